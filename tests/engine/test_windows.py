"""Models that see a window of each context: pages that go, drafts that begin again, and the same tokens as ever."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from faser.engine.engine import Engine
from faser.limits import KeyWindow
from faser.policy import BatchView, Fixed, Policy
from faser.request import FinishReason
from tests.ahead import Ahead
from tests.engine.test_residency import Moving, Place
from tests.oracle import (
    HEADS,
    SEED,
    RandomGuesses,
    SometimesOverlap,
    World,
    expected_output,
    make_request,
)

WINDOW = KeyWindow(8, 2)
SIZES = {"max_model_len": 128, "num_pages": 128, "max_batch_tokens": 64}


class Pauses(Policy):
    """Nobody drafts in some steps of a row, then everybody does."""

    name = "pauses"

    def __init__(self, off: int, on: int = 3, length: int = 3) -> None:
        self.step, self.off, self.on, self.length = 0, off, on, length
        self.lags: list[int] = []

    def lengths(self, view: BatchView) -> np.ndarray:
        self.step += 1
        if self.step % (self.off + self.on) < self.off:
            return np.zeros_like(view.slots)
        self.lags += view.lag.tolist()
        return np.full_like(view.slots, self.length)


def run(world: World, prompts, max_tokens: int = 40) -> None:
    for i, prompt in enumerate(prompts):
        world.add(make_request(str(i), prompt, max_tokens))
    while world.scheduler.has_work:
        world.step()
        world.scheduler.check()
    for i, prompt in enumerate(prompts):
        assert world.tokens[str(i)] == expected_output(prompt, SEED, max_tokens)


@pytest.mark.parametrize("off", [0, 2, 7, 20])
@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("head", [None, *HEADS])
def test_a_draft_holds_no_more_pages_than_its_window_needs(off, caching, head):
    policy = Pauses(off)
    world = World(policy, draft_window=WINDOW, caching=caching, max_running=2, head=HEADS.get(head), **SIZES)
    behind = 3 if head != "block head" else HEADS[head].block_rows
    most = WINDOW.most_pages(4, rows=4 + behind)
    for i in range(2):
        world.add(make_request(str(i), [1, 2, i] * 16, 70))
    while world.scheduler.has_work:
        world.step()
        held = np.count_nonzero(world.draft._held_mask(), axis=1)
        assert held.max() <= most
    for i in range(2):
        assert world.tokens[str(i)] == expected_output([1, 2, i] * 16, SEED, 70)
    assert max(policy.lags) <= WINDOW.span
    assert sum(world.finished[str(i)].finish.stats.accepted for i in range(2)) > 0


def test_a_late_draft_computes_the_sinks_and_the_window():
    world = World(Fixed(2), draft_window=WINDOW, agreement=1.0, **SIZES)
    run(world, [[1] * 50], 8)
    drafting = [(int(plan.draft_start[0]), int(plan.draft_rows[0])) for plan in world.plans if plan.draft_rows[0]]
    assert drafting[:2] == [(0, 2), (51 + 1 - 8, 8)], "the sinks in one step, then the window of the next"
    assert world.executor.num_draft_rows < 30
    first = [plan.draft_first for plan in world.plans if plan.draft_first is not None]
    assert [starts.positions.tolist() for starts in first] == [[44]]


def test_a_window_beyond_the_context_changes_nothing():
    plans = []
    for window in (None, KeyWindow(125, 3)):
        world = World(Pauses(4), draft_window=window, **SIZES)
        run(world, [[1, 2, 3] * 9, [2] * 5])
        plans.append([(p.draft_start.tolist(), p.draft_rows.tolist(), p.lengths.tolist()) for p in world.plans])
        assert all(plan.draft_first is None for plan in world.plans)
    assert plans[0] == plans[1]


def test_a_pool_of_windows_serves_contexts_that_it_cannot_hold():
    window = KeyWindow(8, 2)
    most = window.most_pages(4, rows=4 + 3)
    world = World(Fixed(3), draft_window=window, num_draft_pages=2 * most, max_running=2, caching=False, **SIZES)
    run(world, [[1, 2] * 40, [2, 1] * 40], 30)
    stats = [world.finished[name].finish.stats for name in "01"]
    assert all(each.lengths[3] > each.steps / 2 for each in stats), "nobody lacks pages"


def test_a_pool_for_less_than_a_window_and_its_catch_up_still_lets_a_request_draft():
    world = World(Pauses(6), draft_window=WINDOW, num_draft_pages=5, max_running=1, caching=False, **SIZES)
    run(world, [[1, 2] * 30], 60)
    assert world.finished["0"].finish.stats.accepted > 0


def test_pages_of_a_windowed_draft_are_found_again_if_its_window_was_never_broken():
    world = World(Fixed(3), draft_window=WINDOW, max_running=1, **SIZES)
    prompt = [1, 2, 0] * 3
    run(world, [prompt], 60)
    rows = world.executor.num_draft_rows
    again = [*prompt, *world.tokens["0"]]
    world.add(make_request("again", again, 8))
    world.drain()
    assert world.tokens["again"] == expected_output(again, SEED, 8)
    assert world.executor.num_draft_rows - rows < 20, "the context came from the cache"


def test_pages_of_a_draft_that_began_again_are_not_published():
    world = World(Pauses(30, on=8), draft_window=WINDOW, max_running=1, **SIZES)
    run(world, [[1, 2, 0] * 10], 60)
    names = world.draft._published
    assert len(names) <= 1, "the page of the sinks at most"


@pytest.mark.parametrize("kind", ["plain", "lookup", "overlap", *HEADS])
@settings(max_examples=25)
@given(
    seed=st.integers(0, 10_000),
    agreement=st.sampled_from([0.0, 0.5, 1.0]),
    size=st.sampled_from([7, 8, 13]),
    sinks=st.sampled_from([0, 1, 5]),
    caching=st.booleans(),
    num_draft_pages=st.sampled_from([6, 14, 60]),
)
def test_planning_ahead_reads_no_page_that_has_gone(kind, seed, agreement, size, sinks, caching, num_draft_pages):
    window = KeyWindow(size, sinks)
    world = World(
        RandomGuesses(4, seed), agreement=agreement, draft_window=window,
        target_window=None if kind in HEADS else KeyWindow(size), num_pages=40, head=HEADS.get(kind),
        num_draft_pages=num_draft_pages, max_model_len=64, max_batch_tokens=24, caching=caching,
        looks_up=kind == "lookup", overlap=SometimesOverlap(seed) if kind == "overlap" else None,
    )  # fmt: skip
    engine = Engine(world.scheduler, Ahead(world.executor))
    random = np.random.default_rng(seed)
    prompts = [random.integers(0, 2, random.integers(1, 40)).tolist() for _ in range(5)]
    for i, prompt in enumerate(prompts):
        world.add(make_request(str(i), prompt, int(random.integers(1, 24))))
    for _ in range(2000):
        if not engine.has_work:
            break
        world.receive(engine.step())
        world.scheduler.check()
    for i, prompt in enumerate(prompts):
        got = world.tokens[str(i)]
        assert got == expected_output(prompt, SEED, len(got))
        assert str(i) in world.finished
    assert world.target.num_held == world.draft.num_held == 0


def test_a_windowed_draft_leaves_and_comes_back():
    moving = Moving(3, draft_window=WINDOW, max_model_len=128, num_pages=64, num_draft_pages=24, ahead=Ahead)
    for i in range(3):
        moving.add(make_request(str(i), [1, 2, i] * 12, 60))
    moving.step(8)
    moving.residency.leave()
    moving.until(Place.AWAY)
    moving.step(6)
    moving.residency.come_back()
    moving.until(Place.RESIDENT)
    before = moving.world.executor.num_draft_rows
    moving.drain()
    assert moving.world.executor.num_draft_rows > before
    for i in range(3):
        assert moving.world.tokens[str(i)] == expected_output([1, 2, i] * 12, SEED, 60)


def test_a_target_with_windows_gives_back_pages_while_it_runs():
    window = KeyWindow(8)
    world = World(Fixed(0), target_window=window, max_running=2, caching=False, **SIZES)
    for i in range(2):
        world.add(make_request(str(i), [1, i], 100))
    while world.scheduler.has_work:
        world.step()
        assert world.target.num_held <= 2 * window.most_pages(4)
    for i in range(2):
        assert world.tokens[str(i)] == expected_output([1, i], SEED, 100)


def test_what_left_the_window_is_still_found_in_the_cache():
    world = World(Fixed(0), target_window=KeyWindow(8), max_running=1, **SIZES)
    run(world, [[1, 2, 0] * 3], 60)
    again = [1, 2, 0] * 3 + world.tokens["0"]
    world.add(make_request("again", again, 8))
    world.drain()
    assert world.tokens["again"] == expected_output(again, SEED, 8)
    assert world.finished["again"].finish.stats.cached >= 64


def test_a_failed_step_makes_the_executor_learn_every_window_anew():
    world = World(Fixed(2), draft_window=WINDOW, max_running=1, **SIZES)
    world.add(make_request("a", [1] * 50, 30))
    for _ in range(4):
        world.step()
    assert world.executor.draft.first[0] > 0
    world.scheduler.abandon(FinishReason.FAILED)
    world.add(make_request("b", [1] * 4, 8))
    world.tokens["b"] = []
    while "b" not in world.finished and world.scheduler.has_work:
        world.step()
    assert world.executor.draft.first[0] == 0
    assert world.tokens["b"] == expected_output([1] * 4, SEED, 8)
