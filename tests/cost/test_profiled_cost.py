"""What a profile predicts, and how predictions follow the machine."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from faser.cost.curve import NOTHING
from faser.cost.profile import KINDS
from faser.cost.profiled_cost import MAX_FACTOR, SPEED_DECAY, TRUST, ProfiledCost, work_of
from faser.step import StepSeconds
from tests.cost.machine import GPU, MS, US, make_plan, run


def test_a_step_without_drafts_is_a_verification_and_the_host():
    plan = make_plan([100, 200, 300], 0)
    cost = ProfiledCost(GPU)
    assert cost.predict(plan) == pytest.approx(5 * MS + 600 * US + 0.5 * MS)  # three rows run as four
    assert cost.parts(plan) == StepSeconds(0.0, pytest.approx(5 * MS + 600 * US))


def test_ragged_drafts_are_counted_token_by_token():
    plan = make_plan([100, 200, 300], [3, 0, 2], draft_rows=[1, 1, 2])
    parts = ProfiledCost(GPU).parts(plan)
    # two requests draft a first token, both a second, and the first alone a third
    assert parts.draft == pytest.approx(1.1 * MS + (0.8 * MS + 40 * US) + (0.7 * MS + 10 * US))
    assert parts.verify == pytest.approx(8 * MS + 1200 * US)  # eight rows run as sixteen


def test_a_draft_that_fell_behind_costs_by_rows():
    plan = make_plan([100, 200], 1, draft_rows=[1, 63])
    assert work_of(plan).catch_up_rows == 64
    assert ProfiledCost(GPU).parts(plan).draft == pytest.approx(9 * MS)


def test_prompts_make_a_step_cost_by_all_of_its_rows():
    plan = make_plan([100, 60], 0, num_rows=[1, 39], cut=10)
    assert work_of(plan)[:3] == (1, 39, 150)  # what lies behind the chunk is not read
    assert ProfiledCost(GPU).parts(plan).verify == pytest.approx(22 * MS + 300 * US)


def test_more_rows_than_the_largest_graph_cost_what_prompts_do():
    plan = make_plan([10, 10, 10, 10], 15)
    assert ProfiledCost(GPU).parts(plan).verify == pytest.approx(34 * MS + 80 * US)


def test_drafts_without_a_model_cost_only_their_verification():
    profile = replace(GPU, first_draft=NOTHING, next_draft=NOTHING, catch_up=NOTHING)
    assert ProfiledCost(profile).parts(make_plan([10], 3, draft_rows=0)) == StepSeconds(0.0, 5 * MS + 10 * US)


def test_rows_may_be_arrays():
    cost = ProfiledCost(GPU)
    assert cost.verify(np.array([1, 5, 40]), 0) == pytest.approx([4 * MS, 8 * MS, 22 * MS])
    assert cost.verify(np.array([1, 5]), 0, prompt_rows=39) == pytest.approx([22 * MS, 24 * MS])
    assert cost.first_draft(np.array([1, 3]), 0) == pytest.approx([1.0 * MS, 1.2 * MS])
    assert float(cost.first_draft(3, 0, rows=64)) == pytest.approx(9 * MS)
    assert cost.row_sizes.tolist() == [1, 4, 16]
    assert ProfiledCost(replace(GPU, verify=replace(GPU.verify, stepped_to=0))).row_sizes.size == 0


def test_predictions_follow_a_machine_twice_as_slow():
    cost, plan = ProfiledCost(GPU), make_plan([100, 200], 2)
    fresh = ProfiledCost(GPU).parts(plan)
    run(cost, plan, 2.0, 3 * MS, 300)
    assert cost.factors == pytest.approx((2.0, 2.0), rel=0.01)
    assert cost.host == pytest.approx(3 * MS, rel=0.01)
    assert cost.predict(plan) == pytest.approx(2 * (fresh.draft + fresh.verify) + 3 * MS, rel=0.01)
    assert float(cost.verify(1, 0)) == pytest.approx(8 * MS, rel=0.01)
    assert float(cost.next_draft(1, 0)) == pytest.approx(1.4 * MS, rel=0.01)


@pytest.mark.parametrize(("factor", "most"), [(100.0, MAX_FACTOR), (0.01, 1 / MAX_FACTOR)])
def test_corrections_are_bounded(factor, most):
    cost = ProfiledCost(GPU)
    run(cost, make_plan([100], 2), factor, 0.0, 500)
    assert cost.factors == (most, most)


def test_one_long_pause_hardly_counts():
    cost, plan = ProfiledCost(GPU), make_plan([100], 0)
    parts = cost.parts(plan)
    before = cost.predict(plan)
    cost.learn(plan, parts, 10.0)
    assert before < cost.predict(plan) < before * (1 + 1.1 * (1 - SPEED_DECAY))


def test_a_step_whose_parts_were_not_measured_teaches_nothing():
    cost, plan = ProfiledCost(GPU), make_plan([100], 2)
    cost.learn(plan, StepSeconds(), 1.0)
    assert cost.factors == (1.0, 1.0)
    assert cost.host == GPU.host


def test_the_mean_error_follows_how_wrong_predictions_are():
    cost, plan = ProfiledCost(GPU), make_plan([100], 2)
    assert cost.error == GPU.errors["verify"]
    run(cost, plan, 1.5, 0.0, 3)
    wrong = cost.error
    assert wrong > GPU.errors["verify"]
    run(cost, plan, 1.5, 0.0, 300)
    assert cost.error < 0.02, "the speed was learned, and predictions are right again"


def test_the_less_of_a_profile_was_measured_the_sooner_steps_correct_it():
    factors = []
    for kind in KINDS:
        cost = ProfiledCost(replace(GPU, kind=kind))
        run(cost, make_plan([100], 2), 2.0, 0.0, 3)
        factors.append(cost.factors[0])
    assert set(TRUST) == set(KINDS)
    assert 1 < factors[0] == factors[1] < factors[2] < factors[3]


def test_row_counts_that_are_slower_than_others_become_dearer_than_others():
    """One row takes what the profile says, sixteen rows 1.5 times as long."""
    cost, one, many = ProfiledCost(GPU), make_plan([100], 0), make_plan([100] * 4, 3)
    before = float(cost.verify(16, 0) / cost.verify(1, 0))
    for _ in range(400):
        run(cost, one, 1.0, 0.0, 1)
        run(cost, many, 1.5, 0.0, 1)
    assert float(cost.verify(16, 0) / cost.verify(1, 0)) == pytest.approx(1.5 * before, rel=0.15)
    assert (np.diff(cost.verify(np.arange(1, 64), 0)) >= 0).all(), "more rows never take less time"


def test_steps_with_prompts_say_nothing_of_single_row_counts():
    cost = ProfiledCost(GPU)
    before = float(cost.verify(16, 0) / cost.verify(1, 0))
    run(cost, make_plan([100, 40], 0, num_rows=[1, 15]), 1.5, 0.0, 100)
    assert float(cost.verify(16, 0) / cost.verify(1, 0)) == pytest.approx(before)


def test_another_profile_begins_without_the_old_corrections():
    cost, plan = ProfiledCost(GPU), make_plan([100], 2)
    run(cost, plan, 2.0, 3 * MS, 300)
    host, other = cost.host, replace(GPU, verify=replace(GPU.verify, seconds=(6 * MS, 7 * MS, 9 * MS)))
    cost.adopt(other)
    assert cost.factors == (1.0, 1.0)
    assert cost.parts(plan) == ProfiledCost(other).parts(plan)
    assert cost.host == host, "it was measured by the steps that ran, not by the profile"
