"""Rendered clips with known truth: textured sprites that move over a textured background."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import av
import numpy as np
from PIL import Image

from tests.media.clips import SETTINGS, noise

SIZE = 448
RATE = 10
VISION = replace(SETTINGS, video_max_pixels=SIZE * SIZE)

Draw = Callable[[int], np.ndarray]  # number of the frame → [SIZE, SIZE, 3]


def texture(height: int, width: int, seed: int) -> np.ndarray:
    """Soft random blobs: an encoder finds them again where they moved to."""
    small = Image.fromarray(noise(height // 8, width // 8, seed))
    return np.asarray(small.resize((width, height), Image.Resampling.BICUBIC))


@dataclass(frozen=True)
class Sprite:
    """A textured square that moves from frame `first` up to frame `last`, and then stands still."""

    x: int
    y: int
    dx: int
    dy: int
    seed: int
    side: int = 48
    first: int = 0
    last: int = 1000
    appears: int = 0

    def place(self, i: int) -> tuple[int, int]:
        moved = min(max(i - self.first, 0), self.last - self.first)
        return self.y + moved * self.dy, self.x + moved * self.dx

    def box(self, i: int) -> np.ndarray:
        """[SIZE, SIZE] where the sprite is in frame i."""
        (y, x), covered = self.place(i), np.zeros((SIZE, SIZE), dtype=bool)
        if i >= self.appears:
            covered[y : y + self.side, x : x + self.side] = True
        return covered


SPRITES = (Sprite(40, 60, 2, 1, 11), Sprite(300, 80, -2, 2, 12), Sprite(180, 330, 3, 0, 13))


def scene(sprites: Sequence[Sprite], background: int = 1) -> Draw:
    ground = texture(SIZE, SIZE, background)
    looks = [texture(sprite.side, sprite.side, sprite.seed) for sprite in sprites]

    def draw(i: int) -> np.ndarray:
        frame = ground.copy()
        for sprite, look in zip(sprites, looks, strict=True):
            if i >= sprite.appears:
                y, x = sprite.place(i)
                frame[y : y + sprite.side, x : x + sprite.side] = look
        return frame

    return draw


def encode(
    draw: Draw, num_frames: int = 32, *, preset: str = "medium", crf: int = 23, gop: int = 16,
    codec: str = "libx264", kind: str = "mp4", rate: int = RATE,
) -> bytes:  # fmt: skip
    """I-frames at multiples of `gop` alone: an encoder that sees a cut may not make one."""
    file = io.BytesIO()
    options = {
        "libx264": {"preset": preset, "crf": str(crf), "sc_threshold": "0"},
        "libx265": {"x265-params": "log-level=none"},
        "mpeg4": {"qmax": "2"},
    }
    with av.open(file, "w", format=kind) as container:
        stream = container.add_stream(codec, rate=rate, options=options[codec])
        stream.height, stream.width = draw(0).shape[:2]
        stream.pix_fmt, stream.gop_size = "yuv420p", gop
        for i in range(num_frames):
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(draw(i)), "rgb24")
            frame.pts = i
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return file.getvalue()
