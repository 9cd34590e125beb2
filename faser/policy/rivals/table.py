"""`table`: a length for each range of batch sizes, written down beforehand."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Self

import numpy as np

from faser.arrays import IntArray
from faser.errors import ConfigError
from faser.policy.base import MAX_LENGTH, BatchView

DEFAULT_RANGES = ((64, 3), (128, 1))  # vLLM's example


@dataclass(frozen=True)
class Table:
    """Every request drafts the length of the first range that holds the batch, and nothing beyond the last range.

    vLLM's rule and default. Only requests that decode count as load: prompts that share a step are no part of its size.
    """

    ranges: tuple[tuple[int, int], ...] = DEFAULT_RANGES  # the most requests of a range, rising, and its length

    def __post_init__(self) -> None:
        sizes = [size for size, _ in self.ranges]
        rising = all(a < b for a, b in zip([0, *sizes], sizes, strict=False))
        if not sizes or not rising or not all(0 <= length <= MAX_LENGTH for _, length in self.ranges):
            raise ConfigError(
                f"policy {self.name!r}: expected batch sizes that rise from 1 and lengths from 0 to {MAX_LENGTH}, "
                "as in table:64=3/128=1"
            )

    @classmethod
    def parse(cls, text: str) -> Self:
        """`64=3/128=1`: 3 up to 64 requests, 1 up to 128, 0 above. Commas do for slashes."""
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
