"""uvicorn's HTTP/1.1 protocol with limits for a server on an open network.

A client that sends a second request before the answer to the first (pipelining) gets the first answer and a closed
connection: queueing the second would stop reading, and a disconnect would go unnoticed. The size of headers, the time
for a request to arrive, the time that a client may leave its answer unread, and the number of connections are limited.
"""

from __future__ import annotations

import asyncio
import resource
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEADER_BYTES = 64 * 1024  # the request line included
REQUEST_SECONDS = 60.0  # for a whole request, from its first byte, or from the connection if no byte comes


UNREAD_SECONDS = 60.0  # in which a client must read MIN_READ_BYTES of what waits to be sent to it
MIN_READ_BYTES = 16 * 1024
DESCRIPTORS_KEPT = 64  # of the process, for the engine's socket, files and a log
_TOO_MANY = b"""HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"""


def usable_connections(most: int) -> int:
    """`most`, or as many as the process may have descriptors for."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return most if limit == resource.RLIM_INFINITY else max(1, min(most, limit - DESCRIPTORS_KEPT))


class HttpProtocol(HttpToolsProtocol):
    _deadline: asyncio.TimerHandle | None = None
    _read_deadline: asyncio.TimerHandle | None = None
    _header_bytes = 0

    def __init__(self, *args: Any, max_connections: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._max_connections = max_connections

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if len(self.connections) > self._max_connections:
            transport.write(_TOO_MANY)
            transport.close()
        else:
            self._start_clock()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_clock()
        self._stop_read_clock()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """The client reads more slowly than it is written to. One that does not catch up is disconnected."""
        super().pause_writing()
        self._start_read_clock()

    def _start_read_clock(self) -> None:
        unread = self.transport.get_write_buffer_size()
        self._read_deadline = self.loop.call_later(UNREAD_SECONDS, self._check_reading, unread)

    def _check_reading(self, unread_before: int) -> None:
        if unread_before - self.transport.get_write_buffer_size() < MIN_READ_BYTES:
            self.transport.abort()
        else:
            self._start_read_clock()

    def resume_writing(self) -> None:
        self._stop_read_clock()
        super().resume_writing()

    def data_received(self, data: bytes) -> None:
        if self._is_answering():
            self.cycle.keep_alive = False  # a pipelined request: it is not answered
        else:
            super().data_received(data)

    def on_message_begin(self) -> None:
        if not self._is_answering():
            super().on_message_begin()
            self._header_bytes = 0
            self._start_clock()

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._is_answering():
            self.cycle.keep_alive = False
        else:
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if not self._is_answering():
            super().on_body(body)

    def on_message_complete(self) -> None:
        if not self._is_answering():
            self._stop_clock()
            super().on_message_complete()

    def _is_answering(self) -> bool:
        """Whether a request has arrived whole and its answer is not complete."""
        return self.cycle is not None and not self.cycle.more_body and not self.cycle.response_complete

    def _count(self, size: int) -> None:
        self._header_bytes += size
        if self._header_bytes > MAX_HEADER_BYTES:
            raise ValueError("headers too large")  # the parser reports it, and the answer is 400

    def _start_clock(self) -> None:
        self._stop_clock()
        self._deadline = self.loop.call_later(REQUEST_SECONDS, self.transport.close)

    def _stop_read_clock(self) -> None:
        if self._read_deadline is not None:
            self._read_deadline.cancel()
            self._read_deadline = None

    def _stop_clock(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
