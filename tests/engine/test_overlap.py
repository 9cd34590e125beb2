"""Drafting overlaps with verification: a guess may come to nothing, the output is that of plain decoding."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from faser.arrays import IntArray
from faser.build import build_engine
from faser.config import EngineOptions
from faser.engine.engine import Engine
from faser.errors import ConfigError
from faser.models.transformer import Transformer
from faser.policy import Fixed
from faser.policy.base import Outcome
from faser.policy.overlap import Overlap
from faser.request import FinishReason
from faser.runtime.cpu.device import CpuDevice
from faser.step import Settling, StepPlan
from tests.oracle import SEED, RandomLengths, RandomStops, SometimesOverlap, World, expected_output, make_request
from tests.test_exactness import assert_equal, make_engine, make_requests, reference, serve
from tests.tiny import CONFIGS, make_draft

# ── who drafts and verifies what ─────────────────────────────────────────────────────────────────────────────────────


def play(chunk: int, agrees, max_tokens: int = 24, leads: bool = False) -> World:
    world = World(Fixed(chunk), overlap=Overlap(leads=leads), max_batch_tokens=64)
    world.executor.agrees = agrees
    world.add(make_request("a", [1, 2, 3], max_tokens))
    world.drain()
    assert world.tokens["a"] == expected_output([1, 2, 3], SEED, max_tokens)
    return world


@pytest.mark.parametrize("chunk", [1, 2, 3, 4, 5, 6])
def test_a_draft_that_is_always_right_keeps_the_pipeline_full(chunk):
    """From the second step on every one verifies what the one before drafted, but for the token it knew already."""
    plans = play(chunk, lambda position: True).plans[1:]
    assert all(plan.drafts_beside for plan in plans if plan.has_drafts)
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
def test_after_a_hit_there_is_a_frontier_and_after_a_miss_none(chunk, period):
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


def play_both(chunk: int, leads: bool = False) -> list[StepPlan]:
    """One request whose drafts are always right, and one whose are always wrong: the plans in which both draft."""
    world = World(Fixed(chunk), overlap=Overlap(leads=leads), max_batch_tokens=64, max_running=2)
    draft = world.executor._draft
    world.executor._draft = lambda plan, i: set_agreement(world, float(plan.slots[i] == 0)) or draft(plan, i)
    world.add(make_request("right", [1, 2, 3], 30))
    world.add(make_request("wrong", [3, 2, 1], 30))
    world.drain()
    for name, prompt in (("right", [1, 2, 3]), ("wrong", [3, 2, 1])):
        assert world.tokens[name] == expected_output(prompt, SEED, 30)
    return [plan for plan in world.plans if plan.slots.size == 2 and plan.lengths.all()]


def test_no_request_waits_for_the_miss_of_another():
    first, *plans = play_both(3)
    assert first.frontier.tolist() == [0, 0]
    assert plans
    assert all(plan.frontier.tolist() == [2, 0] for plan in plans)


def set_agreement(world: World, agreement: float) -> None:
    world.executor.agreement = agreement


@pytest.mark.parametrize(("length", "drafted"), [(1, 0), (2, 0), (3, 1), (5, 3)])
def test_a_step_without_overlap_verifies_the_frontier_and_as_many_behind_it_as_its_length_leaves(length, drafted):
    world = World(Fixed(3), overlap=Overlap(), agreement=1.0, max_batch_tokens=64)
    world.add(make_request("a", [1, 2, 3], 30))
    for _ in range(3):
        world.step()
    world.scheduler.overlap, world.scheduler.drafts.policy = None, Fixed(length)
    world.step()
    plan = world.plans[-1]
    assert not plan.drafts_beside
    assert (int(plan.frontier[0]), int(plan.lengths[0]), int(plan.judged[0])) == (2, drafted, 2 + drafted)
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
    world.receive(scheduler.commit(plan, result).progress)
    if ahead is not None:
        assert ahead.frontier.tolist() == [2], "as if it had been a hit"
        world.executor.agreement = 1.0
        committed = scheduler.commit(ahead, world.executor.execute(ahead))
        world.receive(committed.progress)
        assert committed.plan.frontier.tolist() == [0]
        assert world.tokens["a"] == expected_output([1, 2, 3], SEED, int(committed.plan.num_tokens[0]) - 2)
        following = scheduler.plan()
        assert following.frontier.tolist() == [2], "a hit again"
    else:
        following = scheduler.plan()
        assert following.frontier.tolist() == [0]
        assert following.draft_start[0] + following.draft_rows[0] == following.num_tokens[0]
    world.receive(scheduler.commit(following, world.executor.execute(following)).progress)
    world.drain()
    assert world.tokens["a"] == expected_output([1, 2, 3], SEED, 30)


def test_a_frontier_is_cut_to_the_rows_that_newly_decoding_requests_leave():
    """One request has a frontier of 14 in steps of 16 rows when 15 prompts of one token arrive."""
    world = World(Fixed(15), overlap=Overlap(), agreement=1.0, max_batch_tokens=16, max_running=16, max_model_len=128,
                  num_pages=512, num_draft_pages=512)  # fmt: skip
    requests = [make_request(str(i), [1, i % 5, 2][: 1 + 2 * (i == 0)], 60) for i in range(16)]
    world.add(requests[0])
    for _ in range(3):
        world.step()
    assert world.plans[-1].frontier.tolist() == [14]
    for request in requests[1:]:
        world.add(request)
    world.step()
    plan = world.plans[-1]
    assert plan.slots.size == 16
    assert (plan.num_rows + plan.judged).sum() == 16, "31 rows with all of the frontier"
    world.drain()
    for request in requests:
        assert world.tokens[request.id] == expected_output(request.prompt_token_ids, SEED, 60)


def test_a_settled_plan_verifies_no_void_frontier():
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


def test_what_a_request_may_draft_holds_for_all_kinds_of_steps():
    for overlap in (Overlap(), Overlap(leads=True), SometimesOverlap(3)):
        world = World(Fixed(6), overlap=overlap, agreement=1.0, max_batch_tokens=64)
        world.add(make_request("a", [1, 2, 3], 30, max_draft=2))
        world.drain()
        assert max(int(plan.judged.max()) for plan in world.plans) <= 2
        assert max(int(plan.lengths.max()) for plan in world.plans) == 2


# ── leads ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def lead_array(plan: StepPlan) -> IntArray:
    return np.zeros_like(plan.lengths) if plan.overlap is None else plan.overlap.lead


def lead_of(plan: StepPlan) -> int:
    return int(lead_array(plan)[0])


def left_of(plan: StepPlan, max_tokens: int = 24) -> int:
    """Tokens that the request of `play` has yet to get."""
    return max_tokens - (int(plan.num_tokens[0]) - 3)


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 6])
def test_behind_its_first_lead_a_draft_that_is_always_right_needs_none(length):
    _, first, *plans = play(length, lambda position: True, leads=True).plans
    assert (lead_of(first), first.frontier[0], first.lengths[0]) == (length, 0, 2 * length + 1)
    assert not any(lead_array(plan).any() for plan in plans)
    full = [plan for plan in plans if plan.lengths[0] == length + 1]
    assert full
    assert all(plan.frontier[0] == length for plan in full)
    assert all(plan.draft_rows[0] == 1 for plan in full), "the draft goes on where it stopped"
    assert all(plan.overlap.leads for plan in full), "it would lead if its frontier were void"
    assert 1 + len(plans) == -(-23 // (length + 1)), "as many tokens a step as without overlap"


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 6])
def test_a_draft_that_is_always_wrong_leads_every_step_and_costs_no_token(length):
    prompt, *plans = play(length, lambda position: False, leads=True).plans
    assert prompt.overlap is None
    assert len(plans) == 23, "a token each"
    for plan in plans:
        assert plan.frontier.tolist() == [0]
        assert lead_of(plan) == min(length, left_of(plan) - 1)
        assert plan.judged.tolist() == [lead_of(plan)]
        assert plan.lengths[0] == min(2 * length + 1, left_of(plan) - 1)


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 6])
@pytest.mark.parametrize("period", [2, 3, 4, 7])
def test_after_a_miss_there_is_a_lead_and_after_a_hit_a_frontier(length, period):
    """So that every step verifies as many as without overlap, as far as there are tokens to come."""
    found = set()
    plans = play(length, lambda position: position % period != 0, leads=True).plans
    for plan, following in pairwise(plans[1:]):
        first, behind = int(plan.num_tokens[0]), int(plan.num_tokens[0] + plan.judged[0])
        most = min(length, left_of(following) - 1)
        if all(position % period for position in range(first, behind + 1)):
            assert (following.frontier[0], lead_of(following)) == (most, 0)
            assert following.num_tokens[0] == behind + 1
        else:
            assert (following.frontier[0], lead_of(following)) == (0, most)
            assert following.num_tokens[0] <= behind + 1
        if most:
            found.add("lead" if lead_of(following) else "frontier")
    assert found == ({"lead", "frontier"} if length + 1 < period else {"lead"})


@pytest.mark.parametrize("length", [1, 3, 6])
def test_who_missed_leads_and_the_others_keep_their_frontier(length):
    first, *plans = play_both(length, leads=True)
    assert lead_array(first).tolist() == [length, length]
    full = [plan for plan in plans if plan.lengths.tolist() == [length + 1, 2 * length + 1]]
    assert full
    assert all(plan.frontier.tolist() == [length, 0] for plan in full)
    assert all(lead_array(plan).tolist() == [0, length] for plan in full)


@pytest.mark.parametrize(("overlap", "frontier", "lead"), [(Overlap(), [2, 0], [0, 3]), (None, [0, 0], [3, 3])])
@pytest.mark.parametrize("agreement", [0.0, 1.0])
def test_a_plan_made_ahead_leads_where_there_can_be_no_frontier(overlap, frontier, lead, agreement):
    """Behind a step that overlaps, and behind one that does not; where a frontier turns out void it leads as well."""
    world = World(Fixed(3), overlap=overlap, agreement=1.0, max_batch_tokens=64, max_running=2)
    scheduler = world.scheduler
    world.add(make_request("a", [1, 2, 3], 30))
    for _ in range(2):
        world.step()
    world.add(make_request("b", [3, 2, 1], 30))
    plan = scheduler.plan()
    world.executor.agreement = agreement
    result = world.executor.execute(plan)
    scheduler.advance()
    scheduler.overlap = Overlap(leads=True)
    ahead = scheduler.plan()
    assert ahead.unsettled.tolist() == [True, False]
    assert (ahead.frontier.tolist(), lead_array(ahead).tolist()) == (frontier, lead)
    assert ahead.overlap.leads
    later = world.executor.execute(ahead)
    world.receive(scheduler.commit(plan, result).progress)
    settled, progress = scheduler.commit(ahead, later)
    assert settled.judged.tolist() == [max(frontier[0], lead[0]), 3]
    assert settled.overlap.chunk_of(settled.lengths).tolist() == [4, 4]
    assert settled.frontier.tolist() == (frontier if agreement else [0, 0])
    world.receive(progress)
    world.drain()
    assert world.tokens == {"a": expected_output([1, 2, 3], SEED, 30), "b": expected_output([3, 2, 1], SEED, 30)}


@pytest.mark.parametrize("agreement", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("length", [1, 3, 6])
def test_leads_end_with_the_tokens_asked_for(length, agreement):
    world = World(Fixed(length), overlap=Overlap(leads=True), agreement=agreement, max_running=5, max_batch_tokens=99)
    ends = {str(most): 3 + most for most in range(1, 16)}
    for name, end in ends.items():
        world.add(make_request(name, [1, 2, int(name) % 5], end - 3))
    slots = {}
    while world.scheduler.has_work:
        world.step()
        plan = world.plans[-1]
        slots |= {new.slot: 3 + new.params.max_tokens for new in plan.admitted}
        last = np.array([slots[slot] for slot in plan.slots.tolist()])
        drafts = plan.lengths > 0
        assert (plan.num_tokens + plan.frontier + plan.lengths < last)[drafts].all(), "the last token is not drafted"
    for name, end in ends.items():
        assert world.tokens[name] == expected_output([1, 2, int(name) % 5], SEED, end - 3)


@pytest.mark.parametrize("flying", [True, False])
def test_a_request_that_leads_is_cancelled_and_leaves_no_page(flying):
    world = World(Fixed(3), overlap=Overlap(leads=True), agreement=0.0, max_batch_tokens=64, max_running=2)
    for name in "ab":
        world.add(make_request(name, [1, 2, ord(name) % 5], 20))
    for _ in range(3):
        world.step()
    plan = world.scheduler.plan()
    assert lead_array(plan).tolist() == [3, 3]
    result = world.executor.execute(plan)
    if flying:
        assert world.scheduler.cancel("a")
    world.receive(world.scheduler.commit(plan, result).progress)
    if not flying:
        assert world.scheduler.cancel("a")
    world.drain()
    world.scheduler.check()
    assert world.finished["a"].finish.reason is FinishReason.CANCELLED
    assert world.tokens["b"] == expected_output([1, 2, ord("b") % 5], SEED, 20)
    assert (world.target.num_held, world.draft.num_held) == (0, 0)


@pytest.mark.parametrize("num_pages", [9, 12, 16])
def test_without_pages_for_a_lead_no_request_drafts(num_pages):
    """Where a lead would take the last pages nobody drafts; every output is right all the same."""
    sizes = {"num_pages": num_pages, "num_draft_pages": 16, "max_running": 3, "max_batch_tokens": 64}
    world = World(Fixed(4), overlap=Overlap(leads=True), **sizes)
    for name in "abc":
        world.add(make_request(name, [1, 2, ord(name) % 5], 24))
    world.drain()
    for name in "abc":
        assert world.tokens[name] == expected_output([1, 2, ord(name) % 5], SEED, 24)
    decoding = [plan for plan in world.plans if plan.samples.all() and (plan.num_rows == 1).all()]
    assert any(lead_array(plan).any() for plan in decoding)
    if num_pages == 9:
        assert any(not plan.lengths.any() for plan in decoding)


# ── the models ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module", params=CONFIGS)
def pair(request):
    target = Transformer.random(CONFIGS[request.param], 0, std=0.3)
    requests = make_requests(target.config)
    return target, make_draft(target), requests, reference(target, requests)


def make_leading(*args, **sizes) -> tuple[Engine, list[StepPlan]]:
    """An engine whose overlapping steps have leads, and the plans it will have run."""
    engine, plans = make_engine(*args, overlap="on", **sizes), []
    engine.scheduler.overlap = Overlap(leads=True)
    execute = engine.executor.execute
    engine.executor.execute = lambda plan: plans.append(plan) or execute(plan)
    return engine, plans


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


@pytest.mark.parametrize("policy", [name for name in POLICIES if name != "stops"])  # no step here is without overlap
def test_with_leads_the_tokens_are_those_of_plain_decoding(pair, policy):
    target, _, requests, right = pair
    draft = make_draft(target, noise=0.01)  # so that seven in a row are right at times
    engine, plans = make_leading(target, draft, POLICIES[policy](), max_batch_tokens=128)
    outcome = serve(engine, requests)
    assert_equal(outcome, right)
    stats = engine.stats
    assert 0 < stats.hits < stats.chunks
    assert 0 < stats.accepted < stats.verified < stats.drafted
    assert any((lead_array(plan) > 0).any() and plan.frontier.any() for plan in plans)
    for name, each in outcome.stats.items():
        assert each.steps + each.accepted == len(outcome.tokens[name]), "every step emits accepted + 1 bonus"


class Told(Fixed):
    """Keeps what it is told of steps."""

    def learn(self, outcome: Outcome) -> None:
        told = self.__dict__.setdefault("told", [])
        told += zip(outcome.lengths.tolist(), outcome.accepted.tolist(), strict=True)


def test_a_policy_is_told_of_every_draft_that_was_judged_whichever_step_made_it():
    target = Transformer.random(CONFIGS["llama3"], 0, std=0.3)
    policy = Told(3)
    engine = make_engine(target, target, policy, overlap="on")
    engine.scheduler.overlap = SometimesOverlap()
    serve(engine, make_requests(target.config))
    assert engine.stats.accepted > 50
    assert all(accepted == length for length, accepted in policy.told), "it is always right"
    hits = engine.stats.hits  # of which the first token is the one that the verification emits
    assert sum(length for length, _ in policy.told) == engine.stats.accepted + hits


@pytest.mark.parametrize("kind", ["right", "wrong"])
def test_leads_that_are_always_right_or_wrong_change_no_token(pair, kind):
    target, _, requests, right = pair
    plain = [request for request in requests if request.id == "greedy with end token ignored"]
    engine, plans = make_leading(target, target if kind == "right" else always_wrong(target), Fixed(3))
    assert serve(engine, plain).tokens[plain[0].id] == right.tokens[plain[0].id]
    assert engine.stats.hits == (engine.stats.chunks if kind == "right" else 0)
    drafting = [plan for plan in plans if plan.lengths.any()]
    assert sum(lead_array(plan).any() for plan in drafting) == (1 if kind == "right" else len(drafting))


def test_what_an_earlier_request_left_in_the_slot_is_no_draft_behind_a_lead():
    """One that may draft no more than its lead has nothing behind it, whatever is written there."""
    target = Transformer.random(CONFIGS["llama3"], 0, std=0.3)
    request = next(each for each in make_requests(target.config) if each.id == "greedy with end token ignored")
    request = replace(request, params=replace(request.params, max_draft=3))
    engine, plans = make_leading(target, target, Fixed(3), max_running=1)
    first, second = (serve(engine, [request]).tokens for _ in range(2))
    assert first == second == reference(target, [request]).tokens
    assert {lead_of(plan) for plan in plans} == {0, 3}
    assert engine.stats.chunks == engine.stats.hits == 0


@pytest.mark.parametrize("kind", ["right", "wrong"])
def test_overlapped_drafts_that_are_always_right_or_wrong_change_no_token(pair, kind):
    target, _, requests, right = pair
    plain = [request for request in requests if request.id == "greedy with end token ignored"]
    engine = make_engine(target, target if kind == "right" else always_wrong(target), Fixed(3), overlap="on")
    assert serve(engine, plain).tokens[plain[0].id] == right.tokens[plain[0].id]
    assert engine.stats.hits == (engine.stats.chunks if kind == "right" else 0)


@pytest.mark.parametrize("leads", [False, True])
def test_with_arrivals_prompts_in_pieces_preemption_and_cancellation(pair, leads):
    target, draft, requests, right = pair
    arrivals = {request.id: 2 * number for number, request in enumerate(requests)}
    engine = make_engine(target, draft, RandomLengths(seed=5), max_batch_tokens=14, num_pages=24, overlap="on")
    engine.scheduler.overlap = Overlap(leads=leads)
    outcome = serve(engine, requests, arrivals, cancels={"hot": 30})
    assert engine.scheduler.num_preemptions > 0
    assert engine.stats.hits > 0
    for name, tokens in outcome.tokens.items():
        assert tokens == right.tokens[name][: len(tokens)]
        assert name == "hot" or len(tokens) == len(right.tokens[name])


@pytest.mark.parametrize("leads", [False, True])
def test_pages_in_the_prefix_cache_hold_no_drafts(pair, leads):
    target, draft, requests, right = pair
    engine = make_engine(target, draft, Fixed(4), overlap="on")
    engine.scheduler.overlap = Overlap(leads=leads)
    assert_equal(serve(engine, requests), right)
    rows = engine.stats.context_rows
    assert_equal(serve(engine, requests), right)
    assert engine.stats.context_rows - rows < rows


def test_overlap_is_refused_without_a_second_lane_or_a_draft_model_and_so_is_a_typo():
    target = Transformer.random(CONFIGS["llama3"], 0)

    class OneLane(CpuDevice):
        name, splits = "narrow", ()

    with pytest.raises(ConfigError, match="overlap=on: narrow drafts and verifies one after the other"):
        build_engine(target, target, EngineOptions(policy=Fixed(2), overlap="on", num_pages=40), device=OneLane())
    for draft in (None, "ngram"):
        with pytest.raises(ConfigError, match="overlap=on: there is no draft model"):
            build_engine(target, draft, EngineOptions(overlap="on", num_pages=40))
    with pytest.raises(ConfigError, match="overlap='yes'"):
        EngineOptions(overlap="yes")
