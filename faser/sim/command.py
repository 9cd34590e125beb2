"""`faser simulate`: what was asked becomes simulated systems; the rest is `faser bench`.

Knows the options. Imports no torch and no tokenizer: prompts are lengths and categories.
"""

from __future__ import annotations

import argparse
from typing import Any

from faser.bench.command import Asked, Interrupts, Session, make_workloads, play_and_tell, prepare_results
from faser.bench.workload import Vocabulary
from faser.cost.profile import Profile
from faser.errors import ConfigError
from faser.sim.oracle import parse_acceptance
from faser.sim.replica import Machine
from faser.sim.systems import MOST_EXACT, SimulatedSystem, load_profile, per_gpu_table


def simulate(args: argparse.Namespace) -> int:
    """The exit status, as of `faser bench`."""
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
    return play_and_tell(args, session, _about(args, profile, machine), write_report, remark)


def _refuse(args: argparse.Namespace, asked: Asked) -> None:
    if args.replicas < 1:
        raise ConfigError(f"--replicas {args.replicas}: expected an integer of at least 1")
    if any(other.url is not None for other in asked.against):
        raise ConfigError("--against: no server plays in simulated time; give a file of its results")
    if args.replicas > MOST_EXACT and args.concurrency is not None:
        raise ConfigError(f"--concurrency is simulated step by step, with {MOST_EXACT} --replicas at most")


def make_machine(args: argparse.Namespace, profile: Profile) -> Machine:
    known = profile.about.get("kv_tokens")
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
        noise=args.noise,
    )


def _about(args: argparse.Namespace, profile: Profile, machine: Machine) -> dict[str, Any]:
    """What the report says of it, so that nobody takes it for measured."""
    device = profile.about.get("device") or profile.about.get("hardware") or args.profile
    return {
        "simulated": True,
        "profile": args.profile,
        "model": profile.about.get("model") or profile.about.get("target"),
        "draft": profile.about.get("draft"),
        "device": f"{device}, simulated",
        "acceptance": args.acceptance,
        "replicas": args.replicas,
        "method": "every step" if args.replicas <= MOST_EXACT else "steps of one replica, then a flow of requests",
        "max_running": machine.max_running,
        "max_batch_tokens": machine.max_batch_tokens,
        "max_step_ms": machine.max_step_ms,
        "kv_tokens": machine.num_pages * machine.page_size,
        "runs_ahead": machine.runs_ahead,
        "overlap": machine.overlap,
        "noise": machine.noise or None,
    }
