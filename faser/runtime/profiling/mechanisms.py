"""What the optional mechanisms cost: confidence checks, early exit, overlap. Each is a step with and one without."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from faser.cost.curve import Curve
from faser.cost.overlap import OverlapProfile
from faser.engine.engine import AsyncExecutor
from faser.rules.early_exit import ExitPoint, ExitRule
from faser.runtime.profiling.batches import LONG_DRAFT, SHORT_DRAFT, Batch, Subject
from faser.runtime.profiling.steps import Steps
from faser.step import StepSeconds

NUM_REQUESTS = (1, 4, 16, 64)
REPEATS = 2
RUNS = 1 + REPEATS  # with the one to warm up

HasTime = Callable[[Batch, int], bool]  # (batch, runs) → whether the runs end in time


def confidence_check(subject: Subject, steps: Steps, has_time: HasTime) -> float | None:
    """Seconds of one check of one draft, from whole steps: a check may delay the host or the device."""
    plain = Batch.alike(1, LONG_DRAFT, subject.contexts(1)[0])
    if not subject.has_draft_model or subject.max_length < LONG_DRAFT or not has_time(plain, 2 * RUNS):
        return None
    without, checked = (steps.run(replace(plain, has_checks=checks), REPEATS) for checks in (False, True))
    return max(0.0, float(checked.steps.min() - without.steps.min())) / (LONG_DRAFT - SHORT_DRAFT)


def exit_check(subject: Subject, steps: Steps, has_time: HasTime) -> tuple[Curve | None, int]:
    """Seconds that an exit point adds to a verification, by drafts, and the cheapest number of candidates."""
    if not subject.exit_layer or subject.max_length < LONG_DRAFT:
        return None, 0
    seconds: dict[int, list[float]] = {}  # by drafts: for each number of candidates
    num_runs = (1 + len(subject.exit_candidates)) * RUNS
    for plain in _drafting(subject, lambda batch: has_time(batch, num_runs)):
        points = [ExitPoint.by_rank(subject.exit_layer, 1, each) for each in subject.exit_candidates]
        checked = [replace(plain, exits=ExitRule((point,), is_trial=True)) for point in points]
        without, *with_it = (steps.run(batch, REPEATS).verify for batch in (plain, *checked))
        seconds[int(plain.lengths.sum())] = [each - without for each in with_it]
    if not seconds:
        return None, 0
    table = np.maximum.accumulate(np.maximum(list(seconds.values()), 0.0), axis=0)
    best = int(table[-1].argmin())
    check = Curve(tuple(seconds), tuple(table[:, best].tolist()), (0.0,) * len(seconds))
    return check, subject.exit_candidates[best]


def overlap_profiles(subject: Subject, steps: Steps, has_time: Callable[[], bool]) -> tuple[OverlapProfile, ...]:
    """Drafting beside a verification, for each split of the device: all splits for few requests first."""
    if not subject.can_overlap:
        return ()
    splits = list(subject.splits)
    found: dict[int, dict[int, tuple[StepSeconds, StepSeconds, float]]] = {split: {} for split in splits}
    for plain in _drafting(subject, lambda _: has_time()):
        apart = steps.run(plain, REPEATS)
        for split in splits.copy():
            alone, together = (
                steps.run(replace(plain, overlaps=overlaps, draft_sms=split), REPEATS) for overlaps in (False, True)
            )
            if min(apart.draft, apart.verify) > 0:
                found[split][plain.lengths.size] = apart.seconds, alone.seconds, together.total
            if together.total > apart.draft + apart.verify:
                splits.remove(split)  # it loses, and larger batches need more of the device
    return tuple(OverlapProfile.of(split, batches) for split, batches in found.items() if batches)


def await_seconds(subject: Subject, steps: Steps) -> float:
    """Seconds that a step takes longer if it must wait for the result of the step before it."""
    if not subject.can_overlap or not isinstance(subject.executor, AsyncExecutor):
        return 0.0
    plain = replace(Batch.alike(1, LONG_DRAFT, subject.contexts(1)[0]), overlaps=True)
    ahead, waiting = (steps.run(replace(plain, leads=leads), REPEATS) for leads in (False, True))
    return max(0.0, float(waiting.steps.min() - ahead.steps.min()))


def _drafting(subject: Subject, has_time: Callable[[Batch], bool]) -> Iterator[Batch]:
    """Batches of a few sizes that draft LONG_DRAFT tokens each, as far as there is room and time."""
    for size in NUM_REQUESTS:
        batch = Batch.alike(size, LONG_DRAFT, subject.contexts(size)[0])
        if size > subject.limits.max_running or not subject.has_room_for(batch) or not has_time(batch):
            return
        yield batch
