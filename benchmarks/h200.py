"""Is FASER faster than vLLM on an H200, at every batch size, with speculation and without?

A decoding step reads every weight once, so it takes at least their bytes over the memory bandwidth, plus the KV it
attends to; above about 200 rows it takes the FLOPs over what the tensor cores do. This floor stands beside every
figure, and so does what lies between (h200_report.py). Speculation pays by the tokens a step emits; that depends on the
text, so the models are SmolLM2 and its draft inside the shapes of an 8B and a 1B (tools/inflate.py): real acceptance
at real cost. Both systems load the same two folders and get the same prompts (Spec-Bench chats, all of one length), one
after the other, each in processes of its own.

  off          TPOT without speculation, both systems
  speculation  TPOT at fixed lengths; the best of each system per batch size, "off" included; one step of the draft
  prefill      time to first token of 16 prompts of 2,048 tokens, both
  startup      from the start of the process to the first token: FASER without a draft, twice; every other start of
               either system is timed in passing

TPOT is the mean over requests of (last - first token) / (tokens - 1), in a closed batch, greedy, end tokens ignored;
tokens are counted, never chunks. The steady TPOT is that of the time from the last first token to the first last one.
Batches up to 64 are several, one after the other, with other prompts; the spread is between them. Every setting is
warmed up by a short run. Longer drafts are not tried where shorter ones already take 1.3 times the best. vLLM runs as
its own defaults have it (CUDA graphs, asynchronous scheduling, the size of its prompt chunks), with prefix caching off,
as in FASER.

    python3 -m benchmarks.h200 --target TARGET.gguf --prompts specbench.jsonl.xz
        [--vllm-bundle DIR --vllm-trace vllm_trace.py] [--sections off,speculation,prefill,startup] [--python-path DIR]
        [--folder DIR] [--budget-seconds 560] [--batches 1,4,16,64,128,256] [--lengths 1,2,3,4,5,6] [--vllm-lengths 2,4]
    python3 -m benchmarks.h200 --worker faser --device cpu --tiny      # one process, tiny models: does it all run?

Every measurement is a line in DIR/h200.jsonl as soon as it is made; $OUT (else DIR) holds a copy and the processes'
output, h200.log, up to date at any moment. A section that fails is reported and the others run. The next run with the
same --folder adds to the journal, and its tables show both (the later figures where both have them); --report shows
them without measuring. At the end come tables in Markdown (also h200.md); the last line is one JSON document (also
h200.json). Needs 18 GB of disk and a GPU with 80 GB.

Where the machine is bare and a transfer is limited, parts of 34 MiB travel in an ignored folder. Here:

    mkdir -p build/h200 && split -b 34M TARGET.gguf build/h200/target. && split -b 34M vllm.tar.xz build/h200/vllm.
    cp vllm_trace.py specbench.jsonl.xz build/h200/ && cp -r SITE_PACKAGES/gguf build/h200/

There, three transfers carry target.aa, target.ab and vllm.aa, each with `mkdir -p /tmp/h200 && cp build/h200/PART
/tmp/h200/`. The fourth carries the rest and measures at once; the fifth carries nothing. Two commands, because each
must end within 10 minutes (--budget-seconds); each on one line:

    cp -r build/h200/{target.ac,vllm.ab,gguf,vllm_trace.py,specbench.jsonl.xz} /tmp/h200/ && cd /tmp/h200 &&
        cat target.a? > TARGET.gguf && mkdir -p bundle && cat vllm.a? | tar xJ -C bundle && cd - &&
        python3 -m benchmarks.h200 --folder /tmp/h200/work --target /tmp/h200/TARGET.gguf --python-path /tmp/h200
        --prompts /tmp/h200/specbench.jsonl.xz --vllm-bundle /tmp/h200/bundle --vllm-trace /tmp/h200/vllm_trace.py
        --sections off,prefill,startup
    python3 -m benchmarks.h200 --folder /tmp/h200/work --vllm-bundle /tmp/h200/bundle
        --vllm-trace /tmp/h200/vllm_trace.py --sections speculation

At the top this module imports the standard library alone: it is also the driver inside vLLM's process, where nothing of
FASER may be loaded.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import functools
import itertools
import json
import math
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.h200_common import (
    Command,
    Job,
    Journal,
    VllmEngine,
    inflated_pair,
    python_path,
    read_json,
    refuse_missing,
    shared_parser,
    vllm_environment,
    vllm_settings,
)
from benchmarks.h200_report import Figures, failures, read_journal, summarize, tables

PROCESS_STARTED = time.time()

SECTIONS = ("off", "speculation", "prefill", "startup")
MOST_SECONDS = {"models": 150.0, "faser": 400.0, "startup": 120.0, "vllm": 240.0}  # of a process; a hung one is ended
LEAST_SECONDS = {"models": 30.0, "faser": 60.0, "startup": 20.0, "vllm": 80.0}  # with less left none is started

LEAST_REQUESTS = 6  # measured for a figure
WARM_TOKENS = 24
HOPELESS = 1.3  # times the best: no longer drafts are tried
KEPT_TEXTS = 2  # of a run, to see that both systems run the same model
KV_BYTES = 40 << 30  # of FASER's pages: more than any batch here needs, as is vLLM's share of the memory

Prompt = list[int]


@dataclass(frozen=True)
class Sizes:
    """What is measured. Tokens, requests."""

    batches: tuple[int, ...] = (1, 4, 16, 64, 128, 256)
    lengths: tuple[int, ...] = (1, 2, 3, 4, 5, 6)  # of FASER's drafts
    vllm_lengths: tuple[int, ...] = (2, 4)  # each takes a start of vLLM
    first_length: int = 4  # FASER starts with the graphs of this length
    prompt: int = 128
    output: int = 256
    prefill: tuple[int, int] = (16, 2048)  # prompts, tokens of each
    max_model_len: int = 4096

    @property
    def max_running(self) -> int:
        return max(*self.batches, self.prefill[0])


TINY = Sizes((1, 2), (1, 2), first_length=2, prompt=16, output=8, prefill=(2, 32), max_model_len=128)


# ── the requests ─────────────────────────────────────────────────────────────────────────────────────────────────────


def chat_prompts(
    encode: Callable[[str], list[int]], around: tuple[str, str], questions: Sequence[str], count: int, size: int
) -> list[Prompt]:
    """Prompt i ends with question i; a long one loses its beginning, a short one has those before it in front."""
    head, tail = map(encode, around)
    room = size - len(head) - len(tail)
    # every question twice, so that there is always one before it
    bodies = 2 * [encode(question + "\n\n") for question in questions]
    text, ends = list(itertools.chain(*bodies)), list(itertools.accumulate(map(len, bodies)))[len(questions) :]
    if ends[0] < room:
        raise ValueError(f"the texts have {len(text) // 2} tokens in all, a prompt has room for {room}")
    return [head + text[end - room : end] + tail for end in itertools.islice(itertools.cycle(ends), count)]


def groups_of(prompts: Sequence[Prompt], batch: int) -> list[Sequence[Prompt]]:
    """Closed batches, one after the other, with other prompts."""
    return [prompts[i * batch : (i + 1) * batch] for i in range(num_groups(batch))]


def num_groups(batch: int) -> int:
    return max(-(-LEAST_REQUESTS // batch), 2 if batch <= 64 else 1)


# ── what requests saw, whoever served them ───────────────────────────────────────────────────────────────────────────


@dataclass
class Seen:
    """One request of a closed batch. Seconds on one clock; a chunk is what one step gave it."""

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
    """A closed batch."""

    seen: list[Seen]
    steps: Mapping[str, float] = field(default_factory=dict)  # totals while everybody decoded and nobody had ended


def run_figures(batches: Sequence[Played], length: int) -> Figures:
    """Acceptance is what the tokens of a step imply, accepted over drafted, whoever served.

    vLLM hands out two steps' tokens as one chunk where its client is slow, so tokens a step are at most what is said.
    """
    seen = [each for played in batches for each in played.seen]
    short = [each for each in seen if len(each.token_ids) != each.wanted or each.wanted < 2]
    if short:
        raise RuntimeError(f"{len(short)} of {len(seen)} requests got {len(short[0].token_ids)} tokens or the like")
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
    """Milliseconds of a step, and of it those of draft and target on the GPU."""
    number = sum(each["steps"] for each in totals)
    names = {"step_ms": "step_seconds", "draft_ms": "draft_seconds", "verify_ms": "verify_seconds"}
    return {key: 1e3 * sum(each[name] for each in totals) / number for key, name in names.items()} if number else {}


def steady_ms(batches: Sequence[Sequence[Seen]]) -> float | None:
    """Milliseconds a token and request while all of a batch decode: last first token to first last one."""
    seconds, tokens = 0.0, 0
    for batch in batches:
        opened, closed = max(each.first for each in batch), min(each.last for each in batch)
        if closed > opened:
            seconds += (closed - opened) * len(batch)
            tokens += sum(count for each in batch for now, count in each.chunks if opened < now <= closed)
    return 1e3 * seconds / tokens if tokens else None


# ── measuring, whatever the system ───────────────────────────────────────────────────────────────────────────────────


@dataclass
class Worker:
    """One process that measures. It stops in time: `until` is on the clock of time.time()."""

    args: argparse.Namespace
    journal: Journal
    engine: str
    until: float

    def section(self, name: str, work: Callable[[], None]) -> None:
        """Do it if it was asked for."""
        if name in self.args.sections:
            self.journal.attempt(name, self.engine, work)

    def prompts(self, name: str) -> list[Prompt]:
        found: list[Prompt] = read_json(self.args.folder / f"{name}.json")
        return found

    def start(self, length: int, player: FaserPlayer | VllmPlayer, **seconds: float) -> None:
        """Serve the first token and say how long it took. Caches of kernels are warm where one started so before."""
        player.play(self.prompts("requests")[:1], 1)
        since, mode = time.time() - self.args.spawned, f"length {length}" if length else "off"
        before = [(r.get("engine"), r.get("mode")) for r in read_journal(self.journal.path) if r["kind"] == "startup"]
        caches = "warm" if (self.engine, mode) in before else "cold"
        self.journal.add("startup", engine=self.engine, mode=mode, caches=caches, seconds=since, **seconds)


def measure(worker: Worker, player: FaserPlayer | VllmPlayer, lengths: Sequence[int]) -> None:
    """Every setting; longer drafts where shorter ones are not far from the best."""
    prompts, output = worker.prompts("requests"), worker.args.sizes.output
    runs = [record for record in read_journal(worker.journal.path) if record["kind"] == "run"]
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
    """Played three times, of which the first warms up."""
    player.prepare(0)
    prompts = worker.prompts("prefill")
    waits = [[each.first - each.started for each in player.play(prompts, 2).seen] for _ in range(3)]
    means, lasts = (1e3 * statistics.fmean(map(kind, waits[1:])) for kind in (statistics.fmean, max))
    worker.journal.add("prefill", engine=player.name, ttft_ms=means, last_ms=lasts)


# ── the models ───────────────────────────────────────────────────────────────────────────────────────────────────────

Prompts = Callable[[int, int], list[Prompt]]  # (how many, of how many tokens)


def ensure_models(args: argparse.Namespace) -> None:
    """The two folders, the requests, and models.json as the sign that all are whole."""
    sign, sizes = args.folder / "models.json", args.sizes
    number = max(batch * num_groups(batch) for batch in sizes.batches)
    if sign.is_file():
        found = read_json(sign)
        if found["tiny"] != args.tiny or found["requests"] < number:
            raise ValueError(f"{args.folder} holds other models or fewer requests; give another --folder")
        return
    from tools.inflate import Shape, write_folder

    target, draft, prompts = (make_tiny_models if args.tiny else make_models)(args)
    for name, some in (("requests", prompts(number, sizes.prompt)), ("prefill", prompts(*sizes.prefill))):
        (args.folder / f"{name}.json").write_text(json.dumps(some), encoding="utf-8")
    about = {"tiny": args.tiny, "requests": number, "vocabulary": target.config.vocab_size}
    about |= {name: getattr(sizes, name) for name in ("prompt", "output", "prefill")}
    for name, model in (("target", target), ("draft", draft)):
        shutil.rmtree(args.folder / name, ignore_errors=True)
        write_folder(model, args.folder / name)
        about[name] = {part: getattr(model.config, part) for part in Shape.__dataclass_fields__}
    sign.write_text(json.dumps(about), encoding="utf-8")


def make_models(args: argparse.Namespace) -> tuple[Any, Any, Prompts]:
    """SmolLM2 and its draft inside the two shapes, in bfloat16, rounded once."""
    from tools.distill import SYSTEM, read_jsonl

    (target, draft), tokenizer = inflated_pair(args.target, args.draft, ("llama-8b", "llama-1b"), args.device)
    rows: list[Any] = read_jsonl(str(args.prompts))
    questions = [str(row["turns"][0]) for row in rows]
    random.Random(0).shuffle(questions)  # they lie by category
    around = (f"{SYSTEM}<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n")
    return target, draft, functools.partial(chat_prompts, tokenizer.encode, around, questions)


def make_tiny_models(args: argparse.Namespace) -> tuple[Any, Any, Prompts]:
    """A random model in two small shapes, the draft's a little shaken: it agrees often, not always."""
    import torch

    from faser.models.config import ModelConfig
    from faser.models.transformer import Transformer
    from tools.inflate import Shape, inflate

    base = Shape(hidden_size=32, num_layers=1, num_heads=4, intermediate_size=48, num_kv_heads=2, head_dim=16)
    config = ModelConfig(
        family="llama", vocab_size=64, norm_eps=1e-5, max_positions=256, eos_token_ids=(2,), dtype="float32",
        **asdict(base),
    )  # fmt: skip
    small, shaken = (Transformer.random(config, 0, std=0.3) for _ in range(2))
    for weight in shaken.weights():
        weight += 0.03 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
    target = inflate(small, replace(base, hidden_size=64, num_layers=2, num_heads=8, num_kv_heads=4))
    draft = inflate(shaken, replace(base, intermediate_size=64))

    def prompts(count: int, size: int) -> list[Prompt]:
        drawn = random.Random(0)
        return [[drawn.randrange(3, config.vocab_size) for _ in range(size)] for _ in range(count)]

    return target, draft, prompts


# ── the process of FASER ─────────────────────────────────────────────────────────────────────────────────────────────


class FaserPlayer:
    """An engine in this process. Lengths change from batch to batch; their graphs are captured when first asked for."""

    name = "faser"

    def __init__(self, args: argparse.Namespace, length: int, kv_memory: int | None = None) -> None:
        """With graphs of one length, and with the draft if that is not 0."""
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

        self.engine.scheduler.policy = Fixed(length)
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
            engine.abandon()  # what was open must not run into the next batch
            raise
        return played_of([Seen(started, output) for _ in prompts], steps)


def played_of(seen: list[Seen], steps: Sequence[tuple[float, list[Any], Any]]) -> Played:
    """From what each step gave, and the engine's totals after it. Afterwards: the engine must not wait for this."""
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
    """From nothing to the first token, without a draft, with the settings a user gets."""
    player = FaserPlayer(worker.args, 0)
    worker.start(0, player, **player.seconds)


# ── the process of vLLM ──────────────────────────────────────────────────────────────────────────────────────────────


class VllmPlayer:
    """Closed batches through vLLM, one after the other."""

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


# ── the command: one process after the other ─────────────────────────────────────────────────────────────────────────


def plan_jobs(args: argparse.Namespace) -> list[Job]:
    """In the order of their worth: should time run out, the last ones are missing."""
    wanted = set(args.sections)
    jobs = [job_of(args, "models", {"PYTHONPATH": python_path(args.python_path)})]
    if args.vllm_bundle is not None and wanted & {"off", "prefill"}:
        jobs.append(vllm_job(args, 0))
    if wanted - {"startup"}:
        jobs.append(job_of(args, "faser", {"TRITON_CACHE_DIR": str(args.folder / "triton")}))
    if args.vllm_bundle is not None and "speculation" in wanted:
        jobs += [vllm_job(args, length) for length in args.sizes.vllm_lengths]
    if "startup" in wanted:
        jobs += 2 * [job_of(args, "startup", {"TRITON_CACHE_DIR": str(args.folder / "triton-off")})]
    return jobs


def job_of(args: argparse.Namespace, worker: str, environment: Mapping[str, str]) -> Job:
    flags = (*args.given, f"--worker={worker}")
    return Job(worker, "benchmarks.h200", flags, LEAST_SECONDS[worker], MOST_SECONDS[worker], environment)


def vllm_job(args: argparse.Namespace, length: int) -> Job:
    job = job_of(args, "vllm", vllm_environment(args.vllm_bundle, args.folder))
    return replace(job, name=f"vllm {length}", flags=(*job.flags, f"--only-length={length}"))


def run_all(args: argparse.Namespace, journal: Journal) -> None:
    """Without models there is nothing to do."""

    def copy_journal() -> None:
        if args.out != args.folder:
            shutil.copy(journal.path, args.out / "h200.jsonl")

    command = Command(journal, args.out / "h200.log", args.device, copy_journal, len(read_journal(journal.path)))
    for job in plan_jobs(args):
        command.run(job, args.until)
        if not (args.folder / "models.json").is_file():
            break


def run_worker(args: argparse.Namespace, journal: Journal) -> None:
    if args.worker == "models" or args.by_hand:
        ensure_models(args)
        journal.add("models", **read_json(args.folder / "models.json"))
    worker = Worker(args, journal, "vllm" if args.worker == "vllm" else "faser", args.until)
    runs = {"faser": run_faser, "startup": run_startup, "vllm": run_vllm}
    if args.worker in runs:
        runs[args.worker](worker)


def report(args: argparse.Namespace, journal: Journal) -> int:
    """0: nothing failed in the last session."""
    records = read_journal(journal.path)
    summary = summarize(records)
    line = json.dumps({"benchmark": "h200", "seconds": round(time.time() - args.started, 1), **summary})
    (args.out / "h200.md").write_text(tables(summary) + "\n", encoding="utf-8")
    (args.out / "h200.json").write_text(line + "\n", encoding="utf-8")
    print(tables(summary))
    print(line, flush=True)
    return 1 if failures(records) else 0


# ── the flags ────────────────────────────────────────────────────────────────────────────────────────────────────────


def numbers(text: str) -> tuple[int, ...]:
    return tuple(int(each) for each in text.split(","))


def section_list(text: str) -> list[str]:
    names = text.split(",")
    unknown = [name for name in names if name not in SECTIONS]
    if unknown:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: expected some of {','.join(SECTIONS)}")
    return names


def make_parser() -> argparse.ArgumentParser:
    parser = shared_parser(__doc__)
    add = parser.add_argument
    add("--sections", type=section_list, default=list(SECTIONS), help="some of them, with commas between (all)")
    add("--folder", type=Path, help="for models, requests, caches and the journal; kept")
    add("--report", action="store_true", help="measure nothing: the tables of the journal")
    add("--prompts", type=Path, help="JSONL with `turns`, plain or .xz")
    add("--batches", type=numbers)
    add("--lengths", type=numbers, help="of FASER's drafts")
    add("--vllm-lengths", type=numbers, help="each takes a start of vLLM")
    add("--worker", choices=("models", "faser", "startup", "vllm"), help="one of the processes, run by hand")
    return parser


def parse_args(given: Sequence[str]) -> argparse.Namespace:
    parser = make_parser()
    args = parser.parse_args(given)
    args.given, args.started = list(given), time.time()
    asked = {name: getattr(args, name) for name in ("batches", "lengths", "vllm_lengths")}
    args.sizes = replace(TINY if args.tiny else Sizes(), **{name: each for name, each in asked.items() if each})
    name = "faser-h200-tiny" if args.tiny else "faser-h200"
    args.folder = (args.folder or Path(tempfile.gettempdir()) / name).absolute()
    args.out = Path(os.environ.get("OUT") or args.folder).absolute()
    args.by_hand = args.worker is not None and args.spawned is None
    args.spawned = args.spawned or PROCESS_STARTED
    args.until = args.until or args.started + args.budget_seconds
    if args.worker is None and not args.report:
        refuse(parser, args)
    return args


def refuse(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Everything that would otherwise fail after minutes on a GPU."""
    refuse_missing(parser, args, args.prompts)
    if args.prompts is None and not args.tiny and not (args.folder / "models.json").is_file():
        parser.error("give --prompts FILE")


def main(given: Sequence[str] | None = None) -> int:
    args = parse_args(sys.argv[1:] if given is None else given)
    for folder in (args.folder, args.out):
        folder.mkdir(parents=True, exist_ok=True)
    journal = Journal(args.folder / "h200.jsonl", args.session or args.started)
    if args.worker is not None:
        run_worker(args, journal)
    elif not args.report:
        run_all(args, journal)
    return report(args, journal) if args.worker is None or args.by_hand else 0


if __name__ == "__main__":
    sys.exit(main())
