"""From the bytes of a picture or a video to what a prompt holds of it: decode, resize, cut."""

from __future__ import annotations

from faser.errors import InvalidRequest
from faser.media.grids import cut_video, picture_grid, resized, video_bounds
from faser.media.limits import MediaLimits
from faser.media.media import Media
from faser.media.options import PictureOptions, VideoOptions
from faser.media.pictures import decode_picture
from faser.media.reader import Pixels
from faser.media.video import decode_video
from faser.vision import VisionSettings


def check_num_media(num_media: int, limits: MediaLimits) -> None:
    """Before the first of them is fetched."""
    if num_media > limits.max_media:
        raise InvalidRequest(f"{num_media} pictures and videos in one request: expected at most {limits.max_media}")


def picture_media(
    data: bytes, settings: VisionSettings, limits: MediaLimits, options: PictureOptions | None = None
) -> Media:
    """From the bytes of a picture."""
    return Media("image", (picture_grid(decode_picture(data, limits), settings, options),), None, 1)


def video_media(
    data: bytes, settings: VisionSettings, limits: MediaLimits, options: VideoOptions | None = None
) -> Media:
    """From the bytes of a video. Frames are resized as they are decoded; together they stay in max_video_pixels."""
    options = options or VideoOptions()

    def resize(frame: Pixels, num_frames: int) -> Pixels:
        return resized(frame, settings, video_bounds(settings, options, limits.max_video_pixels / num_frames))

    frames = decode_video(data, options, limits, frames_per_grid=settings.frames_per_grid, resize=resize)
    grids = tuple(cut_video(frames.frames, settings))
    return Media("video", grids, settings.frames_per_grid / frames.fps, len(frames.frames))
