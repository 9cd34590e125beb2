"""What this is and runs on, by name and size; and files that are whole or not there."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def faser_version() -> str:
    try:
        return version("faser")
    except PackageNotFoundError:  # run from a checkout
        return "not installed"


def write_whole(path: Path, text: str) -> None:
    """Nobody ever reads a part of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f"{path.name}.{os.getpid()}.new")
    new.write_text(text, encoding="utf-8")
    new.replace(path)


def processor_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.machine()


_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")  # cgroup version 2 and 1


def memory_bytes() -> int:
    """The memory that processes may use here: the machine's, or less in a container that has a limit."""
    most = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([most, *(limit for limit in map(_limit, _LIMITS) if limit is not None)])


def _limit(path: str) -> int | None:
    try:
        text = Path(path).read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None  # "max": no limit
