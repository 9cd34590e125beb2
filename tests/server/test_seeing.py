"""A real model that sees, over HTTP and in Python: small and random, but every part is the one that serves."""

from __future__ import annotations

import pytest

from faser import LLM, SamplingParams
from faser.errors import InvalidRequest
from tests.server.running import running
from tests.server.seeing import data_url, image_part, picture, text_part, video_part, write_gif, write_seeing_checkpoint

FIXED = {"max_tokens": 12, "temperature": 0, "ignore_eos": True}
OPTIONS = {"num_frames": 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("seeing-model")
    write_seeing_checkpoint(path)
    (path / "a.png").write_bytes(picture(84, 56))
    write_gif(path / "a.gif")
    return path


@pytest.fixture(scope="module")
def server(folder, tmp_path_factory):
    flags = ("--allowed-media", str(folder), "--draft", "ngram", "--policy", "fixed:3", "--served-model-name", "tiny")
    with running(folder, tmp_path_factory.mktemp("log"), *flags) as found:
        yield found


@pytest.fixture(scope="module")
def llm(folder):
    with LLM(str(folder), num_pages=64) as made:
        yield made


def conversation(*parts):
    return [{"role": "user", "content": list(parts)}]


def ask(server, messages, **fields):
    body = {"messages": messages, "mm_processor_kwargs": OPTIONS, "logprobs": True, **FIXED, **fields}
    status, answer = server.post("/v1/chat/completions", body)
    assert status == 200, answer
    return answer


@pytest.fixture
def messages(folder):
    first = data_url(picture(56, 56, seed=3))
    return conversation(image_part(first), text_part("then"), video_part(str(folder / "a.gif")), text_part("what?"))


def test_the_server_with_drafts_answers_as_the_library_without(server, llm, messages):
    answer = ask(server, messages)
    right = llm.chat(messages, SamplingParams(max_tokens=12, ignore_eos=True), OPTIONS)
    assert answer["choices"][0]["message"]["content"] == right.text
    assert answer["usage"]["prompt_tokens"] == len(right.prompt_token_ids)
    assert answer["usage"]["prompt_tokens_details"]["video_frames"] == 4
    streamed = llm.stream_chat(messages, SamplingParams(max_tokens=12, ignore_eos=True), OPTIONS)
    assert "".join(chunk.text for chunk in streamed) == right.text


def first_logprobs(answer):
    return answer["choices"][0]["logprobs"]["content"][0]["logprob"]


def test_the_answer_depends_on_the_pixels(server):
    found = [ask(server, conversation(image_part(data_url(picture(seed=seed))), text_part("?"))) for seed in (5, 6, 5)]
    first, second, again = map(first_logprobs, found)
    assert first == pytest.approx(again, abs=1e-4)
    assert abs(first - second) > 1e-3


def test_the_same_picture_is_found_in_the_prefix_cache_and_another_is_not(server):
    text = text_part("the quick brown fox jumps over the lazy dog")
    url = data_url(picture(112, 112, seed=7))
    cached = [
        ask(server, conversation(image_part(each), text))["usage"]["prompt_tokens_details"]["cached_tokens"]
        for each in (url, url, data_url(picture(112, 112, seed=8)))
    ]
    assert cached[1] >= 16, "the pages of the picture"
    assert cached[2] < 16


def test_choices_of_a_picture_are_those_of_single_requests(server, messages):
    several = ask(server, messages, n=2, temperature=1.0, seed=4)
    single = ask(server, messages, temperature=1.0, seed=4)
    texts = [choice["message"]["content"] for choice in several["choices"]]
    assert texts[0] == single["choices"][0]["message"]["content"]
    assert several["usage"]["prompt_tokens"] == single["usage"]["prompt_tokens"]


def test_the_library_reads_paths_relative_to_the_working_folder(llm, folder, monkeypatch):
    monkeypatch.chdir(folder)
    params = SamplingParams(max_tokens=4)
    given = [llm.chat(conversation(image_part(url)), params).text for url in ("a.png", str(folder / "a.png"))]
    assert given[0] == given[1]


def test_the_library_refuses_what_the_server_refuses(llm, folder):
    with pytest.raises(InvalidRequest, match="MediaPrompt"):
        llm.generate("a <|image_pad|>")
    with pytest.raises(InvalidRequest, match="unknown media option 'frames'"):
        llm.chat(conversation(image_part(str(folder / "a.png"))), mm_processor_kwargs={"frames": 3})
    with pytest.raises(InvalidRequest, match=r"messages\[0\].content\[0\]: .*network"):
        llm.chat(conversation(image_part("https://example.com/a.png")))
