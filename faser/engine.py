"""The loop: a step is plan, execute, commit.

Knows the order of things and the one seam, `Executor`. Knows nothing of tensors, text or transport: `LLM`, the server
and the simulator all drive this class.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import TYPE_CHECKING, Protocol

from faser.cost import StepCost
from faser.scheduler import Scheduler
from faser.stats import EngineStats
from faser.types import FinishReason, Progress, Request, StepPlan, StepResult

if TYPE_CHECKING:
    from faser.text import StopChecker


class Executor(Protocol):
    """Runs plans. It keeps a copy of each running request's tokens and page tables, told to it by the plans alone."""

    def execute(self, plan: StepPlan) -> StepResult: ...

    def close(self) -> None: ...


class Engine:
    """Requests in, tokens out, one step at a time."""

    def __init__(self, scheduler: Scheduler, executor: Executor, clock: Callable[[], float] = perf_counter) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.stats = EngineStats()
        self.cost = StepCost()
        self._clock = clock

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def add(self, request: Request, checker: StopChecker | None = None) -> None:
        self.scheduler.add(request, checker)

    def cancel(self, request_id: str) -> bool:
        return self.scheduler.cancel(request_id)

    def step(self) -> list[Progress]:
        """One turn. If it raises, call `abandon`: the open requests cannot go on."""
        started = self._clock()
        plan = self.scheduler.plan()
        if plan is None:
            return self.scheduler.take_ended()
        predicted = self.cost.predict(plan)
        planned = self._clock()
        result = self.executor.execute(plan)
        progress = self.scheduler.commit(plan, result)
        ended = self._clock()
        self.cost.learn(plan, ended - started)
        self.stats.record(plan, result, progress, started=started, planned=planned, ended=ended, predicted=predicted)
        return progress

    def abandon(self, reason: FinishReason = FinishReason.FAILED) -> list[Progress]:
        """End every open request; the engine is then empty and usable again."""
        return self.scheduler.abandon(reason)

    def close(self) -> None:
        self.executor.close()
