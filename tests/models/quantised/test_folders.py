"""Quantised folders: every layout stands for its weights; what is broken or unknown is refused by name."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from faser import LLM, SamplingParams
from faser.errors import ModelError, UnsupportedModel
from faser.models.config import ModelConfig
from faser.models.quantised import Fp8Matrix, Stack, dequantise, folders
from faser.models.quantised.packed import PackedMatrix
from faser.models.quantised.placement import Placement, for_gpu
from faser.models.quantised.tiled import TiledMatrix
from faser.models.transformer import Transformer
from tests.models.quantised.layouts import CONFIG, HIDDEN, LAYOUTS, SHAPES, write_layout
from tests.models.quantised.matrices import every_kind, group_matrix


def load(folder: Path, quantised: str = "off") -> Transformer:
    return folders.load(folder, ModelConfig.from_folder(folder), torch.float32, quantised=quantised)


def fused(weights: dict[str, torch.Tensor], layer: int, field: str) -> torch.Tensor:
    parts = {"qkv": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"], "out": ["self_attn.o_proj"],
             "gate_up": ["mlp.gate_proj", "mlp.up_proj"], "down": ["mlp.down_proj"]}  # fmt: skip
    return torch.cat([weights[f"model.layers.{layer}.{part}"] for part in parts[field]])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("quantised", ["off", "on"])
def test_a_folder_has_the_weights_of_its_layout(tmp_path, layout, quantised):
    weights = write_layout(tmp_path, layout)
    model = load(tmp_path, quantised)
    for index, layer in enumerate(model.layers):
        for field in ("qkv", "out", "gate_up", "down"):
            expected, found = fused(weights, index, field), dequantise(getattr(layer, field))
            tolerance = 2**-7 if isinstance(getattr(layer, field), PackedMatrix) else 1e-6
            assert torch.allclose(found, expected, atol=tolerance * expected.abs().max())


def test_a_cpu_computes_with_codes_of_integers(tmp_path):
    kinds = {"awq": PackedMatrix, "fp8 static": torch.Tensor, "gptq act-order": torch.Tensor}
    for layout, kind in kinds.items():
        write_layout(tmp_path / layout, layout)
        assert type(load(tmp_path / layout, "on").layers[1].down) is kind


@pytest.mark.parametrize("kind", every_kind(16, 256))
def test_a_gpu_keeps_codes_in_tiles_unless_it_is_told_not_to(kind):
    matrix = every_kind(16, 256)[kind]
    kept = for_gpu(matrix, torch.device("cpu"))
    assert isinstance(kept, Fp8Matrix if kind.startswith("fp8") else TiledMatrix)
    scale = matrix.dequantise().abs().max()
    assert torch.allclose(dequantise(kept), matrix.dequantise(), atol=1e-6 * scale)
    # The device without memory stands for a GPU.
    placed = Placement.choose("off", torch.bfloat16, "meta").place(matrix)
    assert (type(placed), placed.dtype, placed.device.type) == (torch.Tensor, torch.bfloat16, "meta")


@pytest.mark.parametrize("kind", every_kind(16, 256))
def test_by_itself_a_gpu_keeps_nothing(kind):
    """Four bits and blocks are slower there than bfloat16, and rounded rows make much of small differences."""
    assert isinstance(Placement.choose("auto", torch.bfloat16, "meta").place(every_kind(16, 256)[kind]), torch.Tensor)


def test_a_gpu_dequantises_what_it_has_no_product_for_and_says_so(caplog):
    parts = (group_matrix(16, 256, "Q4_K"), group_matrix(16, 256, "Q6_K"))
    with caplog.at_level(logging.WARNING, "faser.engine"):
        placed = Placement.choose("on", torch.bfloat16, "meta").place(Stack(parts))
    assert isinstance(placed, torch.Tensor)
    assert "4 bits in groups of 32 and 6 bits in groups of 16 are dequantised" in caplog.text


@pytest.mark.parametrize("layout", ["awq", "compressed fp8", "fp8 blocks"])
def test_speculation_does_not_change_the_text_of_a_quantised_model(tmp_path, layout):
    write_layout(tmp_path, layout)
    prompts = [[5, 9, 5, 9, 5, 9, 5], [3, 3, 3, 3], [17, 4, 17, 4, 17]]
    texts = []
    for policy, draft in (("off", "none"), ("fixed:3", "ngram")):
        llm = LLM(str(tmp_path), draft=draft, policy=policy, quantised="on", device="cpu")
        params = [SamplingParams(max_tokens=24, temperature=t, seed=3) for t in (0.0, 1.0, 0.0)]
        texts.append([each.token_ids for each in llm.generate(prompts, params)])
        llm.close()
    assert texts[0] == texts[1]


def test_matrices_that_the_config_leaves_out_are_plain(tmp_path):
    plain = ("model.layers.0.self_attn.k_proj", "model.layers.1.mlp.down_proj")
    weights = write_layout(tmp_path, "awq", plain, {"modules_to_not_convert": ["layers.0.self_attn.k_proj", plain[1]]})
    model = load(tmp_path, "on")
    assert isinstance(model.layers[1].down, torch.Tensor)
    x = torch.randn(2, HIDDEN)
    expected = x @ fused(weights, 0, "qkv").t()
    assert torch.allclose(model.layers[0].qkv.product(x), expected, atol=2**-7 * expected.abs().max())


def test_patterns_of_compressed_tensors_leave_matrices_out(tmp_path):
    plain = tuple(f"model.layers.{layer}.mlp.{name}_proj" for layer in (0, 1) for name in ("gate", "up", "down"))
    write_layout(tmp_path, "compressed int4", plain, {"ignore": ["lm_head", "re:.*mlp.*"]})
    assert isinstance(load(tmp_path, "on").layers[0].gate_up, torch.Tensor)


def test_a_sparsity_config_may_say_that_nothing_is_sparse():
    described = {**LAYOUTS["compressed fp8"][0], "sparsity_config": {"format": "dense"}}
    assert ModelConfig.from_dict({**CONFIG, "quantization_config": described}).quantisation is not None


def test_scattered_groups_are_dequantised_and_said(tmp_path, caplog):
    write_layout(tmp_path, "gptq act-order")
    with caplog.at_level(logging.WARNING, "faser.engine"):
        load(tmp_path, "on")
    assert "act-order" in caplog.text


# ---- what is refused ----


def change(folder: Path, **tensors: torch.Tensor | None) -> None:
    path = folder / "model.safetensors"
    stored = load_file(path)
    for name, tensor in tensors.items():
        key = f"model.layers.0.mlp.up_proj.{name}"
        stored.pop(key, None)
        if tensor is not None:
            stored[key] = tensor
    save_file(stored, path)


UP = SHAPES["mlp.up_proj"]


@pytest.mark.parametrize(
    ("layout", "tensors", "says"),
    [
        ("fp8 blocks", {"weight_scale_inv": torch.full((1, 1), torch.nan)}, "up_proj: its weight scale"),
        ("fp8 blocks", {"weight_scale_inv": torch.ones(2, 2)}, r"weight_scale_inv has the shape \[2, 2\]"),
        ("fp8 blocks", {"weight_scale_inv": None}, "lacks model.layers.0.mlp.up_proj.weight_scale_inv"),
        ("fp8 blocks", {"weight": torch.ones(UP)}, "has the dtype F32; expected F8_E4M3"),
        ("fp8 blocks", {"weight": torch.full(UP, torch.nan).to(torch.float8_e4m3fn)}, "no numbers"),
        ("fp8 static", {"input_scale": torch.tensor(0.0)}, "input_scale is 0"),
        ("fp8 static", {"weight_scale": torch.tensor(-1.0)}, "none negative"),
        ("awq", {"scales": torch.full((2, 128), torch.inf).half()}, "up_proj.scales: expected finite"),
        ("awq", {"scales": torch.ones(3, 128).half()}, r"scales has the shape \[3, 128\]"),
        ("awq", {"qzeros": None}, "lacks model.layers.0.mlp.up_proj.qzeros"),
        ("awq", {"bias": torch.ones(128)}, "has model.layers.0.mlp.up_proj.bias"),
        ("gptq act-order", {"g_idx": torch.full((64,), 9, dtype=torch.int32)}, "groups outside 0 to 1"),
        ("compressed int4", {"weight_shape": torch.tensor([1, 2])}, r"weight_shape is \[1, 2\]"),
    ],
)
def test_broken_tensors_are_refused_by_name(tmp_path, layout, tensors, says):
    write_layout(tmp_path, layout)
    change(tmp_path, **tensors)
    with pytest.raises(ModelError, match=says):
        load(tmp_path)


def test_a_bias_of_zeros_that_some_tools_write_is_no_bias(tmp_path):
    write_layout(tmp_path, "gptq")
    change(tmp_path, bias=torch.zeros(128))
    load(tmp_path)


@pytest.mark.parametrize(
    ("quantisation", "says"),
    [
        ({"quant_method": "bitsandbytes"}, "quant_method='bitsandbytes' is not supported"),
        ({"quant_method": "fp8", "weight_block_size": [64, 64]}, r"weight_block_size=\[64, 64\]"),
        ({"quant_method": "fp8", "activation_scheme": "none"}, "activation_scheme='none'"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt='e5m2'"),
        ({"quant_method": "fp8", "scale_fmt": "ue8m0"}, "scale_fmt='ue8m0'"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "static"}, "static"),
        ({"quant_method": "mxfp4"}, "quant_method='mxfp4'"),
        ({"quant_method": "modelopt"}, "quant_method='modelopt'"),
        ({"quant_method": "awq", "bits": 8, "group_size": 128}, "bits=8"),
        ({"quant_method": "awq", "bits": 4, "group_size": 100}, "group_size=100"),
        ({"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemv"}, "version='gemv'"),
        ({"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": False}, "zero_point=False"),
        ({"quant_method": "gptq", "bits": 3, "group_size": 128}, "bits=3"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128, "checkpoint_format": "marlin"}, "checkpoint_format"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128, "dynamic": {"-:.*": {}}}, "dynamic"),
        ({"quant_method": "compressed-tensors"}, "config_groups"),
        ({"quant_method": "compressed-tensors", "config_groups": {"a": {}, "b": {}}}, "2 groups"),
        ({"quant_method": "awq", "bits": 4, "group_size": 128, "modules_to_not_convert": ["re:("]}, "regular expr"),
        ("fp8", "expected an object"),
    ],
)
def test_what_the_config_asks_and_faser_lacks_is_refused_by_name(quantisation, says):
    with pytest.raises(ModelError, match=says):
        ModelConfig.from_dict({**CONFIG, "quantization_config": quantisation})


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"weights": {"num_bits": 4, "type": "float"}}, "num_bits=4"),
        ({"weights": {"num_bits": 8, "type": "int", "strategy": "channel"}}, "num_bits=8"),
        ({"input_activations": None}, "without input_activations"),
        ({"input_activations": {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": True}}, "strategy"),
        ({"output_activations": {"num_bits": 8}}, "output_activations"),
        ({"weights": {"num_bits": 8, "type": "float", "strategy": "group"}}, "strategy='group'"),
        ({"weights": {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [64, 64]}}, "block_str"),
        ({"weights": {"num_bits": 8, "type": "mx"}}, "type='mx'"),
    ],
)
def test_groups_of_compressed_tensors_that_faser_lacks_are_refused_by_name(changed, says):
    described = json.loads(json.dumps(LAYOUTS["compressed fp8"][0]))
    described["config_groups"]["group_0"] |= changed
    if changed.get("weights", {}).get("type") == "int":
        described["format"] = "pack-quantized"
    with pytest.raises(UnsupportedModel, match=says):
        ModelConfig.from_dict({**CONFIG, "quantization_config": described})


@pytest.mark.parametrize("key", ["sparsity_config", "transform_config"])
def test_what_compressed_tensors_do_beside_weights_is_refused_by_name(key):
    described = {**LAYOUTS["compressed fp8"][0], key: {"num_bits": 8}}
    with pytest.raises(UnsupportedModel, match=key):
        ModelConfig.from_dict({**CONFIG, "quantization_config": described})
