"""The offline API over real folders: what users call, and what they are told when it cannot work."""

from __future__ import annotations

import json

import pytest
import torch

from faser import LLM, FinishReason, SamplingParams
from faser.errors import ConfigError, EngineError, InvalidRequest, ModelError, RequestTooLong, UnsupportedModel
from tests.checkpoint import TEXT, write_tokenizer
from tests.models.reference import save_hf
from tests.models.test_logits import CASES
from tests.tiny import make_draft, make_model


@pytest.fixture(scope="module")
def llm(folder):
    with LLM(str(folder), draft="ngram", num_pages=64) as llm:
        yield llm


@pytest.mark.parametrize("name", CASES)
def test_greedy_output_equals_transformers_generate(name, tmp_path):
    hf = save_hf(tmp_path, CASES[name])
    prompts = [torch.randint(3, hf.config.vocab_size, (n,)).tolist() for n in (1, 7, 30)]
    right = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = hf.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=40, do_sample=False, pad_token_id=0, eos_token_id=2
        )
        right.append(out[0, len(prompt) :].tolist())
    for draft, policy in ((None, "off"), (str(tmp_path), "fixed:3"), ("ngram", "fixed:5")):
        with LLM(str(tmp_path), draft, policy=policy, num_pages=64) as llm:
            outputs = llm.generate(prompts, SamplingParams(max_tokens=40))
        assert [output.token_ids for output in outputs] == right


def test_outputs_come_in_the_order_of_the_prompts_with_text_and_stats(llm):
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (9, 2, 5)]
    outputs = llm.generate(TEXT, params)
    assert [len(output.token_ids) for output in outputs] == [9, 2, 5]
    assert all(output.finish_reason is FinishReason.LENGTH for output in outputs)
    assert all(output.text for output in outputs)
    stats = outputs[0].stats
    assert stats.drafted == stats.verified + stats.pruned
    assert stats.steps + stats.accepted == 9
    assert llm.stats.emitted >= 16


def test_one_prompt_may_be_given_bare_as_text_or_token_ids(llm):
    (text,) = llm.generate(TEXT[0], SamplingParams(max_tokens=4))
    (ids,) = llm.generate(text.prompt_token_ids, SamplingParams(max_tokens=4))
    assert ids.token_ids == text.token_ids
    assert llm.generate([]) == []


def test_a_seeded_request_repeats_and_an_unseeded_one_does_not(llm):
    def run(seed):
        return llm.generate(TEXT[0], SamplingParams(max_tokens=30, temperature=1.5, seed=seed, ignore_eos=True))[
            0
        ].token_ids

    assert run(5) == run(5)
    assert run(-1) == run(2**64 - 1), "a seed is a 64-bit word"
    assert run(None) != run(None)


@pytest.mark.parametrize("draft", [None, "ngram"])
def test_a_stop_string_ends_text_and_tokens_at_the_same_place_with_and_without_drafts(folder, draft):
    with LLM(str(folder), draft, num_pages=64) as llm:
        params = SamplingParams(max_tokens=40, temperature=1.2, seed=3, ignore_eos=True)
        (free,) = llm.generate(TEXT[0], params)
        stop = free.text[10:13]
        cut = free.text.index(stop)
        (stopped,) = llm.generate(TEXT[0], SamplingParams(**{**params.__dict__, "stop": stop}))
    assert stopped.text == free.text[:cut]
    assert stopped.finish_reason is FinishReason.STOP
    assert stopped.token_ids == free.token_ids[: len(stopped.token_ids)]
    assert len(stopped.token_ids) < 40


def test_the_stop_token_is_in_the_ids_and_not_in_the_text(llm):
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    (free,) = llm.generate(TEXT[1], params)
    stop = free.token_ids[4]
    first = free.token_ids.index(stop)
    (stopped,) = llm.generate(TEXT[1], SamplingParams(max_tokens=20, ignore_eos=True, stop_token_ids=[stop]))
    assert stopped.token_ids == free.token_ids[: first + 1]
    assert stopped.finish_reason is FinishReason.STOP
    (before,) = llm.generate(TEXT[1], SamplingParams(max_tokens=max(first, 1), ignore_eos=True))
    assert stopped.text == (before.text if first else "")


def test_min_tokens_puts_off_the_end(llm):
    (free,) = llm.generate(TEXT[1], SamplingParams(max_tokens=20, ignore_eos=True))
    stop = free.token_ids[0]
    params = SamplingParams(max_tokens=20, min_tokens=7, ignore_eos=True, stop_token_ids=[stop])
    (output,) = llm.generate(TEXT[1], params)
    assert stop not in output.token_ids[:7]
    assert len(output.token_ids) >= 7


def test_logprobs_are_reported_for_every_token(llm):
    (output,) = llm.generate(TEXT[0], SamplingParams(max_tokens=6, logprobs=2))
    assert [entry.token_id for entry in output.logprobs] == output.token_ids
    assert all(len(entry.top) == 2 and entry.top[0][0] == entry.token_id for entry in output.logprobs)
    (output,) = llm.generate(TEXT[0], SamplingParams(max_tokens=6))
    assert output.logprobs is None


@pytest.mark.parametrize(
    ("prompts", "params", "error", "says"),
    [
        ([[1, 2], [3, 320]], None, InvalidRequest, "320.*0 to 319"),
        ([[1, 2], []], None, InvalidRequest, "no token"),
        ([[1], 7.5], None, InvalidRequest, "7.5.*string or a list"),
        ([[1, "x"]], None, InvalidRequest, "'x'"),
        ("", None, InvalidRequest, "no token"),
        ([[1]], SamplingParams(max_tokens=128), RequestTooLong, "= 129.*takes 128"),
        ([[1], [2]], [SamplingParams()], InvalidRequest, "1 sampling parameters for 2 prompts"),
        ([[1]], SamplingParams(logit_bias={400: 1}), InvalidRequest, "logit_bias.*400.*320"),
        ([[1]], SamplingParams(stop_token_ids=[400]), InvalidRequest, "stop_token_ids.*400.*320"),
    ],
)
def test_bad_input_is_refused_with_a_reason_and_the_next_call_works(llm, prompts, params, error, says):
    with pytest.raises(error, match=says):
        llm.generate(prompts, params)
    assert not llm.engine.has_work
    assert len(llm.generate([[1, 2]], SamplingParams(max_tokens=3))) == 1


def test_text_and_stop_strings_need_a_tokenizer():
    llm = LLM(make_model(), num_pages=32)
    assert llm.generate([[5, 6]], SamplingParams(max_tokens=3))[0].text == ""
    with pytest.raises(InvalidRequest, match="give token ids"):
        llm.generate("hello")
    with pytest.raises(InvalidRequest, match="stop_token_ids"):
        llm.generate([[5]], SamplingParams(stop="x"))
    assert not llm.engine.has_work


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"policy": "fixed:3"}, "needs a draft"),
        ({"policy": "faster"}, "expected off"),
        ({"policy": "fixed:99"}, "0 to 32"),
        ({"device": "tpu"}, "expected one of auto, cpu"),
        ({"dtype": "int4"}, "int4"),
        ({"dtype": "bfloat16"}, "in memory is torch.float32"),
        ({"max_running": 0}, "max_running=0"),
        ({"max_running": 9, "max_batch_tokens": 8}, "exceeds max_batch_tokens"),
        ({"max_model_len": 4096}, "the model knows 128"),
        ({"kv_memory": 10}, "one page of 16 tokens"),
        ({"kv_memory": 10, "num_pages": 3}, "give one of them"),
    ],
)
def test_a_bad_option_is_refused_by_name(options, says):
    with pytest.raises(ConfigError, match=says):
        LLM(make_model(), **options)


def test_an_unknown_option_is_not_ignored():
    with pytest.raises(TypeError, match="temperature"):
        LLM(make_model(), temperature=1.0)


def test_a_draft_with_another_tokenizer_is_refused_before_weights_are_read(folder, tmp_path):
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    write_tokenizer(tmp_path, extra=5)
    with pytest.raises(ModelError, match=r"tokenizers of .* differ"):
        LLM(str(folder), draft=str(tmp_path))  # the draft folder holds no weights at all


def test_an_unsupported_model_is_refused_by_name_before_weights_are_read(folder, tmp_path):
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": {"bits": 4}}))
    with pytest.raises(UnsupportedModel, match="quantization_config"):
        LLM(str(tmp_path))


def test_a_closed_llm_says_so(folder):
    llm = LLM(str(folder), num_pages=16)
    llm.close()
    llm.close()
    with pytest.raises(EngineError, match="closed"):
        llm.generate("x")


@pytest.mark.parametrize("error", [RuntimeError("no memory"), KeyboardInterrupt()])
def test_a_failed_step_ends_all_requests_and_the_engine_serves_on(monkeypatch, error):
    target = make_model()
    llm = LLM(target, make_draft(target), num_pages=64, page_size=4)
    prompts = [[5, 6, 7] * 5, [8, 9]]
    right = [output.token_ids for output in llm.generate(prompts)]
    forward, calls = target.run_layers, []

    def fails(*args, **kwargs):
        calls.append(1)
        if len(calls) == 4:
            raise error
        return forward(*args, **kwargs)

    monkeypatch.setattr(target, "run_layers", fails)
    expected = EngineError if isinstance(error, Exception) else KeyboardInterrupt
    with pytest.raises(expected):
        llm.generate(prompts)
    assert not llm.engine.has_work
    llm.engine.scheduler.check()
    assert llm.engine.scheduler.target_pages.num_held == 0
    assert [output.token_ids for output in llm.generate(prompts)] == right
