"""When to stop drafting: a rule that travels with the plan and is asked after each drafted token.

Knows the draft model's confidence in its own tokens, and what one more token costs. Knows nothing of who made the rule.
A length is chosen before drafting begins; where few requests share a step, checking the confidence while drafting
gains more than the check costs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from faser.arrays import BoolArray, FloatArray, IntArray

MIN_CONFIDENCE, MAX_CONFIDENCE = 1e-4, 1 - 1e-4  # confidences are clipped, so that log-odds stay finite


@dataclass(frozen=True)
class Stopping:
    """Draft another token, for all requests below their length at once, while price × expected tokens > seconds."""

    rates: FloatArray  # [B, depth] by index in the plan: P(token accepted | all before it in the draft accepted)
    seconds: FloatArray  # [depth] cost of one more token, by the number of tokens already drafted
    price: float  # seconds that one more output token saves
    calibration: tuple[float, float]  # (a, b): log-odds of acceptance = a + b × log-odds of the draft's confidence

    def watch(self, requests: IntArray) -> Watch:
        """Begin to check the drafts of these requests [n], given in order of falling length."""
        return Watch(self, requests)

    def cut(self, confidence: FloatArray, lengths: IntArray) -> IntArray:
        """[B] how much of each draft to verify, where all tokens are drafted already: rows are their only price.

        confidence [B, depth] by index in the plan; NaN where the draft made nothing, which keeps its length.
        """
        depth = min(confidence.shape[1], self.seconds.size)
        chance = accepted_chance(np.nan_to_num(confidence[:, :depth]), self.calibration)
        num_requests = max(1, int(np.count_nonzero(self.rates.any(axis=1))))  # others do not draft
        row_seconds: FloatArray = self.seconds[:depth] / num_requests
        is_worth_it: BoolArray = self.price * chance.cumprod(axis=1) > row_seconds
        most: IntArray = is_worth_it.cumprod(axis=1).sum(axis=1)
        return np.where(np.isnan(confidence[:, 0]), lengths, np.minimum(lengths, most))

    def spread(self, requests: BoolArray) -> Stopping:
        """The rule for a larger batch, in which this rule's requests are those marked; the others never draft."""
        rates = np.zeros((requests.size, self.rates.shape[1]))
        rates[requests] = self.rates
        return replace(self, rates=rates)


class Watch:
    """Drafts in the making. A GPU waits for each answer, so an answer takes a few operations on plain floats."""

    def __init__(self, rule: Stopping, requests: IntArray) -> None:
        self._rates: list[list[float]] = rule.rates[requests].tolist()
        self._seconds: list[float] = rule.seconds.tolist()
        self._price = rule.price
        self._offset, self._factor = rule.calibration
        self._survival = [1.0] * len(self._rates)  # P(all tokens drafted so far are accepted), by request
        self._num_drafted = 0

    def goes_on(self, confidence: Sequence[float]) -> bool:
        """Whether one more token pays, given the confidence [n] of the latest. Only the first n drafts still grow."""
        self._num_drafted = done = self._num_drafted + 1
        gain = 0.0
        for i, latest in enumerate(confidence):
            latest = min(max(latest, MIN_CONFIDENCE), MAX_CONFIDENCE)
            odds = self._offset + self._factor * math.log(latest / (1 - latest))
            self._survival[i] /= 1 + math.exp(-odds)
            gain += self._survival[i] * self._rates[i][done]
        return self._price * gain > self._seconds[done]


class WatchedPlan:
    """The rule of a plan, asked with confidences in the plan's order."""

    def __init__(self, stopping: Stopping, lengths: IntArray) -> None:
        self._order = np.argsort(-lengths, kind="stable")
        self._lengths = lengths[self._order]
        self._watch = stopping.watch(self._order)

    def goes_on(self, confidence: FloatArray | None, done: int) -> bool:
        """Whether drafting goes on, after `done` tokens with confidence [B, depth]; NaN where nothing was drafted."""
        assert confidence is not None
        latest = confidence[self._order[self._lengths > done], done - 1]
        return self._watch.goes_on(np.nan_to_num(latest).tolist())


def accepted_chance(confidence: FloatArray, calibration: tuple[float, float]) -> FloatArray:
    """P(accepted) of tokens, from the probability that the draft model gave them."""
    offset, factor = calibration
    return 1 / (1 + np.exp(-(offset + factor * log_odds(confidence))))


def log_odds(chance: FloatArray) -> FloatArray:
    chance = np.clip(chance, MIN_CONFIDENCE, MAX_CONFIDENCE)
    return np.log(chance / (1 - chance))
