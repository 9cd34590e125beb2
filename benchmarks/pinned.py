"""Run several CPU benchmarks at once on one large machine, each on two physical cores of its own.

A shared machine of two cores varies by 10 to 30 % from minute to minute. Two cores of a large, otherwise idle machine
vary by a few per cent, and several benchmarks can run side by side. They still share memory bandwidth; that slows both
sides of a comparison alike.

    python -m benchmarks.pinned [--seconds 500] "contention --turns 5" "never_slower --busy 0 --temperatures 0" …

Each argument is a module of benchmarks/ with its flags. What each one printed follows when all have ended; a benchmark
that has not ended in time is stopped, and what it had printed is shown. Linux only.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from time import monotonic, sleep

CORES_EACH = 2


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("commands", nargs="+")
    parser.add_argument("--seconds", type=float, default=500.0)
    args = parser.parse_args()
    cores = physical_cores()
    if len(cores) < CORES_EACH * len(args.commands):
        parser.error(f"{len(args.commands)} benchmarks need {CORES_EACH * len(args.commands)} cores; {len(cores)} here")
    with tempfile.TemporaryDirectory() as folder:
        running = []
        for number, command in enumerate(args.commands):
            mine = cores[CORES_EACH * number :][:CORES_EACH]
            running.append((command, mine, *start(command, mine, Path(folder) / str(number))))
        deadline = monotonic() + args.seconds
        while monotonic() < deadline and any(process.poll() is None for *_, process in running):
            sleep(1.0)
        failed = False
        for command, mine, log, process in running:
            stopped = process.poll() is None
            if stopped:
                process.kill()
            failed |= bool(process.wait())
            print(f"── {command} (CPUs {mine[0]} and {mine[1]}){', stopped' if stopped else ''}")
            print(log.read_text(), flush=True)
    return int(failed)


def start(command: str, cpus: list[int], log: Path) -> tuple[Path, subprocess.Popen[bytes]]:
    module, *flags = shlex.split(command)
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", f"benchmarks.{module}", *flags],
            stdout=output, stderr=subprocess.STDOUT, preexec_fn=lambda: os.sched_setaffinity(0, cpus),
        )  # fmt: skip
    return log, process


def physical_cores() -> list[int]:
    """One CPU of each physical core that this process may use."""
    found: dict[str, int] = {}
    for cpu in sorted(os.sched_getaffinity(0)):
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        found.setdefault(siblings.read_text().strip() if siblings.exists() else str(cpu), cpu)
    return sorted(found.values())


if __name__ == "__main__":
    sys.exit(main())
