"""When drafting stops."""

from __future__ import annotations

import numpy as np

from faser.rules.stopping import Stopping, WatchedPlan


def test_another_token_is_drafted_if_it_is_worth_its_cost():
    rule = Stopping(np.full((3, 4), 0.8), np.array([0.0, 1.0, 1.0, 1.0]), 2.0, (0.0, 1.0))
    both = np.array([0, 2])
    watch = rule.watch(both)
    assert watch.goes_on([0.9, 0.9]), "2 × (0.72 + 0.72) > 1"
    assert not watch.goes_on([0.3, 0.2]), "2 × 0.8 × (0.27 + 0.18) < 1"
    assert not rule.watch(both[:1]).goes_on([0.6]), "2 × 0.48 < 1"


def test_a_watched_draft_that_has_ended_counts_no_more():
    rule = Stopping(np.full((2, 4), 1.0), np.array([0.0, 1.0, 0.6, 0.6]), 1.0, (0.0, 1.0))
    watch = rule.watch(np.arange(2))
    assert watch.goes_on([0.7, 0.7])
    assert not watch.goes_on([0.7]), "0.49, of the first alone"


def test_a_rule_can_be_spread_over_more_requests():
    rule = Stopping(np.array([[0.1], [0.2]]), np.zeros(1), 1.0, (0.0, 1.0))
    spread = rule.spread(np.array([False, True, False, True]))
    assert spread.rates[:, 0].tolist() == [0.0, 0.1, 0.0, 0.2]


def test_a_plan_is_watched_in_its_own_order():
    """The requests that may still draft are the second and third; NaN is a draft that was never made."""
    rule = Stopping(np.full((3, 4), 1.0), np.array([0.0, 0.5, 0.9, 0.9]), 1.0, (0.0, 1.0))
    watched = WatchedPlan(rule, np.array([1, 3, 2]))
    confidence = np.array([[0.99, np.nan, np.nan], [0.4, 0.9, np.nan], [0.3, np.nan, np.nan]])
    assert watched.goes_on(confidence, 1), "0.4 + 0.3 > 0.5"
    assert not watched.goes_on(confidence, 2), "0.4 × 0.9 < 0.9, of the second alone"


def test_of_whole_drafts_as_much_is_verified_as_is_worth_its_rows():
    """Two requests share the seconds of a row; the third does not draft."""
    rule = Stopping(np.array([[0.5] * 3, [0.5] * 3, [0.0] * 3]), np.array([0.4, 0.8, 1.2]), 1.0, (0.0, 1.0))
    confidence = np.array([[0.9, 0.9, 0.9], [0.15, 0.9, 0.9], [np.nan] * 3])
    lengths = rule.cut(confidence, np.array([3, 3, 0]))
    assert lengths.tolist() == [3, 0, 0], "0.9, 0.81 and 0.73 against 0.2, 0.4 and 0.6; 0.15 against 0.2"
    assert rule.cut(confidence, np.array([2, 3, 0])).tolist() == [2, 0, 0]
    assert rule.cut(confidence[:, :1], np.array([1, 1, 0])).tolist() == [1, 0, 0]
