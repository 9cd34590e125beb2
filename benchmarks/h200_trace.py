"""Real traffic on an H200: from which load on does speculation cost more than it brings, in FASER and in vLLM?

The Azure conversation trace, an hour of it within seconds (`--span`), at 0.2 to 1.5 of the rate that saturates FASER
without speculation. Models are the 8B and the 1B of benchmarks/h200.py, prompts are Spec-Bench texts of all categories,
cut or padded to the trace's lengths. FASER plays every load under every policy, vLLM (off, and at its best length) the
same files after it, each in a process of its own; both greedy, end tokens ignored, without prefix caching. All are
judged by the definitions of docs/metrics.md: a request's time counts from when it was due.

    python3 -m benchmarks.h200_trace --target TARGET.gguf [--vllm-bundle DIR --vllm-trace vllm_trace.py]
        [--policies off,fixed:2,fixed:4] [--vllm-lengths 0,2] [--loads 0.2,0.5,0.8,1.1,1.5] [--span SECONDS]
        [--rate SATURATION] [--python-path DIR] [--folder DIR] [--budget-seconds 560] [--resume]
    python3 -m benchmarks.h200_trace --report-only DIR [--folder DIR]
    python3 -m benchmarks.h200_trace --tiny --device cpu      # tiny models: does it all run?

The saturation rate is that of requests ending in a closed loop of --max-running, while it is full. The span is, unless
given, the longest that fits the budget, 20 s at most. Every run is in $OUT/results.json (else in --folder) as soon as
it is over: one document of `faser bench`, vLLM's runs in it as further systems. What fails is listed and the rest goes
on. --resume adds what is missing to the last call with the same folder. At the end come tables (also tables.txt), the
report (report.html) and, as the last line, the document without its details.

On the device, after the three transfers of benchmarks/h200.py (target.aa, target.ab, vllm.aa), each on one line. The
fourth call carries the rest of build/h200 and plays FASER, the fifth carries nothing and plays vLLM:

    cp -r build/h200/{target.ac,vllm.ab,gguf,vllm_trace.py} /tmp/h200/ && cd /tmp/h200 &&
        cat target.a? > TARGET.gguf && mkdir -p bundle && cat vllm.a? | tar xJ -C bundle && cd - &&
        python3 -m benchmarks.h200_trace --folder /tmp/h200/work --target /tmp/h200/TARGET.gguf --python-path /tmp/h200
    python3 -m benchmarks.h200_trace --folder /tmp/h200/work --target /tmp/h200/TARGET.gguf --python-path /tmp/h200
        --vllm-bundle /tmp/h200/bundle --vllm-trace /tmp/h200/vllm_trace.py --resume

All in one call, which leaves a span of 4 to 6 s, is the fourth with the two flags of vLLM. The report again, with
images, where there is a Chromium; FILES is where the device's files lie:

    .venv/bin/python -m benchmarks.h200_trace --report-only FILES --folder docs/results/h200-azure

At the top this module imports the standard library alone: it is also the driver inside vLLM's process.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.h200_common import (
    ROOT,
    Command,
    Job,
    Journal,
    VllmEngine,
    python_path,
    read_json,
    refuse_missing,
    shared_parser,
    vllm_environment,
    vllm_settings,
)
from benchmarks.h200_report import Figures, failures, latest, read_journal

if TYPE_CHECKING:
    from faser.bench.systems import Loaded, PolicySystem
    from faser.engine.engine import Engine
    from faser.traffic.document import Document, RunDocument
    from faser.traffic.records import Workload
    from faser.traffic.summary import Slo
    from faser.traffic.workload import Vocabulary, WorkloadOptions

DEFAULTS: dict[str, Any] = {
    "policies": ("off", "fixed:2", "fixed:4"), "vllm_lengths": (0, 2), "loads": (0.2, 0.5, 0.8, 1.1, 1.5),
    "max_prompt": 1024, "max_output": 256, "max_running": 256, "max_model_len": 4096,
}  # fmt: skip
TINY: dict[str, Any] = {
    "policies": ("off", "fixed:1"), "vllm_lengths": (0, 2), "loads": (0.5, 1.5), "span": 0.2,
    "max_prompt": 24, "max_output": 6, "max_running": 2, "max_model_len": 64,
}  # fmt: skip
TRAFFIC = (
    "trace", "loads", "rate", "span", "max_prompt", "max_output", "max_running", "max_model_len", "batch_tokens",
    "seed", "tiny",
)  # fmt: skip
PROMPTS = ROOT / "faser" / "traffic" / "data" / "specbench.jsonl.xz"

MOST_SECONDS = {"models": 150.0, "faser": 520.0, "vllm": 520.0}  # of a process; a hung one is ended
LEAST_SECONDS = {"models": 20.0, "faser": 60.0, "vllm": 80.0}  # with less left none is started
START_SECONDS = {"faser": 60.0, "vllm": 110.0}  # before the first run; FASER finds the saturation rate, too
RUN_SECONDS = 3.0  # of a run besides its span: warm-up, the last answers
LEAST_SPAN, MOST_SPAN = 4.0, 20.0
LOOP_ROUNDS = 3  # requests of the closed loop, for each that is open
WARM_FIRST, WARM_EACH, WARM_TOKENS = 64, 8, 16  # requests before a system's first run, and before every one; tokens


def vllm_name(length: int) -> str:
    return f"vLLM K={length}" if length else "vLLM off"


def slowness(system: str) -> float:
    """Times FASER without speculation when saturated, to leave time for what queues up."""
    if system in ("off", "vLLM off"):
        return 1.0 if system == "off" else 1.15
    return 2.0 if system.startswith("vLLM") else 1.25


@dataclass(frozen=True)
class Work:
    """What one process plays: every load through some systems."""

    worker: str
    systems: tuple[str, ...]
    length: int = 0  # of vLLM's drafts

    @property
    def name(self) -> str:
        return self.systems[0] if self.worker == "vllm" else self.worker

    def fixed_seconds(self, loads: Sequence[float]) -> float:
        return START_SECONDS[self.worker] + RUN_SECONDS * len(loads) * len(self.systems)

    def num_spans(self, loads: Sequence[float]) -> float:
        """Above saturation a run takes longer than its span."""
        return sum(max(1.0, load * slowness(system)) for system in self.systems for load in loads)

    def seconds(self, loads: Sequence[float], span: float) -> float:
        return self.fixed_seconds(loads) + span * self.num_spans(loads)


def plan_work(args: argparse.Namespace) -> list[Work]:
    """What has not been played yet."""
    lengths = args.vllm_lengths if args.vllm_bundle is not None else ()
    wanted = [Work("faser", args.policies), *(Work("vllm", (vllm_name(length),), length) for length in lengths)]
    return [work for work in wanted if not is_played(args, work)]


def is_played(args: argparse.Namespace, work: Work) -> bool:
    if not args.files.plan.is_file():
        return False
    rates = args.files.rates()
    if work.worker == "vllm":
        return all(args.files.records(work.length, load).is_file() for load in rates)
    runs = read_json(args.files.faser)["runs"] if args.files.faser.is_file() else []
    whole = {(run["system"], run["rate"]) for run in runs if not run["partial"]}
    return all((system, rate) in whole for system in work.systems for rate in rates.values())


def fitting_span(works: Sequence[Work], loads: Sequence[float], seconds: float) -> float:
    """The longest with which all of it takes no more than so many seconds."""
    left = seconds - sum(work.fixed_seconds(loads) for work in works)
    spans = sum(work.num_spans(loads) for work in works)
    return round(min(MOST_SPAN, max(LEAST_SPAN, left / max(1.0, spans))), 1)


# ── files ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Files:
    """What the processes leave for each other."""

    folder: Path

    @property
    def plan(self) -> Path:
        """The traffic, the saturation rate and the rate of every load; there once all workloads are."""
        return self.folder / "plan.json"

    @property
    def faser(self) -> Path:
        """FASER's runs, a document."""
        return self.folder / "faser.json"

    def workload(self, load: float) -> Path:
        return self.folder / f"workload-{load:g}.jsonl"

    def records(self, length: int, load: float) -> Path:
        """Of one run of vLLM, a line for each request."""
        return self.folder / f"vllm-{length}-{load:g}.jsonl"

    def rates(self) -> dict[float, float]:
        """By load."""
        return dict(read_json(self.plan)["rates"])


def write_whole(path: Path, text: str) -> None:
    """Nobody ever reads a part of it."""
    new = path.with_name(f"{path.name}.new")
    new.write_text(text, encoding="utf-8")
    new.replace(path)


def traffic_of(args: argparse.Namespace) -> Figures:
    found: Figures = json.loads(json.dumps({name: getattr(args, name) for name in TRAFFIC}))
    return found


# ── the process of FASER ─────────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class FaserRuns:
    """Plays the loads under every policy; the document is written after each run."""

    args: argparse.Namespace
    journal: Journal
    document: Document
    slo: Slo
    runs: list[RunDocument] = field(default_factory=list)

    def is_over(self) -> bool:
        return time.time() > float(self.args.until)

    def save(self) -> None:
        write_whole(self.args.files.faser, json.dumps(replace(self.document, runs=tuple(self.runs)).to_dict()))

    def has(self, system: str, rate: float) -> bool:
        return any((run.system, run.rate) == (system, rate) for run in self.runs)

    def play(self, system: PolicySystem, load: float, rate: float, workload: Workload) -> None:
        from faser.bench.results import run_document
        from faser.traffic.play import no_update
        from faser.traffic.workload import Load

        if self.has(system.name, rate):
            return
        if self.is_over():
            raise TimeoutError("no time left for it")
        system.warm_up(workload, WARM_EACH, self.is_over)
        run = system.play(workload, self.is_over, no_update)
        self.runs.append(run_document(run, policy=system.policy, load=Load(rate), repeat=0, slo=self.slo))
        self.save()
        shown = ("requests", "lost", "output_tokens_per_s", "latency_per_token_mean", "ttft_mean", "tpot_mean")
        figures = {name: self.runs[-1].summary[name] for name in shown}
        self.journal.add("run", system=system.name, load=load, rate=rate, partial=run.partial, **figures)
        if run.partial:
            raise TimeoutError("cut short")


def run_faser(args: argparse.Namespace, journal: Journal) -> None:
    from faser.bench.systems import PolicySystem
    from faser.traffic.summary import Slo

    loaded = load_faser(args)
    off = PolicySystem(loaded.engine, "off", 0.0)
    runs = FaserRuns(args, journal, new_document(args, loaded), Slo.parse(args.slo))
    if args.files.faser.is_file():
        kept = read_document(args.files.faser)
        runs.document = replace(runs.document, workload=kept.workload)
        runs.runs = [run for run in kept.runs if not run.partial]
    else:
        played = make_plan(args, journal, off, vocabulary_of(args, loaded))
        runs.document = replace(runs.document, workload=played)
    runs.save()
    systems = [PolicySystem(loaded.engine, name, 0.0) for name in args.policies]
    play_faser(runs, ladder(loaded.engine, args.policies) if args.mechanisms else systems)


def ladder(engine: Engine, policies: Iterable[str]) -> list[PolicySystem]:
    """Policies by themselves; then `faser`, one mechanism more each time.

    The last two overlap as the engine does by itself, and wherever anybody drafts.
    """
    from benchmarks.ablation import Rung
    from faser.policy.overlap import Overlap

    exits = engine.exits
    alone = [Rung(engine, name, 0.0, name, None, None) for name in policies]
    rungs = {
        "+ early exit": (exits, None),
        "+ overlap": (exits, engine.scheduler.overlap),
        "+ overlap on": (exits, Overlap("on", leads=True)),
    }
    return [*alone, *(Rung(engine, name, 0.0, "faser", *parts) for name, parts in rungs.items())]


def play_faser(runs: FaserRuns, systems: Sequence[PolicySystem]) -> None:
    """Policies are innermost, so that a slow drift meets all alike."""
    from faser.traffic.workload import load_workload

    args, journal = runs.args, runs.journal
    rates = args.files.rates()
    workloads = {load: load_workload(args.files.workload(load)) for load in rates}
    systems = [system for system in systems if not all(runs.has(system.name, rate) for rate in rates.values())]
    for system in systems:
        heaviest = workloads[max(rates)]
        journal.attempt("warm-up", system.name, partial(system.warm_up, heaviest, WARM_FIRST, runs.is_over))
    for load, rate in rates.items():
        for system in systems:
            work = partial(runs.play, system, load, rate, workloads[load])
            journal.attempt(f"load {load:g}", system.name, work)


def load_faser(args: argparse.Namespace) -> Loaded:
    """With the graphs of the longest drafts; those of others are captured when first asked for.

    And with a profile, where any policy goes by one.
    """
    from faser.bench.systems import load_engine
    from faser.config import EngineOptions
    from faser.policy import make_policy

    def asks_most(name: str) -> tuple[bool, int]:
        policy = make_policy(name)
        return getattr(policy, "needs_cost", False), getattr(policy, "max_length", 0)

    options = EngineOptions(
        policy=max(args.policies, key=asks_most),
        device=args.device,
        max_running=args.max_running,
        max_model_len=args.max_model_len,
        max_batch_tokens=args.batch_tokens,
        prefix_caching=False,
        profiling="full",
    )
    return load_engine(str(args.folder / "target"), str(args.folder / "draft"), options, chat=False)


def vocabulary_of(args: argparse.Namespace, loaded: Loaded) -> Vocabulary:
    """The folders hold no tokenizer: it is the small model's."""
    from faser.bench.systems import load_vocabulary

    if args.tiny:
        return loaded.vocabulary
    return load_vocabulary(None if args.target is None else str(args.target), args.max_model_len, chat=True)


def new_document(args: argparse.Namespace, loaded: Loaded) -> Document:
    from faser.bench.systems import describe_machine
    from faser.traffic.document import Document
    from faser.traffic.summary import Slo

    about = {**loaded.about, **describe_machine(), "slo": dict(Slo.parse(args.slo).most)}
    if not args.tiny:
        about |= {"model": "SmolLM2 in the shape of Llama 8B", "draft": "its 16 layers in the shape of Llama 1B"}
    created = datetime.now(UTC).isoformat(timespec="seconds")
    return Document((), created, about, {}, (), ())


def read_document(path: Path) -> Document:
    from faser.traffic.document import Document

    return Document.from_dict(read_json(path))


def make_plan(args: argparse.Namespace, journal: Journal, off: PolicySystem, vocabulary: Vocabulary) -> Figures:
    """Find the rate, write the workloads, and return what they are."""
    from faser.traffic.traces import Timing
    from faser.traffic.workload import Load, WorkloadOptions, describe_loads, make_workload, save_workload

    traffic = WorkloadOptions(
        trace=args.trace,
        timing=Timing(span=args.span),
        max_prompt=args.max_prompt,
        max_output=args.max_output,
        prompts="random" if args.tiny else "specbench",
        seed=args.seed,
    )
    saturation = args.rate or saturation_rate(args, off, traffic, vocabulary)
    journal.add("saturation", rate=saturation, measured=args.rate is None, span=args.span)
    # few digits: documents round, and the loads of two systems must be the same number
    rates = {load: float(f"{saturation * load:.4g}") for load in args.loads}
    played = [(Load(rate), make_workload(traffic, Load(rate), vocabulary)) for rate in rates.values()]
    for load, (_, workload) in zip(rates, played, strict=True):
        save_workload(workload, args.files.workload(load))
    plan = {"traffic": traffic_of(args), "saturation": saturation, "rates": list(rates.items())}
    write_whole(args.files.plan, json.dumps(plan))
    return describe_loads(played)


def saturation_rate(
    args: argparse.Namespace, off: PolicySystem, traffic: WorkloadOptions, vocabulary: Vocabulary
) -> float:
    """Requests that end a second in a closed loop, from the first end until nobody is left to send."""
    from faser.traffic.workload import Load, make_workload

    size: int = args.max_running
    number, ended = LOOP_ROUNDS * size, 0
    # drawn from all of the trace, as the loads are: its beginning has longer answers
    workload = replace(make_workload(traffic, Load(number / args.span), vocabulary), concurrency=size)

    def is_enough() -> bool:
        """From then on nobody takes the place of those that end."""
        return ended >= number - size or time.time() > float(args.until)

    def note(count: int) -> None:
        nonlocal ended
        ended = count

    off.warm_up(workload, WARM_FIRST, lambda: False)
    records = off.play(workload, is_enough, note).records
    ends = [record.end for record in records if record.end is not None]
    later = [end for end in ends if end > min(ends)]
    if not later:
        raise TimeoutError(f"{ended} of {number} requests of the closed loop ended in time; give --rate")
    return len(later) / (max(later) - min(ends))


# ── the process of vLLM ──────────────────────────────────────────────────────────────────────────────────────────────


def run_vllm(args: argparse.Namespace, journal: Journal) -> None:
    length: int = args.only_length
    started = time.time()
    limits = {name: getattr(args, name) for name in ("max_running", "max_model_len", "batch_tokens")}
    rates = args.files.rates()
    vllm = VllmEngine(args.vllm_trace, args.folder, length, **limits)
    try:
        version = str(getattr(sys.modules.get("vllm"), "__version__", "untold"))
        about = {"version": version, "start_s": time.time() - started, **vllm_settings(vllm.engine)}
        journal.add("note", engine="vllm", length=length, **about)
        vllm.play(short(read_workload(args, max(rates))[:WARM_FIRST]), args.until - time.time())
        for load, rate in rates.items():
            work = partial(play_vllm, args, journal, vllm, load, rate)
            journal.attempt(f"load {load:g}", vllm_name(length), work)
    finally:
        vllm.shutdown()


def play_vllm(args: argparse.Namespace, journal: Journal, vllm: VllmEngine, load: float, rate: float) -> None:
    path = args.files.records(vllm.length, load)
    if path.is_file():
        return
    workload = read_workload(args, load)
    left = args.until - time.time()
    if left < workload[-1]["arrival"]:
        raise TimeoutError("no time left for it")
    vllm.play(short(workload[:WARM_EACH]), left)
    records = vllm.play(workload, args.until - time.time())
    lines = (record | {"category": request["category"]} for record, request in zip(records, workload, strict=True))
    write_whole(path, "".join(json.dumps(line) + "\n" for line in lines))
    seconds = max(record["finished_at"] for record in records)
    tokens = sum(len(record["token_ids"]) for record in records)
    figures = {"requests": len(records), "output_tokens_per_s": tokens / seconds}
    journal.add("run", system=vllm_name(vllm.length), load=load, rate=rate, **figures)


def read_workload(args: argparse.Namespace, load: float) -> list[Figures]:
    return [json.loads(line) for line in args.files.workload(load).read_text(encoding="utf-8").splitlines()]


def short(requests: Iterable[Figures]) -> list[Figures]:
    """All at once, few tokens: a warm-up."""
    return [one | {"arrival": 0.0, "max_tokens": min(one["max_tokens"], WARM_TOKENS)} for one in requests]


# ── the command ──────────────────────────────────────────────────────────────────────────────────────────────────────


def models_job(args: argparse.Namespace) -> Job:
    """The one of benchmarks/h200.py."""
    given = {"folder": args.folder, "device": args.device, "draft": args.draft, "prompts": PROMPTS}
    flags = ["--worker=models", *(f"--{name}={value}" for name, value in given.items())]
    flags += [f"--target={args.target}"] if args.target is not None else []
    flags += ["--tiny"] if args.tiny else []
    environment = {"PYTHONPATH": python_path(args.python_path)}
    least, most = LEAST_SECONDS["models"], MOST_SECONDS["models"]
    return Job("models", "benchmarks.h200", tuple(flags), least, most, environment)


def job_of(args: argparse.Namespace, work: Work) -> Job:
    own = {"worker": work.worker, "only-length": work.length, "span": args.span, "policies": ",".join(args.policies)}
    flags = (*args.given, *(f"--{name}={value}" for name, value in own.items()))
    if work.worker == "vllm":
        environment = vllm_environment(args.vllm_bundle, args.folder)
    else:
        # gguf, for the tokenizer of the small model
        environment = {"PYTHONPATH": python_path(args.python_path), "TRITON_CACHE_DIR": str(args.folder / "triton")}
    least, most = LEAST_SECONDS[work.worker], MOST_SECONDS[work.worker]
    return Job(work.name, "benchmarks.h200_trace", flags, least, most, environment)


def run_all(args: argparse.Namespace, journal: Journal) -> None:
    def save() -> None:
        shutil.copy(journal.path, args.out / "trace.jsonl")
        document = collect(args, journal)
        if document is not None:
            write_whole(args.out / "results.json", json.dumps(document.to_dict()))

    command = Command(journal, args.out / "trace.log", args.device, save, len(read_journal(journal.path)))
    journal.add("call", command=" ".join(args.given))
    if not command.run(models_job(args), args.until):
        return
    works = plan_work(args)
    args.span = args.span or fitting_span(works, args.loads, args.until - time.time())
    for number, work in enumerate(works):
        later = sum(each.seconds(args.loads, args.span) for each in works[number + 1 :])
        command.run(job_of(args, work), until_of(args.until, work.seconds(args.loads, args.span), later))
        if not args.files.plan.is_file():
            return


def until_of(end: float, own: float, later: float) -> float:
    """What those after it leave, and at least its share: where time is short, it is short for all."""
    left = end - time.time()
    return time.time() + max(left - later, left * own / (own + later))


def collect(args: argparse.Namespace, journal: Journal) -> Document | None:
    """Everything measured so far as one document; None where that is nothing."""
    from faser.bench.results import read_against
    from faser.traffic.summary import Slo, group_runs
    from faser.traffic.workload import Load

    if not args.files.faser.is_file():
        return None
    document, plan = read_document(args.files.faser), read_json(args.files.plan)
    runs, about = list(document.runs), {**document.about, "saturation_rate": plan["saturation"]}
    records, unsaid = read_journal(journal.path), ("kind", "session", "engine", "length")
    for (length,), note in sorted(latest(records, "note", "length").items()):
        about[vllm_name(length)] = {name: note[name] for name in note if name not in unsaid}
        for load, rate in plan["rates"]:
            path = args.files.records(length, load)
            if path.is_file():
                runs += read_against(path, vllm_name(length), [Load(rate)], Slo.parse(args.slo))
    if not runs:
        return None
    about["failed"] = failed_of(records)
    command = ("python3", "-m", "benchmarks.h200_trace", *args.given)
    return replace(document, command=command, about=about, runs=tuple(runs), groups=group_runs(runs))


def failed_of(records: Sequence[Figures]) -> list[str]:
    return [f"{each['engine']}, {each['section']}: {each['why']}" for each in failures(records)]


def finish(args: argparse.Namespace, journal: Journal) -> int:
    """0: nothing failed in this call."""
    document = collect(args, journal)
    if document is not None:
        journal.attempt("report", "faser.bench", partial(write_results, args.out, document))
    failed = failed_of(read_journal(journal.path))
    for each in failed:
        print(f"FAILED {each}")
    if document is not None:
        show(document)
    else:
        print(json.dumps({"benchmark": "h200_trace", "failed": failed}), flush=True)
    return 1 if failed else 0


def write_results(folder: Path, document: Document) -> None:
    """The document, the tables, and the report where there is what draws it."""
    from faser.bench.table import render

    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / "results.json", json.dumps(document.to_dict()) + "\n")
    write_whole(folder / "tables.txt", render(document, reference(document)) + "\n")
    if importlib.util.find_spec("jinja2") is None:
        print("no report: jinja2 is not installed; --report-only makes it elsewhere", file=sys.stderr)
        return
    from benchmarks.ablation import explained
    from faser.bench.report import write_report

    write_report(folder, explained(document))


def show(document: Document) -> None:
    from faser.bench.table import render

    print(render(document, reference(document)), end="\n\n")
    print(json.dumps(document.without_details().to_dict()), flush=True)


def reference(document: Document) -> str | None:
    """What ratios are taken against."""
    systems = {run.system for run in document.runs}
    return next((name for name in ("vLLM off", "off") if name in systems), None)


# ── the flags ────────────────────────────────────────────────────────────────────────────────────────────────────────


def words(text: str) -> tuple[str, ...]:
    return tuple(each.strip() for each in text.split(","))


def numbers(text: str) -> tuple[float, ...]:
    return tuple(dict.fromkeys(positive(each) for each in text.split(",")))


def lengths(text: str) -> tuple[int, ...]:
    return tuple(int(each) for each in text.split(","))


def positive(text: str) -> float:
    number = float(text)
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text}: expected a number above 0")
    return number


def make_parser() -> argparse.ArgumentParser:
    parser = shared_parser(__doc__)
    add = parser.add_argument
    add("--vllm-lengths", type=lengths, help="of vLLM's drafts; each takes a start of it (0,2)")
    add("--policies", type=words, help="of FASER (off,fixed:2,fixed:4)")
    add("--mechanisms", action="store_true", help="policies by themselves, and `faser` with early exit and overlap")
    add("--trace", default="azure-conv", help="as in faser bench (azure-conv)")
    add("--loads", type=numbers, help="of the saturation rate (0.2,0.5,0.8,1.1,1.5)")
    add("--rate", type=positive, help="the saturation rate, requests per second (measured)")
    add("--span", type=positive, help="seconds the trace is squeezed into (what fits the budget, at most 20)")
    add("--max-prompt", type=int, help="tokens; longer prompts are cut (1024)")
    add("--max-output", type=int, help="tokens; longer answers are cut (256)")
    add("--max-running", type=int, help="requests in one batch, both systems (256)")
    add("--max-model-len", type=int, help="tokens (4096)")
    add("--slo", default="ttft=1,tpot=0.03", help="seconds, for goodput (ttft=1,tpot=0.03)")
    add("--seed", type=int, default=0)
    add("--folder", type=Path, help="for models, caches and what is measured; that of h200.py will do")
    add("--resume", action="store_true", help="play what the last call with this folder did not")
    add("--report-only", type=Path, metavar="DIR", help="measure nothing: the report of DIR/results.json")
    add("--worker", choices=("faser", "vllm"), help=argparse.SUPPRESS)
    return parser


def parse_args(given: Sequence[str]) -> argparse.Namespace:
    parser = make_parser()
    args = parser.parse_args(given)
    args.given, args.started = list(given), time.time()
    for name, value in (TINY if args.tiny else DEFAULTS).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    default = args.report_only or Path(tempfile.gettempdir()) / ("faser-h200-tiny" if args.tiny else "faser-h200")
    args.folder = (args.folder or default).absolute()
    args.files = Files(args.folder / "trace")
    args.out = args.folder if args.report_only else Path(os.environ.get("OUT") or args.folder).absolute()
    args.until = args.until or args.started + args.budget_seconds
    if args.worker is None:
        refuse(parser, args)
    return args


def refuse(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Everything that would otherwise fail after minutes on a GPU."""
    from faser.errors import ConfigError
    from faser.policy import make_policy
    from faser.traffic.summary import Slo
    from faser.traffic.traces import read_trace

    report = None if args.report_only is None else args.report_only / "results.json"
    refuse_missing(parser, args, report)
    try:
        args.policies = tuple(dict.fromkeys(make_policy(name).name for name in args.policies))
        Slo.parse(args.slo)
        read_trace(args.trace)
    except ConfigError as error:
        parser.error(str(error))
    if args.resume:
        refuse_other_traffic(parser, args)


def refuse_other_traffic(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """The span and the rate are those of before unless given."""
    if not args.files.plan.is_file():
        parser.error(f"--resume: {args.files.folder} holds no workloads; leave it out")
    before = read_json(args.files.plan)["traffic"]
    args.span = args.span or before["span"]
    args.rate = args.rate or before["rate"]
    other = [name for name, value in traffic_of(args).items() if value != before[name]]
    if other:
        told = ", ".join(f"--{name.replace('_', '-')} {before[name]}" for name in other)
        parser.error(f"--resume: the last call had {told}; give the same, or leave --resume out")


def main(given: Sequence[str] | None = None) -> int:
    args = parse_args(sys.argv[1:] if given is None else given)
    if args.report_only is not None:
        document = read_document(args.report_only / "results.json")
        write_results(args.out, document)
        show(document)
        return 0
    journal = Journal(args.files.folder / "trace.jsonl", args.session or args.started)
    if args.worker is not None:
        {"faser": run_faser, "vllm": run_vllm}[args.worker](args, journal)
        return 0
    if not args.resume:
        shutil.rmtree(args.files.folder, ignore_errors=True)
    for folder in (args.files.folder, args.out):
        folder.mkdir(parents=True, exist_ok=True)
    run_all(args, journal)
    return finish(args, journal)


if __name__ == "__main__":
    sys.exit(main())
