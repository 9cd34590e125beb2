"""When to stop drafting: a rule that travels with the plan and is asked between two tokens of a draft.

Knows what the draft thinks of its own tokens, and what another one would cost. Lengths are given before a token is
drafted; where few requests share a step, each draft is worth looking at while it is made.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from faser.arrays import FloatArray, IntArray

LEAST, MOST = 1e-4, 1 - 1e-4  # no confidence is taken to be surer


@dataclass(frozen=True)
class Stopping:
    """One more token is drafted, for all whose lengths allow it, if what that may bring is worth more than it costs."""

    rates: FloatArray  # [B, depth] by index in the plan: the chance of a token whose predecessors are accepted
    seconds: FloatArray  # [depth] of drafting one more token when there are so many
    price: float  # seconds a token is worth
    calibration: tuple[float, float]  # log-odds of being accepted: offset and factor on those of the confidence

    def watch(self, requests: IntArray) -> Watch:
        """Look at the drafts of these requests [n], the longest first."""
        return Watch(self.rates[requests].tolist(), self.seconds.tolist(), self.price, self.calibration)

    def of(self, requests: NDArray[np.bool_]) -> Stopping:
        """The rule for some of the requests."""
        return replace(self, rates=self.rates[requests])

    def spread(self, requests: NDArray[np.bool_]) -> Stopping:
        """The rule where these are some of the requests; the others draft nothing."""
        rates = np.zeros((requests.size, self.rates.shape[1]))
        rates[requests] = self.rates
        return replace(self, rates=rates)


class Watch:
    """Drafts that are being made. A GPU waits for every answer, so it is given in a few operations on plain numbers."""

    def __init__(
        self, rates: list[list[float]], seconds: list[float], price: float, calibration: tuple[float, float]
    ) -> None:
        self._rates = rates
        self._seconds = seconds
        self._price = price
        self._offset, self._factor = calibration
        self._alive = [1.0] * len(rates)  # the chance that a draft is accepted as far as it goes
        self._num_drafted = 0

    def goes_on(self, confidence: Sequence[float]) -> bool:
        """Whether another token is worth its cost, now that the latest has this confidence [n].

        `n` never rises: the first requests are those whose drafts may go on.
        """
        self._num_drafted = done = self._num_drafted + 1
        gain = 0.0
        for i, sure in enumerate(confidence):
            sure = min(max(sure, LEAST), MOST)
            odds = self._offset + self._factor * math.log(sure / (1 - sure))
            self._alive[i] /= 1 + math.exp(-odds)
            gain += self._alive[i] * self._rates[i][done]
        return self._price * gain > self._seconds[done]


class WatchedPlan:
    """The rule of a plan, with the drafts in the plan's own order."""

    def __init__(self, stopping: Stopping, lengths: IntArray) -> None:
        self._order = np.argsort(-lengths, kind="stable")
        self._lengths = lengths[self._order]
        self._watch = stopping.watch(self._order)

    def goes_on(self, confidence: FloatArray | None, done: int) -> bool:
        """Of drafts [B, depth] that have `done` tokens each, or fewer where one had none to draft."""
        assert confidence is not None
        latest = confidence[self._order[self._lengths > done], done - 1]
        return self._watch.goes_on(np.nan_to_num(latest).tolist())


def accepted_chance(confidence: FloatArray, calibration: tuple[float, float]) -> FloatArray:
    """How likely tokens are to be accepted, by the probability the draft gave them."""
    offset, factor = calibration
    chance: FloatArray = 1 / (1 + np.exp(-(offset + factor * log_odds(confidence))))
    return chance


def log_odds(chance: FloatArray) -> FloatArray:
    chance = np.clip(chance, LEAST, MOST)
    odds: FloatArray = np.log(chance / (1 - chance))
    return odds
