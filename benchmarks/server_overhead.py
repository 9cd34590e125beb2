"""What does streaming over HTTP cost? Tokens per second through the server, with a real engine and with an empty one.

(a) The default pair. The same prompts through HTTP streams, 32 at a time, and through faser.LLM in another process
with as many places in the batch; both are up for the whole run and take turns. A token made in a batch costs about
10 ms of two cores, and carrying it some 50 µs of one: the ratio should be near 1. Aim: at least 0.9. The ratio is the
median of those of neighbouring runs. Beside it stand two that a busy machine disturbs less: CPU seconds per token, all
processes of the server together, and steps: over HTTP a place in the batch stays empty for the step in which its next
request is on its way.

(b) A stub engine (stub_engine.py) that answers at once, 256 streams. What is left is the scheduler, the frames between
the processes, detokenising, JSON and sockets. Aim: at least 20,000 tokens per second. Measured twice:
    flat out  the engine never waits, so tokens pile up before the HTTP process and share events
    paced     a step takes at least 10 ms, so that 256 streams ask for 25,600 tokens a second and, where the server
              keeps up, every token has an event of its own
Tokens are those of the usage, never events; how many shared an event is printed. The CPU seconds per wall second of
HTTP process, engine and client say who was the bottleneck: a value near 1 is one that had no more to give, and where
the sum is near the number of cores it is the machine.

    .venv/bin/python -m benchmarks.server_overhead [--parts model,stub] [--repeats 7] [--streams 256]

Medians over repeats, with the least and the most. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.lib.http_client import (
    ROOT,
    STUB_STEP_SECONDS,
    FloodResult,
    Server,
    cpu_seconds,
    get,
    read_metrics,
    read_texts,
    run_flood,
    running,
)

PATH = "/v1/completions"
RATIO_AIM, RATE_AIM = 0.9, 20_000
PROMPT_WORDS = 24


def make_bodies(count: int, max_tokens: int) -> list[dict[str, Any]]:
    """Greedy, with a fixed number of output tokens."""
    texts = [" ".join(text.split()[:PROMPT_WORDS]) for text in read_texts()]
    return [
        {
            "prompt": texts[number * 7 % len(texts)],
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        for number in range(count)
    ]


def measure_flood(server: Server, bodies: Sequence[dict[str, Any]], concurrency: int) -> dict[str, float]:
    """One flood, and the share of a core that each process used during it."""
    before = {name: cpu_seconds(pid) for name, pid in server.pids.items()}
    result: FloodResult = run_flood(server.url, PATH, bodies, concurrency)
    spent = {name: cpu_seconds(pid) - before[name] for name, pid in server.pids.items()}
    expected = sum(body["max_tokens"] for body in bodies)
    assert result.tokens == expected, f"{result.tokens} tokens came, {expected} were asked for"
    return {
        "tokens_per_s": result.tokens_per_second,
        "tokens_per_event": result.tokens / result.events,
        "bytes_per_token": result.bytes / result.tokens,
        "seconds": result.seconds,
        **{f"{name}_cpu_s": seconds for name, seconds in {**spent, "client": result.cpu_seconds}.items()},
        "http_us_per_token": spent["http"] / result.tokens * 1e6,
    }


def summarise(runs: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Medians, and the spread of the rate."""
    medians = {name: round(statistics.median(run[name] for run in runs), 3) for name in runs[0]}
    rates = [run["tokens_per_s"] for run in runs]
    return {**medians, "least": round(min(rates), 1), "most": round(max(rates), 1)}


def show(name: str, found: dict[str, Any]) -> None:
    cores = "  ".join(f"{who} {found[f'{who}_cpu_s'] / found['seconds']:.2f}" for who in ("http", "engine", "client"))
    print(
        f"{name:10} {found['tokens_per_s']:9.1f} tokens/s ({found['least']:.1f} to {found['most']:.1f})  "
        f"{found['tokens_per_event']:.2f} tokens/event  cores used: {cores}  "
        f"HTTP process {found['http_us_per_token']:.1f} µs/token",
        flush=True,
    )


# ── (a) the default pair ─────────────────────────────────────────────────────────────────────────────────────────────


class InProcess:
    """faser.LLM in a child process, which generates on request."""

    def __init__(self, bodies: Sequence[dict[str, Any]], max_running: int) -> None:
        self._child = subprocess.Popen(
            [sys.executable, __file__, "--child"], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._ask({"prompts": [b["prompt"] for b in bodies], "max_tokens": bodies[0]["max_tokens"],
                   "max_running": max_running})  # fmt: skip

    def run(self) -> dict[str, float]:
        before = cpu_seconds(self._child.pid)
        found = self._ask({})
        return {**found, "cpu_s": cpu_seconds(self._child.pid) - before}

    def close(self) -> None:
        assert self._child.stdin is not None
        self._child.stdin.close()
        self._child.wait()

    def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        print(json.dumps(message), file=self._child.stdin, flush=True)
        answer: dict[str, Any] = json.loads(self._child.stdout.readline())
        return answer


def child() -> None:
    from faser import LLM, SamplingParams

    given = json.loads(sys.stdin.readline())
    llm = LLM(max_running=given["max_running"], prefix_caching=False)
    params = SamplingParams(max_tokens=given["max_tokens"], ignore_eos=True)
    print("{}", flush=True)
    for _ in sys.stdin:
        started = time.perf_counter()
        steps = llm.stats.steps
        tokens = sum(len(output.token_ids) for output in llm.generate(given["prompts"], params))
        found = {"tokens_per_s": tokens / (time.perf_counter() - started), "steps": llm.stats.steps - steps}
        print(json.dumps(found), flush=True)


def measure_model(args: argparse.Namespace) -> dict[str, Any]:
    bodies = make_bodies(args.requests, args.max_tokens)
    size = str(args.concurrency)
    direct = InProcess(bodies, args.concurrency)
    with running("--max-running", size, "--no-prefix-caching", "--log-level", "warning") as server:
        run_flood(server.url, PATH, bodies[: args.concurrency], args.concurrency)
        direct.run()
        inside, through = [], []
        for _ in range(args.repeats):
            inside.append(direct.run())
            through.append(_measure_server(server, bodies, args.concurrency))
    direct.close()
    print(f"(a) the default pair, {size} streams, {args.requests} requests of {args.max_tokens} tokens")
    return _compare(inside, through, args.requests * args.max_tokens)


def _measure_server(server: Server, bodies: Sequence[dict[str, Any]], concurrency: int) -> dict[str, float]:
    def steps() -> float:
        return read_metrics(get(server.url, "/metrics").body.decode())["faser:steps_total"]

    before = steps()
    found = measure_flood(server, bodies, concurrency)
    return {**found, "steps": steps() - before, "cpu_s": found["http_cpu_s"] + found["engine_cpu_s"]}


def _compare(inside: Sequence[dict[str, float]], through: Sequence[dict[str, float]], tokens: int) -> dict[str, Any]:
    base, found = summarise(inside), summarise(through)
    pairs = list(zip(inside, through, strict=True))
    ratio = statistics.median(http["tokens_per_s"] / direct["tokens_per_s"] for direct, http in pairs)
    cpu_ratio, steps_ratio = base["cpu_s"] / found["cpu_s"], base["steps"] / found["steps"]
    print(f"{'in process':10} {base['tokens_per_s']:9.1f} tokens/s ({base['least']:.1f} to {base['most']:.1f})")
    show("HTTP", found)
    print(f"{'ratio':10} {ratio:9.3f} (aim: at least {RATIO_AIM})")
    print(f"{'CPU':10} {cpu_ratio:9.3f} ({base['cpu_s'] / tokens * 1e3:.2f} ms per token in process, "
          f"{found['cpu_s'] / tokens * 1e3:.2f} over HTTP)")  # fmt: skip
    print(f"{'steps':10} {steps_ratio:9.3f} ({base['steps']:.0f} in process, {found['steps']:.0f} over HTTP)")
    return {
        "in_process": base,
        "http": found,
        "ratio": round(ratio, 3),
        "cpu_ratio": round(cpu_ratio, 3),
        "steps_ratio": round(steps_ratio, 3),
        "ratio_reached": ratio >= RATIO_AIM,
    }


# ── (b) the stub ─────────────────────────────────────────────────────────────────────────────────────────────────────


def measure_stub(args: argparse.Namespace) -> dict[str, Any]:
    print(f"(b) a stub engine, {args.streams} streams of {args.stub_tokens} tokens; paced: {args.step_ms:g} ms a step")
    found = {}
    for name, seconds in (("flat_out", 0.0), ("paced", args.step_ms / 1000)):
        found[name] = _measure_pace(args, seconds)
        show(name.replace("_", " "), found[name])
    rate = found["flat_out"]["tokens_per_s"]
    print(f"aim: at least {RATE_AIM} tokens/s; the paced run asks for {args.streams / args.step_ms * 1000:.0f}")
    return {**found, "rate_reached": rate >= RATE_AIM}


def _measure_pace(args: argparse.Namespace, step_seconds: float) -> dict[str, Any]:
    bodies = make_bodies(args.streams, args.stub_tokens)
    size = str(args.streams)
    flags = ("--max-running", size, "--max-batch-tokens", "16384", "--log-level", "warning")
    environment = {STUB_STEP_SECONDS: str(step_seconds)}
    with running(*flags, factory="benchmarks.lib.stub_engine:make", environment=environment) as server:
        run_flood(server.url, PATH, make_bodies(args.streams, 32), args.streams)
        return summarise([measure_flood(server, bodies, args.streams) for _ in range(args.repeats)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--parts", default="model,stub", help="model, stub or both")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--concurrency", type=int, default=32, help="streams of the default pair")
    parser.add_argument("--requests", type=int, default=64, help="of one repeat with the default pair")
    parser.add_argument("--max-tokens", type=int, default=16, help="of each of them")
    parser.add_argument("--streams", type=int, default=256, help="of the stub")
    parser.add_argument("--stub-tokens", type=int, default=512, help="of each of them")
    parser.add_argument("--step-ms", type=float, default=10, help="a paced step of the stub")
    args = parser.parse_args()
    if args.child:
        child()
        return
    load = os.getloadavg()[0]
    print(f"{os.cpu_count()} cores, load before the run {load:.2f}")
    measures = {"model": measure_model, "stub": measure_stub}
    results = {part: measures[part](args) for part in args.parts.split(",")}
    print(json.dumps({"cores": os.cpu_count(), "load_before": round(load, 2), **results}))


if __name__ == "__main__":
    main()
