"""A draft that is not made for its target loads and runs: the output is right, and somebody says so, once."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import numpy as np
import pytest

from faser.engine.draft_check import LEAST_ACCEPTED, MEMORY, DraftCheck, highest_share
from faser.request import Request, SamplingParams
from faser.sim.oracle import Draw
from faser.sim.replica import Machine, load_profile, make_replica
from faser.traffic.document import Item, Workload
from faser.traffic.play import play
from tests.test_exactness import assert_equal, make_engine, reference, serve
from tests.tiny import VOCABULARY, make_draft, make_model


def requests_of(target, temperature: float) -> list[Request]:
    random = np.random.default_rng(0)
    params = SamplingParams(max_tokens=48, temperature=temperature, ignore_eos=True)
    prompts = random.integers(3, VOCABULARY, size=(6, 9)).tolist()
    return [
        Request(id=str(i), prompt_token_ids=tuple(prompt), params=params, seed=i, stop_ids=frozenset())
        for i, prompt in enumerate(prompts)
    ]


def warnings_of(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_draft_of_another_checkpoint_changes_no_token_and_is_noticed_once(caplog):
    target, stranger = make_model(), make_model(seed=9)
    requests = requests_of(target, 0.0)
    engine = make_engine(target, stranger, "fixed:2")
    assert_equal(serve(engine, requests), reference(target, requests))
    assert engine.draft_check.misfit is not None
    assert "first tokens were accepted" in engine.draft_check.misfit
    serve(engine, requests)
    assert len([each for each in warnings_of(caplog) if "guesses badly" in each]) == 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_that_fits_is_never_accused(temperature, caplog):
    target = make_model()
    engine = make_engine(target, make_draft(target), "fixed:2")
    serve(engine, requests_of(target, temperature))
    assert engine.stats.verified_per_position[0] > 100, "it was tried often enough"
    assert engine.draft_check.misfit is None
    assert not warnings_of(caplog)


def teach(check: DraftCheck, verified: list[int], accepted: list[int], is_looked_up: list[bool] | None = None) -> None:
    lookup = None if is_looked_up is None else SimpleNamespace(is_looked_up=np.array(is_looked_up))
    result = SimpleNamespace(num_verified=np.array(verified), num_accepted=np.array(accepted))
    check.learn(SimpleNamespace(lookup=lookup), result)


def test_only_first_tokens_of_the_draft_count():
    check = DraftCheck()
    for _ in range(400):
        teach(check, [3, 5, 0], [1, 0, 0], [False, True, False])
    assert check.misfit is None, "what was looked up is the only bad guess"
    for _ in range(8 * MEMORY):
        teach(check, [7], [0])
    assert check.misfit is not None


def test_a_draft_that_gets_better_is_no_longer_accused_and_the_log_said_it_once_each_time(caplog):
    check = DraftCheck()
    for accepted in (0, 1):
        for _ in range(2 * MEMORY):
            teach(check, [1], [accepted])
    assert check.misfit is None
    assert len(warnings_of(caplog)) == 1


@pytest.mark.parametrize("share", [LEAST_ACCEPTED, 0.15, 0.3])
def test_chance_accuses_no_draft_that_could_pay(share):
    """The verdict is looked at after every step, so a run of bad luck would show."""
    for seed in range(20):
        check, random = DraftCheck(), np.random.default_rng(seed)
        for accepted in random.random(1500) < share:
            teach(check, [1], [int(accepted)])
        assert check.misfit is None


def test_the_bound_of_a_share_falls_with_the_count():
    bounds = [highest_share(0.02, count) for count in (10, 100, 1000, 100_000)]
    assert bounds == sorted(bounds, reverse=True)
    assert bounds[0] > LEAST_ACCEPTED > bounds[2]
    assert bounds[3] == pytest.approx(0.02, abs=0.002)


def test_a_hopeless_draft_is_switched_off_and_costs_next_to_nothing():
    """One stream on an H200, by simulation: `off` and `faser`, with drafts of which one in fifty is accepted."""
    machine = Machine(profile=load_profile("h200-8b-1b"))
    workload = Workload((Item(0.0, (0,) * 128, 1000),), concurrency=1)
    seconds = {}
    for policy in ("off", "faser"):
        replica = make_replica(machine, policy, Draw(0.02).oracle([""], 0))
        seconds[policy] = play(replica.engine, workload, policy, clock=replica.time.clock).seconds
    assert seconds["faser"] < 1.01 * seconds["off"]
