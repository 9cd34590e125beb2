"""`table` and `ema`: a length for the batch by its size. They know no costs."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Self

import numpy as np

from faser.arrays import IntArray
from faser.errors import ConfigError
from faser.limits import HARD_MAX_LENGTH
from faser.policy.base import BatchView, Outcome, Policy

DEFAULT_RANGES = ((64, 3), (128, 1))  # vLLM's example of `table`
# of `ema`
WEIGHT = 0.2  # of the latest step in the average: half-life 3 steps
WARM_UP = 10  # steps before the first change
INTERVAL = 5  # steps between two changes
FIRST_LENGTH = 3  # if it is one of the tiers; else the middle tier


@dataclass(frozen=True)
class Table(Policy):
    """Every request drafts the length of the first range that holds the batch size; 0 beyond the last range.

    vLLM's rule and default. The batch size counts decoding requests only, not prompts that share the step.
    """

    ranges: tuple[tuple[int, int], ...] = DEFAULT_RANGES  # (most requests of the range, length), rising

    def __post_init__(self) -> None:
        sizes = [size for size, _ in self.ranges]
        rising = all(a < b for a, b in pairwise([0, *sizes]))
        if not sizes or not rising or not all(0 <= length <= HARD_MAX_LENGTH for _, length in self.ranges):
            raise ConfigError(
                f"policy {self.name!r}: expected batch sizes that rise from 1 and lengths from 0 to {HARD_MAX_LENGTH}, "
                "as in table:64=3/128=1"
            )

    @classmethod
    def parse(cls, text: str) -> Self:
        """`64=3/128=1`: 3 up to 64 requests, 1 up to 128, 0 above. Commas may replace slashes."""
        parts = [re.fullmatch(r"([0-9]+)=([0-9]+)", part.strip()) for part in re.split("[/,]", text)]
        if not all(parts):
            raise ConfigError(
                f"policy {f'table:{text}'!r}: expected SIZE=LENGTH/SIZE=LENGTH/…, as in table:64=3/128=1 "
                "(3 up to 64 requests, 1 up to 128, 0 above)"
            )
        return cls(tuple((int(part[1]), int(part[2])) for part in parts if part is not None))

    @property
    def name(self) -> str:
        return "table:" + "/".join(f"{size}={length}" for size, length in self.ranges)

    @property
    def max_length(self) -> int:
        return max(length for _, length in self.ranges)

    def lengths(self, view: BatchView) -> IntArray:
        length = next((length for size, length in self.ranges if view.num_requests <= size), 0)
        return np.full(view.num_requests, length, dtype=np.int64)


@dataclass
class _SizeRange:
    """The batch sizes from one threshold to the next: their tiers, the one in use, and its average."""

    tiers: tuple[int, ...]
    hysteresis: float  # the average must fall this much further for a lower tier
    current: int = field(init=False)  # index of a tier
    average: float = field(init=False)  # accepted drafts per request and step
    steps: int = 0

    def __post_init__(self) -> None:
        self.current = self.tiers.index(FIRST_LENGTH) if FIRST_LENGTH in self.tiers else len(self.tiers) // 2
        self.average = self.length - 1.0

    @property
    def length(self) -> int:
        return self.tiers[self.current]

    def learn(self, lengths: IntArray, accepted: IntArray) -> None:
        drafted = lengths > 0
        if drafted.any():
            self.average += WEIGHT * (float(accepted[drafted].mean()) - self.average)
        elif self.length:
            return  # nothing was drafted: a step planned before this tier, or one of prompts
        self.steps += 1
        if self.steps > WARM_UP and (self.steps - WARM_UP) % INTERVAL == 0:
            self._change()

    def _change(self) -> None:
        if self.length == 0:
            self.current = min(self.current + 1, len(self.tiers) - 1)
            return
        before = self.current
        while self.current and self.average <= max(self.tiers[self.current - 1] - 0.5, 0.5) - self.hysteresis:
            self.current -= 1
        if self.current == before:
            while self.current < len(self.tiers) - 1 and self.average > self.length - 0.5:
                self.current += 1


class Ema(Policy):
    """By batch size, a short list of lengths (tiers); the average of accepted drafts chooses one.

    SGLang's adaptive speculation: the batch belongs to the largest threshold it reaches. After 10 steps, every 5, the
    length falls while average ≤ lower tier - 0.5 (≤ 0.5 for tier 0); otherwise it rises while average > tier - 0.5.
    A tier of 0 is left after 5 steps, to sample drafts again. The rule knows no costs: the tiers stand for them. Two
    deviations: the average counts only requests that drafted, and the first length is 3, which SGLang takes from its
    command line.
    """

    name = "ema"
    max_length = 7

    def __init__(self) -> None:
        self._ranges = {
            1: _SizeRange((1, 3, 5, 7), hysteresis=0.25),
            8: _SizeRange((0, 1, 3), hysteresis=0.0),
            32: _SizeRange((0, 1), hysteresis=0.0),
            64: _SizeRange((0,), hysteresis=0.0),
        }

    def learn(self, outcome: Outcome) -> None:
        if outcome.slots.size:
            self._range(outcome.slots.size).learn(outcome.lengths, outcome.accepted)

    def lengths(self, view: BatchView) -> IntArray:
        return np.full(view.num_requests, self._range(view.num_requests).length, dtype=np.int64)

    def _range(self, num_requests: int) -> _SizeRange:
        return self._ranges[max(threshold for threshold in self._ranges if threshold <= num_requests)]
