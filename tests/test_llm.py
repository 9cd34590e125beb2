"""The offline API over real folders: what users call, and what they are told when it cannot work."""

from __future__ import annotations

import json
import threading
from dataclasses import replace

import pytest
import torch

from faser import LLM, FinishReason, MediaPrompt, SamplingParams
from faser.errors import ConfigError, EngineError, InvalidRequest, ModelError, RequestTooLong, UnsupportedModel
from faser.media.media import Media
from faser.text.chat import ChatTemplate
from faser.vision import VisionSettings
from tests.checkpoint import TEXT, write_tokenizer
from tests.models.reference import save_hf
from tests.models.test_logits import CASES
from tests.tiny import VISION, make_draft, make_grid, make_model, make_vision_model


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
        ([[1]], SamplingParams(logit_bias={400: 1}), InvalidRequest, "logit_bias.*400.*319"),
        ([[1]], SamplingParams(stop_token_ids=[400]), InvalidRequest, "stop_token_ids.*400.*319"),
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
        ({"max_step_ms": -1}, "max_step_ms=-1: expected milliseconds above 0, or 0"),
        ({"max_step_ms": float("nan")}, "max_step_ms=nan"),
        ({"max_step_ms": "50"}, "max_step_ms='50'"),
        ({"max_model_len": 4096}, "the model has 128"),
        ({"kv_memory": 10}, r"holds 0 tokens, too few for a request of 128; give at least 0\.001 GiB"),
        ({"kv_memory": 10, "max_model_len": 20}, "holds 0 tokens, too few for a request of 32"),
        ({"kv_memory": 2**50}, r"kv_memory of 1\.049e\+06 GiB: there is room for at most [\d.]+ GiB; give less"),
        ({"kv_memory": 10, "num_pages": 3}, "give one of them"),
    ],
)
def test_a_bad_option_is_refused_by_name(options, says):
    with pytest.raises(ConfigError, match=says):
        LLM(make_model(), **options)


@pytest.mark.parametrize(("given", "seconds"), [({}, 0.3), ({"max_step_ms": 80}, 0.08), ({"max_step_ms": 0}, None)])
def test_a_step_on_a_cpu_is_bounded_by_300_ms_unless_the_user_says_otherwise(given, seconds):
    with LLM(make_model(), device="cpu", **given) as llm:
        pace = llm.engine.scheduler.drafts.pace
        assert (None if pace is None else pace.max_seconds) == seconds


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


# ---- streams ----

STREAMED = [
    SamplingParams(max_tokens=40, ignore_eos=True),
    SamplingParams(max_tokens=40, temperature=1.2, seed=3, ignore_eos=True),
    SamplingParams(max_tokens=40, temperature=1.2, seed=4, logprobs=1),
]


def join(chunks):
    chunks = list(chunks)
    assert all(chunk.finish_reason is None and chunk.stats is None for chunk in chunks[:-1])
    return chunks, "".join(chunk.text for chunk in chunks), [t for chunk in chunks for t in chunk.token_ids]


@pytest.mark.parametrize("draft", [None, "ngram"])
def test_a_stream_joined_is_what_generate_returns(folder, draft):
    with LLM(str(folder), draft, policy="fixed:4" if draft else None, num_pages=64) as llm:
        for params in STREAMED:
            (right,) = llm.generate(TEXT[0], params)
            for variant in (params, replace(params, stop=right.text[9:12])):
                (right,) = llm.generate(TEXT[0], variant)
                chunks, text, token_ids = join(llm.stream(TEXT[0], variant))
                assert (text, token_ids) == (right.text, right.token_ids)
                assert (chunks[-1].finish_reason, chunks[-1].error) == (right.finish_reason, right.error)
                assert chunks[-1].stats.accepted == sum(chunk.num_accepted for chunk in chunks)
                if params.logprobs is not None:
                    assert [entry for chunk in chunks for entry in chunk.logprobs or ()] == right.logprobs
    assert len(chunks) > 1


def test_a_stream_says_which_text_was_drafted():
    from faser.text.tokenizer import Tokenizer

    target = make_model()
    prompt, params = [5, 6, 7] * 5, SamplingParams(max_tokens=30, ignore_eos=True)
    llm = LLM(target, target, policy="fixed:3", num_pages=64, tokenizer=spell_out(Tokenizer, target.config.vocab_size))
    chunks, text, _ = join(llm.stream(prompt, params))
    pieces = [piece for chunk in chunks for piece in chunk.pieces]
    assert "".join(piece for piece, _ in pieces) == text
    assert sum(accepted for _, accepted in pieces) == chunks[-1].stats.accepted > 0


def spell_out(tokenizer_class, vocab_size):
    """A tokenizer in which every token is a character."""
    import tokenizers

    vocab = {chr(0x4E00 + i): i for i in range(vocab_size)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token=chr(0x4E00)))
    backend.decoder = tokenizers.decoders.Fuse()
    return tokenizer_class(backend)


def test_a_stream_closed_early_gives_back_its_pages_and_the_next_request_is_served(llm):
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    (right,) = llm.generate(TEXT[0], params)
    stream = llm.stream(TEXT[0], params)
    first = next(stream)
    assert first.token_ids
    stream.close()
    assert not llm.engine.has_work
    llm.engine.scheduler.check()
    assert llm.engine.scheduler.target_pages.num_held == 0
    assert llm.generate(TEXT[0], params)[0].token_ids == right.token_ids


def test_a_stream_never_read_holds_nothing(llm):
    stream = llm.stream(TEXT[0])
    assert len(llm.generate(TEXT[0], SamplingParams(max_tokens=3))) == 1
    stream.close()


def test_with_the_last_chunk_the_llm_is_free_again(llm):
    stream = llm.stream(TEXT[0], SamplingParams(max_tokens=8, ignore_eos=True))
    for chunk in stream:
        if chunk.finish_reason is not None:
            break
    assert len(llm.generate(TEXT[0], SamplingParams(max_tokens=3))) == 1


def test_a_stream_of_something_wrong_refuses_it_with_the_first_chunk_and_holds_nothing(llm):
    for prompt, error in (([1, 320], InvalidRequest), ([1] * 200, RequestTooLong)):
        with pytest.raises(error):
            next(llm.stream(prompt))
        assert not llm.engine.has_work
    assert join(llm.stream(TEXT[0], SamplingParams(max_tokens=2)))[2]


def test_half_through_a_stream_the_same_thread_is_told_so_and_others_wait(llm):
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    (right,) = llm.generate(TEXT[1], params)
    stream = llm.stream(TEXT[0], params)
    next(stream)
    with pytest.raises(EngineError, match=r"this thread has an open stream.*close\(\)"):
        llm.generate(TEXT[1])
    outputs = []
    other = threading.Thread(target=lambda: outputs.extend(llm.generate(TEXT[1], params)))
    other.start()
    assert outputs == []
    list(stream)
    other.join()
    assert outputs[0].token_ids == right.token_ids


def test_an_llm_can_be_closed_half_through_a_stream(folder):
    llm = LLM(str(folder), num_pages=64)
    stream = llm.stream(TEXT[0], SamplingParams(max_tokens=20, ignore_eos=True))
    next(stream)
    llm.close()
    with pytest.raises(EngineError, match="closed"):
        next(stream)
    with pytest.raises(EngineError, match="closed"):
        llm.generate(TEXT[0])


@pytest.mark.parametrize("error", [RuntimeError("no memory"), KeyboardInterrupt()])
def test_a_step_that_fails_in_a_stream_ends_it_and_the_engine_serves_on(monkeypatch, error):
    target = make_model()
    llm = LLM(target, make_draft(target), num_pages=64, page_size=4)
    right = join(llm.stream([5, 6, 7] * 5))[2]
    with monkeypatch.context() as patched:
        stream = llm.stream([5, 6, 7] * 5)
        next(stream)

        def fails(*args, **kwargs):
            raise error

        patched.setattr(target, "run_layers", fails)
        with pytest.raises(EngineError if isinstance(error, Exception) else KeyboardInterrupt):
            list(stream)
    assert not llm.engine.has_work
    assert llm.engine.scheduler.target_pages.num_held == 0
    assert join(llm.stream([5, 6, 7] * 5))[2] == right


# ---- conversations ----

TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
MESSAGES = [{"role": "user", "content": "the quick"}]


def test_chat_answers_what_the_template_writes_without_further_special_tokens(folder):
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    with LLM(str(folder), num_pages=64, chat_template=ChatTemplate(TEMPLATE, "<s>", "</s>")) as llm:
        output = llm.chat(MESSAGES, params)
        assert output.prompt_token_ids == llm.chat_prompt(MESSAGES)
        assert output.prompt_token_ids[0] == 1
        assert output.prompt_token_ids.count(1) == 1
        (right,) = llm.generate("user: the quick\nassistant:", params)
        assert output.prompt_token_ids[1:] == right.prompt_token_ids
        assert join(llm.stream_chat(MESSAGES, params))[1] == output.text


def test_a_model_without_a_template_says_what_to_do(llm):
    with pytest.raises(InvalidRequest, match=r"no chat template.*--chat-template"):
        llm.chat(MESSAGES)
    with pytest.raises(InvalidRequest, match="no chat template"):
        next(llm.stream_chat(MESSAGES))
    with pytest.raises(InvalidRequest, match="tokenizer"):
        LLM(make_model(), num_pages=16, chat_template=TEMPLATE).chat(MESSAGES)


def test_the_most_tokens_of_a_request_are_the_model_s_or_the_pool_s():
    assert LLM(make_model(), num_pages=64, page_size=16).max_request_tokens == 128
    assert LLM(make_model(), num_pages=64, page_size=16, max_model_len=50).max_request_tokens == 50
    small = LLM(make_model(), num_pages=2, page_size=16)
    assert small.max_request_tokens == 32
    with pytest.raises(RequestTooLong):
        small.generate([[1]], SamplingParams(max_tokens=32))
    assert small.generate([[1]], SamplingParams(max_tokens=31, ignore_eos=True))


# ---- pictures ----

EYES = VisionSettings(
    patch_size=VISION.patch_size, merge_size=VISION.merge_size, frames_per_grid=2, min_pixels=1, max_pixels=10**6,
    video_min_pixels=1, video_max_pixels=10**6, image_token_id=VISION.image_token_id,
    video_token_id=VISION.video_token_id, has_spatial_positions=True,
)  # fmt: skip


def test_generate_takes_prompts_with_and_without_pictures():
    image = VISION.image_token_id
    media = [Media("image", (make_grid(seed=seed),), None, 1) for seed in range(2)]
    prompts = [MediaPrompt([3, image, 4], media[:1]), [3, 4, 5], MediaPrompt([3, image, 4, image], media)]
    with LLM(make_vision_model(), num_pages=64, vision_settings=EYES) as llm:
        together = llm.generate(prompts, SamplingParams(max_tokens=6, ignore_eos=True))
        assert together[0].prompt_token_ids == [3, *[image] * media[0].num_tokens, 4]
        for prompt, output in zip(prompts, together, strict=True):
            (alone,) = llm.generate(prompt, SamplingParams(max_tokens=6, ignore_eos=True))
            assert alone.token_ids == output.token_ids
        room = llm.max_request_tokens - len(together[2].prompt_token_ids)
        assert llm.fitted(SamplingParams(max_tokens=1000), prompts[2]).max_tokens == room
        with pytest.raises(InvalidRequest, match="placeholders"):
            llm.generate(MediaPrompt([3, image], media))


def test_a_model_without_eyes_takes_no_pictures():
    with LLM(make_model(), num_pages=16) as llm:
        with pytest.raises(InvalidRequest, match="text alone"):
            llm.generate(MediaPrompt([1], []))
        with pytest.raises(InvalidRequest, match=r"messages\[0\].content\[0\]: .*text alone"):
            llm.chat([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a.png"}}]}])
