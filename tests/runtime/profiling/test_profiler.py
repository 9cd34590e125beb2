"""Profiling simulated machines gives their profiles back, within the time and the limits. No test measures time."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from faser.cost.curve import NOTHING, Curve
from faser.cost.profile import Profile
from faser.cost.profiled_cost import ProfiledCost
from faser.limits import HeadLimits, Limits
from faser.runtime.profiling.batches import NUM_HELD_OUT, Subject
from faser.runtime.profiling.profiler import measure_quick
from faser.step import StepSeconds
from tests.runtime.profiling.machine import (
    CHECK,
    CPU,
    GPU,
    LEFT,
    LIMITS,
    MIXED,
    MS,
    SIZES,
    SLOWER,
    Shared,
    Simulated,
    SimulatedAhead,
    Waiting,
    machine,
    make_subject,
    profile_of,
)


def assert_same(found: Curve, right: Curve, rows, context=(0, 2000)) -> None:
    for each in context:
        np.testing.assert_allclose(found(np.array(rows), each), right(np.array(rows), each), rtol=1e-3)


@pytest.mark.parametrize("kind", [Simulated, SimulatedAhead])
def test_profiling_a_machine_with_graphs_gives_the_machine(kind):
    subject = make_subject(kind=kind)
    found, right = profile_of(subject), machine(GPU)
    assert found.verify.rows == SIZES
    assert found.verify.is_stepped
    assert_same(found.verify, right.verify, range(1, 129))
    assert found.first_draft.rows == found.next_draft.rows == tuple(size for size in SIZES if size <= 32)
    assert_same(found.first_draft, right.first_draft, range(1, 33))
    assert_same(found.next_draft, right.next_draft, range(1, 33))
    assert found.prompts.rows == found.catch_up.rows == (*MIXED, 2048)
    assert found.prompts.stepped_to == found.catch_up.stepped_to == MIXED[-1]
    assert_same(found.prompts, right.prompts, range(33, 2049))
    assert_same(found.catch_up, right.catch_up, range(33, 2049))
    assert found.stop_seconds == pytest.approx(CHECK, rel=0.01)
    assert found.about == {"hardware": "simulated"}
    assert set(found.errors) == {"verify", "draft", "verify_worst", "draft_worst"}
    assert max(found.errors.values()) < 1e-3
    if kind is Simulated:
        assert found.host == pytest.approx(0.1 * MS, rel=0.01)
    else:
        assert subject.executor.most == 2, "no step was submitted while another ran"


def test_profiling_a_machine_without_graphs_gives_the_machine():
    found, right = profile_of(make_subject(CPU, Limits(16, 512, 2048, 2048))), machine(CPU)
    assert not any(curve.stepped_to for curve in (found.verify, found.prompts, found.first_draft, found.next_draft))
    assert_same(found.verify, right.verify, range(1, 65))
    assert_same(found.next_draft, right.next_draft, range(1, 17))
    assert_same(found.prompts, right.prompts, range(1, 512))
    assert found.errors["verify"] < 1e-3
    assert found.errors["draft"] < 0.02  # a request has one or two rows there, and counts as one and a half


def test_the_slots_are_given_back_and_progress_reaches_its_end():
    told = []
    subject = make_subject()
    profile_of(subject, update=lambda done, total: told.append((done, total)))
    assert subject.executor.taken == set()
    assert subject.executor.plans[-1].released == tuple(range(32))
    done, total = zip(*told, strict=True)
    assert list(done) == sorted(done)
    assert done[-1] == total[-1]


def plain_parts(subject: Subject, size: int) -> StepSeconds:
    """Seconds of `size` requests that draft three tokens each, for a plan that the profiler ran."""
    alike = [plan for plan in subject.executor.plans if plan.drafts_beside and plan.slots.size == size]
    plan = replace(alike[0], overlap=None)
    return subject.executor.cost.parts(plan)


def test_overlap_is_measured_for_each_split_of_the_device():
    subject = make_subject(kind=Shared, splits=(0, 16, 48))
    found = profile_of(subject)
    assert [each.draft_sms for each in found.besides] == [0, 16, 48]
    for beside in found.besides:
        left, (draft, verify) = LEFT[beside.draft_sms], SLOWER[beside.draft_sms]
        few = beside.draft_sms == 48  # for four requests it is slower than both in turn, so no larger batch is measured
        assert beside.share.rows == ((1, 4) if few else (1, 4, 16))
        assert beside.share.seconds == pytest.approx([left, 1.2 * left, 2 * left][: 2 if few else 3], rel=0.02)
        for size in beside.share.rows:
            apart = plain_parts(subject, size)
            assert float(beside.draft(size, 0)) == pytest.approx(draft * apart.draft, rel=0.02)
            assert float(beside.verify(size, 0)) == pytest.approx(verify * apart.verify, rel=0.02)
            share = float(beside.share(size, 0))
            both = verify * apart.verify + share * apart.draft
            assert float(beside.together(size, 0)) == pytest.approx(both, rel=0.02)
            assert float(beside.draft_factor(size, 0)) == pytest.approx(draft, rel=0.02)
            assert float(beside.verify_factor(size, 0)) == pytest.approx(verify, rel=0.02)
    assert found.await_seconds == 0
    assert ProfiledCost(found).overlap.splits == (0, 16, 48)


def test_overlap_is_not_measured_where_it_is_not_possible():
    subjects = [
        make_subject(),
        make_subject(splits=(0,), has_draft_model=False),
        make_subject(splits=(0,), limits=Limits(1, 2, 64, 64)),  # there is no room for drafts
    ]
    for subject in subjects:
        found = profile_of(subject)
        assert (found.besides, found.await_seconds) == ((), 0.0)
        assert not any(plan.drafts_beside for plan in subject.executor.plans)


@pytest.mark.parametrize("splits", [(), (0,)])
def test_await_seconds_are_measured_where_overlap_is_possible(splits):
    found = profile_of(make_subject(kind=Waiting, splits=splits))
    assert found.await_seconds == pytest.approx(Waiting.WAIT if splits else 0.0)


@pytest.mark.parametrize("how", [GPU, CPU])
@pytest.mark.parametrize(
    "limits",
    [
        Limits(1, 1, 2), Limits(1, 1, 4096, 4096), Limits(1, 2048, 4096, 4096), Limits(6, 7, 64, 64),
        Limits(7, 64, 3, 3), Limits(5, 64, 8, 4), Limits(64, 64, 8192, 8192), Limits(100, 4096, 40, 20),
        Limits(3, 5, 9, 9),
    ],
)  # fmt: skip
def test_any_limits_are_kept_to(how, limits):
    profile_of(make_subject(how, limits, splits=(0,)))
    profile_of(make_subject(how, limits, splits=(0,)), seconds=0)


def test_a_small_pool_is_shared():
    subject = make_subject(num_pages=5)
    assert max(profile_of(subject).errors.values()) < 1e-3


def test_without_time_a_profile_is_made_of_few_steps():
    subject = make_subject()
    found = profile_of(subject, seconds=0)
    assert len(subject.executor.plans) < 15
    assert found.errors == {}
    assert found.verify.rows == SIZES
    assert found.first_draft.rows[-1] == 32
    # of one context only: what that costs is taken to be the rows'
    right = machine(GPU).verify
    np.testing.assert_allclose(found.verify(np.array([1, 128]), 0), right(np.array([1, 128]), 0), rtol=0.05)


def test_profiling_a_slow_machine_keeps_to_the_time():
    subject = make_subject()
    slow = subject.executor
    slow.slowness = 10.0
    before = slow.time.now()
    found = profile_of(subject, seconds=3.0)
    assert slow.time.now() - before < 5.0  # by its own clock
    assert float(found.verify(1, 0)) == pytest.approx(10 * float(machine(GPU).verify(1, 0)), rel=0.05)


@pytest.mark.parametrize("speculates", [True, False])
def test_without_a_draft_model_drafting_costs_nothing(speculates):
    subject = make_subject(has_draft_model=False, speculates=speculates, limits=Limits(32, 2048, 4096))
    found = profile_of(subject)
    assert found.first_draft == found.next_draft == found.catch_up == NOTHING
    assert found.stop_seconds is None
    assert any(plan.lengths.any() for plan in subject.executor.plans) == speculates
    assert_same(found.verify, machine(GPU).verify, range(1, 33))
    assert "draft" not in found.errors


def test_held_out_batches_are_ragged():
    subject = make_subject()
    profile_of(subject)
    ragged = {tuple(plan.lengths.tolist()) for plan in subject.executor.plans if len(set(plan.lengths.tolist())) > 3}
    assert len(ragged) > NUM_HELD_OUT / 3


def quick_of(subject: Subject) -> Profile:
    return measure_quick(subject, {"hardware": "simulated"}, subject.executor.time.now)


@pytest.mark.parametrize("how", [GPU, CPU])
@pytest.mark.parametrize("slowness", [1.0, 30.0, 300.0])
def test_a_quick_profile_takes_two_seconds_or_three_steps(how, slowness):
    limits = LIMITS if how is GPU else Limits(16, 512, 2048, 2048)
    subject = make_subject(how, limits, assumed=replace(machine(how), kind="assumed"))
    subject.executor.slowness = slowness
    before = subject.executor.time.now()
    found = quick_of(subject)
    steps = 3 * slowness * float(machine(how).verify(4, 0) + machine(how).first_draft(1, 0) * 3)
    assert subject.executor.time.now() - before < max(2.0, steps)  # three steps are the least it takes
    assert found.kind == "quick"
    assert found.why_not_kept() is not None
    # the shape was right and the scale was measured, so all of it is right
    for rows in (1, 4, 32):
        assert float(found.verify(rows, 64)) == pytest.approx(slowness * float(machine(how).verify(rows, 64)), rel=0.1)
    assert float(found.next_draft(1, 64)) == pytest.approx(slowness * float(machine(how).next_draft(1, 64)), rel=0.3)


def test_batches_too_slow_for_the_time_are_left_out():
    subject = make_subject(CPU, Limits(16, 512, 2048, 2048), assumed=replace(machine(CPU), kind="assumed"))
    subject.executor.slowness = 50.0  # one row takes 0.2 s, 64 rows 0.3 s, a draft of three 0.1 s
    before = subject.executor.time.now()
    found = profile_of(subject, seconds=6.0)
    assert subject.executor.time.now() - before < 7.0
    assert float(found.verify(16, 0)) == pytest.approx(50 * float(machine(CPU).verify(16, 0)), rel=0.1)


@pytest.mark.parametrize("how", [GPU, CPU])
def test_further_tokens_of_a_block_are_free(how):
    limits = replace(LIMITS, head=HeadLimits(block_rows=7, max_length=7))

    def blocks(profile, *sizes):
        return Simulated(replace(profile, next_draft=NOTHING), *sizes)

    found = profile_of(make_subject(how, limits, blocks))
    assert float(found.next_draft(4, 400.0)) == pytest.approx(0.0, abs=1e-9)
    assert float(found.first_draft(4, 400.0)) == pytest.approx(float(machine(how).first_draft(4, 400.0)), rel=0.1)
