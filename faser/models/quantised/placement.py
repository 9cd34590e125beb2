"""Quantised matrices put where a model computes, and the whole model around them.

Knows devices, and which parts make a matrix of a layer. Knows nothing of files: a loader reads a part when it is asked
for one, so that no more than a matrix is held besides the model.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, Literal

import torch
from torch import Tensor

from faser.models.quantised.matrix import Fp8Matrix, GroupMatrix, QuantisedMatrix, Stack, Weight, dequantise, stack
from faser.models.quantised.packed import PackedMatrix, for_cpu, packing_pays
from faser.models.quantised.rounding import to_groups
from faser.models.quantised.tiled import TiledMatrix
from faser.models.transformer import Layer, Transformer

log = logging.getLogger("faser.engine")

Mode = str  # of the option `quantised`: auto, on or off

# The matrices of a layer, each with its parts as checkpoints name them.
PARTS = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "out": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
_DRAFT_GROUP = 32


@dataclass(frozen=True)
class Placement:
    """How a device holds the quantised weights of a model."""

    dtype: torch.dtype  # of the model
    device: torch.device
    keeps: bool  # False: dequantised

    @classmethod
    def choose(cls, mode: Mode, dtype: torch.dtype, device: torch.device | str) -> Placement:
        device = torch.device(device)
        if mode == "auto" and device.type != "cpu":
            _say_auto()
        return cls(dtype, device, mode == "on" or (mode == "auto" and device.type == "cpu" and packing_pays()))

    def place(self, weight: Weight) -> Weight:
        if self.device.type == "cpu":
            return for_cpu(weight, self.dtype, self.keeps)
        kept = for_gpu(weight, self.device) if self.keeps else None
        return dequantise(weight).to(self.device, self.dtype) if kept is None else kept


@lru_cache
def _say_auto() -> None:
    log.warning(
        "quantised weights are dequantised on a GPU; --quantised on multiplies by them as they are stored, in less "
        "memory (docs/quantisation.md has its limits)"
    )


def for_gpu(weight: Weight, device: torch.device) -> QuantisedMatrix | None:
    """The form in which a GPU multiplies by a weight (runtime/cuda/quantised.py); None: it cannot by what is stored."""
    kept: QuantisedMatrix | None = None
    if isinstance(weight, GroupMatrix):
        kept = TiledMatrix.tile(weight.to(device))
    elif isinstance(weight, Fp8Matrix) and _has_fp8(device):
        kept = weight.to(device)
    if kept is None and isinstance(weight, QuantisedMatrix):
        _say_dequantised(weight.format)
    return kept


@lru_cache
def _say_dequantised(kind: str) -> None:
    log.warning("weights of %s are dequantised: this GPU has no product with them", kind)


def _has_fp8(device: torch.device) -> bool:
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 9)


def assemble(
    model: Transformer, read: Callable[[str], Weight], placement: Placement, head: str | None = None
) -> Transformer:
    """The model with its matrices, which `read` returns by name; `head` is the name of a quantised head."""

    def matrix(index: int, field: str) -> Weight:
        return placement.place(stack([read(f"model.layers.{index}.{part}") for part in PARTS[field]]))

    layers = tuple(_with_matrices(layer, partial(matrix, index)) for index, layer in enumerate(model.layers))
    return with_weights(model, layers, model.head if head is None else placement.place(read(head)))


def with_weights(model: Transformer, layers: tuple[Layer, ...], head: Weight) -> Transformer:
    """The same model with these layers and this head."""
    return Transformer(
        model.config, model.embedding, layers, model.final_norm, head, model.max_positions, model.vocabulary,
        model.vision,
    )  # fmt: skip


def _with_matrices(layer: Layer, matrix: Callable[[str], Weight]) -> Layer:
    matrices: dict[str, Any] = {field: matrix(field) for field in PARTS}
    return replace(layer, **matrices)


def pack_draft(draft: Transformer, target: Transformer) -> Transformer:
    """A draft on a CPU with rounded weights: four bits in its layers, eight in a head of its own. It only guesses."""

    def pack(weight: Weight, bits: int) -> Weight:
        if not isinstance(weight, Tensor) or weight.shape[1] % _DRAFT_GROUP:
            return weight
        return for_cpu(to_groups(weight, bits, _DRAFT_GROUP, symmetric=False), draft.dtype, packs=True)

    def packed(layer: Layer) -> Layer:
        return _with_matrices(layer, lambda field: pack(getattr(layer, field), 4))

    layers = tuple(map(packed, draft.layers))
    is_shared = draft.head is target.head or draft.head is draft.embedding
    return with_weights(draft, layers, draft.head if is_shared else pack(draft.head, 8))


def is_packed(model: Transformer) -> bool:
    """Whether a CPU computes with the codes of its layers."""
    return not isinstance(model.layers[0].gate_up, Tensor) and model.device.type == "cpu"


def packed_matrices(model: Transformer) -> Literal["none", "some", "all"]:
    """How many of the matrices of its layers are packed. Products with these round rows."""
    matrices = [getattr(layer, name) for layer in model.layers for name in PARTS]
    packed = [isinstance(part, PackedMatrix) for matrix in matrices for part in _parts(matrix)]
    return "all" if all(packed) else "some" if any(packed) else "none"


def _parts(weight: Weight) -> tuple[Weight, ...]:
    return weight.parts if isinstance(weight, Stack) else (weight,)
