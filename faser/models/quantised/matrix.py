"""Weight matrices in fewer bits than they are computed with: what is stored, and the numbers it stands for.

Knows three kinds: 8-bit floats with scales, integer codes with a scale per group of columns, and a stack of others.
`dequantise` defines what a matrix means; every product of every device is tested against it. Knows nothing of
checkpoint formats, which only differ in names and order (`folders.py`, `gguf/blocks.py`), or of how products are
computed.

A matrix has the shape [N, K]: N outputs, K inputs. Tensors of a matrix have N rows, or fewer where rows share a scale,
so that matrices with the same inputs are joined by joining their tensors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar, Union

import torch
import torch.nn.functional as F
from torch import Tensor

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0  # the largest number of float8_e4m3fn
ACTIVATION_GROUP = 128  # columns of a row that share a scale where weights have blocks of 128 x 128

_Matrix = TypeVar("_Matrix", bound="QuantisedMatrix")


@dataclass(frozen=True)
class QuantisedMatrix(ABC):
    """A weight [N, K]. It is dequantised where it is used."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int]:
        """N, K."""

    @property
    @abstractmethod
    def format(self) -> str:
        """What people call it; products of one format and shape take the same time."""

    @abstractmethod
    def dequantise(self) -> Tensor:
        """The weights [N, K] in float32."""

    def product(self, x: Tensor) -> Tensor:
        """x [R, K] @ weights^T, [R, N] in the dtype of x: the plain twin of what a device computes."""
        return F.linear(x.float(), self.dequantise()).to(x.dtype)

    @abstractmethod
    def select(self, rows: slice | Tensor) -> QuantisedMatrix:
        """The matrix of these rows; views for a slice."""

    def tensors(self) -> dict[str, Tensor]:
        """What is in memory, by field."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}

    def to(self: _Matrix, device: torch.device | str) -> _Matrix:
        return replace(self, **{name: tensor.to(device) for name, tensor in self.tensors().items()})

    @property
    def device(self) -> torch.device:
        return next(iter(self.tensors().values())).device

    @property
    def num_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors().values())

    def numel(self) -> int:
        return self.shape[0] * self.shape[1]


# What a model multiplies by. A tensor is [N, K] in the dtype of the model.
Weight = Union[Tensor, QuantisedMatrix]  # noqa: UP007 (evaluated at run time, where Tensor | a string fails)


@dataclass(frozen=True)
class Fp8Matrix(QuantisedMatrix):
    """8-bit floats (e4m3): weight = value * scale. The rows that it is multiplied with are rounded to the same type.

    Rounding rows is part of what the checkpoint means. A product that does it does it at any number of rows. It makes
    much of a small difference between rows, so where it is done texts part at other places than near-ties.
    """

    values: Tensor  # [N, K] float8_e4m3fn
    scales: Tensor  # [ceil(N / rows_per_scale), ceil(K / columns_per_scale)] float32
    rows_per_scale: int  # 1, or 128 in blocks of 128 x 128
    columns_per_scale: int  # 128 in blocks, else K
    input_scale: Tensor | None = None  # [] float32: static; None: a scale for each row (blocks: and 128 columns)

    @property
    def shape(self) -> tuple[int, int]:
        return self.values.shape[0], self.values.shape[1]

    @property
    def format(self) -> str:
        return "fp8 by blocks" if self.columns_per_scale < self.shape[1] else "fp8 by rows"

    @property
    def input_group(self) -> int:
        """Columns of a row that share a scale."""
        return min(self.columns_per_scale, self.shape[1])

    def dequantise(self) -> Tensor:
        n, k = self.shape
        scales = self.scales.repeat_interleave(self.rows_per_scale, 0)[:n]
        return self.values.float() * scales.repeat_interleave(self.columns_per_scale, 1)[:, :k]

    def product(self, x: Tensor) -> Tensor:
        return F.linear(self.round_input(x), self.dequantise()).to(x.dtype)

    def round_input(self, x: Tensor) -> Tensor:
        """x [R, K] as the product sees it, float32: rounded to 8 bits, and back."""
        if self.input_scale is not None:
            return round_fp8(x.float(), self.input_scale)
        padded = F.pad(x.float(), (0, -x.shape[1] % self.input_group))
        groups = padded.view(x.shape[0], padded.shape[1] // self.input_group, self.input_group)
        scales = fp8_scale(groups.abs().amax(-1, keepdim=True))
        return round_fp8(groups, scales).view(padded.shape)[:, : x.shape[1]]

    def select(self, rows: slice | Tensor) -> Fp8Matrix:
        whole = self if self.rows_per_scale == 1 else self.with_scales_by_row()
        return replace(whole, values=whole.values[rows], scales=whole.scales[rows])

    def with_scales_by_row(self) -> Fp8Matrix:
        scales = self.scales.repeat_interleave(self.rows_per_scale, 0)[: self.shape[0]]
        return replace(self, scales=scales, rows_per_scale=1)


@dataclass(frozen=True)
class GroupMatrix(QuantisedMatrix):
    """Integer codes: weight = (code - zero) * scale + minimum, one scale for each group of columns of a row.

    Two codes of 4 bits are a byte, that of the even column in its low half. A code of 6 bits is 4 bits there and 2 in
    `high`, four to a byte, lowest column in the lowest bits. With super scales the scales and minimums are integers:
    the super scale multiplies the scale, the super minimum the minimum.
    """

    codes: Tensor  # uint8 [N, K / 2], with 8 bits [N, K]
    scales: Tensor  # [N, K / group] floats; with super scales uint8 or int8
    bits: int  # 4, 6 or 8
    group: int
    zero: int = 0  # of all groups
    zeros: Tensor | None = None  # uint8 [N, K / group], instead of `zero`
    minimums: Tensor | None = None  # as scales
    high: Tensor | None = None  # uint8 [N, K / 4]
    super_scales: Tensor | None = None  # float16 [N, K / super_group]
    super_minimums: Tensor | None = None  # as super_scales
    super_group: int = 256

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1] * (1 if self.bits == 8 else 2)

    @property
    def format(self) -> str:
        return f"{self.bits} bits in groups of {self.group}"

    def unpacked(self) -> Tensor:
        """The codes, uint8 [N, K]."""
        if self.bits == 8:
            return self.codes
        codes = torch.stack((self.codes & 15, self.codes >> 4), -1).flatten(1)
        if self.high is None:
            return codes
        shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=self.high.device)
        return codes | ((self.high[..., None] >> shifts & 3) << 4).flatten(1)

    def affine(self) -> tuple[Tensor, Tensor]:
        """scale and offset [N, K / group] in float32: weight = code * scale + offset."""
        scales = self._float(self.scales, self.super_scales)
        zeros = self.zero if self.zeros is None else self.zeros.float()
        if self.minimums is None:
            return scales, -zeros * scales
        return scales, self._float(self.minimums, self.super_minimums) - zeros * scales

    def dequantise(self) -> Tensor:
        scale, offset = (each[..., None] for each in self.affine())
        codes = self.unpacked().view(*scale.shape[:2], self.group).float()
        return torch.addcmul(offset, codes, scale).flatten(1)

    def select(self, rows: slice | Tensor) -> GroupMatrix:
        selected: dict[str, Any] = {name: tensor[rows] for name, tensor in self.tensors().items()}
        return replace(self, **selected)

    def _float(self, values: Tensor, super_values: Tensor | None) -> Tensor:
        if super_values is None:
            return values.float()
        return values.float() * super_values.float().repeat_interleave(self.super_group // self.group, 1)


@dataclass(frozen=True)
class Stack(QuantisedMatrix):
    """Matrices with the same inputs and different formats, one above the other: queries of 4 bits, values of 6."""

    parts: tuple[Weight, ...]

    @property
    def shape(self) -> tuple[int, int]:
        return sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]

    @property
    def format(self) -> str:
        return " and ".join(sorted({format_of(part) for part in self.parts}))

    def tensors(self) -> dict[str, Tensor]:
        return {f"{i}.{name}": tensor for i, part in enumerate(self.parts) for name, tensor in tensors_of(part).items()}

    def to(self, device: torch.device | str) -> Stack:
        return Stack(tuple(part.to(device) for part in self.parts))

    def dequantise(self) -> Tensor:
        return torch.cat([dequantise(part) for part in self.parts])

    def product(self, x: Tensor) -> Tensor:
        return torch.cat([linear(x, part) for part in self.parts], 1)

    def select(self, rows: slice | Tensor) -> QuantisedMatrix:
        raise NotImplementedError("rows of a stack are not needed anywhere")


# ---- any weight ----


def linear(x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """x [R, K] @ weight^T + bias, in the dtype of x."""
    if isinstance(weight, Tensor):
        return F.linear(x, weight, bias)
    result = weight.product(x)
    return result if bias is None else result.add_(bias)


def add_linear(residual: Tensor, x: Tensor, weight: Weight) -> Tensor:
    """residual [R, N] + x [R, K] @ weight^T, a new tensor."""
    if isinstance(weight, Tensor):
        return torch.addmm(residual, x, weight.t())
    return weight.product(x).add_(residual)


def dequantise(weight: Weight) -> Tensor:
    """[N, K] in float32."""
    return weight.float() if isinstance(weight, Tensor) else weight.dequantise()


def format_of(weight: Weight) -> str:
    return str(weight.dtype).removeprefix("torch.") if isinstance(weight, Tensor) else weight.format


def plain(weight: Weight) -> Tensor:
    """The weight, where it is known not to be quantised."""
    assert isinstance(weight, Tensor)
    return weight


def tensors_of(weight: Weight) -> dict[str, Tensor]:
    return {"weight": weight} if isinstance(weight, Tensor) else weight.tensors()


def stack(parts: Sequence[Weight]) -> Weight:
    """Weights with the same inputs as one: joined where they have the same format, else a `Stack`."""
    first = parts[0]
    if len(parts) == 1:
        return first
    if all(isinstance(part, Tensor) for part in parts):
        return torch.cat([part for part in parts if isinstance(part, Tensor)])
    joined: QuantisedMatrix | None = None
    if all(isinstance(part, GroupMatrix) for part in parts):
        joined = _join_groups([part for part in parts if isinstance(part, GroupMatrix)])
    elif all(isinstance(part, Fp8Matrix) for part in parts):
        joined = _join_fp8([part for part in parts if isinstance(part, Fp8Matrix)])
    return joined or Stack(tuple(parts))


def _join_groups(parts: list[GroupMatrix]) -> GroupMatrix | None:
    if len({_form(part) for part in parts}) > 1:
        return None
    return replace(parts[0], **_joined(parts))


def _join_fp8(parts: list[Fp8Matrix]) -> Fp8Matrix | None:
    """The largest static scale serves all parts: they round the same rows once. Other engines do the same."""
    if len({(part.columns_per_scale, part.input_scale is None) for part in parts}) > 1:
        return None
    if any(part.shape[0] % part.rows_per_scale for part in parts[:-1]):
        parts = [part.with_scales_by_row() for part in parts]
    if len({part.rows_per_scale for part in parts}) > 1:
        return None
    static = [part.input_scale for part in parts if part.input_scale is not None]
    shared = {"input_scale": torch.stack(static).amax() if static else None}
    return replace(parts[0], **{**_joined([replace(part, input_scale=None) for part in parts]), **shared})


def _joined(parts: Sequence[QuantisedMatrix]) -> dict[str, Any]:
    return {name: torch.cat([part.tensors()[name] for part in parts]) for name in parts[0].tensors()}


def _form(part: GroupMatrix) -> tuple[object, ...]:
    """All but the numbers: matrices of one form can be joined."""
    plain = (part.bits, part.group, part.zero, part.super_group)
    return *plain, *((name, tensor.dtype) for name, tensor in part.tensors().items())


# ---- codes and rounding ----


def pack_nibbles(codes: Tensor) -> Tensor:
    """uint8 codes [N, K] below 16 -> [N, K / 2], the even column in the low half of a byte."""
    return codes[:, ::2] | codes[:, 1::2] << 4


def fp8_scale(largest: Tensor) -> Tensor:
    """The scale at which numbers up to `largest` just fit. A row of zeros has a scale too."""
    return largest.clamp(min=1e-10) / FP8_MAX


def round_fp8(x: Tensor, scale: Tensor) -> Tensor:
    """x rounded to an 8-bit float times the scale; what is too large becomes the largest."""
    return (x / scale).clamp(-FP8_MAX, FP8_MAX).to(FP8).float() * scale
