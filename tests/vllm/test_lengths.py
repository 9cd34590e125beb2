"""The planner: counts in, lengths out."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from faser.policy import make_policy
from faser.policy.base import BatchView, Outcome, Policy
from faser.vllm.costs import SPEEDS, EngineCost, ModelShape, assumed_costs
from faser.vllm.lengths import HELD_FROM, HELD_STEPS, LengthPlanner, PlannedStep, ScheduledStep

TARGET = ModelShape(32, 4096, 14336, 32, 8, 128, 128256)  # about 8 billion weights
DRAFT = ModelShape(16, 2048, 8192, 32, 8, 64, 128256)  # about 1 billion
PROMPT = 180  # tokens


class Recording(Policy):
    """Answers with a given length and keeps what it was shown."""

    name = "recording"

    def __init__(self, length: int = 2) -> None:
        self.length = length
        self.views: list[BatchView] = []
        self.outcomes: list[Outcome] = []

    def lengths(self, view: BatchView):
        self.views.append(view)
        return np.full(view.num_requests, self.length)

    def learn(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)


def make_cost() -> EngineCost:
    return EngineCost(replace(assumed_costs(TARGET, DRAFT, SPEEDS["cuda"], 4096), kind="measured"))


def make_planner(policy: Policy, number: int, max_draft: int = 32, skips_draft: bool = True) -> LengthPlanner:
    planner = LengthPlanner(policy, make_cost(), 7, skips_draft)
    for name in names(number):
        planner.requests.admit(name, max_draft, 1000, PROMPT)
    return planner


def names(number: int) -> list[str]:
    return [f"r{index}" for index in range(number)]


def step(number: int, rows=1, drafts=0, reading=False, output=20) -> ScheduledStep:
    def full(value, dtype=np.int64):
        return np.broadcast_to(np.asarray(value, dtype=dtype), (number,)).copy()

    tokens = PROMPT + np.asarray(output)
    return ScheduledStep(names(number), full(rows), full(drafts), full(reading, np.bool_), full(tokens))


def decode(planner: LengthPlanner, number: int, rates: list[float], steps: int, seed: int = 0) -> list[PlannedStep]:
    """Prompts, then steps whose seconds are those that the cost predicts."""
    random, lengths, plans = np.random.default_rng(seed), np.zeros(number, dtype=np.int64), []
    for index in range(steps):
        planned = planner.plan(step(number, rows=200 if index == 0 else 1 + lengths, drafts=lengths))
        wins = random.random((number, 7)) < np.array(rates)[:, None]
        accepted = np.minimum(wins.cumprod(axis=1).sum(axis=1), lengths)
        planner.learn(planned, accepted + 1, planner.cost.seconds_of(planned.work))
        lengths = planned.lengths
        plans.append(planned)
    return plans


def test_lengths_follow_acceptance_request_by_request():
    plans = decode(make_planner(make_policy("faser"), 4), 4, [0.95, 0.95, 0.05, 0.05], 200)
    good, bad = np.mean([plan.lengths[:2] for plan in plans[50:]]), np.mean([plan.lengths[2:] for plan in plans[50:]])
    assert good > bad + 2


def test_a_busier_batch_never_drafts_more():
    means = []
    for number in (1, 16, 256):
        plans = decode(make_planner(make_policy("faser"), number), number, [0.75] * number, 60)
        means.append(float(np.mean([plan.lengths for plan in plans[20:]])))
    assert means[0] >= means[1] > means[2]


def test_where_nobody_drafts_the_depth_is_zero():
    planned = make_planner(make_policy("off"), 3).plan(step(3, rows=50))
    assert planned.depth == 0
    assert planned.work.num_drafting == 0


def test_the_depth_is_the_longest_length_and_reading_requests_have_none():
    policy = Recording(5)
    planner = make_planner(policy, 3)
    planner.requests.max_draft[planner.requests.slots_of(["r1"])] = 2
    planned = planner.plan(step(3, rows=50, reading=[True, False, False]))
    assert planned.lengths.tolist() == [0, 2, 5]
    assert planned.depth == 5
    assert policy.views[0].num_requests == 2


@pytest.mark.parametrize(("output", "limit"), [(990, 7), (994, 5), (998, 1), (999, 0), (1000, 0), (1003, 0)])
def test_the_limit_leaves_room_for_the_token_behind_the_drafts(output, limit):
    policy = Recording()
    make_planner(policy, 1).plan(step(1, rows=50, output=output))
    assert policy.views[0].limit.tolist() == [limit]


def test_the_lag_grows_while_the_draft_does_not_run_and_ends_when_it_does():
    policy = Recording(0)
    planner = make_planner(policy, 1)
    planner.plan(step(1, rows=100, reading=True))
    for rows in (50, 1, 1):
        planner.plan(step(1, rows=rows))
    policy.length = 2
    caught_up = planner.plan(step(1))
    steady = planner.plan(step(1, rows=3, drafts=2))
    assert [view.lag.tolist() for view in policy.views] == [[150], [151], [152], [153], [1]]
    assert caught_up.work.catch_up_rows == 153
    assert steady.work.catch_up_rows == 0


def test_rejected_drafts_are_no_part_of_the_lag():
    policy = Recording(2)
    planner = make_planner(policy, 1)
    planner.plan(step(1, rows=50))
    policy.length = 0
    planned = planner.plan(step(1, rows=3, drafts=2))
    planner.learn(planned, np.array([1]), 0.01)
    planner.plan(step(1))
    assert policy.views[-1].lag.tolist() == [2]


def test_a_worker_that_always_drafts_leaves_no_lag():
    policy = Recording(0)
    planner = make_planner(policy, 1, skips_draft=False)
    for rows in (50, 1, 1):
        planner.plan(step(1, rows=rows))
    assert [view.lag.tolist() for view in policy.views] == [[50], [1], [1]]


def test_a_preempted_request_keeps_what_was_learned_of_it_and_reads_again():
    policy = Recording(2)
    planner = make_planner(policy, 1)
    planner.plan(step(1, rows=50))
    planner.learn(planner.plan(step(1, rows=3, drafts=2)), np.array([2]), 0.01)
    planner.requests.restart("r0")
    planned = planner.plan(step(1, rows=53))
    assert not planned.decodes.any()
    assert policy.views[-1].accepted.tolist() == [1]
    assert policy.views[-1].tried.tolist() == [2]
    assert policy.views[-1].lag.tolist() == [53]


def test_two_steps_in_flight_are_told_apart():
    policy = Recording(2)
    planner = make_planner(policy, 2)
    planner.plan(step(2, rows=50))
    first = planner.plan(step(2, rows=3, drafts=2))
    second = planner.plan(step(2, rows=[3, 2], drafts=[2, 1]))
    planner.learn(first, np.array([3, 1]), 0.01)
    planner.requests.release(["r1"])  # aborted while the second step runs
    planner.requests.admit("other", 7, 100, PROMPT)
    planner.learn(second, np.array([1, 0]), 0.01)
    assert [outcome.lengths.tolist() for outcome in policy.outcomes] == [[2, 2], [2]]
    assert [outcome.accepted.tolist() for outcome in policy.outcomes] == [[2, 0], [0]]
    other = planner.requests.slots_of(["other"])
    assert planner.requests.tried[other].tolist() == [0]


def test_a_step_that_only_drafts_counts_as_one_with_drafts():
    policy = Recording(2)
    planner = make_planner(policy, 1)
    planner.plan(step(1, rows=50))
    policy.length = 0
    planner.learn(planner.plan(step(1, rows=3, drafts=2)), np.array([3]), 0.01)
    policy.length = 2
    planner.learn(planner.plan(step(1)), np.array([1]), 0.01)
    assert [outcome.lag.tolist() for outcome in policy.outcomes] == [[0], [4]]


def test_a_large_batch_holds_its_lengths_for_a_few_steps():
    policy = Recording(2)
    planner = make_planner(policy, HELD_FROM)
    for _ in range(2 * HELD_STEPS):
        planned = planner.plan(step(HELD_FROM, rows=3, drafts=2))
        assert planned.lengths.tolist() == [2] * HELD_FROM
    assert len(policy.views) < 2 * HELD_STEPS - 2


def test_a_held_length_is_cut_to_what_the_request_may_still_output():
    planner = make_planner(Recording(5), HELD_FROM)
    planner.plan(step(HELD_FROM))
    planner.plan(step(HELD_FROM))
    assert planner.plan(step(HELD_FROM, output=997)).lengths.max() == 2


def test_slots_are_used_again():
    planner = make_planner(Recording(), 0)
    for index in range(500):
        planner.requests.admit(f"r{index}", 1, 1, PROMPT)
        planner.requests.release([f"r{index}", "never seen"])
    assert len(planner.requests) == 0
    assert planner.requests.accepted.size == 64
