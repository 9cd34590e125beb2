"""From a name to a model in memory: find the folder, check it, read the safetensors into the fused weights.

Knows the names tensors have in a Hugging Face checkpoint and the folder's layout. Knows nothing of how a model runs.
Everything about a folder is checked before the first weight is read, and every complaint names the file or tensor.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from faser.errors import ConfigError, MissingPackage, ModelError, UnsupportedModel
from faser.extras import install_hint
from faser.models.config import DTYPES, ModelConfig, read_object
from faser.models.transformer import Layer, Transformer
from faser.text.tokenizer import TOKENIZER_FILE

Progress = Callable[[int, int], None]  # (bytes read, bytes in all)

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_PIECE_BYTES = 16 << 20  # read at a time
_READERS = 8  # threads, to a GPU: one copies out of the file cache at a fraction of the speed of the bus
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_HUB_FILES = ["*.json", "model*.safetensors", "tokenizer*", "*.jinja"]
_NAMES_SHOWN = 4


# ---- which model ----


def resolve(name_or_path: str | Path) -> Path:
    """The folder of a model given as a folder or as a hub name, fetched into the hub's cache if need be."""
    name = str(name_or_path)
    folder = Path(name).expanduser()
    if name and folder.is_dir():
        return folder
    if folder.is_file():
        raise ModelError(f"{name} is a file and no GGUF; expected a model folder: give the one that holds config.json")
    if not _HUB_NAME.fullmatch(name) or name.startswith("."):
        raise ModelError(f"{name!r}: no such folder; expected an existing model folder or a hub name such as org/name")
    return _fetch(name)


def _fetch(name: str) -> Path:
    try:
        import huggingface_hub  # slow to import, and not needed for a folder
    except ImportError:
        raise MissingPackage(
            f"{name}: no such folder here, and the hub cannot be asked: {install_hint('engine', ['huggingface_hub'])}"
        ) from None
    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=_HUB_FILES, ignore_patterns=["*/*"]))
    except Exception as error:  # the hub raises its own, the HTTP library's and the operating system's errors
        raise ModelError(f"{name}: {_hub_remedy(error)} ({_first_line(error)})") from None


def _hub_remedy(error: Exception) -> str:
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        return "the model is gated; accept its terms on huggingface.co, then log in with `hf auth login`"
    if isinstance(error, errors.RepositoryNotFoundError):
        return "no such folder here and no such model on the hub; check the spelling, or `hf auth login` if private"
    return "no such folder here, and the hub cannot provide it; check the network, or give a downloaded folder"


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__


def resolve_dtype(name: str, config: ModelConfig, device_type: str) -> torch.dtype:
    """The dtype to load in. auto is float32 on a CPU, which computes fastest there, and the checkpoint's elsewhere."""
    if name == "auto":
        name = "float32" if device_type == "cpu" else config.dtype
    if name not in DTYPES:
        raise ConfigError(f"dtype={name!r}: expected auto, {', '.join(DTYPES)}")
    dtype: torch.dtype = getattr(torch, name)
    return dtype


# ---- loading ----


def load(
    folder: str | Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
    max_positions: int | None = None,
) -> Transformer:
    """Read the weights of `folder` tensor by tensor into their final places; peak memory is about the model's own."""
    catalogue = _catalogue(Path(folder))
    model = Transformer.empty(config, dtype, device, max_positions)
    slots = tensor_slots(model)
    _check_catalogue(Path(folder), catalogue, slots, config)
    _fill(slots, catalogue, progress)
    return model


@dataclass(frozen=True)
class _Entry:
    """A tensor as the checkpoint holds it."""

    path: Path
    offset: int  # of its first byte in the file
    shape: tuple[int, ...]
    dtype: str  # as safetensors spells it: F32, BF16, ...

    @property
    def row_bytes(self) -> int:
        """Bytes of one index of the first dimension."""
        return _DTYPES[self.dtype].itemsize * torch.Size(self.shape[1:]).numel()

    @property
    def num_bytes(self) -> int:
        return self.row_bytes * self.shape[0]


@dataclass(frozen=True)
class Slot:
    """Where a tensor of the checkpoint goes. A norm shared by all heads spreads over more rows than it has."""

    shape: tuple[int, ...]  # in the checkpoint
    destination: Tensor


def tensor_slots(model: Transformer) -> dict[str, Slot]:
    """Every tensor the checkpoint must hold, by name."""
    slots = {
        "model.embed_tokens.weight": _whole(model.embedding),
        "model.norm.weight": _whole(model.final_norm),
    }
    if not model.config.tie_embeddings:
        slots["lm_head.weight"] = _whole(model.head)
    for index, layer in enumerate(model.layers):
        for name, slot in _layer_slots(layer, model.config).items():
            slots[f"model.layers.{index}.{name}"] = slot
    return slots


def _layer_slots(layer: Layer, config: ModelConfig) -> dict[str, Slot]:
    slots = {
        "input_layernorm.weight": _whole(layer.attention_norm),
        "post_attention_layernorm.weight": _whole(layer.mlp_norm),
        "self_attn.o_proj.weight": _whole(layer.out),
        "mlp.down_proj.weight": _whole(layer.down),
    }
    gate, up = torch.split(layer.gate_up, config.intermediate_size)
    slots |= {"mlp.gate_proj.weight": _whole(gate), "mlp.up_proj.weight": _whole(up)}
    slots |= _qkv_slots(layer.qkv, "weight", config)
    if layer.qkv_bias is not None:
        slots |= _qkv_slots(layer.qkv_bias, "bias", config)
    if layer.out_bias is not None:
        slots["self_attn.o_proj.bias"] = _whole(layer.out_bias)
    if layer.qk_norm is not None:
        query_norm, key_norm = torch.split(layer.qk_norm, [config.num_heads, config.num_kv_heads])
        slots["self_attn.q_norm.weight"] = Slot((config.head_dim,), query_norm)
        slots["self_attn.k_norm.weight"] = Slot((config.head_dim,), key_norm)
    return slots


def _qkv_slots(fused: Tensor, kind: str, config: ModelConfig) -> dict[str, Slot]:
    query_size, key_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    parts = torch.split(fused, [query_size, key_size, key_size])
    return {f"self_attn.{letter}_proj.{kind}": _whole(part) for letter, part in zip("qkv", parts, strict=True)}


def _whole(destination: Tensor) -> Slot:
    return Slot(tuple(destination.shape), destination)


def _fill(slots: Mapping[str, Slot], catalogue: Mapping[str, _Entry], progress: Progress | None) -> None:
    pieces = [piece for name, slot in slots.items() for piece in _pieces(catalogue[name], slot.destination)]
    pieces.sort(key=lambda piece: (piece[0].path, piece[0].offset))
    done, total = 0, sum(part.num_bytes for part, _ in pieces)
    for num_bytes in _copy_all(pieces):
        done += num_bytes
        if progress is not None:
            progress(done, total)


def _pieces(entry: _Entry, destination: Tensor) -> Iterator[tuple[_Entry, Tensor]]:
    """A tensor, some rows at a time, each with their place. A vector stays whole: its place may be many rows."""
    rows_per_piece = max(1, _PIECE_BYTES // entry.row_bytes)
    if len(entry.shape) == 1 or entry.shape[0] <= rows_per_piece:
        yield entry, destination
        return
    for start in range(0, entry.shape[0], rows_per_piece):
        stop = min(start + rows_per_piece, entry.shape[0])
        offset, shape = entry.offset + start * entry.row_bytes, (stop - start, *entry.shape[1:])
        yield _Entry(entry.path, offset, shape, entry.dtype), destination[start:stop]


def _copy_all(pieces: list[tuple[_Entry, Tensor]]) -> Iterator[int]:
    """Read pieces and put them in their places, yielding the bytes of each.

    To a GPU several threads do so, each through page-locked memory, which the GPU reads at full speed. A file is read
    and not mapped: mapped pages would count as memory of the process, and cost a fault each.
    """
    size = max(part.num_bytes for part, _ in pieces)
    on_gpu = pieces[0][1].is_cuda
    buffers: SimpleQueue[Tensor] = SimpleQueue()
    for _ in range(_READERS if on_gpu else 1):
        buffers.put(torch.empty(size, dtype=torch.uint8, pin_memory=on_gpu))

    def copy(piece: tuple[_Entry, Tensor]) -> int:
        part, destination = piece
        buffer = buffers.get()
        try:
            destination.copy_(_read(part, buffer))
        finally:
            buffers.put(buffer)
        return part.num_bytes

    if not on_gpu:
        yield from map(copy, pieces)
        return
    with ThreadPoolExecutor(_READERS) as readers:
        yield from readers.map(copy, pieces)


def _read(part: _Entry, buffer: Tensor) -> Tensor:
    """The part as a tensor over the beginning of the buffer."""
    memory = buffer[: part.num_bytes]
    with part.path.open("rb") as file:
        file.seek(part.offset)
        if file.readinto(memory.numpy().data) != part.num_bytes:
            raise _broken(part.path, EOFError("it has become shorter"))
    return memory.view(_DTYPES[part.dtype]).view(part.shape)


# ---- what the folder holds ----


def _catalogue(folder: Path) -> dict[str, _Entry]:
    """Every tensor of the checkpoint by name, from the headers alone."""
    catalogue: dict[str, _Entry] = {}
    for path in _files(folder):
        header, first = _header(path)
        for name, tensor in header.items():
            start = first + tensor["data_offsets"][0]
            catalogue[name] = _Entry(path, start, tuple(tensor["shape"]), tensor["dtype"])
    return catalogue


def _header(path: Path) -> tuple[dict[str, Any], int]:
    """What a file says of its tensors, and where the first begins. The library, which does not say where, checks it."""
    try:
        safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise _broken(path, error) from error
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header: dict[str, Any] = json.loads(file.read(size))
    header.pop("__metadata__", None)
    return header, 8 + size


def _files(folder: Path) -> list[Path]:
    if (folder / SINGLE_FILE).is_file():
        return [folder / SINGLE_FILE]
    if (folder / INDEX_FILE).is_file():
        return _shards(folder)
    if any(folder.glob("*.bin")) or any(folder.glob("*.pth")) or any(folder.glob("*.pt")):
        raise ModelError(
            f"{folder}: the weights are pickled (.bin, .pt or .pth), which can run code; expected safetensors: "
            "convert with `AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new_folder)` of transformers"
        )
    raise ModelError(f"{folder}: no weights there; expected {SINGLE_FILE} or {INDEX_FILE}: fetch the model again")


def _shards(folder: Path) -> list[Path]:
    index = folder / INDEX_FILE
    names = read_object(index).get("weight_map")
    if not isinstance(names, dict) or not all(
        isinstance(name, str) and Path(name).name == name for name in names.values()
    ):
        raise ModelError(f"{index}: expected a weight_map from tensor to file name; fetch the model again")
    paths = [folder / name for name in sorted(set(names.values()))]
    missing = [path.name for path in paths if not path.is_file()]
    if missing:
        raise ModelError(f"{folder}: {list_names(missing)} missing, named in {INDEX_FILE}; fetch the model again")
    return paths


def _broken(path: Path, error: Exception) -> ModelError:
    return ModelError(f"{path}: not a whole safetensors file ({_first_line(error)}); fetch it again")


def _check_catalogue(
    folder: Path, catalogue: Mapping[str, _Entry], slots: Mapping[str, Slot], config: ModelConfig
) -> None:
    missing = slots.keys() - catalogue.keys()
    if missing:
        raise ModelError(f"{folder}: the checkpoint lacks {list_names(missing)}; its config.json asks for them")
    unexpected = {name for name in catalogue.keys() - slots.keys() if not _harmless(name, config)}
    if unexpected:
        raise ModelError(
            f"{folder}: the checkpoint has {list_names(unexpected)}, which its config.json does not call for"
        )
    for name, slot in slots.items():
        _check_tensor(name, catalogue[name], slot)


def _harmless(name: str, config: ModelConfig) -> bool:
    """Tensors that older tools stored and nothing needs: frequencies, and the copy of a tied head."""
    return name.endswith("rotary_emb.inv_freq") or (config.tie_embeddings and name == "lm_head.weight")


def _check_tensor(name: str, entry: _Entry, slot: Slot) -> None:
    if entry.dtype not in _DTYPES:
        raise UnsupportedModel(
            f"{entry.path}: {name} has the dtype {entry.dtype}; expected one of {', '.join(_DTYPES)}"
        )
    if entry.shape != slot.shape:
        raise ModelError(
            f"{entry.path}: {name} has the shape {list(entry.shape)}; expected {list(slot.shape)} from config.json"
        )


def list_names(names: Iterable[str]) -> str:
    ordered = sorted(names)
    more = len(ordered) - _NAMES_SHOWN
    return ", ".join(ordered[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")


# ---- whether two models can be paired ----


def check_pair(
    target_folder: str | Path, draft_folder: str | Path, target_config: ModelConfig, draft_config: ModelConfig
) -> None:
    """Raise ModelError unless a token id means the same text to both models. Reads no weight.

    Vocabularies padded to different sizes are fine where the tokenizers agree.
    """
    target, draft = Path(target_folder) / TOKENIZER_FILE, Path(draft_folder) / TOKENIZER_FILE
    if target.is_file() != draft.is_file():
        absent, present = (draft, target) if target.is_file() else (target, draft)
        raise ModelError(
            f"{absent}: missing, so the pair cannot be checked; if {present} is the same tokenizer, copy it there"
        )
    if target.is_file():
        _compare_tokenizers(target, draft)
    elif target_config.vocab_size != draft_config.vocab_size:
        raise ModelError(
            f"the draft in {draft_folder} has {draft_config.vocab_size} tokens and the target in {target_folder} has "
            f"{target_config.vocab_size}; expected the same tokenizer: choose a draft of the target's family"
        )


def _compare_tokenizers(target: Path, draft: Path) -> None:
    ours, theirs = read_object(target), read_object(draft)
    our_ids, their_ids = token_ids_of(ours, target), token_ids_of(theirs, draft)
    if our_ids != their_ids:
        differing = [token for token in our_ids.keys() | their_ids.keys() if our_ids.get(token) != their_ids.get(token)]
        raise ModelError(
            f"the tokenizers of {draft} and {target} differ in the ids of {len(differing)} tokens "
            f"({list_names(map(repr, differing))}); choose a draft of the target's family"
        )
    if merges_of(ours) != merges_of(theirs):
        raise ModelError(
            f"the tokenizers of {draft} and {target} differ in their merges; choose a draft of the target's family"
        )


def token_ids_of(tokenizer: Mapping[str, Any], path: Path) -> dict[str, int]:
    """Token to id, added tokens included: some tools list those in the vocabulary as well, some do not."""
    try:
        vocab = tokenizer["model"]["vocab"]
        if isinstance(vocab, list):  # unigram models: [[token, score], ...] in order of id
            vocab = {token: index for index, (token, _) in enumerate(vocab)}
        return {**vocab, **{added["content"]: added["id"] for added in tokenizer.get("added_tokens") or []}}
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(f"{path}: not a tokenizer.json ({_first_line(error)}); fetch the model again") from error


def merges_of(tokenizer: Mapping[str, Any]) -> list[str]:
    """Merges as "left right", whichever of the two spellings the file uses."""
    return [merge if isinstance(merge, str) else " ".join(merge) for merge in tokenizer["model"].get("merges") or []]
