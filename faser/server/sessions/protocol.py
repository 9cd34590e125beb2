"""Video sessions as types: the request that creates one, its state, and its events.

Knows JSON and the meaning of every field; knows no engine, no codecs and no sockets.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from faser.media.options import DEFAULT_FPS
from faser.request import draw_seed
from faser.server.protocol import MAX_STOP_STRINGS, ApiObject, ChatRequest, Message, StopString


class SessionRequest(ApiObject, frozen=True, kw_only=True):
    """What a session asks of every window of its stream. Counts are of sampled frames. null: the default."""

    prompt: Annotated[str, Meta(min_length=1)]
    model: str | None = None
    window: Annotated[int, Meta(ge=1)] = 16  # frames that one answer is about
    stride: Annotated[int, Meta(ge=1)] = 4  # frames from one answer to the next
    fps: Annotated[float, Meta(gt=0)] = DEFAULT_FPS
    min_pixels: Annotated[int, Meta(ge=1)] | None = None  # of a frame, after resizing
    max_pixels: Annotated[int, Meta(ge=1)] | None = None
    pruning: Literal["none", "codec", "difference"] = "none"
    tau: Annotated[float, Meta(gt=0)] = 1.0  # pixels; of pruning by the codec
    threshold: Annotated[float, Meta(gt=0)] = 6.0  # levels of 0 to 255; of pruning by difference
    refresh: Annotated[float, Meta(gt=0)] | None = 8.0  # seconds from one whole grid to the next; null: no refresh
    kv_reuse: bool = False  # approximate: grids that stay in the window are not computed again
    masks: bool = False  # whether events say which groups of each grid were kept
    when_behind: Literal["skip", "wait"] = "skip"  # windows that come faster than they are answered
    max_tokens: Annotated[int, Meta(ge=1, le=2**31)] = 32
    temperature: Annotated[float, Meta(ge=0, le=2)] = 0.0
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=MAX_STOP_STRINGS)] | None = None
    ignore_eos: bool | None = None
    max_draft: Annotated[int, Meta(ge=0, le=2**31)] | None = None

    def chat(self) -> ChatRequest:
        """The same question as a request of chat, but for its video. All windows have one seed."""
        names = ("model", "max_tokens", "temperature", "top_p", "stop", "ignore_eos", "max_draft")
        given = {name: getattr(self, name) for name in names} | {"seed": draw_seed(self.seed)}
        return ChatRequest(messages=[Message(role="user", content=self.prompt)], **given)


# ── answers ──────────────────────────────────────────────────────────────────────────────────────────────────────────


class SessionState(msgspec.Struct, frozen=True):
    """A session as it stands. All counts are since its start."""

    id: str
    created: int  # seconds since 1970
    status: str  # "open" or "ended"
    reason: str | None  # why it ended
    settings: SessionRequest  # defaults filled in
    bytes_received: int
    bytes_queued: int  # received and not decoded
    frames_decoded: int
    windows_answered: int
    windows_skipped: int
    windows_failed: int
    object: str = "video.session"


class Deleted(msgspec.Struct, frozen=True):
    id: str
    deleted: bool = True
    object: str = "video.session.deleted"


class Milliseconds(msgspec.Struct, frozen=True):
    """Where the time of one window went. The engine does not tell apart, for one request, what `first_token` is."""

    decode: float  # of its new frames: decoding, resizing, cutting; without waiting for chunks
    first_token: float  # waiting for a place in the batch, vision encoder, prefill
    answer: float  # the other tokens


class KvReuse(msgspec.Struct, frozen=True):
    """What KV reuse did so far. A check answers a window exactly too, and compares."""

    is_on: bool  # false: too many checked answers differed, and windows are exact from now on
    tokens: int  # of this window, whose KV was taken over
    checks: int  # since the session began
    differing: int  # of these, answers that were not those of the exact twin


class GridMask(msgspec.Struct, frozen=True):
    """Which groups of one grid the model saw."""

    start: float  # seconds of its first frame
    end: float  # of its last one
    kept: str | None  # base64 of a bit for each group, row by row, the highest bit of a byte first; null: all groups


class Masks(msgspec.Struct, frozen=True):
    """Of the grids of a window that no earlier event had."""

    rows: int  # groups of a grid
    columns: int
    grids: list[GridMask]


class WindowEvent(msgspec.Struct, frozen=True, kw_only=True):
    """The answer for one window."""

    number: int  # of the window in the stream, from 0; skipped ones count
    start: float  # seconds of its first frame
    end: float
    text: str
    finish_reason: str | None
    frames: int
    patches: int  # that the model saw
    kept: float  # these as a share of all patches
    pruning: str  # the rule that was used
    video_tokens: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    skipped: int  # windows that were skipped since the last one that was sent to the model
    kv_reuse: KvReuse | None  # null: the session does not reuse KV
    milliseconds: Milliseconds
    masks: Masks | UnsetType = UNSET  # absent unless the session asks for masks
    dropped: int = 0  # events before this one that the reader cannot get any more


class ErrorEvent(msgspec.Struct, frozen=True, kw_only=True):
    """What went wrong. Unless an end event follows, the session goes on with its next window."""

    message: str
    code: str | None = None
    number: int | None = None  # of the window that has no answer; null: it is about the stream
    dropped: int = 0


class EndEvent(msgspec.Struct, frozen=True, kw_only=True):
    """The last event of a session."""

    reason: str
    frames_decoded: int
    windows_answered: int
    windows_skipped: int
    windows_failed: int
    dropped: int = 0


SessionEvent = WindowEvent | ErrorEvent | EndEvent
EVENT_NAMES = {WindowEvent: "window", ErrorEvent: "error", EndEvent: "end"}
