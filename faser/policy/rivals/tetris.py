"""`tetris`: a fixed capacity of rows, filled with the drafts most likely to be accepted."""

from __future__ import annotations

import numpy as np

from faser.arrays import IntArray
from faser.cost.profile import Cost
from faser.policy.base import BatchView
from faser.policy.estimates import likeliest, request_rates, survival

WINDOW = 5  # no request drafts more; the rule itself has no term for the draft's seconds that would stop it
NEARLY_FREE = 1.5  # times the seconds of a single row
ROWS = np.arange(1, 257)  # numbers of rows looked at where verification has no steps


class Tetris:
    """Verifies the C slots (request, position) of the greatest survival, C being what the batch leaves of a capacity.

    The capacity is the most rows whose verification, no context read, takes at most 1.5 times as long as that of one
    row: the knee of the profile. TETRIS leaves it to the operator. It drafts a whole window for everybody and ranks the
    drafts by their probabilities; lengths are given before drafting here, so survival is a power of the request's own
    acceptance, and a request stops drafting at its own length. Prompt rows use capacity like all others.
    """

    name = "tetris"
    max_length = WINDOW
    needs_cost = True

    def lengths(self, view: BatchView) -> IntArray:
        assert view.cost is not None
        room = capacity(view.cost) - view.num_requests - view.num_prefill_rows
        return likeliest(survival(request_rates(view), view.limit, WINDOW), room)


def capacity(cost: Cost) -> int:
    """Rows up to which verification is nearly free."""
    rows = cost.row_sizes if cost.row_sizes.size else ROWS
    seconds = cost.verify(rows, 0.0)
    return int(rows[np.flatnonzero(seconds <= NEARLY_FREE * seconds[0])[-1]])
