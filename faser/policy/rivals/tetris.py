"""`tetris`: a fixed capacity of rows, filled with the drafts that are most likely accepted."""

from __future__ import annotations

import numpy as np

from faser.arrays import IntArray
from faser.cost.profiled_cost import ProfiledCost
from faser.policy.acceptance import Acceptance
from faser.policy.base import BatchView, Outcome, Policy
from faser.policy.estimates import likeliest, survival

WINDOW = 5  # longest draft; the rule has no term for the draft's seconds that would limit it
NEARLY_FREE = 1.5  # times the seconds of a single row
ROWS = np.arange(1, 257)  # row counts compared where verification has no graph sizes


class Tetris(Policy):
    """Verifies the C drafts (request, position) with the highest survival; C = capacity - requests - prompt rows.

    The capacity is the most rows whose verification, without context, takes at most 1.5 times as long as one row: the
    knee of the profile. TETRIS leaves it to the operator. TETRIS drafts a whole window for all requests and ranks the
    drafts by their probabilities. Here lengths are given before drafting, so survival is a power of the request's own
    acceptance rate, and a request stops drafting at its own length.
    """

    name = "tetris"
    max_length = WINDOW
    needs_cost = True

    def __init__(self) -> None:
        self._acceptance = Acceptance(WINDOW)

    def learn(self, outcome: Outcome) -> None:
        self._acceptance.learn(outcome)

    def lengths(self, view: BatchView) -> IntArray:
        assert view.cost is not None
        room = capacity(view.cost) - view.num_requests - view.num_prefill_rows
        return likeliest(survival(self._acceptance.request_rates(view), view.limit, WINDOW), room)


def capacity(cost: ProfiledCost) -> int:
    """Rows up to which verification is nearly free."""
    rows = cost.row_sizes if cost.row_sizes.size else ROWS
    seconds = cost.verify(rows, 0.0)
    return int(rows[np.flatnonzero(seconds <= NEARLY_FREE * seconds[0])[-1]])
