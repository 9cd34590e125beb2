"""The scheduler's part of the plugin against a made-up worker: two steps in flight, preemption, aborts."""

from __future__ import annotations

from random import Random

import pytest

from faser.errors import ConfigError
from faser.policy.base import BatchView, Outcome, Policy
from faser.vllm.costs import run_folder
from faser.vllm.scheduling import GivesLengthsAfter, GivesLengthsAhead
from faser.vllm.status import EngineStatus, status_path
from faser.vllm.versions import HOOKS
from tests.vllm.fakes import FakeAsyncScheduler, FakeScheduler, make_config, result_of
from tests.vllm.simulation import Simulation

POLICIES = ["off", "fixed:3", "fixed:4", "faser", "goodput", "tetris", "table:4=3/16=1"]


class Ahead(GivesLengthsAhead, FakeAsyncScheduler):
    pass


class After(GivesLengthsAfter, FakeScheduler):
    pass


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def simulation(policy: str | None, is_async: bool, num_blocks: int = 1000, **config) -> Simulation:
    scheduler = (Ahead if is_async else After)(make_config(policy, is_async=is_async, **config), num_blocks)
    return Simulation(scheduler, result_of, is_async)


def add_requests(sim: Simulation, number: int = 40, seed: int = 0) -> dict[str, int]:
    """Requests that arrive together; max_tokens of each. Every third has its own limit."""
    random, wanted = Random(seed), {}
    for index in range(number):
        name = f"r{index}"
        wanted[name], sim.rates[name] = random.randint(1, 60), random.random()
        sim.scheduler.add(name, random.randint(1, 300), wanted[name], index % 5 if index % 3 == 0 else None)
    return wanted


def assert_nothing_is_held(scheduler) -> None:
    assert scheduler.num_free_blocks == scheduler.num_blocks
    scheduler.schedule()  # tells who is finished
    assert len(scheduler.faser.planner.requests) == 0


def test_the_scheduler_class_without_the_flag_plans_by_the_default_policy():
    sim = simulation(None, is_async=True)
    wanted = add_requests(sim)
    sim.run()
    assert sim.scheduler.faser.planner.policy.name == "faser"
    assert dict(sim.emitted) == wanted


@pytest.mark.parametrize("num_blocks", [1000, 60], ids=["room", "preemption"])
@pytest.mark.parametrize("is_async", [True, False], ids=["ahead", "after"])
@pytest.mark.parametrize("policy", POLICIES)
def test_every_request_gets_exactly_its_tokens_and_nothing_leaks(policy, is_async, num_blocks):
    sim = simulation(policy, is_async, num_blocks)
    wanted = add_requests(sim)
    sim.run()
    assert dict(sim.emitted) == wanted
    assert (sim.scheduler.num_preemptions > 0) == (num_blocks == 60)
    assert sim.scheduler.faser.planner.num_failures == 0
    assert_nothing_is_held(sim.scheduler)


@pytest.mark.parametrize("is_async", [True, False], ids=["ahead", "after"])
def test_aborts_at_any_time_leak_nothing_and_change_no_other_request(is_async):
    sim = simulation("fixed:3", is_async, num_blocks=60)
    wanted, random = add_requests(sim), Random(3)
    while sim.scheduler.requests:
        sim.step()
        if random.random() < 0.2 and sim.scheduler.requests:
            name = random.choice(sorted(sim.scheduler.requests))
            sim.scheduler.abort(name)
            del wanted[name]
    sim.run()
    assert {name: sim.emitted[name] for name in wanted} == wanted
    assert_nothing_is_held(sim.scheduler)


@pytest.mark.parametrize("is_async", [True, False], ids=["ahead", "after"])
def test_off_proposes_and_verifies_nothing(is_async):
    sim = simulation("off", is_async)
    add_requests(sim)
    sim.run()
    assert not any(sim.depths)
    assert not any(number for each in sim.lengths.values() for number in each)


@pytest.mark.parametrize("is_async", [True, False], ids=["ahead", "after"])
def test_a_request_never_drafts_more_than_its_max_draft(is_async):
    sim = simulation("fixed:4", is_async)
    for limit in (0, 1, 2, 9, None):
        sim.scheduler.add(f"at most {limit}", 20, 40, limit)
    sim.run()
    longest = {name: max(lengths) for name, lengths in sim.lengths.items()}
    assert longest == {"at most 0": 0, "at most 1": 1, "at most 2": 2, "at most 9": 4, "at most None": 4}
    assert sim.num_ragged > 0


@pytest.mark.parametrize("is_async", [True, False], ids=["ahead", "after"])
def test_no_request_drafts_past_its_last_token(is_async):
    sim = simulation("fixed:4", is_async)
    sim.scheduler.add("short", 20, 2)
    sim.run()
    assert max(sim.lengths["short"]) == 0


class Failing(Policy):
    name = "failing"

    def lengths(self, view: BatchView):
        raise ZeroDivisionError("in lengths")

    def learn(self, outcome: Outcome) -> None:
        raise KeyError("in learn")


@pytest.mark.parametrize("is_async", [True, False], ids=["ahead", "after"])
def test_a_failing_policy_falls_back_to_vllm_s_length_and_says_so_once(is_async, caplog):
    sim = simulation("faser", is_async)
    sim.scheduler.faser.planner.policy = Failing()
    wanted = add_requests(sim, 8)
    with caplog.at_level("ERROR", logger="vllm.faser"):
        sim.run()
    assert dict(sim.emitted) == wanted
    assert max(sim.depths) == 4
    said = [record.message for record in caplog.records if record.levelname == "ERROR"]
    assert [message.startswith("FASER: policy failing failed (ZeroDivisionError") for message in said] == [True]
    assert sim.scheduler.faser.planner.num_failures > 10


@pytest.mark.parametrize(("is_async", "wrong"), [(True, After), (False, Ahead)])
def test_the_wrong_scheduler_class_is_refused_with_the_reason(is_async, wrong):
    with pytest.raises(ConfigError, match="async-scheduling; FASER has one scheduler class for each"):
        wrong(make_config("faser", is_async=is_async))


def test_explicit_classes_work_without_the_flag():
    scheduler = Ahead(make_config(None))
    assert scheduler.faser.planner.policy.name == "faser"


def test_a_prompt_of_one_token_is_not_padded_to_the_full_length():
    scheduler = Ahead(make_config("off"))
    assert scheduler.dynamic_sd_lookup == [4] * 17


def test_a_wrong_max_draft_that_reaches_the_scheduler_drafts_nothing_and_stops_nobody(caplog):
    sim = simulation("fixed:3", True)
    for name in ("wrong", "right"):
        sim.scheduler.add(name, 5, 30)
    sim.scheduler.requests["wrong"].sampling_params.extra_args = {"max_draft": "two"}
    sim.run()
    assert sim.emitted == {"wrong": 30, "right": 30}
    assert {name: max(lengths) for name, lengths in sim.lengths.items()} == {"wrong": 0, "right": 3}
    assert [record.message for record in caplog.records if record.levelname == "WARNING"] == [
        "FASER: vllm_xargs.max_draft: expected a whole number from 0 on, got 'two'. The request does not draft."
    ]


def test_faser_adds_two_names_to_vllm_s_scheduler_and_takes_none():
    ours = {name for each in (Ahead, After) for base in each.__mro__[1:3] for name in vars(base)}
    added = set(vars(Ahead(make_config()))) | set(vars(After(make_config(is_async=False))))
    theirs = set(vars(FakeAsyncScheduler(make_config())))
    assert added - theirs == {"faser", "faser_lengths"}
    assert {name for name in ours if not name.startswith("__")} <= {hook.name for hook in HOOKS}


def test_the_status_file_holds_the_totals_and_goes_with_the_engine():
    sim = simulation("fixed:3", True)
    wanted = add_requests(sim)
    sim.run()
    status = EngineStatus.load(status_path("test", 0))
    assert status is not None
    assert status.emitted == sum(wanted.values())
    assert status.running == status.waiting == 0
    assert status.verified == sum(number * steps for number, steps in enumerate(status.lengths))
    assert status.verified == sum(status.verified_per_position)
    assert status.accepted == sum(status.accepted_per_position)
    assert 0 < status.accepted < status.verified
    sim.scheduler.shutdown()
    assert not run_folder("test").exists()
