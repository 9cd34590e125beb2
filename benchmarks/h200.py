"""Is FASER faster than vLLM on an H200, at every batch size, with speculation and without?

A decoding step reads every weight once, so it takes at least their bytes over the memory bandwidth, plus the KV it
attends to; above about 200 rows it takes the FLOPs over what the tensor cores do. This floor stands beside every
figure. What lies between is the GPU being slower than it could be (GPU time beyond the floor) or waiting for the host
(a step beyond its GPU time), and both are printed. Speculation pays by the tokens a step emits; that depends on the
text, so the models are SmolLM2 and its draft inside the shapes of an 8B and a 1B (tools/inflate.py): real acceptance
at real cost. Both systems load the same two folders and get the same prompts, one after the other, each in processes of
its own; the prompts are Spec-Bench chats cut or filled up to one length.

  off          TPOT without speculation, both systems
  speculation  TPOT at fixed lengths; the best of each system per batch size, "off" included
  prefill      time to first token of 16 prompts of 2,048 tokens, both
  draft-step   one step of the draft: the replay of its graph, between CUDA events
  startup      from the start of the process to the first token, both, with empty and with filled caches of kernels

TPOT is the mean over requests of (last - first token) / (tokens - 1), in a closed batch, greedy, end tokens ignored;
tokens are counted, never chunks. Small batches are several, one after the other, so that a figure is never that of one
text. Every setting is warmed up by a short run. Where time is left, the settings that matter run again: medians.

    python3 -m benchmarks.h200 --target TARGET.gguf --prompts specbench.jsonl.xz
        [--vllm-bundle DIR --vllm-trace vllm_trace.py] [--sections off,speculation,prefill,draft-step,startup]
        [--python-path DIR] [--folder DIR] [--budget-seconds 560] [--batches 1,4,16,64,128,256] [--lengths 1,2,3,4,5,6]
        [--vllm-lengths 2,4] [--random-prompts]
    python3 -m benchmarks.h200 --worker faser --device cpu --tiny      # one process, tiny models: does it all run?

The output. Every measurement is a line in DIR/h200.jsonl as soon as it is made, and $OUT (else DIR) holds a copy, the
summary h200.json and the processes' output h200.log, up to date at any moment: a killed run leaves what it measured. A
section that fails is reported and the others run. The next run with the same --folder adds to the journal, and its
tables show both (the later figures where both have them); --earlier FILE adds a journal brought from elsewhere, --fresh
begins anew. At the end tables in Markdown, the targets and whether they were reached; the last line is one JSON
document.

How to run it where the machine is bare and one transfer is limited. Here, into an ignored folder that travels; parts
of 34 MiB, so that each with the tree stays below 64:

    mkdir -p build/h200 && split -b 34M TARGET.gguf build/h200/target. && split -b 34M vllm.tar.xz build/h200/vllm.
    cp vllm_trace.py specbench.jsonl.xz build/h200/ && cp -r SITE_PACKAGES/gguf build/h200/

There, three transfers, each with the one part it copies named as carried: target.aa, target.ab, vllm.aa.

    mkdir -p /tmp/h200 && cp build/h200/target.aa /tmp/h200/

Then the fourth, with target.ac, vllm.ab, gguf, vllm_trace.py and specbench.jsonl.xz carried, measures at once: about 9
minutes. The last needs nothing carried and takes about 8. Sections are shared out because each command must end
within its limit (10 minutes: --budget-seconds); a machine left idle is soon gone, so they follow each other at once.

    cp -r build/h200/{target.ac,vllm.ab,gguf,vllm_trace.py,specbench.jsonl.xz} /tmp/h200/ && cd /tmp/h200 &&
        cat target.a? > TARGET.gguf && mkdir -p bundle && cat vllm.a? | tar xJ -C bundle && cd - &&
        python3 -m benchmarks.h200 --folder /tmp/h200/work --target /tmp/h200/TARGET.gguf --python-path /tmp/h200
        --prompts /tmp/h200/specbench.jsonl.xz --vllm-bundle /tmp/h200/bundle --vllm-trace /tmp/h200/vllm_trace.py
        --sections off,prefill,draft-step,startup
    python3 -m benchmarks.h200 --folder /tmp/h200/work --vllm-bundle /tmp/h200/bundle
        --vllm-trace /tmp/h200/vllm_trace.py --sections speculation

(each on one line). Needs 18 GB of disk for the two folders and a GPU with 80 GB. At the top this module imports the
standard library alone: it is also the driver inside vLLM's process, where nothing of FASER may be loaded.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import functools
import importlib.util
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol, cast

PROCESS_STARTED = time.time()
ROOT = Path(__file__).resolve().parents[1]

BANDWIDTH, FLOPS = 4.3e12, 790e12  # of an H200, as measured: bytes copied, bfloat16 products
BYTES = 2  # of a bfloat16

SECTIONS = ("off", "speculation", "prefill", "draft-step", "startup")
SECTION_SECONDS = {"off": 100.0, "speculation": 200.0, "prefill": 25.0, "draft-step": 60.0, "startup": 220.0}
START_SECONDS = {"models": 150.0, "faser": 150.0, "startup": 150.0, "vllm": 150.0}  # at most, before the first token
LEAST_SECONDS = {"models": 30.0, "faser": 40.0, "startup": 20.0, "vllm": 60.0}  # with less left none is started
FAILED_INSIDE = 3  # exit status of a process that has reported what failed
GRACE_SECONDS = 8.0  # for a process to notice that its time is over

LEAST_REQUESTS = 6  # measured for a figure: smaller batches run several times, with other prompts
WARM_TOKENS = 24
HOPELESS, CONTENDER = 1.3, 1.15  # times the best: no longer drafts are tried; worth a repeat
KEPT_TEXTS = 2  # of a run, to see that both systems run the same model
KV_SLACK = 1.25
DRAFT_STEPS, DRAFT_CONTEXT, PAGE_SIZE = 32, 256, 16

SIZES: dict[str, Any] = {
    "batches": [1, 4, 16, 64, 128, 256], "lengths": [1, 2, 3, 4, 5, 6], "vllm_lengths": [2, 4], "pair_length": 4,
    "prompt": 128, "output": 256, "prefill": "16x2048", "draft_rows": [1, 16, 64, 256], "repeats": 2,
    "max_model_len": 4096, "device": "cuda",
}  # fmt: skip
TINY_SIZES: dict[str, Any] = SIZES | {
    "batches": [1, 2], "lengths": [1, 2], "pair_length": 2, "prompt": 16, "output": 8, "prefill": "2x32",
    "draft_rows": [1, 2], "repeats": 2, "max_model_len": 128, "device": "cpu",
}  # fmt: skip

MODEL_FLAGS = ("tiny", "target_shape", "draft_shape")
REQUEST_FLAGS = ("prompt", "output", "prefill", "seed", "random_prompts")  # what the workload files depend on

MOST_GAP, MOST_DRAFT_MS, MOST_PREFILL, MOST_STARTUP = 0.05, 0.75, 1.15, 1.0

Figures = dict[str, Any]
Line = dict[str, Any]  # a request in the format of vllm_trace.py: arrival, prompt_token_ids, max_tokens


# ── the journal: what was measured, one line each ────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Journal:
    """Lines that several processes append to, one at a time. `session` tells apart the runs of the command."""

    path: Path
    session: float
    prints: bool = True  # else somebody who follows the file does

    def add(self, kind: str, **fields: Any) -> None:
        record = {"kind": kind, "session": self.session, **rounded(fields)}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        if self.prints:
            print(describe(record), flush=True)


def rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    return round(value, 5) if isinstance(value, float) else value


def read_journal(path: Path) -> list[Figures]:
    """Every whole line: the last may still be on its way."""
    records = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else ():
        with suppress(ValueError):
            record = json.loads(line)
            records += [record] if isinstance(record, dict) and "kind" in record else []
    return records


def describe(record: Figures) -> str:
    """A record for people: everything that fits in a line."""
    fields = {key: value for key, value in record.items() if not isinstance(value, (list, dict))}
    shown = "  ".join(f"{key} {value}" for key, value in fields.items() if key not in ("kind", "session"))
    return f"{record['kind']:10} {shown}"


# ── floors ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def num_weights(shape: Mapping[str, int], vocabulary: int) -> int:
    """Those a step reads: the layers' matrices and the head. Of the embedding it reads a few rows."""
    heads = shape["num_heads"] + 2 * shape["num_kv_heads"]
    attention = (heads + shape["num_heads"]) * shape["head_dim"] * shape["hidden_size"]
    mlp = 3 * shape["hidden_size"] * shape["intermediate_size"]
    return shape["num_layers"] * (attention + mlp) + vocabulary * shape["hidden_size"]


def kv_bytes(shape: Mapping[str, int]) -> int:
    """Of one token."""
    return 2 * shape["num_layers"] * shape["num_kv_heads"] * shape["head_dim"] * BYTES


def floor_ms(shape: Mapping[str, int], vocabulary: int, rows: int, context: int) -> float:
    """Of one forward over `rows` that attend to `context` tokens in all: bytes, or FLOPs where those take longer."""
    weights = num_weights(shape, vocabulary)
    moved = BYTES * weights + kv_bytes(shape) * context
    return 1e3 * max(moved / BANDWIDTH, 2 * weights * rows / FLOPS)


def step_floor_ms(models: Figures, batch: int, length: int, context: int) -> float:
    """Of a step: `length` forwards of the draft, then one of the target."""
    target, draft, vocabulary = models["target"], models["draft"], models["vocabulary"]
    drafting = length * floor_ms(draft, vocabulary, batch, context)
    return drafting + floor_ms(target, vocabulary, batch * (length + 1), context)


def prefill_floor_ms(models: Figures, number: int, tokens: int) -> float:
    """Mean time to first token of prompts computed one after the other: FLOPs of the matrices and of attention."""
    shape = models["target"]
    layers = num_weights(shape, 0)
    attention = 2 * shape["num_layers"] * shape["num_heads"] * shape["head_dim"] * tokens**2
    one = (2 * layers * tokens + attention) / FLOPS
    return float(1e3 * one * (number + 1) / 2)


# ── the requests ─────────────────────────────────────────────────────────────────────────────────────────────────────


def fit_prompt(body: list[int], others: Iterable[list[int]], size: int) -> list[int]:
    """Exactly `size` tokens: a long body loses its end, a short one, which comes last, gets others before it."""
    filled: list[int] = []
    for other in others:
        if len(filled) + len(body) >= size:
            break
        filled += other
    filled = filled[: max(0, size - len(body))] + body[:size]
    if len(filled) < size:
        raise ValueError(f"the texts have {len(filled)} tokens in all, a prompt has room for {size}")
    return filled


def chat_prompts(
    encode: Callable[[str], list[int]], around: tuple[str, str], questions: Sequence[str], count: int, size: int
) -> list[list[int]]:
    """Prompt i asks question i, with the beginnings of those behind it in the list where there is room."""
    head, tail = map(encode, around)
    room = size - len(head) - len(tail)
    bodies, fillers = ([encode(question + end) for question in questions] for end in ("", "\n\n"))
    prompts = []
    for index in (i % len(bodies) for i in range(count)):
        others = fillers[index + 1 :] + fillers[:index]
        prompts.append(head + fit_prompt(bodies[index], others, room) + tail)
    return prompts


def random_prompts(count: int, size: int, vocabulary: int, seed: int) -> list[list[int]]:
    drawn = random.Random(seed)
    low, high = (100, 4000) if vocabulary > 4000 else (3, vocabulary)
    return [[drawn.randrange(low, high) for _ in range(size)] for _ in range(count)]


def write_workload(path: Path, prompts: Sequence[list[int]], output: int) -> None:
    lines = ({"arrival": 0.0, "prompt_token_ids": prompt, "max_tokens": output} for prompt in prompts)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def read_workload(path: Path) -> list[Line]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def groups_of(lines: Sequence[Line], batch: int) -> list[list[Line]]:
    """Closed batches, one after the other, of at least LEAST_REQUESTS requests where there are as many."""
    count = min(-(-LEAST_REQUESTS // batch), max(1, len(lines) // batch))
    return [list(lines[i * batch : (i + 1) * batch]) for i in range(count)]


def shortened(lines: Sequence[Line], output: int) -> list[Line]:
    return [line | {"max_tokens": min(output, line["max_tokens"])} for line in lines]


def parse_prefill(text: str) -> tuple[int, int]:
    number, _, tokens = text.partition("x")
    return int(number), int(tokens)


# ── what requests saw, whoever served them ───────────────────────────────────────────────────────────────────────────


@dataclass
class Seen:
    """One request of a closed batch. Seconds on one clock; a chunk is what one step gave it."""

    started: float
    wanted: int  # tokens
    first: float = 0.0
    last: float = 0.0
    num_chunks: int = 0
    token_ids: list[int] = field(default_factory=list)

    @property
    def is_done(self) -> bool:
        return len(self.token_ids) >= self.wanted

    def add(self, token_ids: Sequence[int], now: float) -> None:
        if not len(token_ids):
            return
        self.first = self.first if self.token_ids else now
        self.last = now
        self.num_chunks += 1
        self.token_ids.extend(token_ids)


@dataclass(frozen=True)
class Steps:
    """Steps in which everybody decoded and nobody had ended; seconds in all of them."""

    number: int = 0
    step: float = 0.0
    draft: float = 0.0
    verify: float = 0.0
    plan: float = 0.0
    verified: int = 0  # tokens, likewise
    accepted: int = 0

    def __add__(self, other: Steps) -> Steps:
        return Steps(*(mine + theirs for mine, theirs in zip(vars(self).values(), vars(other).values(), strict=True)))

    def figures(self) -> Figures:
        """Milliseconds a step, and the share of a step in which the GPU computed."""
        if not self.number or not self.step:
            return {}
        parts = {name: getattr(self, name) for name in ("step", "draft", "verify", "plan")}
        means = {f"{name}_ms": 1e3 * seconds / self.number for name, seconds in parts.items()}
        judged = {"stats_acceptance": self.accepted / self.verified} if self.verified else {}
        computed = self.draft + self.verify  # nobody measured it where it is 0
        busy = {"busy": computed / self.step} if computed else {}
        return means | judged | busy | {"steps": self.number}


@dataclass(frozen=True)
class Played:
    seen: list[Seen]
    steps: Steps = Steps()

    def __add__(self, other: Played) -> Played:
        return Played(self.seen + other.seen, self.steps + other.steps)


def run_figures(played: Played, length: int, ends: Sequence[int] = ()) -> Figures:
    """Acceptance is what the tokens of a step imply, accepted over drafted, whoever served.

    vLLM hands out two steps' tokens as one chunk where its client is slow, so tokens a step are at most what is said.
    """
    seen = played.seen
    short = [each for each in seen if len(each.token_ids) != each.wanted or each.wanted < 2]
    if short:
        raise RuntimeError(f"{len(short)} of {len(seen)} requests got {len(short[0].token_ids)} tokens or the like")
    tokens = sum(len(each.token_ids) - 1 for each in seen)
    per_step = tokens / max(1, sum(each.num_chunks - 1 for each in seen))
    figures = {
        "tpot_ms": 1e3 * statistics.fmean((each.last - each.first) / (len(each.token_ids) - 1) for each in seen),
        "ttft_ms": 1e3 * statistics.fmean(each.first - each.started for each in seen),
        "requests": len(seen),
        "tokens": sum(len(each.token_ids) for each in seen),
        "tokens_per_step": per_step,
        "behind_end": statistics.fmean(share_behind_end(each.token_ids, ends) for each in seen),
    }
    accepted = {"acceptance": (per_step - 1) / length} if length else {}
    return figures | accepted | played.steps.figures() | {"texts": [each.token_ids for each in seen[:KEPT_TEXTS]]}


def share_behind_end(token_ids: Sequence[int], ends: Sequence[int]) -> float:
    """Of a text's tokens, those after its first end token: a model that should have stopped may say anything."""
    first = next((i for i, token in enumerate(token_ids) if token in ends), len(token_ids) - 1)
    return 1 - (first + 1) / len(token_ids)


class Player(Protocol):
    """A system that serves closed batches."""

    name: str

    def prepare(self, length: int) -> None:
        """The next batches draft so many tokens."""
        ...

    def play(self, lines: Sequence[Line]) -> Played: ...


# ── measuring, whatever the system ───────────────────────────────────────────────────────────────────────────────────


@dataclass
class Worker:
    """One process that measures. It stops in time: `until` is on the clock of time.time()."""

    args: argparse.Namespace
    journal: Journal
    engine: str
    until: float
    failed: bool = False

    @contextmanager
    def section(self, name: str, **about: Any) -> Iterator[None]:
        """Report what is raised inside, and go on. Time is limited to the section's share."""
        whole, started = self.until, time.time()
        self.until = min(whole, started + self.args.section_seconds.get(name, whole))
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            why = f"{type(error).__name__}: {error}".splitlines()[0]
            self.journal.add("failed", section=name, engine=self.engine, why=why[:300], **about)
            self.failed = True
        finally:
            self.until = whole

    def has(self, seconds: float) -> bool:
        return time.time() + seconds < self.until

    def wants(self, section: str) -> bool:
        return section in self.args.sections

    def workload(self, name: str) -> list[Line]:
        return read_workload(self.args.folder / f"{name}.jsonl")


@dataclass
class Survey:
    """Settings (length, batch): what each took and gave so far."""

    tpot: dict[tuple[int, int], float] = field(default_factory=dict)
    seconds: dict[tuple[int, int], float] = field(default_factory=dict)

    def best(self, batch: int) -> float:
        return min((tpot for (_, each), tpot in self.tpot.items() if each == batch), default=float("inf"))

    def is_hopeless(self, length: int, batch: int) -> bool:
        """Whether shorter drafts already cost far more than the best."""
        shorter = [k for k, each in self.tpot if each == batch and 0 < k < length]
        return bool(shorter) and self.tpot[max(shorter), batch] > HOPELESS * self.best(batch)

    def is_contender(self, length: int, batch: int) -> bool:
        return self.tpot.get((length, batch), float("inf")) <= CONTENDER * self.best(batch)


def measure(worker: Worker, player: Player, section: str, lengths: Sequence[int]) -> None:
    """Every setting once; then, while there is time, those near the best again."""
    survey, lines = Survey(), worker.workload("requests")
    for repeat in range(worker.args.repeats):
        for length in lengths:
            player.prepare(length)
            for batch in worker.args.batches:
                if repeat and not survey.is_contender(length, batch):
                    continue
                if not repeat and survey.is_hopeless(length, batch):
                    worker.journal.add("left out", section=section, engine=player.name, length=length, batch=batch)
                    continue
                if not worker.has(1.2 * survey.seconds.get((length, batch), 0.0)):
                    if not repeat:
                        raise TimeoutError(f"no time for length {length}, batch {batch} and what comes after")
                    return
                measure_one(worker, player, section, lines, (length, batch), survey, warm=not repeat)


def measure_one(
    worker: Worker,
    player: Player,
    section: str,
    lines: Sequence[Line],
    setting: tuple[int, int],
    survey: Survey,
    warm: bool,
) -> None:
    length, batch = setting
    groups = groups_of(lines, batch)
    if warm:
        player.play(shortened(groups[0], WARM_TOKENS))
    started = time.perf_counter()
    played = functools.reduce(Played.__add__, [player.play(group) for group in groups])
    seconds = time.perf_counter() - started
    figures = run_figures(played, length, read_json(worker.args.folder / "models.json")["ends"])
    survey.tpot[setting] = min(figures["tpot_ms"], survey.tpot.get(setting, float("inf")))
    survey.seconds[setting] = seconds
    worker.journal.add(
        "run", section=section, engine=player.name, length=length, batch=batch, **figures, seconds=seconds
    )


def measure_prefill(worker: Worker, player: Player) -> None:
    lines = worker.workload("prefill")
    player.prepare(0)
    player.play(lines)
    for _ in range(worker.args.repeats):
        seen = player.play(lines).seen
        waits = [1e3 * (each.first - each.started) for each in seen]
        figures = {"ttft_ms": statistics.fmean(waits), "first_ms": min(waits), "last_ms": max(waits)}
        worker.journal.add("prefill", section="prefill", engine=player.name, **figures)


def report_start(worker: Worker, mode: str, cache: str, **parts: float) -> None:
    """The first token is out."""
    seconds = time.time() - worker.args.spawned
    worker.journal.add(
        "startup", section="startup", engine=worker.engine, mode=mode, cache=cache, seconds=seconds, **parts
    )


def mode_name(length: int) -> str:
    return f"length {length}" if length else "off"


def cache_state(variable: str, mode: str) -> tuple[str, Callable[[], None]]:
    """Whether such a process has run with this cache of kernels before, and how to say that one has."""
    folder = os.environ.get(variable)
    if folder is None:
        return "unknown", lambda: None
    marker = Path(folder) / f"started-{mode.replace(' ', '-')}"

    def mark() -> None:
        marker.parent.mkdir(parents=True, exist_ok=True)
        marker.touch()

    return ("warm" if marker.exists() else "cold"), mark


# ── the process that makes the models ────────────────────────────────────────────────────────────────────────────────


def ensure_models(worker: Worker) -> None:
    """The two folders, the requests, and models.json as the sign that all are whole."""
    args, sign = worker.args, worker.args.folder / "models.json"
    if sign.is_file():
        found = read_json(sign)
        if {name: found.get(name) for name in MODEL_FLAGS} != {name: getattr(args, name) for name in MODEL_FLAGS}:
            raise ValueError(f"{args.folder} holds other models; give another --folder")
        if same_requests(args, found):
            return
    started = time.perf_counter()
    target, draft, prompts = (make_tiny_models if args.tiny else make_models)(args)
    number, tokens = parse_prefill(args.prefill)
    write_workload(args.folder / "requests.jsonl", prompts(num_requests(args.batches), args.prompt), args.output)
    write_workload(args.folder / "prefill.jsonl", prompts(number, tokens), 2)
    for name, model in (("target", target), ("draft", draft)):
        write_model(model, args.folder / name)
    about = {name: getattr(args, name) for name in (*MODEL_FLAGS, *REQUEST_FLAGS)} | {
        "requests": num_requests(args.batches),
        "vocabulary": target.config.vocab_size,
        "ends": list(target.config.eos_token_ids),
        "target": shape_of(target),
        "draft": shape_of(draft),
        "gigabytes": round((target.num_bytes + draft.num_bytes) / 1e9, 2),
    }
    sign.write_text(json.dumps(about), encoding="utf-8")
    worker.journal.add("models made", seconds=time.perf_counter() - started, gigabytes=about["gigabytes"])


def num_requests(batches: Sequence[int]) -> int:
    return max(batch * -(-LEAST_REQUESTS // batch) for batch in batches)


def same_requests(args: argparse.Namespace, found: Figures) -> bool:
    """Whether the workload files are those that were asked for, or more."""
    same = all(found.get(name) == getattr(args, name) for name in REQUEST_FLAGS)
    return same and bool(found.get("requests", 0) >= num_requests(args.batches))


def read_json(path: Path) -> Figures:
    return cast(Figures, json.loads(path.read_text(encoding="utf-8")))


def shape_of(model: Any) -> dict[str, int]:
    from tools.inflate import Shape

    return {name: getattr(model.config, name) for name in Shape.__dataclass_fields__}


def write_model(model: Any, folder: Path) -> None:
    """Whole or not at all; one that is there is the same one: seeds are fixed."""
    from tools.inflate import write_folder

    if folder.is_dir():
        return
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    write_folder(model, partial)
    partial.rename(folder)


Prompts = Callable[[int, int], list[list[int]]]  # (how many, of how many tokens)


def make_models(args: argparse.Namespace) -> tuple[Any, Any, Prompts]:
    """SmolLM2 and its draft inside the two shapes, in bfloat16, rounded once."""
    import torch

    from faser.models.draft import apply_patch, read_patch
    from faser.models.source import default_target
    from tools.distill import SYSTEM, load_target, read_jsonl
    from tools.inflate import SHAPES, inflate

    path = args.target or default_target()
    small, tokenizer = load_target(str(path), torch.float32, args.device)
    small_draft = apply_patch(small, read_patch(args.draft, small.config))
    print(f"inflating {path} and {args.draft} to {args.target_shape} and {args.draft_shape}", flush=True)
    target, draft = (
        inflate(model, SHAPES[shape], dtype=torch.bfloat16, device=args.device)
        for model, shape in ((small, args.target_shape), (small_draft, args.draft_shape))
    )
    if args.random_prompts:
        return target, draft, lambda count, size: random_prompts(count, size, small.config.vocab_size, args.seed)
    questions = [str(cast(list[str], row["turns"])[0]) for row in read_jsonl(str(args.prompts))]
    random.Random(args.seed).shuffle(questions)  # they lie by category
    around = (f"{SYSTEM}<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n")
    return target, draft, lambda count, size: chat_prompts(tokenizer.encode, around, questions, count, size)


def make_tiny_models(args: argparse.Namespace) -> tuple[Any, Any, Prompts]:
    """A random model in two small shapes, the draft's a little shaken: it agrees often, not always."""
    import torch

    from faser.models.config import ModelConfig
    from faser.models.transformer import Transformer
    from tools.inflate import Shape, inflate

    sizes = {"num_kv_heads": 2, "head_dim": 16}
    base = Shape(hidden_size=32, num_layers=1, num_heads=4, intermediate_size=48, **sizes)
    config = ModelConfig(
        family="llama", vocab_size=64, norm_eps=1e-5, max_positions=256, eos_token_ids=(2,), dtype="float32",
        **asdict(base),
    )  # fmt: skip
    small, shaken = (Transformer.random(config, args.seed, std=0.3) for _ in range(2))
    for weight in shaken.weights():
        weight += 0.03 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
    target = inflate(small, replace(base, hidden_size=64, num_layers=2, num_heads=8, num_kv_heads=4))
    draft = inflate(shaken, replace(base, intermediate_size=64))
    return target, draft, lambda count, size: random_prompts(count, size, config.vocab_size, args.seed)


# ── the process of FASER ─────────────────────────────────────────────────────────────────────────────────────────────


class FaserPlayer:
    """An engine in this process. Lengths change from batch to batch; their graphs are captured when first asked for."""

    name = "faser"

    def __init__(self, args: argparse.Namespace, length: int, kv_memory: int | None = None) -> None:
        """With graphs of one length, and with the draft if that is not 0."""
        started = time.perf_counter()
        from faser.config import EngineOptions
        from faser.runtime.build import build_engine

        self._device = args.device
        self.imported = time.perf_counter()
        target = load_folder(args, "target")
        self.draft = load_folder(args, "draft") if length else None
        self.loaded = time.perf_counter()
        options = EngineOptions(
            policy=f"fixed:{length}" if length else "off",
            device=args.device,
            max_running=max(*args.batches, parse_prefill(args.prefill)[0]),
            max_batch_tokens=args.batch_tokens,
            max_model_len=args.max_model_len,
            kv_memory=kv_memory,
            prefix_caching=False,
            acceptance=args.acceptance,
        )
        self.engine = build_engine(target, self.draft, options)
        self.built = time.perf_counter()
        self.seconds = {
            "import_s": self.imported - started,
            "load_s": self.loaded - self.imported,
            "build_s": self.built - self.loaded,
        }

    def prepare(self, length: int) -> None:
        from faser.policy import Fixed

        self.engine.scheduler.policy = Fixed(length)
        if self._device == "cuda" and length:
            started = time.perf_counter()
            cast(Prepares, self.engine.executor).prepare(length)
            print(f"graphs of length {length} in {time.perf_counter() - started:.1f} s", flush=True)

    def play(self, lines: Sequence[Line]) -> Played:
        try:
            return self._play(lines)
        except BaseException:
            self.engine.abandon()  # what was open must not run into the next batch
            raise

    def _play(self, lines: Sequence[Line]) -> Played:
        engine, steps, started = self.engine, [], time.perf_counter()
        for request in make_requests(lines):
            engine.add(request)
        while engine.has_work:
            progress = engine.step()
            steps.append((time.perf_counter(), progress, copy.copy(engine.stats)))
        return played_of(lines, started, steps)


def played_of(lines: Sequence[Line], started: float, steps: Sequence[tuple[float, list[Any], Any]]) -> Played:
    """From what each step gave, and the engine's totals after it. Afterwards: the engine must not wait for this."""
    seen = {str(i): Seen(started, line["max_tokens"]) for i, line in enumerate(lines)}
    opened = closed = None
    for now, progress, stats in steps:
        for item in progress:
            seen[item.request_id].add(item.token_ids, now)
        if opened is None:
            opened = stats if all(each.num_chunks for each in seen.values()) else None
        elif closed is None and any(each.is_done for each in seen.values()):
            closed = stats
    return Played(list(seen.values()), steps_between(opened, closed))


class Prepares(Protocol):
    """What the CUDA executor has beyond the seam."""

    def prepare(self, length: int) -> None: ...


def load_folder(args: argparse.Namespace, name: str) -> Any:
    from faser.models import weights
    from faser.models.config import ModelConfig

    folder = args.folder / name
    config = ModelConfig.from_folder(folder)
    dtype = weights.resolve_dtype("auto", config, args.device)
    return weights.load(folder, config, dtype, args.device, max_positions=args.max_model_len)


def enough_kv(args: argparse.Namespace) -> int:
    """Bytes for the KV of the largest batch, target and draft, and some more: the rest is for graphs of all lengths."""
    models = read_json(args.folder / "models.json")
    number, tokens = parse_prefill(args.prefill)
    longest = args.prompt + args.output + max([0, *args.lengths]) + 2 * PAGE_SIZE
    most = max(max(args.batches) * longest, number * (tokens + 2 * PAGE_SIZE))
    widest = 2 if args.device == "cpu" else 1  # float32 there
    return int(KV_SLACK * widest * most * (kv_bytes(models["target"]) + kv_bytes(models["draft"])))


def make_requests(lines: Sequence[Line]) -> list[Any]:
    from faser.types import Request, SamplingParams

    return [
        Request(
            id=str(i),
            prompt_token_ids=tuple(line["prompt_token_ids"]),
            params=SamplingParams(max_tokens=line["max_tokens"], ignore_eos=True),
            seed=i,
        )
        for i, line in enumerate(lines)
    ]


def steps_between(before: Any, after: Any) -> Steps:
    """From one state of the engine's stats to a later one."""
    if before is None or after is None:
        return Steps()
    names = ("steps", "step_seconds", "draft_seconds", "verify_seconds", "plan_seconds", "verified", "accepted")
    return Steps(*(getattr(after, name) - getattr(before, name) for name in names))


def run_faser(worker: Worker) -> None:
    args, mode = worker.args, mode_name(worker.args.pair_length)
    cache, mark = cache_state("TRITON_CACHE_DIR", mode)
    player = FaserPlayer(args, args.pair_length, enough_kv(args))
    player.play(shortened(worker.workload("requests")[:1], 1))
    report_start(worker, mode, cache, **player.seconds)
    mark()
    note_memory(worker)
    if worker.wants("off"):
        with worker.section("off"):
            measure(worker, player, "off", [0])
    if worker.wants("prefill"):
        with worker.section("prefill"):
            measure_prefill(worker, player)
    if worker.wants("draft-step"):
        with worker.section("draft-step"):
            measure_draft_steps(worker, player.draft)
    if worker.wants("speculation"):
        with worker.section("speculation"):
            measure(worker, player, "speculation", args.lengths)
    note_memory(worker)


def run_startup(worker: Worker) -> None:
    """FASER from nothing to its first token, with the settings a user gets."""
    length = worker.args.only_length
    cache, mark = cache_state("TRITON_CACHE_DIR", mode_name(length))
    player = FaserPlayer(worker.args, length)
    player.play(shortened(worker.workload("requests")[:1], 1))
    report_start(worker, mode_name(length), cache, **player.seconds)
    mark()
    note_memory(worker)


def note_memory(worker: Worker) -> None:
    import torch

    if worker.args.device == "cuda":
        free, total = torch.cuda.mem_get_info()
        used, allocated = (total - free) / 2**30, torch.cuda.memory_allocated() / 2**30
        gpu = torch.cuda.get_device_name()
        worker.journal.add(
            "memory", engine=worker.engine, used_gib=used, tensors_gib=allocated, gpu=gpu, torch=torch.__version__
        )


def measure_draft_steps(worker: Worker, draft: Any) -> None:
    repeats = worker.args.repeats + 2 if worker.args.device == "cuda" else 1
    for rows in worker.args.draft_rows:
        if not worker.has(0.0):
            raise TimeoutError(f"no time for {rows} rows and what comes after")
        times = time_draft_steps(draft, rows, worker.args.max_model_len, repeats)
        figures = {"ms": statistics.median(times), "least_ms": min(times), "most_ms": max(times)}
        worker.journal.add("draft-step", section="draft-step", rows=rows, context=draft_context(draft), **figures)


def draft_context(draft: Any) -> int:
    """Tokens a row attends to, about."""
    return int(min(DRAFT_CONTEXT, draft.max_positions // 2))


def time_draft_steps(draft: Any, rows: int, max_context: int, repeats: int) -> list[float]:
    """Milliseconds of a step that goes on drafting, each the mean of several in a row; the first several warm up."""
    import numpy as np
    import torch

    from faser.runtime.cuda.model import next_draft

    steps = DRAFT_STEPS if draft.device.type == "cuda" else 2
    with torch.inference_mode():
        model = drafting_model(draft, rows, max_context, steps)
        shape, lengths = next_draft(rows), np.full(rows, steps + 1, dtype=np.int64)
        model.capture(shape)

        def run() -> None:
            model.set_lengths(lengths)
            for _ in range(steps):
                model.launch(shape)

        return [timed_ms(run, draft.device) / steps for _ in range(repeats + 1)][1:]


def drafting_model(draft: Any, rows: int, max_context: int, steps: int) -> Any:
    """A model on the device with pages and requests of its own, as after the first token of a draft."""
    import numpy as np
    import torch

    from faser.runtime.cuda.model import CudaModel
    from faser.runtime.cuda.sampling import Slots

    context, device = draft_context(draft), draft.device
    slots = Slots.allocate(rows, max_context + steps + 1, device)
    slots.history.random_(3, draft.config.vocab_size)
    model = CudaModel(
        draft if device.type == "cuda" else row_major(draft),
        slots,
        max_requests=rows,
        max_rows=2 * rows,
        max_context=max_context,
        page_size=PAGE_SIZE,
        writes=True,
    )
    columns = -(-(context + steps + 1) // PAGE_SIZE)
    model.allocate_pages(rows * columns)
    pages = torch.arange(rows * columns, dtype=torch.int32, device=device)
    model.table[:rows, :columns] = pages.view(rows, columns)
    each = np.ones(rows, dtype=np.int64)
    model.set_requests(np.arange(rows), (context - 1) * each, each, 0 * each, each)
    return model


def row_major(model: Any) -> Any:
    """A model on the CPU in the storage order of a GPU, for kernels that are interpreted."""
    from faser.models.transformer import Layer, Transformer

    def contiguous(weights: Mapping[str, Any]) -> dict[str, Any]:
        return {name: None if weight is None else weight.contiguous() for name, weight in weights.items()}

    layers = tuple(Layer(**contiguous(vars(layer))) for layer in model.layers)
    head = model.head.contiguous()
    return Transformer(model.config, model.embedding, layers, model.final_norm, head, model.max_positions)


def timed_ms(run: Callable[[], None], device: Any) -> float:
    """On the device's clock where it has one."""
    import torch

    if device.type != "cuda":
        started = time.perf_counter()
        run()
        return 1e3 * (time.perf_counter() - started)
    make: Any = torch.cuda.Event
    before, after = make(enable_timing=True), make(enable_timing=True)
    torch.cuda.synchronize()
    before.record()
    run()
    after.record()
    after.synchronize()
    return float(before.elapsed_time(after))


# ── the process of vLLM ──────────────────────────────────────────────────────────────────────────────────────────────


class VllmPlayer:
    """vLLM's engine, made by the peer's own script and kept for all batches. It drafts what it was started for."""

    name = "vllm"

    def __init__(self, args: argparse.Namespace, length: int) -> None:
        trace = import_file(args.vllm_trace)
        if args.vllm_batch_tokens is not None:
            limit_batch_tokens(args.vllm_batch_tokens)
        self._length = length
        self._runner = asyncio.Runner()
        self._served = 0
        self.engine = self._runner.run(self._make(trace, vllm_arguments(args, length)))

    async def _make(self, trace: ModuleType, arguments: argparse.Namespace) -> Any:
        return trace.make_engine(arguments)

    @property
    def batch_tokens(self) -> int | None:
        config = getattr(self.engine, "vllm_config", None)
        return getattr(getattr(config, "scheduler_config", None), "max_num_batched_tokens", None)

    def prepare(self, length: int) -> None:
        assert length == self._length or length == 0, "another length takes another engine"

    def play(self, lines: Sequence[Line]) -> Played:
        return Played(self._runner.run(self._play(lines)))

    async def _play(self, lines: Sequence[Line]) -> list[Seen]:
        started = time.perf_counter()
        return await asyncio.gather(*(self._play_one(line, started) for line in lines))

    async def _play_one(self, line: Line, started: float) -> Seen:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            max_tokens=line["max_tokens"],
            temperature=0.0,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        seen, self._served = Seen(started, line["max_tokens"]), self._served + 1
        prompt = {"prompt_token_ids": line["prompt_token_ids"]}
        async for output in self.engine.generate(prompt, params, f"request-{self._served}"):
            seen.add(output.outputs[0].token_ids, time.perf_counter())
        return seen

    def close(self) -> None:
        """Whatever remains is killed with the process."""
        with suppress(Exception):
            self.engine.shutdown()


def import_file(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert spec is not None, path
    assert spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def limit_batch_tokens(number: int) -> None:
    """Another size of vLLM's prompt chunks than it takes by itself when driven in-process."""
    from vllm.engine import arg_utils

    arg_utils.AsyncEngineArgs = functools.partial(arg_utils.AsyncEngineArgs, max_num_batched_tokens=number)


def vllm_arguments(args: argparse.Namespace, length: int) -> argparse.Namespace:
    """Those that make_engine of vllm_trace.py reads."""
    return argparse.Namespace(
        model=str(args.folder / "target"),
        draft=str(args.folder / "draft") if length else None,
        num_draft=length,
        draft_table=None,
        acceptance=args.acceptance,
        dummy_weights=False,
        max_model_len=args.max_model_len,
        max_num_seqs=max(*args.batches, parse_prefill(args.prefill)[0]),
        gpu_memory=args.vllm_gpu_memory,
    )


def run_vllm(worker: Worker) -> None:
    length = worker.args.only_length
    cache, mark = cache_state("VLLM_CACHE_ROOT", mode_name(length))
    started = time.perf_counter()
    player = VllmPlayer(worker.args, length)
    try:
        ready = time.perf_counter() - started
        player.play(shortened(worker.workload("requests")[:1], 1))
        report_start(worker, mode_name(length), cache, build_s=ready)
        mark()
        worker.journal.add("note", engine="vllm", length=length, max_num_batched_tokens=player.batch_tokens)
        section = "speculation" if length else "off"
        if worker.wants(section):
            with worker.section(section, length=length):
                measure(worker, player, section, [length])
        if not length and worker.wants("prefill"):
            with worker.section("prefill"):
                measure_prefill(worker, player)
    finally:
        player.close()


# ── the summary ──────────────────────────────────────────────────────────────────────────────────────────────────────


def latest(records: Iterable[Figures], kind: str, *names: str) -> dict[tuple[Any, ...], list[Figures]]:
    """Records of a kind by these fields; of each combination those of the last session that has it."""
    found: dict[tuple[Any, ...], list[Figures]] = {}
    for record in records:
        if record["kind"] != kind:
            continue
        kept = found.setdefault(tuple(record.get(name) for name in names), [])
        if kept and kept[0].get("session", 0) < record.get("session", 0):
            kept.clear()
        if not kept or kept[0].get("session", 0) == record.get("session", 0):
            kept.append(record)
    return found


def medians(records: Sequence[Figures]) -> Figures:
    """Of every figure, field by field, with the range of the TPOT."""
    names = [name for name, value in records[0].items() if isinstance(value, (int, float)) and name != "session"]
    figures: Figures = {name: statistics.median(r[name] for r in records if name in r) for name in names}
    figures["repeats"] = len(records)
    if "tpot_ms" in figures:
        tpots = [record["tpot_ms"] for record in records]
        figures |= {"least_ms": min(tpots), "most_ms": max(tpots), "texts": records[0].get("texts", [])}
    return cast(Figures, rounded(figures))


def summarize(records: Sequence[Figures]) -> Figures:
    """Everything the tables and the targets are made of."""
    setup = last_of(records, "setup")
    models = last_of(records, "models")
    runs = {key: medians(group) for key, group in latest(records, "run", "engine", "length", "batch").items()}
    summary = {
        "setup": {key: value for key, value in setup.items() if key not in ("kind", "session")},
        "models": {key: value for key, value in models.items() if key not in ("kind", "session")},
        "off": off_rows(runs, models, setup),
        "speculation": speculation_rows(runs, models, setup),
        "lengths": length_rows(runs),
        "prefill": prefill_figures(records, models, setup),
        "draft-step": draft_rows(records, models),
        "startup": startup_rows(records),
        "memory": [strip(group[-1]) for group in latest(records, "memory", "engine").values()],
        "notes": [strip(group[-1]) for group in latest(records, "note", "engine", "length").values()],
        "failed": [strip(record) for record in failures(records)],
    }
    return summary | {"targets": evaluate(summary)}


def last_of(records: Sequence[Figures], kind: str) -> Figures:
    return next((record for record in reversed(records) if record["kind"] == kind), {})


def strip(record: Figures) -> Figures:
    return {key: value for key, value in record.items() if key not in ("kind", "session")}


def failures(records: Sequence[Figures], session: float | None = None) -> list[Figures]:
    """Of a session: the last one."""
    session = max((record.get("session", 0) for record in records), default=0) if session is None else session
    return [record for record in records if record["kind"] == "failed" and record.get("session", 0) == session]


def batches_of(runs: Mapping[tuple[Any, ...], Figures]) -> list[int]:
    return sorted({batch for _, _, batch in runs})


def context_of(setup: Figures, batch: int) -> int:
    """Tokens a step attends to, half-way through the output."""
    return int(batch * (setup.get("prompt", 0) + setup.get("output", 0) // 2))


def ratio_of(theirs: float | None, ours: float | None) -> float | None:
    return round(theirs / ours, 3) if theirs and ours else None


def common_prefix(left: Sequence[Sequence[int]], right: Sequence[Sequence[int]]) -> float | None:
    """Mean tokens two systems' texts begin with in common; None where there are none to compare."""
    pairs = list(zip(left, right, strict=False))
    if not pairs:
        return None
    same = [next((i for i, (a, b) in enumerate(zip(x, y, strict=False)) if a != b), len(x)) for x, y in pairs]
    return round(statistics.fmean(same), 1)


def off_rows(runs: Mapping[tuple[Any, ...], Figures], models: Figures, setup: Figures) -> list[Figures]:
    rows = []
    for batch in batches_of(runs):
        ours, theirs = runs.get(("faser", 0, batch), {}), runs.get(("vllm", 0, batch), {})
        if not ours and not theirs:
            continue
        rows.append(
            {
                "batch": batch,
                "floor_ms": floor_or_none(models, batch, 0, context_of(setup, batch)),
                "faser": without_texts(ours),
                "vllm": without_texts(theirs),
                "ratio": ratio_of(theirs.get("tpot_ms"), ours.get("tpot_ms")),
                "gap": round(1 - ours["busy"], 4) if "busy" in ours else None,
                "same_text": common_prefix(ours.get("texts", []), theirs.get("texts", [])),
            }
        )
    return rows


def without_texts(figures: Figures) -> Figures:
    return {name: value for name, value in figures.items() if name not in ("texts", "length", "batch")}


def floor_or_none(models: Figures, batch: int, length: int, context: int) -> float | None:
    return round(step_floor_ms(models, batch, length, context), 3) if "target" in models else None


def best_run(
    runs: Mapping[tuple[Any, ...], Figures], engine: str, batch: int, least_length: int = 0
) -> tuple[int, Figures] | None:
    """The length with the least TPOT; length 0, no speculation, is one of them."""
    found = {k: runs[e, k, b] for e, k, b in runs if (e, b) == (engine, batch) and k >= least_length}
    return min(found.items(), key=lambda item: item[1]["tpot_ms"]) if found else None


def speculation_rows(runs: Mapping[tuple[Any, ...], Figures], models: Figures, setup: Figures) -> list[Figures]:
    """A row for each batch size at which anybody speculated."""
    rows = []
    for batch in batches_of(runs):
        if not any(length for _, length, b in runs if b == batch):
            continue
        ours, theirs = best_run(runs, "faser", batch), best_run(runs, "vllm", batch)
        row: Figures = {"batch": batch} | side("faser", ours) | side("vllm", theirs)
        drafted = best_run(runs, "vllm", batch, least_length=1)
        row["vllm_speculating"] = side("", drafted)
        row["vllm_off_ms"] = runs.get(("vllm", 0, batch), {}).get("tpot_ms")
        row["ratio"] = ratio_of(row.get("vllm_ms"), row.get("faser_ms"))
        if ours is not None:
            floor = floor_or_none(models, batch, ours[0], context_of(setup, batch))
            row["floor_ms"] = round(floor / ours[1]["tokens_per_step"], 3) if floor is not None else None
            plain = runs.get(("faser", 0, batch), {})
            row["same_text"] = common_prefix(ours[1].get("texts", []), plain.get("texts", []))
        rows.append(row)
    return rows


def side(name: str, found: tuple[int, Figures] | None) -> Figures:
    if found is None:
        return {}
    length, figures = found
    shown = {"length": length, "ms": figures["tpot_ms"], "tokens_per_step": figures["tokens_per_step"]}
    parts = ("acceptance", "step_ms", "draft_ms", "verify_ms", "busy")
    shown |= {key: figures[key] for key in parts if key in figures}
    return {f"{name}_{key}" if name else key: value for key, value in shown.items()}


def length_rows(runs: Mapping[tuple[Any, ...], Figures]) -> list[Figures]:
    """Every setting, both systems."""
    parts = ("tpot_ms", "least_ms", "most_ms", "repeats", "tokens_per_step", "acceptance", "stats_acceptance",
             "behind_end", "step_ms", "draft_ms", "verify_ms", "busy", "ttft_ms")  # fmt: skip
    return [
        {"engine": engine, "length": length, "batch": batch} | {part: run[part] for part in parts if part in run}
        for (engine, length, batch), run in sorted(runs.items())
    ]


def prefill_figures(records: Sequence[Figures], models: Figures, setup: Figures) -> Figures:
    found = {key[0]: medians(group) for key, group in latest(records, "prefill", "engine").items()}
    ours, theirs = (found.get(name, {}).get("ttft_ms") for name in ("faser", "vllm"))
    shape = setup.get("prefill")
    floor = prefill_floor_ms(models, *parse_prefill(shape)) if shape and "target" in models else None
    inverse = ratio_of(ours, theirs)
    return {"shape": shape, "floor_ms": rounded(floor), "faser_ms": ours, "vllm_ms": theirs, "times_vllm": inverse} | {
        f"{name}_last_ms": figures["last_ms"] for name, figures in found.items()
    }


def draft_rows(records: Sequence[Figures], models: Figures) -> list[Figures]:
    rows = []
    for (number,), group in sorted(latest(records, "draft-step", "rows").items()):
        figures = medians(group) | {"rows": number}
        if "draft" in models:
            context = number * group[-1].get("context", 0)
            figures["floor_ms"] = round(floor_ms(models["draft"], models["vocabulary"], number, context), 3)
        rows.append(figures)
    return rows


def startup_rows(records: Sequence[Figures]) -> list[Figures]:
    """By mode and state of the caches: seconds of both, and ours over theirs."""
    found = {key: group[-1] for key, group in latest(records, "startup", "engine", "mode", "cache").items()}
    rows = []
    for mode, cache in sorted({(mode, cache) for _, mode, cache in found}):
        ours, theirs = (found.get((engine, mode, cache), {}) for engine in ("faser", "vllm"))
        row: Figures = {"mode": mode, "cache": cache, "faser_s": ours.get("seconds"), "vllm_s": theirs.get("seconds")}
        row["times_vllm"] = ratio_of(row["faser_s"], row["vllm_s"])
        rows.append(row | {part: ours[part] for part in ("import_s", "load_s", "build_s") if part in ours})
    return rows


# ── the targets ──────────────────────────────────────────────────────────────────────────────────────────────────────


def least_speculation(batch: int) -> float:
    return 1.5 if batch <= 16 else 1.2 if batch <= 64 else 1.0


def judged(name: str, figure: float | None, bound: float, at_least: bool) -> Figures:
    """`reached` is None where there is no figure."""
    reached = None if figure is None else figure >= bound if at_least else figure <= bound
    return {"name": name, "figure": figure, "target": f"{'>=' if at_least else '<='} {bound:g}", "reached": reached}


def evaluate(summary: Figures) -> list[Figures]:
    targets = []
    for row in summary["off"]:
        targets.append(judged(f"off, batch {row['batch']}: vLLM over FASER", row["ratio"], 1.0, True))
        targets.append(judged(f"off, batch {row['batch']}: share without kernels", row["gap"], MOST_GAP, False))
    for row in summary["speculation"]:
        name = f"speculation, batch {row['batch']}: vLLM's best over FASER's"
        targets.append(judged(name, row["ratio"], least_speculation(row["batch"]), True))
    one = next((row["ms"] for row in summary["draft-step"] if row["rows"] == 1), None)
    targets.append(judged("draft step, one row, ms", one, MOST_DRAFT_MS, False))
    targets.append(judged("prefill: FASER over vLLM", summary["prefill"]["times_vllm"], MOST_PREFILL, False))
    for row in summary["startup"]:
        name = f"start-up, {row['mode']}, {row['cache']} caches: FASER over vLLM"
        targets.append(judged(name, row["times_vllm"], MOST_STARTUP, False))
    return targets


# ── tables ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def cell(value: Any, digits: int = 2) -> str:
    if value is None or value == "":
        return ""
    return f"{value:.{digits}f}" if isinstance(value, float) else str(value)


def markdown(title: str, heads: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Nothing where there are no rows."""
    if not rows:
        return ""
    cells = [list(heads), *([cell(value) for value in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(heads))]
    padded = ([text.rjust(width) for text, width in zip(row, widths, strict=True)] for row in cells)
    lines = ["| " + " | ".join(row) + " |" for row in padded]
    rule = "|" + "|".join("-" * (width + 1) + ":" for width in widths) + "|"
    return "\n".join([f"\n**{title}**\n", lines[0], rule, *lines[1:]])


def tables(summary: Figures) -> str:
    parts = (off_table, speculation_table, lengths_table, draft_table, prefill_table, startup_table, targets_table)
    shown = [part(summary) for part in parts]
    shown += [f"\nFAILED {describe({'kind': '', **each}).strip()}" for each in summary["failed"]]
    return "\n".join(each for each in shown if each)


def off_table(summary: Figures) -> str:
    rows = []
    for row in summary["off"]:
        ours, theirs = row["faser"], row["vllm"]
        gpu = ours["draft_ms"] + ours["verify_ms"] if "step_ms" in ours else None
        host = ours["step_ms"] - gpu if gpu is not None else None
        gap = 100 * row["gap"] if row["gap"] is not None else None
        shown = [row["batch"], row["floor_ms"], ours.get("tpot_ms"), theirs.get("tpot_ms"), row["ratio"]]
        shown += [ours.get("step_ms"), gpu, host, gap, ours.get("ttft_ms"), theirs.get("ttft_ms"), row["same_text"]]
        rows.append(shown)
    heads = ("batch", "floor", "FASER TPOT", "vLLM TPOT", "ratio", "FASER step", "of it GPU", "host", "gap %",
             "FASER TTFT", "vLLM TTFT", "same text")  # fmt: skip
    return markdown("Without speculation, ms", heads, rows)


def speculation_table(summary: Figures) -> str:
    heads = ("batch", "floor", "FASER TPOT", "length", "tokens/step", "acceptance", "step", "draft", "verify",
             "vLLM off", "vLLM drafts", "length", "tokens/step", "ratio", "same as off")  # fmt: skip
    names = ("batch", "floor_ms", "faser_ms", "faser_length", "faser_tokens_per_step", "faser_acceptance",
             "faser_step_ms", "faser_draft_ms", "faser_verify_ms", "vllm_off_ms")  # fmt: skip
    rows = []
    for row in summary["speculation"]:
        theirs = row["vllm_speculating"]
        shown = [row.get(name) for name in names] + [theirs.get(name) for name in ("ms", "length", "tokens_per_step")]
        rows.append([*shown, row["ratio"], row.get("same_text")])
    return markdown("The best fixed length per batch size, ms a token", heads, rows)


def lengths_table(summary: Figures) -> str:
    """TPOT of every setting: a row for each batch size, a column for each length."""
    runs = {(row["engine"], row["length"], row["batch"]): row["tpot_ms"] for row in summary["lengths"]}
    lengths = sorted({(engine, length) for engine, length, _ in runs})
    if not any(length for _, length in lengths):
        return ""
    heads = ("batch", *(f"{'FASER' if engine == 'faser' else 'vLLM'} {length}" for engine, length in lengths))
    rows = [[batch, *(runs.get((*each, batch)) for each in lengths)] for batch in batches_of(runs)]
    return markdown("TPOT by length, ms", heads, rows)


def draft_table(summary: Figures) -> str:
    names = ("rows", "floor_ms", "ms", "least_ms", "most_ms")
    rows = [[row.get(name) for name in names] for row in summary["draft-step"]]
    return markdown("One step of the draft, ms", ("rows", "floor", "median", "least", "most"), rows)


def prefill_table(summary: Figures) -> str:
    found = summary["prefill"]
    names = ("shape", "floor_ms", "faser_ms", "faser_last_ms", "vllm_ms", "vllm_last_ms", "times_vllm")
    heads = ("prompts", "floor", "FASER mean", "last", "vLLM mean", "last", "FASER/vLLM")
    measured = found["faser_ms"] is not None or found["vllm_ms"] is not None
    rows = [[found.get(name) for name in names]] if measured else []
    return markdown("Prefill, time to first token, ms", heads, rows)


def startup_table(summary: Figures) -> str:
    names = ("mode", "cache", "faser_s", "vllm_s", "times_vllm", "import_s", "load_s", "build_s")
    heads = ("mode", "caches", "FASER", "vLLM", "FASER/vLLM", "FASER imports", "weights", "engine")
    rows = [[row.get(name) for name in names] for row in summary["startup"]]
    return markdown("Start-up to the first token, s", heads, rows)


def targets_table(summary: Figures) -> str:
    verdicts = {True: "reached", False: "MISSED", None: "not measured"}
    rows = [[each["name"], each["figure"], each["target"], verdicts[each["reached"]]] for each in summary["targets"]]
    return markdown("Targets", ("what", "figure", "target", ""), rows)


# ── the command: one process after the other ─────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Job:
    """A process to run."""

    worker: str
    about: str
    flags: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    sections: tuple[str, ...] = ()  # whose time it may take
    forgets: Path | None = None  # a cache to empty first


def plan_jobs(args: argparse.Namespace) -> list[Job]:
    """In the order of their worth: should time run out, the last ones are missing."""
    wanted = set(args.sections)
    jobs = [models_job(args)]
    if args.vllm_bundle is not None and wanted & {"off", "prefill"}:
        jobs.append(vllm_job(args, 0, in_order(wanted & {"off", "prefill"})))
    if wanted - {"startup"}:
        environment = {"TRITON_CACHE_DIR": str(args.folder / "triton")}
        jobs.append(Job("faser", "FASER", environment=environment, sections=in_order(wanted - {"startup"})))
    if args.vllm_bundle is not None and "speculation" in wanted:
        jobs += [vllm_job(args, length, ("speculation",)) for length in args.vllm_lengths]
    return jobs + (startup_jobs(args) if "startup" in wanted else [])


def in_order(sections: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(sections, key=SECTIONS.index))


def python_path(first: Path | None = None) -> str:
    return os.pathsep.join(str(path) for path in (first, ROOT, os.environ.get("PYTHONPATH")) if path)


def models_job(args: argparse.Namespace) -> Job:
    return Job("models", "the models and the requests", environment={"PYTHONPATH": python_path(args.python_path)})


def vllm_job(args: argparse.Namespace, length: int, sections: tuple[str, ...]) -> Job:
    environment = {
        "PYTHONPATH": python_path(args.vllm_bundle),
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_CACHE_ROOT": str(args.folder / "vllm-cache"),
        "TRITON_CACHE_DIR": str(args.folder / "vllm-cache" / "triton"),
    }
    return Job("vllm", f"vLLM, {mode_name(length)}", ("--only-length", str(length)), environment, sections)


def startup_jobs(args: argparse.Namespace) -> list[Job]:
    """What is not known from the other sections: FASER without a draft, cold and warm, the rest warm."""
    fresh = args.folder / "triton-off"

    def faser(length: int, cache: Path, state: str, forgets: Path | None = None) -> Job:
        flags, environment = ("--only-length", str(length)), {"TRITON_CACHE_DIR": str(cache)}
        return Job("startup", f"start FASER, {mode_name(length)}, {state}", flags, environment, ("startup",), forgets)

    jobs = [faser(0, fresh, "cold", fresh), faser(0, fresh, "warm")]
    if args.vllm_bundle is not None:
        jobs.append(vllm_job(args, 0, ("startup",)))
    return [*jobs, faser(args.pair_length, args.folder / "triton", "warm if it ran before")]


@dataclass
class Command:
    """Runs the jobs, shows what they write to the journal, keeps the summary up to date."""

    args: argparse.Namespace
    journal: Journal
    until: float
    shown: int = 0

    def run(self, job: Job) -> None:
        left = self.until - time.time()
        if left < LEAST_SECONDS[job.worker]:
            why = f"{left:.0f} s left, it would take more; raise --budget-seconds or run fewer sections"
            self.fail(job, why)
            return
        seconds = START_SECONDS[job.worker] + sum(self.args.section_seconds[name] for name in job.sections)
        print(f"── {job.about} (at most {min(left, seconds):.0f} s of {left:.0f} left)", flush=True)
        started = time.time()
        status = self.run_process(job, min(self.until, started + seconds))
        if status == FAILED_INSIDE:
            self.show_log()
        elif status != 0:
            self.fail(job, "took too long and was ended" if status is None else f"ended with status {status}")
        print(f"   {job.about}: {time.time() - started:.0f} s", flush=True)
        wait_for_gpu(self.args.device)

    def run_process(self, job: Job, until: float) -> int | None:
        """Its exit status; None where it took too long. It is ended with its children: vLLM's engine is one."""
        if job.forgets is not None:
            shutil.rmtree(job.forgets, ignore_errors=True)
        with (self.args.out / "h200.log").open("ab") as log:
            command = worker_command(self.args, job, until)
            environment = os.environ | {"PYTHONUNBUFFERED": "1", "PYTHONPATH": python_path()} | dict(job.environment)
            process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT, process_group=0)
            try:
                return self.follow(process, until + GRACE_SECONDS)
            finally:
                end_group(process)
                self.update()

    def follow(self, process: subprocess.Popen[bytes], until: float) -> int | None:
        while time.time() < until:
            with suppress(subprocess.TimeoutExpired):
                return process.wait(0.5)
            self.update()
        return None

    def fail(self, job: Job, why: str) -> None:
        self.journal.add("failed", section=",".join(job.sections) or job.worker, engine=job.about, why=why)
        self.update()
        self.show_log()

    def show_log(self) -> None:
        path = self.args.out / "h200.log"
        print(path.read_bytes()[-3000:].decode(errors="replace") if path.is_file() else "", flush=True)

    def update(self) -> None:
        """Show what is new and write it where it will be found should this process be killed."""
        records = read_journal(self.journal.path)
        if len(records) == self.shown:
            return
        for record in records[self.shown :]:
            print(f"   {describe(record)}", flush=True)
        self.shown = len(records)
        write_results(self.args, records)


def worker_command(args: argparse.Namespace, job: Job, until: float) -> list[str]:
    own = ["--worker", job.worker, "--until", str(until), "--spawned", str(time.time()), "--session", str(args.session)]
    # the last of a flag counts
    sections = ["--sections", ",".join(job.sections)] if job.sections else []
    return [sys.executable, "-m", "benchmarks.h200", *args.given, *own, *sections, *job.flags]


def write_results(args: argparse.Namespace, records: Sequence[Figures]) -> None:
    partial = args.out / "h200.json.partial"
    partial.write_text(json.dumps(summarize(records)), encoding="utf-8")
    partial.rename(args.out / "h200.json")
    if args.out != args.folder:
        shutil.copy(args.folder / "h200.jsonl", args.out / "h200.jsonl")


def end_group(process: subprocess.Popen[Any]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def wait_for_gpu(device: str, seconds: float = 20.0, most_mib: float = 3000.0) -> None:
    """Until the last process's memory is free again, as far as anybody says."""
    until = time.time() + seconds
    while device == "cuda" and time.time() < until:
        used = gpu_memory_mib()
        if used is None or used < most_mib:
            return
        time.sleep(0.5)


def gpu_memory_mib() -> float | None:
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        return float(subprocess.run(query, capture_output=True, timeout=10, check=True).stdout.split()[0])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None


def run_all(args: argparse.Namespace, journal: Journal) -> int:
    """0: every process did its work. Without models there is nothing to do."""
    command = Command(args, journal, args.until, len(read_journal(journal.path)))
    for job in plan_jobs(args):
        command.run(job)
        if job.worker == "models":
            note_models(args, journal)
            command.update()
            if not (args.folder / "models.json").is_file():
                break
    return FAILED_INSIDE if failures(read_journal(journal.path), args.session) else 0


def note_models(args: argparse.Namespace, journal: Journal) -> None:
    if (args.folder / "models.json").is_file():
        journal.add("models", **read_json(args.folder / "models.json"))


def run_worker(args: argparse.Namespace, journal: Journal) -> int:
    if args.device == "cpu":  # before anybody imports Triton
        os.environ["TRITON_INTERPRET"] = "1"
    runs = {"models": ensure_models, "faser": run_faser, "startup": run_startup, "vllm": run_vllm}
    worker = Worker(args, journal, "vllm" if args.worker == "vllm" else "faser", args.until)
    with worker.section(args.worker):
        if args.by_hand and args.worker in ("faser", "startup"):
            ensure_models(worker)
            note_models(args, journal)
        runs[args.worker](worker)
    return FAILED_INSIDE if worker.failed else 0


def report(args: argparse.Namespace, records: Sequence[Figures]) -> None:
    write_results(args, records)
    summary = summarize(records)
    print(tables(summary))
    print(json.dumps({"benchmark": "h200", "seconds": round(time.time() - args.started, 1), **summary}), flush=True)


def note_setup(args: argparse.Namespace, journal: Journal) -> None:
    names = (*SIZES, "random_prompts", "seed", "acceptance", "batch_tokens", "target_shape", "draft_shape")
    journal.add("setup", sections=args.sections, **{name: getattr(args, name) for name in names})


# ── the flags ────────────────────────────────────────────────────────────────────────────────────────────────────────


def numbers(text: str) -> list[int]:
    return [int(each) for each in text.split(",")]


def section_list(text: str) -> list[str]:
    names = text.split(",")
    unknown = [name for name in names if name not in SECTIONS]
    if unknown:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: expected some of {','.join(SECTIONS)}")
    return names


def section_seconds(text: str) -> dict[str, float]:
    pairs = dict(part.split("=") for part in text.split(",") if part)
    section_list(",".join(pairs) or SECTIONS[0])
    return SECTION_SECONDS | {name: float(seconds) for name, seconds in pairs.items()}


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--sections", type=section_list, default=list(SECTIONS), help="some of them, with commas between (all)")
    add("--budget-seconds", type=float, default=560.0, help="for everything (560)")
    add("--section-seconds", type=section_seconds, default=dict(SECTION_SECONDS), help="e.g. off=60,speculation=240")
    add("--folder", type=Path, help="for models, requests, caches and the journal; kept")
    add("--out", type=Path, help="for the results ($OUT, else --folder)")
    add("--earlier", type=Path, help="a journal of before, whose figures are shown as well")
    add("--fresh", action="store_true", help="forget the journal in --folder")
    add("--report", action="store_true", help="measure nothing: the tables of the journal")
    add_model_flags(parser)
    add_size_flags(parser)
    add("--vllm-bundle", type=Path, help="vLLM, unpacked; without it FASER is measured alone")
    add("--vllm-trace", help="the peer's vllm_trace.py")
    add("--vllm-batch-tokens", type=int, help="vLLM's max_num_batched_tokens (its own choice)")
    add("--vllm-gpu-memory", type=float, default=0.85, help="share of the GPU's memory for vLLM (0.85)")
    for hidden, kind in {"--until": float, "--spawned": float, "--session": float, "--only-length": int}.items():
        add(hidden, type=kind, help=argparse.SUPPRESS)
    add("--worker", choices=("models", "faser", "startup", "vllm"), help="one of the processes, run by hand")
    return parser


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    default_draft = ROOT / "faser" / "drafts" / "smollm2-135m-16.gguf"
    add("--target", type=Path, metavar="TARGET.gguf", help="the small target (the default model, where installed)")
    add("--draft", type=Path, default=default_draft, metavar="DRAFT.gguf", help="its draft (the one of 16 layers)")
    add("--target-shape", default="llama-8b", help="of tools/inflate.py (llama-8b)")
    add("--draft-shape", default="llama-1b")
    add("--python-path", type=Path, help="folder with the package gguf, where it is not installed")
    add("--prompts", type=Path, help="JSONL with `turns`, plain or .xz")
    add("--random-prompts", action="store_true", help="random token ids instead: no real acceptance")
    add("--acceptance", type=float, help="accept drafts with this probability whatever they say, both systems")
    add("--seed", type=int, default=0)


def add_size_flags(parser: argparse.ArgumentParser) -> None:
    """Those without a default here have one in SIZES or TINY_SIZES."""
    add = parser.add_argument
    add("--tiny", action="store_true", help="tiny random models and sizes: does it all run?")
    add("--device", choices=("cuda", "cpu"))
    add("--batches", type=numbers)
    add("--lengths", type=numbers, help="of FASER's drafts")
    add("--vllm-lengths", type=numbers, help="each takes a start of vLLM")
    add("--pair-length", type=int, help="FASER starts with the graphs of this length")
    add("--prompt", type=int, help="tokens")
    add("--output", type=int, help="tokens")
    add("--prefill", help="prompts x tokens")
    add("--draft-rows", type=numbers)
    add("--repeats", type=int, help="at most, while there is time")
    add("--max-model-len", type=int)
    add("--batch-tokens", type=int, help="FASER's max_batch_tokens (its own choice)")


def parse_args(given: Sequence[str]) -> argparse.Namespace:
    parser = make_parser()
    args = parser.parse_args(given)
    args.given, args.started = list(given), time.time()
    for name, value in (TINY_SIZES if args.tiny else SIZES).items():
        setattr(args, name, value if getattr(args, name) is None else getattr(args, name))
    default_folder = Path(tempfile.gettempdir()) / ("faser-h200-tiny" if args.tiny else "faser-h200")
    args.folder = (args.folder or default_folder).absolute()
    args.out = (args.out or Path(os.environ.get("OUT") or args.folder)).absolute()
    args.by_hand = args.worker is not None and args.spawned is None
    args.session = args.session or args.started
    args.spawned = args.spawned or PROCESS_STARTED
    args.until = args.until or args.started + args.budget_seconds
    args.only_length = args.only_length or 0
    make_absolute(args)
    if args.worker is None and not args.report:
        refuse(parser, args)
    return args


def make_absolute(args: argparse.Namespace) -> None:
    """Workers start in the root of the repository."""
    for name in ("target", "draft", "prompts", "python_path", "vllm_bundle", "vllm_trace", "earlier"):
        value = getattr(args, name)
        if value is not None:
            setattr(args, name, Path(value).absolute())


def refuse(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Everything that would otherwise fail after minutes on a GPU."""
    for path in (args.target, args.draft, args.prompts, args.python_path, args.vllm_bundle, args.vllm_trace):
        if path is not None and not path.exists():
            parser.error(f"{path} does not exist")
    if (args.vllm_bundle is None) != (args.vllm_trace is None):
        parser.error("vLLM takes --vllm-bundle and --vllm-trace together")
    made = (args.folder / "models.json").is_file()
    if not made and not args.tiny and args.prompts is None and not args.random_prompts:
        parser.error("give --prompts FILE, or --random-prompts")


def main(given: Sequence[str] | None = None) -> int:
    args = parse_args(sys.argv[1:] if given is None else given)
    for folder in (args.folder, args.out):
        folder.mkdir(parents=True, exist_ok=True)
    journal = Journal(args.folder / "h200.jsonl", args.session, prints=args.worker is not None)
    if args.fresh and (args.worker is None or args.by_hand):
        journal.path.unlink(missing_ok=True)
    if args.worker is not None and not args.by_hand:
        return run_worker(args, journal)
    status = 0
    if not args.report:
        note_setup(args, journal)
        status = run_worker(args, journal) if args.by_hand else run_all(args, journal)
    earlier = read_journal(args.earlier) if args.earlier is not None else []
    report(args, earlier + read_journal(journal.path))
    return status


if __name__ == "__main__":
    sys.exit(main())
