"""`nightjar`: a bandit over lengths for the whole batch; the loss is seconds per token."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from faser.arrays import FloatArray, IntArray
from faser.cost.profiled_cost import MAX_STEADY_LAG
from faser.policy.base import BatchView, Outcome, Policy

LONGEST = 5  # the arms are the lengths 0 … 5
ARM_DECAY = 0.995  # of all sums, at every step: half-life 138 steps
MAX_BLOCK = 1024  # steps
MIN_EXPLORATION = 1 / 24  # share of the bins, however many there have been
FIRST_PLAYS = 16  # steps of every arm before one is preferred


class _Context:
    """Batches of about one size: decaying sums by arm, and the present bin."""

    def __init__(self) -> None:
        self._steps: FloatArray = np.zeros(LONGEST + 1)
        self._seconds: FloatArray = np.zeros(LONGEST + 1)
        self._tokens: FloatArray = np.zeros(LONGEST + 1)  # per request
        self._planned: IntArray = np.zeros(LONGEST + 1, dtype=np.int64)  # steps given this arm
        self._block, self._block_left, self._num_bins = 1, 0, 0
        self.arm, self.bin_left = 0, 0

    @property
    def losses(self) -> FloatArray:
        """[arms] seconds per token of a request; infinite for an arm without steps."""
        unknown = np.full(LONGEST + 1, np.inf)
        losses: FloatArray = np.divide(self._seconds, self._tokens, out=unknown, where=self._tokens > 0)
        return losses

    @property
    def tokens(self) -> FloatArray:
        """[arms] per request and step."""
        return np.divide(self._tokens, self._steps, out=np.ones(LONGEST + 1), where=self._steps > 0)

    @property
    def bin_size(self) -> int:
        """Steps of a bin = √(steps of its block): a block has as many bins as a bin has steps."""
        return int(self._block**0.5)

    @property
    def exploration(self) -> float:
        """P(a bin explores)."""
        return max(1 / self._num_bins, MIN_EXPLORATION)

    @property
    def untried(self) -> IntArray:
        return np.flatnonzero(self._planned < FIRST_PLAYS)

    def learn(self, arm: int, seconds: float, tokens: float) -> None:
        for sums, new in ((self._steps, 1.0), (self._seconds, seconds), (self._tokens, tokens)):
            sums *= ARM_DECAY  # of all arms: an arm that is not played becomes less certain
            sums[arm] += new

    def open_bin(self) -> None:
        if self._block_left <= 0:
            self._block = self._block_left = min(2 * self._block, MAX_BLOCK)
        self._num_bins += 1
        self.bin_left = self.bin_size
        self._block_left -= self.bin_left

    def play(self) -> int:
        """The length of the next step."""
        self.bin_left -= 1
        self._planned[self.arm] += 1
        return self.arm


class Nightjar(Policy):
    """Mostly the length with the lowest measured seconds per token for the batch size, sometimes a random one.

    Nightjar's rule. Time is cut into blocks of doubling length, and blocks into bins; an arm is kept for a bin. In the
    b-th bin an arm is drawn at random with probability 1/b; else the arm with the lowest estimated loss is played.
    After a step without drafts, the loss of every arm but 0 includes the draft's catch-up, divided by the tokens of the
    bin.

    Deviations:
    * A context covers batch sizes within a factor of two, not one size. Losses are per token of one request, so that
      they are comparable.
    * Every arm is played 16 steps first.
    * To follow changing traffic, estimates decay, blocks grow to 1024 steps at most, and exploration stays at 1/24.
    * Steps with prompt rows, and steps that mostly caught up, are not observed: their time is not the arm's.
    * A step counts for the longest length drafted in it.
    """

    name = "nightjar"
    max_length = LONGEST
    needs_cost = True

    def __init__(self, seed: int = 0) -> None:
        self._random = np.random.default_rng(seed)
        self._contexts: defaultdict[int, _Context] = defaultdict(_Context)
        self._was_off = True

    def learn(self, outcome: Outcome) -> None:
        count, arm = outcome.slots.size, int(outcome.lengths.max(initial=0))
        if count == 0 or arm > LONGEST or outcome.num_prefill_rows or outcome.seconds <= 0 or _catches_up(outcome):
            return
        self._context(count).learn(arm, outcome.seconds, 1 + float(outcome.accepted.sum()) / count)

    def lengths(self, view: BatchView) -> IntArray:
        context = self._context(view.num_requests)
        if context.bin_left <= 0:
            context.open_bin()
            context.arm = self._arm(context, view)
        lengths: IntArray = np.minimum(context.play(), view.limit)
        self._was_off = not lengths.any()
        return lengths

    def _arm(self, context: _Context, view: BatchView) -> int:
        if context.untried.size:
            return int(context.untried[0])
        if self._random.random() < context.exploration:
            return int(self._random.integers(LONGEST + 1))
        losses = context.losses
        if self._was_off:
            losses[1:] += _catch_up_seconds(view) / (context.bin_size * context.tokens[1:])
        return int(losses.argmin())

    def _context(self, num_requests: int) -> _Context:
        return self._contexts[num_requests.bit_length()]


def _catches_up(outcome: Outcome) -> bool:
    """Whether the draft comes back from a pause: the median lag of the requests it ran for is above the steady one."""
    ran = outcome.lag[outcome.lag > 0]
    return ran.size > 0 and (not outcome.lengths.any() or float(np.median(ran)) > MAX_STEADY_LAG)


def _catch_up_seconds(view: BatchView) -> float:
    """Seconds that the first drafted token takes longer because the draft paused."""
    assert view.cost is not None
    if view.lag.max() <= MAX_STEADY_LAG:
        return 0.0
    read = float(view.num_tokens.sum())
    paused = view.cost.first_draft(view.num_requests, read, int(view.lag.sum()))
    return max(0.0, float(paused - view.cost.first_draft(view.num_requests, read)))
