"""How long a benchmark will take, and the default load.

Both follow from the pace of a system at a few short requests. Reads no clock: times are those of the records, so that
a test calibrates in virtual time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import cycle, islice

import numpy as np

from faser.traffic.document import Item, Record, Run, Workload
from faser.traffic.play import warm_ups_of

SIZES = (1, 4, 16, 64, 256)  # requests at once in a calibration
PAYS = 1.3  # a size pays if requests per second grow by this factor
CALIBRATION_SECONDS = 20.0  # for all sizes; a size that would exceed it is not tried
NEXT_SIZE = 2.0  # expected seconds of a size, in those of the size before
MOST_PROMPT, MOST_OUTPUT = 256, 16  # tokens of a request in a calibration
LOAD = 0.5  # the default load, as a share of the capacity
MARGIN = 1.1  # factor on the total: only the first system is calibrated, and others may be slower


@dataclass(frozen=True)
class MeasuredPace:
    """Tokens per second with `size` requests at once."""

    size: int
    prompt: float
    output: float

    def seconds(self, items: Sequence[Item]) -> float:
        prompt = sum(len(item.prompt_token_ids) for item in items) / self.prompt
        return prompt + sum(item.max_tokens for item in items) / self.output


def calibrate(play: Callable[[Workload], Run], items: Sequence[Item]) -> tuple[MeasuredPace, ...]:
    """The paces at SIZES, until a larger size does not pay or would take too long; none if nothing was answered."""
    paces: list[MeasuredPace] = []
    endless, spent = cycle(items), 0.0
    for size in SIZES:
        runs = [play(Workload(_short(islice(endless, size), tokens))) for tokens in (1, MOST_OUTPUT)]
        pace = _pace(size, *runs)
        if pace is None:
            break
        paces.append(pace)
        seconds = sum(run.seconds for run in runs)
        spent += seconds
        pays = size == 1 or PAYS * pace.seconds(items) < paces[-2].seconds(items)
        if not pays or spent + NEXT_SIZE * seconds > CALIBRATION_SECONDS:
            break
    return tuple(paces)


def _short(items: Iterable[Item], most_output: int) -> tuple[Item, ...]:
    return tuple(
        Item(0.0, item.prompt_token_ids[:MOST_PROMPT], min(item.max_tokens, most_output), item.category)
        for item in items
    )


def _answered(run: Run) -> list[tuple[Record, float, float]]:
    """The requests that were answered, with the times of their first and last tokens."""
    kept = ((record, record.first, record.end) for record in run.records if record.error is None)
    return [(record, first, end) for record, first, end in kept if first is not None and end is not None]


def _pace(size: int, prompts: Run, whole: Run) -> MeasuredPace | None:
    """`prompts` has one token for each request, so its seconds are those of the prompts; `whole` also decodes.

    Decoding is estimated in two ways and the slower counts: from the extra seconds of `whole`, which are noisy if
    prompts take most of the time, and from the rates of its requests, which are too high if some had to wait.
    """
    short, long = _answered(prompts), _answered(whole)
    prompt_seconds, seconds = (max((end for _, _, end in found), default=0.0) for found in (short, long))
    if not prompt_seconds or not seconds:
        return None
    prompt = sum(record.num_prompt for record, _, _ in short) / prompt_seconds
    decoding = seconds - sum(record.num_prompt for record, _, _ in long) / prompt
    later = sum(record.num_tokens - 1 for record, _, _ in long)  # tokens after the first
    rate = sum((record.num_tokens - 1) / (end - first) for record, first, end in long if end > first)
    return MeasuredPace(size, prompt, min(later / decoding if later and decoding > 0 else math.inf, rate or math.inf))


def default_rate(paces: Sequence[MeasuredPace], items: Sequence[Item]) -> float:
    """Requests per second: LOAD of the system's capacity for these requests, rounded down to two digits."""
    rate = LOAD * max(len(items) / pace.seconds(items) for pace in paces)
    power = 10.0 ** (math.floor(math.log10(rate)) - 1)
    return float(f"{math.floor(rate / power * (1 + 1e-9)) * power:.2g}")


@dataclass(frozen=True)
class Estimate:
    """Seconds of a run, from the paces of a calibration; without paces, from the arrivals alone."""

    paces: tuple[MeasuredPace, ...]

    def of_run(self, workload: Workload) -> float:
        items = workload.items
        if not items:
            return 0.0
        if workload.concurrency is not None:
            return self._work(items, workload.concurrency)
        work = min((pace.seconds(items) for pace in self.paces), default=0.0)
        alone = self._work(items, 1) / len(items)
        return max(items[-1].arrival + 2 * alone, work + alone)  # twice: the last request is not alone

    def _work(self, items: Sequence[Item], size: int) -> float:
        """Seconds with `size` requests at once. Requests per second are interpolated between calibrated sizes."""
        if not self.paces:
            return 0.0
        speeds = [1 / pace.seconds(items) for pace in self.paces]
        return 1 / float(np.interp(size, [pace.size for pace in self.paces], speeds))

    def of_warm_up(self, workload: Workload, size: int) -> float:
        return sum(map(self.of_run, warm_ups_of(workload, size)))


def rounded_up(seconds: float) -> int:
    """To multiples of 5 s; above a minute, of 10 s; above ten minutes, of a minute."""
    step = 5 if seconds <= 60 else 10 if seconds <= 600 else 60
    return max(step, step * math.ceil(seconds / step - 1e-9))


def in_words(seconds: int) -> str:
    hours, minutes, rest = seconds // 3600, seconds // 60 % 60, seconds % 60
    parts = [f"{number} {unit}" for number, unit in ((hours, "h"), (minutes, "min"), (rest, "s")) if number]
    return " ".join(parts) or "0 s"
