"""From the bytes of a video to the frames that a model sees.

Knows which frames are sampled, and bounds the work and the memory. Knows nothing of patches.

A video is read twice: once without decoding, for the times of its frames, and once to decode. Frames that are not
sampled are neither converted to RGB nor kept.
"""

from __future__ import annotations

import io
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from faser.arrays import FloatArray, IntArray
from faser.errors import InvalidRequest
from faser.media.containers import check_whole
from faser.media.limits import MediaLimits
from faser.media.options import DEFAULT_FPS, VideoOptions
from faser.media.reader import Clock, FrameReader, Pixels

MIN_FRAMES = 4  # that are sampled by fps, if the video has them
MAX_MISSING = 1.0  # seconds at the end for which the last frame may stand in
ROUNDING = 1e-6  # seconds: what two ways to compute one time may differ by

Resize = Callable[[Pixels, int], Pixels]  # a frame, and how many of them there will be


@dataclass(frozen=True, eq=False)
class VideoFrames:
    """Sampled frames of one video."""

    frames: NDArray[np.uint8]  # [n, height, width, 3] RGB
    seconds: FloatArray  # [n] since the video's start
    fps: float  # sampled frames a second: n / the video's duration


def decode_video(
    data: bytes,
    options: VideoOptions,
    limits: MediaLimits,
    *,
    frames_per_grid: int = 2,
    resize: Resize | None = None,
    clock: Clock = time.monotonic,
) -> VideoFrames:
    """Frames at options.fps, or options.num_frames of them, or DEFAULT_FPS; whole grids, if the video is that long.

    `resize` makes a frame smaller as soon as it is decoded, so that full ones are never kept.
    """
    if len(data) > limits.max_bytes:
        raise InvalidRequest(f"video of {len(data)} bytes: expected at most {limits.max_bytes}; send a smaller one")
    check_whole(data)
    deadline = clock() + limits.max_decode_seconds
    with FrameReader(io.BytesIO(data), limits, deadline=deadline, clock=clock) as reader:
        times, are_timed = _frame_times(reader, limits)
    duration = _duration(times)
    indices = _sample(times, duration, options, limits, frames_per_grid)
    with FrameReader(io.BytesIO(data), limits, deadline=deadline, clock=clock) as reader:
        sampled = _sampled(reader, times[indices].tolist(), are_timed)
        frames, seconds = _collect(sampled, len(indices), resize, limits)
    return VideoFrames(frames, seconds, len(indices) / duration)


# ---- which frames ----


def _frame_times(reader: FrameReader, limits: MediaLimits) -> tuple[FloatArray, bool]:
    """[frames] seconds at which each is shown, ascending from 0; and whether they come from the file.

    Timestamps that are missing or repeated say nothing: the frames are then counted.
    """
    given = reader.packet_times()
    if not given:
        raise InvalidRequest("video without frames: expected at least one; it is damaged or was cut")
    known = [seconds for seconds in given if seconds is not None]
    are_timed = len(set(known)) == len(given)
    times = np.sort(np.array(known)) if are_timed else np.arange(len(given)) / reader.fps
    if times[-1] - times[0] > limits.max_video_seconds:
        raise InvalidRequest(
            f"video of {times[-1] - times[0]:.0f} s: expected at most {limits.max_video_seconds:g} s; send a part of it"
        )
    return np.maximum(times, 0.0), are_timed


def _duration(times: FloatArray) -> float:
    """Seconds that all frames are shown; the last as long as the others on average."""
    span = float(times[-1] - times[0])
    return span * len(times) / (len(times) - 1) if span > 0 else len(times) / DEFAULT_FPS


def num_sampled(total: int, duration: float, options: VideoOptions, max_frames: int, frames_per_grid: int) -> int:
    """How many of `total` frames are sampled: whole grids, or all frames of a video that is shorter than a grid."""
    most = min(max_frames, total) // frames_per_grid * frames_per_grid
    if options.num_frames is not None:
        wanted = round(options.num_frames / frames_per_grid) * frames_per_grid
    else:
        wanted = math.floor(max(duration * (options.fps or DEFAULT_FPS), MIN_FRAMES) / frames_per_grid + ROUNDING)
        wanted *= frames_per_grid
    return min(max(wanted, frames_per_grid), most) or min(total, max_frames)


def _sample(
    times: FloatArray, duration: float, options: VideoOptions, limits: MediaLimits, frames_per_grid: int
) -> IntArray:
    """Indices of frames, evenly spaced in time."""
    if options.num_frames is not None and options.num_frames > limits.max_frames:
        raise InvalidRequest(f"num_frames={options.num_frames}: expected at most {limits.max_frames}")
    total = len(times)
    num_frames = num_sampled(total, duration, options, limits.max_frames, frames_per_grid)
    even = np.arange(total) * duration / total
    if np.abs(times - times[0] - even).max() * total <= duration / 2:  # no frame is half a frame early or late
        return np.arange(num_frames) * total // num_frames
    wanted = times[0] + np.arange(num_frames) * duration / num_frames
    indices: IntArray = np.searchsorted(times, wanted + ROUNDING, side="right") - 1
    return indices


# ---- decoding ----


def _collect(
    sampled: Iterator[tuple[float, Pixels]], num_frames: int, resize: Resize | None, limits: MediaLimits
) -> tuple[NDArray[np.uint8], FloatArray]:
    frames: NDArray[np.uint8] | None = None
    seconds = np.zeros(num_frames)
    for i, (shown, frame) in enumerate(sampled):
        if resize is not None:
            frame = resize(frame, num_frames)
        if frames is None:
            if frame[..., 0].size * num_frames > limits.max_video_pixels:
                raise _too_many_pixels(frame, num_frames, limits)
            frames = np.empty((num_frames, *frame.shape), dtype=np.uint8)
        if frame.shape != frames.shape[1:]:
            raise InvalidRequest("video whose frames change their size: expected one size; encode it again")
        frames[i], seconds[i] = frame, shown
    assert frames is not None, "at least one frame is wanted, and each gets one"
    return frames, seconds


def _sampled(reader: FrameReader, wanted: Sequence[float], are_timed: bool) -> Iterator[tuple[float, Pixels]]:
    """For each wanted time, the first frame at or behind it. At the end the last frame stands in for missing ones.

    Files may count frames that are never shown. More than MAX_MISSING seconds of them are damage.
    """
    pending = iter(wanted)
    next_time = next(pending)
    seconds, frame = 0.0, None
    for i, (shown, frame) in enumerate(reader.decoded()):
        seconds = shown if are_timed else i / reader.fps
        if next_time > seconds + ROUNDING:
            continue
        pixels = reader.to_rgb(frame)
        while next_time <= seconds + ROUNDING:
            yield seconds, pixels
            next_time = next(pending, math.inf)
        if next_time == math.inf:
            return
    missing = [next_time, *pending]
    if frame is None or missing[-1] - seconds > MAX_MISSING:
        raise InvalidRequest("video whose frames cannot all be decoded: it is damaged; encode it again")
    for _ in missing:
        yield seconds, reader.to_rgb(frame)


def _too_many_pixels(frame: Pixels, num_frames: int, limits: MediaLimits) -> InvalidRequest:
    height, width, _ = frame.shape
    return InvalidRequest(
        f"{num_frames} frames of {width} × {height} pixels: expected at most {limits.max_video_pixels} pixels together;"
        " ask for fewer frames (fps, num_frames) or smaller ones (max_pixels)"
    )
