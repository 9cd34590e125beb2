"""The CUDA side of the seam: a plan becomes a few graph launches and one copy back.

Positions, tokens, drafts and verdicts stay on the device; the host fills in who runs and reads what came of it. Steps
whose requests all decode replay graphs, drafting included; so do steps with up to two thousand prompt rows, one graph
for the layers and one for the head; larger ones are enqueued kernel by kernel, which the host does faster than a GPU
computes so many rows. Requests whose sampling is more than a temperature (filters, penalties, bias, log-probabilities)
have the logits of their rows made once more, outside the graphs, and sampled anew from what the filters leave; those
with a grammar have their rows sampled on the host, by the same code as on the CPU. Drafts of either are guessed with
the temperature alone, which costs agreement and never a token.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from faser.arrays import NONE, FloatArray, IntArray
from faser.errors import ConfigError, EngineError
from faser.policy.base import MOST_LENGTH
from faser.policy.early_exit import Exiting, candidates_of
from faser.policy.overlap import BATCH_SIZES
from faser.policy.stopping import Stopping
from faser.progress import Update
from faser.request import TokenLogprobs
from faser.rules.overlap import OverlapPlan
from faser.runtime.cuda.compile import compile_all
from faser.runtime.cuda.filters import Filters, logprobs, unpack_logprobs
from faser.runtime.cuda.lanes import Lanes
from faser.runtime.cuda.memory import explained_shortage
from faser.runtime.cuda.model import PART_BUCKETS, ROW_BUCKETS, CudaModel, Shape, first_draft, next_draft, verification
from faser.runtime.cuda.sampling import (
    BROKEN as BROKEN_ROW,
)
from faser.runtime.cuda.sampling import (
    FIRST_TOKEN,
    HIT,
    NUM_ACCEPTED,
    Choices,
    Slots,
    inverse_temperature,
    judge,
    mixed_seed,
    sample,
)
from faser.runtime.cuda.transfer import send
from faser.runtime.ngram import NgramDrafter
from faser.runtime.sampling import BROKEN, Sampler
from faser.step import Admission, ExitReadings, Settling, StepPlan, StepResult, StepSeconds

FILTERED_LOGITS = 1 << 22  # logits filtered at a time: sorting them takes some 250 MB
PROMPT_ROWS = (8, 16, 32, 1 << 30)  # sizes of prompts that take kernels of their own
MAX_FLIGHTS = 2  # steps submitted and not collected
FEW_REQUESTS = BATCH_SIZES[-1]  # whose overlapping steps are captured ahead


class CudaExecutor:
    """`history` int64 [max_slots, max_len] is the host's copy of the tokens, for n-gram drafts and for grammars.

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
        ngrams: NgramDrafter | None = None,
        max_length: int = 0,
        acceptance: torch.Tensor | None = None,
        runs_ahead: bool = False,
        lanes: Lanes,
    ) -> None:
        self._target = target
        self._draft = draft
        self._slots = slots
        self._sampler = sampler
        self._history = history
        self._ngrams = ngrams
        self._acceptance = acceptance
        self._on_host = np.zeros(len(history), dtype=np.bool_)  # by slot: the host samples its rows
        width = FIRST_TOKEN + max_length + 1
        max_requests, device = target.requests.slots.shape[0], target.model.device
        vocab_size = target.model.head.shape[0]
        self._filters = Filters(len(history), vocab_size, device)
        most_rows = min(target.choices.tokens.shape[0], max(1, FILTERED_LOGITS // vocab_size))
        self._refined = Choices.allocate(most_rows, vocab_size, device)  # of filtered rows
        self._packed = torch.zeros(max_requests, width, dtype=torch.int32, device=device)
        self._landings = deque(_Landing(max_requests, width, device) for _ in range(MAX_FLIGHTS))
        self._glance = _Glance(max_requests, device)
        self._doubts = _Doubts(max_length, max_requests, device)
        self._lane = _Lane(device)
        self._lanes = lanes
        self._standing = _Glance(target.standing.numel(), device)
        self._flights: deque[_Flight] = deque()
        self._runs_ahead = runs_ahead
        self.ragged = True  # False, for measuring: every token of a draft costs as if everybody drafted it
        self._is_compiled = False
        self._usual_rows = 1  # of a request that speculates: fewer take the same graphs, so that there are few of them

    @torch.inference_mode()
    def prepare(self, length: int, update: Update = lambda done, total: None, exit_layers: Sequence[int] = ()) -> None:
        """Capture the graphs of steps that draft nothing and of those that draft up to `length` tokens.

        And of verifications of these that stop at one of the layers.
        """
        max_requests = self._target.requests.slots.shape[0]
        sizes = [size for size in ROW_BUCKETS if size <= max_requests] or [ROW_BUCKETS[0]]
        wanted = [(self._target, verification(size, 1)) for size in sizes]
        if length and (self._draft is not None or self._ngrams is not None):
            self._usual_rows = length + 1
            most = min(max_requests * (length + 1), ROW_BUCKETS[-1])
            wanted += [(self._target, verification(size, length + 1)) for size in ROW_BUCKETS if 1 < size <= most]
            if self._draft is not None:
                wanted += [(self._draft, first_draft(size, 2)) for size in sizes]
                wanted += [(self._draft, next_draft(size)) for size in sizes if length > 1]
        models = [self._target] + ([self._draft] if self._draft is not None and length else [])
        wanted += [(model, shape) for model in models for shape in model.mixed_shapes()]
        # the largest first: their buffers serve the others
        ready = [(each, shape) for each, shape in reversed(wanted) if shape is not None and each.has_graph_of(shape)]
        choosing = [(model, size) for model in models for size in reversed(sizes)]
        stopping = self._stopping_shapes(length) if exit_layers else []
        if not self._is_compiled:
            compile_all(self._dry_runs(ready, choosing, stopping, exit_layers))
            self._is_compiled = True
        captures = [partial(model.capture, shape) for model, shape in ready]
        captures += [partial(model.capture_choosing, size) for model, size in choosing]
        for shape in stopping:
            captures += [partial(self._target.capture_part, shape, *span) for span in self._spans(exit_layers)]
            captures += [partial(self._target.capture_look, shape, each) for each in self._candidates]
        for done, capture in enumerate(captures):
            capture()
            update(done + 1, len(captures))

    @torch.inference_mode()
    def prepare_overlap(self, splits: Collection[int], update: Update = lambda done, total: None) -> None:
        """Capture what steps of a few requests replay that draft beside a verification and may wait for leads."""
        draft = self._draft
        assert draft is not None
        few = [size for size in ROW_BUCKETS if size <= FEW_REQUESTS]
        depths = {self._usual_rows, max(self._usual_rows, MOST_LENGTH + 1)}  # rows of a request, by policy or lead
        shapes: list[tuple[CudaModel, Shape | None]] = []
        for split in sorted({0, *splits}):
            shapes += [(draft, _on_part(first_draft(size, 2), split)) for size in few]
            shapes += [(draft, _on_part(next_draft(size), split)) for size in few]
            part = self._lanes.num_sms - split if split else 0
            rows = [size for size in ROW_BUCKETS if 1 < size <= FEW_REQUESTS * max(depths)]
            all_ride = [(size, 1) for size in few]
            sizes = all_ride + [(size, depth) for depth in depths for size in rows]
            shapes += [(self._target, _on_part(verification(*size), part)) for size in sizes]
        found = dict.fromkeys(shapes)
        wanted = [(model, shape) for model, shape in found if shape is not None and model.has_graph_of(shape)]
        compile_all([partial(model.forward, shape) for model, shape in wanted])
        with explained_shortage(ConfigError):
            for done, (model, shape) in enumerate(reversed(wanted)):
                model.capture(shape)
                update(done + 1, len(wanted))

    def _stopping_shapes(self, length: int) -> list[Shape]:
        """Of verifications that may stop midway, the largest first."""
        max_requests = self._target.requests.slots.shape[0]
        most = min(max_requests * (length + 1), self._target.max_rows)
        shapes = [self._target.part_shape(size, self._usual_rows) for size in PART_BUCKETS if 1 < size <= most]
        return [shape for shape in reversed(shapes) if shape is not None]

    def _spans(self, exit_layers: Sequence[int]) -> list[tuple[int, int]]:
        """The parts of a verification that stops at one of the layers."""
        last = self._target.model.num_layers
        return [span for layer in exit_layers for span in ((0, layer), (layer, last))]

    @property
    def _candidates(self) -> tuple[int, ...]:
        return candidates_of(self._target.model.config.vocab_size)

    def _dry_runs(
        self,
        graphs: Sequence[tuple[CudaModel, Shape]],
        choosing: Sequence[tuple[CudaModel, int]],
        stopping: Sequence[Shape],
        exit_layers: Sequence[int],
    ) -> Iterator[Callable[[], None]]:
        """Everything that launches kernels, before anything has run."""
        for model, shape in graphs:
            yield partial(model.forward, shape)
        for model, size in choosing:
            yield partial(model.choose_wanted, size)
        for shape in stopping:
            for first, _ in self._spans(exit_layers):  # one layer has the kernels of all
                yield partial(self._target.forward_part, shape, first, first + 1)
            for candidates in self._candidates:
                yield partial(self._target.look, shape, candidates)
        for model in [self._target] + ([self._draft] if self._draft is not None else []):
            for rows in PROMPT_ROWS:
                num_rows = np.array([min(rows, model.max_rows)])
                shape = Shape(1, int(num_rows[0]), int(num_rows[0]), 1)
                yield partial(model.forward, shape, num_rows, np.zeros(1, dtype=np.int64))
        target = self._target
        for overlaps in (False, True):
            yield partial(
                judge, target.choices, target.requests, target.rows.cu_wanted, self._slots, self._packed,
                overlaps=overlaps, acceptance=self._acceptance,
            )  # fmt: skip

    def execute(self, plan: StepPlan) -> StepResult:
        self.submit(plan)
        return self.collect()

    def submit(self, plan: StepPlan) -> None:
        """Enqueue a step. The device runs steps in the order they are submitted in."""
        with torch.inference_mode(), explained_shortage(EngineError):
            self._submit(plan)

    def _submit(self, plan: StepPlan) -> None:
        self._finish_launch()
        for slot in plan.released:
            self._sampler.release(slot)
        self._admit(plan.admitted)
        self._target.apply(plan.target_pages)
        if self._draft is not None:
            self._draft.apply(plan.draft_pages)
        flight = _Flight(plan, self._landings.popleft(), plan)
        flight.rest = self._run(flight)
        self._flights.append(flight)
        next(flight.rest, None)

    def finish_launch(self) -> None:
        """Through with the step that waits for the host, whatever the host has to do before the next."""
        if self._flights and not self._flights[-1].is_launched:
            with torch.inference_mode(), explained_shortage(EngineError):
                self._finish_launch()

    def _finish_launch(self) -> None:
        if self._flights:
            for _ in self._flights[-1].rest:
                pass

    def _run(self, flight: _Flight) -> Iterator[None]:
        """Enqueue a step. Where the host must see something before it knows how to go on, it may do other things."""
        if _leads(flight.plan) and len(self._flights) > 1:
            yield  # until `collect` has settled it
        flight.num_drafted = flight.plan.lengths
        flight.landing.marks.start()
        if flight.plan.overlap is not None and flight.plan.overlap.beside:
            self._draft_lead(flight, flight.plan.overlap)
        else:
            drafting = self._begin_drafts(flight)
            if drafting is not None:
                yield
                self._draft_on(flight, drafting)
            flight.landing.marks.drafted()
        flight.num_verified = self._prune(flight.plan, flight.plan.judged_of(flight.num_drafted))
        exiting = None
        if flight.plan.exits is not None and flight.num_verified.any():
            exiting = Exiting(flight.plan.exits, flight.num_verified, int(flight.plan.num_rows.sum()))
            if flight.plan.exits.looks_before:
                yield
                self._exit_before(flight, exiting)
        yield from self._verify(flight, exiting)
        size = flight.plan.slots.size
        flight.landing.received[:size].copy_(self._packed[:size], non_blocking=True)
        flight.landing.marks.finished()
        flight.is_launched = True

    def _draft_lead(self, flight: _Flight, overlap: OverlapPlan) -> None:
        """Draft what is verified in this step, and leave the rest to the other lane."""
        flight.beside = self._draft_tokens(flight)
        for _ in range(int(overlap.lead.max(initial=0))):
            next(flight.beside, None)
        flight.landing.marks.forked()
        self._lane.fork()

    def _draft_beside(self, flight: _Flight) -> None:
        """The rest. It is launched behind the verification, which takes longer and should begin first."""
        with self._lane.switch():
            for _ in flight.beside:
                pass
            flight.landing.marks.drafted()

    def _draft_on(self, flight: _Flight, drafting: _Drafting) -> None:
        """Token by token, as long as the step's rule says so."""
        assert self._draft is not None
        while drafting.goes_on():
            self._draft.launch(next_draft(drafting.num_active))
            drafting.look(self._draft.choices.confidence)
        flight.num_drafted, flight.confidence = drafting.num_drafted, drafting.confidence

    def collect(self) -> StepResult:
        """What came of the oldest step that was submitted; waits for it."""
        if len(self._flights) == 1:
            self.finish_launch()
        flight = self._flights.popleft()
        marks = flight.landing.marks
        try:
            marks.wait()
            packed = flight.landing.received[: flight.plan.slots.size].numpy().astype(np.int64)
            verdict = self._verdict(flight, packed)
            if self._flights:  # the device may be waiting for this
                self._settle(self._flights[0], flight.settled, verdict)
            return self._result(flight, packed, replace(verdict, seconds=marks.seconds(flight.plan.drafts_beside)))
        finally:
            self._landings.append(flight.landing)

    def _settle(self, flight: _Flight, before: StepPlan, result: StepResult) -> None:
        """Now that it is known what came of the step before."""
        plan = flight.plan
        if plan.overlap is not None:
            settling = Settling.of(before, result).spread(before.slots, len(self._history))
            flight.settled = plan.settle(settling[plan.slots])
        if _leads(plan):
            flight.plan = flight.settled
            self.finish_launch()

    def may_run_ahead(self, plan: StepPlan) -> bool:
        """Not where the host must know tokens or positions before it goes on: to look up, for a grammar, to filter."""
        drafts = (plan.lengths > 0) | (plan.frontier > 0)
        needed = self._on_host[plan.slots] | (self._filters.is_special[plan.slots] & drafts)
        return self._runs_ahead and self._ngrams is None and not needed.any()

    def discard(self) -> None:
        """Forget what is in flight, when the device is done with it."""
        while self._flights:
            flight = self._flights.popleft()
            if flight.is_launched:
                flight.landing.marks.wait()
            else:  # the other lane may be at work
                self._lane.wait()
            self._landings.append(flight.landing)

    def forget_parts(self) -> None:
        """Give the parts of the device back, and what was captured on them."""
        for model in (self._target, self._draft):
            if model is not None:
                model.forget_parts()
        self._lanes.close()

    def close(self) -> None:
        """All but the parts of the device goes with the tensors and graphs."""
        self.discard()
        self.forget_parts()

    # ── slots ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _admit(self, admitted: Sequence[Admission]) -> None:
        if not admitted:
            return
        slots, device = self._slots, self._slots.history.device
        tokens = np.zeros((len(admitted), max(new.token_ids.size for new in admitted)), dtype=np.int32)
        for row, new in zip(tokens, admitted, strict=True):
            row[: new.token_ids.size] = new.token_ids
        who = send(np.array([new.slot for new in admitted]), device)
        slots.history[:, : tokens.shape[1]].index_copy_(0, who, send(tokens, device))
        seeds = np.array([mixed_seed(new.seed) for new in admitted])
        slots.seeds.index_copy_(0, who, send(seeds, device))
        temperatures = np.array([inverse_temperature(new.params.temperature) for new in admitted], dtype=np.float32)
        slots.inverse_temperatures.index_copy_(0, who, send(temperatures, device))
        for new in admitted:
            self._history[new.slot, : new.token_ids.size] = new.token_ids
            self._sampler.admit(new.slot, new.params, new.seed, new.num_prompt, sorted(new.stop_ids))
            self._filters.admit(new.slot, new.params, new.num_prompt, sorted(new.stop_ids))
            self._on_host[new.slot] = new.params.grammar is not None

    # ── drafting ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _begin_drafts(self, flight: _Flight) -> _Drafting | None:
        """Draft; or only the first token, where the plan has a rule by which to go on."""
        plan, tokens = flight.plan, self._draft_tokens(flight)
        order = next(tokens, None)
        if order is None or self._draft is None:
            return None
        if plan.stopping is not None and plan.lengths[order].any():
            drafting = _Drafting(plan, plan.stopping, order, self._glance)
            drafting.look(self._draft.choices.confidence)
            return drafting
        is_doubted = plan.exits is not None and plan.exits.looks_before
        if is_doubted:
            self._doubts.begin(order[plan.lengths[order] > 0], self._draft.choices.confidence)
        for done, _ in enumerate(tokens, 1):
            if is_doubted:
                self._doubts.note(order[plan.lengths[order] > done], self._draft.choices.confidence)
        return None

    def _draft_tokens(self, flight: _Flight) -> Iterator[IntArray]:
        """Launch the drafts of a step, token by token; each time, those who draft or catch up, by index in the plan.

        The longest come first, so that those still drafting are always the first rows.
        """
        plan, draft = flight.plan, self._draft
        if self._ngrams is not None:
            flight.num_drafted = self._look_up(self._ngrams, plan)
        if draft is None:
            return
        order = np.argsort(-plan.lengths, kind="stable")
        order = order[plan.draft_rows[order] > 0]
        if not order.size:
            return
        rows, lengths = plan.draft_rows[order], plan.lengths[order]
        none = np.zeros_like(rows)
        draft.set_requests(
            plan.slots[order], plan.draft_start[order], rows, none, lengths > 0, plan.unsettled[order], none,
            plan.frontier[order],
        )  # fmt: skip
        draft.set_lengths(lengths)
        overlap = plan.overlap
        lead, draft_sms = (int(overlap.lead.max(initial=0)), overlap.draft_sms) if overlap is not None else (0, 0)
        shape = _on_part(first_draft(rows.size, int(rows.max())), 0 if lead else draft_sms)
        _launch(draft, shape, rows, plan.draft_start[order], int((lengths > 0).sum()))
        yield order
        done = 1
        while done < lengths.max():
            shape = next_draft(int((lengths > done).sum()) if self.ragged else lengths.size)
            draft.launch(replace(shape, num_sms=0 if done < lead else draft_sms))
            done += 1
            yield order

    def _look_up(self, ngrams: NgramDrafter, plan: StepPlan) -> IntArray:
        """Prompt lookup on the host, and its finds to the device."""
        num_drafted = ngrams.draft(plan).num_tokens
        for i in np.flatnonzero(num_drafted).tolist():
            slot, first = int(plan.slots[i]), int(plan.num_tokens[i])
            drafted = slice(first, first + int(num_drafted[i]))
            found = self._history[slot, drafted].astype(np.int32)
            self._slots.history[slot, drafted] = torch.from_numpy(found).to(self._slots.history.device)
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

    def _verify(self, flight: _Flight, exiting: Exiting | None) -> Iterator[None]:
        plan, target, num_drafted = flight.plan, self._target, flight.num_verified
        self._set_target_requests(plan, num_drafted)
        shape = yield from self._exit(flight, exiting)
        judged = np.where(plan.samples, flight.num_verified + 1, 0)
        if shape is None:
            shape = self._verification(plan, num_drafted)
            shape = _launch(target, shape, plan.num_rows + num_drafted, plan.start, int(judged.sum()))
        flight.landing.marks.verified()
        if plan.drafts_beside:
            self._draft_beside(flight)
        flight.told = self._refine(plan, judged, shape)
        requests = target.requests_of(shape)
        if plan.drafts_beside:
            self._lane.join()
        judge(
            target.choices, requests, target.rows.cu_wanted[: shape.num_requests + 1], self._slots,
            self._packed[: shape.num_requests], overlaps=plan.drafts_beside, acceptance=self._acceptance,
        )  # fmt: skip

    def _set_target_requests(self, plan: StepPlan, num_drafted: IntArray) -> None:
        self._target.set_requests(
            plan.slots, plan.start, plan.num_rows, num_drafted, plan.samples, plan.unsettled, plan.judged, plan.frontier
        )

    def _verification(self, plan: StepPlan, num_drafted: IntArray) -> Shape | None:
        """The graph of a step in which all requests decode."""
        if not plan.only_decodes:
            return None
        num_rows = plan.num_rows + num_drafted
        most = int(num_rows.max())
        shape = verification(int(num_rows.sum()), most if most == 1 else max(most, self._usual_rows))
        draft_sms = plan.overlap.draft_sms if plan.overlap is not None else 0
        shape = _on_part(shape, self._lanes.num_sms - draft_sms if draft_sms else 0)
        return shape if shape is not None and self._target.has_graph_of(shape) else None

    def _exit_before(self, flight: _Flight, exiting: Exiting) -> None:
        """Drop drafts by what the draft model thought of them."""
        doubts = flight.confidence
        if doubts is None:
            doubts = self._doubts.take(flight.num_drafted) if self._draft is not None else None
        sure = doubts[exiting.owner, exiting.place] if doubts is not None else np.full(exiting.owner.size, np.nan)
        none = np.zeros(exiting.owner.size)
        exiting.take(none.astype(np.int64), none, sure)
        flight.num_verified = exiting.left

    def _exit(self, flight: _Flight, exiting: Exiting | None) -> Generator[None, None, Shape | None]:
        """The verification in parts, with fewer drafts after each; the shape of the last. None: it is not cut.

        A step with prompts is not, nor is one that has more rows than there are graphs for.
        """
        plan, target, done = flight.plan, self._target, 0
        if exiting is None or plan.exits is None:
            return None
        shape = self._part_shape(plan, exiting.left)
        for point in plan.exits.points:
            if not point.layer:
                continue
            if shape is None or not exiting.left.any():
                exiting.skip()
                continue
            where = exiting.rows_before(exiting.left + 1)
            target.launch_part(shape, done, point.layer)
            target.launch_look(shape, point.candidates)
            done = point.layer
            self._standing.request(target.standing.view(-1))
            yield
            standing = self._standing.take(target.standing.numel()).reshape(target.standing.shape)
            rank, best, own, sure = standing[:, where].astype(np.float64)
            exiting.take(rank.astype(np.int64), best - own, sure)
            target.set_drafted(exiting.left)
            shape = self._part_shape(plan, exiting.left)
        flight.num_verified, flight.exits = exiting.left, exiting.readings
        if not done:
            return None
        assert shape is not None
        target.launch_part(shape, done, target.model.num_layers)
        return shape

    def _part_shape(self, plan: StepPlan, num_drafted: IntArray) -> Shape | None:
        if not plan.only_decodes:
            return None
        num_rows = plan.num_rows + num_drafted
        return self._target.part_shape(int(num_rows.sum()), max(int(num_rows.max()), self._usual_rows))

    def _refine(self, plan: StepPlan, judged: IntArray, shape: Shape) -> _Told:
        """The tokens of requests that need more than a temperature, in place of those the forward chose."""
        on_host = self._on_host[plan.slots]
        special = self._filters.is_special[plan.slots] & ~on_host
        told = _Told()
        if (on_host & (judged > 0)).any():
            self._sample_on_host(_Judged.of(plan, judged, on_host), shape, told)
        if (special & (judged > 0)).any():
            self._sample_filtered(_Judged.of(plan, judged, special), shape, told)
        return told

    def _sample_on_host(self, rows: _Judged, shape: Shape, told: _Told) -> None:
        where = self._places(rows)
        logits = self._target.logits_of(shape, where).cpu()
        said = self._sampler.sample(logits, rows.slots, rows.positions)
        self._target.choices.tokens[where] = torch.from_numpy(said.astype(np.int32)).to(where.device)
        for row, why in self._sampler.failed_rows.items():
            told.failed.append((int(rows.owners[row]), int(rows.offsets[row]), why))
        answers = self._sampler.logprobs(logits, rows.slots, said)
        for owner, answer in zip(rows.owners.tolist(), answers, strict=False):
            if answer is not None:
                told.logprobs.setdefault(owner, []).append(answer)

    def _places(self, rows: _Judged) -> torch.Tensor:
        """Where they are among the wanted rows [S]: fewer may lie before them than the host thinks (`settle`)."""
        owners, offsets = send(np.stack([rows.owners, rows.offsets]), self._packed.device)
        return self._target.rows.cu_wanted[owners] + offsets

    def _sample_filtered(self, rows: _Judged, shape: Shape, told: _Told) -> None:
        """Rows to be filtered come first and rows whose log-probabilities are asked for last: each lie side by side."""
        changed = self._filters.changes(rows.slots, rows.positions)
        counts = self._filters.num_logprobs[rows.slots]
        order = np.argsort(np.where(changed, counts >= 0, 2), kind="stable")
        order = order[(changed | (counts >= 0))[order]]
        num_best, size = int(counts.max()), self._refined.tokens.shape[0]
        for first in range(0, order.size, size):
            some = order[first : first + size]
            where = self._places(rows[some])
            logits = self._target.logits_of(shape, where)
            num_changed, asking = int(changed[some].sum()), some[counts[some] >= 0]
            if num_changed:
                self._choose_filtered(rows[some[:num_changed]], logits[:num_changed], where[:num_changed])
            if asking.size:
                chosen = self._target.choices.tokens[where[-asking.size :]]
                packed = logprobs(logits[-asking.size :], chosen, num_best).to("cpu", non_blocking=True)
                told.asked.append(_Asked(rows[asking], counts[asking], packed))

    def _choose_filtered(self, rows: _Judged, logits: torch.Tensor, where: torch.Tensor) -> None:
        """Whether a row is broken the forward has already said, of its own logits."""
        logits = self._filters.apply(logits, rows.slots, rows.positions, self._slots.history)
        # [2, S]
        who = send(np.stack([rows.slots, rows.positions]).astype(np.int32), logits.device)
        count = torch.full((1,), rows.slots.size, dtype=torch.int32, device=logits.device)
        sample(logits, who[0], who[1], count, self._slots, self._refined)
        self._target.choices.tokens[where] = self._refined.tokens[: rows.slots.size]

    def _verdict(self, flight: _Flight, packed: IntArray) -> StepResult:
        """What came of a step but for its tokens; packed [B, FIRST_TOKEN + W]."""
        plan, samples, hits = flight.plan, flight.plan.samples, None
        if plan.overlap is not None and plan.overlap.beside:
            goes_on = (plan.overlap.chunk_of(flight.num_drafted) > 0) & (flight.num_verified == plan.judged)
            hits = samples & goes_on & (packed[:, HIT] == 1)
        # of frontiers that were void there was nothing to verify
        num_verified = np.minimum(flight.num_verified, flight.settled.judged_of(flight.num_drafted))
        num_accepted = np.where(samples, packed[:, NUM_ACCEPTED], 0)
        return StepResult(flight.num_drafted, num_verified, num_accepted, NONE, hits=hits)

    def _result(self, flight: _Flight, packed: IntArray, verdict: StepResult) -> StepResult:
        plan, told, samples = flight.plan, flight.told, flight.plan.samples
        emitted = np.where(samples, verdict.num_accepted + 1, 0)
        tokens = packed[:, FIRST_TOKEN:]
        owners = np.repeat(np.arange(emitted.size), emitted)
        offsets = np.arange(owners.size) - np.repeat(np.cumsum(emitted) - emitted, emitted)
        token_ids = tokens[owners, offsets]
        self._remember(plan, owners, offsets, token_ids)
        failures = dict.fromkeys(np.flatnonzero(samples & (packed[:, BROKEN_ROW] != 0)).tolist(), BROKEN)
        failures |= {owner: why for owner, offset, why in told.failed if offset < emitted[owner]}
        answers = {i: some[: int(emitted[i])] for i, some in told.all_logprobs().items()}
        return replace(
            verdict, token_ids=token_ids, logprobs=answers, failures=failures, confidence=flight.confidence,
            exits=flight.exits,
        )  # fmt: skip

    def _remember(self, plan: StepPlan, owners: IntArray, offsets: IntArray, token_ids: IntArray) -> None:
        """Keep the tokens the host needs: of requests that are never unsettled, since no plan runs ahead of theirs."""
        if self._ngrams is None:
            kept = self._on_host[plan.slots[owners]]
            owners, offsets, token_ids = owners[kept], offsets[kept], token_ids[kept]
        self._history[plan.slots[owners], plan.num_tokens[owners] + offsets] = token_ids


@dataclass(frozen=True)
class _Judged:
    """Some of the rows judged in a step: arrays [S]."""

    owners: IntArray  # index in the plan
    offsets: IntArray  # row within its owner
    places: IntArray  # row among all that are judged, if none is void
    slots: IntArray
    positions: IntArray

    @classmethod
    def of(cls, plan: StepPlan, judged: IntArray, wanted: NDArray[np.bool_]) -> _Judged:
        """The rows of the wanted requests, of which `judged` [B] are judged each."""
        owners = np.repeat(np.arange(judged.size), judged)
        places = np.flatnonzero(wanted[owners])
        owners = owners[places]
        offsets = places - (np.cumsum(judged) - judged)[owners]
        return cls(owners, offsets, places, plan.slots[owners], plan.num_tokens[owners] + offsets)

    def __getitem__(self, some: IntArray) -> _Judged:
        return _Judged(*(getattr(self, each.name)[some] for each in fields(self)))


@dataclass(frozen=True)
class _Asked:
    """Log-probabilities on their way to the host: there when the step is."""

    rows: _Judged
    counts: IntArray  # [S] how many of the most likely tokens each asked for
    packed: torch.Tensor


@dataclass
class _Told:
    """What there is to say of a step beside tokens."""

    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)  # by index in the plan
    failed: list[tuple[int, int, str]] = field(default_factory=list)  # index in the plan, row within it, why
    asked: list[_Asked] = field(default_factory=list)

    def all_logprobs(self) -> dict[int, list[TokenLogprobs]]:
        """By index in the plan, in the order of the rows. The device must be done."""
        found = dict(self.logprobs)
        answers = [
            (place, owner, answer)
            for each in self.asked
            for place, owner, answer in zip(
                each.rows.places.tolist(),
                each.rows.owners.tolist(),
                unpack_logprobs(each.packed.numpy(), each.counts),
                strict=True,
            )
        ]
        for _, owner, answer in sorted(answers, key=lambda item: item[0]):
            found.setdefault(owner, []).append(answer)
        return found


def _launch(model: CudaModel, shape: Shape | None, num_rows: IntArray, start: IntArray, num_wanted: int) -> Shape:
    """A forward over so many rows a request: as the graph of a shape where there is one, else kernel by kernel."""
    if shape is not None and model.has_graph_of(shape):
        model.launch(shape)
        return shape
    mixed = model.launch_mixed(num_rows, start, num_wanted)
    if mixed is not None:
        return mixed
    shape = Shape(num_rows.size, int(num_rows.sum()), int(num_rows.max()), num_wanted)
    model.forward(shape, num_rows, start)
    return shape


def _on_part(shape: Shape | None, num_sms: int) -> Shape | None:
    return None if shape is None else replace(shape, num_sms=num_sms)


def _leads(plan: StepPlan) -> bool:
    """Whether the step must know who missed in the step before."""
    return plan.overlap is not None and plan.overlap.leads


class _Marks:
    """When parts of a step ended on the device. Off a GPU nothing is measured, and nothing waited for."""

    def __init__(self, device: torch.device) -> None:
        make: Any = torch.cuda.Event
        self._events = [make(enable_timing=True) for _ in range(5)] if device.type == "cuda" else []

    def start(self) -> None:
        self._record(0)

    def forked(self) -> None:
        """Verification begins, while drafting goes on."""
        self._record(1)

    def drafted(self) -> None:
        self._record(2)

    def verified(self) -> None:
        self._record(3)

    def finished(self) -> None:
        self._record(4)

    def wait(self) -> None:
        """Until the device is through with the step."""
        if self._events:
            self._events[4].synchronize()

    def seconds(self, overlaps: bool) -> StepSeconds:
        """Of a step that has been waited for."""
        if not self._events:
            return StepSeconds()
        if not overlaps:
            return StepSeconds(self._between(0, 2), self._between(2, 4))
        draft, verify = self._between(0, 2), self._between(1, 3)
        return StepSeconds(draft, verify, draft + verify - self._between(0, 4))

    def _between(self, first: int, last: int) -> float:
        return float(self._events[first].elapsed_time(self._events[last])) / 1e3

    def _record(self, index: int) -> None:
        if self._events:
            self._events[index].record()


class _Lane:
    """A stream beside the current one. Off a GPU there is none, and what is forked runs at once."""

    def __init__(self, device: torch.device) -> None:
        make: Any = torch.cuda.Stream
        self._stream = make(device) if device.type == "cuda" else None

    def fork(self) -> None:
        """It runs beside what the current stream gets from here on, and behind what that has."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())

    @contextmanager
    def switch(self) -> Iterator[None]:
        """What is enqueued inside is enqueued on it."""
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            yield

    def wait(self) -> None:
        """Until all of it is done."""
        if self._stream is not None:
            self._stream.synchronize()

    def join(self) -> None:
        """What the current stream gets from here on runs behind all of it."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)


class _Landing:
    """Where the results of a step arrive: each step in flight has its own."""

    def __init__(self, max_requests: int, width: int, device: torch.device) -> None:
        received = torch.zeros(max_requests, width, dtype=torch.int32)
        self.received = received.pin_memory() if device.type == "cuda" else received
        self.marks = _Marks(device)


class _Glance:
    """A few numbers of the device, seen at once: the host waits until they are there."""

    def __init__(self, size: int, device: torch.device) -> None:
        memory = torch.zeros(size, dtype=torch.float32)
        self._memory = memory.pin_memory() if device.type == "cuda" else memory
        self._values = self._memory.numpy()
        make: Any = torch.cuda.Event
        self._event = make() if device.type == "cuda" else None

    def request(self, values: torch.Tensor) -> None:
        """Ask for them behind everything that was launched so far."""
        self._memory[: values.shape[0]].copy_(values, non_blocking=True)
        if self._event is not None:
            self._event.record()

    def take(self, size: int) -> NDArray[np.float32]:
        """The first so many, until they are asked for again."""
        if self._event is not None:
            self._event.synchronize()
        values: NDArray[np.float32] = self._values[:size]
        return values


class _Doubts:
    """How sure the draft model is of every token of a step's drafts, for the host to see when they are made."""

    def __init__(self, max_length: int, max_requests: int, device: torch.device) -> None:
        memory = torch.zeros(max(1, max_length), max_requests, dtype=torch.float32)
        self._memory = memory.pin_memory() if device.type == "cuda" else memory
        make: Any = torch.cuda.Event
        self._event = make() if device.type == "cuda" else None
        self._requests: list[IntArray] = []  # by index in the plan, of each token

    def begin(self, requests: IntArray, confidence: torch.Tensor) -> None:
        """The first token of these requests has been launched."""
        self._requests.clear()
        self.note(requests, confidence)

    def note(self, requests: IntArray, confidence: torch.Tensor) -> None:
        self._memory[len(self._requests), : requests.size].copy_(confidence[: requests.size], non_blocking=True)
        self._requests.append(requests)
        if self._event is not None:
            self._event.record()

    def take(self, num_drafted: IntArray) -> FloatArray:
        """[B, depth]; waits until they are there."""
        if self._event is not None:
            self._event.synchronize()
        found = np.full((num_drafted.size, max(1, len(self._requests))), np.nan)
        for done, requests in enumerate(self._requests):
            found[requests, done] = self._memory[done, : requests.size].numpy()
        return found


class _Drafting:
    """A draft that is being made token by token."""

    def __init__(self, plan: StepPlan, stopping: Stopping, order: IntArray, glance: _Glance) -> None:
        self._lengths = plan.lengths
        self._requests = order  # by index in the plan, the longest first
        self._depth = stopping.rates.shape[1]
        # how many of them draft a token, by the tokens before it
        self._num_active = [int((plan.lengths[order] > done).sum()) for done in range(self._depth)] + [0]
        self._watch = stopping.watch(order)
        self._glance = glance
        self._seen: list[list[float]] = []  # the confidence of each token

    @property
    def num_active(self) -> int:
        """Requests whose draft goes on."""
        return self._num_active[len(self._seen)]

    @property
    def num_drafted(self) -> IntArray:
        """[B]"""
        return np.minimum(self._lengths, len(self._seen))

    @property
    def confidence(self) -> FloatArray:
        """[B, depth]"""
        found = np.full((self._lengths.size, self._depth), np.nan)
        for done, seen in enumerate(self._seen):
            found[self._requests[: len(seen)], done] = seen
        return found

    def look(self, confidence: torch.Tensor) -> None:
        """Another token has been launched for all that go on."""
        self._glance.request(confidence[: self.num_active])

    def goes_on(self) -> bool:
        """Whether to launch another, now that the latest is there."""
        self._seen.append(self._glance.take(self.num_active).tolist())
        going = self.num_active
        return going > 0 and self._watch.goes_on(self._seen[-1][:going])


@dataclass
class _Flight:
    """A step that was submitted and not collected."""

    plan: StepPlan  # as it runs
    landing: _Landing
    settled: StepPlan  # as it stood when it ran, or on the device
    num_drafted: IntArray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    num_verified: IntArray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    confidence: FloatArray | None = None
    exits: ExitReadings | None = None
    rest: Iterator[None] = field(default_factory=lambda: iter(()))  # of what the host has to do for it
    beside: Iterator[IntArray] = field(default_factory=lambda: iter(()))  # tokens to be drafted on the other lane
    is_launched: bool = False  # and there is none
    told: _Told = field(default_factory=lambda: _Told())
