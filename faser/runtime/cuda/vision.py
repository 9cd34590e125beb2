"""The eyes of a target on the device: a buffer of encoded tokens, and where tokens stand in space and time.

Knows which rows of a forward are encoded tokens, and the angles of M-RoPE. Knows nothing of plans in flight or of
requests beyond their slots. `replace_rows` and `compute` neither allocate nor wait: graphs contain them. The encoder
has graphs of its own, for small forwards whose shape comes again, as those of the frames of a video do.
"""

# mypy: disable-error-code="import-untyped, import-not-found, untyped-decorator, no-untyped-def"
from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from faser.arrays import IntArray
from faser.models.transformer import Transformer
from faser.models.vision.encoder import EncoderInput, ForwardShape, VisionEncoder
from faser.runtime.cuda.graphs import capture
from faser.runtime.cuda.rows import DeviceRows
from faser.runtime.cuda.transfer import send
from faser.step import Admission, GridWrite, VisionPlan
from faser.vision import Grid

log = logging.getLogger("faser.engine")

NO_SOURCE = -1
MAX_PATCHES = 16_384  # of one forward of the encoder: about 0.5 GiB for that of Qwen2.5-VL
# For the encoder of Qwen2.5-VL these are about 5 ms of matrix products, and 400 launches of 2 ms (estimated).
MAX_GRAPH_PATCHES = 4096
MAX_GRAPHS = 32
MAX_SHAPES = 1024  # that are remembered: pruned grids have a new shape each


class CudaEyes:
    """The vision encoder and its buffer [buffer_rows, hidden]."""

    def __init__(self, encoder: VisionEncoder, buffer_rows: int, hidden_size: int, history: Tensor) -> None:
        self._buffer = torch.zeros(buffer_rows, hidden_size, dtype=encoder.dtype, device=history.device)
        self._graphs = EncoderGraphs(encoder, self._buffer)
        # [slots, tokens] the row of the buffer that a token of a context is; NO_SOURCE: it is text
        self._sources = torch.full(history.shape, NO_SOURCE, dtype=torch.int32, device=history.device)

    def admit(self, admitted: Sequence[Admission]) -> None:
        """Forget what the slots were used for before."""
        if admitted:
            where = send(np.array([new.slot for new in admitted]), self._sources.device)
            self._sources.index_fill_(0, where, NO_SOURCE)

    def encode(self, plan: VisionPlan) -> None:
        """Enqueue the encoding of a step's grids."""
        for writes in _parts(plan.writes):
            self._graphs.encode([write.grid for write in writes], np.concatenate([each.buffer_rows for each in writes]))

    def set_sources(self, plan: VisionPlan) -> None:
        """Which context rows of a step are encoded tokens."""
        if plan.slots.size:
            where = send(np.stack([plan.slots, plan.positions, plan.buffer_rows]), self._sources.device)
            self._sources.index_put_((where[0], where[1]), where[2].int())

    def replace_rows(self, rows: DeviceRows, hidden: Tensor) -> None:
        """Put encoded tokens into hidden [R, hidden size], in place of the embeddings of their ids."""
        width = hidden.shape[1]
        assert hidden.is_contiguous()
        _replace_kernel[(hidden.shape[0],)](
            hidden, self._buffer, self._sources, rows.slots, rows.positions, rows.num_rows, self._sources.stride(0),
            width, block=min(1024, triton.next_power_of_2(width)), num_warps=4,
        )  # fmt: skip


def _parts(writes: Sequence[GridWrite]) -> Iterator[list[GridWrite]]:
    """Grids that are encoded together: the memory that they take meanwhile is bounded, but for a single large grid."""
    part: list[GridWrite] = []
    for write in writes:
        if part and sum(len(each.grid.patches) for each in (*part, write)) > MAX_PATCHES:
            yield part
            part = []
        part.append(write)
    if part:
        yield part


class EncoderGraphs:
    """The encoder's forwards into the buffer. A shape is captured when it comes for the second time.

    The GPU needs longer than the host's launches for more patches than MAX_GRAPH_PATCHES: no graph is needed there.
    """

    def __init__(self, encoder: VisionEncoder, buffer: Tensor) -> None:
        self._encoder = encoder
        self._buffer = buffer
        is_on_gpu = buffer.is_cuda
        make: Any = torch.cuda.Stream
        self._stream = make(buffer.device) if is_on_gpu else None
        self._pool = torch.cuda.graph_pool_handle() if is_on_gpu else None
        self._send = partial(send, device=buffer.device)
        self._seen: set[ForwardShape] = set()
        self._graphs: dict[ForwardShape, _EncoderGraph | None] = {}  # None: the capture failed

    @property
    def num_captured(self) -> int:
        return sum(graph is not None for graph in self._graphs.values())

    def encode(self, grids: Sequence[Grid], buffer_rows: IntArray) -> None:
        given = self._encoder.prepare(grids)
        graph = self._graph(given)
        if graph is not None:
            graph.launch(given, buffer_rows)
        else:
            self._write(given.to(self._send), send(buffer_rows, self._buffer.device))

    def _write(self, given: EncoderInput[Tensor], where: Tensor) -> None:
        self._buffer.index_copy_(0, where, self._encoder.forward(given))

    def _graph(self, given: EncoderInput[NDArray]) -> _EncoderGraph | None:
        """The graph of a shape, if it has one or gets one now."""
        shape = given.shape
        has_room = shape.num_rows <= MAX_GRAPH_PATCHES and len(self._graphs) < MAX_GRAPHS
        if shape in self._seen and shape not in self._graphs and has_room:
            self._graphs[shape] = self._try_capture(given)
        if len(self._seen) < MAX_SHAPES:
            self._seen.add(shape)
        return self._graphs.get(shape)

    def _try_capture(self, given: EncoderInput[NDArray]) -> _EncoderGraph | None:
        try:
            return self._capture(given)
        except RuntimeError as error:  # a forward without a graph may still fit
            log.warning("a forward of the vision encoder has no graph: %s", str(error).splitlines()[0])
            return None

    def _capture(self, given: EncoderInput[NDArray]) -> _EncoderGraph:
        # The forward runs once, into the first row, which may be in use.
        num_tokens, device = given.places.size, self._buffer.device
        held, where = given.to(self._send), torch.zeros(num_tokens, dtype=torch.int64, device=device)
        first = self._buffer[:1].clone()
        try:
            replay = capture(lambda: self._write(held, where), device, self._stream, self._pool)
        finally:
            self._buffer[:1] = first
        return _EncoderGraph(held, where, replay)


@dataclass(frozen=True)
class _EncoderGraph:
    given: EncoderInput[Tensor]  # what the graph reads
    where: Tensor  # [tokens] rows of the buffer that it writes
    replay: Callable[[], None]

    def launch(self, given: EncoderInput[NDArray], buffer_rows: IntArray) -> None:
        for held, new in zip((*self.given.arrays, self.where), (*given.arrays, buffer_rows), strict=True):
            held.copy_(send(new, held.device))
        self.replay()


class RowAngles:
    """cos and sin [max_rows, head_dim // 2] of each row of a forward, by its place in time, height and width."""

    def __init__(self, model: Transformer, max_rows: int, history: Tensor) -> None:
        device, half = history.device, model.config.head_dim // 2
        first, second, _ = model.config.rope.sections or (half, 0, 0)
        self.cos = torch.zeros(max_rows, half, dtype=torch.float32, device=device)
        self.sin = torch.zeros_like(self.cos)
        self._tables = model.cos, model.sin
        self._first, self._second = first, first + second  # where the frequencies of height and of width begin
        self._prompts = torch.zeros(*history.shape, 3, dtype=torch.int32, device=device)
        # [slots, 3] prompt tokens whose positions are given, what is added to the indices of the others, and what is
        # added to all positions in time
        self._rest = torch.zeros(history.shape[0], 3, dtype=torch.int32, device=device)

    def admit(self, admitted: Sequence[Admission]) -> None:
        if not admitted:
            return
        device, rest = self._rest.device, np.zeros((len(admitted), 3), dtype=np.int32)
        for row, new in zip(rest, admitted, strict=True):
            positions = new.vision.positions if new.vision is not None else None
            if new.vision is not None:
                row[:] = 0 if positions is None else len(positions), new.vision.offset, new.vision.shift
            if positions is not None:
                self._prompts[new.slot, : len(positions)].copy_(send(positions.astype(np.int32), device))
        self._rest.index_copy_(0, send(np.array([new.slot for new in admitted]), device), send(rest, device))

    def compute(self, rows: DeviceRows) -> None:
        """Of the rows of a forward."""
        num_rows, half = rows.slots.shape[0], self.cos.shape[1]
        _angles_kernel[(num_rows,)](
            self.cos, self.sin, *self._tables, self._prompts, self._rest, rows.slots, rows.positions, rows.num_rows,
            self._prompts.stride(0), self._first, self._second, half, self._tables[0].shape[0] - 1,
            block=triton.next_power_of_2(half), num_warps=1,
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows", "slots", "positions", "source_stride"])
def _replace_kernel(
    hidden, buffer, sources, slots, positions, num_rows, source_stride, width, block: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0)
    if row >= tl.load(num_rows):
        return
    source = tl.load(sources + tl.load(slots + row).to(tl.int64) * source_stride + tl.load(positions + row))
    if source < 0:
        return
    for first in range(0, width, block):
        column = first + tl.arange(0, block)
        inside = column < width
        seen = tl.load(buffer + source.to(tl.int64) * width + column, mask=inside)
        tl.store(hidden + row.to(tl.int64) * width + column, seen, mask=inside)


@triton.jit(do_not_specialize=["num_rows", "slots", "positions", "prompt_stride"])
def _angles_kernel(
    row_cos, row_sin, cos, sin, prompts, rest, slots, positions, num_rows, prompt_stride, height_from, width_from, half,
    last, block: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    if row >= tl.load(num_rows):
        return
    slot, index = tl.load(slots + row).to(tl.int64), tl.load(positions + row)
    num_prompt, offset, shift = tl.load(rest + 3 * slot), tl.load(rest + 3 * slot + 1), tl.load(rest + 3 * slot + 2)
    # [block]
    frequency = tl.arange(0, block)
    inside = frequency < half
    part = (frequency >= height_from).to(tl.int32) + (frequency >= width_from).to(tl.int32)
    given = tl.where(inside, num_prompt, 0) > index
    place = tl.load(prompts + slot * prompt_stride + index * 3 + part, mask=given, other=0)
    place = tl.where(given, place, index + offset) + tl.where(part == 0, shift, 0)
    # Made-up steps, which only take time, may find positions of an older request.
    place = tl.minimum(place, last).to(tl.int64)
    own = row.to(tl.int64) * half + frequency
    tl.store(row_cos + own, tl.load(cos + place * half + frequency, mask=inside, other=0.0), mask=inside)
    tl.store(row_sin + own, tl.load(sin + place * half + frequency, mask=inside, other=0.0), mask=inside)
