"""`faser bench`: the command line becomes systems, loads and runs; their results become a document.

The order is: refuse what cannot work, load, play, write. Ctrl-C and SIGTERM end the current run; everything measured
until then is still written.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Any

from faser.bench.estimate import MARGIN, SIZES, Estimate, calibrate, default_rate, in_words, rounded_up
from faser.bench.remote import Remote
from faser.bench.results import read_against, run_document
from faser.bench.systems import PolicySystem, RemoteSystem, System, describe_machine, load_engine, load_vocabulary
from faser.bench.table import render
from faser.config import API_KEY_VARIABLE, DEFAULT_POLICY, EngineOptions, resolve_draft
from faser.errors import ConfigError
from faser.limits import HARD_MAX_LENGTH
from faser.policy import make_policy
from faser.progress import progress_bar
from faser.traffic.document import Document, RunDocument, Workload
from faser.traffic.play import REAL_CLOCK, Clock, Update, never, no_update
from faser.traffic.summary import Slo, group_runs
from faser.traffic.traces import Timing
from faser.traffic.workload import (
    Load,
    Vocabulary,
    WorkloadOptions,
    at_rate,
    check_tokens,
    check_traffic,
    describe_loads,
    load_workload,
    make_workload,
    mean_rate,
    own_rate,
    poisson_traffic,
    probe_items,
    save_workload,
)

FAILED = 1  # exit status; after a signal it is 128 + its number, as in a shell

LOAD_OPTIONS = (
    "trace", "arrivals", "concurrency", "workload", "rate", "scale", "loads", "start", "duration", "span", "requests",
)  # fmt: skip
LEAST_REQUESTS = 4  # of the default traffic, on a slow machine too

ReportWriter = Callable[[Path, Document], object]


@dataclass(frozen=True)
class Other:
    """A system to compare with: a server, or a file of results."""

    name: str
    url: str | None = None
    path: Path | None = None

    @classmethod
    def parse(cls, text: str) -> Other:
        """`NAME=URL`, `NAME=FILE`, `URL` or `FILE`."""
        name, _, where = text.rpartition("=")
        if not name or Path(text).exists() or re.match(r"https?://", text):
            name, where = "", text
        if re.match(r"https?://", where):
            return cls(name or Remote(where).name, url=where)
        path = Path(where).expanduser()
        if not path.is_file():
            raise ConfigError(f"--against {where}: no such file; give results, or an address as http://host:port")
        return cls(name or path.stem, path=path)


@dataclass(frozen=True)
class Asked:
    """The command line, checked as far as possible without a model."""

    traffic: WorkloadOptions
    workload: Workload | None  # from a file
    loads: tuple[Load, ...]
    policies: tuple[str, ...]  # empty with --url
    against: tuple[Other, ...]
    slo: Slo | None
    repeats: int
    warmup: int
    is_sized: bool = False  # no load was given: a calibration sets it

    @classmethod
    def of(cls, args: argparse.Namespace) -> Asked:
        for name, least in (("repeats", 1), ("warmup", 0)):
            if getattr(args, name) < least:
                raise ConfigError(f"--{name} {getattr(args, name)}: expected an integer of at least {least}")
        if not 0 < args.request_timeout < float("inf"):
            raise ConfigError(f"--request-timeout {args.request_timeout:g}: expected seconds above 0")
        for option in ("policies", "draft", "acceptance"):
            if args.url is not None and getattr(args, option) is not None:
                raise ConfigError(
                    f"--{option} is for FASER in this process; a server at --url has its own: leave it out"
                )
        traffic = _traffic(args)
        loads, workload = _loads(args, traffic), None
        if args.workload is None:
            check_traffic(traffic, loads)
        else:
            for option in ("trace", "arrivals", "duration", "span", "scale", "max_prompt", "max_output"):
                if getattr(args, option) is not None:
                    name = "--" + option.replace("_", "-")
                    raise ConfigError(f"{name} makes a workload and --workload reads one; give one of them")
            workload = load_workload(Path(args.workload).expanduser())
        return cls(
            traffic=traffic,
            workload=workload,
            loads=loads,
            policies=() if args.url is not None else _policies(args),
            against=tuple(map(Other.parse, args.against)),
            slo=None if args.slo is None else Slo.parse(args.slo),
            repeats=args.repeats,
            warmup=args.warmup,
            is_sized=not any(getattr(args, option) for option in LOAD_OPTIONS),
        )


def _traffic(args: argparse.Namespace) -> WorkloadOptions:
    return WorkloadOptions(
        trace=args.trace,
        arrivals=args.arrivals,
        timing=Timing(args.start, args.duration, args.span, args.scale, repeats=args.repeats_trace),
        requests=args.requests,
        prompt_len=_lengths("--prompt-len", args.prompt_len),
        output_len=_lengths("--output-len", args.output_len),
        length_scale=args.length_scale,
        max_prompt=args.max_prompt,
        max_output=args.max_output,
        prompts=args.prompts,
        seed=args.seed,
    )


def _lengths(option: str, text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d+)(?:\.\.(\d+))?", text)
    if found is None:
        raise ConfigError(f"{option} {text}: expected a number of tokens, or two as in 32..256")
    return int(found[1]), int(found[2] or found[1])


def _loads(args: argparse.Namespace, traffic: WorkloadOptions) -> tuple[Load, ...]:
    rates = _numbers("--rate", args.rate)
    if args.concurrency is not None:
        if rates or args.loads is not None or args.scale is not None:
            raise ConfigError("--concurrency is a closed loop and has no rate; leave --rate, --scale and --loads out")
        numbers = _numbers("--concurrency", args.concurrency)
        if any(number != int(number) for number in numbers):
            raise ConfigError(f"--concurrency {args.concurrency}: expected whole numbers")
        return tuple(Load(concurrency=int(number)) for number in numbers)
    if rates and args.scale is not None:
        raise ConfigError("--rate and --scale both set the rate; give one of them")
    if args.loads is not None:
        if len(rates) > 1:
            raise ConfigError("--loads are multiples of one --rate; give one, or list the rates themselves")
        if not rates and args.workload is not None:
            raise ConfigError("--loads of a --workload are multiples of a --rate; give one")
        base = rates[0] if rates else own_rate(traffic)
        rates = [base * factor for factor in _numbers("--loads", args.loads)]
    return tuple(Load(rate) for rate in rates) or (Load(),)


def _numbers(option: str, text: str | None) -> list[float]:
    """`1,2,4`, or `0.2..1.4:7` for seven evenly spaced numbers."""
    numbers: list[float] = []
    for part in [] if text is None else text.split(","):
        found = re.fullmatch(r"([\d.]+?)\.\.([\d.]+):(\d+)", part.strip())
        try:
            if found is None:
                numbers.append(float(part))
            else:
                first, last, count = float(found[1]), float(found[2]), int(found[3])
                numbers += [first + (last - first) * i / max(1, count - 1) for i in range(count)]
        except ValueError:
            numbers.append(-1.0)
    if not all(0 < number < float("inf") for number in numbers):
        raise ConfigError(f"{option} {text}: expected numbers above 0, as in 1,2,4 or 0.2..1.4:7")
    return list(dict.fromkeys(numbers))


def _policies(args: argparse.Namespace) -> tuple[str, ...]:
    has_draft = resolve_draft(args.model, args.draft) is not None
    text = args.policies or (f"off,{DEFAULT_POLICY}" if has_draft else "off")
    names = expand_policies(text)
    for name in names:
        EngineOptions(policy=name).make_policy(has_draft)
    return names


def expand_policies(text: str) -> tuple[str, ...]:
    """The policies of a list, by their full names, without duplicates; `fixed:1..3` is three."""
    names: list[str] = []
    for part in map(str.strip, text.split(",")):
        found = re.fullmatch(r"(\w+:)(\d+)\.\.(\d+)", part)
        if found is None:
            names.append(part)
            continue
        first, last = int(found[2]), int(found[3])
        if not first <= last <= HARD_MAX_LENGTH:
            raise ConfigError(f"--policies {part}: expected a rising range, to {HARD_MAX_LENGTH} at most")
        names += [f"{found[1]}{length}" for length in range(first, last + 1)]
    return tuple(dict.fromkeys(make_policy(name).name for name in names))


# ── playing ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class Interrupts:
    """The first Ctrl-C or SIGTERM stops the runs; a second ends the command at once."""

    signal: int | None = None  # the first one

    def __call__(self) -> bool:
        return self.signal is not None

    @contextmanager
    def watched(self) -> Iterator[None]:
        def handle(number: int, frame: FrameType | None) -> None:
            if self.signal is not None:
                _end_now(number, frame)
            self.signal = number

        with _handling(handle, signal.SIGINT, signal.SIGTERM):
            yield


def _end_now(number: int, frame: FrameType | None) -> None:
    """Raises, so that temporary files are removed and a browser is stopped."""
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise SystemExit(128 + number)


@contextmanager
def _handling(handle: Callable[[int, FrameType | None], None], *numbers: signal.Signals) -> Iterator[None]:
    before = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclass
class Session:
    """All runs of one command. Within a load, systems take turns, so that a slow drift affects all of them alike."""

    asked: Asked
    systems: Sequence[System]
    played: Sequence[tuple[Load, Workload]]
    interrupts: Interrupts
    keeps_records: bool = True  # False: only records of lost requests are kept after the summary
    estimate: Estimate | None = None  # None: no duration was announced
    clock: Clock = REAL_CLOCK
    runs: list[RunDocument] = field(default_factory=list)

    def play(self) -> None:
        turns = [
            (load, workload, repeat, system)
            for load, workload in self.played
            for repeat in range(self.asked.repeats)
            for system in self.systems
        ]
        total, ended = sum(len(workload.items) for _, workload, _, _ in turns), 0
        with progress_bar(f"playing {len(turns)} runs") as move:
            for load, workload, repeat, system in turns:

                def update(count: int, before: int = ended) -> None:
                    move(before + count, total)

                self._play_one(load, workload, repeat, system, update)
                ended += len(workload.items)
                if self.interrupts():
                    return

    def _play_one(self, load: Load, workload: Workload, repeat: int, system: System, update: Update) -> None:
        system.warm_up(workload, self.asked.warmup, self.interrupts)
        if not self.interrupts():
            run = system.play(workload, self.interrupts, self._timed(load, workload, system, update))
            if run.partial and not run.records:
                return  # the signal came before the first request
            made = run_document(run, policy=system.policy, load=load, repeat=repeat, slo=self.asked.slo)
            if not self.keeps_records:
                made = replace(made, records=tuple(record for record in made.records if record.error is not None))
            self.runs.append(made)

    def _timed(self, load: Load, workload: Workload, system: System, update: Update) -> Update:
        """`update`, and one message if the run takes longer than estimated."""
        if self.estimate is None or not self.estimate.paces:
            return update
        expected, started, reported = rounded_up(self.estimate.of_run(workload)), self.clock.now(), False

        def timed(ended: int) -> None:
            nonlocal reported
            update(ended)
            passed = self.clock.now() - started
            if not reported and passed > expected and ended < len(workload.items):
                reported = True
                _say(
                    f"{system.name} at {_label(load)} takes longer than estimated: {passed:.0f} s so far, about "
                    f"{in_words(expected)} expected; {ended} of {len(workload.items)} requests have ended"
                )

        return timed

    def announcement(self) -> str:
        """The traffic, and the estimated duration of all runs."""
        asked, estimate = self.asked, self.estimate or Estimate(())
        seconds = sum(estimate.of_run(w) + estimate.of_warm_up(w, asked.warmup) for _, w in self.played)
        seconds *= asked.repeats * len(self.systems)
        about, least = in_words(rounded_up(MARGIN * seconds)), in_words(int(seconds))
        duration = f"about {about}" if estimate.paces else f"{least} or more"
        kind = "policy" if all(system.policy is not None for system in self.systems) else "system"
        parts = [
            _counted(sum(len(workload.items) for _, workload in self.played), "request"),
            _counted(len(self.systems), kind),
            *([_counted(asked.repeats, "repeat")] if asked.repeats > 1 else []),
            duration,
        ]
        return f"{_traffic_words(asked, [load for load, _ in self.played])}: {', '.join(parts)}"


def _traffic_words(asked: Asked, loads: Sequence[Load]) -> str:
    if asked.is_sized:
        share = "about half of what this machine can do"
        return f"{asked.traffic.arrivals} for {asked.traffic.timing.duration:g} s, {share}"
    return ", ".join(map(_label, loads)) if len(loads) <= 4 else f"{len(loads)} loads"


def _label(load: Load) -> str:
    if load.concurrency is not None:
        return f"{load.concurrency} at a time"
    return "all at once" if load.rate is None else f"{load.rate:.4g} requests/s"


def _counted(number: int, word: str) -> str:
    plural = f"{word[:-1]}ies" if word.endswith("y") else f"{word}s"
    return f"{number} {word if number == 1 else plural}"


def _say(text: str) -> None:
    print(f"faser: {text}", file=sys.stderr)


def bench(args: argparse.Namespace, engine_fields: Mapping[str, Any]) -> int:  # fields of EngineOptions
    """Returns the exit status: 128 + number after a signal, 1 if a system answered no request, else 0."""
    with _handling(_end_now, signal.SIGTERM):  # before anything is measured
        asked = Asked.of(args)
        write_report = prepare_results(args)
        systems, vocabulary, about = _systems(args, asked, engine_fields)
        _say("calibrating with a few requests")
        asked, estimate = size_traffic(asked, systems[0], vocabulary)
        session = Session(asked, systems, make_workloads(asked, vocabulary), Interrupts(), estimate=estimate)
        _say(session.announcement())
        if args.save_workload is not None:
            _save_all(session.played, Path(args.save_workload).expanduser())
        return play_and_report(args, session, about, write_report)


def size_traffic(asked: Asked, system: System, vocabulary: Vocabulary | None) -> tuple[Asked, Estimate]:
    """`asked`, with a load chosen for the system if none was given, and an estimate from the calibration."""
    if asked.workload is not None:
        items = asked.workload.items
    else:
        assert vocabulary is not None
        items = probe_items(asked.traffic, vocabulary, 2 * sum(SIZES))
    system.warm_up(Workload(items), 2, never)
    paces = calibrate(lambda workload: system.play(workload, never, no_update), items)
    if not paces:
        _say(f"{system.name}: no request of the calibration was answered, so the duration is unknown")
        return replace(asked, is_sized=False), Estimate(())
    if asked.is_sized:
        rate = default_rate(paces, items)
        traffic = poisson_traffic(asked.traffic, rate, LEAST_REQUESTS)
        asked = replace(asked, traffic=traffic, loads=(Load(rate),))
    return asked, Estimate(paces)


def play_and_report(
    args: argparse.Namespace,
    session: Session,
    about: Mapping[str, Any],
    write_report: ReportWriter | None,
    remark: Callable[[Document], str] | None = None,
) -> int:
    """Play a session, print and write its results, with a `remark` below the table. Returns the exit status."""
    asked, loads = session.asked, [load for load, _ in session.played]
    given: list[RunDocument] = []
    for other in asked.against:
        given += [] if other.path is None else read_against(other.path, other.name, loads, asked.slo)

    def finish() -> None:
        document = _document(args, session, about, given)
        if args.out is not None:
            document.save(Path(args.out).expanduser())
        try:
            print(render(document, _reference(asked, document)), end="\n\n")
            if remark is not None:
                print(remark(document), end="\n\n")
            print(json.dumps(document.without_details().to_dict()), flush=True)
        finally:  # last, because a browser takes seconds to draw; also after a broken pipe
            if write_report is not None:
                write_report(Path(args.report).expanduser(), document)
        _report_lost(document)

    with session.interrupts.watched():
        try:
            session.play()
        except Exception:
            if session.runs:
                finish()  # keep what was measured before the error
            raise
        if session.runs:
            finish()
    number = session.interrupts.signal
    if number is not None:
        word = "interrupted" if number == signal.SIGINT else "terminated"
        _say(word + ("; the runs measured so far are kept" if session.runs else ""))
        return 128 + number
    return FAILED if any(run.summary["requests"] == run.summary["lost"] for run in session.runs) else 0


def _document(
    args: argparse.Namespace, session: Session, about: Mapping[str, Any], given: Sequence[RunDocument]
) -> Document:
    slo, runs = session.asked.slo, (*session.runs, *given)
    return Document(
        command=("faser", *_without_secrets(args.command_line)),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        about={**about, **describe_machine(), "slo": None if slo is None else dict(slo.most)},
        workload=describe_loads(session.played),
        runs=runs,
        groups=group_runs(runs),
    )


def _systems(
    args: argparse.Namespace, asked: Asked, engine_fields: Mapping[str, Any]
) -> tuple[list[System], Vocabulary | None, dict[str, Any]]:
    """Connects to servers first: a missing one is found before a model is loaded."""
    further: list[System] = [
        RemoteSystem(_remote(args, other.url), other.name) for other in asked.against if other.url is not None
    ]
    chat = not args.no_chat_template
    if args.url is not None:
        remote = _remote(args, args.url)
        about: dict[str, Any] = {"url": args.url, "model": remote.model, "draft": None, "device": "of the server"}
        vocabulary = load_vocabulary(args.model, remote.max_model_len, chat) if asked.workload is None else None
        return [RemoteSystem(remote, remote.name), *further], vocabulary, about
    # An engine has a profile only if the policy it is built with needs one; later policies may.
    policy = next((name for name in asked.policies if make_policy(name).needs_cost), asked.policies[0])
    options = EngineOptions(**{**engine_fields, "policy": policy, "acceptance": args.acceptance, "profiling": "full"})
    loaded = load_engine(args.model, args.draft, options, chat)
    own: list[System] = [PolicySystem(loaded.engine, name, args.temperature) for name in asked.policies]
    return [*own, *further], loaded.vocabulary, loaded.about


def _remote(args: argparse.Namespace, url: str) -> Remote:
    key = args.api_key or os.environ.get(API_KEY_VARIABLE)
    remote = Remote(url, key, args.request_timeout, args.temperature)
    remote.connect()
    return remote


def make_workloads(asked: Asked, vocabulary: Vocabulary | None) -> list[tuple[Load, Workload]]:
    """One for each load; a load without a rate gets the workload's."""
    if asked.workload is not None:
        if vocabulary is not None:
            check_tokens(asked.workload, vocabulary.vocab_size)
        first = replace(asked.workload, items=asked.workload.items[: asked.traffic.requests])
        made = [(load, at_rate(first, load)) for load in asked.loads]
    else:
        assert vocabulary is not None
        made = [(load, make_workload(asked.traffic, load, vocabulary)) for load in asked.loads]
    return [(Load(mean_rate(workload.items)) if load == Load() else load, workload) for load, workload in made]


def _save_all(played: Sequence[tuple[Load, Workload]], path: Path) -> None:
    """One file for each load; several are named by load."""
    for load, workload in played:
        number = load.rate if load.concurrency is None else load.concurrency
        named = path if len(played) == 1 else path.with_stem(f"{path.stem}-{number:.4g}")
        save_workload(workload, named)


# ── writing ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def prepare_results(args: argparse.Namespace) -> ReportWriter | None:
    """Make folders and import the report's libraries before minutes are spent on measuring."""
    folders = [Path(file).expanduser().parent for file in (args.out, args.save_workload) if file is not None]
    folders += [] if args.report is None else [Path(args.report).expanduser()]
    for folder in folders:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"{folder}: cannot be written ({error})") from None
    if args.report is None:
        return None
    from faser.bench.report.page import write_report

    return write_report


def _reference(asked: Asked, document: Document) -> str | None:
    """The system that ratios are taken against: the first other system, or else `off`."""
    systems = [group.system for group in document.groups]
    wanted = [other.name for other in asked.against] + ["off"]
    found = [system for name in wanted for system in systems if system == name or system.startswith(f"{name} ")]
    return found[0] if found and len(set(systems)) > 1 else None


def _without_secrets(given: Sequence[str]) -> list[str]:
    hidden = [re.sub(r"^--api-key=.*", "--api-key=…", word) for word in given]
    return ["…" if before == "--api-key" else word for before, word in zip(["", *hidden], hidden, strict=False)]


def _report_lost(document: Document) -> None:
    for run in document.runs:
        errors = [record.error for record in run.records if record.error is not None]
        if errors:
            lost = f"{len(errors)} of {run.summary['requests']:.0f} requests lost"
            _say(f"{run.system}: {lost}: {errors[0]}")
