"""From one GGUF file to a model and its tokenizer: llama.cpp's format for Llama, Mistral, Qwen2 and Qwen3.

Knows the file's layout, the names and the order of rows llama.cpp gives to weights, and which tokenizer its metadata
describe. Weights are dequantised on their way into the fused buffers; nothing here computes with quantised numbers.
Knows nothing of how a model runs.

The header is parsed here and not by the package's GGUFReader, which takes seconds for a vocabulary and trusts every
length it reads. The package provides what changes from year to year: the block formats and their dequantisation.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import tokenizers
import torch
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, processors
from torch import Tensor

from faser.errors import MissingPackage, ModelError, UnsupportedModel
from faser.extras import install_hint
from faser.models import config as model_config
from faser.models import weights
from faser.models.config import ModelConfig, Rope
from faser.models.transformer import Transformer
from faser.text.tokenizer import TOKENIZER_FILE, Tokenizer

MAGIC = b"GGUF"
VERSIONS = (2, 3)
ARCHITECTURES = ("llama", "qwen2", "qwen3")
TENSOR_TYPES = (
    *("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
    *("IQ4_NL", "IQ4_XS"),  # what llama.cpp puts into Q2_K and Q3_K files where a row is no multiple of 256
)

_PIECE = 1 << 18  # numbers dequantised at a time: they and the temporaries stay in the processor's cache


def is_gguf(path: str | Path) -> bool:
    """Whether it is a file that is, or by its name claims to be, a GGUF."""
    path = Path(path).expanduser()
    if not path.is_file():
        return False
    if path.name.lower().endswith(".gguf"):
        return True
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


# ---- the header ----


@dataclass(frozen=True)
class _Stored:
    """A tensor as the file holds it."""

    name: str
    type: str  # as ggml spells it: F32, Q4_K, ...; "number 99" where the package does not know it
    shape: tuple[int, ...]  # in torch's order, the reverse of the file's
    start: int  # in the file
    num_bytes: int  # 0 where the type is not known

    @property
    def row_bytes(self) -> int:
        """Bytes of one index of the first dimension; a vector is one row, since blocks run along it."""
        return self.num_bytes if len(self.shape) == 1 else self.num_bytes // self.shape[0]


@dataclass(frozen=True)
class GgufFile:
    """All that a file says before its first weight, and where the weights are."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, _Stored]

    @property
    def architecture(self) -> str:
        return self.text("general.architecture")

    def value(self, key: str, default: Any = model_config.REQUIRED) -> Any:
        """What the metadata say: a number, a text or a list of them."""
        return self.fields._value(key, default, model_config.REQUIRED)

    def tensor(self, name: str) -> np.ndarray[Any, np.dtype[np.float32]]:
        """One whole tensor in float32, of any type the package knows."""
        tensor = self.tensors.get(name)
        if tensor is None:
            raise ModelError(f"{self.path}: the file lacks {name}; fetch or make it again")
        with self.path.open("rb") as file:
            values: np.ndarray[Any, np.dtype[np.float32]] = _values(file, self.path, tensor, 0, tensor.shape[0]).numpy()
        return values

    @property
    def fields(self) -> model_config.Fields:
        return model_config.Fields(self.metadata, str(self.path))

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


def _check_complete(path: Path, tensors: Mapping[str, _Stored], file_bytes: int) -> None:
    last = max(tensors.values(), key=lambda tensor: tensor.start + tensor.num_bytes, default=None)
    if last is not None and last.start + last.num_bytes > file_bytes:
        raise ModelError(
            f"{path}: truncated: it has {file_bytes} bytes; expected {last.start + last.num_bytes}, "
            f"where {last.name} ends: fetch it again"
        )


class _Cursor:
    """Reads the header front to back. No length in the file is believed before the bytes are known to be there."""

    SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}  # noqa: RUF012
    STRING, ARRAY = 8, 9
    LENGTH = struct.Struct("<Q")  # of a text: a vocabulary has hundreds of thousands
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
        if kind in self.SCALARS:
            return list(self.numbers(self.SCALARS[kind], count))
        if kind == self.STRING:
            return [self.string() for _ in range(count)]
        raise self.garbled(f"a list of the unknown type {kind}")

    def tensor_info(self) -> _Stored:
        """A tensor whose start is still counted from the first weight."""
        name = self.string()
        num_dimensions = self.number("I")
        if not 1 <= num_dimensions <= self.MAX_DIMENSIONS:
            raise self.garbled(f"{name!r} with {num_dimensions} dimensions")
        shape = self.numbers("Q", num_dimensions)[::-1]
        if 0 in shape:
            raise self.garbled(f"{name!r} of the shape {list(shape)}")
        kind, block_size, block_bytes = _tensor_type(self.number("I"))
        if shape[-1] % block_size:
            raise self.garbled(f"{name!r} with rows of {shape[-1]} for blocks of {block_size}")
        return _Stored(name, kind, shape, self.number("Q"), math.prod(shape) // block_size * block_bytes)

    def _advance(self, num_bytes: int) -> int:
        start = self.offset
        if start + num_bytes > len(self.data):
            raise ModelError(
                f"{self.path}: truncated or garbled: it has {len(self.data)} bytes and the header goes on to byte "
                f"{start + num_bytes} or further; fetch it again"
            )
        self.offset += num_bytes
        return start


def _tensor_type(number: int) -> tuple[str, int, int]:
    """The name of a ggml type, the numbers in a block and the bytes of one."""
    package = gguf_package()
    try:
        kind = package.GGMLQuantizationType(number)
    except ValueError:
        return f"number {number}", 1, 0
    block_size, block_bytes = package.GGML_QUANT_SIZES[kind]
    return str(kind.name), block_size, block_bytes


def gguf_package() -> Any:
    try:
        import gguf
    except ImportError as error:
        raise MissingPackage(f"a GGUF file cannot be read: {install_hint('engine', ['gguf'])}") from error
    return gguf


# ---- the config ----


def read_config(path: str | Path) -> ModelConfig:
    """What the model is, from the header; the one tensor looked into holds the divisors of the frequencies."""
    header = open_file(path)
    _refuse_unsupported(header)
    arch, fields, tensors = header.architecture, header.fields, header.tensors
    num_heads = _count(fields, f"{arch}.attention.head_count")
    hidden_size = _count(fields, f"{arch}.embedding_length")
    head_dim = _head_dim(fields, arch, hidden_size, num_heads)
    config = ModelConfig(
        family=arch,
        vocab_size=_vocab_size(header),
        hidden_size=hidden_size,
        num_layers=_num_layers(header, arch),
        num_heads=num_heads,
        num_kv_heads=_count(fields, f"{arch}.attention.head_count_kv", num_heads),
        head_dim=head_dim,
        intermediate_size=_count(fields, f"{arch}.feed_forward_length"),
        norm_eps=fields.number(f"{arch}.attention.layer_norm_rms_epsilon"),
        max_positions=_count(fields, f"{arch}.context_length"),
        tie_embeddings="output.weight" not in tensors,
        qkv_bias=arch == "qwen2" or "blk.0.attn_q.bias" in tensors,
        out_bias="blk.0.attn_output.bias" in tensors,
        qk_norm=arch == "qwen3",
        rope=_rope(header, arch, head_dim),
        eos_token_ids=_eos_token_ids(fields),
        bos_token_id=model_config.optional_id(fields, "tokenizer.ggml.bos_token_id"),
        dtype=_dtype(tensors.values()),
    )
    model_config.refuse_shapes(config, str(header.path))
    return config


def _refuse_unsupported(header: GgufFile) -> None:
    """Refuse by name what FASER cannot run, before any number is read."""
    fields, arch = header.fields, header.architecture
    num_parts = _count_or_zero(fields, "split.count")
    if num_parts > 1:
        raise fields.refuse(f"one of {num_parts} parts of a file (merge them with llama-gguf-split --merge)")
    if _count_or_zero(fields, f"{arch}.expert_count"):
        raise fields.refuse(f"mixture of experts (MoE, {arch}.expert_count)")
    if arch not in ARCHITECTURES:
        raise UnsupportedModel(
            f"{header.path}: the architecture {arch!r} is not supported; expected one of {', '.join(ARCHITECTURES)}"
        )
    window = _count_or_zero(fields, f"{arch}.attention.sliding_window")
    if 0 < window < _count(fields, f"{arch}.context_length"):
        raise fields.refuse(f"{arch}.attention.sliding_window={window} (a sliding window)")
    for tensor in header.tensors.values():
        if tensor.type not in TENSOR_TYPES:
            raise UnsupportedModel(
                f"{header.path}: {tensor.name} has the tensor type {tensor.type}, which is not supported; "
                f"expected one of {', '.join(TENSOR_TYPES)}: choose another quantisation of the model"
            )


def _count(fields: model_config.Fields, key: str, default: Any = model_config.REQUIRED) -> int:
    """A positive integer. llama.cpp lets some of them be lists, one number per layer."""
    value = fields.get(key)
    if not isinstance(value, list):
        return fields.integer(key, default)
    if len(set(value)) != 1:
        raise fields.refuse(f"{key} that differs from layer to layer")
    return model_config.Fields({key: value[0]}, fields.where).integer(key)


def _count_or_zero(fields: model_config.Fields, key: str) -> int:
    return _count(fields, key) if fields.get(key) else 0


def _num_layers(header: GgufFile, arch: str) -> int:
    """As many as the metadata say; the last is looked for, so that a garbled number builds no endless model."""
    num_layers = _count(header.fields, f"{arch}.block_count")
    last = f"blk.{num_layers - 1}.attn_norm.weight"
    if last not in header.tensors:
        raise ModelError(f"{header.path}: the file lacks {last}; {arch}.block_count={num_layers} asks for it")
    return num_layers


def _vocab_size(header: GgufFile) -> int:
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelError(f"{header.path}: the file lacks token_embd.weight; expected it in every model: fetch it again")
    num_tokens = len(header.array("tokenizer.ggml.tokens", str))
    if num_tokens > embedding.shape[0]:
        raise ModelError(
            f"{header.path}: token_embd.weight has {embedding.shape[0]} rows for {num_tokens} tokens; "
            "expected one for each: convert the model again"
        )
    return embedding.shape[0]


def _head_dim(fields: model_config.Fields, arch: str, hidden_size: int, num_heads: int) -> int:
    head_dim = _count(fields, f"{arch}.attention.key_length", hidden_size // num_heads)
    for key in (f"{arch}.attention.value_length", f"{arch}.rope.dimension_count"):
        if fields.get(key) not in (None, head_dim):
            raise fields.refuse(f"{key}={fields.get(key)} with heads of {head_dim}")
    return head_dim


def _rope(header: GgufFile, arch: str, head_dim: int) -> Rope:
    fields, scaling = header.fields, f"{arch}.rope.scaling."
    kind = header.text(f"{scaling}type", "none")
    theta = fields.number(f"{arch}.rope.freq_base", 10_000.0)
    rope = Rope(theta, factors=_rope_factors(header, head_dim))
    if kind == "linear":
        return replace(rope, kind="linear", factor=fields.number(f"{scaling}factor"))
    if kind == "yarn":
        return _yarn(rope, fields, arch)
    if kind != "none":
        raise fields.refuse(f"{scaling}type={kind!r} (other than none, linear and yarn)")
    return rope


def _yarn(rope: Rope, fields: model_config.Fields, arch: str) -> Rope:
    scaling = f"{arch}.rope.scaling."
    for key, neutral in (("yarn_log_multiplier", (None, 0)), ("yarn_ext_factor", (None, 1, -1))):
        if fields.get(scaling + key) not in neutral:
            raise fields.refuse(f"{scaling}{key}={fields.get(scaling + key)}")
    factor = fields.number(f"{scaling}factor")
    given = fields.number(f"{scaling}attn_factor", 1.0) * fields.number(f"{scaling}yarn_attn_factor", 1.0)
    return replace(
        rope,
        kind="yarn",
        factor=factor,
        original_max_positions=_count(
            fields, f"{scaling}original_context_length", _count(fields, f"{arch}.context_length")
        ),
        beta_fast=fields.number(f"{scaling}yarn_beta_fast", 32.0),
        beta_slow=fields.number(f"{scaling}yarn_beta_slow", 1.0),
        attention_factor=given * (1 + 0.1 * math.log(max(factor, 1.0))),
    )


def _rope_factors(header: GgufFile, head_dim: int) -> tuple[float, ...]:
    """llama3's scaling as llama.cpp stores it: a divisor for each frequency."""
    tensor = header.tensors.get("rope_freqs.weight")
    if tensor is None:
        return ()
    _check_shape(header.path, tensor, (head_dim // 2,))
    with header.path.open("rb") as file:
        factors = _values(file, header.path, tensor, 0, head_dim // 2).tolist()
    if not all(0 < factor < math.inf for factor in factors):
        raise ModelError(f"{header.path}: rope_freqs.weight: expected positive divisors; convert the model again")
    return tuple(factors)


def _eos_token_ids(fields: model_config.Fields) -> tuple[int, ...]:
    """The end of a text, of a turn and of a message: each ends an answer."""
    keys = (f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))
    ids = [model_config.optional_id(fields, key) for key in keys]
    return tuple(dict.fromkeys(each for each in ids if each is not None))


def _dtype(tensors: Iterable[_Stored]) -> str:
    """The narrowest dtype that loses nothing; for quantised weights bfloat16, in which such models were trained."""
    types = {tensor.type for tensor in tensors if len(tensor.shape) > 1}
    if types <= {"F32"}:
        return "float32"
    return "float16" if types <= {"F16", "F32"} else "bfloat16"


# ---- the weights ----

# Names in a Hugging Face checkpoint, part by part, and in a GGUF file.
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
# What older converters stored and nothing needs, and what the config has taken already.
_HARMLESS = ("rope_freqs.weight", ".attn_rot_embd", ".rotary_emb.inv_freq")


def load(
    path: str | Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    progress: weights.Progress | None = None,
    max_positions: int | None = None,
) -> Transformer:
    """Dequantise the weights piece by piece into their final places; peak memory is about the model's own."""
    header = open_file(path)
    _refuse_unsupported(header)
    _check_tensors(header, _slots(Transformer.empty(config, dtype, "meta", max_positions=1)))  # costs no memory
    model = Transformer.empty(config, dtype, device, max_positions)
    slots = _slots(model)
    done, total = 0, sum(header.tensors[name].num_bytes for name in slots)
    with header.path.open("rb") as file:
        for name in sorted(slots, key=lambda name: header.tensors[name].start):
            head_dim = config.head_dim if _is_interleaved(header, name) else None
            for num_bytes in _copy(file, header.path, header.tensors[name], slots[name].destination, head_dim):
                done += num_bytes
                if progress is not None:
                    progress(done, total)
    return model


def _slots(model: Transformer) -> dict[str, weights.Slot]:
    """Every tensor the file must hold, by name."""
    return {_gguf_name(name): slot for name, slot in weights.tensor_slots(model).items()}


def _gguf_name(name: str) -> str:
    for theirs, ours in _NAMES.items():
        name = name.replace(theirs, ours)
    return name


def _check_tensors(header: GgufFile, slots: Mapping[str, weights.Slot]) -> None:
    missing = slots.keys() - header.tensors.keys()
    if missing:
        raise ModelError(f"{header.path}: the file lacks {weights.list_names(missing)}; its metadata ask for them")
    unexpected = {name for name in header.tensors.keys() - slots.keys() if not name.endswith(_HARMLESS)}
    if unexpected:
        raise ModelError(
            f"{header.path}: the file has {weights.list_names(unexpected)}, which its metadata do not call for"
        )
    for name, slot in slots.items():
        _check_shape(header.path, header.tensors[name], slot.shape)


def _check_shape(path: Path, tensor: _Stored, expected: tuple[int, ...]) -> None:
    if tensor.shape != expected:
        raise ModelError(
            f"{path}: {tensor.name} has the shape {list(tensor.shape)}; expected {list(expected)} from the metadata"
        )


def _is_interleaved(header: GgufFile, name: str) -> bool:
    """Whether the rows of each head alternate between its two halves, as llama.cpp rotates those of a Llama."""
    return header.architecture == "llama" and (".attn_q." in name or ".attn_k." in name)


def _copy(
    file: BinaryIO, path: Path, tensor: _Stored, destination: Tensor, interleaved_head_dim: int | None
) -> Iterator[int]:
    """Copy one tensor in pieces of whole heads, yielding the bytes of each."""
    unit = interleaved_head_dim or 1
    num_rows = tensor.shape[0]
    is_vector = len(tensor.shape) == 1
    rows_per_piece = num_rows if is_vector else max(1, _PIECE // tensor.shape[1] // unit) * unit
    for start in range(0, num_rows, rows_per_piece):
        stop = min(start + rows_per_piece, num_rows)
        values = _values(file, path, tensor, start, stop)
        if interleaved_head_dim is not None:
            values = _halves(values, interleaved_head_dim)
        (destination if is_vector else destination[start:stop]).copy_(values)  # a norm spreads over all heads
        yield tensor.num_bytes if is_vector else (stop - start) * tensor.row_bytes


def _values(file: BinaryIO, path: Path, tensor: _Stored, start: int, stop: int) -> Tensor:
    """Rows start to stop - 1 in float32; all of a vector."""
    package = gguf_package()
    num_bytes = tensor.num_bytes if len(tensor.shape) == 1 else (stop - start) * tensor.row_bytes
    file.seek(tensor.start + (0 if len(tensor.shape) == 1 else start * tensor.row_bytes))
    raw = np.fromfile(file, dtype=np.uint8, count=num_bytes)
    if len(raw) < num_bytes:
        raise ModelError(f"{path}: {tensor.name} ends too early; the file has changed: load it again")
    try:
        # One row of blocks: they know nothing of rows, and the package takes its time for each group of 16.
        values = package.quants.dequantize(raw[None], package.GGMLQuantizationType[tensor.type])
    except (KeyError, NotImplementedError) as error:
        raise UnsupportedModel(f"{path}: {tensor.name}: the tensor type {tensor.type} is not supported") from error
    return torch.from_numpy(values).view(stop - start, *tensor.shape[1:])


def _halves(values: Tensor, head_dim: int) -> Tensor:
    """Rows x0 y0 x1 y1 ... of each head as x0 x1 ... y0 y1 ..., where Hugging Face and FASER have them."""
    return values.view(-1, head_dim // 2, 2, *values.shape[1:]).transpose(1, 2).reshape(values.shape)


# ---- the tokenizer ----

_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5  # of tokenizer.ggml.token_type
_SPACE = "\u2581"  # what SentencePiece writes for a space

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
# How a text is cut before merging, by tokenizer.ggml.pre. None is GPT-2's own expression, built into ByteLevel. It
# stands for smollm as well, as in transformers: llama.cpp cuts around each digit first, which changes the ids of white
# space before a number and of numerals beyond ASCII, and nothing else, since no merge has a digit.
_SPLITS = {
    **dict.fromkeys(("gpt-2", "default", "smollm")),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3"), _LLAMA3_SPLIT),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _QWEN2_SPLIT),
}


@dataclass(frozen=True)
class _Vocabulary:
    """The lists of a tokenizer, as long as each other; `merges` and `scores` are empty where the file has none."""

    tokens: list[str]
    types: list[int]
    merges: list[str]
    scores: list[float]

    @property
    def ids(self) -> dict[str, int]:
        return {token: index for index, token in enumerate(self.tokens)}

    @property
    def used_ids(self) -> dict[str, int]:
        """Without the padding up to the size of the embedding."""
        return {
            token: i for i, (token, kind) in enumerate(zip(self.tokens, self.types, strict=True)) if kind != _UNUSED
        }


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer the metadata describe."""
    header = open_file(path)
    vocabulary = _vocabulary(header)
    kind = header.text("tokenizer.ggml.model")
    builders = {"gpt2": _byte_level, "llama": _sentence_piece}
    if kind not in builders:
        raise UnsupportedModel(
            f"{header.path}: tokenizer.ggml.model={kind!r} is not supported; expected {' or '.join(builders)}"
        )
    try:
        backend = builders[kind](header, vocabulary)
    except ModelError:
        raise
    except Exception as error:  # the library raises nothing more specific
        raise ModelError(f"{header.path}: not a usable tokenizer ({error}); convert the model again") from error
    backend.add_special_tokens(_special_tokens(header, vocabulary))
    backend.add_tokens([AddedToken(token, normalized=False) for token in _tokens_of_type(vocabulary, _USER_DEFINED)])
    _add_bos(backend, header, vocabulary)
    return Tokenizer(backend)


def chat_template(path: str | Path) -> str | None:
    """The Jinja template that makes a prompt of messages, where the file has one."""
    template = open_file(path).metadata.get("tokenizer.chat_template")
    return template if isinstance(template, str) else None


def _vocabulary(header: GgufFile) -> _Vocabulary:
    tokens = header.array("tokenizer.ggml.tokens", str)
    if not tokens:
        raise ModelError(f"{header.path}: no tokenizer in it (tokenizer.ggml.tokens); fetch a file with one")
    types = header.array("tokenizer.ggml.token_type", int) or [_NORMAL] * len(tokens)
    scores = header.array("tokenizer.ggml.scores", float)
    if len(types) != len(tokens) or len(scores) not in (0, len(tokens)):
        raise ModelError(
            f"{header.path}: {len(tokens)} tokens with {len(types)} types and {len(scores)} scores; "
            "expected as many of each: convert the model again"
        )
    return _Vocabulary(tokens, types, header.array("tokenizer.ggml.merges", str), scores)


def _byte_level(header: GgufFile, vocabulary: _Vocabulary) -> tokenizers.Tokenizer:
    """GPT-2's kind: bytes spelled as letters, merged within the pieces of a split."""
    name = header.text("tokenizer.ggml.pre", "default")
    if name not in _SPLITS:
        raise UnsupportedModel(
            f"{header.path}: tokenizer.ggml.pre={name!r} is not supported; expected one of {', '.join(_SPLITS)}"
        )
    split = _SPLITS[name]
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary.ids, merges=_pairs(header, vocabulary.merges)))
    spell = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)
    backend.pre_tokenizer = (
        spell
        if split is None
        else pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(split), behavior="isolated"), spell])
    )
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentence_piece(header: GgufFile, vocabulary: _Vocabulary) -> tokenizers.Tokenizer:
    """SentencePiece's kind: characters merged by score, those without a token as bytes."""
    add_space = header.fields.flag("tokenizer.ggml.add_space_prefix", True)
    merges = _pairs(header, vocabulary.merges) if vocabulary.merges else _merges_by_score(header, vocabulary)
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary.ids, merges=merges, fuse_unk=True, byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(
        replacement=_SPACE, prepend_scheme="first" if add_space else "never", split=False
    )
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(content=" ", left=1)] if add_space else steps)
    return backend


def _pairs(header: GgufFile, merges: Sequence[str]) -> list[tuple[str, str]]:
    pairs = [tuple(merge.split(" ")) for merge in merges]
    wrong = next((pair for pair in pairs if len(pair) != 2), None)
    if wrong is not None:
        raise ModelError(f"{header.path}: the merge {' '.join(wrong)!r}: expected two tokens; convert the model again")
    return pairs  # type: ignore[return-value]


def _merges_by_score(header: GgufFile, vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    """Every way to put a token together from two others; the token with the highest score is made first.

    Of the ways to equal scores, longer parts come first, then lower ids of the token, of the left and of the right.
    """
    if not vocabulary.scores:
        raise ModelError(f"{header.path}: neither merges nor scores of tokens; expected one: convert the model again")
    ids, found = vocabulary.ids, []
    for token, score in zip(vocabulary.tokens, vocabulary.scores, strict=True):
        splits = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        known = [(ids[left], ids[right], left, right) for left, right in splits if left in ids and right in ids]
        found += [(-score, -len(left), -len(right), left, right) for _, _, left, right in sorted(known)]
    return [(left, right) for *_, left, right in sorted(found, key=lambda each: each[:3])]


def _special_tokens(header: GgufFile, vocabulary: _Vocabulary) -> list[AddedToken]:
    """Control tokens, and those the metadata give a role."""
    roles = (f"tokenizer.ggml.{role}_token_id" for role in ("bos", "eos", "eot", "eom", "unknown", "padding"))
    ids = [_token_id(header, key, vocabulary) for key in roles]
    named = [vocabulary.tokens[index] for index in ids if index is not None]
    tokens = dict.fromkeys([*_tokens_of_type(vocabulary, _CONTROL), *named])
    return [AddedToken(token, special=True, normalized=False) for token in tokens]


def _tokens_of_type(vocabulary: _Vocabulary, wanted: int) -> list[str]:
    pairs = zip(vocabulary.tokens, vocabulary.types, strict=True)
    return [token for token, kind in pairs if kind == wanted and token]


def _token_id(header: GgufFile, key: str, vocabulary: _Vocabulary) -> int | None:
    index = model_config.optional_id(header.fields, key)
    if index is not None and index >= len(vocabulary.tokens):
        raise header.fields.wrong(key, index, f"less than {len(vocabulary.tokens)}, the number of tokens")
    return index


def _add_bos(backend: tokenizers.Tokenizer, header: GgufFile, vocabulary: _Vocabulary) -> None:
    """Begin every text with the begin token where the file says so, or where llama.cpp would unless told otherwise."""
    is_llama3 = _SPLITS.get(header.text("tokenizer.ggml.pre")) == _LLAMA3_SPLIT
    default = header.text("tokenizer.ggml.model") == "llama" or is_llama3
    bos_id = _token_id(header, "tokenizer.ggml.bos_token_id", vocabulary)
    if bos_id is not None and header.fields.flag("tokenizer.ggml.add_bos_token", default):
        bos = vocabulary.tokens[bos_id]
        backend.post_processor = processors.TemplateProcessing(
            single=[bos, "$A"], pair=[bos, "$A", "$B:1"], special_tokens=[(bos, bos_id)]
        )


# ---- whether two models can be paired ----


def same_tokenizer(target: str | Path, draft: str | Path) -> None:
    """Raise ModelError unless a token id means the same text to both, each a GGUF file or a Hugging Face folder.

    Merges are compared between two files of the same kind; padding is not.
    """
    (our_ids, our_merges), (their_ids, their_merges) = _identity(target), _identity(draft)
    differing = [token for token in our_ids.keys() | their_ids.keys() if our_ids.get(token) != their_ids.get(token)]
    if differing:
        raise ModelError(
            f"the tokenizers of {draft} and {target} differ in the ids of {len(differing)} tokens "
            f"({weights.list_names(map(repr, differing))}); choose a draft of the target's family"
        )
    if is_gguf(target) == is_gguf(draft) and our_merges != their_merges:
        raise ModelError(
            f"the tokenizers of {draft} and {target} differ in their merges; choose a draft of the target's family"
        )


def _identity(path: str | Path) -> tuple[dict[str, int], list[str]]:
    """Token to id, and the merges."""
    if is_gguf(path):
        vocabulary = _vocabulary(open_file(path))
        return vocabulary.used_ids, vocabulary.merges
    file = Path(path) / TOKENIZER_FILE
    if not file.is_file():
        raise ModelError(f"{file}: missing, so the pair cannot be checked; fetch it with the model")
    data = model_config.read_object(file)
    return weights.token_ids_of(data, file), weights.merges_of(data)
