"""Prompt lookup on the CPU: the plan brings the drafts, and they are written down.

Wraps the drafter of a model or a head, which never meets requests whose drafts were looked up.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from faser.arrays import FloatArray, IntArray
from faser.runtime.drafter import Drafter, Drafts
from faser.step import StepPlan


class LookupDrafter:
    """`history` int64 [max_slots, max_len] has the tokens of every slot. Without `inner` all drafts are looked up."""

    def __init__(self, inner: Drafter | None, history: IntArray) -> None:
        self._inner = inner
        self._history = history

    def draft(self, plan: StepPlan) -> Drafts:
        if plan.lookup is not None:
            slots, positions, token_ids = plan.found_tokens()
            self._history[slots, positions] = token_ids
        if self._inner is None:
            return Drafts(plan.lengths)
        drafts = self._inner.draft(plan.by_draft)
        num_tokens = drafts.num_tokens + plan.looked_up
        return replace(drafts, num_tokens=num_tokens, confidence=_widened(drafts.confidence, int(num_tokens.max())))


def _widened(confidence: FloatArray | None, depth: int) -> FloatArray | None:
    """[B, depth or more] NaN, which says nothing, where a draft was looked up."""
    if confidence is None:
        return None
    missing = max(0, depth - confidence.shape[1])
    return np.pad(confidence, ((0, 0), (0, missing)), constant_values=np.nan)
