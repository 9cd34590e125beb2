"""A server of the OpenAI API that runs in a thread and misbehaves on request, for tests of the client.

What it does with a completion is chosen by the first token of the prompt.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

FINE, DROPS, BUSY, SILENT, BREAKS, COUNTLESS = 10, 11, 12, 13, 14, 15


class StubServer:
    """`strict` refuses ignore_eos, as OpenAI's own API does."""

    def __init__(self, strict: bool = False) -> None:
        self.strict = strict
        self.bodies: list[dict[str, Any]] = []
        self.authorizations: list[str | None] = []
        self.num_open = self.most_open = 0
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            fields = {name.lower(): value for name, _, value in (line.partition(": ") for line in head.split("\r\n"))}
            self.authorizations.append(fields.get("authorization"))
            body = await reader.readexactly(int(fields["content-length"]))
            if head.startswith("GET /v1/models "):
                self._answer(writer, 200, {"data": [{"id": "stub", "max_model_len": 64}]})
            else:
                self.num_open += 1
                self.most_open = max(self.most_open, self.num_open)
                await self._complete(writer, json.loads(body))
                self.num_open -= 1
            await writer.drain()
        finally:
            writer.close()

    def _answer(self, writer: asyncio.StreamWriter, status: int, body: Any) -> None:
        data = json.dumps(body).encode()
        writer.write(f"HTTP/1.1 {status} X\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)

    async def _complete(self, writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
        self.bodies.append(body)
        kind, count = body["prompt"][0], body["max_tokens"]
        if self.strict and "ignore_eos" in body:
            self._answer(writer, 400, {"error": {"message": "Unrecognized request argument: ignore_eos"}})
        elif kind == BUSY:
            self._answer(writer, 503, {"error": {"message": "try again later"}})
        elif kind == SILENT:
            await asyncio.sleep(60)
        else:
            writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
            await self._stream(writer, kind, count)

    async def _stream(self, writer: asyncio.StreamWriter, kind: int, count: int) -> None:
        """Two events for all tokens, so that events are no tokens."""

        def send(message: Any) -> None:
            data = b"data: " + (message if isinstance(message, bytes) else json.dumps(message).encode()) + b"\n\n"
            writer.write(b"%x\r\n" % len(data) + data + b"\r\n")

        for text in ("some", 'more with "usage" and "error"'):
            send({"choices": [{"text": text}]})
            await writer.drain()
            await asyncio.sleep(0)
        if kind == DROPS:
            return
        if kind == BREAKS:
            send({"error": {"message": "the engine failed"}})
        elif kind != COUNTLESS:
            details = {"accepted_prediction_tokens": count // 2, "rejected_prediction_tokens": 1}
            send({"choices": [], "usage": {"completion_tokens": count, "completion_tokens_details": details}})
        send(b"[DONE]")
        writer.write(b"0\r\n\r\n")


@contextmanager
def serving(strict: bool = False) -> Iterator[StubServer]:
    stub, loop, ready = StubServer(strict), asyncio.new_event_loop(), threading.Event()

    async def run() -> None:
        server = await asyncio.start_server(stub.serve, "127.0.0.1", 0)
        stub.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        ready.set()
        await ended.wait()
        server.close()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()

    ended = asyncio.Event()
    thread = threading.Thread(target=loop.run_until_complete, args=(run(),))
    thread.start()
    ready.wait()
    try:
        yield stub
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()
