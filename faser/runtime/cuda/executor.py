"""The executor on a GPU: a plan becomes a few graph launches and one copy back.

Positions, tokens, drafts and verdicts stay on the device. The host says who runs and reads the results. Steps whose
requests all decode replay graphs, drafting included. Steps with up to two thousand prompt rows replay one graph for the
layers and one for the head. Larger steps are enqueued kernel by kernel, which takes the host less time than the GPU.

An ordinary step is `CudaExecutor._run` from top to bottom. Optional mechanisms run the steps whose plans ask for them:
confidence.py, early_exit.py, overlap.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from faser.arrays import NONE, IntArray
from faser.errors import EngineError
from faser.models.transformer import Transformer
from faser.progress import Update
from faser.runtime.cuda.compile import compile_all
from faser.runtime.cuda.confidence import DraftConfidence
from faser.runtime.cuda.draft_memory import CudaDraftMemory
from faser.runtime.cuda.drafter import CudaDrafter
from faser.runtime.cuda.early_exit import CudaEarlyExit
from faser.runtime.cuda.graphs import ROW_BUCKETS, Shape, verification
from faser.runtime.cuda.lanes import Lanes
from faser.runtime.cuda.launched import LaunchedStep, ResultBuffer
from faser.runtime.cuda.memory import explained_shortage
from faser.runtime.cuda.model import CudaModel
from faser.runtime.cuda.overlap import CudaOverlap
from faser.runtime.cuda.page_moves import copy_entries, move_pages
from faser.runtime.cuda.resampling import Resampler
from faser.runtime.cuda.sampling import Slots, inverse_temperature, mixed_seed
from faser.runtime.cuda.transfer import send
from faser.runtime.cuda.verifier import FIRST_TOKEN, HIT, IS_BROKEN, NUM_ACCEPTED, CudaVerifier
from faser.runtime.device import Parts
from faser.runtime.sampling import BROKEN
from faser.step import Admission, PageMoves, StepPlan, StepResult, VisionPlan

PROMPT_ROWS = (8, 16, 32, 1 << 30)  # sizes of prompts that take kernels of their own
MAX_STEPS = 2  # steps submitted and not collected


class CudaExecutor:
    """Runs plans on models whose KV pages the caller allocates."""

    def __init__(
        self,
        parts: Parts,
        target: CudaModel,
        drafter: CudaDrafter | None,
        slots: Slots,
        lanes: Lanes,
        *,
        runs_ahead: bool,
    ) -> None:
        max_requests, device, max_length = parts.limits.max_running, target.model.device, parts.max_length
        self.target = target
        self.drafter = drafter
        self._slots = slots
        self._history = parts.history.numpy()  # int64 [max_slots, max_len] the host's copy of the tokens
        self._resampler = Resampler(target, slots, parts.sampler, self._history)
        self.verifier = CudaVerifier(target, slots, self._resampler, max_length, parts.acceptance)
        width = self.verifier.packed.shape[1]
        self._buffers = deque(ResultBuffer(max_requests, width, device) for _ in range(MAX_STEPS))
        self._steps: deque[LaunchedStep] = deque()
        self._runs_ahead = runs_ahead
        self._is_compiled = False
        self.draft_memory: CudaDraftMemory | None = None  # the draft can leave the device
        # optional mechanisms
        self._confidence: DraftConfidence | None = None
        self.early_exit: CudaEarlyExit | None = None
        self.overlap: CudaOverlap | None = None
        if drafter is not None:
            self._confidence = DraftConfidence(max_length, max_requests, device)
            if parts.head is None:  # a head needs the features of whole verifications
                self.early_exit = CudaEarlyExit(drafter, self.verifier, self._confidence)
            if isinstance(parts.draft, Transformer):
                self.overlap = CudaOverlap(drafter, self.verifier, self._confidence, lanes)

    # ── a step ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def execute(self, plan: StepPlan) -> StepResult:
        self.submit(plan)
        return self.collect()

    def submit(self, plan: StepPlan) -> None:
        """Enqueue a step. The device runs steps in the order they are submitted in."""
        self.finish_launch()
        with torch.inference_mode(), explained_shortage(EngineError):
            if plan.copies is not None:  # first: a move may write to pages that the copies read
                copy_entries(self.target.pages, plan.copies)
            if plan.moves is not None:
                move_pages(self.target.pages, plan.moves)
            self._resampler.release(plan.released)
            self._admit(plan.admitted)
            self.target.apply(plan.target_pages)
            if self.drafter is not None:
                self.drafter.apply(plan.draft_pages)
                if plan.draft_first is not None:
                    self.drafter.begin_again(plan.draft_first)
            step = LaunchedStep(plan, self._buffers.popleft(), plan)
            step.events.begin()
            self._steps.append(step)  # so that `discard` gives its buffer back, whatever fails from here on
            if plan.vision is not None:
                self._see(step, plan.vision)
            step.launches = self._run(step)
            next(step.launches, None)

    def _see(self, step: LaunchedStep, vision: VisionPlan) -> None:
        """Enqueue what the step does with pictures before anything else."""
        assert self.target.eyes is not None
        if vision.writes:
            step.events.encoding_started()
            self.target.eyes.encode(vision)
            step.events.encoded()
        self.target.eyes.set_sources(vision)

    def _run(self, step: LaunchedStep) -> Iterator[None]:
        """Enqueue a step: draft, verify, judge, copy back.

        It yields where a mechanism must read from the device before it can go on: the host may do other work first.
        """
        mechanism = self._mechanism(step)
        if mechanism is not None:
            yield from mechanism
        else:
            plan = step.plan
            step.events.started()
            step.num_drafted = plan.lengths
            if self.drafter is not None and self._confidence is not None:
                yield from self._confidence.draft(step, self.drafter.begin(plan))
            step.events.drafted()
            step.num_verified = self._resampler.prune(plan, step.num_drafted)
            shape = self.verifier.launch(plan, step.num_verified)
            step.events.verified()
            self.verifier.resample(step, shape)
            self.verifier.judge(shape)
        size = step.plan.slots.size
        step.results.packed[:size].copy_(self.verifier.packed[:size], non_blocking=True)
        step.events.finished()
        step.is_launched = True

    def _mechanism(self, step: LaunchedStep) -> Iterator[None] | None:
        """The launches of a step that an optional mechanism runs."""
        if step.plan.overlap is not None:
            assert self.overlap is not None
            return self.overlap.run(step, is_ahead=len(self._steps) > 1)
        if step.plan.exits is not None and self.early_exit is not None:
            return self.early_exit.run(step)
        return None

    def finish_launch(self) -> None:
        """Launch the rest of a step that waits for the host."""
        if self._steps and not self._steps[-1].is_launched:
            with torch.inference_mode(), explained_shortage(EngineError):
                for _ in self._steps[-1].launches:
                    pass

    def collect(self) -> StepResult:
        """The result of the oldest step that was submitted; waits for it."""
        if len(self._steps) == 1:
            self.finish_launch()
        step = self._steps.popleft()
        try:
            step.events.wait()
            packed = step.results.packed[: step.plan.slots.size].numpy().astype(np.int64)
            verdict = self._verdict(step, packed)
            if self._steps and self.overlap is not None and self.overlap.settle(self._steps[0], step, verdict):
                self.finish_launch()
            return self._result(step, packed, replace(verdict, seconds=step.events.seconds()))
        finally:
            self._buffers.append(step.results)

    def _verdict(self, step: LaunchedStep, packed: IntArray) -> StepResult:
        """The result of a step without its tokens; packed [B, FIRST_TOKEN + W]."""
        num_accepted = np.where(step.plan.samples, packed[:, NUM_ACCEPTED], 0)
        verdict = StepResult(step.num_drafted, step.num_verified, num_accepted, NONE)
        if step.plan.overlap is not None and self.overlap is not None:
            return self.overlap.verdict(step, verdict, packed[:, HIT])
        return verdict

    def _result(self, step: LaunchedStep, packed: IntArray, verdict: StepResult) -> StepResult:
        plan, samples = step.plan, step.plan.samples
        emitted = np.where(samples, verdict.num_accepted + 1, 0)
        tokens = packed[:, FIRST_TOKEN:]
        owners = np.repeat(np.arange(emitted.size), emitted)
        offsets = np.arange(owners.size) - np.repeat(np.cumsum(emitted) - emitted, emitted)
        token_ids = tokens[owners, offsets]
        self._remember(plan, owners, offsets, token_ids)
        failures = dict.fromkeys(np.flatnonzero(samples & (packed[:, IS_BROKEN] != 0)).tolist(), BROKEN)
        failures |= {owner: why for owner, offset, why in step.answers.failed if offset < emitted[owner]}
        logprobs = {i: some[: int(emitted[i])] for i, some in step.answers.all_logprobs().items()}
        return replace(
            verdict, token_ids=token_ids, logprobs=logprobs, failures=failures, confidence=step.confidence,
            exits=step.exits,
        )  # fmt: skip

    def _remember(self, plan: StepPlan, owners: IntArray, offsets: IntArray, token_ids: IntArray) -> None:
        """Keep the tokens that grammars read. No step is planned ahead for these, so their positions are known."""
        kept = self._resampler.is_on_host[plan.slots[owners]]
        owners, offsets, token_ids = owners[kept], offsets[kept], token_ids[kept]
        self._history[plan.slots[owners], plan.num_tokens[owners] + offsets] = token_ids

    def may_run_ahead(self, plan: StepPlan) -> bool:
        """Whether the step behind `plan` may be submitted before the result of `plan` is known.

        Not if the host needs tokens (grammars) or positions that drafts make uncertain (filters).
        """
        if not self._runs_ahead:
            return False
        drafts = (plan.lengths > 0) | (plan.frontier > 0)
        needed = self._resampler.is_on_host[plan.slots] | (self._resampler.is_special[plan.slots] & drafts)
        return not needed.any()

    def discard(self) -> None:
        """Forget the steps in flight, when the device is done with them."""
        while self._steps:
            step = self._steps.popleft()
            if step.is_launched:
                step.events.wait()
            elif self.overlap is not None:
                self.overlap.stream.wait()
            self._buffers.append(step.results)
        if self._slots.history.is_cuda:  # a step that failed half-way may have left work behind
            torch.cuda.current_stream().synchronize()

    def close(self) -> None:
        """Parts of the device and its virtual memory are given back. Everything else goes with tensors and graphs."""
        self.discard()
        self.forget_overlap()
        if self.draft_memory is not None:
            self.draft_memory.close()

    def _admit(self, admitted: Sequence[Admission]) -> None:
        if not admitted:
            return
        slots, device = self._slots, self._slots.history.device
        tokens = np.zeros((len(admitted), max(new.token_ids.size for new in admitted)), dtype=np.int32)
        for row, new in zip(tokens, admitted, strict=True):
            row[: new.token_ids.size] = new.token_ids
        where = send(np.array([new.slot for new in admitted]), device)
        slots.history[:, : tokens.shape[1]].index_copy_(0, where, send(tokens, device))
        seeds = np.array([mixed_seed(new.seed) for new in admitted])
        slots.seeds.index_copy_(0, where, send(seeds, device))
        temperatures = np.array([inverse_temperature(new.params.temperature) for new in admitted], dtype=np.float32)
        slots.inverse_temperatures.index_copy_(0, where, send(temperatures, device))
        self._resampler.admit(admitted)
        for part in (self.target.eyes, self.target.angles):
            if part is not None:
                part.admit(admitted)

    # ── graphs ───────────────────────────────────────────────────────────────────────────────────────────────────────

    @torch.inference_mode()
    def prepare(self, length: int, update: Update = lambda done, total: None) -> None:
        """Capture the graphs of steps that draft nothing and of steps that draft up to `length` tokens."""
        max_requests = self.target.requests.slots.shape[0]
        sizes = [size for size in ROW_BUCKETS if size <= max_requests] or [ROW_BUCKETS[0]]
        wanted = [(self.target, verification(size, 1)) for size in sizes]
        models = [self.target]
        if length and self.drafter is not None:
            self.verifier.usual_rows = length + 1
            most = min(max_requests * (length + 1), ROW_BUCKETS[-1])
            wanted += [(self.target, verification(size, length + 1)) for size in ROW_BUCKETS if 1 < size <= most]
            wanted += self.drafter.graphs(sizes, length)
            models += self.drafter.models
        wanted += [(model, shape) for model in models for shape in model.mixed_shapes()]
        # the largest first: their buffers serve the others
        graphs = [
            (model, shape) for model, shape in reversed(wanted) if shape is not None and model.has_graph_of(shape)
        ]
        choosing = [(model, size) for model in models for size in reversed(sizes)]
        if not self._is_compiled:
            compile_all(self._dry_runs(graphs, choosing))
            self._is_compiled = True
        captures = [partial(model.capture, shape) for model, shape in graphs]
        captures += [partial(model.capture_choosing, size) for model, size in choosing]
        for done, capture in enumerate(captures):
            capture()
            update(done + 1, len(captures))

    def _dry_runs(
        self, graphs: Sequence[tuple[CudaModel, Shape]], choosing: Sequence[tuple[CudaModel, int]]
    ) -> Iterator[Callable[[], None]]:
        """Everything that launches kernels, before anything has run."""
        for model, shape in graphs:
            yield partial(model.forward, shape)
        for model, size in choosing:
            yield partial(model.choose_wanted, size)
        for model in (self.target, *(self.drafter.models if self.drafter is not None else ())):
            for rows in PROMPT_ROWS:
                num_rows = np.array([min(rows, model.max_rows)])
                shape = Shape(1, int(num_rows[0]), int(num_rows[0]), 1)
                yield partial(model.forward, shape, num_rows, np.zeros(1, dtype=np.int64))
        if self.drafter is not None:
            yield from self.drafter.dry_runs()
        everybody = Shape(self.target.requests.slots.shape[0], 0, 0, 0)
        for overlaps in (False, True):
            yield partial(self.verifier.judge, everybody, overlaps=overlaps)
        if self.draft_memory is not None:
            yield partial(move_pages, self.target.pages, PageMoves(np.zeros(1, np.int64), np.ones(1, np.int64)))

    @torch.inference_mode()
    def prepare_overlap(self, splits: Collection[int], update: Update = lambda done, total: None) -> None:
        assert self.overlap is not None
        self.overlap.prepare(splits, update)

    def forget_overlap(self) -> None:
        """Overlap will not be used: give up what was captured to measure it."""
        if self.overlap is not None:
            self.overlap.forget_parts()

    @torch.inference_mode()
    def prepare_exits(self, layers: Sequence[int], update: Update = lambda done, total: None) -> None:
        assert self.early_exit is not None
        self.early_exit.prepare(layers, update)

    def forget_exits(self) -> None:
        """Early exit will not be used: give up what was captured to measure it."""
        if self.early_exit is not None:
            self.early_exit.parts.graphs.clear()
