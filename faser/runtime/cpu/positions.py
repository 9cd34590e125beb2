"""Where the tokens of each slot stand, for a rotary embedding over time, height and width (M-RoPE).

A model whose embedding knows one position takes that in time.
"""

from __future__ import annotations

import numpy as np

from faser.arrays import IntArray
from faser.step import Admission


class RotaryPositions:
    """Positions in time, height and width of the tokens of each slot. Those of text are its indices, plus an offset."""

    def __init__(self, max_slots: int, max_tokens: int, max_positions: int) -> None:
        self._last = max_positions - 1  # made-up steps, which only take time, may find positions of an older request
        self._prompts: IntArray = np.zeros((max_slots, max_tokens, 3), dtype=np.int64)
        self._num_prompt, self._offset, self._shift = np.zeros((3, max_slots), dtype=np.int64)

    def admit(self, new: Admission) -> None:
        positions = new.vision.positions if new.vision is not None else None
        self._num_prompt[new.slot] = 0 if positions is None else len(positions)
        self._offset[new.slot] = new.vision.offset if new.vision is not None else 0
        self._shift[new.slot] = new.vision.shift if new.vision is not None else 0
        if positions is not None:
            self._prompts[new.slot, : len(positions)] = positions

    def of(self, owners: IntArray, index: IntArray) -> IntArray:
        """[R, 3] of the tokens at `index` [R] of the slots `owners` [R]."""
        positions = np.repeat((index + self._offset[owners])[:, None], 3, axis=1)
        inside = np.flatnonzero(index < self._num_prompt[owners])
        positions[inside] = self._prompts[owners[inside], index[inside]]
        positions[:, 0] += self._shift[owners]
        return np.minimum(positions, self._last, out=positions)
