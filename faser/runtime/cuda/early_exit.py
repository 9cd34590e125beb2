"""Steps that drop drafts during their verification, by a rule that travels with the plan (faser/policy/early_exit.py).

Knows the target's layers and how to stop between two of them. An ordinary step does not come here. A verification runs
in parts: graphs of some layers, and behind each part a graph that ranks the drafts among the tokens the layer would
choose. The host reads the ranks, drops drafts, and the next part takes over the rows that are left.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial

import numpy as np
import torch

from faser.arrays import IntArray
from faser.errors import ConfigError
from faser.progress import Update
from faser.rules.early_exit import Exiting, ExitRule, candidates_of
from faser.runtime.cuda import linear
from faser.runtime.cuda.compile import compile_all
from faser.runtime.cuda.confidence import DraftConfidence, Readback
from faser.runtime.cuda.drafter import CudaDrafter
from faser.runtime.cuda.launched import LaunchedStep
from faser.runtime.cuda.memory import explained_shortage
from faser.runtime.cuda.model import HEAD_ROWS, CudaModel
from faser.runtime.cuda.ranks import NUM_RANK_ROWS, rank_drafts
from faser.runtime.cuda.rows import expand, regather, settle
from faser.runtime.cuda.shapes import MIXED_BUCKETS, ROW_BUCKETS, Shape, verification
from faser.runtime.cuda.transfer import send
from faser.runtime.cuda.verifier import CudaVerifier
from faser.step import StepPlan

# Rows of a verification that may stop between layers.
PART_BUCKETS = ROW_BUCKETS + tuple(size for size in MIXED_BUCKETS if size > ROW_BUCKETS[-1])


class CudaEarlyExit:
    """Runs steps whose plan has a rule to exit by."""

    def __init__(self, drafter: CudaDrafter, verifier: CudaVerifier, confidence: DraftConfidence) -> None:
        self._drafter = drafter
        self._verifier = verifier
        self._confidence = confidence
        self.parts = TargetParts(verifier.target)
        self._ranks = Readback(1, self.parts.ranks.numel(), verifier.target.model.device)

    def run(self, step: LaunchedStep) -> Iterator[None]:
        """Enqueue a step."""
        plan, rule = step.plan, step.plan.exits
        assert rule is not None
        step.events.started()
        yield from self._draft(step, rule)
        step.events.drafted()
        step.num_verified = self._verifier.resampler.prune(plan, step.num_drafted)
        exiting = None
        if step.num_verified.any():
            exiting = Exiting(rule, step.num_verified, int(plan.num_rows.sum()))
            if rule.needs_confidence:
                yield
                self._drop_before(step, exiting)
        self._verifier.set_requests(plan, step.num_verified)
        shape = (yield from self._launch_parts(step, rule, exiting)) if exiting is not None else None
        if shape is None:
            shape = self._verifier.launch_requests(plan, step.num_verified)
        step.events.verified()
        self._verifier.resample(step, shape)
        self._verifier.judge(shape)

    def _draft(self, step: LaunchedStep, rule: ExitRule) -> Iterator[None]:
        draft = self._drafter.begin(step.plan)
        if step.plan.stopping is not None:
            yield from self._confidence.draft_by_rule(step, step.plan.stopping, draft)
        elif rule.needs_confidence:
            self._confidence.draft_all(step, draft)
        else:
            while draft.extend():
                pass
            step.num_drafted = draft.num_tokens

    def _drop_before(self, step: LaunchedStep, exiting: Exiting) -> None:
        """Before the first layer: drop drafts by the draft model's confidence. Prompt lookup has none: NaN."""
        confidence = step.confidence
        if confidence is None:
            depth = int(step.num_drafted.max())
            confidence = self._confidence.values(step.num_drafted.size, depth)
        none = np.zeros(exiting.owner.size)
        exiting.take(none.astype(np.int64), none, confidence[exiting.owner, exiting.place])
        step.num_verified = exiting.left

    def _launch_parts(
        self, step: LaunchedStep, rule: ExitRule, exiting: Exiting
    ) -> Generator[None, None, Shape | None]:
        """The verification in parts, with fewer drafts behind each; the shape of the last part.

        None: it is not cut, because the step has prompts or more rows than the graphs.
        """
        plan, parts, done = step.plan, self.parts, 0
        shape = self._part_shape(plan, exiting.left)
        for point in rule.points:
            if not point.layer:
                continue
            if shape is None or not exiting.left.any():
                exiting.skip()
                continue
            judging = exiting.rows_before(exiting.left + 1)
            parts.launch(shape, done, point.layer)
            parts.launch_ranks(shape, point.candidates)
            done = point.layer
            self._ranks.request(parts.ranks.view(-1))
            yield
            ranks = self._ranks.take().reshape(parts.ranks.shape)
            rank, best, own, confidence = ranks[:, judging].astype(np.float64)
            exiting.take(rank.astype(np.int64), best - own, confidence)
            parts.set_drafted(exiting.left)
            shape = self._part_shape(plan, exiting.left)
        step.num_verified, step.exits = exiting.left, exiting.readings
        if not done:
            return None
        assert shape is not None
        parts.launch(shape, done, parts.num_layers)
        return shape

    def _part_shape(self, plan: StepPlan, num_drafted: IntArray) -> Shape | None:
        if not plan.only_decodes:
            return None
        num_rows = plan.num_rows + num_drafted
        return self.parts.shape(int(num_rows.sum()), max(int(num_rows.max()), self._verifier.usual_rows))

    # ── graphs ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def prepare(self, layers: Sequence[int], update: Update = lambda done, total: None) -> None:
        """Capture the graphs of verifications that stop behind one of the layers."""
        shapes, parts = self._exit_shapes(), self.parts
        candidates = candidates_of(parts.vocab_size)
        spans = [span for layer in layers for span in ((0, layer), (layer, parts.num_layers))]
        compile_all(
            [partial(parts.forward, shape, first, first + 1) for shape in shapes for first, _ in spans]  # one for all
            + [partial(parts.rank, shape, each) for shape in shapes for each in candidates]
        )
        captures = [partial(parts.capture, shape, *span) for shape in shapes for span in spans]
        captures += [partial(parts.capture_ranks, shape, each) for shape in shapes for each in candidates]
        with explained_shortage(ConfigError):
            for done, capture in enumerate(captures):
                capture()
                update(done + 1, len(captures))

    def _exit_shapes(self) -> list[Shape]:
        """The largest first: their buffers serve the others."""
        target = self._verifier.target
        most = min(target.requests.slots.shape[0] * self._verifier.usual_rows, target.max_rows)
        sizes = [size for size in PART_BUCKETS if 1 < size <= most]
        shapes = [self.parts.shape(size, self._verifier.usual_rows) for size in sizes]
        return [shape for shape in reversed(shapes) if shape is not None]

    def forget(self) -> None:
        """Give up all graphs."""
        self.parts.forget()


class TargetParts:
    """The target's forward in parts: some layers at a time, and the ranks of the drafts behind them."""

    def __init__(self, target: CudaModel) -> None:
        device = target.model.device
        self.max_rows = min(target.max_rows, PART_BUCKETS[-1])
        self.ranks = torch.zeros(NUM_RANK_ROWS, self.max_rows, dtype=torch.float32, device=device)
        self._target = target
        self._index = torch.zeros(target.max_rows, dtype=torch.int32, device=device)
        self._cu_rows_before = torch.zeros_like(target.rows.cu_rows)
        self._layers: dict[tuple[Shape, int, int], Callable[[], None]] = {}  # graphs
        self._rankings: dict[tuple[Shape, int], Callable[[], None]] = {}  # graphs, by number of candidates

    @property
    def num_layers(self) -> int:
        return self._target.model.num_layers

    @property
    def vocab_size(self) -> int:
        return self._target.model.config.vocab_size

    def shape(self, num_rows: int, rows_per_request: int) -> Shape | None:
        """The graphs of a verification of num_rows rows; None if no graphs are large enough."""
        shape = verification(num_rows, rows_per_request, PART_BUCKETS)
        if shape is None or shape.num_rows > self.max_rows or not self._target.has_graph_of(shape):
            return None
        return shape

    def set_drafted(self, num_drafted: IntArray) -> None:
        """Fewer drafts of the requests that were set last. The first part has settled everything else."""
        target = self._target
        target.requests.num_drafted[: num_drafted.size].copy_(send(num_drafted.astype(np.int32), target.model.device))

    def launch(self, shape: Shape, first: int, last: int) -> None:
        """Replay the graph of layers first to last - 1; capture it first if need be.

        The first part lays the rows out. A later part comes behind `launch_ranks` and takes over the rows that are left
        by `set_drafted`. Behind the last layer tokens are chosen.
        """
        self.capture(shape, first, last)
        self._layers[shape, first, last]()

    def capture(self, shape: Shape, first: int, last: int) -> None:
        if (shape, first, last) not in self._layers:
            self._layers[shape, first, last] = self._capture(lambda: self.forward(shape, first, last))

    def forward(self, shape: Shape, first: int, last: int) -> None:
        target, model = self._target, self._target.model
        requests, rows = target.requests_of(shape), target.rows_of(shape)
        hidden, size = target.hidden[: shape.num_rows], shape.num_requests
        if not first:
            settle(requests, target.slots.refused, target.slots.missed)
        expand(requests, target.slots.history, rows, vocab_size=self.vocab_size)
        if first:
            index = self._index[: shape.num_rows]
            regather(requests, self._cu_rows_before[: size + 1], rows, index)
            torch.index_select(target.normed, 0, index, out=hidden)
        else:
            torch.index_select(model.embedding, 0, rows.token_ids, out=hidden)
        target.run_layers(shape, rows, target.tiling.whole(shape, requests, rows), range(first, last))
        if last == model.num_layers:
            target.choose(shape, rows, hidden)

    def launch_ranks(self, shape: Shape, candidates: int) -> None:
        """Behind a part: the ranks of its drafts among the first `candidates` tokens (0: all), into `ranks`."""
        self.capture_ranks(shape, candidates)
        self._rankings[shape, candidates]()

    def capture_ranks(self, shape: Shape, candidates: int) -> None:
        if (shape, candidates) not in self._rankings:
            self._rankings[shape, candidates] = self._capture(lambda: self.rank(shape, candidates))

    def rank(self, shape: Shape, candidates: int) -> None:
        """The head on the rows of a part, and the ranks by it. The rows are left in `normed` for the next part."""
        target, model = self._target, self._target.model
        rows, hidden = target.rows_of(shape), target.hidden[: shape.num_rows]
        norm, eps = model.final_norm, model.config.norm_eps
        head = model.head[: candidates or None]
        memory = target.logits.view(-1)
        for first in range(0, shape.num_rows, HEAD_ROWS):
            some = hidden[first : first + HEAD_ROWS]
            logits = memory[: some.shape[0] * head.shape[0]].view(-1, head.shape[0])
            linear.norm_head(some, norm, eps, head, logits, target.normed[: some.shape[0]])
            rank_drafts(
                logits, first, rows.slots, rows.positions, rows.token_ids, rows.num_rows, target.slots, self.ranks,
                hidden, norm, eps, model.head,
            )  # fmt: skip
        target.normed[: shape.num_rows].copy_(hidden)
        self._cu_rows_before[: shape.num_requests + 1].copy_(rows.cu_rows)

    def forget(self) -> None:
        self._layers.clear()
        self._rankings.clear()

    def _capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """A graph may be captured between two parts of a step, and must not disturb the rows of the part before it."""
        target = self._target
        return target.capture_idle(run, kept=(self._cu_rows_before, self.ranks, target.normed, target.rows.cu_rows))
