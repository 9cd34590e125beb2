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
from numpy.typing import NDArray

from faser.runtime.batch import Rows
from faser.runtime.runner import ModelRunner
from faser.runtime.sampling import Sampler, broken_rows
from faser.types import IntArray, StepPlan, TokenLogprobs

BROKEN = "the model gave no finite logits for this request (overflow in its dtype?); try another dtype"


@dataclass(frozen=True)
class Verdict:
    num_accepted: IntArray  # [B]
    token_ids: IntArray  # flat: accepted + bonus of each request that samples
    logprobs: dict[int, list[TokenLogprobs]]  # by index in the plan
    failures: dict[int, str]  # likewise: requests the target has no next token for


class Verifier:
    def __init__(self, runner: ModelRunner, sampler: Sampler, history: torch.Tensor) -> None:
        self._runner = runner
        self._sampler = sampler
        self._history: IntArray = history.numpy()

    def verify(self, plan: StepPlan, num_drafted: IntArray) -> Verdict:
        """Judge the first num_drafted tokens [B] behind each context; there may be more, which nobody looks at."""
        self._runner.apply(plan.target_pages)
        rows = Rows.of(plan.slots, plan.start, plan.num_rows + num_drafted)
        samples = np.flatnonzero(plan.samples)
        judged = num_drafted[samples] + 1  # [S] rows to judge: of the last context token and of every drafted one
        starts = np.cumsum(judged) - judged
        offsets = np.arange(judged.sum()) - np.repeat(starts, judged)  # 0 … num_drafted within each request
        wanted = np.repeat(rows.cu_rows[samples + 1] - judged, judged) + offsets
        logits = self._runner.forward(rows, torch.from_numpy(self._history[rows.owners, rows.positions]), wanted)
        num_accepted = np.zeros_like(num_drafted)
        if samples.size == 0:
            return Verdict(num_accepted, np.zeros(0, dtype=np.int64), {}, {})

        slots, positions = rows.owners[wanted], rows.positions[wanted] + 1
        said = self._sampler.sample(logits, slots, positions)
        accepted = _leading_matches(said, self._history[slots, positions], offsets, judged, starts)
        emitted = offsets <= np.repeat(accepted, judged)
        self._history[slots[emitted], positions[emitted]] = said[emitted]
        num_accepted[samples] = accepted
        logprobs = self._sampler.logprobs(logits, slots, said)
        reasons = {**self._sampler.failed_rows, **dict.fromkeys(np.flatnonzero(broken_rows(logits)).tolist(), BROKEN)}
        failures = _failures(reasons, emitted, samples, starts)
        return Verdict(num_accepted, said[emitted], _by_request(logprobs, samples, starts, accepted + 1), failures)

    def take_seconds(self) -> float:
        return self._runner.take_seconds()


def _leading_matches(
    said: IntArray, drafted: IntArray, offsets: IntArray, judged: IntArray, starts: IntArray
) -> IntArray:
    """How many drafted tokens agree before the first that does not; a request's last row judges no draft. [S]"""
    is_draft = offsets < np.repeat(judged - 1, judged)
    agrees = is_draft & (said == drafted)
    first_miss: IntArray = np.minimum.reduceat(np.where(agrees, np.iinfo(np.int64).max, offsets), starts)
    return first_miss


def _failures(
    reasons: Mapping[int, str], emitted: NDArray[np.bool_], samples: IntArray, starts: IntArray
) -> dict[int, str]:
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
