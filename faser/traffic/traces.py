"""Traces: arrival, prompt length and output length of recorded requests; and synthetic arrivals by name.

Reads CSV and JSON Lines, plain or compressed with xz, under the usual column names. Randomness is an argument. Knows
nothing of tokens or text.
"""

from __future__ import annotations

import csv
import json
import lzma
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import lru_cache, partial
from pathlib import Path
from typing import IO, Any

import numpy as np

from faser.arrays import FloatArray
from faser.errors import ConfigError

DATA = Path(__file__).parent / "data"
SHIPPED = {"azure-conv": DATA / "azure-conv.csv.xz", "azure-code": DATA / "azure-code.csv.xz"}

_COLUMNS = {
    "arrival": ("arrival", "timestamp"),
    "num_prompt": ("prompt_tokens", "contexttokens", "prompt_length", "input_length"),
    "num_output": ("output_tokens", "generatedtokens", "output_length"),
}


@dataclass(frozen=True)
class TraceRow:
    """One request of a trace."""

    arrival: float  # seconds
    num_prompt: int
    num_output: int


def open_text(path: Path) -> IO[str]:
    if path.suffix == ".xz":
        return lzma.open(path, "rt", encoding="utf-8-sig", newline="")
    return path.open(encoding="utf-8-sig", newline="")


@lru_cache(maxsize=2)  # read again for every load
def read_trace(name: str) -> tuple[TraceRow, ...]:
    """A shipped trace by name, or a file. Arrivals count from the first row."""
    path = SHIPPED.get(name) or Path(name).expanduser()
    if not path.is_file():
        raise ConfigError(f"trace {name}: no such file; give a CSV or JSON Lines file, or one of {', '.join(SHIPPED)}")
    try:
        with open_text(path) as file:
            rows = list(_rows(_records(file, path), name))
    except (OSError, EOFError, lzma.LZMAError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"trace {name}: cannot be read ({error or type(error).__name__}); is it complete?") from None
    if not rows:
        raise ConfigError(f"trace {name}: it holds no request; expected one a line")
    return tuple(replace(row, arrival=row.arrival - rows[0].arrival) for row in rows)


def _records(file: IO[str], path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """(line number, record)."""
    if ".csv" in path.suffixes:
        reader = csv.DictReader(file)
        yield from ((reader.line_num, record) for record in reader)
        return
    for number, line in enumerate(file, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"trace {path}: line {number} is no JSON ({error}); name a CSV file .csv") from None
        if not isinstance(record, dict):
            raise ConfigError(f"trace {path}: line {number}: expected an object")
        yield number, record


def _rows(records: Iterable[tuple[int, Mapping[str, Any]]], name: str) -> Iterator[TraceRow]:
    before = -math.inf
    for number, record in records:
        try:
            row = _row({str(key).strip().lower(): value for key, value in record.items()})
            if row.arrival < before:
                raise ConfigError("it arrives before the line above; sort the file by arrival")
        except ConfigError as error:
            raise ConfigError(f"trace {name}: line {number}: {error}") from None
        before = row.arrival
        yield row


def _row(record: Mapping[str, Any]) -> TraceRow:
    found = {}
    for field, columns in _COLUMNS.items():
        present = [record[column] for column in columns if record.get(column) is not None]
        if not present:
            given = ", ".join(record) or "none"
            raise ConfigError(f"no column {' or '.join(columns)}; its columns are: {given}")
        found[field] = present[0]
    return TraceRow(
        _seconds(found["arrival"]), _count(found["num_prompt"], "prompt"), _count(found["num_output"], "output")
    )


def _seconds(value: Any) -> float:
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        seconds = _timestamp(value)
    if not 0 <= seconds < math.inf:
        raise ConfigError(f"arrival {value!r}: expected seconds, 0 or more, or a date and time")
    return seconds


def _timestamp(value: Any) -> float:
    try:
        when = datetime.fromisoformat(str(value))
    except ValueError:
        return math.nan
    return (when if when.tzinfo is not None else when.replace(tzinfo=UTC)).timestamp()


def _count(value: Any, what: str) -> int:
    try:
        count = int(value)
    except (TypeError, ValueError):
        count = -1
    if count < 0:
        raise ConfigError(f"{what} length {value!r}: expected a number of tokens")
    return max(1, count)  # the engine takes no request without tokens


@dataclass(frozen=True)
class Timing:
    """Which part of a trace is played, and how fast. Seconds; None changes nothing."""

    start: float = 0.0
    duration: float | None = None  # of the trace, from `start` on
    span: float | None = None  # the length `duration` is compressed or stretched to
    scale: float | None = None  # factor on the rate
    rate: float | None = None  # requests per second on average, instead of `scale`
    repeats: bool = False  # with a span: reach a rate above the trace's by taking requests several times


def retime(rows: Sequence[TraceRow], timing: Timing, random: np.random.Generator) -> list[TraceRow]:
    """Clip, then change the rate: by stretching time or, with a span, by leaving requests out."""
    end = math.inf if timing.duration is None else timing.start + timing.duration
    kept = [replace(r, arrival=r.arrival - timing.start) for r in rows if timing.start <= r.arrival < end]
    if not kept:
        raise ConfigError(
            f"no request between second {timing.start:g} and {end:g} of the trace; it lasts {rows[-1].arrival:.0f} s"
        )
    duration = timing.duration or kept[-1].arrival or 1.0
    if timing.span is not None:
        kept = _stretched(kept, timing.span / duration)
        duration = timing.span
    natural = len(kept) / duration
    wanted = timing.rate if timing.rate is not None else natural * (timing.scale or 1.0)
    if timing.span is None:
        return _stretched(kept, natural / wanted)
    count = max(1, round(wanted * duration))
    if count > len(kept) and timing.repeats:
        return _repeated(kept, count, duration, random)
    if count > len(kept):
        raise ConfigError(
            f"{wanted:g} requests/s for {duration:g} s are {count} requests; that part of the trace has {len(kept)}: "
            "take a longer --duration, or leave out --span"
        )
    return [kept[i] for i in sorted(random.permutation(len(kept))[:count])]


def _repeated(rows: Sequence[TraceRow], count: int, duration: float, random: np.random.Generator) -> list[TraceRow]:
    """Take every request equally often, give or take one.

    A copy arrives between its original and the next request, so that the load keeps the shape of the trace.
    """
    times, rest = divmod(count, len(rows))
    chosen = np.concatenate([np.repeat(np.arange(len(rows)), times), random.permutation(len(rows))[:rest]])
    edges = np.array([*(row.arrival for row in rows), duration])
    arrivals = edges[chosen] + random.random(count) * np.diff(edges)[chosen]
    order = np.argsort(arrivals, kind="stable")
    copies = zip(arrivals[order].tolist(), chosen[order].tolist(), strict=True)
    return [TraceRow(arrival, rows[i].num_prompt, rows[i].num_output) for arrival, i in copies]


def _stretched(rows: Sequence[TraceRow], factor: float) -> list[TraceRow]:
    return [replace(row, arrival=row.arrival * factor) for row in rows]


# ── synthetic arrivals ───────────────────────────────────────────────────────────────────────────────────────────────

_EXPECTED_ARRIVALS = (
    "poisson:RATE, gamma:RATE:SHAPE (below 1 in bursts, above 1 even), square:LOW:HIGH:PERIOD, ramp:LOW:HIGH or "
    "steps:RATE:RATE:… (equal parts of the time), with rates per second"
)
_GRID = 10_000  # intervals at whose ends the expected number of arrivals is known


@dataclass(frozen=True)
class Arrivals:
    """`rate(times, duration)` per second. Intervals are gamma distributed; shape 1 is exponential.

    A stream of unit rate is mapped through the inverse of the expected number of arrivals up to a time.
    """

    rate: Callable[[FloatArray, float], FloatArray]
    shape: float = 1.0

    def mean_rate(self, duration: float) -> float:
        return float(self._expected_arrivals(duration)[1][-1] / duration)

    def times(self, duration: float, random: np.random.Generator, factor: float = 1.0) -> FloatArray:
        """Sorted arrival times within `duration` seconds, with every rate multiplied by `factor`."""
        grid, expected = self._expected_arrivals(duration)
        total = float(expected[-1]) * factor
        loads: FloatArray = np.zeros(0)
        while not loads.size or loads[-1] < total:
            more = random.gamma(self.shape, 1 / self.shape, size=int(total) + 64)
            loads = np.concatenate([loads, (loads[-1] if loads.size else 0.0) + more.cumsum()])
        times: FloatArray = np.interp(loads[loads < total], expected * factor, grid)
        return times

    def _expected_arrivals(self, duration: float) -> tuple[FloatArray, FloatArray]:
        """A grid of times, and the number of requests expected up to each."""
        grid: FloatArray = np.linspace(0, duration, _GRID + 1)
        middles = (grid[1:] + grid[:-1]) / 2
        return grid, np.concatenate([[0.0], (self.rate(middles, duration) * np.diff(grid)).cumsum()])


def parse_arrivals(text: str) -> Arrivals:
    kind, *given = text.split(":")
    try:
        numbers = [float(value) for value in given]
        if not all(0 <= number < math.inf for number in numbers):
            raise ValueError
        return _MAKERS[kind](*numbers)
    except (KeyError, TypeError, ValueError):  # unknown name, wrong count, no number
        raise ConfigError(f"--arrivals {text}: expected {_EXPECTED_ARRIVALS}") from None


def _gamma(rate: float, shape: float) -> Arrivals:
    if not rate or not shape:
        raise ValueError
    return Arrivals(lambda times, duration: np.full_like(times, rate), shape)


def _square(low: float, high: float, period: float) -> Arrivals:
    """LOW in the first half of every period, HIGH in the second."""
    if not period or not low + high:
        raise ValueError
    return Arrivals(lambda times, duration: np.where(times % period < period / 2, low, high))


def _ramp(low: float, high: float) -> Arrivals:
    if not low + high:
        raise ValueError
    return Arrivals(lambda times, duration: low + (high - low) * times / duration)


def _steps(*rates: float) -> Arrivals:
    """Each rate for an equal part of the duration."""
    if not sum(rates):
        raise ValueError
    known = np.array(rates)
    return Arrivals(lambda times, duration: known[(times / duration * known.size).astype(np.int64)])


_MAKERS: dict[str, Callable[..., Arrivals]] = {
    "poisson": partial(_gamma, shape=1.0),
    "gamma": _gamma,
    "square": _square,
    "ramp": _ramp,
    "steps": _steps,
}
