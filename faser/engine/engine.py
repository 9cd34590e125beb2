"""The loop: a step is plan, execute, commit.

Knows the order of things and the one seam, `Executor`. Knows nothing of tensors, text or transport: `LLM`, the server
and the simulator all drive this class.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Protocol, runtime_checkable

from faser.cost.profiled_cost import ProfiledCost
from faser.cost.step_cost import StepCost
from faser.engine.activity import Activity
from faser.engine.draft_check import DraftCheck
from faser.engine.residency import Place, Residency
from faser.engine.scheduler import Scheduler
from faser.engine.slots import OutputChecker
from faser.engine.stats import EngineStats
from faser.policy.early_exit import EarlyExit
from faser.request import FinishReason, Progress, Request
from faser.step import StepPlan, StepResult


class Executor(Protocol):
    """Runs plans. Keeps a copy of each running request's tokens and page tables; plans alone update it."""

    def execute(self, plan: StepPlan) -> StepResult: ...

    def close(self) -> None: ...


@runtime_checkable
class AsyncExecutor(Protocol):
    """An executor on a device of its own: plans go in and results come out in the same order."""

    def submit(self, plan: StepPlan) -> None: ...

    def collect(self) -> StepResult:
        """Wait for the result of the oldest plan submitted."""

    def finish_launch(self) -> None:
        """Enqueue the rest of the plan submitted last, where that had to wait for something only the host can do."""

    def may_run_ahead(self, plan: StepPlan) -> bool:
        """Whether another plan may be submitted before the result of this one is collected.

        The executor then takes back rejected drafts itself, from the `unsettled` requests of the next plan.
        """

    def discard(self) -> None:
        """Forget all plans that were submitted and not collected."""


@dataclass(frozen=True)
class _RunningStep:
    plan: StepPlan  # the scheduler's
    executed: StepPlan  # the same, with a rule for early exit where there is one
    predicted: float | None  # seconds
    started: float  # when planning began
    planned: float  # when planning ended


class Engine:
    """Requests in, tokens out, one step at a time.

    With an `AsyncExecutor` the next step is planned and submitted while one runs, wherever it can be. `cost` is the one
    that the scheduler's policy goes by, if it needs one. `exits`, where given, drops drafts in the midst of
    verifications. `residency`, where given, moves the draft out of the device and in again. `on_idle` does a little
    work that needs an idle engine and says whether there is more.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        clock: Callable[[], float] = perf_counter,
        cost: ProfiledCost | None = None,
        exits: EarlyExit | None = None,
        residency: Residency | None = None,
        draft_check: DraftCheck | None = None,
        on_idle: Callable[[], bool] = lambda: False,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.stats = EngineStats()
        self.draft_check = draft_check or DraftCheck()
        self.cost = cost or StepCost()
        self.exits = exits
        self.residency = residency
        self.on_plan: Callable[[], None] = lambda: None  # called when a step is planned, before its result is awaited
        # called when something else begins, with the plan of a step that is executed and its predicted seconds
        self.on_activity: Callable[[Activity, StepPlan | None, float | None], None] = lambda *_: None
        self._async = executor if isinstance(executor, AsyncExecutor) else None
        self._running: deque[_RunningStep] = deque()  # oldest first; two at most
        self._last_ended = float("-inf")  # when the latest step ended
        self._untold: list[Progress] = []  # of a step that was committed, until `step` returns it
        self._clock = clock
        self._on_idle = on_idle
        self._on_close = on_close

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self._running)

    def add(self, request: Request, checker: OutputChecker | None = None) -> None:
        self.scheduler.add(request, checker)

    def cancel(self, request_id: str) -> bool:
        return self.scheduler.cancel(request_id)

    def use_idle_moment(self) -> bool:
        """Do a little of the work that needs an idle engine; whether there is more of it."""
        if self.has_work:
            return False
        self.on_activity(Activity.IDLE_WORK, None, None)
        if self.residency is not None:
            is_moving = self.residency.proceed()
            if self.residency.place is not Place.RESIDENT:
                return is_moving  # other work may need the draft
        try:
            return self._on_idle()
        except Exception:
            if self._async is not None:
                self._async.discard()  # else the next request would get the result of a made-up step
            raise

    def step(self) -> list[Progress]:
        """Run one step. If it raises, call `abandon`: the open requests cannot go on."""
        if self.residency is not None:
            self.on_activity(Activity.MOVING, None, None)
            self.residency.proceed()
        if not self._running and not self._launch():
            return self.scheduler.take_ended()
        if self._async is not None:
            self._plan_ahead(self._async)
        return self._land()

    def _launch(self) -> bool:
        """Plan a step, and let an asynchronous executor begin with it; False where there is nothing to do."""
        started = self._clock()
        self.on_activity(Activity.PLANNING, None, None)
        plan = self.scheduler.plan()
        if plan is None:
            return False
        executed = self._with_exits(plan)
        predicted = self._predict(plan)
        planned = self._clock()
        if self._async is not None:
            self._async.submit(executed)
        self._running.append(_RunningStep(plan, executed, predicted, started, planned))
        self.on_plan()
        return True

    def _plan_ahead(self, executor: AsyncExecutor) -> None:
        """Launch a second step behind the one that runs, where the executor can."""
        executor.finish_launch()
        if len(self._running) == 1 and executor.may_run_ahead(self._running[0].plan):
            self.scheduler.advance()
            self._launch()

    def _land(self) -> list[Progress]:
        """Wait for the oldest step, commit it, and learn from what it took."""
        step = self._running.popleft()
        self.on_activity(Activity.EXECUTING, step.executed, step.predicted)
        result = self._async.collect() if self._async is not None else self.executor.execute(step.executed)
        self.on_activity(Activity.COMMITTING, None, None)
        plan, self._untold = self.scheduler.commit(step.plan, result)
        ended = self._clock()
        started = max(step.started, self._last_ended)  # a step planned ahead begins when the one before it ends
        self._last_ended = ended
        drafted = plan.as_drafted(result)
        predicted = step.predicted if drafted is plan else self._predict(drafted)
        self._learn(step.executed, drafted, result, ended - started)
        planned = started + step.planned - step.started
        progress = self._untold
        self.stats.record(drafted, result, progress, started=started, planned=planned, ended=ended, predicted=predicted)
        return self._take_untold()

    def _take_untold(self) -> list[Progress]:
        progress, self._untold = self._untold, []
        return progress

    def _predict(self, plan: StepPlan) -> float | None:
        """Seconds of a step, as far as they are known."""
        seconds, pace = self.cost.predict(plan), self.scheduler.drafts.pace
        return seconds + pace.seconds_to_encode(plan) if seconds is not None and pace is not None else seconds

    def _learn(self, executed: StepPlan, plan: StepPlan, result: StepResult, seconds: float) -> None:
        """Tell the cost model, the pace and the policy what a step took and brought; `plan` has its true numbers."""
        is_trial, without_encoding = self._learn_exits(executed, plan, result), seconds - result.seconds.encode
        if not is_trial:  # a trial takes longer than other steps
            self.cost.learn(plan, result.seconds, without_encoding)
            if self.scheduler.drafts.pace is not None:
                self.scheduler.drafts.pace.learn(plan, result.seconds, seconds)
        self.scheduler.drafts.teach_policy(plan, result, without_encoding)
        self.draft_check.learn(plan, result)

    def abandon(self, reason: FinishReason = FinishReason.FAILED, keep_waiting: bool = False) -> list[Progress]:
        """End every open request, or only those that run. The engine is then usable again.

        What a step did before it raised is told too: requests may have ended in it.
        """
        self._running.clear()
        if self._async is not None:
            self._async.discard()
        return [*self._take_untold(), *self.scheduler.abandon(reason, keep_waiting)]

    def close(self) -> None:
        self._on_close()
        self.executor.close()

    # ── early exit ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _with_exits(self, plan: StepPlan) -> StepPlan:
        """The plan to execute: with a rule for early exit where that saves time."""
        exits = self.exits.rule_for(plan) if self.exits is not None else None
        return plan if exits is None else replace(plan, exits=exits)

    def _learn_exits(self, executed: StepPlan, plan: StepPlan, result: StepResult) -> bool:
        """Tell early exit of a step that had its rule; whether the step was a trial of it."""
        rule = executed.exits
        if self.exits is None or rule is None:
            return False
        self.exits.learn(rule, plan, result)
        return rule.is_trial
