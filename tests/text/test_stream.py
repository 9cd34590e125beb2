"""Chunks: however tokens were grouped into steps, what is shown is certain and joins to the output's text."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from faser.request import Finish, FinishReason, Progress, Stats
from faser.text.stream import ChunkStream
from faser.text.tokenizer import StopChecker, Tokenizer
from tests.checkpoint import write_tokenizer

STOP_ID = 2


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(path)
    return Tokenizer.from_folder(path)


def run(stream, checker, steps, stop_id=None):
    """The chunks of a request that brings `steps`, as the scheduler would report them, up to its stop."""
    chunks, num_tokens = [], 0
    for number, step in enumerate(steps):
        new, found = [], False
        for token in step:
            new.append(token)
            found = token != stop_id and checker is not None and checker.push(token)
            if found:
                break
        num_tokens += len(new)
        finish = None
        if found or number == len(steps) - 1:
            text = checker.text if checker is not None else None
            stats = Stats(accepted=num_tokens - number - 1, steps=number + 1)
            finish = Finish(FinishReason.STOP, stats, stop_id=stop_id, text=text)
        chunks.append(stream.receive(Progress("1", new, None, finish)))
        if finish is not None:
            break
    return chunks


tokens = st.lists(st.lists(st.integers(3, 299), min_size=1, max_size=5), min_size=1, max_size=12)
stops = st.lists(st.sampled_from(["e", " the", "th", "x\ufffd", "東", "abc", "o "]), max_size=3, unique=True)


@settings(max_examples=300)
@given(steps=tokens, stop=stops)
def test_joined_chunks_are_the_output_s_text_and_nothing_shown_is_taken_back(tokenizer, steps, stop):
    checker = StopChecker(tokenizer, stop) if stop else None
    chunks = run(ChunkStream(tokenizer, checker), checker, steps)
    token_ids = [token for chunk in chunks for token in chunk.token_ids]
    text = "".join(chunk.text for chunk in chunks)
    assert text == (checker.text if checker is not None else tokenizer.decode(token_ids))
    assert [chunk.finish_reason is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert sum(chunk.num_accepted for chunk in chunks) == chunks[-1].stats.accepted


def test_text_is_attributed_to_the_token_that_completed_it(tokenizer):
    the, half = tokenizer.encode("the quick"), tokenizer.encode("ö")
    assert len(half) == 2, "two tokens, one character"
    chunks = run(ChunkStream(tokenizer, None), None, [the, half])
    accepted = tokenizer.decode(the[:-1])
    pieces = chunks[0].pieces
    assert "".join(text for text, is_draft in pieces if is_draft) == accepted
    assert pieces[-1] == (tokenizer.decode(the)[len(accepted) :], False)
    assert chunks[1].pieces == (("ö", False),)


def test_text_that_may_begin_a_stop_string_is_held_back_until_it_cannot(tokenizer):
    checker = StopChecker(tokenizer, ["quiet"])
    steps = [[token] for token in tokenizer.encode("a qui") + tokenizer.encode("ck fox")]
    chunks = run(ChunkStream(tokenizer, checker), checker, steps)
    shown = ""
    for chunk in chunks:
        shown += chunk.text
        assert "a quick fox".startswith(shown)
        assert shown not in ("a q", "a qu", "a qui"), "these could still become the stop string"
    assert shown == "a quick fox"


def test_the_token_that_stops_is_among_the_ids_and_not_in_the_text(tokenizer):
    ids = tokenizer.encode("over")
    chunks = run(ChunkStream(tokenizer, None), None, [[*ids, STOP_ID]], stop_id=STOP_ID)
    assert chunks[0].token_ids == (*ids, STOP_ID)
    assert chunks[0].text == "over"


def test_without_a_tokenizer_a_chunk_has_tokens_and_no_text():
    (chunk,) = run(ChunkStream(None, None), None, [[5, 6, 7]])
    assert (chunk.token_ids, chunk.num_accepted, chunk.text, chunk.pieces) == ((5, 6, 7), 2, "", ())
