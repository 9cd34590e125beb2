"""Config files are understood in both layouts, and what FASER cannot run is refused by name before any weight."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from faser.errors import ConfigError, ModelError, UnsupportedModel
from faser.models.config import ModelConfig, Rope, config_dict

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
}
MISTRAL = LLAMA | {"architectures": ["MistralForCausalLM"], "sliding_window": None}
QWEN2 = LLAMA | {"architectures": ["Qwen2ForCausalLM"]}
QWEN3 = LLAMA | {"architectures": ["Qwen3ForCausalLM"], "head_dim": 16}


def write(folder: Path, config: object, name: str = "config.json") -> Path:
    (folder / name).write_text(config if isinstance(config, str) else json.dumps(config))
    return folder


# ---- what is understood ----


def test_the_config_needs_no_torch() -> None:
    script = "import sys; sys.modules['torch'] = None; import faser.models.config"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_a_llama_config_is_read() -> None:
    assert ModelConfig.from_dict(LLAMA) == ModelConfig(
        family="llama", vocab_size=96, hidden_size=48, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=12,
        intermediate_size=80, norm_eps=1e-5, max_positions=128,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("data", "flags"),
    [
        (LLAMA, (False, False, False)),
        (LLAMA | {"attention_bias": True}, (True, True, False)),
        (MISTRAL, (False, False, False)),
        (QWEN2, (True, False, False)),
        (QWEN3, (False, False, True)),
        (QWEN3 | {"attention_bias": True}, (True, True, True)),
    ],
)
def test_each_family_has_its_own_biases_and_norms(data: dict[str, Any], flags: tuple[bool, bool, bool]) -> None:
    config = ModelConfig.from_dict(data)
    assert (config.qkv_bias, config.out_bias, config.qk_norm) == flags


def test_a_config_without_architectures_goes_by_its_model_type() -> None:
    data = {key: value for key, value in QWEN3.items() if key != "architectures"}
    assert ModelConfig.from_dict(data | {"model_type": "qwen3"}).family == "qwen3"
    with pytest.raises(UnsupportedModel, match="gpt2"):
        ModelConfig.from_dict(data | {"model_type": "gpt2"})


YARN = {"factor": 4.0, "original_max_position_embeddings": 32}
YARN_ROPE = Rope(1e6, "yarn", 4.0, 32, attention_factor=1.138629436111989)
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}


@pytest.mark.parametrize(
    ("keys", "rope"),
    [
        ({}, Rope(10_000.0)),
        ({"rope_theta": 1e6}, Rope(1e6)),
        ({"rope_theta": 1e6, "rope_scaling": None}, Rope(1e6)),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, Rope(1e6)),
        ({"rope_theta": 1e6, "rope_scaling": {"type": "linear", "factor": 2}}, Rope(1e6, "linear", 2.0)),
        ({"rope_theta": 1e6, "rope_scaling": {"type": "yarn", **YARN}}, YARN_ROPE),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, **YARN}}, YARN_ROPE),
        ({"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}}, Rope(5e5, "llama3", 8.0, 32)),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}}, Rope(5e5, "llama3", 8.0, 32)),
    ],
)
def test_rope_is_read_from_the_old_layout_and_the_new(keys: dict[str, Any], rope: Rope) -> None:
    assert ModelConfig.from_dict(LLAMA | keys).rope == rope


def test_yarn_takes_its_attention_factor_from_the_config_first() -> None:
    def factor(**keys: float) -> float:
        return ModelConfig.from_dict(LLAMA | {"rope_scaling": {"type": "yarn"} | YARN | keys}).rope.attention_factor

    assert factor(attention_factor=0.7, mscale=1.0, mscale_all_dim=0.5) == 0.7
    assert factor(mscale=1.0, mscale_all_dim=1.0) == 1.0
    assert factor(mscale=1.0) == factor()


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_the_dtype_of_the_checkpoint_has_two_names(key: str) -> None:
    assert ModelConfig.from_dict(LLAMA | {key: "bfloat16"}).dtype == "bfloat16"


@pytest.mark.parametrize(
    ("config", "generation", "ids"),
    [
        ({}, None, ()),
        ({"eos_token_id": 2}, None, (2,)),
        ({"eos_token_id": [2, 5]}, {}, (2, 5)),
        ({"eos_token_id": 2}, {"eos_token_id": [7, 2]}, (7, 2)),
    ],
)
def test_end_tokens_come_from_the_generation_config_first(
    config: dict[str, Any], generation: dict[str, Any] | None, ids: tuple[int, ...], tmp_path: Path
) -> None:
    write(tmp_path, LLAMA | config)
    if generation is not None:
        write(tmp_path, generation, "generation_config.json")
    assert ModelConfig.from_folder(tmp_path).eos_token_ids == ids


def test_a_window_as_long_as_the_context_is_full_attention() -> None:
    assert ModelConfig.from_dict(MISTRAL | {"sliding_window": 128}).family == "mistral"
    unused = {"use_sliding_window": False, "sliding_window": 16, "layer_types": ["full_attention"] * 3}
    assert ModelConfig.from_dict(QWEN2 | unused).family == "qwen2"


WINDOW = {"use_sliding_window": True, "sliding_window": 16}


@pytest.mark.parametrize(
    ("config", "windows"),
    [
        (MISTRAL | {"sliding_window": 64}, (64, 64, 64)),
        ({k: v for k, v in MISTRAL.items() if k != "sliding_window"} | {"max_position_embeddings": 8192}, (4096,) * 3),
        (QWEN2 | WINDOW | {"max_window_layers": 1}, (0, 16, 16)),
        (QWEN2 | WINDOW | {"max_window_layers": 0}, (16, 16, 16)),
        (QWEN2 | WINDOW, ()),
        (QWEN2 | WINDOW | {"max_window_layers": 0, "sliding_window": None}, ()),
        (QWEN3 | WINDOW | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}, (16, 0, 16)),
    ],
)
def test_each_layer_has_its_window(config: dict[str, Any], windows: tuple[int, ...]) -> None:
    found = ModelConfig.from_dict(config)
    assert found.windows == windows
    assert (found.page_window is not None) == (bool(windows) and all(windows))


def test_a_model_with_windows_is_not_written_without_them() -> None:
    with pytest.raises(ConfigError, match="sliding windows cannot be written"):
        config_dict(replace(ModelConfig.from_dict(LLAMA), windows=(8, 8, 8)), "float32")


# ---- what is refused ----

REFUSED: list[tuple[dict[str, Any], str]] = [
    (QWEN2 | WINDOW | {"layer_types": ["sliding_attention"]}, "a list of 3 types"),
    (QWEN3 | {"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
    (QWEN3 | WINDOW | {"layer_types": ["chunked_attention"] * 3}, "chunked_attention"),
    (LLAMA | {"architectures": ["MixtralForCausalLM"], "num_local_experts": 8}, "mixture of experts"),
    (LLAMA | {"architectures": ["Qwen3MoeForCausalLM"]}, "mixture of experts"),
    (LLAMA | {"num_experts": 4}, "mixture of experts"),
    (LLAMA | {"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
    (LLAMA | {"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
    (LLAMA | {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic"),
    (LLAMA | {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "longrope"),
    (LLAMA | {"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "per layer type"),
    (LLAMA | {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    (LLAMA | {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
    (LLAMA | {"hidden_act": "gelu"}, "gelu"),
    (LLAMA | {"mlp_bias": True}, "mlp_bias"),
    (LLAMA | {"num_key_value_heads": 3}, "num_key_value_heads=3"),
    (LLAMA | {"head_dim": 15}, "head_dim=15"),
    (LLAMA | {"hidden_size": 50}, "hidden_size=50"),
    (LLAMA | {"dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
]  # fmt: skip


@pytest.mark.parametrize(("config", "feature"), REFUSED, ids=[feature for _, feature in REFUSED])
def test_what_cannot_run_is_refused_by_name_with_no_weights_there(
    config: dict[str, Any], feature: str, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedModel) as refusal:
        ModelConfig.from_folder(write(tmp_path, config))
    assert feature in str(refusal.value)
    assert "not supported" in str(refusal.value)


BROKEN: list[tuple[object, str]] = [
    ("{garbled", "cannot be read as JSON"),
    ("[1, 2]", "expected a JSON object"),
    (LLAMA | {"hidden_size": "48"}, "hidden_size='48': expected a positive integer"),
    (LLAMA | {"num_hidden_layers": True}, "num_hidden_layers=True: expected a positive integer"),
    (LLAMA | {"vocab_size": None}, "vocab_size=None: expected a positive integer"),
    (LLAMA | {"rms_norm_eps": -1}, "rms_norm_eps=-1: expected a positive number"),
    (LLAMA | {"tie_word_embeddings": "yes"}, "tie_word_embeddings='yes': expected true or false"),
    (LLAMA | {"architectures": []}, "architectures=[]"),
    (LLAMA | {"eos_token_id": "</s>"}, "eos_token_id='</s>'"),
    (LLAMA | {"bos_token_id": [1]}, "bos_token_id=[1]"),
    (LLAMA | {"layer_types": 3}, "layer_types=3"),
    (LLAMA | {"rope_scaling": "linear"}, "rope_scaling='linear'"),
    (LLAMA | {"rope_scaling": {"type": "linear"}}, "'factor' is missing"),
    (LLAMA | {"rope_scaling": {"type": "llama3"} | LLAMA3 | {"high_freq_factor": 1.0}}, "high_freq_factor=1.0"),
    (QWEN3 | {"head_dim": None}, "head_dim=None"),
]


@pytest.mark.parametrize(("config", "message"), BROKEN, ids=[message for _, message in BROKEN])
def test_a_broken_config_is_explained(config: object, message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError) as complaint:
        ModelConfig.from_folder(write(tmp_path, config))
    assert not isinstance(complaint.value, UnsupportedModel)
    assert message in str(complaint.value)
    assert str(tmp_path / "config.json") in str(complaint.value)


@pytest.mark.parametrize(
    "key",
    ["architectures", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
     "max_position_embeddings"],
)  # fmt: skip
def test_a_missing_key_is_named(key: str) -> None:
    with pytest.raises(ModelError, match=f"'{key}' is missing"):
        ModelConfig.from_dict({name: value for name, value in LLAMA.items() if name != key})


def test_a_folder_without_a_config_is_explained(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config\.json there"):
        ModelConfig.from_folder(tmp_path)


def test_a_garbled_generation_config_is_explained(tmp_path: Path) -> None:
    write(tmp_path, LLAMA)
    write(tmp_path, "{", "generation_config.json")
    with pytest.raises(ModelError, match=r"generation_config\.json: cannot be read"):
        ModelConfig.from_folder(tmp_path)
