"""What the engine did: one record per step in, totals and rates out.

Tokens are counted as they are emitted, never as stream chunks. Seconds are those the caller measured.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from faser.types import IntArray, Progress, StepPlan, StepResult


@dataclass
class EngineStats:
    """Totals since the engine started."""

    steps: int = 0
    emitted: int = 0
    drafted: int = 0
    verified: int = 0
    accepted: int = 0
    context_rows: int = 0  # rows of context the target computed, drafts not counted
    plan_seconds: float = 0.0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    step_seconds: float = 0.0
    # index t: how often a request verified, and had accepted, at least t + 1 tokens in one step
    verified_per_position: IntArray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    accepted_per_position: IntArray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))

    def record(
        self,
        plan: StepPlan,
        result: StepResult,
        progress: Iterable[Progress],
        plan_seconds: float,
        step_seconds: float,
    ) -> None:
        """Count a step. Emitted are the tokens handed out; accepted, for the draft's sake, also those behind a stop."""
        self.steps += 1
        self.emitted += sum(len(item.token_ids) for item in progress)
        self.drafted += int(result.num_drafted.sum())
        self.verified += int(result.num_verified.sum())
        self.accepted += int(result.num_accepted.sum())
        self.context_rows += int(plan.num_rows.sum())
        self.plan_seconds += plan_seconds
        self.draft_seconds += result.seconds.draft
        self.verify_seconds += result.seconds.verify
        self.step_seconds += step_seconds
        if result.num_verified.any():
            self.verified_per_position = _add_positions(self.verified_per_position, result.num_verified)
            self.accepted_per_position = _add_positions(self.accepted_per_position, result.num_accepted)

    @property
    def pruned(self) -> int:
        return self.drafted - self.verified

    @property
    def forward_seconds(self) -> float:
        """Inside the two models."""
        return self.draft_seconds + self.verify_seconds

    @property
    def acceptance(self) -> float:
        """Of the verified tokens, the share the target agreed with; 0 where nothing was verified."""
        return self.accepted / self.verified if self.verified else 0.0


def _add_positions(totals: IntArray, counts: IntArray) -> IntArray:
    """Add, for each t, the number of counts above t."""
    reached = np.bincount(counts)[::-1].cumsum()[::-1][1:]
    size = max(totals.size, reached.size)
    summed: IntArray = np.pad(totals, (0, size - totals.size)) + np.pad(reached, (0, size - reached.size))
    return summed
