"""Keys typed while an answer is printed: not echoed, and kept for the next prompt."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

_SIGNALS = (signal.SIGTERM, signal.SIGTSTP) if os.name == "posix" else ()


@contextmanager
def without_echo(keyboard: TextIO) -> Iterator[None]:
    """Do not show keys typed while the block runs. They stay in the terminal's buffer for the next read.

    The echo is restored when the block ends, and when a signal stops (Ctrl-Z) or ends the process. Without a terminal
    nothing happens.
    """
    if os.name != "posix" or not keyboard.isatty():
        yield
        return
    echo = _Echo(keyboard.fileno())
    numbers = [number for number in _SIGNALS if signal.getsignal(number) is signal.SIG_DFL]
    try:
        for number in numbers:
            signal.signal(number, echo.give_way)
        echo.switch_off()
        yield
    finally:
        echo.restore()
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)


class _Echo:
    """The echo of one terminal."""

    def __init__(self, descriptor: int) -> None:
        import termios  # not on Windows

        self._termios = termios
        self._descriptor = descriptor
        self._before = termios.tcgetattr(descriptor)

    def switch_off(self) -> None:
        settings = self._termios.tcgetattr(self._descriptor)
        settings[3] &= ~self._termios.ECHO  # the local flags
        self._set(settings)

    def restore(self) -> None:
        self._set(self._before)

    def give_way(self, number: int, _frame: object) -> None:
        """Restore the echo and let the signal do its default; if it only stopped the process, go on without echo."""
        self.restore()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        signal.signal(number, self.give_way)
        self.switch_off()

    def _set(self, settings: list[Any]) -> None:
        self._termios.tcsetattr(self._descriptor, self._termios.TCSANOW, settings)
