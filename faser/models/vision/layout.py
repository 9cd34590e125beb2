"""Where the patches of grids stand in a forward of the encoder: their order, positions and attention segments.

Plain numbers, the same on every device. Knows nothing of pixels, weights or torch.

A row is a patch. The patches of a group are neighbours and stay so: they share a window, and the merger reads them
together. With windows, the groups of a grid are ordered by window, so that every segment is a range of rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from faser.arrays import IntArray
from faser.models.vision.config import VisionConfig
from faser.vision import Grid


@dataclass(frozen=True, eq=False)
class PatchLayout:
    """The rows of one forward. A group that is not kept has no row; a window without kept groups has no segment."""

    groups: IntArray  # [tokens] the place, among the tokens in the order given, of each group of the forward
    positions: IntArray  # [rows, 2] height and width of each patch in its grid
    cu_grids: IntArray  # [grids + 1] rows where grids begin: segments of full attention
    cu_windows: IntArray  # [windows + 1] rows where windows begin; equal to cu_grids without windows

    @property
    def places(self) -> IntArray:
        """[tokens] the place of each token, in the order given, among the groups of the forward."""
        places = np.empty_like(self.groups)
        places[self.groups] = np.arange(self.groups.size)
        return places


def lay_out(grids: Sequence[Grid], config: VisionConfig) -> PatchLayout:
    """The layout of several grids, one behind the other."""
    assert all(grid.merge_size == config.merge_size for grid in grids), "grids of another model"
    cu_tokens = offsets([grid.num_tokens for grid in grids])
    ordered = [_windows(grid, config) for grid in grids]
    group_size = config.merge_size**2
    return PatchLayout(
        np.concatenate([start + order for start, (order, _) in zip(cu_tokens, ordered, strict=False)]),
        np.concatenate([_positions(grid, order) for grid, (order, _) in zip(grids, ordered, strict=True)]),
        cu_tokens * group_size,
        offsets(np.concatenate([sizes for _, sizes in ordered])) * group_size,
    )


def offsets(sizes: Sequence[int] | IntArray) -> IntArray:
    """[len(sizes) + 1] where each part begins, and where the last ends."""
    cu_sizes = np.zeros(len(sizes) + 1, dtype=np.int64)
    np.cumsum(sizes, out=cu_sizes[1:])
    return cu_sizes


def equal_segments(cu_rows: IntArray) -> list[tuple[int, IntArray]]:
    """Segments by length: (length, rows where the segments of this length begin). Equal ones attend in one call."""
    lengths = np.diff(cu_rows)
    return [(int(length), cu_rows[:-1][lengths == length]) for length in np.unique(lengths)]


def _windows(grid: Grid, config: VisionConfig) -> tuple[IntArray, IntArray]:
    """The tokens of a grid in the order of windows [tokens], and the tokens of each window that has some."""
    side = config.groups_per_window
    if side is None:
        return np.arange(grid.num_tokens), np.array([grid.num_tokens])
    height, width = _group_places(grid)
    window = height // side * -(-grid.width // (grid.merge_size * side)) + width // side
    _, sizes = np.unique(window, return_counts=True)
    return np.argsort(window, kind="stable"), sizes


def _group_places(grid: Grid) -> tuple[IntArray, IntArray]:
    """[tokens] rows and columns of the kept groups, in groups."""
    height, width = np.divmod(grid.groups, grid.width // grid.merge_size)
    return height, width


def _positions(grid: Grid, order: IntArray) -> IntArray:
    """[patches, 2] of the tokens in this order, each with its patches row by row."""
    side = grid.merge_size
    # [tokens, 1, 2] + [patches of a group, 2]
    corners = np.stack(_group_places(grid), axis=1)[order, None] * side
    inner = np.stack(np.divmod(np.arange(side**2), side), axis=1)
    return (corners + inner).reshape(-1, 2)
