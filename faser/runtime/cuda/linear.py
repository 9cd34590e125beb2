"""The matrix products of a decoder at few rows, as Triton kernels that read each weight once, near memory speed.

Knows weights [N, K] row-major, rows [R, K], norms and the gated MLP. Knows nothing of models, layers, attention or
graphs. Launches depend on shapes alone, wait for nothing and allocate nothing, so they can be captured in CUDA graphs.

Three kernels (linear_kernels.py) and cuBLAS share the work; linear_plans.py knows which is fastest:

  chunks      1 or 2 rows. A program takes a few outputs and moves along K.
  persistent  1 to 4 rows. The rows stay in registers, normalised once; a fixed number of programs moves along N.
  tiles       1 to 64 rows, tensor cores. Programs of a residual product may split K, and the last one adds up.
  cublas      the rest, behind small kernels for norm and activation.

Products with quantised weights are in quantised.py: the same functions take them.

Every kernel is launched with programmatic dependent launch: it starts while the one before it still runs, loads its
first weights, and only then waits for the rows (`gdc_wait`). It lets the kernel after it do the same. Any other kernel
that is launched this way must wait too: a kernel relies on the one before it having waited for all earlier ones. A
plain launch in between is always safe, but nothing overlaps with it.
"""

# mypy: disable-error-code="import-untyped, import-not-found"
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

import torch
import triton
from torch import Tensor
from triton.runtime import driver

from faser.models.quantised.matrix import Fp8Matrix, QuantisedMatrix, Weight
from faser.runtime.cuda import quantised
from faser.runtime.cuda.linear_kernels import chunks_kernel, persistent_kernel, tiles_kernel
from faser.runtime.cuda.linear_plans import MAX_SPLIT_PROGRAMS, TILE_ROWS, Plan, choose
from faser.runtime.cuda.quantised import Around, Scratch
from faser.runtime.cuda.rowwise import dependent_launch, require_contiguous
from faser.runtime.cuda.rowwise import rms_norm as rms_norm
from faser.runtime.cuda.rowwise import silu_mul as silu_mul

H200_SHARED_BYTES = 227 * 1024
REGISTERS_PER_SM = 65536


@dataclass(frozen=True)
class LinearWorkspace:
    """Memory in which programs that split K add up. Forwards that may run at once need one each."""

    partials: Tensor  # float32 [MAX_SPLIT_PROGRAMS * 64 * TILE_ROWS]
    counters: Tensor  # int32 [MAX_SPLIT_PROGRAMS]; zero between launches
    scratch: Scratch | None = None  # for quantised weights

    @classmethod
    def allocate(cls, device: torch.device | str, weights: Sequence[Weight] = (), max_rows: int = 0) -> LinearWorkspace:
        """For products of up to max_rows rows with these weights, where they are quantised."""
        matrices = [each for each in weights if isinstance(each, QuantisedMatrix)]
        return cls(
            torch.empty(MAX_SPLIT_PROGRAMS * 64 * TILE_ROWS, dtype=torch.float32, device=device),
            torch.zeros(MAX_SPLIT_PROGRAMS, dtype=torch.int32, device=device),
            Scratch.allocate(matrices, max_rows, device) if matrices else None,
        )


def norm_linear(
    x: Tensor,
    norm_weight: Tensor,
    eps: float,
    weight: Weight,
    bias: Tensor | None,
    out: Tensor,
    normed: Tensor,
    workspace: LinearWorkspace | None = None,
    plan: Plan | None = None,
    num_sms: int = 0,
    product: Literal["norm", "head"] = "norm",
) -> None:
    """out = rms_norm(x) @ weight^T + bias, in float32 if out is. x [R, K], weight [N, K], out [R, N].

    normed [R, K] is scratch. A model's head has no bias.
    """
    if isinstance(weight, QuantisedMatrix):
        around = _around(workspace, bias=bias, num_sms=num_sms, plan=plan)
        _norm_quantised(x, norm_weight, eps, weight, out, normed, around)
        return
    plan = plan or choose(product, *_shape(x, weight), weight.dtype, num_sms=num_sms)
    if plan.kernel in ("chunks", "persistent"):
        _launch_rows(plan, x, weight, out, norm=norm_weight, eps=eps, bias=bias)
        return
    rms_norm(x, norm_weight, eps, normed)
    if plan.kernel == "tiles":
        _launch_tiles(plan, normed, weight, out, bias=bias, workspace=workspace)
    elif bias is not None:
        torch.addmm(bias, normed, weight.t(), out=out)
    elif out.dtype is weight.dtype:
        torch.mm(normed, weight.t(), out=out)
    else:
        torch.mm(normed, weight.t(), out_dtype=out.dtype, out=out)


def norm_gate_up(
    x: Tensor,
    norm_weight: Tensor,
    eps: float,
    weight: Weight,
    out: Tensor,
    normed: Tensor,
    gate_up: Tensor,
    plan: Plan | None = None,
    num_sms: int = 0,
    workspace: LinearWorkspace | None = None,
) -> None:
    """out = silu(gate) * up, where [gate | up] = rms_norm(x) @ weight^T.

    x [R, K], weight [2 * I, K], out [R, I]; normed [R, K] and gate_up [R, 2 * I] are scratch. Only quantised weights
    need a workspace.
    """
    if isinstance(weight, QuantisedMatrix):
        around = _around(workspace, gate_up=gate_up, num_sms=num_sms, plan=plan)
        _norm_quantised(x, norm_weight, eps, weight, out, normed, around)
        return
    num_rows, num_weights, k = _shape(x, weight)
    plan = plan or choose("gate_up", num_rows, num_weights // 2, k, weight.dtype, num_sms=num_sms)
    if plan.kernel in ("chunks", "persistent"):
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
    weight: Weight,
    residual: Tensor,
    bias: Tensor | None = None,
    workspace: LinearWorkspace | None = None,
    plan: Plan | None = None,
    num_sms: int = 0,
) -> None:
    """residual += x @ weight^T + bias, in place. x [R, K], weight [N, K], residual [R, N]."""
    if isinstance(weight, QuantisedMatrix):
        around = _around(workspace, bias=bias, residual=residual, num_sms=num_sms, plan=plan)
        quantised.product(x, weight, residual, around)
        return
    plan = plan or choose("residual", *_shape(x, weight), weight.dtype, workspace is not None, num_sms)
    if plan.kernel in ("chunks", "persistent"):
        _launch_rows(plan, x, weight, residual, bias=bias, residual=residual)
    elif plan.kernel == "tiles":
        _launch_tiles(plan, x, weight, residual, bias=bias, residual=residual, workspace=workspace)
    else:
        torch.addmm(residual, x, weight.t(), out=residual)
        if bias is not None:
            residual.add_(bias)


def linear(
    x: Tensor, weight: Weight, bias: Tensor | None, out: Tensor, workspace: LinearWorkspace, num_sms: int = 0
) -> None:
    """out = x @ weight^T + bias. x [R, K], weight [N, K], out [R, N]."""
    linear_residual(x, weight, out.zero_(), bias, workspace, num_sms=num_sms)


def _around(workspace: LinearWorkspace | None, **what: Any) -> Around:
    assert workspace is not None, "quantised weights need a workspace"
    assert workspace.scratch is not None, "the workspace was allocated without the quantised weights"
    return Around(workspace.scratch, workspace.partials, workspace.counters, **what)


def _norm_quantised(
    x: Tensor, norm_weight: Tensor, eps: float, weight: QuantisedMatrix, out: Tensor, normed: Tensor, around: Around
) -> None:
    """Rows for 8-bit floats are normalised where they are rounded, others before the product."""
    if isinstance(weight, Fp8Matrix):
        quantised.product(x, weight, out, replace(around, norm=norm_weight, eps=eps))
        return
    rms_norm(x, norm_weight, eps, normed)
    quantised.product(normed, weight, out, around)


def _shape(x: Tensor, weight: Tensor) -> tuple[int, int, int]:
    """R, N, K."""
    return x.shape[0], weight.shape[0], weight.shape[1]


def stage_bytes(plan: Plan, num_rows: int, gated: bool, element_size: int) -> int:
    """Bytes of shared memory for one load in flight of `tiles`."""
    return (_padded(num_rows) + (1 + gated) * plan.block_n) * plan.block_k * element_size


def _padded(num_rows: int) -> int:
    """Rows of the narrow operand of a tensor core."""
    return max(16, triton.next_power_of_2(num_rows))


@lru_cache(maxsize=16)
def _shared_bytes(device: torch.device) -> int:
    """Shared memory of a program. A GPU with less than the plans were made for loads less ahead."""
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
    require_contiguous(x, weight, out, norm, bias, residual)
    num_rows, num_weights, k = _shape(x, weight)
    n = num_weights // 2 if gated else num_weights
    is_persistent = plan.kernel == "persistent"
    kernel = persistent_kernel if is_persistent else chunks_kernel
    grid = plan.programs if is_persistent else triton.cdiv(n, plan.block_n)
    extra = {"PROGRAMS": plan.programs} if is_persistent else {}
    kernel[(grid,)](
        x, x if norm is None else norm, eps, weight, x if bias is None else bias,
        x if residual is None else residual, out, num_rows,
        N=n, K=k, NORMED=norm is not None, GATED=gated, BIASED=bias is not None, ADDS=residual is not None,
        ROWS=triton.next_power_of_2(num_rows), BLOCK_N=plan.block_n, BLOCK_K=plan.block_k, **extra,
        num_warps=plan.num_warps, **dependent_launch(x), **_register_limit(plan, x),
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
    workspace: LinearWorkspace | None = None,
) -> None:
    require_contiguous(x, weight, out, bias, residual)
    num_rows, num_weights, k = _shape(x, weight)
    n = num_weights // 2 if gated else num_weights
    num_blocks = triton.cdiv(n, plan.block_n)
    assert num_rows <= TILE_ROWS
    assert plan.split == 1 or (workspace is not None and num_blocks * plan.split <= MAX_SPLIT_PROGRAMS and not gated)
    partials, counters = (x, x) if workspace is None else (workspace.partials, workspace.counters)
    most_stages = _shared_bytes(x.device) // stage_bytes(plan, num_rows, gated, weight.element_size())
    tiles_kernel[(num_blocks, plan.split)](
        x, weight, x if bias is None else bias, x if residual is None else residual, out, partials, counters, num_rows,
        N=n, K=k, GATED=gated, BIASED=bias is not None, ADDS=residual is not None,
        BLOCK_M=_padded(num_rows), BLOCK_N=plan.block_n, BLOCK_K=plan.block_k, SPLIT=plan.split,
        STAGES=min(plan.num_stages, max(1, most_stages)),
        num_warps=plan.num_warps, **dependent_launch(x),
    )  # fmt: skip
