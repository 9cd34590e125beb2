"""When requests arrive: synthetic processes by name.

Each draws a stream of unit rate and maps it through the inverse of the expected number of arrivals up to a time.
Randomness is an argument.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from faser.arrays import FloatArray
from faser.errors import ConfigError

EXPECTED = (
    "poisson:RATE, gamma:RATE:SHAPE (below 1 in bursts, above 1 even), square:LOW:HIGH:PERIOD or ramp:LOW:HIGH, with "
    "rates per second"
)
_GRID = 10_000  # intervals at whose ends the expected number of arrivals is known


@dataclass(frozen=True)
class Arrivals:
    """`rate(times, duration)` per second. Intervals are gamma distributed; shape 1 is exponential."""

    rate: Callable[[FloatArray, float], FloatArray]
    shape: float = 1.0

    def mean_rate(self, duration: float) -> float:
        return float(self._expected_arrivals(duration)[1][-1] / duration)

    def times(self, duration: float, random: np.random.Generator, factor: float = 1.0) -> FloatArray:
        """Sorted arrival times within `duration` seconds, with every rate multiplied by `factor`."""
        grid, expected = self._expected_arrivals(duration)
        total = float(expected[-1]) * factor
        loads: FloatArray = np.zeros(0)
        while not loads.size or loads[-1] < total:
            more = random.gamma(self.shape, 1 / self.shape, size=int(total) + 64)
            loads = np.concatenate([loads, (loads[-1] if loads.size else 0.0) + more.cumsum()])
        times: FloatArray = np.interp(loads[loads < total], expected * factor, grid)
        return times

    def _expected_arrivals(self, duration: float) -> tuple[FloatArray, FloatArray]:
        """A grid of times, and the number of requests expected up to each."""
        grid: FloatArray = np.linspace(0, duration, _GRID + 1)
        middles = (grid[1:] + grid[:-1]) / 2
        return grid, np.concatenate([[0.0], (self.rate(middles, duration) * np.diff(grid)).cumsum()])


def parse_arrivals(text: str) -> Arrivals:
    kind, *given = text.split(":")
    try:
        numbers = [float(value) for value in given]
        if not all(0 <= number < math.inf for number in numbers):
            raise ValueError
        return _MAKERS[kind](*numbers)
    except (KeyError, TypeError, ValueError):  # unknown name, wrong count, no number
        raise ConfigError(f"--arrivals {text}: expected {EXPECTED}") from None


def _poisson(rate: float) -> Arrivals:
    return _gamma(rate, 1.0)


def _gamma(rate: float, shape: float) -> Arrivals:
    if not rate or not shape:
        raise ValueError
    return Arrivals(lambda times, duration: np.full_like(times, rate), shape)


def _square(low: float, high: float, period: float) -> Arrivals:
    """LOW in the first half of every period, HIGH in the second."""
    if not period or not low + high:
        raise ValueError
    return Arrivals(lambda times, duration: np.where(times % period < period / 2, low, high))


def _ramp(low: float, high: float) -> Arrivals:
    if not low + high:
        raise ValueError
    return Arrivals(lambda times, duration: low + (high - low) * times / duration)


_MAKERS: dict[str, Callable[..., Arrivals]] = {"poisson": _poisson, "gamma": _gamma, "square": _square, "ramp": _ramp}
