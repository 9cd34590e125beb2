"""FASER's version; devices, processor and memory of this machine; and files that are never half written."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

DEVICES = ("auto", "cpu", "cuda")  # values of the device option


def faser_version() -> str:
    try:
        return version("faser")
    except PackageNotFoundError:  # run from a checkout
        return "not installed"


def atomic_write(path: Path, text: str) -> None:
    """Replace a text file as a whole: readers find the old text or all of the new. A failed write leaves no file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f"{path.name}.{os.getpid()}.new")
    try:
        new.write_text(text, encoding="utf-8")
        new.replace(path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise


def processor_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.machine()


# of a container, by cgroup version 2 and 1: its limit and what it uses
_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
_USED = ("/sys/fs/cgroup/memory.current", "/sys/fs/cgroup/memory/memory.usage_in_bytes")


def memory_bytes() -> int:
    """Bytes of memory that processes may use here: the machine's, or the limit of the container."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([physical, *(limit for limit in map(_limit, _LIMITS) if limit is not None)])


def free_memory_bytes() -> int:
    """Bytes of memory that a process may still take: what the system can free, and what its container has left."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        lines = []
    found = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    containers = zip(map(_limit, _LIMITS), map(_limit, _USED), strict=True)
    left = [max(0, limit - used) for limit, used in containers if limit is not None and used is not None]
    return min([memory_bytes(), *found, *left])


def _limit(path: str) -> int | None:
    try:
        text = Path(path).read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None  # "max": no limit
