"""Which groups of each grid the model saw, for events: each grid once, a bit for each group.

Knows windows and grids; knows no requests and no events.
"""

from __future__ import annotations

import math
from base64 import b64encode
from typing import TYPE_CHECKING

import numpy as np

from faser.server.sessions.protocol import GridMask, Masks
from faser.vision import Grid

if TYPE_CHECKING:
    from faser.watch import VideoWindow


class MaskLog:
    """The masks of one stream. Its windows come in order; some may be left out."""

    def __init__(self) -> None:
        self._last = -math.inf  # seconds at which the latest grid began

    def new(self, window: VideoWindow) -> Masks:
        """Of the grids that no earlier window had."""
        first = window.media.grids[0]
        masks = [
            GridMask(round(start, 3), round(end, 3), packed(grid))
            for grid, (start, end) in zip(window.media.grids, window.times.tolist(), strict=True)
            if start > self._last
        ]
        self._last = float(window.times[-1, 0])
        return Masks(first.height // first.merge_size, first.width // first.merge_size, masks)


def packed(grid: Grid) -> str | None:
    """A bit for each group, in base64; None: all are kept."""
    if grid.kept is None:
        return None
    bits = np.zeros(grid.num_groups, dtype=np.uint8)
    bits[grid.kept] = 1
    return b64encode(np.packbits(bits).tobytes()).decode()
