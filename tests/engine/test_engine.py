"""Planning ahead of results: the same tokens as planning behind them, whatever happens in between.

The executor is the oracle (tests/ahead.py), so a page that was freed, shared or written too early shows at once.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from faser.arrays import IntArray
from faser.engine.engine import AsyncExecutor, Engine
from faser.engine.pages import page_hash
from faser.engine.prompt_pace import CPU, StepPace
from faser.policy import BatchView, Fixed, Policy
from faser.policy.overlap import Overlap
from faser.request import FinishReason
from faser.step import Settling, StepPlan
from tests.ahead import Ahead
from tests.oracle import (
    HEADS,
    SEED,
    VOCABULARY,
    RandomGuesses,
    SometimesOverlap,
    World,
    expected_output,
    make_request,
)


class Sometimes(Policy):
    """Speculates in some steps only."""

    name = "sometimes"

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)

    def lengths(self, view: BatchView) -> IntArray:
        if self.random.random() < 0.6:
            return np.zeros(view.num_requests, dtype=np.int64)
        return self.random.integers(0, 4, view.num_requests)


def make_engine(policy, **sizes) -> tuple[Engine, World, Ahead]:
    world = World(policy, **sizes)
    executor = Ahead(world.executor)
    assert isinstance(executor, AsyncExecutor)
    return Engine(world.scheduler, executor), world, executor


def drain(engine: Engine, world: World) -> None:
    for _ in range(10_000):
        if not engine.has_work:
            return
        world.receive(engine.step())
        engine.scheduler.check()
    raise AssertionError("the engine did not finish")


@pytest.mark.parametrize("length", [0, 1, 4])
@pytest.mark.parametrize("agreement", [0.0, 0.6, 1.0])
def test_a_second_step_is_in_flight(length, agreement):
    engine, world, executor = make_engine(Fixed(length), agreement=agreement)
    for name in "abc":
        world.add(make_request(name, [1, 2, ord(name) % 5], 12))
    drain(engine, world)
    assert executor.most == 2
    for name in "abc":
        assert world.tokens[name] == expected_output([1, 2, ord(name) % 5], SEED, 12)
    assert engine.stats.emitted == 36
    assert world.target.num_held == 0


@pytest.mark.parametrize("agreement", [0.0, 1.0])
def test_a_plan_ahead_counts_on_all_drafts_and_is_settled_by_the_step_before_it(agreement):
    world = World(Fixed(2), agreement=agreement)
    world.add(make_request("a", [1, 2], 30))
    scheduler, executor = world.scheduler, world.executor
    for _ in range(2):  # the prompt, and a step that drafts
        plan = scheduler.plan()
        result = executor.execute(plan)
        if plan.lengths.any():
            break
        scheduler.commit(plan, result)
    scheduler.advance()
    ahead = scheduler.plan()
    assert ahead.unsettled.tolist() == [True]
    assert ahead.num_tokens.tolist() == (plan.num_tokens + 3).tolist()
    after = executor.execute(ahead)
    scheduler.commit(plan, result)
    scheduler.commit(ahead, after)
    world.receive(scheduler.take_ended())
    accepted = 2 if agreement else 0
    assert result.num_accepted.tolist() == after.num_accepted.tolist() == [accepted]
    assert scheduler.plan().num_tokens.tolist() == (plan.num_tokens + 2 * (accepted + 1)).tolist()


@pytest.mark.parametrize("ahead", [False, True])
def test_the_pace_learns_the_seconds_between_the_ends_of_steps(ahead):
    """The clock moves by one second each time it is read: twice for a plan, once when a step has ended."""
    world = World(Fixed(0), pace=StepPace(0.3, CPU))
    ticks = itertools.count()
    executor = Ahead(world.executor) if ahead else world.executor
    engine = Engine(world.scheduler, executor, clock=lambda: float(next(ticks)))
    world.add(make_request("a", [1] * 10, 20))
    drain(engine, world)
    pace = world.scheduler.drafts.pace.prompts
    assert pace.per_row == pytest.approx((4 if ahead else 2) / 10, rel=0.01), "ahead, it ends behind a second plan"
    assert pace.base == pytest.approx(3 if ahead else 2, rel=0.1)


def test_a_request_that_may_have_ended_goes_on_until_that_is_known():
    world = World(Fixed(2), agreement=0.0)
    world.add(make_request("a", [1, 2], 3))
    scheduler, executor = world.scheduler, world.executor
    prompt = scheduler.plan()
    scheduler.commit(prompt, executor.execute(prompt))
    plan = scheduler.plan()
    assert plan.lengths.tolist() == [1], "it may write two more tokens, one of them drafted"
    result = executor.execute(plan)
    scheduler.advance()
    ahead = scheduler.plan()
    assert ahead is not None
    assert ahead.lengths.tolist() == [0]
    last = executor.execute(ahead)
    for each, come in ((plan, result), (ahead, last)):
        world.receive(scheduler.commit(each, come).progress)
    assert world.finished["a"].finish.reason is FinishReason.LENGTH


def test_what_comes_after_a_stop_is_as_if_never_made():
    prompt = [1, 2, 3]
    whole = expected_output(prompt, SEED, 20)
    stop = whole[5]
    engine, world, executor = make_engine(Fixed(0))
    request = make_request("a", prompt, 20)
    engine.add(type(request)(**{**vars(request), "stop_ids": frozenset([stop])}))
    world.tokens["a"] = []
    drain(engine, world)
    assert executor.most == 2
    first = whole.index(stop)
    assert world.tokens["a"] == whole[: first + 1]
    assert world.finished["a"].finish.reason is FinishReason.STOP


def test_the_slot_of_an_ended_request_is_not_given_away_while_a_step_in_flight_has_it():
    engine, world, _ = make_engine(Fixed(0), max_running=2)
    whole = expected_output([1, 2, 3], SEED, 20)
    request = make_request("a", [1, 2, 3], 20)
    engine.add(type(request)(**{**vars(request), "stop_ids": frozenset([whole[2]])}))
    world.tokens["a"] = []
    for name in "bcd":
        world.add(make_request(name, [2, ord(name) % 5], 9))
    drain(engine, world)
    for name in "bcd":
        assert world.tokens[name] == expected_output([2, ord(name) % 5], SEED, 9)


def test_abandon_forgets_what_is_in_flight_and_the_engine_goes_on():
    engine, world, _ = make_engine(Fixed(0))
    world.add(make_request("a", [1, 2], 30))
    world.receive(engine.step())
    ended = engine.abandon()
    assert [item.finish.reason for item in ended if item.finish is not None] == [FinishReason.FAILED]
    engine.scheduler.check()
    assert not engine.has_work
    world.add(make_request("b", [1, 3], 10))
    drain(engine, world)
    assert world.tokens["b"] == expected_output([1, 3], SEED, 10)


@pytest.mark.parametrize("length", [1, 3, 6])
@pytest.mark.parametrize("agreement", [0.0, 0.9, 1.0])
def test_a_plan_made_ahead_leads_where_its_frontier_turns_out_void(length, agreement):
    """So that every step verifies as many drafts as without overlap, hit or miss."""
    engine, world, executor = make_engine(
        Fixed(length), agreement=agreement, overlap=Overlap(leads=True), max_batch_tokens=64
    )
    world.add(make_request("a", [1, 2, 3], 40))
    drain(engine, world)
    assert world.tokens["a"] == expected_output([1, 2, 3], SEED, 40)
    assert executor.most == 2
    (_, *seen), emitted = executor.seen, 1
    for plan, result in seen:
        if 40 - emitted > 3 * (length + 1):  # with fewer to come there may be no room for what was counted on
            assert plan.overlap.leads
            assert plan.unsettled.tolist() == [emitted > 1], "but for the first it is made ahead"
            assert result.num_verified.tolist() == [length]
            assert result.num_drafted[0] in (length + 1, 2 * length + 1)
        emitted += int(result.num_accepted[0]) + 1
    hits = [bool(result.hits[0]) for _, result in seen if result.num_drafted[0] > length]
    assert set(hits) == ({True, False} if 0 < agreement < 1 else {agreement == 1})


def test_a_plan_made_ahead_gives_no_lead_to_a_request_that_cannot_draft():
    """The draft has no pages for it: it goes on with one token."""
    plan = make_plan_ahead()
    missed = Settling(np.array([1]), np.array([False]), np.array([True]))
    led = plan.settle(missed)
    assert (led.frontier.tolist(), led.overlap.lead.tolist()) == ([0], [3])
    assert led.lengths.tolist() == (plan.lengths + 3).tolist()
    assert led.num_tokens[0] + led.judged[0] <= plan.num_tokens[0] + plan.judged[0], "pages are reserved for no more"
    assert led.draft_start[0] + led.draft_rows[0] == led.num_tokens[0]
    idle = replace(plan, draft_rows=0 * plan.draft_rows, lengths=0 * plan.lengths).settle(missed)
    assert (idle.frontier.tolist(), idle.judged.tolist(), idle.lengths.tolist()) == ([0], [0], [0])
    rides = replace(plan, overlap=replace(plan.overlap, leads=False)).settle(missed)
    assert (rides.judged.tolist(), rides.lengths.tolist()) == ([0], plan.lengths.tolist())
    hit = plan.settle(Settling(np.array([0]), np.array([False]), np.array([False])))
    assert (hit.frontier.tolist(), hit.overlap.lead.any(), hit.lengths.tolist()) == ([3], False, plan.lengths.tolist())


@pytest.mark.parametrize("most", [1, 2, 3, 4, 5, 8])
def test_a_lead_and_what_is_drafted_behind_it_are_no_more_than_a_request_allows(most):
    engine, world, executor = make_engine(Fixed(2), agreement=0.6, overlap=Overlap(leads=True), max_batch_tokens=64)
    world.add(make_request("a", [1, 2, 3], 40, max_draft=most))
    drain(engine, world)
    assert world.tokens["a"] == expected_output([1, 2, 3], SEED, 40)
    assert max(int(result.num_drafted[0]) for _, result in executor.seen) <= most


def make_plan_ahead() -> StepPlan:
    """Of one request, behind a step that leads: it counts on a frontier of three."""
    world = World(Fixed(3), overlap=Overlap(leads=True), agreement=1.0, max_batch_tokens=64)
    world.add(make_request("a", [1, 2, 3], 30))
    for _ in range(2):
        world.step()
    world.executor.execute(world.scheduler.plan())
    world.scheduler.advance()
    return world.scheduler.plan()


@pytest.mark.parametrize("step", range(1, 7))
def test_a_request_that_leads_is_cancelled_between_two_steps(step):
    engine, world, _ = make_engine(Fixed(2), agreement=0.5, overlap=Overlap(leads=True))
    for name in "abc":
        world.add(make_request(name, [1, 2, ord(name) % 5], 14))
    for _ in range(step):
        world.receive(engine.step())
    assert engine.cancel("b")
    drain(engine, world)
    assert world.finished["b"].finish.reason is FinishReason.CANCELLED
    for name in "abc":
        whole = expected_output([1, 2, ord(name) % 5], SEED, 14)
        assert world.tokens[name] == (whole[: len(world.tokens[name])] if name == "b" else whole)
    assert (world.target.num_held, world.draft.num_held) == (0, 0)


MAX_LEN = 26


def hashes_of(tokens, page_size: int) -> set[bytes]:
    """The names of all full pages of a text."""
    found, name = set(), b""
    for start in range(0, len(tokens) - page_size + 1, page_size):
        name = page_hash(name, np.array(tokens[start : start + page_size], dtype=np.int64))
        found.add(name)
    return found


@st.composite
def workloads(draw):
    """Requests with when they arrive, where they stop and when they are cancelled, by step."""
    requests = []
    for number in range(draw(st.integers(1, 9))):
        prompt = draw(st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=14))
        most = MAX_LEN - len(prompt)
        max_tokens = draw(st.one_of(st.just(most), st.integers(1, most)))
        stop = draw(st.one_of(st.none(), st.integers(0, VOCABULARY - 1)))
        cancelled = draw(st.one_of(st.none(), st.integers(0, 25)))
        requests.append((str(number), prompt, max_tokens, draw(st.integers(0, 12)), stop, cancelled))
    return requests


def test_the_random_overlap_of_these_tests_makes_every_kind_of_step():
    """What the workloads below are served with."""
    found = set()
    for seed in range(12):
        engine, world, executor = make_engine(Fixed(3), overlap=SometimesOverlap(seed), max_batch_tokens=60)
        for name in "abcd":
            engine.add(make_request(name, [1, 2, ord(name) % 5], 20))
            world.tokens[name] = []
            world.receive(engine.step())
        drain(engine, world)
        for plan, _ in executor.seen:
            if plan.overlap is None:
                continue
            overlap = plan.overlap
            leads = overlap.lead > 0
            rides = overlap.beside & (plan.lengths > 0) & (plan.frontier == 0) & ~leads
            kinds = {
                "a lead": leads.any(),
                "a lead with nothing behind it": (leads & (overlap.chunk_of(plan.lengths) == 0)).any(),
                "a lead beside a frontier": leads.any() and plan.frontier.any(),
                "a lead beside one that rides": leads.any() and rides.any(),
                "a lead that is not settled": (leads & plan.unsettled).any(),
                "a frontier that may become a lead": (overlap.leads & plan.unsettled & (plan.frontier > 0)).any(),
                "a frontier without overlap": not overlap.beside and plan.frontier.any(),
                "a frontier that is not settled": (plan.unsettled & (plan.frontier > 0)).any(),
            }
            found |= {kind for kind, is_there in kinds.items() if is_there}
    assert found == set(kinds)


@pytest.mark.parametrize("kind", ["off", "sometimes", "random", "fixed"])
@settings(max_examples=150)
@given(
    workload=workloads(), num_pages=st.integers(9, 40), num_draft_pages=st.integers(4, 30), seed=st.integers(0, 99),
    caching=st.booleans(), max_batch_tokens=st.integers(4, 14), stops=st.booleans(),
    mechanism=st.sampled_from(["plain", "lookup", "overlap", *HEADS]),
)  # fmt: skip
def test_any_workload_gets_its_tokens_and_loses_no_page(
    kind, workload, num_pages, num_draft_pages, seed, caching, max_batch_tokens, stops, mechanism
):
    policy = {"off": Fixed(0), "sometimes": Sometimes(seed), "random": RandomGuesses(3), "fixed": Fixed(3)}[kind]
    engine, world, _ = make_engine(
        policy, num_pages=num_pages, num_draft_pages=num_draft_pages, max_running=4,
        max_batch_tokens=max_batch_tokens, max_model_len=MAX_LEN, caching=caching, head=HEADS.get(mechanism),
        overlap=SometimesOverlap(seed) if mechanism == "overlap" else None, looks_up=mechanism == "lookup",
    )  # fmt: skip
    world.executor.stops = stops
    expected, texts = {}, []
    step = 0
    while workload or engine.has_work:
        for item in [each for each in workload if each[3] <= step]:
            name, prompt, max_tokens, _, stop, cancelled = item
            request = make_request(name, prompt, max_tokens)
            stops = frozenset() if stop is None else frozenset([stop])
            engine.add(type(request)(**{**vars(request), "stop_ids": stops}))
            world.tokens[name] = []
            whole = expected_output(prompt, SEED, max_tokens)
            texts.append([*prompt, *whole])
            end = next((i + 1 for i, token in enumerate(whole) if token in stops), len(whole))
            expected[name] = (whole[:end], cancelled)
            workload = [each for each in workload if each is not item]
        for name, (_, cancelled) in expected.items():
            if cancelled == step:
                engine.cancel(name)
        world.receive(engine.step())
        engine.scheduler.check()
        step += 1
        assert step < 5000
    for name, (whole, _) in expected.items():
        reason = world.finished[name].finish.reason
        if reason is FinishReason.CANCELLED:
            assert world.tokens[name] == whole[: len(world.tokens[name])]
        else:
            assert world.tokens[name] == whole
    assert world.target.num_held == 0
    assert world.draft.num_held == 0
    named = set().union(*(hashes_of(text, world.target.page_size) for text in texts))
    assert set(world.target._published) | set(world.draft._published) <= named, (
        "a page was published under a wrong name"
    )
