"""What is computed row by row around products: norms and the gated activation. And how their kernels are launched."""

# mypy: disable-error-code="import-untyped, import-not-found"
from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
from torch import Tensor

from faser.errors import ConfigError
from faser.runtime.cuda.linear_kernels import norm_kernel, silu_mul_kernel


def rms_norm(x: Tensor, norm_weight: Tensor, eps: float, out: Tensor) -> None:
    """out = x / sqrt(mean(x^2) + eps) * norm_weight, row by row. x, out [R, K]."""
    require_contiguous(x, out, norm_weight)
    num_rows, k = x.shape
    block = triton.next_power_of_2(k)
    norm_kernel[(num_rows,)](
        x, norm_weight, eps, out, K=k, BLOCK_K=block, num_warps=min(8, max(1, block // 256)), **dependent_launch(x)
    )


def silu_mul(gate_up: Tensor, out: Tensor) -> None:
    """out = silu(gate) * up. gate_up [R, 2 * I], out [R, I]."""
    require_contiguous(gate_up, out)
    num_rows, size = out.shape
    block = min(1024, triton.next_power_of_2(size))
    grid = (num_rows, triton.cdiv(size, block))
    silu_mul_kernel[grid](gate_up, out, size, BLOCK=block, **dependent_launch(out))


def require_contiguous(*tensors: Tensor | None) -> None:
    if not all(each is None or each.is_contiguous() for each in tensors):
        raise ConfigError("the kernels of faser.runtime.cuda.linear take contiguous tensors: call .contiguous() first")


def dependent_launch(tensor: Tensor) -> dict[str, Any]:
    """Launch options. Programmatic dependent launch needs compute capability 9."""
    early = tensor.is_cuda and _compute_capability(tensor.device) >= (9, 0)
    return {"EARLY": early, "launch_pdl": True} if early else {"EARLY": False}


@lru_cache(maxsize=16)
def _compute_capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)
