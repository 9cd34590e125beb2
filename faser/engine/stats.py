"""Totals of what the engine did, from one record per step.

Tokens are counted when they are emitted, not by stream events. The caller measures the seconds.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from faser.arrays import IntArray
from faser.policy.acceptance import CONTEXT_BOUNDS
from faser.request import Progress
from faser.rules.overlap import OverlapPlan
from faser.step import StepPlan, StepResult


@dataclass(frozen=True)
class LastStep:
    """The latest step in which a request emitted tokens."""

    num_decoding: int  # requests that emitted tokens
    num_drafting: int  # requests that drafted
    drafted: int  # tokens
    speculating_changed: float  # when speculation last went on or off, on the engine's clock


@dataclass
class EngineStats:
    """Totals since the engine started."""

    steps: int = 0
    emitted: int = 0
    drafted: int = 0
    verified: int = 0
    accepted: int = 0
    looked_up: int = 0  # of drafted, tokens from prompt lookup
    lookup_accepted: int = 0  # of accepted, tokens from prompt lookup
    chunks: int = 0  # made beside a verification
    hits: int = 0  # chunks that hit
    lanes: int = 1  # parts of the device that the last step ran on
    context_rows: int = 0  # rows of context that the target computed, without drafts
    plan_seconds: float = 0.0
    draft_seconds: float = 0.0  # without those that ran beside a verification
    verify_seconds: float = 0.0
    encode_seconds: float = 0.0  # of the vision encoder
    grids_encoded: int = 0
    patches_encoded: int = 0
    step_seconds: float = 0.0
    predicted_seconds: float = 0.0  # by the cost model, before each step ran
    off_seconds: float = 0.0  # of steps in which requests decoded and none drafted
    last: LastStep | None = None
    # index k: how often a request that decoded drafted k tokens
    lengths: IntArray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    # index t: how often a request verified, and had accepted, at least t + 1 tokens in one step
    verified_per_position: IntArray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    accepted_per_position: IntArray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    # [4, contexts] of requests that decoded, by the length of their context, between CONTEXT_BOUNDS: how often one did,
    # and their drafted, verified and accepted tokens
    by_context: IntArray = field(default_factory=lambda: np.zeros((4, CONTEXT_BOUNDS.size + 1), dtype=np.int64))

    def record(
        self,
        plan: StepPlan,
        result: StepResult,
        progress: Iterable[Progress],
        *,
        started: float,
        planned: float,
        ended: float,
        predicted: float | None = None,
    ) -> None:
        """Count a step. `emitted` counts tokens handed out; `accepted` also those behind a stop."""
        self.steps += 1
        self.emitted += sum([len(item.token_ids) for item in progress])
        self.context_rows += int(plan.num_rows.sum())
        self.plan_seconds += planned - started
        self.draft_seconds += result.seconds.draft - result.seconds.hidden
        self.verify_seconds += result.seconds.verify
        self.encode_seconds += result.seconds.encode
        if plan.vision is not None:
            self.grids_encoded += len(plan.vision.writes)
            self.patches_encoded += sum(len(grid.patches) for grid in plan.vision.grids)
        self.step_seconds += ended - started
        self.predicted_seconds += predicted or 0.0
        if result.num_drafted.any() or result.num_verified.any():
            self.drafted += int(result.num_drafted.sum())
            self.verified += int(result.num_verified.sum())
            self.accepted += int(result.num_accepted.sum())
        if plan.lookup is not None:
            self.looked_up += int(plan.looked_up.sum())
            self.lookup_accepted += int(result.num_accepted[plan.lookup.is_looked_up].sum())
        self._record_overlap(plan.overlap, result)
        if result.num_verified.any():
            self.verified_per_position = _add_positions(self.verified_per_position, result.num_verified)
            self.accepted_per_position = _add_positions(self.accepted_per_position, result.num_accepted)
        self._record_lengths(plan, result, ended, ended - started)

    def _record_overlap(self, overlap: OverlapPlan | None, result: StepResult) -> None:
        self.lanes = 2 if overlap is not None and overlap.beside and overlap.draft_sms else 1
        if overlap is not None and result.hits is not None:
            self.chunks += int(np.count_nonzero(overlap.chunk_of(result.num_drafted)))
            self.hits += int(np.count_nonzero(result.hits))

    def _record_lengths(self, plan: StepPlan, result: StepResult, ended: float, seconds: float) -> None:
        samples = plan.samples
        num_decoding, num_drafting = int(samples.sum()), int((result.num_drafted > 0).sum())
        if not num_decoding:
            return
        self.lengths = _add(self.lengths, np.bincount(result.num_drafted[samples]))
        self._record_contexts(plan, result)
        if not num_drafting:
            self.off_seconds += seconds
        was = self.last
        changed = ended if was is None or (was.num_drafting > 0) != (num_drafting > 0) else was.speculating_changed
        drafted = int(result.num_drafted.sum())
        self.last = LastStep(num_decoding, num_drafting, drafted, changed)

    def _record_contexts(self, plan: StepPlan, result: StepResult) -> None:
        places = np.searchsorted(CONTEXT_BOUNDS, plan.num_tokens[plan.samples])
        counts = (plan.samples, result.num_drafted, result.num_verified, result.num_accepted)
        sums = [np.bincount(places, each[plan.samples], CONTEXT_BOUNDS.size + 1) for each in counts]
        self.by_context = self.by_context + np.array(sums).astype(np.int64)

    @property
    def pruned(self) -> int:
        return self.drafted - self.verified

    @property
    def forward_seconds(self) -> float:
        """Seconds inside the two models."""
        return self.draft_seconds + self.verify_seconds

    @property
    def acceptance(self) -> float:
        """accepted / verified; 0 where nothing was verified."""
        return self.accepted / self.verified if self.verified else 0.0


def _add_positions(totals: IntArray, counts: IntArray) -> IntArray:
    """totals[t] plus the number of counts above t."""
    return _add(totals, np.bincount(counts)[::-1].cumsum()[::-1][1:])


def _add(totals: IntArray, new: IntArray) -> IntArray:
    longer, shorter = (totals, new) if totals.size >= new.size else (new, totals)
    summed = longer.copy()
    summed[: shorter.size] += shorter
    return summed
