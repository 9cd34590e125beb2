"""Weights rounded to the nearest number that a format can hold."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from faser.models.quantised.matrix import FP8, FP8_MAX, Fp8Matrix, GroupMatrix, fp8_scale, pack_nibbles


def to_groups(
    weight: Tensor, bits: int, group: int, symmetric: bool = True, dtype: torch.dtype = torch.float16
) -> GroupMatrix:
    """Codes of 4 or 8 bits, one scale of this dtype per group. weight [N, K], K a multiple of the group.

    Symmetric: from -max to max, the largest code but one unused. Else: from the least to the greatest weight of the
    group, with a zero point that is a code, so that 0 stays 0.
    """
    groups = weight.float().reshape(weight.shape[0], -1, group)
    top = (1 << bits) - 1
    if symmetric:
        zero = 1 << (bits - 1)
        scales = (groups.abs().amax(-1) / (zero - 1)).clamp(min=_least(dtype)).to(dtype)
        codes = torch.round(groups / scales.float()[..., None]) + zero
        return GroupMatrix(_pack(codes.clamp(0, top), bits), scales, bits, group, zero=zero)
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    scales = ((high - low) / top).clamp(min=_least(dtype)).to(dtype)
    zeros = torch.round(-low / scales.float()).clamp(0, top)
    codes = (torch.round(groups / scales.float()[..., None]) + zeros[..., None]).clamp(0, top)
    return GroupMatrix(_pack(codes, bits), scales, bits, group, zeros=zeros.to(torch.uint8))


def to_fp8(weight: Tensor, block: int | None = None) -> Fp8Matrix:
    """8-bit floats with a scale per row, or per block x block weights."""
    n, k = weight.shape
    rows, columns = (1, k) if block is None else (block, block)
    padded = F.pad(weight.float(), (0, -k % columns, 0, -n % rows))
    # [blocks of rows, rows, blocks of columns, columns]
    blocks = padded.view(-1, rows, padded.shape[1] // columns, columns)
    scales = fp8_scale(blocks.abs().amax((1, 3)))
    values = (blocks / scales[:, None, :, None]).clamp(-FP8_MAX, FP8_MAX).view(padded.shape)[:n, :k]
    return Fp8Matrix(values.to(FP8), scales, rows, columns)


def _pack(codes: Tensor, bits: int) -> Tensor:
    flat = codes.flatten(1).to(torch.uint8)
    return flat if bits == 8 else pack_nibbles(flat)


def _least(dtype: torch.dtype) -> float:
    """A group of zeros has a scale too."""
    return float(torch.finfo(dtype).tiny)
