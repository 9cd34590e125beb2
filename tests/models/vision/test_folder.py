"""Folders of vision-language models: tensors in both layouts, the files about pixels, drafts, devices."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen2Config

from faser.errors import ConfigError, ModelError, UnsupportedModel
from faser.models import weights
from faser.models.config import ModelConfig
from faser.models.source import FolderSource, open_draft, open_target
from faser.models.transformer import Transformer
from faser.models.vision.names import vision_tensors
from tests.models.reference import SIZES, save_hf
from tests.models.vision.reference import (
    FRAMES,
    KINDS,
    MEAN,
    MERGE,
    PATCH,
    STD,
    hf_config,
    load_folder,
    write_processor,
)
from tests.models.vision.test_config import WATCH

NEW_NAMES = {"visual.": "model.visual.", "model.": "model.language_model.", "lm_head.": "lm_head."}


def rename(name: str, names: dict[str, str]) -> str:
    return next(new + name.removeprefix(old) for old, new in names.items() if name.startswith(old))


def saved(folder: Path, kind: str = "qwen2_vl", **text: Any) -> dict[str, torch.Tensor]:
    """Save a model, and return its tensors under their older names."""
    save_hf(folder, hf_config(kind, **text))
    tensors = load_file(folder / weights.SINGLE_FILE)
    old = {new: old for old, new in NEW_NAMES.items()}
    is_new = any(name.startswith("model.visual.") for name in tensors)
    return {rename(name, old) if is_new else name: tensor for name, tensor in tensors.items()}


def write(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file(tensors, folder / weights.SINGLE_FILE, metadata={"format": "pt"})


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_both_layouts_of_names_give_the_same_model(kind: str, tied: bool, tmp_path: Path):
    tensors = saved(tmp_path, kind, tie_word_embeddings=tied)
    write(tmp_path, tensors)
    old = load_folder(tmp_path)
    write(tmp_path, {rename(name, NEW_NAMES): tensor for name, tensor in tensors.items()})
    new = load_folder(tmp_path)
    assert (old.head is old.embedding) == tied
    for ours, theirs in zip(old.weights(), new.weights(), strict=True):
        assert torch.equal(ours, theirs)
    assert old.vision is not None
    for name, tensor in vision_tensors(old.vision).items():
        assert torch.equal(tensor, tensors[name])


def test_missing_and_unexpected_tensors_are_named(tmp_path: Path):
    tensors = saved(tmp_path)
    write(tmp_path, {name: tensor for name, tensor in tensors.items() if name != "visual.merger.mlp.0.bias"})
    with pytest.raises(ModelError, match=r"lacks visual\.merger\.mlp\.0\.bias"):
        load_folder(tmp_path)
    write(tmp_path, tensors | {"visual.deepstack.weight": torch.zeros(1)})
    with pytest.raises(ModelError, match=r"has visual\.deepstack\.weight"):
        load_folder(tmp_path)
    write(tmp_path, tensors | {"visual.patch_embed.proj.weight": torch.zeros(16, 3, 2, 4, 5)})
    with pytest.raises(ModelError, match=r"visual.patch_embed.proj.weight has the shape \[16, 3, 2, 4, 5\]"):
        load_folder(tmp_path)


def test_fasers_own_model_is_loaded(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(WATCH))
    config = ModelConfig.from_folder(tmp_path)
    tensors = {
        name: torch.randn(place.shape)
        for name, place in weights.destinations_of(Transformer.empty(config, torch.float32)).items()
    }
    write(tmp_path, tensors)
    model = load_folder(tmp_path)
    assert torch.equal(model.embedding, tensors["model.embed_tokens.weight"])
    assert model.vision is not None
    assert torch.equal(model.vision.merger.out, tensors["visual.merger.mlp.2.weight"])


# ---- pixels ----


def source(folder: Path) -> FolderSource:
    hf_config("qwen2_5_vl").save_pretrained(folder)
    found = open_target(str(folder))
    assert isinstance(found, FolderSource)
    return found


def bounds(folder: Path) -> tuple[int, int, int, int]:
    settings = source(folder).vision_settings()
    assert settings is not None
    return settings.min_pixels, settings.max_pixels, settings.video_min_pixels, settings.video_max_pixels


def test_settings_have_the_sizes_of_the_config_and_the_defaults_of_transformers(tmp_path: Path):
    settings = source(tmp_path).vision_settings()
    assert settings is not None
    assert (settings.patch_size, settings.merge_size, settings.frames_per_grid) == (PATCH, MERGE, FRAMES)
    assert (settings.image_token_id, settings.video_token_id, settings.positions_per_second) == (90, 91, 2)
    assert settings.has_spatial_positions
    assert bounds(tmp_path) == (56 * 56, 28 * 28 * 1280, 128 * 28 * 28, 28 * 28 * 768)


@pytest.mark.parametrize(
    "fields",
    [
        {"min_pixels": 100, "max_pixels": 2000},
        {"size": {"shortest_edge": 100, "longest_edge": 2000}},
        {"size": {"min_pixels": 100, "max_pixels": 2000}},
        {"size": {"shortest_edge": 7, "longest_edge": 8}, "min_pixels": 100, "max_pixels": 2000},
    ],
)
def test_every_spelling_of_the_bounds_is_read_and_videos_fall_back_to_pictures(fields: dict[str, Any], tmp_path: Path):
    write_processor(tmp_path, **fields)
    assert bounds(tmp_path) == (100, 2000, 100, 2000)


def test_videos_may_have_their_own_bounds(tmp_path: Path):
    write_processor(tmp_path, min_pixels=100, max_pixels=2000)
    own = {"size": {"shortest_edge": 10, "longest_edge": 500}, "image_mean": MEAN, "image_std": STD}
    (tmp_path / "video_preprocessor_config.json").write_text(json.dumps(own))
    assert bounds(tmp_path) == (100, 2000, 10, 500)
    both = {"image_processor": {"size": {"longest_edge": 9000}}, "video_processor": {"size": {"longest_edge": 200000}}}
    (tmp_path / "processor_config.json").write_text(json.dumps(both))
    assert bounds(tmp_path) == (56 * 56, 9000, 128 * 28 * 28, 200000)


def test_pixels_are_normalised_as_the_folder_says(tmp_path: Path):
    write_processor(tmp_path, rescale_factor=0.01)
    eyes = source(tmp_path).config.vision
    assert eyes is not None
    assert (eyes.mean, eyes.std, eyes.rescale) == (MEAN, STD, 0.01)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"do_normalize": False}, "do_normalize=false"),
        ({"do_center_crop": True}, "do_center_crop=true"),
        ({"resample": 2}, "resample=2"),
        ({"patch_size": 14}, "patch_size=14.*4, as in config.json"),
        ({"image_std": [1, 1]}, "image_std.*3 numbers"),
        ({"image_std": 0}, "image_std.*positive"),
        ({"size": 3}, "size=3"),
        ({"min_pixels": 5, "max_pixels": 4}, "at least 5.*at most 4"),
    ],
)
def test_pixels_that_faser_would_see_differently_are_refused(fields: dict[str, Any], said: str, tmp_path: Path):
    write_processor(tmp_path, **fields)
    with pytest.raises((ModelError, UnsupportedModel), match=said):
        source(tmp_path).vision_settings()


def test_videos_with_a_normalisation_of_their_own_are_refused(tmp_path: Path):
    write_processor(tmp_path)
    (tmp_path / "video_preprocessor_config.json").write_text(json.dumps({"image_mean": [0.1, 0.1, 0.1]}))
    with pytest.raises(UnsupportedModel, match=r"video_preprocessor_config.json.*normalisation"):
        source(tmp_path)


# ---- drafts and devices ----


def test_a_vision_language_model_is_no_draft_and_a_text_model_has_no_settings(tmp_path: Path):
    seeing, blind = tmp_path / "seeing", tmp_path / "blind"
    hf_config("qwen2_vl").save_pretrained(seeing)
    Qwen2Config(**SIZES, architectures=["Qwen2ForCausalLM"]).save_pretrained(blind)
    target = open_target(str(blind))
    assert target.vision_settings() is None
    with pytest.raises(ConfigError, match=r"seeing is a vision-language model.*draft"):
        open_draft(str(seeing), target)
    assert open_draft(str(blind), open_target(str(seeing))).path == blind
