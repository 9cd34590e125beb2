"""Quantised models from Hugging Face folders: their tensors, checked and turned into matrices.

Knows the names, shapes and bit orders of each layout. `models/quantisation.py` knows what the config says.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from faser.errors import ModelError, UnsupportedModel
from faser.models.config import ModelConfig
from faser.models.kv_scales import take_kv_scales
from faser.models.quantisation import Quantisation
from faser.models.quantised.matrix import Fp8Matrix, GroupMatrix, Weight, dequantise, pack_nibbles
from faser.models.quantised.placement import Mode, Placement, assemble
from faser.models.transformer import Transformer
from faser.models.weights import (
    CheckpointTensor,
    Destination,
    check_names,
    check_tensors,
    destinations_of,
    fill,
    needed_names,
    read_model_catalogue,
    read_tensor,
)
from faser.progress import Update

log = logging.getLogger("faser.engine")

_PER_WORD = 8  # codes of 4 bits in an int32
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # which nibble of a word holds column 0, 1, ...
_FLOATS = ("F16", "BF16", "F32")

# By suffix: shape, and the dtypes that are allowed
_Expected = dict[str, tuple[tuple[int, ...], tuple[str, ...]]]


def load(
    folder: str | Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    progress: Update | None = None,
    max_positions: int | None = None,
    quantised: Mode = "auto",
    placement: Placement | None = None,
) -> Transformer:
    """Read a quantised model; besides it no more than one of its matrices is in memory.

    `placement`: how its matrices are held; None: as `quantised` says.
    """
    assert config.quantisation is not None
    folder = Path(folder)
    kv_scales, catalogue = take_kv_scales(folder, read_model_catalogue(folder, config), config)
    model = Transformer.empty(config, dtype, device, max_positions, without_matrices=True)
    destinations = destinations_of(model)
    modules = {name.removesuffix(".weight"): _sides(each) for name, each in destinations.items() if each.tensor.is_meta}
    reader = _FolderReader(folder, catalogue, config.quantisation, modules, progress)
    vectors = {name: each for name, each in destinations.items() if not each.tensor.is_meta}
    reader.check(set(vectors), config.tie_embeddings)
    check_tensors(catalogue, vectors)
    fill(vectors, catalogue, None)
    head = None if config.tie_embeddings else "lm_head"
    made = assemble(model, reader.read, placement or Placement.choose(quantised, dtype, device), head)
    made.kv_scales = kv_scales
    return made


def fill_dequantised(
    folder: Path,
    catalogue: Mapping[str, CheckpointTensor],
    scheme: Quantisation,
    destinations: Mapping[str, Destination],
    quantised: Set[str],
    progress: Update | None,
) -> None:
    """Read every tensor into its place. `quantised`: modules whose weights are stored in the scheme's layout."""
    modules = {module: _sides(destinations[f"{module}.weight"]) for module in quantised}
    reader = _FolderReader(folder, catalogue, replace(scheme, targets=tuple(quantised), ignored=()), modules, progress)
    others = {name: each for name, each in destinations.items() if name.removesuffix(".weight") not in quantised}
    reader.check(set(others), is_tied=False)
    check_tensors(catalogue, others)
    fill(others, catalogue, None)
    for module in modules:
        destinations[f"{module}.weight"].tensor.copy_(dequantise(reader.read(module)))


def _sides(destination: Destination) -> tuple[int, int]:
    n, k = destination.shape
    return n, k


@dataclass
class _FolderReader:
    """The matrices of a folder, and how many bytes were read."""

    folder: Path
    catalogue: Mapping[str, CheckpointTensor]
    scheme: Quantisation
    modules: Mapping[str, tuple[int, int]]  # N and K of each matrix by name
    progress: Update | None
    bytes_read: int = 0

    @property
    def num_bytes(self) -> int:
        """Of all matrices."""
        return sum(entry.num_bytes for name, entry in self.catalogue.items() if name.rpartition(".")[0] in self.modules)

    def check(self, others: set[str], is_tied: bool) -> None:
        """Refuse a folder with tensors missing, unknown, or of a wrong shape or dtype, before any is read."""
        expected, optional = set(others), set()
        for module, (n, k) in self.modules.items():
            tensors = self._expected(module, n, k)
            expected |= {f"{module}.{suffix}" for suffix in tensors if suffix not in _OPTIONAL}
            optional |= {f"{module}.{suffix}" for suffix in _OPTIONAL}
        found = needed_names(self.catalogue, is_tied)
        found -= {name for name in found - expected if name in optional or self._is_empty_bias(name)}
        check_names(self.folder, found, expected, "config.json")
        for module, (n, k) in self.modules.items():
            for suffix, (shape, dtypes) in self._expected(module, n, k).items():
                self._check_tensor(f"{module}.{suffix}", shape, dtypes)

    def read(self, module: str) -> Weight:
        n, k = self.modules[module]
        names = {suffix: f"{module}.{suffix}" for suffix in (*self._expected(module, n, k), *_OPTIONAL)}
        stored = {s: read_tensor(self.catalogue[name]) for s, name in names.items() if name in self.catalogue}
        self.bytes_read += sum(tensor.nbytes for tensor in stored.values())
        if self.progress is not None:
            self.progress(self.bytes_read, self.num_bytes)
        where = f"{self.folder}: {module}"
        return _LAYOUTS[self._layout(module)](stored, self.scheme, where)

    def _layout(self, module: str) -> str:
        if not self.scheme.covers(module):
            return "plain"
        return f"{self.scheme.layout} {self.scheme.bits}"

    def _expected(self, module: str, n: int, k: int) -> _Expected:
        return _EXPECTED[self._layout(module)](self.scheme, n, k, f"{self.folder}: {module}")

    def _check_tensor(self, name: str, shape: tuple[int, ...], dtypes: tuple[str, ...]) -> None:
        entry = self.catalogue.get(name)
        if entry is None:
            return  # an optional one
        if entry.dtype not in dtypes:
            raise UnsupportedModel(f"{entry.path}: {name} has the dtype {entry.dtype}; expected {' or '.join(dtypes)}")
        # A scale of a whole matrix may be a number, a list of one or a matrix of one.
        same = entry.shape == shape or (_size(shape) == 1 and _size(entry.shape) == 1)
        if not same:
            raise ModelError(f"{entry.path}: {name} has the shape {list(entry.shape)}; expected {list(shape)}")

    def _is_empty_bias(self, name: str) -> bool:
        """Some tools write a bias of zeros where the model has none."""
        module = name.removesuffix(".bias")
        return module in self.modules and name != module and not read_tensor(self.catalogue[name]).any()


def _size(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


# ---- what is stored ----

_OPTIONAL = ("g_idx", "weight_g_idx", "weight_shape")


def _plain_tensors(scheme: Quantisation, n: int, k: int, where: str) -> _Expected:
    return {"weight": ((n, k), (*_FLOATS, "F64"))}


def _fp8_tensors(scheme: Quantisation, n: int, k: int, where: str) -> _Expected:
    tensors: _Expected = {"weight": ((n, k), ("F8_E4M3",))}
    if scheme.block is not None:
        tensors["weight_scale_inv"] = ((-(-n // scheme.block), -(-k // scheme.block)), _FLOATS)
    else:
        tensors["weight_scale"] = ((), _FLOATS)
    if scheme.has_input_scale:
        tensors["input_scale"] = ((), _FLOATS)
    return tensors


def _compressed_fp8_tensors(scheme: Quantisation, n: int, k: int, where: str) -> _Expected:
    tensors = _fp8_tensors(scheme, n, k, where)
    if scheme.block is not None:
        tensors["weight_scale"] = tensors.pop("weight_scale_inv")
    elif scheme.by_rows:
        tensors["weight_scale"] = ((n, 1), _FLOATS)
    return tensors


def _awq_tensors(scheme: Quantisation, n: int, k: int, where: str) -> _Expected:
    groups = _num_groups(scheme, k, where)
    _require_multiple(n, where)
    tensors: _Expected = {
        "qweight": ((k, n // _PER_WORD), ("I32",)),
        "scales": ((groups, n), _FLOATS),
        "qzeros": ((groups, n // _PER_WORD), ("I32",)),
    }
    return tensors


def _gptq_tensors(scheme: Quantisation, n: int, k: int, where: str) -> _Expected:
    _require_multiple(k, where)
    return {**_awq_tensors(scheme, n, k, where), "qweight": ((k // _PER_WORD, n), ("I32",)), "g_idx": ((k,), ("I32",))}


def _compressed_int4_tensors(scheme: Quantisation, n: int, k: int, where: str) -> _Expected:
    groups = _num_groups(scheme, k, where)
    _require_multiple(k, where)
    tensors: _Expected = {
        "weight_packed": ((n, k // _PER_WORD), ("I32",)),
        "weight_scale": ((n, groups), _FLOATS),
        "weight_g_idx": ((k,), ("I32",)),
        "weight_shape": ((2,), ("I64", "I32")),
    }
    if not scheme.symmetric:
        _require_multiple(n, where)
        tensors["weight_zero_point"] = ((n // _PER_WORD, groups), ("I32",))
    return tensors


def _num_groups(scheme: Quantisation, k: int, where: str) -> int:
    group = k if scheme.group < 0 else scheme.group
    if k % group:
        raise UnsupportedModel(f"{where} has {k} columns; expected a multiple of the group of {group}")
    return k // group


def _require_multiple(size: int, where: str) -> None:
    if size % _PER_WORD:
        raise UnsupportedModel(f"{where} has a side of {size}; expected a multiple of {_PER_WORD}, the codes in a word")


# ---- from stored tensors to matrices ----


def _read_plain(stored: Mapping[str, Tensor], scheme: Quantisation, where: str) -> Weight:
    return stored["weight"]


def _read_fp8(stored: Mapping[str, Tensor], scheme: Quantisation, where: str) -> Weight:
    values = stored["weight"]
    n, k = values.shape
    if values.float().isnan().any():
        raise ModelError(f"{where}.weight has numbers that are no numbers (NaN); fetch or quantise the model again")
    scales = stored["weight_scale_inv"] if "weight_scale_inv" in stored else stored["weight_scale"]
    scales = _checked(scales, f"{where}: its weight scale").float()
    static = None
    if scheme.has_input_scale:
        static = _checked(stored["input_scale"], f"{where}.input_scale").float().reshape(())
        if static == 0:
            raise ModelError(f"{where}.input_scale is 0; expected a positive number: quantise the model again")
    if scheme.block is not None:
        return Fp8Matrix(values, scales, scheme.block, scheme.block)
    return Fp8Matrix(values, scales.reshape(-1, 1).expand(n, 1).contiguous(), 1, k, static)


def _read_awq(stored: Mapping[str, Tensor], scheme: Quantisation, where: str) -> Weight:
    """Codes are [K, N], eight neighbours of N in a word."""
    codes, zeros = (_nibbles(stored[name], _AWQ_ORDER).t() for name in ("qweight", "qzeros"))
    scales = _checked(stored["scales"], f"{where}.scales").t().contiguous()
    return _groups(codes, scales, zeros.contiguous())


def _read_gptq(stored: Mapping[str, Tensor], scheme: Quantisation, where: str) -> Weight:
    """Codes are [K, N], eight neighbours of K in a word; zero points have eight neighbours of N."""
    codes = _nibbles(stored["qweight"].t().contiguous())
    zeros = _nibbles(stored["qzeros"]).t().contiguous()
    if scheme.zeros_are_less_one:
        zeros = zeros + 1
    scales = _checked(stored["scales"], f"{where}.scales").t().contiguous()
    return _in_order(_groups(codes, scales, zeros), stored.get("g_idx"), where)


def _read_compressed_int4(stored: Mapping[str, Tensor], scheme: Quantisation, where: str) -> Weight:
    codes = _nibbles(stored["weight_packed"])
    shape = stored.get("weight_shape")
    if shape is not None and shape.tolist() != list(codes.shape):
        raise ModelError(f"{where}.weight_shape is {shape.tolist()}; expected {list(codes.shape)}: fetch it again")
    scales = _checked(stored["weight_scale"], f"{where}.weight_scale")
    zeros = None
    if not scheme.symmetric:
        zeros = _nibbles(stored["weight_zero_point"].t().contiguous()).t().contiguous()
    return _in_order(_groups(codes, scales, zeros), stored.get("weight_g_idx"), where)


def _groups(codes: Tensor, scales: Tensor, zeros: Tensor | None) -> GroupMatrix:
    """codes [N, K], scales and zeros [N, groups]."""
    group = codes.shape[1] // scales.shape[1]
    return GroupMatrix(pack_nibbles(codes), scales, 4, group, zero=8 if zeros is None else 0, zeros=zeros)


def _in_order(matrix: GroupMatrix, groups: Tensor | None, where: str) -> Weight:
    """The matrix; dequantised where the columns of a group are not neighbours (act-order). `groups`: of each column."""
    k = matrix.shape[1]
    if groups is None or torch.equal(groups.long(), torch.arange(k) // matrix.group):
        return matrix
    num_groups = matrix.scales.shape[1]
    if groups.min() < 0 or groups.max() >= num_groups:
        raise ModelError(f"{where}.g_idx names groups outside 0 to {num_groups - 1}; fetch the model again")
    log.warning("%s is dequantised: the columns of its groups are scattered (act-order)", where)
    scale, offset = (each[:, groups.long()] for each in matrix.affine())
    return torch.addcmul(offset, matrix.unpacked().float(), scale)


def _nibbles(words: Tensor, order: tuple[int, ...] = tuple(range(_PER_WORD))) -> Tensor:
    """int32 [rows, words] -> uint8 codes [rows, 8 * words]; `order`: the nibble of each of eight neighbours."""
    shifts = torch.tensor(order, dtype=torch.int32) * 4
    return (words[..., None] >> shifts & 15).to(torch.uint8).flatten(1)


def _checked(scales: Tensor, where: str) -> Tensor:
    """The scales. One that is 0 makes weights that are 0."""
    if not scales.isfinite().all() or (scales < 0).any():
        raise ModelError(f"{where}: expected finite numbers, none negative; fetch or quantise the model again")
    return scales


_EXPECTED: dict[str, Callable[[Quantisation, int, int, str], _Expected]] = {
    "plain": _plain_tensors,
    "fp8 8": _fp8_tensors,
    "compressed 8": _compressed_fp8_tensors,
    "compressed 4": _compressed_int4_tensors,
    "awq 4": _awq_tensors,
    "gptq 4": _gptq_tensors,
}
_LAYOUTS: dict[str, Callable[[Mapping[str, Tensor], Quantisation, str], Weight]] = {
    "plain": _read_plain,
    "fp8 8": _read_fp8,
    "compressed 8": _read_fp8,
    "compressed 4": _read_compressed_int4,
    "awq 4": _read_awq,
    "gptq 4": _read_gptq,
}
