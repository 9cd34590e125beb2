"""`nightjar`: a bandit tries one length for the batch after another and keeps to what took the least time per token."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from faser.arrays import FloatArray, IntArray
from faser.cost.profile import KEPT_UP
from faser.policy.base import BatchView, Outcome

LONGEST = 5  # the arms are the lengths 0 … 5
FADING = 0.995  # weight of what was seen before a step: some hundred steps count
LONGEST_BLOCK = 1024  # steps
LEAST_EXPLORATION = 1 / 24  # of bins, however many there were
TRIAL = 16  # steps of every arm before any is preferred


class _Context:
    """What is known of batches of about one size: by arm, fading sums; and the bin that runs."""

    def __init__(self) -> None:
        self._steps: FloatArray = np.zeros(LONGEST + 1)
        self._seconds: FloatArray = np.zeros(LONGEST + 1)
        self._tokens: FloatArray = np.zeros(LONGEST + 1)  # per request
        self._planned: IntArray = np.zeros(LONGEST + 1, dtype=np.int64)  # steps, seen or not
        self._block, self._block_left, self._num_bins = 1, 0, 0
        self.arm, self.bin_left = 0, 0

    @property
    def losses(self) -> FloatArray:
        """[arms] seconds per token of a request; those of an arm nobody saw are infinite."""
        unknown = np.full(LONGEST + 1, np.inf)
        losses: FloatArray = np.divide(self._seconds, self._tokens, out=unknown, where=self._tokens > 0)
        return losses

    @property
    def tokens(self) -> FloatArray:
        """[arms] per request and step."""
        tokens: FloatArray = np.divide(self._tokens, self._steps, out=np.ones(LONGEST + 1), where=self._steps > 0)
        return tokens

    @property
    def bin_size(self) -> int:
        """Steps: a block has about as many bins as each of them has steps."""
        return int(self._block**0.5)

    @property
    def exploration(self) -> float:
        """The chance that a bin explores."""
        return max(1 / self._num_bins, LEAST_EXPLORATION)

    @property
    def untried(self) -> IntArray:
        return np.flatnonzero(self._planned < TRIAL)

    def learn(self, arm: int, seconds: float, tokens: float) -> None:
        for sums, new in ((self._steps, 1.0), (self._seconds, seconds), (self._tokens, tokens)):
            sums *= FADING  # all arms: the longer one was not played, the less what it did then counts
            sums[arm] += new

    def open_bin(self) -> None:
        if self._block_left <= 0:
            self._block = self._block_left = min(2 * self._block, LONGEST_BLOCK)
        self._num_bins += 1
        self.bin_left = self.bin_size
        self._block_left -= self.bin_left

    def play(self) -> int:
        """The length of the next step."""
        self.bin_left -= 1
        self._planned[self.arm] += 1
        return self.arm


class Nightjar:
    """By powers of two of the batch size, the length with the least seconds per token seen so far, or now and then any.

    Nightjar's rule. Time is cut into blocks of doubling length and these into bins; an arm is kept for a bin. In the
    b-th bin an arm is drawn at random with probability 1/b, else the one with the least estimated loss is played, where
    after a step without drafts every other arm also bears the draft's catch-up, spread over the tokens of the bin.
    Deviations: a context spans a factor of two in batch sizes, not one size, and losses are times its requests to be
    comparable; every arm gets a trial first; so that changing traffic is followed estimates fade, blocks grow to 1024
    steps and exploration falls to a 24th of the bins, no further. Steps with prompt rows teach nothing, nor do those
    that mostly caught up: their time is not the arm's. A step counts for the longest length drafted in it.
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
    """Whether the draft came back from a pause: most of those it ran for had more than its last tokens to compute."""
    ran = outcome.lag[outcome.lag > 0]
    return ran.size > 0 and (not outcome.lengths.any() or float(np.median(ran)) > KEPT_UP)


def _catch_up_seconds(view: BatchView) -> float:
    """What the draft's first token takes longer because it paused."""
    assert view.cost is not None
    if view.lag.max() <= KEPT_UP:
        return 0.0
    read = float(view.num_tokens.sum())
    paused = view.cost.first_draft(view.num_requests, read, int(view.lag.sum()))
    return max(0.0, float(paused - view.cost.first_draft(view.num_requests, read)))
