"""The shipped profile against what was measured on an H200."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import sim_error

MEASURED = Path(__file__).parents[2] / "docs" / "results" / "h200-policies" / "results.json"


@pytest.mark.parametrize("size", [4, 64])
def test_simulated_loops_are_near_the_measured_ones(tmp_path, size):
    document = json.loads(MEASURED.read_text())
    names = ("off", "fixed:3", "faser", "batch-wide")
    document["runs"] = [run for run in document["runs"] if run["concurrency"] == size and run["system"] in names]
    path = tmp_path / "results.json"
    path.write_text(json.dumps(document))
    lines = sim_error.compare(path, ("--profile", "h200-8b-1b", "--acceptance", str(MEASURED)))
    assert {line["policy"] for line in lines} == {"off", "fixed:3", "faser"}, "a part of an ablation is no policy"
    assert all(abs(line[figure]) < sim_error.AIM for line in lines for figure in sim_error.FIGURES)
