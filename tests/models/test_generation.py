"""Sampling defaults from generation_config.json: what is taken, what is refused, and who wins."""

from __future__ import annotations

import json
import logging
import shutil

import pytest

from faser import LLM, SamplingParams
from faser.cli.main import main
from faser.errors import ConfigError, ModelError
from faser.models import generation
from faser.models.source import recommended_sampling
from tests.checkpoint import TEXT
from tests.tiny import make_model


@pytest.fixture
def written(tmp_path):
    """Writes a file and reads it back."""

    def write(data) -> generation.Recommendation:
        path = tmp_path / generation.FILE
        path.write_text(json.dumps(data))
        return generation.read(path)

    return write


@pytest.fixture
def sampling_model(folder, tmp_path):
    """A function that makes a folder of the tests' model with its own recommendation."""

    def make(**fields) -> str:
        path = tmp_path / "recommending"
        shutil.copytree(folder, path)
        (path / generation.FILE).write_text(json.dumps({"eos_token_id": 2, **fields}))
        return str(path)

    return make


# ---- the file ----


def test_the_fields_that_vllm_takes_are_taken_under_our_names(written):
    found = written(
        {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.05, "max_new_tokens": 9}
    )
    right = SamplingParams(temperature=0.7, top_p=0.8, top_k=20, min_p=0.05, repetition_penalty=1.05, max_tokens=9)
    assert found.params == right
    assert found.ignored == ()
    assert found.origin.endswith(generation.FILE)


def test_what_the_file_leaves_open_is_as_in_sampling_params(written, tmp_path):
    assert written({"temperature": None, "eos_token_id": 2, "top_k": -1}).params == SamplingParams()
    assert written({"eos_token_id": 2}).origin.startswith("none in ")
    assert generation.read(tmp_path / "nowhere.json") == generation.NOTHING


def test_what_faser_does_not_take_is_named_in_one_log_line(written, caplog):
    found = written({"do_sample": False, "num_beams": 4, "penalty_alpha": 0.6, "typical_p": 1.0, "temperature": 0.5})
    assert found.ignored == ("do_sample=False", "num_beams=4", "penalty_alpha=0.6")
    with caplog.at_level(logging.WARNING):
        found.log_ignored()
        written({"do_sample": True, "bos_token_id": 1, "transformers_version": "5"}).log_ignored()
    (record,) = caplog.records
    assert record.getMessage().endswith(f"{generation.FILE}: ignored do_sample=False, num_beams=4, penalty_alpha=0.6")


@pytest.mark.parametrize("wrong", [{"temperature": -1}, {"top_p": "all"}, {"max_new_tokens": 0}, {"top_k": -2}])
def test_a_value_out_of_range_is_refused_with_the_file_and_the_way_out(written, wrong):
    with pytest.raises(ModelError, match=rf"{generation.FILE}: .*expected .*--generation-config none"):
        written(wrong)


def test_the_default_model_s_recommendation_ships_with_faser():
    found = recommended_sampling(None, "auto")
    assert found.values == {"temperature": 0.2, "top_p": 0.9}
    assert found.ignored == ()
    assert generation.describe(found.values) == "temperature 0.2, top_p 0.9"
    assert recommended_sampling(None, "none").values == {}


def test_an_unknown_mode_is_refused():
    with pytest.raises(ConfigError, match="generation_config='vllm': expected one of auto, none"):
        LLM(make_model(), generation_config="vllm")


# ---- LLM ----


def test_calls_without_parameters_sample_as_the_model_recommends(sampling_model):
    model = sampling_model(temperature=1.5, top_k=5, max_new_tokens=12)
    with LLM(model, num_pages=64) as llm:
        assert llm.default_params == SamplingParams(temperature=1.5, top_k=5, max_tokens=12)
        without = [llm.generate(TEXT[0])[0].token_ids for _ in range(4)]
        assert all(len(ids) <= 12 for ids in without)
        assert len({tuple(ids) for ids in without}) > 1, "it samples"
        streamed = [token for chunk in llm.stream(TEXT[0]) for token in chunk.token_ids]
        assert len(streamed) <= 12
        greedy = llm.generate(TEXT[0], SamplingParams())
        assert greedy == llm.generate(TEXT[0], SamplingParams()), "explicit parameters are what they say"
        assert len(greedy[0].token_ids) > 12


def test_without_the_recommendation_calls_without_parameters_are_greedy(sampling_model):
    with LLM(sampling_model(temperature=1.5), num_pages=64, generation_config="none") as llm:
        assert llm.default_params == SamplingParams()
        right = llm.generate(TEXT[0], SamplingParams())[0].token_ids
        assert llm.generate(TEXT[0])[0].token_ids == right


def test_a_recommended_length_beyond_the_context_is_cut_to_the_room_there_is(sampling_model):
    with LLM(sampling_model(max_new_tokens=4096), num_pages=64) as llm:
        (output,) = llm.generate([[5, 6, 7]])
        assert len(output.token_ids) <= 125
        assert llm.fitted(llm.default_params, [5, 6, 7]).max_tokens == 125


# ---- generate and chat ----


def generated(capsys, model, *options, what: str = "token_ids") -> list[int]:
    assert main(["generate", TEXT[0], "--model", model, "--json", "--ignore-eos", *options]) == 0
    return json.loads(capsys.readouterr().out)[what]


def test_generate_takes_what_the_model_recommends_unless_told_otherwise(sampling_model, capsys):
    model = sampling_model(temperature=1.5, max_new_tokens=12)
    seed = ("--seed", "3")
    recommended = generated(capsys, model, *seed)
    assert recommended == generated(
        capsys, model, *seed, "--generation-config", "none", "--temperature", "1.5", "--max-tokens", "12"
    )
    greedy = generated(capsys, model, *seed, "--generation-config", "none")
    assert len(greedy) == 64
    assert generated(capsys, model, *seed, "--temperature", "0") == greedy[:12]
    assert recommended != greedy[:12]


def test_chat_takes_what_the_model_recommends_and_its_own_defaults_for_the_rest(sampling_model, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr("faser.cli.terminal.Chat.run", lambda chat: seen.append(chat._params))
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages[0].content }}")
    command = ["chat", "--model", sampling_model(temperature=0.7), "--chat-template", str(template)]
    for options in ([], ["--generation-config", "none"], ["--temperature", "0"]):
        assert main([*command, *options]) == 0
    assert [(params.temperature, params.top_p, params.max_tokens) for params in seen] == [
        (0.7, 0.9, 512), (0.3, 0.9, 512), (0, 0.9, 512),
    ]  # fmt: skip


def test_generate_without_a_length_uses_the_room_there_is(sampling_model, capsys):
    model = sampling_model(max_new_tokens=4096)
    ids = [generated(capsys, model, "--max-model-len", "100", what=what) for what in ("prompt_token_ids", "token_ids")]
    assert sum(map(len, ids)) == 100
    assert main(["generate", "x", "--model", model, "--max-tokens", "4096"]) == 1


def test_a_field_that_is_not_taken_is_logged_once_by_the_command_line(sampling_model, caplog):
    model = sampling_model(num_beams=4)
    assert main(["generate", "x", "--model", model, "--max-tokens", "1"]) == 0
    assert ["num_beams=4" in record.getMessage() for record in caplog.records] == [True]


def test_a_broken_recommendation_is_one_line_before_weights_are_read(sampling_model, capsys, tmp_path):
    model = sampling_model(temperature=-1)
    (tmp_path / "recommending" / "model.safetensors").unlink()
    assert main(["generate", "x", "--model", model]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert "temperature=-1" in lines[0]
