"""Early exit on the CPU: a verification that drops drafts after some of its layers (faser/rules/early_exit.py)."""

from __future__ import annotations

import numpy as np
import torch

from faser.arrays import FloatArray, IntArray
from faser.rules.early_exit import Exiting, ExitPoint, ExitRule
from faser.runtime.cpu.runner import ModelRunner, Rows
from faser.runtime.sampling import Sampler
from faser.step import StepPlan


class ExitingForward:
    """The target's layers up to the last point of a rule. KV of dropped rows is void, like that of rejected drafts."""

    def __init__(self, runner: ModelRunner, sampler: Sampler, history: IntArray) -> None:
        self._runner = runner
        self._sampler = sampler
        self._history = history

    def run(
        self, plan: StepPlan, rule: ExitRule, hidden: torch.Tensor, num_drafted: IntArray, confidence: FloatArray | None
    ) -> tuple[Rows, torch.Tensor, Exiting]:
        """The rows that are left, their hidden states after the last point, and what the points saw.

        A draft is judged by the row before it. So where a draft is dropped its own row goes and the row before stays.
        """
        if confidence is None:
            confidence = np.full((num_drafted.size, int(num_drafted.max())), np.nan)
        exiting = Exiting(rule, num_drafted, int(plan.num_rows.sum()))
        rows, done = Rows.of(plan.slots, plan.start, plan.num_rows + num_drafted), 0
        for point in rule.points:
            hidden = self._runner.run(rows, hidden, done, point.layer)
            done, seen = point.layer, exiting.seen
            rank, margin = self._rank_drafts(plan, point, rows, hidden, exiting)
            exiting.take(rank, margin, confidence[exiting.owner, exiting.place][seen])
            counts = plan.num_rows + exiting.left
            if (counts < rows.counts).any():
                hidden = hidden[torch.from_numpy(_leading(rows, counts))]
                rows = Rows.of(plan.slots, plan.start, counts)
        return rows, hidden, exiting

    def _rank_drafts(
        self, plan: StepPlan, point: ExitPoint, rows: Rows, hidden: torch.Tensor, exiting: Exiting
    ) -> tuple[IntArray, FloatArray]:
        """[seen] rank and margin of each draft at a point; zeros before the first layer."""
        seen = exiting.seen
        owner, place = exiting.owner[seen], exiting.place[seen]
        slots, positions = plan.slots[owner], plan.num_tokens[owner] + place
        if not point.layer:
            return np.zeros(slots.size, dtype=np.int64), np.zeros(slots.size)
        before, drafted = exiting.rows_before(rows.counts), self._history[slots, positions]
        logits = self._runner.logits(hidden, before, point.candidates, drafted)
        return self._sampler.rank_drafts(logits, slots, positions, drafted, point.candidates)


def _leading(rows: Rows, counts: IntArray) -> IntArray:
    """Indices of the first `counts` [B] rows of each request."""
    inside = np.arange(rows.num_rows) - np.repeat(rows.cu_rows[:-1], rows.counts)
    return np.flatnonzero(inside < np.repeat(counts, rows.counts))
