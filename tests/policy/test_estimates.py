from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from faser.cost.profiled_cost import ProfiledCost
from faser.engine.pages import NO_WRITES
from faser.policy.estimates import expected_tokens, likeliest, seconds_by_length, step_seconds, survival
from faser.step import StepPlan
from tests.policy.profiles import H200, MS, SMOOTH, make_view


def test_tokens_of_one_rate_are_the_geometric_sum():
    rate, size = 0.6, 5
    tokens = expected_tokens(survival(np.full(size, rate), np.full(size, 32), 4))
    assert tokens == pytest.approx([size * (1 - rate ** (k + 1)) / (1 - rate) for k in range(5)])


def test_seconds_are_those_of_the_draft_the_verification_and_the_host():
    seconds = seconds_by_length(make_view(4, num_tokens=0), 4)
    verify = np.array([4.05, 4.2, 4.2, 4.2, 4.9])  # rows 4, 8, 12, 16, 20
    draft = np.array([0, 0.95, 0.95 + 0.85, 0.95 + 2 * 0.85, 0.95 + 3 * 0.85])
    assert seconds == pytest.approx(MS * (verify + draft + 0.05))


def test_a_request_at_its_limit_is_neither_drafted_for_nor_verified_further():
    seconds = seconds_by_length(make_view(4, num_tokens=0, limit=[0, 0, 0, 2]), 3)
    assert seconds == pytest.approx(MS * np.array([4.1, 4.2 + 0.8 + 0.05, 4.2 + 0.8 + 0.7 + 0.05, 5.75]))


@pytest.mark.parametrize("profile", [H200, SMOOTH])
@settings(max_examples=60)
@given(requests=st.lists(st.tuples(st.integers(0, 7), st.integers(3, 900), st.integers(1, 4)), min_size=1, max_size=40))
def test_a_ragged_step_is_priced_as_the_cost_model_prices_its_plan(profile, requests):
    lengths, num_tokens, lag = (np.array(each) for each in zip(*requests, strict=True))
    draft_rows = np.where(lengths > 0, lag, 0)
    ones = np.ones_like(lengths)
    plan = StepPlan(
        (), (), np.arange(lengths.size), num_tokens, num_tokens - 1, ones, lengths, num_tokens - draft_rows,
        draft_rows, lengths < 0, NO_WRITES, NO_WRITES,
    )  # fmt: skip
    cost = ProfiledCost(profile)
    catch_up = int(draft_rows.sum()) if draft_rows.max() > 2 else 0
    assert step_seconds(cost, lengths, num_tokens, catch_up) == pytest.approx(cost.predict(plan))


@settings(max_examples=100)
@given(
    requests=st.lists(
        st.tuples(st.sampled_from([0.0, 0.3, 0.5, 0.9, 1.0]), st.integers(0, 6)), min_size=1, max_size=12
    ),
    count=st.integers(-2, 80),
)
def test_the_likeliest_drafts_are_taken_and_a_draft_has_no_holes(requests, count):
    rates, limit = (np.array(each) for each in zip(*requests, strict=True))
    chances = survival(rates, limit, 5)
    lengths = likeliest(chances, count)
    assert lengths.sum() == min(max(count, 0), np.count_nonzero(chances))
    assert (lengths <= limit).all()
    taken = sum(chances[:length, i].sum() for i, length in enumerate(lengths))
    assert taken == pytest.approx(np.sort(chances.ravel())[::-1][: max(count, 0)].sum())
