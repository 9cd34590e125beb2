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
    """Logs from a thread of its own, because the work may take long between two updates."""
    started, ended, share, result = monotonic(), Event(), "", "failed"

    def update(done: int, total: int) -> None:
        nonlocal share
        share = f"{100 * done // total} % " if total else ""

    def watch() -> None:
        if ended.wait(LONG_SECONDS):
            return
        log.info("%s", description)
        while not ended.wait(REPEAT_SECONDS):
            log.info("%s: %sso far, %.0f s", description, share, monotonic() - started)
        log.info("%s: %s after %.1f s", description, result, monotonic() - started)

    thread = Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield update
        result = "done"
    finally:
        ended.set()
        thread.join()
