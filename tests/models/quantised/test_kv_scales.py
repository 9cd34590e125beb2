"""Scales of 8-bit keys and values: found under every name, checked, and refused by name."""

from __future__ import annotations

import json
import logging

import pytest
import torch

from faser.errors import ModelError, UnsupportedModel
from faser.models.config import ModelConfig
from faser.models.quantised import folders
from tests.models.quantised.layouts import CONFIG, LAYERS, LAYOUTS, write_layout

SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
WANTED = ((0.5, 0.25), (2.0, 0.75))
NAMES = {
    "compressed-tensors": ("self_attn.k_scale", "self_attn.v_scale"),
    "of a module": ("self_attn.attn.k_scale", "self_attn.attn.v_scale"),
    "of projections": ("self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale"),
    "of outputs": ("self_attn.k_proj.output_scale", "self_attn.v_proj.output_scale"),
}


def scales(names=NAMES["compressed-tensors"], values=WANTED) -> dict[str, torch.Tensor]:
    return {
        f"model.layers.{layer}.{name}": torch.tensor([value]) if layer else torch.tensor(value)
        for layer, pair in enumerate(values)
        for name, value in zip(names, pair, strict=True)
    }


def load(folder, more, layout="compressed fp8", scheme=SCHEME):
    write_layout(folder, layout, quantisation={"kv_cache_scheme": scheme} if scheme else None, more=more)
    return folders.load(folder, ModelConfig.from_folder(folder), torch.float32)


@pytest.mark.parametrize("names", NAMES)
def test_scales_are_found_under_every_name(tmp_path, names):
    assert load(tmp_path, scales(NAMES[names])).kv_scales == WANTED


def test_one_scale_may_be_for_both(tmp_path):
    both = {f"model.layers.{layer}.self_attn.kv_scale": torch.tensor(0.5 + layer) for layer in range(LAYERS)}
    assert load(tmp_path, both, "fp8 blocks", None).kv_scales == ((0.5, 0.5), (1.5, 1.5))


def test_a_scheme_without_scales_means_one_and_is_said(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "faser.engine"):
        assert load(tmp_path, {}).kv_scales == ()
    assert "kv_cache_scheme and no scales" in caplog.text


def test_a_folder_may_round_keys_and_values_alone(tmp_path):
    write_layout(tmp_path, "compressed fp8", plain=tuple(write_layout(tmp_path, "compressed fp8")), more=scales())
    described = {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": SCHEME}
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "quantization_config": described}))
    model = folders.load(tmp_path, ModelConfig.from_folder(tmp_path), torch.float32)
    assert model.kv_scales == WANTED
    assert model.formats == ("float32",)


@pytest.mark.parametrize("wrong", [0.0, -1.0, float("nan"), float("inf")])
def test_a_scale_that_is_no_positive_number_is_refused_by_name(tmp_path, wrong):
    values = (WANTED[0], (2.0, wrong))
    with pytest.raises(ModelError, match=r"layers\.1\.self_attn\.v_scale is .*expected a positive number"):
        load(tmp_path, scales(values=values))


@pytest.mark.parametrize(
    ("name", "tensor", "says"),
    [
        ("model.layers.1.self_attn.k_scale", torch.ones(2), r"k_scale has the shape \[2\]; expected one number"),
        ("model.layers.1.self_attn.k_scale", torch.ones(1).int(), "k_scale has the dtype I32"),
        ("model.layers.2.self_attn.k_scale", torch.ones(1), r"too many: model\.layers\.2\.self_attn\.k_scale"),
        ("model.layers.1.self_attn.attn.k_scale", torch.ones(1), "second scale of the same numbers"),
        ("model.layers.1.self_attn.v_proj.k_scale", torch.ones(1), r"v_proj\.k_scale, which config\.json does not"),
        ("model.layers.1.self_attn.q_scale", torch.ones(1), r"q_scale, which config\.json does not"),
    ],
)
def test_scales_that_do_not_fit_are_refused_by_name(tmp_path, name, tensor, says):
    with pytest.raises(ModelError, match=says):
        load(tmp_path, scales() | {name: tensor})


def test_a_layer_without_its_scales_is_refused_by_name(tmp_path):
    found = scales()
    del found["model.layers.0.self_attn.v_scale"]
    with pytest.raises(ModelError, match=r"missing or too many: model\.layers\.0\.self_attn\.v_scale"):
        load(tmp_path, found)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"num_bits": 4}, "num_bits=4"),
        ({"type": "int"}, "type='int'"),
        ({"strategy": "attn_head"}, "strategy='attn_head'"),
        ({"dynamic": True}, "dynamic=True"),
        ({"symmetric": False}, "symmetric=False"),
    ],
)
def test_other_schemes_are_refused_by_name(changed, says):
    described = {**LAYOUTS["compressed fp8"][0], "kv_cache_scheme": {**SCHEME, **changed}}
    with pytest.raises(UnsupportedModel, match=f"kv_cache_scheme: {says}"):
        ModelConfig.from_dict({**CONFIG, "quantization_config": described})


def test_scales_of_a_model_that_is_not_quantised_are_refused_by_name(tmp_path):
    from faser.models import weights

    write_layout(tmp_path, "compressed fp8", plain=tuple(write_layout(tmp_path, "compressed fp8")), more=scales())
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(ModelError, match="k_scale"):
        weights.load(tmp_path, ModelConfig.from_folder(tmp_path), torch.float32)
