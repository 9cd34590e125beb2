"""The matrix products of a decoder at few rows, as Triton kernels that read each weight once, near memory speed.

Knows weights [N, K] row-major, rows [R, K], norms and the gated MLP, and which kernel is fastest for how many rows on
an H200. Knows nothing of models, layers, attention or graphs. Launches depend on shapes alone, wait for nothing and
allocate nothing, so they can be captured in CUDA graphs.

Three kernels and cuBLAS share the work:

  chunks   1 or 2 rows. A program takes a few outputs and walks along K.
  walk     1 to 4 rows. The rows stay in registers, normalised once, and a fixed number of programs walks along N.
  tiles    1 to 64 rows, tensor cores. Programs of a residual product may split K, and the last one adds up.
  cublas   the rest, behind small kernels for norm and activation.

Every kernel is launched with programmatic dependent launch: it starts while the one before it still runs, loads its
first weights, and only then waits for the rows (`gdc_wait`). It lets the kernel after it do the same. Whatever else
is launched so must wait too, because a kernel relies on the one before it having waited for all earlier ones. A plain
launch in between is always safe, but gives that overlap away.
"""

# mypy: disable-error-code="import-untyped, import-not-found, untyped-decorator, no-untyped-def"
# ruff: noqa: N803, N806 (what a kernel is compiled for is in capitals)
from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.runtime import driver

from faser.errors import ConfigError

# What is done around the product: a norm before it; a norm before and silu(gate) * up behind it; a residual added; a
# norm before it and many more outputs than any other.
Product = Literal["norm", "gate_up", "residual", "head"]

TILE_ROWS = 64  # the most rows of `tiles`
NUM_SMS = 132  # of an H200
MAX_SPLIT_PROGRAMS = 2 * NUM_SMS  # programs that share K in `tiles`: an H200 takes them in one go
H200_SHARED_BYTES = 227 * 1024
REGISTERS_PER_SM = 65536


# ---- configuration: which kernel, and how it is cut up ----


@dataclass(frozen=True)
class Plan:
    """One way to compute a product. A program of `chunks` takes block_n outputs; one of `walk`, block_n at a time."""

    kernel: Literal["chunks", "walk", "tiles", "cublas"]
    block_n: int = 0
    block_k: int = 0  # walk: all of K
    num_warps: int = 4
    programs: int = 0  # walk
    per_sm: int = 0  # chunks, walk: programs an SM must have the registers for; 0: as many as it happens to have
    split: int = 1  # tiles: programs that share K
    num_stages: int = 1  # tiles: loads in flight


CUBLAS = Plan("cublas")


@dataclass(frozen=True)
class Workspace:
    """Where programs that split K meet. Forwards that may run at the same time need one each."""

    partials: Tensor  # float32 [MAX_SPLIT_PROGRAMS * 64 * TILE_ROWS]
    counters: Tensor  # int32 [MAX_SPLIT_PROGRAMS]; zero between launches

    @classmethod
    def allocate(cls, device: torch.device | str) -> Workspace:
        return cls(
            torch.empty(MAX_SPLIT_PROGRAMS * 64 * TILE_ROWS, dtype=torch.float32, device=device),
            torch.zeros(MAX_SPLIT_PROGRAMS, dtype=torch.int32, device=device),
        )


@lru_cache(maxsize=4096)
def choose(
    product: Product, num_rows: int, n: int, k: int, dtype: torch.dtype, can_split: bool = True, num_sms: int = 0
) -> Plan:
    """The fastest known plan, measured on an H200 in layers of the shapes of six models of 0.6B to 70B.

    Where two are about as fast, not `tiles`: the others load weights while the kernel before them still runs.

    n is the number of outputs (of the MLP's gate alone). Without a workspace nothing is split. On a part of the device
    of num_sms SMs fewer programs run at once.
    """
    num_sms = num_sms or NUM_SMS
    if dtype is torch.float32:
        return _chunks(4, min(1024, _power(k)), 4) if num_rows == 1 else CUBLAS
    if num_rows == 1:
        plan = _for_one_row(product, n, k, num_sms)
    elif num_rows == 2:
        plan = _for_two_rows(product, n, k, num_sms)
    elif num_rows <= 4 and product == "norm" and 1024 < k <= 2048:
        plan = _walk(2, k, 4, 384, n, num_sms)
    else:
        plan = None
    if plan is None and num_rows <= TILE_ROWS:
        plan = _for_few_rows(product, num_rows, n, k, can_split, num_sms)
    return plan or CUBLAS


def _for_one_row(product: Product, n: int, k: int, num_sms: int) -> Plan | None:
    """None: as for a few."""
    if k <= 1024:
        return _chunks(4, _power(k), 4)
    if product == "residual":
        if k <= 2048:
            return _walk(4, k, 4, n, n, num_sms)
        if k <= 4096:
            return _walk(2, k, 4, 264, n, num_sms) if n <= 2048 else _chunks(4, 1024, 4, 8)
        if k <= 8192:
            return _walk(1, k, 8, 264, n, num_sms) if n < 4096 else _walk(2, k, 8, 132, n, num_sms)
        return _chunks(2, 2048, 8, 4) if k <= 16384 else None
    if product == "gate_up":
        if k <= 2048:
            return _chunks(2, 1024, 4, 8)
        if k <= 6144:
            return _walk(1, k, 4, 396, n, num_sms) if k <= 4096 else _walk(1, k, 8, 264, n, num_sms)
        return None
    if product == "head":
        return _chunks(4, 2048, 8, 5) if k <= 2048 else None
    if k <= 2048:
        return _chunks(4, 1024, 4, 7)
    return _walk(2, k, 4, 396, n, num_sms) if k <= 4096 else _norm_by_walk(n, k, num_sms)


def _for_two_rows(product: Product, n: int, k: int, num_sms: int) -> Plan | None:
    """None: as for a few."""
    if product == "head":
        return None
    if k <= 1024:
        return _chunks(4, _power(k), 4)
    if product == "gate_up":
        if k <= 2048:
            return _walk(1, k, 4, 528, n, num_sms)
        return _walk(1, k, 8, 264, n, num_sms) if k == 4096 else None  # of 3,584 an eighth of the registers lies idle
    if product == "residual":
        if k <= 4096:
            return _walk(2, k, 4, 396 if k <= 2048 else 264, n, num_sms)
        if k <= 8192:
            return _walk(1, k, 8, 264, n, num_sms) if n < 4096 else None
        return _chunks(4, 1024, 4) if k <= 16384 else None
    return _walk(2, k, 4, 384, n, num_sms) if k <= 2048 else _norm_by_walk(n, k, num_sms)


def _norm_by_walk(n: int, k: int, num_sms: int) -> Plan | None:
    """More outputs at a time would not fit into registers."""
    return _walk(2 if k <= 6144 else 1, k, 8, 264, n, num_sms) if k <= 8192 else None


def _for_few_rows(product: Product, num_rows: int, n: int, k: int, can_split: bool, num_sms: int) -> Plan:
    num_blocks = triton.cdiv(n, 64)
    if product == "head":
        return Plan("tiles", 64, 128, num_stages=4 if num_rows <= 32 else 3)
    if product == "gate_up":
        if num_rows > 32:
            return Plan("tiles", 64, 64, num_stages=8)
        # an SM has room for one program: where the last round is of a few, more loads in flight make up for it
        is_lonely = num_blocks > num_sms and 0 < num_blocks % num_sms <= num_sms // 8
        return Plan("tiles", 64, 128, num_stages=5 if is_lonely else 4)
    if product == "norm":
        if num_rows > 32:
            return CUBLAS
        few, more = (8, 3) if num_rows <= 16 else (5, 4)
        return Plan("tiles", 64, 128, num_stages=few if num_blocks <= num_sms else more)
    return _residual_tiles(num_rows, num_blocks, k, num_sms) if can_split else CUBLAS


def _residual_tiles(num_rows: int, num_blocks: int, k: int, num_sms: int) -> Plan:
    """A program for nearly every SM, or nearly two: with one for some and two for others, those wait for these."""
    block_k, num_stages = (256, 3) if num_rows <= 32 else (128, 4)
    split = num_sms // num_blocks
    if split * num_blocks < 0.7 * num_sms:
        block_k, num_stages = 128, 4 if num_rows <= 32 else 3
        split = 2 * num_sms // num_blocks
    elif split * block_k >= k:  # two loads, not one, hide behind one another
        block_k, num_stages = 128, 4
    split = max(1, min(split, k // block_k, MAX_SPLIT_PROGRAMS // num_blocks))
    return Plan("tiles", 64, block_k, split=split, num_stages=num_stages)


def _chunks(block_n: int, block_k: int, num_warps: int, per_sm: int = 0) -> Plan:
    return Plan("chunks", block_n, block_k, num_warps, per_sm=per_sm)


def _walk(block_n: int, k: int, num_warps: int, programs: int, n: int, num_sms: int = NUM_SMS) -> Plan:
    """As many programs an SM as `programs` are on the whole device. Those that take several steps must run at once."""
    num_blocks, per_sm = triton.cdiv(n, block_n), 0
    if programs < num_blocks:
        programs = max(1, programs * num_sms // NUM_SMS)
        per_sm = triton.cdiv(programs, num_sms)
    return Plan("walk", block_n, _power(k), num_warps, min(programs, num_blocks), per_sm)


def _power(size: int) -> int:
    return max(16, triton.next_power_of_2(size))


# ---- the products ----


def norm_linear(
    x: Tensor,
    norm_weight: Tensor,
    eps: float,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    normed: Tensor,
    workspace: Workspace | None = None,
    plan: Plan | None = None,
    num_sms: int = 0,
) -> None:
    """out = rms_norm(x) @ weight^T + bias. x [R, K], weight [N, K], out [R, N]; normed [R, K] is scratch."""
    plan = plan or choose("norm", *_shape(x, weight), weight.dtype, num_sms=num_sms)
    if plan.kernel in ("chunks", "walk"):
        _launch_rows(plan, x, weight, out, norm=norm_weight, eps=eps, bias=bias)
        return
    rms_norm(x, norm_weight, eps, normed)
    if plan.kernel == "tiles":
        _launch_tiles(plan, normed, weight, out, bias=bias, workspace=workspace)
    elif bias is not None:
        torch.addmm(bias, normed, weight.t(), out=out)
    else:
        torch.mm(normed, weight.t(), out=out)


def norm_head(
    x: Tensor,
    norm_weight: Tensor,
    eps: float,
    head: Tensor,
    out: Tensor,
    normed: Tensor,
    plan: Plan | None = None,
    num_sms: int = 0,
) -> None:
    """out = rms_norm(x) @ head^T, in float32 if out is. x [R, K], head [V, K], out [R, V]; normed [R, K] is scratch."""
    plan = plan or choose("head", *_shape(x, head), head.dtype, num_sms=num_sms)
    if plan.kernel in ("chunks", "walk"):
        _launch_rows(plan, x, head, out, norm=norm_weight, eps=eps)
        return
    rms_norm(x, norm_weight, eps, normed)
    if plan.kernel == "tiles":
        _launch_tiles(plan, normed, head, out)
    elif out.dtype is head.dtype:
        torch.mm(normed, head.t(), out=out)
    else:
        torch.mm(normed, head.t(), out_dtype=out.dtype, out=out)


def norm_gate_up(
    x: Tensor,
    norm_weight: Tensor,
    eps: float,
    weight: Tensor,
    out: Tensor,
    normed: Tensor,
    gate_up: Tensor,
    plan: Plan | None = None,
    num_sms: int = 0,
) -> None:
    """out = silu(gate) * up, where [gate | up] = rms_norm(x) @ weight^T.

    x [R, K], weight [2 * I, K], out [R, I]; normed [R, K] and gate_up [R, 2 * I] are scratch.
    """
    num_rows, num_weights, k = _shape(x, weight)
    plan = plan or choose("gate_up", num_rows, num_weights // 2, k, weight.dtype, num_sms=num_sms)
    if plan.kernel in ("chunks", "walk"):
        _launch_rows(plan, x, weight, out, norm=norm_weight, eps=eps, gated=True)
        return
    rms_norm(x, norm_weight, eps, normed)
    if plan.kernel == "tiles":
        _launch_tiles(plan, normed, weight, out, gated=True)
    else:
        torch.mm(normed, weight.t(), out=gate_up)
        silu_mul(gate_up, out)


def linear_residual(
    x: Tensor,
    weight: Tensor,
    residual: Tensor,
    bias: Tensor | None = None,
    workspace: Workspace | None = None,
    plan: Plan | None = None,
    num_sms: int = 0,
) -> None:
    """residual += x @ weight^T + bias, in place. x [R, K], weight [N, K], residual [R, N]."""
    plan = plan or choose("residual", *_shape(x, weight), weight.dtype, workspace is not None, num_sms)
    if plan.kernel in ("chunks", "walk"):
        _launch_rows(plan, x, weight, residual, bias=bias, residual=residual)
    elif plan.kernel == "tiles":
        _launch_tiles(plan, x, weight, residual, bias=bias, residual=residual, workspace=workspace)
    else:
        torch.addmm(residual, x, weight.t(), out=residual)
        if bias is not None:
            residual.add_(bias)


# ---- around cuBLAS ----


def rms_norm(x: Tensor, norm_weight: Tensor, eps: float, out: Tensor) -> None:
    """out = x / sqrt(mean(x^2) + eps) * norm_weight, row by row. x, out [R, K]."""
    _contiguous(x, out, norm_weight)
    num_rows, k = x.shape
    block = triton.next_power_of_2(k)
    _norm_kernel[(num_rows,)](
        x, norm_weight, eps, out, K=k, BLOCK_K=block, num_warps=min(8, max(1, block // 256)), **_dependent_launch(x)
    )


def silu_mul(gate_up: Tensor, out: Tensor) -> None:
    """out = silu(gate) * up. gate_up [R, 2 * I], out [R, I]."""
    _contiguous(gate_up, out)
    num_rows, size = out.shape
    block = min(1024, triton.next_power_of_2(size))
    grid = (num_rows, triton.cdiv(size, block))
    _silu_mul_kernel[grid](gate_up, out, size, BLOCK=block, **_dependent_launch(out))


# ---- launches ----


def _shape(x: Tensor, weight: Tensor) -> tuple[int, int, int]:
    """R, N, K."""
    return x.shape[0], weight.shape[0], weight.shape[1]


def _contiguous(*tensors: Tensor | None) -> None:
    if not all(each is None or each.is_contiguous() for each in tensors):
        raise ConfigError("the kernels of faser.runtime.cuda.linear take contiguous tensors: call .contiguous() first")


def _dependent_launch(tensor: Tensor) -> dict[str, Any]:
    """Launch options. Programmatic dependent launch needs compute capability 9."""
    early = tensor.is_cuda and _compute_capability(tensor.device) >= (9, 0)
    return {"EARLY": early, "launch_pdl": True} if early else {"EARLY": False}


@lru_cache(maxsize=16)
def _compute_capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def stage_bytes(plan: Plan, num_rows: int, gated: bool, element_size: int) -> int:
    """Shared memory that one load in flight of `tiles` takes."""
    return (_padded(num_rows) + (1 + gated) * plan.block_n) * plan.block_k * element_size


def _padded(num_rows: int) -> int:
    """The narrowest operand of a tensor core."""
    return max(16, triton.next_power_of_2(num_rows))


@lru_cache(maxsize=16)
def _shared_bytes(device: torch.device) -> int:
    """Shared memory of a program: less on smaller GPUs than plans were made for, and they load less ahead."""
    if device.type != "cuda":
        return H200_SHARED_BYTES
    return int(driver.active.utils.get_device_properties(device.index)["max_shared_mem"])


def _launch_rows(
    plan: Plan,
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    gated: bool = False,
) -> None:
    _contiguous(x, weight, out, norm, bias, residual)
    num_rows, num_weights, k = _shape(x, weight)
    n = num_weights // 2 if gated else num_weights
    walks = plan.kernel == "walk"
    kernel, grid = (_walk_kernel, plan.programs) if walks else (_chunks_kernel, triton.cdiv(n, plan.block_n))
    extra = {"PROGRAMS": plan.programs} if walks else {}
    kernel[(grid,)](
        x, x if norm is None else norm, eps, weight, x if bias is None else bias,
        x if residual is None else residual, out, num_rows,
        N=n, K=k, NORMED=norm is not None, GATED=gated, BIASED=bias is not None, ADDS=residual is not None,
        ROWS=triton.next_power_of_2(num_rows), BLOCK_N=plan.block_n, BLOCK_K=plan.block_k, **extra,
        num_warps=plan.num_warps, **_dependent_launch(x), **_register_limit(plan, x),
    )  # fmt: skip


def _register_limit(plan: Plan, x: Tensor) -> dict[str, int]:
    if not plan.per_sm or not x.is_cuda:
        return {}
    return {"maxnreg": min(255, REGISTERS_PER_SM // (plan.per_sm * plan.num_warps * 32) // 8 * 8)}


def _launch_tiles(
    plan: Plan,
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    gated: bool = False,
    workspace: Workspace | None = None,
) -> None:
    _contiguous(x, weight, out, bias, residual)
    num_rows, num_weights, k = _shape(x, weight)
    n = num_weights // 2 if gated else num_weights
    num_blocks = triton.cdiv(n, plan.block_n)
    assert num_rows <= TILE_ROWS
    assert plan.split == 1 or (workspace is not None and num_blocks * plan.split <= MAX_SPLIT_PROGRAMS and not gated)
    partials, counters = (x, x) if workspace is None else (workspace.partials, workspace.counters)
    most_stages = _shared_bytes(x.device) // stage_bytes(plan, num_rows, gated, weight.element_size())
    _tiles_kernel[(num_blocks, plan.split)](
        x, weight, x if bias is None else bias, x if residual is None else residual, out, partials, counters, num_rows,
        N=n, K=k, GATED=gated, BIASED=bias is not None, ADDS=residual is not None,
        BLOCK_M=_padded(num_rows), BLOCK_N=plan.block_n, BLOCK_K=plan.block_k, SPLIT=plan.split,
        STAGES=min(plan.num_stages, max(1, most_stages)),
        num_warps=plan.num_warps, **_dependent_launch(x),
    )  # fmt: skip


# ---- kernels ----


@triton.jit
def _weight_tile(rows, n, k, N: tl.constexpr, K: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr):
    """Weights at rows n, to which `rows` points, and columns k. Each is read once: no need to keep it cached."""
    if EVEN_N and EVEN_K:
        return tl.load(rows + k, eviction_policy="evict_first")
    mask = n < N if EVEN_K else (n < N) & (k < K)
    return tl.load(rows + k, mask=mask, other=0.0, eviction_policy="evict_first")


@triton.jit
def _addends(bias, residual, m, n, num_rows, N: tl.constexpr, BIASED: tl.constexpr, ADDS: tl.constexpr):
    """What is added to the product, float32 [M, N of the block] or less. m [M, 1]; n [1, N of the block]."""
    result = tl.zeros([1, 1], tl.float32)
    if BIASED:
        result += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)
    if ADDS:
        result += tl.load(residual + m * N + n, mask=(m < num_rows) & (n < N), other=0.0).to(tl.float32)
    return result


@triton.jit
def _finish(result, up, addends, out, m, n, num_rows, N: tl.constexpr, GATED: tl.constexpr):
    """What follows the product. result, up float32 [M, N of the block]; m [M, 1]; n [1, N of the block]."""
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
def _chunks_kernel(
    x, norm, eps, weight, bias, residual, out, num_rows,
    N: tl.constexpr, K: tl.constexpr,
    NORMED: tl.constexpr, GATED: tl.constexpr, BIASED: tl.constexpr, ADDS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Some outputs of all rows, a chunk of K at a time; the next chunk's weights are loaded before this one's sums.

    The inverse root of the mean square is one factor per row, so it waits for the end.
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
def _walk_kernel(
    x, norm, eps, weight, bias, residual, out, num_rows,
    N: tl.constexpr, K: tl.constexpr,
    NORMED: tl.constexpr, GATED: tl.constexpr, BIASED: tl.constexpr, ADDS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PROGRAMS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """All of K in registers, for every PROGRAMS-th block of outputs.

    Weights are loaded two blocks ahead and the addends one: a load is not done before those issued ahead of it are, so
    one that is used at once would wait for weights that are not needed yet.
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


@triton.jit(do_not_specialize=["num_rows"])
def _tiles_kernel(
    x, weight, bias, residual, out, partials, counters, num_rows,
    N: tl.constexpr, K: tl.constexpr, GATED: tl.constexpr, BIASED: tl.constexpr, ADDS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT: tl.constexpr, STAGES: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Tensor cores: the weights are the 64-row operand, the few rows the narrow one, padded to BLOCK_M."""
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
    # total, up_total [BLOCK_M, BLOCK_N] from here on
    total, up_total = total.T, up_total.T
    n = (block * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    if SPLIT == 1:
        addends = _addends(bias, residual, m, n, num_rows, N, BIASED, ADDS)
        _finish(total, up_total, addends, out, m, n, num_rows, N, GATED)
    else:
        # The last program to arrive adds all parts up, in their order, so that the sum does not depend on who was last.
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


@triton.jit
def _norm_kernel(x, norm, eps, out, K: tl.constexpr, BLOCK_K: tl.constexpr, EARLY: tl.constexpr):
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
def _silu_mul_kernel(gate_up, out, size, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * size
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    gate = tl.load(gate_up + 2 * row + i, mask=i < size, other=0.0).to(tl.float32)
    up = tl.load(gate_up + 2 * row + size + i, mask=i < size, other=0.0).to(tl.float32)
    tl.store(out + row + i, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=i < size)
