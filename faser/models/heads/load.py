"""From a folder to a head in memory and back: the names of a head's tensors in public checkpoints.

Every tensor is accounted for: a missing, unknown or misshapen one is refused by name before a weight is read. Some
EAGLE-3 heads are published in pickled form only; they are read without running code. Quantised weights are dequantised:
a head is small. A head is written as EAGLE-3 or as DFlash and DSpark in their raw form, which vLLM and SGLang load.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from faser.errors import ModelError, UnsupportedModel
from faser.models import weights
from faser.models.config import config_dict
from faser.models.heads.block import BlockHead
from faser.models.heads.config import EAGLE3, HeadConfig
from faser.models.heads.eagle3 import Eagle3Head
from faser.models.heads.head import DraftHead
from faser.models.quantisation import Quantisation
from faser.models.quantised import folders
from faser.models.quantised.matrix import plain
from faser.models.transformer import Transformer
from faser.models.weights import CheckpointTensor, Destination, whole
from faser.progress import Update

MASK_FILE = "mask_embedding.pt"
PICKLED_FILE = "pytorch_model.bin"
_EMBEDDING, _OUTPUT, _MARKOV_IN = "embed_tokens.weight", "lm_head.weight", "markov_head.markov_w1.weight"
_EMBEDDINGS = (_EMBEDDING, _MARKOV_IN)  # looked up and never quantised
_OTHER_NAMES = {  # beginnings of names in some files, and the usual ones
    "midlayer.": "layers.0.",
    "markov_w1.": "markov_head.markov_w1.",
    "markov_w2.": "markov_head.markov_w2.",
    "confidence_proj.": "confidence_head.proj.",
}
_OFFSETS, _IS_DRAFTED = "d2t", "t2d"  # of the short vocabulary: target id - row, and a flag for each target id
# as safetensors spells them
_DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


# ---- loading ----


def load_head(
    folder: str | Path,
    head_config: HeadConfig,
    target: Transformer,
    dtype: torch.dtype,
    max_positions: int | None = None,
    progress: Update | None = None,
) -> DraftHead:
    """Read a head to the target's device. What its checkpoint does not have of embedding and head is the target's."""
    folder = Path(folder)
    head_config = head_config.resolve(target.config, str(folder))
    checkpoint = _open(folder)
    catalogue = checkpoint.catalogue
    shared = {"own_embedding": _EMBEDDING in catalogue, "own_head": _OUTPUT in catalogue}
    make = Eagle3Head if head_config.kind == EAGLE3 else BlockHead
    head = make(head_config, target, dtype, max_positions, **shared)
    destinations = destinations_of(head)
    vocabulary = _read_vocabulary(folder, checkpoint, head_config)
    checkpoint = checkpoint.without(_OFFSETS, _IS_DRAFTED, "rotary_emb.inv_freq")
    if head_config.layers.quantisation is None:
        weights.check_names(folder, checkpoint.catalogue.keys(), destinations.keys(), "config.json")
        weights.check_tensors(checkpoint.catalogue, destinations)
        checkpoint.fill(destinations, progress)
    else:
        checkpoint.fill_dequantised(folder, head_config.layers.quantisation, destinations, progress)
    if head.vocabulary is not None and vocabulary is not None:
        head.vocabulary.copy_(vocabulary)
    if isinstance(head, BlockHead):
        head.mask_embedding = _read_mask_embedding(folder, head)
    return head


@dataclass(frozen=True)
class _HeadFile:
    """The tensors of a checkpoint; EAGLE-3's layer has one name however the file spells it."""

    catalogue: Mapping[str, CheckpointTensor]
    unpickled: Mapping[str, Tensor] | None  # None: the tensors are in safetensors files
    layer: str = "layers.0."  # how the file begins the names of EAGLE-3's layer

    def without(self, *endings: str) -> _HeadFile:
        """Less the tensors whose names end so."""
        kept = {name: entry for name, entry in self.catalogue.items() if not name.endswith(endings)}
        return replace(self, catalogue=kept)

    def fill(self, destinations: Mapping[str, Destination], progress: Update | None) -> None:
        if self.unpickled is None:
            weights.fill(destinations, self.catalogue, progress)
            return
        done, total = 0, sum(self.unpickled[name].nbytes for name in destinations)
        for name, destination in destinations.items():
            destination.tensor.copy_(self.unpickled[name])
            done += self.unpickled[name].nbytes
            if progress is not None:
                progress(done, total)

    def fill_dequantised(
        self,
        folder: Path,
        scheme: Quantisation,
        destinations: Mapping[str, Destination],
        progress: Update | None,
    ) -> None:
        """As `fill`, with the matrices of `scheme` dequantised; the names there are those of the file."""
        if self.unpickled is not None:
            raise UnsupportedModel(f"{folder}: pickled and quantised; expected safetensors of a quantised head")
        matrices = [
            name.removesuffix(".weight")
            for name, destination in destinations.items()
            if len(destination.shape) == 2 and name not in _EMBEDDINGS
        ]
        quantised = {name for name in matrices if scheme.covers(name.replace("layers.0.", self.layer, 1))}
        folders.fill_dequantised(folder, self.catalogue, scheme, destinations, quantised, progress)

    def offsets(self) -> Tensor:
        """Of the short vocabulary."""
        if self.unpickled is not None:
            return self.unpickled[_OFFSETS]
        with safe_open(self.catalogue[_OFFSETS].path, framework="pt") as file:
            tensor: Tensor = file.get_tensor(_OFFSETS)
        return tensor


def _open(folder: Path) -> _HeadFile:
    path = folder / PICKLED_FILE
    if weights.has_safetensors(folder) or not path.is_file():
        stored = weights.read_catalogue(folder)
        layer = "midlayer." if any(name.startswith("midlayer.") for name in stored) else "layers.0."
        return _HeadFile({_plain(name): entry for name, entry in stored.items()}, None, layer)
    state = _unpickle(path)
    if not isinstance(state, dict) or not all(isinstance(tensor, Tensor) for tensor in state.values()):
        raise ModelError(f"{path}: expected tensors by name; fetch the model again")
    tensors = {_plain(name): tensor for name, tensor in state.items()}
    catalogue = {
        name: CheckpointTensor(path, 0, tuple(tensor.shape), _DTYPES.get(tensor.dtype, str(tensor.dtype)))
        for name, tensor in tensors.items()
    }
    return _HeadFile(catalogue, tensors)


def _plain(name: str) -> str:
    """The usual name of a tensor."""
    for other, usual in _OTHER_NAMES.items():
        if name.startswith(other):
            return name.replace(other, usual, 1)
    return name


def _unpickle(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)  # weights_only: no code of the file runs
    except Exception as error:  # pickle, zip and torch raise their own
        raise ModelError(f"{path}: cannot be read ({type(error).__name__}); fetch the model again") from error


def _read_vocabulary(folder: Path, checkpoint: _HeadFile, config: HeadConfig) -> Tensor | None:
    """The token id of each row of the head, int64; None where the head covers the whole vocabulary."""
    entry, size = checkpoint.catalogue.get(_OFFSETS), config.num_output_rows
    if entry is None:
        if config.is_short:
            raise ModelError(f"{folder}: the model lacks {_OFFSETS}; draft_vocab_size={size} asks for it")
        return None
    weights.check_shape(entry.path, _OFFSETS, entry.shape, (size,), "config.json")
    offsets = checkpoint.offsets()
    ids = torch.arange(size) + offsets.long()
    if ids.min() < 0 or ids.max() >= config.layers.vocab_size or len(set(ids.tolist())) != size:
        raise ModelError(f"{entry.path}: {_OFFSETS} leads to tokens twice or outside the vocabulary; fetch it again")
    if not config.is_short and offsets.any():
        raise ModelError(f"{entry.path}: {_OFFSETS} reorders the whole vocabulary; expected draft_vocab_size below it")
    return ids if config.is_short else None


def _read_mask_embedding(folder: Path, head: BlockHead) -> Tensor | None:
    path = folder / MASK_FILE
    if not path.is_file():
        return None
    state = _unpickle(path)
    if isinstance(state, dict):
        of_token = state.get("mask_token_id", head.head_config.mask_token_id)
        if of_token != head.head_config.mask_token_id:
            raise ModelError(f"{path}: of token {of_token}; expected mask_token_id={head.head_config.mask_token_id}")
        state = state.get("embedding")
    if not isinstance(state, Tensor) or state.numel() != head.config.hidden_size:
        raise ModelError(f"{path}: expected {head.config.hidden_size} numbers; fetch the model again")
    return state.reshape(-1).to(head.device, head.dtype)


# ---- names ----


def destinations_of(head: DraftHead) -> dict[str, Destination]:
    """Every tensor that the checkpoint must hold, by name, without the vocabulary and the mask's embedding."""
    destinations = {"fc.weight": whole(head.fc), "norm.weight": whole(head.final_norm)}
    if head.owns_embedding:
        destinations[_EMBEDDING] = whole(head.embedding)
    if head.owns_head:
        destinations[_OUTPUT] = whole(plain(head.head))
    for index, layer in enumerate(head.layers):
        for name, destination in weights.layer_destinations(layer, head.config).items():
            destinations[f"layers.{index}.{name}"] = destination
    if isinstance(head, Eagle3Head):
        return destinations | _eagle3_destinations(head)
    assert isinstance(head, BlockHead)
    return destinations | _block_destinations(head)


def _eagle3_destinations(head: Eagle3Head) -> dict[str, Destination]:
    destinations = {"layers.0.hidden_norm.weight": whole(head.state_norm)}
    if head.input_norm is not None:
        destinations["input_norm.weight"] = whole(head.input_norm)
    if head.fc_norm is not None:
        destinations |= {f"fc_norm.{index}.weight": whole(norm) for index, norm in enumerate(head.fc_norm)}
    return destinations


def _block_destinations(head: BlockHead) -> dict[str, Destination]:
    optional = {
        _MARKOV_IN: head.markov_in,
        "markov_head.markov_w2.weight": head.markov_out,
        "confidence_head.proj.weight": head.confidence_weight,
        "confidence_head.proj.bias": head.confidence_bias,
    }
    destinations = {name: whole(tensor) for name, tensor in optional.items() if tensor is not None}
    return {"hidden_norm.weight": whole(head.feature_norm)} | destinations


# ---- writing ----


def write_head(head: DraftHead, folder: str | Path) -> None:
    """Write config.json and the weights that are not the target's. Files of the same names are replaced."""
    folder = Path(folder)
    description = _describe(head)
    tensors = {name: _stored(name, destination) for name, destination in destinations_of(head).items()}
    if isinstance(head, Eagle3Head):  # the name that every reader of raw EAGLE-3 knows
        tensors = {name.replace("layers.0.", "midlayer.", 1): tensor for name, tensor in tensors.items()}
    if head.vocabulary is not None:
        ids = head.vocabulary.cpu()
        tensors[_OFFSETS] = ids - torch.arange(len(ids))
        tensors[_IS_DRAFTED] = torch.zeros(head.config.vocab_size, dtype=torch.bool).index_fill_(0, ids, True)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(description, indent=2) + "\n", encoding="utf-8")
    save_file(tensors, folder / weights.SINGLE_FILE, metadata={"format": "pt"})
    if isinstance(head, BlockHead) and head.mask_embedding is not None:
        state = {"mask_token_id": head.head_config.mask_token_id, "embedding": head.mask_embedding.cpu().clone()}
        torch.save(state, folder / MASK_FILE)


def _stored(name: str, destination: Destination) -> Tensor:
    """The tensor as the checkpoint has it: of a norm that all heads share, one row."""
    tensor = destination.tensor
    if tuple(tensor.shape) != destination.shape:
        if not torch.equal(tensor, tensor[:1].expand_as(tensor)):
            raise ModelError(f"{name}: differs from head to head; a checkpoint has one for all heads")
        tensor = tensor[0]
    return tensor.cpu().clone(memory_format=torch.contiguous_format)


def _describe(head: DraftHead) -> dict[str, Any]:
    config = head.head_config
    described = config_dict(head.config, str(head.dtype).removeprefix("torch."))
    described |= {"draft_vocab_size": config.num_output_rows, "target_hidden_size": config.target_hidden_size}
    assert config.feature_layers is not None  # resolved against the target
    return described | (_describe_eagle3(config) if config.kind == EAGLE3 else _describe_block(config))


def _describe_eagle3(config: HeadConfig) -> dict[str, Any]:
    features = list(config.feature_layers or ())
    name = "LlamaForCausalLMEagle3" if config.layers.family == "llama" else "Eagle3Qwen3ForCausalLM"
    return {
        "architectures": [name],
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.norm_before_fc,
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
        "num_aux_hidden_states": len(features),
        # vLLM reads the numbers from the outer object, SGLang from the inner one.
        "eagle_aux_hidden_state_layer_ids": features,
        "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": features},
    }


def _describe_block(config: HeadConfig) -> dict[str, Any]:
    if not config.layers.qk_norm:
        raise ModelError("a block head without norms of queries and keys cannot be written; public ones have them")
    outputs = [number - 1 for number in config.feature_layers or ()]
    described = {
        "block_size": config.num_block_rows,
        "layer_types": ["full_attention"] * config.layers.num_layers,
        "dflash_config": {"mask_token_id": config.mask_token_id, "target_layer_ids": outputs},
    }
    if not (config.markov_rank or config.confidence or config.anchor_predicts):
        return {"architectures": ["DFlashDraftModel"], **described}
    return {
        "architectures": ["Qwen3DSparkModel"],
        **described,
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": outputs,
        "sample_from_anchor": config.anchor_predicts,
        "dspark_bonus_anchor": not config.anchor_predicts,
        "markov_rank": config.markov_rank,
        "markov_head_type": "vanilla",
        "enable_confidence_head": config.confidence,
        "confidence_head_with_markov": config.confidence_with_markov,
    }
