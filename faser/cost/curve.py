"""Seconds of one kind of forward, by rows and context.

Seconds are linear in the context tokens read, at every number of rows. Between two measured row counts they are
interpolated; where graphs of fixed sizes run, they are those of the next larger size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from faser.arrays import FloatArray, IntArray
from faser.errors import ConfigError

Rows = IntArray | int
Context = IntArray | FloatArray | float
Table = tuple[FloatArray, FloatArray]  # by rows, from 0: seconds without context, seconds per context token


@dataclass(frozen=True)
class Curve:
    """Seconds at the measured row counts, which ascend. All tuples have one size."""

    rows: tuple[int, ...]
    seconds: tuple[float, ...]  # without context
    per_token: tuple[float, ...]  # seconds added by each context token
    stepped_to: int = 0  # row counts up to this one run as the next larger of `rows`

    def __post_init__(self) -> None:
        sizes = {len(self.rows), len(self.seconds), len(self.per_token)}
        rises = all(a < b for a, b in zip((0, *self.rows), self.rows, strict=False))
        if len(sizes) != 1 or not self.rows or not rises:
            raise ConfigError("a curve needs rows that rise from 1 on, and as many seconds and seconds per token")
        if not all(0 <= each < math.inf for each in (*self.seconds, *self.per_token)):
            raise ConfigError("a curve's seconds are finite numbers of at least 0")

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> Curve:
        return cls(
            tuple(map(int, given["rows"])),
            tuple(map(float, given["seconds"])),
            tuple(map(float, given["per_token"])),
            int(given["stepped_to"]),
        )

    def monotone(self) -> Curve:
        """The same, with seconds that never fall as rows rise: neighbours that do share their mean."""
        pools: list[list[float]] = []  # [sum, count] of neighbours that share a value
        for value in self.seconds:
            pools.append([value, 1.0])
            while len(pools) > 1 and pools[-2][0] / pools[-2][1] > pools[-1][0] / pools[-1][1]:
                total, count = pools.pop()
                pools[-1][0] += total
                pools[-1][1] += count
        seconds = [total / count for total, count in pools for _ in range(int(count))]
        return replace(self, seconds=tuple(seconds))

    @property
    def is_stepped(self) -> bool:
        return self.stepped_to >= self.rows[-1]

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """The graph sizes: row counts beyond which seconds jump."""
        return tuple(size for size in self.rows if size <= self.stepped_to)

    @property
    def max_rows(self) -> int:
        """The largest measured row count; a stepped curve does not run more."""
        return self.rows[-1]

    @cached_property
    def slope(self) -> float:
        """Seconds per row beyond the last measured row count."""
        if self.is_stepped or len(self.rows) == 1:
            return 0.0
        return max(0.0, (self.seconds[-1] - self.seconds[-2]) / (self.rows[-1] - self.rows[-2]))

    @cached_property
    def table(self) -> Table:
        """For every row count up to the last: policies look up thousands at once."""
        rows = np.arange(self.rows[-1] + 1)
        stepped = rows[: self.stepped_to + 1]
        stepped[:] = np.array(self.rows)[np.searchsorted(self.rows, stepped)]
        seconds, per_token = (np.interp(rows, self.rows, each) for each in (self.seconds, self.per_token))
        seconds[0] = per_token[0] = 0.0
        return seconds, per_token

    def __call__(self, rows: Rows, context: Context) -> FloatArray:
        """Seconds for each row count. Beyond the last measured one, `slope` applies. No rows take no time."""
        return look_up(self.table, self.slope, rows, context)


def look_up(table: Table, slope: float, rows: Rows, context: Context) -> FloatArray:
    """Seconds by rows and context; `slope`: seconds per row beyond the table's end."""
    seconds, per_token = table
    last = seconds.size - 1
    index = min(rows, last) if isinstance(rows, int) else np.minimum(rows, last)
    found: FloatArray = seconds[index] + per_token[index] * context
    return found + slope * (rows - index) if slope else found


NOTHING = Curve((1,), (0.0,), (0.0,))  # of a forward that does not exist: 0 s
ALWAYS_ONE = Curve((1,), (1.0,), (0.0,))  # a factor of 1 for all row counts
