"""What steps of vLLM cost: predictions, corrections, and the file between worker and scheduler."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from faser.vllm.config import FaserConfig
from faser.vllm.costs import POLL_STEPS, SPEEDS, CostTable, EngineCost, ModelShape, StepWork, assumed_costs, table_path

TARGET = ModelShape(32, 4096, 14336, 32, 8, 128, 128256)
DRAFT = ModelShape(16, 2048, 8192, 32, 8, 64, 128256)
ASSUMED = assumed_costs(TARGET, DRAFT, SPEEDS["cuda"], 1024)
WITH_DRAFTS = StepWork(rows=40, prompt_rows=0, context=2000, depth=4, num_drafting=8, catch_up_rows=0)
WITHOUT = replace(WITH_DRAFTS, rows=8, depth=0, num_drafting=0)


def test_the_assumed_costs_are_those_of_the_models_sizes():
    assert TARGET.num_weights == pytest.approx(7.5e9, rel=0.1)
    assert DRAFT.num_weights == pytest.approx(1.24e9, rel=0.1)
    cost = EngineCost(ASSUMED)
    assert float(cost.verify(1, 0.0)) > 4 * float(cost.next_draft(1, 0.0))


def test_drafting_costs_the_whole_batch_however_few_reach_a_position():
    cost = EngineCost(ASSUMED)
    cost.num_requests = 64
    few, all_of_them = cost.next_draft(np.array([0, 1, 64]), 0.0)[1:]
    assert few == all_of_them
    assert cost.next_draft(np.array([0, 1]), 0.0)[0] == 0
    assert float(cost.first_draft(1, 0.0)) == float(cost.first_draft(64, 0.0))


def test_a_step_that_does_not_draft_costs_only_the_target():
    cost = EngineCost(ASSUMED)
    plain = cost.seconds_of(WITHOUT)
    assert plain == pytest.approx(float(cost.verify(8, 2000)) + cost.host)
    assert cost.seconds_of(replace(WITHOUT, depth=1, num_drafting=8)) > plain
    assert cost.seconds_of(replace(WITHOUT, depth=1, num_drafting=8, catch_up_rows=900)) > cost.seconds_of(
        replace(WITHOUT, depth=1, num_drafting=8)
    )


@pytest.mark.parametrize("factor", [0.3, 3.0, 40.0])
def test_corrections_scale_the_costs_to_the_machine(factor):
    cost = EngineCost(ASSUMED)
    truth = {work: cost.host + factor * (cost.seconds_of(work) - cost.host) for work in (WITH_DRAFTS, WITHOUT)}
    for _ in range(300):
        for work, seconds in truth.items():
            cost.learn_step(work, seconds)
    for work, seconds in truth.items():
        assert cost.seconds_of(work) == pytest.approx(seconds, rel=0.1)


def test_one_pause_changes_nothing():
    cost = EngineCost(ASSUMED)
    before = cost.seconds_of(WITH_DRAFTS)
    for index in range(30):
        cost.learn_step(WITH_DRAFTS, 20.0 if index == 15 else before)
    assert cost.seconds_of(WITH_DRAFTS) == pytest.approx(before, rel=0.01)


def test_the_scheduler_takes_the_worker_s_profile_when_it_appears(tmp_path):
    path = tmp_path / "costs.json"
    table = CostTable(ASSUMED, path)
    assert table.poll() is None
    measured = replace(ASSUMED, kind="measured", host=0.002, errors={"verify": 0.03, "draft": 0.04})
    measured.save(path)
    news = [table.poll() for _ in range(3 * POLL_STEPS)]
    assert [each for each in news if each] == [f"costs were measured by the worker: {measured.accuracy}"]
    assert table.cost.profile == measured
    assert table.cost.host == 0.002


def test_a_file_that_is_no_profile_leaves_the_assumed_costs_and_says_so_once(tmp_path):
    path = tmp_path / "costs.json"
    path.write_text("{}")
    table = CostTable(ASSUMED, path)
    news = [table.poll() for _ in range(3 * POLL_STEPS)]
    assert len([each for each in news if each]) == 1
    assert news[0].startswith("costs stay assumed")
    assert table.cost.profile.kind == "assumed"


def test_both_processes_find_the_same_file():
    assert table_path(FaserConfig(), "17") == table_path(FaserConfig(policy="off"), "17")
    assert table_path(FaserConfig(), "17") != table_path(FaserConfig(), "18")
    assert str(table_path(FaserConfig(costs="/a/b.json"), "17")) == "/a/b.json"
