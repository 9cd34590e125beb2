"""The seam between the scheduler and whatever decides draft lengths.

A policy sees a frozen view of the requests that could speculate this step, and what forwards cost, and answers with one
length each. It never sees tensors, streams or clocks, so the simulator runs the same policies as the GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from faser.arrays import FloatArray, IntArray
from faser.cost.profile import Cost
from faser.policy.stopping import Stopping

MAX_LENGTH = 32  # no policy drafts more in one step
MOST_LENGTH = 7  # nor do those that look for a length: with the token before it eight rows, for which there are graphs


@dataclass(frozen=True)
class BatchView:
    """The requests about to decode, in order of arrival. Arrays are [B]."""

    slots: IntArray  # where a request sits for as long as it runs
    num_tokens: IntArray  # context
    lag: IntArray  # context tokens the draft has yet to compute: 1 or 2 where it kept up, 0 without a draft model
    limit: IntArray  # the most this request may draft: max_draft, and what it may still emit
    accepted: IntArray  # drafted tokens accepted so far
    tried: IntArray  # accepted + the first rejected of each step
    num_output: IntArray  # tokens it has put out
    remaining: IntArray  # and may still put out, if nothing stops it
    num_prefill_rows: int  # prompt rows that share the step
    cost: Cost | None = None  # there wherever the policy `needs_cost`

    @classmethod
    def alike(cls, num_requests: int, num_tokens: int, cost: Cost) -> BatchView:
        """Requests of one size in their midst, of whose drafts nothing is known."""
        none = np.zeros(num_requests, dtype=np.int64)
        many = none + MAX_LENGTH + 1
        return cls(none + np.arange(num_requests), none + num_tokens, none + 1, many - 1, none, none, none, many,
                   0, cost)  # fmt: skip

    @property
    def num_requests(self) -> int:
        return int(self.slots.size)


@dataclass(frozen=True)
class Outcome:
    """What came of a step. Arrays are [B], the requests that decoded in it, in its order."""

    slots: IntArray
    lengths: IntArray  # drafted, in this step or the one before, and judged in this one
    accepted: IntArray
    lag: IntArray  # context tokens the draft computed first
    num_prefill_rows: int
    seconds: float
    confidence: FloatArray | None = None  # [B, depth] the draft's own, of what it drafted, where it was looked at


class Policy(Protocol):
    """Chooses a length for every request, every step.

    A policy that has a `max_length` never gives more; a GPU prepares for it at start-up. One whose `needs_cost` is true
    is only asked with a view that has a cost.
    """

    @property
    def name(self) -> str: ...

    def lengths(self, view: BatchView) -> IntArray:
        """One length per request of the view, at least 0; the scheduler cuts what exceeds `view.limit` or the pools."""
        ...


@runtime_checkable
class Stops(Protocol):
    """A policy that may end drafts before the lengths it gave."""

    def stopping(self) -> Stopping | None:
        """The rule for the lengths given last, by index in their view; None: drafts are as long as they were given."""
        ...


@runtime_checkable
class Learner(Protocol):
    """A policy that wants to know what came of its lengths."""

    def learn(self, outcome: Outcome) -> None:
        """For every step in which somebody decoded, in order. The next lengths may have been given already."""
        ...
