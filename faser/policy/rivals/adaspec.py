"""`adaspec`: lengthen while predicted goodput rises, then trim to a graph size."""

from __future__ import annotations

import numpy as np

from faser.arrays import FloatArray, IntArray
from faser.limits import ADAPTIVE_MAX_LENGTH
from faser.policy.acceptance import Acceptance
from faser.policy.base import BatchView, Outcome, Policy
from faser.policy.estimates import expected_tokens, likeliest, seconds_by_length, step_seconds, survival


class AdaSpec(Policy):
    """The batch's length rises from 0 while the predicted tokens per second rise.

    The rows are then trimmed to the next smaller graph size, the least likely drafts first, if that gives more tokens
    per second than padding them to the next larger size. AdaSpec's rule without its latency targets, which requests do
    not have here. AdaSpec ranks drafts by the draft's confidence after drafting. Here lengths are given before
    drafting, so a request's own acceptance rate stands in, and trimmed tokens are never drafted.
    """

    name = "adaspec"
    max_length = ADAPTIVE_MAX_LENGTH
    needs_cost = True

    def __init__(self) -> None:
        self._acceptance = Acceptance(ADAPTIVE_MAX_LENGTH)

    def learn(self, outcome: Outcome) -> None:
        self._acceptance.learn(outcome)

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
