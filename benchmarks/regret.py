"""Where does another policy do better than `faser`? A matrix of simulated traffic that nobody tuned to.

A cell is a pair of models, a mix of lengths, an acceptance rate and a load. In every cell all columns (policies) play
the same requests with the same outcomes of drafts (faser/sim), and `faser` is scored against the best other column:
its tokens per second over theirs, and their mean seconds per token over its own. 1 is as good as the best; 0.99 is
the aim. The best column is chosen by hindsight, cell by cell and figure by figure, so a score of 1 everywhere would
need a policy that is never unlucky: with N columns of equal worth the best of them is above their mean. The spread
over seeds beside a score says how much of it is chance. Where more arrives than can be served, the two figures
conflict: long drafts end the running requests sooner and leave the others waiting. So a third score, `both`, is below
1 only where one column is ahead in both figures: it is the better of the two ratios against that column.

  pairs        8b-1b and 32b-0.6b: the shipped profiles. 8b-head and fp8-8b-1b: derived from 8b-1b by the arithmetic
               of `as_head` and `as_fp8`; not measured
  mixes        prompt and answer tokens, uniform: chat 128..896 and 96..320, code 512..1536 and 16..64,
               long 1000..2000 and 300..500
  acceptance   the mean; requests differ by a standard deviation of 0.05
  loads        shares of the request rate at which `off` is saturated: quiet 0.1, busy 0.6, saturated 1.2,
               square 0.1 and 0.95 by turns, spike 0.2 with a burst of 3, ramp 0.05 to 1.2

Times are those of an 8B; for the 32B they are 3.5 times as long, as its steps are. A policy starts without having
learned anything, and that counts. A longer fixed length is not played where a shorter one is 5 % worse than the best
column in both figures.

    python3 -m benchmarks.regret [--quick] [--pairs A,B] [--mixes …] [--acceptance …] [--loads …] [--columns …]
        [--seeds 0,1] [--scale 1] [--jobs 1] [--journal FILE] [--worst 20]
    python3 -m benchmarks.regret --turn [--sizes 1,8,32,128] [--seeds 0,1]

--journal keeps every run as a line of JSON; what is in the file is not played again. --scale multiplies all times.
--turn plays another scenario: the text changes its character for everybody at once, from acceptance 0.9 to 0.2 and
back, in closed loops; regret is the time against the same policy that had learned the new rate before.

Prints the worst cells and a summary; the last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from statistics import fmean

import numpy as np

from faser.arrays import FloatArray, IntArray
from faser.cost.curve import Curve
from faser.cost.profile import Profile
from faser.request import Request, SamplingParams
from faser.sim.oracle import Draw, Drawn, runs_of, uniforms
from faser.sim.replica import Machine, load_profile, make_replica
from faser.traffic.document import Workload
from faser.traffic.play import play
from faser.traffic.summary import summarize
from faser.traffic.traces import Timing
from faser.traffic.workload import Load, Vocabulary, WorkloadOptions, make_workload

AIM = 0.99
MAX_STEP_MS = 50.0  # the default of `faser simulate`
MAX_MODEL_LEN = 4096
SPREAD = 0.05  # of acceptance, over requests
HOPELESS = 0.95  # a fixed length below this share of the best column in both figures ends the row of lengths
TURN_PROMPT, TURN_TOKENS = 256, 1200  # of a request whose text turns; output tokens before the turn, and after it
TURN_SIZES = "1,8,32,128"
PROMPT_ROWS = 1024  # of the step at which the cost of a prompt row is read off
FIGURES = ("tokens_per_s", "seconds_per_token")
BOTH = "both"  # a score: the better of the two, against the column that is ahead in both the most
COLUMNS = "faser,off,fixed:1,fixed:2,fixed:3,fixed:4,fixed:5,fixed:7,table,goodput,nightjar"
QUICK = {
    "columns": "faser,off,fixed:1,fixed:2,fixed:4,fixed:7",
    "acceptance": "0.3,0.85",
    "loads": "quiet,saturated,square",
    "pairs": "8b-1b",
    "scale": "0.3",
}


@dataclass(frozen=True)
class Mix:
    prompt: tuple[int, int]
    answer: tuple[int, int]

    @property
    def mean_prompt(self) -> float:
        return fmean(self.prompt)

    @property
    def mean_answer(self) -> float:
        return fmean(self.answer)


@dataclass(frozen=True)
class Shape:
    """A load: arrivals in shares of saturation, for some seconds."""

    arrivals: str  # with {} where a rate stands
    shares: tuple[float, ...]
    seconds: float
    period: float = 0.0

    def options(self, saturation: float, factor: float) -> tuple[str, float]:
        """`--arrivals` and `--duration` where `off` saturates at this rate; times are multiplied by the factor."""
        rates = [f"{share * saturation:.4f}" for share in self.shares]
        times = [f"{self.period * factor:.4f}"] if self.period else []
        return ":".join([self.arrivals, *rates, *times]), self.seconds * factor


MIXES = {
    "chat": Mix((128, 896), (96, 320)),
    "code": Mix((512, 1536), (16, 64)),
    "long": Mix((1000, 2000), (300, 500)),
}
LOADS = {
    "quiet": Shape("poisson", (0.1,), 20.0),
    "busy": Shape("poisson", (0.6,), 16.0),
    "saturated": Shape("poisson", (1.2,), 12.0),
    "square": Shape("square", (0.1, 0.95), 40.0, period=20.0),
    "spike": Shape("steps", (0.2,) * 5 + (3.0,) + (0.2,) * 9, 20.0),
    "ramp": Shape("ramp", (0.05, 1.2), 20.0),
}
PAIRS = ("8b-1b", "8b-head", "32b-0.6b", "fp8-8b-1b")
TIMES = {"32b-0.6b": 3.5}  # an 8B's times, multiplied
ACCEPTANCE = "0.1,0.3,0.5,0.7,0.85,0.95"


# ── profiles ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@cache
def profile_of(pair: str) -> Profile:
    if pair == "32b-0.6b":
        return load_profile("h200-32b-0.6b")
    base = load_profile("h200-8b-1b")
    return {"8b-1b": lambda given: given, "8b-head": as_head, "fp8-8b-1b": as_fp8}[pair](base)


def as_head(base: Profile) -> Profile:
    """An EAGLE-3 head of one layer in place of the 1B draft. Derived, not measured.

    At 4.8 TB/s and the efficiency of the 1B's forwards a head reads 0.75 GB (layer 0.49, output of 32k tokens 0.26) in
    0.24 ms a token, and 0.07 ms more for the first; the 1B takes 0.69 and 0.755. All curves are scaled by these ratios.
    Context: one layer with keys twice as wide in place of sixteen, an eighth of the seconds.
    """
    first, further = 0.31 / 0.755, 0.24 / 0.69
    return replace(
        base,
        about={**base.about, "draft": "EAGLE-3 head (derived)"},
        first_draft=scaled(base.first_draft, first, 1 / 8),
        next_draft=scaled(base.next_draft, further, 1 / 8),
        catch_up=scaled(base.catch_up, first, 1 / 8),
    )


def as_fp8(base: Profile) -> Profile:
    """An FP8 target with the same bf16 draft. Derived, not measured; today's FP8 kernels gain less (docs/lab.md).

    Half of the weights' 3.4 ms falls away at every number of rows. Steps with prompts are bound by arithmetic: their
    products take 0.8 of the seconds, at twice the speed, so 0.6 of the seconds remain.
    """
    verify = replace(base.verify, seconds=tuple(each - 1.7e-3 for each in base.verify.seconds))
    prompts = scaled(base.prompts, 0.6, 1.0)
    return replace(base, about={**base.about, "model": "8B in FP8 (derived)"}, verify=verify, prompts=prompts)


def scaled(curve: Curve, seconds: float, per_token: float) -> Curve:
    return replace(
        curve,
        seconds=tuple(seconds * each for each in curve.seconds),
        per_token=tuple(per_token * each for each in curve.per_token),
    )


def machine_of(pair: str) -> Machine:
    profile = profile_of(pair)
    return Machine(
        profile=profile,
        kv_tokens=int(profile.about["kv_tokens"]),
        max_model_len=MAX_MODEL_LEN,
        max_step_ms=MAX_STEP_MS,
    )


def saturation(pair: str, mix: Mix) -> float:
    """Requests per second that `off` can answer, by the profile: as many as fit run at once."""
    machine = machine_of(pair)
    context = mix.mean_prompt + mix.mean_answer / 2
    size = min(machine.max_running, int((machine.kv_tokens or math.inf) / (mix.mean_prompt + mix.mean_answer)))
    decode = float(machine.profile.verify(size, size * context)) * mix.mean_answer / size
    prompt = float(machine.profile.prompts(PROMPT_ROWS, 0.0)) / PROMPT_ROWS * mix.mean_prompt
    return 1 / (decode + prompt)


# ── runs ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, order=True)
class Cell:
    pair: str
    mix: str
    acceptance: float
    load: str


@dataclass(frozen=True)
class Played:
    """One column in one cell, with one seed."""

    cell: Cell
    column: str
    seed: int
    tokens_per_s: float
    seconds_per_token: float
    mean_length: float

    def worth(self, figure: str) -> float:
        """More is better."""
        return self.tokens_per_s if figure == "tokens_per_s" else 1 / self.seconds_per_token

    def line(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, line: str) -> Played:
        given = json.loads(line)
        return cls(**{**given, "cell": Cell(**given["cell"])})


def workload_of(cell: Cell, seed: int, scale: float) -> Workload:
    mix, factor = MIXES[cell.mix], scale * TIMES.get(cell.pair, 1.0)
    arrivals, seconds = LOADS[cell.load].options(saturation(cell.pair, mix), factor)
    options = WorkloadOptions(
        arrivals=arrivals,
        timing=Timing(duration=seconds),
        prompt_len=mix.prompt,
        output_len=mix.answer,
        prompts="random",
        seed=seed,
    )
    return make_workload(options, Load(), Vocabulary(1, MAX_MODEL_LEN, None, is_blank=True))


def play_column(cell: Cell, column: str, seed: int, workload: Workload) -> Played:
    oracle = Draw(cell.acceptance, SPREAD).oracle([item.category for item in workload.items], seed)
    replica = make_replica(machine_of(cell.pair), column, oracle, seed)
    summary = summarize(play(replica.engine, workload, column, clock=replica.time.clock))
    rate, latency = summary["output_tokens_per_s"], summary["latency_per_token_mean"]
    assert rate is not None
    assert latency is not None
    assert not summary["lost"]
    return Played(cell, column, seed, rate, latency, summary["mean_length"] or 0.0)


def play_cell(cell: Cell, seed: int, columns: Sequence[str], scale: float, known: Sequence[Played]) -> list[Played]:
    """The columns that are not yet `known`."""
    workload = workload_of(cell, seed, scale)
    played = {each.column: each for each in known}
    found, ended = [], False
    for column in columns:
        if column.startswith("fixed:"):
            if ended:
                continue
            if column not in played:
                found.append(play_column(cell, column, seed, workload))
                played[column] = found[-1]
            ended = is_hopeless(played[column], list(played.values()))
        elif column not in played:
            found.append(play_column(cell, column, seed, workload))
            played[column] = found[-1]
    return found


def is_hopeless(one: Played, others: Sequence[Played]) -> bool:
    """Whether longer fixed lengths than this one need not be played."""
    return all(one.worth(name) < HOPELESS * max(each.worth(name) for each in others) for name in FIGURES)


# ── scores ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Score:
    """`faser` in one cell by one figure."""

    cell: Cell
    figure: str
    score: float  # its worth over that of the best other column, means over seeds
    best: str
    spread: float  # largest less smallest score of a seed against that column
    mean_length: float


def scores_of(runs: Sequence[Played], subject: str) -> Iterator[Score]:
    for cell in sorted({each.cell for each in runs}):
        mine = [each for each in runs if each.cell == cell]
        against: dict[str, list[float]] = {}  # by column: its ratios in all figures
        for figure in FIGURES:
            worth: dict[str, dict[int, float]] = {}
            for each in mine:
                worth.setdefault(each.column, {})[each.seed] = each.worth(figure)
            own = worth.pop(subject, {})
            others = {name: found for name, found in worth.items() if found.keys() == own.keys()}
            if not own or not others:
                continue
            best = max(others, key=lambda name: fmean(others[name].values()))
            ratios = [own[seed] / others[best][seed] for seed in own]
            score = fmean(own.values()) / fmean(others[best].values())
            length = fmean(each.mean_length for each in mine if each.column == subject)
            yield Score(cell, figure, score, best, max(ratios) - min(ratios), length)
            for name, found in others.items():
                against.setdefault(name, []).append(fmean(own.values()) / fmean(found.values()))
        if against:
            best = min(against, key=lambda name: max(against[name]))
            yield Score(cell, BOTH, max(against[best]), best, 0.0, length)


def show(scores: Sequence[Score], worst: int) -> None:
    print(f"{'pair':10} {'mix':5} {'acc':>4} {'load':10} {'figure':18} {'score':>6} {'±seeds':>7} {'length':>6}  best")
    for each in sorted(scores, key=lambda each: each.score)[:worst]:
        cell = each.cell
        print(
            f"{cell.pair:10} {cell.mix:5} {cell.acceptance:4.2f} {cell.load:10} {each.figure:18} {each.score:6.3f}"
            f" {each.spread:7.3f} {each.mean_length:6.2f}  {each.best}"
        )


def summary_of(scores: Sequence[Score]) -> dict[str, object]:
    def of(name: str) -> dict[str, float]:
        found = [each.score for each in scores if each.figure == name]
        below = sum(each < AIM for each in found)
        return {"cells": len(found), "below": below, "worst": min(found), "mean": fmean(found), "best": max(found)}

    return {name: of(name) for name in (*FIGURES, BOTH) if any(each.figure == name for each in scores)}


# ── a change of the text's character ─────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Turned:
    """An oracle: every request is accepted at one rate up to an output position, at another from there on."""

    before: Drawn
    after: Drawn
    at: int

    def runs(self, request: int, size: int) -> IntArray:
        return runs_of(uniforms(self.before.seed, 2 * request + 1, np.arange(size)) < self.confidence(request, 0, size))

    def confidence(self, request: int, first: int, size: int) -> FloatArray:
        early, late = (each.confidence(request, first, size) for each in (self.before, self.after))
        return np.where(np.arange(first, first + size) < self.at, early, late)


class Progressed:
    """Virtual time by output tokens of all requests."""

    def __init__(self) -> None:
        self.tokens, self.times = [0], [0.0]

    def until(self, tokens: int) -> float:
        return float(np.interp(tokens, self.tokens, self.times))


def progress_of(size: int, rates: tuple[float, float], seed: int) -> Progressed:
    """A closed loop of `size` requests whose acceptance turns from one rate to the other."""
    # all alike: requests that progress at different speeds would not turn at once
    before, after = (Draw(rate).oracle([""] * size, seed) for rate in rates)
    replica = make_replica(machine_of("8b-1b"), "faser", Turned(before, after, TURN_TOKENS), seed)
    progressed, engine, clock = Progressed(), replica.engine, replica.time.clock
    params = SamplingParams(max_tokens=2 * TURN_TOKENS, temperature=0.0, ignore_eos=True)
    for index in range(size):
        engine.add(Request(id=str(index), prompt_token_ids=(0,) * TURN_PROMPT, params=params, seed=index))
    while engine.has_work:
        engine.step()
        progressed.tokens.append(engine.stats.emitted)
        progressed.times.append(clock.now())
    return progressed


def regret_of(size: int, rates: tuple[float, float], seed: int) -> float:
    """Seconds lost by a turn, against a policy that had learned the new rate before.

    Both halves are compared with runs at a constant rate: the first with one at the old rate, the second with one at
    the new rate.
    """
    half = size * TURN_TOKENS
    old, new = (progress_of(size, (rate, rate), seed) for rate in rates)
    expected = old.until(half) + new.until(2 * half) - new.until(half)
    return progress_of(size, rates, seed).until(2 * half) - expected


def run_turns(sizes: Sequence[int], seeds: Sequence[int]) -> None:
    figures = []
    print(f"{'requests':>8} {'acceptance':>12}  seconds of regret, by seed")
    for size, rates in product(sizes, ((0.9, 0.2), (0.2, 0.9))):
        found = [regret_of(size, rates, seed) for seed in seeds]
        print(f"{size:8} {rates[0]:.1f} → {rates[1]:.1f}    {'  '.join(f'{each:5.2f}' for each in found)}", flush=True)
        figures.append({"requests": size, "before": rates[0], "after": rates[1], "seconds": found})
    print(json.dumps({"benchmark": "regret", "turns": figures}))


# ── the command ──────────────────────────────────────────────────────────────────────────────────────────────────────


def cells_of(args: argparse.Namespace) -> list[Cell]:
    named = (
        args.pairs.split(","),
        args.mixes.split(","),
        map(float, args.acceptance.split(",")),
        args.loads.split(","),
    )
    return [Cell(*each) for each in product(*named)]


def known_runs(journal: Path | None) -> list[Played]:
    if journal is None or not journal.is_file():
        return []
    return [Played.parse(line) for line in journal.read_text(encoding="utf-8").splitlines() if line.endswith("}")]


def run_matrix(args: argparse.Namespace) -> list[Played]:
    cells, columns = cells_of(args), args.columns.split(",")
    seeds = [int(seed) for seed in args.seeds.split(",")]
    wanted = {(cell, seed) for cell in cells for seed in seeds}
    runs = [each for each in known_runs(args.journal) if (each.cell, each.seed) in wanted and each.column in columns]
    with ProcessPoolExecutor(args.jobs) as pool:
        futures = []
        for cell, seed in product(cells, seeds):
            known = [each for each in runs if each.cell == cell and each.seed == seed]
            futures.append(pool.submit(play_cell, cell, seed, columns, args.scale, known))
        for number, future in enumerate(as_completed(futures), 1):
            found = future.result()
            runs += found
            if args.journal is not None and found:
                with args.journal.open("a", encoding="utf-8") as file:
                    file.writelines(each.line() + "\n" for each in found)
            print(f"\r{number} of {len(futures)} cells and seeds", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return runs


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few cells and columns, shorter traffic")
    parser.add_argument("--turn", action="store_true", help="the text's character changes, instead of the matrix")
    parser.add_argument("--sizes", default=TURN_SIZES, help="requests of a turn's closed loops")
    parser.add_argument("--pairs", default=",".join(PAIRS))
    parser.add_argument("--mixes", default=",".join(MIXES))
    parser.add_argument("--acceptance", default=ACCEPTANCE)
    parser.add_argument("--loads", default=",".join(LOADS))
    parser.add_argument("--columns", default=COLUMNS)
    parser.add_argument("--subject", default="faser", help="the column that is scored")
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--scale", type=float, default=1.0, help="of all times")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--journal", type=Path)
    parser.add_argument("--worst", type=int, default=20)
    args = parser.parse_args(arguments)
    if args.quick:
        parser.set_defaults(**QUICK)
        args = parser.parse_args(arguments)
    for given, known in ((args.pairs, PAIRS), (args.mixes, MIXES), (args.loads, LOADS)):
        for name in given.split(","):
            if name not in known:
                parser.error(f"{name}: expected one of {', '.join(known)}")
    return args


def main() -> int:
    args = parse()
    if args.turn:
        run_turns([int(size) for size in args.sizes.split(",")], [int(seed) for seed in args.seeds.split(",")])
        return 0
    runs = run_matrix(args)
    scores = list(scores_of(runs, args.subject))
    show(scores, args.worst)
    about = {"subject": args.subject, "seeds": args.seeds, "scale": args.scale, "columns": args.columns}
    cells = [
        {**asdict(each.cell), **{name: value for name, value in asdict(each).items() if name != "cell"}}
        for each in sorted(scores, key=lambda each: each.score)
    ]
    print(json.dumps({"benchmark": "regret", "about": about, "summary": summary_of(scores), "scores": cells}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
