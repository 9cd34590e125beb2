"""From a name to a model in memory: find the folder, check it, read the safetensors into the fused weights.

Knows the layout of a Hugging Face folder and the names of its tensors. Knows nothing of how a model runs. A folder is
checked before the first weight is read, and every error names the file or tensor.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
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
from faser.models.config import DTYPES, ModelConfig
from faser.models.fields import read_object
from faser.models.quantised.matrix import plain
from faser.models.transformer import Layer, Transformer
from faser.models.vision.names import canonical_name, vision_tensors
from faser.progress import Update

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_PIECE_BYTES = 16 << 20  # read at a time
_READERS = 8  # threads that load to a GPU: one alone copies from the file cache far slower than the bus can
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_STORED_DTYPES = {**_DTYPES, "F8_E4M3": torch.float8_e4m3fn, "I32": torch.int32, "I64": torch.int64}
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_HUB_FILES = ["*.json", "model*.safetensors", "tokenizer*", "*.jinja", "mask_embedding.pt"]
_NAMES_SHOWN = 4
_UNNEEDED = ("rotary_emb.inv_freq", "rotary_pos_emb.inv_freq")


# ---- which model ----


def resolve(name_or_path: str | Path, more_files: Sequence[str] = ()) -> Path:
    """The folder of a model, given as a folder or a hub name; the latter is fetched into the hub's cache.

    `more_files` are fetched besides those that every model may have.
    """
    name = str(name_or_path)
    folder = Path(name).expanduser()
    if name and folder.is_dir():
        return folder
    if folder.is_file():
        raise ModelError(f"{name} is a file and no GGUF; expected a model folder: give the one that holds config.json")
    if not _HUB_NAME.fullmatch(name) or name.startswith("."):
        raise ModelError(f"{name!r}: no such folder; expected an existing model folder or a hub name such as org/name")
    return _fetch(name, more_files)


def _fetch(name: str, more_files: Sequence[str]) -> Path:
    try:
        import huggingface_hub  # slow to import, and not needed for a folder
    except ImportError:
        raise MissingPackage(
            f"{name}: no such folder here, and the hub cannot be asked: {install_hint('engine', ['huggingface_hub'])}"
        ) from None
    try:
        files = [*_HUB_FILES, *more_files]
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=files, ignore_patterns=["*/*"]))
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
    """The dtype to load in. auto: float32 on a CPU, where it is fastest, and the checkpoint's dtype elsewhere."""
    if name == "auto":
        name = "float32" if device_type == "cpu" else config.dtype
    if name not in DTYPES:
        raise ConfigError(f"dtype={name!r}: expected auto, {', '.join(DTYPES)}")
    return getattr(torch, name)


# ---- loading ----


def load(
    folder: str | Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    progress: Update | None = None,
    max_positions: int | None = None,
) -> Transformer:
    """Read the weights of `folder` tensor by tensor into their final places; peak memory is about the model's own."""
    assert config.quantisation is None, "quantised folders are read by faser.models.quantised.folders"
    catalogue = read_model_catalogue(Path(folder), config)
    expected = destinations_of(Transformer.empty(config, dtype, "meta", max_positions=1))  # takes no memory
    _check_catalogue(Path(folder), catalogue, expected, config.tie_embeddings)
    model = Transformer.empty(config, dtype, device, max_positions)
    fill(destinations_of(model), catalogue, progress)
    return model


@dataclass(frozen=True)
class CheckpointTensor:
    """A tensor of the checkpoint, or some rows of it."""

    path: Path
    offset: int  # of its first byte in the file
    shape: tuple[int, ...]
    dtype: str  # as safetensors spells it: F32, BF16, ...

    @property
    def row_bytes(self) -> int:
        """Bytes of one index of the first dimension."""
        return _STORED_DTYPES[self.dtype].itemsize * torch.Size(self.shape[1:]).numel()

    @property
    def num_bytes(self) -> int:
        return self.row_bytes * (self.shape[0] if self.shape else 1)


@dataclass(frozen=True)
class Destination:
    """Where a tensor of the checkpoint goes. A norm shared by all heads is copied to a row for each head."""

    shape: tuple[int, ...]  # in the checkpoint
    tensor: Tensor  # of the model


def destinations_of(model: Transformer) -> dict[str, Destination]:
    """Every tensor that the checkpoint must hold, by name."""
    destinations = {
        "model.embed_tokens.weight": whole(model.embedding),
        "model.norm.weight": whole(model.final_norm),
    }
    if not model.config.tie_embeddings:
        destinations["lm_head.weight"] = whole(plain(model.head))
    for index, layer in enumerate(model.layers):
        for name, destination in layer_destinations(layer, model.config).items():
            destinations[f"model.layers.{index}.{name}"] = destination
    if model.vision is not None:
        destinations |= {name: whole(tensor) for name, tensor in vision_tensors(model.vision).items()}
    return destinations


def layer_destinations(layer: Layer, config: ModelConfig) -> dict[str, Destination]:
    """Of one layer, by name behind the layer's own."""
    destinations = {
        "input_layernorm.weight": whole(layer.attention_norm),
        "post_attention_layernorm.weight": whole(layer.mlp_norm),
        "self_attn.o_proj.weight": whole(plain(layer.out)),
        "mlp.down_proj.weight": whole(plain(layer.down)),
    }
    gate, up = torch.split(plain(layer.gate_up), config.intermediate_size)
    destinations |= {"mlp.gate_proj.weight": whole(gate), "mlp.up_proj.weight": whole(up)}
    destinations |= _qkv_destinations(plain(layer.qkv), "weight", config)
    if layer.qkv_bias is not None:
        destinations |= _qkv_destinations(layer.qkv_bias, "bias", config)
    if layer.out_bias is not None:
        destinations["self_attn.o_proj.bias"] = whole(layer.out_bias)
    if layer.qk_norm is not None:
        query_norm, key_norm = torch.split(layer.qk_norm, [config.num_heads, config.num_kv_heads])
        destinations["self_attn.q_norm.weight"] = Destination((config.head_dim,), query_norm)
        destinations["self_attn.k_norm.weight"] = Destination((config.head_dim,), key_norm)
    return destinations


def _qkv_destinations(fused: Tensor, kind: str, config: ModelConfig) -> dict[str, Destination]:
    query_size, key_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    parts = torch.split(fused, [query_size, key_size, key_size])
    return {f"self_attn.{letter}_proj.{kind}": whole(part) for letter, part in zip("qkv", parts, strict=True)}


def whole(destination: Tensor) -> Destination:
    """A place of the checkpoint's own shape."""
    return Destination(tuple(destination.shape), destination)


def fill(
    destinations: Mapping[str, Destination], catalogue: Mapping[str, CheckpointTensor], progress: Update | None
) -> None:
    """Read every tensor into its place."""
    pieces = [
        piece for name, destination in destinations.items() for piece in _pieces(catalogue[name], destination.tensor)
    ]
    pieces.sort(key=lambda piece: (piece[0].path, piece[0].offset))
    done, total = 0, sum(part.num_bytes for part, _ in pieces)
    for num_bytes in _copy_all(pieces):
        done += num_bytes
        if progress is not None:
            progress(done, total)


def _pieces(entry: CheckpointTensor, destination: Tensor) -> Iterator[tuple[CheckpointTensor, Tensor]]:
    """A tensor in groups of rows, each with its destination. A vector stays whole: it may fill many rows."""
    rows_per_piece = max(1, _PIECE_BYTES // entry.row_bytes)
    if len(entry.shape) == 1 or entry.shape[0] <= rows_per_piece:
        yield entry, destination
        return
    for start in range(0, entry.shape[0], rows_per_piece):
        stop = min(start + rows_per_piece, entry.shape[0])
        offset, shape = entry.offset + start * entry.row_bytes, (stop - start, *entry.shape[1:])
        yield CheckpointTensor(entry.path, offset, shape, entry.dtype), destination[start:stop]


def _copy_all(pieces: list[tuple[CheckpointTensor, Tensor]]) -> Iterator[int]:
    """Read pieces and copy them to their destinations; yields the bytes of each.

    For a GPU several threads work, each through page-locked memory, which the GPU reads at full speed. Files are read
    and not mapped: mapped pages would count as memory of the process, and each costs a page fault.
    """
    size = max(part.num_bytes for part, _ in pieces)
    on_gpu = pieces[0][1].is_cuda
    buffers: SimpleQueue[Tensor] = SimpleQueue()
    for _ in range(_READERS if on_gpu else 1):
        buffers.put(torch.empty(size, dtype=torch.uint8, pin_memory=on_gpu))

    def copy(piece: tuple[CheckpointTensor, Tensor]) -> int:
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


def _read(part: CheckpointTensor, buffer: Tensor) -> Tensor:
    """Read a part into the beginning of the buffer; returns it as a tensor."""
    memory = buffer[: part.num_bytes]
    with part.path.open("rb") as file:
        file.seek(part.offset)
        if file.readinto(memory.numpy().data) != part.num_bytes:
            raise _broken(part.path, EOFError("it has become shorter"))
    return memory.view(_STORED_DTYPES[part.dtype]).view(part.shape)


def read_tensor(entry: CheckpointTensor) -> Tensor:
    """A whole tensor in memory of its own."""
    return _read(entry, torch.empty(entry.num_bytes, dtype=torch.uint8))


# ---- what the folder holds ----


def read_model_catalogue(folder: Path, config: ModelConfig) -> dict[str, CheckpointTensor]:
    """Every tensor of a model by name; those of eyes under the names of one layout."""
    catalogue = read_catalogue(folder)
    if config.vision is None:
        return catalogue
    return {canonical_name(name): entry for name, entry in catalogue.items()}


def read_catalogue(folder: Path) -> dict[str, CheckpointTensor]:
    """Every tensor of the checkpoint by name, from the headers alone."""
    catalogue: dict[str, CheckpointTensor] = {}
    for path in _files(folder):
        header, first = _header(path)
        for name, tensor in header.items():
            start = first + tensor["data_offsets"][0]
            catalogue[name] = CheckpointTensor(path, start, tuple(tensor["shape"]), tensor["dtype"])
    return catalogue


def _header(path: Path) -> tuple[dict[str, Any], int]:
    """The header of a file, and the offset of the first tensor. The library checks the header but hides the offset."""
    try:
        safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise _broken(path, error) from error
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header: dict[str, Any] = json.loads(file.read(size))
    header.pop("__metadata__", None)
    return header, 8 + size


def has_safetensors(folder: Path) -> bool:
    return (folder / SINGLE_FILE).is_file() or (folder / INDEX_FILE).is_file()


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
    folder: Path, catalogue: Mapping[str, CheckpointTensor], destinations: Mapping[str, Destination], is_tied: bool
) -> None:
    check_names(folder, needed_names(catalogue, is_tied), destinations.keys(), "config.json")
    check_tensors(catalogue, destinations)


def needed_names(catalogue: Iterable[str], is_tied: bool) -> set[str]:
    """Without rotary frequencies of older tools and the copy of a tied head."""
    needed = {name for name in catalogue if not name.endswith(_UNNEEDED)}
    return needed - {"lm_head.weight"} if is_tied else needed


def check_tensors(catalogue: Mapping[str, CheckpointTensor], destinations: Mapping[str, Destination]) -> None:
    """Refuse tensors of the wrong dtype or shape."""
    for name, destination in destinations.items():
        entry = catalogue[name]
        if entry.dtype not in _DTYPES:
            raise UnsupportedModel(
                f"{entry.path}: {name} has the dtype {entry.dtype}; expected one of {', '.join(_DTYPES)}"
            )
        check_shape(entry.path, name, entry.shape, destination.shape, "config.json")


def check_number(name: str, entry: CheckpointTensor) -> None:
    """Refuse a tensor that is not one float."""
    if entry.dtype not in _DTYPES:
        raise UnsupportedModel(f"{entry.path}: {name} has the dtype {entry.dtype}; expected {', '.join(_DTYPES)}")
    if torch.Size(entry.shape).numel() != 1:
        raise UnsupportedModel(f"{entry.path}: {name} has the shape {list(entry.shape)}; expected one number a layer")


def check_names(path: Path, found: Set[str], expected: Set[str], origin: str) -> None:
    """Refuse a model whose file lacks a tensor that `origin` describes, or has one that it does not describe."""
    missing, unexpected = expected - found, found - expected
    if missing:
        raise ModelError(f"{path}: the model lacks {list_names(missing)}; {origin} asks for them")
    if unexpected:
        raise ModelError(f"{path}: the model has {list_names(unexpected)}, which {origin} does not call for")


def check_shape(path: Path, name: str, found: tuple[int, ...], expected: tuple[int, ...], origin: str) -> None:
    if found != expected:
        raise ModelError(f"{path}: {name} has the shape {list(found)}; expected {list(expected)} from {origin}")


def list_names(names: Iterable[str]) -> str:
    ordered = sorted(names)
    more = len(ordered) - _NAMES_SHOWN
    return ", ".join(ordered[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")
