"""What `benchmarks.h200 policies` plays and reports; speed itself is measured elsewhere."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from benchmarks import h200
from benchmarks.lib import policies
from benchmarks.lib.ablation import LADDER, Ablated
from faser.cost.profiled_cost import ProfiledCost
from faser.traffic.document import FIGURES, Document, RunDocument
from tests.policy.profiles import H200, make_outcome, make_view


def test_it_all_runs_on_tiny_models(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("OUT", str(tmp_path / "out"))
    given = ["policies", "--tiny", "--device", "cpu", "--folder", str(tmp_path), "--policies", "off,fixed:1,faser"]
    assert h200.main(given) == 0
    line = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    played = {(run["system"], run["concurrency"]) for run in line["runs"]}
    expected = {(name, size) for name in ("off", "fixed:1", "faser") for size in (1, 2)}
    assert played == expected | {(name, 2) for name in LADDER}
    assert {path.name for path in (tmp_path / "out").iterdir()} >= {"results.json", "profile.json", "report.html"}


def run(system: str, size: int, throughput: float) -> RunDocument:
    summary = {**dict.fromkeys(FIGURES, 0.0), "output_tokens_per_s": throughput}
    return RunDocument(system, system, None, size, 0, False, summary)


def test_faser_is_compared_with_the_best_of_the_others_and_every_single_length():
    speeds = {"off": (100, 1000), "fixed:1": (150, 900), "fixed:2": (200, 800), "faser": (210, 990), "+ off": (999, 0)}
    runs = tuple(
        run(name, size, speed) for name, both in speeds.items() for size, speed in zip((1, 64), both, strict=True)
    )
    lines = policies.comparison(Document((), "", {}, {}, runs, ())).splitlines()
    assert lines[1].split() == ["1", "210", "fixed:2", "200", "1.050", "2.100", "1.050"]
    assert lines[2].split() == ["64", "990", "off", "1000", "0.990", "0.990", "1.100"]
    assert "faser over fixed:2      on average  1.144, least  1.050" in lines
    assert not any("+ off" in line for line in lines)


def taught(name: str) -> Ablated:
    """With a draft that has been tried: before that, `faser` drafts a few tokens of a few requests."""
    policy = Ablated(name, LADDER[name])
    policy.learn(make_outcome([1] * 70, [1] * 49 + [0] * 21))
    return policy


def test_an_ablation_lacks_the_parts_taken_out():
    uneven = make_view(8, accepted=[2] * 4 + [190] * 4, tried=200)
    wide = taught("batch-wide").lengths(uneven)
    assert np.unique(wide).size == 1
    assert wide[0] > 0
    each = taught("+ ragged").lengths(uneven)
    assert (each[4:] > each[:4]).all()
    hopeless = make_view(8, accepted=2, tried=200)
    assert taught("+ ragged").lengths(hopeless).tolist() == [1] * 8, "it may not be off"
    assert not taught("+ off").lengths(hopeless).any()


@pytest.mark.parametrize(("name", "checks"), [("+ ragged", False), ("+ confidence", True)])
def test_confidence_is_checked_only_from_its_step_of_the_ladder_on(name, checks):
    view = make_view(1, accepted=190, tried=200)
    policy = taught(name)
    policy.lengths(replace(view, cost=ProfiledCost(replace(H200, stop_seconds=0.0))))
    assert (policy.stopping() is not None) == checks
