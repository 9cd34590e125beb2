"""The HTTP process's side of the engine: start it, talk to it, notice when it dies, start it again.

Knows the engine's process and its frames; knows nothing of HTTP or JSON. Every submitted request ends: with the
engine's last frame for it, or with `EngineGone` as soon as the engine's socket closes.
"""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import count
from time import monotonic
from typing import Any

from faser.config import ServerOptions
from faser.request import FinishReason, Progress, Reuse, SamplingParams
from faser.server import endings
from faser.server.figures import Figures
from faser.server.messages import (
    TRACE_SIGNAL,
    About,
    Add,
    Cancel,
    EndSession,
    Failed,
    Frames,
    FromEngine,
    Outputs,
    Refused,
    Running,
    SentVision,
    Start,
    frame,
    large_frame,
    socket_pair,
)
from faser.server.watchdog import Watchdog

log = logging.getLogger("faser.server")

MAX_DEATHS = 3  # within DEATH_SECONDS; then the engine is not started again
DEATH_SECONDS = 60.0
TRACE_SECONDS = 0.5  # in which a hung engine writes what it was doing, before it is killed
_REAP_SECONDS = 5.0


class State(StrEnum):
    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"
    FAILED = "failed"  # for good


class EngineGone(Exception):
    """The engine ended while the request was open."""


class ShuttingDown(EngineGone):
    """The server ended the engine while the request was open."""


@dataclass(slots=True, eq=False)
class Track:
    """One open choice of an HTTP request, with the times that its figures need."""

    id: str
    index: int
    arrived: float
    num_prompt: int
    stream: Stream
    first: float | None = None  # when the first token came
    last: float = 0.0  # when the latest token came
    num_tokens: int = 0


Arrival = tuple[int, Progress | Refused]  # index of the choice, and the engine's message about it


class Stream:
    """The engine's messages about the choices of one HTTP request, in order."""

    def __init__(self, num_pixel_bytes: int = 0) -> None:
        self.num_pixel_bytes = num_pixel_bytes  # that the engine holds until the last choice ends
        self._arrivals: list[Arrival] = []
        self._waiter: asyncio.Future[None] | None = None
        self._error: Exception | None = None

    def push(self, index: int, message: Progress | Refused) -> None:
        self._arrivals.append((index, message))
        self._wake()

    def fail(self, error: Exception) -> None:
        """End the stream with an error. Messages that came before are still delivered."""
        if self._error is None:
            self._error = error
            self._wake()

    async def take(self) -> list[Arrival]:
        """All messages since the last call, at least one; raises the error given to `fail`."""
        if not self._arrivals and self._error is None:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if not self._arrivals and self._error is not None:
            raise self._error
        arrivals, self._arrivals = self._arrivals, []
        return arrivals

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class EngineClient:
    def __init__(self, options: ServerOptions, figures: Figures) -> None:
        self.state = State.STARTING
        self.about: About | None = None
        self.failure: str | None = None  # why the engine stays down
        self.num_restarts = 0
        self.ready = asyncio.Event()
        self._options = options
        self._figures = figures
        self._tracks: dict[str, Track] = {}
        self._num_in_batch = 0  # as the engine last reported
        self._ids = count()
        self._transport: asyncio.WriteTransport | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._watchdog: Watchdog | None = None  # of the latest engine
        self._closing = False
        self._was_hung = False  # the engine that ended last was killed as hung
        self._last_frame = monotonic()  # when the engine last sent a frame, or got its first request
        self._start_time = monotonic()
        self._start_seconds: float | None = None  # of the last start that succeeded

    @property
    def num_open(self) -> int:
        """Choices that run or wait."""
        return len(self._tracks)

    @property
    def num_pixel_bytes(self) -> int:
        """Of open requests, whose choices share their pixels, and of all that waits to be written to the engine.

        Pixels that wait count twice: what is written of a request is not known, and they may be of a cancelled one.
        """
        waiting = self._transport.get_write_buffer_size() if self._transport is not None else 0
        streams = {track.stream for track in self._tracks.values()}
        return waiting + sum(stream.num_pixel_bytes for stream in streams)

    @property
    def num_running(self) -> int:
        """Choices in the batch, as the engine last reported. If one has ended since, a waiting one takes its place."""
        return min(self._num_in_batch, self.num_open)

    @property
    def num_waiting(self) -> int:
        return self.num_open - self.num_running

    @property
    def seconds_to_start(self) -> float | None:
        """Seconds left of the current start, if it takes as long as the last one; None before the first has ended."""
        if self._start_seconds is None:
            return None
        return self._start_seconds - (monotonic() - self._start_time)

    # ── requests ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def submit(
        self,
        prompts: Sequence[tuple[list[int], Sequence[int]]],
        params: SamplingParams,
        stop_ids: Sequence[int],
        arrived: float,
        vision: SentVision | None = None,
        session: str | None = None,
        reuse: Reuse | None = None,
    ) -> tuple[Stream, list[Track]]:
        """Send (prompt ids, a seed for each choice) of each prompt; the stream delivers the engine's messages.

        `vision`: what the prompt shows, where there is only one. `session` and `reuse`: as in a Request.
        """
        if self._transport is None or self.state is not State.READY:
            raise EngineGone("the engine is not running")
        assert vision is None or len(prompts) == 1, "a request with pictures has one prompt"
        stream = Stream(0 if vision is None else vision.num_bytes)
        tracks: list[Track] = []
        frames: list[bytes | bytearray] = []
        for prompt, seeds in prompts:
            ids = [str(next(self._ids)) for _ in seeds]
            tracks += [Track(each, len(tracks) + i, arrived, len(prompt), stream) for i, each in enumerate(ids)]
            others = list(zip(ids[1:], seeds[1:], strict=True))
            taken = None if reuse is None else (reuse.starts.tolist(), reuse.ends.tolist(), reuse.sources.tolist())
            message = Add(ids[0], prompt, params, seeds[0], list(stop_ids), others, vision, session, taken)
            frames.append(frame(message) if vision is None else large_frame(message))
        if not self._tracks:
            self._last_frame = monotonic()
        self._tracks.update((track.id, track) for track in tracks)
        self._transport.write(frames[0] if len(frames) == 1 else b"".join(frames))
        return stream, tracks

    def cancel(self, tracks: Sequence[Track], reason: FinishReason = FinishReason.CANCELLED) -> None:
        """Cancel those that are still open; the engine frees them before its next step."""
        open_ones = [track for track in tracks if self._tracks.pop(track.id, None) is not None]
        now = monotonic()
        for track in open_ones:
            self._figures.ended(track, reason, now)
        if open_ones and self._transport is not None:
            self._transport.write(b"".join(frame(Cancel(track.id)) for track in open_ones))

    def end_session(self, name: str) -> None:
        """The engine gives up what a session has kept."""
        if self._transport is not None:
            self._transport.write(frame(EndSession(name)))

    def fail_all(self, error: type[EngineGone], reason: str) -> None:
        """End every open request with an error."""
        for track in list(self._tracks.values()):
            track.stream.fail(error(reason))
        self.cancel(list(self._tracks.values()), FinishReason.FAILED)

    def check_alive(self) -> None:
        """Say what takes long, and kill a hung engine.

        An engine with open requests sends a frame after every step: long silence means hung.
        """
        now = monotonic()
        slow = self._watchdog.take_warning(now) if self._watchdog is not None and self.state is State.READY else None
        if slow is not None:
            log.warning("the engine is slow: %s", slow)
        silent = now - self._last_frame
        is_hung = self.num_open and self.state is State.READY and silent > self._options.engine_timeout
        if is_hung and not self._was_hung and self._process is not None:
            self._was_hung = True
            has = f"{self.num_running} requests in the batch, {self.num_waiting} waiting"
            text = "the engine has been silent for %.0f s (%s); it was %s; its stack follows, then it is killed"
            log.error(text, silent, has, self._doing())
            self._process.send_signal(TRACE_SIGNAL)
            # Its socket closes then, and `run` starts another.
            asyncio.get_running_loop().call_later(TRACE_SECONDS, self._process.kill)

    def _doing(self) -> str:
        """What the latest engine is doing, or did last."""
        return self._watchdog.doing.text(monotonic()) if self._watchdog is not None else "not started"

    # ── the process ──────────────────────────────────────────────────────────────────────────────────────────────────

    async def run(self) -> None:
        """Keep an engine running until `close`, or until it fails for good (state FAILED)."""
        deaths: deque[float] = deque(maxlen=MAX_DEATHS)
        while not self._closing:
            was_ready, reason, advice = await self._run_once()
            if self._closing:
                return
            deaths.append(monotonic())
            often = len(deaths) == MAX_DEATHS and deaths[-1] - deaths[0] < DEATH_SECONDS
            if often or not was_ready or self._options.on_engine_failure == "exit":
                times = f", {MAX_DEATHS} times within a minute" if often else ""
                self.failure = self.failure or f"{reason}{times}: {advice}"
                self.state = State.FAILED
                return
            log.error("%s: %s. Restarting it", reason, advice)
            self.state = State.RESTARTING
            self.num_restarts += 1

    async def _run_once(self) -> tuple[bool, str, str]:
        """Run one engine to its end: whether it was ever ready, how it ended, and what to do about it."""
        lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.ready.clear()
        try:
            await self._spawn(lost)
        except OSError as error:  # no descriptors or no processes left
            reason = f"the engine process could not be started ({error.strerror or error})"
            return False, reason, "raise the limits on processes and open files (ulimit -u, ulimit -n)"
        await lost
        was_ready = self.ready.is_set()
        if was_ready and not self._closing:
            log.error("the engine is gone; it was %s", self._doing())
        self.ready.clear()
        self.fail_all(EngineGone, "the engine process ended while it worked on this request; send it again")
        assert self._process is not None
        code = await asyncio.to_thread(_reap, self._process)
        advice = endings.HUNG if self._was_hung else endings.advice(code)
        self._was_hung = False
        return was_ready, f"the engine process ended ({endings.status(code)})", advice

    async def _spawn(self, lost: asyncio.Future[None]) -> None:
        self._forget_watchdog()
        self._watchdog = Watchdog()
        ours, theirs = socket_pair()
        given = [theirs.fileno(), self._watchdog.descriptor]
        names = [str(given[0]), self._options.engine_factory, str(given[1])]
        with theirs:
            # In its own session: Ctrl-C in a terminal reaches the server alone, which then ends the engine.
            command = [sys.executable, "-m", "faser.server.worker", *names]
            self._process = subprocess.Popen(command, pass_fds=given, start_new_session=True)

        def gone() -> None:
            self._lose()
            if not lost.done():
                lost.set_result(None)

        loop = asyncio.get_running_loop()
        self._transport, _ = await loop.create_unix_connection(lambda: _Connection(self._receive, gone), sock=ours)
        options = self._options
        start = Start(
            options.model, options.draft, vars(options.engine), options.chat_template, options.served_model_name,
            options.log_level, options.generation_config,
        )  # fmt: skip
        self._transport.write(frame(start))

    def _lose(self) -> None:
        """Note at once that the engine has gone, before anything writes to the closed socket."""
        self._transport = None
        self._num_in_batch = 0
        self._figures.latest = None
        if not self._closing and self.failure is None:
            self.state = State.RESTARTING
            self._start_time = monotonic()

    async def close(self) -> None:
        """End the engine: its process ends when its socket closes."""
        self._closing = True
        reason = "the server was shut down before this request had ended; send it again when a server is up"
        self.fail_all(ShuttingDown, reason)
        if self._transport is not None:
            self._transport.close()
        if self._process is not None:
            await asyncio.to_thread(_reap, self._process)
        self._forget_watchdog()

    def _forget_watchdog(self) -> None:
        if self._watchdog is not None:
            self._watchdog.close()
            self._watchdog = None

    def _receive(self, message: FromEngine) -> None:
        if isinstance(message, Outputs):
            self._receive_outputs(message)
        elif isinstance(message, Refused):
            track = self._tracks.pop(message.id, None)
            if track is not None:
                track.stream.push(track.index, message)
        elif isinstance(message, Running):
            self._num_in_batch = message.number
        elif isinstance(message, Failed):
            self.failure = message.message
        else:
            self.about, self.state = message, State.READY
            self._start_seconds = monotonic() - self._start_time
            self.ready.set()

    def _receive_outputs(self, message: Outputs) -> None:
        now, figures, tracks = monotonic(), self._figures, self._tracks
        self._last_frame = now
        for item in message.progress:
            track = tracks.get(item.request_id)
            if track is None:
                continue  # cancelled
            if item.token_ids:
                figures.gained(track, len(item.token_ids), now)
            if item.finish is not None:
                del tracks[item.request_id]
                figures.ended(track, item.finish.reason, now)
            track.stream.push(track.index, item)
        if message.snapshot is not None:
            figures.latest = message.snapshot


class _Connection(asyncio.Protocol):
    def __init__(self, receive: Callable[[Any], None], gone: Callable[[], None]) -> None:
        self._receive = receive
        self._gone = gone
        self._frames = Frames(FromEngine)

    def data_received(self, data: bytes) -> None:
        for message in self._frames.feed(data):
            self._receive(message)

    def connection_lost(self, exc: Exception | None) -> None:
        self._gone()


def _reap(process: subprocess.Popen[bytes]) -> int:
    """The return code of a process whose socket is closed. It is killed if it does not end by itself."""
    try:
        return process.wait(_REAP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()
