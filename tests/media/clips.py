"""Small videos and pictures, made by the tests themselves."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable

import av
import numpy as np
from PIL import Image

from faser.vision import VisionSettings

SETTINGS = VisionSettings(
    patch_size=14,
    merge_size=2,
    frames_per_grid=2,
    min_pixels=56 * 56,
    max_pixels=28 * 28 * 64,
    video_min_pixels=56 * 56,
    video_max_pixels=28 * 28 * 32,
    image_token_id=1001,
    video_token_id=1002,
    has_spatial_positions=True,
)


def noise(height: int, width: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def picture(kind: str = "PNG", width: int = 40, height: int = 30) -> bytes:
    return save(Image.fromarray(noise(height, width)), kind)


def save(image: Image.Image, kind: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def grey(i: int, height: int = 48, width: int = 64) -> np.ndarray:
    """A frame whose brightness tells its number, below 40."""
    return np.full((height, width, 3), 40 + 5 * (i % 40), dtype=np.uint8)


def number(frame: np.ndarray) -> int:
    return round((float(frame.mean()) - 40) / 5)


def moving(i: int, height: int, width: int) -> np.ndarray:
    """A square that moves over a still background."""
    frame = noise(height, width)
    frame[8:36, 2 * i : 2 * i + 28] = noise(28, 28, 1)
    return frame


def clip(
    num_frames: int = 30,
    *,
    kind: str = "mp4",
    codec: str = "libx264",
    rate: int = 10,
    times: Iterable[int] | None = None,  # of the frames, in 1 / rate seconds
    size: tuple[int, int] = (48, 64),  # height, width
    gop: int = 8,
    draw: Callable[..., np.ndarray] = grey,  # number, height, width → frame
    options: dict[str, str] | None = None,  # of the container
) -> bytes:
    file = io.BytesIO()
    with av.open(file, "w", format=kind, options=options or {}) as container:
        stream = container.add_stream(codec, rate=rate)
        stream.height, stream.width = size
        stream.pix_fmt = "yuv420p"
        stream.gop_size = gop
        if codec == "mpeg4":
            stream.codec_context.qmax = 2  # its default would blur the numbers
        for i, time in enumerate(range(num_frames) if times is None else times):
            frame = av.VideoFrame.from_ndarray(draw(i, *size), "rgb24")
            frame.pts = time
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return file.getvalue()


def sound(with_video: bool = False) -> bytes:
    """Half a second of silence in an MP4."""
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        video = container.add_stream("libx264", rate=10, width=64, height=48, pix_fmt="yuv420p") if with_video else None
        stream = container.add_stream("aac", rate=16000, layout="mono")
        if video is not None:
            for i in range(5):
                container.mux(video.encode(av.VideoFrame.from_ndarray(grey(i), "rgb24")))
            container.mux(video.encode(None))
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 8000), np.float32), format="fltp", layout="mono")
        frame.sample_rate = 16000
        container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return file.getvalue()
