"""`faser simulate`: simulated machines as the systems of a benchmark; the rest is `faser bench`.

Every run has fresh replicas at second 0 and a policy that has learned nothing. All policies get the same requests and
the same outcomes of drafts; a repeat draws others. Imports no torch and no tokenizer: prompts are lengths and
categories.
"""

from __future__ import annotations

import argparse
from collections import Counter
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

from faser.bench.command import Asked, Interrupts, Session, make_workloads, play_and_report, prepare_results
from faser.bench.table import aligned, shown_rate
from faser.cost.profile import Profile
from faser.engine.engine import Engine
from faser.errors import ConfigError
from faser.sim.cluster import play_cluster
from faser.sim.fluid import play_fluid
from faser.sim.oracle import AcceptanceModel, parse_acceptance
from faser.sim.replica import Machine, load_profile, make_replica
from faser.sim.throughput import ThroughputTable, measure_throughput
from faser.traffic.document import Document, Run, RunDocument, Workload
from faser.traffic.play import Stopped, Update, play
from faser.traffic.workload import Vocabulary

MAX_EXACT_REPLICAS = 16  # more than this are simulated as a flow, not step by step
REPEAT_SEED_STRIDE = 1_000_003  # between the seeds of two repeats


def simulate(args: argparse.Namespace) -> int:
    """Returns the exit status, with the meanings of `faser bench`."""
    asked = Asked.of(args)
    _refuse(args, asked)
    profile, acceptance = load_profile(args.profile), parse_acceptance(args.acceptance)
    machine = make_machine(args, profile)
    write_report = prepare_results(args)
    systems = [SimulatedSystem(name, machine, acceptance, args.seed, args.replicas) for name in asked.policies]
    blank = Vocabulary(1, args.max_model_len, None, is_blank=True)
    played = make_workloads(asked, blank if asked.workload is None else None)
    session = Session(asked, systems, played, Interrupts(), keeps_records=args.out is not None)
    remark = per_gpu_table if args.replicas > 1 else None
    return play_and_report(args, session, _about(args, profile, machine), write_report, remark)


def _refuse(args: argparse.Namespace, asked: Asked) -> None:
    if args.replicas < 1:
        raise ConfigError(f"--replicas {args.replicas}: expected an integer of at least 1")
    if any(other.url is not None for other in asked.against):
        raise ConfigError("--against: no server plays in simulated time; give a file of its results")
    if args.replicas > MAX_EXACT_REPLICAS and args.concurrency is not None:
        raise ConfigError(f"--concurrency is simulated step by step, with {MAX_EXACT_REPLICAS} --replicas at most")
    if args.replicas > MAX_EXACT_REPLICAS and args.offload != "off":
        raise ConfigError(f"--offload is simulated step by step, with {MAX_EXACT_REPLICAS} --replicas at most")


def make_machine(args: argparse.Namespace, profile: Profile) -> Machine:
    known, window = profile.about.get("kv_tokens"), args.draft_window
    if window == "auto":
        window = profile.about.get("draft_window")
    return Machine(
        profile=profile,
        max_running=args.max_running,
        max_batch_tokens=args.max_batch_tokens,
        max_step_ms=args.max_step_ms,
        max_model_len=args.max_model_len,
        kv_tokens=args.kv_tokens if args.kv_tokens is not None or known is None else int(known),
        page_size=args.page_size,
        runs_ahead=not args.no_run_ahead,
        overlap=args.overlap,
        offload=args.offload,
        draft_window=None if window in (None, "off") else int(window),
        noise=args.noise,
    )


def _about(args: argparse.Namespace, profile: Profile, machine: Machine) -> dict[str, Any]:
    """What the report says of the machine, so that nobody takes a simulation for a measurement."""
    device = profile.about.get("device") or profile.about.get("hardware") or args.profile
    is_exact = args.replicas <= MAX_EXACT_REPLICAS
    return {
        "simulated": True,
        "profile": args.profile,
        "model": profile.about.get("model") or profile.about.get("target"),
        "draft": profile.about.get("draft"),
        "device": f"{device}, simulated",
        "acceptance": args.acceptance,
        "replicas": args.replicas,
        "method": "every step" if is_exact else "steps of one replica, then a flow of requests",
        "max_running": machine.max_running,
        "max_batch_tokens": machine.max_batch_tokens,
        "max_step_ms": machine.max_step_ms,
        "kv_tokens": machine.num_pages * machine.page_size,
        "runs_ahead": machine.runs_ahead,
        "overlap": machine.overlap,
        "offload": machine.offload,
        "draft_window": machine.draft_window,
        "noise": machine.noise or None,
    }


@dataclass
class SimulatedSystem:
    """One policy on `num_replicas` machines of one kind."""

    name: str
    machine: Machine
    acceptance: AcceptanceModel
    seed: int = 0
    num_replicas: int = 1
    _num_played: Counter[int] = field(default_factory=Counter)  # by id of the workload
    _throughput: ThroughputTable | None = None

    @property
    def policy(self) -> str:
        return self.name

    def warm_up(self, workload: Workload, size: int, stopped: Stopped) -> None:
        """A simulated machine is always warm."""

    def play(self, workload: Workload, stopped: Stopped, update: Update) -> Run:
        seed = self.seed + REPEAT_SEED_STRIDE * self._num_played[id(workload)]
        self._num_played[id(workload)] += 1
        if self.num_replicas > MAX_EXACT_REPLICAS:
            return self._play_fluid(workload, stopped, update)
        oracle = self.acceptance.oracle([item.category for item in workload.items], seed)
        replicas = [make_replica(self.machine, self.name, oracle, seed + number) for number in range(self.num_replicas)]
        if self.num_replicas > 1:
            return play_cluster(replicas, workload, self.name, stopped=stopped, update=update)
        engine, clock = replicas[0].engine, replicas[0].time.clock
        run = play(engine, workload, self.name, clock=clock, stopped=stopped, update=update)
        return replace(run, about={"preemptions": engine.scheduler.num_preemptions, **_moves(engine)})

    def _play_fluid(self, workload: Workload, stopped: Stopped, update: Update) -> Run:
        if workload.concurrency is not None:
            raise ConfigError(f"a closed loop is simulated step by step, with {MAX_EXACT_REPLICAS} --replicas at most")
        if self._throughput is None:
            self._throughput = measure_throughput(
                self.machine, self.name, workload, self.acceptance, self.seed, stopped
            )
        if self._throughput is None:
            return Run(self.name, (), 0.0, partial=True)
        return play_fluid(
            self.machine, self._throughput, self.num_replicas, workload, self.name, stopped=stopped, update=update
        )


def _moves(engine: Engine) -> dict[str, Any]:
    """What a run says of the draft's moves."""
    if engine.residency is None:
        return {}
    stats = engine.residency.stats
    return {"draft_moves": stats.moves, "draft_away_s": stats.away_seconds}


def per_gpu_table(document: Document) -> str:
    """Tokens per second and busy share of one replica, for every load and system: medians of the repeats."""
    found: dict[tuple[str, float | None, int | None], list[RunDocument]] = {}
    for run in document.runs:
        if "busy_share" in run.about:
            found.setdefault(run.group, []).append(run)
    rows = [("per GPU", "load", "tok/s", "busy %")]
    for (system, rate, concurrency), runs in found.items():
        tokens, busy = (
            median(run.about[name] or 0.0 for run in runs) for name in ("output_tokens_per_s_per_gpu", "busy_share")
        )
        load = f"{shown_rate(rate)}/s" if rate is not None else f"{concurrency} open"
        rows.append((system, load, f"{tokens:.1f}", f"{100 * busy:.1f}"))
    return aligned(rows)
