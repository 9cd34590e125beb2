from __future__ import annotations

import pytest

from faser.policy.rivals.goodput import Goodput
from tests.policy.profiles import SMOOTH, make_outcome, make_view


def test_the_length_with_the_most_tokens_per_second_is_given():
    # by hand, tokens per ms at acceptance 0.7: 0.98, 1.31, 1.45, 1.47, 1.31 (20 rows run as 64), …
    assert Goodput().lengths(make_view(4, num_tokens=0)).tolist() == [3] * 4


def test_speculation_must_win_by_a_tenth():
    # by hand: 22.65 tokens per ms without drafts, 22.93 with one
    assert not Goodput().lengths(make_view(128, num_tokens=0)).any()


def test_a_full_batch_does_not_speculate():
    assert not Goodput().lengths(make_view(256)).any()


def test_a_busier_batch_never_drafts_more():
    given = [int(Goodput().lengths(make_view(size, profile=SMOOTH)).max()) for size in range(1, 257)]
    assert given[0] >= 3
    assert given[-1] == 0
    assert given == sorted(given, reverse=True)


def test_prompt_rows_are_not_charged_to_drafts():
    alone, beside = (Goodput().lengths(make_view(4, prefill_rows=rows)).max() for rows in (0, 400))
    assert beside >= alone, "beside prompts the verification's weights are read anyway"


def test_rejected_drafts_end_speculation_and_a_long_pause_gives_it_another_chance():
    policy, view = Goodput(), make_view(4)
    for _ in range(300):
        policy.learn(make_outcome([3] * 4, 0))
    assert not policy.lengths(view).any()
    for _ in range(3000):
        policy.learn(make_outcome([0] * 4, 0))
    assert policy.lengths(view).all()


def test_accepted_drafts_grow_longer():
    policy, view = Goodput(), make_view(1)
    before = int(policy.lengths(view)[0])
    for _ in range(500):
        policy.learn(make_outcome(3, 3))
    assert policy.lengths(view)[0] > before


@pytest.mark.parametrize("limit", [0, 1, [0, 1, 2, 32]])
def test_no_request_is_given_more_than_its_limit(limit):
    view = make_view(4, limit=limit)
    assert (Goodput().lengths(view) <= view.limit).all()
