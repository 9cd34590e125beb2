"""Rows of the draft's forwards: which tokens, at which positions, into which KV slots.

The host does not know how many drafts of a step were accepted, the device does. So a row is named by its distance from
the end of its request's context: the row `back` tokens before the end is at position length - back. The host lays out
rows by `owner` (the request's index in the batch) and `back`; the device finds positions, tokens and slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from faser.arrays import IntArray

NO_SLOT = -1  # the KV entry of the row is not written


@dataclass(frozen=True)
class ForwardRows:
    """One forward of the draft. N rows of B requests; those of one request are consecutive, up to its seq_len."""

    input_ids: Tensor  # [N] int32
    positions: Tensor  # [N] int64
    slots: Tensor  # [N] int64
    starts: Tensor  # [B + 1] int32: first row of each request
    starts_cpu: Tensor  # the same for the host
    seq_lens: Tensor  # [B] int32
    block_table: Tensor  # [B, W] int32
    max_rows: int  # of a request


@dataclass(frozen=True)
class Paging:
    """Where tokens and KV entries are: tensors that stay in place while their contents change."""

    history: Tensor  # [R, L] int32: the tokens of each slot
    block_table: Tensor  # [max_requests, W] int32, in the order of the batch
    block_size: int
    limit: int  # positions that the draft model has

    def token_at(self, history_rows: Tensor, positions: Tensor) -> Tensor:
        return self.history[history_rows, positions.clamp(0, self.history.shape[1] - 1)]

    def slot_of(self, owners: Tensor, positions: Tensor, is_real: Tensor) -> Tensor:
        """NO_SLOT for padding, and for positions that do not exist."""
        inside = positions.clamp(0, self.limit - 1)
        blocks = self.block_table[owners, inside // self.block_size].to(torch.int64)
        slots = blocks * self.block_size + inside % self.block_size
        return torch.where(is_real & (positions == inside), slots, NO_SLOT)


@dataclass(frozen=True)
class LagPiece:
    """Some of the rows that a draft lacks: the `rows` tokens before the last `end` of the context."""

    owner: int
    rows: int
    end: int


def plan_catch_up(lags: IntArray, width: int, max_rows: int) -> list[list[LagPiece]]:
    """The forwards that leave no request further behind than `width` tokens. Each has at most `max_rows` rows."""
    passes: list[list[LagPiece]] = []
    room = 0
    for owner in np.flatnonzero(lags > width):
        left = int(lags[owner]) - width
        while left:
            if not room:
                passes.append([])
                room = max_rows
            rows = min(left, room)
            left -= rows
            room -= rows
            passes[-1].append(LagPiece(int(owner), rows, width + left))
    return passes


def host_rows(pieces: Sequence[LagPiece]) -> tuple[IntArray, IntArray]:
    """[N] owner and `back` of every row."""
    owners = np.repeat([piece.owner for piece in pieces], [piece.rows for piece in pieces])
    backs = np.concatenate([np.arange(piece.end + piece.rows, piece.end, -1) for piece in pieces])
    return owners, backs
