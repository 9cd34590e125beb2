"""Ragged attention over KV pages as Triton kernels, ready to be captured in a CUDA graph.

Knows rows, pages, the page table and how to cut a step's rows into tiles. Knows nothing of models, requests, graphs or
streams. Nothing here allocates, copies or waits for the device: the size of a launch follows from the sizes of the
buffers, and what is real in them (rows, tiles, positions) is read on the device. So a captured launch serves every
step that fits its buffers, and rows and tiles past the real ones do nothing.

A tile is up to `rows_per_tile` rows of one request. The query heads that share a key head are folded into the tile, so
decode (one row), verification (a few) and prefill (thousands) are one launch. Where tiles are few and contexts long,
several programs share a tile's keys (a split each) and the last of them to finish combines their results.
"""

# mypy: disable-error-code="import-untyped, import-not-found, untyped-decorator, no-untyped-def"
from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from faser.arrays import IntArray

Int32Array = NDArray[np.int32]

FAR = tl.constexpr(-1e30)  # the score of a key a row may not see; finite, so that FAR - FAR is no NaN
LOG2_E = math.log2(math.e)
MAX_SPLIT = 2048  # keys after which a program leaves the rest to another, so that no long context outlasts the others
MAX_PROGRAMS = 8192  # splits are no use beyond this many programs: most would only find that they have nothing to do
FEW_SPLITS = 4  # where it is not known beforehand how many of a step's requests a launch is for
MAX_WORKSPACE = 128 * 2**20  # bytes


# ---- configuration: fixed when a graph is captured ----


@dataclass(frozen=True)
class AttentionConfig:
    """How `attend` is cut up. A tile is rows_per_tile rows times the heads of a key head, padded to block_m.

    A tile's keys are shared by as many programs as keep the SMs busy, up to num_splits of them, each with min_split to
    MAX_SPLIT keys; by more of those where the context is longer than that.
    """

    rows_per_tile: int
    block_m: int
    block_n: int  # keys at a time
    num_splits: int
    num_sms: int
    min_split: int
    num_warps: int
    num_stages: int


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

    Where a step has other rows besides, which are attended by another launch, step_rows counts all.

    Tuned on an H200 in bf16 for head dimensions 64 and 128 (benchmarks/cuda_attention.py); others follow by bytes.
    Splits that find nothing to do are not free: 16 decodes over 1024 keys take 24 µs if max_context is 2048 and 29 µs
    if it is 8192, so a graph for short contexts should say so.
    """
    group = num_heads // num_kv_heads
    block_m, rows_per_tile = _tile_size(group, rows_per_request, head_dim, dtype)
    num_programs = num_requests * -(-rows_per_request // rows_per_tile) * num_kv_heads
    # How many requests there are besides others is not known, and few are worse served as many than many as few.
    is_crowded = num_programs >= 2 * num_sms and step_rows is None
    block_n, num_warps, num_stages = _block(block_m, head_dim, dtype, is_crowded)
    min_split = max(128 if block_m < 64 else 256, block_n)
    num_splits = -(-max_context // MAX_SPLIT)
    if step_rows is not None:
        num_splits = max(num_splits, FEW_SPLITS)
    num_splits = max(num_sms // num_programs, min(num_splits, MAX_PROGRAMS // num_programs))
    row_bytes = 4 * num_heads * (head_dim + 1)
    room = MAX_WORKSPACE // ((step_rows or num_requests * rows_per_request) * row_bytes)
    num_splits = max(1, min(num_splits, max_context // min_split, room))
    return AttentionConfig(rows_per_tile, block_m, block_n, num_splits, num_sms, min_split, num_warps, num_stages)


def _tile_size(group: int, rows: int, head_dim: int, dtype: torch.dtype) -> tuple[int, int]:
    """block_m and rows_per_tile. float32 has no matrix instruction that is exact, and large tiles would spill."""
    largest = 32 if dtype is torch.float32 else 64 if head_dim > 128 else 128
    block_m = max(16, min(largest, triton.next_power_of_2(group * rows)), triton.next_power_of_2(group))
    return block_m, min(block_m // group, rows)


def _block(block_m: int, head_dim: int, dtype: torch.dtype, crowded: bool) -> tuple[int, int, int]:
    """block_n, num_warps, num_stages. Crowded: several programs an SM, whose loads hide each other's latency."""
    if block_m >= 64:
        return (64 if head_dim <= 128 else 32), (4 if block_m == 64 else 8), 3
    keys, num_warps, num_stages = 64, 4, 3
    if crowded:
        keys, num_warps, num_stages = (64, 4, 2) if block_m == 16 else (32, 2, 3)
    # Keys for a head dimension of 128 and two bytes, and as many bytes for others.
    block_n = keys * 256 // (head_dim * dtype.itemsize)
    return min(128, max(16, block_n)), num_warps, num_stages


def build_tiles(
    num_rows: IntArray, rows_per_tile: int, start: IntArray | None = None, some: NDArray[np.bool_] | None = None
) -> tuple[Int32Array, Int32Array]:
    """The request and the first row within it of each tile, for requests of num_rows rows, or only `some` of them.

    With `start` (each request's first position) the tiles with the most keys come first, so that the last programs to
    run are short ones.
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


# ---- what the kernels read: buffers that stay where they are and change in content ----


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
class Workspace:
    """Where splits leave their results for one another. Forwards that may run at once need one each."""

    partial: Tensor  # [rows, num_heads, num_splits, head_dim] float32
    log_sums: Tensor  # [rows, num_heads, num_splits] float32: log2 of the sum of weights
    arrived: Tensor  # [T, num_kv_heads] int32: the splits of a tile that are done; zero between launches


class Memory:
    """One piece of memory for the workspaces of launches that never run at once: it is as large as the largest."""

    def __init__(self, device: torch.device | str) -> None:
        self._results = torch.empty(0, dtype=torch.float32, device=device)
        self._arrived = torch.zeros(0, dtype=torch.int32, device=device)
        self._outgrown: list[Tensor] = []  # graphs may hold their addresses

    def workspace(
        self, config: AttentionConfig, num_rows: int, num_tiles: int, num_heads: int, num_kv_heads: int, head_dim: int
    ) -> Workspace:
        splits = config.num_splits if config.num_splits > 1 else 0
        num_sums, num_counts = num_rows * num_heads * splits, num_tiles * num_kv_heads
        num_partial = num_sums * head_dim
        if self._results.numel() < num_partial + num_sums:
            self._outgrown.append(self._results)
            self._results = self._results.new_empty(num_partial + num_sums)
        if self._arrived.numel() < num_counts:
            self._outgrown.append(self._arrived)
            self._arrived = self._arrived.new_zeros(num_counts)
        return Workspace(
            self._results[:num_partial].view(num_rows, num_heads, splits, head_dim),
            self._results[num_partial : num_partial + num_sums].view(num_rows, num_heads, splits),
            self._arrived[:num_counts].view(num_tiles, num_kv_heads),
        )


# ---- rotation and writing ----


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
    overlap: bool = False,
) -> None:
    """Rotate the queries in place and write the rotated keys, and the values, to their pages.

    With qk_norm the queries and keys are normalised per head first.

    qkv [R, num_heads + 2 * num_kv_heads, head_dim], contiguous; positions, slots [R] int32; num_rows [1] int32, the
    real rows; table [slots, columns] int32; cos, sin [max_positions, head_dim // 2] float32; pages [num_pages,
    page_size, 2 * num_kv_heads, head_dim], contiguous; qk_norm [num_heads + num_kv_heads, head_dim]. `overlap` as in
    `attend`: positions, slots, num_rows and table must have been written at least two launches before.
    """
    rows, all_heads, head_dim = qkv.shape
    page_size, kv_entry = pages.shape[1], pages.shape[2]
    num_heads = all_heads - kv_entry
    assert all(each.is_contiguous() for each in (qkv, pages, cos, sin))
    assert table.stride(1) == 1
    block_heads = min(triton.next_power_of_2(all_heads), max(1, 1024 // head_dim))
    _rotate_kernel[(-(-all_heads // block_heads), rows)](
        qkv,
        positions,
        slots,
        num_rows,
        table,
        cos,
        sin,
        pages,
        qk_norm,
        table.stride(0),
        eps,
        num_heads=num_heads,
        num_kv_heads=kv_entry // 2,
        head_dim=head_dim,
        page_size=page_size,
        block_heads=block_heads,
        normalise=qk_norm is not None,
        overlap=overlap,
        num_warps=2,
        launch_pdl=overlap,
    )


@triton.jit(do_not_specialize=["num_rows"])
def _rotate_kernel(
    qkv,
    positions,
    slots,
    num_rows,
    table,
    cos,
    sin,
    pages,
    qk_norm,
    table_stride,
    eps,
    num_heads: tl.constexpr,
    num_kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    page_size: tl.constexpr,
    block_heads: tl.constexpr,
    normalise: tl.constexpr,
    overlap: tl.constexpr,
):
    """One program for block_heads heads of a row. Halves of heads are [block_heads, head_dim // 2]."""
    if overlap:
        gdc_launch_dependents()
    row = tl.program_id(1)
    position = tl.load(positions + row)
    slot = tl.load(slots + row)
    if row >= tl.load(num_rows):
        return
    half: tl.constexpr = head_dim // 2
    head = tl.program_id(0) * block_heads + tl.arange(0, block_heads)
    present = (head < num_heads + 2 * num_kv_heads)[:, None]
    turns = (head < num_heads + num_kv_heads)[:, None]  # values do not
    column = tl.arange(0, half)
    inside = head[:, None] * head_dim + column[None, :]
    source = qkv + row.to(tl.int64) * ((num_heads + 2 * num_kv_heads) * head_dim) + inside
    page = tl.load(table + slot.to(tl.int64) * table_stride + position // page_size)
    if overlap:
        gdc_wait()
    first = tl.load(source, mask=present, other=0.0).to(tl.float32)
    second = tl.load(source + half, mask=present, other=0.0).to(tl.float32)
    if normalise:
        # Rounded where faser.models.layers.rms_norm_heads_ rounds.
        dtype: tl.constexpr = qkv.dtype.element_ty
        mean = (tl.sum(first * first, 1) + tl.sum(second * second, 1)) / head_dim
        unit = tl.rsqrt(mean + eps)[:, None]
        weight = qk_norm + inside
        first_weight = tl.load(weight, mask=turns, other=0.0).to(tl.float32)
        second_weight = tl.load(weight + half, mask=turns, other=0.0).to(tl.float32)
        first_normed = ((first * unit).to(dtype).to(tl.float32) * first_weight).to(dtype).to(tl.float32)
        second_normed = ((second * unit).to(dtype).to(tl.float32) * second_weight).to(dtype).to(tl.float32)
        first = tl.where(turns, first_normed, first)
        second = tl.where(turns, second_normed, second)
    angle = position.to(tl.int64) * half + column[None, :]
    c = tl.load(cos + angle + head[:, None] * 0, mask=turns, other=1.0)
    s = tl.load(sin + angle + head[:, None] * 0, mask=turns, other=0.0)
    turned_first = first * c - second * s
    turned_second = second * c + first * s
    is_query = (head < num_heads)[:, None]
    tl.store(source, turned_first.to(qkv.dtype.element_ty), mask=is_query)
    tl.store(source + half, turned_second.to(qkv.dtype.element_ty), mask=is_query)
    entry = page.to(tl.int64) * page_size + position % page_size
    kept = pages + entry * (2 * num_kv_heads * head_dim) + (inside - num_heads * head_dim)
    is_kept = present & (head >= num_heads)[:, None]
    tl.store(kept, turned_first.to(pages.dtype.element_ty), mask=is_kept)
    tl.store(kept + half, turned_second.to(pages.dtype.element_ty), mask=is_kept)


# ---- attention ----


def attend(
    qkv: Tensor,
    pages: Tensor,
    table: Tensor,
    tiles: Tiles,
    out: Tensor,
    workspace: Workspace,
    config: AttentionConfig,
    scale: float | None = None,
    overlap: bool = False,
) -> None:
    """Causal attention of the rows of the tiles to their requests' keys, into out.

    qkv [R, num_heads + 2 * num_kv_heads, head_dim], contiguous, its queries rotated; pages [num_pages, page_size,
    2 * num_kv_heads, head_dim], the step's own keys and values already in them; table [slots, columns] int32; out [R,
    num_heads * head_dim], contiguous. Rows of no tile are left as they are.

    With `overlap` the launch starts while the one before it on the stream still runs and waits for it before it reads
    qkv and pages: right behind rotate_and_write, this hides a launch (1.5 to 2 µs). What it reads sooner (table, tiles)
    must have been written at least two launches before.
    """
    all_heads, head_dim = qkv.shape[1:]
    page_size, kv_entry = pages.shape[1], pages.shape[2]
    num_heads, num_kv_heads = all_heads - kv_entry, kv_entry // 2
    assert all(each.is_contiguous() for each in (qkv, pages, out))
    assert table.stride(1) == 1
    assert config.num_splits == 1 or workspace.partial.shape[2] == config.num_splits
    _attend_kernel[(num_kv_heads, tiles.request.shape[0], config.num_splits)](
        qkv,
        pages,
        table,
        out,
        workspace.partial,
        workspace.log_sums,
        workspace.arrived,
        tiles.first_row,
        tiles.num_rows,
        tiles.start,
        tiles.slot,
        tiles.request,
        tiles.offset,
        tiles.num_tiles,
        table.stride(0),
        (head_dim**-0.5 if scale is None else scale) * LOG2_E,
        config.rows_per_tile,
        config.num_splits,
        config.num_sms,
        config.min_split // config.block_n,
        max(MAX_SPLIT, config.min_split) // config.block_n,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        block_m=config.block_m,
        block_n=config.block_n,
        is_split=config.num_splits > 1,
        overlap=overlap,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        launch_pdl=overlap,
    )


# What differs from graph to graph and does not shape the code is not compiled in; nor is where num_tiles lies.
@triton.jit(do_not_specialize=["num_tiles", "rows_per_tile", "num_splits", "num_sms", "min_share", "max_share"])
def _attend_kernel(
    qkv,
    pages,
    table,
    out,
    partial,
    log_sums,
    arrived,
    first_row,
    num_rows,
    start,
    slot,
    tile_request,
    tile_offset,
    num_tiles,
    table_stride,
    scale,
    rows_per_tile,
    num_splits,
    num_sms,
    min_share,
    max_share,
    num_heads: tl.constexpr,
    num_kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    page_size: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    is_split: tl.constexpr,
    overlap: tl.constexpr,
):
    """One program for a split of a tile at one key head. Queries are [block_m, head_dim], keys [block_n, head_dim].

    A share is a split's blocks of keys. Unless is_split there is one split, and no code for more.
    """
    kv_head, tile, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    request = tl.load(tile_request + tile)
    offset = tl.load(tile_offset + tile)
    real_tiles = tl.load(num_tiles)
    if tile >= real_tiles:
        if overlap:  # noqa: SIM102 (compiled in or not, and then a test)
            if tile == 0:  # a launch without any tile must not end before the one before it, for the one after it
                gdc_wait()
        return
    rows_here = tl.minimum(tl.load(num_rows + request) - offset, rows_per_tile)
    position = tl.load(start + request) + offset  # of the tile's first row
    columns = table + tl.load(slot + request).to(tl.int64) * table_stride
    end = position + rows_here  # the keys its last row sees
    low, high, num_active = 0, end, 1
    if is_split:
        num_blocks = tl.cdiv(end, block_n)
        usual_splits = tl.maximum(1, num_sms // (real_tiles * num_kv_heads))
        share = tl.maximum(tl.cdiv(num_blocks, usual_splits), min_share)
        share = tl.maximum(tl.minimum(share, max_share), tl.cdiv(num_blocks, num_splits))
        low = split * share * block_n
        high = tl.minimum(end, low + share * block_n)
        num_active = tl.cdiv(num_blocks, share)
    if low >= high:
        return

    group: tl.constexpr = num_heads // num_kv_heads
    deferred: tl.constexpr = block_m < 64  # in small tiles a sum of weights per key, and over keys only at the end
    entry: tl.constexpr = 2 * num_kv_heads * head_dim
    m = tl.arange(0, block_m)
    dim = tl.arange(0, head_dim)
    row = m // group
    valid = row < rows_here
    # [block_m] each row's and head's place among all rows and heads
    flat_row = (tl.load(first_row + request) + offset + row).to(tl.int64)
    head = kv_head * group + m % group
    q_at = flat_row * ((num_heads + 2 * num_kv_heads) * head_dim) + head * head_dim
    if overlap:
        gdc_wait()
    q = tl.load(qkv + q_at[:, None] + dim[None, :], mask=valid[:, None], other=0.0)
    keys = pages + kv_head * head_dim
    peak = tl.full([block_m], FAR, tl.float32)
    total = tl.zeros([block_m, block_n], tl.float32) if deferred else tl.zeros([block_m], tl.float32)
    acc = tl.zeros([block_m, head_dim], tl.float32)
    clear = low  # keys before this one are seen by every row
    if block_m >= 64:  # where arithmetic counts, keys that every row sees take a loop without masks
        clear = tl.maximum(low, tl.minimum(high, (position + 1) // block_n * block_n))
        acc, total, peak = _scan(
            acc, total, peak, q, columns, keys, low, clear, end, position + row, scale, entry,
            num_kv_heads, head_dim, page_size, block_n, False, deferred,
        )  # fmt: skip
    acc, total, peak = _scan(
        acc, total, peak, q, columns, keys, clear, high, end, position + row, scale, entry,
        num_kv_heads, head_dim, page_size, block_n, True, deferred,
    )  # fmt: skip
    if deferred:
        total = tl.sum(total, 1)
    acc = acc / total[:, None]
    result = out + (flat_row * num_heads + head)[:, None] * head_dim + dim[None, :]
    if is_split:
        if num_active == 1:
            tl.store(result, acc.to(out.dtype.element_ty), mask=valid[:, None])
        else:
            place = (flat_row * num_heads + head) * num_splits
            tl.store(partial + (place + split)[:, None] * head_dim + dim[None, :], acc, mask=valid[:, None])
            tl.store(log_sums + place + split, peak + tl.log2(total), mask=valid)
            # Every thread's stores, then the count: whoever counts last sees them all.
            tl.debug_barrier()
            count = arrived + tile * num_kv_heads + kv_head
            if tl.atomic_add(count, 1, sem="acq_rel", scope="gpu") == num_active - 1:
                tl.store(count, 0)
                acc = _combine(partial, log_sums, place, valid, num_active, block_m, head_dim)
                tl.store(result, acc.to(out.dtype.element_ty), mask=valid[:, None])
    else:
        tl.store(result, acc.to(out.dtype.element_ty), mask=valid[:, None])


@triton.jit
def _scan(
    acc, total, peak, q, columns, keys, low, high, end, row_position, scale,
    entry: tl.constexpr, num_kv_heads: tl.constexpr, head_dim: tl.constexpr, page_size: tl.constexpr,
    block_n: tl.constexpr, masked: tl.constexpr, deferred: tl.constexpr,
):  # fmt: skip
    """Flash attention's loop over keys low to high - 1. Pages are looked up one block ahead of their use."""
    dim = tl.arange(0, head_dim)
    n = low + tl.arange(0, block_n)
    page = tl.load(columns + n // page_size, mask=n < end, other=0)
    for at in range(low, high, block_n):
        n = at + tl.arange(0, block_n)
        entry_at = (page.to(tl.int64) * page_size + n % page_size) * entry
        ahead = n + block_n
        page = tl.load(columns + ahead // page_size, mask=ahead < end, other=0)
        key_at = keys + entry_at[:, None] + dim[None, :]
        value_at = key_at + num_kv_heads * head_dim
        if masked:
            written = (n < end)[:, None]
            k = tl.load(key_at, mask=written, other=0.0)
            v = tl.load(value_at, mask=written, other=0.0)
            scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
            scores = tl.where(n[None, :] <= row_position[:, None], scores, FAR)
            new_peak = tl.maximum(peak, tl.max(scores, 1))
            weights = tl.exp2(scores - new_peak[:, None])
        else:
            k = tl.load(key_at)
            v = tl.load(value_at)
            scores = tl.dot(q, tl.trans(k), input_precision="ieee")
            new_peak = tl.maximum(peak, tl.max(scores, 1) * scale)
            weights = tl.exp2(scores * scale - new_peak[:, None])
        shrink = tl.exp2(peak - new_peak)
        total = total * shrink[:, None] + weights if deferred else total * shrink + tl.sum(weights, 1)
        acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
        peak = new_peak
    return acc, total, peak


@triton.jit
def _combine(partial, log_sums, place, valid, num_active, block_m: tl.constexpr, head_dim: tl.constexpr):
    """The mean of the splits' results, each weighed by its sum of weights. Loads bypass the SM's own cache."""
    dim = tl.arange(0, head_dim)
    peak = tl.full([block_m], FAR, tl.float32)
    total = tl.zeros([block_m], tl.float32)
    acc = tl.zeros([block_m, head_dim], tl.float32)
    at_once: tl.constexpr = max(1, 128 // block_m)  # independent loads that the registers hold
    for first in range(0, num_active, at_once):
        for split in tl.static_range(at_once):
            from_split = place + first + split
            there = valid & (from_split - place < num_active)
            log_sum = tl.load(log_sums + from_split, mask=there, other=FAR, cache_modifier=".cg")
            at = partial + from_split[:, None] * head_dim + dim[None, :]
            result = tl.load(at, mask=there[:, None], other=0.0, cache_modifier=".cg")
            new_peak = tl.maximum(peak, log_sum)
            shrink, weight = tl.exp2(peak - new_peak), tl.exp2(log_sum - new_peak)
            acc = acc * shrink[:, None] + weight[:, None] * result
            total = total * shrink + weight
            peak = new_peak
    return acc / total[:, None]
