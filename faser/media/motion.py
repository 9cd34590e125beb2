"""Where a picture changed, by the motion vectors of its codec.

Knows blocks, vectors and picture types. Knows nothing of FFmpeg, models or pixels.

H.264 predicts most blocks of a P- or B-frame from another frame: a *vector* says from where. A block that stays as it
was has the vector zero. A block without a vector is coded anew: a cut, or a thing that appears, resembles nothing in
other frames. An I-frame has no vectors at all, so it says nothing of what changed since the frame before it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from faser.arrays import BoolArray

CELL = 8  # pixels: blocks that FFmpeg exports have sides of 8 or 16, at multiples of 8
MACROBLOCK = 16  # pixels: a coded frame is made of whole ones


@dataclass(frozen=True, eq=False)
class FrameMotion:
    """What the codec says of one decoded frame."""

    kind: str  # "I"; "P", "B": predicted; "?": predicted or not, its vectors cannot be used
    height: int  # pixels, as encoded
    width: int
    turns: int = 0  # quarter turns, anticlockwise, that make the frame upright
    vectors: NDArray[np.void] | None = None  # [vectors] FFmpeg's AVMotionVector; None: it has none


class ChangedCells:
    """The cells of CELL × CELL pixels that changed since `clear`, for frames of one size."""

    def __init__(self, height: int, width: int, scale_y: float, scale_x: float, tau: float) -> None:
        """`scale_y`, `scale_x`: pixels of the model's input by those of the frame. `tau`: in the model's pixels."""
        self.height, self.width = height, width
        self._scale_y, self._scale_x, self._tau = scale_y, scale_x, tau
        per_block = MACROBLOCK // CELL
        self._rows, self._columns = (per_block * -(-side // MACROBLOCK) for side in (height, width))
        self.cells: BoolArray = np.zeros((self._rows, self._columns), dtype=np.bool_)

    def clear(self) -> None:
        self.cells[:] = False

    def add(self, motion: FrameMotion) -> None:
        """Add the changes of a P- or B-frame. A frame whose vectors cannot be used may have changed anywhere."""
        if motion.kind not in ("P", "B") or (motion.height, motion.width) != (self.height, self.width):
            self.cells[:] = True
        elif motion.vectors is None or not len(motion.vectors):
            self.cells[:] = True  # nothing is predicted
        else:
            self.cells |= self._changed(motion.vectors)

    def _changed(self, vectors: NDArray[np.void]) -> BoolArray:
        """[rows, columns] of one frame: covered by a vector that reaches tau, or by none."""
        is_fast = self._is_fast(vectors)
        changed = np.ones(self._rows * self._columns, dtype=np.bool_)
        corners = self._corners(vectors)
        for cells, _ in corners:
            changed[cells] = False
        for cells, is_sound in corners:
            changed[cells[is_fast[is_sound]]] = True
        return changed.reshape(self._rows, self._columns)

    def _is_fast(self, vectors: NDArray[np.void]) -> BoolArray:
        """[vectors] whether each reaches tau. A vector is motion / scale pixels of the frame."""
        across = vectors["motion_x"] * self._scale_x
        down = vectors["motion_y"] * self._scale_y
        reach = vectors["motion_scale"] * self._tau  # not divided: a damaged scale of 0 then counts as fast
        is_fast: BoolArray = across**2 + down**2 >= reach**2
        return is_fast

    def _corners(self, vectors: NDArray[np.void]) -> list[tuple[NDArray[np.int64], BoolArray]]:
        """For each corner of the blocks, the cells there, and which vectors these cells belong to.

        A block has one or two cells a side, so that its corners are all of its cells. Blocks that are damaged, of
        another size or outside the frame, cover nothing: their area then counts as changed.
        """
        width, height = vectors["w"].astype(np.int64), vectors["h"].astype(np.int64)
        left, top = vectors["dst_x"] - width // 2, vectors["dst_y"] - height // 2  # dst: the block's middle
        first, last = left // CELL, (left + width - 1) // CELL
        upper, lower = top // CELL, (top + height - 1) // CELL
        is_sound = ((width == 8) | (width == 16)) & ((height == 8) | (height == 16))
        is_sound &= ((left | top) % CELL == 0) & (first >= 0) & (upper >= 0)
        is_sound &= (last < self._columns) & (lower < self._rows)
        pairs = [(y, x) for y in (upper, lower) for x in (first, last)]
        return [((y * self._columns + x)[is_sound], is_sound) for y, x in pairs]
