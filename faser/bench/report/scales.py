"""From values to pixels: ticks, scales, and labels that do not touch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from faser.bench.report.svg import width_of


@dataclass(frozen=True)
class Axis:
    """What an axis measures. It ends at `most`, if given. A `wide` axis is logarithmic if values lie far apart."""

    label: str
    show: Callable[[float], str]
    whole: bool = False
    most: float | None = None
    wide: bool = False


def ticks(low: float, high: float, most: int = 5, whole: bool = False) -> list[float]:
    """Multiples of 1, 2, 2.5 or 5 times a power of ten that enclose low and high."""
    span = high - low if high > low else abs(high) or 1.0
    rough = span / max(most, 1)
    power = 10.0 ** math.floor(math.log10(rough))
    factors = (1, 2, 5, 10) if whole else (1, 2, 2.5, 5, 10)
    step = next(factor * power for factor in factors if factor * power >= rough * 0.999)
    step = max(step, 1.0) if whole else step
    first, last = math.floor(low / step + 1e-6), math.ceil(high / step - 1e-6)
    return [float(f"{index * step:.12g}") for index in range(first, max(last, first + 1) + 1)]


def wide_ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Ticks of a logarithmic axis that enclose two positive numbers."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for factors in ((1, 2, 5), (1, 3), (1,)):
        every = [factor * 10.0**power for power in powers for factor in factors]
        first = max((i for i, tick in enumerate(every) if tick <= low * 1.0001), default=0)
        last = min((i for i, tick in enumerate(every) if tick >= high * 0.9999), default=len(every) - 1)
        found = every[first : max(last, first + 1) + 1]
        if len(found) <= most + 1:
            break
    return [float(f"{tick:.12g}") for tick in found]


@dataclass(frozen=True)
class Scale:
    """From values to pixels."""

    low: float
    high: float
    start: float
    end: float
    wide: bool = False

    def __call__(self, value: float) -> float:
        low, high, at = self.low, self.high, value
        if self.wide:
            low, high, at = math.log(low), math.log(high), math.log(at)
        share = (at - low) / (high - low) if high != low else 0.5
        return self.start + (self.end - self.start) * min(max(share, 0.0), 1.0)


def value_scale(axis: Axis, values: Sequence[float], start: float, end: float, most: int) -> tuple[Scale, list[float]]:
    """Linear from zero; logarithmic if the axis is wide and max / min > 25."""
    high = axis.most if axis.most is not None else max(values, default=1.0)
    low = min(values, default=0.0)
    if axis.wide and low > 0 and high / low > 25:
        levels = wide_ticks(low, high, most)
        return Scale(levels[0], levels[-1], start, end, wide=True), levels
    levels = ticks(0.0, high, most, axis.whole)
    return Scale(levels[0], levels[-1], start, end), levels


def spaced(values: Sequence[float], place: Scale, show: Callable[[float], str]) -> list[float]:
    """The values whose labels do not touch the label before."""
    kept: list[float] = []
    for value in values:
        room = (width_of(show(value)) + width_of(show(kept[-1]))) / 2 + 8 if kept else 0.0
        if not kept or place(value) - place(kept[-1]) >= room:
            kept.append(value)
    return kept


def spread_out(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Positions near the wanted ones, in the same order, at least `gap` apart and between low and high if they fit.

    Labels that would touch form a block around their mean.
    """
    gap = min(gap, (high - low) / max(len(wanted) - 1, 1))
    order = sorted(range(len(wanted)), key=lambda index: wanted[index])
    blocks: list[tuple[float, int]] = []  # (wanted position of the first label, number of labels)

    def first(block: tuple[float, int]) -> float:
        return min(max(block[0], low), high - gap * (block[1] - 1))

    for index in order:
        block = (wanted[index], 1)
        while blocks and first(blocks[-1]) + gap * blocks[-1][1] > first(block):
            start, number = blocks.pop()
            total = number + block[1]
            block = ((start * number + (block[0] - gap * number) * block[1]) / total, total)
        blocks.append(block)
    spread = [first(block) + gap * rank for block in blocks for rank in range(block[1])]
    places = dict(zip(order, spread, strict=True))
    return [places[index] for index in range(len(wanted))]
