"""What a model is, from the metadata of its GGUF file. Refuses by name what FASER cannot run."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from faser.errors import ModelError, UnsupportedModel
from faser.models.config import ModelConfig, Rope, refuse_shapes
from faser.models.fields import REQUIRED, Fields, optional_id
from faser.models.gguf.reader import TENSOR_TYPES, GgufFile, StoredTensor, open_file
from faser.models.weights import check_shape

ARCHITECTURES = ("llama", "qwen2", "qwen3")


def read_config(path: str | Path) -> ModelConfig:
    """The config from the header. Of the tensors only the divisors of the rotary frequencies are read."""
    header = open_file(path)
    refuse_unsupported(header)
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
        bos_token_id=optional_id(fields, "tokenizer.ggml.bos_token_id"),
        dtype=_dtype(tensors.values()),
    )
    config = replace(config, windows=_windows(fields, arch, config))
    refuse_shapes(config, str(header.path))
    return config


def refuse_unsupported(header: GgufFile) -> None:
    """Raise UnsupportedModel for what FASER cannot run, by name, before any number is read."""
    fields, arch = header.fields, header.architecture
    num_parts = _count_or_zero(fields, "split.count")
    if num_parts > 1:
        raise fields.refuse(f"one of {num_parts} parts of a file (merge them with llama-gguf-split --merge)")
    if _count_or_zero(fields, f"{arch}.expert_count"):
        raise fields.refuse(f"mixture of experts (MoE, {arch}.expert_count)")
    if arch not in ARCHITECTURES:
        raise fields.refuse(f"the architecture {arch!r}", f"expected one of {', '.join(ARCHITECTURES)}")
    for tensor in header.tensors.values():
        if tensor.type not in TENSOR_TYPES:
            raise UnsupportedModel(
                f"{header.path}: {tensor.name} has the tensor type {tensor.type}, which is not supported; "
                f"expected one of {', '.join(TENSOR_TYPES)}: choose another quantisation of the model"
            )


def _count(fields: Fields, key: str, default: Any = REQUIRED) -> int:
    """A positive integer. Some keys may hold a list, one number per layer; all must be equal."""
    value = fields.get(key)
    if not isinstance(value, list):
        return fields.integer(key, default)
    if len(set(value)) != 1:
        raise fields.refuse(f"{key} that differs from layer to layer")
    return Fields({key: value[0]}, fields.where).integer(key)


def _count_or_zero(fields: Fields, key: str) -> int:
    return _count(fields, key) if fields.get(key) else 0


def _windows(fields: Fields, arch: str, config: ModelConfig) -> tuple[int, ...]:
    """By layer, the keys that a row sees. The pattern: a flag for each layer, or n, and all but every n-th slide."""
    size = _count_or_zero(fields, f"{arch}.attention.sliding_window")
    if not 0 < size < config.max_positions:
        return ()
    key = f"{arch}.attention.sliding_window_pattern"
    pattern, layers = fields.get(key), range(config.num_layers)
    if pattern is None:
        slides = [True for _ in layers]
    elif isinstance(pattern, list) and len(pattern) == config.num_layers:
        slides = [bool(each) for each in pattern]
    else:
        period = fields.integer(key)
        slides = [layer % period < period - 1 for layer in layers]
    windows = tuple(size if slide else 0 for slide in slides)
    return windows if any(windows) else ()


def _num_layers(header: GgufFile, arch: str) -> int:
    """The layers that the metadata name. The last must exist: a garbled number must not allocate a huge model."""
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


def _head_dim(fields: Fields, arch: str, hidden_size: int, num_heads: int) -> int:
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


def _yarn(rope: Rope, fields: Fields, arch: str) -> Rope:
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
    """llama3's scaling as llama.cpp stores it: one divisor per frequency."""
    name = "rope_freqs.weight"
    if name not in header.tensors:
        return ()
    check_shape(header.path, name, header.tensors[name].shape, (head_dim // 2,), "the metadata")
    factors = header.tensor(name).tolist()
    if not all(0 < factor < math.inf for factor in factors):
        raise ModelError(f"{header.path}: {name}: expected positive divisors; convert the model again")
    return tuple(factors)


def _eos_token_ids(fields: Fields) -> tuple[int, ...]:
    """The tokens that end a text, a turn and a message: each ends an answer."""
    keys = (f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))
    ids = [optional_id(fields, key) for key in keys]
    return tuple(dict.fromkeys(each for each in ids if each is not None))


def _dtype(tensors: Iterable[StoredTensor]) -> str:
    """The narrowest dtype that loses nothing; for quantised weights bfloat16, the usual dtype of training."""
    types = {tensor.type for tensor in tensors if len(tensor.shape) > 1}
    if types <= {"F32"}:
        return "float32"
    return "float16" if types <= {"F16", "F32"} else "bfloat16"
