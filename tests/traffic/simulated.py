"""An engine over the oracle whose steps take simulated seconds: minutes of a run in no time, the same every time."""

from __future__ import annotations

from dataclasses import replace

from faser.engine.engine import Engine
from faser.engine.pages import PagePool
from faser.engine.scheduler import Scheduler
from faser.limits import Limits
from faser.policy import make_policy
from faser.step import StepPlan, StepResult, StepSeconds
from faser.traffic.document import Item, Workload
from faser.traffic.play import Clock
from tests.oracle import OracleExecutor


class Time:
    """Virtual time: it passes only when told to."""

    def __init__(self) -> None:
        self.seconds = 100.0

    def now(self) -> float:
        return self.seconds

    def pass_by(self, seconds: float) -> None:
        self.seconds += max(seconds, 1e-6)  # less could be nothing, and nothing would pass

    @property
    def clock(self) -> Clock:
        return Clock(self.now, self.pass_by)


class SlowOracle(OracleExecutor):
    """Takes a verification of 8 ms and a quarter more per row, and 3 ms per drafted token of the longest draft."""

    time: Time
    prepared: tuple[int, ...] = ()

    def prepare(self, length: int) -> None:
        self.prepared = (*self.prepared, length)

    def execute(self, plan: StepPlan) -> StepResult:
        result = super().execute(plan)
        rows = int(plan.num_rows.sum() + plan.lengths.sum())
        seconds = StepSeconds(draft=0.003 * int(plan.lengths.max()), verify=0.008 + 0.00025 * rows)
        self.time.pass_by(seconds.draft + seconds.verify + 0.0005)
        return replace(result, seconds=seconds)


def make_engine(
    time: Time, agreement: float = 0.7, max_running: int = 8, max_batch_tokens: int = 64, max_model_len: int = 128
) -> Engine:
    limits = Limits(max_running, max_batch_tokens, max_model_len)

    def pool() -> PagePool:
        return PagePool(16 * max_running, 8, max_running, max_model_len, caching=False)

    target, draft = pool(), pool()
    executor = SlowOracle(limits, target, draft, agreement)
    executor.time = time
    scheduler = Scheduler(limits, make_policy("off"), target, draft, speculates=True, prefix_caching=False)
    return Engine(scheduler, executor, time.now)


def make_workload(size: int, rate: float, concurrency: int | None = None) -> Workload:
    """Requests at even distances, of two categories."""
    items = (
        Item(
            arrival=i / rate,
            prompt_token_ids=tuple((i + j) % 5 for j in range(8 + i % 5)),
            max_tokens=4 + 7 * (i % 4),
            category=("maths", "prose")[i % 2],
        )
        for i in range(size)
    )
    return Workload(tuple(items), concurrency, {"source": "even distances", "requests": size})
