"""`goodput`: one length for the batch, the one that promises the most tokens per second."""

from __future__ import annotations

import numpy as np

from faser.arrays import IntArray
from faser.policy.acceptance import Acceptance
from faser.policy.base import MOST_LENGTH, BatchView, Outcome
from faser.policy.estimates import expected_tokens, seconds_by_length, survival

MARGIN = 1.1  # by so much speculation must beat plain decoding


class Goodput:
    """Maximises B(1 - α^(k+1)) / (1 - α) over the seconds of a step of length k; no drafts unless 1.1 times better.

    SmartSpec's rule (dynamic speculative decoding). α is the share of judged drafts that were accepted of late, over
    all requests; the seconds are profiled. Two deviations: a request that may draft less than k counts with what it
    may; and while nothing is judged α drifts back to its prior, or a bad spell would end speculation for good.
    """

    name = "goodput"
    max_length = MOST_LENGTH
    needs_cost = True

    def __init__(self) -> None:
        self._acceptance = Acceptance(MOST_LENGTH)

    def learn(self, outcome: Outcome) -> None:
        self._acceptance.learn(outcome)

    def lengths(self, view: BatchView) -> IntArray:
        rates = np.full(view.num_requests, self._acceptance.mean)
        tokens = expected_tokens(survival(rates, view.limit, MOST_LENGTH))
        goodput = tokens / seconds_by_length(view, MOST_LENGTH)
        goodput[0] *= MARGIN
        return np.minimum(int(goodput.argmax()), view.limit)
