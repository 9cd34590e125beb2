"""One model on the device: static buffers, its KV pages, and a forward from requests to sampled tokens.

Knows the order of the kernels of a forward and which buffers they share. Knows nothing of plans or of who drafts. From
step to step the content of the buffers changes, never their addresses or shapes, so that a forward of a given `Shape`
can be captured once as a CUDA graph and replayed. Rows beyond those of the step are padding: they are computed, and
neither write KV nor choose tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from faser.arrays import IntArray
from faser.limits import KeyWindow, Limits
from faser.models.transformer import Decoder, matrices_of
from faser.runtime.cuda import attention, linear
from faser.runtime.cuda.features import CudaFeatures
from faser.runtime.cuda.graphs import MIXED_BUCKETS, ROW_BUCKETS, Shape, capture, least
from faser.runtime.cuda.lanes import Lanes
from faser.runtime.cuda.rows import NUM_COLUMNS, DeviceRows, Requests, expand, next_draft_rows, settle
from faser.runtime.cuda.sampling import Choices, Slots, sample
from faser.runtime.cuda.tiling import Attending, Tiling
from faser.runtime.cuda.transfer import Staging, send
from faser.runtime.cuda.vision import CudaEyes, RowAngles
from faser.runtime.kv_cache import KvFormat, bytes_per_page
from faser.step import KeyStarts, PageWrites

HEAD_ROWS = 512  # rows of logits at a time: 300 MB for a vocabulary of 150k


class CudaModel:
    """A model, its pages and its buffers.

    All rows of a forward may be sampled from. The buffers also have room for the graph that the most rows are rounded
    up to, and for two rows of each request. `writes` is for a draft model: sampled tokens go into the history at once,
    and their confidence is kept. `kv` says how keys and values are stored; None: in the dtype of the model.
    """

    first_key = 0  # tokens of a context before this one have no keys
    sees_all = False  # a row sees all rows of its request, not only those before it

    def __init__(
        self,
        model: Decoder,
        slots: Slots,
        limits: Limits,
        page_size: int,
        lanes: Lanes,
        *,
        kv: KvFormat | None = None,
        window: KeyWindow | None = None,
        writes: bool = False,
    ) -> None:
        """`window`: what every layer sees of a context, instead of what the model's config says."""
        config, device, dtype = model.config, model.device, model.dtype
        max_requests, max_rows, max_context = limits.max_running, limits.max_batch_tokens, limits.max_model_len
        max_rows = max(least(ROW_BUCKETS, max_rows) or max_rows, 2 * (least(ROW_BUCKETS, max_requests) or max_requests))
        self.model = model
        self.features: CudaFeatures | None = None  # what a draft head reads of this model's forwards
        self.eyes: CudaEyes | None = None  # of a target that sees
        self.angles: RowAngles | None = None  # of a target whose tokens stand in space and time
        self.carried: tuple[Tensor, ...] = ()  # what one forward of a draft leaves to the next
        self.max_rows = max_rows
        self.page_size = page_size
        self._writes = writes
        self.kv = kv or KvFormat.of(model)
        self.requests = Requests.allocate(max_requests, device)
        self.rows = DeviceRows.allocate(max_requests, max_rows, max_rows, device)
        self.choices = Choices.allocate(max_rows, model.head.shape[0], device)
        self._drafting = torch.zeros(max_requests + 1, dtype=torch.int32, device=device)
        self._lengths, self._draft_step = self._drafting[:-1], self._drafting[-1:]
        self._first_keys = torch.zeros(slots.history.shape[0], dtype=torch.int32, device=device)  # see begin_again
        windows = (window,) * config.num_layers if window is not None else config.layer_windows
        self._windows = [self._windowed(each, begins_again=window is not None) for each in windows]
        columns = -(-max_context // page_size)
        self.table = torch.zeros(slots.history.shape[0], columns, dtype=torch.int32, device=device)
        self.slots = slots
        # Programmatic dependent launch: a launch may begin before the one before it has ended. From Hopper on.
        self._overlaps = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
        # Graphs are captured on a stream of the model's own: cuBLAS has a workspace for each stream, and two models may
        # run at a time.
        make: Any = torch.cuda.Stream
        self._stream = make(device) if device.type == "cuda" else None
        self._lanes = lanes
        self._staging = Staging(self.requests.memory, NUM_COLUMNS)
        self._staged_lengths = Staging(self._drafting, 1)
        self._vocabulary = model.vocabulary.int() if model.vocabulary is not None else None
        heads = config.num_heads + 2 * config.num_kv_heads

        def buffer(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.hidden = buffer(max_rows, config.hidden_size)
        self.normed = buffer(max_rows, config.hidden_size)
        self._qkv = buffer(max_rows, heads, config.head_dim)
        self._attended = buffer(max_rows, config.num_heads * config.head_dim)
        self._gate_up = buffer(max_rows, 2 * config.intermediate_size)
        self._activated = buffer(max_rows, config.intermediate_size)
        self._wanted = buffer(max_rows, config.hidden_size)
        self.logits = torch.zeros(min(max_rows, HEAD_ROWS), model.head.shape[0], dtype=torch.float32, device=device)
        self._rest = torch.zeros(1, dtype=torch.int32, device=device)
        self._linear = linear.LinearWorkspace.allocate(device, matrices_of(model), max_rows)
        seen = [max_context if each is None else min(max_context, each.span) for each in windows]
        self.tiling = Tiling(model, max_requests, max_rows, max(seen))
        self._graphs: dict[Shape, Callable[[], None]] = {}
        self._choosing: dict[int, Callable[[], None]] = {}  # graphs of head and sampling, by wanted rows
        self.pages = torch.zeros(0, dtype=self.kv.dtype, device=device)

    @property
    def page_bytes(self) -> int:
        return bytes_per_page(self.model.config, self.page_size, self.kv.dtype)

    def allocate_pages(self, num_pages: int) -> None:
        config = self.model.config
        shape = (config.num_layers, num_pages, self.page_size, 2 * config.num_kv_heads, config.head_dim)
        self.pages = torch.zeros(shape, dtype=self.kv.dtype, device=self.model.device)

    # ── what changes from step to step ───────────────────────────────────────────────────────────────────────────────

    def apply(self, writes: PageWrites) -> None:
        if writes.slots.size:
            where = send(np.stack([writes.slots, writes.columns, writes.pages]), self.table.device)
            self.table.index_put_((where[0], where[1]), where[2].int())

    def begin_again(self, starts: KeyStarts) -> None:
        """From now on, keys of these slots between the sinks and a position do not exist."""
        where = send(np.stack([starts.slots, starts.positions]), self.table.device)
        self._first_keys.index_put_((where[0],), where[1].int())

    def _windowed(self, window: KeyWindow | None, begins_again: bool) -> attention.Windowed | None:
        if window is None:
            return None
        model, starts = self.model, self._first_keys if begins_again else None
        return attention.Windowed(window, starts, model.cos, model.sin, model.config.rope.attention_factor)

    def set_requests(
        self,
        slots: IntArray,
        start: IntArray,
        num_rows: IntArray,
        num_drafted: IntArray,
        samples: NDArray[np.bool_],
        unsettled: NDArray[np.bool_],
        planned: IntArray,
        frontier: IntArray,
    ) -> None:
        """The requests of the next forward."""
        self._staging.write((slots, start, num_rows, num_drafted, samples, unsettled, planned, frontier), slots.size)

    def set_lengths(self, lengths: IntArray) -> None:
        """How many tokens each of these requests drafts, the longest first. The next forward drafts the first one."""
        self._staged_lengths.write((lengths,), 1)

    def has_graph_of(self, shape: Shape) -> bool:
        """Whether one tile holds all rows of a request, as a graph needs unless it is mixed."""
        if shape.is_mixed:
            return True
        fits = shape.num_rows <= self.max_rows
        return fits and self.tiling.config(shape).rows_per_tile >= shape.rows_per_request

    def mixed_shapes(self) -> list[Shape]:
        """The graphs of steps whose requests differ much in rows; at least one."""
        sizes = [size for size in MIXED_BUCKETS if size <= self.max_rows] or [self.max_rows]
        return [self._mixed_shape(size) for size in sizes]

    def _mixed_shape(self, num_rows: int) -> Shape:
        return Shape(self.requests.slots.shape[0], num_rows, num_rows, 0, is_mixed=True)

    # ── a forward ────────────────────────────────────────────────────────────────────────────────────────────────────

    def launch_rows(self, shape: Shape | None, num_rows: IntArray, start: IntArray, num_wanted: int) -> Shape:
        """A forward over num_rows [B] rows of the requests that were set, num_wanted of all sampled from.

        It replays the graph of `shape` where there is one, else graphs for mixed steps, else it enqueues kernel by
        kernel. Returns the shape that ran.
        """
        if shape is not None and self.has_graph_of(shape):
            self.launch(shape)
            return shape
        mixed = self.launch_mixed(num_rows, start, num_wanted)
        if mixed is not None:
            return mixed
        shape = Shape(num_rows.size, int(num_rows.sum()), int(num_rows.max()), num_wanted)
        self.forward(shape, num_rows, start)
        return shape

    def launch(self, shape: Shape) -> None:
        self.capture(shape)()

    def capture(self, shape: Shape) -> Callable[[], None]:
        """The graph of a shape. If it must be captured first, a forward runs once, without requests."""
        if shape not in self._graphs:
            self._graphs[shape] = self.capture_idle(lambda: self.forward(shape), shape.num_sms)
        return self._graphs[shape]

    def forget_parts(self) -> None:
        """Give up the graphs that keep to a part of the device."""
        self._graphs = {shape: graph for shape, graph in self._graphs.items() if not shape.num_sms}

    def capture_idle(
        self, run: Callable[[], None], num_sms: int = 0, kept: Sequence[Tensor] = ()
    ) -> Callable[[], None]:
        """A graph of what `run` enqueues, captured while there are no requests, no tiles and no wanted rows.

        `run` also runs once. The contents of the requests, the tiles and `kept` are restored.
        """
        own = (self.requests.memory, self._drafting, *self.tiling.memories, self.rows.cu_wanted, *self.carried)
        contents = (*own, *kept)
        before = [(each, each.clone()) for each in contents]
        for count in (self.requests.num_requests, *self.tiling.counts, self.rows.cu_wanted):
            count.zero_()
        graph = capture(run, self.model.device, self._lanes.stream(num_sms) if num_sms else self._stream)
        for each, content in before:
            each.copy_(content)
        return graph

    def launch_mixed(self, num_rows: IntArray, start: IntArray, num_wanted: int) -> Shape | None:
        """Replay the graphs for num_rows [B] rows of the requests; None if no graphs are large enough."""
        rows, wanted = least(MIXED_BUCKETS, int(num_rows.sum())), least(ROW_BUCKETS, num_wanted)
        if rows is None or rows > self.max_rows or wanted is None or wanted > self.max_rows:
            return None
        shape = self._mixed_shape(rows)
        self.tiling.stage(shape, num_rows, start)
        self.launch(shape)
        if not num_wanted:
            return shape
        self.capture_choosing(wanted)()
        return replace(shape, num_wanted=wanted)

    def capture_choosing(self, num_wanted: int) -> Callable[[], None]:
        if num_wanted not in self._choosing:
            self._choosing[num_wanted] = self.capture_idle(lambda: self.choose_wanted(num_wanted))
        return self._choosing[num_wanted]

    def choose_wanted(self, num_wanted: int) -> None:
        """The head and the sampling of the latest mixed forward, which has at most num_wanted wanted rows."""
        shape = replace(self._mixed_shape(0), num_wanted=num_wanted, is_mixed=False)
        self.choose(shape, self.rows_of(shape), self.hidden)

    def forward(self, shape: Shape, num_rows: IntArray | None = None, start: IntArray | None = None) -> None:
        """Enqueue everything from the requests to the tokens in `choices`.

        If a request has more rows than a tile, `num_rows` and `start` of the plan are given to cut the rows.
        """
        requests, rows = self.requests_of(shape), self.rows_of(shape)
        vocab_size = self.model.config.vocab_size
        if shape.drafts_on:
            lengths = self._lengths[: shape.num_requests]
            next_draft_rows(requests, lengths, self._draft_step, self.slots.history, rows, vocab_size=vocab_size)
        else:
            settle(requests, self.slots.refused, self.slots.missed, self.slots.short if self._writes else None)
            expand(requests, self.slots.history, rows, vocab_size=vocab_size)
        if shape.is_mixed:
            attending = self.tiling.staged(shape, requests, rows)
        elif num_rows is None or start is None:
            attending = self.tiling.whole(shape, requests, rows)
        else:
            attending = self.tiling.cut(shape, requests, rows, num_rows, start)
        self.embed(shape, rows)
        hidden = self.run_layers(shape, rows, attending, range(self.model.num_layers))
        if shape.num_wanted:
            self.choose(shape, rows, hidden)

    def embed(self, shape: Shape, rows: DeviceRows) -> None:
        """Write what enters the layers into `hidden`."""
        torch.index_select(self.model.embedding, 0, rows.token_ids, out=self.hidden[: shape.num_rows])
        if self.eyes is not None:
            self.eyes.replace_rows(rows, self.hidden[: shape.num_rows])

    def logits_of(self, shape: Shape, indices: Tensor) -> Tensor:
        """Logits [len(indices), V] of some wanted rows of the latest forward, computed again."""
        hidden = (self.hidden if shape.wants_all else self._wanted)[indices]
        logits = self.logits.new_empty(len(indices), self.logits.shape[1])
        model = self.model
        linear.norm_linear(
            hidden, model.final_norm, model.config.norm_eps, model.head, None, logits,
            torch.empty_like(hidden), self._linear, product="head",
        )  # fmt: skip
        return logits

    def requests_of(self, shape: Shape) -> Requests:
        return Requests.of(self.requests.memory, shape.num_requests)

    def rows_of(self, shape: Shape) -> DeviceRows:
        whole = self.rows
        num_wanted = whole.wanted.shape[0] if shape.is_mixed else shape.num_wanted
        return DeviceRows(
            whole.cu_rows[: shape.num_requests + 1],
            whole.cu_wanted[: shape.num_requests + 1],
            *(each[: shape.num_rows] for each in (whole.slots, whole.positions, whole.token_ids)),
            *(each[:num_wanted] for each in (whole.wanted, whole.wanted_slots, whole.wanted_positions)),
        )

    # ── layers ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def run_layers(
        self, shape: Shape, rows: DeviceRows, attending: Sequence[Attending], layers: Iterable[int]
    ) -> Tensor:
        """Run layers over the rows in `hidden`, in place. Features are kept of forwards through all layers."""
        model, num_sms, eps = self.model, shape.num_sms, self.model.config.norm_eps
        hidden, normed, qkv = (each[: shape.num_rows] for each in (self.hidden, self.normed, self._qkv))
        if self.angles is not None:
            self.angles.compute(rows)
        for index in layers:
            if self.features is not None:
                self.features.keep(index, hidden)
            layer = model.layers[index]
            linear.norm_linear(
                hidden, layer.attention_norm, eps, layer.qkv, layer.qkv_bias, qkv.flatten(1), normed,
                self._linear, num_sms=num_sms,
            )  # fmt: skip
            self.finish_layer(index, shape, rows, attending)
        if self.features is not None:
            self.features.store(rows, self.table)
        return hidden

    def finish_layer(self, index: int, shape: Shape, rows: DeviceRows, attending: Sequence[Attending]) -> None:
        """A layer behind its first product: attention over queries, keys and values, and the MLP."""
        model, num_sms, eps = self.model, shape.num_sms, self.model.config.norm_eps
        layer, pages = model.layers[index], self.pages[index]
        hidden, normed, qkv, attended, gate_up, activated = (
            each[: shape.num_rows]
            for each in (self.hidden, self.normed, self._qkv, self._attended, self._gate_up, self._activated)
        )
        by_row, kv_scales = self.angles is not None, self.kv.scales_of(index)
        cos, sin = (model.cos, model.sin) if self.angles is None else (self.angles.cos, self.angles.sin)
        attention.rotate_and_write(
            qkv, rows.positions, rows.slots, rows.num_rows, self.table, cos, sin, pages, layer.qk_norm, eps,
            by_row=by_row, overlap=self._overlaps, kv_scales=kv_scales,
        )  # fmt: skip
        for each in attending:
            attention.attend(
                qkv, pages, self.table, each.tiles, attended, each.workspace, each.config,
                kv_scales=kv_scales, overlap=self._overlaps,
                first_key=self.first_key, sees_all=self.sees_all, windowed=self._windows[index],
            )  # fmt: skip
        linear.linear_residual(attended, layer.out, hidden, layer.out_bias, self._linear, num_sms=num_sms)
        linear.norm_gate_up(
            hidden, layer.mlp_norm, eps, layer.gate_up, activated, normed, gate_up, num_sms=num_sms,
            workspace=self._linear,
        )  # fmt: skip
        linear.linear_residual(activated, layer.down, hidden, None, self._linear, num_sms=num_sms)

    def choose(self, shape: Shape, rows: DeviceRows, hidden: Tensor) -> None:
        """The head and the sampling, HEAD_ROWS rows at a time."""
        if not shape.wants_all:
            hidden = torch.index_select(hidden, 0, rows.wanted, out=self._wanted[: shape.num_wanted])
        for first in range(0, shape.num_wanted, HEAD_ROWS):
            some = slice(first, min(first + HEAD_ROWS, shape.num_wanted))
            logits = self.logits[: some.stop - first]
            linear.norm_linear(
                hidden[some], self.model.final_norm, self.model.config.norm_eps, self.model.head, None, logits,
                self.normed[some], self._linear, num_sms=shape.num_sms, product="head",
            )  # fmt: skip
            num_rows = rows.num_wanted if first == 0 else torch.sub(rows.num_wanted, first, out=self._rest)
            sample(
                logits, rows.wanted_slots[some], rows.wanted_positions[some], num_rows, self.slots,
                self.choices[some], vocabulary=self._vocabulary, write=self._writes,
                confidence=self._writes,
            )  # fmt: skip
