"""Makes workloads: arrivals from a trace or a process, lengths, prompts; saves and loads them.

Everything is drawn from one seed: the same options give the same requests, and another load gives the same prompts at
other times. A workload file is JSON Lines, one request a line, which scripts play through other systems:
{"arrival": …, "prompt_token_ids": […], "max_tokens": …, "category": …}.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from faser.errors import ConfigError
from faser.traffic.document import Item, Workload
from faser.traffic.prompts import RANDOM, BlankPrompts, Prompts, RandomPrompts, TextPrompts, read_texts
from faser.traffic.traces import Timing, TraceRow, parse_arrivals, read_trace, retime

DEFAULT_ARRIVALS = "poisson:1"
DEFAULT_DURATION = 30.0
LEAST_CLOSED = 16  # requests of a closed loop, or
ROUNDS_CLOSED = 4  # times its concurrency, whichever is more


@dataclass(frozen=True)
class Vocabulary:
    """What prompts are made of."""

    vocab_size: int
    max_model_len: int | None  # None where it is not known
    encode: Callable[[str], list[int]] | None  # None without a tokenizer: only random prompts are possible
    # what the chat template puts before and after a message
    around: tuple[list[int], list[int]] = field(default_factory=lambda: ([], []))
    is_blank: bool = False  # prompts have a length and a category, and hold only zeros


@dataclass(frozen=True)
class Load:
    """How much traffic: a mean rate, a concurrency, or, with neither, the source's own rate."""

    rate: float | None = None
    concurrency: int | None = None


@dataclass(frozen=True, kw_only=True)
class WorkloadOptions:
    """The traffic options of `faser bench`, checked."""

    trace: str | None = None  # gives arrivals and lengths; with `arrivals` given, only lengths
    arrivals: str | None = None
    timing: Timing = field(default_factory=Timing)
    requests: int | None = None  # the most
    prompt_len: tuple[int, int] = (128, 128)  # without a trace: uniform between these
    output_len: tuple[int, int] = (64, 64)
    length_scale: float = 1.0
    max_prompt: int | None = None
    max_output: int | None = None
    prompts: str = "specbench"
    seed: int = 0

    def __post_init__(self) -> None:
        timing = self.timing
        for name, value, positive in (
            ("--requests", self.requests, True),
            ("--length-scale", self.length_scale, True),
            ("--max-prompt", self.max_prompt, True),
            ("--max-output", self.max_output, True),
            ("--start", timing.start, False),
            ("--duration", timing.duration, True),
            ("--span", timing.span, True),
            ("--scale", timing.scale, True),
            ("--rate", timing.rate, True),
        ):
            if value is not None and not (0 < value < math.inf or (value == 0 and not positive)):
                raise ConfigError(f"{name} {value:g}: expected a number above 0")
        for name, (least, most) in (("--prompt-len", self.prompt_len), ("--output-len", self.output_len)):
            if not 1 <= least <= most:
                raise ConfigError(f"{name} {least}..{most}: expected tokens, at least 1, the smaller number first")
        if timing.scale is not None and timing.rate is not None:
            raise ConfigError("--rate and --scale both set the rate; give one of them")
        if self.arrivals is not None and (timing.span is not None or timing.start):
            raise ConfigError("--start and --span cut a trace's time; --arrivals has its own, give its --duration")


def make_workload(options: WorkloadOptions, load: Load, vocabulary: Vocabulary) -> Workload:
    rows = _fit(_rows(options, load), options, vocabulary.max_model_len)
    prompts = _prompts(options, vocabulary)
    first = rows[0].arrival
    items = []
    for row in rows:
        category, token_ids = prompts.take(row.num_prompt)
        items.append(Item(row.arrival - first, token_ids, row.num_output, category))
    return Workload(tuple(items), load.concurrency, {**_describe(options), **describe_items(items)})


def check_traffic(options: WorkloadOptions, loads: Iterable[Load]) -> None:
    """Raises ConfigError for everything that is wrong whatever the model."""
    for load in loads:
        _rows(options, load)
    if options.prompts != RANDOM:
        read_texts(options.prompts)


def poisson_traffic(options: WorkloadOptions, rate: float, least: int) -> WorkloadOptions:
    """Poisson arrivals for the default duration, or longer, until `least` requests have arrived."""
    process = f"poisson:{rate:g}"
    longest = max(DEFAULT_DURATION, 20 * least / rate)
    times = parse_arrivals(process).times(longest, _generator(options, 0))
    duration = max(DEFAULT_DURATION, math.ceil(times[:least][-1]))
    return replace(options, arrivals=process, timing=replace(options.timing, duration=duration))


def probe_items(options: WorkloadOptions, vocabulary: Vocabulary, number: int) -> tuple[Item, ...]:
    """Requests with the traffic's lengths, for a calibration. Random tokens, so that no prefix is cached."""
    probe = replace(options, prompts=RANDOM, requests=number)
    return make_workload(probe, Load(concurrency=1), vocabulary).items


def _generator(options: WorkloadOptions, purpose: int) -> np.random.Generator:
    """One generator per purpose, so that a draw for one does not shift the others."""
    return np.random.default_rng([options.seed, purpose])


def _rows(options: WorkloadOptions, load: Load) -> list[TraceRow]:
    timing = options.timing if load.rate is None else replace(options.timing, rate=load.rate, scale=None)
    if load.concurrency is not None:
        number = options.requests or max(LEAST_CLOSED, ROUNDS_CLOSED * load.concurrency)
        return _lengths(options, [0.0] * number)
    if options.trace is not None and options.arrivals is None:
        return retime(read_trace(options.trace), timing, _generator(options, 0))[: options.requests]
    arrivals = parse_arrivals(options.arrivals or DEFAULT_ARRIVALS)
    duration = timing.duration or DEFAULT_DURATION
    factor = timing.rate / arrivals.mean_rate(duration) if timing.rate is not None else timing.scale or 1.0
    times = arrivals.times(duration, _generator(options, 0), factor)[: options.requests].tolist()
    if not times:
        raise ConfigError(f"no request arrives within {duration:g} s; raise the rate or the --duration")
    return _lengths(options, times)


def _lengths(options: WorkloadOptions, times: Sequence[float]) -> list[TraceRow]:
    """Rows at these times, with the trace's lengths in turn, or with drawn ones."""
    if options.trace is not None:
        rows = [row for row in read_trace(options.trace) if row.arrival >= options.timing.start]
        if not rows:
            raise ConfigError(f"--start {options.timing.start:g}: the trace {options.trace} has ended by then")
        return [replace(rows[i % len(rows)], arrival=time) for i, time in enumerate(times)]
    random = _generator(options, 1)
    (least, most), (least_output, most_output) = options.prompt_len, options.output_len
    return [
        TraceRow(time, int(random.integers(least, most + 1)), int(random.integers(least_output, most_output + 1)))
        for time in times
    ]


def _fit(rows: Sequence[TraceRow], options: WorkloadOptions, max_model_len: int | None) -> list[TraceRow]:
    """Scale the lengths, then cut them to the options and to the model; an output is cut before a prompt."""
    most = max_model_len or math.inf
    fitted = []
    for row in rows:
        prompt = min(max(1, round(row.num_prompt * options.length_scale)), options.max_prompt or math.inf)
        output = min(max(1, round(row.num_output * options.length_scale)), options.max_output or math.inf)
        prompt = min(prompt, most - 1)
        fitted.append(TraceRow(row.arrival, int(prompt), int(min(output, most - prompt))))
    return fitted


def _prompts(options: WorkloadOptions, vocabulary: Vocabulary) -> Prompts:
    random = _generator(options, 2)
    if vocabulary.is_blank:
        texts = {RANDOM: [""]} if options.prompts == RANDOM else read_texts(options.prompts)
        return BlankPrompts(texts, random)
    if options.prompts == RANDOM:
        return RandomPrompts(vocabulary.vocab_size, random)
    texts = read_texts(options.prompts)
    if vocabulary.encode is None:
        raise ConfigError(f"the model has no tokenizer, so no text can be its prompt; give --prompts {RANDOM}")
    return TextPrompts(texts, vocabulary.encode, vocabulary.around, random)


def _describe(options: WorkloadOptions) -> dict[str, Any]:
    given = asdict(options)
    timing = given["timing"].items()
    given["timing"] = {name: value for name, value in timing if value is not None and value is not False}
    if options.trace is None:
        given["arrivals"] = options.arrivals or DEFAULT_ARRIVALS
    else:
        del given["prompt_len"], given["output_len"]
    return {name: value for name, value in given.items() if value is not None}


def describe_items(items: Sequence[Item]) -> dict[str, Any]:
    """Sizes, for the report."""
    return {
        "num_requests": len(items),
        "seconds": items[-1].arrival,
        "mean_prompt_tokens": fmean(len(item.prompt_token_ids) for item in items),
        "mean_output_tokens": fmean(item.max_tokens for item in items),
        "categories": sorted({item.category for item in items}),
    }


def describe_loads(played: Sequence[tuple[Load, Workload]]) -> dict[str, Any]:
    """What all loads have in common, and under `loads` the sizes of each."""
    sizes = ("num_requests", "seconds", "mean_prompt_tokens", "mean_output_tokens")
    about = {name: value for name, value in played[0][1].about.items() if name not in sizes}
    loads = [{**asdict(load), **{name: workload.about[name] for name in sizes}} for load, workload in played]
    return {**about, "loads": loads}


def mean_rate(items: Sequence[Item]) -> float | None:
    """Requests per second, from the first arrival to the last; None if all arrive at once."""
    seconds = items[-1].arrival - items[0].arrival
    return (len(items) - 1) / seconds if seconds else None


def own_rate(options: WorkloadOptions) -> float:
    """Requests per second of the source itself."""
    rows = _rows(replace(options, timing=replace(options.timing, rate=None)), Load())
    return len(rows) / (rows[-1].arrival or 1.0)


def at_rate(workload: Workload, load: Load) -> Workload:
    """A workload from a file under another load: its arrivals are stretched to the rate."""
    natural = mean_rate(workload.items)
    items = workload.items
    if load.rate is not None:
        if natural is None:
            raise ConfigError("the workload's requests arrive all at once; no rate can be made of that")
        items = tuple(replace(item, arrival=item.arrival * natural / load.rate) for item in items)
    return Workload(items, load.concurrency, {**workload.about, **describe_items(items)})


# ── files ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def save_workload(workload: Workload, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(asdict(item)) + "\n" for item in workload.items)


def load_workload(path: Path) -> Workload:
    try:
        with path.open(encoding="utf-8") as file:
            lines = [line for line in file if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--workload {path}: cannot be read ({error})") from None
    items: list[Item] = []
    for number, line in enumerate(lines, start=1):
        try:
            items.append(_item(json.loads(line)))
            if number > 1 and items[-1].arrival < items[-2].arrival:
                raise ValueError("it arrives before the line above; sort the file by arrival")
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            reason = f"no {error}" if isinstance(error, KeyError) else str(error)
            raise ConfigError(f"--workload {path}: line {number}: {reason}") from None
    if not items:
        raise ConfigError(f"--workload {path}: it holds no request; expected one a line")
    return Workload(tuple(items), None, {"file": path.name, **describe_items(items)})


def check_tokens(workload: Workload, vocab_size: int) -> None:
    """Raises ConfigError for token ids outside the model's vocabulary."""
    highest = max(max(item.prompt_token_ids) for item in workload.items)
    if highest >= vocab_size:
        raise ConfigError(
            f"the workload holds token {highest}, and the model has {vocab_size} tokens; it was made for another model"
        )


def _item(given: dict[str, Any]) -> Item:
    arrival, token_ids, max_tokens = given["arrival"], given["prompt_token_ids"], given["max_tokens"]
    if isinstance(arrival, bool) or not isinstance(arrival, int | float) or not 0 <= arrival < math.inf:
        raise ValueError(f"arrival {arrival!r}: expected seconds, 0 or more")
    if not isinstance(max_tokens, int) or max_tokens < 1:
        raise ValueError(f"max_tokens {max_tokens!r}: expected an integer of at least 1")
    known = token_ids if isinstance(token_ids, list) else []
    if not known or not all(type(token) is int and token >= 0 for token in known):
        raise ValueError("prompt_token_ids: expected a list of token ids, at least one")
    return Item(float(arrival), tuple(token_ids), max_tokens, str(given.get("category", "")))
