"""The draft leaves and comes back at any moment: outputs, pages and memory against the oracle (tests/oracle.py)."""

import logging

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from faser.engine.engine import Engine
from faser.engine.residency import FIRST_RETRY, Place, Residency
from faser.errors import MoveError, RequestTooLong
from tests.ahead import Ahead, Late
from tests.oracle import (
    SEED,
    Never,
    OracleDraftMemory,
    RandomLengths,
    SometimesOverlap,
    World,
    expected_output,
    make_request,
)


class Lengths(RandomLengths):
    """Up to `most` tokens at random; the draft moves when the test says so."""

    def residency_rule(self):
        return Never()


class Hesitant(Late):
    """Sometimes no step can be planned ahead."""

    def __init__(self, inner) -> None:
        super().__init__(inner)
        self.random = np.random.default_rng(0)

    def may_run_ahead(self, plan) -> bool:
        return bool(self.random.random() < 0.5)


class Moving:
    """An engine over the oracle whose draft moves when told to. Requests draft up to `most` tokens."""

    def __init__(self, most=3, seed=0, *, pages_gained=16, parts=1, ahead=None, **options) -> None:
        self.world = World(Lengths(most, seed), pages_gained=pages_gained, **options)
        self.now = 0.0
        pool = self.world.target
        self.memory = OracleDraftMemory(self.world.executor, pool.base_pages, pages_gained, parts)
        self.world.executor.target.back(pool.base_pages)
        self.residency = Residency(self.world.scheduler, self.memory, lambda: self.now)
        executor = self.world.executor if ahead is None else ahead(self.world.executor)
        self.engine = Engine(self.world.scheduler, executor, lambda: self.now, residency=self.residency)

    @property
    def place(self) -> Place:
        return self.residency.place

    def add(self, request) -> None:
        self.world.add(request)

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            self.now += 0.01
            if self.engine.has_work:
                self.world.receive(self.engine.step())
            else:
                self.engine.use_idle_moment()

    def until(self, place: Place, most: int = 200) -> None:
        for _ in range(most):
            if self.place is place:
                return
            self.step()
        raise AssertionError(f"the draft is {self.place}, not {place}")

    def drain(self, most: int = 5000) -> None:
        for _ in range(most):
            if not self.engine.has_work:
                return
            self.step()
        raise AssertionError("the engine did not finish its requests")

    def assert_exact(self, *requests) -> None:
        for request in requests:
            right = expected_output(request.prompt_token_ids, SEED, request.params.max_tokens)
            assert self.world.tokens[request.id] == right, request.id


def requests_of(count, prompt=8, max_tokens=16, seed=0):
    random = np.random.default_rng(seed)
    return [make_request(str(i), random.integers(0, 3, size=prompt), max_tokens) for i in range(count)]


WAYS = pytest.mark.parametrize("ahead", [None, Ahead, Late])


@WAYS
def test_output_does_not_change_when_the_draft_leaves_and_returns(ahead):
    moving = Moving(ahead=ahead, parts=3)
    requests = requests_of(8, max_tokens=24)
    for request in requests:
        moving.add(request)
    moving.step(3)
    drafted = moving.engine.stats.drafted
    assert drafted
    moving.residency.leave()
    moving.until(Place.AWAY)
    away = moving.engine.stats.drafted
    moving.step(4)
    assert moving.engine.stats.drafted == away, "nobody drafts while the draft is away"
    assert moving.world.target.num_pages == 64 + 16
    moving.residency.come_back()
    moving.until(Place.RESIDENT)
    assert moving.world.target.num_pages == 64
    moving.drain()
    assert moving.engine.stats.drafted > away
    moving.assert_exact(*requests)


@WAYS
def test_pages_in_the_drafts_memory_are_used_and_moved_back(ahead):
    moving = Moving(num_pages=12, pages_gained=12, max_running=4, max_batch_tokens=64, ahead=ahead)
    moving.residency.leave()
    moving.until(Place.AWAY)
    requests = requests_of(4, prompt=12, max_tokens=9)
    for request in requests:
        moving.add(request)
    while not moving.engine.has_work or moving.world.target.num_held <= 14:
        moving.step()
    assert moving.world.scheduler.num_running == 4
    moving.drain()
    short = requests_of(2, prompt=12, max_tokens=20, seed=9)
    for i, request in enumerate(short):
        moving.add(make_request(f"short {i}", request.prompt_token_ids, 20))
    moving.step(2)
    moving.residency.come_back()
    moving.until(Place.RESIDENT)
    moving.drain()
    moving.assert_exact(*requests)
    for i, request in enumerate(short):
        right = expected_output(request.prompt_token_ids, SEED, 20)
        assert moving.world.tokens[f"short {i}"] == right


def test_a_moved_page_keeps_its_name_and_its_sharers():
    moving = Moving(0, num_pages=6, pages_gained=20, max_batch_tokens=64)
    pool = moving.world.target
    prompt = [1, 0, 1, 1, 0, 0, 1, 0, 1]
    moving.residency.leave()
    moving.until(Place.AWAY)
    filler = make_request("filler", [2] * 20, 3)  # takes the first pages
    moving.add(filler)
    moving.step()
    first, second = make_request("first", prompt, 6), make_request("second", prompt, 6)
    moving.add(first)
    moving.step()
    moving.add(second)
    moving.step()
    while "filler" not in moving.world.finished:
        moving.step()
    beyond = pool.table[:, :2][pool.count >= 2]
    assert (beyond >= 6).any()
    moving.residency.come_back()
    moving.until(Place.RESIDENT)
    assert pool.num_beyond == 0
    moving.drain()
    moving.assert_exact(filler, first, second)
    hits = moving.world.scheduler.prefixes.num_hits
    moving.add(make_request("third", prompt, 2))
    moving.drain()
    assert moving.world.scheduler.prefixes.num_hits == hits + 8, "the cached pages are found where they are now"


def test_the_return_waits_for_room_and_preempts_nobody():
    moving = Moving(0, num_pages=8, pages_gained=8, max_batch_tokens=64)
    moving.residency.leave()
    moving.until(Place.AWAY)
    requests = requests_of(4, prompt=10, max_tokens=5)
    for request in requests:
        moving.add(request)
    moving.step(2)
    assert moving.world.target.num_held > 8
    moving.residency.come_back()
    moving.step()
    assert moving.world.target.num_held > 8, "there is no room yet"
    assert moving.place is not Place.LOADING
    moving.drain()
    assert moving.world.scheduler.num_preemptions == 0
    moving.assert_exact(*requests)
    moving.residency.come_back()  # where the first attempt was given up
    moving.until(Place.RESIDENT)


def test_the_return_is_given_up_when_requests_need_the_pages():
    moving = Moving(0, num_pages=8, pages_gained=8, max_batch_tokens=64)
    moving.residency.leave()
    moving.until(Place.AWAY)
    filler, other = make_request("filler", [2] * 28, 3), make_request("other", [1] * 12, 12)
    moving.add(filler)
    moving.step()
    moving.add(other)
    while "filler" not in moving.world.finished:
        moving.step()
    moving.residency.come_back()
    assert moving.place is Place.COMPACTING
    late = make_request("late", [0] * 29, 2)
    moving.add(late)
    moving.step()
    assert moving.place is Place.AWAY
    assert moving.world.target.num_pages == 16
    moving.drain()
    moving.assert_exact(filler, other, late)


def test_a_request_must_fit_into_the_pool_with_the_draft():
    moving = Moving(num_pages=6, pages_gained=20)
    moving.residency.leave()
    moving.until(Place.AWAY)
    with pytest.raises(RequestTooLong, match="6 pages"):
        moving.add(make_request("large", [1] * 20, 5))


@pytest.mark.parametrize("when", ["leaving", "loading"])
def test_a_failed_move_leaves_the_engine_serving_and_is_tried_again(when, caplog):
    moving = Moving()
    requests = requests_of(3, max_tokens=40)
    for request in requests:
        moving.add(request)
    moving.step(3)
    moving.memory.failures = 2 if when == "leaving" else 0
    moving.residency.leave()
    with caplog.at_level(logging.ERROR):
        moving.step(2)
        if when == "loading":
            assert moving.place is Place.AWAY
            moving.memory.failures = 2
            moving.residency.come_back()
            moving.step(3)
        assert moving.place is Place.LOADING
        assert "for a test" in moving.residency.stats.failure
        moving.step(4)
        moving.now += FIRST_RETRY
        moving.step(2)  # the second failure
        assert moving.residency.stats.failure is not None
    assert len(caplog.records) == 1, "it is said once"
    drafted = moving.engine.stats.drafted
    moving.step(2)
    assert moving.engine.stats.drafted == drafted
    assert moving.world.target.num_pages == moving.world.target.base_pages
    moving.now += 2 * FIRST_RETRY
    moving.until(Place.RESIDENT)
    assert moving.residency.stats.failure is None
    moving.drain()
    assert moving.engine.stats.drafted > drafted
    moving.assert_exact(*requests)


def test_pages_of_an_abandoned_step_are_offered_to_nobody():
    moving = Moving(0, num_pages=6, pages_gained=20, max_batch_tokens=64)
    moving.residency.leave()
    moving.until(Place.AWAY)
    prompt = [1, 0, 1, 1, 0, 0, 1, 0, 1]
    filler, other = make_request("filler", [2] * 20, 2), make_request("other", prompt, 8)
    moving.add(filler)
    moving.step()
    moving.add(other)
    while len(moving.world.tokens["other"]) < 4:
        moving.step()
    moving.world.target.shrink(6)
    assert moving.world.scheduler.plan().moves is not None
    moving.world.receive(moving.engine.abandon())
    again = make_request("again", [*prompt, *moving.world.tokens["other"]], 3)
    moving.add(again)
    moving.drain()
    moving.assert_exact(again)


def test_the_draft_leaves_while_steps_that_share_pages_are_in_flight():
    moving = Moving(ahead=Hesitant, num_pages=40)
    requests = [make_request(str(i), [0, 1, 1, 0] * 3 + [i % 3], 12) for i in range(8)]
    for request in requests:
        moving.add(request)
    for _ in range(12):
        moving.step(2)
        moving.residency.leave()
        moving.step(2)
        moving.world.scheduler.check()
        moving.residency.come_back()
    moving.drain()
    moving.assert_exact(*requests)


def test_idle_work_waits_for_the_draft():
    moving = Moving()
    calls = []
    moving.engine._on_idle = lambda: bool(calls.append(None))
    moving.residency.leave()
    moving.until(Place.AWAY)
    assert not moving.engine.use_idle_moment()
    assert not calls
    moving.residency.bring_back()
    moving.engine.use_idle_moment()
    assert len(calls) == 1


def test_a_draft_that_cannot_be_brought_back_says_so():
    moving = Moving()
    moving.residency.leave()
    moving.memory.failures = 1
    with pytest.raises(MoveError, match="for a test"):
        moving.residency.bring_back()


def test_a_request_whose_cached_pages_are_the_only_free_ones_lacks_pages():
    moving = Moving(0, num_pages=8, max_batch_tokens=64)
    prompt = [1, 0, 1, 1] * 4
    moving.add(make_request("first", prompt, 1))
    moving.drain()
    moving.add(make_request("long", [2] * 14, 6))
    moving.step()
    moving.add(make_request("again", [*prompt, *[0] * 8], 2))
    moving.step()
    scheduler = moving.world.scheduler
    assert (scheduler.num_running, scheduler.num_waiting) == (1, 1)
    assert scheduler.lacks_pages


def test_a_step_that_fails_with_moves_in_flight_offers_no_unknown_page():
    moving = Moving(0, num_pages=6, pages_gained=20, max_batch_tokens=64)
    pool, scheduler = moving.world.target, moving.world.scheduler
    moving.residency.leave()
    moving.until(Place.AWAY)
    filler, other = make_request("filler", [2] * 20, 2), make_request("other", [1, 0, 1, 1, 0, 0, 1, 0, 1], 6)
    moving.add(filler)
    moving.step()
    moving.add(other)
    moving.step()
    while "filler" not in moving.world.finished:
        moving.step()
    pool.shrink(6)
    plan = scheduler.plan()
    assert plan.moves is not None
    moving.engine.abandon()
    scheduler.check()
    assert pool.find([pool._hash_of[p] for p in pool._hash_of if p in plan.moves.destinations]) == (0, 0)


def test_figures_say_where_the_draft_is():
    moving = Moving()
    moving.now = 5.0
    moving.residency.leave("memory is short")
    moving.until(Place.AWAY)
    moving.now += 2.0
    stats = moving.residency.stats
    assert (stats.is_resident, stats.moves, stats.pages_gained, stats.num_pages) == (False, 1, 16, 80)
    assert stats.away_seconds == pytest.approx(2.0, abs=0.1)
    moving.residency.come_back()
    moving.until(Place.RESIDENT)
    stats = moving.residency.stats
    assert (stats.is_resident, stats.moves, stats.pages_gained, stats.num_pages) == (True, 2, 0, 64)
    away = stats.away_seconds
    moving.now += 7.0
    assert moving.residency.stats.away_seconds == away


class ResidencyMachine(RuleBasedStateMachine):
    """After any sequence of requests, steps, cancels, moves and failures nothing is lost and every output is right."""

    @initialize(
        num_pages=st.integers(10, 16),
        num_draft_pages=st.integers(4, 16),
        pages_gained=st.integers(1, 12),
        parts=st.integers(1, 3),
        max_running=st.integers(1, 5),
        agreement=st.sampled_from([0.0, 0.5, 1.0]),
        caching=st.booleans(),
        overlaps=st.booleans(),
        ahead=st.sampled_from([None, Ahead, Late, Hesitant]),
        seed=st.integers(0, 99),
    )
    def start(
        self, num_pages, num_draft_pages, pages_gained, parts, max_running, agreement, caching, overlaps, ahead, seed
    ) -> None:
        self.moving = Moving(
            5,
            seed,
            num_pages=num_pages,
            num_draft_pages=num_draft_pages,
            pages_gained=pages_gained,
            parts=parts,
            max_running=max_running,
            max_batch_tokens=max_running + 10,
            max_model_len=40,
            agreement=agreement,
            caching=caching,
            overlap=SometimesOverlap(seed) if overlaps else None,
            ahead=ahead,
        )
        self.requests = {}
        self.cancelled = set()

    @rule(
        shared=st.integers(0, 3),
        own=st.lists(st.integers(0, 1), min_size=1, max_size=12),
        max_tokens=st.integers(1, 16),
    )
    def add(self, shared, own, max_tokens) -> None:
        prompt = [0, 1, 1, 0] * shared + own
        request = make_request(str(len(self.requests)), prompt, max_tokens)
        self.moving.add(request)
        self.requests[request.id] = request

    @rule(steps=st.integers(1, 6))
    def run(self, steps) -> None:
        self.moving.step(steps)

    @rule()
    def leave(self) -> None:
        self.moving.residency.leave()

    @rule()
    def come_back(self) -> None:
        self.moving.residency.come_back()

    @rule(failures=st.integers(1, 2))
    def fail(self, failures) -> None:
        self.moving.memory.failures = failures

    @rule(seconds=st.sampled_from([FIRST_RETRY, 300.0]))
    def wait(self, seconds) -> None:
        self.moving.now += seconds

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def cancel(self, data) -> None:
        name = data.draw(st.sampled_from(sorted(self.requests)))
        if self.moving.engine.cancel(name):
            self.cancelled.add(name)

    @precondition(lambda self: self.requests)
    @rule()
    def abandon(self) -> None:
        self.cancelled |= set(self.requests) - set(self.moving.world.finished)
        self.moving.world.receive(self.moving.engine.abandon())

    @invariant()
    def books_agree(self) -> None:
        if hasattr(self, "moving"):
            self.moving.world.scheduler.check()

    def teardown(self) -> None:
        if not hasattr(self, "moving"):
            return
        moving, pool = self.moving, self.moving.world.target
        moving.memory.failures = 0
        moving.now += 1000.0
        moving.drain()
        assert set(moving.world.finished) == set(self.requests), "every request is answered"
        if moving.place is not Place.RESIDENT:
            moving.until(Place.AWAY if moving.place in (Place.LEAVING, Place.AWAY) else Place.RESIDENT)
            moving.residency.come_back()
            moving.until(Place.RESIDENT)
        assert pool.num_held == 0
        assert pool.num_pages == pool.base_pages == moving.world.executor.target.num_backed
        assert moving.world.draft.num_held == 0
        for name, request in self.requests.items():
            right = expected_output(request.prompt_token_ids, SEED, request.params.max_tokens)
            got = moving.world.tokens[name]
            assert got == (right[: len(got)] if name in self.cancelled else right)


TestResidencyMachine = ResidencyMachine.TestCase
TestResidencyMachine.settings = settings(max_examples=150, stateful_step_count=40)
