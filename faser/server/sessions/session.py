"""One session: a stream that arrives in chunks, and the answer for each of its windows.

Knows its own state and its order of events; knows no HTTP. It is three parts side by side: whoever feeds chunks, the
thread that decodes (windows.py), and the task that asks the engine. Whatever goes wrong ends at most this session.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import time

from faser.errors import InvalidRequest
from faser.media.live import LiveFile
from faser.server import background
from faser.server.engine_client import EngineGone
from faser.server.figures import Figures
from faser.server.protocol import ApiError
from faser.server.service import Service
from faser.server.sessions.asking import WindowAsker
from faser.server.sessions.events import EventLog
from faser.server.sessions.protocol import (
    EndEvent,
    ErrorEvent,
    SessionRequest,
    SessionState,
)
from faser.server.sessions.windows import SeenWindow, WindowPlan, WindowSlot, decode

log = logging.getLogger("faser.server")

CHUNK_SECONDS = 5.0  # that a chunk waits for room before it is refused


@dataclass
class Counts:
    """Of one session, since its start."""

    bytes_received: int = 0
    frames: int = 0  # decoded
    answered: int = 0  # windows
    failed: int = 0


class VideoSession:
    def __init__(
        self,
        id: str,
        request: SessionRequest,
        plan: WindowPlan,
        service: Service,
        figures: Figures,
        max_queue: int,
        clock: Callable[[], float],
    ) -> None:
        self.id = id
        self.events = EventLog()
        self.created, self.fed = clock(), clock()  # when it was made, and when a chunk last came
        self.ended: float | None = None
        self._request, self._plan = request, plan
        self._asker = WindowAsker(id, request, plan, service)
        self._service, self._figures, self._clock = service, figures, clock
        self._max_queue = max_queue  # bytes
        self._created = int(time())
        self._loop = asyncio.get_running_loop()
        self._room = asyncio.Event()
        self._file = LiveFile(on_read=lambda: background.call_in(self._loop, self._room.set))
        self._slot = WindowSlot(skips=request.when_behind == "skip")
        self._counts = Counts()
        self._skips_told = 0  # of the skipped windows, those that an event has counted
        self._is_claimed = False
        self._reason: str | None = None  # why the stream ends, or the session has ended
        self._figures.open_sessions += 1
        self._task = asyncio.create_task(self._run())
        # The one place that every end passes, and always behind the Cancel of a question that was open.
        self._task.add_done_callback(lambda _: self._asker.close())

    @property
    def is_finishing(self) -> bool:
        """No chunk will follow."""
        return self._reason is not None

    def state(self) -> SessionState:
        counts = self._counts
        return SessionState(
            id=self.id,
            created=self._created,
            status="open" if self.ended is None else "ended",
            reason=self._reason if self.ended is not None else None,
            settings=self._request,
            bytes_received=counts.bytes_received,
            bytes_queued=self._file.num_waiting,
            frames_decoded=counts.frames,
            windows_answered=counts.answered,
            windows_skipped=self._slot.num_skipped,
            windows_failed=counts.failed,
        )

    # ── chunks ───────────────────────────────────────────────────────────────────────────────────────────────────────

    @contextmanager
    def claimed(self) -> Iterator[None]:
        """Claim the session for a chunk, before its bytes are read: one arrives at a time, in order."""
        self._refuse_ended()
        if self._is_claimed:
            message = "another chunk of this session is arriving; send chunks one after the other"
            raise ApiError(409, message, code="session_busy")
        self._is_claimed, self.fed = True, self._clock()
        try:
            yield
        finally:
            self._is_claimed, self.fed = False, self._clock()

    async def feed(self, data: bytes, is_last: bool) -> None:
        """Take a chunk whole, or none of it. Waits a little for room. The caller has claimed the session."""
        assert self._is_claimed, "chunks come one after the other"
        await self._wait_for_room(len(data))
        self._file.feed(data)
        self._counts.bytes_received += len(data)
        if is_last:
            self.finish("complete")

    async def _wait_for_room(self, size: int) -> None:
        try:
            async with asyncio.timeout(CHUNK_SECONDS):
                while self._is_full(size):
                    self._room.clear()
                    await self._room.wait()
        except TimeoutError:
            message = f"{self._file.num_waiting} bytes of this session wait to be decoded; send this chunk again later"
            raise ApiError(429, message, code="session_full", headers={"Retry-After": "1"}) from None

    def _refuse_ended(self) -> None:
        if self.is_finishing:
            message = f"the session's stream has ended ({self._reason}); create another session"
            raise ApiError(410, message, code="session_ended")

    def _is_full(self, size: int) -> bool:
        self._refuse_ended()
        return self._file.num_waiting > 0 and self._file.num_waiting + size > self._max_queue

    # ── the end ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def finish(self, reason: str) -> None:
        """The stream is complete: what has arrived is answered, then the session ends."""
        self._reason = self._reason or reason
        self._file.finish()
        self._room.set()

    def end(self, reason: str) -> None:
        """End at once: what has arrived is not answered."""
        if self.ended is None:
            self._reason = reason
            self._task.cancel()
            self._end()

    def _end(self) -> None:
        if self.ended is not None:
            return
        self._file.abort()
        self._slot.close(drop=True)
        self._room.set()
        counts = self._counts
        self.ended = self._clock()
        self._figures.open_sessions -= 1
        self._figures.windows_skipped += self._slot.num_skipped - self._skips_told
        assert self._reason is not None
        self.events.add(
            EndEvent(
                reason=self._reason,
                frames_decoded=counts.frames,
                windows_answered=counts.answered,
                windows_skipped=self._slot.num_skipped,
                windows_failed=counts.failed,
            )
        )
        self.events.close()

    # ── windows ──────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _run(self) -> None:
        try:
            work = background.start(decode, self._file, self._plan, self._hand_over)
            work.add_done_callback(lambda _: self._slot.close())
            while (seen := await self._slot.take()) is not None:
                await self._answer(seen)
            await asyncio.wrap_future(work)
            self._reason = self._reason or "complete"  # a file may say itself where it ends
        except asyncio.CancelledError:  # kept by the task, it would hold the pixels of the window
            self._reason = self._reason or "shutting_down"
        except (ApiError, InvalidRequest) as error:
            self._reason = "failed"
            self.events.add(ErrorEvent(message=str(error), code=getattr(error, "code", None) or "invalid_stream"))
        except Exception:
            log.exception("a video session failed")
            self._reason = "failed"
            self.events.add(ErrorEvent(message="an internal error; the server's log has the details"))
        finally:
            self._end()

    def _hand_over(self, seen: SeenWindow) -> bool:
        """Called in the decoder's thread."""
        background.call_in(self._loop, lambda: self._count_frames(seen.num_decoded))
        return self._slot.put(seen)

    def _count_frames(self, total: int) -> None:
        self._figures.session_frames += total - self._counts.frames
        self._counts.frames = total

    async def _answer(self, seen: SeenWindow) -> None:
        """An event for the window: its answer, or why it has none. A request that cannot be served ends the session."""
        await self._service.wait_ready()
        seen = self._slot.newer(seen)  # an engine may have taken long to start
        skipped = self._slot.num_skipped - self._skips_told
        self._skips_told += skipped
        self._figures.windows_skipped += skipped
        try:
            self.events.add(await self._asker.ask(seen, skipped))
            self._counts.answered += 1
            self._figures.windows_answered += 1
        except (ApiError, EngineGone) as error:
            self._counts.failed += 1
            error = self._service.engine_error(error) if isinstance(error, EngineGone) else error
            if error.status < 500:
                raise error from None
            self.events.add(ErrorEvent(number=seen.number, message=str(error), code=error.code))
