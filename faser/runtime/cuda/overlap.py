"""Steps that draft beside their verification: two streams, and parts of the device for them.

Knows what a plan says of overlap (faser/rules/overlap.py). An ordinary step does not come here. What is verified in the
step is drafted first; the rest is drafted on a second stream while the target verifies.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from faser.arrays import IntArray
from faser.errors import ConfigError
from faser.limits import ADAPTIVE_MAX_LENGTH
from faser.progress import Update
from faser.rules.overlap import MAX_REQUESTS, OverlapPlan
from faser.runtime.cuda.compile import compile_all
from faser.runtime.cuda.confidence import DraftConfidence
from faser.runtime.cuda.drafter import CudaDrafter
from faser.runtime.cuda.graphs import ROW_BUCKETS, Shape, first_draft, next_draft, on_part, verification
from faser.runtime.cuda.lanes import Lanes
from faser.runtime.cuda.launched import LaunchedStep
from faser.runtime.cuda.memory import explained_shortage
from faser.runtime.cuda.model import CudaModel
from faser.runtime.cuda.verifier import CudaVerifier
from faser.step import Settling, StepPlan, StepResult


class CudaOverlap:
    """Runs steps whose plan has an `overlap`."""

    def __init__(self, drafter: CudaDrafter, verifier: CudaVerifier, confidence: DraftConfidence, lanes: Lanes) -> None:
        self._drafter = drafter
        self._verifier = verifier
        self._confidence = confidence
        self.lanes = lanes
        self.stream = SideStream(verifier.target.model.device)

    def run(self, step: LaunchedStep, is_ahead: bool) -> Iterator[None]:
        """Enqueue a step. `is_ahead`: the result of the step before it is not known."""
        assert step.plan.overlap is not None
        if is_ahead and step.plan.overlap.leads:  # it must know who missed in the step before
            yield  # until `settle` has been called
        plan, overlap = step.plan, step.plan.overlap
        assert overlap is not None
        step.events.started()
        if overlap.beside:
            self._run_beside(step, plan, overlap)
        else:
            yield from self._run_in_turn(step, plan, overlap)

    def _run_beside(self, step: LaunchedStep, plan: StepPlan, overlap: OverlapPlan) -> None:
        draft = self._drafter.begin(plan)
        step.num_drafted = plan.lengths
        for _ in range(int(overlap.lead.max(initial=0))):
            draft.extend()
        step.events.verification_started()
        self.stream.fork()
        shape = self._launch_verification(step, overlap)
        # Launched behind the verification, which takes longer and should begin first.
        with self.stream.switch():
            while draft.extend(overlap.draft_sms):
                pass
            step.events.drafted()
        self._verifier.resample(step, shape)
        self.stream.join()
        self._verifier.judge(shape, overlaps=True)

    def _run_in_turn(self, step: LaunchedStep, plan: StepPlan, overlap: OverlapPlan) -> Iterator[None]:
        """All drafts first; they are verified together with those of the step before."""
        yield from self._confidence.draft(step, self._drafter.begin(plan), overlap.draft_sms)
        step.events.drafted()
        shape = self._launch_verification(step, overlap)
        self._verifier.resample(step, shape)
        self._verifier.judge(shape)

    def _launch_verification(self, step: LaunchedStep, overlap: OverlapPlan) -> Shape:
        plan = step.plan
        step.num_verified = self._verifier.resampler.prune(plan, plan.judged_of(step.num_drafted))
        shape = self._verifier.launch(plan, step.num_verified, self._verifying_sms(overlap.draft_sms))
        step.events.verified()
        return shape

    def _verifying_sms(self, draft_sms: int) -> int:
        return self.lanes.num_sms - draft_sms if draft_sms else 0

    # ── results ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def verdict(self, step: LaunchedStep, verdict: StepResult, hit: IntArray) -> StepResult:
        """The verdict with hits; hit [B] is 1 where the token behind the verified drafts was right."""
        plan, hits = step.plan, None
        assert plan.overlap is not None
        if plan.overlap.beside:
            goes_on = (plan.overlap.chunk_of(step.num_drafted) > 0) & (step.num_verified == plan.judged)
            hits = plan.samples & goes_on & (hit != 0)
        # of a frontier that was void nothing was verified
        num_verified = np.minimum(step.num_verified, step.settled.judged_of(step.num_drafted))
        return replace(verdict, num_verified=num_verified, hits=hits)

    def settle(self, step: LaunchedStep, before: LaunchedStep, result: StepResult) -> bool:
        """The result of the step before `step` is known. Whether `step` waited for that to be launched."""
        plan = step.plan
        if plan.overlap is None:
            return False
        num_slots = self._verifier.target.slots.seeds.shape[0]
        settling = Settling.of(before.settled, result).spread(before.plan.slots, num_slots)
        step.settled = plan.settle(settling[plan.slots])
        if not plan.overlap.leads:
            return False
        step.plan = step.settled
        return True

    # ── graphs ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def prepare(self, splits: Collection[int], update: Update = lambda done, total: None) -> None:
        """Capture the graphs of overlapping steps of a few requests, for these numbers of SMs for drafting."""
        wanted = self._graphs(splits)
        compile_all([partial(model.forward, shape) for model, shape in wanted])
        with explained_shortage(ConfigError):
            for done, (model, shape) in enumerate(reversed(wanted)):
                model.capture(shape)
                update(done + 1, len(wanted))

    def _graphs(self, splits: Collection[int]) -> list[tuple[CudaModel, Shape]]:
        target, (draft,) = self._verifier.target, self._drafter.models
        few = [size for size in ROW_BUCKETS if size <= MAX_REQUESTS]
        usual_rows = self._verifier.usual_rows
        depths = {usual_rows, max(usual_rows, ADAPTIVE_MAX_LENGTH + 1)}  # rows of a request, by policy or by lead
        rows = [size for size in ROW_BUCKETS if 1 < size <= MAX_REQUESTS * max(depths)]
        verifications = [(size, 1) for size in few] + [(size, depth) for depth in depths for size in rows]
        shapes: list[tuple[CudaModel, Shape | None]] = []
        for split in sorted({0, *splits}):
            shapes += [(draft, on_part(first_draft(size, 2), split)) for size in few]
            shapes += [(draft, on_part(next_draft(size), split)) for size in few]
            part = self._verifying_sms(split)
            shapes += [(target, on_part(verification(*size), part)) for size in verifications]
        found = dict.fromkeys(shapes)
        return [(model, shape) for model, shape in found if shape is not None and model.has_graph_of(shape)]

    def forget_parts(self) -> None:
        """Give the parts of the device back, and the graphs that were captured on them."""
        for model in (self._verifier.target, *self._drafter.models):
            model.forget_parts()
        self.lanes.close()


class SideStream:
    """A stream beside the current one. Without a GPU there is none, and its work runs at once."""

    def __init__(self, device: torch.device) -> None:
        make: Any = torch.cuda.Stream
        self._stream = make(device) if device.type == "cuda" else None

    def fork(self) -> None:
        """Its next work waits for all earlier work of the current stream, and runs beside later work."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())

    def switch(self) -> AbstractContextManager[Any]:
        """Work enqueued inside is enqueued on this stream."""
        return torch.cuda.stream(self._stream) if self._stream is not None else nullcontext()

    def join(self) -> None:
        """The next work of the current stream waits for all work of this one."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)

    def wait(self) -> None:
        """The host waits until it is idle."""
        if self._stream is not None:
            self._stream.synchronize()
