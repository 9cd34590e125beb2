"""Predicts the seconds of a step where nothing was profiled, from the steps that ran.

Knows plans and seconds, no tensors. The dashboard compares steps with it when the policy needs no profile
(faser/cost/profile.py). No policy uses it. The model is linear in rows of the target, forwards and rows of the draft,
and context read. It is fitted online with decaying weights, so it follows the machine and the traffic. Errors are
relative to the size of the step, so a long prefill does not outweigh the short decoding steps. Errors relative to the
measured time would be biased: slow outliers would count less, and every prediction would be too low.
"""

from __future__ import annotations

import numpy as np

from faser.arrays import FloatArray
from faser.step import StepPlan, StepSeconds

_COST_DECAY = 0.99  # of what was learned, at every step: half-life 69 steps
_RIDGE = 1e-6  # keeps the fit defined while all steps are alike
_SCALE = np.array([1.0, 16.0, 1.0, 16.0, 4096.0])  # brings the features to about one


class StepCost:
    """Predicts the seconds of a step before it runs, and learns from every step."""

    def __init__(self) -> None:
        size = _SCALE.size
        self._gram: FloatArray = np.zeros((size, size))
        self._moment: FloatArray = np.zeros(size)
        self._weights: FloatArray | None = None

    def predict(self, plan: StepPlan) -> float | None:
        """Seconds, or None before the first step was seen."""
        return None if self._weights is None else max(0.0, float(_features(plan) @ self._weights))

    def learn(self, plan: StepPlan, spent: StepSeconds, seconds: float) -> None:
        """Take in what a step took. `spent`, the seconds of its parts, is not used: the signature is ProfiledCost's."""
        features = _features(plan)
        weight = 1 / features.sum() ** 2
        self._gram = _COST_DECAY * self._gram + weight * np.outer(features, features)
        self._moment = _COST_DECAY * self._moment + weight * seconds * features
        ridge = _RIDGE * float(np.trace(self._gram)) * np.eye(_SCALE.size)
        self._weights = np.linalg.solve(self._gram + ridge, self._moment).astype(np.float64)


def _features(plan: StepPlan) -> FloatArray:
    """One, rows of the target, forwards of the draft, rows of the draft, context tokens read by the target."""
    lengths = plan.by_draft.lengths
    longest = int(lengths.max(initial=0))
    passes = max(longest, int(plan.draft_rows.any()))
    draft_rows = plan.draft_rows.sum() + np.maximum(lengths - 1, 0).sum()
    rows = (plan.num_rows + plan.judged).sum()
    features: FloatArray = np.array([1, rows, passes, draft_rows, plan.num_tokens.sum()]) / _SCALE
    return features
