"""Keys: who may ask, and whose quota a request counts against.

Knows headers and paths; quotas.py knows how much a key may ask for.
"""

from __future__ import annotations

import hmac
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from faser.server.figures import Figures
from faser.server.protocol import ApiError
from faser.server.quotas import OverQuota
from faser.server.responses import refusal
from faser.server.service import MAX_RETRY_SECONDS

# Paths that need no key. The dashboard's pages have no figures and ask for the key.
OPEN_PATHS = ("", "/health", "/dashboard", "/dashboard/video")
KEY_NUMBER = "faser.key_number"  # in a scope: which of the server's keys was sent


class KeyCheck:
    """Requires a bearer key on every path that is not open."""

    def __init__(self, app: ASGIApp, keys: Sequence[str], open_paths: Sequence[str], figures: Figures) -> None:
        self._app = app
        self._figures = figures
        self._keys = [key.encode() for key in keys]
        self._open_paths = frozenset(open_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # A path with a slash at its end is redirected to the one without.
        is_open = scope["type"] != "http" or scope["path"].rstrip("/") in self._open_paths
        number = None if is_open else self._number(scope["headers"])
        if is_open or number is not None:
            scope[KEY_NUMBER] = number
            await self._app(scope, receive, send)
            return
        message, headers = "a valid API key is needed: send Authorization: Bearer KEY", {"WWW-Authenticate": "Bearer"}
        error = ApiError(401, message, code="invalid_api_key", headers=headers)
        await refusal(error, self._figures)(scope, receive, send)

    def _number(self, headers: Sequence[tuple[bytes, bytes]]) -> int | None:
        """Which key was sent; None: no valid one."""
        given = next((value for name, value in headers if name == b"authorization"), b"")
        scheme, _, key = given.partition(b" ")
        # Every key is compared, in constant time, so that the time of an answer reveals nothing.
        equal = [hmac.compare_digest(key.strip(), known) for known in self._keys]
        return equal.index(True) if any(equal) and scheme.lower() == b"bearer" else None


def key_name(request: Request) -> str:
    """Whose quota a request counts against: its key's, or without keys its address's."""
    number = request.scope.get(KEY_NUMBER)
    if number is not None:
        return f"key {number}"
    return request.client.host if request.client is not None else ""


@contextmanager
def within_quota() -> Iterator[None]:
    try:
        yield
    except OverQuota as error:
        seconds = min(MAX_RETRY_SECONDS, math.ceil(error.seconds))
        raise ApiError(429, str(error), code=error.code, headers={"Retry-After": str(seconds)}) from None
