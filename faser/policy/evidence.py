"""Whether drafting pays, as measured: tokens per second with drafts against without, by the size of the batch.

Knows outcomes of steps and what a step without drafts should take; no lengths. Costs that predict steps poorly cannot
say whether a small gain is real. Where the expected gain is within their error, blocks of steps with and without drafts
take turns, with a rest between two pairs. The faster way then holds for a number of steps before both are compared
again. A comparison that ends undecided leaves drafts off until they are certainly faster.
"""

from __future__ import annotations

import math
from statistics import fmean, stdev

from faser.policy.base import Outcome

BLOCK_STEPS = 4
MIN_PAIRS, MAX_PAIRS = 2, 8  # of blocks in a comparison
REST_STEPS = 48  # between two pairs of blocks: by the latest result; without drafts while there is none
CERTAIN_ERRORS = 2.0  # a mean log ratio of this many standard errors decides a comparison
MIN_ERROR = 0.02  # standard error of a mean log ratio: two blocks may agree by chance
UNTRUSTED_LENGTH = 3  # tokens a request drafts at most where a gain cannot be trusted
TRUSTED_ERRORS = 3.0  # an expected gain of this many mean errors of predictions needs no comparison
CLEAR_RATIO = 0.08  # log ratio of a single pair that confirms the previous result
COMPARING_COST = 0.005  # share of throughput that comparisons may cost: sets how long a result holds
RECHECK_STEPS = 16  # of a hold, between two evaluations of the expected gain
MIN_HOLD, MAX_HOLD = 128, 4096  # steps for which a result holds


def is_trusted(expected_gain: float, error: float) -> bool:
    """Whether a gain is larger than errors of predictions explain."""
    return expected_gain > 1 + TRUSTED_ERRORS * error


class MeasuredGain:
    """Asked before every step whether drafting is allowed, and told the outcome of every step."""

    def __init__(self) -> None:
        self._comparisons: dict[int, _Comparison] = {}

    def allows(self, num_requests: int, expected_gain: float, error: float) -> bool:
        """Whether to draft for an expected factor in speed. `error`: mean error of predicted seconds, as a share."""
        return is_trusted(expected_gain, error) or self._comparison(num_requests).allows

    def rules_out(self, num_requests: int) -> bool:
        """Whether drafting lost and the result holds. False every RECHECK_STEPS, so that a trusted gain is noticed."""
        comparison = self._comparisons.get(num_requests.bit_length())
        if comparison is None or comparison.allows:
            return False
        return comparison.steps_left % RECHECK_STEPS > 0

    def learn(self, outcome: Outcome, plain_seconds: float) -> None:
        """Take in a step. `plain_seconds`: predicted for its batch without drafts; makes steps comparable."""
        size = int(outcome.slots.size)
        if outcome.num_prefill_rows or not size or outcome.seconds <= 0 or plain_seconds <= 0:
            return
        tokens = 1 + float(outcome.accepted.sum()) / size
        # a draft that catches up costs time before it brings anything: such a step is one with drafts
        speculates = bool(outcome.lengths.any() or outcome.lag.any())
        self._comparison(size).add(speculates, tokens * plain_seconds, outcome.seconds)

    def _comparison(self, num_requests: int) -> _Comparison:
        """One for batches of 1, of 2 and 3, of 4 to 7 requests, and so on."""
        return self._comparisons.setdefault(num_requests.bit_length(), _Comparison())


class _Comparison:
    """Blocks of steps with and without drafts, in turn, until one way is clearly faster; then its result holds.

    In a block with drafts every step counts, also those in which no request drafts or a draft catches up.
    """

    def __init__(self) -> None:
        self.allows = True  # drafts: in the present block, or while the result holds
        self.steps_left = 0  # of the hold
        self._pays = False  # the latest result
        self._is_first = True
        self._begin()

    def _begin(self) -> None:
        self._gains: list[float] = []  # log(speed with drafts / speed without), of each pair of blocks
        self._speeds: dict[bool, float] = {}  # of the present pair's blocks, by whether they draft
        self._rest_left = 0
        self._new_block(self._pays or self._is_first)

    def _new_block(self, drafts: bool) -> None:
        self.allows = drafts
        self._steps, self._num_drafting, self._work, self._seconds = 0, 0, 0.0, 0.0
        # the first step may have been planned before the block, or may catch up for the block before
        self._skips_next = True

    def add(self, drafted: bool, work: float, seconds: float) -> None:
        """Count a step. `work`: its tokens × the predicted seconds of a token without drafts."""
        if self.steps_left > 0:
            self.steps_left -= 1
            if not self.steps_left:
                self._begin()
            return
        if self._rest_left > 0:
            self._rest_left -= 1
            if not self._rest_left:
                self._new_block(self.allows)
            return
        if self._skips_next:
            self._skips_next = False
            return
        if drafted and not self.allows:
            return  # it drafted because its expected gain was trusted: no sample of a step without drafts
        self._steps, self._work, self._seconds = self._steps + 1, self._work + work, self._seconds + seconds
        self._num_drafting += drafted
        if self._steps == BLOCK_STEPS:
            self._end_block()

    def _end_block(self) -> None:
        if self.allows and 2 * self._num_drafting < self._steps:
            self._new_block(True)  # most steps drafted nothing: no sample of a block with drafts
            return
        self._speeds[self.allows] = self._work / self._seconds
        if len(self._speeds) < 2:
            self._new_block(not self.allows)
            return
        self._gains.append(math.log(self._speeds[True] / self._speeds[False]))
        self._speeds = {}
        if self._is_decided():
            self._conclude()
        else:
            self.allows, self._rest_left = self._pays, REST_STEPS

    def _is_decided(self) -> bool:
        count, mean = len(self._gains), fmean(self._gains)
        if count < MIN_PAIRS:
            return not self._is_first and (mean > CLEAR_RATIO if self._pays else mean < -CLEAR_RATIO)
        return count >= MAX_PAIRS or self._is_certain()

    def _is_certain(self) -> bool:
        if len(self._gains) < MIN_PAIRS:
            return True  # one clear pair confirmed the latest result
        error = stdev(self._gains) / math.sqrt(len(self._gains))
        return abs(fmean(self._gains)) > CERTAIN_ERRORS * max(MIN_ERROR, error)

    def _conclude(self) -> None:
        mean = fmean(self._gains)
        lost = len(self._gains) * (1 + BLOCK_STEPS) * (1 - math.exp(-abs(mean)))  # in steps of the faster way
        if self._is_certain() or self._pays:  # no drafts until they are certainly faster
            self._pays = mean > 0
        self.allows = self._pays
        self._is_first = False
        self.steps_left = int(min(MAX_HOLD, max(MIN_HOLD, lost / COMPARING_COST)))
