"""One model with its KV cache and page table: rows in, logits out. Target and draft have a runner each."""

from __future__ import annotations

from time import perf_counter

import numpy as np
import torch

from faser.arrays import IntArray
from faser.models.transformer import Transformer
from faser.runtime.cpu.attention import CpuAttention
from faser.runtime.cpu.rows import Rows
from faser.runtime.kv_cache import KVCache
from faser.step import PageWrites


class ModelRunner:
    """Counts the seconds of its forwards until `take_seconds`."""

    def __init__(self, model: Transformer, cache: KVCache, max_slots: int, max_tokens: int) -> None:
        self.model = model
        self._seconds = 0.0
        self._cache = cache
        self._table: IntArray = np.zeros((max_slots, -(-max_tokens // cache.page_size)), dtype=np.int64)

    def apply(self, writes: PageWrites) -> None:
        self._table[writes.slots, writes.columns] = writes.pages

    def take_seconds(self) -> float:
        """Seconds spent in forwards since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def forward(self, rows: Rows, token_ids: torch.Tensor, wanted: IntArray) -> torch.Tensor:
        """Compute all rows; logits [len(wanted), vocabulary] of the wanted ones, by row index."""
        return self.logits(self.run(rows, self.model.embed(token_ids)), wanted)

    def run(self, rows: Rows, hidden: torch.Tensor, first: int = 0, last: int | None = None) -> torch.Tensor:
        """Run layers first … last - 1 (default: all) on hidden [R, hidden size]."""
        started = perf_counter()
        attend = CpuAttention(self.model, self._cache, self._table, rows)
        hidden = self.model.run_layers(hidden, attend, first, last)
        self._seconds += perf_counter() - started
        return hidden

    def logits(self, hidden: torch.Tensor, wanted: IntArray) -> torch.Tensor:
        """[len(wanted), vocabulary] of the wanted rows of hidden, the output of any layer."""
        started = perf_counter()
        logits = self.model.logits(_some(hidden, wanted))
        self._seconds += perf_counter() - started
        return logits

    def shortlist_logits(
        self, hidden: torch.Tensor, wanted: IntArray, candidates: int, token_ids: IntArray
    ) -> torch.Tensor:
        """[len(wanted), candidates + 1] logits of the first `candidates` tokens and of each row's own token."""
        started = perf_counter()
        logits = self.model.shortlist_logits(_some(hidden, wanted), candidates, torch.from_numpy(token_ids))
        self._seconds += perf_counter() - started
        return logits


def _some(hidden: torch.Tensor, wanted: IntArray) -> torch.Tensor:
    return hidden[torch.from_numpy(wanted)] if wanted.size < hidden.shape[0] else hidden
