"""What a request may ask of its media: sizes of pictures, and which frames of a video (`mm_processor_kwargs`).

Knows names and ranges. Knows nothing of decoding. Unknown names are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from faser.errors import InvalidRequest

DEFAULT_FPS = 2.0  # what the models' own tools take
FPS_RANGE = (1e-3, 1e3)  # frames a second that may be asked for
SIZE_NAMES = {"shortest_edge": "min_pixels", "longest_edge": "max_pixels"}  # both count pixels, despite their names


EXPECTED_FPS = "0.001 to 1000 frames a second"


def is_frame_rate(value: object) -> bool:
    """Whether frames can be taken at this rate: far beyond it, times and positions are no longer numbers."""
    low, high = FPS_RANGE
    return isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= high


@dataclass(frozen=True, kw_only=True)
class PictureOptions:
    """Sizes, within those of the model. None: the model's own."""

    min_pixels: int | None = None  # of a picture or a frame, after resizing
    max_pixels: int | None = None

    def __post_init__(self) -> None:
        for name in ("min_pixels", "max_pixels"):
            _require_count(name, getattr(self, name))
        if self.min_pixels is not None and self.max_pixels is not None and self.min_pixels > self.max_pixels:
            raise InvalidRequest(f"min_pixels={self.min_pixels}: expected at most max_pixels={self.max_pixels}")


@dataclass(frozen=True, kw_only=True)
class VideoOptions(PictureOptions):
    """Which frames: a number a second, or a number in all. Neither: DEFAULT_FPS."""

    fps: float | None = None
    num_frames: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_count("num_frames", self.num_frames)
        if self.fps is not None and not is_frame_rate(self.fps):
            raise InvalidRequest(f"fps={self.fps!r}: expected {EXPECTED_FPS}")
        if self.fps is not None and self.num_frames is not None:
            raise InvalidRequest("fps and num_frames: expected one of them, they exclude each other")


def parse_options(given: Mapping[str, object]) -> VideoOptions:
    """From the JSON of a request. `size` may hold the two sizes under the names of the models' own processors."""
    flat = {name: value for name, value in given.items() if name != "size"}
    size = given.get("size") or {}
    if not isinstance(size, Mapping):
        raise InvalidRequest(f"size={size!r}: expected an object with {' and '.join(SIZE_NAMES)}")
    for name, value in size.items():
        _require_known(f"size.{name}", name, SIZE_NAMES)
        if flat.setdefault(SIZE_NAMES[name], value) != value:
            raise InvalidRequest(f"size.{name} and {SIZE_NAMES[name]} differ: give one of them")
    names = {field.name: None for field in fields(VideoOptions)}
    for name in flat:
        _require_known(name, name, {**names, "size": None})
    return VideoOptions(**flat)  # type: ignore[arg-type]  # checked when it is made


def _require_known(shown: str, name: str, known: Mapping[str, object]) -> None:
    if name not in known:
        raise InvalidRequest(f"unknown media option {shown!r}: expected one of {', '.join(sorted(known))}")


def _require_count(name: str, value: object) -> None:
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise InvalidRequest(f"{name}={value!r}: expected a positive integer")
