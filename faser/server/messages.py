"""Messages between the HTTP process and the engine's process: MessagePack frames on a socket pair.

When a process dies, the other reads end-of-file from the socket at once, so nothing is polled or timed. Knows the types
of the messages and their framing; knows no engine and no HTTP.
"""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np

from faser.request import Progress, SamplingParams
from faser.vision import Grid, Vision, VisionSettings

TRACE_SIGNAL = signal.SIGUSR1  # makes the engine's process write the stacks of its threads to the log
_LENGTH_BYTES = 4
BUFFER_BYTES = 4 * 2**20  # of the socket in each direction, so that a busy HTTP process does not stall a step


class Start(msgspec.Struct, frozen=True):
    """The first frame to an engine's process: what to serve. `engine`: fields of EngineOptions."""

    model: str | None
    draft: str | None
    engine: dict[str, Any]
    chat_template: str | None
    served_model_name: str | None
    log_level: str
    generation_config: str = "auto"


class SentGrid(msgspec.Struct, frozen=True, array_like=True):
    """A Grid as bytes. Decoded arrays are views of the frame that they came in."""

    name: bytes  # hashed by the sender: the receiver is the engine, which must not wait for it
    patches: memoryview
    shape: tuple[int, ...]  # of patches
    height: int
    width: int
    merge_size: int
    kept: memoryview | None  # int64

    @classmethod
    def of(cls, grid: Grid) -> SentGrid:
        kept = _bytes_of(grid.kept) if grid.kept is not None else None
        patches = _bytes_of(grid.patches)
        return cls(grid.name, patches, grid.patches.shape, grid.height, grid.width, grid.merge_size, kept)

    def grid(self) -> Grid:
        patches = np.frombuffer(self.patches, np.uint8).reshape(self.shape)
        kept = np.frombuffer(self.kept, np.int64) if self.kept is not None else None
        grid = Grid(patches, self.height, self.width, self.merge_size, kept)
        vars(grid)["name"] = self.name  # what the cached property would compute
        return grid


class SentVision(msgspec.Struct, frozen=True, array_like=True):
    """A Vision as bytes."""

    grids: list[SentGrid]
    starts: memoryview  # int64
    positions: memoryview | None  # int64
    shift: int = 0

    @classmethod
    def of(cls, vision: Vision) -> SentVision:
        """Hashes the pixels and copies none: call it in a thread."""
        positions = _bytes_of(vision.positions) if vision.positions is not None else None
        return cls([SentGrid.of(grid) for grid in vision.grids], _bytes_of(vision.starts), positions, vision.shift)

    def vision(self) -> Vision:
        positions = np.frombuffer(self.positions, np.int64).reshape(-1, 3) if self.positions is not None else None
        grids, starts = tuple(sent.grid() for sent in self.grids), np.frombuffer(self.starts, np.int64)
        return Vision(grids, starts, positions, self.shift)

    @property
    def num_bytes(self) -> int:
        """Of pixels."""
        return sum(grid.patches.nbytes for grid in self.grids)


def _bytes_of(array: np.ndarray[Any, Any]) -> memoryview:
    kind = np.uint8 if array.dtype == np.uint8 else np.int64
    return np.ascontiguousarray(array, kind).reshape(-1).data.cast("B")


class Add(msgspec.Struct, frozen=True, tag="add"):
    """One prompt and its choices, which share all but id and seed. `others`: those of each choice beyond the first."""

    id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    stop_ids: list[int]
    others: list[tuple[str, int]] = []
    vision: SentVision | None = None
    session: str | None = None
    reuse: tuple[list[int], list[int], list[int]] | None = None  # starts, ends and sources, as in Reuse

    @property
    def choices(self) -> list[tuple[str, int]]:
        return [(self.id, self.seed), *self.others]


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    id: str


class EndSession(msgspec.Struct, frozen=True, tag="end_session"):
    """The engine gives up the context that a session has kept."""

    name: str


ToEngine = Add | Cancel | EndSession


class About(msgspec.Struct, frozen=True, tag="ready"):
    """The engine is ready: all that the HTTP process needs to know of it. `reasons`: why each value was chosen."""

    model: str
    draft: str | None
    policy: str
    device: str
    dtype: str
    reasons: dict[str, str]
    vocab_size: int
    end_ids: list[int]
    max_model_len: int
    max_running: int
    page_size: int
    num_pages: int
    kv_bytes: int
    load_seconds: float
    tokenizer: str | None  # tokenizer.json
    chat_template: tuple[str, str, str] | None  # source, bos, eos
    sampling: dict[str, Any] = {}  # fields of SamplingParams for requests that do not give them
    vision: VisionSettings | None = None  # None: the model has no eyes
    max_positions: int = 0  # of a model with eyes
    kv_dtype: str = ""  # of the target's keys and values

    @property
    def kv_tokens(self) -> int:
        return self.num_pages * self.page_size

    @property
    def max_tokens(self) -> int:
        """The most tokens of one request, prompt and output: the smaller of the model's context and the KV pool."""
        return min(self.max_model_len, self.kv_tokens)


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The engine could not start. Its last frame."""

    message: str


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The engine did not accept a request."""

    id: str
    message: str


class Exits(msgspec.Struct, frozen=True, array_like=True):
    """Totals of early exit since the engine started."""

    pruned: dict[int, int]  # tokens, by the layer after which they were dropped
    trials: int  # steps that ran all layers to check the rule
    trial_pruned: int  # tokens the rule would have pruned in trials
    trial_false: int  # of trial_pruned, tokens that the target accepted
    predicted_seconds: float  # saved, by the profile
    measured_seconds: float  # saved, by the clock against the profile of all rows


class DraftResidency(msgspec.Struct, frozen=True, array_like=True):
    """Whether the draft is on the device, and totals of its moves since the engine started."""

    is_resident: bool
    away_seconds: float
    moves: int
    pages_gained: int  # of the target's pages, those in the draft's memory
    last_move_seconds: float
    failure: str | None  # why the latest move failed; None: it did not, or the draft is back


class Snapshot(msgspec.Struct, frozen=True, array_like=True):
    """Totals of the engine since it started, and figures of its latest step. Times are of the monotonic clock."""

    time: float
    steps: int
    emitted: int
    drafted: int
    verified: int
    accepted: int
    preemptions: int
    prefix_queries: int
    prefix_hits: int
    step_failures: int
    step_seconds: float
    predicted_seconds: float
    off_seconds: float
    plan_seconds: float
    draft_seconds: float
    verify_seconds: float
    pages_held: int
    num_pages: int  # of the target now: more while the draft is away
    draft_pages_held: int | None  # None: no draft model
    lengths: list[int]
    verified_per_position: list[int]
    accepted_per_position: list[int]
    last_decoding: int
    last_drafting: int
    last_drafted: int
    speculating_changed: float | None
    exits: Exits | None = None  # None: verifications have no early exit
    chunks: int = 0  # times that a request drafted while its frontier was verified
    hits: int = 0  # of chunks, those whose drafts became the next frontier
    lanes: int = 1  # parts of the device's SMs that the last step ran on
    residency: DraftResidency | None = None  # None: the draft never leaves
    encode_seconds: float = 0.0
    grids_encoded: int = 0
    grids_found: int = 0  # that a request found encoded
    tokens_reused: int = 0  # whose KV was taken from the context of a session
    looked_up: int = 0  # of drafted, tokens from prompt lookup
    lookup_accepted: int = 0  # of accepted, tokens from prompt lookup
    by_context: list[list[int]] = []  # as EngineStats has it
    misfit: str = ""  # why the draft cannot be meant for the target; empty: nothing is known against it

    @property
    def kv_used(self) -> float:
        """Share of the target's pages in use. Pages of a pool that shrank may lie beyond its end."""
        return min(1.0, self.pages_held / self.num_pages)

    @property
    def draft_kv_used(self) -> float | None:
        """The same of the draft, whose pool is as large as the target's while the draft is resident."""
        return self.draft_pages_held / self._base_pages if self.draft_pages_held is not None else None

    @property
    def kv_gained(self) -> float | None:
        """Share by which the target's pool is larger because the draft is away; None: it is not."""
        gained = self.residency.pages_gained if self.residency is not None else 0
        return gained / self._base_pages if gained else None

    @property
    def draft_failure(self) -> str | None:
        """What is wrong with the draft; a move that failed comes first."""
        return (self.residency.failure if self.residency is not None else None) or self.misfit or None

    @property
    def _base_pages(self) -> int:
        return self.num_pages - (self.residency.pages_gained if self.residency is not None else 0)


class Outputs(msgspec.Struct, frozen=True, tag="outputs"):
    progress: list[Progress]
    snapshot: Snapshot | None = None


class Running(msgspec.Struct, frozen=True, tag="running"):
    """Requests in the batch. Sent before a step is executed, if the number has changed."""

    number: int


FromEngine = About | Failed | Refused | Outputs | Running

_encoder = msgspec.msgpack.Encoder(enc_hook=dict)  # for logit_bias, a mapping that is no dict


def frame(message: msgspec.Struct) -> bytes:
    body = _encoder.encode(message)
    return len(body).to_bytes(_LENGTH_BYTES, "big") + body


def large_frame(message: msgspec.Struct) -> bytearray:
    """The same bytes as `frame`, with one copy less: faster for pixels, slower for short messages."""
    buffer = bytearray(_LENGTH_BYTES)
    _encoder.encode_into(message, buffer, _LENGTH_BYTES)
    buffer[:_LENGTH_BYTES] = (len(buffer) - _LENGTH_BYTES).to_bytes(_LENGTH_BYTES, "big")
    return buffer


class Frames:
    """Splits a byte stream into messages of one type."""

    def __init__(self, type_: Any) -> None:
        self._decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(type_)
        self._buffer = bytearray()

    @property
    def is_within(self) -> bool:
        """Whether a message has begun and is not complete."""
        return bool(self._buffer)

    def feed(self, data: bytes) -> Iterator[Any]:
        """The messages completed by `data`."""
        self._buffer += data
        start = 0
        while len(self._buffer) - start >= _LENGTH_BYTES:
            end = start + _LENGTH_BYTES + int.from_bytes(self._buffer[start : start + _LENGTH_BYTES], "big")
            if len(self._buffer) < end:
                break
            with memoryview(self._buffer) as view:
                body = bytearray(
                    view[start + _LENGTH_BYTES : end]
                )  # decoded arrays are views, which torch wants writable
            start = end
            yield self._decoder.decode(body)
        del self._buffer[:start]


def socket_pair() -> tuple[socket.socket, socket.socket]:
    ours, theirs = socket.socketpair()
    for end in (ours, theirs):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
    return ours, theirs
