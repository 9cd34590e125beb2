"""The tokens of media in the place of their placeholders, and the positions of all tokens of a prompt.

Knows ids, counts and positions. Knows nothing of pixels.

Text behind a medium begins at the greatest position so far + 1, be it in time, height or width: so the models were
trained, and so does vLLM. transformers 5.23 adds only the greater of height and width; the two differ where a video has
more positions in time than in height and width.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from faser.arrays import IntArray
from faser.errors import InvalidRequest
from faser.media.media import KINDS, Media
from faser.vision import Vision, VisionSettings


def place_media(token_ids: Sequence[int], media: Sequence[Media], settings: VisionSettings) -> tuple[list[int], Vision]:
    """Put the tokens of each medium in the place of its placeholder id. Gives the longer prompt and its Vision."""
    placeholders = (settings.image_token_id, settings.video_token_id)  # may be one id
    _check_placeholders(
        [token_id for token_id in token_ids if token_id in placeholders],
        [placeholders[KINDS.index(medium.kind)] for medium in media],
    )
    prompt: list[int] = []
    starts: list[int] = []
    positions = _Positions(settings)
    pending = iter(media)
    text = 0  # tokens of text since the last medium
    for token_id in token_ids:
        if token_id not in placeholders:
            prompt.append(token_id)
            text += 1
            continue
        medium = next(pending)
        positions.add_text(text)
        positions.add_media(medium)
        text = 0
        for grid in medium.grids:
            starts.append(len(prompt))
            prompt += [token_id] * grid.num_tokens
    positions.add_text(text)
    grids = tuple(grid for medium in media for grid in medium.grids)
    return prompt, Vision(grids, np.array(starts, dtype=np.int64), positions.finish())


def _check_placeholders(found: Sequence[int], given: Sequence[int]) -> None:
    """Ids of the placeholders in the prompt, and those of the media."""
    if len(found) != len(given):
        raise InvalidRequest(
            f"prompt with {len(found)} placeholders for {len(given)} pictures and videos: expected one for each,"
            " and none in plain text"
        )
    if list(found) != list(given):
        raise InvalidRequest("prompt with pictures and videos in another order than its placeholders: order them alike")


class _Positions:
    """Positions in time, height and width, medium by medium."""

    def __init__(self, settings: VisionSettings) -> None:
        self._settings = settings
        self._next = 0  # the greatest position so far + 1
        self._parts: list[IntArray] = []

    def add_text(self, num_tokens: int) -> None:
        self._parts.append(np.repeat(np.arange(self._next, self._next + num_tokens)[:, None], 3, axis=1))
        self._next += num_tokens

    def add_media(self, media: Media) -> None:
        """Positions come from whole grids: what stands behind does not depend on which groups are kept."""
        first = media.grids[0]
        rows, columns = first.height // first.merge_size, first.width // first.merge_size
        times = self._times(media)
        for grid, at in zip(media.grids, times, strict=True):
            groups = grid.groups
            part = np.stack([np.full(len(groups), at), groups // columns, groups % columns], axis=1)
            self._parts.append(self._next + part)
        self._next += max(int(times[-1]) + 1, rows, columns)

    def finish(self) -> IntArray | None:
        """[tokens, 3]; None: the model counts tokens alone."""
        if not self._settings.has_spatial_positions:
            return None
        return np.concatenate(self._parts)

    def _times(self, media: Media) -> IntArray:
        """[grids] positions in time, from 0."""
        indices = np.arange(len(media.grids))
        rate = self._settings.positions_per_second
        if rate is None or media.seconds_per_grid is None:
            return indices
        # In float32, as in the code that the models were trained with: near a whole number the last bit decides.
        times: IntArray = (indices.astype(np.float32) * np.float32(media.seconds_per_grid * rate)).astype(np.int64)
        return times
