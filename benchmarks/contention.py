"""What do OpenMP's threads cost on a machine that is not idle, and what do FASER's settings save?

Two processes hold the default model without speculation: `before` waits as OpenMP's runtime does by itself, with all
threads at all times; `after` is FASER as it ships. They take turns of some seconds on the same machine, while the other
one sleeps. Then the same with busy loops beside them. The ratio is the median over turns.

A thread can have at most its fair share of the cores: with L busy loops on C cores one thread gets C / (L + 1) of a
core, at most 1. That bounds what can be gained.

    python -m benchmarks.contention [--turns 5] [--seconds 4] [--busy 2]

Prints a table, then one JSON document on the last line.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from time import perf_counter

from faser.threads import available_cpus

# libgomp's defaults, set explicitly, so that FASER does not change them
BEFORE = {"GOMP_SPINCOUNT": "300000", "OMP_NUM_THREADS": str(available_cpus())}
STREAMS = {1: 16, 8: 8}  # tokens of each, a call


class Child:
    """A process that generates on demand."""

    def __init__(self, settings: dict[str, str]) -> None:
        names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
        environment = {name: value for name, value in os.environ.items() if name not in names} | settings
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.contention", "--child"],
            env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._to, self._from = self._process.stdin, self._process.stdout
        self._from.readline()  # it is ready

    def tokens_per_second(self, streams: int, seconds: float) -> float:
        self._to.write(f"{streams} {seconds}\n")
        self._to.flush()
        return float(self._from.readline())

    def close(self) -> None:
        self._to.close()
        self._process.wait()


def child() -> None:
    from faser import LLM, SamplingParams

    with LLM(policy="off", prefix_caching=False) as llm:
        print("ready", flush=True)
        for line in sys.stdin:
            streams, seconds = int(line.split()[0]), float(line.split()[1])
            prompts = [[(7 * i + j) % 4000 + 5 for j in range(32)] for i in range(streams)]
            params = SamplingParams(max_tokens=STREAMS[streams], ignore_eos=True)
            started, tokens = perf_counter(), 0
            while perf_counter() - started < seconds:
                tokens += sum(len(output.token_ids) for output in llm.generate(prompts, params))
            print(tokens / (perf_counter() - started), flush=True)


@contextmanager
def busy_loops(count: int) -> Iterator[None]:
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--busy", type=int, default=2)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child()
        return 0
    figures = []
    with ExitStack() as stack:
        systems = {"before": Child(BEFORE), "after": Child({})}
        for system in systems.values():
            stack.callback(system.close)
        for busy in (0, args.busy):
            with busy_loops(busy):
                for streams in STREAMS:
                    figures.append(compare(systems, streams, busy, args.turns, args.seconds))
    print(json.dumps({"benchmark": "contention", "cpus": available_cpus(), "figures": figures}))
    return 0


def compare(systems: dict[str, Child], streams: int, busy: int, turns: int, seconds: float) -> dict[str, object]:
    rates: dict[str, list[float]] = {name: [] for name in systems}
    for system in systems.values():
        system.tokens_per_second(streams, seconds)  # warm-up: the number of threads is found
    for turn in range(turns):
        for name in list(systems)[:: 1 if turn % 2 else -1]:
            rates[name].append(systems[name].tokens_per_second(streams, seconds))
    ratios = [after / before for before, after in zip(rates["before"], rates["after"], strict=True)]
    medians = {name: statistics.median(values) for name, values in rates.items()}
    ratio = statistics.median(ratios)
    print(
        f"{busy} busy loops, {streams} streams: {medians['before']:.1f} → {medians['after']:.1f} tokens/s, "
        f"ratio {ratio:.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
        flush=True,
    )
    return {"busy": busy, "streams": streams, **medians, "ratio": ratio, "ratios": ratios}


if __name__ == "__main__":
    sys.exit(main())
