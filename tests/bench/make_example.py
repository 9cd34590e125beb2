"""Writes example.json beside it: a document of faser bench over a simulated engine.

python -m tests.bench.make_example
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

from faser.bench.results import run_document
from faser.traffic.document import Document, RunDocument, Workload
from faser.traffic.play import play, set_policy
from faser.traffic.summary import Slo, group_runs
from faser.traffic.workload import Load
from tests.traffic.simulated import Time, make_engine, make_workload

PATH = Path(__file__).parent / "example.json"
RATES = (4.0, 24.0)
SLO = Slo({"ttft": 0.2, "tpot": 0.015})


def make_example() -> Document:
    runs = [_run(policy, rate, repeat) for rate in RATES for repeat in range(2) for policy in ("off", "fixed:3")]
    return Document(
        command=("faser", "bench", "--policies", "off,fixed:3", "--rate", "4,24", "--repeats", "2"),
        created="2026-01-01T00:00:00+00:00",
        about={
            "machine": "a simulated one",
            "device": "oracle",
            "model": "oracle",
            "draft": "oracle",
            "versions": {"faser": "0.1.0", "python": "3.11"},
            "slo": dict(SLO.most),
        },
        workload={
            "arrivals": "even distances, shaken",
            "prompts": "five tokens",
            "seed": 0,
            "loads": [{"rate": rate, "concurrency": None, "requests": 48} for rate in RATES],
        },
        runs=tuple(runs),
        groups=group_runs(runs),
    )


def _run(policy: str, rate: float, repeat: int) -> RunDocument:
    time = Time()
    engine = make_engine(time, agreement=0.7 + 0.02 * repeat)
    set_policy(engine, policy)
    run = play(engine, _shaken(make_workload(48, rate)), policy, clock=time.clock)
    return run_document(run, policy=policy, load=Load(rate), repeat=repeat, slo=SLO)


def _shaken(workload: Workload) -> Workload:
    """Swings: the second half of the requests comes three times as fast as the first."""
    chance, now, items = random.Random(0), 0.0, []
    for number, item in enumerate(workload.items):
        items.append(replace(item, arrival=now))
        now += chance.expovariate(1.0) * workload.items[1].arrival * (1.5 if number < 24 else 0.5)
    return replace(workload, items=tuple(items))


if __name__ == "__main__":
    make_example().save(PATH)
