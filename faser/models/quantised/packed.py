"""Quantised matrices on a CPU: four bits a weight, multiplied as they are by torch's own kernel.

Decoding on a CPU waits for memory, so weights of four bits instead of 32 make it several times as fast. The kernel
(`_weight_int4pack_mm_for_cpu`) rounds rows and results to bfloat16 and scales to bfloat16; it sums in float32, in the
same order for any number of rows. So a row's result does not depend on the batch, bit for bit: tests check it. A weight
of eight bits is two of four: 16 * high + low.

What the kernel cannot do (groups of 16, odd shapes, 8-bit floats) is dequantised when it is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from time import perf_counter

import torch
import torch.nn.functional as F
from torch import Tensor

from faser.models.quantised.matrix import GroupMatrix, QuantisedMatrix, Stack, Weight, dequantise

_GROUPS = (32, 64, 128, 256)  # columns that may share a scale
_OUTPUTS = 16  # N must be a multiple
_PACKED_TOGETHER = 64  # rows, at most
_TRIAL_SHAPE = 2048, 1024  # of a product that decides whether packing pays: it fits into the cache as float32
_TRIAL_ROWS = 1, 16


@dataclass(frozen=True)
class PackedMatrix(QuantisedMatrix):
    """A `GroupMatrix` in the order of torch's kernel for CPUs."""

    codes: Tensor  # uint8, opaque
    scales: Tensor  # bfloat16 [groups, N, 2]: weight = (code - 8) * scale + offset
    group: int
    num_inputs: int
    halves: int  # 2: eight bits; the columns stand twice, once for each half of a code

    @classmethod
    def pack(cls, matrix: GroupMatrix) -> PackedMatrix:
        codes, (scale, offset) = matrix.unpacked(), matrix.affine()
        halves = 1
        if matrix.bits > 4:
            halves = 2
            codes = torch.cat([codes >> 4, codes & 15], 1)
            scale, offset = torch.cat([16 * scale, scale], 1), torch.cat([offset, torch.zeros_like(offset)], 1)
        # [N, groups] -> [groups, N, 2]
        scales = torch.stack((scale, offset + 8 * scale), -1).transpose(0, 1)
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.int(), 1)
        return cls(packed, scales.bfloat16().contiguous(), matrix.group, matrix.shape[1], halves)

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.num_inputs

    @property
    def format(self) -> str:
        return f"{4 * self.halves} bits in groups of {self.group}, packed"

    def product(self, x: Tensor) -> Tensor:
        rows = x.bfloat16()
        if self.halves == 2:
            rows = torch.cat((rows, rows), 1)
        return torch.ops.aten._weight_int4pack_mm_for_cpu(rows, self.codes, self.group, self.scales).to(x.dtype)

    def dequantise(self) -> Tensor:
        """As the kernel sees the weights: rounded to bfloat16."""
        return self.product(torch.eye(self.num_inputs)).t().contiguous()

    def select(self, rows: slice | Tensor) -> PackedMatrix:
        """The first rows, a multiple of 64: rows are packed 16 to 64 together, depending on the CPU."""
        assert isinstance(rows, slice), "the order of packed rows is torch's own"
        assert rows.start in (None, 0)
        assert rows.step in (None, 1)
        num_rows = min(rows.stop, self.shape[0])
        assert num_rows % _PACKED_TOGETHER == 0 or num_rows == self.shape[0], "these rows are packed with others"
        return replace(self, codes=self.codes[:num_rows], scales=self.scales[:, :num_rows].contiguous())


def for_cpu(weight: Weight, dtype: torch.dtype, packs: bool) -> Weight:
    """The form in which a CPU multiplies by a weight. `packs`: where it can, by its codes.

    Rows for 8-bit floats are not rounded. The last bits of a row depend on how many rows were computed together, and
    rounding to 8 bits makes so much of them that the output would depend on speculation.
    """
    if isinstance(weight, Stack):
        parts = [for_cpu(part, dtype, packs) for part in weight.parts]
        plain = [part for part in parts if isinstance(part, Tensor)]
        return transposed(torch.cat(plain)) if len(plain) == len(parts) else Stack(tuple(parts))
    if isinstance(weight, GroupMatrix) and packs and can_pack(weight):
        return PackedMatrix.pack(weight)
    return transposed(dequantise(weight).to(dtype))


def can_pack(matrix: GroupMatrix) -> bool:
    return matrix.group in _GROUPS and matrix.shape[0] % _OUTPUTS == 0


def transposed(weight: Tensor) -> Tensor:
    """The same matrix, stored in the order that is fast on a CPU (models/allocation.py)."""
    return weight.t().contiguous().t()


@lru_cache(maxsize=1)
def packing_pays() -> bool:
    """Whether this CPU multiplies by packed codes faster than by float32, with one row and with several.

    Both fit into the cache here. Where weights come from memory, packed ones gain more.
    """
    n, k = _TRIAL_SHAPE
    packed = PackedMatrix.pack(GroupMatrix(torch.zeros(n, k // 2, dtype=torch.uint8), torch.ones(n, k // 32), 4, 32))
    plain = transposed(torch.ones(n, k))
    return all(_seconds(packed, rows) < _seconds(plain, rows) for rows in _TRIAL_ROWS)


def _seconds(weight: Tensor | PackedMatrix, num_rows: int) -> float:
    x, best = torch.ones(num_rows, weight.shape[1]), float("inf")
    for _ in range(5):
        started = perf_counter()
        F.linear(x, weight) if isinstance(weight, Tensor) else weight.product(x)
        best = min(best, perf_counter() - started)
    return best
