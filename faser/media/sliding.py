"""Prompts of consecutive windows of one stream, and what each takes over from the window before.

Knows grids, prompts and positions. Knows nothing of the engine or of time. The KV of a grid that stays in the window is
taken over instead of being computed again, unless the grid is an *anchor*. That is an approximation: the KV of a grid
depends on grids before it that have left.

A grid keeps its position in time as long as it stays. So positions grow along a stream: a window is the same as one at
its beginning, but for a shift of all positions in time, and a rotary embedding sees differences alone. Before positions
exceed those of the model, a window is computed whole and the shift begins at 0 again. That takes one prefill in hours;
turning the stored keys instead would need a kernel, and round them once more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from faser.arrays import BoolArray
from faser.media.media import Media
from faser.media.placement import place_media
from faser.request import Reuse
from faser.vision import Grid, Vision, VisionSettings


@dataclass(frozen=True, eq=False)
class PlacedPrompt:
    """A prompt whose media stand in their places; `session` and `reuse` as in a Request."""

    token_ids: Sequence[int]
    vision: Vision
    session: str | None = None
    reuse: Reuse | None = None

    @property
    def exact(self) -> PlacedPrompt:
        """The same prompt, computed whole."""
        return PlacedPrompt(self.token_ids, self.vision)


class SlidingPrompts:
    """The windows of one stream, in order. `prompt_ids` has one placeholder for the video."""

    def __init__(self, prompt_ids: Sequence[int], settings: VisionSettings, session: str, max_positions: int) -> None:
        self._prompt_ids = prompt_ids
        self._settings = settings
        self._session = session
        self._max_positions = max_positions
        self._last: Vision | None = None  # of the window before

    def forget(self) -> None:
        """The next window takes nothing over: the session has lost its context."""
        self._last = None

    def next(self, media: Media, is_anchor: BoolArray, num_output: int) -> PlacedPrompt:
        """The prompt of the next window. `is_anchor` [grids]: those that are computed again."""
        media = self._steady(media)
        token_ids, vision = place_media(self._prompt_ids, [media], self._settings)
        last, num_left = self._last, self._num_left(media.grids)
        if last is not None and num_left is not None:
            vision = replace(vision, shift=last.shift + self._moved_by(last, num_left, media))
        if vision.offset + vision.shift + len(token_ids) + num_output > self._max_positions or num_left is None:
            vision, last = replace(vision, shift=0), None
        self._last = vision
        return PlacedPrompt(token_ids, vision, self._session, None if last is None else _taken(last, vision, is_anchor))

    def _steady(self, media: Media) -> Media:
        """The media with a whole number of positions from one grid to the next, so that a grid never moves."""
        rate = self._settings.positions_per_second
        if rate is None or media.seconds_per_grid is None:
            return media
        return replace(media, seconds_per_grid=max(1, round(media.seconds_per_grid * rate)) / rate)

    def _num_left(self, grids: Sequence[Grid]) -> int | None:
        """Grids of the window before that have left; None: none has stayed."""
        before = self._last.grids if self._last is not None else ()
        return next((i for i, grid in enumerate(before) if grid is grids[0]), None)

    def _moved_by(self, last: Vision, num_left: int, media: Media) -> int:
        """Positions in time by which the window begins later than the one before."""
        if not self._settings.has_spatial_positions:
            return sum(grid.num_tokens for grid in last.grids[:num_left])
        rate = self._settings.positions_per_second
        per_grid = 1 if rate is None or media.seconds_per_grid is None else round(media.seconds_per_grid * rate)
        return num_left * per_grid


def _taken(last: Vision, vision: Vision, is_anchor: BoolArray) -> Reuse | None:
    """What the window takes over; None: nothing."""
    before = {id(grid): int(start) for grid, start in zip(last.grids, last.starts, strict=True)}
    ranges: list[list[int]] = []  # start, end, source
    for i, grid in enumerate(vision.grids):
        source, start, end = before.get(id(grid)), int(vision.starts[i]), int(vision.ends[i])
        if source is None or is_anchor[i]:
            continue
        if ranges and ranges[-1][1] == start and ranges[-1][2] + start - ranges[-1][0] == source:
            ranges[-1][1] = end
        else:
            ranges.append([start, end, source])
    return Reuse(*np.array(ranges).T) if ranges else None
