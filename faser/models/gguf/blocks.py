"""Blocks of a GGUF file as a quantised matrix: the same numbers, sorted by kind instead of by block.

A block holds 32 or 256 weights of a row with their scales between the codes. Sorted, codes and scales can be read by
wide loads. Nothing is rounded: `GroupMatrix.dequantise` gives the same weights as the package gguf. Types that are not
in KEPT_TYPES are dequantised when they are loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from faser.models.quantised.matrix import GroupMatrix, pack_nibbles

_Bytes = NDArray[np.uint8]
_SUPER = 256  # weights of a block of the K types


def to_matrix(raw: _Bytes, kind: str, num_rows: int) -> GroupMatrix:
    """The matrix that `raw`, the bytes of all its rows, stands for. `kind` is one of KEPT_TYPES."""
    block_bytes, convert = _CONVERSIONS[kind]
    # [N, blocks of a row, bytes of a block]
    return convert(raw.reshape(num_rows, -1, block_bytes))


def _q8_0(blocks: _Bytes) -> GroupMatrix:
    codes = blocks[..., 2:] ^ 128  # int8 + 128
    return GroupMatrix(_tensor(codes), _halves(blocks, 0), 8, 32, zero=128)


def _q4_0(blocks: _Bytes) -> GroupMatrix:
    return GroupMatrix(_low_then_high(blocks[..., 2:]), _halves(blocks, 0), 4, 32, zero=8)


def _q4_1(blocks: _Bytes) -> GroupMatrix:
    return GroupMatrix(_low_then_high(blocks[..., 4:]), _halves(blocks, 0), 4, 32, minimums=_halves(blocks, 2))


def _q4_k(blocks: _Bytes) -> GroupMatrix:
    """Eight groups of 32. Scales and minimums of 6 bits share 12 bytes; a minimum is subtracted."""
    first, second, third = (blocks[..., start : start + 4] for start in (4, 8, 12))
    scales = np.concatenate([first & 63, (third & 15) | (first >> 6 << 4)], -1)
    minimums = np.concatenate([second & 63, (third >> 4) | (second >> 6 << 4)], -1)
    # 32 bytes for 64 weights
    codes = _low_then_high(blocks[..., 16:].reshape(*blocks.shape[:2], 4, 32))
    return GroupMatrix(
        codes, _tensor(scales), 4, 32, minimums=_tensor(minimums), super_scales=_halves(blocks, 0),
        super_minimums=-_halves(blocks, 2), super_group=_SUPER,
    )  # fmt: skip


def _q6_k(blocks: _Bytes) -> GroupMatrix:
    """Sixteen groups of 16. Of 128 weights, 64 bytes hold the low four bits and 32 bytes the high two."""
    halves = (*blocks.shape[:2], 2)
    low = blocks[..., :128].reshape(*halves, 64)
    nibbles = np.concatenate([low & 15, low >> 4], -1)
    pairs = blocks[..., 128:192].reshape(*halves, 1, 32) >> np.array([0, 2, 4, 6], dtype=np.uint8)[:, None] & 3
    # [N, K / 4, 4]: four neighbours share a byte
    quads = pairs.reshape(blocks.shape[0], -1, 4)
    high = quads[..., 0] | quads[..., 1] << 2 | quads[..., 2] << 4 | quads[..., 3] << 6
    return GroupMatrix(
        pack_nibbles(_tensor(nibbles)), _tensor(blocks[..., 192:208]).view(torch.int8), 6, 16, zero=32,
        high=_tensor(high), super_scales=_halves(blocks, 208), super_group=_SUPER,
    )  # fmt: skip


def _low_then_high(codes: _Bytes) -> Tensor:
    """Runs of bytes: the low halves of all bytes of a run are its first weights, the high halves the others."""
    return pack_nibbles(_tensor(np.concatenate([codes & 15, codes >> 4], -1)))


def _halves(blocks: _Bytes, start: int) -> Tensor:
    """The float16 at this byte of each block, [N, blocks of a row]."""
    values = np.ascontiguousarray(blocks[..., start : start + 2]).view(np.float16)[..., 0]
    return torch.from_numpy(values.copy())


def _tensor(values: NDArray[Any]) -> Tensor:
    """[N, the rest]."""
    return torch.from_numpy(np.ascontiguousarray(values.reshape(values.shape[0], -1)))


_CONVERSIONS: dict[str, tuple[int, Callable[[_Bytes], GroupMatrix]]] = {
    "Q8_0": (34, _q8_0),
    "Q4_0": (18, _q4_0),
    "Q4_1": (20, _q4_1),
    "Q4_K": (144, _q4_k),
    "Q6_K": (210, _q6_k),
}
KEPT_TYPES = tuple(_CONVERSIONS)
