"""What a model sees: pictures and video frames cut into patches, and their places in a prompt.

Knows sizes, names and positions. Knows nothing of torch, files or codecs. Every value is frozen and complete when it is
made.

A *grid* is what the vision encoder computes on its own: one picture, or a few consecutive frames of a video. It is
height × width *patches*. A *group* is merge_size × merge_size neighbouring patches; a group becomes one token. A grid
may keep only some of its groups: the others are neither encoded nor part of the prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from faser.arrays import IntArray

NAME_BYTES = 16


@dataclass(frozen=True, kw_only=True)
class VisionSettings:
    """How pictures become patches, and patches tokens, for one model. Plain numbers: another process may hold them."""

    patch_size: int  # pixels
    merge_size: int  # patches: a group is merge_size × merge_size
    frames_per_grid: int  # of a video; a picture stands for all of them
    min_pixels: int  # of a picture, after resizing
    max_pixels: int
    video_min_pixels: int  # of each frame, after resizing
    video_max_pixels: int
    image_token_id: int  # stands for a token of a picture
    video_token_id: int  # stands for a token of a video
    has_spatial_positions: bool  # tokens have positions in time, height and width (M-RoPE)
    positions_per_second: float | None = None  # positions in time; None: one a grid

    @property
    def factor(self) -> int:
        """Pixels of a group's side: both sides of a resized picture are multiples of it."""
        return self.patch_size * self.merge_size


@dataclass(frozen=True, eq=False)
class Grid:
    """One grid. `patches` are in the order of groups, row by row, and within a group row by row."""

    patches: NDArray[np.uint8]  # [kept groups * merge_size², channels, frames, patch_size, patch_size]; frames may be 1
    height: int  # of the whole grid, in patches
    width: int
    merge_size: int
    kept: IntArray | None = None  # [tokens] indices of the kept groups, ascending; None: all

    def __post_init__(self) -> None:
        side = self.merge_size
        assert self.height % side == 0 == self.width % side, "a grid is made of whole groups"
        num_groups = self.num_groups if self.kept is None else self.kept.size
        assert len(self.patches) == num_groups * side**2 > 0, "a grid has the patches of its groups"

    @property
    def num_groups(self) -> int:
        """Of the whole grid."""
        return self.height * self.width // self.merge_size**2

    @property
    def num_tokens(self) -> int:
        return len(self.patches) // self.merge_size**2

    @property
    def groups(self) -> IntArray:
        """[tokens] indices of the kept groups."""
        return np.arange(self.num_groups) if self.kept is None else self.kept

    @cached_property
    def name(self) -> bytes:
        """A hash of all that the encoder sees: equal names mean equal tokens."""
        shape = np.array([self.height, self.width, self.merge_size, *self.patches.shape])
        digest = blake2b(shape.tobytes(), digest_size=NAME_BYTES)
        digest.update(self.groups.tobytes())
        digest.update(np.ascontiguousarray(self.patches).data)
        return digest.digest()


@dataclass(frozen=True, eq=False)
class Vision:
    """The grids of one prompt. Grid i stands for the prompt tokens starts[i] … starts[i] + grids[i].num_tokens - 1."""

    grids: tuple[Grid, ...]  # in the order of the prompt
    starts: IntArray  # [grids]
    positions: IntArray | None  # [prompt tokens, 3] in time, height and width; None: every position is the index
    shift: int = 0  # added to all positions in time: of a window in the midst of a video

    @cached_property
    def ends(self) -> IntArray:
        """[grids] the index behind each grid's last token."""
        return self.starts + np.array([grid.num_tokens for grid in self.grids], dtype=np.int64)

    @cached_property
    def offset(self) -> int:
        """What must be added to the index of an output token to get its position, without the shift."""
        return 0 if self.positions is None else int(self.positions.max()) + 1 - len(self.positions)

    def rotary_positions(self, num_tokens: int) -> IntArray:
        """[num_tokens, 3]: positions of the prompt, and of the output behind it."""
        positions = self._positions(0, num_tokens)
        positions[:, 0] += self.shift
        return positions

    def _positions(self, start: int, stop: int) -> IntArray:
        """[stop - start, 3] of the tokens start … stop - 1, without the shift."""
        positions = np.repeat(np.arange(start, stop)[:, None], 3, axis=1)
        if self.positions is not None:
            positions += self.offset
            given = self.positions[start:stop]
            positions[: len(given)] = given
        return positions

    def page_salt(self, start: int, stop: int) -> bytes:
        """What distinguishes the tokens start … stop - 1 from others with the same ids: pixels and positions.

        Empty where they are text at its usual positions, so that such pages are shared with prompts without pictures.
        """
        salt = b""
        for i in range(int(np.searchsorted(self.ends, start, side="right")), len(self.grids)):
            if self.starts[i] >= stop:
                break
            salt += self.grids[i].name + int(start - self.starts[i]).to_bytes(8, "little", signed=True)
        positions = self._positions(start, stop)
        if (positions != np.arange(start, stop)[:, None]).any():
            salt += positions.tobytes()
        return salt + (self.shift.to_bytes(8, "little") if self.shift else b"")


def count_tokens(grids: Sequence[Grid]) -> int:
    return sum(grid.num_tokens for grid in grids)
