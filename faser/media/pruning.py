"""Which groups of a grid the model sees, by what changed in the stream.

Knows the rules and what they remember of a stream. Knows nothing of windows: a grid's groups depend on the stream
alone, so that overlapping windows share them. Vectors are read in motion.py.

What changed stays kept until the stream starts anew: with an I-frame (codec), or with a refresh. A *whole* grid keeps
all its groups: the first one, one with an I-frame (codec), and one that begins `refresh` seconds after the last whole
one, which is the refresh.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from faser.arrays import BoolArray, FloatArray, IntArray
from faser.errors import ConfigError
from faser.media.grids import smart_resize
from faser.media.motion import CELL, ChangedCells, FrameMotion
from faser.media.reader import FrameReader, Pixels
from faser.vision import VisionSettings

RULES = ("none", "codec", "difference")
ROUNDING = 1e-6  # seconds: what two ways to compute one time may differ by


@dataclass(frozen=True, kw_only=True)
class PruningOptions:
    """Which groups of each grid are kept. The defaults are measured: docs/video.md."""

    rule: str = "none"  # one of RULES
    tau: float = 1.0  # codec: pixels of the model's input that a vector must reach to count as motion
    threshold: float = 6.0  # difference: mean absolute difference of a group, in levels of 0 to 255
    refresh: float = 8.0  # seconds from one whole grid to the next, at most; math.inf: none but those of the rule

    def __post_init__(self) -> None:
        if self.rule not in RULES:
            raise ConfigError(f"pruning {self.rule!r}: expected one of {', '.join(RULES)}")
        for name in ("tau", "threshold"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise ConfigError(f"{name}={value!r}: expected a positive number")
        if not self.refresh > 0:
            raise ConfigError(f"refresh={self.refresh!r}: expected a positive number of seconds")


def rule_for(reader: FrameReader, options: PruningOptions) -> str:
    """The rule that is used: without vectors, differences of pixels take their place."""
    return "difference" if options.rule == "codec" and not reader.has_motion else options.rule


def make_pruner(
    reader: FrameReader, options: PruningOptions, settings: VisionSettings, bounds: tuple[int, int]
) -> Pruner | None:
    """`bounds`: fewest and most pixels of a frame after resizing. None: everything is kept."""
    rule = rule_for(reader, options)
    if rule == "codec":
        return CodecPruner(options, settings, bounds)
    return DifferencePruner(options, settings) if rule == "difference" else None


class Pruner(ABC):
    """Follows one stream. Gets its frames in the order in which they are shown, and says what each grid keeps."""

    needs_motion = False  # of every decoded frame

    def __init__(self, refresh: float) -> None:
        self._refresh = refresh
        self._last_whole = -math.inf  # seconds at which the last whole grid began
        self.is_whole = False  # the latest grid; one of which everything changed is not

    def observe(self, motion: FrameMotion) -> None:  # noqa: B027  # a rule without vectors ignores it
        """Take the motion of a decoded frame, sampled or not."""

    @abstractmethod
    def see(self, pixels: Pixels) -> None:
        """Take a sampled frame, resized. Its motion was observed."""

    def kept(self, start: float) -> IntArray | None:
        """Groups that the grid of the frames since the last call keeps, ascending; None: all.

        `start`: seconds of the grid's first frame.
        """
        self.is_whole = self._keeps_all()
        if not self.is_whole and start - self._last_whole >= self._refresh - ROUNDING:
            self.is_whole = True
            self.forget()
        if not self.is_whole:
            return _indices(self.changed())
        self._last_whole = start
        return None

    @abstractmethod
    def _keeps_all(self) -> bool:
        """Whether the rule keeps all of the grid, whatever changed. Asked once for each grid."""

    @abstractmethod
    def changed(self) -> BoolArray:
        """[rows, columns] the groups that changed and were not forgotten."""

    @abstractmethod
    def forget(self) -> None:
        """The grid is whole: what changed before is seen."""


def _indices(changed: BoolArray) -> IntArray | None:
    """A grid is never empty: where nothing changed it keeps its middle group, as good as any other."""
    if changed.all():
        return None
    rows, columns = changed.shape
    indices = np.flatnonzero(changed)
    return indices if len(indices) else np.array([rows // 2 * columns + columns // 2])


# ---- codec ----


class CodecPruner(Pruner):
    """Keeps what moved or was coded anew since the last I-frame.

    A grid is whole if an I-frame is among its frames, or among the frames that were not sampled between the grid before
    it and its own last frame. Vectors do not reach across an I-frame: nobody knows what changed there.
    """

    needs_motion = True

    def __init__(self, options: PruningOptions, settings: VisionSettings, bounds: tuple[int, int]) -> None:
        super().__init__(options.refresh)
        self._tau, self._settings, self._bounds = options.tau, settings, bounds
        self._has_key = False  # an I-frame came since the last grid
        self._area: _Area | None = None

    def observe(self, motion: FrameMotion) -> None:
        if self._area is None or (motion.kind == "I" and not self._area.fits(motion)):
            self._area = _Area(motion, self._settings, self._bounds, self._tau)
        if motion.kind == "I":
            self._has_key = True
            self._area.cells.clear()
        else:
            self._area.cells.add(motion)

    def see(self, pixels: Pixels) -> None:
        assert self._area is not None, "a frame's motion comes before the frame"
        rows, columns = self._area.shape
        assert pixels.shape[:2] == (rows * self._settings.factor, columns * self._settings.factor)

    def _keeps_all(self) -> bool:
        is_whole, self._has_key = self._has_key, False
        return is_whole

    def changed(self) -> BoolArray:
        assert self._area is not None
        return self._area.changed_groups()

    def forget(self) -> None:
        assert self._area is not None
        self._area.cells.clear()


class _Area:
    """Cells of a frame as encoded, and the groups of the upright, resized frame that they lie in."""

    def __init__(self, motion: FrameMotion, settings: VisionSettings, bounds: tuple[int, int], tau: float) -> None:
        self._turns = motion.turns
        size = (motion.height, motion.width)
        upright = size[::-1] if motion.turns % 2 else size
        resized = smart_resize(*upright, settings.factor, *bounds)
        self.shape = resized[0] // settings.factor, resized[1] // settings.factor  # groups, upright
        as_encoded = resized[::-1] if motion.turns % 2 else resized
        self.cells = ChangedCells(*size, as_encoded[0] / size[0], as_encoded[1] / size[1], tau)
        rows, columns = self.cells.cells.shape
        self._rows = _overlaps(as_encoded[0] // settings.factor, motion.height, rows)
        self._columns = _overlaps(as_encoded[1] // settings.factor, motion.width, columns).T

    def fits(self, motion: FrameMotion) -> bool:
        return (self.cells.height, self.cells.width, self._turns) == (motion.height, motion.width, motion.turns)

    def changed_groups(self) -> BoolArray:
        """[rows, columns] with a cell that changed, upright."""
        counts = self._rows @ self.cells.cells.astype(np.float32) @ self._columns
        return np.rot90(counts > 0, self._turns)


def _overlaps(num_groups: int, size: int, num_cells: int) -> NDArray[np.float32]:
    """[groups, cells] 1 where they share pixels, along a side of `size` pixels."""
    edges = np.arange(num_groups + 1)[:, None] * size / num_groups
    starts = np.arange(num_cells) * CELL
    return ((starts < edges[1:]) & (starts + CELL > edges[:-1])).astype(np.float32)


# ---- difference ----


class DifferencePruner(Pruner):
    """Keeps groups whose pixels differ from those of the sampled frame before."""

    def __init__(self, options: PruningOptions, settings: VisionSettings) -> None:
        super().__init__(options.refresh)
        self._threshold, self._factor = options.threshold, settings.factor
        self._last: Pixels | None = None
        self._mask: BoolArray | None = None

    def see(self, pixels: Pixels) -> None:
        if self._last is None or self._mask is None:
            self._mask = np.zeros([side // self._factor for side in pixels.shape[:2]], dtype=np.bool_)
        else:
            self._mask |= group_differences(self._last, pixels, self._factor) >= self._threshold
        self._last = pixels

    def _keeps_all(self) -> bool:
        return False  # but for the refresh

    def changed(self) -> BoolArray:
        assert self._mask is not None, "a grid has frames"
        return self._mask

    def forget(self) -> None:
        assert self._mask is not None
        self._mask[:] = False


def group_differences(before: Pixels, after: Pixels, factor: int) -> FloatArray:
    """[rows, columns] mean absolute difference of each group's pixels, over all channels, in levels of 0 to 255."""
    height, width, channels = after.shape
    rows, columns = height // factor, width // factor
    difference = np.maximum(before, after) - np.minimum(before, after)  # bytes: faster than signed numbers
    lines = difference.reshape(height, columns, factor * channels).sum(axis=2, dtype=np.uint32)
    sums: FloatArray = lines.reshape(rows, factor, columns).sum(axis=1) / float(factor**2 * channels)
    return sums
