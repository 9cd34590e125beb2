"""Drafting overlaps with verification: a guess may come to nothing, the output is that of plain decoding."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from faser.config import EngineOptions
from faser.errors import ConfigError
from faser.models.transformer import Transformer
from faser.policy import Fixed
from faser.policy.overlap import Overlap
from faser.runtime.build import build_engine
from faser.runtime.cpu_device import CpuDevice
from faser.types import Settling
from tests.oracle import SEED, RandomLengths, RandomStops, SometimesOverlap, World, expected_output, make_request
from tests.test_exactness import assert_equal, make_engine, make_requests, reference, serve
from tests.tiny import CONFIGS, make_draft

# ── who drafts and verifies what ─────────────────────────────────────────────────────────────────────────────────────


def play(chunk: int, agrees, max_tokens: int = 24) -> World:
    world = World(Fixed(chunk), overlap=Overlap(), max_batch_tokens=64)
    world.executor.agrees = agrees
    world.add(make_request("a", [1, 2, 3], max_tokens))
    world.drain()
    assert world.tokens["a"] == expected_output([1, 2, 3], SEED, max_tokens)
    return world


@pytest.mark.parametrize("chunk", [1, 2, 3, 4, 5, 6])
def test_a_draft_that_is_always_right_keeps_the_pipeline_full(chunk):
    """From the second step on every one verifies what the one before drafted, but for the token it knew already."""
    plans = play(chunk, lambda position: True).plans[1:]
    assert all(plan.overlaps for plan in plans if plan.lengths.any() or plan.frontier.any())
    full = [plan for plan in plans[1:] if plan.lengths[0] == chunk]
    assert full
    assert all(plan.frontier[0] == chunk - 1 for plan in full)
    assert all(plan.draft_rows[0] == 1 for plan in full), "the draft goes on where it stopped"
    assert len(plans) == 1 + -(-22 // chunk), "a chunk a step, and one token to begin"


@pytest.mark.parametrize("chunk", [1, 3, 6])
def test_a_draft_that_is_always_wrong_costs_no_step_and_no_token(chunk):
    plans = play(chunk, lambda position: False).plans
    assert len(plans) == 24, "as without drafts"
    assert not any(plan.frontier.any() for plan in plans)


@pytest.mark.parametrize("chunk", [1, 2, 3, 4, 5, 6])
@pytest.mark.parametrize("period", [2, 3, 4, 7])
def test_right_and_then_wrong(chunk, period):
    """After a miss the request rides the next verification with one row, and drafts again meanwhile."""
    plans = play(chunk, lambda position: position % period != 0).plans
    for plan, following in pairwise(plans[1:]):
        first, behind = int(plan.num_tokens[0]), int(plan.num_tokens[0] + plan.frontier[0])
        right = all(position % period for position in range(first, behind + 1))
        if not plan.lengths[0]:
            assert following.frontier[0] == 0
        elif right:
            assert following.frontier[0] == plan.lengths[0] - 1
            assert following.num_tokens[0] == behind + 1
        else:
            assert following.frontier[0] == 0
            assert following.num_tokens[0] <= behind + 1


def test_nobody_waits_for_the_miss_of_another():
    world = World(Fixed(3), overlap=Overlap(), max_batch_tokens=64, max_running=2)
    draft = world.executor._draft
    world.executor._draft = lambda plan, i: set_agreement(world, float(plan.slots[i] == 0)) or draft(plan, i)
    world.add(make_request("right", [1, 2, 3], 30))
    world.add(make_request("wrong", [3, 2, 1], 30))
    world.drain()
    for name, prompt in (("right", [1, 2, 3]), ("wrong", [3, 2, 1])):
        assert world.tokens[name] == expected_output(prompt, SEED, 30)
    both = [plan for plan in world.plans[2:] if plan.slots.size == 2 and plan.lengths.all()]
    assert both
    assert all(plan.frontier.tolist() == [2, 0] for plan in both)


def set_agreement(world: World, agreement: float) -> None:
    world.executor.agreement = agreement


def test_a_step_without_overlap_verifies_the_frontier_and_what_is_drafted_behind_it():
    world = World(Fixed(3), overlap=Overlap(), agreement=1.0, max_batch_tokens=64)
    world.add(make_request("a", [1, 2, 3], 30))
    for _ in range(3):
        world.step()
    world.scheduler.overlap = None
    world.step()
    plan = world.plans[-1]
    assert not plan.overlaps
    assert (int(plan.frontier[0]), int(plan.lengths[0]), int(plan.judged[0])) == (2, 3, 5)
    world.drain()
    assert world.tokens["a"] == expected_output([1, 2, 3], SEED, 30)


@pytest.mark.parametrize("planned", [True, False])
def test_a_miss_is_known_to_a_plan_made_ahead_and_to_the_next_one(planned):
    """All of the frontier is accepted, and the first token behind it is not what was drafted."""
    world = World(Fixed(3), overlap=Overlap(), agreement=1.0, max_batch_tokens=64)
    scheduler = world.scheduler
    world.add(make_request("a", [1, 2, 3], 30))
    for _ in range(2):
        world.step()
    plan = scheduler.plan()
    assert plan.frontier.tolist() == [2]
    world.executor.agreement = 0.0
    result = world.executor.execute(plan)
    assert (result.num_accepted.tolist(), result.hits.tolist()) == ([2], [False])
    scheduler.advance()
    ahead = scheduler.plan() if planned else None
    world.receive(scheduler.commit(plan, result))
    if ahead is not None:
        assert ahead.frontier.tolist() == [2], "as if it had been a hit"
        world.executor.agreement = 1.0
        world.receive(scheduler.commit(ahead, world.executor.execute(ahead)))
        settled = scheduler._num_tokens[0] - 1  # it had one row, and its drafts begin anew
        assert world.tokens["a"][-1:] == expected_output([1, 2, 3], SEED, int(settled) - 2)[-1:]
        following = scheduler.plan()
        assert following.frontier.tolist() == [2], "a hit again"
    else:
        following = scheduler.plan()
        assert following.frontier.tolist() == [0]
        assert following.draft_start[0] + following.draft_rows[0] == following.num_tokens[0]
    world.receive(scheduler.commit(following, world.executor.execute(following)))
    world.drain()
    assert world.tokens["a"] == expected_output([1, 2, 3], SEED, 30)


def test_a_settled_plan_verifies_no_guess_that_came_to_nothing():
    world = World(Fixed(3), overlap=Overlap(), agreement=1.0, max_batch_tokens=64)
    world.add(make_request("a", [1, 2, 3], 30))
    for _ in range(3):
        world.step()
    plan = replace(world.plans[-1], unsettled=np.array([True]))
    missed = plan.settle(Settling(np.array([1]), np.array([False]), np.array([True])))
    assert missed.num_tokens[0] == plan.num_tokens[0] - 1
    assert missed.frontier.tolist() == [0]
    assert missed.draft_start[0] == missed.num_tokens[0] - 1
    assert missed.draft_rows.tolist() == [1]
    hit = plan.settle(Settling(np.array([0]), np.array([False]), np.array([False])))
    assert (hit.frontier, hit.draft_start, hit.draft_rows) == (plan.frontier, plan.draft_start, plan.draft_rows)


def test_what_a_request_may_draft_holds_for_both_kinds_of_steps():
    for overlap in (Overlap(), SometimesOverlap(3)):
        world = World(Fixed(6), overlap=overlap, agreement=1.0, max_batch_tokens=64)
        world.add(make_request("a", [1, 2, 3], 30, max_draft=2))
        world.drain()
        assert max(int(plan.judged.max()) for plan in world.plans) <= 2
        assert max(int(plan.lengths.max()) for plan in world.plans) == 2


# ── the models ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module", params=CONFIGS)
def pair(request):
    target = Transformer.random(CONFIGS[request.param], 0, std=0.3)
    requests = make_requests(target.config)
    return target, make_draft(target), requests, reference(target, requests)


def always_wrong(target: Transformer) -> Transformer:
    """Says the token behind the one it means."""
    draft = Transformer.random(target.config, 0, std=0.3)
    draft.head = target.head.roll(1, 0)
    return draft


POLICIES = {
    **{f"chunks of {chunk}": lambda chunk=chunk: Fixed(chunk) for chunk in range(1, 7)},
    "any length": RandomLengths,
    "stops": RandomStops,
}


@pytest.mark.parametrize("policy", POLICIES)
def test_the_tokens_are_those_of_plain_decoding(pair, policy):
    target, draft, requests, right = pair
    engine = make_engine(target, draft, POLICIES[policy](), overlap="on")
    outcome = serve(engine, requests)
    assert_equal(outcome, right)
    stats = engine.stats
    assert 0 < stats.hits < stats.chunks
    if policy != "chunks of 1":  # whose one token is checked without a row
        assert 0 < stats.accepted < stats.verified < stats.drafted
    for name, each in outcome.stats.items():
        assert each.steps + each.accepted == len(outcome.tokens[name]), "every step emits accepted + 1 bonus"


@pytest.mark.parametrize("kind", ["right", "wrong"])
def test_drafts_that_are_always_right_or_wrong(pair, kind):
    target, _, requests, right = pair
    plain = [request for request in requests if request.id == "greedy with end token ignored"]
    engine = make_engine(target, target if kind == "right" else always_wrong(target), Fixed(3), overlap="on")
    assert serve(engine, plain).tokens[plain[0].id] == right.tokens[plain[0].id]
    assert engine.stats.hits == (engine.stats.chunks if kind == "right" else 0)


def test_with_arrivals_prompts_in_pieces_preemption_and_cancellation(pair):
    target, draft, requests, right = pair
    arrivals = {request.id: 2 * number for number, request in enumerate(requests)}
    engine = make_engine(target, draft, RandomLengths(seed=3), max_batch_tokens=14, num_pages=24, overlap="on")
    outcome = serve(engine, requests, arrivals, cancels={"hot": 30})
    assert engine.scheduler.num_preemptions > 0
    assert engine.stats.hits > 0
    for name, tokens in outcome.tokens.items():
        assert tokens == right.tokens[name][: len(tokens)]
        assert name == "hot" or len(tokens) == len(right.tokens[name])


def test_pages_in_the_prefix_cache_hold_no_guess(pair):
    target, draft, requests, right = pair
    engine = make_engine(target, draft, Fixed(4), overlap="on")
    assert_equal(serve(engine, requests), right)
    rows = engine.stats.context_rows
    assert_equal(serve(engine, requests), right)
    assert engine.stats.context_rows - rows < rows


def test_where_there_is_one_lane_it_is_refused_and_a_typo_too():
    target = Transformer.random(CONFIGS["llama3"], 0)

    class OneLane(CpuDevice):
        name, can_overlap = "narrow", False

    with pytest.raises(ConfigError, match="overlap=on: narrow drafts and verifies one after the other"):
        build_engine(target, target, EngineOptions(policy=Fixed(2), overlap="on", num_pages=40), device=OneLane())
    with pytest.raises(ConfigError, match="overlap='yes'"):
        EngineOptions(overlap="yes")
