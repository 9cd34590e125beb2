"""How a product with quantised weights is cut up. Knows shapes, bytes and numbers of SMs; no tensors.

The tiles follow from the bytes that an SM must have in flight to keep its share of the memory busy, about 32 KB. They
have not been tuned: docs/quantisation.md has what they reach on an H200.
"""

# mypy: disable-error-code="import-untyped, import-not-found"
from __future__ import annotations

from functools import lru_cache
from typing import Literal

import triton

from faser.runtime.cuda.linear_plans import CUBLAS, MAX_SPLIT_PROGRAMS, NUM_SMS, TILE_ROWS, Plan

# 8-bit floats that torch has a product for too, others, and codes in groups.
Kind = Literal["fp8 by rows", "fp8 in tiles", "groups"]

FP8_COLUMNS = 128  # of a step: those that share a scale in blocks
_MOST_TILED_ROWS = {"fp8 by rows": TILE_ROWS, "fp8 in tiles": 1 << 30, "groups": 256}  # cuBLAS above
_MOST_ROWS = 128  # of a program
_SHARED_BYTES = 100 * 1024  # of a program at few rows: an SM has room for two
_VALUE_BYTES = {"fp8 by rows": 1, "fp8 in tiles": 1, "groups": 2}  # of a row


@lru_cache(maxsize=4096)
def choose(
    kind: Kind, num_rows: int, n: int, k: int, step: int, step_bytes: int, is_gated: bool, num_sms: int = 0
) -> Plan:
    """A plan for n outputs (gate_up: of the gate alone). A step of an output takes `step` columns in `step_bytes`."""
    if num_rows > _MOST_TILED_ROWS[kind]:
        return CUBLAS
    if num_rows > TILE_ROWS:
        return Plan("tiles", 64 if is_gated else 128, step, 8, num_stages=3)
    num_blocks, num_sms = triton.cdiv(n, 64), num_sms or NUM_SMS
    stage_bytes = 64 * (1 + is_gated) * step_bytes + padded(num_rows) * step * _VALUE_BYTES[kind]
    stages = max(2, min(8, _SHARED_BYTES // stage_bytes))
    split = 1 if is_gated else min(2 * num_sms // num_blocks, MAX_SPLIT_PROGRAMS // num_blocks, k // (2 * step))
    return Plan("tiles", 64, step, 4, split=max(1, split), num_stages=stages)


def padded(num_rows: int) -> int:
    """Rows of one program: the narrow operand of a tensor core."""
    return min(_MOST_ROWS, max(16, triton.next_power_of_2(num_rows)))


def fits_workspace(plan: Plan, num_rows: int, num_blocks: int) -> bool:
    """Whether a `LinearWorkspace` has room for the sums of programs that share K: those of one block of rows."""
    rows = padded(num_rows)
    sums = num_blocks * plan.split * plan.block_n * rows
    return num_rows <= rows and num_blocks <= MAX_SPLIT_PROGRAMS and sums <= MAX_SPLIT_PROGRAMS * 64 * TILE_ROWS
