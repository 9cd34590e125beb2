"""What stands behind the things of a scene: gradients, textures, walls, streets and rooms.

Knows one still picture. Knows nothing of things or light over time. The last family is held out: training never draws
it. Every picture is a function of its generator.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tools.watch.sprites import Floats, Random, paint


def value_noise(random: Random, side: int, cells: int) -> Floats:
    """[side, side] smooth noise, -1 … 1: random numbers on a grid of `cells`, interpolated."""
    knots = random.uniform(-1, 1, (cells + 2, cells + 2)).astype(np.float32)
    places = np.arange(side, dtype=np.float32) * cells / side
    low = places.astype(int)
    share = places - low
    rows = knots[low] * (1 - share)[:, None] + knots[low + 1] * share[:, None]
    return rows[:, low] * (1 - share) + rows[:, low + 1] * share


def gradient(random: Random, side: int) -> Floats:
    angle = random.uniform(0, 2 * np.pi)
    ramp = np.linspace(-1, 1, side, dtype=np.float32)
    along = (np.cos(angle) * ramp[None] + np.sin(angle) * ramp[:, None])[..., None] * 0.35 + 0.5
    return paint(random) * (1 - along) + paint(random) * along


def texture(random: Random, side: int) -> Floats:
    rough = sum(value_noise(random, side, cells) / (1 + i) for i, cells in enumerate((4, 11, 29)))
    return paint(random, 60, 200) + np.asarray(rough)[..., None] * np.float32(random.uniform(8, 28))


def bricks(random: Random, side: int) -> Floats:
    height = max(3, round(side * random.uniform(0.04, 0.09)))
    y, x = np.arange(side)[:, None], np.arange(side)[None]
    shifted = x + (y // height % 2) * height
    joint = (y % height == 0) | (shifted % (2 * height) == 0)
    wall = np.where(joint[..., None], paint(random, 120, 220), paint(random, 60, 180))
    return wall.astype(np.float32) + 8 * value_noise(random, side, 9)[..., None]


def street(random: Random, side: int) -> Floats:
    top, bottom = (round(side * share) for share in (random.uniform(0.25, 0.5), random.uniform(0.7, 0.95)))
    picture = np.empty((side, side, 3), dtype=np.float32)
    picture[:top] = paint(random, 110, 220)
    for _ in range(int(random.integers(2, 6))):  # houses
        left, height = int(random.integers(side)), int(random.integers(top // 2, top + 1))
        picture[top - height : top, left : left + side // 4] = paint(random, 70, 210)
    picture[top:bottom] = random.uniform(60, 110)
    picture[bottom:] = random.uniform(130, 180)
    middle, dash = (top + bottom) // 2, side // 8
    picture[middle : middle + max(1, side // 80), np.arange(side) % dash < dash // 2] = 220
    return picture + 6 * value_noise(random, side, 17)[..., None]


def room(random: Random, side: int) -> Floats:
    floor = round(side * random.uniform(0.5, 0.75))
    picture = np.empty((side, side, 3), dtype=np.float32)
    picture[:floor], picture[floor:] = paint(random, 120, 230), paint(random, 60, 170)
    for _ in range(int(random.integers(0, 4))):  # windows, pictures, doors
        x, y = (int(value) for value in random.integers(0, (side, floor)))
        width, height = (round(side * share) for share in random.uniform(0.08, 0.25, 2))
        picture[y : min(floor, y + height), x : x + width] = paint(random)
    return picture + 5 * value_noise(random, side, 13)[..., None]


def field(random: Random, side: int) -> Floats:
    ramp = np.linspace(0, 1, side, dtype=np.float32)[:, None, None]
    picture = np.array([140, 185, 235], np.float32) * (1 - 0.3 * ramp) * np.ones((1, side, 1), np.float32)
    edge = side * (0.45 + 0.08 * np.sin(np.linspace(0, random.uniform(4, 12), side) + random.uniform(0, 6)))
    grass = np.array([90, 140, 60], np.float32) * np.float32(random.uniform(0.6, 1.2)) * (0.7 + 0.5 * ramp)
    is_ground = np.arange(side)[:, None] > edge[None]
    return np.where(is_ground[..., None], grass, picture) + 12 * value_noise(random, side, 37)[..., None]


BACKGROUNDS = (gradient, texture, bricks, street, room, field)  # the last is held out


def draw_background(random: Random, side: int, held_out: bool) -> NDArray[np.float32]:
    """[side, side, 3] float32, 0 … 255."""
    index = len(BACKGROUNDS) - 1 if held_out else int(random.integers(len(BACKGROUNDS) - 1))
    return np.clip(BACKGROUNDS[index](random, side), 0, 255).astype(np.float32)
