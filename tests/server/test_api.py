"""The API as its users meet it: the official client, and bodies it would never send."""

from __future__ import annotations

import asyncio
import json
import re
import shutil

import openai
import pytest

from faser.request import MAX_LOGPROBS, SamplingParams
from faser.server.protocol import CompletionRequest, parse
from tests.server.running import running

PROMPT = "the quick brown fox the quick brown"
FIXED = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0.8, "seed": 5, "ignore_eos": True}


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as found:
        yield found


def complete(client, **fields):
    extra = {name: fields.pop(name) for name in list(fields) if name in EXTRA}
    return client.completions.create(model="tiny", extra_body=extra, **fields)


def chat(client, **fields):
    extra = {name: fields.pop(name) for name in list(fields) if name in EXTRA}
    messages = fields.pop("messages", [{"role": "user", "content": "the fox"}])
    return client.chat.completions.create(model="tiny", messages=messages, extra_body=extra, **fields)


EXTRA = {"ignore_eos", "top_k", "min_p", "max_draft", "min_tokens", "repetition_penalty", "structured_outputs"}


# ── answers ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_completion_has_text_reason_and_usage_that_adds_up(client):
    answer = complete(client, **FIXED)
    assert answer.object == "text_completion"
    assert answer.choices[0].text
    assert answer.choices[0].finish_reason == "length"
    usage = answer.usage
    assert usage.completion_tokens == 12
    assert usage.total_tokens == usage.prompt_tokens + 12


def test_usage_tells_what_speculation_did(client):
    answer = complete(client, prompt=PROMPT, max_tokens=80, temperature=0, ignore_eos=True)
    details = answer.usage.completion_tokens_details
    assert 0 < details.accepted_prediction_tokens < 80
    assert details.rejected_prediction_tokens > 0


def test_speculation_does_not_show_in_the_output(client, server, plain_server):
    for seed in range(6):
        body = {**FIXED, "seed": seed, "max_tokens": 60, "logprobs": 2}
        speculated, plain = (s.complete(**body) for s in (server, plain_server))
        assert speculated["choices"][0]["text"] == plain["choices"][0]["text"]
        said, expected = (answer["choices"][0]["logprobs"] for answer in (speculated, plain))
        assert said["tokens"] == expected["tokens"]
        assert said["token_logprobs"] == pytest.approx(expected["token_logprobs"], abs=1e-4)
        details = plain["usage"]["completion_tokens_details"]
        assert details == {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0}


def test_streamed_text_is_the_whole_text(client):
    whole = complete(client, **FIXED).choices[0].text
    chunks = list(complete(client, **FIXED, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == whole
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]][-1] == "length"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 12
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_a_stream_without_include_usage_reports_none(client):
    assert all(chunk.usage is None and chunk.choices for chunk in complete(client, **FIXED, stream=True))


def test_chat_answers_and_streams_the_same_text(client):
    fields = {"max_tokens": 10, "temperature": 0.7, "seed": 1, "ignore_eos": True}
    whole = chat(client, **fields).choices[0]
    assert whole.message.role == "assistant"
    assert whole.finish_reason == "length"
    chunks = list(chat(client, **fields, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.message.content


def test_the_chat_template_is_applied_once(client, server):
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "the fox"}]
    rendered = "<s>system: be brief</s><s>user: the fox</s><s>assistant:"
    fields = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}
    spoken = chat(client, messages=messages, **fields)
    written = complete(client, prompt=rendered, **fields)
    assert spoken.choices[0].message.content == written.choices[0].text
    assert spoken.usage.prompt_tokens == written.usage.prompt_tokens


def test_text_parts_are_a_message(client):
    parts = [{"type": "text", "text": "the"}, {"type": "text", "text": "fox"}]
    fields = {"max_tokens": 4, "temperature": 0}
    split = chat(client, messages=[{"role": "user", "content": parts}], **fields)
    joined = chat(client, messages=[{"role": "user", "content": "the\nfox"}], **fields)
    assert split.choices[0].message.content == joined.choices[0].message.content


def test_the_async_client_streams_many_at_once(server):
    async def one(client, seed):
        stream = await client.completions.create(
            model="tiny", prompt=PROMPT, max_tokens=20, seed=seed, stream=True, extra_body={"ignore_eos": True}
        )
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def all_of_them():
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none") as client:
            return await asyncio.gather(*(one(client, seed % 4) for seed in range(24)))

    texts = asyncio.run(all_of_them())
    assert all(texts)
    assert texts[:4] * 6 == texts, "the same seed gives the same text, whoever else is in the batch"
    assert len(set(texts[:4])) > 1


@pytest.mark.parametrize("stream", [False, True])
def test_n_choices_are_different_and_the_first_is_the_only_one_of_n_1(client, stream):
    if stream:
        texts = ["", "", ""]
        for chunk in complete(client, **FIXED, n=3, stream=True):
            texts[chunk.choices[0].index] += chunk.choices[0].text
    else:
        answer = complete(client, **FIXED, n=3)
        texts = [choice.text for choice in answer.choices]
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        assert answer.usage.completion_tokens == 36
        assert answer.usage.prompt_tokens == complete(client, **FIXED).usage.prompt_tokens
    assert texts[0] == complete(client, **FIXED).choices[0].text
    assert len(set(texts)) == 3


def test_several_prompts_are_answered_in_order(client):
    fields = {**FIXED, "temperature": 0}
    prompts = ["the fox", "a draft", "lazy dog"]
    alone = [complete(client, **{**fields, "prompt": prompt}).choices[0].text for prompt in prompts]
    together = complete(client, **{**fields, "prompt": prompts})
    assert [choice.text for choice in together.choices] == alone
    ids = [[259, 78, 81], [70, 71, 72]]
    assert len(complete(client, **{**fields, "prompt": ids}).choices) == 2
    assert complete(client, **{**fields, "prompt": ids[0]}).usage.prompt_tokens == 3


def test_echo_puts_the_prompt_before_the_text(client):
    plain = complete(client, **FIXED).choices[0].text
    assert complete(client, **FIXED, echo=True).choices[0].text == PROMPT + plain
    assert "".join(c.choices[0].text for c in complete(client, **FIXED, echo=True, stream=True)) == PROMPT + plain


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_text_before_it(client, stream):
    whole = complete(client, **FIXED).choices[0].text
    stop = whole[5:7]
    expected = whole[: whole.index(stop)]
    if stream:
        chunks = list(complete(client, **FIXED, stop=[stop, "never seen"], stream=True))
        text, reason = "".join(c.choices[0].text for c in chunks), chunks[-1].choices[0].finish_reason
    else:
        choice = complete(client, **FIXED, stop=stop).choices[0]
        text, reason = choice.text, choice.finish_reason
    assert (text, reason) == (expected, "stop")


def test_the_end_token_ends_the_text_with_reason_stop(client):
    answer = complete(client, prompt=PROMPT, max_tokens=50, temperature=0, logit_bias={"2": 100}, logprobs=1)
    assert (answer.choices[0].finish_reason, answer.choices[0].text) == ("stop", "")
    assert answer.choices[0].logprobs.tokens == []
    assert answer.usage.completion_tokens == 1


def test_completion_logprobs_line_up_with_the_text(client):
    answer = complete(client, **FIXED, logprobs=3)
    logprobs = answer.choices[0].logprobs
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.top_logprobs) == 12
    assert all(value <= 0 for value in logprobs.token_logprobs)
    assert logprobs.text_offset[0] == 0
    assert all(3 <= len(top) <= 4 for top in logprobs.top_logprobs)
    streamed = [c.choices[0].logprobs for c in complete(client, **FIXED, logprobs=3, stream=True)]
    assert [token for part in streamed for token in part.tokens] == logprobs.tokens
    assert [offset for part in streamed for offset in part.text_offset] == logprobs.text_offset


def test_chat_logprobs_hold_the_best_rivals(client):
    fields = {"max_tokens": 6, "temperature": 0, "logprobs": True, "ignore_eos": True}
    content = chat(client, **fields, top_logprobs=4).choices[0].logprobs.content
    assert len(content) == 6
    assert all(len(item.top_logprobs) == 4 for item in content)
    assert all(item.top_logprobs[0].logprob == item.logprob for item in content), "greedy takes the best"
    assert all(item.token == bytes(item.bytes).decode() or item.token.startswith("bytes:") for item in content)
    assert all(item.top_logprobs == [] for item in chat(client, **fields).choices[0].logprobs.content)


def test_max_draft_0_opts_out_and_changes_nothing(client):
    drafted, opted_out = complete(client, **FIXED), complete(client, **FIXED, max_draft=0)
    assert drafted.choices[0].text == opted_out.choices[0].text
    details = opted_out.usage.completion_tokens_details
    assert details.accepted_prediction_tokens == details.rejected_prediction_tokens == 0


def test_a_repeated_prompt_is_found_in_the_prefix_cache(client):
    prompt = "a prompt of several pages, which nobody has sent before this very test did it " * 2
    first, again = (complete(client, prompt=prompt, max_tokens=2, temperature=0) for _ in range(2))
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    assert again.usage.prompt_tokens_details.cached_tokens > 0


SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["fox", "dog"]}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def test_a_json_schema_binds_the_output_and_speculation_does_not_show(server, plain_server):
    wanted = {"type": "json_schema", "json_schema": {"name": "animal", "schema": SCHEMA}}
    for seed in range(3):
        body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 200, "seed": seed}
        body["response_format"] = wanted
        answers = [each.post("/v1/chat/completions", body)[1] for each in (server, plain_server)]
        texts = [answer["choices"][0]["message"]["content"] for answer in answers]
        assert texts[0] == texts[1]
        assert answers[0]["choices"][0]["finish_reason"] == "stop"
        value = json.loads(texts[0])
        assert value["name"] in ("fox", "dog")
        assert 0 <= value["age"] <= 99


def test_a_json_object_that_is_cut_is_the_beginning_of_one(client):
    answer = chat(client, response_format={"type": "json_object"}, max_tokens=30, temperature=0)
    assert answer.choices[0].message.content.lstrip().startswith("{")


def test_a_regex_binds_the_output(client):
    answer = complete(client, prompt="x", max_tokens=30, seed=3, structured_outputs={"regex": "(fox|dog)-[0-9]{3}"})
    assert re.fullmatch("(fox|dog)-[0-9]{3}", answer.choices[0].text)
    assert answer.choices[0].finish_reason == "stop"


def test_models_are_listed(client, server):
    (model,) = client.models.list().data
    assert (model.id, model.owned_by) == ("tiny", "faser")
    assert client.models.retrieve("tiny").id == "tiny"
    assert server.get("/v1/models/other")[0] == 404


# ── defaults of the model ────────────────────────────────────────────────────────────────────────────────────────────

DEFAULTS = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "repetition_penalty": 1.2, "max_tokens": 3}


@pytest.mark.parametrize(
    ("given", "changed"),
    [
        ({}, {}),
        ({"temperature": 0, "top_k": -1}, {"temperature": 0, "top_k": 0}),
        ({"top_p": 1, "min_p": 0, "repetition_penalty": 1}, {"top_p": 1, "min_p": 0, "repetition_penalty": 1}),
        ({"temperature": None, "seed": 4}, {"seed": 4}),
    ],
)
def test_a_field_of_the_request_comes_before_the_model_s_default(given, changed):
    request = parse(json.dumps({"prompt": "a", **given}).encode(), CompletionRequest)
    assert request.sampling(20, None, DEFAULTS) == SamplingParams(**{**DEFAULTS, "max_tokens": 20, **changed})
    without = SamplingParams(**{"temperature": 1.0, "max_tokens": 20, **changed})
    assert request.sampling(20, None, {}) == without


def test_requests_without_fields_are_answered_as_the_model_recommends(chat_folder, tmp_path):
    folder = tmp_path / "recommending"
    shutil.copytree(chat_folder, folder)
    recommended = {"eos_token_id": 2, "temperature": 0.0, "max_new_tokens": 5, "num_beams": 4}
    (folder / "generation_config.json").write_text(json.dumps(recommended))
    with running(folder, tmp_path) as server:
        assert f"sampling temperature 0, max_tokens 5 ({folder}/generation_config.json); a request's" in server.log
        assert server.log.count("ignored num_beams=4") == 1
        fields = {"prompt": PROMPT, "ignore_eos": True}
        plain = server.complete(**fields)
        assert plain["usage"]["completion_tokens"] == 5
        assert plain["choices"][0]["text"] == server.complete(**fields)["choices"][0]["text"], "greedy"
        assert server.complete(**fields, max_tokens=9)["usage"]["completion_tokens"] == 9, "no cap, a default"
        hot = {server.complete(**fields, temperature=2, seed=seed)["choices"][0]["text"] for seed in range(4)}
        assert len(hot) > 1
        body = {"messages": [{"role": "user", "content": "x"}], "ignore_eos": True}
        assert server.post("/v1/chat/completions", body)[1]["usage"]["completion_tokens"] == 5


# ── refusals ─────────────────────────────────────────────────────────────────────────────────────────────────────────

TOO_LONG = "the fox " * 400

REFUSED = {
    "no prompt": ({}, "prompt"),
    "a wrong type": ({"prompt": "a", "max_tokens": "many"}, "max_tokens"),
    "an unknown field": ({"prompt": "a", "wisdom": 3}, "wisdom"),
    "a misspelt field": ({"prompt": "a", "max_token": 3}, "max_token"),
    "best_of": ({"prompt": "a", "best_of": 2}, "best_of"),
    "a suffix": ({"prompt": "a", "suffix": "b"}, "suffix"),
    "a temperature": ({"prompt": "a", "temperature": 9}, "temperature"),
    "no tokens": ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
    "an empty prompt": ({"prompt": ""}, "prompt"),
    "no prompts": ({"prompt": []}, "prompt"),
    "mixed prompts": ({"prompt": ["a", [1]]}, "prompt"),
    "an unknown id": ({"prompt": [1, 320]}, "prompt"),
    "a long prompt": ({"prompt": TOO_LONG}, "prompt"),
    "a very long prompt": ({"prompt": TOO_LONG * 100}, "prompt"),
    "too many tokens": ({"prompt": "a", "max_tokens": 600}, "max_tokens"),
    "a bias on nothing": ({"prompt": "a", "logit_bias": {"fox": 1}}, "logit_bias"),
    "a bias beyond the vocabulary": ({"prompt": "a", "logit_bias": {"320": 1}}, "logit_bias"),
    "too many logprobs": ({"prompt": "a", "logprobs": MAX_LOGPROBS + 1}, "logprobs"),
    "an empty stop": ({"prompt": "a", "stop": [""]}, "stop[0]"),
    "echo with logprobs": ({"prompt": "a", "echo": True, "logprobs": 1}, "echo"),
    "a bad regex": ({"prompt": "a", "structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
    "a bad schema": (
        {"prompt": "a", "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "fox"}}}},
        "response_format",
    ),
    "an unknown format": ({"prompt": "a", "response_format": {"type": "xml"}}, "response_format.type"),
    "a bias on an endless number": ({"prompt": "a", "logit_bias": {"9" * 5000: 1}}, "logit_bias"),
    "a long stop": ({"prompt": "a", "stop": "x" * 300}, "stop"),
    "too many ids": ({"prompt": [70] * 600}, "prompt"),
    "too many prompts": ({"prompt": ["a"] * 200}, "prompt"),
    "options of no stream": ({"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options"),
    "a costly schema": (
        {
            "prompt": "a",
            "response_format": {"type": "json_schema", "json_schema": {"schema": {"multipleOf": 999979}}},
        },
        "response_format",
    ),
    "a constrained output that must not end": (
        {"prompt": "a", "response_format": {"type": "json_object"}, "ignore_eos": True},
        "ignore_eos",
    ),
    "an unknown option": ({"prompt": "a", "stream_options": {"fast": True}}, "stream_options.fast"),
    "no number": ({"prompt": "a", "n": 1e400}, None),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_bad_request_is_refused_with_the_name_of_the_field(server, name):
    body, param = REFUSED[name]
    data = json.dumps({"model": "tiny", **body}).encode()
    status, answer = server.post("/v1/completions", data)
    assert status == 400, answer
    error = answer["error"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert error["message"]
    assert "Traceback" not in json.dumps(answer)


CHAT_REFUSED = {
    "no messages": ({"messages": []}, "messages"),
    "an image": ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
    "a real image": (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]},
        "messages[0].content",
    ),
    "more than fits": (
        {"messages": [{"role": "user", "content": "a"}], "max_completion_tokens": 9999},
        "max_completion_tokens",
    ),
    "no content": ({"messages": [{"role": "user"}]}, "messages[0].content"),
    "tools": ({"messages": [{"role": "user", "content": "a"}], "tools": [{"type": "function"}]}, "tools"),
    "top_logprobs alone": ({"messages": [{"role": "user", "content": "a"}], "top_logprobs": 2}, "top_logprobs"),
    "a completion's prompt": ({"messages": [{"role": "user", "content": "a"}], "prompt": "a"}, "prompt"),
}


@pytest.mark.parametrize("name", CHAT_REFUSED)
def test_a_bad_chat_is_refused_with_the_name_of_the_field(server, name):
    body, param = CHAT_REFUSED[name]
    status, answer = server.post("/v1/chat/completions", body)
    assert (status, answer["error"]["param"]) == (400, param)


def test_unsupported_fields_pass_with_values_that_change_nothing(server):
    neutral = {"best_of": 1, "user": "somebody", "suffix": None, "response_format": {"type": "text"}, "top_k": -1}
    assert server.complete(prompt="a", max_tokens=1, **neutral)["choices"]


def test_what_is_not_json_or_not_there_is_refused_in_the_envelope(server):
    for body in (b"", b"{", b"[]", b"\xff", b"[" * 100_000, b'{"prompt": "\\ud800"}'):
        status, answer = server.post("/v1/completions", body)
        assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
    assert server.post("/v1/completions", {"prompt": "a", "model": "other"})[0] == 404
    assert server.get("/v1/nothing")[1]["error"]["message"]
    assert server.get("/v1/completions")[0] == 405


def test_an_answer_s_message_can_be_sent_back_as_the_client_dumps_it(client):
    answer = chat(client, max_tokens=3, temperature=0, ignore_eos=True).choices[0].message
    messages = [{"role": "user", "content": "the fox"}, answer.model_dump(), {"role": "user", "content": "and"}]
    assert chat(client, messages=messages, max_tokens=2, temperature=0).usage.completion_tokens


def test_a_compressed_body_is_refused_by_its_encoding(server):
    status, answer = server.post("/v1/completions", b"x", {"Content-Encoding": "gzip"})
    assert status == 415
    assert "gzip" in answer["error"]["message"]


def test_the_client_raises_the_error_by_its_status(client):
    with pytest.raises(openai.BadRequestError, match="best_of"):
        complete(client, prompt="a", best_of=3)
    with pytest.raises(openai.NotFoundError, match="other"):
        client.completions.create(model="other", prompt="a")
