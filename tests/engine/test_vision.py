"""Pictures in the scheduler: encoded once, in time, in bounded room, and never taken for another picture."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from faser.engine.engine import Engine
from faser.engine.prompt_pace import Pacing, StepPace
from faser.engine.vision import BLOCK_ROWS, EncodedGrids
from faser.errors import EngineError, InvalidRequest, RequestTooLong
from faser.limits import VisionLimits
from faser.policy import Fixed
from faser.request import FinishReason, Request
from faser.step import StepPlan, StepSeconds
from faser.vision import Grid, Vision
from tests.ahead import Ahead
from tests.oracle import (
    SEED,
    RandomLengths,
    World,
    expected_output,
    make_grid,
    make_picture_request,
    make_request,
    seen_prompt,
)

SIZES = {"max_running": 4, "max_batch_tokens": 24, "max_model_len": 128, "num_pages": 128, "num_draft_pages": 128}


def make_world(buffer_rows: int = 64, max_positions: int = 256, **sizes) -> World:
    policy = sizes.pop("policy", Fixed(2))
    return World(policy, vision=VisionLimits(buffer_rows, max_positions), **{**SIZES, **sizes})


def right_output(request: Request) -> list[int]:
    prompt = seen_prompt(request.prompt_token_ids, request.vision)
    return expected_output(prompt, SEED, request.params.max_tokens)


def serve(world: World, *requests: Request) -> None:
    """Serve all, and compare what they got with what they should get."""
    for request in requests:
        world.add(request)
    world.drain()
    world.scheduler.check()
    for request in requests:
        assert world.tokens[request.id] == right_output(request)


def test_a_picture_between_texts_is_seen_whole():
    world = make_world()
    serve(world, make_picture_request("a", [[1, 2], make_grid(7, 20), [3, 1], make_grid(8, 9), [2]]))
    assert world.executor.num_encoded == 2


def test_one_picture_in_several_prompts_is_encoded_once():
    world = make_world(caching=False)
    grid = make_grid(7, 20)
    serve(world, *(make_picture_request(str(i), [[i], grid, [1]]) for i in range(6)))
    assert world.executor.num_encoded == 1
    assert world.scheduler.vision.num_found == 5


def test_windows_of_a_video_encode_each_grid_once():
    world = make_world(buffer_rows=10 * BLOCK_ROWS)
    grids = [make_grid(i, 9) for i in range(12)]
    for first in range(0, 9, 2):
        serve(world, make_picture_request(str(first), [[1], *grids[first : first + 4], [2, 3]]))
    assert world.executor.num_encoded == 12


def test_the_least_recently_used_picture_makes_room():
    world = make_world(buffer_rows=2 * BLOCK_ROWS, caching=False)
    first, second, third = (make_grid(i, BLOCK_ROWS) for i in range(3))
    for name, grid in enumerate((first, second, first, third, first)):
        serve(world, make_picture_request(str(name), [[name], grid]))
    assert world.executor.num_encoded == 3
    serve(world, make_picture_request("second again", [[3], second]))
    assert world.executor.num_encoded == 4


def test_a_prompt_with_more_pictures_than_fit_is_served_piece_by_piece():
    world = make_world(buffer_rows=2 * BLOCK_ROWS)
    serve(world, make_picture_request("long", [part for i in range(6) for part in ([1, i % 4], make_grid(i, 13))]))
    assert world.executor.num_encoded == 6


def test_a_picture_is_not_encoded_long_before_its_rows():
    world = make_world(buffer_rows=100 * BLOCK_ROWS)
    world.add(make_picture_request("a", [[1] * 60, make_grid(7, 20)]))
    world.step()
    assert world.executor.num_encoded == 0
    world.drain()
    assert world.executor.num_encoded == 1


def test_a_cached_prompt_encodes_nothing():
    world = make_world(buffer_rows=2 * BLOCK_ROWS)
    parts = [[1, 2], make_grid(7, 20), [3] * 8]
    serve(world, make_picture_request("a", parts))
    serve(world, make_picture_request("other", [make_grid(9, 2 * BLOCK_ROWS), [1]]))  # takes all room
    serve(world, make_picture_request("b", parts))
    assert world.executor.num_encoded == 2
    assert world.finished["b"].finish.stats.cached == 28


@pytest.mark.parametrize(
    ("other", "cached"),
    [
        ({"grid": make_grid(7, 8)}, 16),
        ({"grid": make_grid(8, 8)}, 4),  # other pixels
        ({"grid": make_grid(7, 8), "shift": 3}, 4),  # other positions
    ],
    ids=["same", "pixels", "positions"],
)
def test_pages_are_shared_by_prompts_with_the_same_picture_at_the_same_positions(other, cached):
    world = make_world(max_batch_tokens=32)
    serve(world, make_picture_request("a", [[1] * 4, make_grid(7, 8), [2] * 5]))
    serve(world, make_picture_request("b", [[1] * 4, other.pop("grid"), [2] * 5], **other))
    assert world.finished["b"].finish.stats.cached == cached


def test_text_before_a_picture_is_shared_with_prompts_without_one():
    world = make_world()
    serve(world, make_request("text", [1, 2, 3, 1] * 4))
    serve(world, make_picture_request("picture", [[1, 2, 3, 1] * 3, make_grid(7, 8), [2]]))
    assert world.finished["picture"].finish.stats.cached == 12


def test_a_grid_is_named_by_its_pixels_its_shape_and_what_it_keeps():
    patches = np.zeros((4, 3, 1, 1, 1), dtype=np.uint8)
    kept = [Grid(patches, 2, 4, 1, kept=np.array(each)) for each in ([0, 1, 2, 3], [0, 1, 2, 4])]
    grids = [make_grid(0, 4), make_grid(1, 4), Grid(patches, 2, 2, 1), *kept]
    assert len({grid.name for grid in grids}) == len(grids)
    assert make_grid(0, 4).name == grids[0].name


def test_output_positions_go_on_behind_the_largest_position_of_the_prompt():
    positions = np.array([[0, 0, 0], [1, 1, 1], [1, 1, 2], [3, 3, 3]])
    vision = Vision((make_grid(1, 2),), np.array([1]), positions)
    assert vision.rotary_positions(6)[:, 0].tolist() == [0, 1, 1, 3, 4, 5]
    assert Vision(vision.grids, vision.starts, None).rotary_positions(3)[:, 2].tolist() == [0, 1, 2]


# ── what cannot be served ────────────────────────────────────────────────────────────────────────────────────────────


def test_a_model_without_eyes_refuses_pictures():
    world = World(Fixed(2), **SIZES)
    with pytest.raises(InvalidRequest, match="cannot see"):
        world.add(make_picture_request("a", [[1], make_grid(7, 2)]))


def test_a_picture_that_can_never_fit_is_refused_with_the_numbers():
    world = make_world(buffer_rows=2 * BLOCK_ROWS + 5)
    with pytest.raises(RequestTooLong, match="a picture of 33 tokens, but encoded pictures have room for 32"):
        world.add(make_picture_request("a", [make_grid(7, 33)]))


def test_positions_beyond_the_model_are_refused():
    world = make_world(max_positions=64)
    with pytest.raises(RequestTooLong, match="reach position 65, but the model has 64"):
        world.add(make_picture_request("a", [[1], make_grid(7, 6)], max_tokens=8, shift=50))


@pytest.mark.parametrize(
    "wrong",
    [
        {"positions": np.full((9, 3), -(2**62))},
        {"positions": np.zeros((8, 3), dtype=np.int64)},
        {"starts": np.array([4])},
        {"starts": np.array([-1])},
        {"shift": -1},
    ],
    ids=["negative", "too few", "behind the end", "before the start", "shift"],
)
def test_places_and_positions_that_do_not_fit_are_refused(wrong):
    request = make_picture_request("a", [[1], make_grid(7, 6), [2, 3]])
    with pytest.raises(InvalidRequest, match="do not fit the prompt"):
        make_world().add(replace(request, vision=replace(request.vision, **wrong)))


def test_a_prompt_that_shows_nothing_is_served():
    world = make_world()
    serve(world, replace(make_request("a", [1, 2, 3]), vision=Vision((), np.zeros(0, dtype=np.int64), None)))


def test_prompts_cut_to_one_row_do_not_exceed_the_rows_of_a_step():
    """The oracle refuses larger steps. One picture is encoded a step, the other prompts wait behind one token."""
    world = make_world(policy=Fixed(6), max_running=12, max_batch_tokens=16, num_pages=256, num_draft_pages=256)
    for i in range(2):
        world.add(make_request(f"text {i}", [1, 2, i], 40))
    for _ in range(4):
        world.step()
    world.scheduler.drafts.pace = StepPace(1.0, Pacing(300.0, 32, 1))
    serve(world, *(make_picture_request(str(i), [[i % 4], make_grid(10 + i, 1)], 4) for i in range(9)))


@pytest.mark.parametrize("shift", [0, 5])
def test_an_answer_is_found_in_the_cache_by_the_next_turn(shift):
    world = make_world(policy=Fixed(0), max_batch_tokens=64)
    parts = [[1, 2, 3], make_grid(9, 9)]
    serve(world, make_picture_request("a", parts, 21, shift=shift))
    serve(world, make_picture_request("b", [*parts, [*world.tokens["a"], 1, 2]], 2, shift=shift))
    assert world.finished["b"].finish.stats.cached == 32


# ── ends and failures ────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_cancelled_request_releases_its_pictures():
    world = make_world(buffer_rows=2 * BLOCK_ROWS)
    request = make_picture_request("a", [[1], make_grid(1, 30), [2]])
    world.add(request)
    world.step()
    world.scheduler.cancel("a")
    serve(world, make_picture_request("b", [[1], make_grid(2, 32), [2]]))


def test_after_a_failed_step_nothing_counts_as_encoded():
    world = make_world()
    parts = [[1], make_grid(7, 20), [2]]
    world.add(make_picture_request("a", parts))
    world.scheduler.plan()  # never executed
    world.receive(world.scheduler.abandon(FinishReason.FAILED))
    world.scheduler.check()
    serve(world, make_picture_request("b", parts))
    assert world.executor.num_encoded == 1


def test_lost_blocks_are_noticed():
    grids = EncodedGrids(4 * BLOCK_ROWS)
    grids.add(make_grid(1, 20))
    grids.check()
    grids._free.pop()
    with pytest.raises(EngineError, match="lost"):
        grids.check()


# ── seconds ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def seconds_of(plan: StepPlan) -> StepSeconds:
    patches = sum(len(grid.patches) for grid in plan.vision.grids) if plan.vision is not None else 0
    return StepSeconds(verify=0.001 + 0.0001 * int(plan.num_rows.sum()), encode=0.001 * patches)


def total_seconds(plan: StepPlan) -> float:
    spent = seconds_of(plan)
    return spent.total + spent.encode


def test_pictures_do_not_hold_up_a_stream_by_more_than_one_grid_or_the_bound():
    world = make_world(
        buffer_rows=40 * BLOCK_ROWS, max_batch_tokens=128, pace=StepPace(0.04, Pacing(40.0, 8, 1)), policy=Fixed(0)
    )
    world.add(make_request("stream", [1, 2], 100))
    requests = [make_picture_request(str(i), [[i], *(make_grid(10 * i + j, 10) for j in range(4))]) for i in range(3)]
    for request in requests:
        world.add(request)
    while world.scheduler.has_work:
        plan = world.scheduler.plan()
        spent = seconds_of(plan)
        assert total_seconds(plan) <= 0.045, "a grid takes 10 ms, the bound of a step is 40 ms"
        world.receive(world.scheduler.commit(plan, world.executor.execute(plan)).progress)
        world.scheduler.drafts.pace.learn(plan, spent, spent.total + spent.encode)
        world.plans.append(plan)
    most = max(len(plan.vision.writes) for plan in world.plans if plan.vision is not None)
    assert most == 2, "half of the spare seconds go to the encoder once its speed is known"
    assert world.scheduler.drafts.pace.encoding.seconds(100, 10 * 10**2) == pytest.approx(0.1, rel=0.2)


def test_the_encoder_does_not_teach_the_pace_of_prompts():
    paces = []
    for encode in (0.0, 5.0):
        pace = StepPace(1.0, Pacing(1e3, 8, 1))
        world = make_world()
        world.add(make_picture_request("a", [[1], make_grid(7, 10), [2]]))
        pace.learn(world.scheduler.plan(), StepSeconds(verify=0.5, encode=encode), 0.5 + encode)
        paces.append(pace.prompts.per_row)
    assert paces[0] == pytest.approx(paces[1])


# ── anything may happen ──────────────────────────────────────────────────────────────────────────────────────────────


PARTS = st.one_of(st.integers(1, 14), st.tuples(st.integers(0, 4), st.integers(1, 30)))


@settings(max_examples=80)
@given(
    prompts=st.lists(st.lists(PARTS, min_size=1, max_size=5), min_size=1, max_size=8),
    blocks=st.integers(2, 5),
    num_pages=st.integers(40, 60),
    max_running=st.integers(1, 4),
    spare_rows=st.integers(0, 20),
    caching=st.booleans(),
    ahead=st.booleans(),
    cancelled=st.sets(st.integers(0, 40)),
)  # fmt: skip
def test_every_prompt_ends_with_the_right_output_in_any_room(
    prompts, blocks, num_pages, max_running, spare_rows, caching, ahead, cancelled
):
    """Prompts of text (a number of tokens) and grids (pixel, tokens); in step i of `cancelled` an open one goes."""
    world = make_world(
        buffer_rows=blocks * BLOCK_ROWS, num_pages=num_pages, max_running=max_running, caching=caching,
        max_batch_tokens=max_running + spare_rows, max_model_len=160, policy=RandomLengths(3, 1),
    )  # fmt: skip
    engine = Engine(world.scheduler, Ahead(world.executor) if ahead else world.executor)
    requests = {}
    for name, parts in enumerate(prompts):
        made = [[1] * part if isinstance(part, int) else make_grid(*part) for part in parts]
        if any(isinstance(part, Grid) for part in made):
            requests[str(name)] = make_picture_request(str(name), made, 5)
        else:
            requests[str(name)] = make_request(str(name), [token for part in made for token in part], 5)
        world.add(requests[str(name)])
    gone = set()
    for step in range(5000):
        if not engine.has_work:
            break
        if step in cancelled and (open_ones := sorted(requests.keys() - world.finished.keys())):
            gone |= {open_ones[0]} if engine.cancel(open_ones[0]) else set()
        world.receive(engine.step())
        world.scheduler.check()
    assert set(world.finished) == set(requests)
    assert world.target.num_held == 0
    for name, request in requests.items():
        right, got = right_output(request), world.tokens[name]
        assert got == (right[: len(got)] if name in gone else right)
