"""Tokens from logits, and the verdict over drafts, on the device and without a word to the host.

Knows the noise of faser/runtime/sampling.py (the same hash bits), the tokens, seeds and temperatures of every slot, and
which rows are judged. Does not know models, plans, filters, penalties or grammars. A row's token depends on nothing but
its logits, seed, position and temperature: tiles have one width whatever the number of rows.

Everything can be captured in a graph: grids depend on the shapes of the buffers alone, the counts that vary from step
to step are read on the device, and what lies beyond them is left alone. The scratch memory of `Choices` belongs to one
stream at a time.

A row is read by many blocks. Each finds how good the best token of its tiles is; the last one done for a row, by a
counter, takes the best tile and finds the token in it. The largest (x - max) / T + gumbel is found as the smallest
E * exp((max - x) / T), where gumbel = -log E: one logarithm less per token.

Shapes: R rows, V columns of logits, B requests, W tokens one request can emit in a step at most.
"""

# mypy: disable-error-code="import-untyped, import-not-found, untyped-decorator, no-untyped-def"
from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl

from faser.runtime.cuda.rows import Requests
from faser.runtime.sampling import LARGEST_UNIFORM, MULTIPLIERS, SHIFTS, WEYL

TILE = 1024  # columns compared at a time; a row's last bits depend on it, so it is one for all batches
FEW_TILES = 1056  # eight blocks of four warps on every SM of an H200; these three were measured there
MANY_BLOCKS = 2048
MOST_TILES_PER_BLOCK = 8

RECENT = 64  # positions whose confidence is kept: more than a draft has tokens

# columns of a packed verdict
NUM_ACCEPTED, BROKEN, HIT, FIRST_TOKEN = 0, 1, 2, 3

MIN_TEMPERATURE = 1e-30  # a gap between logits divided by this is still a finite float32

_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
_WEYL = tl.constexpr(int(WEYL))
_FACTOR0, _FACTOR1 = (tl.constexpr(int(factor)) for factor in MULTIPLIERS)
_SHIFT0, _SHIFT1, _SHIFT2 = (tl.constexpr(int(shift)) for shift in SHIFTS)
_WEYL64 = tl.constexpr(0x9E3779B97F4A7C15)
_FACTOR64_0 = tl.constexpr(0xBF58476D1CE4E5B9)
_FACTOR64_1 = tl.constexpr(0x94D049BB133111EB)
_LARGEST_UNIFORM = tl.constexpr(float(LARGEST_UNIFORM))
_LARGEST_FLOAT = tl.constexpr(float(np.finfo(np.float32).max))
_INFINITY = tl.constexpr(math.inf)
_LOG2_E = tl.constexpr(math.log2(math.e))
_LN_2 = tl.constexpr(math.log(2.0))
_NO_TOKEN = tl.constexpr(2**31 - 1)
_COIN = tl.constexpr(0xFFFFFFFF)  # no token has this id: its noise decides synthetic acceptance
_OTHER_COIN = tl.constexpr(0xFFFFFFFE)


@dataclass(frozen=True)
class Slots:
    """What sampling knows of the requests, by slot: static tensors on the device."""

    history: torch.Tensor  # int32 [max_slots, max_len] tokens; drafts lie behind the context
    seeds: torch.Tensor  # int64 [max_slots] `mixed_seed` of the request's seed
    inverse_temperatures: torch.Tensor  # float32 [max_slots] 0 is greedy
    refused: torch.Tensor  # int32 [max_slots] drafts the latest step was to make and that came to nothing
    short: torch.Tensor  # int32 [max_slots] 1 where it made fewer, all of them accepted
    missed: torch.Tensor  # int32 [max_slots] 1 where what lay behind the drafts it verified is void
    sure: torch.Tensor  # float32 [max_slots, RECENT] the draft's confidence in its latest tokens, by position

    @classmethod
    def allocate(cls, max_slots: int, max_len: int, device: torch.device | str) -> Slots:
        return cls(
            torch.zeros(max_slots, max_len, dtype=torch.int32, device=device),
            torch.zeros(max_slots, dtype=torch.int64, device=device),
            torch.zeros(max_slots, dtype=torch.float32, device=device),
            torch.zeros(max_slots, dtype=torch.int32, device=device),
            torch.zeros(max_slots, dtype=torch.int32, device=device),
            torch.zeros(max_slots, dtype=torch.int32, device=device),
            torch.full((max_slots, RECENT), torch.nan, dtype=torch.float32, device=device),
        )


@dataclass(frozen=True)
class Choices:
    """Where sampled tokens go, and scratch memory for up to max_rows rows of max_columns logits."""

    tokens: torch.Tensor  # int32 [R]
    broken: torch.Tensor  # int32 [R] 1 where the row held a NaN or no finite best; its token is then 0
    confidence: torch.Tensor  # float32 [R] the token's probability, where asked for
    tile_max: torch.Tensor  # float32 [R, tiles] the tile's largest logit
    tile_cost: torch.Tensor  # float32 [R, tiles] smallest E * exp((largest - logit) / T)
    tile_mass: torch.Tensor  # float32 [R, tiles] sum of exp((logit - largest) / T)
    arrived: torch.Tensor  # int32 [R] blocks done; 0 between calls

    @classmethod
    def allocate(cls, max_rows: int, max_columns: int, device: torch.device | str) -> Choices:
        def zeros(dtype: torch.dtype, *shape: int) -> torch.Tensor:
            return torch.zeros(max_rows, *shape, dtype=dtype, device=device)

        tiles = -(-max_columns // TILE)
        return cls(
            tokens=zeros(torch.int32),
            broken=zeros(torch.int32),
            confidence=zeros(torch.float32),
            tile_max=zeros(torch.float32, tiles),
            tile_cost=zeros(torch.float32, tiles),
            tile_mass=zeros(torch.float32, tiles),
            arrived=zeros(torch.int32),
        )


def mixed_seed(seed: int) -> int:
    """The start of a request's noise stream, as the int64 that `Slots.seeds` holds."""
    mixed = (seed + _WEYL64.value) % 2**64
    mixed = (mixed ^ (mixed >> 30)) * _FACTOR64_0.value % 2**64
    mixed = (mixed ^ (mixed >> 27)) * _FACTOR64_1.value % 2**64
    mixed ^= mixed >> 31
    return mixed - 2**64 if mixed >= 2**63 else mixed


def inverse_temperature(temperature: float) -> float:
    """What `Slots.inverse_temperatures` holds: 0 for greedy."""
    return 0.0 if temperature == 0 else 1 / max(temperature, MIN_TEMPERATURE)


def sample(
    logits: torch.Tensor,
    row_slots: torch.Tensor,
    positions: torch.Tensor,
    num_rows: torch.Tensor,
    slots: Slots,
    choices: Choices,
    *,
    vocabulary: torch.Tensor | None = None,
    confidence: bool = False,
    write: bool = False,
) -> None:
    """The tokens at `positions`, into choices.tokens and choices.broken, for the first num_rows rows.

    logits float [R, V], its columns adjacent; row_slots and positions int32 [R]; num_rows int32 [1]. Column c stands
    for token vocabulary[c] where a vocabulary (int32 [V], ascending) is given. `confidence` also gives the chosen
    token's probability at the row's temperature (a greedy row's: at temperature 1). `write` also puts the token into
    the history, at its position, and its confidence where that is kept.
    """
    num_bucket_rows, num_columns = logits.shape
    num_tiles = -(-num_columns // TILE)
    num_warps, tiles_per_block = _shape_of_a_block(num_bucket_rows * num_tiles)
    _sample_kernel[(num_bucket_rows, -(-num_tiles // tiles_per_block))](
        logits, row_slots, positions, num_rows,
        slots.seeds, slots.inverse_temperatures, vocabulary, slots.history if write else None,
        choices.tokens, choices.broken, choices.confidence if confidence else None,
        slots.sure if confidence and write else None,
        choices.tile_max, choices.tile_cost, choices.tile_mass, choices.arrived,
        logits.stride(0), slots.history.stride(0), num_columns, num_tiles, tiles_per_block,
        tile_width=TILE, padded_tiles=_power_of_two(num_tiles), recent=RECENT, num_warps=num_warps,
    )  # fmt: skip


def _shape_of_a_block(num_tiles: int) -> tuple[int, int]:
    """Warps and tiles. Few tiles: all hands on each. Many: fewer hands to wait for, and fewer blocks to count."""
    if num_tiles <= FEW_TILES:
        return 4, 1
    return 2, min(-(-num_tiles // MANY_BLOCKS), MOST_TILES_PER_BLOCK)


def judge(
    choices: Choices,
    requests: Requests,
    cu_wanted: torch.Tensor,
    slots: Slots,
    packed: torch.Tensor,
    *,
    overlaps: bool = False,
    acceptance: torch.Tensor | None = None,
) -> None:
    """The verdict over each request's drafts, packed for one copy to the host, and its tokens put into the history.

    The wanted rows cu_wanted[i] … cu_wanted[i + 1] - 1 (int32 [B + 1]) are of the last context token of request i and
    of every drafted one; a request that does not sample has none. packed is int32 [B, FIRST_TOKEN + W]: the number of
    accepted tokens, whether an emitted row was broken, whether all drafts were accepted and the bonus is what lay
    behind them (with `overlaps` the draft's next token), then the accepted tokens and the bonus, then -1. How many of
    the planned drafts came to nothing, and whether what lay behind them did, stays on the device for the next step.

    With `acceptance` (float32 [W - 1], by position in the draft) drafted tokens are accepted with these
    probabilities, whatever they are: it measures the cost of a step where weights are random.
    """
    num_bucket_requests, width = packed.shape
    width -= FIRST_TOKEN
    _judge_kernel[(num_bucket_requests,)](
        choices.tokens, choices.broken, cu_wanted, requests.slots, requests.start, requests.num_rows, requests.planned,
        requests.num_requests, slots.history, slots.seeds, slots.refused, slots.short, slots.missed, acceptance, packed,
        slots.history.stride(0), packed.stride(0), width,
        padded_width=_power_of_two(width), first_token=FIRST_TOKEN, overlaps=overlaps, num_warps=1,
    )  # fmt: skip


def _power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()


# --- noise ---------------------------------------------------------------------------------------------------------


@triton.jit
def _mix64(x):
    x += _WEYL64
    x = (x ^ (x >> 30)) * _FACTOR64_0
    x = (x ^ (x >> 27)) * _FACTOR64_1
    return x ^ (x >> 31)


@triton.jit
def _noise_keys(mixed_seed, position):
    """The two words of (seed, position)."""
    key = _mix64(mixed_seed.to(tl.uint64, bitcast=True) + position.to(tl.uint64) * _WEYL64)
    return key.to(tl.uint32), (key >> 32).to(tl.uint32)


@triton.jit
def _mix32(x):
    x = (x ^ (x >> _SHIFT0)) * _FACTOR0
    x = (x ^ (x >> _SHIFT1)) * _FACTOR1
    return x ^ (x >> _SHIFT2)


@triton.jit
def _noise_word(token, key0, key1):
    return _mix32(_mix32(token.to(tl.uint32) * _WEYL + key0) ^ key1)


@triton.jit
def draw(mixed_seed, position):
    """A uniform number of (seed, position) that decides about no token."""
    key0, key1 = _noise_keys(mixed_seed, position)
    return _uniform(_noise_word(tl.full([], _OTHER_COIN, tl.uint32), key0, key1))


@triton.jit
def _uniform(word):
    """(word + 1/2) / 2^32, below 1."""
    return tl.minimum((word.to(tl.float32) + 0.5) * 2.0**-32, _LARGEST_UNIFORM)


@triton.jit
def _log2(x):
    """The hardware's, to 2^-22 of the larger of 1 and the result: x is never near 1 here, nor subnormal."""
    if _INTERPRETED:
        y = tl.log2(x)
    else:
        y = tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)
    return y


@triton.jit
def _exponential(word):
    """E = -log(1 - u) of the word's uniform u; gumbel = -log E. Near u = 0, where winners are, by its series."""
    u = _uniform(word)
    series = u * (1 + u * (1 / 2 + u * (1 / 3 + u * (1 / 4 + u * (1 / 5 + u * (1 / 6))))))
    return tl.where(u < 0.0625, series, -_LN_2 * _log2(1 - u))


@triton.jit
def _scale(inverse_temperature):
    """What makes a difference of logits an exponent of two; a greedy row's probabilities are those at temperature 1."""
    return tl.where(inverse_temperature > 0, inverse_temperature, 1.0) * _LOG2_E


# --- sampling ------------------------------------------------------------------------------------------------------


@triton.jit
def _row(row, row_slots, positions, seeds, inverse_temperatures):
    """Whose row it is, where its token will stand, and how that is drawn."""
    slot = tl.load(row_slots + row).to(tl.int64)
    position = tl.load(positions + row)
    key0, key1 = _noise_keys(tl.load(seeds + slot), position)
    return slot, position, tl.load(inverse_temperatures + slot), key0, key1


@triton.jit
def _finite(x):
    """To subtract from: the difference of two infinities is not a number."""
    return tl.minimum(tl.maximum(x, -_LARGEST_FLOAT), _LARGEST_FLOAT)


@triton.jit
def _load_tile(row_logits, tile, num_columns, tile_width: tl.constexpr):
    """The logits of a tile and their columns, [tile_width]. NaN reads as infinity: either breaks the row."""
    column = tile * tile_width + tl.arange(0, tile_width)
    x = tl.load(row_logits + column, mask=column < num_columns, other=-_INFINITY).to(tl.float32)
    return tl.where(x != x, _INFINITY, x), column


@triton.jit
def _tokens_of(column, vocabulary, num_columns):
    token = column
    if vocabulary is not None:
        token = tl.load(vocabulary + column, mask=column < num_columns, other=_NO_TOKEN)
    return token


@triton.jit
def _costs(x, token, tile_max, inverse_temperature, key0, key1):
    """The smallest is the winner's: E * exp((tile_max - x) / T), [tile_width]."""
    exponent = (_finite(tile_max) - x) * _scale(inverse_temperature)
    return _exponential(_noise_word(token, key0, key1)) * tl.exp2(exponent)


@triton.jit
def _finish_row(
    row_logits, vocabulary, num_columns, inverse_temperature, key0, key1,
    tile_max, tile_cost, tile_mass, num_tiles, row, tokens, broken, confidence, sure,
    tile_width: tl.constexpr, padded_tiles: tl.constexpr,
):  # fmt: skip
    """Choose among the tiles of a row, then within the best. Reads past the caches that others' stores do not reach."""
    # [padded_tiles]
    tile = tl.arange(0, padded_tiles)
    known = tile < num_tiles
    largest = tl.load(tile_max + tile, mask=known, other=-_INFINITY, cache_modifier=".cg")
    row_max = tl.max(largest, axis=0)
    is_broken = tl.abs(row_max) == _INFINITY
    is_best = largest == row_max
    row_max = _finite(row_max)
    scale = _scale(inverse_temperature)
    if inverse_temperature > 0:
        cost = tl.load(tile_cost + tile, mask=known, other=_INFINITY, cache_modifier=".cg")
        cost = tl.where(known, cost * tl.exp2((row_max - _finite(largest)) * scale), _INFINITY)
        is_best = cost == tl.min(cost, axis=0)
    best_tile = tl.min(tl.where(is_best & known, tile, num_tiles - 1), axis=0)

    # [tile_width]
    x, column = _load_tile(row_logits, best_tile, num_columns, tile_width)
    token = _tokens_of(column, vocabulary, num_columns)
    best = tl.max(x, axis=0)
    is_best = x == best
    if inverse_temperature > 0:
        cost = _costs(x, token, best, inverse_temperature, key0, key1)
        is_best = cost == tl.min(cost, axis=0)
    chosen = tl.min(tl.where(is_best & (column < num_columns), token, _NO_TOKEN), axis=0)
    chosen = tl.where(is_broken, 0, chosen)
    tl.store(tokens + row, chosen)
    tl.store(broken + row, is_broken.to(tl.int32))
    if confidence is not None:
        mass = tl.load(tile_mass + tile, mask=known, other=0.0, cache_modifier=".cg")
        mass = tl.sum(mass * tl.exp2((largest - row_max) * scale), axis=0)
        logit = tl.max(tl.where(token == chosen, x, -_INFINITY), axis=0)
        chance = tl.where(is_broken, 0.0, tl.exp2((logit - row_max) * scale) / mass)
        tl.store(confidence + row, chance)
        if sure is not None:
            tl.store(sure, chance)
    return chosen


@triton.jit(do_not_specialize=["num_rows", "history_stride", "num_tiles", "tiles_per_block"])
def _sample_kernel(
    logits, row_slots, positions, num_rows,
    seeds, inverse_temperatures, vocabulary, history,
    tokens, broken, confidence, sure,
    tile_max, tile_cost, tile_mass, arrived,
    logits_stride, history_stride, num_columns, num_tiles, tiles_per_block,
    tile_width: tl.constexpr, padded_tiles: tl.constexpr, recent: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    if row >= tl.load(num_rows):
        return
    slot, position, inverse_temperature, key0, key1 = _row(row, row_slots, positions, seeds, inverse_temperatures)
    logits += row.to(tl.int64) * logits_stride
    tile_max += row * num_tiles
    tile_cost += row * num_tiles
    tile_mass += row * num_tiles
    if sure is not None:
        sure += slot * recent + position % recent
    first = tl.program_id(1) * tiles_per_block
    for tile in range(first, tl.minimum(first + tiles_per_block, num_tiles)):
        x, column = _load_tile(logits, tile, num_columns, tile_width)
        largest = tl.max(x, axis=0)
        tl.store(tile_max + tile, largest)
        if inverse_temperature > 0:
            token = _tokens_of(column, vocabulary, num_columns)
            tl.store(tile_cost + tile, tl.min(_costs(x, token, largest, inverse_temperature, key0, key1), axis=0))
        if confidence is not None:
            mass = tl.sum(tl.exp2((x - _finite(largest)) * _scale(inverse_temperature)), axis=0)
            tl.store(tile_mass + tile, mass)

    tl.debug_barrier()  # every thread's stores come before the count
    if tl.atomic_add(arrived + row, 1, sem="acq_rel") == tl.num_programs(1) - 1:
        tl.store(arrived + row, 0)
        chosen = _finish_row(
            logits, vocabulary, num_columns, inverse_temperature, key0, key1,
            tile_max, tile_cost, tile_mass, num_tiles, row, tokens, broken, confidence, sure,
            tile_width, padded_tiles,
        )  # fmt: skip
        if history is not None:
            tl.store(history + slot * history_stride + position, chosen)


# --- standing ------------------------------------------------------------------------------------------------------


def stand(
    logits: torch.Tensor,
    first: int,
    row_slots: torch.Tensor,
    positions: torch.Tensor,
    token_ids: torch.Tensor,
    num_rows: torch.Tensor,
    slots: Slots,
    standing: torch.Tensor,
    hidden: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    head: torch.Tensor,
) -> None:
    """How the draft behind each row stands among the candidates, into standing, float32 [4, R].

    The draft of a row is the token of the next one, where that is the same request's. Rows of it: how many candidates
    score above it, with the row's noise where it draws; the score of the best; its own; how sure the draft model was.
    What no draft follows is left as it was. logits [n, C] are those of rows first to first + n - 1 and of the first C
    tokens, out of whatever layer; a draft that is not among these has its own made of the row's hidden state [R, H],
    the norm [H] and the head [V, H]. The others are int32, [R] and [1].
    """
    num_bucket_rows, num_columns = logits.shape
    standing[0, first : first + num_bucket_rows].zero_()
    standing[1, first : first + num_bucket_rows].fill_(-math.inf)
    num_blocks = -(-num_columns // (TILE * MOST_TILES_PER_BLOCK))
    _stand_kernel[(num_bucket_rows, num_blocks)](
        logits, first, row_slots, positions, token_ids, num_rows, slots.seeds, slots.inverse_temperatures, slots.sure,
        standing, hidden, norm, head, eps, logits.stride(0), standing.stride(0), hidden.stride(0), head.stride(0),
        num_columns, head.shape[1],
        tile_width=TILE, tiles_per_block=MOST_TILES_PER_BLOCK, recent=RECENT, num_warps=4,
    )  # fmt: skip


@triton.jit
def _scores(x, token, inverse_temperature, key0, key1):
    """What sampling takes the largest of."""
    if inverse_temperature > 0:
        x = x * inverse_temperature - _LN_2 * _log2(_exponential(_noise_word(token, key0, key1)))
    return x


@triton.jit
def _logit(hidden, norm, head, eps, width, block: tl.constexpr):
    """Of one row and one token: rms_norm(hidden) @ head."""
    square, product = tl.zeros([block], tl.float32), tl.zeros([block], tl.float32)
    for begin in range(0, width, block):
        column = begin + tl.arange(0, block)
        inside = column < width
        x = tl.load(hidden + column, mask=inside, other=0).to(tl.float32)
        weight = tl.load(norm + column, mask=inside, other=0).to(tl.float32)
        square += x * x
        product += x * weight * tl.load(head + column, mask=inside, other=0).to(tl.float32)
    return tl.sum(product, axis=0) / tl.sqrt(tl.sum(square, axis=0) / width + eps)


@triton.jit(do_not_specialize=["first", "num_rows", "standing_stride"])
def _stand_kernel(
    logits, first, row_slots, positions, token_ids, num_rows, seeds, inverse_temperatures, sure,
    standing, hidden, norm, head, eps, logits_stride, standing_stride, hidden_stride, head_stride,
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
    key0, key1 = _noise_keys(tl.load(seeds + slot), position)
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
    tl.atomic_add(standing + row, above)
    tl.atomic_max(standing + standing_stride + row, best)
    if tl.program_id(1) == 0:
        tl.store(standing + 2 * standing_stride + row, own)
        tl.store(standing + 3 * standing_stride + row, tl.load(sure + slot * recent + position % recent))


# --- verdict -------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["cu_wanted", "num_requests", "history_stride", "packed_stride", "width"])
def _judge_kernel(
    said_tokens, broken, cu_wanted, request_slots, start, num_rows, planned,
    num_requests, history, seeds, refused, short, missed, acceptance, packed,
    history_stride, packed_stride, width, padded_width: tl.constexpr, first_token: tl.constexpr, overlaps: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0)
    if request >= tl.load(num_requests):
        return
    slot = tl.load(request_slots + request).to(tl.int64)
    num_tokens = tl.load(start + request) + tl.load(num_rows + request)
    first = tl.load(cu_wanted + request)
    num_judged = tl.load(cu_wanted + request + 1) - first

    # [padded_width]
    offset = tl.arange(0, padded_width)
    is_judged = offset < num_judged
    is_draft = offset < num_judged - 1  # the last row judges none
    place = history + slot * history_stride + num_tokens + offset
    said = tl.load(said_tokens + first + offset, mask=is_judged, other=-1)
    drafted = tl.load(place, mask=is_judged, other=-1).to(tl.int32)
    agrees = said == drafted
    if acceptance is not None:
        key0, key1 = _noise_keys(tl.load(seeds + slot), num_tokens + offset)
        coin = _uniform(_noise_word(tl.full([padded_width], _COIN, tl.uint32), key0, key1))
        agrees = coin < tl.load(acceptance + offset, mask=is_judged & (offset < width - 1), other=0.0)
    num_accepted = tl.min(tl.where(is_draft & agrees, padded_width, offset), axis=0)
    hits = is_judged & (offset == num_judged - 1) & (offset == num_accepted) & agrees
    hit = tl.max(hits.to(tl.int32), axis=0)
    tl.store(missed + slot, 1 - hit)
    num_planned = tl.load(planned + request)
    tl.store(refused + slot, num_planned - num_accepted)
    num_drafted = tl.maximum(num_judged - 1, 0)
    tl.store(short + slot, ((num_drafted < num_planned) & (num_accepted == num_drafted)).to(tl.int32))
    emitted = is_judged & (offset <= num_accepted)
    token = tl.where(offset < num_accepted, drafted, said)
    if overlaps:  # the same, but for synthetic acceptance
        token = tl.where(hits, drafted, token)
    tl.store(place, token, mask=emitted)
    is_broken = tl.max(tl.load(broken + first + offset, mask=emitted, other=0), axis=0)
    packed += request * packed_stride
    tl.store(packed, num_accepted)
    tl.store(packed + 1, is_broken)
    tl.store(packed + 2, hit)
    tl.store(packed + first_token + offset, tl.where(emitted, token, -1), mask=offset < width)
