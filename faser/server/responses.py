"""What endpoints share: reading a body within its limit, noticing a client that leaves, and the forms of answers."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive

from faser.server.figures import Figures
from faser.server.protocol import ApiError

JSON = "application/json"
EVENT_STREAM: Message = {
    "type": "http.response.start",
    "status": 200,
    "headers": [
        (b"content-type", b"text/event-stream; charset=utf-8"),
        (b"cache-control", b"no-cache"),
        (b"x-accel-buffering", b"no"),  # nginx must not hold events back
    ],
}


async def read_body(request: Request, most: int) -> bytes:
    """The body. One above the limit is refused as soon as that is known."""
    encoding = request.headers.get("content-encoding", "identity")
    if encoding != "identity":
        raise ApiError(415, f"Content-Encoding {encoding[:100]!r} is not supported; send the body as it is")
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > most:
        raise _too_large(most)
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > most:
            raise _too_large(most)
        parts.append(part)
    return b"".join(parts)


async def disconnect(receive: Receive) -> None:
    """Returns when the client has disconnected. The body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


def json_response(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type=JSON)


def refusal(error: ApiError, figures: Figures) -> Response:
    figures.refused[error.status] += 1
    return Response(error.body, error.status, error.headers, JSON)


def _too_large(most: int) -> ApiError:
    return ApiError(413, f"the body has more than {most} bytes; send less", code="body_too_large")
