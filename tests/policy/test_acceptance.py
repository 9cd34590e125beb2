"""Rates by position and request, and what a draft's confidence is worth."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from faser.policy.acceptance import LEAST_PAUSE, MOST_PAUSE, PRIOR_RATE, Acceptance, Calibration
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


def test_a_position_that_was_never_tried_is_taken_to_be_like_the_one_before_it():
    usual, checked = Acceptance(3), Acceptance(3, is_checked=True)
    for acceptance in (usual, checked):
        for step in range(400):
            acceptance.learn(make_outcome([1] * 8, [step % 4 == 0] * 8))
    assert usual.likely_rates == pytest.approx(0.25, abs=0.05)
    assert checked.likely_rates[1:] == pytest.approx(PRIOR_RATE), "only confident drafts are that long"


@pytest.mark.parametrize(("before", "after"), [(1, 0), (0, 1)])
def test_a_change_of_the_texts_character_is_believed_within_a_few_steps(before, after):
    """Everybody's drafts are accepted, then nobody's; what was known of single requests is forgotten as well."""
    acceptance = Acceptance(1)
    for _ in range(1000):
        acceptance.learn(make_outcome([1] * 8, [before] * 8))
    old = make_view(8, tried=500, accepted=500 * before)
    acceptance.request_rates(old)
    steps = 0
    while abs(acceptance.rates[0] - after) > 0.3:
        acceptance.learn(make_outcome([1] * 8, [after] * 8))
        steps += 1
    assert steps <= 16
    assert np.abs(acceptance.request_rates(old) - acceptance.mean).max() < 0.5


def test_chance_alone_changes_nothing():
    random, acceptance = np.random.default_rng(0), Acceptance(1)
    rates = []
    for _ in range(3000):
        acceptance.learn(make_outcome([1] * 8, random.random(8) < 0.6))
        rates.append(float(acceptance.rates[0]))
    assert np.ptp(rates[1000:]) < 0.15


def test_what_is_forgotten_of_a_request_is_not_forgotten_of_the_next_one_in_its_slot():
    acceptance, totals = Acceptance(1), make_view(4, accepted=400, tried=400)
    acceptance.request_rates(totals)
    acceptance._own.forget(16)
    rates = acceptance.request_rates(replace(totals, tried=np.array([400, 416, 464, 400])))
    assert rates[0] > rates[1] > rates[2]
    assert rates[2] < 0.5, "400 of 464 were accepted"
    others = make_view(6, accepted=0, tried=[0, 0, 0, 10, 10, 400])
    fresh = Acceptance(1).request_rates(others)
    assert acceptance.request_rates(others) == pytest.approx(fresh)
    assert acceptance.request_rates(replace(others, tried=others.tried + 500))[0] < 0.1, "it stays another request"


def test_pauses_before_another_chance_double_and_end():
    """Drafts are hopeless: each chance takes a few steps, and the next one comes later, but it comes."""
    acceptance, pauses, pause = Acceptance(1), [], 0
    for _ in range(6000):
        drafts = acceptance.rates[0] > 0.4
        acceptance.learn(make_outcome([int(drafts)], [0]))
        if drafts and pause:
            pauses.append(pause)
        pause = 0 if drafts else pause + 1
    long = [each for each in pauses if each > 1]
    assert LEAST_PAUSE <= long[0] < long[-1] <= MOST_PAUSE
