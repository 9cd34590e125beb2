"""Rates by position and request, and what a draft's confidence is worth."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from faser.policy.acceptance import PRIOR_RATE, Acceptance, Calibration
from faser.rules.stopping import accepted_chance
from tests.policy.profiles import make_outcome, make_view


def test_the_first_estimate_is_the_prior():
    assert Acceptance(3).position_rates(make_view(2)) == pytest.approx(PRIOR_RATE)


def test_every_position_has_a_rate_of_its_own():
    """Always drafts of three: the first is accepted in half of the steps, then everything is."""
    acceptance = Acceptance(4)
    for step in range(2000):
        acceptance.learn(make_outcome([3], [3 if step % 2 else 0]))
    assert acceptance.rates[:3] == pytest.approx([0.5, 1.0, 1.0], abs=0.03)
    assert acceptance.rates[3] == pytest.approx(PRIOR_RATE), "no request drafted a fourth token"


def test_the_first_rejected_token_counts_as_tried_and_those_behind_it_do_not():
    acceptance = Acceptance(3)
    for _ in range(2000):
        acceptance.learn(make_outcome([3], [1]))
    assert acceptance.rates == pytest.approx([1.0, 0.0, PRIOR_RATE], abs=0.05)


def test_old_steps_count_less_and_less():
    acceptance = Acceptance(1)
    for accepted in (1, 0):
        for _ in range(3000):
            acceptance.learn(make_outcome([1], [accepted]))
    assert acceptance.rates[0] < 0.05


def test_a_request_differs_by_its_own_count_and_only_a_little_after_few_tokens():
    view = make_view(4, accepted=[0, 0, 95, 1], tried=[100, 0, 100, 1])
    low, unknown, high, hardly = Acceptance(2).position_rates(view)
    assert (low < unknown).all()
    assert (unknown < hardly).all()
    assert (hardly < high).all()
    assert unknown == pytest.approx(PRIOR_RATE)
    assert (hardly - unknown < 0.1).all()


def test_a_request_has_the_mean_of_all_requests_and_then_more_and_more_its_own_rate():
    acceptance = Acceptance(2)
    view = make_view(3, accepted=[0, 8, 800], tried=[0, 8, 800])
    rates = acceptance.request_rates(view)
    assert rates[0] == pytest.approx(PRIOR_RATE)
    assert rates[0] < rates[1] < rates[2] < 1
    for _ in range(2000):
        acceptance.learn(make_outcome([1], [0]))
    assert acceptance.request_rates(view)[0] == pytest.approx(acceptance.mean)
    assert acceptance.mean < 0.2


def test_a_new_request_is_judged_by_those_with_contexts_about_as_long():
    acceptance, contexts = Acceptance(3), np.array([200, 20_000])
    for _ in range(1000):
        acceptance.learn(replace(make_outcome([3, 3], [3, 0]), num_tokens=contexts))
    short, long, between = acceptance.request_rates(make_view(3, num_tokens=[300, 30_000, 4000]))
    assert short > 0.85
    assert long < 0.25
    assert between == pytest.approx(acceptance.mean, abs=0.01), "of such contexts nothing is known"


def test_contexts_that_nobody_names_change_nothing():
    acceptance = Acceptance(3)
    for _ in range(50):
        acceptance.learn(make_outcome([3], [1]))
    assert acceptance.request_rates(make_view(2, num_tokens=[10, 99_999])) == pytest.approx(acceptance.mean)


def test_no_depth_beyond_the_one_given_is_learned():
    acceptance = Acceptance(3)
    for _ in range(500):
        acceptance.learn(make_outcome([3, 2], [3, 0]), depth=1)
    assert acceptance.rates[0] == pytest.approx(0.5, abs=0.03)
    assert acceptance.rates[1:] == pytest.approx(PRIOR_RATE)


def test_calibration_finds_what_confidence_is_worth():
    random, calibration, right = np.random.default_rng(0), Calibration(), (0.5, 1.6)
    for _ in range(4000):
        confidence = random.uniform(0.05, 0.95, (1, 3))
        agrees = random.random(3) < accepted_chance(confidence[0], right)
        accepted = 3 if agrees.all() else int(np.argmin(agrees))
        outcome = make_outcome([3], [accepted])
        calibration.learn(replace(outcome, confidence=confidence))
    assert calibration.weights == pytest.approx(right, abs=0.25)


@pytest.mark.parametrize("accepted", [0, 3])
@pytest.mark.parametrize("sure", [0.0, 0.5, 1.0])
def test_calibration_stays_within_its_bounds(accepted, sure):
    calibration = Calibration()
    for _ in range(3000):
        calibration.learn(replace(make_outcome([3], [accepted]), confidence=np.full((1, 3), sure)))
    offset, factor = calibration.weights
    assert abs(offset) <= 8
    assert 0 <= factor <= 8
    assert 0 <= accepted_chance(np.array([0.0, 1.0]), (offset, factor))[0] <= 1


def test_calibration_learns_nothing_from_drafts_without_confidence_checks():
    calibration = Calibration()
    calibration.learn(make_outcome([3], [0]))
    assert calibration.weights == Calibration().weights
