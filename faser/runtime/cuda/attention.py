"""Ragged attention over KV pages as Triton kernels, ready to be captured in a CUDA graph.

Knows rows, pages, the page table and how to cut a step's rows into tiles. Knows nothing of models, requests, graphs or
streams. Nothing here allocates, copies or waits for the device. The size of a launch follows from the sizes of the
buffers; how many rows and tiles are real is read on the device. So a captured launch serves every step that fits its
buffers.

A tile is up to `rows_per_tile` rows of one request. The query heads that share a key head are folded into the tile, so
decode (one row), verification (a few) and prefill (thousands) are one launch. Where tiles are few and contexts long,
several programs share a tile's keys (a split each) and the last of them to finish combines their results.
"""

# mypy: disable-error-code="import-untyped, import-not-found"
from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
import triton
from numpy.typing import NDArray
from torch import Tensor

from faser.arrays import IntArray
from faser.limits import KeyWindow
from faser.runtime.cuda.attention_kernels import attend_kernel, rotate_kernel
from faser.runtime.kv_cache import ROUNDED

Int32Array = NDArray[np.int32]

LOG2_E = math.log2(math.e)
MAX_SPLIT = 2048  # keys of one program at most, so that a long context does not outlast the others
MAX_PROGRAMS = 8192  # with more programs than this, most splits would find nothing to do
FEW_SPLITS = 4  # at least, if it is not known how many requests of a step a launch is for
MAX_WORKSPACE = 128 * 2**20  # bytes


# ---- configuration: fixed when a graph is captured ----


@dataclass(frozen=True)
class AttentionConfig:
    """How `attend` is cut up. A tile is rows_per_tile rows times the heads of a key head, padded to block_m.

    Up to num_splits programs share a tile's keys: enough to keep the SMs busy, with min_split to MAX_SPLIT keys each.
    If num_splits * MAX_SPLIT is less than the context, each has more keys.
    """

    rows_per_tile: int
    block_m: int
    block_n: int  # keys at a time
    num_splits: int
    num_sms: int
    min_split: int
    num_warps: int
    num_stages: int


def padded_dim(head_dim: int) -> int:
    """The columns of a block that holds a head: a power of two, and the narrowest operand of a tensor core at least."""
    return max(16, triton.next_power_of_2(head_dim))


def choose(
    num_requests: int,
    rows_per_request: int,
    max_context: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    num_sms: int = 132,
    step_rows: int | None = None,
) -> AttentionConfig:
    """A configuration for up to num_requests requests of up to rows_per_request rows and max_context keys each.

    step_rows, if given, counts all rows of a step of which this launch attends only some.

    Tuned on an H200 in bf16 for head dimensions 64 and 128 (benchmarks/cuda_attention.py); others follow by bytes.
    Splits that find nothing to do are not free: 16 decodes over 1024 keys take 24 µs if max_context is 2048 and 29 µs
    if it is 8192, so a graph for short contexts should say so.
    """
    group, block_d = num_heads // num_kv_heads, padded_dim(head_dim)
    block_m, rows_per_tile = _tile_size(group, rows_per_request, block_d, dtype)
    num_programs = num_requests * -(-rows_per_request // rows_per_tile) * num_kv_heads
    # With step_rows the number of requests is not known. To plan for few costs less than to plan for many.
    is_crowded = num_programs >= 2 * num_sms and step_rows is None
    block_n, num_warps, num_stages = _block(block_m, block_d, dtype, is_crowded)
    min_split = max(128 if block_m < 64 else 256, block_n)
    num_splits = -(-max_context // MAX_SPLIT)
    if step_rows is not None:
        num_splits = max(num_splits, FEW_SPLITS)
    num_splits = max(num_sms // num_programs, min(num_splits, MAX_PROGRAMS // num_programs))
    row_bytes = 4 * num_heads * (head_dim + 1)
    room = MAX_WORKSPACE // ((step_rows or num_requests * rows_per_request) * row_bytes)
    num_splits = max(1, min(num_splits, max_context // min_split, room))
    return AttentionConfig(rows_per_tile, block_m, block_n, num_splits, num_sms, min_split, num_warps, num_stages)


def _tile_size(group: int, rows: int, block_d: int, dtype: torch.dtype) -> tuple[int, int]:
    """block_m and rows_per_tile. float32 has no matrix instruction that is exact, and large tiles would spill."""
    largest = 32 if dtype is torch.float32 else 64 if block_d > 128 else 128
    block_m = max(16, min(largest, triton.next_power_of_2(group * rows)), triton.next_power_of_2(group))
    return block_m, min(block_m // group, rows)


def _block(block_m: int, block_d: int, dtype: torch.dtype, crowded: bool) -> tuple[int, int, int]:
    """block_n, num_warps, num_stages. Crowded: several programs an SM, whose loads hide each other's latency."""
    if block_m >= 64:
        return (64 if block_d <= 128 else 32), (4 if block_m == 64 else 8), 3
    keys, num_warps, num_stages = 64, 4, 3
    if crowded:
        keys, num_warps, num_stages = (64, 4, 2) if block_m == 16 else (32, 2, 3)
    # `keys` is for a head dimension of 128 and two bytes an element; others get the same number of bytes.
    block_n = keys * 256 // (block_d * dtype.itemsize)
    return min(128, max(16, block_n)), num_warps, num_stages


def build_tiles(
    num_rows: IntArray, rows_per_tile: int, start: IntArray | None = None, some: NDArray[np.bool_] | None = None
) -> tuple[Int32Array, Int32Array]:
    """The request of each tile and the tile's first row within it, for all requests or only `some`.

    With `start` (each request's first position) tiles with the most keys come first, so that the last programs are
    short ones.
    """
    # [B] and, from here, [T]
    per_request = -(-num_rows // rows_per_tile)
    if some is not None:
        per_request = np.where(some, per_request, 0)
    request = np.repeat(np.arange(num_rows.size), per_request)
    first_tile = np.cumsum(per_request) - per_request
    offset = (np.arange(request.size) - first_tile[request]) * rows_per_tile
    if start is not None:
        order = np.argsort(-(start[request] + offset), kind="stable")
        request, offset = request[order], offset[order]
    return request.astype(np.int32), offset.astype(np.int32)


# ---- buffers that the kernels read: their addresses stay and their content changes ----


@dataclass(frozen=True)
class Tiles:
    """The tiles of a step. Request i has num_rows[i] rows: from first_row[i] on, at positions from start[i] on.

    All int32. B and T are the most requests and tiles the buffers hold; the first num_tiles tiles are real.
    """

    first_row: Tensor  # [B]
    num_rows: Tensor  # [B]
    start: Tensor  # [B]
    slot: Tensor  # [B] the request's row of the page table
    request: Tensor  # [T]
    offset: Tensor  # [T] the tile's first row within the request
    num_tiles: Tensor  # [1]


@dataclass(frozen=True)
class AttentionWorkspace:
    """Results that splits of a tile exchange. Forwards that may run at once need one workspace each."""

    partial: Tensor  # [rows, num_heads, num_splits, head_dim] float32
    log_sums: Tensor  # [rows, num_heads, num_splits] float32: log2 of the sum of weights
    arrived: Tensor  # [T, num_kv_heads] int32: splits of a tile that are done; zero between launches


class Memory:
    """Memory for the workspaces of launches that never run at once: as large as the largest."""

    def __init__(self, device: torch.device | str) -> None:
        self._results = torch.empty(0, dtype=torch.float32, device=device)
        self._arrived = torch.zeros(0, dtype=torch.int32, device=device)
        self._outgrown: list[Tensor] = []  # graphs may hold their addresses

    def workspace(
        self, config: AttentionConfig, num_rows: int, num_tiles: int, num_heads: int, num_kv_heads: int, head_dim: int
    ) -> AttentionWorkspace:
        splits = config.num_splits if config.num_splits > 1 else 0
        num_sums, num_counts = num_rows * num_heads * splits, num_tiles * num_kv_heads
        num_partial = num_sums * head_dim
        if self._results.numel() < num_partial + num_sums:
            self._outgrown.append(self._results)
            self._results = self._results.new_empty(num_partial + num_sums)
        if self._arrived.numel() < num_counts:
            self._outgrown.append(self._arrived)
            self._arrived = self._arrived.new_zeros(num_counts)
        return AttentionWorkspace(
            self._results[:num_partial].view(num_rows, num_heads, splits, head_dim),
            self._results[num_partial : num_partial + num_sums].view(num_rows, num_heads, splits),
            self._arrived[:num_counts].view(num_tiles, num_kv_heads),
        )


def rotate_and_write(
    qkv: Tensor,
    positions: Tensor,
    slots: Tensor,
    num_rows: Tensor,
    table: Tensor,
    cos: Tensor,
    sin: Tensor,
    pages: Tensor,
    qk_norm: Tensor | None = None,
    eps: float = 0.0,
    by_row: bool = False,
    overlap: bool = False,
    kv_scales: tuple[float, float] = (1.0, 1.0),
) -> None:
    """Rotate the queries in place and write the rotated keys, and the values, to their pages.

    With qk_norm the queries and keys are normalised per head first. Into pages of 8-bit floats keys and values are
    written divided by kv_scales, rounded, and cut to the range of these floats.

    qkv [R, num_heads + 2 * num_kv_heads, head_dim], contiguous; positions, slots [R] int32; num_rows [1] int32, the
    real rows; table [slots, columns] int32; cos, sin [max_positions, head_dim // 2] float32, or [R, head_dim // 2] with
    `by_row`; pages [num_pages, page_size, 2 * num_kv_heads, head_dim], contiguous; qk_norm [num_heads + num_kv_heads,
    head_dim]. `overlap` as in `attend`: positions, slots, num_rows and table must have been written at least two
    launches before.
    """
    rows, all_heads, head_dim = qkv.shape
    page_size, kv_entry = pages.shape[1], pages.shape[2]
    num_heads = all_heads - kv_entry
    assert all(each.is_contiguous() for each in (qkv, pages, cos, sin))
    assert table.stride(1) == 1
    block_half = triton.next_power_of_2(head_dim // 2)
    block_heads = min(triton.next_power_of_2(all_heads), max(1, 512 // block_half))
    rotate_kernel[(-(-all_heads // block_heads), rows)](
        qkv, positions, slots, num_rows, table, cos, sin, pages, qk_norm, table.stride(0), eps, *kv_scales,
        num_heads=num_heads, num_kv_heads=kv_entry // 2, head_dim=head_dim, page_size=page_size,
        block_heads=block_heads, block_half=block_half, normalise=qk_norm is not None, by_row=by_row, overlap=overlap,
        rounded=pages.dtype is ROUNDED, num_warps=2, launch_pdl=overlap,
    )  # fmt: skip


@dataclass(frozen=True)
class Windowed:
    """What a layer sees of a context."""

    window: KeyWindow
    starts: Tensor | None  # [slots] int32: keys between the sinks and here do not exist; None: all do
    cos: Tensor  # [max_positions, head_dim // 2] by which queries turn back to the sinks
    sin: Tensor
    factor: float  # that both tables have


def attend(
    qkv: Tensor,
    pages: Tensor,
    table: Tensor,
    tiles: Tiles,
    out: Tensor,
    workspace: AttentionWorkspace,
    config: AttentionConfig,
    scale: float | None = None,
    kv_scales: tuple[float, float] = (1.0, 1.0),
    overlap: bool = False,
    first_key: int = 0,
    sees_all: bool = False,
    windowed: Windowed | None = None,
) -> None:
    """Causal attention of the rows of the tiles to their requests' keys from first_key on, into out.

    With `sees_all` it is not causal: a row sees all rows of its request. With `windowed` a row sees the sinks and a
    window (with `sees_all` the rows behind it too); the page table may have anything where no row sees a key.

    qkv [R, num_heads + 2 * num_kv_heads, head_dim], contiguous, its queries rotated; pages [num_pages, page_size,
    2 * num_kv_heads, head_dim], the step's own keys and values already in them; table [slots, columns] int32; out [R,
    num_heads * head_dim], contiguous. Rows outside all tiles are left as they are. Pages of 8-bit floats hold keys and
    values divided by kv_scales.

    With `overlap` the launch starts while the one before it on the stream still runs and waits for it before it reads
    qkv and pages: behind rotate_and_write, this hides a launch (1.5 to 2 µs). Table and tiles are read sooner and must
    have been written at least two launches before.
    """
    all_heads, head_dim = qkv.shape[1:]
    page_size, kv_entry = pages.shape[1], pages.shape[2]
    num_heads, num_kv_heads = all_heads - kv_entry, kv_entry // 2
    assert all(each.is_contiguous() for each in (qkv, pages, out))
    assert table.stride(1) == 1
    window, starts, cos, sin, unturned = None, None, None, None, 1.0
    if windowed is not None:
        window, starts = windowed.window, windowed.starts
    if windowed is not None and windowed.window.sinks:
        cos, sin, unturned = windowed.cos, windowed.sin, 1 / windowed.factor
    assert config.num_splits == 1 or workspace.partial.shape[2] == config.num_splits
    attend_kernel[(num_kv_heads, tiles.request.shape[0], config.num_splits)](
        qkv, pages, table, out, workspace.partial, workspace.log_sums, workspace.arrived,
        tiles.first_row, tiles.num_rows, tiles.start, tiles.slot, tiles.request, tiles.offset, tiles.num_tiles,
        table.stride(0), (head_dim**-0.5 if scale is None else scale) * kv_scales[0] * LOG2_E, kv_scales[1],
        config.rows_per_tile, config.num_splits, config.num_sms,
        config.min_split // config.block_n, max(MAX_SPLIT, config.min_split) // config.block_n,
        num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, page_size=page_size,
        rounded=pages.dtype is ROUNDED,
        block_m=config.block_m, block_n=config.block_n, block_d=padded_dim(head_dim), is_split=config.num_splits > 1,
        overlap=overlap, first_key=first_key, sees_all=sees_all,
        starts=starts, cos=cos, sin=sin, unturned=unturned,
        window=0 if window is None else window.size, sinks=0 if window is None else window.sinks,
        num_warps=config.num_warps, num_stages=config.num_stages, launch_pdl=overlap,
    )  # fmt: skip
