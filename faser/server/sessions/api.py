"""The endpoints of video sessions. Knows HTTP; registry.py and session.py know what a session is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from faser.config import ServerOptions
from faser.server.protocol import ApiError, parse_object
from faser.server.responses import EVENT_STREAM, disconnect, json_response, read_body
from faser.server.service import Service
from faser.server.sessions.protocol import Deleted, SessionRequest
from faser.server.sessions.registry import Sessions
from faser.server.sessions.session import VideoSession

MAX_READERS = 8  # of the events of one session
CREATE_BYTES = 1 << 20  # of the body that creates a session
BOOLEANS = {"true": True, "1": True, "false": False, "0": False}


class SessionApi:
    def __init__(
        self, options: ServerOptions, service: Service, sessions: Sessions, count: Callable[[Request], None]
    ) -> None:
        """`count` counts a request against its key's quota, and raises where that is used up."""
        self._count = count
        self._limits = options.sessions
        self._service = service
        self._sessions = sessions

    def routes(self) -> list[Route]:
        return [
            Route("/v1/video/sessions", self.create, methods=["POST"]),
            Route("/v1/video/sessions/{id}", self.state, methods=["GET"]),
            Route("/v1/video/sessions/{id}", self.delete, methods=["DELETE"]),
            Route("/v1/video/sessions/{id}/chunk", self.chunk, methods=["POST"]),
            Route("/v1/video/sessions/{id}/events", self.events, methods=["GET"]),
        ]

    async def create(self, request: Request) -> Response:
        self._service.served()  # answers 503 before the body is read
        self._count(request)
        body = await read_body(request, CREATE_BYTES)
        session = await self._sessions.create(parse_object(body, SessionRequest))
        return json_response(session.state())

    async def state(self, request: Request) -> Response:
        return json_response(self._find(request).state())

    async def delete(self, request: Request) -> Response:
        session = self._find(request)
        self._sessions.delete(session.id)
        return json_response(Deleted(session.id))

    async def chunk(self, request: Request) -> Response:
        session, is_last = self._find(request), _is_last(request)
        _check_type(request.headers.get("content-type", ""))
        with session.claimed():
            await session.feed(await read_body(request, self._limits.queue_bytes), is_last)
        return json_response(session.state())

    async def events(self, request: Request) -> Response:
        session, given = self._find(request), request.headers.get("last-event-id", "")
        if given and not (given.isascii() and given.isdigit() and len(given) < 20):
            raise ApiError(400, f"Last-Event-ID {given[:100]!r}: expected the number of an event")
        if session.events.num_readers >= MAX_READERS:
            message = f"{MAX_READERS} readers already get the events of this session; end one of them"
            raise ApiError(429, message, code="too_many_readers")
        return EventStream(session, int(given or 0))

    def _find(self, request: Request) -> VideoSession:
        return self._sessions.find(request.path_params["id"])


class EventStream(Response):
    """The events of a session, until its end or until the reader disconnects."""

    def __init__(self, session: VideoSession, last_id: int) -> None:
        self._session = session
        self._last_id = last_id
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send(EVENT_STREAM)
        tasks = [asyncio.create_task(self._send(send)), asyncio.create_task(disconnect(receive))]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _send(self, send: Send) -> None:
        async for event in self._session.events.read(self._last_id):
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


def _is_last(request: Request) -> bool:
    given = request.query_params.get("last", "false")
    if given not in BOOLEANS:
        raise ApiError(400, f"last={given[:100]!r}: expected true or false", param="last")
    return BOOLEANS[given]


def _check_type(given: str) -> None:
    kind = given.partition(";")[0].strip().lower()
    if kind and kind != "application/octet-stream" and not kind.startswith("video/"):
        raise ApiError(415, f"Content-Type {kind[:100]!r}: expected application/octet-stream or video/…, raw bytes")
