"""Which pictures are encoded in each step, and which of their tokens the executor keeps.

Knows grids by name, rows of the executor's buffer of encoded tokens, and how far each running request has computed its
prompt. Knows no tensors and no clock.

A grid is encoded when a step could reach its first row, and is then *held* by the requests whose rows of it are not
computed. Afterwards it is *idle*: it stays until its room is needed, the least recently used first. So windows of a
video that share frames, and prompts with the same picture, share what was encoded. Requests take grids in the order of
their prompts: whoever waits for room waits for requests that hold encoded rows and can compute them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from faser.arrays import NONE, BoolArray, IntArray
from faser.engine.prompt_pace import StepPace, encoding_work
from faser.engine.slots import SlotTable
from faser.errors import EngineError, InvalidRequest, RequestTooLong
from faser.limits import VisionLimits
from faser.request import Request, Reuse
from faser.step import GridWrite, VisionPlan
from faser.vision import Grid, Vision

BLOCK_ROWS = 16  # rows of the buffer are given out in blocks of this size


def check_vision(request: Request, limits: VisionLimits | None) -> None:
    """Refuse a request whose pictures can never be served."""
    vision = request.vision
    if vision is None or not vision.grids:
        return
    if limits is None:
        raise InvalidRequest("the prompt has pictures, and the model cannot see; send text alone")
    most = limits.buffer_rows // BLOCK_ROWS * BLOCK_ROWS
    largest = max(grid.num_tokens for grid in vision.grids)
    if largest > most:
        raise RequestTooLong(
            f"a picture of {largest} tokens, but encoded pictures have room for {most}; send a smaller picture, or "
            "enlarge vision_memory"
        )
    if not _is_sound(vision, len(request.prompt_token_ids)):
        raise InvalidRequest("pictures whose places or positions do not fit the prompt; send other frames or sizes")
    end = len(request.prompt_token_ids) + request.params.max_tokens + vision.offset + vision.shift
    if end > limits.max_positions:
        raise RequestTooLong(
            f"prompt and max_tokens reach position {end}, but the model has {limits.max_positions}; send a shorter "
            "video or more frames per second, or lower max_tokens"
        )


def _is_sound(vision: Vision, num_prompt: int) -> bool:
    """Whether grids stand one behind the other in the prompt, and every token has a position."""
    bounds = np.stack([vision.starts, vision.ends], axis=1).reshape(-1)
    are_apart = bool((np.diff(bounds) >= 0).all()) and bounds[0] >= 0 and bounds[-1] <= num_prompt
    positions = vision.positions
    are_placed = positions is None or (positions.shape == (num_prompt, 3) and bool((positions >= 0).all()))
    return are_apart and are_placed and vision.shift >= 0


class EncodedGrids:
    """The rows of the executor's buffer: which grid has which, and who holds it."""

    def __init__(self, num_rows: int) -> None:
        self.num_blocks = num_rows // BLOCK_ROWS
        self._free: list[int] = []
        self._rows: dict[bytes, IntArray] = {}  # by name
        self._holders: dict[bytes, int] = {}
        self._idle: OrderedDict[bytes, None] = OrderedDict()  # least recently used first
        self.clear()

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, name: bytes) -> bool:
        return name in self._rows

    def rows_of(self, grid: Grid) -> IntArray:
        """[tokens] of a grid that is here."""
        return self._rows[grid.name]

    def hold(self, grid: Grid) -> None:
        """One more request needs a grid that is here."""
        self._idle.pop(grid.name, None)
        self._holders[grid.name] = self._holders.get(grid.name, 0) + 1

    def release(self, grid: Grid) -> None:
        """One request less needs it."""
        left = self._holders.pop(grid.name) - 1
        if left:
            self._holders[grid.name] = left
        else:
            self._idle[grid.name] = None

    def add(self, grid: Grid) -> IntArray | None:
        """Rows for a grid that is not here; it is idle at first. None where held grids leave too little room."""
        needed = -(-grid.num_tokens // BLOCK_ROWS)
        if needed > len(self._free) + sum(self._num_blocks(name) for name in self._idle):
            return None
        while len(self._free) < needed:
            self._drop(next(iter(self._idle)))
        blocks = np.array([self._free.pop() for _ in range(needed)])
        rows = (blocks[:, None] * BLOCK_ROWS + np.arange(BLOCK_ROWS)).reshape(-1)[: grid.num_tokens]
        self._rows[grid.name] = rows
        self._idle[grid.name] = None
        return rows

    def clear(self) -> None:
        """Forget all grids: what the buffer holds is not known."""
        self._free = list(range(self.num_blocks))[::-1]
        for names in (self._rows, self._holders, self._idle):
            names.clear()

    def check(self) -> None:
        """Raise EngineError unless every block has one owner and every grid one state."""
        blocks = [block for rows in self._rows.values() for block in np.unique(rows // BLOCK_ROWS).tolist()]
        if sorted([*blocks, *self._free]) != list(range(self.num_blocks)):
            raise EngineError("a block of encoded tokens is lost or in two grids")
        if self._holders.keys() & self._idle.keys() or self._holders.keys() | self._idle.keys() != self._rows.keys():
            raise EngineError("an encoded grid is neither held nor idle, or both")

    def _num_blocks(self, name: bytes) -> int:
        return -(-self._rows[name].size // BLOCK_ROWS)

    def _drop(self, name: bytes) -> None:
        blocks = np.unique(self._rows.pop(name) // BLOCK_ROWS)
        del self._idle[name]
        self._free += blocks.tolist()[::-1]


@dataclass(eq=False)
class _Viewer:
    """A running request whose pictures are not all computed: it holds grids first … claimed - 1."""

    vision: Vision
    is_reused: BoolArray  # [grids] whose KV it took from elsewhere: they need not be encoded
    first: int = 0  # the first grid whose rows are not all computed
    claimed: int = 0  # the first grid that it has not claimed

    @property
    def reach(self) -> int | None:
        """The first token that cannot be computed yet; None: all can."""
        return int(self.vision.starts[self.claimed]) if self.claimed < len(self.vision.grids) else None


@dataclass(frozen=True)
class Encoding:
    """What a step encodes."""

    writes: tuple[GridWrite, ...] = ()
    seconds: float = 0.0  # expected


@dataclass
class _EncodingRoom:
    """What one step has for the encoder. Without a pace there is no bound; before the first measurement, one grid."""

    pace: StepPace | None
    seconds: float
    patches: int = 0
    pairs: float = 0.0

    def has_room(self, grid: Grid) -> bool:
        """Whether one more grid fits. The first always does, or its request would wait for ever."""
        patches, pairs = encoding_work([grid])
        return not self.patches or self._fits(self.patches + patches, self.pairs + pairs)

    def take(self, grid: Grid) -> None:
        patches, pairs = encoding_work([grid])
        self.patches, self.pairs = self.patches + patches, self.pairs + pairs

    @property
    def taken_seconds(self) -> float:
        return self.pace.encoding.seconds(self.patches, self.pairs) if self.pace is not None else 0.0

    def _fits(self, patches: int, pairs: float) -> bool:
        if self.pace is None:
            return True
        is_known = self.pace.encoding.per_row > 0
        return is_known and self.pace.encoding.seconds(patches, pairs) <= self.seconds


class VisionPlanner:
    """Plans the encoder's work of each step for the running requests."""

    def __init__(self, limits: VisionLimits, slots: SlotTable) -> None:
        self.grids = EncodedGrids(limits.buffer_rows)
        self.num_found = 0  # grids that a request found encoded, since the engine started
        self._slots = slots
        self._viewers: dict[int, _Viewer] = {}  # by slot

    def admit(self, slot: int, vision: Vision | None, reuse: Reuse | None = None) -> None:
        """`reuse`: what the request took from the context of its session."""
        if vision is not None:
            is_reused = np.zeros(len(vision.grids), dtype=np.bool_)
            self._viewers[slot] = _Viewer(
                vision, is_reused if reuse is None else reuse.covers(vision.starts, vision.ends)
            )

    def vacate(self, slot: int) -> None:
        viewer = self._viewers.pop(slot, None)
        if viewer is not None:
            self._release(viewer, viewer.claimed)

    def abandon(self) -> None:
        """A step failed: what it was to encode may not be there. No request is left."""
        assert not self._viewers
        self.grids.clear()

    def encode(self, slots: IntArray, pace: StepPace | None, is_alone: bool, max_rows: int) -> Encoding:
        """Choose what the next step encodes, for running requests (oldest first) that may compute `max_rows` rows.

        `is_alone`: no request decodes in this step.
        """
        room = _EncodingRoom(pace, pace.encoding_seconds(is_alone) if pace is not None else 0.0)
        writes: list[GridWrite] = []
        self._release_computed()
        for slot in slots.tolist() if self._viewers else ():
            viewer = self._viewers.get(slot)
            if viewer is not None:
                self._claim(viewer, int(self._slots.num_computed[slot]) + max_rows, room, writes)
        return Encoding(tuple(writes), room.taken_seconds)

    def limit(self, slots: IntArray, start: IntArray, pending: IntArray) -> IntArray:
        """Of the rows that requests have not computed [B], those that they can: up to the first picture not encoded."""
        if not self._viewers:
            return pending
        able = pending.copy()
        for i, slot in enumerate(slots.tolist()):
            viewer = self._viewers.get(slot)
            reach = viewer.reach if viewer is not None else None
            if reach is not None:
                able[i] = min(able[i], max(0, reach - start[i]))
        return able

    def plan(self, encoding: Encoding, slots: IntArray, start: IntArray, num_rows: IntArray) -> VisionPlan | None:
        """The vision part of a step in which requests compute num_rows [B] rows from `start` on; None: it has none."""
        if not self._viewers:
            return None
        parts = [
            (np.full(positions.size, slot), positions, buffer_rows)
            for slot, first, count in zip(slots.tolist(), start.tolist(), num_rows.tolist(), strict=True)
            if slot in self._viewers
            for positions, buffer_rows in self._seen_rows(self._viewers[slot], first, first + count)
        ]
        if not parts:
            return VisionPlan(encoding.writes, NONE, NONE, NONE) if encoding.writes else None
        return VisionPlan(encoding.writes, *(np.concatenate(each) for each in zip(*parts, strict=True)))

    def _seen_rows(self, viewer: _Viewer, first: int, last: int) -> Iterator[tuple[IntArray, IntArray]]:
        """Of the tokens first … last - 1, those of each grid, and their rows of the buffer."""
        vision = viewer.vision
        for i in range(viewer.first, viewer.claimed):
            start = int(vision.starts[i])
            begin, end = max(start, first), min(int(vision.ends[i]), last)
            if begin < end:
                yield np.arange(begin, end), self.grids.rows_of(vision.grids[i])[begin - start : end - start]

    def check(self) -> None:
        """Raise EngineError unless the buffer is consistent and only running requests hold parts of it."""
        self.grids.check()
        if self._viewers.keys() - set(self._slots.running.tolist()):
            raise EngineError("a request that does not run holds encoded pictures")

    def _release_computed(self) -> None:
        """Release the grids whose rows are computed, or were found in the prefix cache."""
        for slot, viewer in list(self._viewers.items()):
            done = int(np.searchsorted(viewer.vision.ends, self._slots.num_computed[slot], side="right"))
            self._release(viewer, done)
            viewer.first, viewer.claimed = done, max(viewer.claimed, done)
            if done == len(viewer.vision.grids):
                del self._viewers[slot]

    def _release(self, viewer: _Viewer, end: int) -> None:
        for i in range(viewer.first, min(end, viewer.claimed)):
            if not viewer.is_reused[i]:
                self.grids.release(viewer.vision.grids[i])

    def _claim(self, viewer: _Viewer, end: int, room: _EncodingRoom, writes: list[GridWrite]) -> None:
        """Hold the grids that begin before the token `end`, in order; encode those that are not here."""
        vision = viewer.vision
        while viewer.claimed < len(vision.grids) and vision.starts[viewer.claimed] < end:
            if not viewer.is_reused[viewer.claimed] and not self._hold(vision.grids[viewer.claimed], room, writes):
                return
            viewer.claimed += 1

    def _hold(self, grid: Grid, room: _EncodingRoom, writes: list[GridWrite]) -> bool:
        """Hold a grid that is here, or is encoded in this step; False where there is no room for that."""
        if grid.name in self.grids:
            self.num_found += 1
        elif not self._make(grid, room, writes):
            return False
        self.grids.hold(grid)
        return True

    def _make(self, grid: Grid, room: _EncodingRoom, writes: list[GridWrite]) -> bool:
        rows = self.grids.add(grid) if room.has_room(grid) else None
        if rows is None:
            return False
        room.take(grid)
        writes.append(GridWrite(grid, rows))
        return True
