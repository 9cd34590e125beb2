"""One forward of the target over context rows and drafted tokens, and the verdict.

The target's token at a position is a function of the tokens before it and the request's seed. A drafted token is
accepted exactly when it equals the target's token; the first that differs is replaced by the target's. So the output is
that of plain decoding.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch

from faser.arrays import NONE, BoolArray, FloatArray, IntArray
from faser.request import TokenLogprobs
from faser.runtime.cpu.early_exit import ExitingForward
from faser.runtime.cpu.runner import ModelRunner, Rows
from faser.runtime.cpu.vision import CpuEyes
from faser.runtime.sampling import BROKEN, Sampler, broken_rows
from faser.step import StepPlan, StepResult, StepSeconds


class Verifier:
    def __init__(
        self, runner: ModelRunner, sampler: Sampler, history: torch.Tensor, eyes: CpuEyes | None = None
    ) -> None:
        self.runner = runner
        self._eyes = eyes
        self._sampler = sampler
        self._history: IntArray = history.numpy()
        self._exiting = ExitingForward(runner, sampler, self._history)

    def verify(
        self, plan: StepPlan, num_drafted: IntArray, confidence: FloatArray | None, num_new: IntArray
    ) -> StepResult:
        """Judge the first num_drafted tokens [B] behind each context. The result has no figures of the drafter.

        `num_new` [B] tokens were drafted in this step; those behind the first num_drafted are not judged. `confidence`
        [B, depth] is the draft's own, for plans with a rule for early exit.
        """
        self.runner.apply(plan.target_pages)
        rows = Rows.of(plan.slots, plan.start, plan.num_rows + num_drafted)
        hidden = self.runner.model.embed(torch.from_numpy(self._history[rows.owners, rows.positions]))
        if self._eyes is not None and plan.vision is not None:
            self._eyes.replace_rows(plan.vision, rows, hidden)
        if plan.exits is None or not num_drafted.any():
            return self._judge(plan, rows, self.runner.run(rows, hidden), num_drafted, num_new)
        rows, hidden, exiting = self._exiting.run(plan, plan.exits, hidden, num_drafted, confidence)
        hidden = self.runner.run(rows, hidden, plan.exits.layers[-1])
        return replace(self._judge(plan, rows, hidden, exiting.left, num_new), exits=exiting.readings)

    def _judge(
        self, plan: StepPlan, rows: Rows, hidden: torch.Tensor, num_drafted: IntArray, num_new: IntArray
    ) -> StepResult:
        """Sample the target's tokens from the last layer and compare the drafts with them."""
        samples = np.flatnonzero(plan.samples)
        num_rows = num_drafted[samples] + 1  # [S] judged rows: of the last context token and of every draft
        starts = np.cumsum(num_rows) - num_rows
        offsets = np.arange(num_rows.sum()) - np.repeat(starts, num_rows)  # 0 … num_drafted within each request
        wanted = np.repeat(rows.cu_rows[samples + 1] - num_rows, num_rows) + offsets
        logits = self.runner.logits(hidden, wanted)
        seconds = StepSeconds(verify=self.runner.take_seconds())
        num_accepted = np.zeros_like(num_drafted)
        if samples.size == 0:
            return StepResult(num_new, num_drafted, num_accepted, NONE, seconds=seconds)
        slots, positions = rows.owners[wanted], rows.positions[wanted] + 1
        said = self._sampler.sample(logits, slots, positions)
        drafted = self._history[slots, positions]
        num_accepted[samples] = _leading_matches(said, drafted, offsets, num_rows, starts)
        emitted = offsets <= np.repeat(num_accepted[samples], num_rows)
        last = np.zeros(plan.slots.size, dtype=np.int64)
        last[samples] = starts + num_rows - 1
        hits = _hits(plan, num_drafted, num_accepted, num_new, (said == drafted)[last])
        self._history[slots[emitted], positions[emitted]] = said[emitted]
        logprobs = self._sampler.logprobs(logits, slots, said)
        reasons = {**self._sampler.failed_rows, **dict.fromkeys(np.flatnonzero(broken_rows(logits)).tolist(), BROKEN)}
        failures = _failures(reasons, emitted, samples, starts)
        told = _by_request(logprobs, samples, starts, num_accepted[samples] + 1)
        return StepResult(num_new, num_drafted, num_accepted, said[emitted], told, failures, seconds, hits=hits)


def _hits(
    plan: StepPlan, num_drafted: IntArray, num_accepted: IntArray, num_new: IntArray, agrees_behind: BoolArray
) -> BoolArray | None:
    """[B] whose drafts were all accepted and whose chunk behind them begins with the right token (`agrees_behind`)."""
    if plan.overlap is None or not plan.overlap.beside:
        return None
    has_chunk = (plan.overlap.chunk_of(num_new) > 0) & (num_drafted == plan.judged_of(num_new))
    return plan.samples & has_chunk & (num_accepted == num_drafted) & agrees_behind


def _leading_matches(
    said: IntArray, drafted: IntArray, offsets: IntArray, num_rows: IntArray, starts: IntArray
) -> IntArray:
    """[S] drafts that agree before the first that does not; a request's last row judges no draft."""
    is_draft = offsets < np.repeat(num_rows - 1, num_rows)
    agrees = is_draft & (said == drafted)
    return np.minimum.reduceat(np.where(agrees, np.iinfo(np.int64).max, offsets), starts)


def _failures(reasons: Mapping[int, str], emitted: BoolArray, samples: IntArray, starts: IntArray) -> dict[int, str]:
    """By request, from the rows that failed. A failed row behind the last emitted token follows a rejected draft."""
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
