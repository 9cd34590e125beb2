"""Completes a quick profile while the engine is idle, one made-up step at a time.

A request that arrives during a step waits for its end, about MAX_SECONDS at most. The steps run in slots and on pages
that the scheduler lends: what a request or the prefix cache holds is not touched.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from time import perf_counter
from typing import Any

from faser.arrays import IntArray
from faser.cost.profile import Profile
from faser.cost.profiled_cost import ProfiledCost
from faser.engine.scheduler import Scheduler
from faser.runtime.profiling.batches import Batch, Subject, all_batches
from faser.runtime.profiling.fit import Samples, errors_of
from faser.runtime.profiling.steps import Measured, Steps

log = logging.getLogger("faser.engine")

MAX_SECONDS = 0.25  # of one step: slower batches are left out and extrapolated
NUM_ROUNDS = 2  # runs of each batch; the faster one counts
MAX_ATTEMPTS = 3  # at a profile that is good enough; then the machine is too busy


class IdleProfiler:
    """Called in idle moments: measures one batch and returns whether there is more to do."""

    def __init__(
        self,
        subject: Subject,
        cost: ProfiledCost,
        scheduler: Scheduler,
        about: Mapping[str, Any],
        keep: Callable[[Profile], object],
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self._subject = subject
        self._cost = cost
        self._scheduler = scheduler
        self._about = about
        self._keep = keep
        self._steps = Steps(subject, clock)
        *batches, held_out = all_batches(subject)
        self._batches = [batch for several in batches for batch in several if self._can_fit(batch)]
        self._held_out = [batch for batch in held_out if self._can_fit(batch)]
        self._lacks_pages = False
        self._moments = self._measure_all()

    def __call__(self) -> bool:
        return next(self._moments, False)

    def _measure_all(self) -> Iterator[bool]:
        for _ in range(MAX_ATTEMPTS):
            found: dict[int, Measured] = {}
            self._lacks_pages = False
            yield from self._run(self._batches, NUM_ROUNDS, found)
            if not found:
                return  # not enough free pages for any batch
            samples = Samples(self._subject)
            samples.add(found.values())
            profile = samples.profile(self._about)
            profile = replace(profile, stop_seconds=self._cost.profile.stop_seconds, host=self._cost.host)
            checked: dict[int, Measured] = {}
            yield from self._run(self._held_out, 1, checked)
            profile = replace(profile, errors=errors_of(ProfiledCost(profile), checked.values()))
            reason = profile.why_not_kept()
            if reason is None and self._lacks_pages:
                reason = "too few pages were free to measure all batches"
            self._cost.adopt(replace(profile, kind="idle" if reason is None else "quick"))
            if reason is None:
                log.info("profile completed in idle moments: %s", profile.accuracy)
                self._keep(self._cost.profile)
                return
            log.info("profile measured in idle moments and not kept: %s", reason)

    def _run(self, batches: list[Batch], rounds: int, found: dict[int, Measured]) -> Iterator[bool]:
        """Measure batches, one per idle moment, `rounds` times each; the best of each is left in `found`."""
        for _ in range(rounds):
            for number, batch in enumerate(batches):
                if self._cost.predict(self._steps.plan(batch)) > MAX_SECONDS:
                    continue
                measured = self._measure(batch)
                if measured is not None:
                    self._cost.learn(measured.plan, measured.seconds, measured.total + self._cost.host)
                    found[number] = measured.or_better(found.get(number))
                    yield True

    def _num_tokens(self, batch: Batch) -> IntArray:
        """[B] tokens that must have pages."""
        return batch.num_tokens + self._subject.rows_behind(batch.lengths) + 1

    def _can_fit(self, batch: Batch) -> bool:
        """Whether the pool is large enough. A profile at start lets requests share pages; served requests cannot."""
        pages = -(-self._num_tokens(batch) // self._subject.page_size)
        subject = self._subject
        return int(pages.sum()) <= min(subject.num_pages, subject.num_draft_pages or subject.num_pages)

    def _measure(self, batch: Batch) -> Measured | None:
        """One step on lent pages; None if there are too few."""
        writes = self._scheduler.lend_slots(self._num_tokens(batch))
        if writes is None:
            self._lacks_pages = True
            return None
        size = batch.num_tokens.size
        try:
            target_pages, draft_pages = writes
            plan = replace(
                self._steps.plan(batch),
                admitted=self._steps.admissions(size), target_pages=target_pages, draft_pages=draft_pages,
            )  # fmt: skip
            return self._steps.run_plan(plan, 0)
        finally:
            self._scheduler.take_back_slots(size)
