"""What a codec does to frames: x264 itself where PyAV is installed, and a cheap likeness for training on a GPU.

Knows pixels. Knows nothing of scenes or models. The likeness is a codec without motion search: each frame is predicted
by the decoded frame before it, the residual goes through an 8 × 8 cosine transform, and its coefficients are rounded
to multiples of a step. So blocks without change are copied, and coarse steps give the blocks, the lost texture and the
trails of low quality.
"""

from __future__ import annotations

import io
import math
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from faser.errors import MissingPackage

BLOCK = 8
# BT.601: rows are Y, Cb, Cr.
_TO_YCC = ((0.299, 0.587, 0.114), (-0.168736, -0.331264, 0.5), (0.5, -0.418688, -0.081312))


@lru_cache(maxsize=4)
def _cosines(device: str) -> Tensor:
    """[8, 8] the orthonormal cosine transform."""
    k, n = torch.arange(BLOCK)[:, None], torch.arange(BLOCK)[None]
    table = torch.cos(math.pi * (n + 0.5) * k / BLOCK) * math.sqrt(2 / BLOCK)
    table[0] /= math.sqrt(2)
    return table.to(device)


def round_blocks(planes: Tensor, step: Tensor) -> Tensor:
    """Round the cosine coefficients of planes [windows, planes, height, width] to multiples of step [windows].

    Coefficients below half a step vanish, and those of high frequency get up to twice the step.
    """
    windows, channels, height, width = planes.shape
    table = _cosines(str(planes.device))
    blocks = planes.view(windows, channels, height // BLOCK, BLOCK, width // BLOCK, BLOCK).transpose(3, 4)
    frequency = torch.arange(BLOCK, device=planes.device)
    steps = step.view(-1, 1, 1, 1, 1, 1) * (1 + (frequency[:, None] + frequency) / (2 * BLOCK - 2))
    rounded = torch.round(table @ blocks @ table.T / steps) * steps
    return (table.T @ rounded @ table).transpose(3, 4).reshape(planes.shape)


def degrade(frames: Tensor, step: Tensor) -> Tensor:
    """Frames [windows, frames, height, width, 3] as a codec leaves them. step [windows]: 0 leaves a window as it is."""
    assert frames.shape[2] % BLOCK == 0 == frames.shape[3] % BLOCK, "sides are multiples of 8"
    to_ycc = torch.tensor(_TO_YCC, device=frames.device)
    source = (frames.float() @ to_ycc.T).permute(0, 1, 4, 2, 3)  # [windows, frames, planes, height, width]
    safe = step.clamp(min=1e-3)
    decoded = torch.zeros_like(source[:, 0])
    decoded[:, 0] = 128
    out = []
    for frame in range(frames.shape[1]):
        decoded = decoded + round_blocks(source[:, frame] - decoded, safe)
        out.append(decoded)
    rgb = torch.stack(out, 1).permute(0, 1, 3, 4, 2) @ torch.linalg.inv(to_ycc).T
    coded = rgb.round().clamp(0, 255).to(torch.uint8)
    return torch.where((step > 0).view(-1, 1, 1, 1, 1), coded, frames)


def random_steps(windows: int, generator: torch.Generator) -> Tensor:
    """[windows] steps for training: a fifth is not coded; the others span what crf 18 to 35 leaves."""
    shares = torch.rand(2, windows, generator=generator, device=generator.device)
    return torch.where(shares[0] < 0.2, 0.0, 4 * 12 ** shares[1])


# ── the real one ─────────────────────────────────────────────────────────────────────────────────────────────────────


def _av() -> Any:
    try:
        import av
    except ImportError as error:
        raise MissingPackage("x264 needs PyAV: pip install 'faser[vision]'") from error
    return av


def x264(frames: NDArray[np.uint8], crf: int, fps: int = 4, preset: str = "medium") -> NDArray[np.uint8]:
    """The frames [frames, height, width, 3] after x264 at this quality: 18 is nearly lossless, 35 is coarse."""
    file = io.BytesIO(encode_x264(frames, crf, fps, preset))
    with _av().open(file) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])


def encode_x264(frames: NDArray[np.uint8], crf: int, fps: int = 4, preset: str = "medium", gop: int = 16) -> bytes:
    """An MP4 file of the frames, with an I-frame at every `gop`-th at least."""
    av, file = _av(), io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=fps, options={"crf": str(crf), "preset": preset, "g": str(gop)})
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt, stream.thread_count = "yuv420p", 1
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())
    return file.getvalue()
