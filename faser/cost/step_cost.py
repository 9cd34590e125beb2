"""What a step costs where nothing was profiled: seconds predicted from a plan, learned from the steps that ran.

Knows plans and seconds, no tensors. The dashboard compares steps with it when the policy needs no profile
(faser/cost/profile.py). No policy uses it. The model is linear in what a step does: rows of the target, passes and rows
of the draft, context read. It is fitted online with weights that fade, so it follows the machine and the traffic.
Errors count relative to the size of the step, so a long prefill does not outweigh the short decoding steps. Errors
relative to the measured time would be wrong: slow outliers would count less, and every prediction would be too low.
"""

from __future__ import annotations

import numpy as np

from faser.arrays import FloatArray
from faser.step import StepPlan, StepSeconds

_FADING = 0.99  # weight of a step against the one after it: about the last hundred count
_RIDGE = 1e-6  # keeps the fit defined while the steps seen are all alike
_SCALE = np.array([1.0, 16.0, 1.0, 16.0, 4096.0])  # brings the features to about one


class StepCost:
    """Predicts the seconds of a step before it runs; wiser after every step."""

    def __init__(self) -> None:
        size = _SCALE.size
        self._gram: FloatArray = np.zeros((size, size))
        self._moment: FloatArray = np.zeros(size)
        self._weights: FloatArray | None = None

    def predict(self, plan: StepPlan) -> float | None:
        """Seconds, or None before the first step was seen."""
        return None if self._weights is None else max(0.0, float(_features(plan) @ self._weights))

    def learn(self, plan: StepPlan, spent: StepSeconds, seconds: float) -> None:
        """What its parts `spent` is of no use here."""
        features = _features(plan)
        weight = 1 / features.sum() ** 2
        self._gram = _FADING * self._gram + weight * np.outer(features, features)
        self._moment = _FADING * self._moment + weight * seconds * features
        ridge = _RIDGE * float(np.trace(self._gram)) * np.eye(_SCALE.size)
        self._weights = np.linalg.solve(self._gram + ridge, self._moment).astype(np.float64)


def _features(plan: StepPlan) -> FloatArray:
    """One, rows of the target, forwards of the draft, rows of the draft, context tokens read by the target."""
    longest = int(plan.lengths.max(initial=0))
    passes = max(longest, int(plan.draft_rows.any()))
    draft_rows = plan.draft_rows.sum() + np.maximum(plan.lengths - 1, 0).sum()
    rows = (plan.num_rows + plan.judged).sum()
    features: FloatArray = np.array([1, rows, passes, draft_rows, plan.num_tokens.sum()]) / _SCALE
    return features
