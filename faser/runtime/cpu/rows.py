"""The flat rows of one forward.

Every request has its own number of rows, so a batch is flat, with `cu_` offsets where a request's rows begin. Knows
slots and positions; knows nothing of tokens, models or devices.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from faser.arrays import IntArray


@dataclass(frozen=True)
class Rows:
    """Rows of B requests: request i has counts[i] > 0 rows, at positions start[i], start[i] + 1, …"""

    slots: IntArray  # [B]
    start: IntArray  # [B]
    counts: IntArray  # [B]
    cu_rows: IntArray  # [B + 1]
    owners: IntArray  # [R] the slot of each row
    positions: IntArray  # [R]

    @classmethod
    def of(cls, slots: IntArray, start: IntArray, counts: IntArray) -> Rows:
        """Requests without rows are left out."""
        if not counts.all():
            present = counts > 0
            slots, start, counts = slots[present], start[present], counts[present]
        cu_rows = np.zeros(counts.size + 1, dtype=np.int64)
        np.cumsum(counts, out=cu_rows[1:])
        positions = np.arange(cu_rows[-1]) + np.repeat(start - cu_rows[:-1], counts)
        return cls(slots, start, counts, cu_rows, np.repeat(slots, counts), positions)

    @property
    def num_rows(self) -> int:
        return int(self.positions.size)

    @property
    def last(self) -> IntArray:
        """The index of each request's last row."""
        return self.cu_rows[1:] - 1
