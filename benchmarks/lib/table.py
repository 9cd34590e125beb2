"""Is FASER faster than vLLM at every batch size, with speculation and without? Closed batches on a GPU.

A decoding step reads every weight once, so it takes at least their bytes over the memory bandwidth, plus the KV it
attends to; above about 200 rows it takes the FLOPs over what the tensor cores do. This floor stands beside every
figure (table_report.py). Both systems load the same two folders (models.py) and get the same prompts, Spec-Bench chats
of one length, one system after the other, each in processes of its own.

  off          TPOT without speculation, both systems
  speculation  TPOT at fixed lengths; the best of each system per batch size, "off" included; one step of the draft
  prefill      time to first token of 16 prompts of 2,048 tokens, both
  startup      from the start of the process to the first token: FASER without a draft, twice; every other start of
               either system is timed in passing

TPOT is the mean over requests of (last - first token) / (tokens - 1), in a closed batch, greedy, end tokens ignored;
tokens are counted, never chunks. The steady TPOT is that of the time from the last first token to the first last one.
Batches up to 64 are measured several times with other prompts; the spread is between them. Every setting is warmed up
by a short run. Longer drafts are not tried where shorter ones already take 1.3 times the best. vLLM runs with its own
defaults (CUDA graphs, asynchronous scheduling, the size of its prompt chunks), with prefix caching off, as in FASER.

Every measurement is a record of the journal as soon as it is made. A section that fails is reported and the others
run. A second run with the same --folder adds to the journal, and its tables show both, the later figures where both
have them.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import json
import math
import shutil
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.lib.journal import Figures, Journal, failures, read_json
from benchmarks.lib.models import Prompt, num_groups
from benchmarks.lib.processes import Process, Runner, worker_process
from benchmarks.lib.table_report import summarize, tables
from benchmarks.lib.vllm import VllmEngine, vllm_settings

SECTIONS = ("off", "speculation", "prefill", "startup")
MOST_SECONDS = {"faser": 400.0, "startup": 120.0, "vllm": 240.0}  # of a process; then it is ended

WARM_TOKENS = 24
HOPELESS = 1.3  # times the best: no longer drafts are tried
KEPT_TEXTS = 2  # of a run, to see that both systems run the same model
KV_BYTES = 40 << 30  # of FASER's pages: more than any batch here needs, as is vLLM's share of the memory


# ── requests of either system ──────────────────────────────────────────────────────────────────────────────────────


@dataclass
class Seen:
    """One request of a closed batch. Seconds on one clock; a chunk is the tokens of one step."""

    started: float
    wanted: int  # tokens
    chunks: list[tuple[float, int]] = field(default_factory=list)  # when, how many tokens
    token_ids: list[int] = field(default_factory=list)

    @property
    def first(self) -> float:
        return self.chunks[0][0]

    @property
    def last(self) -> float:
        return self.chunks[-1][0]

    @property
    def tpot(self) -> float:
        return (self.last - self.first) / (self.wanted - 1)

    @property
    def is_done(self) -> bool:
        return len(self.token_ids) >= self.wanted

    def add(self, token_ids: Sequence[int], now: float) -> None:
        if len(token_ids):
            self.chunks.append((now, len(token_ids)))
            self.token_ids.extend(token_ids)


@dataclass(frozen=True)
class Played:
    """A closed batch that was measured."""

    seen: list[Seen]
    steps: Mapping[str, float] = field(default_factory=dict)  # totals while all requests decoded and none had ended


def run_figures(batches: Sequence[Played], length: int) -> Figures:
    """Acceptance = (tokens per step - 1) / length, for either system.

    vLLM joins the tokens of two steps into one chunk where its client is slow, so tokens per step is an upper bound.
    """
    seen = [each for played in batches for each in played.seen]
    short = [each for each in seen if len(each.token_ids) != each.wanted or each.wanted < 2]
    if short:
        raise RuntimeError(f"{len(short)} of {len(seen)} requests got the wrong number of tokens")
    tpots = [1e3 * statistics.fmean(each.tpot for each in played.seen) for played in batches]
    per_step = sum(each.wanted - 1 for each in seen) / max(1, sum(len(each.chunks) - 1 for each in seen))
    return {
        "tpot_ms": statistics.fmean(tpots),
        "spread": (max(tpots) - min(tpots)) / statistics.fmean(tpots),
        "steady_ms": steady_ms([played.seen for played in batches]),
        "ttft_ms": 1e3 * statistics.fmean(each.first - each.started for each in seen),
        "requests": len(seen),
        "tokens_per_step": per_step,
        "acceptance": (per_step - 1) / length if length else None,
        **step_figures([played.steps for played in batches if played.steps]),
        "texts": [each.token_ids for each in seen[:KEPT_TEXTS]],
    }


def step_figures(totals: Sequence[Mapping[str, float]]) -> Figures:
    """Milliseconds of a step, and of draft and target on the GPU within it."""
    number = sum(each["steps"] for each in totals)
    names = {"step_ms": "step_seconds", "draft_ms": "draft_seconds", "verify_ms": "verify_seconds"}
    return {key: 1e3 * sum(each[name] for each in totals) / number for key, name in names.items()} if number else {}


def steady_ms(batches: Sequence[Sequence[Seen]]) -> float | None:
    """Milliseconds per token and request while all of a batch decode: from the last first token to the first end."""
    seconds, tokens = 0.0, 0
    for batch in batches:
        opened, closed = max(each.first for each in batch), min(each.last for each in batch)
        if closed > opened:
            seconds += (closed - opened) * len(batch)
            tokens += sum(count for each in batch for now, count in each.chunks if opened < now <= closed)
    return 1e3 * seconds / tokens if tokens else None


# ── measuring either system ───────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class Worker:
    """One process that measures until `until`, on the clock of time.time()."""

    args: argparse.Namespace
    journal: Journal
    engine: str
    until: float

    def section(self, name: str, work: Callable[[], None]) -> None:
        """Do the work if the section was asked for."""
        if name in self.args.sections:
            self.journal.attempt(name, self.engine, work)

    def prompts(self, name: str) -> list[Prompt]:
        found: list[Prompt] = read_json(self.args.folder / f"{name}.json")
        return found

    def start(self, length: int, player: FaserPlayer | VllmPlayer, **seconds: float) -> None:
        """Serve the first token and record the seconds since the process started.

        Kernel caches are warm if an earlier process started with the same engine and length.
        """
        player.play(self.prompts("requests")[:1], 1)
        since, mode = time.time() - self.args.spawned, f"length {length}" if length else "off"
        before = [(r.get("engine"), r.get("mode")) for r in self.journal.read() if r["kind"] == "startup"]
        caches = "warm" if (self.engine, mode) in before else "cold"
        self.journal.add("startup", engine=self.engine, mode=mode, caches=caches, seconds=since, **seconds)


def groups_of(prompts: Sequence[Prompt], batch: int) -> list[Sequence[Prompt]]:
    """Closed batches of other prompts each."""
    return [prompts[i * batch : (i + 1) * batch] for i in range(num_groups(batch))]


def measure(worker: Worker, player: FaserPlayer | VllmPlayer, lengths: Sequence[int]) -> None:
    """Every length at every batch size, except longer drafts where a shorter one is hopeless."""
    prompts, output = worker.prompts("requests"), worker.args.sizes.output
    runs = [record for record in worker.journal.read() if record["kind"] == "run"]
    best = {r["batch"]: r["tpot_ms"] for r in runs if (r["engine"], r["length"]) == (player.name, 0)}
    hopeless = set()
    for length in lengths:
        player.prepare(length)
        for batch in worker.args.sizes.batches:
            if batch in hopeless:
                continue
            if time.time() > worker.until:
                raise TimeoutError(f"no time for length {length}, batch {batch} and what comes after")
            groups = groups_of(prompts, batch)
            player.play(groups[0], min(WARM_TOKENS, output))
            figures = run_figures([player.play(group, output) for group in groups], length)
            worker.journal.add("run", engine=player.name, length=length, batch=batch, **figures)
            best[batch] = min(best.get(batch, math.inf), figures["tpot_ms"])
            if figures["tpot_ms"] > HOPELESS * best[batch]:
                hopeless.add(batch)


def measure_prefill(worker: Worker, player: FaserPlayer | VllmPlayer) -> None:
    """Played three times; the first is the warm-up."""
    player.prepare(0)
    prompts = worker.prompts("prefill")
    waits = [[each.first - each.started for each in player.play(prompts, 2).seen] for _ in range(3)]
    means, lasts = (1e3 * statistics.fmean(map(kind, waits[1:])) for kind in (statistics.fmean, max))
    worker.journal.add("prefill", engine=player.name, ttft_ms=means, last_ms=lasts)


# ── the process of FASER ─────────────────────────────────────────────────────────────────────────────────────────────


class FaserPlayer:
    """An engine in this process. The graphs of a length are captured when it is first used."""

    name = "faser"

    def __init__(self, args: argparse.Namespace, length: int, kv_memory: int | None = None) -> None:
        """With graphs of `length`, and with the draft unless it is 0."""
        started = time.perf_counter()
        from faser.build import build_engine, load_pair
        from faser.config import EngineOptions

        imported = time.perf_counter()
        options = EngineOptions(
            policy=f"fixed:{length}" if length else "off",
            device=args.device,
            max_running=args.sizes.max_running,
            max_batch_tokens=args.batch_tokens,
            max_model_len=args.sizes.max_model_len,
            kv_memory=kv_memory,
            prefix_caching=False,
        )
        pair = load_pair(str(args.folder / "target"), str(args.folder / "draft") if length else None, options)
        loaded = time.perf_counter()
        self.engine = build_engine(pair.target, pair.draft, options)
        self.on_gpu = args.device == "cuda"
        built = time.perf_counter()
        self.seconds = {"import_s": imported - started, "load_s": loaded - imported, "build_s": built - loaded}

    def prepare(self, length: int) -> None:
        from faser.policy import Fixed

        self.engine.scheduler.drafts.policy = Fixed(length)
        if self.on_gpu and length:
            executor: Any = self.engine.executor
            executor.prepare(length)

    def play(self, prompts: Sequence[Prompt], output: int) -> Played:
        engine, steps, started = self.engine, [], time.perf_counter()
        try:
            for request in make_requests(prompts, output):
                engine.add(request)
            while engine.has_work:
                progress = engine.step()
                steps.append((time.perf_counter(), progress, copy.copy(engine.stats)))
        except BaseException:
            engine.abandon()  # open requests must not run into the next batch
            raise
        return played_of([Seen(started, output) for _ in prompts], steps)


def played_of(seen: list[Seen], steps: Sequence[tuple[float, list[Any], Any]]) -> Played:
    """From the progress of each step and the engine's totals after it; computed after the run, to cost it nothing."""
    opened = closed = None
    for now, progress, stats in steps:
        for item in progress:
            seen[int(item.request_id)].add(item.token_ids, now)
        if opened is None:
            opened = stats if all(each.chunks for each in seen) else None
        elif closed is None and any(each.is_done for each in seen):
            closed = stats
    names = ("steps", "step_seconds", "draft_seconds", "verify_seconds")
    known = opened is not None and closed is not None
    return Played(seen, {name: getattr(closed, name) - getattr(opened, name) for name in names} if known else {})


def make_requests(prompts: Sequence[Prompt], output: int) -> list[Any]:
    from faser.request import Request, SamplingParams

    params = SamplingParams(max_tokens=output, ignore_eos=True)
    return [
        Request(id=str(i), prompt_token_ids=tuple(prompt), params=params, seed=i) for i, prompt in enumerate(prompts)
    ]


def run_faser(worker: Worker) -> None:
    sizes = worker.args.sizes
    kv_memory = KV_BYTES if worker.args.device == "cuda" else None
    player = FaserPlayer(worker.args, sizes.first_length, kv_memory)
    worker.start(sizes.first_length, player, **player.seconds)
    worker.section("off", lambda: measure(worker, player, [0]))
    worker.section("prefill", lambda: measure_prefill(worker, player))
    worker.section("speculation", lambda: measure(worker, player, sizes.lengths))


def run_startup(worker: Worker) -> None:
    """From the start of the process to the first token, without a draft, with default settings."""
    player = FaserPlayer(worker.args, 0)
    worker.start(0, player, **player.seconds)


# ── the process of vLLM ──────────────────────────────────────────────────────────────────────────────────────────────


class VllmPlayer:
    """Closed batches through vLLM."""

    name = "vllm"

    def __init__(self, args: argparse.Namespace, length: int) -> None:
        limits = {"max_running": args.sizes.max_running, "max_model_len": args.sizes.max_model_len}
        self.vllm = VllmEngine(args.vllm_trace, args.folder, length, batch_tokens=args.batch_tokens, **limits)
        self._served = 0

    def prepare(self, length: int) -> None:
        assert length == self.vllm.length, "another length takes another engine"

    def play(self, prompts: Sequence[Prompt], output: int) -> Played:
        return Played(self.vllm.run(self._play(prompts, output)))

    async def _play(self, prompts: Sequence[Prompt], output: int) -> list[Seen]:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        chunks = {"detokenize": False, "output_kind": RequestOutputKind.DELTA}
        params = SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True, **chunks)
        started = time.perf_counter()
        return await asyncio.gather(*(self._play_one(prompt, params, Seen(started, output)) for prompt in prompts))

    async def _play_one(self, prompt: Prompt, params: Any, seen: Seen) -> Seen:
        self._served += 1
        async for output in self.vllm.engine.generate({"prompt_token_ids": prompt}, params, f"request-{self._served}"):
            seen.add(output.outputs[0].token_ids, time.perf_counter())
        return seen


def run_vllm(worker: Worker) -> None:
    length, started = worker.args.only_length, time.perf_counter()
    player = VllmPlayer(worker.args, length)
    try:
        worker.start(length, player, build_s=time.perf_counter() - started)
        worker.journal.add("note", engine="vllm", length=length, **vllm_settings(player.vllm.engine))
        worker.section("speculation" if length else "off", lambda: measure(worker, player, [length]))
        if not length:
            worker.section("prefill", lambda: measure_prefill(worker, player))
    finally:
        player.vllm.shutdown()


# ── the experiment ───────────────────────────────────────────────────────────────────────────────────────────────────


def add_flags(add: Callable[..., Any]) -> None:
    add("--sections", type=section_list, default=list(SECTIONS), help="some of them, separated by commas (all)")
    add("--batches", type=integers, help="(1,4,16,64,128,256)")
    add("--lengths", type=integers, help="of FASER's drafts (1,2,3,4,5,6)")
    add("--vllm-lengths", type=integers, help="of vLLM's drafts; each takes a start of it (2,4)")


def integers(text: str) -> tuple[int, ...]:
    return tuple(int(each) for each in text.split(",") if each)


def section_list(text: str) -> list[str]:
    names = text.split(",")
    unknown = [name for name in names if name not in SECTIONS]
    if unknown:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: expected some of {','.join(SECTIONS)}")
    return names


def plan_processes(args: argparse.Namespace) -> list[Process]:
    """The most useful first: should time run out, the last ones are missing."""

    def vllm(length: int) -> Process:
        return worker_process(args, "vllm", MOST_SECONDS["vllm"], f"vllm {length}", only_length=length)

    wanted = set(args.sections)
    processes = []
    if args.vllm_bundle is not None and wanted & {"off", "prefill"}:
        processes.append(vllm(0))
    if wanted - {"startup"}:
        processes.append(worker_process(args, "faser", MOST_SECONDS["faser"]))
    if args.vllm_bundle is not None and "speculation" in wanted:
        processes += map(vllm, args.sizes.vllm_lengths)
    if "startup" in wanted:
        processes += 2 * [worker_process(args, "startup", MOST_SECONDS["startup"])]
    return processes


def run(args: argparse.Namespace, runner: Runner) -> None:
    runner.journal.add("models", **read_json(args.folder / "models.json"))
    for process in plan_processes(args):
        runner.run(process, args.until)


def work(args: argparse.Namespace, journal: Journal) -> None:
    engine = "vllm" if args.worker == "vllm" else "faser"
    runs = {"faser": run_faser, "startup": run_startup, "vllm": run_vllm}
    runs[args.worker](Worker(args, journal, engine, args.until))


def save(args: argparse.Namespace, journal: Journal) -> None:
    shutil.copy(journal.path, args.out / "table.jsonl")


def finish(args: argparse.Namespace, journal: Journal) -> int:
    """0: nothing failed in the last session."""
    records = journal.read()
    summary = summarize(records)
    line = json.dumps({"benchmark": "h200", "seconds": round(time.time() - args.started, 1), **summary})
    (args.out / "table.md").write_text(tables(summary) + "\n", encoding="utf-8")
    (args.out / "table.json").write_text(line + "\n", encoding="utf-8")
    print(tables(summary))
    print(line, flush=True)
    return 1 if failures(records) else 0
