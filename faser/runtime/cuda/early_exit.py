"""Steps that drop drafts during their verification, by a rule that travels with the plan (faser/rules/early_exit.py).

Knows the target's layers and how to stop between two of them. An ordinary step does not come here. A verification runs
in parts: graphs of some layers, and behind each part a graph that ranks the drafts among the tokens the layer would
choose. The host reads the ranks, drops drafts, and the next part takes over the rows that are left.
"""

# mypy: disable-error-code="import-untyped, import-not-found, untyped-decorator, no-untyped-def"
from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial

import numpy as np
import torch
import triton
import triton.language as tl

from faser.arrays import IntArray
from faser.errors import ConfigError
from faser.models.quantised.matrix import plain
from faser.progress import Update
from faser.rules.early_exit import Exiting, ExitRule, candidates_of
from faser.runtime.cuda import linear
from faser.runtime.cuda.compile import compile_all
from faser.runtime.cuda.confidence import DraftConfidence, Readback
from faser.runtime.cuda.drafter import CudaDrafter
from faser.runtime.cuda.graphs import MIXED_BUCKETS, ROW_BUCKETS, Shape, verification
from faser.runtime.cuda.launched import LaunchedStep
from faser.runtime.cuda.memory import explained_shortage
from faser.runtime.cuda.model import HEAD_ROWS, CudaModel
from faser.runtime.cuda.rows import DeviceRows, expand, regather, settle
from faser.runtime.cuda.sampling import MOST_TILES_PER_BLOCK, RECENT, TILE, Slots, noise_keys, noisy_scores
from faser.runtime.cuda.transfer import send
from faser.runtime.cuda.verifier import CudaVerifier
from faser.step import StepPlan

# Rows of a verification that may stop between layers.
PART_BUCKETS = ROW_BUCKETS + tuple(size for size in MIXED_BUCKETS if size > ROW_BUCKETS[-1])
NUM_RANK_ROWS = 4  # rank, best score, own score, confidence of the draft model

_INFINITY = tl.constexpr(math.inf)


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
        yield from self._confidence.draft(step, self._drafter.begin(plan), reads=rule.needs_confidence)
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

    def _drop_before(self, step: LaunchedStep, exiting: Exiting) -> None:
        """Before the first layer: drop drafts by the draft model's confidence. Prompt lookup has none: NaN."""
        confidence = step.confidence
        if confidence is None:
            confidence = self._confidence.values(step.num_drafted.size, int(step.num_drafted.max()))
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
            parts.capture(shape, done, point.layer)()
            parts.capture_ranks(shape, point.candidates)()
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
        parts.capture(shape, done, parts.num_layers)()
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


class TargetParts:
    """The target's forward in parts: some layers at a time, and the ranks of the drafts behind them."""

    def __init__(self, target: CudaModel) -> None:
        device = target.model.device
        self.num_layers, self.vocab_size = target.model.num_layers, target.model.config.vocab_size
        self.max_rows = min(target.max_rows, PART_BUCKETS[-1])
        self.ranks = torch.zeros(NUM_RANK_ROWS, self.max_rows, dtype=torch.float32, device=device)
        self._target = target
        self._index = torch.zeros(target.max_rows, dtype=torch.int32, device=device)
        self._cu_rows_before = torch.zeros_like(target.rows.cu_rows)
        # by first and last layer, or by number of candidates
        self.graphs: dict[tuple[Shape, *tuple[int, ...]], Callable[[], None]] = {}

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

    def capture(self, shape: Shape, first: int, last: int) -> Callable[[], None]:
        """The graph of `forward`."""
        return self._capture((shape, first, last), lambda: self.forward(shape, first, last))

    def forward(self, shape: Shape, first: int, last: int) -> None:
        """Layers first to last - 1.

        The first part lays the rows out. A later part comes behind `rank` and takes over the rows that are left by
        `set_drafted`. Behind the last layer tokens are chosen.
        """
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
            target.embed(shape, rows)
        target.run_layers(shape, rows, target.tiling.whole(shape, requests, rows), range(first, last))
        if last == model.num_layers:
            target.choose(shape, rows, hidden)

    def capture_ranks(self, shape: Shape, candidates: int) -> Callable[[], None]:
        """The graph of `rank`."""
        return self._capture((shape, candidates), lambda: self.rank(shape, candidates))

    def rank(self, shape: Shape, candidates: int) -> None:
        """Behind a part: the ranks of its drafts among the first `candidates` tokens (0: all), into `ranks`.

        The rows are left in `normed` for the next part.
        """
        target, model = self._target, self._target.model
        rows, hidden = target.rows_of(shape), target.hidden[: shape.num_rows]
        norm, eps = model.final_norm, model.config.norm_eps
        whole = model.embedding if model.config.tie_embeddings else plain(model.head)
        head = whole[: candidates or None]
        memory = target.logits.view(-1)
        for first in range(0, shape.num_rows, HEAD_ROWS):
            some = hidden[first : first + HEAD_ROWS]
            logits = memory[: some.shape[0] * head.shape[0]].view(-1, head.shape[0])
            linear.norm_linear(some, norm, eps, head, None, logits, target.normed[: some.shape[0]], product="head")
            rank_drafts(logits, first, rows, target.slots, self.ranks, hidden, norm, eps, whole)
        target.normed[: shape.num_rows].copy_(hidden)
        self._cu_rows_before[: shape.num_requests + 1].copy_(rows.cu_rows)

    def _capture(self, key: tuple[Shape, *tuple[int, ...]], run: Callable[[], None]) -> Callable[[], None]:
        """A graph may be captured between two parts of a step, and must not disturb the rows of the part before it."""
        if key not in self.graphs:
            target = self._target
            kept = (self._cu_rows_before, self.ranks, target.normed, target.rows.cu_rows)
            self.graphs[key] = target.capture_idle(run, kept=kept)
        return self.graphs[key]


def rank_drafts(
    logits: torch.Tensor,
    first: int,
    rows: DeviceRows,
    slots: Slots,
    ranks: torch.Tensor,
    hidden: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    head: torch.Tensor,
) -> None:
    """Rank the draft behind each row among candidate tokens, into ranks float32 [4, R].

    The draft behind a row is the token of the next row, if both belong to one request; other columns are left as they
    are. The four rows: candidates that score above the draft, the best score, the draft's score, and the draft model's
    confidence. Scores include the row's noise unless the request is greedy.

    logits [n, C] are of the rows first … first + n - 1 and of the first C tokens, by any layer. The logit of a draft
    outside the first C tokens is computed here, from the hidden states [R, H], the norm [H] and the head [V, H].
    """
    num_bucket_rows, num_columns = logits.shape
    ranks[0, first : first + num_bucket_rows].zero_()
    ranks[1, first : first + num_bucket_rows].fill_(-math.inf)
    num_blocks = -(-num_columns // (TILE * MOST_TILES_PER_BLOCK))
    _rank_kernel[(num_bucket_rows, num_blocks)](
        logits, first, rows.slots, rows.positions, rows.token_ids, rows.num_rows,
        slots.seeds, slots.inverse_temperatures, slots.recent_confidence, ranks, hidden, norm, head, eps,
        logits.stride(0), ranks.stride(0), hidden.stride(0), head.stride(0), num_columns, head.shape[1],
        tile_width=TILE, tiles_per_block=MOST_TILES_PER_BLOCK, recent=RECENT, num_warps=4,
    )  # fmt: skip


@triton.jit
def _logit(hidden, norm, head, eps, width, block: tl.constexpr):
    """rms_norm(hidden) @ head, of one row and one token."""
    square, product = tl.zeros([block], tl.float32), tl.zeros([block], tl.float32)
    for begin in range(0, width, block):
        column = begin + tl.arange(0, block)
        inside = column < width
        x = tl.load(hidden + column, mask=inside, other=0).to(tl.float32)
        weight = tl.load(norm + column, mask=inside, other=0).to(tl.float32)
        square += x * x
        product += x * weight * tl.load(head + column, mask=inside, other=0).to(tl.float32)
    return tl.sum(product, axis=0) / tl.sqrt(tl.sum(square, axis=0) / width + eps)


@triton.jit(do_not_specialize=["first", "num_rows", "ranks_stride"])
def _rank_kernel(
    logits, first, row_slots, positions, token_ids, num_rows, seeds, inverse_temperatures, confidence,
    ranks, hidden, norm, head, eps, logits_stride, ranks_stride, hidden_stride, head_stride,
    num_columns, width,
    tile_width: tl.constexpr, tiles_per_block: tl.constexpr, recent: tl.constexpr,
):  # fmt: skip
    row = first + tl.program_id(0)
    if row + 1 >= tl.load(num_rows):
        return
    slot = tl.load(row_slots + row).to(tl.int64)
    if tl.load(row_slots + row + 1).to(tl.int64) != slot:
        return
    drafted = tl.load(token_ids + row + 1)
    inverse_temperature = tl.load(inverse_temperatures + slot)
    position = tl.load(positions + row) + 1
    key0, key1 = noise_keys(tl.load(seeds + slot), position)
    logits += tl.program_id(0).to(tl.int64) * logits_stride
    if drafted < num_columns:
        logit = tl.load(logits + drafted).to(tl.float32)
    else:
        logit = _logit(
            hidden + row.to(tl.int64) * hidden_stride, norm, head + drafted.to(tl.int64) * head_stride, eps, width,
            tile_width,
        )  # fmt: skip
    own = noisy_scores(logit, drafted, inverse_temperature, key0, key1)
    above = 0.0
    best = own
    for index in range(tiles_per_block):
        column = (tl.program_id(1) * tiles_per_block + index) * tile_width + tl.arange(0, tile_width)
        x = tl.load(logits + column, mask=column < num_columns, other=-_INFINITY).to(tl.float32)
        score = noisy_scores(x, column, inverse_temperature, key0, key1)
        score = tl.where(column < num_columns, score, -_INFINITY)
        above += tl.sum((score > own).to(tl.float32), axis=0)
        best = tl.maximum(best, tl.max(score, axis=0))
    tl.atomic_add(ranks + row, above)
    tl.atomic_max(ranks + ranks_stride + row, best)
    if tl.program_id(1) == 0:
        tl.store(ranks + 2 * ranks_stride + row, own)
        tl.store(ranks + 3 * ranks_stride + row, tl.load(confidence + slot * recent + position % recent))
