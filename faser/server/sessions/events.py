"""The events of one session: kept in bounded number, read by any number of readers at their own pace.

Knows the format of server-sent events; knows nothing of what they say. A reader that is too slow, or comes late, loses
the oldest events: the next one that it gets says how many.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator

import msgspec

from faser.server.sessions.protocol import EVENT_NAMES, SessionEvent

MAX_EVENTS = 256  # that are kept
PING_SECONDS = 15.0  # of silence after which a comment is sent, so that proxies keep the connection
_PING = b": no news\n\n"


class EventLog:
    """Events are numbered from 1. Belongs to one event loop."""

    def __init__(self, most: int = MAX_EVENTS) -> None:
        self.num_readers = 0
        self._events: deque[SessionEvent] = deque(maxlen=most)
        self._num_added = 0
        self._is_closed = False
        self._news = asyncio.Event()

    def add(self, event: SessionEvent) -> None:
        self._events.append(event)
        self._num_added += 1
        self._tell()

    def close(self) -> None:
        """No event will follow: readers end when they have read the last one."""
        self._is_closed = True
        self._tell()

    def _tell(self) -> None:
        """Wake the readers that wait now. Those that come later wait for the next news."""
        self._news.set()
        self._news = asyncio.Event()

    async def read(self, last_id: int = 0) -> AsyncIterator[bytes]:
        """Events behind the one of that number as they come. Which one is next is decided when it is asked for."""
        wanted = min(max(last_id, 0), self._num_added) + 1
        self.num_readers += 1
        try:
            while wanted <= self._num_added or not self._is_closed:
                if wanted > self._num_added:
                    yield b"" if await self._has_news() else _PING
                    continue
                oldest = self._num_added - len(self._events) + 1
                number = max(wanted, oldest)
                yield _encoded(number, self._events[number - oldest], number - wanted)
                wanted = number + 1
        finally:
            self.num_readers -= 1

    async def _has_news(self) -> bool:
        try:
            await asyncio.wait_for(self._news.wait(), PING_SECONDS)
        except TimeoutError:
            return False
        return True


def _encoded(number: int, event: SessionEvent, num_dropped: int) -> bytes:
    data = msgspec.json.encode(msgspec.structs.replace(event, dropped=num_dropped))
    return b"id: %d\nevent: %b\ndata: %b\n\n" % (number, EVENT_NAMES[type(event)].encode(), data)
