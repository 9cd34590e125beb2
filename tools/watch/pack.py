"""Weights in few bits: blocks of 32 numbers that share a scale, four or eight bits a number.

Knows tensors and their names. Knows nothing of training or files. The rounding is that of llama.cpp's Q4_0, with as
many bits as asked for: the number of largest magnitude in a block is exact, and the scale is a float16. The way back is
in faser/models/vision/packed.py.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from faser.models.vision.packed import BLOCK, QUANTS, SCALE, dequantise


def bits_of(name: str, tensor: Tensor) -> int:
    """How many bits a number of this tensor gets: 16 for vectors, 8 where pixels enter and tokens leave, else 4."""
    if tensor.dim() < 2 or tensor.numel() % BLOCK:
        return 16
    return 8 if "patch_embed" in name or "merger.mlp.2" in name else 4


def quantise(tensor: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Numbers 0 … 2^bits - 1 [blocks, 32], uint8, and scales [blocks, 1], float16."""
    half = 2 ** (bits - 1)
    blocks = tensor.detach().float().reshape(-1, BLOCK)
    largest = blocks.gather(1, blocks.abs().argmax(1, keepdim=True))
    scale = (largest / -half).to(torch.float16)
    inverse = torch.where(scale == 0, 0, 1 / scale.float())
    return (blocks * inverse + half).round().clamp(0, 2 * half - 1).to(torch.uint8), scale


def rounded(tensor: Tensor, bits: int) -> Tensor:
    """The tensor as `unpack` gives it back. Gradients pass as if nothing had been rounded."""
    if bits == 16:
        near = tensor.detach().to(torch.float16).to(tensor.dtype)
    else:
        near = dequantise(*quantise(tensor, bits), bits).view_as(tensor).to(tensor.dtype)
    return tensor + (near - tensor).detach()


def pack(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors by name, each as two: NAME.quants and NAME.scale; those of 16 bits as they are, in float16."""
    packed: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        bits = bits_of(name, tensor)
        if bits == 16:
            packed[name] = tensor.detach().to(torch.float16).cpu().contiguous()
            continue
        numbers, scale = quantise(tensor.cpu(), bits)
        packed[name + QUANTS] = numbers if bits == 8 else numbers[:, ::2] | numbers[:, 1::2] << 4
        packed[name + SCALE] = scale.reshape(-1)
    return packed
