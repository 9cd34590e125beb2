"""Processes of a run on a GPU, one after the other: each is started, watched and ended in time.

Knows nothing of what is measured. Imports the standard library alone.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.lib.journal import Journal, describe

ROOT = Path(__file__).resolve().parents[2]
GRACE_SECONDS = 8.0  # for a process to notice that its time is over
LEAST_SECONDS = {"models": 20.0, "faser": 60.0, "startup": 20.0, "vllm": 80.0}  # with less left none is started


@dataclass(frozen=True)
class Process:
    """One worker of a benchmark and its flags."""

    name: str
    flags: tuple[str, ...]
    least: float  # seconds; with less left it is not started
    most: float  # seconds; then it is ended
    environment: Mapping[str, str] = field(default_factory=dict)
    module: str = "benchmarks.h200"


def worker_process(
    args: argparse.Namespace, kind: str, most: float, name: str | None = None, **flags: object
) -> Process:
    """A process of FASER, or of vLLM, with the flags of this command and some of its own."""
    own = {"worker": kind, **flags}
    given = (*args.given, *(f"--{name.replace('_', '-')}={value}" for name, value in own.items()))
    return Process(name or kind, given, LEAST_SECONDS[kind], most, _environment(args, kind))


def _environment(args: argparse.Namespace, kind: str) -> dict[str, str]:
    if kind == "vllm":
        caches = args.folder / "vllm-cache"
        return {
            "PYTHONPATH": _python_path(args.vllm_bundle),
            "VLLM_CACHE_ROOT": str(caches),
            "TRITON_CACHE_DIR": str(caches / "triton"),
        }
    # a start is timed with a Triton cache of its own
    cache = {"TRITON_CACHE_DIR": str(args.folder / ("triton-off" if kind == "startup" else "triton"))}
    return {"PYTHONPATH": _python_path(args.python_path), **(cache if kind != "models" else {})}


def _python_path(first: Path | None) -> str:
    return os.pathsep.join(str(path) for path in (first, ROOT, os.environ.get("PYTHONPATH")) if path)


@dataclass
class Runner:
    """Runs processes and prints what they write to the journal."""

    journal: Journal
    log: Path  # what the processes print
    device: str
    on_news: Callable[[], None]  # called after new records: saves results, should this process be killed
    shown: int = 0  # records printed so far

    def run(self, process: Process, until: float) -> bool:
        """Whether it ended with status 0. `until` is on the clock of time.time()."""
        started = time.time()
        left = until - started
        if left < process.least:
            self._fail(process, f"{left:.0f} s left, it would take more; raise --budget-seconds or ask for less")
            return False
        print(f"── {process.name} ({left:.0f} s left)", flush=True)
        status = self._run(process, min(until, started + process.most))
        if status != 0:
            self._fail(process, "took too long and was ended" if status is None else f"ended with status {status}")
            print(self.log.read_bytes()[-3000:].decode(errors="replace"), flush=True)
        print(f"   {process.name}: {time.time() - started:.0f} s", flush=True)
        wait_for_gpu(self.device)
        return status == 0

    def _run(self, process: Process, until: float) -> int | None:
        """The exit status; None after too long. The whole group is ended: vLLM's engine is a child process."""
        own = {"until": until, "spawned": time.time(), "session": self.journal.session}
        flags = [*process.flags, *(f"--{name}={value}" for name, value in own.items())]
        with self.log.open("ab") as log:
            started = subprocess.Popen(
                [sys.executable, "-m", process.module, *flags],
                env=os.environ | {"PYTHONUNBUFFERED": "1"} | dict(process.environment),
                stdout=log,
                stderr=subprocess.STDOUT,
                process_group=0,
            )
            try:
                while time.time() < until + GRACE_SECONDS:
                    with suppress(subprocess.TimeoutExpired):
                        return started.wait(0.5)
                    self.update()
                return None
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(started.pid, signal.SIGKILL)
                started.wait()
                self.update()

    def _fail(self, process: Process, why: str) -> None:
        self.journal.add("failed", section="all", engine=process.name, why=why)
        self.update()

    def update(self) -> None:
        records = self.journal.read()
        for record in records[self.shown :]:
            print(f"   {describe(record)}", flush=True)
        if len(records) > self.shown:
            self.shown = len(records)
            self.on_news()


def wait_for_gpu(device: str, seconds: float = 20.0, most_mib: float = 3000.0) -> None:
    """Until the last process's memory is free again; returns at once without nvidia-smi."""
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    until = time.time() + seconds
    while device == "cuda" and time.time() < until:
        try:
            used = float(subprocess.run(query, capture_output=True, timeout=10, check=True).stdout.split()[0])
        except (OSError, subprocess.SubprocessError, ValueError, IndexError):
            return
        if used < most_mib:
            return
        time.sleep(0.5)
