"""What FASER's plugin brings inside vLLM: the same requests through vLLM's own modes and through the plugin, on a GPU.

  loops   closed loops of 1 to 256 open requests: milliseconds per token and tokens per second
  trace   Azure's conversation trace at loads from idle to above saturation: mean latency per token of a request
  decode  a saturated closed loop of short prompts and long answers: tokens per second
  start   every mode is started once more, after all others: seconds to the first token, with warm caches

Modes of vLLM: `off-v2` and `off-v1`, no speculation on each of its runners; `vllm:K`, a draft of K tokens with
asynchronous scheduling and CUDA graphs up to the largest batch; `table:K`, its table of lengths by batch size.
`plugin:POLICY` is the same engine with --additional-config '{"faser": {"policy": POLICY}}'. Each mode runs in a process
of its own, and plays all parts. The models are those of benchmarks/h200.py (lib/models.py): real acceptance at real
cost.

Every start is timed, from the beginning of the process to the first token. The first start of a mode in a folder
compiles; later ones find the caches as vLLM keeps them (compiled code, Triton kernels). Only later ones are compared.

In the loop of 1 all modes should give the same answers. bf16 rounds differently in batches of another shape, so an
answer may part from that of `off-v1` where two tokens are nearly tied. `partings` has the first token that differs and
the gap: by how much `off-v1` preferred its own token, in nats. Null: the other token is none of its five best. Gaps
of a few tenths are rounding; larger ones, or vLLM's own speculation without them, point to an error.

    python3 -m benchmarks.vllm_plugin --target TARGET.gguf --vllm-bundle DIR [--python-path DIR] [--folder DIR]
        [--parts loops,trace,decode,start] [--modes off-v1,vllm:4,plugin:faser] [--batches 1,16,128] [--loads 0.2,1.2]
        [--rate R]
    python3 -m benchmarks.vllm_plugin --report-only DIR                  # measures nothing
    python3 -m benchmarks.vllm_plugin --tiny --device cpu                # the vLLM of this Python: does it all run?

The rate that saturates vLLM without speculation is measured by the first mode that runs, unless it is given or known to
the folder. Later calls with the same --folder add to the journal; figures measured later replace earlier ones. Results
go to $OUT (else to --folder) as soon as they are measured: plugin.jsonl is the journal, plugin.json all figures so far,
plugin.log the output of the processes. The last line is plugin.json. How to carry models and vLLM to a bare machine:
benchmarks/h200.py.

All modes and parts take longer than ten minutes: vLLM's first start alone took 84 s on an H200 (docs/lab.md). Ask for
`--parts loops` in one call, for `--parts trace,decode,start` in another, each with the three or four modes that matter.

At the top this module imports the standard library alone: nothing of FASER may be loaded beside vLLM's own modes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.lib import models
from benchmarks.lib.journal import Figures, Journal, atomic_write, failures, latest, read_json
from benchmarks.lib.processes import ROOT, Process, Runner, worker_process
from benchmarks.lib.run_flags import add_run_flags, begin_run, refuse_missing

PARTS = ("loops", "trace", "decode", "start")
# In the order in which they are measured: should the time end, what is compared most comes first.
MODES = ("off-v2", "plugin:faser", "vllm:4", "off-v1", "vllm:2", "plugin:fixed:4", "table:4")
MODULE = "benchmarks.vllm_plugin"
MAX_LENGTH = 8  # of the plugin's drafts under a policy that chooses
TABLE = ((1, 32, 1.0), (33, 128, 0.5), (129, 1024, 0.0))  # batch sizes, and the share of K that vLLM drafts there
MODELS_SECONDS, MODE_SECONDS = 200.0, 520.0  # of a process; then it is ended
GPU_MEMORY = 0.85  # share
BATCH_TOKENS = 8192  # of a step, as `vllm serve` chooses on this GPU; an engine made in a process would take 2,048
WARM_TOKENS = 24
REFERENCE = "off-v1"  # the mode that answers of the loop of 1 are compared with
NUM_LOGPROBS = 5
CPU_ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Shape:
    """Sizes of all parts. Tokens, requests, seconds."""

    batches: tuple[int, ...] = (1, 4, 16, 64, 128, 256)
    loads: tuple[float, ...] = (0.1, 0.4, 0.8, 1.2)
    span: float = 15.0  # of the trace at every load
    decode: tuple[int, int] = (150, 300)  # tokens of prompts and answers
    rounds: int = 3  # requests of a closed loop for each that is open, at most 256 open ones
    max_prompt: int = 1024  # of the trace
    max_output: int = 256
    max_model_len: int = 4096
    max_running: int = 256


TINY = Shape((1, 2), (0.5, 1.2), 1.0, (12, 10), 2, max_prompt=24, max_output=8, max_model_len=128, max_running=4)


@dataclass(frozen=True)
class Mode:
    """One way to run vLLM."""

    name: str

    @property
    def kind(self) -> str:
        return self.name.partition(":")[0]

    @property
    def policy(self) -> str | None:
        return self.name.partition(":")[2] if self.kind == "plugin" else None

    @property
    def length(self) -> int:
        """vLLM's num_speculative_tokens."""
        last = self.name.rpartition(":")[2]
        return 0 if self.kind.startswith("off") else int(last) if last.isdigit() else MAX_LENGTH

    def engine_args(self, folder: Path, shape: Shape, on_gpu: bool) -> Figures:
        """Arguments of vLLM's AsyncEngineArgs."""
        given: Figures = {
            "model": str(folder / "target"), "skip_tokenizer_init": True, "enable_prefix_caching": False,
            "max_model_len": shape.max_model_len, "max_num_seqs": shape.max_running, "disable_log_stats": True,
            "dtype": "bfloat16" if on_gpu else "float32",
        }  # fmt: skip
        own = {"gpu_memory_utilization": GPU_MEMORY, "max_num_batched_tokens": BATCH_TOKENS}
        given |= own if on_gpu else {"enforce_eager": True}
        if self.length:
            draft: Figures = {"method": "draft_model", "model": str(folder / "draft")}
            given["speculative_config"] = draft | {"num_speculative_tokens": self.length}
        if self.kind == "table":
            rows = [[first, last, int(share * self.length)] for first, last, share in TABLE]
            given["speculative_config"]["num_speculative_tokens_per_batch_size"] = rows
        if self.policy is not None:
            given["additional_config"] = {"faser": {"policy": self.policy}}
        elif self.length and on_gpu:
            given["async_scheduling"] = True
            given["compilation_config"] = {"max_cudagraph_capture_size": shape.max_running * (1 + self.length)}
        return given

    @property
    def environment(self) -> Mapping[str, str]:
        return {"VLLM_USE_V2_MODEL_RUNNER": "0"} if self.kind == "off-v1" else {}


# ── the process of one mode ──────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class Answer:
    """One request, in seconds on one clock."""

    due: float
    token_ids: list[int]
    first: float = 0.0
    last: float = 0.0
    likeliest: list[list[tuple[int, float]]] = field(default_factory=list)  # by position, if asked: (token, logprob)

    @property
    def tpot(self) -> float:
        return (self.last - self.first) / max(1, len(self.token_ids) - 1)

    @property
    def per_token(self) -> float:
        """Latency since the request was due, per token."""
        return (self.last - self.due) / len(self.token_ids)


class Player:
    """vLLM's asynchronous engine, driven on one event loop."""

    def __init__(self, mode: Mode, folder: Path, shape: Shape, on_gpu: bool) -> None:
        if mode.policy is not None:
            from faser.vllm import register  # the checkout is not installed: vLLM does not find its entry point

            register()
        self._runner, self._number = asyncio.Runner(), 0
        self.engine = self._runner.run(self._make(mode.engine_args(folder, shape, on_gpu)))

    async def _make(self, given: Figures) -> Any:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        return AsyncLLM.from_engine_args(AsyncEngineArgs(**given))

    def shutdown(self) -> None:
        self.engine.shutdown()

    def loop(self, requests: Sequence[Figures], size: int, seconds: float) -> tuple[list[Answer], float]:
        """A closed loop of `size` open requests; the answers, and how long it took."""
        return self._runner.run(asyncio.wait_for(self._loop(requests, size), seconds))

    def play(self, requests: Sequence[Figures], seconds: float) -> list[Answer]:
        """Every request when it is due."""
        return self._runner.run(asyncio.wait_for(self._play(requests), seconds))

    async def _loop(self, requests: Sequence[Figures], size: int) -> tuple[list[Answer], float]:
        waiting, answers, began = iter(requests), [], time.perf_counter()

        async def serve() -> None:
            for request in waiting:
                answers.append(await self._answer(request, time.perf_counter()))

        await asyncio.gather(*(serve() for _ in range(size)))
        return answers, time.perf_counter() - began

    async def _play(self, requests: Sequence[Figures]) -> list[Answer]:
        began = time.perf_counter() + 0.05

        async def serve(request: Figures) -> Answer:
            due = began + request["arrival"]
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            return await self._answer(request, due)

        return list(await asyncio.gather(*map(serve, requests)))

    async def _answer(self, request: Figures, due: float) -> Answer:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        given = {"detokenize": False, "output_kind": RequestOutputKind.DELTA, "logprobs": request.get("logprobs")}
        given |= {"max_tokens": request["max_tokens"], "temperature": request.get("temperature", 0.0)}
        params = SamplingParams(ignore_eos=True, **given)
        self._number += 1
        answer = Answer(due, [])
        async for output in self.engine.generate(
            {"prompt_token_ids": request["prompt_token_ids"]}, params, f"request-{self._number}"
        ):
            answer.last = time.perf_counter()
            answer.first = answer.first or answer.last
            answer.token_ids.extend(output.outputs[0].token_ids)
            for at_token in output.outputs[0].logprobs or ():
                answer.likeliest.append([(token, found.logprob) for token, found in at_token.items()])
        return answer


def run_mode(args: argparse.Namespace, journal: Journal) -> None:
    mode, shape = Mode(args.only_mode), args.shape
    player = Player(mode, args.folder, shape, args.device == "cuda")
    try:
        player.loop(short(read_requests(args, "decode")[:1]), 1, left(args))
        caches = "warm" if has_started(journal, mode.name) else "cold"
        journal.add("start", mode=mode.name, caches=caches, seconds=time.time() - args.spawned)
        parts = {"loops": measure_loops, "trace": measure_trace, "decode": measure_decode}
        for name in (each for each in args.parts if each in parts):
            journal.attempt(name, mode.name, lambda measure=parts[name]: measure(args, journal, mode, player))
    finally:
        player.shutdown()


def measure_loops(args: argparse.Namespace, journal: Journal, mode: Mode, player: Player) -> None:
    prompts = read_json(args.folder / "requests.json")
    output = args.sizes.output
    for size in args.shape.batches:
        number = size * args.shape.rounds
        requests = [
            {"prompt_token_ids": prompts[index % len(prompts)], "max_tokens": output} for index in range(number)
        ]
        player.loop(short(requests[:size]), size, left(args))
        answers, seconds = player.loop(requests, size, left(args))
        figures = {"tpot_ms": 1e3 * statistics.fmean(each.tpot for each in answers)}
        figures |= {"tokens_per_s": sum(len(each.token_ids) for each in answers) / seconds}
        journal.add("loop", mode=mode.name, batch=size, **figures)
        if size == 1:
            record_answers(args, journal, mode, player, requests, answers)


def record_answers(
    args: argparse.Namespace,
    journal: Journal,
    mode: Mode,
    player: Player,
    requests: Sequence[Figures],
    answers: Sequence[Answer],
) -> None:
    """The answers of the loop of 1; of the mode that others are compared with, also its best tokens, once more."""
    journal.add("answers", mode=mode.name, token_ids=[each.token_ids for each in answers])
    if mode.name == REFERENCE:
        asked = [request | {"logprobs": NUM_LOGPROBS} for request in requests]
        answers, _ = player.loop(asked, 1, left(args))
        likeliest = [each.likeliest for each in answers]
        journal.add("reference", token_ids=[each.token_ids for each in answers], likeliest=likeliest)


def has_started(journal: Journal, mode: str) -> bool:
    """Whether the mode was started before in this folder, and left its caches there."""
    return any(record["kind"] == "start" and record["mode"] == mode for record in journal.read())


def measure_decode(args: argparse.Namespace, journal: Journal, mode: Mode, player: Player) -> None:
    requests, size = read_requests(args, "decode"), args.shape.max_running
    player.loop(short(requests[:size]), size, left(args))
    answers, seconds = player.loop(requests, size, left(args))
    tokens = sum(len(each.token_ids) for each in answers)
    journal.add("decode", mode=mode.name, requests=len(answers), tokens_per_s=tokens / seconds)


def measure_trace(args: argparse.Namespace, journal: Journal, mode: Mode, player: Player) -> None:
    rate = known_rate(args, journal) or measure_rate(args, journal, player)
    for load in args.shape.loads:
        ensure_workload(args, load, rate)
        requests = read_requests(args, f"load-{load:g}")
        player.loop(short(requests[:16]), 16, left(args))
        answers = player.play(requests, left(args))
        seconds = max(each.last for each in answers) - min(each.due for each in answers)
        latencies = sorted(each.per_token for each in answers)
        figures = {
            "per_token_ms": 1e3 * statistics.fmean(latencies),
            "p99_per_token_ms": 1e3 * latencies[int(0.99 * (len(latencies) - 1))],
            "ttft_ms": 1e3 * statistics.fmean(each.first - each.due for each in answers),
            "tokens_per_s": sum(len(each.token_ids) for each in answers) / seconds,
        }
        journal.add("trace", mode=mode.name, load=load, rate=rate * load, requests=len(answers), **figures)


def known_rate(args: argparse.Namespace, journal: Journal) -> float | None:
    """Requests per second that saturate vLLM without speculation, where they were given or measured before."""
    rates = [record["rate"] for record in journal.read() if record["kind"] == "saturation"]
    return args.rate or (rates[-1] if rates else None)


def measure_rate(args: argparse.Namespace, journal: Journal, player: Player) -> float:
    """Requests that end per second in a closed loop of the trace's lengths."""
    requests, size = read_requests(args, "saturation"), args.shape.max_running
    player.loop(short(requests[:size]), size, left(args))
    answers, seconds = player.loop(requests, size, left(args))
    rate = len(answers) / seconds
    journal.add("saturation", rate=rate, mode=args.only_mode)
    return rate


def left(args: argparse.Namespace) -> float:
    return max(1.0, args.until - time.time())


def short(requests: Iterable[Figures]) -> list[Figures]:
    """The requests of a warm-up."""
    return [request | {"max_tokens": min(request["max_tokens"], WARM_TOKENS)} for request in requests]


# ── requests: made by processes that may load FASER ──────────────────────────────────────────────────────────────────


def read_requests(args: argparse.Namespace, name: str) -> list[Figures]:
    return [json.loads(line) for line in (args.work / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]


def ensure_workload(args: argparse.Namespace, load: float, rate: float) -> None:
    """The trace at a load; written by another process, for this one may not load FASER."""
    wanted, told = (args.work / f"load-{load:g}.jsonl"), args.work / f"load-{load:g}.json"
    if wanted.is_file() and told.is_file() and read_json(told) == rate:
        return
    own = ["--worker=traffic", f"--only-load={load}", f"--rate={rate}", f"--session={args.session}"]
    paths = [str(path) for path in (args.python_path, ROOT, os.environ.get("PYTHONPATH")) if path]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    subprocess.run([sys.executable, "-m", MODULE, *args.given, *own], check=True, env=environment)
    told.write_text(json.dumps(rate), encoding="utf-8")


def make_closed_requests(args: argparse.Namespace) -> None:
    """Of the loops that saturate the engine: the trace's lengths, and those of `decode`."""
    from faser.traffic.traces import Timing
    from faser.traffic.workload import Load, WorkloadOptions, make_workload, save_workload

    shape, vocabulary = args.shape, vocabulary_of(args)
    number, prompts = shape.rounds * shape.max_running, "random" if args.tiny else "specbench"
    sizes = {"prompt_len": (shape.decode[0],) * 2, "output_len": (shape.decode[1],) * 2}
    decode = WorkloadOptions(
        arrivals=f"poisson:{number}", timing=Timing(span=None), requests=number, prompts=prompts, **sizes
    )
    save_workload(make_workload(decode, Load(), vocabulary), args.work / "decode.jsonl")
    traced = make_workload(trace_options(args), Load(number / shape.span), vocabulary)
    save_workload(traced, args.work / "saturation.jsonl")


def make_traffic(args: argparse.Namespace) -> None:
    from faser.traffic.workload import Load, make_workload, save_workload

    load = args.only_load
    workload = make_workload(trace_options(args), Load(args.rate * load), vocabulary_of(args))
    save_workload(workload, args.work / f"load-{load:g}.jsonl")


def trace_options(args: argparse.Namespace) -> Any:
    from faser.traffic.traces import Timing
    from faser.traffic.workload import WorkloadOptions

    shape = args.shape
    return WorkloadOptions(
        trace="azure-conv", timing=Timing(span=shape.span), max_prompt=shape.max_prompt, max_output=shape.max_output,
        prompts="random" if args.tiny else "specbench",
    )  # fmt: skip


def vocabulary_of(args: argparse.Namespace) -> Any:
    """The small model's: the folders hold no tokenizer."""
    from faser.bench.systems import load_vocabulary
    from faser.traffic.workload import Vocabulary

    if args.tiny:
        return Vocabulary(read_json(args.folder / "models.json")["vocabulary"], args.shape.max_model_len, None)
    return load_vocabulary(None if args.target is None else str(args.target), args.shape.max_model_len, chat=True)


# ── figures ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def ratio(over: float | None, under: float | None) -> float | None:
    return None if not over or not under else round(over / under, 3)


def best(figures: Mapping[str, float], chosen: Callable[[str], bool], take: Callable[..., float]) -> float | None:
    values = [value for mode, value in figures.items() if chosen(mode)]
    return take(values) if values else None


def is_vllm(mode: str) -> bool:
    return not mode.startswith("plugin:")


def speculates(mode: str) -> bool:
    """vLLM's speculation of one length."""
    return mode.startswith("vllm:")


def by_mode(records: Sequence[Figures], kind: str, key: str, value: str) -> dict[Any, dict[str, float]]:
    """The figure `value` by `key`, then by mode."""
    found: dict[Any, dict[str, float]] = {}
    for (mode, at), record in latest(records, kind, "mode", key).items():
        found.setdefault(at, {})[mode] = record[value]
    return dict(sorted(found.items()))


def summarize(records: Sequence[Figures]) -> Figures:
    """All figures, and the plugin under `faser` against vLLM: ratios above 1 are in its favour."""
    ours = "plugin:faser"
    loops, trace = by_mode(records, "loop", "batch", "tpot_ms"), by_mode(records, "trace", "load", "per_token_ms")
    decode = {mode: record["tokens_per_s"] for (mode,), record in latest(records, "decode", "mode").items()}
    starts: dict[str, dict[str, float]] = {"cold": {}, "warm": {}}
    for (mode, caches), record in latest(records, "start", "mode", "caches").items():
        starts[caches][mode] = record["seconds"]
    partings, own_start = compare_answers(records), starts["warm"].get(ours)
    vllm_start = best(starts["warm"], speculates, min)
    swing = {mode: [each.get(mode) for each in trace.values()] for mode in {m for each in trace.values() for m in each}}
    means = {mode: statistics.fmean(all_loads) for mode, all_loads in swing.items() if None not in all_loads}
    return {
        "tpot_ms": loops,
        "loop_gain": {size: ratio(best(each, is_vllm, min), each.get(ours)) for size, each in loops.items()},
        "equal_texts": equal_share(records, partings),
        "partings": partings,
        "trace_per_token_ms": trace,
        "trace_gain": {
            "over_speculation": ratio(best(means, speculates, min), means.get(ours)),
            "over_best": ratio(best(means, is_vllm, min), means.get(ours)),
        },
        "decode_tokens_per_s": decode,
        "decode_gain_over_speculation": ratio(decode.get(ours), best(decode, speculates, max)),
        "start_s": starts["warm"],
        "first_start_s": starts["cold"],
        "start_more_s": None if not own_start or not vllm_start else round(own_start - vllm_start, 1),
        "failed": failures(records),
    }


def compare_answers(records: Sequence[Figures]) -> dict[str, list[Figures]]:
    """Where a mode's answers in the loop of 1 part from the reference: one entry for every answer that does."""
    found = [record for record in records if record["kind"] == "reference"]
    if not found:
        return {}
    plain, likeliest = found[-1]["token_ids"], found[-1]["likeliest"]
    partings: dict[str, list[Figures]] = {}
    for (mode,), record in latest(records, "answers", "mode").items():
        differences = map(first_difference, record["token_ids"], plain, likeliest)
        partings[mode] = [{"answer": index} | each for index, each in enumerate(differences) if each is not None]
    return partings


def first_difference(own: Sequence[int], plain: Sequence[int], likeliest: Sequence[Any]) -> Figures | None:
    """None for equal answers. `likeliest`: a few pairs (token, logprob) for every position of `plain`."""
    position = next((at for at, (one, other) in enumerate(zip(own, plain, strict=False)) if one != other), None)
    if position is None:
        return None if len(own) == len(plain) else {"position": min(len(own), len(plain)), "gap": None}
    logprobs = dict(likeliest[position])
    other = logprobs.get(own[position])
    return {"position": position, "gap": None if other is None else round(logprobs[plain[position]] - other, 4)}


def equal_share(records: Sequence[Figures], partings: Mapping[str, Sequence[Figures]]) -> dict[str, float]:
    """Share of a mode's answers in the loop of 1 that are those of the reference."""
    numbers = {mode: len(record["token_ids"]) for (mode,), record in latest(records, "answers", "mode").items()}
    return {mode: round(1 - len(parted) / numbers[mode], 3) for mode, parted in partings.items()}


# ── the command ──────────────────────────────────────────────────────────────────────────────────────────────────────


def chosen_from(names: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    def parse(text: str) -> tuple[str, ...]:
        given = tuple(text.split(","))
        unknown = [each for each in given if each not in names]
        if unknown:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: expected some of {','.join(names)}")
        return given

    return parse


def mode_list(text: str) -> tuple[str, ...]:
    given = tuple(text.split(","))
    kinds = {"off-v1", "off-v2", "vllm", "table", "plugin"}
    unknown = [each for each in given if each.partition(":")[0] not in kinds]
    if unknown:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: expected modes such as {','.join(MODES)}")
    return given


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--target", type=Path, metavar="TARGET.gguf", help="the small target (the default model)")
    add("--draft", type=Path, default=models.DRAFT, metavar="DRAFT.gguf", help="its draft (the one of 16 layers)")
    add("--python-path", type=Path, help="folder with the package gguf, where it is not installed")
    add("--vllm-bundle", type=Path, help="vLLM, unpacked (the one of this Python)")
    add("--parts", type=chosen_from(PARTS), default=PARTS, help="some of them, separated by commas (all)")
    add("--modes", type=mode_list, default=MODES, help=f"({','.join(MODES)})")
    add("--batches", type=lambda text: tuple(map(int, text.split(","))), help="of `loops` (1,4,16,64,128,256)")
    add("--loads", type=lambda text: tuple(map(float, text.split(","))), help="of `trace` (0.1,0.4,0.8,1.2)")
    add("--span", type=float, help="seconds that the trace is squeezed into (15)")
    add("--rate", type=float, help="the saturation rate, requests per second (measured)")
    add_run_flags(add, only_mode=str, only_load=float)
    return parser


def parse_args(given: Sequence[str]) -> argparse.Namespace:
    parser = make_parser()
    args = parser.parse_args(given)
    begin_run(args, given)
    asked = {name: getattr(args, name) for name in ("batches", "loads", "span") if getattr(args, name)}
    args.shape = replace(TINY if args.tiny else Shape(), **asked)
    args.sizes = models.TINY if args.tiny else models.Sizes()
    args.work = args.folder / "plugin"
    args.journal = args.folder / "plugin.jsonl" if args.report_only else args.work / "plugin.jsonl"
    refuse_missing(parser, (args.target, args.draft, args.python_path, args.vllm_bundle, args.report_only))
    return args


def measure(args: argparse.Namespace, journal: Journal) -> None:
    for folder in (args.work, args.out):
        folder.mkdir(parents=True, exist_ok=True)
    journal.add("call", command=" ".join(args.given))

    runner = Runner(
        journal, args.out / "plugin.log", args.device, lambda: save_results(args, journal), len(journal.read())
    )
    making = replace(worker_process(args, "models", MODELS_SECONDS), module=MODULE)
    if not runner.run(making, args.until):
        return
    if set(args.parts) != {"start"}:
        for name in args.modes:
            runner.run(mode_process(args, name), args.until)
    for name in args.modes if "start" in args.parts else ():
        if has_started(journal, name) or runner.run(mode_process(args, name, parts="start"), args.until):
            runner.run(mode_process(args, name, parts="start"), args.until)


def save_results(args: argparse.Namespace, journal: Journal) -> Figures:
    """The journal and all figures so far, should this process be killed."""
    if not args.report_only and journal.path.is_file():
        shutil.copy(journal.path, args.out / "plugin.jsonl")
    figures = {"benchmark": "vllm_plugin", "seconds": round(time.time() - args.started, 1), **summarize(journal.read())}
    atomic_write(args.out / "plugin.json", json.dumps(figures) + "\n")
    return figures


def mode_process(args: argparse.Namespace, name: str, **flags: str) -> Process:
    process = worker_process(args, "vllm", MODE_SECONDS, name, only_mode=name, **flags)
    environment = {**process.environment, **Mode(name).environment, "VLLM_USE_FLASHINFER_SAMPLER": "0"}
    environment |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    environment |= CPU_ENVIRONMENT if args.device == "cpu" else {}
    return replace(process, module=MODULE, environment=environment)


def main(given: Sequence[str] | None = None) -> int:
    args = parse_args(sys.argv[1:] if given is None else given)
    journal = Journal(args.journal, args.session)
    if args.worker == "models":
        models.ensure_models(args)
        make_closed_requests(args)
    elif args.worker == "traffic":
        make_traffic(args)
    elif args.worker == "vllm":
        run_mode(args, journal)
    if args.worker is not None:
        return 0
    if args.report_only is None:
        measure(args, journal)
    figures = save_results(args, journal)
    print(json.dumps(figures), flush=True)
    return 1 if figures["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
