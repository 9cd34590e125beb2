"""Every policy at every load, on an H200: is `faser` as good as the best of them wherever one looks?

Closed loops of 1 to 256 requests over the models of benchmarks/h200_trace.py (8B and 1B shapes, bf16, greedy,
Spec-Bench prompts of 128 tokens and all categories, answers of 64 to 192), one engine, every policy in turn. Then what
each part of `faser` brings (benchmarks/ablation.py). vLLM is not part of it: benchmarks/h200_trace.py has both.

    python3 -m benchmarks.h200_policies --target TARGET.gguf [--folder DIR] [--python-path DIR]
        [--policies off,fixed:1..5,…] [--concurrency 1,4,16,64,128,256] [--ablation 1,16,128] [--budget-seconds 560]
    python3 -m benchmarks.h200_policies --report-only DIR [--folder DIR]
    python3 -m benchmarks.h200_policies --tiny --device cpu      # tiny models: does it all run?

Every run is in $OUT/results.json (else in --folder) as soon as it is over: one document of `faser bench`; the profile
the engine went by is beside it. The last lines say how `faser` stands against the best of the others and against the
best single length. On the device, after the transfers of benchmarks/h200_trace.py:

    python3 -m benchmarks.h200_policies --folder /tmp/h200/work --target /tmp/h200/TARGET.gguf --python-path /tmp/h200
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.ablation import LADDER, Ablated, Parts, explained
from benchmarks.h200_common import Journal, refuse_missing, shared_parser
from benchmarks.h200_trace import load_faser, models_job, new_document, read_document, vocabulary_of, write_whole
from faser.bench.command import expand_policies
from faser.bench.document import Document, RunDocument
from faser.bench.play import play, take_policy, warm_ups_of
from faser.bench.records import Workload
from faser.bench.report import write_report
from faser.bench.results import run_document
from faser.bench.summary import group_runs
from faser.bench.table import render
from faser.bench.workload import Load, WorkloadOptions, make_workload
from faser.engine.engine import Engine
from faser.policy import Policy, make_policy

POLICIES = "off,fixed:1..5,table,goodput,ema,adaspec,tetris,nightjar,faser-gp,faser"
# requests of a closed loop, by how many are open: some seconds each, more where few tokens make chance
REQUESTS = {1: 20, 2: 32, 4: 48, 8: 64, 16: 96, 32: 160, 64: 224, 128: 320, 256: 512}
WARM_UP = 8


@dataclass
class Bench:
    """An engine, and the runs it has played."""

    args: argparse.Namespace
    engine: Engine
    document: Document
    journal: Journal
    workloads: dict[int, Workload]

    def is_over(self) -> bool:
        return time.time() > float(self.args.until)

    def play(self, name: str, policy: Policy, concurrency: int, *, ragged: bool = True, warms: bool = True) -> None:
        if self.is_over():
            raise TimeoutError("no time left for it")
        take_policy(self.engine, policy)
        self.engine.executor.drafter.ragged = ragged  # type: ignore[attr-defined]
        workload = self.workloads[concurrency]
        if warms:
            warm, _ = warm_ups_of(workload, max(WARM_UP, concurrency))
            play(self.engine, warm, name, stopped=self.is_over)
        run = play(self.engine, workload, name, stopped=self.is_over)
        made = run_document(run, policy=name, load=Load(concurrency=concurrency), repeat=0, slo=None)
        self.add(replace(made, records=()))

    def add(self, run: RunDocument) -> None:
        runs = (*self.document.runs, run)
        self.document = replace(self.document, runs=runs, groups=group_runs(runs))
        write_whole(self.args.out / "results.json", json.dumps(self.document.to_dict()) + "\n")
        shown = {name: run.summary[name] for name in ("output_tokens_per_s", "tpot_mean", "mean_length", "acceptance")}
        said = "  ".join(f"{name} {value:.4g}" for name, value in shown.items() if value is not None)
        print(f"{time.time() - self.args.started:6.1f} s  {run.concurrency:4} × {run.system:14} {said}", flush=True)


def open_bench(args: argparse.Namespace, journal: Journal) -> Bench:
    """The engine, loaded, and the workload of every size."""
    loaded = load_faser(args)
    traffic = WorkloadOptions(
        prompt_len=(8, 8) if args.tiny else (128, 128),
        output_len=(2, 6) if args.tiny else (64, 192),
        prompts="random" if args.tiny else "specbench",
        seed=args.seed,
    )
    vocabulary = vocabulary_of(args, loaded)
    workloads = {
        size: make_workload(
            replace(traffic, requests=args.requests or REQUESTS[size]), Load(concurrency=size), vocabulary
        )
        for size in sorted({*args.concurrency, *args.ablation})
    }
    about = {"ablation": list(LADDER)}
    document = new_document(args, loaded)
    command = ("python3", "-m", "benchmarks.h200_policies", *args.given)
    document = replace(document, command=command, about={**document.about, **about})
    save_profile(args, loaded.engine)
    return Bench(args, loaded.engine, document, journal, workloads)


def measure(args: argparse.Namespace, journal: Journal) -> Document:
    bench = open_bench(args, journal)
    for size in args.concurrency:
        for name in args.policies:
            journal.attempt(f"{size}", name, lambda name=name, size=size: bench.play(name, make_policy(name), size))
    for size in args.ablation:
        for name, parts in LADDER.items():
            journal.attempt(f"ablation {size}", name, lambda n=name, p=parts, s=size: play_ablated(bench, n, p, s))
    return bench.document


def play_ablated(bench: Bench, name: str, parts: Parts, size: int) -> None:
    bench.play(name, Ablated(name, parts), size, ragged=parts.ragged)


def save_profile(args: argparse.Namespace, engine: Engine) -> None:
    profile: Any = getattr(engine.cost, "profile", None)
    if profile is not None:
        profile.save(args.out / "profile.json")
        print(f"profile: {profile.accuracy}", flush=True)


# ── what it comes to ─────────────────────────────────────────────────────────────────────────────────────────────────


def throughput(document: Document) -> dict[tuple[str, int], float]:
    """By system and concurrency."""
    return {
        (run.system, run.concurrency): float(run.summary["output_tokens_per_s"] or 0.0)
        for run in document.runs
        if run.concurrency is not None and not run.partial
    }


def standing(document: Document) -> str:
    """How `faser` stands against the best of the others at every size, and against every single length."""
    found = throughput(document)
    sizes = sorted({size for system, size in found if system == "faser"})
    others = sorted({system for system, _ in found} - {"faser", *LADDER})
    lines = ["requests  faser tok/s  best other       tok/s   ratio  of off  of the best length"]
    for size in sizes:
        rivals = {name: found[name, size] for name in others if (name, size) in found}
        if not rivals:
            continue
        mine, best = found["faser", size], max(rivals, key=lambda name: rivals[name])
        fixed = max((value for name, value in rivals.items() if name.startswith("fixed:")), default=mine)
        lines.append(
            f"{size:8}  {mine:11.0f}  {best:12} {rivals[best]:9.0f}  {mine / rivals[best]:6.3f}"
            f"  {mine / rivals.get('off', mine):6.3f}  {mine / fixed:6.3f}"
        )
    for name in others:
        ratios = [found["faser", size] / found[name, size] for size in sizes if (name, size) in found]
        if ratios:
            lines.append(f"faser over {name:12} on average {sum(ratios) / len(ratios):6.3f}, least {min(ratios):6.3f}")
    return "\n".join(lines)


def finish(args: argparse.Namespace, document: Document) -> None:
    document = explained(document)
    text = f"{render(document, 'off')}\n\n{standing(document)}\n"
    write_whole(args.out / "tables.txt", text)
    write_report(args.out, document)
    print(text)
    print(json.dumps(document.without_details().to_dict()), flush=True)


# ── the command ──────────────────────────────────────────────────────────────────────────────────────────────────────


def make_models(args: argparse.Namespace) -> None:
    """In a process of its own, whose memory is then free again."""
    if (args.folder / "target").is_dir() and (args.folder / "draft").is_dir():
        return
    job = models_job(args)
    subprocess.run([sys.executable, "-m", job.module, *job.flags], env={**os.environ, **job.environment}, check=True)


def prepare(args: argparse.Namespace, name: str) -> Journal:
    """Folders and models, and an empty journal of that name."""
    for folder in (args.out, args.folder):
        folder.mkdir(parents=True, exist_ok=True)
    if args.python_path is not None:
        sys.path.insert(0, str(args.python_path))
    make_models(args)
    journal = Journal(args.out / name, args.started)
    journal.path.unlink(missing_ok=True)
    return journal


def status_of(journal: Journal) -> int:
    return 1 if journal.path.exists() and '"failed"' in journal.path.read_text() else 0


def sizes_of(text: str) -> tuple[int, ...]:
    return tuple(int(each) for each in text.split(",") if each)


def parse_args(given: Sequence[str]) -> argparse.Namespace:
    parser = shared_parser(__doc__)
    add = parser.add_argument
    add("--policies", default=POLICIES, help=f"({POLICIES})")
    add("--concurrency", type=sizes_of, default=(1, 4, 16, 64, 128, 256), help="requests open at a time")
    add("--ablation", type=sizes_of, default=(1, 16, 128), help="likewise, for the parts of faser; empty: none")
    add("--requests", type=int, help="of every closed loop (some seconds' worth)")
    add("--max-running", type=int)
    add("--max-model-len", type=int)
    add("--seed", type=int, default=0)
    add("--slo", default="ttft=1,tpot=0.03", help=argparse.SUPPRESS)
    add("--folder", type=Path, help="for models and caches; that of h200_trace.py will do")
    add("--report-only", type=Path, metavar="DIR", help="measure nothing: the report of DIR/results.json")
    args = parser.parse_args(given)
    args.given, args.started = list(given), time.time()
    if args.tiny:
        args.concurrency, args.ablation, args.requests = (1, 2), (2,), args.requests or 3
    args.max_running = args.max_running or max((*args.concurrency, *args.ablation, 2))
    args.max_model_len = args.max_model_len or (64 if args.tiny else 2048)
    default = args.report_only or Path(tempfile.gettempdir()) / ("faser-h200-tiny" if args.tiny else "faser-h200")
    args.folder = (args.folder or default).absolute()
    args.out = args.folder if args.report_only else Path(os.environ.get("OUT") or args.folder).absolute()
    args.until = args.until or args.started + args.budget_seconds
    args.policies = expand_policies(args.policies)
    refuse_missing(parser, args, args.report_only)
    return args


def main(given: Sequence[str] | None = None) -> int:
    args = parse_args(sys.argv[1:] if given is None else given)
    args.out.mkdir(parents=True, exist_ok=True)
    if args.report_only is not None:
        finish(args, read_document(args.report_only / "results.json"))
        return 0
    journal = prepare(args, "policies.jsonl")
    finish(args, measure(args, journal))
    return status_of(journal)


if __name__ == "__main__":
    sys.exit(main())
