"""The two policies that never look: no speculation, and one length for all."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from faser.arrays import IntArray
from faser.policy.base import BatchView


@dataclass(frozen=True)
class Fixed:
    """Every request drafts `length` tokens every step. Length 0 is `off`: the draft never runs."""

    length: int

    @property
    def name(self) -> str:
        return f"fixed:{self.length}" if self.length else "off"

    @property
    def max_length(self) -> int:
        return self.length

    def lengths(self, view: BatchView) -> IntArray:
        return np.full(view.num_requests, self.length, dtype=np.int64)
