"""From the tensors of a GGUF file to a model: the names llama.cpp gives them, and the order of their rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from faser.models import weights
from faser.models.config import ModelConfig
from faser.models.gguf.blocks import KEPT_TYPES, to_matrix
from faser.models.gguf.config import refuse_unsupported
from faser.models.gguf.reader import GgufFile, StoredTensor, open_file, read_bytes, read_rows
from faser.models.quantised import Weight
from faser.models.quantised.placement import Mode, Placement, assemble
from faser.models.transformer import Transformer
from faser.progress import Update

_PIECE = 1 << 18  # numbers dequantised at a time: with the temporaries they fit the processor's cache

# Parts of tensor names: in a Hugging Face checkpoint, and in a GGUF file.
_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.layers": "blk",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_": "attn_q_",
    "self_attn.k_": "attn_k_",
    "self_attn.v_": "attn_v_",
    "self_attn.o_": "attn_output_",
    "mlp.gate_": "ffn_gate_",
    "mlp.up_": "ffn_up_",
    "mlp.down_": "ffn_down_",
    "_proj": "",
}
# Tensors that are not loaded: those of older converters, and the divisors that the config holds.
_HARMLESS = ("rope_freqs.weight", ".attn_rot_embd", ".rotary_emb.inv_freq")


def load(
    path: str | Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    progress: Update | None = None,
    max_positions: int | None = None,
    quantised: Mode = "off",
) -> Transformer:
    """Read the weights piece by piece into a new model; peak memory is about that of the model.

    `quantised`: whether matrices stay in their blocks, as `Placement.choose` says; else all are dequantised.
    """
    header = open_file(path)
    refuse_unsupported(header)
    _check(header, config, dtype)
    placement = Placement.choose(quantised, dtype, device)
    model = Transformer.empty(config, dtype, device, max_positions, without_matrices=placement.keeps)
    with header.path.open("rb") as file:
        loading = _Loading(header, file, config.head_dim, progress)
        for name, destination in loading.in_order(_destinations_of(model)):
            loading.copy(name, destination.tensor)
        if not placement.keeps:
            return model
        head = None if config.tie_embeddings else "lm_head"
        if config.tie_embeddings and header.tensors[_gguf_name("model.embed_tokens.weight")].type in KEPT_TYPES:
            head = "model.embed_tokens"
        return assemble(model, loading.read, placement, head)


def _check(header: GgufFile, config: ModelConfig, dtype: torch.dtype) -> None:
    """Refuse a file that does not hold the tensors of the config."""
    expected = _destinations_of(Transformer.empty(config, dtype, "meta", max_positions=1))  # takes no memory
    needed = {name for name in header.tensors if not name.endswith(_HARMLESS)}
    weights.check_names(header.path, needed, expected.keys(), "the metadata")
    for name, destination in expected.items():
        weights.check_shape(header.path, name, header.tensors[name].shape, destination.shape, "the metadata")


class _Loading:
    """A file that is being read, and how far."""

    def __init__(self, header: GgufFile, file: BinaryIO, head_dim: int, progress: Update | None) -> None:
        self._header = header
        self._file = file
        self._head_dim = head_dim
        self._progress = progress
        self._done = 0
        self._total = sum(tensor.num_bytes for tensor in header.tensors.values())

    def in_order(self, destinations: Mapping[str, weights.Destination]) -> list[tuple[str, weights.Destination]]:
        """Those that have memory, as they follow each other in the file."""
        written = [(name, each) for name, each in destinations.items() if not each.tensor.is_meta]
        return sorted(written, key=lambda each: self._header.tensors[each[0]].start)

    def copy(self, name: str, destination: Tensor) -> None:
        """Dequantise a tensor into its place."""
        tensor, head_dim = self._header.tensors[name], self._interleaved_head_dim(name)
        for num_bytes in _copy(self._file, self._header.path, tensor, destination, head_dim):
            self._advance(num_bytes)

    def read(self, name: str) -> Weight:
        """A matrix by its name in a checkpoint: in its blocks, or dequantised where its type is not kept."""
        name = _gguf_name(f"{name}.weight")
        tensor, head_dim = self._header.tensors[name], self._interleaved_head_dim(name)
        if tensor.type not in KEPT_TYPES:
            values = torch.empty(tensor.shape)
            self.copy(name, values)
            return values
        raw = read_bytes(self._file, self._header.path, tensor, 0, tensor.shape[0])
        matrix = to_matrix(raw, tensor.type, tensor.shape[0])
        self._advance(tensor.num_bytes)
        return matrix if head_dim is None else matrix.select(_deinterleave(torch.arange(tensor.shape[0]), head_dim))

    def _interleaved_head_dim(self, name: str) -> int | None:
        return self._head_dim if _is_interleaved(self._header, name) else None

    def _advance(self, num_bytes: int) -> None:
        self._done = min(self._done + num_bytes, self._total)  # a tied head is read twice
        if self._progress is not None:
            self._progress(self._done, self._total)


def _destinations_of(model: Transformer) -> dict[str, weights.Destination]:
    """Every tensor that the file must hold, by name."""
    return {_gguf_name(name): destination for name, destination in weights.destinations_of(model).items()}


def _gguf_name(name: str) -> str:
    for theirs, ours in _NAMES.items():
        name = name.replace(theirs, ours)
    return name


def _is_interleaved(header: GgufFile, name: str) -> bool:
    """Whether the rows of each head alternate between its two halves: llama.cpp's order for Llama."""
    return header.architecture == "llama" and (".attn_q." in name or ".attn_k." in name)


def _copy(
    file: BinaryIO, path: Path, tensor: StoredTensor, destination: Tensor, interleaved_head_dim: int | None
) -> Iterator[int]:
    """Copy one tensor in pieces of whole heads; yields the bytes of each."""
    unit = interleaved_head_dim or 1
    num_rows = tensor.shape[0]
    is_vector = len(tensor.shape) == 1
    rows_per_piece = num_rows if is_vector else max(1, _PIECE // tensor.shape[1] // unit) * unit
    for start in range(0, num_rows, rows_per_piece):
        stop = min(start + rows_per_piece, num_rows)
        values = read_rows(file, path, tensor, start, stop)
        if interleaved_head_dim is not None:
            values = _deinterleave(values, interleaved_head_dim)
        (destination if is_vector else destination[start:stop]).copy_(values)  # one norm fills the rows of all heads
        yield tensor.num_bytes if is_vector else (stop - start) * tensor.row_bytes


def _deinterleave(values: Tensor, head_dim: int) -> Tensor:
    """Reorder the rows of each head from x0 y0 x1 y1 … to x0 x1 … y0 y1 …, the order of Hugging Face and FASER."""
    return values.view(-1, head_dim // 2, 2, *values.shape[1:]).transpose(1, 2).reshape(values.shape)
