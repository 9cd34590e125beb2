"""The Triton kernels behind faser/runtime/cuda/quantised.py: products of rows with 8-bit floats and with codes.

Both products are tiles for tensor cores, as `tiles_kernel` of linear_kernels.py: weights are the operand of 64 rows or
more, the rows are the narrow one. A step along K takes the columns that share a scale, or fewer; the sum of a step is
exact but for float32, then multiplied by the scale. So scales cost one multiplication for each sum, not each weight,
and 8-bit sums, which tensor cores keep to fewer bits, stay short.
"""

# mypy: disable-error-code="import-untyped, import-not-found, untyped-decorator, no-untyped-def"
# ruff: noqa: N803, N806 (what a kernel is compiled for is in capitals)
from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from faser.runtime.cuda.linear_kernels import finish_tile


@triton.jit
def round_e4m3(x):
    """x, at most 448 in size, rounded to the nearest number that e4m3 has; still float32.

    A cast would do on a GPU. Triton's interpreter casts 127.7 to 64; what is rounded already it casts well. Adding and
    subtracting 1.5 * 2^(e + 20), with e the exponent of x, leaves 3 bits behind the leading one; numbers below 2^-6
    have the step of 2^-6.
    """
    exponent = x.to(tl.int32, bitcast=True) & 0x7F800000
    large = (tl.maximum(exponent, 121 << 23) + ((20 << 23) + (1 << 22))).to(tl.float32, bitcast=True)
    return (x + large) - large


@triton.jit
def round_rows_kernel(
    x, norm, eps, static, values, scales,
    K: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, NORMED: tl.constexpr, STATIC: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """One row as 8-bit floats with a scale for each GROUP columns, normalised first if NORMED."""
    GROUPS: tl.constexpr = (K + GROUP - 1) // GROUP
    group = tl.arange(0, BLOCK_K // GROUP)[:, None]
    k = group * GROUP + tl.arange(0, GROUP)[None, :]
    row = tl.program_id(0).to(tl.int64)
    if NORMED:
        weights = tl.load(norm + k, mask=k < K, other=0.0).to(tl.float32)
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    # row_values [groups, GROUP]
    row_values = tl.load(x + row * K + k, mask=k < K, other=0.0).to(tl.float32)
    if NORMED:
        inverse = tl.rsqrt(tl.sum(row_values * row_values) / K + eps)
        row_values = (row_values * inverse * weights).to(x.dtype.element_ty).to(tl.float32)
    if STATIC:
        scale = tl.zeros([BLOCK_K // GROUP, 1], tl.float32) + tl.load(static)
    else:
        scale = tl.div_rn(tl.maximum(tl.max(tl.abs(row_values), 1, keep_dims=True), 1e-10), 448.0)
    rounded = round_e4m3(tl.clamp(tl.div_rn(row_values, scale + tl.zeros_like(row_values)), -448.0, 448.0))
    tl.store(values + row * K + k, rounded.to(tl.float8e4nv), mask=k < K)
    tl.store(scales + row * GROUPS + group, scale, mask=group < GROUPS)


@triton.jit
def _prefetch(addresses):
    """Ask for what is at these pointers, to be in the L2 cache when it is loaded."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;",
        "=r,l",
        [addresses.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _prefetch_rows(weight, n, first, N: tl.constexpr, ROW_BYTES: tl.constexpr):
    """Ask for 1,024 bytes, from byte `first` on, of outputs n [BLOCK_N, 1]. They arrive while rows are computed."""
    at = tl.minimum(first + tl.arange(0, 8)[None, :] * 128, ROW_BYTES - 1)
    _prefetch(weight + tl.minimum(n, N - 1).to(tl.int64) * ROW_BYTES + at)


@triton.jit
def _weight_scales(scales, n, column, N: tl.constexpr, COLUMNS: tl.constexpr, ROWS_PER_SCALE: tl.constexpr):
    return tl.load(
        scales + n // ROWS_PER_SCALE * COLUMNS + column, mask=(n < N) & (column + 0 * n < COLUMNS), other=0.0
    )


@triton.jit
def _fp8_tile(weights, n, k, N: tl.constexpr, K: tl.constexpr, EVEN: tl.constexpr):
    if EVEN:
        return tl.load(weights, eviction_policy="evict_first")
    return tl.load(weights, mask=(n < N) & (k < K), other=0.0, eviction_policy="evict_first")


@triton.jit(do_not_specialize=["num_rows"])
def fp8_tiles_kernel(
    x, x_scales, weight, scales, bias, residual, out, partials, counters, num_rows,
    N: tl.constexpr, K: tl.constexpr, GATED: tl.constexpr, BIASED: tl.constexpr, ADDS: tl.constexpr,
    ROWS_PER_SCALE: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT: tl.constexpr, STAGES: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """x [R, K] and weight in e4m3. COLUMNS scales along K, of rows and weights: 1, or one for each BLOCK_K columns.

    Gate and up are one matrix [2 * N, K]; N is a multiple of ROWS_PER_SCALE there.
    """
    PART: tl.constexpr = (K + SPLIT * BLOCK_K - 1) // (SPLIT * BLOCK_K) * BLOCK_K
    EVEN: tl.constexpr = N % BLOCK_N == 0 and K % (SPLIT * BLOCK_K) == 0
    UP_SCALES: tl.constexpr = N // ROWS_PER_SCALE * COLUMNS
    block, part = tl.program_id(1), tl.program_id(2)
    m = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]
    n = (block * BLOCK_N + tl.arange(0, BLOCK_N))[:, None]
    k = tl.arange(0, BLOCK_K)[None, :]
    weights = weight + n.to(tl.int64) * K
    up_weights = weights + N * K
    # Scales are loaded one step ahead: the compiler moves only those loads ahead that a product of tensor cores reads,
    # and none in a loop that carries a value over two steps.
    column = 0 if COLUMNS == 1 else part * (PART // BLOCK_K)
    scale = _weight_scales(scales, n, column, N, COLUMNS, ROWS_PER_SCALE)
    up_scale = _weight_scales(scales + UP_SCALES, n, column, N, COLUMNS, ROWS_PER_SCALE) if GATED else scale
    if EARLY:
        gdc_launch_dependents()
        _prefetch_rows(weight, n, part * PART, N, K)
        if GATED:
            _prefetch_rows(weight + N * K, n, part * PART, N, K)
        gdc_wait()
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    up_total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    row_scales = x_scales + (tl.arange(0, BLOCK_M)[None, :] + tl.program_id(0) * BLOCK_M) * COLUMNS
    is_scale = tl.arange(0, BLOCK_M)[None, :] + tl.program_id(0) * BLOCK_M < num_rows
    for start in tl.range(part * PART, part * PART + PART, BLOCK_K, num_stages=STAGES):
        here = start + k
        if COLUMNS > 1:
            column = start // BLOCK_K
            row_scale = tl.load(row_scales + tl.minimum(column, COLUMNS - 1), mask=is_scale, other=0.0)
            next_scale = _weight_scales(scales, n, column + 1, N, COLUMNS, ROWS_PER_SCALE)
        values = tl.load(
            x + m.to(tl.int64) * K + here, mask=(m < num_rows) & (here < K), other=0.0, eviction_policy="evict_last"
        )
        sums = tl.dot(_fp8_tile(weights + here, n, here, N, K, EVEN), values.T)
        if COLUMNS > 1:
            sums *= scale * row_scale
            scale = next_scale
        total += sums
        if GATED:
            up_sums = tl.dot(_fp8_tile(up_weights + here, n, here, N, K, EVEN), values.T)
            if COLUMNS > 1:
                up_sums *= up_scale * row_scale
                up_scale = _weight_scales(scales + UP_SCALES, n, column + 1, N, COLUMNS, ROWS_PER_SCALE)
            up_total += up_sums
    if COLUMNS == 1:
        row_scale = tl.load(row_scales, mask=is_scale, other=0.0)
        total *= scale * row_scale
        up_total *= up_scale * row_scale
    finish_tile(
        total, up_total, bias, residual, out, partials, counters, block, part, m, num_rows,
        N, GATED, BIASED, ADDS, BLOCK_M, BLOCK_N, SPLIT,
    )  # fmt: skip


# Four bytes -> the codes in their low halves and in their high halves, less 8, as two pairs of bfloat16 each. A byte
# below 0x43 is the bfloat16 128 + code, once the other half is masked out: one or two instructions for each weight.
_HALVES: tl.constexpr = tl.constexpr("""
{
    .reg .b32 first, second, high_first, high_second, one, base;
    mov.b32 one, 0x3F803F80;
    mov.b32 base, 0xC308C308;
    prmt.b32 first, $4, 0x43434343, 0x4140;
    prmt.b32 second, $4, 0x43434343, 0x4342;
    shr.u32 high_first, first, 4;
    shr.u32 high_second, second, 4;
    lop3.b32 first, first, 0xFF0FFF0F, 0, 0xC0;
    lop3.b32 second, second, 0xFF0FFF0F, 0, 0xC0;
    lop3.b32 high_first, high_first, 0x000F000F, 0x43004300, 0xEA;
    lop3.b32 high_second, high_second, 0x000F000F, 0x43004300, 0xEA;
    fma.rn.bf16x2 $0, first, one, base;
    fma.rn.bf16x2 $1, second, one, base;
    fma.rn.bf16x2 $2, high_first, one, base;
    fma.rn.bf16x2 $3, high_second, one, base;
}
""")


@triton.jit
def _halves(packed, dtype: tl.constexpr, FAST: tl.constexpr):
    """Bytes [N, RUN] -> codes of their low and of their high halves, less 8, in `dtype`."""
    if FAST:
        return tl.inline_asm_elementwise(
            _HALVES, "=r,=r,=r,=r,r", [packed], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
        )
    return ((packed & 15).to(dtype) - 8).to(dtype), ((packed >> 4).to(dtype) - 8).to(dtype)


@triton.jit
def _by_output(values, group, n, N: tl.constexpr, ALL: tl.constexpr, GROUPS: tl.constexpr):
    """Of one group, for outputs n [BLOCK_N, 1]; `values` is [GROUPS, ALL]."""
    return tl.load(values + group * ALL + n, mask=(n < N) & (group + 0 * n < GROUPS), other=0)


@triton.jit
def _scales_of_part(scales, group, n, N: tl.constexpr, ALL: tl.constexpr, GROUPS: tl.constexpr, COUNT: tl.constexpr):
    """Pointers to the scales of COUNT groups."""
    groups = tl.minimum(group + tl.arange(0, triton.next_power_of_2(COUNT))[None, :], GROUPS - 1)
    return scales + groups * ALL + tl.minimum(n, N - 1)


@triton.jit
def _weights(
    tile, scale, zeros, minimums, group, n,
    N: tl.constexpr, ALL: tl.constexpr, GROUPS: tl.constexpr, CENTRE: tl.constexpr, ZERO: tl.constexpr,
    HAS_ZEROS: tl.constexpr, HAS_MINIMUMS: tl.constexpr,
):  # fmt: skip
    """Codes less CENTRE -> codes less their zero point; whole weights if there are minimums, which no scale follows."""
    if HAS_ZEROS:
        tile = (tile - (_by_output(zeros, group, n, N, ALL, GROUPS).to(tile.dtype) - CENTRE)).to(tile.dtype)
    elif ZERO != CENTRE:
        tile = (tile - (ZERO - CENTRE)).to(tile.dtype)
    if HAS_MINIMUMS:
        minimum = _by_output(minimums, group, n, N, ALL, GROUPS).to(tl.float32)
        tile = (tile.to(tl.float32) * scale.to(tl.float32) + minimum).to(tile.dtype)
    return tile


@triton.jit
def _add_step(
    total, packed, values, high_values, scale, scales, zeros, minimums, group, high_group, n,
    N: tl.constexpr, ALL: tl.constexpr, GROUPS: tl.constexpr, BITS: tl.constexpr, ZERO: tl.constexpr,
    HAS_ZEROS: tl.constexpr, HAS_MINIMUMS: tl.constexpr, IS_ONE_GROUP: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """total + the weights of a step @ values^T. `scale` is that of `group`."""
    CENTRE: tl.constexpr = 8 if BITS == 4 else 128
    if BITS == 4:
        low, high = _halves(packed, values.dtype, FAST)
    else:
        low = (packed.to(values.dtype) - CENTRE).to(values.dtype)
    low = _weights(low, scale, zeros, minimums, group, n, N, ALL, GROUPS, CENTRE, ZERO, HAS_ZEROS, HAS_MINIMUMS)
    sums = tl.dot(low, values.T, input_precision="ieee")
    if BITS == 4:
        high_scale = scale if IS_ONE_GROUP else _by_output(scales, high_group, n, N, ALL, GROUPS)
        high = _weights(
            high, high_scale, zeros, minimums, high_group, n,
            N, ALL, GROUPS, CENTRE, ZERO, HAS_ZEROS, HAS_MINIMUMS,
        )  # fmt: skip
        if IS_ONE_GROUP or HAS_MINIMUMS:
            sums = tl.dot(high, high_values.T, sums, input_precision="ieee")
        else:
            total += tl.dot(high, high_values.T, input_precision="ieee") * high_scale.to(tl.float32)
    return total + sums if HAS_MINIMUMS else total + sums * scale.to(tl.float32)


@triton.jit
def _bytes(codes, n, N: tl.constexpr, EVEN: tl.constexpr):
    if EVEN:
        return tl.load(codes, eviction_policy="evict_first")
    return tl.load(codes, mask=n < N, other=0, eviction_policy="evict_first")


@triton.jit(do_not_specialize=["num_rows"])
def group_tiles_kernel(
    x, codes, scales, zeros, minimums, bias, residual, out, partials, counters, num_rows,
    N: tl.constexpr, K: tl.constexpr, GATED: tl.constexpr, BIASED: tl.constexpr, ADDS: tl.constexpr,
    BITS: tl.constexpr, GROUP: tl.constexpr, RUN: tl.constexpr, ZERO: tl.constexpr,
    HAS_ZEROS: tl.constexpr, HAS_MINIMUMS: tl.constexpr, FAST: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Codes in the order of `TiledMatrix`: a step takes RUN bytes of each output, one or two codes in each."""
    STEP: tl.constexpr = RUN * 8 // BITS  # columns
    STEPS: tl.constexpr = K // STEP
    PART: tl.constexpr = (STEPS + SPLIT - 1) // SPLIT
    EVEN: tl.constexpr = N % BLOCK_N == 0
    ALL: tl.constexpr = N * (2 if GATED else 1)  # outputs that the matrix has
    GROUPS: tl.constexpr = K // GROUP
    IS_ONE_GROUP: tl.constexpr = GROUP % STEP == 0  # of a step
    ROW_BYTES: tl.constexpr = STEPS * RUN
    block, part = tl.program_id(1), tl.program_id(2)
    m = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]
    n = (block * BLOCK_N + tl.arange(0, BLOCK_N))[:, None]
    run = tl.arange(0, RUN)[None, :]
    bytes_at = codes + n.to(tl.int64) * ROW_BYTES + run
    up_bytes_at = bytes_at + N * ROW_BYTES
    rows, is_row = x + m.to(tl.int64) * K + run, m < num_rows
    first = part * PART
    # Scales are loaded one step ahead, as in fp8_tiles_kernel.
    scale = _by_output(scales, first * STEP // GROUP, n, N, ALL, GROUPS)
    up_scale = _by_output(scales + N, first * STEP // GROUP, n, N, ALL, GROUPS) if GATED else scale
    if EARLY:
        gdc_launch_dependents()
        _prefetch_rows(codes, n, first * RUN, N, ROW_BYTES)
        _prefetch(_scales_of_part(scales, first * STEP // GROUP, n, N, ALL, GROUPS, PART * STEP // GROUP + 1))
        if GATED:
            _prefetch_rows(codes + N * ROW_BYTES, n, first * RUN, N, ROW_BYTES)
            _prefetch(_scales_of_part(scales + N, first * STEP // GROUP, n, N, ALL, GROUPS, PART * STEP // GROUP + 1))
        gdc_wait()
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    up_total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for step in tl.range(first, tl.minimum(first + PART, STEPS), num_stages=STAGES):
        next_scale = _by_output(scales, (step + 1) * STEP // GROUP, n, N, ALL, GROUPS)
        values = tl.load(rows + step * STEP, mask=is_row, other=0.0, eviction_policy="evict_last")
        high_values = values
        if BITS == 4:
            high_values = tl.load(rows + step * STEP + RUN, mask=is_row, other=0.0, eviction_policy="evict_last")
        group, high_group = step * STEP // GROUP, (step * STEP + RUN) // GROUP
        packed = _bytes(bytes_at + step * RUN, n, N, EVEN)
        total = _add_step(
            total, packed, values, high_values, scale, scales, zeros, minimums, group, high_group, n,
            N, ALL, GROUPS, BITS, ZERO, HAS_ZEROS, HAS_MINIMUMS, IS_ONE_GROUP, FAST,
        )  # fmt: skip
        scale = next_scale
        if GATED:
            next_up_scale = _by_output(scales + N, (step + 1) * STEP // GROUP, n, N, ALL, GROUPS)
            up_packed = _bytes(up_bytes_at + step * RUN, n, N, EVEN)
            up_total = _add_step(
                up_total, up_packed, values, high_values, up_scale, scales + N, zeros + N, minimums + N,
                group, high_group, n,
                N, ALL, GROUPS, BITS, ZERO, HAS_ZEROS, HAS_MINIMUMS, IS_ONE_GROUP, FAST,
            )  # fmt: skip
            up_scale = next_up_scale
    finish_tile(
        total, up_total, bias, residual, out, partials, counters, block, part, m, num_rows,
        N, GATED, BIASED, ADDS, BLOCK_M, BLOCK_N, SPLIT,
    )  # fmt: skip


@triton.jit
def _store_run(
    out, tile, scales, zeros, minimums, at, is_output,
    ZERO: tl.constexpr, HAS_ZEROS: tl.constexpr, HAS_MINIMUMS: tl.constexpr,
):  # fmt: skip
    zero = tl.load(zeros + at, mask=is_output, other=0).to(tl.float32) if HAS_ZEROS else ZERO
    result = (tile.to(tl.float32) - zero) * tl.load(scales + at, mask=is_output, other=0.0).to(tl.float32)
    if HAS_MINIMUMS:
        result += tl.load(minimums + at, mask=is_output, other=0.0).to(tl.float32)
    tl.store(out, result.to(out.dtype.element_ty), mask=is_output)


@triton.jit(do_not_specialize=["first", "num_outputs"])
def dequantise_kernel(
    codes, scales, zeros, minimums, out, first, num_outputs,
    N: tl.constexpr, K: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, RUN: tl.constexpr, ZERO: tl.constexpr,
    HAS_ZEROS: tl.constexpr, HAS_MINIMUMS: tl.constexpr, BLOCK_N: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """RUN bytes of some outputs into out [num_outputs, K], whose first one is `first` of the matrix."""
    STEP: tl.constexpr = RUN * 8 // BITS
    row = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N))[:, None].to(tl.int64)
    step, run = tl.program_id(1), tl.arange(0, RUN)[None, :]
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    is_output = row < num_outputs
    packed = tl.load(codes + (first + row) * (K // STEP * RUN) + step * RUN + run, mask=is_output, other=0)
    at = step * STEP // GROUP * N + first + row
    here = out + row * K + step * STEP + run
    if BITS == 4:
        _store_run(here, packed & 15, scales, zeros, minimums, at, is_output, ZERO, HAS_ZEROS, HAS_MINIMUMS)
        at = (step * STEP + RUN) // GROUP * N + first + row
        _store_run(here + RUN, packed >> 4, scales, zeros, minimums, at, is_output, ZERO, HAS_ZEROS, HAS_MINIMUMS)
    else:
        _store_run(here, packed, scales, zeros, minimums, at, is_output, ZERO, HAS_ZEROS, HAS_MINIMUMS)
