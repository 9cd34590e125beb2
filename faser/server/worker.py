"""The engine's process: frames in, steps, frames out.

Reads frames between two steps, so a cancelled request leaves before the next step is planned. Ends when its socket
closes: an engine never outlives its server. Run as `python -m faser.server.worker FD FACTORY NOTE`; FACTORY
(module:function) makes a `Served` from a `Start`, NOTE is the descriptor of memory that the HTTP process reads too.
"""

from __future__ import annotations

import faulthandler
import importlib
import logging
import select
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from time import monotonic
from typing import TypeVar

import numpy as np

from faser.engine.activity import Activity
from faser.engine.engine import Engine
from faser.engine.residency import Place
from faser.errors import FaserError, InvalidRequest
from faser.progress import progress_bar
from faser.request import Finish, FinishReason, Progress, Request, Reuse
from faser.server.messages import (
    TRACE_SIGNAL,
    About,
    Add,
    Cancel,
    DraftResidency,
    EndSession,
    Exits,
    Failed,
    Frames,
    FromEngine,
    Outputs,
    Refused,
    Running,
    Snapshot,
    Start,
    ToEngine,
    frame,
)
from faser.server.watchdog import SIZE, Note
from faser.text.tokenizer import StopChecker, Tokenizer
from faser.threads import prepare_openmp
from faser.vision import Vision

log = logging.getLogger("faser.engine")

SNAPSHOT_SECONDS = 0.1
REST_SECONDS = 1.0  # without requests, before the scheduler's state is checked
MAX_STEP_FAILURES = 3  # in a row; then the engine ends
DEVICE_LOST = "the device failed, and nothing that it holds can be trusted"
PIECES_SECONDS = 0.01  # between two steps, to read a frame that arrives in pieces
_READ_BYTES = 1 << 20

_Totals = TypeVar("_Totals", Exits, DraftResidency)


@dataclass(frozen=True)
class Served:
    """What a factory makes: an engine, and its description."""

    engine: Engine
    about: About
    tokenizer: Tokenizer | None


class Worker:
    """One engine and its socket."""

    def __init__(
        self,
        served: Served,
        connection: socket.socket,
        clock: Callable[[], float] = monotonic,
        note: Note | None = None,
    ) -> None:
        self._engine = served.engine
        self._tokenizer = served.tokenizer
        self._connection = connection
        self._poll = select.poll()  # select() cannot wait for descriptors above 1023, which a busy server may have
        self._poll.register(connection, select.POLLIN)
        self._frames = Frames(ToEngine)
        self._clock = clock
        self._last_snapshot = float("-inf")
        self._step_failures = 0
        self._failed_in_a_row = 0
        self._running = 0  # as last sent
        self._open = True
        self._note = note or Note(bytearray(SIZE))
        self._engine.on_plan = self._tell_running
        self._engine.on_activity = self._note.enter

    def run(self) -> None:
        """Serve until the HTTP process closes the socket.

        After REST_SECONDS without requests the scheduler's state is checked for lost pages; then the engine may use the
        idle time to measure its profile.
        """
        checked, improves = False, True
        self._send([], is_last=True)
        while self._open:
            if self._engine.has_work:
                self._receive(0)
                progress = self._step()
                self._send(progress, is_last=not self._engine.has_work)
                checked, improves = False, True
            elif not self._receive(self._idle_timeout(checked, improves)):
                if checked:
                    improves = self._improve()
                    if self._engine.residency is not None:
                        self._send([], is_last=not improves)
                else:
                    self._engine.scheduler.check()
                    checked = True

    def _idle_timeout(self, checked: bool, improves: bool) -> float | None:
        """Seconds to wait for a frame while there are no requests; None: for ever. A draft that is away comes back."""
        residency = self._engine.residency
        if (checked and improves) or (residency is not None and residency.is_moving):
            return 0
        is_away = residency is not None and residency.place is not Place.RESIDENT
        return REST_SECONDS if is_away or not checked else None

    def _improve(self) -> bool:
        """Use an idle moment; returns whether there is more to do. An error is logged and harms no request."""
        try:
            return self._engine.use_idle_moment()
        except Exception as error:
            log.exception("work in an idle moment failed")
            if is_device_lost(error):
                raise FaserError(DEVICE_LOST) from error
            return False

    def _step(self) -> list[Progress]:
        try:
            progress = self._engine.step()
        except Exception as error:
            return self._fail_running(error)
        self._failed_in_a_row = 0
        return progress

    def _fail_running(self, error: Exception) -> list[Progress]:
        """A step that raises fails its requests, with a reason; those that wait go on waiting.

        The engine ends where it cannot be trusted any more: after several failed steps in a row, after an error of the
        device, and if the scheduler's books do not agree. Then every open request is told so, and another is started.
        """
        log.exception("a step failed; the engine was %s", self._note.read().text(monotonic()))
        if is_device_lost(error):
            raise FaserError(DEVICE_LOST) from error
        self._step_failures += 1
        self._failed_in_a_row += 1
        reason = f"a step of the engine failed ({type(error).__name__})"
        ended = [_with_error(item, reason) for item in self._engine.abandon(FinishReason.FAILED, keep_waiting=True)]
        self._engine.scheduler.check()
        if self._failed_in_a_row >= MAX_STEP_FAILURES:
            self._send(ended, is_last=True)
            raise FaserError(f"{self._failed_in_a_row} steps failed in a row; the last: {error}") from error
        return ended

    # ── frames ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _receive(self, timeout: float | None) -> bool:
        """Read frames, waiting up to `timeout` seconds (None: for ever); returns whether any came.

        The pixels of a video are larger than the socket's buffer. So the rest of a frame that has begun is waited for,
        but running requests wait no longer than PIECES_SECONDS between two steps.
        """
        arrived, end = False, inf
        if timeout != 0:
            self._note.enter(Activity.WAITING)
        while self._open and self._poll.poll(None if timeout is None else 1e3 * timeout):
            data = self._read()
            self._open, arrived, timeout = bool(data), True, 0
            for message in self._frames.feed(data):
                self._take(message)
            if self._frames.is_within:
                now = self._clock()
                end = min(end, now + PIECES_SECONDS)
                timeout = end - now
                if timeout <= 0:
                    break
        return arrived

    def _read(self) -> bytes:
        """Empty when the HTTP process has gone; if it left frames of ours unread, the socket raises."""
        try:
            return self._connection.recv(_READ_BYTES)
        except ConnectionResetError:
            return b""

    def _take(self, message: ToEngine) -> None:
        if isinstance(message, Cancel):
            self._engine.cancel(message.id)
            return
        if isinstance(message, EndSession):
            self._engine.scheduler.retained.drop(message.name)
            return
        vision = message.vision.vision() if message.vision is not None else None
        for name, seed in message.choices:
            try:
                self._add(message, name, seed, vision)
            except InvalidRequest as error:
                self._write(Refused(name, str(error)))

    def _add(self, message: Add, name: str, seed: int, vision: Vision | None) -> None:
        params, checker = message.params, None
        if params.stop:
            assert self._tokenizer is not None, "the HTTP process refuses stop strings without a tokenizer"
            checker = StopChecker(self._tokenizer, params.stop, params.min_tokens)
        request = Request(
            id=name,
            prompt_token_ids=tuple(message.prompt_token_ids),
            params=params,
            seed=seed,
            stop_ids=frozenset(message.stop_ids),
            vision=vision,
            session=message.session,
            reuse=None if message.reuse is None else Reuse(*(np.array(part) for part in message.reuse)),
        )
        self._engine.add(request, checker)

    def _send(self, progress: list[Progress], is_last: bool) -> None:
        """Send progress, and a snapshot ten times a second. `is_last`: nothing may follow for a while."""
        now = self._clock()
        due = now - self._last_snapshot >= SNAPSHOT_SECONDS or is_last
        if progress or due:
            self._note.enter(Activity.SENDING)
            snapshot = take_snapshot(self._engine, now, self._step_failures) if due else None
            self._last_snapshot = now if due else self._last_snapshot
            self._write(Outputs(progress, snapshot))

    def _tell_running(self) -> None:
        """Send the size of the batch before the step runs, because a step can take seconds."""
        running = self._engine.scheduler.num_running
        if running != self._running:
            self._running = running
            self._write(Running(running))

    def _write(self, message: FromEngine) -> None:
        try:
            self._connection.sendall(frame(message))
        except (BrokenPipeError, ConnectionResetError):
            self._open = False


def is_device_lost(error: BaseException) -> bool:
    """Whether this is an error of CUDA, after which a process can do nothing more on the device.

    By name, because this module does not import torch: torch.AcceleratorError, and the texts of torch and Triton. A
    lack of memory is none: it leaves the device as it was.
    """
    names, text = {kind.__name__ for kind in type(error).__mro__}, str(error)
    if "OutOfMemoryError" in names or "out of memory" in text:
        return False
    return "AcceleratorError" in names or "CUDA error" in text or "Triton Error [CUDA]" in text


def _with_error(item: Progress, reason: str) -> Progress:
    if item.finish is None or item.finish.reason is not FinishReason.FAILED:
        return item
    return item._replace(finish=Finish(FinishReason.FAILED, item.finish.stats, error=item.finish.error or reason))


def take_snapshot(engine: Engine, now: float, step_failures: int = 0) -> Snapshot:
    """The fields that EngineStats, ExitStats and ResidencyStats have too are copied by name."""
    stats, scheduler, last = engine.stats, engine.scheduler, engine.stats.last
    totals = {name: getattr(stats, name) for name in Snapshot.__struct_fields__ if hasattr(stats, name)}
    totals |= {name: value.tolist() for name, value in totals.items() if isinstance(value, np.ndarray)}
    exits = engine.exits.stats if engine.exits is not None else None
    residency = engine.residency.stats if engine.residency is not None else None
    return Snapshot(
        **totals,
        time=now,
        preemptions=scheduler.num_preemptions,
        prefix_queries=scheduler.prefixes.num_queries,
        prefix_hits=scheduler.prefixes.num_hits,
        step_failures=step_failures,
        pages_held=scheduler.target_pages.num_held,
        num_pages=scheduler.target_pages.num_pages,
        draft_pages_held=scheduler.draft_pages.num_held if scheduler.draft_pages is not None else None,
        last_decoding=last.num_decoding if last is not None else 0,
        last_drafting=last.num_drafting if last is not None else 0,
        last_drafted=last.drafted if last is not None else 0,
        speculating_changed=last.speculating_changed if last is not None else None,
        grids_found=scheduler.vision.num_found if scheduler.vision is not None else 0,
        tokens_reused=scheduler.retained.num_taken,
        exits=_copied(Exits, exits) if exits is not None else None,
        residency=_copied(DraftResidency, residency) if residency is not None else None,
        misfit=engine.draft_check.misfit or "",
    )


def _copied(kind: type[_Totals], stats: object) -> _Totals:
    return kind(*(getattr(stats, name) for name in kind.__struct_fields__))


def main() -> int:
    prepare_openmp()
    descriptor, factory, note = int(sys.argv[1]), sys.argv[2], Note.at(int(sys.argv[3]))
    faulthandler.register(TRACE_SIGNAL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server closes the socket when the engine should end
    connection = socket.socket(fileno=descriptor)
    start = _read_start(connection)
    logging.basicConfig(level=start.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    module, _, name = factory.partition(":")
    with progress_bar("importing torch"):
        make: Callable[[Start], Served] = getattr(importlib.import_module(module), name)
    try:
        served = make(start)
    except FaserError as error:
        with suppress(BrokenPipeError):
            connection.sendall(frame(Failed(str(error))))
        return 1
    with connection:
        with suppress(BrokenPipeError):  # the server has gone meanwhile, which the worker notices
            connection.sendall(frame(served.about))
        Worker(served, connection, note=note).run()
    served.engine.close()
    return 0


def _read_start(connection: socket.socket) -> Start:
    frames = Frames(Start)
    while data := connection.recv(_READ_BYTES):
        for start in frames.feed(data):
            return start  # type: ignore[no-any-return]
    raise SystemExit(0)  # the server ended before it sent a frame


if __name__ == "__main__":
    sys.exit(main())
