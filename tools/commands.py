"""The entry of a tool: its first word may choose a command, and an error becomes one line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from faser.errors import FaserError

Command = tuple[Callable[[argparse.Namespace], None], Callable[[], argparse.ArgumentParser]]


def run_command(named: dict[str, Command], default: Command, arguments: Sequence[str] | None) -> int:
    """Run the command that the first argument names, else `default`; the exit status. A command is (run, parser)."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    is_named = bool(given) and given[0] in named
    run, make_parser = named[given[0]] if is_named else default
    try:
        run(make_parser().parse_args(given[1:] if is_named else given))
    except FaserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0
