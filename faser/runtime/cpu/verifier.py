"""One forward of the target over context rows and drafted tokens, and the verdict.

The target's token at a position is a function of the tokens before it and the request's seed. A drafted token is
accepted exactly when it equals that token, the first that differs is replaced by it, so what is emitted is what plain
decoding would have emitted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from faser.arrays import NONE, BoolArray, FloatArray, IntArray
from faser.request import TokenLogprobs
from faser.rules.early_exit import Exiting, ExitReadings, ExitRule
from faser.runtime.cpu.rows import Rows
from faser.runtime.cpu.runner import ModelRunner
from faser.runtime.sampling import Sampler, broken_rows
from faser.step import StepPlan

BROKEN = "the model gave no finite logits for this request (overflow in its dtype?); try another dtype"


@dataclass(frozen=True)
class Verdict:
    num_verified: IntArray  # [B] drafts that went through all layers
    num_accepted: IntArray  # [B]
    token_ids: IntArray  # flat: accepted + bonus of each request that samples
    logprobs: dict[int, list[TokenLogprobs]]  # by index in the plan
    failures: dict[int, str]  # by index in the plan: requests that the target has no next token for
    hits: BoolArray | None = None  # [B] who has a next frontier, where drafting goes on beside the verification
    exits: ExitReadings | None = None


class Verifier:
    def __init__(self, runner: ModelRunner, sampler: Sampler, history: torch.Tensor) -> None:
        self._runner = runner
        self._sampler = sampler
        self._history: IntArray = history.numpy()

    def verify(
        self, plan: StepPlan, num_drafted: IntArray, confidence: FloatArray | None, num_new: IntArray
    ) -> Verdict:
        """Judge the first num_drafted tokens [B] behind each context.

        `num_new` [B] tokens were drafted in this step; those behind the first num_drafted are not judged. `confidence`
        [B, depth] is the draft's own, for plans with a rule for early exit.
        """
        runner = self._runner
        runner.apply(plan.target_pages)
        rows = Rows.of(plan.slots, plan.start, plan.num_rows + num_drafted)
        hidden = runner.model.embed(torch.from_numpy(self._history[rows.owners, rows.positions]))
        exits, done = None, 0
        if plan.exits is not None and num_drafted.any():
            if confidence is None:
                confidence = np.full((num_drafted.size, int(num_drafted.max())), np.nan)
            exiting = Exiting(plan.exits, num_drafted, int(plan.num_rows.sum()))
            rows, hidden = self._exit(plan, plan.exits, rows, hidden, exiting, confidence)
            num_drafted, exits, done = exiting.left, exiting.readings, plan.exits.layers[-1]
        hidden = runner.run(rows, hidden, done)
        samples = np.flatnonzero(plan.samples)
        judged = num_drafted[samples] + 1  # [S] rows to judge: of the last context token and of every drafted one
        starts = np.cumsum(judged) - judged
        offsets = np.arange(judged.sum()) - np.repeat(starts, judged)  # 0 … num_drafted within each request
        wanted = np.repeat(rows.cu_rows[samples + 1] - judged, judged) + offsets
        logits = runner.logits(hidden, wanted)
        num_accepted = np.zeros_like(num_drafted)
        if samples.size == 0:
            return Verdict(num_drafted, num_accepted, NONE, {}, {})
        slots, positions = rows.owners[wanted], rows.positions[wanted] + 1
        said = self._sampler.sample(logits, slots, positions)
        drafted = self._history[slots, positions]
        accepted = _leading_matches(said, drafted, offsets, judged, starts)
        hits = None
        if plan.overlap is not None and plan.overlap.beside:
            last = starts + judged - 1
            hits = (plan.overlap.chunk_of(num_new) > 0) & (num_drafted == plan.judged_of(num_new)) & plan.samples
            hits[samples] &= (accepted == judged - 1) & (said[last] == drafted[last])
        emitted = offsets <= np.repeat(accepted, judged)
        self._history[slots[emitted], positions[emitted]] = said[emitted]
        num_accepted[samples] = accepted
        logprobs = self._sampler.logprobs(logits, slots, said)
        reasons = {**self._sampler.failed_rows, **dict.fromkeys(np.flatnonzero(broken_rows(logits)).tolist(), BROKEN)}
        failures = _failures(reasons, emitted, samples, starts)
        told = _by_request(logprobs, samples, starts, accepted + 1)
        return Verdict(num_drafted, num_accepted, said[emitted], told, failures, hits, exits)

    def _exit(
        self, plan: StepPlan, rule: ExitRule, rows: Rows, hidden: torch.Tensor, exiting: Exiting, confidence: FloatArray
    ) -> tuple[Rows, torch.Tensor]:
        """Layers up to the last point of the rule. The rows that are left, out of them.

        A draft is judged by the row before it, so that one stays and the draft's own row goes.
        """
        owner, place, done = exiting.owner, exiting.place, 0
        for point in rule.points:
            hidden = self._runner.run(rows, hidden, done, point.layer)
            seen, done = exiting.seen, point.layer
            slots, positions = plan.slots[owner][seen], (plan.num_tokens[owner] + place)[seen]
            standing = np.zeros(slots.size, dtype=np.int64), np.zeros(slots.size)
            if point.layer:
                before, drafted = exiting.rows_before(rows.counts), self._history[slots, positions]
                if point.candidates:
                    logits = self._runner.shortlist_logits(hidden, before, point.candidates, drafted)
                else:
                    logits = self._runner.logits(hidden, before)
                standing = self._sampler.standing(logits, slots, positions, drafted, point.candidates)
            exiting.take(*standing, confidence[owner, place][seen])
            counts = plan.num_rows + exiting.left
            if (counts < rows.counts).any():
                hidden = hidden[torch.from_numpy(_leading(rows, counts))]
                rows = Rows.of(plan.slots, plan.start, counts)
        return rows, hidden

    def take_seconds(self) -> float:
        return self._runner.take_seconds()


def _leading(rows: Rows, counts: IntArray) -> IntArray:
    """Indices of the first so many rows [B] of each request."""
    inside = np.arange(rows.num_rows) - np.repeat(rows.cu_rows[:-1], rows.counts)
    return np.flatnonzero(inside < np.repeat(counts, rows.counts))


def _leading_matches(
    said: IntArray, drafted: IntArray, offsets: IntArray, judged: IntArray, starts: IntArray
) -> IntArray:
    """How many drafted tokens agree before the first that does not; a request's last row judges no draft. [S]"""
    is_draft = offsets < np.repeat(judged - 1, judged)
    agrees = is_draft & (said == drafted)
    first_miss: IntArray = np.minimum.reduceat(np.where(agrees, np.iinfo(np.int64).max, offsets), starts)
    return first_miss


def _failures(reasons: Mapping[int, str], emitted: BoolArray, samples: IntArray, starts: IntArray) -> dict[int, str]:
    """By request, from the rows that failed. Behind the last emitted token such a row stands on a refused draft."""
    rows = [row for row in sorted(reasons, reverse=True) if emitted[row]]  # a request's first row has the last word
    return {int(samples[np.searchsorted(starts, row, side="right") - 1]): reasons[row] for row in rows}


def _by_request(
    logprobs: list[TokenLogprobs | None], samples: IntArray, starts: IntArray, emitted: IntArray
) -> dict[int, list[TokenLogprobs]]:
    found: dict[int, list[TokenLogprobs]] = {}
    if logprobs:
        for i, start, count in zip(samples.tolist(), starts.tolist(), emitted.tolist(), strict=True):
            rows = [row for row in logprobs[start : start + count] if row is not None]
            if rows:
                found[i] = rows
    return found
