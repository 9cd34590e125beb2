"""The plugin in a real engine on a CPU: the output is vLLM's own, nothing leaks, wrong configurations are refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
POLICIES = [{"policy": "fixed:3"}, {"policy": "off"}, {"policy": "faser"}, {"policy": "faser", "max_draft": True}]
EVERY = [*POLICIES, {"policy": "fixed:5", "max_draft": True}, {"policy": "fixed:3", "aborts": True}]
FAILING = {"policy": "fixed:3", "fails": True}


def start(spec: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.vllm.real.engine", json.dumps(spec)]
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": paths}
    )


def result(spec: dict[str, Any]) -> dict[str, Any]:
    done = start(spec)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, done.stdout[-3000:] + done.stderr[-3000:]
    return {**json.loads(lines[-1].removeprefix("RESULT ")), "log": done.stdout + done.stderr}


@cache
def without_speculation(folder: Path) -> list[list[int]]:
    """vLLM's own output without speculation."""
    return result({"pair": str(folder), "method": None, "runs": [{}]})["runs"][0]["tokens"]


@pytest.fixture(scope="module", params=["draft_model", "ngram", "eagle3"])
def engine(request, pair) -> dict[str, Any]:
    folder = request.getfixturevalue("heads") if request.param == "eagle3" else pair
    done = result({"pair": str(folder), "method": request.param, "runs": [*EVERY, FAILING]})
    return {**done, "method": request.param, "plain": without_speculation(folder)}


def test_the_flag_puts_faser_s_scheduler_in_place(engine):
    assert engine["scheduler"].startswith("AfterScheduler")
    assert "FASER in vLLM" in engine["log"]


@pytest.mark.parametrize("index", range(5), ids=["fixed:3", "off", "faser", "faser mixed", "fixed mixed"])
def test_greedy_output_is_vllm_s_own_without_speculation(engine, index):
    run = engine["runs"][index]
    assert run["tokens"] == engine["plain"]
    assert run["leaked"] == 0
    assert run["open"] == 1


def test_policies_draft_as_they_say(engine):
    fixed, off = engine["runs"][:2]
    assert fixed["verified"] > 100
    assert 0 < fixed["accepted"] <= fixed["verified"]
    assert off["verified"] == off["drafting_steps"] == 0
    assert fixed["steps"] < off["steps"]


def test_aborted_requests_leak_nothing_and_change_no_other(engine):
    run, plain = engine["runs"][5], engine["plain"]
    assert run["leaked"] == 0
    assert run["open"] == 1
    whole = [index for index, tokens in enumerate(run["tokens"]) if len(tokens) == len(plain[index])]
    assert 0 < len(whole) < len(plain)
    assert all(tokens == plain[index][: len(tokens)] for index, tokens in enumerate(run["tokens"]))


def test_a_failing_policy_falls_back_to_vllm_s_length_and_says_so_once(engine):
    run = engine["runs"][6]
    assert run["tokens"] == engine["plain"]
    assert run["failures"] == run["steps"]
    assert run["verified"] > 100
    assert engine["log"].count("policy failing failed (ZeroDivisionError") == 1


def test_preemption_changes_no_token_and_leaks_nothing(pair):
    spec = {"pair": str(pair), "method": "draft_model", "runs": [POLICIES[0], POLICIES[2]], "num_blocks": 14}
    done = result(spec)
    assert done["preemptions"] > 0
    for run in done["runs"]:
        assert run["tokens"] == without_speculation(pair)
        assert run["leaked"] == 0
    assert run["open"] == 1


def test_prefix_caching_changes_no_token(pair):
    spec = {"pair": str(pair), "method": "draft_model", "prefix_caching": True}
    runs = [POLICIES[1], POLICIES[0], POLICIES[2]]  # blocks that the draft has not seen come first
    done = result({**spec, "runs": runs})
    assert [run["tokens"] == without_speculation(pair) for run in done["runs"]] == [True, True, True]


def test_policies_plan_for_two_workers_with_the_costs_that_these_measured(pair):
    spec = {"pair": str(pair), "method": "draft_model", "runs": POLICIES, "tensor_parallel": 2}
    done = result(spec)
    assert [run["tokens"] == without_speculation(pair) for run in done["runs"]] == [True] * len(POLICIES)
    fixed, off = done["runs"][:2]
    assert fixed["accepted"] > 0
    assert off["drafting_steps"] == 0
    assert "FASER: costs were measured by the worker" in done["log"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"runs": [{"policy": "best"}]}, "policy 'best': expected off"),
        ({"runs": [{"policy": "faser"}], "options": {"lenght": 3}}, "has no lenght; it has policy"),
        ({"runs": [{"policy": "fixed:7"}]}, "policy fixed:7 needs num_speculative_tokens of 7, not 5"),
        ({"runs": [{"policy": "faser"}], "method": None}, "nothing drafts here: add --speculative-config"),
    ],
)
def test_a_wrong_configuration_is_refused_with_the_reason(pair, change, reason):
    done = start({"pair": str(pair), "method": "ngram"} | change)
    assert done.returncode != 0
    assert reason in done.stdout + done.stderr
