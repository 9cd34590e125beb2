"""Traffic under which KV memory is short, and the columns that play it: on an engine, or simulated.

A column is a policy and what the draft does meanwhile: it stays in, it moves by the policy's rule, or it is out all the
time ("no draft": the best that `off` can do with the same memory).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

from benchmarks.lib.journal import Figures
from faser.cost.curve import Curve
from faser.engine.engine import Engine
from faser.engine.residency import Place, Residency
from faser.sim.oracle import AcceptanceModel
from faser.sim.replica import Machine, make_replica
from faser.traffic.document import Run, Workload
from faser.traffic.play import REAL_CLOCK, Clock, Stopped, play, set_policy, warm_ups_of
from faser.traffic.summary import summarize
from faser.traffic.traces import Timing
from faser.traffic.workload import Load, Vocabulary, WorkloadOptions, make_workload

IN, MOVES, OUT = "in", "moves", "out"
SPIKE = (2, 8, 24, 40, 6)  # requests/s
SWING = (4, 28)
AZURE_RATE = 28.0  # requests/s
WARM_UP = 8  # requests before a run
FIGURES = ("requests", "lost", "output_tokens_per_s", "latency_per_token_mean", "ttft_p99", "mean_length")


@dataclass(frozen=True)
class Column:
    policy: str
    draft: str = IN

    @property
    def name(self) -> str:
        return {IN: self.policy, MOVES: f"{self.policy}+offload", OUT: "no draft"}[self.draft]


COLUMNS = {
    column.name: column
    for column in (
        Column("off"), Column("off", OUT), Column("fixed:3"), Column("nightjar"), Column("nightjar", MOVES),
        Column("faser"), Column("faser", MOVES),
    )
}  # fmt: skip


@dataclass(frozen=True)
class TrafficSizes:
    """Seconds of each pattern, a factor on all rates, and the longest prompt and output."""

    seconds: float
    scale: float = 1.0
    max_prompt: int = 1024
    max_output: int = 256
    prompts: str = "specbench"
    seed: int = 0

    def patterns(self) -> dict[str, WorkloadOptions]:
        """Azure's lengths in all of them; its arrivals in the first."""
        options = partial(
            WorkloadOptions,
            trace="azure-conv",
            max_prompt=self.max_prompt,
            max_output=self.max_output,
            prompts=self.prompts,
            seed=self.seed,
        )
        lasting = Timing(duration=self.seconds, scale=self.scale)
        azure = Timing(span=self.seconds, rate=AZURE_RATE * self.scale, repeats=True)
        return {
            "azure": options(timing=azure),
            "spike": options(arrivals=f"steps:{':'.join(map(str, SPIKE))}", timing=lasting),
            "swing": options(arrivals=f"square:{SWING[0]}:{SWING[1]}:{self.seconds / 2:g}", timing=lasting),
        }

    def wave(self, period: float) -> WorkloadOptions:
        timing = Timing(duration=self.seconds, scale=self.scale)
        arrivals = f"square:{SPIKE[0]}:{SPIKE[3]}:{period:g}"
        return replace(self.patterns()["spike"], arrivals=arrivals, timing=timing)


def workload_of(options: WorkloadOptions, vocabulary: Vocabulary) -> Workload:
    return make_workload(options, Load(), vocabulary)


# ── on an engine ─────────────────────────────────────────────────────────────────────────────────────────────────────


def residency_of(engine: Engine) -> Residency:
    if engine.residency is None:
        raise ValueError("the draft of this engine cannot leave the device")
    return engine.residency


def bring_home(engine: Engine) -> None:
    """The draft comes back, if it is away. The engine has no requests."""
    residency_of(engine).bring_back()


def send_away(engine: Engine) -> None:
    """The draft leaves. The engine has no requests."""
    residency = residency_of(engine)
    residency.leave()
    while residency.is_moving:
        residency.proceed()
    if residency.place is not Place.AWAY:
        raise RuntimeError(residency.stats.failure or f"the draft is {residency.place.value}")


@contextmanager
def under(engine: Engine, column: Column) -> Iterator[None]:
    """The engine with a column's policy; the draft is where the column wants it, and at home afterwards."""
    residency = engine.residency
    bring_home(engine)
    set_policy(engine, column.policy)
    if column.draft == OUT:
        send_away(engine)
    if column.draft != MOVES:
        engine.residency = None
    try:
        yield
    finally:
        engine.residency = residency
        bring_home(engine)


def play_column(engine: Engine, column: Column, workload: Workload, stopped: Stopped) -> Figures:
    with under(engine, column):
        warm, _ = warm_ups_of(workload, WARM_UP)
        play(engine, warm, column.name, stopped=stopped)
        set_policy(engine, column.policy)  # it has learned nothing
        return measured(engine, column, workload, REAL_CLOCK, stopped)


def measured(engine: Engine, column: Column, workload: Workload, clock: Clock, stopped: Stopped) -> Figures:
    """Figures of one run, and what the draft did in it."""
    preemptions, residency = engine.scheduler.num_preemptions, engine.residency
    before = residency.stats if residency is not None else None
    run = play(engine, workload, column.name, clock=clock, stopped=stopped)
    figures = {**figures_of(run), "preemptions": engine.scheduler.num_preemptions - preemptions}
    if residency is None or before is None:
        return {**figures, "moves": 0, "away_s": 0.0}
    after = residency.stats
    return {**figures, "moves": after.moves - before.moves, "away_s": after.away_seconds - before.away_seconds}


def figures_of(run: Run) -> Figures:
    summary = summarize(run)
    return {**{name: summary[name] for name in FIGURES}, "partial": run.partial}


# ── simulated ────────────────────────────────────────────────────────────────────────────────────────────────────────


def simulate_column(machine: Machine, column: Column, workload: Workload, acceptance: AcceptanceModel) -> Figures:
    """The same on a simulated machine; `machine` has the pool of a resident draft."""
    machine = replace(machine, offload="auto")
    if column.draft != MOVES:
        gained = machine.pages_gained if column.draft == OUT else 0
        machine = replace(machine, offload="off", kv_tokens=(machine.num_pages + gained) * machine.page_size)
    oracle = acceptance.oracle([item.category for item in workload.items], 0)
    replica = make_replica(machine, column.policy, oracle)
    figures = measured(replica.engine, column, workload, replica.time.clock, lambda: False)
    replica.engine.scheduler.check()
    return figures


def scaled(curve: Curve, factor: float) -> Curve:
    seconds, per_token = (tuple(factor * each for each in values) for values in (curve.seconds, curve.per_token))
    return replace(curve, seconds=seconds, per_token=per_token)


# ── what is said of it ───────────────────────────────────────────────────────────────────────────────────────────────


def ratios(columns: Mapping[str, Figures]) -> Figures:
    """Throughput and latency per token of each column against fixed:3, and with offload against without."""
    against = {name: (name, "fixed:3") for name in columns if name != "fixed:3"}
    against |= {f"{name} by offload": (name, name.removesuffix("+offload")) for name in columns if "+" in name}
    return {
        key: {figure: _ratio(columns[one], columns[other], figure) for figure in FIGURES[2:4]}
        for key, (one, other) in against.items()
        if other in columns
    }


def _ratio(one: Figures, other: Figures, figure: str) -> float | None:
    return one[figure] / other[figure] if one[figure] and other[figure] else None


def table(columns: Mapping[str, Figures]) -> str:
    """A row for each column."""
    lines = [f"{'':18}   tok/s  ms/token  TTFT p99  preempted  moves   away  length"]
    for name, each in columns.items():
        throughput, latency, ttft, length = (each[figure] or 0.0 for figure in FIGURES[2:])
        lines.append(
            f"{name:18} {throughput:7.0f} {1e3 * latency:9.2f} {ttft:9.2f} {each['preemptions']:10} "
            f"{each['moves']:6} {each['away_s']:6.1f} {length:7.2f}"
        )
    return "\n".join(lines)
