"""Ranks of drafts by the logits of a middle layer, for early exit.

Knows logits of some candidate tokens, the drafts of the rows and their noise. Knows nothing of layers or rules.
"""

# mypy: disable-error-code="import-untyped, import-not-found, untyped-decorator, no-untyped-def"
from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from faser.runtime.cuda.noise import LN_2, exponential, log2, noise_keys, noise_word
from faser.runtime.cuda.sampling import MOST_TILES_PER_BLOCK, RECENT, TILE, Slots

NUM_RANK_ROWS = 4  # rank, best score, own score, confidence of the draft model

_INFINITY = tl.constexpr(math.inf)


def rank_drafts(
    logits: torch.Tensor,
    first: int,
    row_slots: torch.Tensor,
    positions: torch.Tensor,
    token_ids: torch.Tensor,
    num_rows: torch.Tensor,
    slots: Slots,
    ranks: torch.Tensor,
    hidden: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    head: torch.Tensor,
) -> None:
    """Rank the draft behind each row among candidate tokens, into ranks float32 [4, R].

    The draft behind a row is the token of the next row, if both belong to one request; other columns are left as they
    are. The four rows: candidates that score above the draft, the best score, the draft's score, and the draft model's
    confidence. Scores include the row's noise unless the request is greedy.

    logits [n, C] are of the rows first … first + n - 1 and of the first C tokens, by any layer. The logit of a draft
    outside the first C tokens is computed here, from the hidden states [R, H], the norm [H] and the head [V, H].
    row_slots, positions and token_ids are int32 [R], num_rows int32 [1].
    """
    num_bucket_rows, num_columns = logits.shape
    ranks[0, first : first + num_bucket_rows].zero_()
    ranks[1, first : first + num_bucket_rows].fill_(-math.inf)
    num_blocks = -(-num_columns // (TILE * MOST_TILES_PER_BLOCK))
    _rank_kernel[(num_bucket_rows, num_blocks)](
        logits, first, row_slots, positions, token_ids, num_rows, slots.seeds, slots.inverse_temperatures,
        slots.recent_confidence, ranks, hidden, norm, head, eps,
        logits.stride(0), ranks.stride(0), hidden.stride(0), head.stride(0), num_columns, head.shape[1],
        tile_width=TILE, tiles_per_block=MOST_TILES_PER_BLOCK, recent=RECENT, num_warps=4,
    )  # fmt: skip


@triton.jit
def _scores(x, token, inverse_temperature, key0, key1):
    """The token with the largest score is the one that is sampled."""
    if inverse_temperature > 0:
        x = x * inverse_temperature - LN_2 * log2(exponential(noise_word(token, key0, key1)))
    return x


@triton.jit
def _logit(hidden, norm, head, eps, width, block: tl.constexpr):
    """rms_norm(hidden) @ head, of one row and one token."""
    square, product = tl.zeros([block], tl.float32), tl.zeros([block], tl.float32)
    for begin in range(0, width, block):
        column = begin + tl.arange(0, block)
        inside = column < width
        x = tl.load(hidden + column, mask=inside, other=0).to(tl.float32)
        weight = tl.load(norm + column, mask=inside, other=0).to(tl.float32)
        square += x * x
        product += x * weight * tl.load(head + column, mask=inside, other=0).to(tl.float32)
    return tl.sum(product, axis=0) / tl.sqrt(tl.sum(square, axis=0) / width + eps)


@triton.jit(do_not_specialize=["first", "num_rows", "ranks_stride"])
def _rank_kernel(
    logits, first, row_slots, positions, token_ids, num_rows, seeds, inverse_temperatures, confidence,
    ranks, hidden, norm, head, eps, logits_stride, ranks_stride, hidden_stride, head_stride,
    num_columns, width,
    tile_width: tl.constexpr, tiles_per_block: tl.constexpr, recent: tl.constexpr,
):  # fmt: skip
    row = first + tl.program_id(0)
    if row + 1 >= tl.load(num_rows):
        return
    slot = tl.load(row_slots + row).to(tl.int64)
    if tl.load(row_slots + row + 1).to(tl.int64) != slot:
        return
    drafted = tl.load(token_ids + row + 1)
    inverse_temperature = tl.load(inverse_temperatures + slot)
    position = tl.load(positions + row) + 1
    key0, key1 = noise_keys(tl.load(seeds + slot), position)
    logits += tl.program_id(0).to(tl.int64) * logits_stride
    if drafted < num_columns:
        logit = tl.load(logits + drafted).to(tl.float32)
    else:
        logit = _logit(
            hidden + row.to(tl.int64) * hidden_stride, norm, head + drafted.to(tl.int64) * head_stride, eps, width,
            tile_width,
        )  # fmt: skip
    own = _scores(logit, drafted, inverse_temperature, key0, key1)
    above = 0.0
    best = own
    for index in range(tiles_per_block):
        column = (tl.program_id(1) * tiles_per_block + index) * tile_width + tl.arange(0, tile_width)
        x = tl.load(logits + column, mask=column < num_columns, other=-_INFINITY).to(tl.float32)
        score = _scores(x, column, inverse_temperature, key0, key1)
        score = tl.where(column < num_columns, score, -_INFINITY)
        above += tl.sum((score > own).to(tl.float32), axis=0)
        best = tl.maximum(best, tl.max(score, axis=0))
    tl.atomic_add(ranks + row, above)
    tl.atomic_max(ranks + ranks_stride + row, best)
    if tl.program_id(1) == 0:
        tl.store(ranks + 2 * ranks_stride + row, own)
        tl.store(ranks + 3 * ranks_stride + row, tl.load(confidence + slot * recent + position % recent))
