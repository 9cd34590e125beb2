"""Drafters behind one seam, and rules that end drafts by confidence."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from faser.arrays import IntArray
from faser.models.transformer import Transformer
from faser.policy import Fixed
from faser.rules.stopping import Stopping
from faser.runtime.profiling.profiler import Batch, Steps
from faser.step import StepPlan
from tests.runtime.cuda.test_executor import chosen, make_engine
from tests.runtime.profiling.test_profiler import make_subject
from tests.test_exactness import reference, serve
from tests.tiny import CONFIGS

pytest.importorskip("triton")

from faser.runtime.cuda.confidence import DraftConfidence
from faser.runtime.cuda.drafter import CudaDrafter
from faser.runtime.cuda.launched import LaunchedStep, ResultBuffer

CPU = torch.device("cpu")


class ScriptedDraft:
    """Drafts of a plan whose requests are in order of length; token k of request i has confidence[k][i]."""

    is_whole = False

    def __init__(self, plan: StepPlan, confidence: list[list[float]] | None) -> None:
        self._lengths = plan.lengths
        self._script = confidence
        self._depth = 0

    @property
    def num_tokens(self) -> IntArray:
        return np.minimum(self._lengths, self._depth)

    @property
    def requests(self) -> IntArray:
        return np.flatnonzero(self._lengths >= self._depth)

    @property
    def num_unfinished(self) -> int:
        return int((self._lengths > self._depth).sum())

    @property
    def confidence(self) -> torch.Tensor | None:
        return None if self._script is None else torch.tensor(self._script[self._depth - 1])

    def extend(self, num_sms: int = 0) -> bool:
        if self._depth >= self._lengths.max():
            return False
        self._depth += 1
        return True


def draft_by_rule(lengths: list[int], confidence: list[list[float]] | None) -> tuple[LaunchedStep, int]:
    """A rule that goes on while the confidence is high. Returns the step and how often the host may do other work."""
    counts = np.array(lengths)
    plan = Steps(make_subject(), lambda: 0.0).plan(Batch.decoding(np.full(counts.size, 8), counts))
    depth = int(counts.max()) + 1
    stopping = Stopping(np.ones((counts.size, depth)), np.full(depth, 0.5), price=1.0, calibration=(0.0, 1.0))
    step = LaunchedStep(plan, ResultBuffer(4, 8, CPU), plan)
    checks = DraftConfidence(8, 4, CPU)
    yields = sum(1 for _ in checks.draft_by_rule(step, stopping, ScriptedDraft(plan, confidence)))
    return step, yields


def test_a_rule_ends_drafts_when_their_confidence_falls():
    step, yields = draft_by_rule([4, 2], [[0.9, 0.9], [0.8, 0.9], [0.1], [0.9]])
    assert step.num_drafted.tolist() == [3, 2]
    assert yields == 1
    assert step.confidence is not None
    np.testing.assert_allclose(step.confidence[0], [0.9, 0.8, 0.1, np.nan, np.nan], rtol=1e-6)
    np.testing.assert_allclose(step.confidence[1], [0.9, 0.9, np.nan, np.nan, np.nan], rtol=1e-6)


def test_a_rule_that_always_goes_on_drafts_the_full_lengths():
    step, _ = draft_by_rule([3, 1], [[0.99, 0.99], [0.99], [0.99]])
    assert step.num_drafted.tolist() == [3, 1]


def test_of_drafts_made_at_once_each_request_verifies_what_is_worth_it(monkeypatch):
    monkeypatch.setattr(ScriptedDraft, "is_whole", True)
    step, yields = draft_by_rule([4, 2], [[0.9, 0.2], [0.8, 0.9], [0.3], [0.9]])
    assert step.num_drafted.tolist() == [2, 0], "0.9 × 0.8 and 0.2, against 0.25 a row"
    assert yields == 1


def test_a_drafter_without_probabilities_is_not_asked_between_tokens():
    step, yields = draft_by_rule([1, 1], None)
    assert step.num_drafted.tolist() == [1, 1]
    assert (step.confidence, yields) == (None, 0)


class BlockDraft:
    """All tokens of a draft in one launch, as draft heads may make them."""

    confidence = None
    num_unfinished = 0
    is_whole = True

    def __init__(self, history: torch.Tensor, plan: StepPlan) -> None:
        self._history = history
        self._plan = plan
        self.num_tokens = np.zeros_like(plan.lengths)

    @property
    def requests(self) -> IntArray:
        return np.flatnonzero(self.num_tokens)

    def extend(self, num_sms: int = 0) -> bool:
        plan = self._plan
        if self.num_tokens.any() or not plan.lengths.any():
            return False
        for slot, first, length in zip(plan.slots, plan.num_tokens, plan.lengths, strict=True):
            self._history[int(slot), int(first) : int(first + length)] = int(first) % 50
        self.num_tokens = plan.lengths
        return True


class BlockDrafter(CudaDrafter):
    def __init__(self, history: torch.Tensor) -> None:
        self._history = history

    def begin(self, plan: StepPlan) -> BlockDraft:
        return BlockDraft(self._history, plan)


def test_a_drafter_that_makes_a_block_of_tokens_at_once_fits_behind_the_seam(device):

    target = Transformer.random(replace(CONFIGS["llama3"], head_dim=16, num_layers=1), 0, std=0.3)
    requests = chosen(target, device)[:2]
    engine = make_engine(device, target, "ngram", Fixed(3))
    engine.scheduler.drafts.lookup = None  # the policy gives lengths, and the drafter below makes the drafts
    engine.executor.drafter = BlockDrafter(engine.executor._slots.history)
    outcome = serve(engine, requests)
    assert outcome.tokens == reference(target, requests).tokens
    assert outcome.total.drafted > 0
