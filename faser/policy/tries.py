"""Tries: a few short drafts of a draft of which little is known, to learn whether drafting pays.

Knows views, costs and what a draft might gain; no acceptance rates. A try is short (one token) and begins with a few
requests, those whose drafts have the least to catch up. It widens as drafts are accepted: as many requests as accepted
tokens. A try is made only if the gain that may be hoped for soon repays it. Tries that fail are paid off by a share of
all steps, and no try begins before that: hopeless drafts cost that share in the long run, and one try at the start.
"""

from __future__ import annotations

import numpy as np

from faser.arrays import IntArray
from faser.cost.profiled_cost import MAX_STEADY_LAG, ProfiledCost
from faser.policy.base import BatchView
from faser.policy.estimates import step_seconds

FEW = 4  # requests that a try begins with, at most
MOST_ROWS = 512  # context tokens that they catch up with in one step, at most; one request is always tried
REPAID_STEPS = 64  # steps without drafts in which the hoped gain must repay one step of a try
SHARE = 0.002  # of all steps: what failed tries may cost
MOST_OWED = 1.0  # steps that failed tries may have cost beyond their share when another one begins


class Tries:
    """Lengths of a try, and when the next may begin. Seconds are counted in steps without drafts."""

    def __init__(self) -> None:
        self._owed = 0.0  # steps that tries have cost, less their share
        self._latest = 0.0  # steps that the latest try costs

    @property
    def may_begin(self) -> bool:
        return self._owed <= MOST_OWED

    def lengths(self, view: BatchView, cost: ProfiledCost, num_accepted: int, hoped_gain: float) -> IntArray:
        """[B] 0 or 1. `hoped_gain`: factor in speed if the draft is good."""
        lengths = np.zeros(view.num_requests, dtype=np.int64)
        plain = step_seconds(cost, lengths, view.num_tokens)
        tried = _requests(view, num_accepted)
        lengths[tried] = 1
        lag = view.lag[tried]
        catch_up = int(lag.sum()) if lag.max() > MAX_STEADY_LAG else 0
        steps = step_seconds(cost, lengths, view.num_tokens, catch_up) / plain - 1
        if steps > REPAID_STEPS * (hoped_gain - 1):
            return np.zeros_like(lengths)
        self._latest = steps
        return lengths

    def learn(self, is_try: bool) -> None:
        """Told of every step."""
        self._owed = max(0.0, self._owed - SHARE) + self._latest * is_try

    def succeed(self) -> None:
        """Drafting pays: nothing is owed for the tries that showed it."""
        self._owed = 0.0


def _requests(view: BatchView, num_accepted: int) -> IntArray:
    """Indices of the requests to try; at least one may draft."""
    able = np.flatnonzero(view.limit > 0)
    able = able[view.lag[able].argsort(kind="stable")]
    lag = view.lag[able]
    num_steady = int(np.count_nonzero(lag <= MAX_STEADY_LAG))  # these have nothing to catch up
    number = max(num_accepted, min(FEW, num_steady or FEW))
    return able[: max(1, min(number, int(np.count_nonzero(lag.cumsum() <= MOST_ROWS))))]
