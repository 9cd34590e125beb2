"""Runs of FASER, and of vLLM beside it, as one document of `faser bench`: what `trace` and `policies` share.

FASER is imported inside functions: vLLM's process loads this module too.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.lib.journal import Journal, atomic_write, failures, read_json

if TYPE_CHECKING:
    from faser.bench.systems import Loaded
    from faser.traffic.document import Document, RunDocument
    from faser.traffic.workload import Vocabulary

SHOWN = ("requests", "lost", "output_tokens_per_s", "latency_per_token_mean", "ttft_mean", "tpot_mean", "mean_length")


def add_flags(add: Callable[..., Any]) -> None:
    add("--max-running", type=int, help="requests in one batch (256)")
    add("--max-model-len", type=int, help="tokens")
    add("--slo", default="ttft=1,tpot=0.03", help="seconds, for goodput (ttft=1,tpot=0.03)")
    add("--seed", type=int, default=0)


def load_faser(args: argparse.Namespace) -> Loaded:
    """An engine with the graphs of the longest drafts, and with a profile if any policy needs one.

    Graphs of other lengths are captured when they are first used.
    """
    from faser.bench.systems import load_engine
    from faser.config import EngineOptions
    from faser.policy import make_policy

    def demand(name: str) -> tuple[bool, int]:
        policy = make_policy(name)
        return getattr(policy, "needs_cost", False), getattr(policy, "max_length", 0)

    options = EngineOptions(
        policy=max(args.policies, key=demand),
        device=args.device,
        max_running=args.max_running,
        max_model_len=args.max_model_len,
        max_batch_tokens=args.batch_tokens,
        prefix_caching=False,
        profiling="full",
    )
    return load_engine(str(args.folder / "target"), str(args.folder / "draft"), options, chat=False)


def vocabulary_of(args: argparse.Namespace, loaded: Loaded) -> Vocabulary:
    """The small model's: the folders hold no tokenizer."""
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
    return Document(("python3", "-m", "benchmarks.h200", *args.given), created, about, {}, (), ())


def read_document(path: Path) -> Document:
    from faser.traffic.document import Document

    return Document.from_dict(read_json(path))


@dataclass
class Runs:
    """FASER's runs. The document is written after each of them."""

    args: argparse.Namespace
    journal: Journal
    document: Document

    def is_over(self) -> bool:
        return time.time() > float(self.args.until)

    def check_time(self) -> None:
        if self.is_over():
            raise TimeoutError("no time left for it")

    def has(self, system: str, rate: float) -> bool:
        return any((run.system, run.rate) == (system, rate) for run in self.document.runs)

    def save(self) -> None:
        atomic_write(self.args.work / "faser.json", json.dumps(self.document.to_dict()))

    def add(self, run: RunDocument) -> None:
        self.document = replace(self.document, runs=(*self.document.runs, run))
        self.save()
        figures = {name: run.summary[name] for name in SHOWN}
        load = {"rate": run.rate} if run.concurrency is None else {"concurrency": run.concurrency}
        self.journal.add("run", system=run.system, **load, partial=run.partial, **figures)


Add = Callable[[argparse.Namespace, "Document"], "Document"]  # adds the runs of another system
Remark = Callable[["Document"], str]  # text below the tables


def collect(args: argparse.Namespace, journal: Journal, add: Add | None) -> Document | None:
    """Everything measured so far as one document; None before FASER's first run."""
    from faser.traffic.summary import group_runs

    path = args.work / "faser.json"
    if not path.is_file():
        return None
    document = read_document(path)
    document = document if add is None else add(args, document)
    if not document.runs:
        return None
    about = {**document.about, "failed": failures(journal.read())}
    command = ("python3", "-m", "benchmarks.h200", *args.given)
    return replace(document, command=command, about=about, groups=group_runs(document.runs))


def save(args: argparse.Namespace, journal: Journal, add: Add | None = None) -> None:
    shutil.copy(journal.path, args.out / journal.path.name)
    document = collect(args, journal, add)
    if document is not None:
        atomic_write(args.out / "results.json", json.dumps(document.to_dict()))


def finish(args: argparse.Namespace, journal: Journal, add: Add | None = None, remark: Remark | None = None) -> int:
    """0: nothing failed in this call."""
    document = collect(args, journal, add)
    if document is not None:
        found = document
        journal.attempt("report", "faser.bench", lambda: write_results(args.out, found, remark))
    failed = failures(journal.read())
    for each in failed:
        print(f"FAILED {each}")
    if document is None:
        print(json.dumps({"benchmark": args.experiment, "failed": failed}), flush=True)
    else:
        show(document, remark)
    return 1 if failed else 0


def write_results(folder: Path, document: Document, remark: Remark | None) -> None:
    """The document, the tables, and the report if jinja2 is installed."""
    folder.mkdir(parents=True, exist_ok=True)
    atomic_write(folder / "results.json", json.dumps(document.to_dict()) + "\n")
    atomic_write(folder / "tables.txt", tables(document, remark) + "\n")
    if importlib.util.find_spec("jinja2") is None:
        print("no report: jinja2 is not installed; --report-only makes it elsewhere", file=sys.stderr)
        return
    from benchmarks.lib.ablation import explained
    from faser.bench.report.page import write_report

    write_report(folder, explained(document))


def show(document: Document, remark: Remark | None) -> None:
    print(tables(document, remark), end="\n\n")
    print(json.dumps(document.without_details().to_dict()), flush=True)


def tables(document: Document, remark: Remark | None) -> str:
    from faser.bench.table import render

    systems = {run.system for run in document.runs}
    reference = next((name for name in ("vLLM off", "off") if name in systems), None)  # of the ratios
    text = render(document, reference)
    return text if remark is None else f"{text}\n\n{remark(document)}"
