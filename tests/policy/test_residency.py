"""When the draft leaves and comes back: the two rules, on an H200-like machine (tests/policy/profiles.py)."""

from dataclasses import replace

import pytest

from faser.cost.profiled_cost import ProfiledCost
from faser.policy import Fixed, make_policy
from faser.policy.residency import FreePages, Regret, ResidencyView
from tests.policy.profiles import SMOOTH, make_view

STEP = 0.01

SHORT = ResidencyView(
    now=0.0,
    num_steps=0,
    num_running=100,
    num_waiting=60,
    num_free_slots=156,
    context=100 * 200,
    lacks_pages=True,
    num_preemptions=0,
    pages_held=1250,
    num_pages=1280,
    base_pages=1280,
    pages_gained=640,
    load_seconds=0.05,
    last_drafted=0,
    cost=ProfiledCost(SMOOTH),
)
QUIET = replace(
    SHORT, num_running=4, num_waiting=0, num_free_slots=252, context=800, lacks_pages=False, pages_held=60,
    num_pages=1920,
)  # fmt: skip


def no_gain() -> float:
    return 1.0


def ask(decide, view, gain=no_gain, *, seconds=10.0, start=0.0):
    """The first reason, and when it was given; None where there was none in `seconds`."""
    for step in range(int(seconds / STEP)):
        now = start + step * STEP
        reason = decide(replace(view, now=now, num_steps=view.num_steps + step + 1), gain)
        if reason is not None:
            return reason, now
    return None


@pytest.mark.parametrize(
    ("change", "leaves"),
    [
        ({}, True),
        ({"pages_held": 1100}, False),  # 14 % are free
        ({"last_drafted": 10**6}, False),  # the policy drafts
    ],
)
def test_nightjar_leaves_when_few_pages_are_free_and_nothing_is_drafted(change, leaves):
    found = ask(FreePages().why_leave, replace(SHORT, **change))
    assert (found is not None) == leaves
    if found is not None:
        assert found[1] == pytest.approx((FreePages.STEPS - 1) * STEP), "three steps in a row"


def test_nightjar_counts_steps_in_a_row_and_each_step_once():
    rule = FreePages()
    free = replace(SHORT, pages_held=100)
    views = [SHORT, SHORT, free, SHORT, SHORT]
    assert not any(rule.why_leave(replace(view, num_steps=i + 1), no_gain) for i, view in enumerate(views))
    assert rule.why_leave(replace(SHORT, num_steps=5), no_gain) is None, "the same step again"
    assert rule.why_leave(replace(SHORT, num_steps=6), no_gain)


def test_nightjar_returns_when_nothing_waits_and_pages_fit():
    rule = FreePages()
    assert rule.why_return(QUIET, no_gain)
    assert rule.why_return(replace(QUIET, num_waiting=1), no_gain) is None
    assert rule.why_return(replace(QUIET, pages_held=1200), no_gain) is None


def test_who_goes_by_which_rule():
    assert isinstance(make_policy("nightjar").residency_rule(), FreePages)
    assert isinstance(Fixed(3).residency_rule(), FreePages)
    assert isinstance(make_policy("faser").residency_rule(), Regret)


def test_regret_leaves_when_waiting_cost_as_much_as_a_move():
    reason, when = ask(Regret().why_leave, SHORT)
    assert 0.1 < when < 3.0
    assert "100 running, 60 waiting" in reason
    assert ask(Regret().why_leave, replace(SHORT, load_seconds=0.5))[1] > when, "a dear move waits longer"
    assert ask(Regret().why_leave, replace(SHORT, pages_gained=256))[1] > when, "a small gain waits longer"


@pytest.mark.parametrize(
    "change",
    [{"lacks_pages": False}, {"num_free_slots": 0}, {"cost": None}, {"num_running": 0}],
    ids=["pages suffice", "slots are short", "no costs", "nobody runs"],
)
def test_regret_stays_where_leaving_brings_nothing(change):
    assert ask(Regret().why_leave, replace(SHORT, **change)) is None


def test_regret_stays_while_drafts_bring_more_than_pages_would():
    assert ask(Regret().why_leave, SHORT, lambda: 1.8) is None
    assert ask(Regret().why_leave, SHORT, lambda: 1.02)


def test_regret_leaves_where_requests_are_preempted():
    rule, found = Regret(), None
    for step in range(400):
        view = replace(SHORT, lacks_pages=False, num_waiting=40, now=step * STEP, num_preemptions=step)
        found = found or rule.why_leave(view, no_gain)
    assert found


def test_regret_returns_when_drafting_would_have_repaid_the_move():
    _, slow = ask(Regret().why_return, QUIET, lambda: 1.2)
    reason, fast = ask(Regret().why_return, QUIET, lambda: 1.8)
    assert 0.05 < fast < slow < 3.0
    assert "1.80 times" in reason
    assert ask(Regret().why_return, QUIET, no_gain) is None
    assert ask(Regret().why_return, replace(QUIET, num_waiting=3), lambda: 1.8) is None
    assert ask(Regret().why_return, replace(QUIET, pages_held=1200), lambda: 1.8) is None, "no room to spare"


def test_regret_returns_soon_when_there_are_no_requests():
    idle = replace(QUIET, num_running=0, context=0, pages_held=0)
    _, when = ask(Regret().why_return, idle)
    assert when < 1.0


@pytest.mark.parametrize("half", [0.05, 0.2])
def test_a_load_that_swings_faster_than_a_move_pays_causes_no_move(half):
    rule, now = Regret(), 0.0
    relaxed = replace(SHORT, lacks_pages=False, num_waiting=0)
    while now < 60.0:
        view = SHORT if int(now / half) % 2 else relaxed
        assert rule.why_leave(replace(view, now=now), no_gain) is None
        now += STEP


def test_the_gain_of_faser_is_that_of_its_lengths():
    policy = make_policy("faser")
    small, large = policy.expected_gain(make_view(1)), policy.expected_gain(make_view(128))
    assert small > large >= 1.0
    assert policy.expected_gain(make_view(4, limit=0)) == 1.0
    late = policy.expected_gain(make_view(1, lag=1))
    assert policy.lengths(make_view(1)).any() == (late > 1)
