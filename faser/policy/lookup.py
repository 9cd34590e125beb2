"""How likely a looked-up token is accepted: by how many tokens agreed where it was found, and by its position.

Knows counts; no tokens, no lengths and no costs. It learns from every proposal, whether it was drafted or not: the
tokens that a request emits say for nothing whether the proposal was right.
"""

from __future__ import annotations

import numpy as np

from faser.arrays import FloatArray, IntArray
from faser.limits import ADAPTIVE_MAX_LENGTH

CLASSES = (2, 3, 4, 8, 16)  # proposals are told apart by how many tokens agree; each number is the least of its class
PRIOR_RATES = (0.25, 0.35, 0.5, 0.75, 0.9)  # of these classes, before a proposal was tried
PRIOR_WEIGHT = 8.0  # tried tokens that the prior counts as, at each position
DECAY = 0.998  # of counts, at every step: half-life 346 steps
MIN_RATE, MAX_RATE = 0.01, 0.995  # bounds of every estimate
DEPTH = 2 * ADAPTIVE_MAX_LENGTH + 1  # positions told apart: those in flight, and those drafted behind them


class LookupAcceptance:
    """Rates of all requests together. N proposals."""

    def __init__(self) -> None:
        self._prior: FloatArray = PRIOR_WEIGHT * np.array(PRIOR_RATES)[:, None]
        self._tried: FloatArray = np.zeros((len(CLASSES), DEPTH))
        self._accepted: FloatArray = np.zeros((len(CLASSES), DEPTH))

    @property
    def rates(self) -> FloatArray:
        """[classes, depth] P(a token is right | all tokens of the proposal before it are)."""
        rates: FloatArray = (self._accepted + self._prior) / (self._tried + PRIOR_WEIGHT)
        return rates.clip(MIN_RATE, MAX_RATE)

    def learn(self, agreed: IntArray, right: IntArray, seen: IntArray) -> None:
        """Count proposals that `agreed` [N] tokens led to: the first `right` [N] of `seen` [N] tokens came true."""
        self._tried *= DECAY
        self._accepted *= DECAY
        position = np.arange(DEPTH)
        which = class_of(agreed)
        np.add.at(self._accepted, which, position < right[:, None])
        np.add.at(self._tried, which, position < np.minimum(right + 1, seen)[:, None])

    def survival(self, agreed: IntArray, skipped: IntArray, limit: IntArray) -> FloatArray:
        """[N, ADAPTIVE_MAX_LENGTH] P(drafts are accepted up to each position); 0 beyond `limit` [N] drafts.

        The first `skipped` [N] tokens of a proposal stand for tokens in flight. If one of these is wrong, so are the
        drafts behind it.
        """
        whole = self.rates.cumprod(axis=1)[class_of(agreed)]
        position = np.arange(ADAPTIVE_MAX_LENGTH)
        # a longer proposal goes on at the chance of its last position
        at = np.minimum(skipped[:, None] + position, DEPTH - 1)
        return np.where(position < limit[:, None], whole[np.arange(limit.size)[:, None], at], 0.0)


def class_of(agreed: IntArray) -> IntArray:
    """[N] the class of proposals by the tokens that agree, at least CLASSES[0]."""
    found: IntArray = np.searchsorted(CLASSES, agreed, side="right") - 1
    return found
