"""What does it bring that the draft leaves the device while KV pages are short, and what do its moves cost?

An H200 has plenty of memory, so the KV cache is capped to what a card of 24 or 48 GiB would leave beside an 8B in
bfloat16 (16.1 GB), the draft and a reserve of 1.5 GiB. The models are SmolLM2 and its draft inside the shapes of an 8B
and a 1B (tools/inflate.py); without --target, random weights of these shapes, of which drafts are accepted with a given
probability. The 3B is always random. Parts (--parts):

  capacity  KV tokens with the draft in and out, of every pair and card; aims: 1.2 times (1B), 1.5 times (3B)
  moves     64 requests decode while the draft is made to leave and come back: the longest delay of a step while it
            leaves (aim: 20 ms), steps while it loads against steps before (aim: 1 % slower), seconds until the first
            draft (aim: 0.2)
  traffic   Azure's conversation trace, a spike of 2, 8, 24, 40, 6 requests/s and a swing between 4 and 28, under off,
            fixed:3, and nightjar and faser without and with offload; `no draft` is off with the draft out all the time
  wave      square waves of several periods, faser without and with offload: moves, KV pages lost, GPU memory at the
            start and at the end; every 30 s of a run the journal gets a record of what there is so far
  predict   the traffic and the waves in the simulator, on the same cards; needs no GPU

    python3 -m benchmarks.residency --target SMALL.gguf [--parts capacity,moves,traffic,wave]
        [--machines 8b-1b:24,8b-3b:24] [--traffic-seconds 15] [--scale 1] [--columns off,faser,faser+offload]
    python3 -m benchmarks.residency --target SMALL.gguf --parts wave --machines 8b-3b:24 --wave-seconds 600
        --wave-periods 20 --columns faser+offload --budget-seconds 1000
    python3 -m benchmarks.residency --parts predict --machines 8b-1b:24,8b-1b:48,8b-3b:24,8b-3b:48
    python3 -m benchmarks.residency --tiny --device cpu      # tiny models: does it all run?

--machines says where traffic and waves are played; moves are timed on the first pair and the largest card. Every
figure is in the journal (residency.jsonl in $OUT, else in --folder) as soon as it is measured. The last line is one
JSON document, which is residency.json there too. The exit status is 1 if a part failed.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path

import numpy as np
import torch

from benchmarks.cuda_steps import VOCABULARY, make_model
from benchmarks.lib import residency_traffic as traffic
from benchmarks.lib.journal import Figures, Journal, describe, failures
from benchmarks.lib.models import DRAFT, inflated_pair, make_tiny_models
from benchmarks.lib.residency_traffic import (
    COLUMNS,
    Column,
    TrafficSizes,
    bring_home,
    residency_of,
    send_away,
    workload_of,
)
from faser.bench.systems import load_vocabulary
from faser.build import build_engine
from faser.config import EngineOptions
from faser.engine.engine import Engine
from faser.engine.residency import Place
from faser.models.transformer import Transformer
from faser.policy import Fixed
from faser.policy.residency import ExpectedGain, ResidencyRule, ResidencyView
from faser.request import FinishReason, Request, SamplingParams
from faser.runtime.device import make_device
from faser.sim.oracle import parse_acceptance
from faser.sim.replica import Machine, load_profile
from faser.traffic.play import take_policy
from faser.traffic.workload import Vocabulary

GIB = 2**30
TARGET_BYTES = 16_100_000_000  # an 8B in bfloat16
RESERVE_BYTES = 3 * 2**29
TARGET_TOKEN_BYTES = 131_072  # KV of an 8B in bfloat16


@dataclass(frozen=True)
class Draft:
    """A draft's shape, and its sizes for the simulator: bytes of weights and of a token's KV, seconds over a 1B's."""

    shape: str
    weight_bytes: int
    token_bytes: int
    slowness: float

    def kv_memory(self, card: int, weight_bytes: int | None = None) -> int:
        """Bytes that a card of `card` GiB leaves for KV pages."""
        return card * GIB - TARGET_BYTES - (weight_bytes or self.weight_bytes) - RESERVE_BYTES


PAIRS = {
    "8b-1b": Draft("llama-1b", 2_350_000_000, 32_768, 1.0),
    "8b-3b": Draft("llama-3b", 6_240_000_000, 114_688, 2.6),
}
AIMS = {"8b-1b": 1.2, "8b-3b": 1.5}
LOAD_RATE = 50e9  # bytes/s from the host, for the simulator
PARTS = ("capacity", "moves", "traffic", "wave", "predict")
MACHINE_SECONDS = {"models": 60.0, "engine": 45.0, "moves": 40.0}  # assumed, for the estimate


@dataclass(frozen=True)
class MoveSizes:
    """What `moves` plays: requests, tokens, and steps before a move."""

    requests: int = 64
    prompt: int = 128
    output: int = 2048
    settle: int = 40
    rounds: int = 5
    length: int = 3  # of the drafts after a return


TINY_MOVES = MoveSizes(requests=2, prompt=8, output=80, settle=4, rounds=2, length=2)


# ── the models and engines ───────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class Models:
    """Made when first needed, and kept. An engine gets a copy of the draft, whose weights it may move."""

    args: argparse.Namespace
    _drafts: dict[str, Transformer] = field(default_factory=dict)

    @cached_property
    def target(self) -> Transformer:
        if self.args.tiny:
            target, self._drafts["8b-1b"], _ = make_tiny_models(self.args)
        elif self.args.target is not None:
            shapes = ("llama-8b", PAIRS["8b-1b"].shape)
            (target, self._drafts["8b-1b"]), _ = inflated_pair(self.args.target, DRAFT, shapes, self.args.device)
        else:
            target = make_model("llama-8b", 0, self.args.max_model_len)
        return target

    def draft(self, pair: str) -> Transformer:
        assert self.target is not None
        if pair not in self._drafts:
            self._drafts[pair] = make_model(PAIRS[pair].shape, 1, self.args.max_model_len)
        return copy.deepcopy(self._drafts[pair])

    def is_natural(self, pair: str) -> bool:
        return self.args.tiny or (self.args.target is not None and pair == "8b-1b")

    @cached_property
    def vocabulary(self) -> Vocabulary:
        if self.args.target is not None and not self.args.tiny:
            return load_vocabulary(str(self.args.target), self.args.max_model_len, chat=True)
        return Vocabulary(64 if self.args.tiny else VOCABULARY, self.args.max_model_len, None)

    def build(self, pair: str, card: int, needs_cost: bool) -> Engine:
        args, draft = self.args, self.draft(pair)
        sizes = {"num_pages": args.tiny_pages, "page_size": 8} if args.tiny else {}
        options = EngineOptions(
            policy="faser" if needs_cost else "fixed:3",
            max_running=args.max_running,
            max_model_len=args.max_model_len,
            prefix_caching=False,
            profiling="full" if needs_cost and not args.tiny else "none",
            early_exit="off",
            overlap="off",
            offload="on",
            acceptance=None if self.is_natural(pair) else args.acceptance,
            kv_memory=None if args.tiny else PAIRS[pair].kv_memory(card, draft.num_bytes),
            **sizes,
        )
        engine = build_engine(self.target, draft, options, device=make_device(args.device))
        if engine.residency is None:
            raise RuntimeError("the draft of this engine cannot leave the device")
        return engine


def gpu_bytes() -> int | None:
    """GPU memory in use; None without a GPU."""
    if not torch.cuda.is_available():
        return None
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free


# ── capacity ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def capacity(engine: Engine, pair: str) -> Figures:
    """Tokens of the pool, before, with the draft out, and after it came back."""
    pool = engine.scheduler.target_pages
    before, used = pool.num_pages, gpu_bytes()
    send_away(engine)
    out, left = pool.num_pages, residency_of(engine).stats.last_move_seconds
    used_out = gpu_bytes()
    bring_home(engine)
    engine.scheduler.check()
    return {
        "tokens_in": before * pool.page_size,
        "tokens_out": out * pool.page_size,
        "ratio": out / before,
        "aim": AIMS[pair],
        "tokens_after": pool.num_pages * pool.page_size,
        "leave_s": left,
        "return_s": residency_of(engine).stats.last_move_seconds,
        "gpu_bytes": [used, used_out, gpu_bytes()],
    }


# ── moves ────────────────────────────────────────────────────────────────────────────────────────────────────────────


class NeverMoves(ResidencyRule):
    """The draft moves only when it is told to."""

    def why_leave(self, view: ResidencyView, gain: ExpectedGain) -> str | None:
        return None

    def why_return(self, view: ResidencyView, gain: ExpectedGain) -> str | None:
        return None


@dataclass(frozen=True)
class FixedWithoutRule(Fixed):
    def residency_rule(self) -> ResidencyRule:
        return NeverMoves()


@dataclass(frozen=True)
class Moving:
    """A closed batch that decodes while the draft moves. Seconds are of whole steps."""

    engine: Engine
    sizes: MoveSizes
    stopped: Callable[[], bool]

    def start(self) -> None:
        """Until every request decodes."""
        random, sizes = np.random.default_rng(0), self.sizes
        take_policy(self.engine, FixedWithoutRule(sizes.length))  # captures the graphs of its length
        self._draft(0)
        params = SamplingParams(max_tokens=sizes.output, ignore_eos=True)
        for number in range(sizes.requests):
            tokens = tuple(random.integers(3, 60, sizes.prompt).tolist())
            self.engine.add(Request(id=str(number), prompt_token_ids=tokens, params=params, seed=number))
        begun: set[str] = set()
        while len(begun) < sizes.requests:
            begun |= {progress.request_id for progress in self.engine.step()}

    def rounds(self) -> Iterator[Figures]:
        for _ in range(self.sizes.rounds):
            if self.engine.scheduler.num_running < self.sizes.requests or self.stopped():
                return
            yield self._round()

    def _round(self) -> Figures:
        residency, settle = residency_of(self.engine), self.sizes.settle
        before = self._steps(settle)
        residency.leave()
        leaving = self._until(lambda: residency.place is Place.AWAY) + self._steps(settle // 4)
        left = residency.stats.last_move_seconds
        away = self._steps(settle)
        self._draft(self.sizes.length)
        drafted, started = self.engine.stats.drafted, time.perf_counter()
        residency.come_back()
        *loading, back = self._until(lambda: residency.place is Place.RESIDENT)
        loading = loading or [back]
        catching_up = [back]  # the step in which the draft is back computes what it has missed
        if self.engine.stats.drafted == drafted:
            catching_up += self._until(lambda: self.engine.stats.drafted > drafted)
        first_draft = time.perf_counter() - started
        self._draft(0)
        self._steps(settle // 4)
        return {
            "step_before_s": statistics.median(before),
            "leave_s": left,
            "worst_delay_s": max(leaving) - statistics.median(before),
            "worst_undisturbed_s": max(before) - statistics.median(before),
            "step_away_s": statistics.median(away),
            "step_loading_s": statistics.median(loading),
            "mean_away_s": statistics.fmean(away),
            "mean_loading_s": statistics.fmean(loading),
            "loading_s": loading,
            "catching_up_s": catching_up,
            "first_draft_s": first_draft,
        }

    def _draft(self, length: int) -> None:
        self.engine.scheduler.drafts.policy = FixedWithoutRule(length)

    def _steps(self, number: int) -> list[float]:
        return [self._step() for _ in range(number)]

    def _until(self, is_done: Callable[[], bool]) -> list[float]:
        """Steps until it is done; at least one."""
        seconds = [self._step()]
        while not is_done():
            if not self.engine.has_work:
                raise RuntimeError("the requests ended in the middle of a move; give them more tokens")
            seconds.append(self._step())
        return seconds

    def _step(self) -> float:
        started = time.perf_counter()
        self.engine.step()
        return time.perf_counter() - started


def moves(engine: Engine, sizes: MoveSizes, stopped: Callable[[], bool]) -> Figures:
    pool = engine.scheduler.target_pages
    room = pool.base_pages * pool.page_size // sizes.requests - sizes.prompt - 2 * pool.page_size
    sizes = replace(sizes, output=min(sizes.output, room, engine.scheduler.limits.max_model_len - sizes.prompt))
    moving = Moving(engine, sizes, stopped)
    try:
        moving.start()
        rounds = list(moving.rounds())
    finally:
        engine.abandon(FinishReason.CANCELLED)
        bring_home(engine)
    if not rounds:
        raise RuntimeError("no round of moves could be timed")
    away, loading = (statistics.fmean(each[name] for each in rounds) for name in ("mean_away_s", "mean_loading_s"))
    return {
        "requests": sizes.requests,
        "worst_delay_s": max(each["worst_delay_s"] for each in rounds),
        "worst_undisturbed_s": max(each["worst_undisturbed_s"] for each in rounds),
        "slower_while_loading": loading / away - 1,
        "first_draft_s": max(each["first_draft_s"] for each in rounds),
        "aims": {"worst_delay_s": 0.02, "slower_while_loading": 0.01, "first_draft_s": 0.2},
        "rounds": rounds,
    }


# ── traffic and waves ────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Played:
    """Plays columns and writes each to the journal."""

    args: argparse.Namespace
    journal: Journal
    where: Figures  # pair and card
    vocabulary: Vocabulary
    play: Callable[[Column, object], Figures]
    prefix: str = ""  # of the kinds of records

    def traffic(self) -> None:
        for pattern, options in self.args.traffic.patterns().items():
            workload = workload_of(options, self.vocabulary)
            columns = {}
            for column in self.args.columns:
                columns[column.name] = self.play(column, workload)
                self._add("traffic", columns[column.name], pattern=pattern, column=column.name)
            print(f"\n{self._title} {pattern}\n{traffic.table(columns)}", flush=True)
            self.journal.add(f"{self.prefix}ratios", **self.where, pattern=pattern, ratios=traffic.ratios(columns))

    def wave(self) -> None:
        sizes = replace(self.args.traffic, seconds=self.args.wave_seconds)
        for period in self.args.wave_periods:
            workload = workload_of(sizes.wave(period), self.vocabulary)
            columns = {}
            for column in self.args.columns:
                if column.policy == "faser":
                    columns[column.name] = self.play(column, workload)
                    self._add("wave", columns[column.name], period=period, column=column.name)
            print(f"\n{self._title} square wave of {period:g} s\n{traffic.table(columns)}", flush=True)

    @property
    def _title(self) -> str:
        return f"{self.prefix}{self.where['pair']} on {self.where['card']} GiB:"

    def _add(self, kind: str, figures: Figures, **more: object) -> None:
        self.journal.add(f"{self.prefix}{kind}", **self.where, **more, **figures)


@dataclass
class ProgressRecords:
    """Asked before every step whether to stop; now and then it writes to the journal what the engine did so far."""

    engine: Engine
    journal: Journal
    stopped: Callable[[], bool]
    clock: Callable[[], float] = time.time
    seconds: float = 30.0  # between two records

    def __post_init__(self) -> None:
        self._started = self._last = self.clock()

    def __call__(self) -> bool:
        now = self.clock()
        if now >= self._last + self.seconds:
            self._last = now
            figures = {"elapsed_s": now - self._started, **self._figures()}
            self.journal.add("progress", **figures)
            print(describe(figures), flush=True)
        return self.stopped()

    def _figures(self) -> Figures:
        scheduler, residency = self.engine.scheduler, self.engine.residency
        figures: Figures = {"steps": scheduler.num_landed, "preemptions": scheduler.num_preemptions}
        figures |= {"held_pages": scheduler.target_pages.num_held, "pages": scheduler.target_pages.num_pages}
        if residency is not None:
            figures |= {"moves": residency.stats.moves, "away_s": residency.stats.away_seconds}
        if torch.cuda.is_available():
            free, total = torch.cuda.mem_get_info()
            figures["gpu_bytes"] = total - free
        return figures


def play_real(
    engine: Engine, journal: Journal, stopped: Callable[[], bool], column: Column, workload: object
) -> Figures:
    """A run, and whether pool and GPU memory are the same after it."""
    if stopped():
        raise TimeoutError("no time left for it")
    pool, used = engine.scheduler.target_pages, gpu_bytes()
    stopped = ProgressRecords(engine, journal, stopped)
    figures = traffic.play_column(engine, column, workload, stopped)  # type: ignore[arg-type]
    engine.scheduler.check()
    figures["pages_lost"] = pool.base_pages - pool.num_available
    figures["gpu_bytes"] = [used, gpu_bytes()]
    return figures


def predict(args: argparse.Namespace, journal: Journal) -> None:
    """Simulated: the shipped profile of an 8B with a 1B; a larger draft takes longer in proportion to its weights."""
    known, acceptance = load_profile("h200-8b-1b"), parse_acceptance(args.simulated_acceptance)
    assert known.residency is not None
    for pair, card in args.machines:
        draft = PAIRS[pair]
        sizes = {"weight_bytes": draft.weight_bytes, "draft_token_bytes": draft.token_bytes}
        load_seconds = draft.weight_bytes / LOAD_RATE
        curves = {
            name: traffic.scaled(getattr(known, name), draft.slowness)
            for name in ("first_draft", "next_draft", "catch_up")
        }
        residency = replace(known.residency, load_seconds=load_seconds, **sizes)
        machine = Machine(
            profile=replace(known, **curves, residency=residency),
            max_running=args.max_running,
            max_model_len=args.max_model_len,
            max_step_ms=50.0,
            kv_tokens=draft.kv_memory(card) // (TARGET_TOKEN_BYTES + draft.token_bytes),
        )
        gained = replace(machine, offload="auto").pages_gained
        tokens = {"tokens_in": machine.num_pages * machine.page_size, "ratio": 1 + gained / machine.num_pages}
        journal.add("predicted_capacity", pair=pair, card=card, **tokens)
        blank = Vocabulary(1, args.max_model_len, None, is_blank=True)
        play = partial(play_simulated, machine, acceptance)
        played = Played(args, journal, {"pair": pair, "card": card}, blank, play, "predicted_")
        for part in (played.traffic, played.wave):
            journal.attempt(f"predict {part.__name__} {pair}:{card}", "simulator", part)


def play_simulated(machine: Machine, acceptance: object, column: Column, workload: object) -> Figures:
    return traffic.simulate_column(machine, column, workload, acceptance)  # type: ignore[arg-type]


# ── the command ──────────────────────────────────────────────────────────────────────────────────────────────────────


def jobs_of(args: argparse.Namespace) -> dict[tuple[str, int], list[str]]:
    """Parts by pair and card: each engine is built once."""
    jobs: dict[tuple[str, int], list[str]] = {}
    if "capacity" in args.parts:
        jobs |= {(pair, card): ["capacity"] for pair in args.pairs for card in args.cards}
    if "moves" in args.parts:
        jobs.setdefault((args.machines[0][0], max(args.cards)), []).append("moves")
    for part in ("traffic", "wave"):
        for machine in args.machines if part in args.parts else ():
            jobs.setdefault(machine, []).append(part)
    return jobs


def estimate(args: argparse.Namespace) -> float:
    """Seconds on a GPU. Columns that cannot keep up take longer than the traffic lasts."""
    jobs, seconds = jobs_of(args), MACHINE_SECONDS["models"]
    for parts in jobs.values():
        seconds += MACHINE_SECONDS["engine"] + MACHINE_SECONDS["moves"] * ("moves" in parts)
        seconds += 1.3 * len(args.columns) * 3 * args.traffic.seconds * ("traffic" in parts)
        num_waves = len(args.wave_periods) * sum(column.policy == "faser" for column in args.columns)
        seconds += num_waves * args.wave_seconds * ("wave" in parts)
    return seconds if jobs else 0.0


def run_job(args: argparse.Namespace, journal: Journal, models: Models, machine: tuple[str, int]) -> None:
    (pair, card), parts = machine, jobs_of(args)[machine]
    where = {"pair": pair, "card": card}
    started = time.time()
    engine = models.build(pair, card, needs_cost="traffic" in parts or "wave" in parts)
    journal.add("engine", **where, seconds=time.time() - started)
    played = Played(args, journal, where, models.vocabulary, partial(play_real, engine, journal, args.is_over))
    if not models.is_natural(pair):
        played = replace(played, args=_with_random_prompts(args))

    def do(part: str) -> None:
        if part == "capacity":
            journal.add("capacity", **where, **capacity(engine, pair))
        elif part == "moves":
            journal.add("moves", **where, **moves(engine, args.moves, args.is_over))
        else:
            (played.traffic if part == "traffic" else played.wave)()

    try:
        for part in parts:
            journal.attempt(f"{part} {pair}:{card}", "faser", partial(do, part))
            print(f"{time.time() - args.started:6.0f} s  {part} {pair}:{card}", flush=True)
    finally:
        engine.close()


def _with_random_prompts(args: argparse.Namespace) -> argparse.Namespace:
    changed = copy.copy(args)
    changed.traffic = replace(args.traffic, prompts="random")
    return changed


def document(records: Sequence[Figures], session: float) -> Figures:
    """Everything this run measured, by kind."""
    own = [record for record in records if record["session"] == session]
    kinds = dict.fromkeys(record["kind"] for record in own if record["kind"] not in ("call", "failed"))
    hidden = ("kind", "session")
    found: Figures = {"benchmark": "residency", "failed": failures(own)}
    for kind in kinds:
        found[kind] = [{k: v for k, v in each.items() if k not in hidden} for each in own if each["kind"] == kind]
    return found


def machine_of(text: str) -> tuple[str, int]:
    pair, _, card = text.partition(":")
    if pair not in PAIRS or not card.isdigit():
        raise argparse.ArgumentTypeError(f"{text}: expected one of {', '.join(PAIRS)} and GiB, as in 8b-1b:24")
    return pair, int(card)


def listed(kind: Callable[[str], object]) -> Callable[[str], list[object]]:
    return lambda text: [kind(each.strip()) for each in text.split(",")]


def parse_args(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--target", type=Path, metavar="SMALL.gguf", help="the small target (random weights)")
    add("--parts", type=listed(str), default=list(PARTS[:-1]), help="(capacity,moves,traffic,wave)")
    add("--pairs", type=listed(str), default=list(PAIRS), help="of capacity (8b-1b,8b-3b)")
    add("--cards", type=listed(int), default=[24, 48], help="GiB (24,48)")
    add("--machines", type=listed(machine_of), default=[("8b-1b", 24)], help="of traffic and waves (8b-1b:24)")
    add("--columns", type=listed(str), default=list(COLUMNS), help=f"({','.join(COLUMNS)})")
    add("--traffic-seconds", type=float, default=12.0, help="of each pattern (12)")
    add("--scale", type=float, default=1.0, help="factor on all rates (1)")
    add("--max-prompt", type=int, default=1024)
    add("--max-output", type=int, default=256)
    add("--wave-seconds", type=float, default=10.0, help="of each wave (10)")
    add("--wave-periods", type=listed(float), default=[0.3, 2.0, 10.0], help="seconds (0.3,2,10)")
    add("--acceptance", type=float, default=0.75, help="of random weights (0.75)")
    add("--simulated-acceptance", default="replay", help="as in faser simulate (replay)")
    add("--max-running", type=int, default=256)
    add("--max-model-len", type=int, default=4096)
    add("--seed", type=int, default=0)
    add("--budget-seconds", type=float, default=560.0, help="runs that do not fit are left out (560)")
    add("--folder", type=Path, default=Path(tempfile.gettempdir()) / "faser-residency")
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--tiny", action="store_true", help="tiny random models and sizes: does it all run?")
    args = parser.parse_args(given)
    unknown = [each for each in args.parts if each not in PARTS] + [each for each in args.pairs if each not in PAIRS]
    unknown += [each for each in args.columns if each not in COLUMNS]
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}")
    return complete(args)


def complete(args: argparse.Namespace) -> argparse.Namespace:
    args.started = time.time()
    args.is_over = lambda: time.time() > args.started + args.budget_seconds
    args.columns = [COLUMNS[name] for name in args.columns]
    args.moves, args.tiny_pages, prompts = MoveSizes(), 0, "specbench" if args.target is not None else "random"
    if args.tiny:
        args.pairs, args.cards, args.machines, args.moves, prompts = (
            ["8b-1b"],
            [24],
            [("8b-1b", 24)],
            TINY_MOVES,
            "random",
        )
        args.traffic_seconds, args.wave_seconds, args.wave_periods = 0.3, 0.3, [0.1]
        args.max_running, args.max_model_len, args.tiny_pages = 4, 96, 24
        args.max_prompt, args.max_output = 24, 12
    args.traffic = TrafficSizes(args.traffic_seconds, args.scale, args.max_prompt, args.max_output, prompts, args.seed)
    args.out = Path(os.environ.get("OUT") or args.folder)
    args.out.mkdir(parents=True, exist_ok=True)
    return args


def main(given: Sequence[str] | None = None) -> int:
    args = parse_args(given)
    journal = Journal(args.out / "residency.jsonl", args.started)
    journal.add("call", command=" ".join(given if given is not None else sys.argv[1:]))
    print(f"expected: {estimate(args):.0f} s on an H200, of {args.budget_seconds:.0f} s", flush=True)
    if "predict" in args.parts:
        predict(args, journal)
    models = Models(args)
    for machine in jobs_of(args):
        name = f"{machine[0]}:{machine[1]}"
        journal.attempt(f"engine {name}", "faser", partial(run_job, args, journal, models, machine))
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    for record in journal.read():
        if record["session"] == args.started and record["kind"] in ("capacity", "moves"):
            print(describe(record))
    found = document(journal.read(), args.started)
    for each in found["failed"]:
        print(f"FAILED {each}")
    (args.out / "residency.json").write_text(json.dumps(found) + "\n", encoding="utf-8")
    print(json.dumps(found), flush=True)
    return 1 if found["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
