"""What drafting and verification take at once, as profiled and as corrected by the steps that overlap."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from faser.cost.curve import Curve
from faser.cost.overlap import MAX_CORRECTION, OverlapProfile
from faser.cost.profiled_cost import ProfiledCost
from faser.rules.overlap import OverlapPlan
from faser.step import StepPlan, StepSeconds
from tests.cost.machine import GPU, MS, make_plan, run


def test_contention_is_a_share_of_the_shorter_of_drafting_and_verification():
    batches = {
        1: (StepSeconds(2.0, 8.0), StepSeconds(3.0, 9.0), 10.0),
        4: (StepSeconds(6.0, 4.0), StepSeconds(7.0, 5.0), 9.0),
        16: (StepSeconds(6.0, 10.0), StepSeconds(7.0, 9.0), 9.0),
        32: (StepSeconds(6.0, 8.0), StepSeconds(12.0, 10.0), 16.0),
    }
    found, none = OverlapProfile.of(16, batches), (0.0,) * 4
    assert found.draft_sms == 16
    assert found.draft == Curve(tuple(batches), (3.0, 7.0, 7.0, 12.0), none)
    assert found.verify == Curve(tuple(batches), (9.0, 5.0, 9.0, 10.0), none)
    assert found.together == Curve(tuple(batches), (10.0, 9.0, 9.0, 16.0), none)
    assert found.share == Curve(tuple(batches), (0.5, 0.5, 0.0, 2 / 3), none)
    assert found.draft_factor == Curve(tuple(batches), (1.5, 7 / 6, 7 / 6, 2.0), none)
    assert found.verify_factor == Curve(tuple(batches), (9 / 8, 5 / 4, 0.9, 1.25), none)
    for size, (apart, _, together) in batches.items():
        assert found.total(apart.draft, apart.verify, size) == pytest.approx(together)


def overlapping(plan: StepPlan, frontier=0, lead=0, leads=False, draft_sms=0) -> StepPlan:
    each = np.zeros_like(plan.lengths)
    return replace(plan, overlap=OverlapPlan(each + frontier, each + lead, leads=leads, draft_sms=draft_sms))


def test_hidden_seconds_depend_on_the_requests_and_the_split():
    share = Curve((1, 5), (0.25, 1.25), (0.0, 0.0))
    cost = ProfiledCost(replace(GPU, besides=(replace(GPU.besides[0], draft_sms=16, share=share), GPU.besides[0])))
    assert cost.overlap.splits == (16, 0)
    assert cost.overlap.hidden(4.0, 8.0, 1, 16) == cost.overlap.hidden(8.0, 4.0, 1, 16) == pytest.approx(3.0)
    assert cost.overlap.hidden(4.0, 8.0, 3, 16) == pytest.approx(1.0)
    assert cost.overlap.hidden(4.0, 8.0, 5, 16) == pytest.approx(-1.0)  # both are slower at once
    assert cost.overlap.hidden(4.0, 8.0, 6, 16) == 0  # more than were measured
    assert cost.overlap.hidden(4.0, 8.0, 1) == pytest.approx(1.0)
    assert cost.overlap.hidden(4.0, 8.0, 1, 48) == 0  # nothing is known of it
    assert ProfiledCost(replace(GPU, besides=())).overlap.splits == ()


def test_on_a_part_of_the_device_each_model_is_slower_by_its_measured_factor():
    one = replace(
        GPU.besides[0],
        share=Curve((1, 4), (0.25, 0.5), (0.0, 0.0)),
        draft_factor=Curve((1, 4), (2.0, 3.0), (0.0, 0.0)),
        verify_factor=Curve((1, 4), (0.5, 1.25), (0.0, 0.0)),
    )
    assert one.total(4.0, 20.0, 1) == pytest.approx(10 + 0.25 * 4)
    assert one.total(8.0, 20.0, 1) == pytest.approx(16 + 0.25 * 8)  # drafting is what takes longer
    assert one.total(4.0, 20.0, 4) == pytest.approx(25 + 0.5 * 4)
    cost = ProfiledCost(replace(GPU, besides=(replace(one, draft_sms=16),)))
    assert cost.overlap.hidden(4.0, 20.0, 4, 16) == pytest.approx(24 - 27)
    assert cost.overlap.hidden(4.0, 20.0, 5, 16) == 0  # more requests than were measured


def test_drafts_that_the_verification_waits_for_are_not_hidden():
    even = replace(GPU.next_draft, per_token=(0.0,) * 3)  # 0.7 ms a token, whichever it is
    cost, plan = ProfiledCost(replace(GPU, first_draft=even, next_draft=even)), make_plan([100], 5)
    ahead = cost.parts(overlapping(plan, frontier=2, draft_sms=32))
    slower = 0.25 * 5.1 * MS  # verification on its part
    assert ahead == StepSeconds(
        pytest.approx(3.5 * MS), pytest.approx(5.1 * MS), pytest.approx(0.75 * 3.5 * MS - slower)
    )
    led = cost.parts(overlapping(plan, lead=2, draft_sms=32))
    assert led == StepSeconds(pytest.approx(3.5 * MS), pytest.approx(5.1 * MS), pytest.approx(0.75 * 2.1 * MS - slower))
    assert cost.parts(overlapping(plan, lead=5)).hidden == 0


def test_a_step_that_waits_takes_the_await_seconds_longer():
    cost, plan = ProfiledCost(GPU), make_plan([100], 3)
    ahead, waiting = (cost.predict(overlapping(plan, lead=1, leads=each)) for each in (False, True))
    assert waiting - ahead == pytest.approx(0.2 * MS)


def learn_waiting(cost: ProfiledCost, more: float, steps: int, leads: bool = True) -> StepPlan:
    """Learn steps that took `more` seconds longer than both models and the host; returns their plan."""
    plan = overlapping(make_plan([100, 200], 3), lead=1, leads=leads)
    spent = cost.parts(plan)
    for _ in range(steps):
        cost.learn(plan, spent, spent.total + cost.host + more)
    return plan


@pytest.mark.parametrize("more", [0.0, 0.05 * MS, 1.5 * MS])
def test_await_seconds_are_learned_from_the_steps_that_wait(more):
    cost = ProfiledCost(GPU)
    plan = learn_waiting(cost, more, 300)
    assert cost.overlap.await_seconds == pytest.approx(more, abs=0.01 * MS)
    assert cost.predict(plan) == pytest.approx(cost.parts(plan).total + GPU.host + more, abs=0.01 * MS)
    assert cost.factors == (1.0, 1.0)
    assert cost.host == GPU.host


def lead_seconds(plan: StepPlan) -> float:
    """What the verification waits for: the drafts of a lead by themselves."""
    lead = plan.overlap.lead
    return ProfiledCost(GPU).parts(replace(plan, lengths=lead)).draft if lead.any() else 0.0


def learn_beside(cost: ProfiledCost, plan: StepPlan, factor: float, steps: int) -> None:
    """Learn steps in which both at once took `factor` times the profiled seconds, the lead aside."""
    lead = lead_seconds(plan)
    total = lead + factor * (ProfiledCost(cost.profile).parts(plan).total - lead)
    for _ in range(steps):
        cost.learn(plan, StepSeconds(total, total, total), total + cost.host)


@pytest.mark.parametrize("factor", [0.8, 1.0, 1.5])
@pytest.mark.parametrize("lead", [0, 2])
def test_the_seconds_of_both_at_once_are_learned_for_each_split(factor, lead):
    cost, plan = ProfiledCost(GPU), overlapping(make_plan([100], 5), lead=lead, draft_sms=32)
    learn_beside(cost, plan, factor, 100)
    fresh = ProfiledCost(GPU)
    assert 11 * MS - cost.overlap.hidden(5 * MS, 6 * MS, 1, 32) == pytest.approx(
        factor * (11 * MS - fresh.overlap.hidden(5 * MS, 6 * MS, 1, 32)), rel=0.01
    )
    assert cost.overlap.hidden(5 * MS, 6 * MS, 1) == fresh.overlap.hidden(5 * MS, 6 * MS, 1), "another split"
    assert cost.factors == (1.0, 1.0)


@pytest.mark.parametrize(("slower", "bound"), [(100.0, MAX_CORRECTION), (0.01, 1 / MAX_CORRECTION)])
def test_corrections_of_both_at_once_are_bounded(slower, bound):
    cost, plan = ProfiledCost(GPU), overlapping(make_plan([100], 5), lead=2, draft_sms=32)
    learn_beside(cost, plan, slower, 500)
    fresh = ProfiledCost(GPU)
    assert 11 * MS - cost.overlap.hidden(5 * MS, 6 * MS, 1, 32) == pytest.approx(
        bound * (11 * MS - fresh.overlap.hidden(5 * MS, 6 * MS, 1, 32))
    )


def test_steps_shorter_than_their_lead_and_steps_with_prompts_correct_nothing():
    cost, plan = ProfiledCost(GPU), overlapping(make_plan([100], 5), lead=2, draft_sms=32)
    before, lead = cost.parts(plan), lead_seconds(plan)
    cost.learn(plan, StepSeconds(0.9 * lead, 0.9 * lead, 0.9 * lead), 0.0)
    assert cost.parts(plan) == before
    for beside in (make_plan([100, 40], 5, num_rows=[1, 8], draft_rows=[1, 0]), make_plan([100, 40], 5, cut=3)):
        cost.learn(overlapping(beside, draft_sms=32), StepSeconds(1.0, 1.0, 0.0), 2.0)
    assert cost.parts(plan) == before


def test_a_correction_that_no_step_confirms_returns_to_the_profile():
    cost, plan = ProfiledCost(GPU), make_plan([100], 5)
    learn_beside(cost, overlapping(plan, draft_sms=32), 1.8, 100)
    slow = cost.overlap.hidden(5 * MS, 6 * MS, 1, 32)
    run(cost, plan, 1.0, 0.0, 100)
    profiled = ProfiledCost(GPU).overlap.hidden(5 * MS, 6 * MS, 1, 32)
    assert slow < cost.overlap.hidden(5 * MS, 6 * MS, 1, 32) < 0.5 * (slow + profiled)
    run(cost, plan, 1.0, 0.0, 5_000)
    assert cost.overlap.hidden(5 * MS, 6 * MS, 1, 32) == pytest.approx(profiled, rel=0.05)


def test_one_long_pause_of_an_overlapping_step_hardly_counts():
    cost, plan = ProfiledCost(GPU), overlapping(make_plan([100], 5), draft_sms=32)
    before = cost.parts(plan).total
    learn_beside(cost, plan, 1000.0, 1)
    assert before < cost.parts(plan).total < 1.11 * before


def test_steps_that_do_not_wait_do_not_change_the_await_seconds():
    cost, plain = ProfiledCost(GPU), make_plan([100], 3)
    learn_waiting(cost, 1.5 * MS, 20, leads=False)
    run(cost, plain, 1.0, 3 * MS, 20)
    cost.learn(overlapping(plain, lead=1, leads=True), StepSeconds(), 1.0)  # its parts were not measured
    assert cost.overlap.await_seconds == GPU.await_seconds


def test_await_seconds_are_never_negative():
    cost = ProfiledCost(GPU)
    learn_waiting(cost, -GPU.host - 1 * MS, 300)
    assert 0 <= cost.overlap.await_seconds < 0.01 * MS


def test_one_long_pause_hardly_changes_the_await_seconds():
    cost = ProfiledCost(GPU)
    plan = learn_waiting(cost, 1.0, 1)
    assert cost.overlap.await_seconds < GPU.await_seconds + cost.parts(plan).total / 8
