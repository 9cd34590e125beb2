"""Flags of benchmarks that run in several processes on a GPU (processes.py), and what follows from the flags.

Imports the standard library alone.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

# told to the processes of a run, not to people
HIDDEN = {"--worker": str, "--until": float, "--spawned": float, "--session": float}


def add_run_flags(add: Callable[..., Any], **hidden: type) -> None:
    """`hidden`: further flags for the processes, by name."""
    add("--folder", type=Path, help="for models, caches and what is measured; kept")
    add("--report-only", type=Path, metavar="DIR", help="measure nothing: the figures of DIR again")
    add("--budget-seconds", type=float, default=560.0, help="for everything (560)")
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--tiny", action="store_true", help="tiny random models and sizes: does it all run?")
    for name, kind in (HIDDEN | {f"--{each.replace('_', '-')}": kind for each, kind in hidden.items()}).items():
        add(name, type=kind, help=argparse.SUPPRESS)


def begin_run(args: argparse.Namespace, given: Sequence[str]) -> None:
    """Times and folders of a run. Times are on the clock of time.time()."""
    args.given, args.started = list(given), time.time()
    args.until = args.until or args.started + args.budget_seconds
    args.spawned = args.spawned or args.started
    args.session = args.session or args.started
    default = args.report_only or Path(tempfile.gettempdir()) / ("faser-h200-tiny" if args.tiny else "faser-h200")
    args.folder = (args.folder or default).absolute()
    args.out = args.folder if args.report_only else Path(os.environ.get("OUT") or args.folder).absolute()


def refuse_missing(parser: argparse.ArgumentParser, paths: Iterable[Path | None]) -> None:
    for path in paths:
        if path is not None and not path.exists():
            parser.error(f"{path} does not exist")
