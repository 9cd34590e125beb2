"""`adaspec`: lengthen while it pays, then trim to what a graph holds."""

from __future__ import annotations

import numpy as np

from faser.arrays import FloatArray, IntArray
from faser.policy.base import MOST_LENGTH, BatchView
from faser.policy.estimates import expected_tokens, likeliest, request_rates, seconds_by_length, step_seconds, survival


class AdaSpec:
    """Drafts nothing unless a first token raises the predicted tokens per second; then deeper while they rise.

    The batch's length settled, the rows are trimmed to the next smaller size for which there is a graph, the least
    likely slots first, where that promises more than to pad them to the next larger. AdaSpec's rule without its latency
    targets, which no request has here. It ranks slots by the draft's confidence after drafting; lengths are given
    before it here, so a request's own acceptance stands in, and what is trimmed is never drafted.
    """

    name = "adaspec"
    max_length = MOST_LENGTH
    needs_cost = True

    def lengths(self, view: BatchView) -> IntArray:
        chances = survival(request_rates(view), view.limit, MOST_LENGTH)
        tokens = expected_tokens(chances)
        goodput = tokens / seconds_by_length(view, MOST_LENGTH)
        falls = np.flatnonzero(np.diff(goodput) <= 0)
        length = int(falls[0]) if falls.size else MOST_LENGTH
        return self._trimmed(view, chances[:length], float(goodput[length]))

    def _trimmed(self, view: BatchView, chances: FloatArray, goodput: float) -> IntArray:
        whole: IntArray = np.count_nonzero(chances, axis=0).astype(np.int64)
        assert view.cost is not None
        sizes = view.cost.row_sizes
        at = int(np.searchsorted(sizes, view.num_requests + whole.sum())) - 1  # the next smaller size
        slots = int(sizes[at]) - view.num_requests if at >= 0 else 0
        if view.num_prefill_rows or slots <= 0:  # beside prompts no graph runs
            return whole
        trimmed = likeliest(chances, slots)
        kept = np.arange(1, len(chances) + 1)[:, None] <= trimmed
        tokens = view.num_requests + float(chances[kept].sum())
        return trimmed if tokens / step_seconds(view.cost, trimmed, view.num_tokens) > goodput else whole
