"""How many prompt rows fit into the seconds of a step, and which prompts get them.

Knows rows, contexts and measured seconds. Knows no clock, no requests and no pages.

A step takes about

    base + per_row · rows + per_pair · pairs

where base is the seconds of a step without prompt rows, and pairs counts (row, context token) pairs: a prompt row
attends to all tokens before it. For a long prompt the pairs dominate.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import exp, inf, log, sqrt

import numpy as np

from faser.arrays import BoolArray, IntArray
from faser.step import StepPlan, StepSeconds
from faser.vision import Grid

OLDEST_SHARE = 0.25  # of a step's room for prompts, kept for the oldest prompt
ALONE = 2.0  # times the bound, where no request decodes: no stream stalls, and larger steps waste less
CATCH_UP_SHARE = 0.5  # of the spare seconds, for a draft that catches up while prompts wait
ENCODING_SHARE = 0.5  # of the spare seconds, for the vision encoder: encoded tokens then need prompt rows
KEPT_UP = 16  # rows that the draft may lag and still has kept up: they cost about as much as one row

MIN_FILLED = 512  # rows of a step from which on every further row takes time
# Matrix products have tiles of 256 rows. An 8B model on an H200 computes 42 to 44 thousand rows a second at multiples
# of 256 from 512 to 2,048 rows, and 40 to 41 thousand at 640, 896, 1,408, 1,664 and 1,920 rows.
TILE_ROWS = 256

_EQUAL_CONTEXT = 4096.0  # tokens of context at which a row costs twice as much as without context: a first guess
_MOST_ERROR = log(2.0)  # of one step: an outlier counts as at most twice, or half, of the expected seconds
_BASE_GAIN = 0.25  # share of the base's error that one step corrects
_LEAST_SHARE = 0.1  # of a step's seconds that its prompt rows count for, however large the base is
# Variances of logarithms, that is, of relative errors.
_STEP_NOISE = 0.2**2  # of a step's seconds
_SPEED_DRIFT = 0.12**2  # of the machine's speed from step to step
_RATIO_DRIFT = 0.01**2  # of per_row and of per_pair alone
_FIRST_RATIO = 1.0**2  # of _EQUAL_CONTEXT


@dataclass(frozen=True)
class Pacing:
    """What suits a kind of hardware."""

    max_step_ms: float  # the default of --max-step-ms
    first_rows: int  # prompt rows of a step before anything is known
    least_rows: int  # prompt rows that the oldest prompt gets in any step
    row_sizes: tuple[int, ...] = ()  # rows that steps with prompts are rounded up to, ascending; none: no rounding


CPU = Pacing(max_step_ms=300.0, first_rows=32, least_rows=8)
GPU = Pacing(max_step_ms=60.0, first_rows=512, least_rows=64)


@dataclass
class Room:
    """What one step has left for prompts. Rows alone are bounded where seconds and pairs are infinite."""

    rows: int
    seconds: float = inf
    pairs: float = inf
    per_row: float = 0.0  # seconds
    per_pair: float = 0.0
    least_rows: int = 1

    def take(self, wanted: int, context: int, is_oldest: bool = False, has_rows: bool = False) -> int:
        """Rows for a prompt that has `context` computed tokens and wants `wanted` rows.

        The oldest prompt gets its share, and never fewer than `least_rows`. Other prompts get nothing rather than fewer
        than `least_rows`, unless these complete the prompt or it has rows of this step already.
        """
        share = OLDEST_SHARE if is_oldest else 1.0
        least = min(self.least_rows, wanted, self.rows)
        by_seconds = _most_rows(share * self.seconds, self.per_row, self.per_pair, context)
        by_pairs = _most_rows(share * self.pairs, 0.0, 1.0, context)
        rows = int(min(wanted, self.rows, share * self.rows, by_seconds, by_pairs))
        if rows < least and not has_rows:
            rows = least if is_oldest else 0
        self.rows -= rows
        self.seconds -= self.per_row * rows + self.per_pair * pairs_of(rows, context)
        self.pairs -= pairs_of(rows, context)
        return rows


def pairs_of(rows: float, context: float) -> float:
    """(row, context token) pairs of `rows` rows behind a context: each row sees one token more than the row before."""
    return rows * (context + rows / 2)


def _most_rows(limit: float, per_row: float, per_pair: float, context: int) -> float:
    """The largest r with per_row · r + per_pair · pairs_of(r, context) <= limit."""
    if limit <= 0 or limit == inf:
        return max(limit, 0.0)
    first = per_row + per_pair * context
    divisor = first + sqrt(first * first + 2 * per_pair * limit)
    return 2 * limit / divisor if divisor else inf  # a product of tiny numbers may be 0


def turns(left: Sequence[int]) -> Iterator[tuple[int, bool]]:
    """The order in which prompts take rows, by index. `left` has the rows that each still needs, oldest prompt first.

    The oldest prompt takes its share first (True). Then all prompts take what they need: the prompt with the fewest
    rows left first, of equal ones the oldest. So the oldest prompt gets rows in every step, every prompt is the oldest
    at some time, and no prompt starves. The caller may lower `left` while it iterates.
    """
    if left:
        yield 0, True
        yield from ((i, False) for i in sorted(range(len(left)), key=left.__getitem__))


def share(room: Room, left: Sequence[int], context: Sequence[int]) -> list[int]:
    """Rows for each prompt, oldest first."""
    rest, rows = list(left), [0] * len(left)
    for i, is_oldest in turns(rest):
        taken = room.take(rest[i], context[i] + rows[i], is_oldest, rows[i] > 0)
        rest[i] -= taken
        rows[i] += taken
    return rows


def fill_size(rows: list[int], left: Sequence[int], num_others: int, sizes: Sequence[int]) -> list[int]:
    """Cut the largest prompt chunk so that the step fills whole tiles: a partly filled tile costs a full one.

    `left` has the rows that each prompt needs; `num_others` rows of the step belong to no prompt. A chunk that
    completes its prompt is not cut, nor is a step with few rows, whose seconds hardly depend on them.
    """
    total = num_others + sum(rows)
    below = [size for size in sizes if MIN_FILLED <= size <= total and size % TILE_ROWS == 0]
    if not below or total > sizes[-1]:
        return rows
    excess = total - below[-1]
    largest = max(range(len(rows)), key=rows.__getitem__)
    if rows[largest] == left[largest] or rows[largest] <= 2 * excess:
        return rows
    return [each - excess if i == largest else each for i, each in enumerate(rows)]


class Pace:
    """Learns base, per_row and per_pair from the steps that ran.

    A Kalman filter over the logarithms of per_row and per_pair: both stay positive. A machine that slows down changes
    both together; steps with short contexts determine per_row, and steps with long contexts then correct per_pair.
    """

    def __init__(self, first_rows: int) -> None:
        self.base = 0.0
        self.per_row = 0.0  # seconds; 0: no step with prompt rows has run
        self.per_pair = 0.0
        self._most_rows = first_rows / 2
        self._most_pairs = first_rows * _EQUAL_CONTEXT
        # variances of log(per_row) and log(per_pair), and their covariance
        self._row_variance, self._pair_variance, self._covariance = 0.0, 0.0, 0.0

    def learn(self, rows: int, pairs: float, seconds: float) -> None:
        """A step with `rows` prompt rows and `pairs` pairs took `seconds`."""
        seconds = max(seconds, 0.0)  # a difference of two clocks, the host's and the device's
        if not rows:
            change = seconds - self.base
            self.base += _BASE_GAIN * min(max(change, -self.base / 2), self.base) if self.base else seconds
            return
        if seconds <= 0:
            return
        if seconds < self.base:  # the steps without prompts had a larger batch
            self.base += _BASE_GAIN * max(seconds - self.base, -self.base / 2)
        self._most_rows = max(self._most_rows, rows)
        self._most_pairs = max(self._most_pairs, pairs)
        self._correct(rows, pairs, max(seconds - self.base, _LEAST_SHARE * seconds))

    def _correct(self, rows: int, pairs: float, seconds: float) -> None:
        if not self.per_row:
            self.per_row = seconds / (rows + pairs / _EQUAL_CONTEXT)
            self.per_pair = self.per_row / _EQUAL_CONTEXT
            self._row_variance = self._covariance = _STEP_NOISE
            self._pair_variance = _STEP_NOISE + _FIRST_RATIO
            return
        expected = self.seconds(rows, pairs)
        error = min(max(log(seconds / expected), -_MOST_ERROR), _MOST_ERROR)
        by_rows = self.per_row * rows / expected  # share of the expected seconds that rows take; pairs take the rest
        # Covariances of both logarithms with the logarithm of the step's seconds: H = (by_rows, 1 - by_rows).
        row = by_rows * self._row_variance + (1 - by_rows) * self._covariance
        pair = by_rows * self._covariance + (1 - by_rows) * self._pair_variance
        variance = by_rows * row + (1 - by_rows) * pair + _STEP_NOISE
        self.per_row *= exp(row / variance * error)
        self.per_pair *= exp(pair / variance * error)
        self._row_variance += _SPEED_DRIFT + _RATIO_DRIFT - row * row / variance
        self._pair_variance += _SPEED_DRIFT + _RATIO_DRIFT - pair * pair / variance
        self._covariance += _SPEED_DRIFT - row * pair / variance

    def seconds(self, rows: float, pairs: float) -> float:
        """Seconds that prompt rows add to a step."""
        return self.per_row * rows + self.per_pair * pairs

    def room(self, rows: int, seconds: float, least_rows: int) -> Room:
        """Room of at most `rows` and `seconds`, and of at most twice the rows and pairs of any step so far."""
        return Room(
            min(rows, int(2 * self._most_rows)), seconds, 2 * self._most_pairs, self.per_row, self.per_pair, least_rows
        )


class StepPace:
    """Bounds the seconds of a step: prompt rows of the target, rows with which the draft catches up, and pictures."""

    def __init__(self, max_seconds: float, pacing: Pacing) -> None:
        self.max_seconds = max_seconds
        self.prompts = Pace(pacing.first_rows)
        self.catch_up = Pace(pacing.first_rows)
        self.encoding = Pace(pacing.first_rows)  # of the vision encoder: rows are patches
        self.row_sizes = pacing.row_sizes
        self._least_rows = pacing.least_rows

    def learn(self, plan: StepPlan, spent: StepSeconds, seconds: float) -> None:
        """A step took `seconds`, of which the executor measured `spent`."""
        drafting = max(0.0, spent.draft - spent.hidden)
        self.prompts.learn(*_prompt_work(plan), seconds - drafting - spent.encode)
        if plan.vision is not None and plan.vision.writes:
            self.encoding.learn(*encoding_work(plan.vision.grids), spent.encode)
        self.catch_up.learn(*catch_up_work(plan.draft_rows, plan.draft_start, plan.lengths), drafting)

    def prompt_room(self, rows: int, is_alone: bool, taken: float = 0.0) -> Room:
        """Room for prompts, beside `taken` seconds of other work. `is_alone`: no request decodes in this step."""
        return self.prompts.room(rows, self._spare(is_alone) - taken, self._least_rows)

    def catch_up_room(self, rows: int, beside_prompts: bool) -> Room:
        """Room for drafts that catch up. They get `least_rows` also where a step has no spare seconds."""
        seconds = self._spare(is_alone=False) * (CATCH_UP_SHARE if beside_prompts else 1.0)
        return self.catch_up.room(rows, seconds, self._least_rows)

    def seconds_to_encode(self, plan: StepPlan) -> float:
        """Expected seconds of the vision encoder in a step."""
        return self.encoding.seconds(*encoding_work(plan.vision.grids)) if plan.vision is not None else 0.0

    def encoding_seconds(self, is_alone: bool) -> float:
        """Seconds that a step has for the vision encoder: prompt rows get the rest."""
        return ENCODING_SHARE * self._spare(is_alone)

    def _spare(self, is_alone: bool) -> float:
        spare = self.max_seconds * (ALONE if is_alone else 1.0) - self.prompts.base - self.catch_up.base
        # On a slow machine, too, prompt rows may take half of a step without streams.
        return max(spare, self.prompts.base) if is_alone else spare


def prompt_room(pace: StepPace | None, rows: int, is_alone: bool, taken_seconds: float = 0.0) -> Room:
    """What a step has for prompts, beside `taken_seconds` of other work. Without a pace only rows are bounded."""
    return Room(rows) if pace is None else pace.prompt_room(rows, is_alone, taken_seconds)


def share_rows(
    pace: StepPace | None,
    max_rows: int,
    start: IntArray,
    pending: IntArray,
    num_judged: int = 0,
    taken_seconds: float = 0.0,
    decoding: BoolArray | None = None,
) -> IntArray:
    """Rows of each request [B] in a step of `max_rows`, of which `num_judged` are rows of drafts.

    `start` are the context rows that a request has computed, `pending` those that it can compute now. Requests that
    decode (None: those with one pending row) get their row. The others have prompts, which share what is left beside
    `taken_seconds` of other work.
    """
    decoding = pending == 1 if decoding is None else decoding
    reads = ~decoding & (pending > 0)
    if not reads.any():
        return pending
    num_others = int(np.count_nonzero(decoding))
    room = prompt_room(pace, max_rows - num_others - num_judged, num_others == 0, taken_seconds)
    left = pending[reads].tolist()
    shared = share(room, left, start[reads].tolist())
    if pace is not None and pace.row_sizes:
        shared = fill_size(shared, left, num_others + num_judged, pace.row_sizes)
    rows = np.minimum(pending, 1)
    rows[reads] = shared
    return rows


def _prompt_work(plan: StepPlan) -> tuple[int, float]:
    """Prompt rows of a step, and their pairs."""
    if plan.only_decodes:
        return 0, 0.0
    reads = (plan.num_rows > 1) | ~plan.samples
    rows, start = plan.num_rows[reads], plan.start[reads]
    return int(rows.sum()), float(np.dot(rows, start + rows / 2))


def encoding_work(grids: Sequence[Grid]) -> tuple[int, float]:
    """Patches of grids, and pairs of patches that attend to each other."""
    patches = [len(grid.patches) for grid in grids]
    return sum(patches), float(sum(number**2 for number in patches))


def catch_up_work(rows: IntArray, start: IntArray, lengths: IntArray) -> tuple[int, float]:
    """Rows with which drafts catch up in a step, and their pairs. `rows` and `start` are those of the draft."""
    late = rows > np.where(lengths > 0, KEPT_UP, 0)  # a request that has not caught up drafts nothing
    if not late.any():
        return 0, 0.0
    return int(rows[late].sum()), float(np.dot(rows[late], start[late] + rows[late] / 2))
