"""Does the server hold under a mixed load, with every kind of draft? None of the requests may be lost.

The load is drawn from a seed: completions and chat, streamed and whole, greedy and sampled, several choices, stop
strings, log-probabilities, grammars, capped drafts, pictures, videos and video sessions; between them clients that read
slowly, that leave before, in and after their body, broken bodies and pictures, wrong types, unknown fields, prompts and
bodies that are too large, models that are not there. It goes to one server after another: a draft model, a head, prompt
lookup, and a model with prompt lookup, under policy `faser`, where the draft may leave the device. The KV memory is
small, so that requests are preempted and every page has been touched when the warm-up is over. Afterwards:
    answers   every request got the answer of its kind: 200 and a finish_reason, an OpenAI error of the right status and
              code, or it was left by us. Anything else is listed
    books     no page is held, nothing runs or waits, no session is open, no process has more descriptors than before;
              the server's counts of ended and refused requests are ours
    memory    what the processes hold does not grow: a line through the samples after the warm-up rises by less than
              the bound. Legitimate growth (pages, caches of compiled grammars) comes in the warm-up
    output    all texts equal those of a server with --policy off, asked for whole answers; a text we left half read is
              the beginning of its own. Greedy texts may part where two tokens tie up to the last bits: they are counted

    .venv/bin/python -m benchmarks.soak [--requests 1000] [--concurrency 64] [--kinds model,head,ngram,both] [--seed 0]
    .venv/bin/python -m benchmarks.soak --pair default --kinds model,ngram,both    # SmolLM2: slower, and without eyes
    .venv/bin/python -m benchmarks.soak --url URL --reference URL                  # servers that run

The models are tiny and made here (`--pair tiny`); they need the packages of the tests. `--requests` counts for each
kind. With --url the memory of that server is not looked at, since its processes are not known. The exit status is 1 if
anything failed. A table for each kind, then one JSON document on the last line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.lib.http_client import Server, mapped_bytes, read_metrics, resident_bytes
from benchmarks.lib.soak_client import Choice, Client, Outcome
from benchmarks.lib.soak_load import COMPLETIONS, LEAVING, MAX_MODEL_LEN, MIB, Item, Load
from benchmarks.lib.soak_models import DEFAULT_PAIR, KINDS, Models, make_media, tiny_models
from faser.bench.client import ClientConnection

# Small pages: a request is admitted with one spare page and outgrows it.
FLAGS = ("--page-size", "4", "--max-model-len", str(MAX_MODEL_LEN), "--max-body-size", "1", "--max-sessions", "64",
         "--session-idle", "5", "--log-level", "warning")  # fmt: skip
# Several arenas of the C library would keep more and more for later, for thousands of requests, and hide what is lost.
ONE_ARENA = {"MALLOC_ARENA_MAX": "1"}
TIE = 1e-5  # between log-probabilities; float32 rounds them to about 2e-7
WARM_UP = 0.3  # share of the requests
BOUND_MIB = {"http": 8, "engine": 32}  # most growth of memory after the warm-up
REST_SECONDS = 60
SAMPLE_SECONDS = 0.5


# ── all of them ──────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class Samples:
    """Memory of the processes, by the number of requests that ended."""

    pids: dict[str, int]
    descriptors: dict[str, int] = field(default_factory=dict)  # that were open before the load
    at: list[int] = field(default_factory=list)
    held: dict[str, list[float]] = field(default_factory=dict)  # MiB
    mapped: dict[str, dict[str, int]] = field(default_factory=dict)  # bytes by what is mapped, before and since

    def add(self, num_done: int) -> None:
        self.at.append(num_done)
        for name, pid in self.pids.items():
            self.held.setdefault(name, []).append(resident_bytes(pid) / MIB)

    def mark(self) -> None:
        """Note the memory by what is mapped, or from the second time on how much it grew since."""
        for name, pid in self.pids.items():
            now = mapped_bytes(pid)
            before = self.mapped.setdefault(name, now)
            self.mapped[name] = now if before is now else {kind: now[kind] - size for kind, size in before.items()}

    def lost_descriptors(self) -> list[str]:
        """Processes that have more descriptors than before."""
        counts = {name: count_descriptors(pid) for name, pid in self.pids.items()}
        return [
            f"{name} has {count} descriptors open, and had {self.descriptors[name]} before"
            for name, count in counts.items()
            if count > self.descriptors[name]
        ]

    def growth(self, name: str, num_requests: int) -> dict[str, float]:
        """Growth in MiB after the warm-up, by least squares."""
        first = next((i for i, at in enumerate(self.at) if at >= WARM_UP * num_requests), 0)
        at, held = self.at[first:], self.held[name][first:]
        slope = _slope(at, held)
        return {
            "after_warm_up_mib": round(held[0], 1),
            "at_end_mib": round(held[-1], 1),
            "growth_mib": round(slope * (at[-1] - at[0]), 2),
            "mib_per_1000_requests": round(1000 * slope, 2),
            "bound_mib": BOUND_MIB[name],
            "growth_by_mapping_mib": {kind: round(size / MIB, 1) for kind, size in self.mapped.get(name, {}).items()},
        }


def count_descriptors(pid: int) -> int:
    return sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())


def _slope(x: Sequence[float], y: Sequence[float]) -> float:
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    spread = sum((value - mean_x) ** 2 for value in x)
    return sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / spread if spread else 0.0


async def run_load(url: str, items: Sequence[Item], concurrency: int, samples: Samples) -> list[Outcome]:
    waiting, outcomes = list(reversed(items)), []

    async def work() -> None:
        client = Client(url)
        while waiting:
            outcomes.append(await client.run(waiting.pop()))
        client.close()

    async def watch() -> None:
        while True:
            samples.add(len(outcomes))
            if not samples.mapped and len(outcomes) >= WARM_UP * len(items):
                samples.mark()
            await asyncio.sleep(SAMPLE_SECONDS)

    watcher = asyncio.create_task(watch())
    await asyncio.gather(*(work() for _ in range(concurrency)))
    watcher.cancel()
    with suppress(asyncio.CancelledError):
        await watcher
    samples.add(len(outcomes))
    if samples.mapped:
        samples.mark()
    return sorted(outcomes, key=lambda outcome: outcome.item.number)


async def metrics(url: str) -> dict[str, float]:
    connection = await ClientConnection.open(url)
    answer = await connection.ask("/metrics")
    connection.close()
    return read_metrics(answer.body.decode())


BUSY = ("vllm:num_requests_running", "vllm:num_requests_waiting", "faser:video_sessions")


async def metrics_at_rest(url: str) -> dict[str, float]:
    """The metrics when no request runs, or after a timeout the last ones read."""
    deadline = time.monotonic() + REST_SECONDS
    while True:
        found = await metrics(url)
        busy = sum(found.get(name, 0) for name in BUSY)
        if not busy or time.monotonic() > deadline:
            return found
        await asyncio.sleep(0.2)


# ── what must hold ───────────────────────────────────────────────────────────────────────────────────────────────────


def check_books(before: dict[str, float], after: dict[str, float], outcomes: Sequence[Outcome]) -> list[str]:
    """The server's counts against ours. A request that the client left may count as any end, or as none."""

    def counted(name: str) -> int:
        return round(after.get(name, 0) - before.get(name, 0))

    ends = Counter(choice.finish_reason for o in outcomes if o.completed for choice in o.choices)
    left = sum(o.item.num_choices for o in outcomes if o.left and o.item.kind != LEAVING[2])
    refused = Counter(o.status for o in outcomes if o.status is not None and o.status != 200)
    by_reason = {
        reason: counted(f'vllm:request_success_total{{finished_reason="{reason}"}}')
        for reason in ("stop", "length", "cancelled", "failed")
    }
    finished = by_reason["stop"] + by_reason["length"]
    ours = ends["stop"] + ends["length"]
    found = [
        f"{name} is {after.get(name)}, not 0"
        for name in (*BUSY, "vllm:kv_cache_usage_perc", "faser:draft_kv_cache_usage")
        if after.get(name, 0) != 0
    ]
    if any(by_reason[reason] < ends[reason] for reason in ("stop", "length")):
        found.append(f"the server ended {by_reason}, we saw {dict(ends)}")
    if not ours <= finished + by_reason["cancelled"] <= ours + left or by_reason["cancelled"] > left:
        found.append(f"the server ended {by_reason}; we saw {ours} end and left {left}")
    if by_reason["failed"] or counted("faser:step_failures_total") or counted("faser:engine_restarts_total"):
        found.append("requests or steps failed, or the engine was started again")
    for status in sorted({400, 404, 413, 500, 503, *refused}):
        said = counted(f'faser:requests_refused_total{{status="{status}"}}')
        if said != refused[status]:
            found.append(f"the server refused {said} with {status}, we saw {refused[status]}")
    return found


def check_output(outcomes: Sequence[Outcome], plain: Sequence[Outcome]) -> tuple[list[str], list[str]]:
    """Speculation must not change a text: equal if read to the end, a prefix if the client left.

    The differences, and apart from them those of greedy answers in which two tokens tie up to float32's last bits:
    there the size of a batch may decide.
    """
    reference = {outcome.item.number: outcome for outcome in plain}
    found: list[str] = []
    ties: list[str] = []
    for outcome in outcomes:
        other = reference.get(outcome.item.number)
        if other is None or not other.completed:
            continue
        for index, (ours, theirs) in enumerate(zip(outcome.choices, other.choices, strict=True)):
            if not _is_same(outcome, ours, theirs):
                is_tie = outcome.item.body.get("temperature") == 0 and min(theirs.gaps, default=1.0) < TIE
                (ties if is_tie else found).append(
                    f"request {outcome.item.number}, choice {index}: {ours} with speculation, {theirs} without; "
                    f"{outcome.item.path} {json.dumps(outcome.item.body)}"
                )
    return found, ties


def _is_same(outcome: Outcome, ours: Choice, theirs: Choice) -> bool:
    if outcome.left:
        return theirs.text.startswith(ours.text)
    if outcome.item.body.get("logprobs"):
        return ours == theirs
    return (ours.text, ours.finish_reason) == (theirs.text, theirs.finish_reason)


def comparable(outcomes: Sequence[Outcome]) -> list[Item]:
    """Items with a text to compare, as requests without streaming. Greedy ones also ask how close tokens come."""
    return [
        replace(o.item, leave_after=0, pause=0, body=_whole(o.item))
        for o in outcomes
        if o.fault is None and (o.completed or (o.left and o.item.kind == LEAVING[0]))
    ]


def _whole(item: Item) -> dict[str, Any]:
    body = {name: value for name, value in item.body.items() if name not in STREAM}
    if item.is_session or body.get("temperature") != 0:
        return body
    return {**body, **({"logprobs": 2} if item.path == COMPLETIONS else {"logprobs": True, "top_logprobs": 2})}


STREAM = ("stream", "stream_options")


# ── the run ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class Run:
    """One server under one load."""

    outcomes: list[Outcome]
    seconds: float
    samples: Samples
    books: list[str]
    after: dict[str, float]
    end: list[str] = field(default_factory=list)  # faults of the server's exit


def soak(url: str | None, flags: Sequence[str], items: Sequence[Item], concurrency: int) -> Run:
    """Against the server at `url`, or one started here."""
    server = Server(*flags, environment=ONE_ARENA) if url is None else None
    target = server.url if server is not None else url
    assert target is not None
    try:
        run = asyncio.run(_soak(target, items, concurrency, server.pids if server is not None else {}))
    finally:
        status = server.stop() if server is not None else 0
    if server is not None:
        if status:
            run.end.append(f"the server's exit status is {status}")
        run.end += errors_in(server.log())
    return run


def errors_in(log: str) -> list[str]:
    """Errors in a server's log; of each traceback the lines that follow it."""
    lines = log.splitlines()
    found = [line for line in lines if "ERROR" in line]
    return found + ["\n".join(lines[i : i + 40]) for i, line in enumerate(lines) if "Traceback" in line]


async def _soak(url: str, items: Sequence[Item], concurrency: int, pids: dict[str, int]) -> Run:
    before, samples, started = await metrics(url), Samples(pids), time.perf_counter()
    samples.descriptors = {name: count_descriptors(pid) for name, pid in pids.items()}
    outcomes = await run_load(url, items, concurrency, samples)
    seconds = time.perf_counter() - started
    after = await metrics_at_rest(url)
    books = check_books(before, after, outcomes) + samples.lost_descriptors()
    return Run(outcomes, seconds, samples, books, after)


# ── what is said ─────────────────────────────────────────────────────────────────────────────────────────────────────


def show_kinds(outcomes: Sequence[Outcome]) -> None:
    print(f"{'kind':24}{'sent':>6}{'as expected':>13}{'left by us':>12}{'faults':>8}")
    for kind in dict.fromkeys(outcome.item.kind for outcome in outcomes):
        these = [outcome for outcome in outcomes if outcome.item.kind == kind]
        left, faults = sum(o.left for o in these), sum(o.fault is not None for o in these)
        print(f"{kind:24}{len(these):6}{len(these) - left - faults:13}{left:12}{faults:8}")


def show_list(title: str, lines: Sequence[str], most: int = 20) -> None:
    print(f"{title}: {'none' if not lines else len(lines)}")
    for line in lines[:most]:
        print(f"    {line[:2000]}")


def faults_of(run: Run, plain: Run, num_requests: int) -> dict[str, list[str]]:
    memory = {name: run.samples.growth(name, num_requests) for name in run.samples.held}
    faults = {
        "answers": [f"{o.item.kind} {o.item.number}: {o.fault}" for o in run.outcomes if o.fault is not None],
        "books": run.books,
        "memory": [f"{name} grew by {g['growth_mib']} MiB" for name, g in memory.items()
                   if g["growth_mib"] > g["bound_mib"]],
        "output": check_output(run.outcomes, plain.outcomes)[0],
        "how the server ended": run.end,
    }  # fmt: skip
    if len(run.outcomes) != num_requests:
        faults["answers"].append(f"{num_requests - len(run.outcomes)} requests were lost")
    return faults


COUNTS = {
    "tokens": "vllm:generation_tokens_total",
    "drafted": "vllm:spec_decode_num_draft_tokens_total",
    "accepted": "vllm:spec_decode_num_accepted_tokens_total",
    "preemptions": "vllm:num_preemptions_total",
    "prefix_hits": "vllm:prefix_cache_hits_total",
    "draft_moves": "faser:draft_moves_total",
    "windows": "faser:video_windows_answered_total",
}


def report(kind: str, run: Run, plain: Run, num_requests: int) -> dict[str, Any]:
    print(f"\n── {kind}: {num_requests} requests in {run.seconds:.0f} s ──")
    show_kinds(run.outcomes)
    faults = faults_of(run, plain, num_requests)
    for title, lines in faults.items():
        show_list(title, lines)
    ties = check_output(run.outcomes, plain.outcomes)[1]
    show_list("texts that part at a tie", ties, most=3)
    memory = {name: run.samples.growth(name, num_requests) for name in run.samples.held}
    for name, growth in memory.items():
        print(f"memory of {name}: {growth}")
    counts = {name: round(run.after.get(metric, 0)) for name, metric in COUNTS.items()}
    print(", ".join(f"{name} {count}" for name, count in counts.items()), flush=True)
    compared = len({o.item.number for o in run.outcomes} & {o.item.number for o in plain.outcomes})
    return {
        "seconds": round(run.seconds, 1), "kinds": Counter(o.item.kind for o in run.outcomes),
        "faults": {title: len(lines) for title, lines in faults.items()}, "compared": compared, "ties": len(ties),
        "memory": memory, **counts,
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1000, help="for each kind of draft")
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0, help="of the load")
    parser.add_argument("--kinds", default=",".join(KINDS), help=f"of drafts: some of {', '.join(KINDS)}")
    parser.add_argument("--pair", choices=("tiny", "default"), default="tiny", help="the models")
    parser.add_argument("--policy", help="of the servers under test; default: faser, but fixed:2 for the random head")
    parser.add_argument("--url", help="a server of the default model that runs; default: they are started")
    parser.add_argument("--reference", metavar="URL", help="one with --policy off that runs; default: one is started")
    args = parser.parse_args()
    kinds = tuple(args.kinds.split(","))
    if set(kinds) - set(KINDS) or (args.pair == "default" and "head" in kinds):
        parser.error(f"--kinds {args.kinds}: expected some of {', '.join(KINDS)}; the default pair has no head")
    kinds = kinds if args.url is None else ("as given",)
    with tempfile.TemporaryDirectory(prefix="faser-soak-") as folder:
        is_tiny = args.pair == "tiny" and args.url is None
        models = tiny_models(Path(folder)) if is_tiny else DEFAULT_PAIR
        items = Load(args.seed, models, make_media() if models.sees else None).draw(args.requests)
        return soak_all(args, models, items, kinds)


def soak_all(args: argparse.Namespace, models: Models, items: Sequence[Item], kinds: Sequence[str]) -> int:
    """The same items for every kind; then those with a text for a server that does not speculate."""
    runs = {}
    for kind in kinds:
        flags = (*FLAGS, *models.flags(kind, args.policy)) if args.url is None else ()
        runs[kind] = soak(args.url, flags, items, args.concurrency)
    wanted = {item.number: item for run in runs.values() for item in comparable(run.outcomes)}
    plain = soak(args.reference, (*FLAGS, *models.flags(None)), list(wanted.values()), args.concurrency)
    told = {kind: report(kind, run, plain, args.requests) for kind, run in runs.items()}
    print()
    odd = [f"{o.item.number}: {o.fault}" for o in plain.outcomes if o.fault] + plain.books + plain.end
    show_list("without speculation", odd)
    failed = bool(odd) or any(sum(each["faults"].values()) for each in told.values())
    document = {
        "requests": args.requests, "concurrency": args.concurrency, "seed": args.seed, "pair": args.pair,
        "policy": args.policy, "failed": failed, "drafts": told, "seconds_off": round(plain.seconds, 1),
    }  # fmt: skip
    print(json.dumps(document))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
