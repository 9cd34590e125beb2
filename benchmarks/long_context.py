"""What long contexts cost on a GPU, and what a draft with a window brings there: FASER against vLLM.

The target is SmolLM2 in the shape of an 8B, the draft one in that of a 1B (lib/models.py). Up to 8,192 tokens, which
SmolLM2 was trained for, acceptance is real; in longer contexts drafts are accepted with --acceptance, in vLLM by its
own synthetic acceptance. Parts (--parts):

  capacity  KV tokens that fit beside the models, with each kind of draft, and requests of every case that fit
  kernels   attention of 1 to 8 rows a request over the contexts of all cases: microseconds a layer, against the memory
            floor and against one row
  prefill   one prompt alone: time to first token, and to the end of a short answer, which waits for the catch-up
  loops     all requests of a case decode: tokens/s. One batch plays the policies by turns, forth and back, so that they
            see the same mean context; tokens of a turn begin to count after --settle tokens a request
  trace     Azure's conversation trace, every tenth prompt 16,384 tokens long: `faser` against every fixed length. Its
            acceptance is real, beyond 8,192 tokens too, where SmolLM2 writes worse text

Modes (--modes), each in a process of its own:

  whole, window        the draft sees whole contexts, or --window tokens (every policy of --policies; `off` too)
  eagle3               a head instead, if --eagle3 is given
  trace                of `trace`, with a window
  vllm:off, vllm:model:K, vllm:eagle3:K   vLLM. `loops` are closed batches: tokens/s from the time when all requests
                       that fit decode until the first one ends; none where one ends before. `trace` plays what the
                       mode `trace` wrote

Every engine of FASER is built for one case (--cases, prompt:requests), with all memory that the models leave, a quick
profile and no bound on a step's duration; that of `trace` has a full profile and the default bound. Where fewer
requests fit than are open, the others wait; `running` says how many decode. Where the time ends early, a policy has
fewer `turns`.

    python3 -m benchmarks.long_context --target TARGET.gguf [--parts capacity,kernels,prefill,loops,trace]
        [--modes window,whole,vllm:off,vllm:model:2] [--cases 2048:128,8192:64,16384:32,32768:24,131072:1]
        [--eagle3 HEAD] [--vllm-bundle DIR] [--python-path DIR] [--folder DIR]
    python3 -m benchmarks.long_context --report-only DIR         # measures nothing
    python3 -m benchmarks.long_context --tiny --device cpu       # tiny models, no kernels: does it all run?

All of it takes more than one call of ten minutes: at the floor of 790 TFLOP/s the prompts of all cases take 56 s, and
every mode reads them. Calls with the same --folder share models, caches and the journal, for instance

    --parts capacity,kernels,prefill,loops --modes window,whole --cases 2048:128,8192:64,16384:32
    --parts prefill,loops --modes window,whole --cases 32768:24,131072:1
    --parts prefill,loops --modes vllm:off,vllm:model:2 --cases 8192:64,32768:24
    --parts trace --modes trace,vllm:off --loads 0.3,1 --trace-policies off,fixed:1,fixed:2,fixed:4,faser

--budget-seconds counts from the start of the command: lower it by what else a call does before, such as to unpack vLLM.

Results go to $OUT (else to --folder): long_context.jsonl is the journal, long_context.log the output of the processes,
long_context.json and .md are up to date at any moment. Figures measured later replace earlier ones. The last line is
the JSON document. What fails is listed and the rest goes on; the exit status is then 1. How to carry models and vLLM to
a bare machine: benchmarks/h200.py.

At the top this module imports the standard library alone: it is also the driver inside vLLM's process.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.heads import VllmHeadMode, is_vllm_mode, numbers, vllm_environment
from benchmarks.lib import head_models, models
from benchmarks.lib.journal import Figures, Journal, atomic_write, read_json
from benchmarks.lib.long_report import prompt_floor_s, summarize, tables
from benchmarks.lib.models import Prompt
from benchmarks.lib.processes import Process, Runner, worker_process
from benchmarks.lib.run_flags import add_run_flags, begin_run, refuse_missing
from benchmarks.lib.table import Seen
from benchmarks.lib.table_report import floor_ms
from benchmarks.lib.vllm import vllm_settings
from benchmarks.vllm_plugin import Player, Shape, chosen_from, left, short

MODULE = "benchmarks.long_context"
NAME = "long_context"
PARTS = ("capacity", "kernels", "prefill", "loops", "trace")
CASE_PARTS = {"prefill", "loops"}
CAPACITY_RUNNING = 256  # requests of the engine that capacity is read from: more pages than they can hold are not made
DRAFTS = {"whole": "draft", "window": "draft", "eagle3": "eagle3"}  # folders, by mode
MODES = ("window", "whole", "eagle3", "trace", "vllm:off", "vllm:model:2")
KERNEL_ROWS = (1, 2, 3, 5, 8)
MODELS_SECONDS, MODE_SECONDS = 240.0, 540.0  # of a process; then it is ended
ENGINE_SECONDS = 15.0  # to build an engine with a quick profile, assumed
STEADY_STEPS = 4  # in which no request is admitted: then all that fit have begun
VLLM_MEMORY = 0.92  # share of the GPU's; FASER takes what the models leave but for 1.5 GiB


@dataclass(frozen=True)
class Case:
    """A closed batch. `context`: tokens of a prompt."""

    context: int
    requests: int

    @property
    def name(self) -> str:
        return f"{self.context}:{self.requests}"


@dataclass(frozen=True)
class LongSizes:
    """Tokens, requests, seconds."""

    cases: tuple[Case, ...] = tuple(
        Case(*each) for each in ((2048, 128), (8192, 64), (16_384, 32), (32_768, 24), (131_072, 1))
    )
    trained: int = 8192  # context up to which acceptance is real
    window: int = 1024
    rounds: int = 2  # of all policies forth, and back
    turn: int = 64  # tokens of each request that count in a turn, on average
    settle: int = 32  # before them
    answer: int = 16  # of a prompt alone
    vllm_output: int = 512
    span: float = 8.0  # of the trace at every load
    loads: tuple[float, ...] = (0.3, 0.7, 1.0)
    max_prompt: int = 1024  # of the trace's short prompts
    max_output: int = 256
    long: int = 16_384  # of every tenth prompt
    max_running: int = 64  # of the trace

    def growth(self, num_policies: int) -> int:
        """Tokens that a request may emit in `loops`: twice the mean, as some are accepted more often."""
        return 4 * self.rounds * num_policies * (self.turn + self.settle)

    def prompt(self, case: Case, num_policies: int) -> int:
        """Prompts of real acceptance leave room for what is written behind them."""
        if case.context > self.trained:
            return case.context
        return min(case.context, self.trained - self.growth(num_policies) // 2)


TINY = LongSizes(
    (Case(24, 2), Case(48, 1)), trained=200, window=64, rounds=1, turn=2, settle=1, answer=3, vllm_output=6, span=0.3,
    loads=(0.5,), max_prompt=12, max_output=4, long=40, max_running=2,
)  # fmt: skip


# ── files ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def ensure_files(args: argparse.Namespace) -> None:
    """The models, their copies for long contexts, and the prompts of all cases."""
    models.ensure_models(args)
    head_models.ensure_heads(args)
    most = most_tokens(args)
    for name in ("target", "draft", "eagle3"):
        if (args.folder / name).is_dir():
            lengthen(args.folder / name, args.long_folder / name, most)
    prompts = make_prompts(args)
    for case in args.long.cases:
        path, size = prompts_file(args, case), args.long.prompt(case, len(args.policies))
        if not path.is_file() or len(read_json(path)[0]) != size:
            kind = "text" if case.context <= args.long.trained else "random"
            atomic_write(path, json.dumps(prompts[kind](case.requests, size)))


def most_tokens(args: argparse.Namespace) -> int:
    """Of any request of this command, and the drafts behind it."""
    sizes, growth = args.long, args.long.growth(len(args.policies))
    longest = max((case.context for case in sizes.cases), default=0)
    return max(longest + max(growth, sizes.vllm_output), sizes.long + sizes.max_output) + 64


def lengthen(source: Path, folder: Path, positions: int) -> None:
    """A folder with the same weights whose config allows contexts of `positions` tokens."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for path in source.iterdir():
        if path.name != "config.json":
            (folder / path.name).symlink_to(path)
    config = read_json(source / "config.json")
    config["max_position_embeddings"] = max(positions, config.get("max_position_embeddings", 0))
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")


def make_prompts(args: argparse.Namespace) -> dict[str, models.MakePrompts]:
    from faser.models.source import open_target

    random = models.make_random_prompts(read_json(args.folder / "models.json")["vocabulary"], seed=2)
    if args.tiny:
        return {"text": random, "random": random}
    tokenizer = open_target(None if args.target is None else str(args.target)).tokenizer()
    assert tokenizer is not None, "the target has no tokenizer"
    return {"text": models.specbench_prompts(tokenizer), "random": random}


def prompts_file(args: argparse.Namespace, case: Case) -> Path:
    return Path(args.work / f"prompts-{case.context}-{case.requests}.json")


# ── a mode of FASER ──────────────────────────────────────────────────────────────────────────────────────────────────


def engine_options(args: argparse.Namespace, mode: str, max_model_len: int, max_running: int, **more: Any) -> Any:
    from faser.config import EngineOptions

    on_gpu = args.device == "cuda"
    sizes = {} if on_gpu else {"num_pages": max_running * -(-max_model_len // 16) + 8}
    return EngineOptions(
        policy="faser",
        device=args.device,
        max_running=max_running,
        max_model_len=max_model_len,
        draft_window=args.long.window if mode in ("window", "trace") else "off",
        prefix_caching=False,
        profiling="none" if not on_gpu else "full" if mode == "trace" else "quick",
        early_exit="off",
        overlap="off",
        offload="off",
        **sizes,
        **more,
    )


def load_models(args: argparse.Namespace, mode: str) -> Any:
    from faser.build import load_pair

    folder = args.long_folder
    options = engine_options(args, mode, most_tokens(args), 1)
    return load_pair(str(folder / "target"), str(folder / DRAFTS.get(mode, "draft")), options)


def run_own_mode(args: argparse.Namespace, journal: Journal) -> None:
    pair, mode = load_models(args, args.only_mode), args.only_mode
    if "capacity" in args.parts:
        journal.attempt("capacity", mode, partial(measure_capacity, args, journal, pair))
        gc.collect()
    for case in args.long.cases if CASE_PARTS & set(args.parts) else ():
        journal.attempt(case.name, mode, partial(measure_case, args, journal, pair, case))
        gc.collect()


def measure_capacity(args: argparse.Namespace, journal: Journal, pair: Any) -> None:
    from faser.build import build_engine

    longest, running = min(args.long.long, most_tokens(args)), 2 if args.tiny else CAPACITY_RUNNING
    options = engine_options(args, args.only_mode, longest, running)
    engine = build_engine(pair.target, pair.draft, replace(options, policy="fixed:4", profiling="none"))
    try:
        pool = engine.scheduler.target_pages
        tokens = pool.num_pages * pool.page_size
        fitting = {str(case.context): tokens // case.context for case in args.long.cases}
        journal.add("capacity", mode=args.only_mode, tokens=tokens, fitting=fitting)
    finally:
        engine.close()


def measure_case(args: argparse.Namespace, journal: Journal, pair: Any, case: Case) -> None:
    from faser.build import build_engine

    mode, sizes, shape = args.only_mode, args.long, shape_of(pair.target.config)
    prompts: list[Prompt] = read_json(prompts_file(args, case))
    growth = sizes.growth(len(args.policies))
    needed = seconds_needed(args, shape, case.requests, len(prompts[0]))
    if args.device == "cuda" and time.time() + needed > args.until:
        raise TimeoutError(f"it would take {needed:.0f} s or more, {left(args):.0f} s are left")
    is_real = case.context <= sizes.trained or args.device != "cuda"
    options = engine_options(
        args, mode, len(prompts[0]) + growth + 16, case.requests, acceptance=None if is_real else args.acceptance,
        max_step_ms=0,  # else the first requests are at their end before the last prompt is read
    )  # fmt: skip
    started = time.perf_counter()
    engine = build_engine(pair.target, pair.draft, options)
    about = {"mode": mode, "context": case.context, "requests": case.requests}
    try:
        journal.add("engine", **about, seconds=time.perf_counter() - started, shapes={"target": shape})
        batch = LongBatch(engine, args)
        if "prefill" in args.parts:
            for policy in ("off", args.policies[0]):
                journal.add("prefill", **about, policy=policy, **batch.alone(policy, prompts[0]))
        if "loops" in args.parts:
            for figures in batch.loops(prompts, growth):
                floor = step_floor_ms(args, pair, mode, figures)
                journal.add("loop", **about, **figures, floor_ms=floor, is_real=is_real)
    finally:
        engine.close()


def seconds_needed(args: argparse.Namespace, shape: Figures, requests: int, prompt: int) -> float:
    """Of a case: its engine, prompts, and turns of one token a step, at the floor of the target."""
    sizes, has_loops = args.long, "loops" in args.parts
    prompts = requests * has_loops + 4 * ("prefill" in args.parts)
    steps = 2 * sizes.rounds * len(args.policies) * (sizes.turn + sizes.settle) * has_loops
    step = floor_ms(shape, shape["vocab_size"], requests, requests * prompt) / 1e3
    return ENGINE_SECONDS + 1.5 * prompts * prompt_floor_s(shape, prompt) + steps * step


def shape_of(config: Any) -> dict[str, int]:
    names = ("hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "intermediate_size", "vocab_size")
    return {name: getattr(config, name) for name in names}


def step_floor_ms(args: argparse.Namespace, pair: Any, mode: str, figures: Figures) -> float | None:
    """Of a mean step: one forward of the target, and one of the draft for each drafted token. None with a head."""
    running, length, seen = figures["running"], figures["mean_length"], figures["mean_context"]
    shape = shape_of(pair.target.config)
    verifying = floor_ms(shape, shape["vocab_size"], round(running * (1 + length)), running * seen)
    if not length:
        return verifying
    if DRAFTS[mode] != "draft":
        return None
    drafted = min(seen, args.long.window) if mode == "window" else seen
    shape = shape_of(pair.draft.config)
    return verifying + length * floor_ms(shape, shape["vocab_size"], running, running * drafted)


class LongBatch:
    """An engine that is empty, or in which all requests of a case decode."""

    def __init__(self, engine: Any, args: argparse.Namespace) -> None:
        from faser.policy import make_policy
        from faser.traffic.play import take_policy

        self.engine, self.args = engine, args
        self.policies = {name: make_policy(name) for name in args.policies}
        for policy in self.policies.values():
            take_policy(engine, policy)  # captures the graphs of its lengths
        self._ended = 0

    def alone(self, policy: str, prompt: Prompt) -> Figures:
        """Seconds of a prompt that nobody is beside; the second of two, the first is the warm-up."""
        from faser.policy import make_policy

        for _ in range(2):
            self.engine.scheduler.drafts.policy = make_policy(policy)
            began, first = time.perf_counter(), None
            self._add([prompt], self.args.long.answer)
            while self.engine.has_work:
                self._check_time()
                if any(item.token_ids for item in self.engine.step()) and first is None:
                    first = time.perf_counter()
            ended = time.perf_counter()
        assert first is not None
        return {"ttft_s": first - began, "answer_s": ended - began, "tokens": len(prompt)}

    def loops(self, prompts: Sequence[Prompt], growth: int) -> Iterator[Figures]:
        """The figures of every policy over the turns for which there was time. Raises if one had no turn."""
        sizes, names = self.args.long, list(self.policies)
        began = time.perf_counter()
        self._fill(prompts, growth)
        filled = time.perf_counter() - began
        turns: dict[str, list[Figures]] = {name: [] for name in names}
        why: Exception = RuntimeError("a request ended")
        try:
            for name in sizes.rounds * (names + names[::-1]):
                found = self._turn(name)
                if found is None:
                    break
                turns[name].append(found)
        except TimeoutError as error:
            why = error
        self.engine.abandon()
        for name, played in turns.items():
            if played:
                yield {"policy": name, "fill_s": filled, "turns": len(played), **joined(played, len(prompts[0]))}
        without = [name for name, played in turns.items() if not played]
        if without:
            raise RuntimeError(f"no turn of {', '.join(without)}: {why}") from why

    def _fill(self, prompts: Sequence[Prompt], growth: int) -> None:
        """Until all requests that fit have begun."""
        scheduler, begun, steady = self.engine.scheduler, set(), 0
        self.engine.scheduler.drafts.policy = self.policies[self.args.policies[0]]
        self._add(prompts, growth)
        while steady < STEADY_STEPS:
            self._check_time()
            progress = self.engine.step()
            if any(item.finish is not None for item in progress):
                raise RuntimeError(f"a request ended when {len(begun)} of {len(prompts)} had begun")
            begun |= {item.request_id for item in progress}
            is_full = len(begun) == len(prompts) or scheduler.lacks_pages
            steady = steady + 1 if is_full and len(begun) >= scheduler.num_running > 0 else 0

    def _turn(self, name: str) -> Figures | None:
        """None where a request ended: then fewer decode."""
        engine, sizes = self.engine, self.args.long
        engine.scheduler.drafts.policy = self.policies[name]
        self._emit(sizes.settle)
        before, preempted, began = replace(engine.stats), engine.scheduler.num_preemptions, time.perf_counter()
        running = engine.scheduler.num_running
        self._emit(sizes.turn)
        seconds, after = time.perf_counter() - began, engine.stats
        if self._ended:
            return None
        names = (
            "steps", "emitted", "drafted", "verified", "accepted", "draft_seconds", "verify_seconds", "plan_seconds",
        )  # fmt: skip
        gained = {each: getattr(after, each) - getattr(before, each) for each in names}
        preempted = engine.scheduler.num_preemptions - preempted
        return {"seconds": seconds, "running": running, "preempted": preempted, **gained}

    def _emit(self, tokens: int) -> None:
        """Steps until the running requests emitted so many tokens each, on average."""
        engine = self.engine
        most = engine.stats.emitted + tokens * engine.scheduler.num_running
        while engine.stats.emitted < most and engine.has_work and not self._ended:
            self._check_time()
            self._ended += sum(item.finish is not None for item in engine.step())

    def _add(self, prompts: Sequence[Prompt], output: int) -> None:
        from faser.request import Request, SamplingParams

        params = SamplingParams(max_tokens=output, ignore_eos=True)
        for number, prompt in enumerate(prompts):
            self.engine.add(Request(id=str(number), prompt_token_ids=tuple(prompt), params=params, seed=number))

    def _check_time(self) -> None:
        if time.time() > self.args.until:
            raise TimeoutError("no time left")


def joined(turns: Sequence[Figures], prompt: int) -> Figures:
    """The turns of a policy as one. A request's share of a step that drafts: tokens_per_step."""
    total = {name: sum(each[name] for each in turns) for name in turns[0]}
    running, steps = total["running"] / len(turns), max(1, total["steps"])
    rates = [each["emitted"] / each["seconds"] for each in turns]
    return {
        "tokens_per_s": total["emitted"] / total["seconds"],
        "spread": (max(rates) - min(rates)) / (sum(rates) / len(rates)),
        "running": running,
        "step_ms": 1e3 * total["seconds"] / steps,
        **{f"{name}_ms": 1e3 * total[f"{name}_seconds"] / steps for name in ("draft", "verify", "plan")},
        "tokens_per_step": total["emitted"] / steps / running,
        "mean_length": total["drafted"] / steps / running,
        "acceptance": total["accepted"] / total["verified"] if total["verified"] else None,
        "mean_context": prompt + total["emitted"] / running / 2,
        "preempted": total["preempted"],
    }


# ── the mixed trace ──────────────────────────────────────────────────────────────────────────────────────────────────


def run_trace(args: argparse.Namespace, journal: Journal) -> None:
    from faser.bench.command import expand_policies
    from faser.bench.systems import PolicySystem
    from faser.build import build_engine

    sizes = args.long
    options = engine_options(args, "trace", sizes.long + sizes.max_output + 16, sizes.max_running)
    pair = load_models(args, "trace")
    engine = build_engine(pair.target, pair.draft, options)
    try:
        systems = [PolicySystem(engine, name, 0.0) for name in expand_policies(args.trace_policies)]
        rate = args.rate or saturation_rate(args, systems[0])
        journal.add("saturation", rate=rate, measured=args.rate is None)
        for load in sizes.loads:
            ensure_workload(args, load, rate)
        for load, system in itertools.product(sizes.loads, systems):
            journal.attempt(f"load {load:g}", system.name, partial(play_trace, args, journal, system, load))
    finally:
        engine.close()


def mixed_workload(args: argparse.Namespace, rate: float) -> Any:
    """The trace at a rate; every tenth prompt is as long as can be, of the texts behind it."""
    from faser.bench.systems import load_vocabulary
    from faser.traffic.document import Workload
    from faser.traffic.traces import Timing
    from faser.traffic.workload import Load, Vocabulary, WorkloadOptions, make_workload

    sizes = args.long
    options = WorkloadOptions(
        trace="azure-conv", timing=Timing(span=sizes.span), max_prompt=sizes.max_prompt, max_output=sizes.max_output,
        prompts="random" if args.tiny else "specbench",
    )  # fmt: skip
    if args.tiny:
        vocabulary = Vocabulary(read_json(args.folder / "models.json")["vocabulary"], sizes.long, None)
    else:
        vocabulary = load_vocabulary(None if args.target is None else str(args.target), None, chat=True)
    items = list(make_workload(options, Load(rate), vocabulary).items)
    texts = [item.prompt_token_ids for item in items]
    for index in range(0, len(items), 10):
        following = itertools.chain.from_iterable(itertools.cycle(texts[index:] + texts[:index]))
        tokens = tuple(itertools.islice(following, sizes.long))
        items[index] = replace(items[index], prompt_token_ids=tokens, category=f"long {items[index].category}")
    return Workload(tuple(items))


def saturation_rate(args: argparse.Namespace, off: Any) -> float:
    """Requests per second of a closed loop without speculation."""
    from faser.traffic.play import no_update

    size = args.long.max_running
    workload = mixed_workload(args, 3 * size / args.long.span)
    run = off.play(replace(workload, concurrency=size), lambda: time.time() > args.until, no_update)
    ended = [record for record in run.records if record.end is not None]
    if run.partial or not ended:
        raise TimeoutError("the saturation rate took too long; give --rate")
    return len(ended) / float(run.seconds)


def workload_file(args: argparse.Namespace, load: float) -> Path:
    return Path(args.work / f"load-{load:g}.jsonl")


def ensure_workload(args: argparse.Namespace, load: float, rate: float) -> None:
    from faser.traffic.workload import save_workload

    save_workload(mixed_workload(args, rate * load), workload_file(args, load))


def play_trace(args: argparse.Namespace, journal: Journal, system: Any, load: float) -> None:
    from faser.traffic.play import no_update
    from faser.traffic.summary import summarize as figures_of
    from faser.traffic.workload import load_workload

    def is_over() -> bool:
        return time.time() > float(args.until)

    if is_over():
        raise TimeoutError("no time left")
    workload = load_workload(workload_file(args, load))
    system.warm_up(workload, 8, is_over)
    run = system.play(workload, is_over, no_update)
    if run.partial:
        raise TimeoutError("cut short")
    summary = figures_of(run)
    names = ("requests", "lost", "output_tokens_per_s", "latency_per_token_mean", "ttft_mean", "mean_length")
    groups = {
        name: [each for each in run.records if (each.num_prompt > args.long.max_prompt) == (name == "long")]
        for name in ("short", "long")
    }
    by_context = {name: drafts_of(records) for name, records in groups.items()}
    about = {"mode": "trace", "system": system.name, "load": load}
    journal.add("trace", **about, **{name: summary[name] for name in names}, by_context=by_context)


def drafts_of(records: Sequence[Any]) -> Figures:
    """Mean length and acceptance of some requests."""
    steps, drafted, verified, accepted = (
        sum(getattr(each, name) or 0 for each in records) for name in ("steps", "drafted", "verified", "accepted")
    )
    return {"mean_length": drafted / max(1, steps), "acceptance": accepted / verified if verified else None}


# ── a mode of vLLM ───────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class LongVllmMode(VllmHeadMode):
    """As in benchmarks/heads.py. `chance`: of synthetic acceptance; None: real acceptance."""

    chance: float | None = None

    def engine_args(self, folder: Path, shape: Shape, on_gpu: bool) -> Figures:
        given = super().engine_args(folder, shape, on_gpu) | {"disable_log_stats": True}
        given |= {"gpu_memory_utilization": VLLM_MEMORY} if on_gpu else {}
        if self.chance is not None and self.length:
            rates = [self.chance**number for number in range(1, self.length + 1)]
            synthetic = {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": rates}
            given["speculative_config"] |= synthetic
        return given


class TimedPlayer(Player):
    """vLLM's engine; keeps when each chunk of a request came."""

    def timed(self, prompts: Sequence[Prompt], output: int, seconds: float) -> list[Seen]:
        """A closed batch."""
        return self._runner.run(asyncio.wait_for(self._timed(prompts, output), seconds))

    async def _timed(self, prompts: Sequence[Prompt], output: int) -> list[Seen]:
        started = time.perf_counter()
        seen = [Seen(started, output) for _ in prompts]
        await asyncio.gather(*(self._receive(*each, output) for each in zip(prompts, seen, strict=True)))
        return seen

    async def _receive(self, prompt: Prompt, seen: Seen, output: int) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        chunks = {"detokenize": False, "output_kind": RequestOutputKind.DELTA, "logprobs": None}
        params = SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True, **chunks)
        self._number += 1
        async for given in self.engine.generate({"prompt_token_ids": prompt}, params, f"request-{self._number}"):
            seen.add(given.outputs[0].token_ids, time.perf_counter())


def steady_rate(seen: Sequence[Seen], fitting: int) -> Figures:
    """Tokens/s and running requests from the last beginning before the first end, until that end.

    No rate if fewer have begun by then than fit: prompts were still read.
    """
    closed = min(each.last for each in seen)
    begun = [each for each in seen if each.first < closed]
    opened = max((each.first for each in begun), default=closed)
    tokens = sum(count for each in begun for now, count in each.chunks if opened < now <= closed)
    is_steady = closed > opened and len(begun) >= min(fitting, len(seen))
    return {"tokens_per_s": tokens / (closed - opened) if is_steady else None, "running": len(begun)}


def vllm_fitting(engine: Any, tokens: int) -> int | None:
    """How many requests of so many tokens vLLM's KV cache holds; None where the engine does not say."""
    config = getattr(getattr(engine, "vllm_config", None), "cache_config", None)
    blocks, size = (getattr(config, name, None) for name in ("num_gpu_blocks", "block_size"))
    return int(blocks // -(-tokens // size)) if blocks and size else None


def run_vllm_mode(args: argparse.Namespace, journal: Journal) -> None:
    sizes, name, kind = args.long, args.only_mode, args.only_kind
    cases = [case for case in sizes.cases if kind in ("all", kind_of(args, case))]
    mode = LongVllmMode(name, args.acceptance if kind == "beyond" and args.device == "cuda" else None)
    running = max([case.requests for case in cases] + [sizes.max_running] * (kind != "beyond"))
    shape = Shape(max_model_len=most_tokens(args), max_running=running)
    player = TimedPlayer(mode, args.long_folder, shape, args.device == "cuda")
    try:
        journal.add("note", mode=name, acceptance=kind, **vllm_settings(player.engine))
        if CASE_PARTS & set(args.parts):
            for case in cases:
                journal.attempt(case.name, name, partial(measure_vllm, args, journal, player, case))
        if "trace" in args.parts and kind != "beyond":
            for load in sizes.loads:
                journal.attempt(f"load {load:g}", name, partial(play_vllm_trace, args, journal, player, load))
    finally:
        player.shutdown()


def kind_of(args: argparse.Namespace, case: Case) -> str:
    """Whether its acceptance is real."""
    return "real" if case.context <= args.long.trained else "beyond"


def measure_vllm(args: argparse.Namespace, journal: Journal, player: TimedPlayer, case: Case) -> None:
    prompts: list[Prompt] = read_json(prompts_file(args, case))
    about = {"mode": args.only_mode, "context": case.context, "requests": case.requests, "policy": "vllm"}
    (alone,) = player.timed(prompts[:1], args.long.answer, left(args))  # the warm-up
    if "prefill" in args.parts:
        (alone,) = player.timed(prompts[:1], args.long.answer, left(args))
        figures = {"ttft_s": alone.first - alone.started, "answer_s": alone.last - alone.started}
        journal.add("prefill", **about, **figures, tokens=len(prompts[0]))
    if "loops" in args.parts:
        seen = player.timed(prompts, args.long.vllm_output, left(args))
        fitting = vllm_fitting(player.engine, len(prompts[0]) + args.long.vllm_output)
        figures = steady_rate(seen, len(seen) if fitting is None else fitting)
        journal.add("loop", **about, **figures, is_real=kind_of(args, case) == "real")
        if figures["tokens_per_s"] is None:
            raise RuntimeError(f"a request ended when {figures['running']} had begun; raise --vllm-output")


def play_vllm_trace(args: argparse.Namespace, journal: Journal, player: TimedPlayer, load: float) -> None:
    path = workload_file(args, load)
    if not path.is_file():
        raise ValueError(f"{path} is not there; the mode `trace` writes it")
    requests = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    player.loop(short(requests[:8]), 8, left(args))
    answers = player.play(requests, left(args))
    seconds = max(each.last for each in answers) - min(each.due for each in answers)
    figures = {
        "requests": len(answers),
        "lost": 0,
        "output_tokens_per_s": sum(len(each.token_ids) for each in answers) / seconds,
        "latency_per_token_mean": sum(each.per_token for each in answers) / len(answers),
        "ttft_mean": sum(each.first - each.due for each in answers) / len(answers),
    }
    journal.add("trace", mode=args.only_mode, system=args.only_mode, load=load, **figures)


# ── kernels ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def run_kernels(args: argparse.Namespace, journal: Journal) -> None:
    from benchmarks import cuda_attention as measured
    from faser.runtime.cuda import attention

    arena, shape = measured.make_arena(), measured.LARGE
    for case, rows in itertools.product(args.long.cases, KERNEL_ROWS):

        def one(case: Case = case, rows: int = rows) -> None:
            if time.time() > args.until:
                raise TimeoutError("no time left")
            config = attention.choose(
                case.requests, rows, case.context + 1024, shape.num_heads, shape.num_kv_heads, shape.head_dim,
                arena.dtype,
            )  # fmt: skip
            found = measured.measure(measured.Case(shape, case.requests, rows, case.context), arena, config)
            journal.add("kernel", **found)

        journal.attempt(f"{case.name}, {rows} rows", "kernels", one)


# ── the command ──────────────────────────────────────────────────────────────────────────────────────────────────────


def case_list(text: str) -> tuple[Case, ...]:
    found = []
    for each in text.split(","):
        context, _, requests = each.partition(":")
        if not (context.isdigit() and requests.isdigit() and int(context) and int(requests)):
            raise argparse.ArgumentTypeError(f"{each}: expected tokens and requests, as in 32768:24")
        found.append(Case(int(context), int(requests)))
    return tuple(found)


def mode_list(text: str) -> tuple[str, ...]:
    given = tuple(text.split(","))
    unknown = [each for each in given if each not in MODES and not is_vllm_mode(each)]
    if unknown:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: expected modes such as {','.join(MODES)}")
    return given


def words(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(each.strip() for each in text.split(",")))


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--target", type=Path, metavar="TARGET.gguf", help="the small target (the default model)")
    add("--draft", type=Path, default=models.DRAFT, metavar="DRAFT.gguf", help="its draft (the one of 16 layers)")
    add("--eagle3", type=Path, metavar="FOLDER", help="its EAGLE-3 head")
    add("--python-path", type=Path, help="folder with the package gguf, where it is not installed")
    add("--vllm-bundle", type=Path, help="vLLM, unpacked; without it FASER is measured alone")
    add("--parts", type=chosen_from(PARTS), default=PARTS, help="some of them, separated by commas (all)")
    add("--modes", type=mode_list, default=MODES, help=f"({','.join(MODES)})")
    add("--cases", type=case_list, help="tokens and requests (2048:128,8192:64,16384:32,32768:24,131072:1)")
    add("--policies", type=words, default=("fixed:4", "fixed:2", "off", "faser"), help="of `loops`")
    add("--trace-policies", default="off,fixed:1..5,faser", help="(off,fixed:1..5,faser)")
    add("--acceptance", type=float, default=0.76, help="beyond 8,192 tokens; docs/lab.md, 2026-11-19 (0.76)")
    add("--window", type=int, help="tokens that the draft of `window` and `trace` sees (1024)")
    add("--rounds", type=int, help="of all policies, forth and back (2)")
    add("--turn", type=int, help="tokens a request in a turn (64)")
    add("--settle", type=int, help="tokens a request before them (32)")
    add("--vllm-output", type=int, help="tokens of an answer of vLLM in `loops` (512)")
    add("--loads", type=numbers(float), help="of `trace`, of the rate that saturates `off` (0.3,0.7,1)")
    add("--span", type=float, help="seconds that the trace is squeezed into (8)")
    add("--long", type=int, help="tokens of every tenth prompt of `trace` (16384)")
    add("--rate", type=float, help="the saturation rate, requests per second (measured)")
    add_run_flags(add, only_mode=str, only_kind=str)
    return parser


def parse_args(given: Sequence[str]) -> argparse.Namespace:
    parser = make_parser()
    args = parser.parse_args(given)
    begin_run(args, given)
    args.block = None  # of head_models.ensure_heads
    names = ("cases", "window", "rounds", "turn", "settle", "vllm_output", "loads", "span", "long")
    asked = {name: getattr(args, name) for name in names if getattr(args, name)}
    args.long = replace(TINY if args.tiny else LongSizes(), **asked)
    args.sizes = models.TINY if args.tiny else models.Sizes()
    args.work, args.long_folder = args.folder / NAME, args.folder / f"{NAME}-models"
    args.journal = args.folder / f"{NAME}.jsonl" if args.report_only else args.work / f"{NAME}.jsonl"
    paths = (args.target, args.draft, args.eagle3, args.python_path, args.vllm_bundle, args.report_only)
    refuse_missing(parser, paths)
    if args.worker is None and args.report_only is None:
        refuse_impossible(parser, args)
    return args


def refuse_impossible(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """What would otherwise fail after minutes on a GPU."""
    from faser.bench.command import expand_policies
    from faser.errors import ConfigError

    try:
        expand_policies(",".join(args.policies))
        expand_policies(args.trace_policies)
    except ConfigError as error:
        parser.error(str(error))
    if not 0 < args.acceptance <= 1:
        parser.error(f"--acceptance {args.acceptance:g}: expected a probability above 0, 1 at most")
    too_short = [c.name for c in args.long.cases if args.long.prompt(c, len(args.policies)) < 1]
    if too_short:
        parser.error(f"--cases {','.join(too_short)}: no room for the turns; lower --rounds, --turn or --settle")


def modes_of(args: argparse.Namespace) -> list[str]:
    """Those that can run: vLLM's with a bundle, those with a head where there is one."""
    has_head = args.tiny or args.eagle3 is not None or (args.folder / "eagle3").is_dir()
    found = [mode for mode in args.modes if args.vllm_bundle is not None or not mode.startswith("vllm:")]
    return [mode for mode in found if has_head or "eagle3" not in mode.split(":")]


def processes_of(args: argparse.Namespace) -> Iterator[Process]:
    """The models first, then the kernels and every mode."""

    def own(name: str, mode: str) -> Process:
        return replace(worker_process(args, "faser", MODE_SECONDS, name, only_mode=mode), module=MODULE)

    yield replace(worker_process(args, "models", MODELS_SECONDS), module=MODULE)
    if "kernels" in args.parts and args.device == "cuda":
        yield own("kernels", "kernels")
    for mode in modes_of(args):
        if mode.startswith("vllm:"):
            yield from vllm_processes(args, mode)
        elif ({"trace"} if mode == "trace" else {"capacity", *CASE_PARTS}) & set(args.parts):
            yield own(mode, mode)


def vllm_processes(args: argparse.Namespace, mode: str) -> Iterator[Process]:
    """One without speculation; else one for real and one for synthetic acceptance."""
    found = {kind_of(args, case) for case in args.long.cases} if CASE_PARTS & set(args.parts) else set()
    found |= {"real"} if "trace" in args.parts else set()
    for kind in ["all"] if LongVllmMode(mode).length == 0 and found else sorted(found, reverse=True):
        process = worker_process(args, "vllm", MODE_SECONDS, f"{mode} {kind}", only_mode=mode, only_kind=kind)
        environment = {**process.environment, **vllm_environment(args.device)}
        yield replace(process, module=MODULE, environment=environment)


def measure(args: argparse.Namespace, journal: Journal) -> None:
    for folder in (args.work, args.out):
        folder.mkdir(parents=True, exist_ok=True)
    journal.add("call", command=" ".join(args.given))
    save = partial(save_results, args, journal)
    runner = Runner(journal, args.out / f"{NAME}.log", args.device, save, len(journal.read()))
    making, *others = processes_of(args)
    if runner.run(making, args.until):
        for process in others:
            runner.run(process, args.until)


def save_results(args: argparse.Namespace, journal: Journal) -> Figures:
    """The journal and all figures so far, should this process be killed."""
    if not args.report_only and journal.path.is_file():
        shutil.copy(journal.path, args.out / f"{NAME}.jsonl")
    figures = {"benchmark": NAME, "seconds": round(time.time() - args.started, 1), **summarize(journal.read())}
    atomic_write(args.out / f"{NAME}.json", json.dumps(figures) + "\n")
    atomic_write(args.out / f"{NAME}.md", tables(figures) + "\n")
    return figures


def work(args: argparse.Namespace, journal: Journal) -> None:
    """What a process of this command does."""
    own: dict[str, Callable[[argparse.Namespace, Journal], None]] = {"kernels": run_kernels, "trace": run_trace}
    if args.worker == "models":
        ensure_files(args)
    elif args.worker == "vllm":
        run_vllm_mode(args, journal)
    else:
        own.get(args.only_mode, run_own_mode)(args, journal)


def main(given: Sequence[str] | None = None) -> int:
    args = parse_args(sys.argv[1:] if given is None else given)
    journal = Journal(args.journal, args.session)
    if args.worker is not None:
        work(args, journal)
        return 0
    if args.report_only is None:
        measure(args, journal)
    figures = save_results(args, journal)
    print(tables(figures))
    print(json.dumps(figures), flush=True)
    return 1 if figures["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
