"""Tokens from logits, on the device and without the host.

Knows the tokens, seeds and temperatures of every slot. Does not know models, plans, filters, penalties or grammars. A
row's token depends only on its logits, seed, position and temperature: tiles have the same width for any number of
rows. The noise has the hash bits of faser/runtime/sampling.py for the same (seed, position, token).

Everything can be captured in a graph: grids depend only on the shapes of the buffers. The counts that vary from step to
step are read on the device, and entries beyond the counts are not touched. The scratch memory of `Choices` belongs to
one stream at a time.

A row is read by many blocks. Each block finds the score of the best token of its tiles. The last block of a row, by a
counter, takes the best tile and finds the token in it. The largest (x - max) / T + gumbel is found as the smallest
E * exp((max - x) / T), where gumbel = -log E: one logarithm less per token.

Shapes: R rows, V columns of logits.
"""

# mypy: disable-error-code="import-untyped, import-not-found, untyped-decorator, no-untyped-def"
from __future__ import annotations

import math
from dataclasses import dataclass, fields

import numpy as np
import torch
import triton
import triton.language as tl

from faser.runtime.sampling import LARGEST_UNIFORM, MULTIPLIERS, SHIFTS, WEYL

TILE = 1024  # columns compared at a time; the same for all batches, because the last bits of a row depend on it
FEW_TILES = 1056  # eight blocks of four warps on every SM of an H200; this and the next two were measured there
MANY_BLOCKS = 2048
MOST_TILES_PER_BLOCK = 8

RECENT = 64  # positions whose confidence is kept; a draft has fewer tokens

MIN_TEMPERATURE = 1e-30  # a gap between logits divided by this is still a finite float32

_LN_2 = tl.constexpr(math.log(2.0))
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
_NO_TOKEN = tl.constexpr(2**31 - 1)


@dataclass(frozen=True)
class Slots:
    """What sampling knows of the requests, by slot: static tensors on the device."""

    history: torch.Tensor  # int32 [max_slots, max_len] tokens; drafts lie behind the context
    seeds: torch.Tensor  # int64 [max_slots] `mixed_seed` of the request's seed
    inverse_temperatures: torch.Tensor  # float32 [max_slots] 0 is greedy
    refused: torch.Tensor  # int32 [max_slots] drafts that the latest step was planned to verify and did not accept
    short: torch.Tensor  # int32 [max_slots] 1 where it made fewer drafts than planned and accepted all of them
    missed: torch.Tensor  # int32 [max_slots] 1 where the drafts behind the ones it verified are void
    recent_confidence: torch.Tensor  # float32 [max_slots, RECENT] of the latest drafts, by position modulo RECENT

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
    broken: torch.Tensor  # int32 [R] 1 where the row has a NaN or no finite maximum; its token is then 0
    confidence: torch.Tensor  # float32 [R] the probability of the token, if asked for
    tile_max: torch.Tensor  # float32 [R, tiles] the tile's largest logit
    tile_cost: torch.Tensor  # float32 [R, tiles] smallest E * exp((largest - logit) / T)
    tile_mass: torch.Tensor  # float32 [R, tiles] sum of exp((logit - largest) / T)
    arrived: torch.Tensor  # int32 [R] blocks done; 0 between calls

    @classmethod
    def allocate(cls, max_rows: int, max_columns: int, device: torch.device | str) -> Choices:
        def zeros(dtype: torch.dtype, *shape: int) -> torch.Tensor:
            return torch.zeros(max_rows, *shape, dtype=dtype, device=device)

        tiles = -(-max_columns // TILE)
        by_tile = zeros(torch.float32, tiles), zeros(torch.float32, tiles), zeros(torch.float32, tiles)
        return cls(zeros(torch.int32), zeros(torch.int32), zeros(torch.float32), *by_tile, zeros(torch.int32))

    def __getitem__(self, some: slice) -> Choices:
        return Choices(*(getattr(self, each.name)[some] for each in fields(self)))


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
    the history, at its position, and its confidence, if given, into slots.recent_confidence.
    """
    num_bucket_rows, num_columns = logits.shape
    num_tiles = -(-num_columns // TILE)
    num_warps, tiles_per_block = 4, 1
    if num_bucket_rows * num_tiles > FEW_TILES:  # fewer warps to wait for each other, and fewer blocks to count
        num_warps = 2
        tiles_per_block = min(-(-num_bucket_rows * num_tiles // MANY_BLOCKS), MOST_TILES_PER_BLOCK)
    _sample_kernel[(num_bucket_rows, -(-num_tiles // tiles_per_block))](
        logits, row_slots, positions, num_rows,
        slots.seeds, slots.inverse_temperatures, vocabulary, slots.history if write else None,
        choices.tokens, choices.broken, choices.confidence if confidence else None,
        slots.recent_confidence if confidence and write else None,
        choices.tile_max, choices.tile_cost, choices.tile_mass, choices.arrived,
        logits.stride(0), slots.history.stride(0), num_columns, num_tiles, tiles_per_block,
        tile_width=TILE, padded_tiles=triton.next_power_of_2(num_tiles), recent=RECENT, num_warps=num_warps,
    )  # fmt: skip


@triton.jit
def _mix64(x):
    x += _WEYL64
    x = (x ^ (x >> 30)) * _FACTOR64_0
    x = (x ^ (x >> 27)) * _FACTOR64_1
    return x ^ (x >> 31)


@triton.jit
def noise_keys(mixed_seed, position):
    """Two words, a function of (seed, position)."""
    key = _mix64(mixed_seed.to(tl.uint64, bitcast=True) + position.to(tl.uint64) * _WEYL64)
    return key.to(tl.uint32), (key >> 32).to(tl.uint32)


@triton.jit
def _mix32(x):
    x = (x ^ (x >> _SHIFT0)) * _FACTOR0
    x = (x ^ (x >> _SHIFT1)) * _FACTOR1
    return x ^ (x >> _SHIFT2)


@triton.jit
def noise_word(token, key0, key1):
    return _mix32(_mix32(token.to(tl.uint32) * _WEYL + key0) ^ key1)


@triton.jit
def uniform(word):
    """(word + 1/2) / 2^32, below 1."""
    return tl.minimum((word.to(tl.float32) + 0.5) * 2.0**-32, _LARGEST_UNIFORM)


@triton.jit
def _log2(x):
    """The hardware's, with an error of 2^-22 * max(1, |result|). x is never near 1 here, nor subnormal."""
    if _INTERPRETED:
        y = tl.log2(x)
    else:
        y = tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)
    return y


@triton.jit
def exponential(word):
    """E = -log(1 - u) for the word's uniform u; gumbel = -log E. Chosen tokens have u near 0: there it is a series."""
    u = uniform(word)
    series = u * (1 + u * (1 / 2 + u * (1 / 3 + u * (1 / 4 + u * (1 / 5 + u * (1 / 6))))))
    return tl.where(u < 0.0625, series, -_LN_2 * _log2(1 - u))


@triton.jit
def noisy_scores(x, token, inverse_temperature, key0, key1):
    """The token with the largest score is the one that is sampled."""
    if inverse_temperature > 0:
        x = x * inverse_temperature - _LN_2 * _log2(exponential(noise_word(token, key0, key1)))
    return x


@triton.jit
def _scale(inverse_temperature):
    """log2(e) / T: a difference of logits times this is an exponent of two. For a greedy row T is 1."""
    return tl.where(inverse_temperature > 0, inverse_temperature, 1.0) * _LOG2_E


@triton.jit
def _row(row, row_slots, positions, seeds, inverse_temperatures):
    """A row's slot, the position of its token, and what the token is drawn with."""
    slot = tl.load(row_slots + row).to(tl.int64)
    position = tl.load(positions + row)
    key0, key1 = noise_keys(tl.load(seeds + slot), position)
    return slot, position, tl.load(inverse_temperatures + slot), key0, key1


@triton.jit
def _finite(x):
    """Clamped, because the difference of two infinities is NaN."""
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
    """E * exp((tile_max - x) / T), [tile_width]; the token with the smallest cost is chosen."""
    exponent = (_finite(tile_max) - x) * _scale(inverse_temperature)
    return exponential(noise_word(token, key0, key1)) * tl.exp2(exponent)


@triton.jit
def _finish_row(
    row_logits, vocabulary, num_columns, inverse_temperature, key0, key1,
    tile_max, tile_cost, tile_mass, num_tiles, row, tokens, broken, confidence, recent_confidence,
    tile_width: tl.constexpr, padded_tiles: tl.constexpr,
):  # fmt: skip
    """Choose the best tile of a row, then the token in it. Loads bypass caches that other blocks' stores miss."""
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
        if recent_confidence is not None:
            tl.store(recent_confidence, chance)
    return chosen


@triton.jit(do_not_specialize=["num_rows", "history_stride", "num_tiles", "tiles_per_block"])
def _sample_kernel(
    logits, row_slots, positions, num_rows,
    seeds, inverse_temperatures, vocabulary, history,
    tokens, broken, confidence, recent_confidence,
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
    if recent_confidence is not None:
        recent_confidence += slot * recent + position % recent
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
            tile_max, tile_cost, tile_mass, num_tiles, row, tokens, broken, confidence, recent_confidence,
            tile_width, padded_tiles,
        )  # fmt: skip
        if history is not None:
            tl.store(history + slot * history_stride + position, chosen)
