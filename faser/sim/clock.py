"""Time that passes only when somebody says so."""

from __future__ import annotations

import math

from faser.traffic.play import Clock


class VirtualTime:
    """Seconds from 0, shared by an engine, its executor and whoever plays requests through them."""

    def __init__(self) -> None:
        self._seconds = 0.0

    def now(self) -> float:
        return self._seconds

    def reach(self, seconds: float) -> None:
        """Go on to that time; never back."""
        self._seconds = max(self._seconds, seconds)

    def sleep(self, seconds: float) -> None:
        """At least a little passes: what is too short to be added would never be over."""
        self._seconds = max(self._seconds + seconds, math.nextafter(self._seconds, math.inf))

    @property
    def clock(self) -> Clock:
        return Clock(self.now, self.sleep)
