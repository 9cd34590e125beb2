"""A GGUF file: its metadata, where each tensor is, and the rows of a tensor as float32.

The package gguf provides what changes from year to year: the block formats and their dequantisation. The header is
parsed here and not by the package's GGUFReader, which takes seconds for a vocabulary and trusts every length it reads.
Knows the layout of the file; knows nothing of models.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from faser.errors import MissingPackage, ModelError, UnsupportedModel
from faser.extras import install_hint
from faser.models.fields import Fields

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_LIST = (
    2**23
)  # items of a list in the metadata, each an object of Python; a vocabulary has 300,000 and its merges more
TENSOR_TYPES = (
    *("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
    *("IQ4_NL", "IQ4_XS"),  # what llama.cpp puts into Q2_K and Q3_K files where a row is no multiple of 256
)


def is_gguf(path: str | Path) -> bool:
    """Whether the path is a file that begins like a GGUF file, or ends in .gguf."""
    path = Path(path).expanduser()
    if not path.is_file():
        return False
    if path.name.lower().endswith(".gguf"):
        return True
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


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


@dataclass(frozen=True)
class GgufFile:
    """The header of a file: its metadata, and where its tensors are."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]

    @property
    def architecture(self) -> str:
        return self.text("general.architecture")

    def tensor(self, name: str) -> Tensor:
        """One whole tensor in float32, of any type the package knows."""
        tensor = self.tensors.get(name)
        if tensor is None:
            raise ModelError(f"{self.path}: the file lacks {name}; fetch or make it again")
        with self.path.open("rb") as file:
            return read_rows(file, self.path, tensor, 0, tensor.shape[0])

    @property
    def fields(self) -> Fields:
        return Fields(self.metadata, str(self.path))

    def text(self, key: str, default: str = "") -> str:
        value = self.metadata.get(key, default)
        if not isinstance(value, str):
            raise self.fields.wrong(key, value, "a text")
        return value

    def array(self, key: str, kind: type) -> list[Any]:
        """A list of values of one type; empty where the key is missing."""
        value = self.metadata.get(key, [])
        if not isinstance(value, list) or not all(isinstance(each, kind) for each in value):
            raise ModelError(f"{self.path}: {key}: expected a list of {kind.__name__}; convert the model again")
        return value


def open_file(path: str | Path) -> GgufFile:
    """Read and check the header of any GGUF file, and that the file is as long as its tensors need."""
    path = Path(path).expanduser()
    gguf_package()
    try:
        with path.open("rb") as file:
            if file.read(len(MAGIC)) != MAGIC:
                raise ModelError(f"{path}: not a GGUF file; expected it to begin with {MAGIC.decode()}: fetch it again")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _parse(path, data)
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error}); expected a GGUF file") from error


def _parse(path: Path, data: mmap.mmap) -> GgufFile:
    cursor = _Cursor(path, data)
    _check_version(path, cursor.number("I"))
    num_tensors, num_keys = cursor.number("Q"), cursor.number("Q")
    metadata: dict[str, Any] = {}
    for _ in range(num_keys):
        key = cursor.string()
        if key in metadata:
            raise cursor.garbled(f"the key {key!r} twice")
        metadata[key] = cursor.value(cursor.number("I"))
    infos = [cursor.tensor_info() for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise cursor.garbled(f"general.alignment={alignment!r}")
    data_start = -(-cursor.offset // alignment) * alignment
    tensors = {info.name: replace(info, start=data_start + info.start) for info in infos}
    if len(tensors) < len(infos):
        raise cursor.garbled("a tensor twice")
    _check_complete(path, tensors, len(data))
    return GgufFile(path, metadata, tensors)


def _check_version(path: Path, version: int) -> None:
    if version in VERSIONS:
        return
    if version.to_bytes(4, "big") in [v.to_bytes(4, "little") for v in VERSIONS]:
        raise UnsupportedModel(f"{path}: a big-endian GGUF file is not supported; fetch the little-endian one")
    raise UnsupportedModel(
        f"{path}: GGUF version {version} is not supported; expected {' or '.join(map(str, VERSIONS))}: convert it again"
    )


def _check_complete(path: Path, tensors: Mapping[str, StoredTensor], file_bytes: int) -> None:
    last = max(tensors.values(), key=lambda tensor: tensor.start + tensor.num_bytes, default=None)
    if last is not None and last.start + last.num_bytes > file_bytes:
        raise ModelError(
            f"{path}: truncated: it has {file_bytes} bytes; expected {last.start + last.num_bytes}, "
            f"where {last.name} ends: fetch it again"
        )


class _Cursor:
    """Reads the header front to back. No length is trusted before the file is known to hold that many bytes."""

    SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}  # noqa: RUF012
    STRING, ARRAY = 8, 9
    LENGTH = struct.Struct("<Q")  # of a text; compiled once, because a vocabulary has hundreds of thousands of texts
    MAX_DIMENSIONS = 4

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.offset = len(MAGIC)

    def garbled(self, found: str) -> ModelError:
        return ModelError(f"{self.path}: garbled: {found} before byte {self.offset} of the header; fetch it again")

    def number(self, code: str) -> Any:
        return self.numbers(code, 1)[0]

    def numbers(self, code: str, count: int) -> tuple[Any, ...]:
        start = self._advance(count * struct.calcsize(code))
        return struct.unpack_from(f"<{count}{code}", self.data, start)

    def string(self) -> str:
        (length,) = self.LENGTH.unpack_from(self.data, self._advance(self.LENGTH.size))
        start = self._advance(length)
        try:
            return self.data[start : self.offset].decode()
        except UnicodeDecodeError as error:
            raise self.garbled("a text that is not UTF-8") from error

    def value(self, kind: int) -> Any:
        """One metadata value: a number, a text or a list of them."""
        if kind in self.SCALARS:
            return self.number(self.SCALARS[kind])
        if kind == self.STRING:
            return self.string()
        if kind == self.ARRAY:
            return self._array(self.number("I"), self.number("Q"))
        raise self.garbled(f"a value of the unknown type {kind}")

    def _array(self, kind: int, count: int) -> list[Any]:
        if count > MAX_LIST and count <= len(self.data):  # beyond that, the file is too short, which is said below
            raise self.garbled(f"a list of {count}")
        if kind in self.SCALARS:
            return list(self.numbers(self.SCALARS[kind], count))
        if kind == self.STRING:
            return [self.string() for _ in range(count)]
        raise self.garbled(f"a list of the unknown type {kind}")

    def tensor_info(self) -> StoredTensor:
        """A tensor; its `start` still counts from the first weight, not from the beginning of the file."""
        name = self.string()
        num_dimensions = self.number("I")
        if not 1 <= num_dimensions <= self.MAX_DIMENSIONS:
            raise self.garbled(f"{name!r} with {num_dimensions} dimensions")
        shape = self.numbers("Q", num_dimensions)[::-1]
        if 0 in shape:
            raise self.garbled(f"{name!r} of the shape {list(shape)}")
        kind, block_size, block_bytes = block_format(self.number("I"))
        if shape[-1] % block_size:
            raise self.garbled(f"{name!r} with rows of {shape[-1]} for blocks of {block_size}")
        return StoredTensor(name, kind, shape, self.number("Q"), math.prod(shape) // block_size * block_bytes)

    def _advance(self, num_bytes: int) -> int:
        start = self.offset
        if start + num_bytes > len(self.data):
            raise ModelError(
                f"{self.path}: truncated or garbled: it has {len(self.data)} bytes and the header goes on to byte "
                f"{start + num_bytes} or further; fetch it again"
            )
        self.offset += num_bytes
        return start


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
    raw = read_bytes(file, path, tensor, start, stop)
    try:
        # As one row of blocks: blocks know nothing of rows, and the package is slow per group of 16 rows.
        values = package.quants.dequantize(raw[None], package.GGMLQuantizationType[tensor.type])
    except (KeyError, NotImplementedError) as error:
        raise UnsupportedModel(f"{path}: {tensor.name}: the tensor type {tensor.type} is not supported") from error
    return torch.from_numpy(values).view(stop - start, *tensor.shape[1:])


def read_bytes(file: BinaryIO, path: Path, tensor: StoredTensor, start: int, stop: int) -> NDArray[np.uint8]:
    """The blocks of rows start to stop - 1. A vector is always read whole."""
    num_bytes = tensor.num_bytes if len(tensor.shape) == 1 else (stop - start) * tensor.row_bytes
    file.seek(tensor.start + (0 if len(tensor.shape) == 1 else start * tensor.row_bytes))
    raw = np.fromfile(file, dtype=np.uint8, count=num_bytes)
    if len(raw) < num_bytes:
        raise ModelError(f"{path}: {tensor.name} ends too early; the file has changed: load it again")
    return raw
