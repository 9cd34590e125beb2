"""The Triton kernels behind faser/runtime/cuda/linear.py.

Rows are [R, K], weights [N, K] row-major. A kernel is compiled for N, K and what is done around the product. With EARLY
it is launched with programmatic dependent launch: it loads its first weights, then waits for the launch before it.
"""

# mypy: disable-error-code="import-untyped, import-not-found, untyped-decorator, no-untyped-def"
# ruff: noqa: N803, N806 (what a kernel is compiled for is in capitals)
from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def _weight_tile(rows, n, k, N: tl.constexpr, K: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr):
    """Weights at rows n, to which `rows` points, and columns k. Each is read once, so it is not kept in the cache."""
    if EVEN_N and EVEN_K:
        return tl.load(rows + k, eviction_policy="evict_first")
    mask = n < N if EVEN_K else (n < N) & (k < K)
    return tl.load(rows + k, mask=mask, other=0.0, eviction_policy="evict_first")


@triton.jit
def _addends(bias, residual, m, n, num_rows, N: tl.constexpr, BIASED: tl.constexpr, ADDS: tl.constexpr):
    """Bias and residual, float32 [M, N of the block] or broadcast to it. m [M, 1]; n [1, N of the block]."""
    result = tl.zeros([1, 1], tl.float32)
    if BIASED:
        result += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)
    if ADDS:
        result += tl.load(residual + m * N + n, mask=(m < num_rows) & (n < N), other=0.0).to(tl.float32)
    return result


@triton.jit
def _finish(result, up, addends, out, m, n, num_rows, N: tl.constexpr, GATED: tl.constexpr):
    """Activation, addends and store. result, up float32 [M, N of the block]; m [M, 1]; n [1, N of the block]."""
    if GATED:
        result = result * tl.sigmoid(result) * up
    result += addends
    tl.store(out + m * N + n, result.to(out.dtype.element_ty), mask=(m < num_rows) & (n < N))


@triton.jit
def _chunk(
    x, norm, k, is_row, total, up_total, squares, tile, up_tile,
    K: tl.constexpr, NORMED: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    # values [ROWS, 1, BLOCK_K]
    values = tl.load(x + k, mask=is_row & (k < K), other=0.0, eviction_policy="evict_last").to(tl.float32)
    if NORMED:
        squares += values * values
        values *= tl.load(norm + k, mask=k < K, other=0.0, eviction_policy="evict_last").to(tl.float32)
    total += tile.to(tl.float32) * values
    if GATED:
        up_total += up_tile.to(tl.float32) * values
    return total, up_total, squares


@triton.jit(do_not_specialize=["num_rows"])
def chunks_kernel(
    x, norm, eps, weight, bias, residual, out, num_rows,
    N: tl.constexpr, K: tl.constexpr,
    NORMED: tl.constexpr, GATED: tl.constexpr, BIASED: tl.constexpr, ADDS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Some outputs of all rows, a chunk of K at a time. Weights of the next chunk are loaded before this one is summed.

    The inverse root of the mean square is one factor per row and is applied at the end.
    """
    EVEN_N: tl.constexpr = N % BLOCK_N == 0
    EVEN_K: tl.constexpr = K % BLOCK_K == 0
    first = tl.program_id(0) * BLOCK_N
    # [ROWS, BLOCK_N, BLOCK_K], the layout of all three: a thread holds the same columns of rows and weights.
    n = (first + tl.arange(0, BLOCK_N))[None, :, None]
    k = tl.arange(0, BLOCK_K)[None, None, :]
    m = tl.arange(0, ROWS)[:, None, None]
    weights = weight + n.to(tl.int64) * K
    up_weights = weights + N * K
    tile = _weight_tile(weights, n, k, N, K, EVEN_N, EVEN_K)
    up_tile = _weight_tile(up_weights, n, k, N, K, EVEN_N, EVEN_K) if GATED else tile
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    total = tl.zeros([ROWS, BLOCK_N, BLOCK_K], tl.float32)
    up_total = tl.zeros([ROWS, BLOCK_N, BLOCK_K], tl.float32)
    squares = tl.zeros([ROWS, 1, BLOCK_K], tl.float32)
    rows, is_row = x + m * K, m < num_rows
    for start in range(BLOCK_K, K, BLOCK_K):
        next_tile = _weight_tile(weights, n, start + k, N, K, EVEN_N, EVEN_K)
        next_up_tile = _weight_tile(up_weights, n, start + k, N, K, EVEN_N, EVEN_K) if GATED else next_tile
        total, up_total, squares = _chunk(
            rows, norm, start - BLOCK_K + k, is_row, total, up_total, squares, tile, up_tile, K, NORMED, GATED
        )
        tile, up_tile = next_tile, next_up_tile
    LAST: tl.constexpr = (K - 1) // BLOCK_K * BLOCK_K
    total, up_total, squares = _chunk(
        rows, norm, LAST + k, is_row, total, up_total, squares, tile, up_tile, K, NORMED, GATED
    )
    # result, up [ROWS, BLOCK_N]
    result, up = tl.sum(total, 2), tl.sum(up_total, 2)
    if NORMED:
        inverse = tl.rsqrt(tl.sum(squares, 2) / K + eps)
        result, up = result * inverse, up * inverse
    m, n = tl.arange(0, ROWS)[:, None], (first + tl.arange(0, BLOCK_N))[None, :]
    _finish(result, up, _addends(bias, residual, m, n, num_rows, N, BIASED, ADDS), out, m, n, num_rows, N, GATED)


@triton.jit(do_not_specialize=["num_rows"])
def persistent_kernel(
    x, norm, eps, weight, bias, residual, out, num_rows,
    N: tl.constexpr, K: tl.constexpr,
    NORMED: tl.constexpr, GATED: tl.constexpr, BIASED: tl.constexpr, ADDS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PROGRAMS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """All of K in registers, for every PROGRAMS-th block of outputs.

    Weights are loaded two blocks ahead and the addends one. Loads complete in order, so an addend that is used at once
    would wait for weights that are not needed yet.
    """
    STRIDE: tl.constexpr = PROGRAMS * BLOCK_N
    STEPS: tl.constexpr = (N + STRIDE - 1) // STRIDE
    EVEN_N: tl.constexpr = N == STRIDE
    EVEN_K: tl.constexpr = K == BLOCK_K
    first = tl.program_id(0) * BLOCK_N
    n = (first + tl.arange(0, BLOCK_N))[None, :, None]
    k = tl.arange(0, BLOCK_K)[None, None, :]
    m = tl.arange(0, ROWS)[:, None, None]
    weights = weight + n.to(tl.int64) * K
    tile = _weight_tile(weights, n, k, N, K, EVEN_N, EVEN_K)
    up_tile = _weight_tile(weights + N * K, n, k, N, K, EVEN_N, EVEN_K) if GATED else tile
    next_tile, next_up_tile = tile, up_tile
    if STEPS > 1:
        after = n + STRIDE
        weights = weight + after.to(tl.int64) * K
        next_tile = _weight_tile(weights, after, k, N, K, EVEN_N, EVEN_K)
        next_up_tile = _weight_tile(weights + N * K, after, k, N, K, EVEN_N, EVEN_K) if GATED else next_tile
    if NORMED:
        scales = tl.load(norm + k, mask=k < K, other=0.0).to(tl.float32)
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    # values [ROWS, 1, BLOCK_K]
    values = tl.load(x + m * K + k, mask=(m < num_rows) & (k < K), other=0.0).to(tl.float32)
    if NORMED:
        inverse = tl.rsqrt(tl.sum(values * values, 2) / K + eps)
        values *= scales
    m = tl.arange(0, ROWS)[:, None]
    here = (first + tl.arange(0, BLOCK_N))[None, :]
    addends = _addends(bias, residual, m, here, num_rows, N, BIASED, ADDS)
    for step in range(STEPS):
        later_tile, later_up_tile = next_tile, next_up_tile
        if STEPS > 2:
            after = n + (step + 2) * STRIDE
            weights = weight + after.to(tl.int64) * K
            later_tile = _weight_tile(weights, after, k, N, K, EVEN_N, EVEN_K)
            later_up_tile = _weight_tile(weights + N * K, after, k, N, K, EVEN_N, EVEN_K) if GATED else later_tile
        here = (first + step * STRIDE + tl.arange(0, BLOCK_N))[None, :]
        next_addends = _addends(bias, residual, m, here + STRIDE, num_rows, N, BIASED, ADDS)
        # result, up [ROWS, BLOCK_N]
        result = tl.sum(tile.to(tl.float32) * values, 2)
        up = tl.sum(up_tile.to(tl.float32) * values, 2) if GATED else result
        if NORMED:
            result, up = result * inverse, up * inverse
        _finish(result, up, addends, out, m, here, num_rows, N, GATED)
        tile, next_tile = next_tile, later_tile
        up_tile, next_up_tile = next_up_tile, later_up_tile
        addends = next_addends


@triton.jit
def finish_tile(
    total, up_total, bias, residual, out, partials, counters, block, part, m, num_rows,
    N: tl.constexpr, GATED: tl.constexpr, BIASED: tl.constexpr, ADDS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Add up what programs of a block of outputs have, and finish. total, up_total [BLOCK_N, BLOCK_M]; m [BLOCK_M, 1].

    Programs that share K take the same rows: m begins at 0.
    """
    # total, up_total [BLOCK_M, BLOCK_N] from here on
    total, up_total = total.T, up_total.T
    n = (block * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    if SPLIT == 1:
        addends = _addends(bias, residual, m, n, num_rows, N, BIASED, ADDS)
        _finish(total, up_total, addends, out, m, n, num_rows, N, GATED)
    else:
        # The last program to arrive adds all parts in a fixed order, so that the sum does not depend on who was last.
        here = partials + block * (SPLIT * BLOCK_M * BLOCK_N) + m * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        tl.store(here + part * (BLOCK_M * BLOCK_N), total)
        tl.debug_barrier()
        if tl.atomic_add(counters + block, 1, sem="acq_rel") == SPLIT - 1:
            total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            for each in tl.static_range(SPLIT):
                total += tl.load(here + each * (BLOCK_M * BLOCK_N), cache_modifier=".cg")
            tl.store(counters + block, 0)
            addends = _addends(bias, residual, m, n, num_rows, N, BIASED, ADDS)
            _finish(total, up_total, addends, out, m, n, num_rows, N, GATED)


@triton.jit(do_not_specialize=["num_rows"])
def tiles_kernel(
    x, weight, bias, residual, out, partials, counters, num_rows,
    N: tl.constexpr, K: tl.constexpr, GATED: tl.constexpr, BIASED: tl.constexpr, ADDS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT: tl.constexpr, STAGES: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Tensor cores: the weights are the operand of 64 rows, the rows are the narrow one, padded to BLOCK_M."""
    # PART of K for each of the programs that share it
    PART: tl.constexpr = (K + SPLIT * BLOCK_K - 1) // (SPLIT * BLOCK_K) * BLOCK_K
    EVEN_N: tl.constexpr = N % BLOCK_N == 0
    EVEN_K: tl.constexpr = K % (SPLIT * BLOCK_K) == 0
    block, part = tl.program_id(0), tl.program_id(1)
    m = tl.arange(0, BLOCK_M)[:, None]
    n = (block * BLOCK_N + tl.arange(0, BLOCK_N))[:, None]
    k = (part * PART + tl.arange(0, BLOCK_K))[None, :]
    weights = weight + n.to(tl.int64) * K
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    up_total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for start in tl.range(0, PART, BLOCK_K, num_stages=STAGES):
        inside = (m < num_rows) & (start + k < K)
        values = tl.load(x + m * K + start + k, mask=inside, other=0.0, eviction_policy="evict_last")
        tile = _weight_tile(weights, n, start + k, N, K, EVEN_N, EVEN_K)
        total = tl.dot(tile, values.T, total, input_precision="ieee")
        if GATED:
            up_tile = _weight_tile(weights + N * K, n, start + k, N, K, EVEN_N, EVEN_K)
            up_total = tl.dot(up_tile, values.T, up_total, input_precision="ieee")
    finish_tile(
        total, up_total, bias, residual, out, partials, counters, block, part, m, num_rows,
        N, GATED, BIASED, ADDS, BLOCK_M, BLOCK_N, SPLIT,
    )  # fmt: skip


@triton.jit
def norm_kernel(x, norm, eps, out, K: tl.constexpr, BLOCK_K: tl.constexpr, EARLY: tl.constexpr):
    """One row."""
    k = tl.arange(0, BLOCK_K)
    row = tl.program_id(0).to(tl.int64) * K
    scales = tl.load(norm + k, mask=k < K, other=0.0).to(tl.float32)
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    values = tl.load(x + row + k, mask=k < K, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(values * values) / K + eps)
    tl.store(out + row + k, (values * inverse * scales).to(out.dtype.element_ty), mask=k < K)


@triton.jit
def silu_mul_kernel(gate_up, out, size, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * size
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    gate = tl.load(gate_up + 2 * row + i, mask=i < size, other=0.0).to(tl.float32)
    up = tl.load(gate_up + 2 * row + size + i, mask=i < size, other=0.0).to(tl.float32)
    tl.store(out + row + i, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=i < size)
