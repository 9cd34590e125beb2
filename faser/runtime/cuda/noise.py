"""The noise of faser/runtime/sampling.py on the device: the same hash bits for (seed, position, token).

Knows seeds, positions and token ids; no logits.
"""

# mypy: disable-error-code="import-untyped, import-not-found, untyped-decorator, no-untyped-def"
from __future__ import annotations

import math

import triton
import triton.language as tl

from faser.runtime.sampling import LARGEST_UNIFORM, MULTIPLIERS, SHIFTS, WEYL

LN_2 = tl.constexpr(math.log(2.0))

_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
_WEYL = tl.constexpr(int(WEYL))
_FACTOR0, _FACTOR1 = (tl.constexpr(int(factor)) for factor in MULTIPLIERS)
_SHIFT0, _SHIFT1, _SHIFT2 = (tl.constexpr(int(shift)) for shift in SHIFTS)
_WEYL64 = tl.constexpr(0x9E3779B97F4A7C15)
_FACTOR64_0 = tl.constexpr(0xBF58476D1CE4E5B9)
_FACTOR64_1 = tl.constexpr(0x94D049BB133111EB)
_LARGEST_UNIFORM = tl.constexpr(float(LARGEST_UNIFORM))


def mixed_seed(seed: int) -> int:
    """The start of a request's noise stream, as the int64 that `Slots.seeds` holds."""
    mixed = (seed + _WEYL64.value) % 2**64
    mixed = (mixed ^ (mixed >> 30)) * _FACTOR64_0.value % 2**64
    mixed = (mixed ^ (mixed >> 27)) * _FACTOR64_1.value % 2**64
    mixed ^= mixed >> 31
    return mixed - 2**64 if mixed >= 2**63 else mixed


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
def log2(x):
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
    return tl.where(u < 0.0625, series, -LN_2 * log2(1 - u))
