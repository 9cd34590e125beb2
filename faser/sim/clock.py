"""Virtual time: it passes only when told to."""

from __future__ import annotations

import math

from faser.traffic.play import Clock


class VirtualTime:
    """Seconds from 0, shared by an engine, its executor and the player of requests."""

    def __init__(self) -> None:
        self._seconds = 0.0

    def now(self) -> float:
        return self._seconds

    def reach(self, seconds: float) -> None:
        """Advance to `seconds`; never backwards."""
        self._seconds = max(self._seconds, seconds)

    def sleep(self, seconds: float) -> None:
        """Advances by at least one float step: a sleep too short to be added would repeat forever."""
        self._seconds = max(self._seconds + seconds, math.nextafter(self._seconds, math.inf))

    @property
    def clock(self) -> Clock:
        return Clock(self.now, self.sleep)
