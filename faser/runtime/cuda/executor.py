"""The CUDA side of the seam: a plan becomes a few graph launches and one copy back.

Positions, tokens, drafts and verdicts stay on the device; the host fills in who runs and reads what came of it. Steps
whose requests all decode replay graphs, drafting included; steps with prompt rows are enqueued kernel by kernel, which
the host does faster than a GPU computes hundreds of rows. Requests whose sampling is more than a temperature (filters,
penalties, bias, grammars, log-probabilities) have their rows sampled on the host, by the same code as on the CPU; their
drafts are guessed with the temperature alone, which costs agreement and never a token.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from faser.ngram import lookup
from faser.progress import Update
from faser.runtime.cuda.model import ROW_BUCKETS, CudaModel, Shape, first_draft, next_draft, verification
from faser.runtime.cuda.sampling import FIRST_TOKEN, Slots, inverse_temperature, judge, mixed_seed
from faser.runtime.sampling import Sampler
from faser.runtime.verifier import BROKEN
from faser.types import (
    Admission,
    IntArray,
    SamplingParams,
    StepPlan,
    StepResult,
    StepSeconds,
    TokenLogprobs,
)


class CudaExecutor:
    """`history` int64 [max_slots, max_len] is the host's copy of the tokens, for n-gram drafts and the host's sampler.

    `acceptance`, by position in the draft, accepts drafts with these probabilities whatever they say: for measuring.
    """

    def __init__(
        self,
        target: CudaModel,
        draft: CudaModel | None,
        slots: Slots,
        sampler: Sampler,
        history: IntArray,
        *,
        uses_ngrams: bool = False,
        max_length: int = 0,
        acceptance: torch.Tensor | None = None,
    ) -> None:
        self._target = target
        self._draft = draft
        self._slots = slots
        self._sampler = sampler
        self._history = history
        self._uses_ngrams = uses_ngrams
        self._acceptance = acceptance
        self._on_host = np.zeros(len(history), dtype=np.bool_)  # by slot: the host samples its rows
        width = FIRST_TOKEN + max_length + 1
        max_requests, device = target.requests.slots.shape[0], target.model.device
        self._packed = torch.zeros(max_requests, width, dtype=torch.int32, device=device)
        received = torch.zeros(max_requests, width, dtype=torch.int32)
        self._received = received.pin_memory() if device.type == "cuda" else received
        self._marks = _Marks(device)
        self._usual_rows = 1  # of a request that speculates: fewer take the same graphs, so that there are few of them

    @torch.inference_mode()
    def prepare(self, length: int, update: Update = lambda done, total: None) -> None:
        """Capture the graphs of steps that draft nothing and of those that draft up to `length` tokens."""
        max_requests = self._target.requests.slots.shape[0]
        sizes = [size for size in ROW_BUCKETS if size <= max_requests] or [ROW_BUCKETS[0]]
        wanted = [(self._target, verification(size, 1)) for size in sizes]
        if length and (self._draft is not None or self._uses_ngrams):
            self._usual_rows = length + 1
            most = min(max_requests * (length + 1), ROW_BUCKETS[-1])
            wanted += [(self._target, verification(size, length + 1)) for size in ROW_BUCKETS if 1 < size <= most]
            if self._draft is not None:
                wanted += [(self._draft, first_draft(size, size, 2)) for size in sizes]
                wanted += [(self._draft, next_draft(size)) for size in sizes if length > 1]
        for done, (model, shape) in enumerate(reversed(wanted)):  # the largest first: their buffers serve the others
            if shape is not None and model.has_graph_of(shape):
                model.capture(shape)
            update(done + 1, len(wanted))

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        for slot in plan.released:
            self._sampler.release(slot)
        self._admit(plan.admitted)
        self._target.apply(plan.target_pages)
        self._marks.start()
        num_drafted = self._make_drafts(plan)
        self._marks.drafted()
        num_verified = self._prune(plan, num_drafted)
        told = self._verify(plan, num_verified)
        size = plan.slots.size
        self._received[:size].copy_(self._packed[:size], non_blocking=True)
        seconds = self._marks.finish()
        return self._result(plan, num_drafted, num_verified, told, seconds)

    def close(self) -> None:
        """Nothing outlives the tensors and graphs."""

    # ── slots ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _admit(self, admitted: Iterable[Admission]) -> None:
        for new in admitted:
            size, device = new.token_ids.size, self._slots.history.device
            self._history[new.slot, :size] = new.token_ids
            tokens = torch.from_numpy(new.token_ids.astype(np.int32))
            self._slots.history[new.slot, :size].copy_(tokens.to(device), non_blocking=True)
            self._slots.seeds[new.slot] = mixed_seed(new.seed)
            self._slots.inverse_temperatures[new.slot] = inverse_temperature(new.params.temperature)
            self._sampler.admit(new.slot, new.params, new.seed, new.num_prompt, sorted(new.stop_ids))
            self._on_host[new.slot] = _needs_host(new.params, bool(new.stop_ids))

    # ── drafting ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _make_drafts(self, plan: StepPlan) -> IntArray:
        if self._uses_ngrams:
            return self._look_up(plan)
        if self._draft is None:
            return plan.lengths
        self._draft.apply(plan.draft_pages)
        if plan.draft_rows.any():
            self._run_draft(self._draft, plan)
        return plan.lengths

    def _run_draft(self, draft: CudaModel, plan: StepPlan) -> None:
        """Longest drafts first, so that those still drafting are always the first rows."""
        order = np.argsort(-plan.lengths, kind="stable")
        order = order[plan.draft_rows[order] > 0]
        rows, lengths = plan.draft_rows[order], plan.lengths[order]
        none = np.zeros_like(rows)
        draft.set_requests(plan.slots[order], plan.draft_start[order], rows, none, (lengths > 0).astype(np.int64))
        draft.set_lengths(lengths)
        shape = first_draft(rows.size, int(rows.sum()), int(rows.max()))
        _launch(draft, shape, rows, plan.draft_start[order], int((lengths > 0).sum()))
        for done in range(1, int(lengths.max())):
            draft.launch(next_draft(int((lengths > done).sum())))

    def _look_up(self, plan: StepPlan) -> IntArray:
        """Prompt lookup, on the host."""
        num_drafted = np.zeros_like(plan.lengths)
        for i in np.flatnonzero(plan.lengths).tolist():
            slot, num_tokens = int(plan.slots[i]), int(plan.num_tokens[i])
            found = lookup(self._history[slot, :num_tokens], int(plan.lengths[i]))
            if found.size:
                self._history[slot, num_tokens : num_tokens + found.size] = found
                drafts = torch.from_numpy(found.astype(np.int32)).to(self._slots.history.device)
                self._slots.history[slot, num_tokens : num_tokens + found.size] = drafts
            num_drafted[i] = found.size
        return num_drafted

    def _prune(self, plan: StepPlan, num_drafted: IntArray) -> IntArray:
        """Drop what breaks a grammar. The host's sampler must know the drafts of the requests it samples for."""
        if not (self._on_host[plan.slots] & (num_drafted > 0)).any():
            return num_drafted
        for i in np.flatnonzero(self._on_host[plan.slots] & (num_drafted > 0)).tolist():
            slot, first = int(plan.slots[i]), int(plan.num_tokens[i])
            drafted = slice(first, first + int(num_drafted[i]))
            self._history[slot, drafted] = self._slots.history[slot, drafted].cpu().numpy()
        return self._sampler.num_valid(plan.slots, plan.num_tokens, num_drafted)

    # ── verification ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _verify(self, plan: StepPlan, num_drafted: IntArray) -> _Told:
        target, samples = self._target, plan.samples
        target.set_requests(plan.slots, plan.start, plan.num_rows, num_drafted, samples.astype(np.int64))
        judged = np.where(samples, num_drafted + 1, 0)
        num_rows = plan.num_rows + num_drafted
        shape = None
        if num_rows.sum() == judged.sum():
            most = int(num_rows.max())
            shape = verification(int(num_rows.sum()), most if most == 1 else max(most, self._usual_rows))
        shape = _launch(target, shape, num_rows, plan.start, int(judged.sum()))
        told = self._sample_on_host(plan, judged, shape) if self._on_host[plan.slots[samples]].any() else _Told()
        requests = target.requests_of(shape)
        judge(
            target.choices, requests, target.rows.cu_wanted[: shape.num_requests + 1], self._slots,
            self._packed[: shape.num_requests], acceptance=self._acceptance,
        )  # fmt: skip
        return told

    def _sample_on_host(self, plan: StepPlan, judged: IntArray, shape: Shape) -> _Told:
        """The tokens of requests that need more than a temperature, put in place of those the device chose."""
        first = np.cumsum(judged) - judged
        asking = np.flatnonzero(self._on_host[plan.slots] & (judged > 0))
        owners = np.repeat(asking, judged[asking])
        rows = np.concatenate([np.arange(first[i], first[i] + judged[i]) for i in asking])
        offsets = rows - first[owners]
        slots, positions = plan.slots[owners], plan.num_tokens[owners] + offsets
        where = torch.from_numpy(rows).to(self._packed.device)
        logits = self._target.logits_of(shape, where).cpu()
        said = self._sampler.sample(logits, slots, positions)
        self._target.choices.tokens[where] = torch.from_numpy(said.astype(np.int32)).to(where.device)
        failed = [(int(owners[row]), int(offsets[row]), why) for row, why in self._sampler.failed_rows.items()]
        told = _Told(failed=failed)
        for owner, answer in zip(owners.tolist(), self._sampler.logprobs(logits, slots, said), strict=False):
            if answer is not None:
                told.logprobs.setdefault(owner, []).append(answer)
        return told

    def _result(
        self,
        plan: StepPlan,
        num_drafted: IntArray,
        num_verified: IntArray,
        told: _Told,
        seconds: StepSeconds,
    ) -> StepResult:
        packed = self._received[: plan.slots.size].numpy().astype(np.int64)
        samples = plan.samples
        num_accepted = np.where(samples, packed[:, 0], 0)
        emitted = np.where(samples, num_accepted + 1, 0)
        tokens = packed[:, FIRST_TOKEN:]
        owners = np.repeat(np.arange(emitted.size), emitted)
        offsets = np.arange(owners.size) - np.repeat(np.cumsum(emitted) - emitted, emitted)
        token_ids = tokens[owners, offsets]
        self._history[plan.slots[owners], plan.num_tokens[owners] + offsets] = token_ids
        failures = dict.fromkeys(np.flatnonzero(samples & (packed[:, 1] != 0)).tolist(), BROKEN)
        failures |= {owner: why for owner, offset, why in told.failed if offset < emitted[owner]}
        logprobs = {i: answers[: int(emitted[i])] for i, answers in told.logprobs.items()}
        return StepResult(num_drafted, num_verified, num_accepted, token_ids, logprobs, failures, seconds)


@dataclass
class _Told:
    """What the host's sampler has to say beside tokens."""

    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)  # by index in the plan
    failed: list[tuple[int, int, str]] = field(default_factory=list)  # index in the plan, row within it, why


def _launch(model: CudaModel, shape: Shape | None, num_rows: IntArray, start: IntArray, num_wanted: int) -> Shape:
    """A forward over so many rows a request: as the graph of a shape where there is one, else kernel by kernel."""
    if shape is not None and model.has_graph_of(shape):
        model.launch(shape)
        return shape
    shape = Shape(num_rows.size, int(num_rows.sum()), int(num_rows.max()), num_wanted)
    model.forward(shape, num_rows, start)
    return shape


def _needs_host(params: SamplingParams, has_stop_ids: bool) -> bool:
    """Whether a row's token is more than its best score, or its best score with noise."""
    filtered = params.temperature > 0 and (params.top_k > 0 or params.top_p < 1 or params.min_p > 0)
    adjusted = params.penalised or params.logit_bias is not None or (params.min_tokens > 0 and has_stop_ids)
    return filtered or adjusted or params.grammar is not None or params.logprobs is not None


class _Marks:
    """When drafting and verification ended on the device. Off a GPU nothing is measured."""

    def __init__(self, device: torch.device) -> None:
        make: Any = torch.cuda.Event
        self._events = [make(enable_timing=True) for _ in range(3)] if device.type == "cuda" else []

    def start(self) -> None:
        self._record(0)

    def drafted(self) -> None:
        self._record(1)

    def finish(self) -> StepSeconds:
        """Wait for the device."""
        if not self._events:
            return StepSeconds()
        self._record(2)
        self._events[2].synchronize()
        draft, verify = (self._events[i].elapsed_time(self._events[i + 1]) / 1e3 for i in (0, 1))
        return StepSeconds(draft, verify)

    def _record(self, index: int) -> None:
        if self._events:
            self._events[index].record()
