"""Pictures of things, drawn from a few shapes: people, cars, dogs, balls and boxes, several families of each.

Knows how to draw one thing with antialiased edges. Knows nothing of scenes, motion or questions. The last family of
each kind is held out: training never draws it. Every picture is a function of its generator.

A drawing is a list of parts, back to front. A part is a shape in a unit square (x to the right, y down, both -1 … 1)
and a colour. There are three shapes: an oval, a bar (a rectangle with round corners) and a limb (a thick line).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Colour = NDArray[np.float32]  # [3], 0 … 255
Random = np.random.Generator

KINDS = ("person", "car", "dog", "ball", "box")
# Width and height as a share of the picture's side, for a thing of size 1. Sizes are drawn from SIZES.
ASPECTS = {"person": (0.45, 1.0), "car": (1.3, 0.65), "dog": (0.85, 0.62), "ball": (0.5, 0.5), "box": (0.62, 0.62)}
SIZES = (0.20, 0.32)


@dataclass(frozen=True)
class Part:
    shape: str  # oval, bar or limb
    numbers: tuple[float, ...]  # oval, bar: centre x, y, half width, half height; limb: x, y, x, y, radius
    colour: Colour


@dataclass(frozen=True, eq=False)
class Sprite:
    """One picture of a thing; `alpha` is 0 outside."""

    colour: Floats  # [height, width, 3], 0 … 255
    alpha: Floats  # [height, width, 1], 0 … 1


# ── shapes ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def distance(part: Part, x: Floats, y: Floats) -> Floats:
    """Distance to the edge in unit lengths, negative inside; for an oval an approximation. x, y [height, width]."""
    if part.shape == "limb":
        x0, y0, x1, y1, radius = part.numbers
        dx, dy = x1 - x0, y1 - y0
        along = np.clip(((x - x0) * dx + (y - y0) * dy) / (dx * dx + dy * dy), 0, 1)
        return np.hypot(x - x0 - along * dx, y - y0 - along * dy) - radius
    centre_x, centre_y, half_width, half_height = part.numbers
    if part.shape == "oval":
        scaled = np.hypot((x - centre_x) / half_width, (y - centre_y) / half_height)
        return (scaled - 1) * min(half_width, half_height)
    assert part.shape == "bar", part.shape
    corner = 0.2 * min(half_width, half_height)
    out_x, out_y = np.abs(x - centre_x) - half_width + corner, np.abs(y - centre_y) - half_height + corner
    return np.hypot(np.maximum(out_x, 0), np.maximum(out_y, 0)) + np.minimum(np.maximum(out_x, out_y), 0) - corner


def rasterise(parts: Sequence[Part], width: int, height: int) -> Sprite:
    """Draw the parts over each other. Light comes from above."""
    x = ((np.arange(width, dtype=np.float32) + 0.5) * 2 / width - 1)[None, :]
    y = ((np.arange(height, dtype=np.float32) + 0.5) * 2 / height - 1)[:, None]
    colour = np.zeros((height, width, 3), dtype=np.float32)
    alpha = np.zeros((height, width, 1), dtype=np.float32)
    pixels = 0.5 * min(width, height)  # of a unit length
    for part in parts:
        cover = np.clip(0.5 - distance(part, x, y) * pixels, 0, 1)[..., None].astype(np.float32)
        colour += (part.colour - colour) * cover
        alpha += (1 - alpha) * cover
    light = 1.08 - 0.16 * (y[..., None] + 1) / 2
    return Sprite(np.clip(colour * light, 0, 255), alpha)


# ── families ─────────────────────────────────────────────────────────────────────────────────────────────────────────
# Each takes a generator and the phase of a step (-1 … 1: how far the legs are apart) and returns parts. Things look to
# the right.


def paint(random: Random, low: float = 30, high: float = 235) -> Colour:
    return random.uniform(low, high, 3).astype(np.float32)


def skin(random: Random) -> Colour:
    return np.array([225, 180, 150], dtype=np.float32) * np.float32(random.uniform(0.4, 1.1))


def legs(colour: Colour, top: float, spread: float, phase: float, radius: float = 0.16) -> list[Part]:
    return [Part("limb", (0.0, top, side * spread * phase, 0.86, radius), colour) for side in (-1, 1)]


def walker(random: Random, phase: float) -> list[Part]:
    shirt, trousers, face = paint(random), paint(random, 20, 140), skin(random)
    arms = [Part("limb", (0, -0.35, side * (0.3 + 0.3 * phase), 0.2, 0.1), shirt * 0.85) for side in (-1, 1)]
    body = Part("bar", (0, -0.2, 0.42, 0.38), shirt)
    return [*legs(trousers, 0.1, 0.5, phase), arms[0], body, arms[1], Part("oval", (0.05, -0.78, 0.36, 0.18), face)]


def coat(random: Random, phase: float) -> list[Part]:
    cloth, face = paint(random), skin(random)
    hat = Part("bar", (0, -0.92, 0.45, 0.07), paint(random, 20, 120))
    body = [Part("oval", (0, 0.1, 0.6, 0.62), cloth), Part("oval", (0, -0.72, 0.36, 0.2), face)]
    return [*legs(cloth * 0.5, 0.5, 0.45, phase), *body, hat]


def worker(random: Random, phase: float) -> list[Part]:
    vest, trousers, face = np.array([240, 130, 20], np.float32), paint(random, 20, 110), skin(random)
    stripes = [Part("bar", (0, y, 0.46, 0.04), np.full(3, 235, np.float32)) for y in (-0.3, -0.08)]
    head = [Part("oval", (0, -0.74, 0.34, 0.18), face), Part("oval", (0, -0.86, 0.42, 0.12), paint(random, 150, 250))]
    return [*legs(trousers, 0.1, 0.5, phase, 0.2), Part("bar", (0, -0.18, 0.46, 0.38), vest), *stripes, *head]


def child(random: Random, phase: float) -> list[Part]:
    dress, face = paint(random, 90, 250), skin(random)
    bag = Part("bar", (-0.45, -0.05, 0.25, 0.25), paint(random))
    head = [Part("oval", (0, -0.6, 0.5, 0.26), face), Part("oval", (-0.1, -0.76, 0.5, 0.14), paint(random, 20, 120))]
    return [*legs(face * 0.9, 0.3, 0.55, phase), bag, Part("oval", (0, 0.05, 0.5, 0.42), dress), *head]


def wheels(places: Sequence[float], radius: float) -> list[Part]:
    dark, rim = np.full(3, 25, np.float32), np.full(3, 150, np.float32)
    rings = [("oval", radius, dark), ("oval", radius * 0.5, rim)]
    return [Part(shape, (x, 0.62, size * 0.5, size), colour) for x in places for shape, size, colour in rings]


def saloon(random: Random, phase: float) -> list[Part]:
    body, glass = paint(random), np.array([150, 190, 215], np.float32) * np.float32(random.uniform(0.5, 1.1))
    windows = [Part("bar", (x, -0.36, 0.2, 0.2), glass) for x in (-0.27, 0.22)]
    cabin = [Part("oval", (-0.03, -0.25, 0.6, 0.55), body * 0.9), *windows]
    light = Part("oval", (0.92, 0.15, 0.06, 0.12), np.array([255, 240, 170], np.float32))
    return [*cabin, Part("bar", (0, 0.25, 0.97, 0.36), body), light, *wheels((-0.55, 0.55), 0.34)]


def van(random: Random, phase: float) -> list[Part]:
    body, glass = paint(random, 80, 250), np.array([110, 140, 160], np.float32)
    front = [Part("bar", (0.8, 0.2, 0.18, 0.4), body * 0.9), Part("bar", (0.62, -0.35, 0.2, 0.25), glass)]
    return [Part("bar", (-0.12, -0.08, 0.84, 0.68), body), *front, *wheels((-0.58, 0.55), 0.32)]


def truck(random: Random, phase: float) -> list[Part]:
    load, cab = paint(random), paint(random)
    window = Part("bar", (0.76, -0.25, 0.14, 0.2), np.array([120, 160, 190], np.float32))
    boxes = [Part("bar", (-0.25, -0.18, 0.72, 0.62), load), Part("bar", (0.74, 0.05, 0.24, 0.5), cab), window]
    chassis = Part("bar", (0, 0.5, 0.96, 0.08), np.full(3, 50, np.float32))
    return [*boxes, chassis, *wheels((-0.65, -0.3, 0.66), 0.3)]


def beetle(random: Random, phase: float) -> list[Part]:
    body = paint(random)
    windows = [Part("oval", (x, -0.35, 0.2, 0.24), np.array([90, 120, 150], np.float32)) for x in (-0.22, 0.25)]
    stripe = Part("bar", (0, 0.18, 0.9, 0.06), paint(random))
    shell = [Part("oval", (0, -0.1, 0.62, 0.75), body), Part("oval", (0, 0.28, 0.98, 0.4), body * 0.92)]
    return [*shell, *windows, stripe, *wheels((-0.55, 0.55), 0.36)]


def four_legs(colour: Colour, top: float, phase: float, radius: float) -> list[Part]:
    places = ((-0.5, 1), (-0.38, -1), (0.32, 1), (0.42, -1))
    return [Part("limb", (x, top, x + 0.18 * phase * side, 0.88, radius), colour) for x, side in places]


def hound(random: Random, phase: float) -> list[Part]:
    fur = np.array([170, 120, 70], np.float32) * np.float32(random.uniform(0.35, 1.3))
    head = [Part("oval", (0.68, -0.42, 0.26, 0.28), fur), Part("oval", (0.88, -0.32, 0.12, 0.14), fur * 0.8)]
    extras = [Part("limb", (-0.6, -0.1, -0.92, -0.6, 0.07), fur), Part("oval", (0.56, -0.5, 0.1, 0.28), fur * 0.6)]
    return [*four_legs(fur * 0.85, 0.2, phase, 0.09), Part("oval", (-0.05, 0.02, 0.64, 0.36), fur), *head, *extras]


def terrier(random: Random, phase: float) -> list[Part]:
    fur, patch = paint(random, 150, 250), paint(random, 20, 110)
    body = [Part("bar", (-0.05, 0.1, 0.6, 0.32), fur), Part("oval", (-0.2, 0.0, 0.3, 0.2), patch)]
    ears = [Part("limb", (x, -0.55, x - 0.06, -0.85, 0.08), patch) for x in (0.55, 0.75)]
    tail = Part("limb", (-0.6, -0.05, -0.7, -0.5, 0.08), fur)
    return [*four_legs(fur * 0.8, 0.3, phase, 0.1), *body, *ears, Part("oval", (0.66, -0.35, 0.28, 0.3), fur), tail]


def poodle(random: Random, phase: float) -> list[Part]:
    wool = np.full(3, random.uniform(60, 235), np.float32)
    puffs = ((-0.45, 0.0, 0.36, 0.4), (0.2, -0.05, 0.42, 0.46), (0.66, -0.5, 0.3, 0.32), (-0.86, -0.5, 0.14, 0.18))
    curls = [Part("oval", puff, wool * np.float32(random.uniform(0.8, 1.05))) for puff in puffs]
    tail = Part("limb", (-0.6, 0.0, -0.84, -0.5, 0.05), wool)
    return [*four_legs(wool * 0.7, 0.2, phase, 0.08), tail, *curls, Part("oval", (0.92, -0.4, 0.08, 0.1), wool * 0.5)]


def plain_ball(random: Random, phase: float) -> list[Part]:
    colour = paint(random, 60, 250)
    return [Part("oval", (0, 0, 0.96, 0.96), colour), Part("oval", (-0.3, -0.35, 0.25, 0.2), colour * 0.4 + 153)]


def striped_ball(random: Random, phase: float) -> list[Part]:
    stripe = Part("limb", (-0.6, -0.3, 0.6, 0.3, 0.22), paint(random))
    return [Part("oval", (0, 0, 0.96, 0.96), paint(random, 60, 250)), stripe]


def football(random: Random, phase: float) -> list[Part]:
    dark = np.full(3, 30, np.float32)
    spots = [
        Part("oval", (x, y, 0.2, 0.2), dark) for x, y in ((0, 0), (-0.6, -0.3), (0.6, -0.3), (-0.35, 0.6), (0.4, 0.6))
    ]
    return [Part("oval", (0, 0, 0.96, 0.96), np.full(3, random.uniform(200, 250), np.float32)), *spots]


def ringed_ball(random: Random, phase: float) -> list[Part]:
    ball, ring = paint(random, 60, 250), paint(random)
    return [Part("oval", (0, 0, size, size), colour) for size, colour in ((0.96, ball), (0.62, ring), (0.34, ball))]


def crate(random: Random, phase: float) -> list[Part]:
    wood = np.array([175, 125, 75], np.float32) * np.float32(random.uniform(0.5, 1.3))
    planks = [Part("bar", (0, y, 0.86, 0.05), wood * 0.55) for y in (-0.5, 0, 0.5)]
    brace = Part("limb", (-0.75, 0.75, 0.75, -0.75, 0.08), wood * 0.75)
    return [Part("bar", (0, 0, 0.95, 0.95), wood), *planks, brace]


def parcel(random: Random, phase: float) -> list[Part]:
    tapes = [Part("bar", numbers, paint(random)) for numbers in ((0, 0, 0.12, 0.93), (0, 0, 0.93, 0.12))]
    return [Part("bar", (0, 0, 0.95, 0.95), paint(random, 60, 240)), *tapes[: int(random.integers(1, 3))]]


def locker(random: Random, phase: float) -> list[Part]:
    metal = paint(random, 80, 200)
    doors = [Part("bar", (x, 0, 0.42, 0.86), metal * 0.8) for x in (-0.46, 0.46)]
    handles = [Part("bar", (x, 0, 0.05, 0.2), np.full(3, 30, np.float32)) for x in (-0.14, 0.14)]
    return [Part("bar", (0, 0, 0.97, 0.97), metal), *doors, *handles]


def gift(random: Random, phase: float) -> list[Part]:
    ribbon = paint(random, 120, 250)
    bow = [Part("oval", (x, -0.74, 0.3, 0.2), ribbon) for x in (-0.3, 0.3)]
    paper = Part("bar", (0, 0.2, 0.92, 0.75), paint(random))
    return [paper, Part("bar", (0, 0.2, 0.14, 0.75), ribbon), Part("bar", (0, -0.35, 0.97, 0.16), ribbon * 0.9), *bow]


Draw = Callable[[Random, float], list[Part]]
FAMILIES: dict[str, tuple[Draw, ...]] = {  # the last of each kind is held out
    "person": (walker, coat, worker, child),
    "car": (saloon, van, truck, beetle),
    "dog": (hound, terrier, poodle),
    "ball": (plain_ball, striped_ball, football, ringed_ball),
    "box": (crate, parcel, locker, gift),
}
HAS_LEGS = frozenset(("person", "dog"))


def pick_family(kind: str, held_out: bool, random: Random) -> int:
    """The index of a family: the held-out one, or one of the others."""
    last = len(FAMILIES[kind]) - 1
    return last if held_out else int(random.integers(last))


def sprite_size(kind: str, size: float, side: int) -> tuple[int, int]:
    """Width and height in pixels of a thing of `size` in a picture of `side` pixels."""
    width, height = ASPECTS[kind]
    return max(3, round(width * size * side)), max(3, round(height * size * side))


def draw_sprites(kind: str, family: int, size: tuple[int, int], seed: int, flipped: bool) -> tuple[Sprite, ...]:
    """The phases of a thing's step: two for a thing with legs, else one. The same seed gives the same thing."""
    phases = (1.0, 0.25) if kind in HAS_LEGS else (0.0,)
    parts = [FAMILIES[kind][family](np.random.default_rng(seed), phase) for phase in phases]
    drawn = [rasterise(each, *size) for each in parts]
    return tuple(Sprite(each.colour[:, ::-1], each.alpha[:, ::-1]) if flipped else each for each in drawn)
