"""Makes a profile: measures batches in order of importance for as long as there is time.

Measured are, coarse before fine and several times at some distance:

* decoding steps with no, one and three drafted tokens each, at two contexts: verification by rows, and drafts by
  requests. Tokens behind the first cost (seconds of three - seconds of one) / 2;
* steps with prompts, or with drafts that fell behind: some decoding requests, at two contexts, and more rows;
* what confidence checks, early exit and overlap cost (mechanisms.py), and a move of the draft (residency.py);
* random batches that the profile is not made from: how wrong its predictions are.

It must be done before the executor serves a request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any

from faser.cost.profile import Profile
from faser.cost.profiled_cost import ProfiledCost
from faser.progress import Update
from faser.runtime.profiling import mechanisms, residency
from faser.runtime.profiling.batches import Batch, Subject, all_batches, quick_batches
from faser.runtime.profiling.fit import Samples, errors_of
from faser.runtime.profiling.steps import Measured, Steps

ROUNDS = (1, 2, 2)  # runs of every batch in each round, after one to warm up; later rounds while there is time
MIN_DECODING = 5  # batches without which no profile can be made: those with the fewest and the most requests
WARM_UP = 0.02  # share of the time
DECODING_UNTIL, MIXED_UNTIL, ALL_UNTIL = 0.55, 0.8, 1.0  # shares of the time at which each kind of batch ends
OVERLAP_TIME = 0.4  # seconds for overlap / seconds for everything else
QUICK_SECONDS = 1.2  # of a quick profile


def measure_quick(subject: Subject, about: Mapping[str, Any], clock: Callable[[], float] = perf_counter) -> Profile:
    """A rough profile in about QUICK_SECONDS: a few steps are measured, the rest is assumed."""
    return _Measurement(subject, QUICK_SECONDS, lambda done, total: None, clock).quick_profile(about)


def measure(
    subject: Subject,
    about: Mapping[str, Any],
    seconds: float | None = None,
    update: Update = lambda done, total: None,
    clock: Callable[[], float] = perf_counter,
) -> Profile:
    """A profile in about `seconds`. With little time it is coarse, and has no held-out errors."""
    measurement = _Measurement(subject, subject.how.seconds if seconds is None else seconds, update, clock)
    profile = measurement.profile(about)
    return replace(profile, errors=measurement.errors(ProfiledCost(profile)))


class _Measurement:
    """Runs batches within a time budget."""

    def __init__(self, subject: Subject, seconds: float, update: Update, clock: Callable[[], float]) -> None:
        self._subject = subject
        self._seconds = seconds
        self._update = update
        self._clock = clock
        self._started = clock()
        self._uncounted = 0.0  # seconds that are not part of the budget
        self._steps = Steps(subject, clock)
        self._expected = ProfiledCost(subject.assumed) if subject.assumed is not None else None
        self._decoding, *self._mixed, self._held_out = all_batches(subject)

    def profile(self, about: Mapping[str, Any]) -> Profile:
        self._warm_up()
        samples = Samples(self._subject)
        # without an assumed profile, what a profile cannot be made without is measured however late it is
        min_decoding, min_mixed = (MIN_DECODING, 1) if self._expected is None else (1, 0)
        samples.add(self._run(self._decoding, DECODING_UNTIL, min_decoding))
        for number, batches in enumerate(self._mixed, 1):
            until = DECODING_UNTIL + (MIXED_UNTIL - DECODING_UNTIL) * number / len(self._mixed)
            samples.add(self._run(batches, until, min_mixed))
        subject, steps = self._subject, self._steps
        stop_seconds = mechanisms.confidence_check(subject, steps, self._has_time_for)
        # a GPU compiles and captures for these two first, and a slow model would have left overlap no time
        started = self._clock()
        exit_check, exit_candidates = mechanisms.exit_check(subject, steps, self._has_time_for)
        ends = self._clock() + OVERLAP_TIME * self._seconds
        besides = mechanisms.overlap_profiles(subject, steps, lambda: self._clock() < ends)
        await_seconds = mechanisms.await_seconds(subject, steps)
        moves = residency.round_trip(subject, self._clock)
        self._uncounted = self._clock() - started
        return replace(
            samples.profile(about),
            stop_seconds=stop_seconds,
            exit_check=exit_check,
            exit_candidates=exit_candidates,
            besides=besides,
            await_seconds=await_seconds,
            residency=moves,
        )

    def quick_profile(self, about: Mapping[str, Any]) -> Profile:
        subject, samples = self._subject, Samples(self._subject)
        if subject.how.graph_rows:  # a GPU runs hundreds of steps in the time
            samples.add(self._run(self._decoding, DECODING_UNTIL, least=1))
            for batches in self._mixed:
                samples.add(self._run(batches, MIXED_UNTIL, least=0))
            stop_seconds = mechanisms.confidence_check(subject, self._steps, self._has_time_for)
        else:
            samples.add(self._run_once(quick_batches(subject)))
            stop_seconds = subject.assumed.stop_seconds if subject.assumed is not None else None
        self._steps.release()
        return replace(samples.profile(about), stop_seconds=stop_seconds, kind="quick")

    def errors(self, cost: ProfiledCost) -> dict[str, float]:
        """Mean and worst error of predictions on the held-out batches. Gives the slots back."""
        found = errors_of(cost, self._run(self._held_out, ALL_UNTIL, least=0))
        self._steps.release()
        self._update(100, 100)
        return found

    def _warm_up(self) -> None:
        """Let clocks rise, and let everything be made that is made once."""
        self._steps.run(self._decoding[0], 0)
        while self._spent() < WARM_UP:
            self._steps.run(self._decoding[0], 1)

    def _run(self, batches: Sequence[Batch], until: float, least: int) -> list[Measured]:
        """Run batches in rounds until that share of the time is spent; the first `least` of them in any case."""
        found: dict[int, Measured] = {}
        for turn, repeats in enumerate(ROUNDS):
            for number, batch in enumerate(batches):
                is_late = self._spent() >= until
                is_optional = turn > 0 or number >= least
                if is_late and is_optional:
                    return list(found.values())
                if is_optional and not self._has_time_for(batch, 1 + repeats):
                    continue
                measured = self._measure(batch, 0 if is_late else repeats)
                found[number] = measured.or_better(found.get(number))
                self._update(min(100, int(100 * self._spent())) if self._seconds > 0 else 100, 100)
        return list(found.values())

    def _run_once(self, batches: Sequence[Batch]) -> Iterator[Measured]:
        """Run each batch once while there is time; the first one twice, to warm up."""
        self._steps.run(batches[0], 0)
        for number, batch in enumerate(batches):
            if number == 0 or self._has_time_for(batch, 1):
                yield self._measure(batch, 0)

    def _measure(self, batch: Batch, repeats: int) -> Measured:
        measured = self._steps.run(batch, repeats)
        if self._expected is not None:
            self._expected.learn(measured.plan, measured.seconds, measured.total)
        return measured

    def _has_time_for(self, batch: Batch, num_runs: int) -> bool:
        """Whether the runs should end within the time: on a slow machine large batches are left out."""
        left = self._seconds - (self._clock() - self._started - self._uncounted)
        if self._expected is None:
            return left > 0
        return num_runs * self._expected.predict(self._steps.plan(batch)) <= left

    def _spent(self) -> float:
        """Share of the time."""
        spent = self._clock() - self._started - self._uncounted
        return spent / self._seconds if self._seconds > 0 else float("inf")
