"""The oracle as an asynchronous executor: it runs plans in the order of submission, as a GPU stream does."""

from __future__ import annotations

from collections import deque

from faser.step import StepPlan, StepResult


class Late:
    """Runs a plan only when its result is collected: the latest moment at which a device may touch memory."""

    def __init__(self, inner) -> None:
        self.inner = inner
        self.plans: deque[StepPlan] = deque()

    def submit(self, plan: StepPlan) -> None:
        self.plans.append(plan)

    def collect(self) -> StepResult:
        return self.inner.execute(self.plans.popleft())

    def finish_launch(self) -> None: ...

    def may_run_ahead(self, plan: StepPlan) -> bool:
        return True

    def discard(self) -> None:
        while self.plans:  # the device finishes what was submitted
            self.collect()

    def close(self) -> None: ...


class Ahead:
    """Wraps an `OracleExecutor`."""

    def __init__(self, inner) -> None:
        self.inner = inner
        self.results: deque[StepResult] = deque()
        self.plans: deque[StepPlan] = deque()  # in flight
        self.most = 0
        self.seen: list[tuple[StepPlan, StepResult]] = []
        self.num_launched = 0  # plans in flight at the last `finish_launch`

    def execute(self, plan: StepPlan) -> StepResult:
        raise AssertionError("an asynchronous executor is not asked to execute")

    def submit(self, plan: StepPlan) -> None:
        for other in self.plans:
            slots = set(other.slots.tolist())
            assert slots.isdisjoint(new.slot for new in plan.admitted), "a slot in flight was given to another request"
        self.plans.append(plan)
        self.results.append(self.inner.execute(plan))
        self.seen.append((plan, self.results[-1]))
        self.most = max(self.most, len(self.results))

    def collect(self) -> StepResult:
        self.plans.popleft()
        return self.results.popleft()

    def finish_launch(self) -> None:
        self.num_launched = len(self.results)

    def may_run_ahead(self, plan: StepPlan) -> bool:
        assert self.num_launched == len(self.results), "the device may be waiting for the host"
        return True

    def discard(self) -> None:
        self.results.clear()
        self.plans.clear()

    def close(self) -> None: ...
