"""HTTP/1.1 and server-sent events over asyncio streams, one exchange at a time.

Without a library: a token's time is taken when its bytes arrive, and `faser bench --url` runs where no HTTP library is
installed. Raises OSError and EOFError for a connection that fails, ValueError for an answer that is not HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

MAX_LINE = 2**20  # bytes of a header or a chunk's first line
_NOTHING: Mapping[str, str] = {}


@dataclass(frozen=True)
class HttpAnswer:
    status: int
    headers: dict[str, str]
    body: bytes


def request_head(
    method: str, path: str, size: int | None, headers: Mapping[str, str] = _NOTHING, host: str = "localhost"
) -> bytes:
    """`size` is that of the body; None announces chunks."""
    length = "Transfer-Encoding: chunked" if size is None else f"Content-Length: {size}"
    further = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return (
        f"{method} {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n{further}{length}\r\n\r\n"
    ).encode()


class ClientConnection:
    """One connection; exchanges follow one another."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, url: str) -> ClientConnection:
        parts = urlsplit(url)
        encrypted = parts.scheme == "https"
        port = parts.port or (443 if encrypted else 80)
        return cls(*await asyncio.open_connection(parts.hostname, port, limit=MAX_LINE, ssl=encrypted or None))

    async def ask(self, path: str, body: bytes | None = None) -> HttpAnswer:
        """A whole exchange: POST with a body, GET without."""
        self.write(request_head("GET" if body is None else "POST", path, len(body or b"")) + (body or b""))
        return await self.answer()

    def write(self, data: bytes) -> None:
        self._writer.write(data)

    async def drain(self) -> None:
        await self._writer.drain()

    async def answer(self) -> HttpAnswer:
        status, headers = await self.head()
        return HttpAnswer(status, headers, b"".join([part async for part in self.parts(headers)]))

    async def head(self) -> tuple[int, dict[str, str]]:
        first, *lines = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")[:-2]
        protocol, _, status = first.partition(" ")
        if not protocol.startswith("HTTP/1.") or not status[:3].isdigit():
            raise ValueError(f"not HTTP: {first[:100]!r}")
        headers = (line.partition(":") for line in lines)
        return int(status[:3]), {name.lower(): value.strip() for name, _, value in headers}

    async def parts(self, headers: Mapping[str, str]) -> AsyncIterator[bytes]:
        """The body, part by part as it arrives."""
        if headers.get("transfer-encoding") == "chunked":
            while size := int(await self._reader.readuntil(b"\r\n"), 16):
                yield (await self._reader.readexactly(size + 2))[:-2]
            await self._reader.readexactly(2)
        elif "content-length" in headers:
            yield await self._reader.readexactly(int(headers["content-length"]))
        else:  # the body ends with the connection
            while part := await self._reader.read(MAX_LINE):
                yield part

    def close(self) -> None:
        """Close after everything written has been sent."""
        self._writer.close()

    def abort(self) -> None:
        """Close at once."""
        self._writer.transport.abort()


async def events(parts: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The data of server-sent events, without comments, which keep a connection open."""
    held = b""
    async for part in parts:
        *whole, held = (held + part).replace(b"\r\n", b"\n").split(b"\n\n")
        for event in whole:
            if event.startswith(b":"):
                continue
            if not event.startswith(b"data: "):
                raise ValueError(f"not an event: {event[:100]!r}")
            yield event.removeprefix(b"data: ")
    if held:
        raise ValueError(f"the stream ends within an event: {held[:100]!r}")
