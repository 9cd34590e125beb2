"""The seam between an executor and what drafts for it.

A drafter writes its tokens into the history, behind each request's context. A wrong draft costs time and never a token:
the verifier emits what the target says. Drafts that are sampled keep to the request's grammar, as the target does;
drafts that are looked up need not, and the executor drops those that break it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from faser.arrays import FloatArray, IntArray
from faser.step import StepPlan


@dataclass(frozen=True)
class Drafts:
    """The drafts of one step. B requests."""

    num_tokens: IntArray  # [B]
    confidence: FloatArray | None = None  # [B, depth] probability of each drafted token, if the plan has a rule for it
    seconds: float = 0.0  # of the draft's forwards


class Drafter(Protocol):
    """Makes the drafts of a step, token by token or all at once."""

    def draft(self, plan: StepPlan) -> Drafts:
        """Write up to plan.lengths tokens per request to history[slot, num_tokens + frontier:]."""
