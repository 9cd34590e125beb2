"""Virtual time and outcomes: what can be worked out by hand comes out exactly."""

from dataclasses import replace

import numpy as np
import pytest

from faser.cost.curve import NOTHING, Curve
from faser.cost.overlap import OverlapProfile
from faser.cost.profile import Profile
from faser.cost.profiled_cost import ProfiledCost
from faser.engine.engine import AsyncExecutor, Engine
from faser.engine.pages import PagePool
from faser.engine.scheduler import Scheduler
from faser.limits import KeyWindow
from faser.policy import BatchView, Policy, make_policy
from faser.policy.overlap import Overlap
from faser.request import Request, SamplingParams
from faser.rules.stopping import Stopping
from faser.sim.executor import Noise, SimExecutor, VirtualTime
from faser.sim.oracle import Draw, Replay
from faser.sim.replica import Machine, load_profile, make_replica
from faser.traffic.document import Item, Workload
from faser.traffic.play import play
from faser.traffic.prompts import Blank
from tests.sim.toy import PROFILE, TOY, Known, make_workload, simulate

HOST = 0.0005


def one(arrival=0.0, prompt=4, output=3):
    return Item(arrival, Blank(prompt), output)


def test_time_passes_only_when_told_and_never_stands_still():
    time = VirtualTime()
    time.sleep(0.25)
    time.reach(0.2)
    assert time.now() == 0.25
    time.sleep(0.0)
    assert 0.25 < time.now() < 0.25 + 1e-12


def test_a_request_takes_the_sum_of_its_steps():
    run, replica = simulate(Workload((one(arrival=1.0),)), "off", Known([1]))
    (record,) = run.records
    prompt, decode = 0.010 + 4 * 0.002 + HOST, 0.009 + HOST
    assert record.first == pytest.approx(1.0 + prompt, abs=1e-12)
    assert record.end == pytest.approx(1.0 + prompt + 2 * decode, abs=1e-12)
    assert run.phases["idle"] == pytest.approx(1.0)
    assert run.phases["host"] == pytest.approx(3 * HOST)
    assert replica.engine.stats.verify_seconds == pytest.approx(0.018 + 2 * 0.009)


@pytest.mark.parametrize("runs_ahead", [True, False])
def test_drafts_are_paid_for_as_they_run(runs_ahead):
    # 1 token from the prompt, 3 from a step that catches up, 3 from one that has kept up: 7
    run, replica = simulate(Workload((one(output=7),)), "fixed:2", Known([1]), runs_ahead=runs_ahead)
    (record,) = run.records
    prompt = 0.010 + 4 * 0.002 + HOST
    first = (0.005 + 5 * 0.001) + 0.002 + 0.008 + 3 * 0.001 + HOST
    second = 0.003 + 0.002 + 0.008 + 3 * 0.001 + HOST
    assert record.end == pytest.approx(prompt + first + second, abs=1e-12)
    assert (record.drafted, record.accepted, record.steps) == (4, 4, 3)
    assert replica.engine.stats.draft_seconds == pytest.approx(0.012 + 0.005)


def test_a_windowed_draft_reads_and_catches_up_with_no_more_than_its_window():
    # 1 token from the prompt, 1 beside the sinks, 3 from a step that computes the window, 3 from one that kept up: 8
    profile = replace(PROFILE, next_draft=Curve((1,), (0.002,), (1e-5,)))
    workload = Workload((one(prompt=100, output=8),))
    sizes = {"profile": profile, "max_batch_tokens": 128, "runs_ahead": False}
    _, replica = simulate(workload, "fixed:2", Known([1]), draft_window=64, **sizes)
    further = 0.002 + 68 * 1e-5
    sinks, window, steady = 0.005 + 4 * 0.001, 0.005 + 64 * 0.001 + further, 0.003 + further
    assert replica.engine.stats.draft_seconds == pytest.approx(sinks + window + steady)
    assert replica.engine.scheduler.draft_pages.num_pages == 8 * KeyWindow(64, 4).most_pages(8, rows=9)
    _, whole = simulate(workload, "fixed:2", Known([1]), **sizes)
    expected = 0.005 + 101 * 0.001 + 0.002 + 101 * 1e-5 + 0.003 + 0.002 + 104 * 1e-5
    assert whole.engine.stats.draft_seconds == pytest.approx(expected)


@pytest.mark.parametrize("policy", ["fixed:3", "faser"])
def test_a_window_beyond_all_contexts_changes_nothing(policy):
    workload = make_workload(20, rate=30.0)
    runs = [simulate(workload, policy, Known([1, 1, 0]), draft_window=size)[0] for size in (None, 124)]
    assert runs[0].records == runs[1].records


@pytest.mark.parametrize("runs_ahead", [True, False])
def test_all_tokens_come_with_a_window_and_few_pages(runs_ahead):
    workload = make_workload(30, rate=40.0, prompt=80, output=30)
    run, replica = simulate(
        workload, "fixed:3", Known([1, 1, 0]), draft_window=64, kv_tokens=400, runs_ahead=runs_ahead
    )
    assert [record.num_tokens for record in run.records] == [item.max_tokens for item in workload.items]
    assert sum(record.accepted for record in run.records) > 0
    replica.engine.scheduler.check()


def test_a_windowed_draft_of_a_context_larger_than_its_pool_drafts_in_every_step():
    run, replica = simulate(Workload((one(output=117),)), "fixed:3", Known([1]), draft_window=64, max_running=1)
    assert replica.engine.scheduler.draft_pages.num_pages * 8 < 4 + 117
    assert run.records[0].steps == 1 + 116 / 4


def test_steps_run_back_to_back_on_the_device():
    """A step that is submitted while one runs begins when that one ends."""
    time = VirtualTime()
    executor = SimExecutor(TOY.limits, ProfiledCost(PROFILE), Known([1]), time)
    assert isinstance(executor, AsyncExecutor)
    engine = make_replica(TOY, "off", Known([1])).engine
    for index in range(2):
        engine.add(request(index))
    plans = [engine.scheduler.plan()]
    engine.scheduler.advance()
    plans.append(engine.scheduler.plan())
    for plan in plans:
        executor.submit(plan)
    assert time.now() == 0
    executor.collect()
    first = time.now()
    executor.collect()
    assert first == pytest.approx(0.010 + 8 * 0.002 + HOST)
    assert time.now() - first == pytest.approx(0.010 + HOST)


def request(index, prompt=4, output=3):
    params = SamplingParams(max_tokens=output)
    return Request(id=str(index), prompt_token_ids=Blank(prompt), params=params, seed=index)


def test_planning_ahead_admits_a_request_one_step_later():
    items = (one(output=40), one(arrival=0.1, output=2))
    late, _ = simulate(Workload(items), "off", Known([1]))
    soon, _ = simulate(Workload(items), "off", Known([1]), runs_ahead=False)
    assert late.records[1].first - soon.records[1].first == pytest.approx(0.009 + HOST)


@pytest.mark.parametrize("policy", ["off", "fixed:3"])
@pytest.mark.parametrize("runs_ahead", [True, False])
@pytest.mark.parametrize("concurrency", [None, 5])
def test_every_request_ends_with_all_its_tokens(policy, runs_ahead, concurrency):
    workload = make_workload(60, rate=30.0, concurrency=concurrency)
    run, replica = simulate(workload, policy, Known([1, 1, 0, 1, 0]), runs_ahead=runs_ahead)
    assert [record.num_tokens for record in run.records] == [item.max_tokens for item in workload.items]
    assert not any(record.error for record in run.records)
    assert sum(run.phases.values()) == pytest.approx(replica.time.now())
    assert not replica.engine.has_work
    replica.engine.scheduler.check()


def shared(profile: Profile, share: float) -> Profile:
    """Of the shorter of drafting and verification that share is not hidden."""
    return replace(profile, besides=(OverlapProfile(0, NOTHING, NOTHING, NOTHING, Curve((1,), (share,), (0.0,))),))


@pytest.mark.parametrize("runs_ahead", [True, False])
def test_an_overlapped_step_takes_the_longer_part_plus_a_share_of_the_shorter(runs_ahead):
    profile = shared(PROFILE, 0.25)
    # 1 token from the prompt; 1 from a step that drafts two; 2 from each that verifies one and drafts two, and the last
    workload = Workload((one(output=6),))
    run, replica = simulate(workload, "fixed:2", Known([1]), runs_ahead=runs_ahead, profile=profile, overlap="on")
    (record,) = run.records
    prompt = 0.010 + 4 * 0.002 + HOST
    first = (0.005 + 5 * 0.001) + 0.002 + 0.25 * 0.009 + HOST  # the draft catches up: 12 ms beside 9
    second = 0.010 + 0.25 * 0.005 + HOST
    last = 0.010 + HOST  # there is no room for another draft
    assert record.end == pytest.approx(prompt + first + second + last, abs=1e-12)
    assert record.num_tokens == 6
    stats = replica.engine.stats
    assert (stats.chunks, stats.hits) == (2, 2)
    assert stats.draft_seconds == pytest.approx(0.012 + 0.005 - 0.75 * (0.009 + 0.005), abs=1e-9)


def simulate_leads(workload, policy, agreement, profile, runs_ahead, watch=None):
    machine = replace(TOY, profile=profile, runs_ahead=runs_ahead)
    replica = make_replica(machine, policy, Known(agreement), watch=watch)
    replica.engine.scheduler.overlap = Overlap(leads=True)
    return play(replica.engine, workload, policy, clock=replica.time.clock), replica


EVEN = Curve((1,), (0.002,), (0.0,))  # a drafted token, whichever it is


@pytest.mark.parametrize(
    ("agreement", "output", "steps", "hidden", "hits"),
    [
        # 1 token from the prompt; 2 from a step that waits for one draft of three and verifies it; 2 from one that
        # verifies one and drafts one; the last
        ([1], 6, [0.002 + 0.010 + 0.25 * 0.004, 0.010 + 0.25 * 0.002, 0.009], 0.75 * (0.004 + 0.002), (2, 2)),
        # a token a step: the first waits for one draft of two, the second for the only one, the third has none
        ([0], 4, [0.002 + 0.010 + 0.25 * 0.002, 0.002 + 0.010, 0.009], 0.75 * 0.002, (1, 0)),
        # 2 tokens from a step that has nothing to draft behind its lead
        ([1], 3, [0.002 + 0.010], 0.0, (0, 0)),
    ],
)
def test_a_lead_is_paid_for_before_its_verification(agreement, output, steps, hidden, hits):
    profile = replace(shared(PROFILE, 0.25), first_draft=EVEN, next_draft=EVEN, catch_up=EVEN)
    workload = Workload((one(output=output),))
    run, replica = simulate_leads(workload, "fixed:1", agreement, profile, runs_ahead=False)
    (record,) = run.records
    prompt = 0.010 + 4 * 0.002 + HOST
    assert record.end == pytest.approx(prompt + sum(each + HOST for each in steps), abs=1e-12)
    assert record.num_tokens == output
    stats = replica.engine.stats
    assert stats.draft_seconds == pytest.approx(0.002 * stats.drafted - hidden, abs=1e-12)
    assert (stats.chunks, stats.hits) == hits


@pytest.mark.parametrize("runs_ahead", [True, False])
@pytest.mark.parametrize("policy", ["fixed:1", "fixed:3"])
@pytest.mark.parametrize("period", [1, 2, 5, 9])
def test_every_miss_costs_a_lead_in_the_next_step(policy, period, runs_ahead):
    """Planned ahead or not; near the end of a request there may be no room for what was counted on."""
    seen, size = [], int(policy[-1])
    profile = replace(shared(PROFILE, 0.25), first_draft=EVEN, next_draft=EVEN, catch_up=EVEN)
    agreement = [int(position % period > 0) for position in range(100)]
    workload = Workload((one(output=100),))
    simulate_leads(workload, policy, agreement, profile, runs_ahead, lambda *step: seen.append(step))
    missed, verify, chunk = True, 0.008 + (size + 1) * 0.001, (size + 1) * 0.002
    for plan, result in seen[1:]:
        if plan.num_tokens[0] < 80:
            lead = size * 0.002 if missed else 0.0
            assert result.seconds.draft == pytest.approx(lead + chunk)
            assert result.seconds.total == pytest.approx(lead + max(chunk, verify) + 0.25 * min(chunk, verify))
            assert result.num_verified.tolist() == [size]
        missed = not result.hits[0] if result.hits is not None else True


@pytest.mark.parametrize("runs_ahead", [True, False])
@pytest.mark.parametrize("policy", ["fixed:1", "fixed:3"])
def test_with_leads_every_request_ends_with_all_its_tokens(policy, runs_ahead):
    workload = make_workload(60, rate=30.0, concurrency=5)
    agreement = [1, 1, 0, 1, 1, 1, 1, 1, 0]
    run, replica = simulate_leads(workload, policy, agreement, shared(PROFILE, 0.25), runs_ahead)
    assert [record.num_tokens for record in run.records] == [item.max_tokens for item in workload.items]
    assert 0 < replica.engine.stats.hits < replica.engine.stats.chunks
    assert sum(run.phases.values()) == pytest.approx(replica.time.now())
    replica.engine.scheduler.check()


@pytest.mark.parametrize("runs_ahead", [True, False])
@pytest.mark.parametrize("policy", ["fixed:1", "fixed:4"])
def test_with_overlap_every_request_ends_with_all_its_tokens(policy, runs_ahead):
    workload = make_workload(60, rate=30.0, concurrency=5)
    profile = shared(PROFILE, 0.25)
    run, replica = simulate(
        workload, policy, Known([1, 1, 0, 1, 0]), runs_ahead=runs_ahead, profile=profile, overlap="on"
    )
    assert [record.num_tokens for record in run.records] == [item.max_tokens for item in workload.items]
    assert 0 < replica.engine.stats.hits < replica.engine.stats.chunks
    assert sum(run.phases.values()) == pytest.approx(replica.time.now())
    replica.engine.scheduler.check()


def test_the_accepted_number_is_the_run_of_agreements_from_the_position_on():
    # positions      0  1  2  3  4  5  6  7  8
    agreement = Known([0, 1, 1, 0, 0, 1, 1, 1, 1])
    run, _ = simulate(Workload((one(output=9),)), "fixed:2", agreement, runs_ahead=False)
    (record,) = run.records
    # the prompt brings 0; a step at 1 accepts 1, 2 and brings 3; at 4 nothing; at 5 it accepts 5, 6 and brings 7; at 8
    # there is one token to come, so nothing is drafted
    assert (record.steps, record.accepted, record.drafted) == (5, 4, 6)
    assert record.lengths == (2, 0, 3)


class Witness:
    """Sees what became of every draft: by request and output position, its length and what was accepted."""

    def __init__(self):
        self.slots, self.seen = {}, {}

    def __call__(self, plan, result):
        self.slots.update({new.slot: new for new in plan.admitted})
        for slot, context, length, accepted in zip(
            plan.slots.tolist(), plan.num_tokens.tolist(), plan.lengths.tolist(), result.num_accepted, strict=True
        ):
            if length:
                self.seen[self.slots[slot].seed, context - self.slots[slot].num_prompt] = (length, int(accepted))


@pytest.mark.parametrize("acceptance", [Draw(0.7, 0.15), Replay.shipped()])
@pytest.mark.parametrize("policy", ["fixed:1", "fixed:4"])
@pytest.mark.parametrize(("concurrency", "runs_ahead"), [(1, True), (7, True), (7, False)])
def test_outcomes_depend_neither_on_the_policy_nor_on_the_batch(acceptance, policy, concurrency, runs_ahead):
    workload, witness = make_workload(30, concurrency=concurrency), Witness()
    oracle = acceptance.oracle([item.category for item in workload.items], seed=5)
    replica = make_replica(replace(TOY, runs_ahead=runs_ahead), policy, oracle, watch=witness)
    play(replica.engine, workload, policy, clock=replica.time.clock)
    assert len(witness.seen) > 100
    for (index, position), (length, accepted) in witness.seen.items():
        alone = oracle.runs(index, workload.items[index].max_tokens)
        if position < alone.size:  # else it had ended, and nobody knew
            assert accepted == min(length, alone[position])


@pytest.mark.parametrize("policy", ["off", "fixed:3"])
def test_a_small_pool_preempts_and_no_request_is_lost(policy):
    workload = make_workload(24, concurrency=8, prompt=20, output=40)
    oracle = Draw(0.7).oracle([item.category for item in workload.items], 0)
    whole, _ = simulate(workload, policy, oracle)
    tight, replica = simulate(workload, policy, oracle, kv_tokens=160)
    assert replica.engine.scheduler.num_preemptions > 0
    assert [record.num_tokens for record in tight.records] == [item.max_tokens for item in workload.items]
    assert tight.seconds > whole.seconds
    replica.engine.scheduler.check()


def test_a_request_beyond_the_pool_is_lost_with_a_reason():
    run, _ = simulate(Workload((one(prompt=40, output=40), one())), "off", Known([1]), kv_tokens=64)
    assert "KV pool" in run.records[0].error
    assert run.records[1].error is None


@pytest.mark.parametrize("policy", ["off", "fixed:3"])
@pytest.mark.parametrize("concurrency", [None, 6])
def test_reporting_only_begins_and_ends_changes_no_record(policy, concurrency):
    workload = make_workload(50, rate=40.0, concurrency=concurrency)
    oracle = Draw(0.7).oracle([item.category for item in workload.items], 0)
    quiet, replica = simulate(workload, policy, oracle)
    time = VirtualTime()
    pools = [PagePool(TOY.num_pages, 8, TOY.max_running, TOY.max_model_len, caching=False) for _ in range(2)]
    scheduler = Scheduler(TOY.limits, make_policy(policy), *pools, speculates=True, prefix_caching=False)
    engine = Engine(scheduler, SimExecutor(TOY.limits, ProfiledCost(PROFILE), oracle, time), time.now)
    plain = play(engine, workload, policy, clock=time.clock)
    assert quiet == plain
    assert engine.stats.emitted == replica.engine.stats.emitted


class Sure(Policy):
    """Gives length 4 and stops as soon as the draft is not sure."""

    name = "sure"
    max_length = 4

    def lengths(self, view: BatchView):
        self.size = view.num_requests
        return np.full(view.num_requests, 4)

    def stopping(self):
        return Stopping(np.ones((self.size, 5)), np.full(5, 0.5), 1.0, (0.0, 1.0))


@pytest.mark.parametrize("runs_ahead", [True, False])
def test_drafts_stop_by_the_rule_of_the_plan(runs_ahead):
    oracle = Known([1], sure=[0.9, 0.9, 0.2, 0.9, 0.9, 0.9, 0.2])
    workload = make_workload(12, concurrency=1)
    replica = make_replica(replace(TOY, runs_ahead=runs_ahead), "fixed:4", oracle)
    replica.engine.scheduler.drafts.policy = Sure()
    run = play(replica.engine, workload, "sure", clock=replica.time.clock)
    assert [record.num_tokens for record in run.records] == [item.max_tokens for item in workload.items]
    stats = replica.engine.stats
    assert stats.accepted == stats.drafted  # all agree, and what was not drafted was not refused
    assert stats.lengths[2] > 0
    assert stats.lengths[3] > 0
    replica.engine.scheduler.check()


def test_noise_has_mean_one_and_depends_on_its_seed():
    noise, same, other = Noise(0.1, 1), Noise(0.1, 1), Noise(0.1, 2)
    drawn = [noise() for _ in range(4000)]
    assert drawn == [same() for _ in range(4000)]
    assert drawn[0] != other()
    assert np.mean(drawn) == pytest.approx(1, abs=0.01)
    assert np.std(drawn) == pytest.approx(0.1, rel=0.1)


def test_a_bound_on_steps_keeps_them_short_beside_a_long_prompt_and_is_the_same_every_time():
    workload = Workload((one(output=400), one(arrival=0.1, prompt=3500), one(arrival=0.12, prompt=20)))

    def play_bounded(bound):
        steps = []
        machine = Machine(profile=load_profile("h200-8b-1b"), max_step_ms=bound)
        replica = make_replica(
            machine, "off", Known([1]), watch=lambda plan, result: steps.append(result.seconds.total)
        )
        return play(replica.engine, workload, "off", clock=replica.time.clock), steps

    free, unbounded = play_bounded(0.0)
    bounded, steps = play_bounded(40.0)
    assert max(unbounded) > 0.07
    assert max(steps) < 1.2 * 0.04
    assert bounded.records[2].first < free.records[2].first - 0.02, "the short prompt does not wait for the long one"
    again, same = play_bounded(40.0)
    assert (again.records, same) == (bounded.records, steps)
