"""Keys typed while the terminal shows something else: not echoed, and kept for the next prompt."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

_SIGNALS = (signal.SIGTERM, signal.SIGTSTP) if os.name == "posix" else ()


@contextmanager
def without_echo(keyboard: TextIO) -> Iterator[None]:
    """Keys typed while the block runs are not shown. They stay in the terminal's buffer for whoever reads next.

    The terminal is as before when the block ends, and while a signal has stopped (Ctrl-Z) or ended the process. Without
    a terminal nothing happens.
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
        """Let a signal do what it does by default, with the terminal as it was; then go on if it only stopped us."""
        self.restore()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        signal.signal(number, self.give_way)
        self.switch_off()

    def _set(self, settings: list[Any]) -> None:
        self._termios.tcsetattr(self._descriptor, self._termios.TCSANOW, settings)
