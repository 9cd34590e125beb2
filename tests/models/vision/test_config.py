"""Configs of vision-language models in every layout, and what is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from faser.errors import ConfigError, ModelError, UnsupportedModel
from faser.models.config import ModelConfig, Rope, config_dict
from tests.models.vision.reference import KINDS, hf_config
from tests.tiny import VISION_CONFIGS

# As in the public checkpoints of Qwen2-VL-2B and Qwen2.5-VL-3B.
QWEN2_VL: dict[str, Any] = {
    "architectures": ["Qwen2VLForConditionalGeneration"], "attention_dropout": 0.0, "bos_token_id": 151643,
    "eos_token_id": 151645, "vision_start_token_id": 151652, "vision_end_token_id": 151653,
    "vision_token_id": 151654, "image_token_id": 151655, "video_token_id": 151656, "hidden_act": "silu",
    "hidden_size": 1536, "initializer_range": 0.02, "intermediate_size": 8960, "max_position_embeddings": 32768,
    "max_window_layers": 28, "model_type": "qwen2_vl", "num_attention_heads": 12, "num_hidden_layers": 28,
    "num_key_value_heads": 2, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "sliding_window": 32768,
    "tie_word_embeddings": True, "torch_dtype": "bfloat16", "use_cache": True, "use_sliding_window": False,
    "vision_config": {
        "depth": 32, "embed_dim": 1280, "mlp_ratio": 4, "num_heads": 16, "in_chans": 3, "hidden_size": 1536,
        "patch_size": 14, "spatial_merge_size": 2, "spatial_patch_size": 14, "temporal_patch_size": 2,
    },
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}, "vocab_size": 151936,
}  # fmt: skip
QWEN2_5_VL: dict[str, Any] = QWEN2_VL | {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"], "hidden_size": 2048, "intermediate_size": 11008,
    "max_position_embeddings": 128000, "model_type": "qwen2_5_vl", "num_attention_heads": 16,
    "num_hidden_layers": 36,
    "vision_config": {
        "depth": 32, "hidden_act": "silu", "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16,
        "in_chans": 3, "out_hidden_size": 2048, "patch_size": 14, "spatial_merge_size": 2,
        "spatial_patch_size": 14, "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31],
        "tokens_per_second": 2, "temporal_patch_size": 2,
    },
}  # fmt: skip
WATCH: dict[str, Any] = {
    "architectures": ["FaserWatchForConditionalGeneration"], "image_token_id": 4, "video_token_id": 5,
    "text_config": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 96, "hidden_size": 48,
        "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 80, "max_position_embeddings": 128,
        "tie_word_embeddings": True,
    },
    "vision_config": {"depth": 2, "embed_dim": 32, "num_heads": 4, "hidden_size": 48, "mlp_ratio": 3},
}  # fmt: skip
_TOP_KEYS = {
    "architectures", "model_type", "vision_config", "image_token_id", "video_token_id", "vision_start_token_id",
    "vision_end_token_id", "torch_dtype",
}  # fmt: skip


def nested(flat: dict[str, Any]) -> dict[str, Any]:
    """The same config as newer versions of transformers write it."""
    text = {key: value for key, value in flat.items() if key not in _TOP_KEYS}
    rope = {"rope_type": "default", "rope_theta": text.pop("rope_theta"), **text.pop("rope_scaling")}
    outer = {key: flat[key] for key in _TOP_KEYS if key in flat}
    outer["dtype"] = outer.pop("torch_dtype")
    return outer | {"text_config": {**text, "model_type": f"{flat['model_type']}_text", "rope_parameters": rope}}


def changed(data: dict[str, Any], part: str, **changes: Any) -> dict[str, Any]:
    return data | {part: data[part] | changes}


def test_qwen2_vl_is_a_qwen2_with_eyes():
    config = ModelConfig.from_dict(QWEN2_VL)
    assert (config.family, config.num_layers, config.qkv_bias, config.tie_embeddings) == ("qwen2", 28, True, True)
    assert config.rope == Rope(1_000_000.0, sections=(16, 24, 24))
    assert (config.dtype, config.eos_token_ids) == ("bfloat16", (151645,))
    eyes = config.vision
    assert eyes is not None
    assert (eyes.depth, eyes.hidden_size, eyes.mlp_size, eyes.output_size) == (32, 1280, 5120, 1536)
    assert (eyes.activation, eyes.window_size, eyes.tokens_per_second) == ("quick_gelu", None, None)
    assert (eyes.image_token_id, eyes.video_token_id, eyes.has_spatial_positions) == (151655, 151656, True)


def test_qwen2_5_vl_has_windows_and_counts_seconds():
    eyes = ModelConfig.from_dict(QWEN2_5_VL).vision
    assert eyes is not None
    assert (eyes.hidden_size, eyes.mlp_size, eyes.output_size, eyes.activation) == (1280, 3420, 2048, "silu")
    assert (eyes.window_size, eyes.groups_per_window, eyes.full_attention_layers) == (112, 4, (7, 15, 23, 31))
    assert eyes.tokens_per_second == 2
    assert [eyes.is_windowed(layer) for layer in (6, 7, 8)] == [True, False, True]


@pytest.mark.parametrize("flat", [QWEN2_VL, QWEN2_5_VL], ids=KINDS)
def test_old_and_new_layouts_mean_the_same(flat: dict[str, Any]):
    assert ModelConfig.from_dict(nested(flat)) == ModelConfig.from_dict(flat)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "type": "default", "mrope_section": [16, 24, 24]},
        {"rope_type": "mrope", "mrope_section": [16, 24, 24]},
        {"type": "mrope"},
    ],
)
def test_every_spelling_of_the_rope_means_the_same(rope: dict[str, Any]):
    assert ModelConfig.from_dict(QWEN2_VL | {"rope_scaling": rope}).rope == Rope(1_000_000.0, sections=(16, 24, 24))


@pytest.mark.parametrize("kind", KINDS)
def test_a_config_saved_without_its_model_is_known_by_its_type(kind: str, tmp_path: Path):
    hf_config(kind).save_pretrained(tmp_path)
    config = ModelConfig.from_folder(tmp_path)
    assert config.vision is not None
    assert config.vision.kind == kind
    assert config.rope.sections == (2, 2, 2)


def test_heads_are_tied_where_either_object_says_so():
    outer = nested(QWEN2_VL)
    outer["tie_word_embeddings"] = outer["text_config"].pop("tie_word_embeddings")
    assert ModelConfig.from_dict(outer).tie_embeddings
    assert not ModelConfig.from_dict(QWEN2_VL | {"tie_word_embeddings": False}).tie_embeddings


def test_fasers_own_model_has_one_position_a_token():
    config = ModelConfig.from_dict(WATCH)
    assert (config.family, config.rope.sections, config.tie_embeddings) == ("llama", (), True)
    assert config.vision is not None
    assert (config.vision.kind, config.vision.mlp_size, config.vision.has_spatial_positions) == ("qwen2_vl", 96, False)


@pytest.mark.parametrize(
    "data",
    [
        {"architectures": ["LlavaForConditionalGeneration"], "vision_config": {"hidden_size": 1}},
        {"architectures": ["Qwen3VLForConditionalGeneration"], "vision_config": {"depth": 1}},
        {"architectures": ["Qwen3VLMoeForConditionalGeneration"]},
        {"architectures": ["MllamaForConditionalGeneration"]},
        {"architectures": ["Idefics3ForConditionalGeneration"]},
        {"architectures": ["Qwen2_5OmniModel"], "thinker_config": {"vision_config": {}}},
        {"architectures": ["LlavaLlamaForCausalLM"], "mm_vision_tower": "clip"},
        {"model_type": "smolvlm", "vision_config": {"hidden_size": 1}},
        {"architectures": ["LlamaForCausalLM"], "vision_config": {"hidden_size": 1}},
    ],
    ids=lambda data: (data.get("architectures") or [data.get("model_type")])[0],
)
def test_other_vision_models_are_refused_by_name(data: dict[str, Any]):
    name = (data.get("architectures") or [data.get("model_type")])[0]
    with pytest.raises(UnsupportedModel, match=f"{name}, a vision model FASER does not see with.*Qwen2VLForCond"):
        ModelConfig.from_dict(data)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (changed(QWEN2_VL, "vision_config", deepstack_visual_indexes=[1]), "deepstack_visual_indexes"),
        (changed(QWEN2_VL, "vision_config", window_size=112), "window_size"),
        (changed(QWEN2_VL, "vision_config", hidden_act="relu"), "hidden_act='relu'.*quick_gelu"),
        (changed(QWEN2_5_VL, "vision_config", hidden_act="gelu"), "hidden_act='gelu'.*silu"),
        (changed(QWEN2_VL, "vision_config", in_chans=4), "in_chans=4.*RGB"),
        (changed(QWEN2_VL, "vision_config", spatial_patch_size=16), "spatial_patch_size=16.*14"),
        (changed(QWEN2_VL, "vision_config", hidden_size=1000), "output size of 1000.*hidden_size=1536"),
        (changed(QWEN2_VL, "vision_config", num_heads=9), "num_heads=9"),
        (changed(QWEN2_VL, "vision_config", rope_parameters={"rope_type": "yarn"}), "yarn.*axial"),
        (changed(QWEN2_5_VL, "vision_config", window_size=20), "window_size=20.*28"),
        (changed(QWEN2_5_VL, "vision_config", fullatt_block_indexes=[7, 32]), "fullatt_block_indexes.*depth=32"),
        (QWEN2_VL | {"use_sliding_window": True}, "use_sliding_window"),
        (QWEN2_VL | {"quantization_config": {"bits": 4}}, "quantization_config"),
        (nested(QWEN2_VL) | {"quantization_config": {"bits": 4}}, "quantization_config"),
        (changed(WATCH, "text_config", architectures=["GPT2LMHeadModel"]), "GPT2LMHeadModel"),
        (WATCH | {"text_config": QWEN2_VL}, "text_config: the architecture Qwen2VLForConditionalGeneration"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(data: dict[str, Any], said: str):
    with pytest.raises(UnsupportedModel, match=said):
        ModelConfig.from_dict(data)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (QWEN2_VL | {"rope_scaling": {"type": "mrope", "mrope_section": [16, 24]}}, "mrope_section.*three"),
        (QWEN2_VL | {"rope_scaling": {"type": "mrope", "mrope_section": [8, 8, 8]}}, "mrope_section.*add up to 64"),
        (QWEN2_VL | {"image_token_id": 151936}, "image_token_id=151936.*below vocab_size=151936"),
        ({key: value for key, value in WATCH.items() if key != "video_token_id"}, "video_token_id"),
        ({key: value for key, value in QWEN2_VL.items() if key != "vision_config"}, "vision_config=None"),
        (QWEN2_VL | {"text_config": 3}, "text_config=3"),
        (changed(QWEN2_VL, "vision_config", depth="deep"), "depth='deep'"),
        (changed(QWEN2_5_VL, "vision_config", fullatt_block_indexes="all"), "fullatt_block_indexes='all'"),
    ],
)
def test_broken_configs_are_explained(data: dict[str, Any], said: str):
    with pytest.raises(ModelError, match=said):
        ModelConfig.from_dict(data)


def test_the_eyes_are_not_lost_when_a_config_is_written():
    with pytest.raises(ConfigError, match="eyes cannot be written"):
        config_dict(VISION_CONFIGS["watch"], "float32")
