"""Damaged and hostile files of a model: a model, or a refusal by name; never memory for what a file merely claims."""

from __future__ import annotations

import json
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from faser.errors import FaserError, ModelError, UnsupportedModel
from faser.models import fields, gguf, weights
from faser.models.config import ModelConfig
from faser.models.gguf import reader
from faser.models.source import open_target
from faser.models.transformer import Transformer

SIZES = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "head_dim",
    "max_position_embeddings",
)  # fmt: skip
ABSURD = (10**9, 2**31, 2**63, 10**18, 10**400)


@pytest.fixture
def model(folder: Path, tmp_path: Path) -> Path:
    """A folder of its own, whose files may be changed."""
    return Path(shutil.copytree(folder, tmp_path / "model"))


def with_config(model: Path, **changed: object) -> Path:
    file = model / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changed}))
    return model


def load(model: Path) -> None:
    """Everything that a server reads of a model."""
    source = open_target(str(model))
    source.load(torch.float32, min(64, source.config.max_positions), lambda *_: None, "cpu")
    source.tokenizer()
    source.chat_template()


@pytest.mark.parametrize("value", ABSURD, ids=lambda value: f"{value:.0e}" if value < 10**300 else "huge")
@pytest.mark.parametrize("name", SIZES)
def test_an_absurd_size_is_refused_by_its_name_before_anything_is_allocated(name, value, model):
    with pytest.raises((ModelError, UnsupportedModel), match=r"config.json: .*(expected|is not supported)") as refused:
        ModelConfig.from_folder(with_config(model, **{name: value}))
    assert len(str(refused.value)) < 1000


@pytest.mark.parametrize("name", ["rms_norm_eps", "rope_theta"])
def test_a_number_that_no_float_holds_is_refused_by_its_name(name, model):
    with pytest.raises(ModelError, match=f"{name}=1000.*a float can hold"):
        ModelConfig.from_folder(with_config(model, **{name: 10**400}))


def test_positions_beyond_any_memory_are_refused(model):
    with pytest.raises(UnsupportedModel, match="lower max_position_embeddings"):
        ModelConfig.from_folder(with_config(model, max_position_embeddings=2**27, head_dim=256))


@pytest.mark.parametrize("name", ["vocab_size", "num_hidden_layers", "intermediate_size"])
def test_sizes_that_the_file_does_not_hold_are_refused_before_memory_is_taken(name, model, monkeypatch):
    sizes = {"vocab_size": 2**24, "num_hidden_layers": 900, "intermediate_size": 2**21}
    empty, devices = Transformer.empty, []

    def spying(config, dtype, device, max_positions):
        devices.append(device)
        return empty(config, dtype, device, max_positions)

    monkeypatch.setattr(Transformer, "empty", spying)
    config = ModelConfig.from_folder(with_config(model, **{name: sizes[name]}))
    with pytest.raises(ModelError, match=r"config\.json"):
        weights.load(model, config, torch.float32)
    assert devices == ["meta"]


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "", "\0", '{"vocab_size":' + "9" * 10_000 + "}"])
@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "tokenizer.json"])
def test_json_that_is_none_or_is_nested_too_deeply_is_refused_by_the_name_of_its_file(name, text, model):
    (model / name).write_text(text)
    with pytest.raises(ModelError, match=name):
        load(model)


def test_a_file_of_json_beyond_all_measure_is_not_read(model, monkeypatch):
    monkeypatch.setattr(fields, "MAX_BYTES", 100)
    with pytest.raises(ModelError, match=r"config\.json: has \d+ bytes; expected at most 100"):
        ModelConfig.from_folder(model)


def test_a_list_of_absurd_length_in_a_gguf_file_is_refused_before_it_is_made(tmp_path, monkeypatch):
    monkeypatch.setattr(reader, "MAX_LIST", 1000)
    items = struct.pack("<IIQ", reader._Cursor.ARRAY, 0, 1001) + bytes(1001)
    (tmp_path / "a.gguf").write_bytes(b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"a" + items + bytes(100))
    with pytest.raises(ModelError, match="garbled: a list of 1001"):
        gguf.open_file(tmp_path / "a.gguf")


def flip(data: bytearray, chance: random.Random, most: int) -> None:
    data[chance.randrange(most)] = chance.randrange(256)


def cut(data: bytearray, chance: random.Random, most: int) -> None:
    del data[chance.randrange(most) :]


def lose(data: bytearray, chance: random.Random, most: int) -> None:
    start = chance.randrange(most)
    del data[start : start + chance.randint(1, 50)]


def insert(data: bytearray, chance: random.Random, most: int) -> None:
    parts = (b"9" * 20, b"[", b"{", b'"', b"null", b"-1", b"1e400", b"\0", b"\xff", bytes(data[:30]))
    place = chance.randrange(most)
    data[place:place] = chance.choice(parts)


CHANGES: tuple[Callable[[bytearray, random.Random, int], None], ...] = (flip, cut, lose, insert)


@pytest.mark.parametrize(
    ("name", "times"),
    [("config.json", 150), ("model.safetensors", 150), ("tokenizer.json", 100), ("tokenizer_config.json", 100)],
)
def test_a_damaged_file_is_refused_or_makes_a_model(name, times, model):
    file = model / name
    if name == "tokenizer_config.json":
        file.write_text(json.dumps({"chat_template": "{{ messages }}", "bos_token": "<s>", "eos_token": "</s>"}))
    whole, refusals = file.read_bytes(), []
    most = 8 + int.from_bytes(whole[:8], "little") if name.endswith("safetensors") else len(whole)
    for seed in range(times):
        chance, data = random.Random(seed), bytearray(whole)
        for _ in range(chance.randint(1, 4)):
            chance.choice(CHANGES)(data, chance, max(1, min(most, len(data))))
            data = data or bytearray(b"x")
        file.write_bytes(bytes(data))
        try:
            load(model)
        except FaserError as error:
            refusals.append(str(error))
    assert len(refusals) > times / 4
    assert all(str(model) in refusal for refusal in refusals), "the file is named"
