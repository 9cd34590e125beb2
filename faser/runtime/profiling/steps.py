"""Runs made-up batches through the executor that will serve, and takes their times.

The steps have arbitrary tokens and read whatever the KV pages hold, which costs what real requests cost. They leave no
trace: the scheduler and its page pools are not told, no page is published, and a request writes its pages and its slot
before it reads them.

Every request of a step has pages of its own, numbered from 0. Where the pool is too small the numbers start again, so
requests share pages, and the device's cache may help more than with real requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from faser.arrays import FloatArray
from faser.engine.engine import AsyncExecutor
from faser.engine.pages import NO_WRITES
from faser.request import SamplingParams
from faser.rules.overlap import OverlapPlan
from faser.rules.stopping import Stopping
from faser.runtime.profiling.batches import Batch, Subject
from faser.step import Admission, PageWrites, StepPlan, StepResult, StepSeconds

TOKEN_PERIOD = 8  # the made-up tokens repeat, so that prompt lookup finds drafts


@dataclass(frozen=True)
class Measured:
    """A step that ran several times: its plan, with the drafts that were made, and the shortest seconds."""

    plan: StepPlan
    draft: float
    verify: float
    total: float  # of both models; less than draft + verify where they overlap
    steps: FloatArray  # seconds of the whole step, for each run that could be timed
    host: FloatArray  # seconds outside both models, for the same runs

    @property
    def seconds(self) -> StepSeconds:
        return StepSeconds(self.draft, self.verify)

    def or_better(self, other: Measured | None) -> Measured:
        """Both measurements of one step as one."""
        if other is None:
            return self
        return Measured(
            self.plan,
            min(self.draft, other.draft),
            min(self.verify, other.verify),
            min(self.total, other.total),
            np.concatenate((self.steps, other.steps)),
            np.concatenate((self.host, other.host)),
        )


class Steps:
    """Makes plans of batches and runs them on an executor that serves no request."""

    def __init__(self, subject: Subject, clock: Callable[[], float]) -> None:
        self._subject = subject
        self._clock = clock
        self._is_first = True

    def run(self, batch: Batch, repeats: int) -> Measured:
        """Run a batch once to warm up, then `repeats` times. The shortest counts: disturbances only add time."""
        first = self._plan_with_pages(batch)
        if self._is_first:
            first = replace(first, admitted=self.admissions(self._subject.limits.max_running))
            self._is_first = False
        return self.run_plan(first, repeats)

    def run_plan(self, first: StepPlan, repeats: int) -> Measured:
        again = replace(first, admitted=(), target_pages=NO_WRITES, draft_pages=NO_WRITES)
        plans = [first, *[again] * repeats]
        times, results = [self._clock()], []
        for result in self._execute(plans):
            times.append(self._clock())
            results.append(result)
        draft, verify, total = (
            np.array([getattr(each.seconds, name) for each in results]) for name in ("draft", "verify", "total")
        )
        # If the next step is already submitted, the time between two results is that of a step. The last has no next.
        timed = slice(1, -1) if self._runs_ahead(first) else slice(1, None)
        steps = np.diff(times)[timed]
        host = np.maximum(steps - total[timed], 0.0)
        plan = replace(again, lengths=results[-1].num_drafted)
        return Measured(plan, float(draft.min()), float(verify.min()), float(total.min()), steps, host)

    def release(self) -> None:
        """Give all slots back. A step must have requests, so one of the released slots takes part."""
        slots = tuple(range(self._subject.limits.max_running))
        self._subject.executor.execute(replace(self._plan_with_pages(Batch.alike(1, 0, 1)), released=slots))

    def plan(self, batch: Batch) -> StepPlan:
        """The step of a batch, without admissions and pages."""
        subject = self._subject
        draft_rows = batch.draft_rows if subject.has_draft_model else np.zeros_like(batch.draft_rows)
        overlap, none = None, np.zeros_like(batch.lengths)
        frontier = none
        if batch.overlaps:
            frontier, draft_rows = batch.lengths, np.minimum(draft_rows, 1)
        if batch.overlaps or batch.draft_sms:
            overlap = OverlapPlan(frontier, none, batch.overlaps, batch.leads, batch.draft_sms)
        return StepPlan(
            admitted=(),
            released=(),
            slots=np.arange(batch.num_tokens.size),
            num_tokens=batch.num_tokens,
            start=batch.num_tokens - batch.num_rows,
            num_rows=batch.num_rows,
            lengths=batch.lengths,
            draft_start=batch.num_tokens + frontier - draft_rows,
            draft_rows=draft_rows,
            unsettled=np.zeros(batch.num_tokens.size, dtype=np.bool_),
            target_pages=NO_WRITES,
            draft_pages=NO_WRITES,
            stopping=_never_stopping(batch) if batch.has_checks else None,
            exits=batch.exits,
            overlap=overlap,
        )

    def admissions(self, num_slots: int) -> tuple[Admission, ...]:
        tokens = np.random.default_rng(0).integers(0, self._subject.vocab_size, (num_slots, TOKEN_PERIOD))
        size = self._subject.max_context
        return tuple(
            Admission(slot, np.resize(some, size), size, SamplingParams(), 0, frozenset())
            for slot, some in enumerate(tokens)
        )

    def _execute(self, plans: Sequence[StepPlan]) -> Iterator[StepResult]:
        """As the engine does: if possible the next step is submitted before the result of this one is collected."""
        executor = self._subject.executor
        if not (isinstance(executor, AsyncExecutor) and self._runs_ahead(plans[0])):
            yield from map(executor.execute, plans)
            return
        executor.submit(plans[0])
        for plan in plans[1:]:
            executor.submit(plan)
            yield executor.collect()
        yield executor.collect()

    def _runs_ahead(self, plan: StepPlan) -> bool:
        executor = self._subject.executor
        return isinstance(executor, AsyncExecutor) and executor.may_run_ahead(plan)

    def _plan_with_pages(self, batch: Batch) -> StepPlan:
        pages, draft_pages = self._pages(batch), NO_WRITES
        if self._subject.has_draft_model:
            num_pages = self._subject.num_draft_pages or self._subject.num_pages
            draft_pages = replace(pages, pages=pages.pages % num_pages)
        return replace(self.plan(batch), target_pages=pages, draft_pages=draft_pages)

    def _pages(self, batch: Batch) -> PageWrites:
        """Pages in one run from 0: a CPU's pages take memory when they are first touched."""
        behind = self._subject.rows_behind(batch.lengths)
        counts = -(-(batch.num_tokens + (1 + batch.overlaps) * behind) // self._subject.page_size)
        slots = np.repeat(np.arange(counts.size), counts)
        columns = np.arange(slots.size) - np.repeat(np.cumsum(counts) - counts, counts)
        return PageWrites(slots, columns, np.arange(slots.size) % self._subject.num_pages)


def _never_stopping(batch: Batch) -> Stopping:
    depth = int(batch.lengths.max()) + 1
    return Stopping(np.ones((batch.lengths.size, depth)), np.zeros(depth), price=1.0, calibration=(0.0, 1.0))
