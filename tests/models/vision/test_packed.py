"""Packed eyes with the default language model behind them: as the exported folder, or refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from faser import LLM, SamplingParams
from faser.errors import ModelError
from faser.media.media import Media, MediaPrompt
from faser.models.source import PackedSource, open_target
from faser.models.vision import packed
from faser.models.weights import SINGLE_FILE
from faser.vision import Grid
from tests.models.reference import random_hf
from tests.models.test_gguf import SIZES, load, write_hf
from tests.tools.test_watch import toy_tokenizer
from tools.watch import export
from tools.watch.vit import Eyes, EyesConfig


@pytest.fixture
def language(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small language model in place of the default one."""
    config = LlamaConfig(**SIZES, tie_word_embeddings=True)
    path = write_hf(tmp_path / "language.gguf", random_hf(config))
    monkeypatch.setattr("faser.models.source.default_target", lambda: path)
    return path


@pytest.fixture
def folder(tmp_path: Path, language: Path) -> Path:
    eyes = Eyes(EyesConfig(depth=2, embed_dim=32, num_heads=2, hidden_size=64))
    generator = torch.Generator().manual_seed(0)
    for parameter in eyes.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.3, generator)
    export.write_eyes(eyes, load(language), tmp_path / "eyes")
    return tmp_path / "eyes"


def test_packed_eyes_answer_as_the_exported_folder(folder: Path, language: Path, tmp_path: Path) -> None:
    export.write_full(folder, load(language), toy_tokenizer(), tmp_path / "full")
    sources = [open_target(str(folder)), open_target(str(tmp_path / "full"))]
    assert isinstance(sources[0], PackedSource)
    models = [source.load(torch.float32, 128, lambda done, total: None, "cpu") for source in sources]
    for ours, theirs in zip(models[0].weights(), models[1].weights(), strict=True):
        assert torch.equal(ours, theirs)
    settings = [source.vision_settings() for source in sources]
    assert settings[0] == settings[1]
    texts = [source.chat_template() for source in sources]
    assert texts[0] is not None
    assert texts[1] is not None
    assert texts[0].source == texts[1].source == export.CHAT_TEMPLATE
    prompts = [seeing(seed) for seed in range(2)]
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    answers = []
    for model in models:
        with LLM(model, vision_settings=settings[0], num_pages=32) as llm:
            answers.append([output.token_ids for output in llm.generate(prompts, params)])
    assert answers[0] == answers[1]
    assert answers[0][0] != answers[0][1], "the model sees"


def seeing(seed: int) -> MediaPrompt:
    patches = np.random.default_rng(seed).integers(0, 256, (16, 3, 2, 14, 14), np.uint8)
    return MediaPrompt([3, export.VIDEO_TOKEN_ID, 4], [Media("video", (Grid(patches, 4, 4, 2),), 0.5, 2)])


def test_in_bfloat16_they_are_rounded_as_those_of_the_exported_folder(
    folder: Path, language: Path, tmp_path: Path
) -> None:
    export.write_full(folder, load(language, torch.bfloat16), toy_tokenizer(), tmp_path / "full")
    models = [
        open_target(str(path)).load(torch.bfloat16, 128, lambda done, total: None, "cpu")
        for path in (folder, tmp_path / "full")
    ]
    assert all(torch.equal(*pair) for pair in zip(models[0].weights(), models[1].weights(), strict=True))


def change(folder: Path, **fields: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def refused(folder: Path) -> str:
    """Why the folder is refused before a weight of the language model is read."""
    with pytest.raises(ModelError) as refusal:
        open_target(str(folder))
    return str(refusal.value)


@pytest.mark.parametrize("about", [{"version": 2, "checksum": "x"}, {}, None, [1]])
def test_an_unknown_version_is_refused_by_name(folder: Path, about: object) -> None:
    change(folder, packed_eyes=about)
    assert "packed eyes of version" in refused(folder)
    assert "reads version 1" in refused(folder)


@pytest.mark.parametrize("damage", ["a bit", "its end", "all"])
def test_a_damaged_file_is_refused_by_name(folder: Path, damage: str) -> None:
    file = folder / SINGLE_FILE
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes({"a bit": bytes(data), "its end": bytes(data[:-100]), "all": b""}[damage])
    assert str(file) in refused(folder)
    assert "damaged" in refused(folder)
    file.unlink()
    assert "missing" in refused(folder)


@pytest.mark.parametrize("fault", ["missing", "shape", "infinite", "no safetensors"])
def test_tensors_that_are_not_those_of_the_config_are_refused(folder: Path, fault: str) -> None:
    file = folder / SINGLE_FILE
    tensors = load_file(file)
    name = "visual.blocks.0.attn.proj.weight"
    if fault == "missing":
        del tensors[name + ".scale"]
    elif fault == "shape":
        tensors[name + ".quants"] = tensors[name + ".quants"][:-1].clone()
        tensors[name + ".scale"] = tensors[name + ".scale"][:-1].clone()
    elif fault == "infinite":
        tensors[name + ".scale"][0] = torch.inf
    save_file(tensors, file)
    if fault == "no safetensors":
        file.write_bytes(b"x" * 100)
    change(folder, packed_eyes=packed.seal(folder))
    source = open_target(str(folder))
    with pytest.raises(ModelError, match="not the eyes of its config"):
        source.load(torch.float32, 128, lambda done, total: None, "cpu")


def test_eyes_for_another_language_model_are_refused_by_name(folder: Path) -> None:
    text = json.loads((folder / "config.json").read_text())["text_config"]
    change(folder, text_config={**text, "num_hidden_layers": 3})
    assert "num_layers=3; the default one has 2" in refused(folder)
