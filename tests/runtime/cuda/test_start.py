"""What a start on a GPU prepares: graphs of a mechanism only if the profile says that the mechanism can pay."""

from __future__ import annotations

from dataclasses import replace

import pytest

from faser.cost.curve import Curve
from faser.models.transformer import Transformer
from faser.policy import Fixed
from tests.policy.profiles import H200
from tests.runtime.cuda.test_executor import make_engine
from tests.runtime.profiling.engines import Costly
from tests.tiny import CONFIGS, make_draft

pytest.importorskip("triton")


@pytest.fixture
def target():
    return Transformer.random(replace(CONFIGS["llama3"], head_dim=16, num_layers=2), 0, std=0.3)


def exit_graphs(engine) -> int:
    return len(engine.executor.early_exit.parts.graphs)


def profile_with(tmp_path, check_seconds: float) -> str:
    """A verification of these few rows rises steeply, so that dropping drafts saves much."""
    steep = Curve((1, 24), (1e-3, 1e-1), (0.0, 0.0))
    check = Curve((1, 24), (check_seconds, check_seconds), (0.0, 0.0))
    path = tmp_path / "profile.json"
    replace(H200, verify=steep, exit_check=check).save(path)
    return str(path)


@pytest.mark.parametrize(("check_seconds", "is_prepared"), [(1e-5, True), (10.0, False)])
def test_exit_graphs_are_captured_only_if_the_profile_says_that_an_exit_can_pay(
    device, target, tmp_path, check_seconds, is_prepared
):
    profile = profile_with(tmp_path, check_seconds)
    engine = make_engine(device, target, make_draft(target), Fixed(3), profile=profile)
    assert (exit_graphs(engine) > 0) == is_prepared
    assert engine.exits is not None, "an exit before the first layer has no graphs"
    assert [score.layer for score in engine.exits._scores.values()] == ([0, 1] if is_prepared else [0])


@pytest.mark.parametrize(("mode", "is_prepared"), [("on", True), ("auto", False), ("off", False)])
def test_without_a_profile_exit_graphs_are_captured_only_if_exits_are_forced(device, target, mode, is_prepared):
    engine = make_engine(device, target, make_draft(target), Fixed(3), early_exit=mode)
    assert (exit_graphs(engine) > 0) == is_prepared


def test_a_quick_profile_measures_neither_exits_nor_overlap(device, target, tmp_path, monkeypatch):
    from faser.runtime.cuda.executor import CudaExecutor

    monkeypatch.setenv("FASER_CACHE", str(tmp_path))
    monkeypatch.setattr("faser.runtime.profiling.profiler.QUICK_SECONDS", 0.0 if device == "cpu" else 1.2)
    plans, submit = [], CudaExecutor.submit
    monkeypatch.setattr(CudaExecutor, "submit", lambda executor, plan: (plans.append(plan), submit(executor, plan))[1])
    engine = make_engine(device, target, make_draft(target), Costly(), profiling="quick")
    assert plans
    assert all(plan.exits is None and plan.overlap is None for plan in plans)
    assert exit_graphs(engine) == 0
