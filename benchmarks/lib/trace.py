"""Real traffic: from which load on does speculation cost more than it brings, in FASER and in vLLM?

The Azure conversation trace, an hour of it within seconds (`--span`), at 0.2 to 1.5 of the rate that saturates FASER
without speculation. Prompts are Spec-Bench texts of all categories, cut or padded to the trace's lengths. FASER plays
every load under every policy, then vLLM (off, and at its best length) plays the same files, each in a process of its
own; both greedy, end tokens ignored, without prefix caching. All are measured by the definitions of docs/metrics.md: a
request's time counts from when it was due.

The saturation rate is the rate at which requests end in a closed loop of --max-running while it is full. The span is,
unless given, the longest that fits the budget, 20 s at most. vLLM's runs are further systems of the document.
--resume adds what is missing to the last call with the same folder.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.lib import documents
from benchmarks.lib.documents import Runs, load_faser, new_document, read_document, vocabulary_of
from benchmarks.lib.journal import Figures, Journal, atomic_write, latest, read_json
from benchmarks.lib.processes import Runner, worker_process
from benchmarks.lib.table import integers
from benchmarks.lib.vllm import VllmEngine, vllm_settings

if TYPE_CHECKING:
    from faser.bench.systems import PolicySystem
    from faser.engine.engine import Engine
    from faser.traffic.document import Document, Workload
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

MOST_SECONDS = 520.0  # of a process; then it is ended
START_SECONDS = {"faser": 60.0, "vllm": 110.0}  # before the first run; FASER also finds the saturation rate
RUN_SECONDS = 3.0  # of a run besides its span: warm-up, the last answers
LEAST_SPAN, MOST_SPAN = 4.0, 20.0
LOOP_ROUNDS = 3  # requests of the closed loop, for each that is open
WARM_FIRST, WARM_EACH, WARM_TOKENS = 64, 8, 16  # requests before a system's first run, and before every one; tokens


def vllm_name(length: int) -> str:
    return f"vLLM K={length}" if length else "vLLM off"


def slowness(system: str) -> float:
    """Assumed slowdown against FASER without speculation under saturation: time for the queue to empty."""
    if system in ("off", "vLLM off"):
        return 1.0 if system == "off" else 1.15
    return 2.0 if system.startswith("vLLM") else 1.25


@dataclass(frozen=True)
class Work:
    """What one process plays: every load through its systems."""

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
    if not plan_file(args).is_file():
        return False
    rates, path = rates_of(args), args.work / "faser.json"
    if work.worker == "vllm":
        return all(records_file(args, work.length, load).is_file() for load in rates)
    runs = read_json(path)["runs"] if path.is_file() else []
    whole = {(run["system"], run["rate"]) for run in runs if not run["partial"]}
    return all((system, rate) in whole for system in work.systems for rate in rates.values())


def fitting_span(works: Sequence[Work], loads: Sequence[float], seconds: float) -> float:
    """The longest span with which all work fits into `seconds`."""
    left = seconds - sum(work.fixed_seconds(loads) for work in works)
    spans = sum(work.num_spans(loads) for work in works)
    return round(min(MOST_SPAN, max(LEAST_SPAN, left / max(1.0, spans))), 1)


# ── files that the processes leave for each other ────────────────────────────────────────────────────────────────────


def plan_file(args: argparse.Namespace) -> Path:
    """The traffic, the saturation rate and the rate of every load; written last, after all workloads."""
    return Path(args.work / "plan.json")


def workload_file(args: argparse.Namespace, load: float) -> Path:
    return Path(args.work / f"workload-{load:g}.jsonl")


def records_file(args: argparse.Namespace, length: int, load: float) -> Path:
    """Of one run of vLLM, a line for each request."""
    return Path(args.work / f"vllm-{length}-{load:g}.jsonl")


def rates_of(args: argparse.Namespace) -> dict[float, float]:
    """Requests per second, by load."""
    return dict(read_json(plan_file(args))["rates"])


def traffic_of(args: argparse.Namespace) -> Figures:
    found: Figures = json.loads(json.dumps({name: getattr(args, name) for name in TRAFFIC}))
    return found


# ── the process of FASER ─────────────────────────────────────────────────────────────────────────────────────────────


def run_faser(args: argparse.Namespace, journal: Journal) -> None:
    from faser.bench.systems import PolicySystem

    loaded = load_faser(args)
    runs = Runs(args, journal, new_document(args, loaded))
    if (args.work / "faser.json").is_file():
        kept = read_document(args.work / "faser.json")
        whole = tuple(run for run in kept.runs if not run.partial)
        runs.document = replace(runs.document, workload=kept.workload, runs=whole)
    else:
        off = PolicySystem(loaded.engine, "off", 0.0)
        runs.document = replace(runs.document, workload=make_plan(args, journal, off, vocabulary_of(args, loaded)))
    runs.save()
    systems = [PolicySystem(loaded.engine, name, 0.0) for name in args.policies]
    play_faser(runs, ladder(loaded.engine, args.policies) if args.mechanisms else systems)


def play_load(runs: Runs, system: PolicySystem, rate: float, workload: Workload) -> None:
    from faser.bench.results import run_document
    from faser.traffic.play import no_update
    from faser.traffic.summary import Slo
    from faser.traffic.workload import Load

    if runs.has(system.name, rate):
        return
    runs.check_time()
    system.warm_up(workload, WARM_EACH, runs.is_over)
    run = system.play(workload, runs.is_over, no_update)
    runs.add(run_document(run, policy=system.policy, load=Load(rate), repeat=0, slo=Slo.parse(runs.args.slo)))
    if run.partial:
        raise TimeoutError("cut short")


def play_faser(runs: Runs, systems: Sequence[PolicySystem]) -> None:
    """Policies are the inner loop, so that a slow drift of the machine affects all of them alike."""
    from faser.traffic.workload import load_workload

    args, journal = runs.args, runs.journal
    rates = rates_of(args)
    workloads = {load: load_workload(workload_file(args, load)) for load in rates}
    systems = [system for system in systems if not all(runs.has(system.name, rate) for rate in rates.values())]
    for system in systems:
        heaviest = workloads[max(rates)]
        journal.attempt("warm-up", system.name, partial(system.warm_up, heaviest, WARM_FIRST, runs.is_over))
    for load, rate in rates.items():
        for system in systems:
            work = partial(play_load, runs, system, rate, workloads[load])
            journal.attempt(f"load {load:g}", system.name, work)


def ladder(engine: Engine, policies: Iterable[str]) -> list[PolicySystem]:
    """Policies by themselves; then `faser` with one more mechanism each time.

    The last two overlap where the engine expects it to pay, and in every step that drafts.
    """
    from benchmarks.lib.ablation import Rung
    from faser.policy.overlap import Overlap

    exits = engine.exits
    alone = [Rung(engine, name, 0.0, name, None, None) for name in policies]
    rungs = {
        "+ early exit": (exits, None),
        "+ overlap": (exits, engine.scheduler.overlap),
        "+ overlap on": (exits, Overlap("on", leads=True)),
    }
    return [*alone, *(Rung(engine, name, 0.0, "faser", *parts) for name, parts in rungs.items())]


def make_plan(args: argparse.Namespace, journal: Journal, off: PolicySystem, vocabulary: Vocabulary) -> Figures:
    """Find the saturation rate, write the workloads, and return their description."""
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
    # four digits: documents round, and two systems must have the same number for a load
    rates = {load: float(f"{saturation * load:.4g}") for load in args.loads}
    played = [(Load(rate), make_workload(traffic, Load(rate), vocabulary)) for rate in rates.values()]
    for load, (_, workload) in zip(rates, played, strict=True):
        save_workload(workload, workload_file(args, load))
    plan = {"traffic": traffic_of(args), "saturation": saturation, "rates": list(rates.items())}
    atomic_write(plan_file(args), json.dumps(plan))
    return describe_loads(played)


def saturation_rate(
    args: argparse.Namespace, off: PolicySystem, traffic: WorkloadOptions, vocabulary: Vocabulary
) -> float:
    """Requests that end per second in a closed loop, from the first end until none is left to send."""
    from faser.traffic.workload import Load, make_workload

    size: int = args.max_running
    number, ended = LOOP_ROUNDS * size, 0
    # from all of the trace, as the loads are: its beginning has longer answers
    workload = replace(make_workload(traffic, Load(number / args.span), vocabulary), concurrency=size)

    def is_enough() -> bool:
        """From then on no request replaces one that ends."""
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
    rates = rates_of(args)
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
    path = records_file(args, vllm.length, load)
    if path.is_file():
        return
    workload = read_workload(args, load)
    left = args.until - time.time()
    if left < workload[-1]["arrival"]:
        raise TimeoutError("no time left for it")
    vllm.play(short(workload[:WARM_EACH]), left)
    records = vllm.play(workload, args.until - time.time())
    lines = (record | {"category": request["category"]} for record, request in zip(records, workload, strict=True))
    atomic_write(path, "".join(json.dumps(line) + "\n" for line in lines))
    seconds = max(record["finished_at"] for record in records)
    tokens = sum(len(record["token_ids"]) for record in records)
    figures = {"requests": len(records), "output_tokens_per_s": tokens / seconds}
    journal.add("run", system=vllm_name(vllm.length), rate=rate, **figures)


def read_workload(args: argparse.Namespace, load: float) -> list[Figures]:
    return [json.loads(line) for line in workload_file(args, load).read_text(encoding="utf-8").splitlines()]


def short(requests: Iterable[Figures]) -> list[Figures]:
    """The requests of a warm-up: all at once, few tokens."""
    return [one | {"arrival": 0.0, "max_tokens": min(one["max_tokens"], WARM_TOKENS)} for one in requests]


# ── the experiment ───────────────────────────────────────────────────────────────────────────────────────────────────


def add_flags(add: Callable[..., Any]) -> None:
    documents.add_flags(add)
    add("--vllm-lengths", type=integers, help="of vLLM's drafts; each takes a start of it (0,2)")
    add("--policies", type=words, help="of FASER (off,fixed:2,fixed:4)")
    add("--mechanisms", action="store_true", help="policies by themselves, and `faser` with early exit and overlap")
    add("--trace", default="azure-conv", help="as in faser bench (azure-conv)")
    add("--loads", type=numbers, help="of the saturation rate (0.2,0.5,0.8,1.1,1.5)")
    add("--rate", type=positive, help="the saturation rate, requests per second (measured)")
    add("--span", type=positive, help="seconds the trace is squeezed into (what fits the budget, at most 20)")
    add("--max-prompt", type=int, help="tokens; longer prompts are cut (1024)")
    add("--max-output", type=int, help="tokens; longer answers are cut (256)")
    add("--resume", action="store_true", help="play what the last call with this folder did not")


def words(text: str) -> tuple[str, ...]:
    return tuple(each.strip() for each in text.split(","))


def numbers(text: str) -> tuple[float, ...]:
    return tuple(dict.fromkeys(positive(each) for each in text.split(",")))


def positive(text: str) -> float:
    number = float(text)
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text}: expected a number above 0")
    return number


def complete(args: argparse.Namespace) -> None:
    """Defaults; refuses what would otherwise fail after minutes on a GPU. vLLM's process gets everything by flags."""
    for name, value in (TINY if args.tiny else DEFAULTS).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if args.worker is not None:
        return
    from faser.policy import make_policy
    from faser.traffic.summary import Slo
    from faser.traffic.traces import read_trace

    Slo.parse(args.slo)
    args.policies = tuple(dict.fromkeys(make_policy(name).name for name in args.policies))
    read_trace(args.trace)
    if args.resume:
        refuse_other_traffic(args)


def refuse_other_traffic(args: argparse.Namespace) -> None:
    """Span and rate are those of the last call unless given."""
    if not plan_file(args).is_file():
        raise ValueError(f"--resume: {args.work} holds no workloads; leave it out")
    before = read_json(plan_file(args))["traffic"]
    args.span = args.span or before["span"]
    args.rate = args.rate or before["rate"]
    other = [name for name, value in traffic_of(args).items() if value != before[name]]
    if other:
        listed = ", ".join(f"--{name.replace('_', '-')} {before[name]}" for name in other)
        raise ValueError(f"--resume: the last call had {listed}; give the same, or leave --resume out")


def run(args: argparse.Namespace, runner: Runner) -> None:
    works = plan_work(args)
    args.span = args.span or fitting_span(works, args.loads, args.until - time.time())
    for number, work in enumerate(works):
        later = sum(each.seconds(args.loads, args.span) for each in works[number + 1 :])
        own = {"only_length": work.length, "span": args.span, "policies": ",".join(args.policies)}
        process = worker_process(args, work.worker, MOST_SECONDS, work.name, **own)
        runner.run(process, until_of(args.until, work.seconds(args.loads, args.span), later))
        if not plan_file(args).is_file():
            return


def work(args: argparse.Namespace, journal: Journal) -> None:
    {"faser": run_faser, "vllm": run_vllm}[args.worker](args, journal)


def until_of(end: float, own: float, later: float) -> float:
    """The time that later processes leave, and at least its proportional share."""
    left = end - time.time()
    return time.time() + max(left - later, left * own / (own + later))


def add_vllm(args: argparse.Namespace, document: Document) -> Document:
    """The document with vLLM's runs and settings."""
    from faser.bench.results import read_against
    from faser.traffic.summary import Slo
    from faser.traffic.workload import Load

    plan, runs = read_json(plan_file(args)), list(document.runs)
    about = {**document.about, "saturation_rate": plan["saturation"]}
    hidden = ("kind", "session", "engine", "length")
    for (length,), note in sorted(latest(Journal(args.journal, 0.0).read(), "note", "length").items()):
        about[vllm_name(length)] = {name: note[name] for name in note if name not in hidden}
        for load, rate in plan["rates"]:
            path = records_file(args, length, load)
            if path.is_file():
                runs += read_against(path, vllm_name(length), [Load(rate)], Slo.parse(args.slo))
    return replace(document, about=about, runs=tuple(runs))


def save(args: argparse.Namespace, journal: Journal) -> None:
    documents.save(args, journal, add_vllm)


def finish(args: argparse.Namespace, journal: Journal) -> int:
    return documents.finish(args, journal, add_vllm)
