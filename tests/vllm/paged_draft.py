"""A draft "model" on paged memory whose every token depends on all KV entries that it reads.

An entry is the token and the position it was computed for. A draft is right only if every entry of its context is
there and none is stale.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from faser.vllm.drafting.rows import ForwardRows

VOCABULARY = 997


def next_token(tokens: list[int]) -> int:
    """What the draft says after these tokens."""
    value = 7
    for position, token in enumerate(tokens):
        value = (value * 31 + token * (position + 3)) % VOCABULARY
    return value


def greedy(tokens: list[int], depth: int) -> list[int]:
    out: list[int] = []
    for _ in range(depth):
        out.append(next_token([*tokens, *out]))
    return out


class PagedDraft:
    """The seam DraftForward. It counts the rows that it computes."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.entries = torch.full((num_blocks * block_size, 2), -1, dtype=torch.int64)  # token, position
        self.rows: list[int] = []

    def forward(self, rows: ForwardRows) -> Tensor:
        """[N, 1]: the next token after each row."""
        self.rows.append(rows.input_ids.numel())
        written = rows.slots >= 0
        self.entries[rows.slots[written], 0] = rows.input_ids[written].long()
        self.entries[rows.slots[written], 1] = rows.positions[written]
        hidden = torch.zeros(rows.input_ids.numel(), 1, dtype=torch.int64)
        starts = rows.starts.tolist()
        assert starts == rows.starts_cpu.tolist()
        for request, (first, last) in enumerate(itertools.pairwise(starts)):
            assert last - first <= rows.max_rows
            for row in range(first, last):
                end = int(rows.seq_lens[request]) - (last - row) + 1  # causal: the last row sees the whole context
                hidden[row, 0] = next_token(self._read(rows.block_table[request], end)) if end > 0 else 0
        return hidden

    def _read(self, blocks: Tensor, end: int) -> list[int]:
        """Tokens of a context; an entry of another position reads as another token."""
        positions = torch.arange(end)
        entries = self.entries[
            blocks[positions // self.block_size].long() * self.block_size + positions % self.block_size
        ]
        return torch.where(entries[:, 1] == positions, entries[:, 0], -5).tolist()

    def top_tokens(self, hidden_states: Tensor) -> Tensor:
        return hidden_states[:, 0]
