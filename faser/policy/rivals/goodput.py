"""`goodput`, `adaspec` and `tetris`: lengths by the tokens that acceptance rates and costs let expect."""

from __future__ import annotations

import numpy as np

from faser.arrays import FloatArray, IntArray
from faser.cost.profiled_cost import ProfiledCost
from faser.limits import ADAPTIVE_MAX_LENGTH
from faser.policy.acceptance import Acceptance
from faser.policy.base import BatchView, Outcome, Policy
from faser.policy.estimates import expected_tokens, likeliest, seconds_by_length, step_seconds, survival

MARGIN = 1.1  # of `goodput`: predicted speed of speculation / plain decoding, at least
WINDOW = 5  # longest draft of `tetris`; the rule has no term for the draft's seconds that would limit it
NEARLY_FREE = 1.5  # times the seconds of a single row
ROWS = np.arange(1, 257)  # row counts compared where verification has no graph sizes


class _Expecting(Policy):
    needs_cost = True

    def __init__(self) -> None:
        self._acceptance = Acceptance(self.max_length)

    def learn(self, outcome: Outcome) -> None:
        self._acceptance.learn(outcome)


class Goodput(_Expecting):
    """Maximises B(1 - α^(k+1)) / (1 - α) / (seconds of a step of length k); k = 0 unless that is 1.1 times better.

    SmartSpec's rule (dynamic speculative decoding). α is the recent acceptance rate of all requests together; the
    seconds are profiled. Two deviations: a request that may draft fewer than k tokens counts with its limit; and while
    nothing is drafted α drifts back to its prior, or a bad spell would end speculation for good.
    """

    name = "goodput"

    def lengths(self, view: BatchView) -> IntArray:
        rates = np.full(view.num_requests, self._acceptance.mean)
        tokens = expected_tokens(survival(rates, view.limit, ADAPTIVE_MAX_LENGTH))
        goodput = tokens / seconds_by_length(view, ADAPTIVE_MAX_LENGTH)
        goodput[0] *= MARGIN
        return np.minimum(int(goodput.argmax()), view.limit)


class AdaSpec(_Expecting):
    """The batch's length rises from 0 while the predicted tokens per second rise.

    The rows are then trimmed to the next smaller graph size, the least likely drafts first, if that gives more tokens
    per second than padding them to the next larger size. AdaSpec's rule without its latency targets, which requests do
    not have here. AdaSpec ranks drafts by the draft's confidence after drafting. Here lengths are given before
    drafting, so a request's own acceptance rate stands in (shrunk to the mean of all requests), and trimmed tokens are
    never drafted.
    """

    name = "adaspec"

    def lengths(self, view: BatchView) -> IntArray:
        chances = survival(self._acceptance.request_rates(view), view.limit, ADAPTIVE_MAX_LENGTH)
        tokens = expected_tokens(chances)
        goodput = tokens / seconds_by_length(view, ADAPTIVE_MAX_LENGTH)
        falls = np.flatnonzero(np.diff(goodput) <= 0)
        length = int(falls[0]) if falls.size else ADAPTIVE_MAX_LENGTH
        return self._trimmed(view, chances[:length], float(goodput[length]))

    def _trimmed(self, view: BatchView, chances: FloatArray, goodput: float) -> IntArray:
        whole: IntArray = np.count_nonzero(chances, axis=0).astype(np.int64)
        assert view.cost is not None
        sizes = view.cost.row_sizes
        at = int(np.searchsorted(sizes, view.num_requests + whole.sum())) - 1  # the next smaller size
        room = int(sizes[at]) - view.num_requests if at >= 0 else 0
        if view.num_prefill_rows or room <= 0:  # steps with prompts run no decoding graph
            return whole
        trimmed = likeliest(chances, room)
        kept = np.arange(1, len(chances) + 1)[:, None] <= trimmed
        tokens = view.num_requests + float(chances[kept].sum())
        return trimmed if tokens / step_seconds(view.cost, trimmed, view.num_tokens) > goodput else whole


class Tetris(_Expecting):
    """Verifies the C drafts (request, position) with the highest survival; C = capacity - requests - prompt rows.

    The capacity is the most rows whose verification, without context, takes at most 1.5 times as long as one row: the
    knee of the profile. TETRIS leaves it to the operator. TETRIS drafts a whole window for all requests and ranks the
    drafts by their probabilities. Here lengths are given before drafting, so survival is a power of the request's own
    acceptance rate, and a request stops drafting at its own length.
    """

    name = "tetris"
    max_length = WINDOW

    def lengths(self, view: BatchView) -> IntArray:
        assert view.cost is not None
        room = capacity(view.cost) - view.num_requests - view.num_prefill_rows
        return likeliest(survival(self._acceptance.request_rates(view), view.limit, WINDOW), room)


def capacity(cost: ProfiledCost) -> int:
    """Rows up to which verification is nearly free."""
    rows = cost.row_sizes if cost.row_sizes.size else ROWS
    seconds = cost.verify(rows, 0.0)
    return int(rows[np.flatnonzero(seconds <= NEARLY_FREE * seconds[0])[-1]])
