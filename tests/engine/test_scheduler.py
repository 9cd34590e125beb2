"""The scheduler against an executor that knows what every page must hold (tests/oracle.py). No torch."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from faser.engine import prefixes
from faser.engine.admission import MAX_CANDIDATES, MAX_NAMED
from faser.engine.engine import Engine
from faser.engine.pages import page_hash
from faser.engine.prompt_pace import KEPT_UP, Pacing, StepPace, pairs_of
from faser.errors import EngineError, InvalidRequest, RequestTooLong
from faser.limits import KeyWindow
from faser.policy import Fixed, Policy
from faser.request import FinishReason
from faser.step import StepPlan, StepSeconds
from tests.ahead import Ahead
from tests.oracle import (
    HEADS,
    SEED,
    RandomGuesses,
    RandomLengths,
    SometimesOverlap,
    World,
    expected_output,
    make_request,
)


def assert_exact(world, *requests):
    for request in requests:
        right = expected_output(request.prompt_token_ids, SEED, request.params.max_tokens)
        assert world.tokens[request.id] == right, request.id


def prompts(count, size=10, seed=0):
    random = np.random.default_rng(seed)
    return [random.integers(0, 3, size=int(random.integers(1, size + 1))) for _ in range(count)]


@pytest.mark.parametrize("length", [0, 1, 3, 6])
@pytest.mark.parametrize("agreement", [0.0, 0.5, 1.0])
def test_output_does_not_depend_on_length_or_agreement(length, agreement):
    world = World(Fixed(length), agreement=agreement)
    requests = [make_request(str(i), prompt, 9) for i, prompt in enumerate(prompts(8))]
    for request in requests:
        world.add(request)
    world.drain()
    assert_exact(world, *requests)
    stats = [world.finished[request.id].finish.stats for request in requests]
    assert all(s.steps + s.accepted == 9 for s in stats), "every step emits accepted + 1 bonus"
    assert (sum(s.accepted for s in stats) > 0) == (length > 0 and agreement > 0)


def test_a_right_draft_saves_steps():
    world = World(Fixed(3), agreement=1.0)
    world.add(make_request("a", [1, 2], 9))
    world.drain()
    assert world.finished["a"].finish.stats.steps == 3  # 1 with the prompt, then 4 and 4


def test_every_request_has_its_own_length_and_zero_is_normal():
    world = World(RandomLengths(5), max_running=6, max_batch_tokens=64)
    for i, prompt in enumerate(prompts(6)):
        world.add(make_request(str(i), prompt, 20))
    world.drain()
    ragged = [plan.lengths for plan in world.plans if len(set(plan.lengths.tolist())) > 2]
    assert ragged
    assert any((lengths == 0).any() for lengths in ragged)


def test_off_never_runs_the_draft():
    world = World(Fixed(0))
    for i, prompt in enumerate(prompts(6)):
        world.add(make_request(str(i), prompt, 12))
    world.drain()
    assert world.executor.num_draft_rows == 0
    assert all(not plan.draft_rows.any() and plan.draft_pages.slots.size == 0 for plan in world.plans)


def test_max_draft_caps_one_request_and_zero_opts_it_out():
    world = World(Fixed(5), agreement=1.0, max_batch_tokens=64)
    requests = [make_request(str(cap), [1, 2, 3], 20, max_draft=cap) for cap in (0, 2, None)]
    for request in requests:
        world.add(request)
    world.drain()
    assert_exact(world, *requests)
    assert world.finished["0"].finish.stats.drafted == 0
    first = next(plan for plan in world.plans if plan.lengths.any())
    assert first.lengths.tolist() == [0, 2, 5]


def test_a_draft_that_kept_up_computes_one_or_two_rows_a_step():
    for agreement, most in ((1.0, 2), (0.0, 1)):
        world = World(Fixed(3), agreement=agreement)
        world.add(make_request("a", [1, 2, 1], 40))
        world.drain()
        rows = [int(plan.draft_rows[0]) for plan in world.plans if plan.lengths[0] > 0]
        assert set(rows[1:]) == {most}


def test_a_preempted_request_comes_back_before_those_that_never_ran():
    world = World(Fixed(0), num_pages=16, max_running=4)
    for i in range(7):
        world.add(make_request(str(i), [i % 3] * 5, 30))
    world.drain()
    assert world.scheduler.num_preemptions > 0
    assert list(world.finished) == sorted(world.finished)


def test_a_draft_pool_for_one_still_lets_one_finish_catching_up():
    world = World(Fixed(2), num_draft_pages=14, max_batch_tokens=12, caching=False)
    for name in "ab":
        world.add(make_request(name, [1] * 20, 30))
    world.drain()
    drafted = [world.finished[name].finish.stats.drafted for name in "ab"]
    assert drafted[0] >= 15, "the oldest gets its pages"


def test_a_context_longer_than_the_draft_can_see_is_served_without_drafts():
    world = World(Fixed(3), draft_max_len=16)
    request = make_request("a", [1, 2, 1], 40)
    world.add(request)
    world.drain()
    assert_exact(world, request)
    beyond = [plan for plan in world.plans if plan.num_tokens[0] > 16]
    assert beyond
    assert not any(plan.lengths.any() or plan.draft_rows.any() for plan in beyond)
    assert any(plan.lengths.any() for plan in world.plans)


def test_the_policy_is_told_the_prompt_rows_that_will_really_share_the_step():
    class Watching(Fixed):
        told = []  # noqa: RUF012

        def lengths(self, view):
            self.told.append(view.num_prefill_rows)
            return super().lengths(view)

    world = World(Watching(0), max_batch_tokens=8, max_model_len=128)
    world.add(make_request("a", [1], 20))
    world.step()
    world.add(make_request("b", [2] * 50, 5))
    world.step()
    assert Watching.told[-1] == 7 == world.plans[-1].num_rows[1]


def test_a_failed_request_is_answered_with_its_reason_and_publishes_nothing():
    world = World(Fixed(0), max_batch_tokens=64)
    for name in "ab":
        world.add(make_request(name, [1] * 12 if name == "a" else [2] * 12, 5))
    plan = world.scheduler.plan()
    result = world.executor.execute(plan)
    world.receive(world.scheduler.commit(plan, replace(result, failures={0: "overflow"})).progress)
    assert world.finished["a"].finish.reason is FinishReason.FAILED
    assert world.finished["a"].finish.error == "overflow"
    world.scheduler.check()
    world.drain()
    assert world.finished["b"].finish.reason is FinishReason.LENGTH
    for name, prompt in (("again a", [1] * 12), ("again b", [2] * 12)):
        world.add(make_request(name, prompt, 2))
    world.step()
    assert world.plans[-1].start.tolist() == [0, 8], "only the good request's pages are in the cache"
    world.drain()


def test_no_end_is_lost_when_a_commit_raises():
    class Breaks:
        text = ""

        def push(self, token):
            raise RuntimeError("bad checker")

    world = World(Fixed(0))
    world.add(make_request("ends", [1], 1))
    world.scheduler.add(make_request("breaks", [2], 5), Breaks())
    plan = world.scheduler.plan()
    result = world.executor.execute(plan)
    with pytest.raises(RuntimeError):
        world.scheduler.commit(plan, result)
    assert {p.request_id for p in world.scheduler.abandon(FinishReason.FAILED)} == {"ends", "breaks"}


class OnOff(Policy):
    """Speculates only in every `period`-th step."""

    name = "on-off"

    def __init__(self, period: int) -> None:
        self.period, self.count, self.lags = period, 0, []

    def lengths(self, view):
        self.count += 1
        self.lags.append(view.lag.tolist())
        return np.full(view.num_requests, 3 if self.count % self.period == 0 else 0)


def test_a_request_that_did_not_speculate_catches_up_before_it_drafts_again():
    policy = OnOff(5)
    world = World(policy)
    requests = [make_request(str(i), prompt, 25) for i, prompt in enumerate(prompts(4))]
    for request in requests:
        world.add(request)
    world.drain()  # the oracle refuses a draft over KV that was not computed
    assert_exact(world, *requests)
    caught_up = [rows for plan in world.plans for rows in plan.draft_rows[plan.lengths > 0].tolist()]
    assert max(caught_up) > 4
    assert max(lag for lags in policy.lags for lag in lags) > 4, "the policy is told what catching up would cost"


def test_a_long_catch_up_is_cut_into_steps_and_delays_no_other_request():
    world = World(Fixed(2), max_batch_tokens=8, max_model_len=128, num_pages=128, num_draft_pages=128, caching=False)
    long = make_request("long", [1] * 40, 20)
    short = make_request("short", [2, 1], 40)
    world.add(short)
    for _ in range(4):
        world.step()
    world.add(long)
    world.drain()
    assert_exact(world, long, short)
    plans = [plan for plan in world.plans if plan.slots.size == 2 and plan.samples.all()]
    catching_up = [plan for plan in plans if (plan.draft_rows[1] > 0) and plan.lengths[1] == 0]
    assert len(catching_up) >= 4
    assert all(plan.draft_rows.sum() <= 8 for plan in plans)
    assert all(plan.lengths[0] > 0 for plan in catching_up), "the request that kept up goes on drafting"


def test_prefill_is_chunked_and_shares_the_step_with_verification():
    world = World(Fixed(2), max_batch_tokens=8, max_model_len=128)
    first, second = make_request("first", [1, 2], 30), make_request("second", list(range(5)) * 6, 5)
    world.add(first)
    for _ in range(3):
        world.step()
    world.add(second)
    world.drain()
    assert_exact(world, first, second)
    mixed = [p for p in world.plans if p.slots.size == 2 and not p.samples[1] and p.lengths[0] > 0]
    assert len(mixed) >= 3
    assert all((plan.num_rows + plan.lengths).sum() <= 8 for plan in world.plans)


def test_speculation_leaves_prefill_a_share_of_the_rows():
    world = World(Fixed(6), max_running=5, max_batch_tokens=20, agreement=0.0, max_model_len=128)
    for name in "abcd":
        world.add(make_request(name, [1], 60))
    for _ in range(3):
        world.step()
    assert world.plans[-1].lengths.sum() == 16
    world.add(make_request("late", [2] * 30, 5))
    world.step()
    late = world.plans[-1]
    assert late.num_rows[-1] >= 20 // 4
    world.drain()


def test_a_pool_too_small_for_all_preempts_the_newest_and_every_output_is_right():
    world = World(Fixed(3), num_pages=16, num_draft_pages=16, max_running=6)
    requests = [make_request(str(i), [i % 3] * 5, 30) for i in range(6)]
    for request in requests:
        world.add(request)
    world.drain()
    assert world.scheduler.num_preemptions > 0
    assert_exact(world, *requests)
    ends = list(world.finished)
    assert ends[0] == "0", "the oldest is never preempted"


def test_a_draft_pool_too_small_costs_drafts_not_requests():
    world = World(RandomLengths(4), num_draft_pages=6, max_running=4)
    requests = [make_request(str(i), prompt, 20) for i, prompt in enumerate(prompts(8))]
    for request in requests:
        world.add(request)
    world.drain()
    assert_exact(world, *requests)
    assert world.scheduler.num_preemptions == 0
    assert sum(p.finish.stats.drafted for p in world.finished.values()) > 0


def test_an_equal_prompt_is_not_computed_twice_by_target_or_draft():
    world = World(Fixed(2), max_batch_tokens=64)
    prompt = [1, 2, 0, 1] * 6
    for name in ("first", "second"):
        world.add(make_request(name, prompt, 6))
        world.drain()
    prefills = [int(p.num_rows[0]) for p in world.plans if p.admitted]
    assert prefills == [24, 4], "all but the last page, whose last row must be computed to sample"
    catch_ups = [int(p.draft_rows[0]) for p in world.plans if p.draft_rows[0] > 4]
    assert catch_ups == [25], "the second request's draft context came from the cache"


def test_a_conversation_continues_on_the_pages_of_its_first_turn():
    world = World(Fixed(2), max_batch_tokens=64)
    world.add(make_request("turn", [1, 2, 3], 17))
    world.drain()
    context = [1, 2, 3, *world.tokens["turn"]]
    world.add(make_request("next", [*context, 4, 4], 4))
    world.step()
    assert world.plans[-1].start[0] == 16


def test_a_cancelled_request_frees_its_pages_and_is_answered():
    world = World(Fixed(2))
    world.add(make_request("a", [1] * 9, 40))
    world.add(make_request("b", [2] * 9, 4))
    for _ in range(3):
        world.step()
    assert world.scheduler.cancel("a")
    assert not world.scheduler.cancel("a")
    world.scheduler.check()
    world.drain()
    assert world.finished["a"].finish.reason is FinishReason.CANCELLED
    assert world.target.num_held == 0
    assert world.draft.num_held == 0


def test_a_cancel_while_a_step_is_in_flight_takes_effect_when_it_lands():
    world = World(Fixed(2), max_batch_tokens=8)
    world.add(make_request("a", [1] * 9, 40))
    world.add(make_request("b", [2] * 30, 4))  # its prefill waits for rows: it may be in no plan at all
    world.step()
    plan = world.scheduler.plan()
    assert world.scheduler.cancel("a")
    assert world.scheduler.cancel("b")
    assert world.target.num_held > 0, "its pages are being written"
    world.receive(world.scheduler.commit(plan, world.executor.execute(plan)).progress)
    assert world.target.num_held == 0
    world.drain()
    assert {p.finish.reason for p in world.finished.values()} == {FinishReason.CANCELLED}


def test_a_waiting_request_can_be_cancelled():
    world = World(Fixed(0), max_running=1)
    for name in "ab":
        world.add(make_request(name, [1], 5))
    world.step()
    assert world.scheduler.cancel("b")
    world.drain()
    assert world.finished["b"].finish.reason is FinishReason.CANCELLED
    assert world.finished["a"].finish.reason is FinishReason.LENGTH


def test_abandon_ends_everything_even_a_step_in_flight():
    world = World(Fixed(2), max_running=2)
    for name in "abc":
        world.add(make_request(name, [1] * 5, 5))
    world.step()
    world.scheduler.plan()
    ended = world.scheduler.abandon(FinishReason.FAILED)
    assert {p.request_id for p in ended} == {"a", "b", "c"}
    world.scheduler.check()
    assert world.target.num_held == 0
    request = make_request("d", [1] * 5, 5)
    world.add(request)
    world.drain()
    assert_exact(world, request)


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "error", "numbers"),
    [
        ([], 5, InvalidRequest, "no token"),
        ([1] * 60, 5, RequestTooLong, "60 prompt tokens .* = 65.* takes 64"),
        ([1] * 50, 14, RequestTooLong, r"= 64.* holds 60 \(15 pages of 4\)"),
    ],
)
def test_what_can_never_be_served_is_refused_at_once_with_the_numbers(prompt, max_tokens, error, numbers):
    world = World(Fixed(0), num_pages=15)
    with pytest.raises(error, match=numbers):
        world.scheduler.add(make_request("a", prompt, max_tokens))
    assert not world.scheduler.has_work


def test_a_request_id_in_use_is_refused():
    world = World(Fixed(0))
    world.add(make_request("a", [1], 5))
    with pytest.raises(InvalidRequest, match="already in use"):
        world.scheduler.add(make_request("a", [1], 5))


@pytest.mark.parametrize("lengths", [[1], [1, -1], [[1, 1]], [0.5, 1.0]])
def test_a_policy_that_answers_nonsense_is_an_error_not_a_wrong_step(lengths):
    class Nonsense(Policy):
        name = "nonsense"

        def lengths(self, view):
            return np.array(lengths)

    world = World(Nonsense(), max_running=2)
    for name in "ab":
        world.add(make_request(name, [1], 5))
    with pytest.raises(EngineError, match="nonsense"):
        world.drain()


def test_plan_and_commit_alternate():
    world = World(Fixed(0))
    world.add(make_request("a", [1], 5))
    plan = world.scheduler.plan()
    with pytest.raises(EngineError, match="before the last plan"):
        world.scheduler.plan()
    world.scheduler.commit(plan, world.executor.execute(plan))
    with pytest.raises(EngineError, match="another plan"):
        world.scheduler.commit(plan, world.executor.execute(plan))


def test_a_stop_id_cuts_what_the_step_brought_behind_it():
    right = expected_output([1, 2], SEED, 20)
    stop = right[5]
    first = right.index(stop)
    for length in (0, 6):
        world = World(Fixed(length), agreement=1.0)
        request = make_request("a", [1, 2], 20)
        world.add(type(request)(**{**request.__dict__, "stop_ids": frozenset({stop})}))
        world.drain()
        assert world.tokens["a"] == right[: first + 1]
        assert world.finished["a"].finish.reason is FinishReason.STOP
        assert world.finished["a"].finish.stop_id == stop


# ── prompts share a step ─────────────────────────────────────────────────────────────────────────────────────────────


def seconds_of(plan: StepPlan) -> StepSeconds:
    """A step takes 10 ms, a prompt row 1 ms and 4 µs for each token before it; a draft's row a tenth of that."""
    reads = (plan.num_rows > 1) | ~plan.samples
    verify = 0.010 + price(plan.num_rows[reads], plan.start[reads])
    return StepSeconds(0.1 * price(plan.draft_rows, plan.draft_start), verify)


def price(rows, start) -> float:
    return float((0.001 * rows + 0.000004 * pairs_of(rows, start)).sum())


def make_paced(policy=None, *, bound=0.05, least=2, first=8, **sizes) -> World:
    sizes = {"max_batch_tokens": 256, "max_model_len": 512, "num_pages": 512, "num_draft_pages": 512, **sizes}
    pace = StepPace(bound, Pacing(1e3 * bound, first, least))
    return World(policy or Fixed(0), pace=pace, seconds=seconds_of, **sizes)


def test_a_stream_beside_a_long_prompt_has_no_step_far_above_the_bound():
    world = make_paced(caching=False)
    world.add(make_request("stream", [1], 200))
    for _ in range(5):
        world.step()
    world.add(make_request("long", [2] * 400, 5))
    while not world.tokens["long"]:
        world.step()
    reading = [plan for plan in world.plans if plan.slots.size == 2]
    taken = [seconds_of(plan).total for plan in reading]
    assert max(taken) < 1.3 * 0.05
    assert max(taken) > 0.8 * 0.05, "the bound is used"
    assert all(plan.samples[0] for plan in reading), "the stream is part of every step"
    rows = [int(plan.num_rows[1]) for plan in reading]
    assert rows[0] == 8
    assert all(after <= 2 * max(rows[: i + 1]) for i, after in enumerate(rows[1:]))
    assert rows[-2] < 0.7 * max(rows), "a row costs more behind a long context"


def test_without_a_bound_a_prompt_takes_all_rows_of_a_step():
    world = World(Fixed(0), max_batch_tokens=256, max_model_len=512, num_pages=512)
    world.add(make_request("long", [2] * 400, 5))
    world.step()
    assert world.plans[-1].num_rows.tolist() == [256]


def test_a_short_prompt_overtakes_a_long_one_that_goes_on():
    world = World(Fixed(0), max_batch_tokens=16, max_model_len=256, num_pages=256, caching=False)
    long, short = make_request("long", [1] * 200, 4), make_request("short", [2] * 20, 4)
    world.add(long)
    for _ in range(3):
        world.step()
    world.add(short)
    for _ in range(2):
        world.step()
    assert [plan.num_rows.tolist() for plan in world.plans[-2:]] == [[4, 12], [8, 8]]
    assert len(world.tokens["short"]) == 1
    assert not world.tokens["long"]
    world.drain()
    assert_exact(world, long, short)


def test_a_short_prompt_that_waits_is_admitted_beside_a_long_one_and_a_longer_one_is_not():
    world = World(Fixed(0), max_batch_tokens=16, max_model_len=256, num_pages=256, caching=False)
    for name, size in (("long", 200), ("longer", 220), ("short", 8)):
        world.add(make_request(name, [1] * size, 4))
    world.step()
    assert [admission.token_ids.size for admission in world.plans[-1].admitted] == [200, 8]
    assert world.scheduler.num_waiting == 1
    world.drain()
    assert list(world.finished) == ["short", "long", "longer"]


def test_what_overtakes_leaves_pages_for_the_head_of_the_queue():
    """Of 17 pages the first holds 5 and the one with the fewest rows 2; each has one in reserve; the head needs 8."""
    world = World(Fixed(0), num_pages=17, max_running=6, max_batch_tokens=8, caching=False)
    for name, size, max_tokens in (("first", 20, 2), ("head", 30, 2), ("short", 8, 2), ("shorter", 6, 20)):
        world.add(make_request(name, [1] * size, max_tokens))
    world.drain()
    admitted = [[a.token_ids.size for a in plan.admitted] for plan in world.plans if plan.admitted]
    assert admitted == [[20, 6], [30, 8]], "two pages for a third would be those of the head"


def test_what_overtakes_leaves_a_slot_for_the_head_of_the_queue():
    world = World(Fixed(0), max_running=3, max_batch_tokens=8, max_model_len=128, num_pages=128, caching=False)
    for name, size in (("first", 100), ("head", 110), ("a", 2), ("b", 2)):
        world.add(make_request(name, [1] * size, 2))
    world.step()
    assert [a.token_ids.size for a in world.plans[-1].admitted] == [100, 2]
    world.step()
    assert not world.plans[-1].admitted, "the third slot is kept for the head"


def test_a_head_that_lacks_pages_lets_no_request_pass():
    world = World(Fixed(0), num_pages=16, max_batch_tokens=16, caching=False)
    world.add(make_request("holds", [1] * 40, 10))
    for _ in range(4):
        world.step()
    world.add(make_request("head", [1] * 30, 2))
    world.add(make_request("short", [1] * 2, 2))
    world.step()
    assert world.scheduler.num_waiting == 2
    world.drain()
    assert list(world.finished) == ["holds", "short", "head"], "admitted together, once there are pages"


@pytest.mark.parametrize(("num_pages", "fits"), [(4, False), (5, True)])
def test_an_admission_leaves_a_page_for_each_running_request(num_pages, fits):
    """The running request holds two pages and has one in reserve, the waiting one needs two."""
    world = World(Fixed(0), num_pages=num_pages, max_batch_tokens=64, caching=False)
    world.add(make_request("runs", [1] * 4, 8))
    world.step()
    world.add(make_request("waits", [1] * 8, 4))
    world.step()
    assert world.scheduler.num_waiting == (not fits)
    world.drain()


def test_the_newest_request_is_preempted_though_it_was_admitted_before_an_older_one():
    world = World(Fixed(0), num_pages=14, max_running=4, max_batch_tokens=8, caching=False)
    for name, size in (("first", 12), ("older", 14), ("newer", 2)):
        world.add(make_request(name, [1] * size, 16))
    admitted = []
    while world.scheduler.num_preemptions == 0:
        world.step()
        admitted += [a.token_ids.size for a in world.plans[-1].admitted]
    assert admitted == [12, 2, 14]
    assert [waiting.request.id for waiting in world.scheduler._queue.waiting] == ["newer"]
    world.drain()


@pytest.mark.parametrize("ahead", [False, True])
def test_equal_prompts_that_arrive_together_are_computed_once(ahead):
    world = World(Fixed(0), max_running=8, max_batch_tokens=64, num_pages=256, max_model_len=128)
    engine = Engine(world.scheduler, Ahead(world.executor)) if ahead else None
    requests = [make_request(str(i), [1, 2, 0, 1] * 10, 3) for i in range(8)]
    for request in requests:
        world.add(request)
    if engine is not None:
        while engine.has_work:
            world.receive(engine.step())
        rows = engine.stats.context_rows
    else:
        world.drain()
        rows = sum(int(plan.num_rows.sum()) for plan in world.plans)
    assert_exact(world, *requests)
    assert rows == 40 + 7 * 4 + 8 * 2, "one prompt, of the others the last page, and a row for each further token"


def test_a_prompt_waits_for_pages_only_while_another_request_computes_them():
    """'long' computes their common beginning; when it has passed it, 'short' is admitted with all of it."""
    world = World(Fixed(0), max_batch_tokens=8, max_model_len=256, num_pages=256)
    common = [1, 2, 0, 1] * 6
    world.add(make_request("long", common + [1] * 150, 2))
    world.add(make_request("short", common + [2] * 6, 2))
    for _ in range(4):
        world.step()
    admissions = {a.token_ids.size: (i, p) for i, p in enumerate(world.plans) for a in p.admitted}
    step, plan = admissions[30]
    assert step == 3
    assert plan.start.tolist() == [24, 24]
    world.drain()


def test_a_prompt_in_the_cache_counts_by_the_rows_it_has_left():
    world = World(Fixed(0), max_batch_tokens=8, max_model_len=256, num_pages=256)
    turn = [1, 2, 0, 1] * 20
    world.add(make_request("turn", turn, 2))
    world.drain()
    world.add(make_request("long", [2] * 60, 2))
    world.add(make_request("next turn", [*turn, 2, 2], 2))
    world.step()
    assert world.plans[-1].start.tolist() == [0, 80]


def test_a_preempted_request_that_had_overtaken_goes_behind_the_older_one_that_waits():
    world = World(Fixed(0), num_pages=16, max_running=4, max_batch_tokens=8, caching=False)
    for name, size, max_tokens in (("first", 20, 20), ("head", 24, 2), ("newer", 2, 30)):
        world.add(make_request(name, [1] * size, max_tokens))
    world.step()
    assert world.scheduler.num_running == 2, "the first, and the one that overtakes"
    slots = world.scheduler._slots
    world.scheduler._preempt(slots[int(slots.running[-1])])
    assert [waiting.request.id for waiting in world.scheduler._queue.waiting] == ["head", "newer"]
    world.drain()
    assert list(world.finished).index("head") < list(world.finished).index("newer")


@pytest.mark.parametrize("size", [6, 300])
def test_a_plan_looks_at_a_bounded_number_of_waiting_requests(size, monkeypatch):
    world = World(Fixed(0), max_batch_tokens=8, max_running=4, max_model_len=8192, num_pages=8192)
    looked, named = [], []
    find = world.target.find
    world.target.find = lambda names: looked.append(1) or find(names)
    monkeypatch.setattr(prefixes, "page_hash", lambda *page: named.append(1) or page_hash(*page))
    for i in range(600):
        world.add(make_request(str(i), [i % 5, 1, 2] * (size // 3), 2))
    for _ in range(3):
        looked.clear()
        named.clear()
        world.step()
        assert 0 < len(looked) <= MAX_CANDIDATES + world.limits.max_running
        assert len(named) <= MAX_NAMED


def test_a_prompt_with_more_pages_than_a_plan_gives_names_is_admitted_all_the_same():
    world = World(Fixed(0), max_batch_tokens=8, max_model_len=8192, num_pages=8192)
    for name in "ab":
        world.add(make_request(name, [1] * 4 * (MAX_NAMED + 10), 2))
    world.scheduler.plan()
    assert (world.scheduler.num_running, world.scheduler.num_waiting) == (1, 1)


def test_a_long_catch_up_is_cut_to_the_bound_while_a_stream_goes_on():
    world = make_paced(OnOff(1), bound=0.02, num_draft_pages=512, caching=False)
    stream, long = make_request("stream", [1], 120), make_request("long", [2] * 300, 60)
    world.add(stream)
    for _ in range(3):
        world.step()
    world.add(long)
    world.drain()
    assert_exact(world, stream, long)
    late = [seconds_of(plan).draft for plan in world.plans if (plan.draft_rows > KEPT_UP).any()]
    assert len(late) >= 4
    assert max(late) < 0.015
    assert sum(late) > 0.03, "more than two steps have room for"


def test_catching_up_and_a_prompt_share_the_seconds_of_a_step():
    world = make_paced(OnOff(1), bound=0.04, caching=False, max_model_len=2048, num_pages=2048, num_draft_pages=2048)
    requests = [make_request(str(i), [i] * 600, 20) for i in range(4)]
    for request in requests:
        world.add(request)
    world.drain()
    assert_exact(world, *requests)
    both = [plan for plan in world.plans if (plan.draft_rows > KEPT_UP).any() and (plan.num_rows > 1).any()]
    assert len(both) > 5
    taken = [seconds_of(plan).total for plan in both]
    assert max(taken) < 1.4 * 0.04
    assert np.median(taken) < 1.1 * 0.04


@settings(max_examples=60)
@given(
    sizes=st.lists(st.integers(1, 50), min_size=1, max_size=8),
    every=st.integers(1, 4),
    num_pages=st.integers(26, 60),
    max_running=st.integers(2, 5),
    spare_rows=st.integers(0, 10),
    bound=st.sampled_from([None, 0.011, 0.03]),
    caching=st.booleans(),
)
def test_no_request_starves_while_short_ones_keep_coming(
    sizes, every, num_pages, max_running, spare_rows, bound, caching
):
    """Short prompts arrive as long as a request of before is open; all of these end all the same."""
    sizes_of = {
        "max_running": max_running, "max_batch_tokens": max_running + spare_rows, "max_model_len": 64,
        "num_pages": num_pages, "num_draft_pages": 26, "caching": caching,
    }  # fmt: skip
    world = World(Fixed(0), **sizes_of) if bound is None else make_paced(bound=bound, least=1, first=2, **sizes_of)
    requests = [make_request(str(i), [i % 3] * size, 1 + size % 7) for i, size in enumerate(sizes)]
    for request in requests:
        world.add(request)
    step = 0
    while not all(request.id in world.finished for request in requests):
        if step % every == 0 and world.scheduler.num_waiting < 20:
            world.add(make_request(f"short {step}", [4] * (1 + step % 3), 2))
        world.step()
        world.scheduler.check()
        step += 1
        assert step < 3000, "somebody starves"
    assert_exact(world, *requests)


class SchedulerMachine(RuleBasedStateMachine):
    """After any sequence of add, plan, commit, cancel and preemption the pools are conserved; draining empties them."""

    @initialize(
        num_pages=st.integers(10, 20),
        num_draft_pages=st.one_of(st.none(), st.integers(1, 20)),
        max_running=st.integers(1, 5),
        spare_rows=st.integers(0, 12),
        agreement=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
        caching=st.booleans(),
        seed=st.integers(0, 99),
        kind=st.sampled_from(["plain", "lookup", "overlap", *HEADS]),
        bound=st.sampled_from([None, 0.011, 0.03]),
        windows=st.sampled_from([(None, None), (KeyWindow(9), KeyWindow(7, 1)), (KeyWindow(5), KeyWindow(11))]),
    )
    def start(
        self, num_pages, num_draft_pages, max_running, spare_rows, agreement, caching, seed, kind, bound, windows
    ) -> None:
        if kind in HEADS:  # a head has pages, and features stand under the target's table
            num_draft_pages, windows = num_draft_pages or 20, (None, windows[1])
        self.world = World(
            RandomGuesses(5, seed),
            num_pages=num_pages,
            num_draft_pages=num_draft_pages,
            max_running=max_running,
            max_batch_tokens=max_running + spare_rows,
            max_model_len=40,
            agreement=agreement,
            caching=caching,
            head=HEADS.get(kind),
            overlap=SometimesOverlap(seed) if kind == "overlap" else None,
            looks_up=kind == "lookup",
            target_window=windows[0],
            draft_window=windows[1],
            pace=None if bound is None else StepPace(bound, Pacing(1e3 * bound, 4, 1)),
            seconds=seconds_of,
        )
        self.requests = {}
        self.cancelled = set()
        self.in_flight = None

    @rule(prompt=st.lists(st.integers(0, 1), min_size=1, max_size=24), max_tokens=st.integers(1, 16))
    def add(self, prompt, max_tokens) -> None:
        request = make_request(str(len(self.requests)), prompt, max_tokens)
        self.world.add(request)
        self.requests[request.id] = request

    @precondition(lambda self: self.in_flight is None)
    @rule()
    def plan(self) -> None:
        self.in_flight = self.world.scheduler.plan()

    @precondition(lambda self: self.in_flight is not None)
    @rule()
    def commit(self) -> None:
        plan, self.in_flight = self.in_flight, None
        self.world.receive(self.world.scheduler.commit(plan, self.world.executor.execute(plan)).progress)

    @precondition(lambda self: self.in_flight is None)
    @rule(steps=st.integers(1, 8))
    def run(self, steps) -> None:
        for _ in range(steps):
            self.world.step()

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def cancel(self, data) -> None:
        name = data.draw(st.sampled_from(sorted(self.requests)))
        if self.world.scheduler.cancel(name):
            self.cancelled.add(name)

    @invariant()
    def books_agree(self) -> None:
        if hasattr(self, "world"):
            self.world.scheduler.check()

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        if self.in_flight is not None:
            self.commit()
        self.world.drain()
        assert self.world.target.num_held == 0
        assert self.world.draft is None or self.world.draft.num_held == 0
        assert set(self.world.finished) == set(self.requests), "every request is answered"
        for name, request in self.requests.items():
            right = expected_output(request.prompt_token_ids, SEED, request.params.max_tokens)
            got = self.world.tokens[name]
            assert got == (right[: len(got)] if name in self.cancelled else right)


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=150, stateful_step_count=40)
