"""From a session's stream to its windows, in a thread of its own.

Knows the decoder's thread and how it hands windows over; knows no requests. At most one window waits: when the next one
is complete it takes the place of the waiting one, which is skipped, or it waits itself, and then the decoder waits too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from threading import Condition
from typing import TYPE_CHECKING

from faser.media.limits import MediaLimits
from faser.media.live import LiveFile, StreamAborted
from faser.server import background
from faser.vision import VisionSettings

if TYPE_CHECKING:
    from faser.watch import VideoWindow, WatchOptions


@dataclass(frozen=True)
class WindowPlan:
    """How a stream becomes prompts."""

    prompt: list[int]  # with one placeholder
    settings: VisionSettings
    options: WatchOptions
    limits: MediaLimits
    max_positions: int  # of the model


@dataclass(frozen=True, eq=False)
class SeenWindow:
    number: int  # in the stream, from 0
    window: VideoWindow
    rule: str  # by which it was pruned
    decode_seconds: float  # without waiting for bytes
    num_decoded: int  # frames of the stream so far


def decode(file: LiveFile, plan: WindowPlan, hand_over: Callable[[SeenWindow], bool]) -> None:
    """Decode to the end of the stream, or until a window is not taken. Raises InvalidRequest for a bad stream."""
    from faser.media.pruning import rule_for  # imports the decoders
    from faser.media.reader import FrameReader
    from faser.watch import windows

    with suppress(StreamAborted), FrameReader(file, plan.limits) as reader:
        rule, waited = rule_for(reader, plan.options.pruning), file.waited_seconds
        for number, window in enumerate(windows(reader, plan.settings, plan.options)):
            seconds = max(0.0, window.decode_seconds - (file.waited_seconds - waited))
            waited = file.waited_seconds
            if not hand_over(SeenWindow(number, window, rule, seconds, reader.num_decoded)):
                return


class WindowSlot:
    """Room for one window, between the decoder's thread, which puts, and the event loop, which takes."""

    def __init__(self, skips: bool) -> None:
        self.num_skipped = 0
        self._skips = skips
        self._waiting: SeenWindow | None = None
        self._is_closed = False
        self._changed = Condition()
        self._loop, self._news = asyncio.get_running_loop(), asyncio.Event()

    def put(self, window: SeenWindow) -> bool:
        """Whether the window was taken: not once the slot is closed."""
        with self._changed:
            if not self._skips:
                self._changed.wait_for(lambda: self._waiting is None or self._is_closed)
            if self._is_closed:
                return False
            self.num_skipped += self._waiting is not None
            self._waiting = window
        background.call_in(self._loop, self._news.set)
        return True

    async def take(self) -> SeenWindow | None:
        """The newest window; None: none will come."""
        while True:
            self._news.clear()
            with self._changed:
                window, self._waiting = self._waiting, None
                self._changed.notify_all()
                if window is not None or self._is_closed:
                    return window
            await self._news.wait()

    def newer(self, window: SeenWindow) -> SeenWindow:
        """The window that waits, where windows are skipped and one waits; else the window itself."""
        with self._changed:
            if self._skips and self._waiting is not None:
                window, self._waiting = self._waiting, None
                self.num_skipped += 1
        return window

    def close(self, drop: bool = False) -> None:
        """From any thread. The window that waits can still be taken, unless it is dropped."""
        with self._changed:
            self._is_closed = True
            self._waiting = None if drop else self._waiting
            self._changed.notify_all()
        background.call_in(self._loop, self._news.set)
