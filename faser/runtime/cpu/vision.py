"""The eyes of a target on the CPU: the vision encoder, and a buffer of encoded tokens."""

from __future__ import annotations

from time import perf_counter

import numpy as np
import torch

from faser.models.vision.encoder import VisionEncoder
from faser.runtime.cpu.runner import Rows
from faser.step import VisionPlan


class CpuEyes:
    """The vision encoder and its buffer [buffer_rows, hidden] of encoded tokens."""

    def __init__(self, encoder: VisionEncoder, buffer_rows: int, hidden_size: int) -> None:
        self._encoder = encoder
        self._buffer = torch.zeros(buffer_rows, hidden_size, dtype=encoder.dtype)

    def encode(self, plan: VisionPlan) -> float:
        """Encode the grids of a step; the seconds that it took."""
        if not plan.writes:
            return 0.0
        started = perf_counter()
        tokens = self._encoder.encode(plan.grids)
        self._buffer[torch.from_numpy(np.concatenate([write.buffer_rows for write in plan.writes]))] = tokens
        return perf_counter() - started

    def replace_rows(self, plan: VisionPlan, rows: Rows, hidden: torch.Tensor) -> None:
        """Put encoded tokens into `hidden` [R, hidden], in place of the embeddings of their ids."""
        if not plan.slots.size:
            return
        first = np.zeros(int(rows.slots.max()) + 1, dtype=np.int64)  # by slot: the row of token 0
        first[rows.slots] = rows.cu_rows[:-1] - rows.start
        index = torch.from_numpy(first[plan.slots] + plan.positions)
        hidden[index] = self._buffer[torch.from_numpy(plan.buffer_rows)]
