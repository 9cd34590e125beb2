"""What a long training says while it runs, and when it saves its state."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

SAVE_SECONDS = 60.0
REPORT_SECONDS = 5.0


class Saves(Protocol):
    """A training that can be resumed."""

    seconds: float  # that it has run, over all its starts

    def save(self, path: Path) -> None: ...


class TrainingReport(ABC):
    """Prints a line every few seconds and saves every minute. Clocks and lines are the caller's."""

    def __init__(self, training: Saves, path: Path, minutes: float, clock: Callable[[], float]) -> None:
        self._saves, self._path, self._minutes, self._clock = training, path, minutes, clock
        self._started = clock() - training.seconds
        self._printed = self._saved = clock()

    def tick(self, done: float) -> None:
        """A step has ended; `done`: the share of the training behind it."""
        now = self._clock()
        if now - self._printed >= REPORT_SECONDS:
            print(self._line(now - self._printed, done), flush=True)
            self._forget()
            self._printed = now
        if now - self._saved >= SAVE_SECONDS:
            self.save()

    def save(self) -> None:
        self._saved = self._clock()
        self._saves.seconds = self._saved - self._started
        self._saves.save(self._path)

    @abstractmethod
    def _line(self, seconds: float, done: float) -> str:
        """What happened since the last line, `seconds` ago."""

    @abstractmethod
    def _forget(self) -> None:
        """The next line begins here."""
