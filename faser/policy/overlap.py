"""Whether the draft goes on while the target verifies what it drafted before.

Knows the batch about to decode, what its policy would draft and what forwards cost; no tensors and no clocks. In a step
that overlaps a request drafts its next chunk as if its frontier (the chunk before) were accepted.

A chunk of c tokens is good for c tokens of text if its frontier of c - 1 and its first token are right, with a chance
of p^c. After a miss a request has no frontier: the next step brings one token, and its chunk holds with a chance of p.
"""

from __future__ import annotations

import numpy as np

from faser.policy.base import MOST_LENGTH, BatchView
from faser.policy.estimates import ragged_seconds, reaches, request_rates
from faser.types import FloatArray, IntArray

MODES = ("auto", "on", "off")
MARGIN = 0.05  # by which overlapping must be better to begin with it: rates are estimates, and a switch costs drafts
SURE = 0.99  # no rate is taken to be higher
CHUNKS = range(2, MOST_LENGTH + 1)  # of one token nothing would be left to verify


class Overlap:
    """`on`: every step that drafts, by the policy's lengths. `auto`: where it gives more tokens per second."""

    def __init__(self, mode: str = "on") -> None:
        self._mode = mode
        self._is_on = False

    def chunks(self, view: BatchView, lengths: IntArray) -> IntArray | None:
        """What each request drafts beside the verification of its frontier. None: the step has none of that."""
        if self._mode == "on":
            return lengths
        if view.cost is None or not view.cost.can_overlap or not lengths.any():
            self._is_on = False
            return None
        rates = np.minimum(request_rates(view), SURE)
        # drafts may stop before their lengths
        apart = max(plain_speed(view, rates, np.minimum(lengths, most)) for most in range(1, int(lengths.max()) + 1))
        together = [chunk_speed(view, rates, chunk) for chunk in CHUNKS]
        best = int(np.argmax(together))
        self._is_on = together[best] > apart * (1.0 if self._is_on else 1 + MARGIN)
        return np.full(lengths.size, CHUNKS[best]) if self._is_on else None


def chunk_speed(view: BatchView, rates: FloatArray, chunk: int) -> float:
    """Tokens per second of steps in which everybody drafts so many beside the verification."""
    assert view.cost is not None
    cost, context = view.cost, float(view.num_tokens.sum())
    full = rates / (1 - rates**chunk + rates)  # [B] the share of steps that have a frontier
    tokens = full * (1 - rates**chunk) / (1 - rates) + (1 - full)
    rows = view.num_requests + round(float(full.sum()) * (chunk - 1))
    verify = float(cost.verify(rows, context, view.num_prefill_rows))
    draft = float(cost.first_draft(view.num_requests, context))
    draft += (chunk - 1) * float(cost.next_draft(view.num_requests, context))
    return float(tokens.sum()) / (draft + verify - cost.hidden(draft, verify, view.num_requests) + cost.host)


def plain_speed(view: BatchView, rates: FloatArray, lengths: IntArray) -> float:
    """Likewise of steps that draft and then verify."""
    assert view.cost is not None
    tokens = ((1 - rates ** (lengths + 1)) / (1 - rates)).sum()
    reached = reaches(lengths, int(lengths.max()))
    drafting, read = reached.sum(axis=1), reached @ view.num_tokens
    context = float(view.num_tokens.sum())
    seconds = ragged_seconds(view.cost, view.num_requests, context, drafting, read, view.num_prefill_rows)
    return float(tokens / seconds)
