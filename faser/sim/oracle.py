"""Which drafts are accepted: replayed from measured sequences, or drawn.

An oracle knows for every output position of a request whether the draft, given the correct tokens before it, agrees
with the target. This is a property of the request alone and depends neither on the policy nor on the batch: a step at
position p with length k accepts min(k, run of agreements from p on).
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from faser.arrays import FloatArray, IntArray
from faser.errors import ConfigError
from faser.traffic.document import Document

Flags = NDArray[np.bool_]

DATA = Path(__file__).parent / "data"
SHIPPED_SEQUENCES = DATA / "agreement-16.npz"
REPLAY = "replay"
EXPECTED = (
    f"{REPLAY} (measured sequences), a probability P, P:SPREAD (its standard deviation over requests), "
    "P:SPREAD:DRIFT (its change over 100 tokens), or a document of faser bench"
)
DRIFT_TOKENS = 100
LEAST_RATE = 1e-9
_MASK = 2**64 - 1


class Oracle(Protocol):
    def runs(self, request: int, size: int) -> IntArray:
        """The number of consecutive agreements from each of the first `size` output positions of a request on.

        `request` is its index in the workload.
        """
        ...

    def confidence(self, request: int, first: int, size: int) -> FloatArray:
        """The probability that the draft gives its token, at `size` positions from `first` on."""
        ...


class AcceptanceModel(Protocol):
    """The value of `--acceptance`: makes oracles."""

    def oracle(self, categories: Sequence[str], seed: int) -> Oracle:
        """For requests of these categories, in the order of the workload."""
        ...


def runs_of(agreement: Flags) -> IntArray:
    """The number of consecutive agreements from each position on: [N] → [N]."""
    positions = np.arange(agreement.size)
    differs = np.where(agreement, agreement.size, positions)
    runs: IntArray = np.minimum.accumulate(differs[::-1])[::-1] - positions
    return runs


# ── random numbers ────────────────────────────────────────────────────────────────────────────────────────────────────


def _mixed(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's finalizer: independent bits from neighbouring inputs."""
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


def uniforms(seed: int, stream: int, counters: IntArray) -> FloatArray:
    """Numbers from 0 to 1, each a function of (seed, stream, counter) alone."""
    key = _mixed(np.array([seed & _MASK], dtype=np.uint64)) + np.uint64(stream)
    bits = _mixed(_mixed(key) + counters.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15))
    drawn: FloatArray = (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return drawn


# ── replayed ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Replayed:
    """Each request replays one of the sequences from its beginning, again and again."""

    source: Replay
    chosen: IntArray  # [requests] the sequence of each

    @cached_property
    def _runs(self) -> IntArray:
        """[S, positions]; the end of a sequence is followed by its beginning."""
        agreement = self.source.agreement
        return np.array([runs_of(np.concatenate([each, each]))[: each.size] for each in agreement])

    def runs(self, request: int, size: int) -> IntArray:
        whole: IntArray = self._runs[self.chosen[request]]
        return whole[:size] if size <= whole.size else np.resize(whole, size)

    def confidence(self, request: int, first: int, size: int) -> FloatArray:
        whole: FloatArray = self.source.confidence[self.chosen[request]]
        return whole[np.arange(first, first + size) % whole.size]


@dataclass(frozen=True)
class Replay:
    """Measured sequences by category. A request takes one of its category, or any if its category has none."""

    agreement: Flags  # [S, positions]
    confidence: FloatArray  # [S, positions]
    categories: tuple[str, ...]  # [S]

    @classmethod
    def shipped(cls) -> Replay:
        with np.load(SHIPPED_SEQUENCES) as file:
            confidence = file["confidence"] / 255
            agreement = np.unpackbits(file["agreement"], axis=1, count=confidence.shape[1]).astype(np.bool_)
            return cls(agreement, confidence, tuple(file["categories"].tolist()))

    def oracle(self, categories: Sequence[str], seed: int) -> Replayed:
        whole = np.arange(len(self.categories))
        members = {name: np.flatnonzero([each == name for each in self.categories]) for name in set(categories)}
        members = {name: found if found.size else whole for name, found in members.items()}
        drawn = uniforms(seed, 0, np.arange(len(categories))).tolist()
        chosen = [members[name][int(u * members[name].size)] for name, u in zip(categories, drawn, strict=True)]
        return Replayed(self, np.array(chosen, dtype=np.int64))


# ── drawn ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Drawn:
    """Two random numbers for every position of every request: the draft's confidence, and whether it agrees."""

    rates: FloatArray  # [requests]
    seed: int
    drift: float = 0.0  # of the rate, over DRIFT_TOKENS

    def runs(self, request: int, size: int) -> IntArray:
        chances = self.confidence(request, 0, size)
        return runs_of(uniforms(self.seed, 2 * request + 1, np.arange(size)) < chances)

    def confidence(self, request: int, first: int, size: int) -> FloatArray:
        """u^((1 - rate) / rate) for a uniform u, whose mean is the rate.

        `runs` accepts with this probability, so the confidence is calibrated.
        """
        positions = np.arange(first, first + size)
        rates = np.clip(self.rates[request] + self.drift / DRIFT_TOKENS * positions, LEAST_RATE, 1.0)
        chances: FloatArray = uniforms(self.seed, 2 * request + 2, positions) ** ((1 - rates) / rates)
        return chances


@dataclass(frozen=True)
class Draw:
    """Acceptance rates from a Beta distribution, with means by category if these are known."""

    mean: float
    spread: float = 0.0  # standard deviation over requests
    drift: float = 0.0
    by_category: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for mean in (self.mean, *self.by_category.values()):
            if not 0 <= mean <= 1:
                raise ConfigError(f"--acceptance {mean:g}: expected a probability, 0 to 1")
            if not 0 <= self.spread < math.inf or (self.spread and self.spread**2 >= mean * (1 - mean)):
                most = math.sqrt(mean * (1 - mean))
                raise ConfigError(
                    f"--acceptance {mean:g}:{self.spread:g}: expected a spread from 0 to below {most:.3g}, the most a "
                    f"rate with mean {mean:g} can have"
                )
        if not math.isfinite(self.drift):
            raise ConfigError(f"--acceptance: drift {self.drift:g}: expected a number")

    def oracle(self, categories: Sequence[str], seed: int) -> Drawn:
        means: FloatArray = np.array([self.by_category.get(name, self.mean) for name in categories], dtype=np.float64)
        if not self.spread:
            return Drawn(means, seed, self.drift)
        size = means * (1 - means) / self.spread**2 - 1
        rates = np.random.default_rng([seed, 2]).beta(means * size, (1 - means) * size)
        return Drawn(rates, seed, self.drift)


def rate_of(accepted: int, lengths: Mapping[int, int]) -> float:
    """The rate at which steps of these lengths (length → number of steps) accept `accepted` tokens on average.

    A step of length k accepts rate + rate² + … + rateᵏ.
    """
    low, high = 0.0, 1.0
    for _ in range(50):
        rate = (low + high) / 2
        expected = sum(count * sum(rate**t for t in range(1, length + 1)) for length, count in lengths.items())
        low, high = (rate, high) if expected < accepted else (low, rate)
    return (low + high) / 2


def draw_like(document: Document, spread: float = 0.0) -> Draw:
    """The acceptance rates, by category, of the runs of a document. Raises ConfigError if none drafted."""
    accepted: Counter[str] = Counter()  # by category
    lengths: dict[str, Counter[int]] = {}  # steps by length, by category
    for run in document.runs:
        for name, found in run.categories.items():
            if found.verified and found.accepted is not None:
                accepted[name] += found.accepted
                steps = {length: count for length, count in enumerate(found.lengths) if length and count}
                lengths.setdefault(name, Counter()).update(steps)
    whole = sum(lengths.values(), Counter[int]())
    if not whole:
        raise ConfigError("no run of it reports accepted drafts by length; play one with fixed:K")
    rates = {name: rate_of(accepted[name], steps) for name, steps in lengths.items() if steps}
    return Draw(rate_of(accepted.total(), whole), spread, by_category=rates)


# ── by name ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def parse_acceptance(text: str) -> AcceptanceModel:
    """EXPECTED lists the forms."""
    if text == REPLAY:
        return Replay.shipped()
    try:
        numbers = [float(part) for part in text.split(":")]
    except ValueError:
        return _like_file(text)
    if len(numbers) > 3:
        raise ConfigError(f"--acceptance {text}: expected {EXPECTED}")
    mean, spread, drift = [*numbers, 0.0, 0.0][:3]
    return Draw(mean, spread, drift)


def _like_file(text: str) -> Draw:
    """`FILE` or `FILE:SPREAD`."""
    path, spread = Path(text).expanduser(), 0.0
    if not path.is_file():
        name, _, number = text.rpartition(":")
        with suppress(ValueError):
            path, spread = Path(name).expanduser(), float(number)
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
        last = json.loads([line for line in lines if line.strip()][-1])
    except (OSError, ValueError, IndexError) as error:
        raise ConfigError(f"--acceptance {text}: cannot be read ({error}); expected {EXPECTED}") from None
    try:
        return draw_like(Document.from_dict(last if isinstance(last, dict) else {}), spread)
    except ConfigError as error:
        raise ConfigError(f"--acceptance {text}: {error}") from None
