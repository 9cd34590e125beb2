"""Integer codes in the order of a GPU's tiles.

A kernel takes the columns that share a scale in one step. With four bits a byte holds two columns that are a run apart,
not two neighbours: the low halves of a run of bytes are then neighbouring columns, and so are the high halves, and the
rows that they are multiplied with are read as they are. Scales stand by group, then by output, as tiles read them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from faser.models.quantised.matrix import GroupMatrix, QuantisedMatrix

_RUNS = (64, 32, 16)  # bytes that a step takes of an output


@dataclass(frozen=True)
class TiledMatrix(QuantisedMatrix):
    """A `GroupMatrix`: weight = (code - zero) * scale + minimum, one of each for each group of columns of an output."""

    codes: Tensor  # uint8 [N, K / 2]: in runs; with 8 bits [N, K]
    scales: Tensor  # floats [K / group, N]
    bits: int  # 4 or 8
    group: int
    run: int
    zero: int
    zeros: Tensor | None  # uint8 [K / group, N], instead of `zero`
    minimums: Tensor | None  # as scales

    @classmethod
    def tile(cls, matrix: GroupMatrix) -> TiledMatrix | None:
        """None: its groups do not fit into runs."""
        bits, (n, k) = 4 if matrix.bits == 4 else 8, matrix.shape
        run = next((run for run in _RUNS if matrix.group % run == 0 and k % (run * 8 // bits) == 0), None)
        if run is None:
            return None
        codes = matrix.unpacked()
        if bits == 4:
            halves = codes.view(n, -1, 2, run)
            codes = (halves[:, :, 0] | halves[:, :, 1] << 4).flatten(1)
        scales, minimums, zero, zeros = matrix.scales, matrix.minimums, matrix.zero, matrix.zeros
        if matrix.super_scales is not None:
            scales, offsets = matrix.affine()
            minimums = None if minimums is None else offsets + matrix.zero * scales
        if zeros is not None and bool((zeros == zeros[0, 0]).all()):
            zero, zeros = int(zeros[0, 0]), None
        return cls(
            codes.contiguous(), _by_group(scales), bits, matrix.group, run, zero,
            None if zeros is None else _by_group(zeros), None if minimums is None else _by_group(minimums),
        )  # fmt: skip

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1] * 8 // self.bits

    @property
    def format(self) -> str:
        return f"{self.bits} bits in groups of {self.group}"

    def unpacked(self) -> Tensor:
        """The codes, uint8 [N, K]."""
        if self.bits == 8:
            return self.codes
        runs = self.codes.view(self.shape[0], -1, self.run)
        return torch.stack((runs & 15, runs >> 4), 2).flatten(1)

    def dequantise(self) -> Tensor:
        # [N, groups, 1]
        scales = self.scales.float().t()[..., None]
        zeros = self.zero if self.zeros is None else self.zeros.float().t()[..., None]
        weights = (self.unpacked().view(*scales.shape[:2], self.group).float() - zeros) * scales
        return (weights if self.minimums is None else weights + self.minimums.float().t()[..., None]).flatten(1)

    def select(self, rows: slice | Tensor) -> TiledMatrix:
        by_group: dict[str, Any] = {
            name: tensor[:, rows].contiguous() for name, tensor in self.tensors().items() if name != "codes"
        }
        return replace(self, codes=self.codes[rows], **by_group)


def _by_group(values: Tensor) -> Tensor:
    return values.t().contiguous()
