"""The progress of long work: a bar where standard error is a terminal, lines in the log elsewhere.

The lines tell who starts a server from a script how long each stage takes. A program that uses FASER as a library gets
them if it configures logging at level INFO.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Thread
from time import monotonic

log = logging.getLogger("faser.engine")

LONG_SECONDS = 1.0  # work that ends sooner is not logged
REPEAT_SECONDS = 10.0

Update = Callable[[int, int], None]  # (done, total)


@contextmanager
def progress_bar(description: str, *, bytes_: bool = False, logs: bool = True) -> Iterator[Update]:
    """Show progress while the block runs; the yielded function reports (done, total). `logs=False`: terminals only."""
    if sys.stderr.isatty():
        with _bar(description, bytes_) as update:
            yield update
    elif logs and log.isEnabledFor(logging.INFO):
        with _lines(description) as update:
            yield update
    else:
        yield lambda done, total: None


@contextmanager
def _bar(description: str, bytes_: bool) -> Iterator[Update]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    count = DownloadColumn() if bytes_ else MofNCompleteColumn()
    columns = (TextColumn("{task.description}"), BarColumn(), count, TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(description, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextmanager
def _lines(description: str) -> Iterator[Update]:
    stage = _Stage(description)
    result = "failed"
    try:
        yield stage.update
        result = "done"
    finally:
        stage.end(result)


class _Stage:
    """Logs one stage from a thread of its own, because the work may take long between two updates."""

    def __init__(self, description: str) -> None:
        self._description = description
        self._started = monotonic()
        self._percent: int | None = None
        self._is_long = False
        self._ended = Event()
        self._thread = Thread(target=self._watch, daemon=True)
        self._thread.start()

    def update(self, done: int, total: int) -> None:
        self._percent = 100 * done // total if total else None

    def end(self, result: str) -> None:
        self._ended.set()
        self._thread.join()
        if self._is_long:
            log.info("%s: %s after %.1f s", self._description, result, monotonic() - self._started)

    def _watch(self) -> None:
        if self._ended.wait(LONG_SECONDS):
            return
        self._is_long = True
        log.info("%s", self._description)
        while not self._ended.wait(REPEAT_SECONDS):
            seconds = monotonic() - self._started
            share = "" if self._percent is None else f"{self._percent} % "
            log.info("%s: %sso far, %.0f s", self._description, share, seconds)
