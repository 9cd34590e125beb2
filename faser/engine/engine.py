"""The loop: a step is plan, execute, commit.

Knows the order of things and the one seam, `Executor`. Knows nothing of tensors, text or transport: `LLM`, the server
and the simulator all drive this class.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from time import perf_counter
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from faser.cost.profiled_cost import ProfiledCost
from faser.cost.step_cost import StepCost
from faser.engine.scheduler import Scheduler
from faser.engine.stats import EngineStats
from faser.policy.base import Outcome
from faser.policy.early_exit import EarlyExit
from faser.request import FinishReason, Progress, Request
from faser.rules.early_exit import ExitRule
from faser.step import StepPlan, StepResult

if TYPE_CHECKING:
    from faser.text.tokenizer import StopChecker


class Executor(Protocol):
    """Runs plans. It keeps a copy of each running request's tokens and page tables, told to it by the plans alone."""

    def execute(self, plan: StepPlan) -> StepResult: ...

    def close(self) -> None: ...


@runtime_checkable
class AsyncExecutor(Protocol):
    """An executor that runs by itself once told: plans go in and results come out in the same order."""

    def submit(self, plan: StepPlan) -> None: ...

    def collect(self) -> StepResult:
        """The result of the oldest plan submitted; waits for it."""
        ...

    def go_on(self) -> None:
        """Do what the plan submitted last still needs the host for, so that the device need not wait for it."""
        ...

    def may_run_ahead(self, plan: StepPlan) -> bool:
        """Whether another plan may be submitted before the result of this one was collected.

        The executor then takes back refused drafts itself, from the requests of the next plan that are `unsettled`.
        """
        ...

    def discard(self) -> None:
        """Forget what was submitted and not collected."""
        ...


@dataclass(frozen=True)
class _Flight:
    plan: StepPlan  # the scheduler's
    exits: ExitRule | None
    predicted: float | None
    started: float
    planned: float


class Engine:
    """Requests in, tokens out, one step at a time.

    `exits`, where given, drops drafts in the midst of verifications. `on_idle` improves the engine by a little while
    there are no requests, and says whether it could do more.
    `cost` is the one the scheduler's policy goes by, where it needs one. With an `AsyncExecutor` the next step is
    planned and submitted while this one runs, wherever it can be.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        clock: Callable[[], float] = perf_counter,
        cost: ProfiledCost | None = None,
        exits: EarlyExit | None = None,
        on_idle: Callable[[], bool] = lambda: False,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.stats = EngineStats()
        self.cost = cost or StepCost()
        self.exits = exits
        self.on_plan: Callable[[], None] = lambda: None  # called when a step is planned, before anybody waits for it
        self._async = executor if isinstance(executor, AsyncExecutor) else None
        self._flights: deque[_Flight] = deque()
        self._landed = float("-inf")  # when the last step ended
        self._clock = clock
        self._on_idle = on_idle
        self._on_close = on_close

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self._flights)

    def add(self, request: Request, checker: StopChecker | None = None) -> None:
        self.scheduler.add(request, checker)

    def cancel(self, request_id: str) -> bool:
        return self.scheduler.cancel(request_id)

    def use_idle_moment(self) -> bool:
        """Do a little of what is better done without requests; whether there is more of it."""
        if self.has_work:
            return False
        try:
            return self._on_idle()
        except Exception:
            if self._async is not None:
                self._async.discard()  # or the next request would be given the result of a made-up step
            raise

    def step(self) -> list[Progress]:
        """One turn. If it raises, call `abandon`: the open requests cannot go on."""
        if not self._flights and not self._launch():
            return self.scheduler.take_ended()
        if self._async is not None:
            self._async.go_on()
            if len(self._flights) == 1 and self._async.may_run_ahead(self._flights[0].plan):
                self.scheduler.advance()
                self._launch()
        return self._land()

    def _launch(self) -> bool:
        """Plan a step, and let an asynchronous executor begin with it; False where there is nothing to do."""
        started = self._clock()
        plan = self.scheduler.plan()
        if plan is None:
            return False
        exits = self.exits.rule_for(plan) if self.exits is not None else None
        predicted = self.cost.predict(plan)
        planned = self._clock()
        if self._async is not None:
            self._async.submit(_with_exits(plan, exits))
        self._flights.append(_Flight(plan, exits, predicted, started, planned))
        self.on_plan()
        return True

    def _land(self) -> list[Progress]:
        flight = self._flights.popleft()
        plan, exits = flight.plan, flight.exits
        result = self._async.collect() if self._async else self.executor.execute(_with_exits(plan, exits))
        settled = self.scheduler.settled
        progress = self.scheduler.commit(plan, result)
        plan = settled
        ended = self._clock()
        # A step planned ahead began, as far as anybody waited for it, when the one before it ended.
        started = max(flight.started, self._landed)
        planned = started + flight.planned - flight.started
        self._landed = ended
        predicted = flight.predicted
        if plan.stopping is not None:  # what was to be drafted is known by now
            plan = replace(plan, lengths=result.num_drafted)
            predicted = self.cost.predict(plan)
        if self.exits is not None and exits is not None:
            self.exits.learn(exits, plan, result)
        if exits is None or not exits.is_trial:  # no other step takes as long as a trial
            self.cost.learn(plan, result.seconds, ended - started)
            if self.scheduler.pace is not None:
                self.scheduler.pace.learn(plan, result.seconds, ended - started)
        self._teach(plan, result, ended - started)
        self.stats.record(plan, result, progress, started=started, planned=planned, ended=ended, predicted=predicted)
        return progress

    def _teach(self, plan: StepPlan, result: StepResult, seconds: float) -> None:
        policy, overlap, samples = self.scheduler.policy, self.scheduler.overlap, plan.samples
        if not samples.any() or not (policy.learns or overlap is not None):
            return
        lengths, accepted = plan.judged_of(result.num_drafted), result.num_accepted
        if plan.overlap is not None and result.hits is not None:  # the first token of a chunk is judged, too
            lengths = lengths + (plan.overlap.chunk_of(result.num_drafted) > 0)
            accepted = accepted + result.hits
        outcome = Outcome(
            slots=plan.slots[samples],
            lengths=lengths[samples],
            accepted=accepted[samples],
            lag=plan.draft_rows[samples],
            num_prefill_rows=int(plan.num_rows.sum()) - int(samples.sum()),
            seconds=seconds,
            confidence=None if result.confidence is None else result.confidence[samples],
        )
        policy.learn(outcome)
        if overlap is not None:
            overlap.learn(outcome)

    def abandon(self, reason: FinishReason = FinishReason.FAILED) -> list[Progress]:
        """End every open request; the engine is then empty and usable again."""
        self._flights.clear()
        if self._async is not None:
            self._async.discard()
        return self.scheduler.abandon(reason)

    def close(self) -> None:
        self._on_close()
        self.executor.close()


def _with_exits(plan: StepPlan, exits: ExitRule | None) -> StepPlan:
    return plan if exits is None else replace(plan, exits=exits)
