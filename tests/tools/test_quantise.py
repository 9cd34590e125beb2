"""tools/quantise.py: folders that load again, with weights close to the original's, in formats that others read."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from benchmarks.perplexity import logits_of
from faser.models.quantised import dequantise
from faser.models.source import open_target
from faser.runtime.kv_cache import KvFormat
from tests.checkpoint import write_tokenizer
from tests.models.reference import save_hf
from tests.tiny import make_model
from tools import quantise

SIZES = {
    "vocab_size": 320, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("original")
    save_hf(folder, transformers.LlamaConfig(**SIZES))
    write_tokenizer(folder)
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog " * 20)
    return folder


def write(original: Path, out: Path, kind: str, calibrated: bool = False) -> Path:
    extra = ["--calibrate", str(original / "text.txt"), "--tokens", "100"] if calibrated else []
    assert quantise.main([str(original), str(out), "--format", kind, *extra]) == 0
    return out


def load(folder: Path) -> list[dict[str, torch.Tensor]]:
    model = open_target(str(folder)).load(torch.float32, 64, lambda *_: None, "cpu")
    return [{name: dequantise(getattr(layer, name)) for name in quantise.PARTS} for layer in model.layers]


@pytest.mark.parametrize(
    ("kind", "calibrated", "error"),
    [("fp8-block", False, 0.04), ("fp8-channel", False, 0.04), ("fp8-static", True, 0.04), ("int4", False, 0.15),
     ("int4", True, 0.2)],
)  # fmt: skip
def test_a_quantised_folder_loads_with_weights_close_to_the_originals(original, tmp_path, kind, calibrated, error):
    expected, found = load(original), load(write(original, tmp_path / "out", kind, calibrated))
    for ours, theirs in zip(found, expected, strict=True):
        for name in quantise.PARTS:
            difference = (ours[name] - theirs[name]).square().mean().sqrt() / theirs[name].square().mean().sqrt()
            assert 0 < difference < error
    assert open_target(str(tmp_path / "out")).tokenizer() is not None


def test_a_folder_whose_blocks_are_cut_is_said_to_be_read_wrongly_elsewhere(original, tmp_path, capsys):
    write(original, tmp_path / "cut", "fp8-block")
    assert "transformers 5.23 reads these wrongly" in capsys.readouterr().out, "an MLP of 192"
    write(original, tmp_path / "rows", "fp8-channel")
    assert "wrongly" not in capsys.readouterr().out


def test_clipping_lowers_the_error_on_the_inputs_it_was_made_for():
    random = torch.Generator().manual_seed(0)
    weight = torch.randn(32, 128, generator=random)
    weight[:, 3] *= 6  # an outlier that most inputs do not use
    x = torch.randn(200, 128, generator=random)
    x[:, 3] *= 0.01
    inputs = quantise.Inputs(x.square().sum(0))
    errors = [
        (x @ (quantise.quantise(weight, "int4", 64, each).dequantise() - weight).t()).square().mean()
        for each in (None, inputs)
    ]
    assert errors[1] < 0.9 * errors[0]


def test_calibration_sees_the_inputs_of_every_matrix(original):
    model = open_target(str(original)).load(torch.float32, 64, lambda *_: None, "cpu")
    found = quantise.calibrate(model, list(range(3, 60)))
    assert len(found) == 2
    assert all(each.largest > 0 and (each.energy > 0).all() for layer in found for each in layer.inputs.values())
    assert found[0].inputs["down"].energy.shape == (192,)


@pytest.mark.parametrize(
    ("kind", "large", "undone"),
    [("plain", "k", "q"), ("fp8-block", "v", "o"), ("fp8-channel", "k", "q"), ("int4", "v", "o")],
)
def test_scales_of_keys_and_values_keep_them_from_saturating(original, tmp_path, kind, large, undone):
    """Keys or values far beyond 448, in a model that says the same."""
    folder, out = tmp_path / "large", tmp_path / "out"
    shutil.copytree(original, folder)
    tensors = load_file(folder / "model.safetensors")
    for index in range(SIZES["num_hidden_layers"]):
        for part, factor in ((large, 2.0**14), (undone, 2.0**-14)):
            tensors[f"model.layers.{index}.self_attn.{part}_proj.weight"] *= factor
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    text = ["--calibrate", str(folder / "text.txt"), "--tokens", "100", "--kv-scales"]
    assert quantise.main([str(folder), str(out), "--format", kind, *text]) == 0
    model, token_ids = open_target(str(out)).load(torch.float32, 64, lambda *_: None, "cpu"), torch.arange(3, 60)
    wanted, found = logits_of(model, token_ids), logits_of(model, token_ids, KvFormat.rounded(model))
    model.kv_scales = ()
    saturated = logits_of(model, token_ids, KvFormat.rounded(model))
    errors = [float((each - wanted).square().mean()) for each in (found, saturated)]
    assert errors[0] < 0.1 * errors[1]


def test_a_key_is_measured_at_any_position():
    """A turn gives all of a pair to one of its numbers."""
    model = make_model("qwen2")
    for layer in model.layers:
        layer.qkv.zero_()
        layer.qkv_bias.zero_()
        layer.qkv_bias[[32, 36]] = torch.tensor([3.0, 4.0])  # a pair of the first key head
        layer.qkv_bias[-1] = -7.0
    assert {(seen.key, seen.value) for seen in quantise.calibrate(model, [3, 4, 5])} == {(5.0, 7.0)}


def test_what_cannot_be_written_is_refused(original, tmp_path, capsys):
    assert quantise.main([str(original), str(tmp_path / "a"), "--format", "fp8-static"]) == 2
    assert "--calibrate TEXT" in capsys.readouterr().err
    assert quantise.main([str(original), str(tmp_path / "a"), "--format", "int4", "--kv-scales"]) == 2
    assert "--kv-scales needs the keys and values of a text" in capsys.readouterr().err
    assert quantise.main([str(original), str(tmp_path / "a"), "--format", "plain"]) == 2
    assert "--format plain rounds no weights: give --kv-scales" in capsys.readouterr().err
    write(original, tmp_path / "b", "int4")
    assert quantise.main([str(original), str(tmp_path / "b"), "--format", "int4"]) == 2
    assert "expected a new or an empty folder" in capsys.readouterr().err
    assert quantise.main([str(tmp_path / "b"), str(tmp_path / "c"), "--format", "int4"]) == 2
    assert "is quantised; start from the original" in capsys.readouterr().err


def test_the_group_is_the_largest_that_divides_every_matrix(original, tmp_path):
    config = json.loads((write(original, tmp_path / "out", "int4") / "config.json").read_text())
    weights = config["quantization_config"]["config_groups"]["group_0"]["weights"]
    assert weights["group_size"] == 64  # 192 columns
