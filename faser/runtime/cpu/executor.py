"""The executor on the CPU: a plan becomes forwards of the two models.

Keeps each running request's tokens (the history) by slot: admissions set it, results extend it. Drafts are written
behind the context and overwritten by the target's tokens. Drafts that break a request's grammar can never be accepted,
and are dropped before the verification.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from faser.engine.residency import DraftMemory
from faser.runtime.cpu.verifier import Verifier
from faser.runtime.cpu.vision import CpuEyes
from faser.runtime.drafter import Drafter, Drafts
from faser.runtime.sampling import Sampler
from faser.step import StepPlan, StepResult
from faser.threads import ThreadTuner


class TorchExecutor:
    def __init__(
        self,
        verifier: Verifier,
        drafter: Drafter | None,
        sampler: Sampler,
        history: torch.Tensor,
        threads: ThreadTuner | None = None,
        draft_memory: DraftMemory | None = None,
        eyes: CpuEyes | None = None,
    ) -> None:
        self.draft_memory = draft_memory
        self._verifier = verifier
        self._eyes = eyes
        self._threads = threads
        self.drafter = drafter
        self._sampler = sampler
        self._history = history.numpy()

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Draft, then verify. Drafts that overlap are made first too: the verification compares with them."""
        if plan.copies is not None:  # first: a move may write to pages that the copies read
            self._verifier.runner.copy(plan.copies)
        if plan.moves is not None:
            self._verifier.runner.move(plan.moves)
        self._update_slots(plan)
        encode_seconds = self._eyes.encode(plan.vision) if self._eyes is not None and plan.vision is not None else 0.0
        num_rows = int(plan.num_rows.sum() + plan.judged.sum())
        if self._threads is not None:
            self._threads.begin(num_rows)
        drafts = self.drafter.draft(plan) if self.drafter is not None else Drafts(plan.lengths)
        num_verified = self._sampler.num_valid(plan.slots, plan.num_tokens, plan.judged_of(drafts.num_tokens))
        result = self._verifier.verify(plan, num_verified, drafts.confidence, drafts.num_tokens)
        if self._threads is not None:
            self._threads.end(num_rows, result.seconds.verify)
        confidence = drafts.confidence if plan.stopping is not None else None
        seconds = replace(result.seconds, draft=drafts.seconds, encode=encode_seconds)
        return replace(result, seconds=seconds, confidence=confidence)

    def _update_slots(self, plan: StepPlan) -> None:
        for slot in plan.released:
            self._sampler.release(slot)
        for new in plan.admitted:
            self._history[new.slot, : new.token_ids.size] = new.token_ids
            self._sampler.admit(new.slot, new.params, new.seed, new.num_prompt, sorted(new.stop_ids))
            self._verifier.runner.admit(new)

    def close(self) -> None:
        """Nothing outlives the tensors."""
