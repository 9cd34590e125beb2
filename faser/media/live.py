"""A binary file over bytes that are still arriving: what FFmpeg reads of a live stream.

Knows bytes and two sides: some thread feeds, one thread reads and waits. Knows nothing of containers or HTTP. How many
bytes may wait is the feeder's decision (`num_waiting`).

Containers make FFmpeg step back a little, within the bytes read last. So the file can seek, but not far back, and not
from its end, which nobody knows. A seek forward reads and forgets.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from threading import Condition
from time import perf_counter

KEPT_BYTES = 1 << 16  # behind the reader, for steps back: twice FFmpeg's buffer
CANNOT_SEEK = -1  # FFmpeg goes on; an exception would end the reading, even where FFmpeg only tried


class StreamAborted(Exception):
    """The stream was given up while a thread read it."""


class LiveFile:
    def __init__(self, on_read: Callable[[], None] = lambda: None) -> None:
        """`on_read` is called in the reading thread after bytes were taken: there is room for more."""
        self.waited_seconds = 0.0  # that the reader has waited for bytes
        self._on_read = on_read
        self._changed = Condition()
        self._bytes = bytearray()  # from _start on
        self._start = 0  # of _bytes in the stream
        self._position = 0  # of the reader in the stream
        self._is_finished = False
        self._is_aborted = False

    # ---- the feeding side ----

    @property
    def num_waiting(self) -> int:
        """Bytes that were fed and not read."""
        return self._end - self._position

    def feed(self, data: bytes) -> None:
        with self._changed:
            if not self._is_finished and not self._is_aborted:
                self._bytes += data
                self._changed.notify_all()

    def finish(self) -> None:
        """No more bytes will come. The reader gets what waits, and then the end of the file."""
        with self._changed:
            self._is_finished = True
            self._changed.notify_all()

    def abort(self) -> None:
        """The reader gets StreamAborted, now or with its next read."""
        with self._changed:
            self._is_aborted = True
            self._bytes = bytearray()
            self._start = self._position
            self._changed.notify_all()

    # ---- the reading side ----

    def read(self, size: int = -1) -> bytes:
        """At least one byte, as soon as there is one; none at the end."""
        with self._changed:
            self._wait()
            first = self._position - self._start
            data = bytes(self._bytes[first : first + size] if size >= 0 else self._bytes[first:])
            self._position += len(data)
            self._forget()
        self._on_read()
        return data

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        target = offset + (self._position if whence == io.SEEK_CUR else 0)
        if whence == io.SEEK_END or target < self._start:
            return CANNOT_SEEK
        while target > self._end and self.read(1 << 16):
            pass
        self._position = min(target, self._end)
        return self._position

    def tell(self) -> int:
        return self._position

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def close(self) -> None: ...

    @property
    def _end(self) -> int:
        return self._start + len(self._bytes)

    def _wait(self) -> None:
        started = perf_counter()
        self._changed.wait_for(lambda: self._position < self._end or self._is_finished or self._is_aborted)
        self.waited_seconds += perf_counter() - started
        if self._is_aborted:
            raise StreamAborted

    def _forget(self) -> None:
        """Drop what is far behind the reader, now and then: each time it moves the rest."""
        num_behind = self._position - self._start
        if num_behind > 2 * KEPT_BYTES:
            del self._bytes[: num_behind - KEPT_BYTES]
            self._start += num_behind - KEPT_BYTES
