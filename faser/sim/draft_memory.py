"""The draft's memory in virtual time: moves take the seconds of a profile."""

from __future__ import annotations

from faser.cost.residency import ResidencyProfile
from faser.sim.executor import VirtualTime

PART_SECONDS = 0.005  # the longest part of a move that one call does


class SimDraftMemory:
    """A `DraftMemory`. A part of lending takes the host's time, beside the step that runs. Loading takes its own."""

    def __init__(self, profile: ResidencyProfile, pages_gained: int, time: VirtualTime) -> None:
        self.pages_gained = pages_gained
        self.load_seconds = profile.load_seconds
        self._lend_seconds = profile.lend_seconds
        self._time = time
        self._lent_seconds = 0.0  # of lending, done so far
        self._loaded_at: float | None = None  # when the weights that are being loaded will be there

    def offload(self) -> bool:
        part = min(PART_SECONDS, self._lend_seconds - self._lent_seconds)
        self._time.sleep(part)
        self._lent_seconds += part
        return self._lent_seconds >= self._lend_seconds

    def load(self) -> bool:
        if self._loaded_at is None:
            self._loaded_at = self._time.now() + self.load_seconds
        if self._time.now() < self._loaded_at:
            return False
        self._lent_seconds, self._loaded_at = 0.0, None
        return True
