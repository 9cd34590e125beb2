"""Verifications that drop drafts between layers emit the tokens of the CPU, and read what the CPU reads."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from faser.build import build_engine
from faser.config import EngineOptions
from faser.models.transformer import Transformer
from faser.policy import Fixed
from faser.policy.early_exit import EarlyExit
from faser.rules.early_exit import ExitPoint, ExitReadings, ExitRule
from tests.runtime.cuda.test_executor import assert_same_logprobs, chosen, make_engine
from tests.test_exactness import reference, serve
from tests.tiny import CONFIGS, make_draft

pytest.importorskip("triton")


INTERPRETED = {("some, twice", True)}  # half a minute each in the interpreter

EXITS = {
    "nearly everything at the first layer": ExitRule((ExitPoint.by_rank(1, 1),)),
    "some, twice": ExitRule((ExitPoint.by_rank(1, 20), ExitPoint.by_rank(2, 6))),
    "by place, before the first layer": ExitRule(
        (ExitPoint(0, (0.0, 0.0, 0.0, 0.0, 1.0), 0.5), ExitPoint.by_rank(1, 10))
    ),
    "by confidence alone": ExitRule((ExitPoint(0, (0.0, 0.0, 0.0, -1.0, 0.3), 1.0),)),
    "against a shortlist": ExitRule((ExitPoint(1, (0.0, 1.0, 0.0, 0.0, 1.0), 0.5, 24),)),
    "a trial": ExitRule((ExitPoint.by_rank(1, 1), ExitPoint.by_rank(2, 1)), is_trial=True),
}


def leave_most_to_the_gpu(device: str, runs: bool) -> None:
    if device == "cpu" and not runs:
        pytest.skip("slow in Triton's interpreter: `make test-gpu` runs these on a GPU")


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("exits", EXITS)
def test_drafts_that_leave_early_change_no_token(device, exits, ahead):
    leave_most_to_the_gpu(device, (exits, ahead) in INTERPRETED)
    target = Transformer.random(replace(CONFIGS["llama3"], head_dim=16, num_layers=3), 0, std=0.3)
    requests = chosen(target, device)
    expected = reference(target, requests)
    engine = make_engine(device, target, make_draft(target), Fixed(3), ahead=ahead)
    engine.exits = EarlyExit("on", 3, rule=EXITS[exits])
    outcome = serve(engine, requests, {r.id: i for i, r in enumerate(requests)})
    assert outcome.tokens == expected.tokens
    assert outcome.reasons == expected.reasons
    assert_same_logprobs(outcome, expected)
    stats = engine.stats
    if exits == "a trial":
        assert stats.verified == stats.drafted > stats.accepted > 0
    else:
        assert stats.verified < stats.drafted
        assert sum(engine.exits.stats.pruned.values()) == stats.drafted - stats.verified


@pytest.mark.parametrize("candidates", [0, 24])
def test_middle_layers_rank_drafts_as_on_the_cpu(device, candidates):
    """Rank, margin, confidence and place of every draft of a step, and before the first layer."""
    leave_most_to_the_gpu(device, candidates > 0)
    target = Transformer.random(replace(CONFIGS["llama3"], head_dim=16, num_layers=2), 0, std=0.3)
    draft = make_draft(target)
    plain = [r for r in chosen(target, device) if r.id in ("greedy", "sampled")]
    requests = [replace(r, params=replace(r.params, max_tokens=4)) for r in plain]
    found: list[list[ExitReadings]] = []
    options = {"max_running": 6, "max_batch_tokens": 64, "max_step_ms": 0, "page_size": 4, "num_pages": 300}
    plain = build_engine(target, draft, EngineOptions(policy=Fixed(3), **options))
    for engine in (plain, make_engine(device, target, draft, Fixed(3))):
        points = ExitPoint.by_rank(0, 1), ExitPoint.by_rank(1, 1, candidates)
        engine.exits = Recording("on", 2, rule=ExitRule(points, is_trial=True))
        serve(engine, requests)
        found.append(engine.exits.readings)
    assert len(found[0]) == len(found[1]) > 0
    for mine, theirs in zip(*found, strict=True):
        assert mine.owner.tolist() == theirs.owner.tolist()
        assert mine.place.tolist() == theirs.place.tolist()
        torch.testing.assert_close(
            torch.from_numpy(mine.features), torch.from_numpy(theirs.features), atol=2e-3, rtol=1e-3
        )


def test_beside_prompts_drafts_leave_before_the_first_layer_or_not_at_all(device):
    target = Transformer.random(replace(CONFIGS["llama3"], head_dim=16, num_layers=2), 0, std=0.3)
    requests = chosen(target, device)
    expected = reference(target, requests)
    engine = make_engine(device, target, make_draft(target), Fixed(3), max_batch_tokens=12)
    by_place = ExitPoint(0, (0.0, 0.0, 0.0, 0.0, 1.0), 0.5)  # the first of each draft stays
    engine.exits = exits = Recording("on", 2, rule=ExitRule((by_place, ExitPoint.by_rank(1, 1))))
    outcome = serve(engine, requests, {r.id: 2 * i for i, r in enumerate(requests)})
    assert outcome.tokens == expected.tokens
    was_ranked = [not np.isnan(each.features[1]).all() for each in exits.readings]
    assert set(was_ranked) == {True, False}
    for readings, ranked in zip(exits.readings, was_ranked, strict=True):
        assert (readings.kept[0] == np.minimum(1, np.bincount(readings.owner, minlength=readings.kept.shape[1]))).all()
        assert ranked or (readings.kept[1] == readings.kept[0]).all()


class Recording(EarlyExit):
    """Keeps all readings."""

    def __init__(self, *given, **named) -> None:
        super().__init__(*given, **named)
        self.readings: list[ExitReadings] = []

    def learn(self, rule, plan, result) -> None:
        if result.exits is not None:
            self.readings.append(result.exits)
