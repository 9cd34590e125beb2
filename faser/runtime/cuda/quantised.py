"""The matrix products of a decoder with quantised weights.

Knows `Fp8Matrix` and `TiledMatrix`, and does with them what linear.py does with plain weights; linear.py hands them on.
Rows of 8-bit floats are rounded at any number of rows, by one kernel and each by its own numbers. So a row's product
depends on the rows beside it no more than with plain weights: only the order of sums differs.

Few rows: tiles that read each code once (quantised_kernels.py). Many rows: `torch._scaled_mm` where it takes the
scales, else tiles again for 8-bit floats; codes are dequantised, some outputs at a time, for cuBLAS.
"""

# mypy: disable-error-code="import-untyped, import-not-found"
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton
from torch import Tensor

from faser.errors import ConfigError
from faser.models.quantised.matrix import FP8, Fp8Matrix, QuantisedMatrix
from faser.models.quantised.tiled import TiledMatrix
from faser.runtime.cuda.linear_plans import Plan
from faser.runtime.cuda.quantised_kernels import (
    dequantise_kernel,
    fp8_tiles_kernel,
    group_tiles_kernel,
    round_rows_kernel,
)
from faser.runtime.cuda.quantised_plans import FP8_COLUMNS, Kind, choose, fits_workspace, padded
from faser.runtime.cuda.rowwise import dependent_launch, require_contiguous, silu_mul

_SLICE_WEIGHTS = 1 << 24  # dequantised at a time: 32 MB in bfloat16, which fits into the L2 cache of an H200

_DEQUANTISED_ROWS = 32  # outputs of a program


@dataclass(frozen=True)
class Scratch:
    """Memory for rounded rows and dequantised weights. Forwards that may run at once need one each."""

    values: Tensor  # uint8: bytes of rounded rows
    scales: Tensor  # float32: scales of rounded rows
    wide: Tensor  # uint8: bytes of dequantised weights

    @classmethod
    def allocate(cls, matrices: Sequence[QuantisedMatrix], max_rows: int, device: torch.device | str) -> Scratch:
        rounded = [each for each in matrices if isinstance(each, Fp8Matrix)]
        codes = [each.shape for each in matrices if isinstance(each, TiledMatrix)]
        values = max_rows * max((each.shape[1] for each in rounded), default=0)
        scales = max_rows * max(map(_num_scales, rounded), default=0)
        # at least one output in float32
        wide = max((max(4 * k, 2 * min(n * k, _SLICE_WEIGHTS)) for n, k in codes), default=0)
        return cls(
            torch.empty(values, dtype=torch.uint8, device=device),
            torch.empty(scales, dtype=torch.float32, device=device),
            torch.empty(wide, dtype=torch.uint8, device=device),
        )

    def rounded(self, matrix: Fp8Matrix, num_rows: int) -> tuple[Tensor, Tensor]:
        """Values [R, K] and their scales [R, scales of a row], not written."""
        k, num_scales = matrix.shape[1], _num_scales(matrix)
        values, scales = self.values[: num_rows * k].view(FP8), self.scales[: num_rows * num_scales]
        return values.view(num_rows, k), scales.view(num_rows, num_scales)

    def dequantised(self, n: int, k: int, dtype: torch.dtype) -> Tensor:
        """Weights of up to n outputs, [., K], not written."""
        weights = self.wide.view(dtype)
        num_outputs = min(n, weights.numel() // k)
        return weights[: num_outputs * k].view(num_outputs, k)


@dataclass(frozen=True)
class Around:
    """What is done around a product, and in what memory."""

    scratch: Scratch
    partials: Tensor  # of a LinearWorkspace
    counters: Tensor
    norm: Tensor | None = None  # [K]; for 8-bit floats alone, whose rows are normalised where they are rounded
    eps: float = 0.0
    bias: Tensor | None = None  # [N]
    residual: Tensor | None = None  # [R, N]
    gate_up: Tensor | None = None  # [R, 2 * N] scratch: the result is silu(gate) * up
    num_sms: int = 0
    plan: Plan | None = None

    def options(self, x: Tensor) -> dict[str, Any]:
        """What a kernel is compiled for."""
        flags = {"GATED": self.gate_up is not None, "BIASED": self.bias is not None, "ADDS": self.residual is not None}
        return {**flags, **dependent_launch(x)}

    def tensors(self, x: Tensor, out: Tensor) -> tuple[Tensor, ...]:
        """Arguments of a tile kernel: bias, residual, result, sums."""
        bias, residual = (x if each is None else each for each in (self.bias, self.residual))
        return bias, residual, out, self.partials, self.counters


def product(x: Tensor, weight: QuantisedMatrix, out: Tensor, around: Around) -> None:
    """out = x @ weight^T with what is around it. x [R, K], out [R, N]; N is half the matrix where it is gate and up."""
    require_contiguous(x, out, *weight.tensors().values(), around.norm, around.bias, around.residual, around.gate_up)
    if isinstance(weight, Fp8Matrix):
        _fp8_product(x, weight, out, around)
    elif isinstance(weight, TiledMatrix):
        _group_product(x, weight, out, around)
    else:
        raise ConfigError(f"a GPU has no product with weights of {weight.format}: load them with --quantised off")


# ---- 8-bit floats ----


def _num_scales(matrix: Fp8Matrix) -> int:
    """Scales of a rounded row."""
    return triton.cdiv(matrix.shape[1], matrix.input_group)


def _fp8_product(x: Tensor, weight: Fp8Matrix, out: Tensor, around: Around) -> None:
    (n, k), num_rows, num_scales = weight.shape, x.shape[0], _num_scales(weight)
    n, is_gated = out.shape[1], around.gate_up is not None
    assert not is_gated or n % weight.rows_per_scale == 0, "a block holds gate and up"
    values, scales = around.scratch.rounded(weight, num_rows)
    round_rows(x, weight, values, scales, around)
    kind: Kind = "fp8 by rows" if _takes_scaled_mm(weight, out) else "fp8 in tiles"
    plan = around.plan or choose(kind, num_rows, n, k, FP8_COLUMNS, FP8_COLUMNS, is_gated, around.num_sms)
    if plan.kernel == "cublas":
        _finish(_scaled_mm(values, scales, weight), out, around)
        return
    fp8_tiles_kernel[_grid(plan, num_rows, n)](
        values, scales, weight.values, weight.scales, *around.tensors(x, out), num_rows,
        N=n, K=k, ROWS_PER_SCALE=weight.rows_per_scale, COLUMNS=num_scales,
        BLOCK_M=padded(num_rows), BLOCK_N=plan.block_n, BLOCK_K=FP8_COLUMNS, SPLIT=plan.split, STAGES=plan.num_stages,
        num_warps=plan.num_warps, **around.options(x),
    )  # fmt: skip


def round_rows(x: Tensor, weight: Fp8Matrix, values: Tensor, scales: Tensor, around: Around) -> None:
    """x, normalised if there is a norm, as the rows that `weight` is multiplied with."""
    num_rows, k = x.shape
    block = triton.next_power_of_2(k)
    norm, static = around.norm, weight.input_scale
    round_rows_kernel[(num_rows,)](
        x, x if norm is None else norm, around.eps, scales if static is None else static, values, scales,
        K=k, BLOCK_K=block, GROUP=block if _num_scales(weight) == 1 else weight.input_group,
        NORMED=norm is not None, STATIC=static is not None,
        num_warps=min(16, max(1, block // 512)), **dependent_launch(x),
    )  # fmt: skip


def _takes_scaled_mm(weight: Fp8Matrix, out: Tensor) -> bool:
    """Whether torch has the product: a scale for each output, sides that are multiples of 16, compute capability 9."""
    is_aligned = weight.rows_per_scale == 1 and _num_scales(weight) == 1 and not any(x % 16 for x in weight.shape)
    return is_aligned and out.dtype is torch.bfloat16 and out.is_cuda and _multiplies_by_rows(out.device)


@lru_cache(maxsize=16)
def _multiplies_by_rows(device: torch.device) -> bool:
    return hasattr(torch, "_scaled_mm") and torch.cuda.get_device_capability(device) >= (9, 0)


def _scaled_mm(values: Tensor, scales: Tensor, weight: Fp8Matrix) -> Tensor:
    """Sums are kept in float32, as in our tiles: fast ones have fewer bits, and few rows and many would differ more."""
    return torch._scaled_mm(
        values, weight.values.t(), scale_a=scales, scale_b=weight.scales.view(1, -1), out_dtype=torch.bfloat16,
        use_fast_accum=False,
    )  # fmt: skip


# ---- codes ----


def _group_product(x: Tensor, weight: TiledMatrix, out: Tensor, around: Around) -> None:
    assert around.norm is None
    num_rows, k, n = x.shape[0], weight.shape[1], out.shape[1]
    step, is_gated = weight.run * 8 // weight.bits, around.gate_up is not None
    plan = around.plan or choose("groups", num_rows, n, k, step, weight.run, is_gated, around.num_sms)
    if plan.kernel == "cublas":
        _dequantised_mm(x, weight, out, around)
        return
    group_tiles_kernel[_grid(plan, num_rows, n)](
        x, *_numbers(weight), *around.tensors(x, out), num_rows,
        N=n, K=k, **_form(weight), FAST=_has_pairs(x),
        BLOCK_M=padded(num_rows), BLOCK_N=plan.block_n, SPLIT=plan.split, STAGES=plan.num_stages,
        num_warps=plan.num_warps, **around.options(x),
    )  # fmt: skip


def _dequantised_mm(x: Tensor, weight: TiledMatrix, out: Tensor, around: Around) -> None:
    """By cuBLAS, some outputs at a time."""
    n, k = weight.shape
    result = around.gate_up if around.gate_up is not None else out
    if around.residual is not None:
        result = torch.empty_like(out)
    room = around.scratch.dequantised(n, k, x.dtype)
    for first in range(0, n, room.shape[0]):
        plain = room[: n - first]
        dequantise(weight, first, plain)
        columns = result[:, first : first + plain.shape[0]]
        if columns.dtype is x.dtype:
            torch.mm(x, plain.t(), out=columns)
        else:
            torch.mm(x, plain.t(), out_dtype=columns.dtype, out=columns)
    _finish(result, out, around)


def dequantise(weight: TiledMatrix, first: int, out: Tensor) -> None:
    """Weights of outputs from `first` on into out [., K]."""
    n, k = weight.shape
    grid = (triton.cdiv(out.shape[0], _DEQUANTISED_ROWS), k * weight.bits // (8 * weight.run))
    dequantise_kernel[grid](
        *_numbers(weight), out, first, out.shape[0],
        N=n, K=k, **_form(weight), BLOCK_N=_DEQUANTISED_ROWS, num_warps=4, **dependent_launch(out),
    )  # fmt: skip


def _has_pairs(x: Tensor) -> bool:
    """Whether codes become pairs of bfloat16 by instructions of the GPU (compute capability 8)."""
    return x.is_cuda and x.dtype is torch.bfloat16


def _numbers(weight: TiledMatrix) -> tuple[Tensor, ...]:
    """Codes, scales, zeros, minimums; scales in place of what there is not."""
    scales = weight.scales
    return weight.codes, scales, *(scales if each is None else each for each in (weight.zeros, weight.minimums))


def _form(weight: TiledMatrix) -> dict[str, int]:
    return {
        "BITS": weight.bits, "GROUP": weight.group, "RUN": weight.run, "ZERO": weight.zero,
        "HAS_ZEROS": weight.zeros is not None, "HAS_MINIMUMS": weight.minimums is not None,
    }  # fmt: skip


# ---- both ----


def _grid(plan: Plan, num_rows: int, n: int) -> tuple[int, int, int]:
    """Blocks of rows stand next to each other, so that the second finds the weights in the L2 cache."""
    row_blocks, num_blocks = triton.cdiv(num_rows, padded(num_rows)), triton.cdiv(n, plan.block_n)
    assert plan.split == 1 or (row_blocks == 1 and fits_workspace(plan, num_rows, num_blocks))
    return row_blocks, num_blocks, plan.split


def _finish(result: Tensor, out: Tensor, around: Around) -> None:
    """Bias, activation and residual behind a product [R, N] that is nothing else."""
    if around.bias is not None:
        result.add_(around.bias)
    if around.gate_up is not None:
        silu_mul(result, out)
    elif around.residual is not None:
        torch.add(around.residual, result, out=out)
    elif result is not out:
        out.copy_(result)
