"""A draft model on the CPU."""

from __future__ import annotations

import numpy as np
import torch

from faser.arrays import FloatArray, IntArray
from faser.rules.stopping import WatchedPlan
from faser.runtime.cpu.runner import ModelRunner, Rows
from faser.runtime.drafter import Drafts
from faser.runtime.sampling import Sampler
from faser.step import StepPlan


class ModelDrafter:
    """Samples with the target's noise, so that it agrees as often as it can.

    Drafting is ragged: a request leaves the batch at its own length. The first forward also computes the context rows
    that the draft lags behind, also of requests that catch up and do not draft yet.
    """

    def __init__(self, runner: ModelRunner, sampler: Sampler, history: torch.Tensor, target_vocab_size: int) -> None:
        self._runner = runner
        self._sampler = sampler
        self._history: IntArray = history.numpy()
        self._vocab_size = target_vocab_size
        self._confidence: FloatArray | None = None  # [B, depth] of the drafts of the current step

    def draft(self, plan: StepPlan) -> Drafts:
        self._runner.apply(plan.draft_pages)
        runs = np.flatnonzero(plan.draft_rows)
        if runs.size == 0:
            return Drafts(np.zeros_like(plan.lengths))
        self._confidence = None
        if plan.stopping is not None or plan.exits is not None:
            self._confidence = np.full((plan.lengths.size, int(plan.lengths.max()) + 1), np.nan)
        rows = Rows.of(plan.slots[runs], plan.draft_start[runs], plan.draft_rows[runs])
        lengths, slots, positions = plan.lengths[runs], rows.slots, (plan.num_tokens + plan.frontier)[runs]
        active = np.flatnonzero(lengths)
        stuck = self._extend(rows, rows.last[active], slots[active], positions[active], runs[active], 0)
        lengths[active[stuck]] = 0
        watch = None if plan.stopping is None else WatchedPlan(plan.stopping, plan.lengths)
        for done in range(1, int(lengths.max())):
            active = np.flatnonzero(lengths > done)
            if active.size == 0:
                break
            if watch is not None and not watch.goes_on(self._confidence, done):
                lengths = np.minimum(lengths, done)
                break
            rows = Rows.of(slots[active], positions[active] + done - 1, np.ones(active.size, dtype=np.int64))
            stuck = self._extend(rows, rows.last, rows.slots, rows.positions + 1, runs[active], done)
            lengths[active[stuck]] = done
        num_drafted = np.zeros_like(plan.lengths)
        num_drafted[runs] = lengths
        return Drafts(num_drafted, self._confidence, self._runner.take_seconds())

    def _extend(
        self, rows: Rows, wanted: IntArray, slots: IntArray, positions: IntArray, requests: IntArray, done: int
    ) -> list[int]:
        """Compute rows; draft token number `done` of `requests` (by index in the plan) from the `wanted` rows.

        Returns the indices of requests without a token to draft: a short vocabulary may hold no token that a request's
        grammar allows.
        """
        # A target's vocabulary may be padded beyond the draft's; padding has no text, so any stand-in will do.
        token_ids = np.minimum(self._history[rows.owners, rows.positions], self._runner.model.config.vocab_size - 1)
        hidden = self._runner.run(rows, self._runner.model.embed(torch.from_numpy(token_ids)))
        logits = self._runner.logits(hidden, wanted)
        if wanted.size == 0:
            return []
        logits = self._spread(logits)
        tokens = self._sampler.sample(logits, slots, positions)
        self._history[slots, positions] = tokens
        if self._confidence is not None and requests.size:
            self._confidence[requests, done] = self._sampler.confidence(logits, slots, tokens)
        return list(self._sampler.failed_rows)

    def _spread(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits by the target's token ids, as noise, bias and penalties are. Tokens that the draft lacks get -inf."""
        if self._runner.model.vocabulary is None:
            return logits[:, : self._vocab_size]
        whole = logits.new_full((logits.shape[0], self._vocab_size), -torch.inf)
        return whole.index_copy_(1, self._runner.model.vocabulary, logits)
