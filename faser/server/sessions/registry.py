"""All sessions of a server: creating, finding and ending them, and their limits.

Knows time by its clock and the model by the service; knows no HTTP. A session that has ended is kept for a while, so
that its last events can be read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from secrets import token_hex
from time import monotonic
from typing import TYPE_CHECKING

import msgspec

from faser.config import ServerOptions
from faser.errors import ConfigError, InvalidRequest, MissingPackage
from faser.extras import require
from faser.server.figures import Figures
from faser.server.protocol import ApiError
from faser.server.service import Service, check_model
from faser.server.sessions.protocol import SessionRequest
from faser.server.sessions.session import VideoSession
from faser.server.sessions.windows import WindowPlan
from faser.vision import VisionSettings

if TYPE_CHECKING:
    from faser.watch import WatchOptions

ENDED_SECONDS = 60.0  # that a session is kept after its end
MAX_ENDED = 64  # sessions that are kept after their end
RETRY_SECONDS = 5


class Sessions:
    def __init__(
        self, options: ServerOptions, service: Service, figures: Figures, clock: Callable[[], float] = monotonic
    ) -> None:
        self._limits, self._media_limits = options.sessions, options.media_limits
        self._service, self._figures, self._clock = service, figures, clock
        self._sessions: dict[str, VideoSession] = {}  # in the order of their creation
        self._num_opening = 0

    @property
    def _num_open(self) -> int:
        return sum(session.ended is None for session in self._sessions.values())

    async def create(self, request: SessionRequest) -> VideoSession:
        about = self._service.served().about
        check_model(request.model, about)
        if about.vision is None:
            raise ApiError(400, f"the model {about.model!r} cannot see; only text is served", param="model")
        request = msgspec.structs.replace(request, model=about.model)
        with self._opening():
            plan = await self._plan(request, about.vision, about.max_positions)
            self._service.served()  # the server may be shutting down by now, and has ended its sessions
            session = VideoSession(
                f"vs-{token_hex(12)}", request, plan, self._service, self._figures, self._limits.queue_bytes,
                self._clock,
            )  # fmt: skip
        self._sessions[session.id] = session
        ended = [each.id for each in self._sessions.values() if each.ended is not None]
        for id in ended[: max(0, len(ended) - MAX_ENDED)]:
            del self._sessions[id]
        return session

    @contextmanager
    def _opening(self) -> Iterator[None]:
        """Requests that are being checked count as sessions: a hundred at once must not pass together."""
        most = self._limits.max_sessions
        if self._num_open + self._num_opening >= most:
            message = f"{most} video sessions are open, the most that this server takes; try again later"
            raise ApiError(503, message, code="too_many_sessions", headers={"Retry-After": str(RETRY_SECONDS)})
        self._num_opening += 1
        try:
            yield
        finally:
            self._num_opening -= 1

    async def _plan(self, request: SessionRequest, settings: VisionSettings, max_positions: int) -> WindowPlan:
        with _refusing():
            require("vision")
            options = await asyncio.to_thread(watch_options, request)  # imports the decoders
            options.check(settings.frames_per_grid)
            _check_window(options, settings, self._media_limits.max_frames, self._media_limits.max_video_pixels)
        prompt = await self._service.watch_prompt(request.prompt)
        return WindowPlan(prompt, settings, options, self._media_limits, max_positions)

    def find(self, id: str) -> VideoSession:
        session = self._sessions.get(id)
        if session is None:
            raise ApiError(404, "no such video session; it was deleted or ended a while ago", code="session_not_found")
        return session

    def delete(self, id: str) -> None:
        self.find(id).end("deleted")
        del self._sessions[id]

    def tick(self) -> None:
        """End what is idle or too old, and forget what ended a while ago. Called about every second."""
        now = self._clock()
        for session in list(self._sessions.values()):
            if session.ended is not None:
                if now - session.ended > ENDED_SECONDS:
                    del self._sessions[session.id]
            elif now - session.created > self._limits.max_seconds:
                session.end("expired")
            elif not session.is_finishing and now - session.fed > self._limits.idle_seconds:
                session.finish("idle")

    def end_all(self, reason: str) -> None:
        for session in self._sessions.values():
            session.end(reason)


def watch_options(request: SessionRequest) -> WatchOptions:
    """Imports the decoders, which a server of text may not have."""
    from math import inf

    from faser.media.options import PictureOptions
    from faser.media.pruning import PruningOptions
    from faser.watch import WatchOptions

    refresh = inf if request.refresh is None else request.refresh
    return WatchOptions(
        request.window,
        request.stride,
        request.fps,
        PictureOptions(min_pixels=request.min_pixels, max_pixels=request.max_pixels),
        PruningOptions(rule=request.pruning, tau=request.tau, threshold=request.threshold, refresh=refresh),
        request.kv_reuse,
    )


def _check_window(options: WatchOptions, settings: VisionSettings, max_frames: int, max_video_pixels: int) -> None:
    """Bound what the windows of a session hold in memory."""
    from faser.watch import frame_bounds

    _, most = frame_bounds(settings, options)
    max_frames = min(max_frames, max_video_pixels // most)
    if options.window > max_frames:
        raise InvalidRequest(
            f"window={options.window}: expected at most {max_frames} frames of {most} pixels; lower it or max_pixels"
        )


@contextmanager
def _refusing() -> Iterator[None]:
    """Errors of settings, which begin with the field's name."""
    try:
        yield
    except (InvalidRequest, ConfigError) as error:
        raise ApiError(400, str(error), param=str(error).partition("=")[0]) from None
    except MissingPackage as error:
        raise ApiError(501, f"the server cannot decode video: {error}", code="missing_package") from None
