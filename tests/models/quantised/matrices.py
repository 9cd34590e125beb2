"""Random quantised matrices of every kind, for tests."""

from __future__ import annotations

import torch
from torch import Tensor

from faser.models.quantised import Fp8Matrix, GroupMatrix, QuantisedMatrix
from faser.models.quantised.matrix import FP8, FP8_MAX


def fp8_matrix(n: int, k: int, seed: int = 0, block: int | None = None, input_scale: float | None = None) -> Fp8Matrix:
    """With a scale per row, or per block x block weights."""
    generator = torch.Generator().manual_seed(seed)
    values = (torch.randn(n, k, generator=generator) * 60).clamp(-FP8_MAX, FP8_MAX).to(FP8)
    rows, columns = (1, k) if block is None else (block, block)
    scales = torch.rand(-(-n // rows), -(-k // columns), generator=generator) * 1e-3 + 1e-4
    static = None if input_scale is None else torch.tensor(input_scale)
    return Fp8Matrix(values, scales, rows, columns, static)


def group_matrix(n: int, k: int, kind: str, seed: int = 0) -> GroupMatrix:
    """One of GROUP_KINDS: how checkpoints and GGUF files store integers."""
    generator = torch.Generator().manual_seed(seed)

    def codes(columns: int) -> Tensor:
        return torch.randint(0, 256, (n, columns), generator=generator, dtype=torch.uint8)

    def floats(columns: int, scale: float = 0.01) -> Tensor:
        return (torch.rand(n, columns, generator=generator) * scale + scale / 10).half()

    def integers(columns: int, low: int, high: int, dtype: torch.dtype = torch.uint8) -> Tensor:
        return torch.randint(low, high, (n, columns), generator=generator, dtype=dtype)

    if kind == "symmetric":
        return GroupMatrix(codes(k // 2), floats(k // 128), 4, 128, zero=8)
    if kind == "zeros":
        return GroupMatrix(codes(k // 2), floats(k // 128), 4, 128, zeros=integers(k // 128, 0, 16))
    if kind == "Q4_0":
        return GroupMatrix(codes(k // 2), floats(k // 32), 4, 32, zero=8)
    if kind == "Q4_1":
        return GroupMatrix(codes(k // 2), floats(k // 32), 4, 32, minimums=-floats(k // 32, 0.08))
    if kind == "Q8_0":
        return GroupMatrix(codes(k), floats(k // 32, 1e-3), 8, 32, zero=128)
    if kind == "Q4_K":
        return GroupMatrix(
            codes(k // 2), integers(k // 32, 0, 64), 4, 32, minimums=integers(k // 32, 0, 64),
            super_scales=floats(k // 256, 3e-4), super_minimums=-floats(k // 256, 2e-3),
        )  # fmt: skip
    if kind == "Q6_K":
        return GroupMatrix(
            codes(k // 2), integers(k // 16, -128, 128, torch.int8), 6, 16, zero=32, high=codes(k // 4),
            super_scales=floats(k // 256, 1e-5),
        )  # fmt: skip
    raise ValueError(kind)


GROUP_KINDS = ("symmetric", "zeros", "Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q6_K")


def every_kind(n: int, k: int, seed: int = 0) -> dict[str, QuantisedMatrix]:
    """K is a multiple of 256."""
    kinds: dict[str, QuantisedMatrix] = {kind: group_matrix(n, k, kind, seed) for kind in GROUP_KINDS}
    return kinds | {
        "fp8 rows": fp8_matrix(n, k, seed),
        "fp8 blocks": fp8_matrix(n, k, seed, block=128),
        "fp8 static": fp8_matrix(n, k, seed, input_scale=0.01),
    }
