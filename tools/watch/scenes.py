"""Short scenes with exact ground truth: things that stand, move, stop, start, appear and leave before a background.

Knows what is where in which frame, and how to draw it. Knows nothing of questions, codecs or models. A scene is a
function of its settings and seed. `plan_scene` decides everything, `render` draws it: whoever needs only the truth
never draws.

Drawn with numpy on CPU cores, not on the GPU: the cores are idle while a GPU trains, and the same code makes the
windows that x264 encodes. Coordinates are pixels, x to the right and y down; boxes are x0, y0, x1, y1.

In the first two and the last two frames every thing is clear: at least 60 % or at most 5 % of it is inside the picture,
and no other thing hides more than a quarter of it. Answers are about these frames, so that each is beyond doubt.
Between them things may hide each other.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from tools.watch.backgrounds import draw_background
from tools.watch.sprites import KINDS, SIZES, Random, draw_sprites, pick_family, sprite_size

DIRECTIONS = ("left", "right", "up", "down")
_UNITS = {"left": (-1.0, 0.0), "right": (1.0, 0.0), "up": (0.0, -1.0), "down": (0.0, 1.0)}
_SPEEDS = (0.014, 0.038)  # of the picture's side, per frame
_SEEN, _UNSEEN, _HIDDEN = 0.6, 0.05, 0.25  # shares of a thing's box
_TRIES = 16  # to place a thing


@dataclass(frozen=True, kw_only=True)
class SceneSettings:
    side: int = 224  # pixels of the square picture
    num_frames: int = 16
    max_things: int = 8
    held_out: bool = False  # families and background that training never draws
    most_noise: float = 5.0  # of a camera, in levels; the least is 0.5

    def __post_init__(self) -> None:
        assert self.num_frames >= 4, "a window has two pairs of frames or more"
        assert self.num_frames % 2 == 0, "frames come in pairs"


@dataclass(frozen=True)
class Thing:
    """One thing: its looks and its path. It moves by `velocity` a frame from frame `begin` to frame `end`."""

    kind: str
    family: int
    width: int
    height: int
    seed: int  # of its looks
    centre: tuple[float, float]  # in frame 0
    velocity: tuple[float, float] = (0.0, 0.0)
    direction: str | None = None  # the main direction of the velocity
    begin: int = 0
    end: int = 0  # equal to begin: it stands
    born: int = 0  # first frame in which it exists
    gone: int = 1 << 30  # first frame in which it does not exist any more

    def centres(self, num_frames: int) -> NDArray[np.float64]:
        """[frames, 2]"""
        moved = np.clip(np.arange(num_frames), self.begin, self.end) - self.begin
        return np.array(self.centre) + moved[:, None] * np.array(self.velocity)


@dataclass(frozen=True)
class Event:
    """What happened to a thing: in `frame` it first is so."""

    name: str  # appears, leaves, starts, stops
    frame: int
    thing: int


@dataclass(frozen=True, eq=False)
class Plan:
    """A scene without pixels. Things are in drawing order, farthest first."""

    settings: SceneSettings
    seed: int
    things: tuple[Thing, ...]

    @cached_property
    def full_boxes(self) -> NDArray[np.float64]:
        """[frames, things, 4], also outside the picture."""
        return full_boxes(self.things, self.settings.num_frames)

    @cached_property
    def boxes(self) -> NDArray[np.float64]:
        """[frames, things, 4], cut to the picture; a thing outside has a box without area."""
        return np.clip(self.full_boxes, 0, self.settings.side)

    @cached_property
    def exists(self) -> NDArray[np.bool_]:
        """[frames, things]"""
        frames = np.arange(self.settings.num_frames)[:, None]
        born, gone = (np.array([getattr(t, name) for t in self.things], dtype=int) for name in ("born", "gone"))
        return (frames >= born) & (frames < gone)

    @cached_property
    def seen(self) -> NDArray[np.bool_]:
        """[frames, things] at least 60 % of the box is in the picture."""
        return self.exists & (inside_share(self.full_boxes, self.settings.side) >= _SEEN)

    @cached_property
    def moving(self) -> NDArray[np.bool_]:
        """[frames, things] seen, and at another place than in the frame before; in frame 0, than in frame 1."""
        centres = centres_of(self.things, self.settings.num_frames)
        moved = (np.diff(centres, axis=0) != 0).any(-1)
        return self.seen & np.concatenate((moved[:1], moved))

    @cached_property
    def events(self) -> tuple[Event, ...]:
        """In order of their frames."""
        found: list[Event] = []
        for thing in range(len(self.things)):
            found += _changes(self.seen[:, thing], thing, "appears", "leaves")
            found += [
                event
                for event in _changes(self.moving[:, thing], thing, "starts", "stops")
                if self.seen[event.frame - 1 : event.frame + 1, thing].all()
            ]
        return tuple(sorted(found, key=lambda event: (event.frame, event.thing)))


def _changes(is_so: NDArray[np.bool_], thing: int, on: str, off: str) -> list[Event]:
    frames = 1 + np.flatnonzero(is_so[1:] != is_so[:-1])
    return [Event(on if is_so[frame] else off, int(frame), thing) for frame in frames]


def centres_of(things: tuple[Thing, ...], num_frames: int) -> NDArray[np.float64]:
    """[frames, things, 2]"""
    return np.stack([t.centres(num_frames) for t in things], 1) if things else np.zeros((num_frames, 0, 2))


def full_boxes(things: tuple[Thing, ...], num_frames: int) -> NDArray[np.float64]:
    """[frames, things, 4] in whole pixels, as drawn."""
    sizes = np.array([(t.width, t.height) for t in things], dtype=float).reshape(-1, 2)
    corners = np.round(centres_of(things, num_frames) - sizes / 2)
    return np.concatenate((corners, corners + sizes), -1)


def inside_share(boxes: NDArray[np.float64], side: int) -> NDArray[np.float64]:
    """The share of each box that lies in the picture. boxes [..., 4]."""
    return _area(np.clip(boxes, 0, side)) / _area(boxes)


def _area(boxes: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.prod(boxes[..., 2:] - boxes[..., :2], axis=-1)


# ── planning ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def plan_scene(settings: SceneSettings, seed: int) -> Plan:
    """A scene with 0 to max_things things at its end, each number as likely, as far as there is room for them."""
    random = np.random.default_rng((seed, settings.held_out, 1))
    things: tuple[Thing, ...] = ()
    for behaviour in behaviours(settings.max_things, random):
        for _ in range(_TRIES):
            thing = make_thing(behaviour, settings, random)
            if keeps_word(thing, behaviour, settings) and is_clear(thing, things, settings):
                things = (*things, thing)
                break
    order = random.permutation(len(things))
    return Plan(settings, seed, tuple(things[i] for i in order))


def behaviours(max_things: int, random: Random) -> list[str]:
    """What each thing of a scene does.

    Something appears, leaves and stops in about half of all scenes each. Of the other things a random share moves.
    """
    num_at_end = int(random.integers(max_things + 1))
    appears, leaves, stops = random.random(3) < (0.56, 0.5, 0.56)
    chosen = ["leave"] * bool(leaves) + (["enter"] * bool(appears) + ["stop"] * bool(stops))[:num_at_end]
    num_left, share = num_at_end - sum(each != "leave" for each in chosen), random.random()
    is_mover = random.random(num_left) < share
    starts = random.random(num_left) < 0.15
    return chosen + [("start" if s else "move") if m else "stand" for m, s in zip(is_mover, starts, strict=True)]


def make_thing(behaviour: str, settings: SceneSettings, random: Random) -> Thing:
    side = settings.side
    kind = KINDS[int(random.integers(len(KINDS)))]
    width, height = sprite_size(kind, random.uniform(*SIZES), side)
    margin = 0.5 * min(width, height)
    centre = random.uniform(margin, side - margin, 2)
    family = pick_family(kind, settings.held_out, random)
    thing = Thing(kind, family, width, height, int(random.integers(1 << 31)), (float(centre[0]), float(centre[1])))
    if behaviour == "stand":
        return thing
    if behaviour in ("enter", "leave") and random.random() < 0.2:  # through a door
        frame = int(random.integers(2, settings.num_frames - 1))
        return replace(thing, born=frame) if behaviour == "enter" else replace(thing, gone=frame)
    return set_in_motion(thing, behaviour, settings, random)


def set_in_motion(thing: Thing, behaviour: str, settings: SceneSettings, random: Random) -> Thing:
    side, last = settings.side, settings.num_frames - 1
    direction = DIRECTIONS[int(random.integers(4))]
    unit = np.array(_UNITS[direction])
    velocity = random.uniform(*_SPEEDS) * side * _turned(unit, random.normal(0, 0.1))
    begin = int(random.integers(1, max(2, last // 2))) if behaviour == "start" else 0
    end = int(random.integers(max(1, last // 3), last - 1)) if behaviour == "stop" else last
    centre, path = np.array(thing.centre), (end - begin) * velocity
    outside = 0.5 * (thing.width, thing.height)[int(unit[0] == 0)] + random.uniform(0, 0.05) * side  # behind the edge
    if behaviour in ("enter", "leave"):
        sign = -1 if behaviour == "enter" else 1
        edge = side / 2 + sign * unit * (side / 2 + outside)
        centre = np.where(unit == 0, centre, edge)
    if behaviour in ("leave", "stop"):  # so far the centre at the end of the path
        centre = centre - path
    return replace(
        thing,
        centre=(float(centre[0]), float(centre[1])),
        velocity=(float(velocity[0]), float(velocity[1])),
        direction=direction,
        begin=begin,
        end=end,
    )


def _turned(unit: tuple[float, float], angle: float) -> NDArray[np.float64]:
    cos, sin = np.cos(angle), np.sin(angle)
    return np.array([cos * unit[0] - sin * unit[1], sin * unit[0] + cos * unit[1]])


def keeps_word(thing: Thing, behaviour: str, settings: SceneSettings) -> bool:
    """Whether the thing is seen at the beginning and at the end as its behaviour says."""
    seen = Plan(settings, 0, (thing,)).seen[[0, -1], 0].tolist()
    return bool(seen == {"enter": [False, True], "leave": [True, False]}.get(behaviour, [True, True]))


def is_clear(thing: Thing, others: tuple[Thing, ...], settings: SceneSettings) -> bool:
    """Whether the thing is clearly seen or clearly not in the first and last frames, and hides nothing there."""
    checked = [0, 1, settings.num_frames - 2, settings.num_frames - 1]
    boxes = full_boxes((thing, *others), settings.num_frames)[checked]
    shares = inside_share(boxes[:, 0], settings.side)
    exists = Plan(settings, 0, (thing, *others)).exists[checked]
    if not ((shares >= _SEEN) | (shares <= _UNSEEN) | ~exists[:, 0]).all():
        return False
    low = np.maximum(boxes[:, :1, :2], boxes[:, 1:, :2])
    high = np.minimum(boxes[:, :1, 2:], boxes[:, 1:, 2:])
    overlap = np.prod(np.clip(high - low, 0, None), axis=-1)  # [checked, others]
    smaller = np.minimum(_area(boxes[:, :1]), _area(boxes[:, 1:]))
    return bool((overlap <= _HIDDEN * smaller)[exists[:, :1] & exists[:, 1:]].all())


# ── drawing ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def render(plan: Plan) -> NDArray[np.uint8]:
    """[frames, side, side, 3]: background, things, slow changes of light, and the noise of a camera."""
    settings = plan.settings
    random = np.random.default_rng((plan.seed, settings.held_out, 2))
    background = draw_background(random, settings.side, settings.held_out)
    frames = np.repeat(background[None], settings.num_frames, axis=0)
    for index, thing in enumerate(plan.things):
        _draw_thing(frames, thing, plan.full_boxes[:, index].astype(int), plan.exists[:, index])
    light = 1 + random.uniform(-0.12, 0.12) * np.linspace(-1, 1, settings.num_frames) * (random.random() < 0.5)
    frames *= light.astype(np.float32)[:, None, None, None]
    _add_noise(frames, random.uniform(0.5, settings.most_noise), random)
    return np.clip(frames, 0, 255, out=frames).astype(np.uint8)


def _draw_thing(frames: NDArray[np.float32], thing: Thing, boxes: NDArray[np.int_], exists: NDArray[np.bool_]) -> None:
    side = frames.shape[1]
    flipped = thing.velocity[0] < 0 or (thing.velocity[0] == 0 and thing.seed % 2 == 1)
    sprites = draw_sprites(thing.kind, thing.family, (thing.width, thing.height), thing.seed, flipped)
    for frame in np.flatnonzero(exists):
        x0, y0, x1, y1 = boxes[frame]
        left, top, right, bottom = max(x0, 0), max(y0, 0), min(x1, side), min(y1, side)
        if left >= right or top >= bottom:
            continue
        is_walking = thing.begin <= frame < thing.end
        sprite = sprites[frame % len(sprites) if is_walking else -1]
        part = np.s_[top - y0 : bottom - y0, left - x0 : right - x0]
        below = frames[frame, top:bottom, left:right]
        below += (sprite.colour[part] - below) * sprite.alpha[part]


@lru_cache(maxsize=1)
def _noise_bank() -> NDArray[np.float32]:
    """Noise of variance 1. Drawing it anew for every frame would cost more than all the rest."""
    return np.random.default_rng(0).standard_normal(1 << 20, dtype=np.float32)


def _add_noise(frames: NDArray[np.float32], strength: float, random: Random) -> None:
    bank = _noise_bank()
    for frame in frames.reshape(len(frames), -1):
        start = int(random.integers(len(bank) - frame.size))
        frame += np.float32(strength) * bank[start : start + frame.size]
