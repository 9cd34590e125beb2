"""How likely a drafted token is accepted: for each request and each position of a draft.

Knows counts of accepted and tried tokens; no lengths and no costs. All policies that estimate acceptance do it here.
A token whose predecessors were accepted is itself accepted more often than the first token of a draft, so every
position has a rate of its own: over all requests, with decaying weights. A request differs from the others by one
factor on the odds of all its positions, taken from its own counts, which are shrunk to the mean of all requests with
contexts about as long: a draft may know a long context worse than a short one, or see only a window of it.
"""

from __future__ import annotations

import numpy as np

from faser.arrays import FloatArray, IntArray
from faser.policy.base import PRIOR_RATE, PRIOR_WEIGHT, BatchView, Outcome
from faser.rules.stopping import accepted_chance, log_odds

REQUEST_PRIOR_WEIGHT = 16.0  # tried tokens the mean of all requests counts as against a request's own
CONTEXT_BOUNDS = np.array([512, 2048, 8192, 32_768])  # tokens; contexts between two bounds are about as long
CONTEXT_PRIOR_WEIGHT = 128.0  # tried tokens the mean of all requests counts as against those of about that context
ACCEPTANCE_DECAY = 0.998  # of counts, at every step: half-life 346 steps
CALIBRATION_WEIGHT = 4.0  # tried tokens that the initial calibration counts as, about
MIN_CALIBRATION, MAX_CALIBRATION = (-8.0, 0.0), (8.0, 8.0)  # bounds of offset and factor
MIN_RATE, MAX_RATE = 0.02, 0.99  # bounds of every estimate


class Acceptance:
    """Rates of all requests together, by position, and each request's own."""

    def __init__(self, depth: int) -> None:
        self._tried: FloatArray = np.zeros(depth)
        self._accepted: FloatArray = np.zeros(depth)
        self._context_tried, self._context_accepted = np.zeros((2, CONTEXT_BOUNDS.size + 1))

    @property
    def rates(self) -> FloatArray:
        """[depth] of all requests: P(accepted | all predecessors in the draft accepted)."""
        return (self._accepted + PRIOR_RATE * PRIOR_WEIGHT) / (self._tried + PRIOR_WEIGHT)

    @property
    def mean(self) -> float:
        """Of all requests, over all positions, each weighted by how often it was tried."""
        weight = PRIOR_WEIGHT * self._tried.size
        return float((self._accepted.sum() + PRIOR_RATE * weight) / (self._tried.sum() + weight))

    def learn(self, outcome: Outcome, depth: int | None = None) -> None:
        """Count each request's accepted tokens and its first rejected one; only the first `depth` positions."""
        size = self._tried.size
        lengths, accepted = outcome.of_draft
        if depth is not None:
            accepted, lengths = np.minimum(accepted, depth), np.minimum(lengths, depth)
        self._tried *= ACCEPTANCE_DECAY
        self._accepted *= ACCEPTANCE_DECAY
        if lengths.any():
            tried = np.minimum(accepted + 1, lengths)
            self._tried += _count_above(tried, size)
            self._accepted += _count_above(accepted, size)
            self._learn_contexts(outcome, tried, accepted)

    def _learn_contexts(self, outcome: Outcome, tried: IntArray, accepted: IntArray) -> None:
        self._context_tried *= ACCEPTANCE_DECAY
        self._context_accepted *= ACCEPTANCE_DECAY
        if outcome.num_tokens is not None:
            place = np.searchsorted(CONTEXT_BOUNDS, outcome.num_tokens)
            np.add.at(self._context_tried, place, tried)
            np.add.at(self._context_accepted, place, accepted)

    def context_rates(self, num_tokens: IntArray) -> FloatArray:
        """[B] of all requests with contexts about as long, over all positions."""
        place = np.searchsorted(CONTEXT_BOUNDS, num_tokens)
        rates = self._context_accepted + CONTEXT_PRIOR_WEIGHT * self.mean
        return (rates / (self._context_tried + CONTEXT_PRIOR_WEIGHT))[place]

    def request_rates(self, view: BatchView) -> FloatArray:
        """[B] one rate for all positions of a request."""
        expected = REQUEST_PRIOR_WEIGHT * self.context_rates(view.num_tokens)
        return _bounded((view.accepted + expected) / (view.tried + REQUEST_PRIOR_WEIGHT))

    def position_rates(self, view: BatchView, depth: int | None = None) -> FloatArray:
        """[B, depth] of each request and position; their cumulative product is the survival of its draft."""
        factor = _odds(self.request_rates(view)) / _odds(_bounded(np.array(self.mean)))
        odds = _odds(_bounded(self.rates[:depth])) * factor[:, None]
        return _bounded(odds / (1 + odds))


class Calibration:
    """P(accepted) from the draft's confidence: log-odds of acceptance = offset + factor × log-odds of the confidence.

    Fitted online to the tried tokens, one Newton step for each step of the engine.
    """

    def __init__(self) -> None:
        self._weights: FloatArray = np.array([1.0, 1.0])  # draft models are underconfident: an offset above 0
        self._gram: FloatArray = CALIBRATION_WEIGHT * np.eye(2)

    @property
    def weights(self) -> tuple[float, float]:
        """Offset and factor."""
        offset, factor = self._weights.tolist()
        return offset, factor

    def learn(self, outcome: Outcome) -> None:
        if outcome.confidence is None:
            return
        position = np.arange(outcome.confidence.shape[1])
        lengths, right = outcome.of_draft
        tried = position < np.minimum(right + 1, lengths)[:, None]
        accepted = (position < right[:, None])[tried]
        confidence = outcome.confidence[tried]
        expected = accepted_chance(confidence, self.weights)
        features = np.stack([np.ones_like(confidence), log_odds(confidence)])
        gram = (expected * (1 - expected) * features) @ features.T
        prior = (1 - ACCEPTANCE_DECAY) * CALIBRATION_WEIGHT * np.eye(2)
        self._gram = ACCEPTANCE_DECAY * self._gram + gram + prior
        step = np.linalg.solve(self._gram, features @ (accepted - expected))
        self._weights = np.clip(self._weights + step, MIN_CALIBRATION, MAX_CALIBRATION)


def _count_above(counts: IntArray, depth: int) -> FloatArray:
    """[depth] how many of the counts are above 0, above 1, …"""
    histogram = np.bincount(np.minimum(counts, depth), minlength=depth + 1)
    return histogram[::-1].cumsum()[::-1][1:].astype(np.float64)


def _odds(rates: FloatArray) -> FloatArray:
    return rates / (1 - rates)


def _bounded(rates: FloatArray) -> FloatArray:
    return rates.clip(MIN_RATE, MAX_RATE)
