"""A draft that is not made for its target loads and runs: the output is right, and somebody says so, once."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from faser.build import build_engine
from faser.config import EngineOptions
from faser.engine.draft_check import LEAST_ACCEPTED, MEMORY, DraftCheck, highest_share
from faser.errors import ConfigError
from faser.models.heads.shift import Shift
from faser.request import Request, SamplingParams
from faser.sim.oracle import Draw
from faser.sim.replica import Machine, load_profile, make_replica
from faser.text.tokenizer import Tokenizer
from faser.traffic.document import Item, Workload
from faser.traffic.play import play
from tests.test_exactness import assert_equal, make_engine, reference, serve
from tests.tiny import VOCABULARY, make_draft, make_head, make_model

TARGET = make_model()


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


SHIFT = Shift(-1, (1, 2), (0, 1), (0.25, 0.5), 300, is_eagle3=False)


@pytest.fixture
def start(folder):
    """An engine with a draft, and the tokenizer of a folder."""

    def build(draft, with_tokenizer: bool = True, **options):
        tokenizer = Tokenizer.from_folder(folder) if with_tokenizer else None
        sizes = {"policy": "fixed:2", "max_running": 8, "max_step_ms": 0, "page_size": 4, "num_pages": 400}
        return build_engine(TARGET, draft, EngineOptions(**(sizes | options)), tokenizer)

    return build


def test_a_head_that_is_off_by_a_layer_changes_no_token_and_is_named_at_the_start(start, monkeypatch, caplog):
    """What finds it is tested in tests/models/heads/test_shift.py."""
    monkeypatch.setattr("faser.build.find_shift", lambda *_: SHIFT)
    requests = requests_of(TARGET, 0.0)
    engine = start(make_head(TARGET, "eagle3"))
    assert engine.draft_check.misfit == str(SHIFT)
    assert [each for each in warnings_of(caplog) if "off by a layer" in each] == warnings_of(caplog)
    assert len(warnings_of(caplog)) == 1
    assert_equal(serve(engine, requests), reference(TARGET, requests))


def test_the_layers_of_a_head_are_not_checked_where_that_tells_nothing(start, monkeypatch):
    def find_shift(*_):
        raise AssertionError("it was checked")

    monkeypatch.setattr("faser.build.find_shift", find_shift)
    head = make_head(TARGET, "eagle3")
    start(make_draft(TARGET))
    start(head, with_tokenizer=False)
    with pytest.raises(ConfigError, match="synthetic acceptance"):  # a CPU has none, so it is refused behind the check
        start(head, acceptance=0.5)
    with pytest.raises(AssertionError, match="it was checked"):
        start(head)


def test_without_memory_for_the_check_the_engine_starts(start, monkeypatch):
    def find_shift(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("faser.build.find_shift", find_shift)
    assert start(make_head(TARGET, "eagle3")).draft_check.misfit is None


def test_what_is_known_at_the_start_outlasts_good_and_bad_guesses(caplog):
    check = DraftCheck("its features seem to be off by a layer")
    for accepted, found in ((1, "off by a layer"), (0, "first tokens were accepted"), (1, "off by a layer")):
        for _ in range(2 * MEMORY):
            teach(check, [1], [accepted])
        assert found in (check.misfit or "")
    assert len(warnings_of(caplog)) == 2


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
