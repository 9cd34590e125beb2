"""Work in threads of its own, which neither later requests nor the end of the process wait for."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def start(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
    """Run a function in a new daemon thread."""
    done: Future[T] = Future()
    done.set_running_or_notify_cancel()  # a caller that waits no longer does not cancel it

    def run() -> None:
        try:
            done.set_result(function(*args, **kwargs))
        except Exception as error:
            done.set_exception(error)

    Thread(target=run, daemon=True).start()
    return done
