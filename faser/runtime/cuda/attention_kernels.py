"""The Triton kernels behind faser/runtime/cuda/attention.py."""

# mypy: disable-error-code="import-untyped, import-not-found, untyped-decorator, no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from faser.runtime.cuda.quantised_kernels import round_e4m3

FAR = tl.constexpr(-1e30)  # the score of a key a row may not see; finite, so that FAR - FAR is no NaN


@triton.jit(do_not_specialize=["num_rows"])
def rotate_kernel(
    qkv, positions, slots, num_rows, table, cos, sin, pages, qk_norm, table_stride, eps, key_scale, value_scale,
    num_heads: tl.constexpr, num_kv_heads: tl.constexpr, head_dim: tl.constexpr, page_size: tl.constexpr,
    block_heads: tl.constexpr, block_half: tl.constexpr, normalise: tl.constexpr, by_row: tl.constexpr,
    overlap: tl.constexpr, rounded: tl.constexpr,
):  # fmt: skip
    """One program for block_heads heads of a row. Halves of heads are [block_heads, block_half].

    If `rounded`, keys and values are stored as 8-bit floats, divided by their scales.
    """
    if overlap:
        gdc_launch_dependents()
    row = tl.program_id(1)
    position = tl.load(positions + row)
    slot = tl.load(slots + row)
    if row >= tl.load(num_rows):
        return
    half: tl.constexpr = head_dim // 2
    head = tl.program_id(0) * block_heads + tl.arange(0, block_heads)
    column = tl.arange(0, block_half)
    present = _in_head((head < num_heads + 2 * num_kv_heads)[:, None], column, half, block_half)
    turns = _in_head((head < num_heads + num_kv_heads)[:, None], column, half, block_half)  # values do not
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
    angle = (row if by_row else position).to(tl.int64) * half + column[None, :]
    c = tl.load(cos + angle + head[:, None] * 0, mask=turns, other=1.0)
    s = tl.load(sin + angle + head[:, None] * 0, mask=turns, other=0.0)
    turned_first = first * c - second * s
    turned_second = second * c + first * s
    is_query = _in_head((head < num_heads)[:, None], column, half, block_half)
    tl.store(source, turned_first.to(qkv.dtype.element_ty), mask=is_query)
    tl.store(source + half, turned_second.to(qkv.dtype.element_ty), mask=is_query)
    entry = page.to(tl.int64) * page_size + position % page_size
    kept = pages + entry * (2 * num_kv_heads * head_dim) + (inside - num_heads * head_dim)
    is_kept = present & (head >= num_heads)[:, None]
    if rounded:
        scale = tl.where(turns, key_scale, value_scale)
        turned_first = _round_entry(turned_first, scale, qkv.dtype.element_ty)
        turned_second = _round_entry(turned_second, scale, qkv.dtype.element_ty)
    tl.store(kept, turned_first.to(pages.dtype.element_ty), mask=is_kept)
    tl.store(kept + half, turned_second.to(pages.dtype.element_ty), mask=is_kept)


@triton.jit
def _in_head(rows, column, size: tl.constexpr, block: tl.constexpr):
    """A mask [N, block]: `rows` [N, 1] and the first `size` columns. Without a test if a block has no more columns."""
    return rows if size == block else rows & (column < size)[None, :]


@triton.jit
def _round_entry(x, scale, dtype: tl.constexpr):
    """x / scale rounded to 8-bit floats, by way of the model's dtype as on a CPU, and cut to their range."""
    quotient = tl.div_rn(x.to(dtype).to(tl.float32), scale + tl.zeros_like(x))
    return round_e4m3(tl.clamp(quotient, -448.0, 448.0))


# Arguments that differ from graph to graph are not compiled in, nor is the alignment of num_tiles.
@triton.jit(do_not_specialize=["num_tiles", "rows_per_tile", "num_splits", "num_sms", "min_share", "max_share"])
def attend_kernel(
    qkv, pages, table, out, partial, log_sums, arrived,
    first_row, num_rows, start, slot, tile_request, tile_offset, num_tiles,
    table_stride, scale, value_scale, rows_per_tile, num_splits, num_sms, min_share, max_share,
    rounded: tl.constexpr,
    num_heads: tl.constexpr, num_kv_heads: tl.constexpr, head_dim: tl.constexpr, page_size: tl.constexpr,
    block_m: tl.constexpr, block_n: tl.constexpr, block_d: tl.constexpr, is_split: tl.constexpr, overlap: tl.constexpr,
    first_key: tl.constexpr, sees_all: tl.constexpr,
    starts, cos, sin, unturned, window: tl.constexpr, sinks: tl.constexpr,
):  # fmt: skip
    """One program for a split of a tile at one key head. Queries are [block_m, block_d], keys [block_n, block_d].

    A share is a split's blocks of keys. Unless is_split there is one split, and no code for more. With a window splits
    share what the tile sees of it; the first split also has the sinks.
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
    if sees_all:
        end = tl.load(start + request) + tl.load(num_rows + request)
    low, high, num_active = 0, end, 1
    begin = 0  # of the run of keys, whole blocks
    visible = first_key  # the first key of the run that a row sees; pages before it may be another request's
    if window > 0:
        visible = sinks
        if starts is not None:
            visible = tl.maximum(visible, tl.load(starts + tl.load(slot + request)))
        visible = tl.maximum(visible, position - window + 1)
        begin = visible // block_n * block_n
        low = begin
    if is_split:
        num_blocks = tl.cdiv(end - begin, block_n)
        if window > 0:  # the sinks may be all that there is
            num_blocks = tl.maximum(num_blocks, 1)
        usual_splits = tl.maximum(1, num_sms // (real_tiles * num_kv_heads))
        share = tl.maximum(tl.cdiv(num_blocks, usual_splits), min_share)
        share = tl.maximum(tl.minimum(share, max_share), tl.cdiv(num_blocks, num_splits))
        low = begin + split * share * block_n
        high = tl.minimum(end, low + share * block_n)
        num_active = tl.cdiv(num_blocks, share)
    if (low >= high) & ((window == 0) | (split > 0)):
        return

    group: tl.constexpr = num_heads // num_kv_heads
    deferred: tl.constexpr = block_m < 64  # in small tiles a sum of weights per key, and over keys only at the end
    entry: tl.constexpr = 2 * num_kv_heads * head_dim
    m = tl.arange(0, block_m)
    dim = tl.arange(0, block_d)
    row = m // group
    valid = row < rows_here
    real = _in_head(valid[:, None], dim, head_dim, block_d)
    # [block_m] each row's and head's place among all rows and heads
    flat_row = (tl.load(first_row + request) + offset + row).to(tl.int64)
    head = kv_head * group + m % group
    q_at = flat_row * ((num_heads + 2 * num_kv_heads) * head_dim) + head * head_dim
    if overlap:
        gdc_wait()
    q = tl.load(qkv + q_at[:, None] + dim[None, :], mask=real, other=0.0)
    keys = pages + kv_head * head_dim
    peak = tl.full([block_m], FAR, tl.float32)
    total = tl.zeros([block_m, block_n], tl.float32) if deferred else tl.zeros([block_m], tl.float32)
    acc = tl.zeros([block_m, block_d], tl.float32)
    clear = low  # keys from here to `clear` are seen by every row
    # [block_m] the first key of each row's window, and the last that it sees
    row_first = position + row - window + 1
    row_last = position + row
    if sees_all:
        row_last = tl.zeros_like(row) + end - 1
    if sinks > 0 and split == 0:
        near = _turn_back(
            q, qkv, q_at, position + row, valid, real, cos, sin, unturned, window + sinks - 1, head_dim, block_d
        )
        last = tl.minimum(sinks, end)
        acc, total, peak = _scan(
            acc, total, peak, near, columns, keys, 0, last, last, row_first, row_last, scale, 0, entry,
            num_kv_heads, head_dim, page_size, block_n, block_d, True, deferred, first_key, -1,
        )  # fmt: skip
    if block_m >= 64 and first_key == 0:  # where arithmetic counts, keys that every row sees take a loop without masks
        if window > 0:  # before these, keys that some rows see no more
            unclear = tl.maximum(visible, end - window)
            unclear = tl.maximum(low, tl.minimum(high, begin + tl.cdiv(unclear - begin, block_n) * block_n))
            acc, total, peak = _scan(
                acc, total, peak, q, columns, keys, low, unclear, end, row_first, row_last, scale, visible, entry,
                num_kv_heads, head_dim, page_size, block_n, block_d, True, deferred, first_key, window,
            )  # fmt: skip
            low = unclear
        clear = tl.maximum(low, tl.minimum(high, (position + 1) // block_n * block_n))
        acc, total, peak = _scan(
            acc, total, peak, q, columns, keys, low, clear, end, row_first, row_last, scale, visible, entry,
            num_kv_heads, head_dim, page_size, block_n, block_d, False, deferred, first_key, window,
        )  # fmt: skip
    acc, total, peak = _scan(
        acc, total, peak, q, columns, keys, clear, high, end, row_first, row_last, scale, visible, entry,
        num_kv_heads, head_dim, page_size, block_n, block_d, True, deferred, first_key, window,
    )  # fmt: skip
    if deferred:
        total = tl.sum(total, 1)
    acc = acc / total[:, None]
    if rounded:  # pages hold 8-bit floats; the scale of the keys is part of `scale`
        acc = acc * value_scale
    result = out + (flat_row * num_heads + head)[:, None] * head_dim + dim[None, :]
    if is_split:
        if num_active == 1:
            tl.store(result, acc.to(out.dtype.element_ty), mask=real)
        else:
            place = (flat_row * num_heads + head) * num_splits
            tl.store(partial + (place + split)[:, None] * head_dim + dim[None, :], acc, mask=real)
            tl.store(log_sums + place + split, peak + tl.log2(total), mask=valid)
            # Every thread's stores, then the count: whoever counts last sees them all.
            tl.debug_barrier()
            count = arrived + tile * num_kv_heads + kv_head
            if tl.atomic_add(count, 1, sem="acq_rel", scope="gpu") == num_active - 1:
                tl.store(count, 0)
                acc = _combine(partial, log_sums, place, valid, num_active, block_m, head_dim, block_d)
                tl.store(result, acc.to(out.dtype.element_ty), mask=real)
    else:
        tl.store(result, acc.to(out.dtype.element_ty), mask=real)


@triton.jit
def _turn_back(
    q, qkv, q_at, row_position, valid, real, cos, sin, unturned, furthest, head_dim: tl.constexpr, block_d: tl.constexpr
):  # fmt: skip
    """The queries as sinks see them: rotated as if no row stood further than `furthest`.

    `unturned` undoes the factor that both tables have: the queries have been multiplied by it.
    """
    half: tl.constexpr = head_dim // 2
    dim = tl.arange(0, block_d)
    back = tl.where(valid, tl.maximum(row_position - furthest, 0), 0)
    angle = back.to(tl.int64)[:, None] * half + (dim % half)[None, :]
    c, s = tl.load(cos + angle) * unturned, tl.load(sin + angle) * unturned
    other = tl.load(qkv + q_at[:, None] + ((dim + half) % head_dim)[None, :], mask=real, other=0.0)
    s = tl.where(dim[None, :] < half, s, -s)
    return (q.to(tl.float32) * c + other.to(tl.float32) * s).to(q.dtype)


@triton.jit
def _scan(
    acc, total, peak, q, columns, keys, low, high, end, row_first, row_last, scale, visible,
    entry: tl.constexpr, num_kv_heads: tl.constexpr, head_dim: tl.constexpr, page_size: tl.constexpr,
    block_n: tl.constexpr, block_d: tl.constexpr, masked: tl.constexpr, deferred: tl.constexpr,
    first_key: tl.constexpr, window: tl.constexpr,
):  # fmt: skip
    """Flash attention's loop over keys low to high - 1. Pages are looked up one block ahead of their use.

    A row sees keys up to row_last; with a window those from row_first and from `visible` on; if `window` is negative,
    all before `end`.
    """
    dim = tl.arange(0, block_d)
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
            exists = (n >= first_key) & (n < end)
            if window > 0:
                exists = exists & (n >= visible)
            written = _in_head(exists[:, None], dim, head_dim, block_d)
            k = tl.load(key_at, mask=written, other=0.0).to(q.dtype)
            v = tl.load(value_at, mask=written, other=0.0).to(q.dtype)
            scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
            seen = n[None, :] <= row_last[:, None]
            if first_key > 0:
                seen = seen & (n >= first_key)[None, :]
            if window > 0:
                seen = seen & (n >= visible)[None, :] & (n[None, :] >= row_first[:, None])
            if window < 0:
                seen = seen & (n < end)[None, :]
            scores = tl.where(seen, scores, FAR)
            new_peak = tl.maximum(peak, tl.max(scores, 1))
            weights = tl.exp2(scores - new_peak[:, None])
        else:
            inside = None if head_dim == block_d else (dim < head_dim)[None, :]
            beyond = None if head_dim == block_d else 0.0
            k = tl.load(key_at, mask=inside, other=beyond).to(q.dtype)
            v = tl.load(value_at, mask=inside, other=beyond).to(q.dtype)
            scores = tl.dot(q, tl.trans(k), input_precision="ieee")
            new_peak = tl.maximum(peak, tl.max(scores, 1) * scale)
            weights = tl.exp2(scores * scale - new_peak[:, None])
        shrink = tl.exp2(peak - new_peak)
        total = total * shrink[:, None] + weights if deferred else total * shrink + tl.sum(weights, 1)
        acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
        peak = new_peak
    return acc, total, peak


@triton.jit
def _combine(
    partial, log_sums, place, valid, num_active, block_m: tl.constexpr, head_dim: tl.constexpr, block_d: tl.constexpr
):  # fmt: skip
    """The mean of the splits' results, each weighed by its sum of weights. Loads bypass the SM's own cache."""
    dim = tl.arange(0, block_d)
    peak = tl.full([block_m], FAR, tl.float32)
    total = tl.zeros([block_m], tl.float32)
    acc = tl.zeros([block_m, block_d], tl.float32)
    at_once: tl.constexpr = max(1, 128 // block_m)  # independent loads that the registers hold
    for first in range(0, num_active, at_once):
        for split in tl.static_range(at_once):
            from_split = place + first + split
            there = valid & (from_split - place < num_active)
            log_sum = tl.load(log_sums + from_split, mask=there, other=FAR, cache_modifier=".cg")
            at = partial + from_split[:, None] * head_dim + dim[None, :]
            real = _in_head(there[:, None], dim, head_dim, block_d)
            result = tl.load(at, mask=real, other=0.0, cache_modifier=".cg")
            new_peak = tl.maximum(peak, log_sum)
            shrink, weight = tl.exp2(peak - new_peak), tl.exp2(log_sum - new_peak)
            acc = acc * shrink[:, None] + weight[:, None] * result
            total = total * shrink + weight
            peak = new_peak
    return acc / total[:, None]
