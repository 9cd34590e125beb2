"""From pixels to grids of patches, as the models' own processors cut them.

Knows sizes and layout. Knows nothing of files, codecs or normalisation: patches stay bytes, and the encoder normalises.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from faser.arrays import IntArray
from faser.errors import InvalidRequest
from faser.media.options import PictureOptions
from faser.media.video import VideoFrames
from faser.vision import Grid, VisionSettings

MAX_ASPECT = 200  # the longer side by the shorter one
MIN_SHARE = 1.05  # frames of a long video keep at least this much more than video_min_pixels


def smart_resize(height: int, width: int, factor: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
    """Height and width nearest to the given ones that are multiples of `factor` within the two bounds."""
    if max(height, width) > MAX_ASPECT * min(height, width):
        raise InvalidRequest(
            f"picture of {width} × {height} pixels: expected a longer side of at most {MAX_ASPECT} times the shorter"
        )
    rows, columns = round(height / factor), round(width / factor)
    if rows * columns * factor**2 > max_pixels:
        scale = math.sqrt(height * width / max_pixels)
        rows = max(1, math.floor(height / scale / factor))
        columns = max(1, math.floor(width / scale / factor))
    elif rows * columns * factor**2 < min_pixels:
        scale = math.sqrt(min_pixels / (height * width))
        rows, columns = math.ceil(height * scale / factor), math.ceil(width * scale / factor)
    return rows * factor, columns * factor


def picture_grid(
    picture: NDArray[np.uint8],
    settings: VisionSettings,
    options: PictureOptions | None = None,
    kept: IntArray | None = None,
) -> Grid:
    """`picture`: [height, width, 3]. `kept`: ascending indices of the groups that the grid keeps; None: all."""
    bounds = _bounds(settings.min_pixels, settings.max_pixels, options)
    return make_grid(resized(picture, settings, bounds)[None], settings, kept)


def video_grids(
    frames: VideoFrames,
    settings: VisionSettings,
    options: PictureOptions | None = None,
    kept: Sequence[IntArray | None] | None = None,
) -> list[Grid]:
    """One grid for each frames_per_grid frames; the last frame is repeated to fill the last grid."""
    bounds = video_bounds(settings, options)
    return cut_video(np.stack([resized(frame, settings, bounds) for frame in frames.frames]), settings, kept)


def cut_video(
    pixels: NDArray[np.uint8], settings: VisionSettings, kept: Sequence[IntArray | None] | None = None
) -> list[Grid]:
    """`pixels`: [frames, height, width, 3], resized."""
    size = settings.frames_per_grid
    pixels = np.concatenate([pixels, np.repeat(pixels[-1:], -len(pixels) % size, axis=0)])
    pairs = [pixels[i : i + size] for i in range(0, len(pixels), size)]
    return [make_grid(pair, settings, None if kept is None else kept[i]) for i, pair in enumerate(pairs)]


def make_grid(pixels: NDArray[np.uint8], settings: VisionSettings, kept: IntArray | None = None) -> Grid:
    """`pixels`: [frames, height, width, 3] of one grid, both sides multiples of settings.factor."""
    frames, height, width, channels = pixels.shape
    patch, merge = settings.patch_size, settings.merge_size
    rows, columns = height // settings.factor, width // settings.factor
    planes = np.ascontiguousarray(pixels.transpose(3, 0, 1, 2))  # whole rows of one channel: the copy below is faster
    cut = planes.reshape(channels, frames, rows, merge, patch, columns, merge, patch)
    # [rows, columns, merge, merge, channels, frames, patch, patch]
    groups = cut.transpose(2, 5, 3, 6, 0, 1, 4, 7).reshape(rows * columns, merge**2, channels, frames, patch, patch)
    chosen = groups if kept is None else groups[kept]
    patches = chosen.reshape(-1, channels, frames, patch, patch)
    return Grid(patches, height // patch, width // patch, merge, kept)


# ---- sizes ----


def video_bounds(
    settings: VisionSettings, options: PictureOptions | None, max_share: float = math.inf
) -> tuple[int, int]:
    """Fewest and most pixels of a frame. `max_share`: what each frame may have of a bound on all of them together."""
    low, high = _bounds(settings.video_min_pixels, settings.video_max_pixels, options)
    return low, int(min(high, max(max_share, low * MIN_SHARE)))


def _bounds(low: int, high: int, options: PictureOptions | None) -> tuple[int, int]:
    """The model's bounds, moved inwards or downwards by the request's."""
    if options is None:
        return low, high
    if options.max_pixels is not None and options.max_pixels > high:
        raise InvalidRequest(f"max_pixels={options.max_pixels}: expected at most {high}, the model's own bound")
    high = options.max_pixels or high
    if options.min_pixels is not None and options.min_pixels > high:
        raise InvalidRequest(f"min_pixels={options.min_pixels}: expected at most max_pixels={high}")
    return min(options.min_pixels or low, high), high


def resized(picture: NDArray[np.uint8], settings: VisionSettings, bounds: tuple[int, int]) -> NDArray[np.uint8]:
    """Bicubic, with Pillow: bit for bit what the processors in Python's libraries give."""
    min_pixels, max_pixels = bounds
    height, width = smart_resize(picture.shape[0], picture.shape[1], settings.factor, min_pixels, max_pixels)
    if picture.shape[:2] == (height, width):
        return picture
    image = Image.fromarray(picture).resize((width, height), Image.Resampling.BICUBIC)
    return np.asarray(image)
