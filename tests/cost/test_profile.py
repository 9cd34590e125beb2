"""What a profile predicts, how it is kept, and how it follows the machine."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from faser.cost.curve import NOTHING, Curve
from faser.cost.overlap import MAX_CORRECTION, OverlapProfile
from faser.cost.profile import VERSION, Profile
from faser.cost.profiled_cost import MAX_FACTOR, SPEED_DECAY, ProfiledCost
from faser.cost.work import work_of
from faser.engine.pages import NO_WRITES
from faser.errors import ConfigError
from faser.step import StepPlan, StepSeconds

MS, US = 1e-3, 1e-6
SMOOTH = Curve((1, 4, 10), (1.0, 4.0, 16.0), (0.0, 0.0, 0.3))
STEPPED = replace(SMOOTH, stepped_to=SMOOTH.rows[-1])

GPU = Profile(
    about={"hardware": "a GPU"},
    verify=Curve((1, 4, 16), (4 * MS, 5 * MS, 8 * MS), (1 * US, 1 * US, 2 * US), stepped_to=16),
    prompts=Curve((16, 64), (10 * MS, 34 * MS), (2 * US, 2 * US)),
    first_draft=Curve((1, 2, 4), (1.0 * MS, 1.1 * MS, 1.2 * MS), (0.0, 0.0, 0.0), stepped_to=4),
    next_draft=Curve((1, 2, 4), (0.7 * MS, 0.8 * MS, 0.9 * MS), (0.1 * US,) * 3, stepped_to=4),
    catch_up=Curve((8, 64), (2 * MS, 9 * MS), (0.0, 0.0)),
    host=0.5 * MS,
    besides=(
        OverlapProfile.of(0, {1: (StepSeconds(2 * MS, 4 * MS), StepSeconds(2 * MS, 4 * MS), 5.5 * MS)}),
        OverlapProfile.of(32, {1: (StepSeconds(2 * MS, 4 * MS), StepSeconds(3 * MS, 5 * MS), 5.5 * MS)}),
    ),
    await_seconds=0.2 * MS,
    errors={"verify": 0.02, "verify_worst": 0.05},
)


def make_plan(num_tokens, lengths, num_rows=1, draft_rows=1, cut=0) -> StepPlan:
    """Requests by their context and drafts; of the last, `cut` prompt tokens are left for another step."""

    def each(value) -> np.ndarray:
        return np.broadcast_to(np.array(value, dtype=np.int64), len(num_tokens)).copy()

    tokens, rows, drafted = each(num_tokens), each(num_rows), each(draft_rows) * (each(lengths) > 0)
    start = tokens - rows
    start[-1] -= cut
    return StepPlan(
        (), (), np.arange(tokens.size), tokens, start, rows, each(lengths), each(0), tokens - drafted, drafted,
        np.zeros(tokens.size, dtype=bool), NO_WRITES, NO_WRITES,
    )  # fmt: skip


# ---- curves ----


@pytest.mark.parametrize(
    ("rows", "seconds"), [(0, 0.0), (1, 1.0), (2, 2.0), (4, 4.0), (7, 10.0), (10, 16.0), (12, 20.0)]
)
def test_between_measured_rows_a_curve_is_straight_and_beyond_them_its_last_rise_goes_on(rows, seconds):
    assert float(SMOOTH(rows, 0)) == pytest.approx(seconds)


@pytest.mark.parametrize(("rows", "seconds"), [(0, 0.0), (1, 1.0), (2, 4.0), (4, 4.0), (5, 16.0), (10, 16.0)])
def test_rows_between_two_graphs_cost_what_the_larger_does(rows, seconds):
    assert float(STEPPED(rows, 0)) == pytest.approx(seconds)


def test_context_costs_by_the_token_and_arrays_keep_their_shape():
    assert SMOOTH(np.array([0, 4, 7, 10]), 100) == pytest.approx([0.0, 4.0, 10.0 + 15, 16.0 + 30])
    assert SMOOTH(np.array([10, 10]), np.array([0, 10])) == pytest.approx([16.0, 19.0])
    assert SMOOTH(np.ones((2, 3), dtype=np.int64), 0).shape == (2, 3)


def test_what_does_not_exist_takes_no_time():
    assert float(NOTHING(5, 1000)) == 0


@pytest.mark.parametrize(
    "wrong",
    [
        ((), (), ()),
        ((1, 2), (1.0,), (0.0,)),
        ((2, 1), (1.0, 1.0), (0.0, 0.0)),
        ((1, 1), (1.0, 1.0), (0.0, 0.0)),
        ((0, 1), (1.0, 1.0), (0.0, 0.0)),
        ((1,), (-1.0,), (0.0,)),
        ((1,), (float("nan"),), (0.0,)),
        ((1,), (1.0,), (float("inf"),)),
    ],
)
def test_a_curve_that_is_none_is_refused(wrong):
    with pytest.raises(ConfigError, match="curve"):
        Curve(*wrong)


# ---- keeping ----


def test_a_saved_profile_comes_back_as_it_was(tmp_path):
    path = tmp_path / "some" / "where" / "p.json"
    GPU.save(path)
    assert Profile.load(path) == GPU
    assert [each.name for each in path.parent.iterdir()] == ["p.json"]


def test_ways_to_overlap_come_back_as_numbers_of_their_own():
    given = json.loads(json.dumps(GPU.to_dict()))
    assert [each["draft_sms"] for each in given["besides"]] == [0, 32]
    assert given["besides"][1]["share"]["seconds"] == pytest.approx([0.25])
    assert given["besides"][1]["draft_factor"]["seconds"] == pytest.approx([1.5])
    found = Profile.from_dict(given)
    assert found.besides == GPU.besides
    assert found.await_seconds == GPU.await_seconds
    older = Profile.from_dict({key: value for key, value in given.items() if key not in ("besides", "await_seconds")})
    assert older == replace(GPU, besides=(), await_seconds=0.0)


def test_what_is_not_hidden_is_a_share_of_the_shorter():
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
        assert found.total(apart.draft, apart.verify, size, size) == pytest.approx(together)


def test_errors_are_told_in_a_line():
    assert GPU.accuracy == "verify 2.0 % off (worst 5.0 %)"
    assert "not measured" in replace(GPU, errors={}).accuracy


def without(name):
    return {key: value for key, value in GPU.to_dict().items() if key != name}


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("no JSON", "cannot be read"),
        ("[]", "version None"),
        ("{}", "version None"),
        (json.dumps({**GPU.to_dict(), "version": VERSION + 1}), f"expected {VERSION}"),
        (json.dumps(without("catch_up")), "catch_up"),
        (json.dumps({**GPU.to_dict(), "verify": [1]}), "TypeError"),
        (json.dumps({**GPU.to_dict(), "errors": [0.1]}), "AttributeError"),
        (json.dumps({**GPU.to_dict(), "host": "long"}), "long"),
        (json.dumps({**GPU.to_dict(), "besides": [{"draft_sms": 0}]}), "draft"),
    ],
)
def test_a_file_that_is_no_profile_is_refused_by_name(tmp_path, content, says):
    path = tmp_path / "broken.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=says) as refused:
        Profile.load(path)
    assert str(path) in str(refused.value)


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="nowhere"):
        Profile.load(tmp_path / "nowhere.json")


# ---- predictions ----


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


def test_more_rows_than_graphs_have_cost_what_prompts_do():
    plan = make_plan([10, 10, 10, 10], 15)
    assert ProfiledCost(GPU).parts(plan).verify == pytest.approx(34 * MS + 80 * US)


def test_lookup_costs_only_what_is_verified():
    profile = replace(GPU, first_draft=NOTHING, next_draft=NOTHING, catch_up=NOTHING)
    assert ProfiledCost(profile).parts(make_plan([10], 3, draft_rows=0)) == StepSeconds(0.0, 5 * MS + 10 * US)


def test_policies_may_ask_for_many_numbers_at_once():
    cost = ProfiledCost(GPU)
    assert cost.verify(np.array([1, 5, 40]), 0) == pytest.approx([4 * MS, 8 * MS, 22 * MS])
    assert cost.verify(np.array([1, 5]), 0, prompt_rows=39) == pytest.approx([22 * MS, 24 * MS])
    assert cost.first_draft(np.array([1, 3]), 0) == pytest.approx([1.0 * MS, 1.2 * MS])
    assert float(cost.first_draft(3, 0, rows=64)) == pytest.approx(9 * MS)
    assert cost.row_sizes.tolist() == [1, 4, 16]
    assert ProfiledCost(replace(GPU, verify=SMOOTH)).row_sizes.size == 0


def overlapping(plan: StepPlan, frontier=0, lead=0, waits=False, draft_sms=0) -> StepPlan:
    each = np.zeros_like(plan.lengths)
    return replace(plan, overlaps=True, frontier=each + frontier, lead=each + lead, waits=waits, draft_sms=draft_sms)


def test_what_overlapping_hides_goes_by_requests_and_by_how_the_device_is_shared():
    share = Curve((1, 5), (0.25, 1.25), (0.0, 0.0))
    cost = ProfiledCost(replace(GPU, besides=(replace(GPU.besides[0], draft_sms=16, share=share), GPU.besides[0])))
    assert cost.splits == (16, 0)
    assert cost.hidden(4.0, 8.0, 1, 16) == cost.hidden(8.0, 4.0, 1, 16) == pytest.approx(3.0)
    assert cost.hidden(4.0, 8.0, 3, 16) == pytest.approx(1.0)
    assert cost.hidden(4.0, 8.0, 5, 16) == pytest.approx(-1.0)  # both are slower at once
    assert cost.hidden(4.0, 8.0, 6, 16) == 0  # more than were measured
    assert cost.hidden(4.0, 8.0, 1) == pytest.approx(1.0)
    assert cost.hidden(4.0, 8.0, 1, 48) == 0  # nothing is known of it
    assert ProfiledCost(replace(GPU, besides=())).splits == ()


def test_a_part_of_the_device_makes_each_as_much_slower_as_was_measured():
    one = replace(
        GPU.besides[0],
        share=Curve((1, 4), (0.25, 0.5), (0.0, 0.0)),
        draft_factor=Curve((1, 4), (2.0, 3.0), (0.0, 0.0)),
        verify_factor=Curve((1, 4), (0.5, 1.25), (0.0, 0.0)),
    )
    assert one.total(4.0, 20.0, 1, 1) == pytest.approx(10 + 0.25 * 4)
    assert one.total(8.0, 20.0, 1, 1) == pytest.approx(16 + 0.25 * 8)  # drafting is what takes longer
    assert one.total(4.0, 20.0, 4, 4) == pytest.approx(25 + 0.5 * 4)
    assert one.total(4.0, 20.0, 1, 4) == pytest.approx(12)  # branches are, on their part
    assert one.total(3.0, 20.0, 1, 4) == pytest.approx(10 + 0.25 * 3)  # they are not
    assert one.total(4.0, 20.0, 1, 64) == pytest.approx(12)  # nothing is known of so many
    cost = ProfiledCost(replace(GPU, besides=(replace(one, draft_sms=16),)))
    assert cost.hidden(4.0, 20.0, 4, 16) == pytest.approx(24 - 27)
    assert cost.hidden(4.0, 20.0, 1, 16, 4) == pytest.approx(24 - 12)
    assert cost.hidden(4.0, 20.0, 5, 16, 10) == 0  # more requests than were measured


def test_branches_are_rows_of_every_draft_behind_the_first_that_is_not_verified():
    flat = Curve((1, 2, 100), (MS, 2 * MS, 100 * MS), (0.0,) * 3)  # a millisecond a row
    cost = ProfiledCost(replace(GPU, first_draft=flat, next_draft=flat))
    plan = overlapping(make_plan([100, 50], 6), lead=3)
    assert cost.parts(plan).draft == pytest.approx(12 * MS)
    assert cost.parts(replace(plan, outcomes=2)).draft == pytest.approx((12 + 2 * 2 * (2 * 4)) * MS)
    plan = overlapping(make_plan([100, 50], 4), frontier=19)
    assert cost.parts(replace(plan, outcomes=4)).draft == pytest.approx((8 + 3 * 40) * MS)  # one guess has room
    nothing_left = overlapping(make_plan([100], 3), lead=2)
    assert cost.parts(replace(nothing_left, outcomes=2)) == cost.parts(nothing_left)


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


def test_a_step_that_waits_takes_that_much_longer():
    cost, plan = ProfiledCost(GPU), make_plan([100], 3)
    ahead, waiting = (cost.predict(overlapping(plan, lead=1, waits=each)) for each in (False, True))
    assert waiting - ahead == pytest.approx(0.2 * MS)


# ---- corrections ----


def run(cost: ProfiledCost, plan: StepPlan, factor: float, host: float, steps: int) -> None:
    """A machine that is so many times slower than the profile says."""
    parts = ProfiledCost(cost.profile).parts(plan)
    spent = StepSeconds(factor * parts.draft, factor * parts.verify)
    for _ in range(steps):
        cost.learn(plan, spent, spent.draft + spent.verify + host)


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


def learn_waiting(cost: ProfiledCost, more: float, steps: int, waits: bool = True) -> StepPlan:
    """Steps that took so many seconds more than both models and the host; returns their plan."""
    plan = overlapping(make_plan([100, 200], 3), lead=1, waits=waits)
    spent = cost.parts(plan)
    for _ in range(steps):
        cost.learn(plan, spent, spent.total + cost.host + more)
    return plan


@pytest.mark.parametrize("more", [0.0, 0.05 * MS, 1.5 * MS])
def test_what_waiting_takes_is_learned_from_the_steps_that_wait(more):
    cost = ProfiledCost(GPU)
    plan = learn_waiting(cost, more, 300)
    assert cost.await_seconds == pytest.approx(more, abs=0.01 * MS)
    assert cost.predict(plan) == pytest.approx(cost.parts(plan).total + GPU.host + more, abs=0.01 * MS)
    assert cost.factors == (1.0, 1.0)
    assert cost.host == GPU.host


def lead_seconds(plan: StepPlan) -> float:
    """What the verification waits for: the drafts of a lead by themselves."""
    lead = int(plan.lead.max(initial=0))
    return ProfiledCost(GPU).parts(replace(plan, lengths=plan.lead, outcomes=0)).draft if lead else 0.0


def learn_beside(cost: ProfiledCost, plan: StepPlan, factor: float, steps: int) -> None:
    """Both at once took so many times as long as the profile says, beside the lead."""
    lead = lead_seconds(plan)
    total = lead + factor * (ProfiledCost(cost.profile).parts(plan).total - lead)
    for _ in range(steps):
        cost.learn(plan, StepSeconds(total, total, total), total + cost.host)


@pytest.mark.parametrize("factor", [0.8, 1.0, 1.5])
@pytest.mark.parametrize("lead", [0, 2])
def test_what_both_take_at_once_is_learned_from_the_steps_that_overlap_that_way(factor, lead):
    cost, plan = ProfiledCost(GPU), overlapping(make_plan([100], 5), lead=lead, draft_sms=32)
    learn_beside(cost, plan, factor, 100)
    fresh = ProfiledCost(GPU)
    assert 11 * MS - cost.hidden(5 * MS, 6 * MS, 1, 32) == pytest.approx(
        factor * (11 * MS - fresh.hidden(5 * MS, 6 * MS, 1, 32)), rel=0.01
    )
    assert cost.hidden(5 * MS, 6 * MS, 1) == fresh.hidden(5 * MS, 6 * MS, 1), "another split"
    assert cost.hidden(5 * MS, 6 * MS, 1, 32, 9) == fresh.hidden(5 * MS, 6 * MS, 1, 32, 9), "with branches"
    assert cost.factors == (1.0, 1.0)
    branched = replace(plan, outcomes=2)
    learn_beside(cost, branched, 1.2 * factor, 200)
    alone = lead_seconds(branched)
    assert cost.parts(branched).total == pytest.approx(
        alone + 1.2 * factor * (fresh.parts(branched).total - alone), rel=0.01
    )


@pytest.mark.parametrize(("slower", "bound"), [(100.0, MAX_CORRECTION), (0.01, 1 / MAX_CORRECTION)])
def test_what_is_learned_of_both_at_once_is_bounded(slower, bound):
    cost, plan = ProfiledCost(GPU), overlapping(make_plan([100], 5), lead=2, draft_sms=32)
    learn_beside(cost, plan, slower, 500)
    fresh = ProfiledCost(GPU)
    assert 11 * MS - cost.hidden(5 * MS, 6 * MS, 1, 32) == pytest.approx(
        bound * (11 * MS - fresh.hidden(5 * MS, 6 * MS, 1, 32))
    )


def test_nothing_is_learned_of_both_at_once_from_less_than_a_lead_nor_beside_prompts():
    cost, plan = ProfiledCost(GPU), overlapping(make_plan([100], 5), lead=2, draft_sms=32)
    before, lead = cost.parts(plan), lead_seconds(plan)
    cost.learn(plan, StepSeconds(0.9 * lead, 0.9 * lead, 0.9 * lead), 0.0)
    assert cost.parts(plan) == before
    for beside in (make_plan([100, 40], 5, num_rows=[1, 8], draft_rows=[1, 0]), make_plan([100, 40], 5, cut=3)):
        cost.learn(overlapping(beside, draft_sms=32), StepSeconds(1.0, 1.0, 0.0), 2.0)
    assert cost.parts(plan) == before


def test_a_step_with_no_room_for_branches_is_one_without():
    plan = overlapping(make_plan([100], 5), lead=4, draft_sms=32)
    costs = ProfiledCost(GPU), ProfiledCost(GPU)
    for cost, outcomes in zip(costs, (0, 2), strict=True):
        learn_beside(cost, replace(plan, outcomes=outcomes), 1.5, 50)
    assert costs[0].parts(plan) == costs[1].parts(plan) == costs[1].parts(replace(plan, outcomes=2))
    assert costs[1].parts(plan).total > 1.2 * ProfiledCost(GPU).parts(plan).total


def test_a_way_that_was_slow_is_tried_again_some_day():
    cost, plan = ProfiledCost(GPU), make_plan([100], 5)
    learn_beside(cost, overlapping(plan, draft_sms=32), 1.8, 100)
    slow = cost.hidden(5 * MS, 6 * MS, 1, 32)
    run(cost, plan, 1.0, 0.0, 100)
    assert slow < cost.hidden(5 * MS, 6 * MS, 1, 32) < 0.5 * (slow + ProfiledCost(GPU).hidden(5 * MS, 6 * MS, 1, 32))
    run(cost, plan, 1.0, 0.0, 5_000)
    assert cost.hidden(5 * MS, 6 * MS, 1, 32) == pytest.approx(
        ProfiledCost(GPU).hidden(5 * MS, 6 * MS, 1, 32), rel=0.05
    )


def test_one_long_pause_of_a_step_that_overlaps_hardly_counts():
    cost, plan = ProfiledCost(GPU), overlapping(make_plan([100], 5), draft_sms=32)
    before = cost.parts(plan).total
    learn_beside(cost, plan, 1000.0, 1)
    assert before < cost.parts(plan).total < 1.11 * before


def test_other_steps_say_nothing_of_waiting():
    cost, plain = ProfiledCost(GPU), make_plan([100], 3)
    learn_waiting(cost, 1.5 * MS, 20, waits=False)
    run(cost, plain, 1.0, 3 * MS, 20)
    cost.learn(overlapping(plain, lead=1, waits=True), StepSeconds(), 1.0)  # its parts were not measured
    assert cost.await_seconds == GPU.await_seconds


def test_waiting_never_takes_less_than_nothing():
    cost = ProfiledCost(GPU)
    learn_waiting(cost, -GPU.host - 1 * MS, 300)
    assert 0 <= cost.await_seconds < 0.01 * MS


def test_a_pause_is_no_wait():
    cost = ProfiledCost(GPU)
    plan = learn_waiting(cost, 1.0, 1)
    assert cost.await_seconds < GPU.await_seconds + cost.parts(plan).total / 8


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
