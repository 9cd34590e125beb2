"""What looked-up tokens are worth, and which guesser a policy gives each request."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from faser.limits import ADAPTIVE_MAX_LENGTH
from faser.policy import Fixed
from faser.policy.acceptance import Acceptance
from faser.policy.adaptive import DEPTH
from faser.policy.base import BatchView, LookupView
from faser.policy.lookup import CLASSES, PRIOR_RATES, LookupAcceptance, class_of
from tests.policy.profiles import make_outcome, make_view, proven

GOOD = {"accepted": 160, "tried": 200}


def counts(*numbers: int) -> np.ndarray:
    return np.array(numbers, dtype=np.int64)


def with_lookup(view: BatchView, rates: list[float], alone: bool = False) -> BatchView:
    """Every request may look up tokens of this acceptance rate; 0: it found nothing."""
    survival = np.array(rates)[:, None] ** np.arange(1, DEPTH + 1)
    limit = np.where(np.array(rates) > 0, view.limit.max(), 0)
    return replace(view, lookup=LookupView(limit, survival, alone))


def test_more_tokens_that_agree_are_worth_more_before_anything_is_known():
    survival = LookupAcceptance().survival(counts(*CLASSES), counts(0, 0, 0, 0, 0), counts(7, 7, 7, 7, 7))
    assert survival[:, 0].tolist() == pytest.approx(list(PRIOR_RATES))
    assert (np.diff(survival, axis=0) > 0).all()
    assert class_of(counts(2, 3, 4, 7, 8, 15, 16, 40)).tolist() == [0, 1, 2, 2, 3, 3, 4, 4]


def test_each_class_and_position_learns_its_own_rate():
    acceptance = LookupAcceptance()
    for _ in range(200):  # the first token is right, the second never; other classes do not appear
        acceptance.learn(counts(4), counts(1), counts(3))
    rates = acceptance.rates
    assert rates[2, 0] > 0.95
    assert rates[2, 1] < 0.05
    assert rates[2, 2] == pytest.approx(PRIOR_RATES[2], abs=0.01), "behind a wrong token nothing was tried"
    assert rates[1, 0] == pytest.approx(PRIOR_RATES[1])


def test_survival_ends_at_the_limit_and_goes_on_behind_tokens_in_flight():
    acceptance = LookupAcceptance()
    now, later = acceptance.survival(counts(8, 8), counts(0, 3), counts(7, 2))
    assert (now > 0).all()
    assert later[:2] == pytest.approx(now[3:5])
    assert not later[2:].any()
    far = acceptance.survival(counts(8), counts(40), counts(3))
    assert far.shape == (1, ADAPTIVE_MAX_LENGTH)
    assert 0 < far[0, 0] < now[6]


def test_a_draft_does_not_learn_from_tokens_that_were_looked_up():
    own, mixed = Acceptance(4), Acceptance(4)
    for _ in range(20):
        own.learn(make_outcome([3], [2]))
        mixed.learn(replace(make_outcome([3, 3], [2, 0]), is_looked_up=np.array([False, True])))
    assert mixed.rates == pytest.approx(own.rates)


def test_any_policy_looks_up_where_that_brings_more_tokens_than_the_draft():
    view = with_lookup(make_view(4, accepted=100, tried=200), [0.9, 0.2, 0.0, 0.9])
    view = replace(view, limit=counts(9, 9, 9, 0))
    guesses = Fixed(3).guesses(view)
    assert guesses.is_looked_up.tolist() == [True, False, False, True], "the last cannot use the draft"
    assert guesses.lengths.tolist() == [3, 3, 3, 3]


def test_without_prompt_lookup_a_policy_is_asked_as_ever():
    view = make_view(3, **GOOD)
    guesses = proven().guesses(view)
    assert guesses.lengths.tolist() == proven().lengths(view).tolist()
    assert not guesses.is_looked_up.any()
    nothing = proven().guesses(with_lookup(view, [0.0, 0.0, 0.0]))
    assert nothing.lengths.tolist() == guesses.lengths.tolist()
    assert not nothing.is_looked_up.any()


@pytest.mark.parametrize("size", [8, 32])
def test_faser_gives_each_request_the_better_guesser(size):
    rates = [0.98] + [0.3] * (size - 1)
    guesses = proven().guesses(with_lookup(make_view(size, accepted=180, tried=200), rates))
    assert guesses.is_looked_up.tolist() == [True] + [False] * (size - 1)
    assert (guesses.lengths[0] >= guesses.lengths[1:]).all(), "copied text is drafted for nothing"
    assert guesses.lengths[1:].all()


def test_faser_runs_no_draft_for_the_few_while_many_copy():
    """The seconds of the draft delay everybody."""
    guesses = proven().guesses(with_lookup(make_view(8, **GOOD), [0.98] * 6 + [0.0] * 2))
    assert guesses.lengths[:6].all()
    assert not guesses.lengths[6:].any()


def test_faser_leaves_the_draft_alone_where_looking_up_is_as_good():
    """A draft that agrees as often costs its forwards besides."""
    view = make_view(8, accepted=170, tried=200)
    guesses = proven().guesses(with_lookup(view, [0.84] * 8))
    assert guesses.is_looked_up.all()
    assert (guesses.lengths > 0).all()


def test_faser_copies_where_the_draft_is_too_dear_for_anybody():
    """256 rows cost what 200 do."""
    view = make_view(200, accepted=20, tried=100)
    assert not proven().lengths(view).any()
    guesses = proven().guesses(with_lookup(view, [0.95] * 8 + [0.0] * 192))
    assert guesses.lengths[:8].all()
    assert not guesses.lengths[8:].any()
    none = proven().guesses(with_lookup(make_view(256, accepted=20, tried=100), [0.95] * 8 + [0.0] * 248))
    assert not none.lengths.any(), "a 257th row costs as much as 256 more"


def test_faser_copies_nothing_that_is_wrong_too_often():
    guesses = proven().guesses(with_lookup(make_view(256, accepted=60, tried=100), [0.05] * 256))
    assert not guesses.lengths.any()


def test_while_the_draft_is_away_its_seconds_count_for_nothing():
    view = with_lookup(make_view(64, accepted=2, tried=200, lag=0), [0.5] * 64, alone=True)
    guesses = proven().guesses(view)
    assert guesses.is_looked_up.all()
    assert guesses.lengths.all()


def test_a_step_with_copied_text_says_nothing_of_the_drafts_own_gain():
    policy = proven()
    told = []
    policy._measured.learn = lambda outcome, seconds: told.append(outcome)
    policy.learn(make_outcome([3], [2]))
    policy.learn(replace(make_outcome([3, 3], [2, 3]), is_looked_up=np.array([False, True])))
    assert len(told) == 1
