"""The small operations of a decoder layer, as plain functions of tensors.

Knows normalisation, rotary embedding and the gated MLP, and the fastest form of each per device. Knows nothing of
models, layers or caches.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from faser.models.config import Rope


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, computed in float32, returned in the dtype of x."""
    if _plain_float32(x):
        return _normalise(x, eps).mul_(weight)
    return F.rms_norm(x, x.shape[-1:], weight, eps)


def rms_norm_heads_(heads: Tensor, weight: Tensor, eps: float) -> None:
    """Normalise each head in place. heads [rows, num, head_dim], weight [num, head_dim]."""
    unit = _normalise(heads, eps) if _plain_float32(heads) else F.rms_norm(heads, heads.shape[-1:], None, eps)
    torch.mul(unit, weight, out=heads)


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up. gate_up [rows, 2 * intermediate] -> [rows, intermediate]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the halves of each head against each other, IN PLACE, and return x.

    x [rows, heads, head_dim], possibly a slice of a larger tensor; cos, sin [rows, 1, head_dim // 2] in float32.
    """
    first, second = x.chunk(2, dim=-1)
    if x.dtype is torch.float32:
        turned = first * sin
        first.mul_(cos).addcmul_(second, sin, value=-1)
        second.mul_(cos).add_(turned)
    else:
        wide_first, wide_second = first.float(), second.float()
        first.copy_(wide_first * cos - wide_second * sin)
        second.copy_(wide_second * cos + wide_first * sin)
    return x


def rope_tables(
    rope: Rope, head_dim: int, num_positions: int, device: torch.device | str = "cpu"
) -> tuple[Tensor, Tensor]:
    """cos and sin [num_positions, head_dim // 2] in float32, yarn's attention factor included."""
    positions = torch.arange(num_positions, dtype=torch.float32)
    angles = torch.outer(positions, _frequencies(rope, head_dim))
    cos, sin = angles.cos(), angles.sin_()
    if rope.attention_factor != 1:
        cos.mul_(rope.attention_factor)
        sin.mul_(rope.attention_factor)
    return cos.to(device), sin.to(device)


def look_up(cos: Tensor, sin: Tensor, positions: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
    """Rows of the tables [num_positions, head_dim // 2] at positions [rows], or [rows, 3] in time, height and width.

    Without sections all frequencies turn by the time, which of a text is the position.
    """
    if positions.dim() == 2 and not rope.sections:
        positions = positions[:, 0]
    if positions.dim() == 1:
        return cos[positions], sin[positions]
    # [head_dim // 2] which of the three positions each frequency turns by
    part = torch.repeat_interleave(torch.tensor(rope.sections)).to(positions.device)
    rows, columns = positions[:, part], torch.arange(cos.shape[1], device=positions.device)
    return cos[rows, columns], sin[rows, columns]


def _plain_float32(x: Tensor) -> bool:
    return x.dtype is torch.float32 and not x.is_cuda


def _normalise(x: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps). On a CPU these four kernels take 60 % of the time of F.rms_norm at 1 to 64 rows."""
    # norm [rows, 1]
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x * torch.addcmul(_scalar(eps), norm, norm, value=1 / x.shape[-1]).rsqrt_()


@lru_cache(maxsize=16)
def _scalar(value: float) -> Tensor:
    with torch.inference_mode(False):  # a cached tensor must work in and out of inference mode
        return torch.tensor(value, dtype=torch.float32)


# ---- rotary frequencies, [head_dim // 2] radians per position ----


def _frequencies(rope: Rope, head_dim: int) -> Tensor:
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / rope.theta**exponents
    if rope.factors:
        frequencies = frequencies / torch.tensor(rope.factors, dtype=torch.float32)
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, frequencies)
    if rope.kind == "yarn":
        return _yarn(rope, frequencies, head_dim)
    return frequencies


def _llama3(rope: Rope, frequencies: Tensor) -> Tensor:
    """Low frequencies are interpolated, high ones kept, and those between blended by their number of rotations."""
    rotations = rope.original_max_positions * frequencies / (2 * math.pi)
    kept = (rotations - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    return _blend(frequencies / rope.factor, frequencies, kept.clamp(0, 1))


def _yarn(rope: Rope, frequencies: Tensor, head_dim: int) -> Tensor:
    """Like llama3, but blended linearly in the dimension, between beta_fast and beta_slow rotations."""
    low = _dimension_with(rope.beta_fast, rope, head_dim)
    high = _dimension_with(rope.beta_slow, rope, head_dim)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low or 0.001  # no division by zero
    interpolated = (torch.arange(head_dim // 2, dtype=torch.float32) - low) / width
    return _blend(frequencies / rope.factor, frequencies, 1 - interpolated.clamp(0, 1))


def _dimension_with(rotations: float, rope: Rope, head_dim: int) -> float:
    """The (fractional) dimension with this number of rotations over the positions seen in pre-training."""
    return head_dim * math.log(rope.original_max_positions / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))


def _blend(interpolated: Tensor, kept: Tensor, share_kept: Tensor) -> Tensor:
    return interpolated * (1 - share_kept) + kept * share_kept
