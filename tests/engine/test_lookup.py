"""Prompt lookup against a search slow enough to be obviously right, and inside the scheduler."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from faser.engine.lookup import INDEXED_PER_STEP, MAX_NGRAM, MIN_NGRAM, MOST_AGREED, NgramIndex, PromptLookup
from faser.engine.slots import SlotTable
from tests.oracle import RandomGuesses, World, make_request


def slow_lookup(tokens: list[int], length: int) -> list[int]:
    """What followed the latest earlier occurrence of the longest repeated suffix."""
    for size in range(MAX_NGRAM, MIN_NGRAM - 1, -1):
        for start in range(len(tokens) - size - 1, -1, -1):
            if tokens[start : start + size] == tokens[-size:]:
                known = list(tokens)
                for i in range(length):
                    known.append(known[start + size + i])
                return known[len(tokens) :]
    return []


def index_of(*parts: list[int]) -> NgramIndex:
    index = NgramIndex()
    for part in parts:
        index.extend(part)
    return index


def find(index: NgramIndex, length: int) -> list[int]:
    return [] if index.match is None else index.following(index.match, length)


@given(parts=st.lists(st.lists(st.integers(0, 3), max_size=12), max_size=6), length=st.integers(0, 12))
def test_an_index_finds_what_a_search_of_the_whole_context_finds(parts: list[list[int]], length: int) -> None:
    """After every addition, however the context was cut."""
    index, tokens = NgramIndex(), []
    for part in parts:
        index.extend(part)
        tokens += part
        assert find(index, length) == slow_lookup(tokens, length)
        assert len(index) == len(tokens)


@given(tokens=st.lists(st.integers(0, 2), min_size=2, max_size=60))
def test_a_match_says_how_many_tokens_agree(tokens: list[int]) -> None:
    match = index_of(tokens).match
    if match is None:
        assert not slow_lookup(tokens, 1)
        return
    agreed = 0
    while agreed <= match.end and tokens[match.end - agreed] == tokens[-1 - agreed]:
        agreed += 1
    assert match.agreed == min(agreed, MOST_AGREED)


def test_the_longest_suffix_wins_over_a_more_recent_shorter_one() -> None:
    assert find(index_of([1, 2, 3, 7, 9, 2, 3, 8, 1, 2, 3]), 1) == [7]


def test_of_equal_suffixes_the_most_recent_wins() -> None:
    assert find(index_of([2, 3, 7, 2, 3, 8, 2, 3]), 2) == [8, 2]


@pytest.mark.parametrize("period", [1, 2, 3, 5])
def test_periodic_text_is_continued_at_full_length(period: int) -> None:
    text = [i % period for i in range(40)]
    assert find(index_of(text[:20]), 20) == text[20:]


@pytest.mark.parametrize("tokens", [[], [1], [1, 1], [1, 2], [1, 2, 3, 4], [2, 9, 2]])
def test_nothing_repeated_gives_nothing(tokens: list[int]) -> None:
    assert find(index_of(tokens), 4) == []


def test_large_token_ids_are_told_apart() -> None:
    """Keys hold whole ids: nothing is hashed."""
    large = 2**24 - 2
    assert find(index_of([0, large, 5, large, 0, 6, 0, large]), 1) == [5]


class Slots:
    """Running requests with these contexts, in slots 0, 1, …"""

    def __init__(self, *contexts: list[int], length: int = 12_000) -> None:
        self.table = SlotTable(len(contexts), length)
        for slot, context in enumerate(contexts):
            self.extend(slot, context)
        self.lookup = PromptLookup(self.table)

    def extend(self, slot: int, tokens: list[int], in_flight: int = 0) -> None:
        table, known = self.table, int(self.table.num_known[slot])
        table.tokens[slot, known : known + len(tokens)] = tokens
        table.num_known[slot] = known + len(tokens)
        table.num_tokens[slot] = known + len(tokens) + in_flight

    def look(self, room: int = 4):
        slots = np.arange(self.table.num_known.size)
        return self.lookup.look(slots, np.full(slots.size, room), False)


def test_only_requests_that_repeat_themselves_may_look_up():
    slots = Slots([1, 2, 3, 4, 1, 2], [1, 2, 3, 4, 5, 6])
    view = slots.look()
    assert view.limit.tolist() == [4, 0]
    assert (np.diff(view.survival[0, :4]) < 0).all()
    assert not view.survival[0, 4:].any()
    assert not view.survival[1].any()
    drafts = slots.lookup.take(np.arange(2), np.array([3, 0]))
    assert drafts.is_looked_up.tolist() == [True, False]
    assert drafts.token_ids.tolist() == [[3, 4, 1], [0, 0, 0]]


def test_tokens_in_flight_are_skipped_and_cost_survival():
    settled, ahead = Slots([1, 2, 3, 4, 1, 2]), Slots([1, 2, 3, 4, 1, 2])
    ahead.extend(0, [], in_flight=2)
    now, later = settled.look(), ahead.look()
    assert later.survival[0, 0] == pytest.approx(now.survival[0, 2])
    drafts = ahead.lookup.take(np.array([0]), np.array([2]))
    assert drafts.start.tolist() == [6], "behind the last known token"
    assert drafts.token_ids.tolist() == [[3, 4, 1, 2]], "two of them stand for the tokens in flight"


def test_proposals_are_judged_by_what_came_whether_they_were_drafted_or_not():
    right, wrong = Slots([1, 2, 3, 4, 5, 1, 2]), Slots([1, 2, 3, 4, 5, 1, 2])
    for slots, came in ((right, [3, 4]), (wrong, [9, 9])):
        before = slots.look().survival[0, 0]
        slots.extend(0, came)
        slots.look()
        rates = slots.lookup.acceptance.rates[0]
        assert (rates[0] > before) == (slots is right)
        assert rates[1] == pytest.approx(before) or slots is right, "behind a wrong token nothing was tried"


def test_a_long_context_enters_its_index_in_several_steps():
    context = [*range(INDEXED_PER_STEP), 0, 1]
    slots = Slots(context)
    assert not slots.look().limit.any()
    assert slots.look().limit.tolist() == [4]
    assert slots.lookup.take(np.array([0]), np.array([2])).token_ids.tolist() == [[2, 3]]


def test_another_request_in_a_slot_finds_nothing_of_the_one_before():
    slots = Slots([1, 2, 3, 1, 2])
    assert slots.look().limit.any()
    slots.lookup.forget(0)
    slots.table.num_known[0] = 0
    slots.extend(0, [1, 2])
    assert not slots.look().limit.any()


def test_a_draft_that_rests_while_requests_look_up_counts_as_resting():
    """So it may leave the device."""
    world = World(RandomGuesses(3, seed=1), looks_up=True)
    world.scheduler.drafts.is_away = True
    for number in range(3):
        world.add(make_request(str(number), [1, 2, 1, 2, 1], 20))
    world.drain()
    assert any(plan.looked_up.any() for plan in world.plans)
    assert world.scheduler.last_drafted == 0
    assert not any(map(len, world.scheduler.drafts.lookup._indexes)), "requests that left keep no memory"


def test_while_many_tokens_wait_for_their_index_old_requests_still_look_up():
    slots = Slots([1, 2, 3, 1, 2], list(range(2 * INDEXED_PER_STEP)))
    for _ in range(3):
        assert slots.look().limit[0] == 4
        slots.extend(0, [3, 1, 2])
