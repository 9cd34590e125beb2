"""Which kernel computes a product, and how it is cut up: the fastest measured on an H200.

Knows shapes and numbers of SMs; no tensors.
"""

# mypy: disable-error-code="import-untyped, import-not-found"
from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
import triton

# What is done around the product: a norm before it; a norm before and silu(gate) * up behind it; a residual added; a
# norm before it and many more outputs than any other.
Product = Literal["norm", "gate_up", "residual", "head"]

TILE_ROWS = 64  # the most rows of `tiles`
NUM_SMS = 132  # of an H200
MAX_SPLIT_PROGRAMS = 2 * NUM_SMS  # programs that share K in `tiles`: an H200 runs this many at once


@dataclass(frozen=True)
class Plan:
    """One way to compute a product. A program takes block_n outputs; one of `persistent`, block_n at a time."""

    kernel: Literal["chunks", "persistent", "tiles", "cublas"]
    block_n: int = 0
    block_k: int = 0  # persistent: all of K
    num_warps: int = 4
    programs: int = 0  # persistent
    per_sm: int = 0  # chunks, persistent: programs whose registers an SM must hold; 0: no limit
    split: int = 1  # tiles: programs that share K
    num_stages: int = 1  # tiles: loads in flight


CUBLAS = Plan("cublas")


@lru_cache(maxsize=4096)
def choose(
    product: Product, num_rows: int, n: int, k: int, dtype: torch.dtype, can_split: bool = True, num_sms: int = 0
) -> Plan:
    """The fastest known plan, measured on an H200 in layers of the shapes of six models of 0.6B to 70B.

    Of two equally fast plans it is not `tiles`: the others load weights while the kernel before them still runs.

    n is the number of outputs (gate_up: of the gate alone). K is split only if can_split. On num_sms SMs (0: the whole
    device) fewer programs run at once.
    """
    num_sms = num_sms or NUM_SMS
    if dtype is torch.float32:
        return _chunks(4, min(1024, _power(k)), 4) if num_rows == 1 else CUBLAS
    if num_rows == 1:
        plan = _for_one_row(product, n, k, num_sms)
    elif num_rows == 2:
        plan = _for_two_rows(product, n, k, num_sms)
    elif num_rows <= 4 and product == "norm" and 1024 < k <= 2048:
        plan = persistent(2, k, 4, 384, n, num_sms)
    else:
        plan = None
    if plan is None and num_rows <= TILE_ROWS:
        plan = _for_few_rows(product, num_rows, n, k, can_split, num_sms)
    return plan or CUBLAS


def _for_one_row(product: Product, n: int, k: int, num_sms: int) -> Plan | None:
    """None: the plan for few rows."""
    if k <= 1024:
        return _chunks(4, _power(k), 4)
    if product == "residual":
        if k <= 2048:
            return persistent(4, k, 4, n, n, num_sms)
        if k <= 4096:
            return persistent(2, k, 4, 264, n, num_sms) if n <= 2048 else _chunks(4, 1024, 4, 8)
        if k <= 8192:
            return persistent(1, k, 8, 264, n, num_sms) if n < 4096 else persistent(2, k, 8, 132, n, num_sms)
        return _chunks(2, 2048, 8, 4) if k <= 16384 else None
    if product == "gate_up":
        if k <= 2048:
            return _chunks(2, 1024, 4, 8)
        if k <= 6144:
            return persistent(1, k, 4, 396, n, num_sms) if k <= 4096 else persistent(1, k, 8, 264, n, num_sms)
        return None
    if product == "head":
        return _chunks(4, 2048, 8, 5) if k <= 2048 else None
    if k <= 2048:
        return _chunks(4, 1024, 4, 7)
    return persistent(2, k, 4, 396, n, num_sms) if k <= 4096 else _persistent_norm(n, k, num_sms)


def _for_two_rows(product: Product, n: int, k: int, num_sms: int) -> Plan | None:
    """None: the plan for few rows."""
    if product == "head":
        return None
    if k <= 1024:
        return _chunks(4, _power(k), 4)
    if product == "gate_up":
        if k <= 2048:
            return persistent(1, k, 4, 528, n, num_sms)
        # 3,584 columns would leave an eighth of the registers idle
        return persistent(1, k, 8, 264, n, num_sms) if k == 4096 else None
    if product == "residual":
        if k <= 4096:
            return persistent(2, k, 4, 396 if k <= 2048 else 264, n, num_sms)
        if k <= 8192:
            return persistent(1, k, 8, 264, n, num_sms) if n < 4096 else None
        return _chunks(4, 1024, 4) if k <= 16384 else None
    return persistent(2, k, 4, 384, n, num_sms) if k <= 2048 else _persistent_norm(n, k, num_sms)


def _persistent_norm(n: int, k: int, num_sms: int) -> Plan | None:
    """More outputs at a time would not fit into registers."""
    return persistent(2 if k <= 6144 else 1, k, 8, 264, n, num_sms) if k <= 8192 else None


def _for_few_rows(product: Product, num_rows: int, n: int, k: int, can_split: bool, num_sms: int) -> Plan:
    num_blocks = triton.cdiv(n, 64)
    if product == "head":
        return Plan("tiles", 64, 128, num_stages=4 if num_rows <= 32 else 3)
    if product == "gate_up":
        if num_rows > 32:
            return Plan("tiles", 64, 64, num_stages=8)
        # An SM has room for one program. If the last round has few programs, more loads in flight make up for it.
        is_lonely = num_blocks > num_sms and 0 < num_blocks % num_sms <= num_sms // 8
        return Plan("tiles", 64, 128, num_stages=5 if is_lonely else 4)
    if product == "norm":
        if num_rows > 32:
            return CUBLAS
        few, more = (8, 3) if num_rows <= 16 else (5, 4)
        return Plan("tiles", 64, 128, num_stages=few if num_blocks <= num_sms else more)
    return _residual_tiles(num_rows, num_blocks, k, num_sms) if can_split else CUBLAS


def _residual_tiles(num_rows: int, num_blocks: int, k: int, num_sms: int) -> Plan:
    """One program for nearly every SM, or two: if some SMs have two and others one, the others wait."""
    block_k, num_stages = (256, 3) if num_rows <= 32 else (128, 4)
    split = num_sms // num_blocks
    if split * num_blocks < 0.7 * num_sms:
        block_k, num_stages = 128, 4 if num_rows <= 32 else 3
        split = 2 * num_sms // num_blocks
    elif split * block_k >= k:  # two loads hide behind one another
        block_k, num_stages = 128, 4
    split = max(1, min(split, k // block_k, MAX_SPLIT_PROGRAMS // num_blocks))
    return Plan("tiles", 64, block_k, split=split, num_stages=num_stages)


def _chunks(block_n: int, block_k: int, num_warps: int, per_sm: int = 0) -> Plan:
    return Plan("chunks", block_n, block_k, num_warps, per_sm=per_sm)


def persistent(block_n: int, k: int, num_warps: int, programs: int, n: int, num_sms: int = NUM_SMS) -> Plan:
    """`programs` on a whole device, and as many an SM on a part of it. If they take several blocks, all run at once."""
    num_blocks, per_sm = triton.cdiv(n, block_n), 0
    if programs < num_blocks:
        programs = max(1, programs * num_sms // NUM_SMS)
        per_sm = triton.cdiv(programs, num_sms)
    return Plan("persistent", block_n, _power(k), num_warps, min(programs, num_blocks), per_sm)


def _power(size: int) -> int:
    return max(16, triton.next_power_of_2(size))
