"""Does planning hide behind the GPU? CPU time of plan + commit for 256 running requests with ragged lengths.

On a GPU a forward over 256 requests takes about 8 ms; planning and committing must cost under 1 ms of it. The executor
here is a stub that answers at once with random acceptance, so only the scheduler is timed. Prefix caching is on, both
models have pages, every request drafts its own random length every step, and the bound on a step's seconds learns.

    .venv/bin/python benchmarks/scheduler.py [--requests 256] [--steps 400]

Prints medians, and one JSON document on the last line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import numpy as np

from faser.arrays import IntArray
from faser.engine.pages import PagePool
from faser.engine.prompt_pace import GPU, StepPace
from faser.engine.scheduler import Scheduler
from faser.limits import Limits
from faser.policy import BatchView, Policy
from faser.request import Request, SamplingParams
from faser.step import StepPlan, StepResult, StepSeconds

STEP = StepSeconds(draft=0.002, verify=0.008)  # what the pace is told
PROMPT, PAGE_SIZE, MAX_MODEL_LEN = 128, 16, 8192


class RaggedLengths(Policy):
    name = "ragged"

    def __init__(self, most: int) -> None:
        self.most = most
        self.random = np.random.default_rng(0)

    def lengths(self, view: BatchView) -> IntArray:
        return self.random.integers(0, self.most + 1, size=view.num_requests)


def answer(plan: StepPlan, random: np.random.Generator) -> StepResult:
    """Each drafted token is accepted with probability 0.7."""
    accepted = np.minimum(random.geometric(0.3, size=plan.slots.size) - 1, plan.lengths)
    emitted = int(np.where(plan.samples, accepted + 1, 0).sum())
    return StepResult(plan.lengths, plan.lengths, accepted, random.integers(2, 30_000, size=emitted))


def make_scheduler(num_requests: int, most: int) -> Scheduler:
    limits = Limits(num_requests, 8192, MAX_MODEL_LEN)
    pools = [PagePool(num_requests * MAX_MODEL_LEN // PAGE_SIZE, PAGE_SIZE, num_requests, MAX_MODEL_LEN) for _ in "td"]
    pace = StepPace(GPU.max_step_ms / 1e3, GPU)
    scheduler = Scheduler(limits, RaggedLengths(most), pools[0], pools[1], speculates=True, pace=pace)
    random = np.random.default_rng(1)
    for number in range(num_requests):
        prompt = tuple(random.integers(2, 30_000, size=PROMPT).tolist())
        params = SamplingParams(max_tokens=MAX_MODEL_LEN - PROMPT)
        scheduler.add(
            Request(id=str(number), prompt_token_ids=prompt, params=params, seed=0, stop_ids=frozenset({0, 1}))
        )
    return scheduler


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--most", type=int, default=8, help="the longest draft")
    args = parser.parse_args()

    scheduler, random = make_scheduler(args.requests, args.most), np.random.default_rng(2)
    plan_seconds, commit_seconds, rows = [], [], []
    for _ in range(args.steps):
        started = time.process_time()
        plan = scheduler.plan()
        planned = time.process_time()
        assert plan is not None
        result = answer(plan, random)
        answered = time.process_time()
        scheduler.commit(plan, result)
        if scheduler.drafts.pace is not None:
            scheduler.drafts.pace.learn(plan, STEP, STEP.total)
        if plan.samples.all() and plan.slots.size == args.requests:
            plan_seconds.append(planned - started)
            commit_seconds.append(time.process_time() - answered)
            rows.append(int((plan.num_rows + plan.lengths).sum()))
    total = [p + c for p, c in zip(plan_seconds, commit_seconds, strict=True)]
    summary = {
        "requests": args.requests,
        "steps": len(total),
        "mean_rows": round(statistics.fmean(rows), 1),
        "plan_us": round(1e6 * statistics.median(plan_seconds), 1),
        "commit_us": round(1e6 * statistics.median(commit_seconds), 1),
        "total_us": round(1e6 * statistics.median(total), 1),
        "p99_total_us": round(1e6 * sorted(total)[int(0.99 * len(total))], 1),
    }
    print(f"{args.requests} requests, {summary['mean_rows']:.0f} rows a step, CPU time, median of {len(total)} steps")
    for phase in ("plan", "commit", "total", "p99_total"):
        print(f"  {phase:10} {summary[phase + '_us']:8.1f} µs")
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
