"""The seam between the scheduler and whatever decides draft lengths.

A policy sees a frozen view of the requests that could speculate in this step, and what forwards cost, and answers with
one length per request. It never sees tensors, streams or clocks, so the simulator runs the same policies as the GPU.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np

from faser.arrays import BoolArray, FloatArray, IntArray
from faser.cost.profiled_cost import ProfiledCost
from faser.limits import ADAPTIVE_MAX_LENGTH, HARD_MAX_LENGTH
from faser.policy.residency import FreePages, ResidencyRule
from faser.rules.stopping import Stopping

PRIOR_RATE = 0.7  # acceptance rate of a draft that has not drafted yet
PRIOR_WEIGHT = 16.0  # tried tokens that the prior counts as


@dataclass(frozen=True)
class LookupView:
    """What prompt lookup found in the contexts of a batch. B requests."""

    limit: IntArray  # [B] most tokens that may be drafted from it; 0: nothing was found
    survival: FloatArray  # [B, depth] P(its tokens are accepted up to each position); 0 beyond the limit
    is_alone: bool  # there is no draft, or it is away: every draft of this step is looked up


@dataclass(frozen=True)
class Guesses:
    """A policy's answer: how much each request drafts, and where from. Arrays are [B]."""

    lengths: IntArray
    is_looked_up: BoolArray  # its drafts come from prompt lookup, not from the draft


@dataclass(frozen=True)
class BatchView:
    """The requests about to decode, in order of arrival. Arrays are [B]."""

    slots: IntArray  # the same for as long as a request runs
    num_tokens: IntArray  # context
    lag: IntArray  # context tokens the draft has yet to compute: 1 or 2 where it kept up, 0 without a draft model
    limit: IntArray  # most tokens the request may draft: min(max_draft, what it may still output)
    accepted: IntArray  # drafted tokens accepted so far
    tried: IntArray  # accepted + the first rejected of each step: acceptance rate = accepted / tried
    num_output: IntArray  # tokens generated so far
    remaining: IntArray  # tokens it may still generate, if nothing stops it
    num_prefill_rows: int  # prompt rows that share the step
    cost: ProfiledCost | None = None  # given where the policy `needs_cost`
    lookup: LookupView | None = None  # given where prompt lookup is there; `limit` is then that of the draft

    @classmethod
    def alike(cls, num_requests: int, num_tokens: int, cost: ProfiledCost) -> BatchView:
        """Requests of one context length in mid-generation, without any acceptance history."""
        none = np.zeros(num_requests, dtype=np.int64)
        return cls(
            slots=np.arange(num_requests),
            num_tokens=none + num_tokens,
            lag=none + 1,
            limit=none + HARD_MAX_LENGTH,
            accepted=none,
            tried=none,
            num_output=none,
            remaining=none + HARD_MAX_LENGTH + 1,
            num_prefill_rows=0,
            cost=cost,
        )

    @property
    def num_requests(self) -> int:
        return int(self.slots.size)


@dataclass(frozen=True)
class Outcome:
    """The result of a step. Arrays are [B]: the requests that decoded in it, in its order."""

    slots: IntArray
    lengths: IntArray  # drafted tokens that were verified in this step
    accepted: IntArray
    lag: IntArray  # context tokens the draft computed first
    num_prefill_rows: int
    seconds: float
    confidence: FloatArray | None = None  # [B, depth] of the drafted tokens, where confidence checks were made
    is_looked_up: BoolArray | None = None  # whose drafts were not made by the draft; None: nobody's
    num_tokens: IntArray | None = None  # context before the step, where it is known

    @property
    def of_draft(self) -> tuple[IntArray, IntArray]:
        """[B] lengths and accepted tokens of what the draft made."""
        if self.is_looked_up is None:
            return self.lengths, self.accepted
        return np.where(self.is_looked_up, 0, self.lengths), np.where(self.is_looked_up, 0, self.accepted)


class Policy(ABC):
    """Chooses a draft length for every request, every step. Only `name` and `lengths` have no default."""

    needs_cost: bool = False  # if True, every view has a cost

    @property
    @abstractmethod
    def name(self) -> str:
        """As `--policy` spells it."""

    @property
    def max_length(self) -> int:
        """The longest draft it asks for; 0: it never drafts. A GPU captures graphs for it at start-up."""
        return ADAPTIVE_MAX_LENGTH

    @abstractmethod
    def lengths(self, view: BatchView) -> IntArray:
        """[B] lengths of at least 0. The scheduler cuts them to `view.limit` and to the pages that are free."""

    def guesses(self, view: BatchView) -> Guesses:
        """Lengths, and who looks its drafts up: those that expect at least as many accepted tokens from that.

        The draft's tokens are taken to be accepted at the request's own rate, shrunk to that of all running requests.
        """
        lengths, lookup = self.lengths(view), view.lookup
        if lookup is None or lookup.is_alone:
            return Guesses(lengths, np.full(lengths.shape, lookup is not None))
        mean = (view.accepted.sum() + PRIOR_RATE * PRIOR_WEIGHT) / (view.tried.sum() + PRIOR_WEIGHT)
        rates = (view.accepted + mean * PRIOR_WEIGHT) / (view.tried + PRIOR_WEIGHT)
        depth = np.arange(1, lookup.survival.shape[1] + 1)
        drafted = (rates[:, None] ** depth * (depth <= np.minimum(lengths, view.limit)[:, None])).sum(axis=1)
        found = (lookup.survival * (depth <= lengths[:, None])).sum(axis=1)
        return Guesses(lengths, (found > 0) & (found >= drafted))

    def learn(self, outcome: Outcome) -> None:  # noqa: B027 - a policy need not learn
        """Told of every step in which a request decoded, in order. The next step may be planned already."""

    @property
    def learns(self) -> bool:
        """Whether `learn` does anything: the engine builds no Outcome for a policy that ignores it."""
        return type(self).learn is not Policy.learn

    def expected_gain(self, view: BatchView) -> float:
        """Expected speed with drafts over speed without, in this batch, if the draft had kept up; 1: none pays.

        Asked while the draft is away, and before it leaves. It changes nothing.
        """
        return 1.0

    def residency_rule(self) -> ResidencyRule:
        """A new rule for when the draft leaves the device and comes back."""
        return FreePages()

    def stopping(self) -> Stopping | None:
        """A rule that may end drafts before the lengths given last, by index in their view; None: no rule."""
        return None


@dataclass(frozen=True)
class Fixed(Policy):
    """Every request drafts `length` tokens in every step. Length 0 is `off`: the draft never runs."""

    length: int

    @property
    def name(self) -> str:
        return f"fixed:{self.length}" if self.length else "off"

    @property
    def max_length(self) -> int:
        return self.length

    def lengths(self, view: BatchView) -> IntArray:
        return np.full(view.num_requests, self.length, dtype=np.int64)
