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
from typing import Generic, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from faser.arrays import IntArray
from faser.models.allocation import Allocator, fill_random
from faser.models.layers import rms_norm, rotate, silu_mul
from faser.models.vision.config import VisionConfig
from faser.models.vision.layout import equal_segments, lay_out
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


@dataclass(frozen=True)
class ForwardShape:
    """What decides which kernels a forward launches."""

    num_rows: int
    full: tuple[tuple[int, int], ...]  # segments of attention within a grid: (length, number of this length)
    windowed: tuple[tuple[int, int], ...]  # within a window; empty without windows
    is_ordered: bool  # groups enter in the order given


Array = TypeVar("Array", NDArray, Tensor)
Converted = TypeVar("Converted", NDArray, Tensor)


@dataclass(frozen=True, eq=False)
class EncoderInput(Generic[Array]):
    """What one forward reads, on the host or on a device."""

    shape: ForwardShape
    pixels: Array  # uint8 [rows, numbers of a patch], patches in the order given
    cos: Array  # float32 [rows, head_dim // 2] rows in the order of the layout
    sin: Array
    groups: Array  # int64 [tokens] which group enters at each place
    places: Array  # int64 [tokens] where each token, in the order given, is among the groups
    full: tuple[Array, ...]  # int64, rows of the segments of each length
    windowed: tuple[Array, ...]

    def to(self, convert: Callable[[Array], Converted]) -> EncoderInput[Converted]:
        return EncoderInput(
            self.shape, convert(self.pixels), convert(self.cos), convert(self.sin), convert(self.groups),
            convert(self.places), tuple(map(convert, self.full)), tuple(map(convert, self.windowed)),
        )  # fmt: skip

    @property
    def arrays(self) -> tuple[Array, ...]:
        single: tuple[Array, ...] = (self.pixels, self.cos, self.sin, self.groups, self.places)
        return single + self.full + self.windowed


class VisionEncoder:
    """An encoder in memory."""

    def __init__(self, config: VisionConfig, dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
        """Allocate the weights; they are not written yet."""
        self.config = config
        make = Allocator(dtype, torch.device(device))
        self.patch_embedding = make.matrix(config.hidden_size, config.pixels_per_patch)
        self.blocks = tuple(_empty_block(config, make) for _ in range(config.depth))
        self.merger = _empty_merger(config, make)
        # [numbers of a patch] float32
        numbers = config.pixels_per_patch // config.in_channels
        self._mean = torch.tensor(config.mean, device=device).repeat_interleave(numbers)
        self._std = torch.tensor(config.std, device=device).repeat_interleave(numbers)

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
        return self.forward(self.prepare(grids).to(lambda array: torch.from_numpy(array).to(self.device)))

    def prepare(self, grids: Sequence[Grid]) -> EncoderInput[NDArray]:
        """All that a forward reads, on the host."""
        layout, config = lay_out(grids, self.config), self.config
        num_frames = config.temporal_patch_size
        assert all(grid.patches.shape[2] in (1, num_frames) for grid in grids), "one frame, or those of a patch"
        frames = [grid.patches.repeat(num_frames // grid.patches.shape[2], axis=2) for grid in grids]
        pixels = np.concatenate(frames)
        cos, sin = (each.numpy() for each in rotation(layout.positions, config))
        full = equal_segments(layout.cu_grids)
        windowed = equal_segments(layout.cu_windows) if config.groups_per_window is not None else []
        is_ordered = bool((layout.groups == np.arange(layout.groups.size)).all())
        return EncoderInput(
            ForwardShape(len(pixels), _sizes(full), _sizes(windowed), is_ordered),
            pixels.reshape(len(pixels), -1), cos, sin, layout.groups, layout.places,
            tuple(_rows_of(starts, length) for length, starts in full),
            tuple(_rows_of(starts, length) for length, starts in windowed),
        )  # fmt: skip

    def forward(self, given: EncoderInput[Tensor]) -> Tensor:
        """[tokens, output size] in the order given. Neither allocates outside torch's pool nor waits."""
        hidden = self.embed_patches(self.normalised(given.pixels))
        if not given.shape.is_ordered:
            groups = hidden.view(len(given.groups), self.config.merge_size**2, -1)
            hidden = groups[given.groups].view(hidden.shape)
        hidden = self.merge(self.run_blocks(hidden, given))
        return hidden if given.shape.is_ordered else hidden[given.places]

    def normalised(self, pixels: Tensor) -> Tensor:
        """pixels [patches, numbers of a patch] as uint8 -> the same in the encoder's dtype."""
        return ((pixels.float() * self.config.rescale - self._mean) / self._std).to(self.dtype)

    def embed_patches(self, pixels: Tensor) -> Tensor:
        """pixels [rows, numbers of a patch] -> hidden [rows, hidden]."""
        return F.linear(pixels, self.patch_embedding)

    def run_blocks(self, hidden: Tensor, given: EncoderInput[Tensor]) -> Tensor:
        """hidden [rows, hidden], in the order of the layout, is not changed."""
        cos, sin = given.cos.unsqueeze(1), given.sin.unsqueeze(1)
        full = [(length, rows) for (length, _), rows in zip(given.shape.full, given.full, strict=True)]
        windowed = [(length, rows) for (length, _), rows in zip(given.shape.windowed, given.windowed, strict=True)]

        def attend(layer: int, qkv: Tensor) -> Tensor:
            rotate(qkv[:, : 2 * self.config.num_heads], cos, sin)
            return _attend(qkv, windowed if self.config.is_windowed(layer) else full)

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


def _attend(qkv: Tensor, segments: Sequence[tuple[int, Tensor]]) -> Tensor:
    """Within segments of rows; those of one length attend in one call.

    qkv [rows, 3 * num_heads, head_dim], rotated -> [rows, num_heads * head_dim].
    """
    if len(segments) == 1:
        return _attend_equal(qkv, segments[0][0])
    out = qkv.new_empty(qkv.shape[0], qkv.shape[1] // 3 * qkv.shape[2])
    for length, rows in segments:
        out[rows] = _attend_equal(qkv[rows], length)
    return out


def _sizes(segments: Sequence[tuple[int, IntArray]]) -> tuple[tuple[int, int], ...]:
    return tuple((length, starts.size) for length, starts in segments)


def _rows_of(starts: IntArray, length: int) -> IntArray:
    return (starts[:, None] + np.arange(length)).reshape(-1)


def _attend_equal(qkv: Tensor, length: int) -> Tensor:
    """Segments of this length, one behind the other."""
    # [segments, 3 * num_heads, length, head_dim]
    parts = qkv.view(-1, length, *qkv.shape[1:]).transpose(1, 2)
    query, key, value = parts.chunk(3, dim=1)
    return F.scaled_dot_product_attention(query, key, value).transpose(1, 2).reshape(qkv.shape[0], -1)


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
