"""Every policy at every load: is `faser` as good as the best of them at each?

Closed loops of 1 to 256 requests (Spec-Bench prompts of 128 tokens and all categories, answers of 64 to 192 tokens,
greedy), one engine, every policy in turn. Then what each part of `faser` brings (ablation.py). vLLM is not part of it:
`trace` has both. The profile of the engine is written beside the results. The last lines compare `faser` with the best
of the others and with the best single length.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from benchmarks.lib import documents
from benchmarks.lib.documents import Runs, load_faser, new_document, vocabulary_of
from benchmarks.lib.journal import Journal
from benchmarks.lib.processes import Runner, worker_process
from benchmarks.lib.table import integers

if TYPE_CHECKING:
    from faser.engine.engine import Engine
    from faser.policy import Policy
    from faser.traffic.document import Document, Workload

POLICIES = "off,fixed:1..5,table,goodput,ema,adaspec,tetris,nightjar,faser-gp,faser"
# requests of a closed loop, by concurrency: some seconds each, more where few tokens make the figures noisy
REQUESTS = {1: 20, 2: 32, 4: 48, 8: 64, 16: 96, 32: 160, 64: 224, 128: 320, 256: 512}
WARM_UP = 8
MOST_SECONDS = 560.0


def add_flags(add: Callable[..., Any]) -> None:
    documents.add_flags(add)
    add("--policies", default=POLICIES, help=f"({POLICIES})")
    add("--concurrency", type=integers, default=(1, 4, 16, 64, 128, 256), help="requests open at a time")
    add("--ablation", type=integers, default=(1, 16, 128), help="concurrency for the parts of faser; empty: none")
    add("--requests", type=int, help="of every closed loop (some seconds' worth)")


def complete(args: argparse.Namespace) -> None:
    from faser.bench.command import expand_policies

    if args.tiny:
        args.concurrency, args.ablation, args.requests = (1, 2), (2,), args.requests or 3
    args.max_running = args.max_running or max((*args.concurrency, *args.ablation, 2))
    args.max_model_len = args.max_model_len or (64 if args.tiny else 2048)
    args.policies = expand_policies(args.policies)


@dataclass
class Loops:
    """An engine and the closed loops it plays."""

    engine: Engine
    runs: Runs
    workloads: dict[int, Workload]  # by concurrency

    def play(self, name: str, policy: Policy, concurrency: int, *, ragged: bool = True, warms: bool = True) -> None:
        from faser.bench.results import run_document
        from faser.traffic.play import play, take_policy, warm_ups_of
        from faser.traffic.workload import Load

        self.runs.check_time()
        take_policy(self.engine, policy)
        self.engine.executor.drafter.ragged = ragged  # type: ignore[attr-defined]
        workload = self.workloads[concurrency]
        if warms:
            warm, _ = warm_ups_of(workload, max(WARM_UP, concurrency))
            play(self.engine, warm, name, stopped=self.runs.is_over)
        run = play(self.engine, workload, name, stopped=self.runs.is_over)
        made = run_document(run, policy=name, load=Load(concurrency=concurrency), repeat=0, slo=None)
        self.runs.add(replace(made, records=()))


def open_loops(args: argparse.Namespace, journal: Journal) -> Loops:
    """The loaded engine, and the workload of every concurrency."""
    from benchmarks.lib.ablation import LADDER
    from faser.traffic.workload import Load, WorkloadOptions, make_workload

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
    document = new_document(args, loaded)
    document = replace(document, about={**document.about, "ablation": list(LADDER)})
    profile: Any = getattr(loaded.engine.cost, "profile", None)
    if profile is not None:
        profile.save(args.out / "profile.json")
        print(f"profile: {profile.accuracy}", flush=True)
    return Loops(loaded.engine, Runs(args, journal, document), workloads)


def run(args: argparse.Namespace, runner: Runner) -> None:
    runner.run(worker_process(args, "faser", MOST_SECONDS), args.until)


def work(args: argparse.Namespace, journal: Journal) -> None:
    from benchmarks.lib.ablation import LADDER, Ablated
    from faser.policy import make_policy

    loops = open_loops(args, journal)
    for size in args.concurrency:
        for name in args.policies:
            journal.attempt(f"{size}", name, lambda name=name, size=size: loops.play(name, make_policy(name), size))
    for size in args.ablation:
        for name, parts in LADDER.items():
            policy = Ablated(name, parts)
            journal.attempt(
                f"ablation {size}",
                name,
                lambda n=name, p=policy, s=size, r=parts.ragged: loops.play(n, p, s, ragged=r),
            )


def save(args: argparse.Namespace, journal: Journal) -> None:
    documents.save(args, journal)


def finish(args: argparse.Namespace, journal: Journal) -> int:
    return documents.finish(args, journal, remark=comparison)


def comparison(document: Document) -> str:
    """`faser` against the best of the others at every concurrency, and against every other policy on average."""
    from benchmarks.lib.ablation import LADDER

    found = {
        (run.system, run.concurrency): float(run.summary["output_tokens_per_s"] or 0.0)
        for run in document.runs
        if run.concurrency is not None and not run.partial
    }
    sizes = sorted({size for system, size in found if system == "faser"})
    others = sorted({system for system, _ in found} - {"faser", *LADDER})
    lines = ["requests  faser tok/s  best other       tok/s   ratio  of off  of the best length"]
    for size in sizes:
        rivals = {name: found[name, size] for name in others if (name, size) in found}
        if not rivals:
            continue
        own, best = found["faser", size], max(rivals, key=lambda name: rivals[name])
        fixed = max((value for name, value in rivals.items() if name.startswith("fixed:")), default=own)
        lines.append(
            f"{size:8}  {own:11.0f}  {best:12} {rivals[best]:9.0f}  {own / rivals[best]:6.3f}"
            f"  {own / rivals.get('off', own):6.3f}  {own / fixed:6.3f}"
        )
    for name in others:
        ratios = [found["faser", size] / found[name, size] for size in sizes if (name, size) in found]
        if ratios:
            lines.append(f"faser over {name:12} on average {sum(ratios) / len(ratios):6.3f}, least {min(ratios):6.3f}")
    return "\n".join(lines)
