"""The eyes in training: the vision transformer of Qwen2-VL, small, for many grids of one size at once.

Knows the weights under their public names and computes what transformers' Qwen2VisionTransformerPretrainedModel
computes, without its lists of lengths: every grid of a batch has the same height and width. Knows nothing of the
language model, the training or files. faser/models/vision/ serves the same weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MEAN = (0.48145466, 0.4578275, 0.40821073)  # of pixels 0 … 1, by channel
STD = (0.26862954, 0.26130258, 0.27577711)


@dataclass(frozen=True, kw_only=True)
class EyesConfig:
    """The shape of the encoder. A ratio of 2 in the MLP, not the usual 4, keeps the quantised weights under 12 MB."""

    depth: int = 12
    embed_dim: int = 384
    num_heads: int = 6
    mlp_ratio: int = 2
    hidden_size: int = 576  # of the language model
    patch_size: int = 14
    merge_size: int = 2
    frames_per_grid: int = 2

    @property
    def head_dim(self) -> int:
        return self.embed_dim // self.num_heads

    @property
    def factor(self) -> int:
        """Pixels of a token's side."""
        return self.patch_size * self.merge_size

    def to_dict(self) -> dict[str, Any]:
        """`vision_config` of config.json, as Qwen2-VL names it."""
        return {
            "model_type": "qwen2_vl",
            "depth": self.depth,
            "embed_dim": self.embed_dim,
            "hidden_size": self.hidden_size,
            "hidden_act": "quick_gelu",
            "mlp_ratio": self.mlp_ratio,
            "num_heads": self.num_heads,
            "in_channels": 3,
            "patch_size": self.patch_size,
            "spatial_merge_size": self.merge_size,
            "temporal_patch_size": self.frames_per_grid,
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> EyesConfig:
        """The inverse of `to_dict`."""
        names = {"merge_size": "spatial_merge_size", "frames_per_grid": "temporal_patch_size"}
        return cls(**{name: data[names.get(name, name)] for name in cls.__dataclass_fields__})


def patches_of(frames: Tensor, config: EyesConfig) -> Tensor:
    """Frames [windows, frames, height, width, 3], uint8, to patches [windows * grids, patches, numbers], float.

    Patches are in the order of groups, row by row, and within a group row by row. The numbers of a patch are by
    channel, frame, y and x.
    """
    patch, merge, depth = config.patch_size, config.merge_size, config.frames_per_grid
    windows, num_frames, height, width, channels = frames.shape
    mean, std = (torch.tensor(values, device=frames.device) for values in (MEAN, STD))
    pixels = (frames.float() / 255 - mean) / std
    groups = height // config.factor, width // config.factor
    parts = pixels.view(windows, num_frames // depth, depth, groups[0], merge, patch, groups[1], merge, patch, channels)
    # windows, grids, group row, group column, row and column in the group, channel, frame, y, x
    ordered = parts.permute(0, 1, 3, 6, 4, 7, 9, 2, 5, 8)
    return ordered.reshape(windows * (num_frames // depth), groups[0] * groups[1] * merge**2, -1)


def rotary_table(config: EyesConfig, height: int, width: int, device: torch.device) -> Tensor:
    """[patches, head_dim // 2] angles of every patch of a grid of height × width patches, in the order of groups."""
    merge, quarter = config.merge_size, config.head_dim // 4
    frequencies = 10_000.0 ** (-torch.arange(quarter, device=device) / quarter)
    rows = torch.arange(height, device=device)[:, None].expand(height, width)
    columns = torch.arange(width, device=device)[None, :].expand(height, width)
    order = (height // merge, merge, width // merge, merge)
    row, column = (each.reshape(order).permute(0, 2, 1, 3).reshape(-1, 1) for each in (rows, columns))
    return torch.cat((row * frequencies, column * frequencies), dim=-1)


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """x [grids, heads, patches, head_dim]; angles [patches, head_dim // 2]."""
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


class EyeAttention(nn.Module):
    def __init__(self, config: EyesConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.qkv = nn.Linear(config.embed_dim, 3 * config.embed_dim)
        self.proj = nn.Linear(config.embed_dim, config.embed_dim)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        grids, patches, width = x.shape
        qkv = self.qkv(x).view(grids, patches, 3, self.num_heads, -1)
        query, key, value = (part.transpose(1, 2) for part in qkv.unbind(2))
        attended = F.scaled_dot_product_attention(rotate(query, angles), rotate(key, angles), value)
        return self.proj(attended.transpose(1, 2).reshape(grids, patches, width))


class EyeMlp(nn.Module):
    def __init__(self, config: EyesConfig) -> None:
        super().__init__()
        self.fc1 = nn.Linear(config.embed_dim, config.mlp_ratio * config.embed_dim)
        self.fc2 = nn.Linear(config.mlp_ratio * config.embed_dim, config.embed_dim)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.fc1(x)
        return self.fc2(inner * torch.sigmoid(1.702 * inner))


class EyeBlock(nn.Module):
    def __init__(self, config: EyesConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.embed_dim, eps=1e-6)
        self.attn = EyeAttention(config)
        self.norm2 = nn.LayerNorm(config.embed_dim, eps=1e-6)
        self.mlp = EyeMlp(config)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x), angles)
        return x + self.mlp(self.norm2(x))


class PatchEmbedding(nn.Module):
    """The public weight is a convolution's, [embed_dim, 3, frames, size, size]; its patches do not overlap."""

    def __init__(self, config: EyesConfig) -> None:
        super().__init__()
        sizes = (config.frames_per_grid, config.patch_size, config.patch_size)
        self.proj = nn.Conv3d(3, config.embed_dim, sizes, stride=sizes, bias=False)

    def forward(self, patches: Tensor) -> Tensor:
        return F.linear(patches, self.proj.weight.flatten(1))


class EyeMerger(nn.Module):
    def __init__(self, config: EyesConfig) -> None:
        super().__init__()
        inner = config.embed_dim * config.merge_size**2
        self.inner = inner
        self.ln_q = nn.LayerNorm(config.embed_dim, eps=1e-6)
        self.mlp = nn.Sequential(nn.Linear(inner, inner), nn.GELU(), nn.Linear(inner, config.hidden_size))

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(self.ln_q(x).view(len(x), -1, self.inner))


class Eyes(nn.Module):
    def __init__(self, config: EyesConfig) -> None:
        super().__init__()
        self.config = config
        self.patch_embed = PatchEmbedding(config)
        self.blocks = nn.ModuleList(EyeBlock(config) for _ in range(config.depth))
        self.merger = EyeMerger(config)

    def forward(self, patches: Tensor, height: int, width: int) -> Tensor:
        """patches [grids, height * width, numbers] -> tokens [grids, height * width / merge_size², hidden_size]."""
        x = self.patch_embed(patches)
        angles = rotary_table(self.config, height, width, patches.device)
        for block in self.blocks:
            x = block(x, angles)
        return self.merger(x)


def begin(eyes: Eyes, seed: int) -> Eyes:
    """Small random weights; the outputs of blocks shrink with depth, so that the sum over blocks stays of size 1."""
    generator = torch.Generator().manual_seed(seed)
    shrink = (2 * eyes.config.depth) ** -0.5
    with torch.no_grad():
        for name, parameter in eyes.named_parameters():
            if parameter.dim() > 1:
                scale = shrink if name.endswith(("attn.proj.weight", "mlp.fc2.weight")) and "blocks" in name else 1.0
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(noise * scale * parameter[0].numel() ** -0.5)
            else:
                parameter.fill_(1.0 if name.endswith("weight") else 0.0)
    return eyes
