"""What a request may cost before a model sees it: bytes, pixels, frames, seconds; and from where media may be read.

Plain numbers. Knows nothing of formats.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

from faser.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class MediaLimits:
    """Bounds on one request's media. Whatever exceeds one is refused before it costs memory or time."""

    max_media: int = 32  # pictures and videos of one request
    max_bytes: int = 64 << 20  # of one picture or video, as it was sent
    max_pixels: int = 1 << 25  # of one picture or frame, as it was sent: 8192 × 4096
    max_frames: int = 512  # that a model sees of one video
    max_video_pixels: int = 1 << 26  # of all these frames together: 200 MB of RGB
    max_video_seconds: float = 3600.0  # from the first frame to the last
    max_decode_seconds: float = 60.0  # of work on one video
    max_streams: int = 16  # in one video file: video, sound, subtitles
    max_fetch_seconds: float = 20.0  # to fetch one URL

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not value > 0:
                raise ConfigError(f"{field.name}={value!r}: expected a positive number")


@dataclass(frozen=True, kw_only=True)
class MediaAccess:
    """From where media may be read, besides data URLs. By default from nowhere."""

    allowed_folders: tuple[Path, ...] = ()
    allow_network: bool = False
