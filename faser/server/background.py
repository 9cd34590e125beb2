"""Work in threads of its own, which neither later requests nor the end of the process wait for."""

from __future__ import annotations

from asyncio import AbstractEventLoop
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
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


def call_in(loop: AbstractEventLoop, function: Callable[[], object]) -> None:
    """From any thread: call the function in the loop. Not if the loop is closed: then the server has ended."""
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(function)
