"""Contexts that sessions keep: what is taken is not computed, what is not taken is, and no page is lost."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from faser.engine.engine import Engine
from faser.engine.residency import Place
from faser.errors import InvalidRequest
from faser.limits import VisionLimits
from faser.policy import Fixed
from faser.request import FinishReason, Request, Reuse
from tests.ahead import Ahead
from tests.engine.test_residency import Moving
from tests.oracle import RandomLengths, World, make_grid, make_picture_request, make_request

SIZES = {"max_running": 3, "max_batch_tokens": 16, "max_model_len": 128, "num_pages": 96, "num_draft_pages": 96}


def make_world(**sizes) -> World:
    return World(sizes.pop("policy", Fixed(0)), vision=VisionLimits(64, 256), **{**SIZES, **sizes})


def window(name: str, first: int, count: int = 4, taken: list[int] | None = None, session: str = "s") -> Request:
    """Grids first … first + count - 1 of a stream, between texts; `taken`: those whose KV comes from the window before,
    which began one grid earlier."""
    size = 6
    request = make_picture_request(name, [[1, 2, 3], *(make_grid(first + i, size) for i in range(count)), [2, 1]], 4)
    ranges = [3 + size * (grid - first) for grid in taken or []]
    if not ranges:
        return replace(request, session=session)
    starts = np.array(ranges)
    return replace(request, session=session, reuse=Reuse(starts, starts + size, starts + size))


def rows_of(world: World, first_plan: int = 0) -> int:
    return sum(int(plan.num_rows.sum()) for plan in world.plans[first_plan:])


def serve(world: World, request: Request) -> int:
    """Rows that a request took."""
    before = len(world.plans)
    world.add(request)
    world.drain()
    world.scheduler.check()
    assert world.finished[request.id].finish.reason is FinishReason.LENGTH
    return rows_of(world, before)


def test_only_what_is_not_taken_is_computed():
    world = make_world()
    whole = serve(world, window("a", 0))
    assert whole == 3 + 24 + 2 + 3
    part = serve(world, window("b", 1, taken=[1, 2, 3]))
    assert part == whole - 18
    assert world.finished["b"].finish.stats.reused == 18
    assert world.finished["a"].finish.stats.reused == 0


def test_grids_that_are_taken_are_not_encoded():
    world = make_world(max_running=1)
    serve(world, window("a", 0))
    world.scheduler.vision.grids.clear()
    serve(world, window("b", 1, taken=[1, 2, 3]))
    assert world.executor.num_encoded == 5


def test_an_anchor_between_taken_grids_is_computed():
    world = make_world()
    whole = serve(world, window("a", 0))
    assert serve(world, window("b", 1, taken=[1, 3])) == whole - 12


def test_the_pages_of_such_a_request_are_offered_to_nobody():
    world = make_world()
    serve(world, window("a", 0))
    serve(world, window("b", 1, taken=[1, 2, 3]))
    world.scheduler.retained.drop("s")
    serve(world, replace(window("c", 1), session=None))
    assert world.finished["c"].finish.stats.cached == 0, "an exact request computes for itself"


def test_a_session_keeps_one_context_and_gives_it_up_when_told():
    world = make_world()
    for i in range(3):
        serve(world, window(str(i), i))
    assert len(world.scheduler.retained) == 1
    world.scheduler.retained.drop("s")
    assert world.target.num_held == 0
    world.scheduler.retained.drop("never there")


def test_without_a_kept_context_everything_is_computed():
    world = make_world()
    assert serve(world, window("b", 1, taken=[1, 2, 3])) == 3 + 24 + 2 + 3
    assert world.finished["b"].finish.stats.reused == 0


def test_sessions_do_not_take_from_each_other():
    world = make_world()
    serve(world, window("a", 0, session="one"))
    serve(world, window("b", 1, taken=[1, 2, 3], session="two"))
    assert world.finished["b"].finish.stats.reused == 0


def test_kept_contexts_make_room_for_requests():
    world = make_world(num_pages=20)
    serve(world, window("a", 0))
    assert world.target.num_held > 0
    serve(world, make_request("large", [1] * 70, 4))
    assert len(world.scheduler.retained) == 0
    assert world.scheduler.num_preemptions == 0


def test_kept_contexts_hold_at_most_half_of_the_pages():
    world = make_world(num_pages=40)
    for i in range(6):
        serve(world, window(str(i), i, session=str(i)))
    assert 0 < world.target.num_held <= 20


def test_cancelled_and_failed_requests_keep_nothing():
    world = make_world()
    world.add(window("a", 0))
    world.step()
    world.scheduler.cancel("a")
    world.drain()
    assert len(world.scheduler.retained) == 0
    serve(world, window("b", 0))
    world.scheduler.plan()
    world.scheduler.abandon(FinishReason.FAILED)
    assert len(world.scheduler.retained) == 0
    assert world.target.num_held == 0


def test_an_idle_engine_gives_contexts_up_for_the_draft_that_comes_back():
    moving = Moving(0, pages_gained=16, max_running=3, max_batch_tokens=64, max_model_len=128, num_pages=32,
                    num_draft_pages=32)  # fmt: skip
    moving.residency.leave()
    moving.until(Place.AWAY)
    for i in range(2):
        moving.add(make_request(f"large {i}", [i] * 81, 2))
    moving.add(replace(make_request("s", [1, 2, 3] * 10, 2), session="s"))
    moving.drain()
    (kept,) = moving.world.scheduler.retained._contexts.values()
    assert kept.pages.max() >= moving.world.target.base_pages, "the context lies in the draft's memory"
    moving.residency.come_back()
    moving.residency.bring_back()
    assert moving.residency.place is Place.RESIDENT
    assert len(moving.world.scheduler.retained) == 0


@pytest.mark.parametrize(
    "reuse",
    [
        Reuse(np.array([5]), np.array([5]), np.array([0])),
        Reuse(np.array([5, 4]), np.array([6, 9]), np.array([0, 0])),
        Reuse(np.array([5]), np.array([29]), np.array([0])),
        Reuse(np.array([5]), np.array([9]), np.array([-1])),
        Reuse(np.zeros(0, int), np.zeros(0, int), np.zeros(0, int)),
    ],
    ids=["empty", "order", "to the end", "negative", "none"],
)
def test_ranges_that_cannot_be_meant_are_refused(reuse):
    with pytest.raises(InvalidRequest, match="reuse"):
        make_world().add(replace(window("a", 0), reuse=reuse))


def test_a_context_that_is_too_short_is_not_taken():
    world = make_world()
    serve(world, window("a", 0))
    request = replace(window("b", 1), reuse=Reuse(np.array([3]), np.array([9]), np.array([60])))
    serve(world, request)
    assert world.finished["b"].finish.stats.reused == 0


@settings(max_examples=60)
@given(
    events=st.lists(
        st.tuples(st.integers(0, 2), st.sampled_from(["window", "text", "cancel", "drop", "step"]), st.integers(0, 7)),
        min_size=1,
        max_size=25,
    ),
    num_pages=st.integers(24, 60),
    ahead=st.booleans(),
    spare_rows=st.integers(0, 12),
)
def test_pages_are_conserved_whatever_sessions_do(events, num_pages, ahead, spare_rows):
    world = make_world(num_pages=num_pages, max_batch_tokens=3 + spare_rows, policy=RandomLengths(3, 1))
    engine = Engine(world.scheduler, Ahead(world.executor) if ahead else world.executor)
    first = [0, 0, 0]
    for number, (session, event, detail) in enumerate(events):
        name = f"{session}/{number}"
        if event == "window":
            taken = [first[session] + i for i in range(4) if detail >> min(i, 2) & 1 and i < 3] if number else None
            world.add(window(name, first[session], taken=taken, session=str(session)))
            first[session] += 1
        elif event == "text":
            world.add(make_request(name, [1] * (1 + 5 * detail), 3))
        elif event == "cancel":
            open_ones = sorted(world.tokens.keys() - world.finished.keys())
            if open_ones:
                engine.cancel(open_ones[0])
        elif event == "drop":
            world.scheduler.retained.drop(str(session))
        for _ in range(detail):
            if engine.has_work:
                world.receive(engine.step())
        world.scheduler.check()
    for _ in range(3000):
        if not engine.has_work:
            break
        world.receive(engine.step())
    assert set(world.finished) == set(world.tokens)
    while world.scheduler.retained.drop_oldest():
        pass
    world.scheduler.check()
    assert world.target.num_held == 0
