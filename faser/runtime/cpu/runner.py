"""One model on the CPU with its KV pages and page table: rows in, logits out. Target and draft have a runner each.

For a draft head, the target's runner also keeps features: of every row that it computes, in pages of their own.

Every request has its own number of rows, so a batch is flat, with `cu_` offsets where a request's rows begin. Attention
is ragged, over pages, with plain torch calls. Requests are put into groups. A group's pages are gathered into one
padded block, and torch's fused attention is called once per group and layer. Indices, masks and rotation depend on the
rows alone and are prepared once per forward. The query heads that share a key head are folded into the query's rows,
which keeps the fused kernel on its fast path.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter

import numpy as np
import torch
import torch.nn.functional as F

from faser.arrays import NONE, BoolArray, IntArray
from faser.limits import KeyWindow
from faser.models.heads import DraftHead
from faser.models.layers import rotate
from faser.models.transformer import Attend, Decoder, Transformer
from faser.runtime.cpu.positions import RotaryPositions
from faser.step import Admission, KeyStarts, KvCopies, PageMoves, PageWrites, StepPlan

SHORT_ROWS = 16  # a request with more rows is a group of its own
SPARE_PAGES = 64  # pages of padding that a group may always have; beyond it, at most half of its pages may be padding
FUSED_ROWS = 64  # features that wait at most
GROUP_BYTES = 3 * 2**20  # keys and values of a group: more would leave the CPU's cache before they are used


@dataclass(frozen=True)
class Rows:
    """Rows of B requests: request i has counts[i] > 0 rows, at positions start[i], start[i] + 1, …"""

    slots: IntArray  # [B]
    start: IntArray  # [B]
    counts: IntArray  # [B]
    cu_rows: IntArray  # [B + 1]
    owners: IntArray  # [R] the slot of each row
    positions: IntArray  # [R]

    @classmethod
    def of(cls, slots: IntArray, start: IntArray, counts: IntArray) -> Rows:
        """Requests without rows are left out."""
        if not counts.all():
            present = counts > 0
            slots, start, counts = slots[present], start[present], counts[present]
        cu_rows = np.zeros(counts.size + 1, dtype=np.int64)
        np.cumsum(counts, out=cu_rows[1:])
        positions = np.arange(cu_rows[-1]) + np.repeat(start - cu_rows[:-1], counts)
        return cls(slots, start, counts, cu_rows, np.repeat(slots, counts), positions)

    @property
    def num_rows(self) -> int:
        return int(self.positions.size)

    @property
    def last(self) -> IntArray:
        """The index of each request's last row."""
        return self.cu_rows[1:] - 1


class FeaturePages:
    """The target's features as a draft head reads them: fused, one row of `pages` [pages, page_size, hidden] a token.

    They stand under the target's page table, so whatever context the target has, the head can compute. Rows are fused
    when somebody reads, or FUSED_ROWS at a time: the product reads its weights once for all of them.
    """

    def __init__(self, head: DraftHead, num_pages: int, page_size: int) -> None:
        layers = head.head_config.feature_layers
        assert layers is not None, "a head in memory knows its target"
        self.layers = layers  # the features are the residual streams before these
        self._fuse = head.fuse
        self._pages = torch.zeros(num_pages * page_size, head.config.hidden_size, dtype=head.dtype)
        self._waiting: list[tuple[torch.Tensor, torch.Tensor]] = []  # entries and features of rows, oldest first
        self._num_waiting = 0  # rows

    def write(self, entries: torch.Tensor, features: Sequence[torch.Tensor]) -> None:
        self._waiting.append((entries, torch.cat(tuple(features), dim=-1)))
        self._num_waiting += entries.numel()
        if self._num_waiting >= FUSED_ROWS:
            self._fuse_waiting()

    def read(self, entries: torch.Tensor) -> torch.Tensor:
        self._fuse_waiting()
        return self._pages[entries]

    def _fuse_waiting(self) -> None:
        if not self._waiting:
            return
        every = [entries for entries, _ in self._waiting]
        fused = self._fuse(torch.cat([features for _, features in self._waiting]))
        for entries, rows in zip(every, torch.split(fused, [each.numel() for each in every]), strict=True):
            self._pages.index_copy_(0, entries, rows)  # step by step: a later row takes the place of a rejected one
        self._waiting, self._num_waiting = [], 0


class Runner:
    """The pages and the page table of one model, and the seconds of its forwards until `take_seconds`."""

    def __init__(
        self,
        model: Decoder,
        pages: torch.Tensor,
        max_slots: int,
        max_tokens: int,
        window: KeyWindow | None = None,
    ) -> None:
        """`window`: what every layer sees of a context, instead of what the model's config says."""
        self._model = model
        self._windows = (window,) * model.num_layers if window is not None else model.config.layer_windows
        self._seconds = 0.0
        self._pages = pages  # of `pages_over`
        self._table: IntArray = np.zeros((max_slots, -(-max_tokens // pages.shape[2])), dtype=np.int64)
        self._first: IntArray = np.zeros(max_slots, dtype=np.int64)  # keys between the sinks and here do not exist

    def follow(self, plan: StepPlan) -> None:
        """Take in what a step changes of a draft's pages."""
        self.apply(plan.draft_pages)
        if plan.draft_first is not None:
            self.begin_again(plan.draft_first)

    def begin_again(self, starts: KeyStarts) -> None:
        self._first[starts.slots] = starts.positions

    def apply(self, writes: PageWrites) -> None:
        self._table[writes.slots, writes.columns] = writes.pages

    def take_seconds(self) -> float:
        """Seconds spent in forwards since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def entries(self, owners: IntArray, positions: IntArray) -> torch.Tensor:
        """[R] places in the pages of a layer, of the tokens at `positions` [R] of the slots `owners` [R]."""
        size = self._pages.shape[2]
        return torch.from_numpy(self._table[owners, positions // size] * size + positions % size)

    @contextmanager
    def timed(self) -> Iterator[None]:
        started = perf_counter()
        try:
            yield
        finally:
            self._seconds += perf_counter() - started


class HeadRunner(Runner):
    """A draft head on the CPU. `features` gives the target's features of tokens, by slot and position."""

    def __init__(
        self,
        head: DraftHead,
        pages: torch.Tensor,
        max_slots: int,
        max_tokens: int,
        target: ModelRunner,
        window: KeyWindow | None = None,
    ) -> None:
        super().__init__(head, pages, max_slots, max_tokens, window)
        self._target = target

    def features(self, owners: IntArray, positions: IntArray) -> torch.Tensor:
        assert self._target.features is not None
        return self._target.features.read(self._target.entries(owners, positions))

    def attention(self, rows: Rows, first_key: int = 0, sees_all: bool = False) -> CpuAttention:
        """`sees_all`: a row sees all rows of its request, not only those before it."""
        return CpuAttention(
            self._model, self._pages, self._table, rows, first_key, sees_all, windows=self._windows,
            first=self._first[rows.slots],
        )  # fmt: skip

    def write_kv(self, rows: Rows, layer: int, kv: torch.Tensor) -> None:
        """Store keys, which are not rotated, and values: kv [R, 2 * num_kv_heads, head_dim]."""
        cos, sin = self._model.rotation(torch.from_numpy(rows.positions))
        rotate(kv[:, : self._model.config.num_kv_heads], cos.unsqueeze(1), sin.unsqueeze(1))
        self._pages[layer].flatten(0, 1).index_copy_(0, self.entries(rows.owners, rows.positions), kv)


class ModelRunner(Runner):
    """A whole model on the CPU."""

    def __init__(
        self,
        model: Transformer,
        pages: torch.Tensor,
        max_slots: int,
        max_tokens: int,
        features: FeaturePages | None = None,
        window: KeyWindow | None = None,
        attention: Callable[..., CpuAttention] | None = None,
    ) -> None:
        super().__init__(model, pages, max_slots, max_tokens, window)
        self.model = model
        self.features = features
        self._make_attention = attention or CpuAttention
        self.rotary: RotaryPositions | None = None  # of a model whose tokens stand in space and time

    def admit(self, new: Admission) -> None:
        if self.rotary is not None:
            self.rotary.admit(new)

    def copy(self, copies: KvCopies) -> None:
        sources, destinations = torch.from_numpy(copies.sources), torch.from_numpy(copies.destinations)
        for layer in self._pages.view(torch.uint8):  # bytes: torch copies no 8-bit floats by index
            entries = layer.flatten(0, 1)
            entries.index_copy_(0, destinations, entries.index_select(0, sources))

    def move(self, moves: PageMoves) -> None:
        assert self.features is None, "a target with a head has pages that stay"
        sources, destinations = torch.from_numpy(moves.sources), torch.from_numpy(moves.destinations)
        pages = self._pages.view(torch.uint8)
        pages.index_copy_(1, destinations, pages.index_select(1, sources))

    def run(self, rows: Rows, hidden: torch.Tensor, first: int = 0, last: int | None = None) -> torch.Tensor:
        """Run layers first … last - 1 (default: all) on hidden [R, hidden size]."""
        with self.timed():
            return self._run(rows, hidden, first, last)

    def _run(self, rows: Rows, hidden: torch.Tensor, first: int, last: int | None) -> torch.Tensor:
        positions = None if self.rotary is None else self.rotary.of(rows.owners, rows.positions)
        attend = self._attention(rows, positions)
        if self.features is not None:
            assert (first, last) == (0, None), "features are kept of whole forwards"
            return self._run_and_keep(self.features, rows, hidden, attend)
        return self.model.run_layers(hidden, attend, first, last)

    def _attention(self, rows: Rows, positions: IntArray | None) -> Attend:
        return self._make_attention(
            self.model, self._pages, self._table, rows, positions=positions, windows=self._windows,
            first=self._first[rows.slots],
        )  # fmt: skip

    def _run_and_keep(self, features: FeaturePages, rows: Rows, hidden: torch.Tensor, attend: Attend) -> torch.Tensor:
        kept, done = [], 0
        for layer in features.layers:
            hidden = self.model.run_layers(hidden, attend, done, layer)
            kept.append(hidden[: rows.num_rows])
            done = layer
        features.write(self.entries(rows.owners, rows.positions), kept)
        return self.model.run_layers(hidden, attend, done)

    def logits(
        self, hidden: torch.Tensor, wanted: IntArray, candidates: int = 0, token_ids: IntArray = NONE
    ) -> torch.Tensor:
        """[len(wanted), vocabulary] of the wanted rows of hidden, the output of any layer.

        With `candidates`: [len(wanted), candidates + 1], as Transformer.shortlist_logits.
        """
        with self.timed():
            if wanted.size < hidden.shape[0]:
                hidden = hidden[torch.from_numpy(wanted)]
            if candidates:
                return self.model.shortlist_logits(hidden, candidates, torch.from_numpy(token_ids))
            return self.model.logits(hidden)


@dataclass(frozen=True)
class Group:
    """Requests that attend in one call: G requests padded to L rows and S keys."""

    rows: torch.Tensor | slice  # [G * L] indices of the query rows; padding repeats a request's last row
    real: torch.Tensor | None  # [R'] indices into `rows` that are not padding; None: no padding
    real_rows: torch.Tensor | slice  # [R'] the query rows at these indices
    pages: torch.Tensor  # [G * S / page_size]
    void: torch.Tensor  # [V] indices into the G * S gathered entries that are padding or not yet written
    num_requests: int
    mask: torch.Tensor  # [G, 1, L, S], or [G, 1, heads per key head * L, S] where folded
    folded: bool
    sink_turn: SinkTurn | None  # where some row is further from its sinks than its window is long


@dataclass(frozen=True)
class SinkTurn:
    """Queries as sinks see them: as if the row stood right behind the sinks and a window.

    So no distance is larger than a window, and a draft with a short context drafts for a long one.
    """

    num_sinks: int
    cos: torch.Tensor  # [G, 1, 1, L, head_dim // 2] by how much a query turns back
    sin: torch.Tensor

    @classmethod
    def of(cls, model: Decoder, window: KeyWindow, positions: IntArray) -> SinkTurn | None:
        """positions [G, L]. None where no query has to turn."""
        back = np.maximum(positions - (window.span - 1), 0)
        if not window.sinks or not back.any():
            return None
        cos, sin = model.rotation(torch.from_numpy(back.reshape(-1)))
        factor = model.config.rope.attention_factor  # both tables have it, and the query has turned by them once
        shape = back.shape[0], 1, 1, back.shape[1], -1
        return cls(window.sinks, (cos / factor).view(shape), (-sin / factor).view(shape))


class CpuAttention:
    """Attention over the rows of one forward. Keys before `first_key` do not exist.

    A row sees the keys up to its own, with `sees_all` those of all rows of its request. `positions` are those of the
    rotary embedding; None: the indices of the rows. `windows` are what layers see of a context; empty: all of it.
    `first` [B]: keys between the sinks and here do not exist.
    """

    dtype: torch.dtype | None = None  # in which keys, values and weights are multiplied; None: that of the model

    def __init__(
        self,
        model: Decoder,
        pages: torch.Tensor,
        table: IntArray,
        rows: Rows,
        first_key: int = 0,
        sees_all: bool = False,
        positions: IntArray | None = None,
        windows: Sequence[KeyWindow | None] = (),
        first: IntArray | None = None,
    ) -> None:
        config = model.config
        self._num_heads, self._num_kv_heads = config.num_heads, config.num_kv_heads
        self._scale = config.head_dim**-0.5
        self._pages = pages
        cos, sin = model.rotation(torch.from_numpy(rows.positions if positions is None else positions))
        self._cos, self._sin = cos.unsqueeze(1), sin.unsqueeze(1)  # [R, 1, head_dim // 2]
        size = pages.shape[2]
        written = table[rows.owners, rows.positions // size] * size + rows.positions % size
        self._written = torch.from_numpy(written)  # [R] entries of a layer
        heads_per_kv = config.num_heads // config.num_kv_heads
        page_bytes = size * 2 * config.num_kv_heads * config.head_dim * model.dtype.itemsize
        self._windows = windows
        dtype = self.dtype or model.dtype
        self._groups = {
            window: [
                _make_group(model, rows, table, span, members, heads_per_kv, dtype, first_key, sees_all)
                for members in _partition(rows, span.num_pages, max(1, GROUP_BYTES // page_bytes))
            ]
            for window in dict.fromkeys(windows or (None,))
            for span in (_Span.of(rows, size, window, first),)
        }

    def __call__(self, layer: int, qkv: torch.Tensor) -> torch.Tensor:
        num_heads, num_kv_heads = self._num_heads, self._num_kv_heads
        rotate(qkv[:, : num_heads + num_kv_heads], self._cos, self._sin)
        self._write(layer, qkv[:, num_heads:])
        groups = self._groups[self._windows[layer] if self._windows else None]
        if len(groups) == 1 and groups[0].real is None:
            return self._attend(groups[0], qkv[:, :num_heads], layer)
        out = qkv.new_empty(qkv.shape[0], num_heads * qkv.shape[2])
        for group in groups:
            attended = self._attend(group, qkv[:, :num_heads], layer)
            out[group.real_rows] = attended if group.real is None else attended[group.real]
        return out

    def _write(self, layer: int, kv: torch.Tensor) -> None:
        """Store the keys and values [R, 2 * kv heads, head_dim] of the rows."""
        self._pages[layer].flatten(0, 1).index_copy_(0, self._written, kv)

    def _read(self, layer: int, pages: torch.Tensor) -> torch.Tensor:
        """[pages, page_size, 2 * kv heads, head_dim] of some pages, in new memory."""
        return self._pages[layer].index_select(0, pages)

    def _attend(self, group: Group, query: torch.Tensor, layer: int) -> torch.Tensor:
        """[rows, heads, head_dim] → [G * L, heads * head_dim]"""
        num_kv, head_dim = self._num_kv_heads, query.shape[2]
        fold = self._num_heads // num_kv
        # [G, S, 2 * kv heads, head_dim]. Void entries are zeroed: they may hold another request's overflow, and a
        # weight of zero times infinity is NaN.
        kv = self._read(layer, group.pages).flatten(0, 1).index_fill_(0, group.void, 0)
        kv = kv.view(group.num_requests, -1, 2 * num_kv, head_dim)
        key, value = kv[:, :, :num_kv].transpose(1, 2), kv[:, :, num_kv:].transpose(1, 2)
        # [G, kv heads, heads per key head, L, head_dim]
        query = query[group.rows].view(group.num_requests, -1, num_kv, fold, head_dim).permute(0, 2, 3, 1, 4)
        num_rows = query.shape[3]
        if group.sink_turn is not None:
            out = self._attend_turned(group, group.sink_turn, query, key, value)
        elif group.folded:
            query = query.reshape(group.num_requests, num_kv, fold * num_rows, head_dim)
            out = F.scaled_dot_product_attention(query, key, value, attn_mask=group.mask, scale=self._scale)
            out = out.view(group.num_requests, num_kv, fold, num_rows, head_dim)
        else:  # one request: kv heads take the place of the batch
            key, value = (x[0].unsqueeze(1).expand(-1, fold, -1, -1) for x in (key, value))
            out = F.scaled_dot_product_attention(query[0], key, value, attn_mask=group.mask, scale=self._scale)[None]
        return out.permute(0, 3, 1, 2, 4).reshape(-1, self._num_heads * head_dim)

    def _attend_turned(
        self, group: Group, turn: SinkTurn, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """With other queries for the sinks. query [G, kv heads, heads per key head, L, head_dim]"""
        shape, key = query.shape, key.transpose(-1, -2)
        turned = rotate(query.clone(), turn.cos, turn.sin).flatten(2, 3)
        scores = query.flatten(2, 3) @ key
        scores[..., : turn.num_sinks] = turned @ key[..., : turn.num_sinks]
        mask = group.mask.view(shape[0], 1, -1, shape[3], scores.shape[-1])
        scores = scores.view(*shape[:4], -1).mul_(self._scale).add_(mask)
        return (scores.softmax(-1).flatten(2, 3) @ value).view(shape)


@dataclass(frozen=True)
class _Span:
    """The pages that the rows of B requests see: those of the sinks, and one run up to the last row."""

    page_size: int
    window: KeyWindow | None
    num_sink_pages: int
    first: IntArray  # [B] keys between the sinks and here do not exist
    first_page: IntArray  # [B] of the run
    num_pages: IntArray  # [B] of sinks and run

    @classmethod
    def of(cls, rows: Rows, page_size: int, window: KeyWindow | None, first: IntArray | None) -> _Span:
        first = np.zeros_like(rows.start) if first is None else first
        end = -(-(rows.start + rows.counts) // page_size)
        if window is None:
            return cls(page_size, window, 0, first, np.zeros_like(end), end)
        sinks = -(-window.sinks // page_size)
        begin = np.maximum(np.maximum(window.first(rows.start), first) // page_size, sinks)
        return cls(page_size, window, sinks, first, begin, sinks + np.maximum(end - begin, 0))

    def columns(self, members: IntArray) -> IntArray:
        """[G, pages] columns of the page table, padded behind the last row."""
        run = np.arange(int(self.num_pages[members].max()) - self.num_sink_pages)
        run = self.first_page[members][:, None] + run
        return np.hstack((np.broadcast_to(np.arange(self.num_sink_pages), (members.size, self.num_sink_pages)), run))

    def sees(self, members: IntArray, keys: IntArray, positions: IntArray) -> BoolArray | bool:
        """[G, L, S] which of the keys [G, 1, S] up to their own are in the windows of rows at positions [G, L, 1]."""
        if self.window is None:
            return True
        exists = keys >= self.first[members][:, None, None]
        return (keys < self.window.sinks) | (exists & (keys > positions - self.window.size))


def _partition(rows: Rows, num_pages: IntArray, most_pages: int) -> list[IntArray]:
    """Groups, by index: short requests of similar context, at most `most_pages` pages; each long request alone."""
    long = rows.counts > SHORT_ROWS
    groups = [np.array([i]) for i in np.flatnonzero(long).tolist()]
    short = np.flatnonzero(~long)
    short = short[np.argsort(-num_pages[short], kind="stable")]
    while short.size:
        padding = num_pages[short[0]] - num_pages[short]
        fits = (padding.cumsum() <= SPARE_PAGES) | (2 * padding <= num_pages[short[0]])
        fits &= np.arange(1, short.size + 1) * num_pages[short[0]] <= most_pages
        fits[0] = True
        size = short.size if fits.all() else int(np.argmin(fits))
        groups.append(np.sort(short[:size]))
        short = short[size:]
    return groups


def _make_group(
    model: Decoder,
    rows: Rows,
    table: IntArray,
    span: _Span,
    members: IntArray,
    heads_per_kv: int,
    dtype: torch.dtype,
    first_key: int,
    sees_all: bool,
) -> Group:
    counts, start = rows.counts[members], rows.start[members]
    first = rows.cu_rows[members]
    num_rows = int(counts.max())
    columns = span.columns(members)
    offsets = np.minimum(np.arange(num_rows), counts[:, None] - 1)  # [G, L]
    real = np.arange(num_rows) < counts[:, None]  # [G, L]
    taken = (first[:, None] + offsets).reshape(-1)
    # [G, 1, S]
    keys = (columns[:, :, None] * span.page_size + np.arange(span.page_size)).reshape(members.size, 1, -1)
    positions = start[:, None] + offsets
    last_seen = np.broadcast_to((start + counts - 1)[:, None], offsets.shape) if sees_all else positions
    visible = (keys >= first_key) & (keys <= last_seen[:, :, None])  # [G, L, S]
    visible &= span.sees(members, keys, positions[:, :, None])
    mask = torch.zeros(visible.shape, dtype=dtype).masked_fill_(torch.from_numpy(~visible), -math.inf)
    mask, folded = mask[:, None], num_rows <= SHORT_ROWS
    void = (keys[:, 0] < first_key) | (keys[:, 0] >= (start + counts)[:, None])
    if span.window is not None:
        void |= ~visible.any(axis=1)
    if folded:
        mask = mask.expand(-1, heads_per_kv, -1, -1).reshape(members.size, 1, heads_per_kv * num_rows, -1)
    contiguous = bool(real.all()) and int(taken[-1] - taken[0]) + 1 == taken.size
    picked: torch.Tensor | slice = slice(int(taken[0]), int(taken[-1]) + 1) if contiguous else torch.from_numpy(taken)
    return Group(
        rows=picked,
        real=None if real.all() else torch.from_numpy(np.flatnonzero(real)),
        real_rows=picked if real.all() else torch.from_numpy(taken[real.reshape(-1)]),
        # padding is masked
        pages=torch.from_numpy(
            table[rows.slots[members][:, None], np.minimum(columns, table.shape[1] - 1)].reshape(-1)
        ),
        void=torch.from_numpy(np.flatnonzero(void)),
        num_requests=int(members.size),
        mask=mask,
        folded=folded,
        sink_turn=None if span.window is None else SinkTurn.of(model, span.window, positions),
    )
