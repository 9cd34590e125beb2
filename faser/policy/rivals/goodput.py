"""`goodput`: one length for the batch, the one with the most expected tokens per second."""

from __future__ import annotations

import numpy as np

from faser.arrays import IntArray
from faser.limits import ADAPTIVE_MAX_LENGTH
from faser.policy.acceptance import Acceptance
from faser.policy.base import BatchView, Outcome, Policy
from faser.policy.estimates import expected_tokens, seconds_by_length, survival

MARGIN = 1.1  # predicted speed of speculation / plain decoding, at least


class Goodput(Policy):
    """Maximises B(1 - α^(k+1)) / (1 - α) / (seconds of a step of length k); k = 0 unless that is 1.1 times better.

    SmartSpec's rule (dynamic speculative decoding). α is the recent acceptance rate of all requests together; the
    seconds are profiled. Two deviations: a request that may draft fewer than k tokens counts with its limit; and while
    nothing is drafted α drifts back to its prior, or a bad spell would end speculation for good.
    """

    name = "goodput"
    max_length = ADAPTIVE_MAX_LENGTH
    needs_cost = True

    def __init__(self) -> None:
        self._acceptance = Acceptance(ADAPTIVE_MAX_LENGTH)

    def learn(self, outcome: Outcome) -> None:
        self._acceptance.learn(outcome)

    def lengths(self, view: BatchView) -> IntArray:
        rates = np.full(view.num_requests, self._acceptance.mean)
        tokens = expected_tokens(survival(rates, view.limit, ADAPTIVE_MAX_LENGTH))
        goodput = tokens / seconds_by_length(view, ADAPTIVE_MAX_LENGTH)
        goodput[0] *= MARGIN
        return np.minimum(int(goodput.argmax()), view.limit)
