"""One tensor of a GGUF file: how its numbers are packed into blocks, and its rows as float32.

The package gguf provides what changes from year to year: the block formats and their dequantisation.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from faser.errors import MissingPackage, ModelError, UnsupportedModel
from faser.extras import install_hint

TENSOR_TYPES = (
    *("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
    *("IQ4_NL", "IQ4_XS"),  # what llama.cpp puts into Q2_K and Q3_K files where a row is no multiple of 256
)


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as the file holds it."""

    name: str
    type: str  # as ggml spells it: F32, Q4_K, ...; "number 99" where the package does not know it
    shape: tuple[int, ...]  # in torch's order, the reverse of the file's
    start: int  # byte of the file
    num_bytes: int  # 0 where the type is not known

    @property
    def row_bytes(self) -> int:
        """Bytes of one index of the first dimension; a vector is one row, since blocks run along it."""
        return self.num_bytes if len(self.shape) == 1 else self.num_bytes // self.shape[0]


def gguf_package() -> Any:
    try:
        import gguf
    except ImportError as error:
        raise MissingPackage(install_hint("engine", ["gguf"])) from error
    return gguf


def block_format(number: int) -> tuple[str, int, int]:
    """A ggml type by its number: its name, the numbers in a block and the bytes of a block."""
    package = gguf_package()
    try:
        kind = package.GGMLQuantizationType(number)
    except ValueError:
        return f"number {number}", 1, 0
    block_size, block_bytes = package.GGML_QUANT_SIZES[kind]
    return str(kind.name), block_size, block_bytes


def read_rows(file: BinaryIO, path: Path, tensor: StoredTensor, start: int, stop: int) -> Tensor:
    """Rows start to stop - 1 in float32. A vector is always read whole."""
    package = gguf_package()
    num_bytes = tensor.num_bytes if len(tensor.shape) == 1 else (stop - start) * tensor.row_bytes
    file.seek(tensor.start + (0 if len(tensor.shape) == 1 else start * tensor.row_bytes))
    raw = np.fromfile(file, dtype=np.uint8, count=num_bytes)
    if len(raw) < num_bytes:
        raise ModelError(f"{path}: {tensor.name} ends too early; the file has changed: load it again")
    try:
        # As one row of blocks: blocks know nothing of rows, and the package is slow per group of 16 rows.
        values = package.quants.dequantize(raw[None], package.GGMLQuantizationType[tensor.type])
    except (KeyError, NotImplementedError) as error:
        raise UnsupportedModel(f"{path}: {tensor.name}: the tensor type {tensor.type} is not supported") from error
    return torch.from_numpy(values).view(stop - start, *tensor.shape[1:])
