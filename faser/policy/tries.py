"""Tries: a few short drafts of a draft of which little is known, to learn whether drafting pays.

Knows views, costs and what a draft might gain; no acceptance rates. A try is short (one token) and begins with a few
requests, those whose drafts have the least to catch up. It widens as drafts are accepted: as many requests as accepted
tokens. A try is made only if the gain that may be hoped for soon repays it. What tries cost is paid off by a share of
all steps and by what drafting then gains; before that no try begins and none that is open catches up long contexts.
"""

from __future__ import annotations

import numpy as np

from faser.arrays import BoolArray, IntArray
from faser.cost.profiled_cost import MAX_STEADY_LAG, ProfiledCost, catch_up_rows
from faser.policy.base import BatchView
from faser.policy.estimates import step_seconds, typical_rest

FEW = 4  # requests that a try begins with, at most
MOST_ROWS = 512  # context tokens that they catch up with in one step, at most; one request is always tried
REPAID_STEPS = 64  # steps without drafts in which the hoped gain must repay one step of a try
SHARE = 0.002  # of all steps: what failed tries may cost
MOST_OWED = 4.0  # steps that failed tries may have cost beyond their share when another one begins
MOST_REMEMBERED = 16.0  # steps owed, at most: a draft that became good is found within 6,000 steps


class Tries:
    """Lengths of a try, and when the next may begin. Seconds are counted in steps without drafts."""

    def __init__(self) -> None:
        self._owed = 0.0  # steps that tries have cost, less their share
        self._is_open = False
        self._begun: IntArray = np.zeros(0, dtype=np.int64)  # slots of requests that catch up for the open try

    @property
    def may_begin(self) -> bool:
        return self._owed <= MOST_OWED

    @property
    def may_go_on(self) -> bool:
        return self._is_open or self.may_begin

    def lengths(self, view: BatchView, cost: ProfiledCost, num_accepted: int, hoped_gain: float) -> IntArray:
        """[B] 0 or 1. `hoped_gain`: factor in speed if the draft is good."""
        none = np.zeros(view.num_requests, dtype=np.int64)
        may_draft, is_near = view.limit > 0, view.lag <= MOST_ROWS
        if view.lookup is not None:  # what is found costs no draft
            may_draft &= view.lookup.limit == 0
        is_begun = np.isin(view.slots, self._begun)
        if not self.may_begin:
            may_draft &= is_begun | is_near if self._is_open else False
        if not may_draft.any():
            return none
        tried = _requests(view, may_draft, num_accepted)
        lengths = none.copy()
        lengths[tried] = 1
        late_rows = catch_up_rows(view.lag if cost.drafts_whole_batch else view.lag[tried])
        plain = step_seconds(cost, none, view.num_tokens)
        steps = step_seconds(cost, lengths, view.num_tokens, late_rows) / plain - 1
        if steps > REPAID_STEPS * (hoped_gain - 1):
            return none
        if late_rows and not (is_near | is_begun)[tried].all():
            rest = typical_rest(view) if cost.drafts_whole_batch else typical_rest(view)[tried]
            if steps > (1 - 1 / hoped_gain) * float(rest.sum()) / view.num_requests:
                return none  # not even a good draft would repay it until they end
        self._is_open = True
        self._begun = view.slots[tried[~is_near[tried]]]
        return lengths

    def learn(self, steps: float) -> None:
        """Told of every step. `steps`: what its drafts cost, if it was one of a try."""
        self._owed = min(MOST_REMEMBERED, max(0.0, self._owed - SHARE) + steps)

    def end(self, gain: float = 1.0) -> None:
        """No try goes on. `gain`: factor in speed of the drafts that are made now."""
        self._is_open, self._begun = False, self._begun[:0]
        self._owed = max(0.0, self._owed - max(0.0, gain - 1))


def _requests(view: BatchView, may_draft: BoolArray, num_accepted: int) -> IntArray:
    """Indices of the requests to try; at least one may draft."""
    able = np.flatnonzero(may_draft)
    able = able[view.lag[able].argsort(kind="stable")]
    lag = view.lag[able]
    num_steady = int(np.count_nonzero(lag <= MAX_STEADY_LAG))  # these have nothing to catch up
    number = max(num_accepted, min(FEW, num_steady or FEW))
    return able[: max(1, min(number, int(np.count_nonzero(lag.cumsum() <= MOST_ROWS))))]
