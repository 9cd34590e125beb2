"""Policies that ignore the batch: `off` (no speculation) and `fixed:K` (one length for all requests)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from faser.arrays import IntArray
from faser.policy.base import BatchView, Policy


@dataclass(frozen=True)
class Fixed(Policy):
    """Every request drafts `length` tokens in every step. Length 0 is `off`: the draft never runs."""

    length: int

    @property
    def name(self) -> str:
        return f"fixed:{self.length}" if self.length else "off"

    @property
    def max_length(self) -> int:
        return self.length

    def lengths(self, view: BatchView) -> IntArray:
        return np.full(view.num_requests, self.length, dtype=np.int64)
