"""The vision encoder: patches of grids in, rows of the language model out.

Knows the weights and the order of operations. Knows nothing of files, prompts or requests. Has no state between calls,
so two forwards may run at once. The caller holds torch.inference_mode().

On a CPU grids are encoded one by one: the result of a grid has the same bits whatever it is encoded with. One forward
over several grids is no faster: with 12 layers of 384, four grids of 256 or 1,024 patches take the same CPU time within
the noise.

Matrices have the shape [out, in] and are stored as those of `Transformer`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from faser.arrays import IntArray
from faser.models.allocation import Allocator, fill_random
from faser.models.layers import rms_norm, rotate, silu_mul
from faser.models.vision.config import VisionConfig
from faser.models.vision.layout import PatchLayout, equal_segments, lay_out
from faser.vision import Grid


@dataclass(frozen=True)
class VisionBlock:
    """The weights of one layer. Rows of qkv: queries, keys, values. Rows of mlp_in: gate, then up, where gated."""

    attention_norm: Tensor  # [hidden]
    attention_norm_bias: Tensor | None  # [hidden]; None: RMSNorm
    qkv: Tensor  # [3 * hidden, hidden]
    qkv_bias: Tensor  # [3 * hidden]
    out: Tensor  # [hidden, hidden]
    out_bias: Tensor  # [hidden]
    mlp_norm: Tensor  # [hidden]
    mlp_norm_bias: Tensor | None  # [hidden]
    mlp_in: Tensor  # [mlp, hidden]; [2 * mlp, hidden] where gated
    mlp_in_bias: Tensor  # [mlp] or [2 * mlp]
    mlp_out: Tensor  # [hidden, mlp]
    mlp_out_bias: Tensor  # [hidden]


@dataclass(frozen=True)
class Merger:
    """The weights that make one token of a group."""

    norm: Tensor  # [hidden]
    norm_bias: Tensor | None  # [hidden]; None: RMSNorm
    inner: Tensor  # [group, group], where group = merge_size² * hidden
    inner_bias: Tensor  # [group]
    out: Tensor  # [output size, group]
    out_bias: Tensor  # [output size]


class VisionEncoder:
    """An encoder in memory."""

    def __init__(self, config: VisionConfig, dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
        """Allocate the weights; they are not written yet."""
        self.config = config
        make = Allocator(dtype, torch.device(device))
        self.patch_embedding = make.matrix(config.hidden_size, config.pixels_per_patch)
        self.blocks = tuple(_empty_block(config, make) for _ in range(config.depth))
        self.merger = _empty_merger(config, make)

    @classmethod
    def random(
        cls,
        config: VisionConfig,
        seed: int,
        dtype: torch.dtype = torch.float32,
        std: float = 0.02,
        device: torch.device | str = "cpu",
    ) -> VisionEncoder:
        """An encoder with random weights, for tests and benchmarks. Norms are near 1, biases not 0: mistakes show."""
        encoder = cls(config, dtype, device)
        fill_random(encoder.weights(), encoder.norms(), seed, std)
        return encoder

    @property
    def dtype(self) -> torch.dtype:
        return self.patch_embedding.dtype

    @property
    def device(self) -> torch.device:
        return self.patch_embedding.device

    @property
    def num_bytes(self) -> int:
        return sum(weight.numel() * weight.element_size() for weight in self.weights())

    def weights(self) -> Iterator[Tensor]:
        yield self.patch_embedding
        for part in (*self.blocks, self.merger):
            yield from (tensor for tensor in vars(part).values() if tensor is not None)

    def norms(self) -> Iterator[Tensor]:
        """The weights that are near 1."""
        for part in (*self.blocks, self.merger):
            yield from (tensor for name, tensor in vars(part).items() if name.endswith("norm"))

    def encode(self, grids: Sequence[Grid]) -> Tensor:
        """[sum of grid.num_tokens, output size] in the order given."""
        return torch.cat([self.encode_together([grid]) for grid in grids])

    def encode_together(self, grids: Sequence[Grid]) -> Tensor:
        """As `encode`, in one forward. Bits may depend on what is encoded together."""
        layout = lay_out(grids, self.config)
        hidden = self.embed_patches(torch.cat([self.read_pixels(grid) for grid in grids]))
        hidden = _take_groups(hidden, layout.groups, self.config.merge_size**2)
        hidden = self.run_blocks(hidden, layout)
        return self.merge(hidden)[torch.from_numpy(layout.places).to(self.device)]

    def read_pixels(self, grid: Grid) -> Tensor:
        """[patches, numbers of a patch], normalised. A grid of one frame stands for all frames of a patch."""
        config = self.config
        num_frames = grid.patches.shape[2]
        assert num_frames in (1, config.temporal_patch_size), "a grid has one frame or those of a patch"
        shape = (1, config.in_channels, 1, 1, 1)
        mean = torch.tensor(config.mean, device=self.device).view(shape)
        std = torch.tensor(config.std, device=self.device).view(shape)
        pixels = torch.from_numpy(np.ascontiguousarray(grid.patches)).to(self.device).float()
        pixels = (pixels * config.rescale - mean) / std
        return pixels.expand(-1, -1, config.temporal_patch_size, -1, -1).flatten(1).to(self.dtype)

    def embed_patches(self, pixels: Tensor) -> Tensor:
        """pixels [rows, numbers of a patch] -> hidden [rows, hidden]."""
        return F.linear(pixels, self.patch_embedding)

    def run_blocks(self, hidden: Tensor, layout: PatchLayout) -> Tensor:
        """hidden [rows, hidden], in the order of the layout, is not changed."""
        cos, sin = rotation(layout.positions, self.config)
        cos, sin = cos.to(self.device).unsqueeze(1), sin.to(self.device).unsqueeze(1)
        full, windowed = (_Segments(cu_rows, self.device) for cu_rows in (layout.cu_grids, layout.cu_windows))

        def attend(layer: int, qkv: Tensor) -> Tensor:
            rotate(qkv[:, : 2 * self.config.num_heads], cos, sin)
            return (windowed if self.config.is_windowed(layer) else full).attend(qkv)

        for index, block in enumerate(self.blocks):
            hidden = run_block(index, block, self.config, hidden, attend)
        return hidden

    def merge(self, hidden: Tensor) -> Tensor:
        """hidden [rows, hidden] -> [rows / merge_size², output size]."""
        merger = self.merger
        normed = normalise(hidden, merger.norm, merger.norm_bias, self.config.norm_eps)
        inner = F.gelu(F.linear(normed.view(-1, merger.inner.shape[1]), merger.inner, merger.inner_bias))
        return F.linear(inner, merger.out, merger.out_bias)


def run_block(
    index: int, block: VisionBlock, config: VisionConfig, hidden: Tensor, attend: Callable[[int, Tensor], Tensor]
) -> Tensor:
    """One layer on hidden [rows, hidden], which is not changed.

    attend takes qkv [rows, 3 * num_heads, head_dim], not rotated, and returns [rows, hidden]; it may write into qkv.
    """
    normed = normalise(hidden, block.attention_norm, block.attention_norm_bias, config.norm_eps)
    qkv = F.linear(normed, block.qkv, block.qkv_bias).view(-1, 3 * config.num_heads, config.head_dim)
    hidden = torch.addmm(hidden, attend(index, qkv), block.out.t()).add_(block.out_bias)
    normed = normalise(hidden, block.mlp_norm, block.mlp_norm_bias, config.norm_eps)
    inner = activate(F.linear(normed, block.mlp_in, block.mlp_in_bias), config.activation)
    return torch.addmm(hidden, inner, block.mlp_out.t()).add_(block.mlp_out_bias)


def normalise(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """LayerNorm, or RMSNorm without a bias."""
    return rms_norm(x, weight, eps) if bias is None else F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def activate(x: Tensor, activation: str) -> Tensor:
    """x [rows, mlp], or [rows, 2 * mlp] with silu, which gates -> [rows, mlp]."""
    if activation == "silu":
        return silu_mul(x)
    return F.gelu(x) if activation == "gelu" else x * torch.sigmoid(1.702 * x)


def rotation(positions: IntArray, config: VisionConfig) -> tuple[Tensor, Tensor]:
    """cos and sin [rows, head_dim // 2]: the first half turns by the height, the second by the width."""
    half = config.head_dim // 2
    frequencies = 1.0 / config.rope_theta ** (torch.arange(0, half, 2, dtype=torch.float32) / half)
    # [rows, 2, head_dim // 4]
    angles = torch.from_numpy(positions).float().unsqueeze(-1) * frequencies
    return angles.cos().flatten(1), angles.sin().flatten(1)


class _Segments:
    """Attention within segments of rows; segments of the same length attend in one call."""

    def __init__(self, cu_rows: IntArray, device: torch.device) -> None:
        self._parts = [(length, _rows_of(starts, length).to(device)) for length, starts in equal_segments(cu_rows)]

    def attend(self, qkv: Tensor) -> Tensor:
        """qkv [rows, 3 * num_heads, head_dim], rotated -> [rows, num_heads * head_dim]."""
        if len(self._parts) == 1:
            return _attend_equal(qkv, self._parts[0][0])
        out = qkv.new_empty(qkv.shape[0], qkv.shape[1] // 3 * qkv.shape[2])
        for length, rows in self._parts:
            out[rows] = _attend_equal(qkv[rows], length)
        return out


def _rows_of(starts: IntArray, length: int) -> Tensor:
    return torch.from_numpy((starts[:, None] + np.arange(length)).reshape(-1))


def _attend_equal(qkv: Tensor, length: int) -> Tensor:
    """Segments of this length, one behind the other."""
    # [segments, 3 * num_heads, length, head_dim]
    parts = qkv.view(-1, length, *qkv.shape[1:]).transpose(1, 2)
    query, key, value = parts.chunk(3, dim=1)
    return F.scaled_dot_product_attention(query, key, value).transpose(1, 2).reshape(qkv.shape[0], -1)


def _take_groups(hidden: Tensor, groups: IntArray, group_size: int) -> Tensor:
    """The rows of these groups, in their order."""
    if (groups == np.arange(groups.size)).all():
        return hidden
    taken = hidden.view(groups.size, group_size, -1)[torch.from_numpy(groups).to(hidden.device)]
    return taken.view(hidden.shape)


def _empty_block(config: VisionConfig, make: Allocator) -> VisionBlock:
    hidden = config.hidden_size
    inner = config.mlp_size * (2 if config.has_rms_norm else 1)
    return VisionBlock(
        attention_norm=make.vector(hidden),
        attention_norm_bias=None if config.has_rms_norm else make.vector(hidden),
        qkv=make.matrix(3 * hidden, hidden),
        qkv_bias=make.vector(3 * hidden),
        out=make.matrix(hidden, hidden),
        out_bias=make.vector(hidden),
        mlp_norm=make.vector(hidden),
        mlp_norm_bias=None if config.has_rms_norm else make.vector(hidden),
        mlp_in=make.matrix(inner, hidden),
        mlp_in_bias=make.vector(inner),
        mlp_out=make.matrix(hidden, config.mlp_size),
        mlp_out_bias=make.vector(hidden),
    )


def _empty_merger(config: VisionConfig, make: Allocator) -> Merger:
    hidden, group = config.hidden_size, config.merge_size**2 * config.hidden_size
    return Merger(
        norm=make.vector(hidden),
        norm_bias=None if config.has_rms_norm else make.vector(hidden),
        inner=make.matrix(group, group),
        inner_bias=make.vector(group),
        out=make.matrix(config.output_size, group),
        out_bias=make.vector(config.output_size),
    )
