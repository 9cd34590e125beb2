"""Text and JSON from tokens, however the tokens arrive."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from faser.request import Finish, FinishReason, Progress, SamplingParams, Stats, TokenLogprobs
from faser.server.answers import ChatAnswerer, Choice, ChoiceText, CompletionAnswerer, Piece, count_usage
from faser.server.protocol import ApiError
from faser.text.tokenizer import StopChecker, Tokenizer
from tests.checkpoint import write_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return Tokenizer.from_folder(folder)


def finish(reason=FinishReason.LENGTH, **fields) -> Finish:
    return Finish(reason, Stats(drafted=7, verified=6, accepted=4, steps=3, cached=2), **fields)


def cut(tokens: list[int], data) -> list[list[int]]:
    """The tokens in groups, as steps would bring them."""
    groups, rest = [], tokens
    while rest:
        size = data.draw(st.integers(1, len(rest)))
        groups.append(rest[:size])
        rest = rest[size:]
    return groups or [[]]


@given(st.data())
def test_the_pieces_of_a_text_joined_are_the_text(tokenizer, data):
    text = data.draw(st.text(max_size=30))
    tokens = tokenizer.encode(text)
    choice = ChoiceText(tokenizer, SamplingParams())
    groups = cut(tokens, data)
    ends = [None] * (len(groups) - 1) + [finish()]
    assert "".join(choice.push(*pair) for pair in zip(groups, ends, strict=True)) == text


@given(st.data())
def test_a_stop_string_is_never_shown_not_even_its_beginning(tokenizer, data):
    tokens = tokenizer.encode(data.draw(st.text("abc ", max_size=20)))
    stop = data.draw(st.lists(st.text("abc ", min_size=1, max_size=4), min_size=1, max_size=3))
    checker = StopChecker(tokenizer, stop)
    number = next((i + 1 for i, token in enumerate(tokens) if checker.push(token)), len(tokens))
    choice, shown = ChoiceText(tokenizer, SamplingParams(stop=stop)), ""
    groups = cut(tokens[:number], data)
    for i, group in enumerate(groups):
        shown += choice.push(group, finish(text=checker.text) if i == len(groups) - 1 else None)
        assert checker.text.startswith(shown)
    assert shown == checker.text


def test_the_token_that_ended_a_choice_is_counted_and_not_shown(tokenizer):
    choice = Choice(0, tokenizer, SamplingParams(logprobs=0))
    logprobs = [TokenLogprobs(token, -1.0, ()) for token in (70, 2)]
    piece = choice.feed([Progress("1", [70, 2], logprobs, finish(FinishReason.STOP, stop_id=2))])
    assert (piece.text, piece.finish_reason, len(piece.logprobs), choice.num_tokens) == ("d", "stop", 1, 2)


def test_a_failed_choice_fails_the_answer_with_its_reason(tokenizer):
    choice = Choice(0, tokenizer, SamplingParams())
    with pytest.raises(ApiError, match="overflow") as failed:
        choice.feed([Progress("1", [], None, finish(FinishReason.FAILED, error="overflow"))])
    assert failed.value.status == 500


def test_usage_counts_a_prompt_once_and_outputs_each():
    choices = [Choice(i, None, SamplingParams()) for i in range(4)]
    for choice in choices:
        choice.feed([Progress("1", [70] * 7, None, finish())])
    usage = count_usage([5, 6], choices)
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (11, 28, 39)
    assert usage.prompt_tokens_details.cached_tokens == 4
    details = usage.completion_tokens_details
    assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (16, 12)


def test_an_event_is_a_line_of_json_and_nothing_to_say_is_no_event(tokenizer):
    answerer = CompletionAnswerer("m", tokenizer, wants_logprobs=False)
    assert answerer.event(0, Piece("", [], None)) == b""
    event = answerer.event(1, Piece("a\nb", [], None))
    assert event.startswith(b"data: ")
    assert event.endswith(b"\n\n")
    assert event.count(b"\n") == 2
    assert json.loads(event[6:])["choices"] == [{"index": 1, "text": "a\nb", "logprobs": None, "finish_reason": None}]


def test_a_token_that_is_part_of_a_character_is_spelt_in_bytes(tokenizer):
    first, second = tokenizer.encode("Ć")
    answerer = ChatAnswerer("m", tokenizer, wants_logprobs=True)
    piece = Piece("Ć", [TokenLogprobs(first, -1.0, ((second, -2.0),))], None)
    (content,) = json.loads(answerer.event(0, piece)[6:])["choices"][0]["logprobs"]["content"]
    assert (content["token"], content["bytes"]) == (r"bytes:\xc4", [0xC4])
    assert content["top_logprobs"][0]["bytes"] == [0x86]
