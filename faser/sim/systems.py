"""Simulated machines as systems that a benchmark drives: one GPU, a few, or a thousand.

Every run has fresh replicas at second 0 and a policy that has learned nothing. All policies meet the same requests and
the same outcomes of drafts; a repeat draws others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median

from faser.bench.document import Document, RunDocument
from faser.bench.play import Update, play
from faser.bench.records import Run, Workload
from faser.bench.systems import Stopped
from faser.bench.table import shown_rate
from faser.cost.profile import Profile
from faser.errors import ConfigError
from faser.sim.cluster import play_cluster
from faser.sim.fluid import play_fluid
from faser.sim.oracle import Acceptance, Oracle
from faser.sim.pace import Pace, measure_pace
from faser.sim.replica import Machine, make_replica

PROFILES = Path(__file__).parent / "profiles"
MOST_EXACT = 16  # replicas of which every step is simulated
REPEAT_SEEDS = 1_000_003  # between the seeds of two repeats


def load_profile(name: str) -> Profile:
    """A shipped one by name, or a file."""
    shipped = {path.stem: path for path in sorted(PROFILES.glob("*.json"))}
    path = shipped.get(name) or Path(name).expanduser()
    if not path.is_file():
        raise ConfigError(
            f"--profile {name}: no such file; give one that `faser profile` wrote, or one of {', '.join(shipped)}"
        )
    return Profile.load(path)


@dataclass
class SimulatedSystem:
    """One policy on so many replicas of a machine."""

    name: str
    machine: Machine
    acceptance: Acceptance
    seed: int = 0
    num_replicas: int = 1
    _num_played: Counter[int] = field(default_factory=Counter)  # by workload
    _pace: Pace | None = None

    @property
    def policy(self) -> str:
        return self.name

    def warm_up(self, workload: Workload, size: int, stopped: Stopped) -> None:
        """A simulated machine is always warm."""

    def play(self, workload: Workload, stopped: Stopped, update: Update) -> Run:
        seed = self.seed + REPEAT_SEEDS * self._num_played[id(workload)]
        self._num_played[id(workload)] += 1
        if self.num_replicas > MOST_EXACT:
            return self._play_many(workload, stopped, update)
        oracle = self.acceptance.oracle([item.category for item in workload.items], seed)
        if self.num_replicas == 1:
            return self._play_one(workload, oracle, seed, stopped, update)
        replicas = [make_replica(self.machine, self.name, oracle, seed + number) for number in range(self.num_replicas)]
        return play_cluster(replicas, workload, self.name, stopped=stopped, update=update)

    def _play_one(self, workload: Workload, oracle: Oracle, seed: int, stopped: Stopped, update: Update) -> Run:
        replica = make_replica(self.machine, self.name, oracle, seed)
        run = play(replica.engine, workload, self.name, clock=replica.time.clock, stopped=stopped, update=update)
        return replace(run, about={"preemptions": replica.engine.scheduler.num_preemptions})

    def _play_many(self, workload: Workload, stopped: Stopped, update: Update) -> Run:
        if workload.concurrency is not None:
            raise ConfigError(f"a closed loop is simulated step by step, with {MOST_EXACT} --replicas at most")
        if self._pace is None:
            self._pace = measure_pace(self.machine, self.name, workload, self.acceptance, self.seed, stopped)
        if self._pace is None:
            return Run(self.name, (), 0.0, partial=True)
        return play_fluid(
            self.machine, self._pace, self.num_replicas, workload, self.name, stopped=stopped, update=update
        )


def per_gpu_table(document: Document) -> str:
    """What one of the replicas did, for every load and system: medians of the repeats."""
    found: dict[tuple[str, float | None, int | None], list[RunDocument]] = {}
    for run in document.runs:
        if "busy_share" in run.about:
            found.setdefault(run.group, []).append(run)
    rows = [("per GPU", "load", "tok/s", "busy %")]
    for (system, rate, concurrency), runs in found.items():
        tokens, busy = (_median(runs, name) for name in ("output_tokens_per_s_per_gpu", "busy_share"))
        load = f"{shown_rate(rate)}/s" if rate is not None else f"{concurrency} open"
        rows.append((system, load, f"{tokens:.1f}", f"{100 * busy:.1f}"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows)


def _median(runs: Sequence[RunDocument], name: str) -> float:
    return median(run.about[name] or 0.0 for run in runs)
