"""uvicorn's HTTP/1.1 protocol with limits for a server on an open network.

A client that sends a second request before the answer to the first (pipelining) gets the first answer and a closed
connection: queueing the second would stop reading, and a disconnect would go unnoticed. The size of headers and the
time for a request to arrive are limited.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEADER_BYTES = 64 * 1024  # the request line included
REQUEST_SECONDS = 60.0  # for a whole request, from its first byte, or from the connection if no byte comes


class HttpProtocol(HttpToolsProtocol):
    _deadline: asyncio.TimerHandle | None = None
    _header_bytes = 0

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._start_clock()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_clock()
        super().connection_lost(exc)

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

    def _stop_clock(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
