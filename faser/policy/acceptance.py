"""How likely a drafted token is accepted: for each request and each position of a draft.

Knows counts of accepted and judged tokens, no lengths and no costs. Drafts come in runs: a token whose predecessors
were accepted is itself accepted more often than the first, so every position has a rate of its own, learned from all
requests and fading. What sets a request apart is one shift of all its positions, on the scale of log-odds, from its own
count shrunk to that of all.
"""

from __future__ import annotations

import numpy as np

from faser.arrays import FloatArray, IntArray
from faser.policy.base import BatchView, Outcome
from faser.policy.stopping import accepted_chance, log_odds

PRIOR_RATE = 0.7  # of a pair of models nobody has seen yet
PRIOR_WEIGHT = 16.0  # tokens it counts as, at each position
STRENGTH = 16.0  # judged tokens the rate of all counts as against a request's own
FADING = 0.998  # weight of what was seen before a step: some hundred steps count
CALIBRATION_WEIGHT = 4.0  # judged tokens, about, that a calibration nobody has seen counts as
LEAST_WEIGHTS, MOST_WEIGHTS = (-8.0, 0.0), (8.0, 8.0)  # of a calibration, whatever it is told
LEAST, MOST = 0.02, 0.99  # no rate is taken to be surer


class Acceptance:
    """Rates by position, of all requests together, and from them each request's."""

    def __init__(self, depth: int) -> None:
        self._judged: FloatArray = np.zeros(depth)
        self._accepted: FloatArray = np.zeros(depth)

    @property
    def rates(self) -> FloatArray:
        """[depth] of all requests: the chance of a token whose predecessors in the draft were accepted."""
        rates: FloatArray = (self._accepted + PRIOR_RATE * PRIOR_WEIGHT) / (self._judged + PRIOR_WEIGHT)
        return rates

    @property
    def mean(self) -> float:
        """Over all positions, as often as each was judged."""
        weight = PRIOR_WEIGHT * self._judged.size
        return float((self._accepted.sum() + PRIOR_RATE * weight) / (self._judged.sum() + weight))

    def learn(self, outcome: Outcome, depth: int | None = None) -> None:
        """Of each request the accepted tokens and the first refused one were tried; none counts beyond `depth`."""
        size = self._judged.size
        accepted, lengths = outcome.accepted, outcome.lengths
        if depth is not None:
            accepted, lengths = np.minimum(accepted, depth), np.minimum(lengths, depth)
        self._judged *= FADING
        self._accepted *= FADING
        if lengths.any():
            self._judged += _at_least(np.minimum(accepted + 1, lengths), size)
            self._accepted += _at_least(accepted, size)

    def rates_of(self, view: BatchView, depth: int | None = None) -> FloatArray:
        """[B, depth] likewise, of each request; their product is the chance that its draft is accepted so far.

        `depth`: of the first positions alone.
        """
        mean = self.mean
        own = (view.accepted + STRENGTH * mean) / (view.tried + STRENGTH)
        shift = _moderate_odds(own) - _moderate_odds(np.array(mean))
        rates = 1 / (1 + np.exp(-_moderate_odds(self.rates[:depth]) - shift[:, None]))
        return _moderate(rates)


class Calibration:
    """What a draft's confidence is worth: the log-odds of being accepted are linear in those of its probability.

    Fitted online, a Newton step for each step of the engine, from the tokens that were judged.
    """

    def __init__(self) -> None:
        self._weights: FloatArray = np.array([1.0, 1.0])  # drafts are surer than they think
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
        judged = position < np.minimum(outcome.accepted + 1, outcome.lengths)[:, None]
        accepted = (position < outcome.accepted[:, None])[judged]
        given = outcome.confidence[judged]
        expected = accepted_chance(given, self.weights)
        features = np.stack([np.ones_like(given), log_odds(given)])
        seen = (expected * (1 - expected) * features) @ features.T
        self._gram = FADING * self._gram + seen + (1 - FADING) * CALIBRATION_WEIGHT * np.eye(2)
        step = np.linalg.solve(self._gram, features @ (accepted - expected))
        self._weights = np.clip(self._weights + step, LEAST_WEIGHTS, MOST_WEIGHTS)


def _at_least(counts: IntArray, depth: int) -> FloatArray:
    """[depth] how many of the counts are above 0, above 1, …"""
    histogram = np.bincount(np.minimum(counts, depth), minlength=depth + 1)
    reached: FloatArray = histogram[::-1].cumsum()[::-1][1:].astype(np.float64)
    return reached


def _moderate(rates: FloatArray) -> FloatArray:
    moderate: FloatArray = rates.clip(LEAST, MOST)
    return moderate


def _moderate_odds(rates: FloatArray) -> FloatArray:
    rates = _moderate(rates)
    odds: FloatArray = np.log(rates / (1 - rates))
    return odds
