"""`table`: a length for each range of batch sizes, given beforehand."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Self

import numpy as np

from faser.arrays import IntArray
from faser.errors import ConfigError
from faser.limits import HARD_MAX_LENGTH
from faser.policy.base import BatchView, Policy

DEFAULT_RANGES = ((64, 3), (128, 1))  # vLLM's example


@dataclass(frozen=True)
class Table(Policy):
    """Every request drafts the length of the first range that holds the batch size; 0 beyond the last range.

    vLLM's rule and default. The batch size counts decoding requests only, not prompts that share the step.
    """

    ranges: tuple[tuple[int, int], ...] = DEFAULT_RANGES  # (most requests of the range, length), rising

    def __post_init__(self) -> None:
        sizes = [size for size, _ in self.ranges]
        rising = all(a < b for a, b in zip([0, *sizes], sizes, strict=False))
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
