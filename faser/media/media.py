"""A picture or a video that is ready for a prompt: a value, and what it costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from faser.vision import Grid, count_tokens

KINDS = ("image", "video")


@dataclass(frozen=True, eq=False)
class Media:
    """One picture or video, ready for a prompt."""

    kind: str  # one of KINDS
    grids: tuple[Grid, ...]  # in the order of time; all of one height and width
    seconds_per_grid: float | None  # of a video
    num_frames: int  # that were sampled: without the repetition that fills a grid; 1 for a picture

    def __post_init__(self) -> None:
        assert self.kind in KINDS
        assert self.grids, "media have at least one grid"
        assert len({(grid.height, grid.width, grid.merge_size) for grid in self.grids}) == 1

    @property
    def num_patches(self) -> int:
        return sum(len(grid.patches) for grid in self.grids)

    @property
    def num_tokens(self) -> int:
        return count_tokens(self.grids)

    @property
    def kept_share(self) -> float:
        """Of all patches, those that the grids keep."""
        return self.num_tokens / sum(grid.num_groups for grid in self.grids)


@dataclass(frozen=True)
class MediaPrompt:
    """A prompt, and what it shows. The prompt has one placeholder for each medium, in their order."""

    prompt: str | Sequence[int]
    media: Sequence[Media]
