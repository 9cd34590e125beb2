"""The seam between the scheduler and whatever decides draft lengths.

A policy sees a frozen view of the requests that could speculate this step and answers with one length each. It never
sees tensors, streams or clocks, so the simulator runs the same policies as the GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from faser.types import IntArray


@dataclass(frozen=True)
class BatchView:
    """The requests about to decode, in order of arrival. Arrays are [B]."""

    slots: IntArray  # where a request sits for as long as it runs
    num_tokens: IntArray  # context
    lag: IntArray  # context tokens the draft has yet to compute: 1 or 2 where it kept up, 0 without a draft model
    limit: IntArray  # the most this request may draft: max_draft, and what it may still emit
    drafted: IntArray  # tokens drafted for it so far
    accepted: IntArray  # and accepted
    num_prefill_rows: int  # prompt rows that share the step
    num_waiting: int

    @property
    def num_requests(self) -> int:
        return int(self.slots.size)


class Policy(Protocol):
    """Chooses a length for every request, every step.

    A policy that has a `max_length` never gives more; a GPU prepares for it at start-up.
    """

    @property
    def name(self) -> str: ...

    def lengths(self, view: BatchView) -> IntArray:
        """One length per request of the view, at least 0; the scheduler cuts what exceeds `view.limit` or the pools."""
        ...
