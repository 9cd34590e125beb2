"""A draft that is a patch on its target: some of the target's layers, each with a small correction.

The file is a GGUF with an architecture name of our own. It holds the numbers of the target's layers that the draft
uses, a quantised difference for each of their matrices, the draft's own norms, and optionally a short list of tokens
that the draft may propose. The draft shares the target's embedding and head in memory. Lossy differences are fine: a
draft only guesses.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from faser.errors import ConfigError, ModelError
from faser.models import gguf
from faser.models.config import ModelConfig
from faser.models.gguf.reader import gguf_package
from faser.models.quantised import dequantise
from faser.models.transformer import Transformer

ARCHITECTURE = "faser-draft"
MATRICES = ("qkv", "out", "gate_up", "down")  # of Layer; stored as differences
QUANT_TYPES = ("TQ2_0", "Q4_0", "Q8_0")  # ternary, 4 and 8 bits
BLOCK = 256  # numbers per scale in TQ2_0; the size of a matrix must be a multiple of it, that of a row need not


@dataclass(frozen=True)
class Patch:
    """The difference between a target and its draft."""

    source_layers: tuple[int, ...]  # of the target, in the draft's order
    differences: tuple[Mapping[str, Tensor], ...]  # by layer: each of MATRICES, shaped as in Layer
    norms: tuple[Mapping[str, Tensor], ...]  # by layer: the other tensors of Layer, whole
    final_norm: Tensor
    vocabulary: Tensor | None  # [short] token ids the draft may propose, ascending; None: all


def apply_patch(target: Transformer, patch: Patch) -> Transformer:
    """The draft. It shares the target's embedding and, unless its vocabulary is short, the head."""
    config = patched_config(target.config, patch)
    draft = Transformer.shared(target, config, short_vocabulary=patch.vocabulary)
    draft.final_norm.copy_(patch.final_norm)
    for layer, source, difference, norms in zip(
        draft.layers, patch.source_layers, patch.differences, patch.norms, strict=True
    ):
        for name, tensor in layer.tensors().items():
            if name in MATRICES:
                own = dequantise(getattr(target.layers[source], name))
                tensor.copy_(own + difference[name].to(tensor.device).float())
            else:
                tensor.copy_(norms[name])
    return draft


def patched_config(target: ModelConfig, patch: Patch) -> ModelConfig:
    """The shape of the draft."""
    windows = tuple(target.windows[layer] for layer in patch.source_layers) if target.windows else ()
    return replace(target, num_layers=len(patch.source_layers), vision=None, windows=windows)


def read_patch(path: str | Path, target: ModelConfig) -> Patch:
    """Read a draft file and check that it was made for a target of this shape."""
    file = gguf.open_file(path)
    _require(file.architecture == ARCHITECTURE, path, f"a {ARCHITECTURE} file, not {file.architecture!r}")
    made_for, ours = file.array("faser.draft.target_shape", int), _shape(target)
    _require(made_for == ours, path, f"a draft for {ours} (layers, hidden, MLP, vocabulary), not for {made_for}")
    source_layers = _read_ids(file, "faser.draft.source_layers", target.num_layers)
    _require(len(source_layers) > 0, path, "at least one layer")
    vocabulary = _read_ids(file, "faser.draft.vocabulary", target.vocab_size)
    shapes = _layer_shapes(target)
    layers = [
        {name: _read_tensor(file, f"blk.{index}.{name}", shape) for name, shape in shapes.items()}
        for index in range(len(source_layers))
    ]
    foreign = set(file.tensors) - {f"blk.{i}.{name}" for i in range(len(layers)) for name in shapes} - {"output_norm"}
    _require(not foreign, path, f"no {min(foreign, default='')}, which the target does not have")
    return Patch(
        source_layers,
        tuple({name: tensor for name, tensor in layer.items() if name in MATRICES} for layer in layers),
        tuple({name: tensor for name, tensor in layer.items() if name not in MATRICES} for layer in layers),
        _read_tensor(file, "output_norm", (target.hidden_size,)),
        torch.tensor(vocabulary) if vocabulary else None,
    )


def write_patch(path: str | Path, patch: Patch, target: ModelConfig, quant_type: str, note: str) -> None:
    """Write a draft file: differences in `quant_type`, the rest in float32. `note` tells how it was made."""
    if quant_type not in QUANT_TYPES:
        raise ConfigError(f"quant_type={quant_type!r}: expected one of {', '.join(QUANT_TYPES)}")
    package = gguf_package()
    writer = package.GGUFWriter(str(path), ARCHITECTURE)
    writer.add_string("general.description", note)
    writer.add_array("faser.draft.target_shape", _shape(target))
    writer.add_array("faser.draft.source_layers", list(patch.source_layers))
    if patch.vocabulary is not None:
        writer.add_array("faser.draft.vocabulary", patch.vocabulary.tolist())
    quantisation = package.GGMLQuantizationType[quant_type]
    for index, (difference, norms) in enumerate(zip(patch.differences, patch.norms, strict=True)):
        for name, tensor in difference.items():
            blocks = package.quants.quantize(_numpy(tensor).reshape(-1, BLOCK), quantisation)
            writer.add_tensor(f"blk.{index}.{name}", blocks, raw_dtype=quantisation)
        for name, tensor in norms.items():
            writer.add_tensor(f"blk.{index}.{name}", _numpy(tensor))
    writer.add_tensor("output_norm", _numpy(patch.final_norm))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def ternary(difference: Tensor) -> Tensor:
    """The tensor rounded to -s, 0 or s, with one s per 256 numbers along the rows; TQ2_0 stores it without loss.

    Magnitudes below 0.7 of the block's mean become 0, and s is the mean magnitude of the others: a small squared error
    for normally distributed numbers.
    """
    blocks = difference.reshape(-1, BLOCK)
    size = blocks.abs()
    kept = size > 0.7 * size.mean(dim=-1, keepdim=True)
    scale = (size * kept).sum(dim=-1, keepdim=True) / kept.sum(dim=-1, keepdim=True).clamp(min=1)
    return (blocks.sign() * kept * scale.half().to(blocks.dtype)).reshape(difference.shape)


def _read_ids(file: gguf.GgufFile, key: str, below: int) -> tuple[int, ...]:
    ids = tuple(file.array(key, int))
    _require(all(0 <= each < below for each in ids), file.path, f"{key} from 0 to {below - 1}")
    return ids


def _read_tensor(file: gguf.GgufFile, name: str, shape: tuple[int, ...]) -> Tensor:
    tensor = file.tensor(name)
    _require(tensor.numel() == math.prod(shape), file.path, f"{name} of the target's shape {list(shape)}")
    return tensor.reshape(shape)


def _layer_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    model = Transformer.empty(
        replace(config, num_layers=1, vision=None, windows=()), torch.float32, "meta", max_positions=1
    )
    return {name: tuple(tensor.shape) for name, tensor in model.layers[0].tensors().items()}


def _shape(config: ModelConfig) -> list[int]:
    return [config.num_layers, config.hidden_size, config.intermediate_size, config.vocab_size]


def _numpy(tensor: Tensor) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.ascontiguousarray(tensor.detach().float().cpu().numpy())


def _require(valid: bool, path: str | Path, expected: str) -> None:
    if not valid:
        raise ModelError(f"{path}: expected {expected}; make one with tools/distill.py")
