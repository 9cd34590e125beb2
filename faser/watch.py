"""Answers about a video, window by window.

Knows frames, windows, and how the time of an answer divides into stages. Knows nothing of codecs or tensors. Windows
overlap: a grid is cut once, and the engine keeps it encoded while later windows may need it. Which of its groups a grid
keeps is decided in faser/media/pruning.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np

from faser.errors import ConfigError, InvalidRequest
from faser.media.grids import make_grid, resized, video_bounds
from faser.media.media import Media, MediaPrompt
from faser.media.options import DEFAULT_FPS, PictureOptions
from faser.media.pruning import Pruner, PruningOptions, make_pruner, rule_for
from faser.media.reader import FrameReader, Pixels
from faser.request import FinishReason, SamplingParams
from faser.vision import Grid, VisionSettings

if TYPE_CHECKING:
    from faser.llm import LLM  # imports torch, which windows do not need


@dataclass(frozen=True)
class WatchOptions:
    """Which frames each answer is about. All counts are of sampled frames."""

    window: int = 16  # frames that one answer is about
    stride: int = 4  # frames from one answer to the next
    fps: float = DEFAULT_FPS  # frames a second; a video with fewer gives all it has
    pictures: PictureOptions | None = None  # sizes of frames
    pruning: PruningOptions = field(default_factory=PruningOptions)  # which of their groups the model sees

    def check(self, frames_per_grid: int) -> None:
        """Raise ConfigError unless windows are made of whole grids."""
        for name in ("window", "stride"):
            value = getattr(self, name)
            if value < 1 or value % frames_per_grid:
                raise ConfigError(f"{name}={value}: expected a multiple of {frames_per_grid}, the frames of a grid")
        if self.stride > self.window:
            raise ConfigError(f"stride={self.stride}: expected at most the window ({self.window}), or frames are lost")
        if not 0 < self.fps < np.inf:
            raise ConfigError(f"fps={self.fps!r}: expected a positive number of frames a second")


@dataclass(frozen=True, eq=False)
class VideoWindow:
    """Consecutive frames of a video."""

    start: float  # seconds of the first frame
    end: float  # seconds of the last one
    media: Media
    decode_seconds: float  # since the window before: reading, decoding, resizing and cutting its new frames


@dataclass(frozen=True)
class StageSeconds:
    """Where the time of one window went."""

    decode: float
    encode: float  # the vision encoder, over the grids that were not encoded before
    prefill: float  # until the first token, without the encoder
    answer: float  # the other tokens


@dataclass(frozen=True)
class WindowAnswer:
    """What the model said of one window."""

    number: int  # of the window, from 0
    start: float  # seconds
    end: float
    text: str
    num_frames: int
    num_tokens: int  # that stand for the frames
    pruning: str  # the rule that was used: "none", "codec" or "difference"
    kept: float  # share of the frames' patches that the model saw
    grids_encoded: int
    grids_found: int  # encoded for an earlier window
    seconds: StageSeconds


@dataclass(frozen=True, eq=False)
class _TimedGrid:
    grid: Grid
    start: float
    end: float
    num_frames: int


def windows(reader: FrameReader, settings: VisionSettings, options: WatchOptions) -> Iterator[VideoWindow]:
    """Windows of a video as it is decoded. Frames behind the last whole stride make one more window."""
    options.check(settings.frames_per_grid)
    size, stride = options.window // settings.frames_per_grid, options.stride // settings.frames_per_grid
    seconds_per_grid = settings.frames_per_grid / min(options.fps, reader.fps)
    recent: deque[_TimedGrid] = deque(maxlen=size)
    num_new, started = 0, perf_counter()
    for grid in _grids(reader, settings, options):
        recent.append(grid)
        num_new += 1
        if len(recent) == size and num_new >= stride:
            yield _window(recent, seconds_per_grid, perf_counter() - started)
            num_new, started = 0, perf_counter()
    if num_new:
        yield _window(recent, seconds_per_grid, perf_counter() - started)


def _window(grids: Sequence[_TimedGrid], seconds_per_grid: float, decode_seconds: float) -> VideoWindow:
    num_frames = sum(each.num_frames for each in grids)
    media = Media("video", tuple(each.grid for each in grids), seconds_per_grid, num_frames)
    return VideoWindow(grids[0].start, grids[-1].end, media, decode_seconds)


def _grids(reader: FrameReader, settings: VisionSettings, options: WatchOptions) -> Iterator[_TimedGrid]:
    """Grids as they become complete; the last frame of a video fills its last grid."""
    pruner = make_pruner(reader, options.pruning, settings, video_bounds(settings, options.pictures))
    frames: list[tuple[float, Pixels]] = []
    for seconds, pixels in _resized_frames(reader, settings, options, pruner):
        frames.append((seconds, pixels))
        if len(frames) == settings.frames_per_grid:
            yield _timed(frames, settings, pruner)
            frames = []
    if frames:
        yield _timed(frames, settings, pruner)


def _resized_frames(
    reader: FrameReader, settings: VisionSettings, options: WatchOptions, pruner: Pruner | None
) -> Iterator[tuple[float, Pixels]]:
    """Sampled frames of one size. The pruner follows."""
    bounds = video_bounds(settings, options.pictures)
    observe = pruner.observe if pruner is not None and pruner.needs_motion else None
    shape: tuple[int, ...] | None = None
    for seconds, frame in reader.frames_at(options.fps, observe):
        pixels = resized(frame, settings, bounds)
        if shape is not None and pixels.shape != shape:
            raise InvalidRequest("video whose frames change their size: expected one size; encode it again")
        shape = pixels.shape
        if pruner is not None:
            pruner.see(pixels)
        yield seconds, pixels


def _timed(frames: Sequence[tuple[float, Pixels]], settings: VisionSettings, pruner: Pruner | None) -> _TimedGrid:
    start, end = frames[0][0], frames[-1][0]
    pixels = [pixels for _, pixels in frames]
    pixels += pixels[-1:] * (settings.frames_per_grid - len(pixels))
    kept = None if pruner is None else pruner.kept(start)
    return _TimedGrid(make_grid(np.stack(pixels), settings, kept), start, end, len(frames))


class VideoWatcher:
    """Asks a model one question about every window of a video."""

    def __init__(
        self, llm: LLM, question: str, options: WatchOptions | None = None, params: SamplingParams | None = None
    ) -> None:
        settings = llm.vision_settings
        if settings is None:
            raise ConfigError("the model cannot see; give one that can, such as Qwen/Qwen2.5-VL-3B-Instruct")
        self._llm = llm
        self._settings = settings
        self._options = options or WatchOptions()
        self._options.check(settings.frames_per_grid)
        self._params = params or SamplingParams(max_tokens=32)
        content = [{"type": "video"}, {"type": "text", "text": question}]
        self._prompt = llm.chat_prompt([{"role": "user", "content": content}])

    def watch(self, reader: FrameReader) -> Iterator[WindowAnswer]:
        """An answer for each window, as soon as its frames are there."""
        rule = rule_for(reader, self._options.pruning)
        for number, window in enumerate(windows(reader, self._settings, self._options)):
            yield self._answer(number, window, rule)

    def _answer(self, number: int, window: VideoWindow, rule: str) -> WindowAnswer:
        stats, vision = self._llm.stats, self._llm.engine.scheduler.vision
        assert vision is not None
        encode, encoded, found = stats.encode_seconds, stats.grids_encoded, vision.num_found
        started, first, text = perf_counter(), None, ""
        for chunk in self._llm.stream(MediaPrompt(self._prompt, (window.media,)), self._params):
            first = perf_counter() if first is None else first
            text += chunk.text
            if chunk.finish_reason is FinishReason.FAILED:
                raise InvalidRequest(f"window {number} failed: {chunk.error}")
        ended = perf_counter()
        assert first is not None
        encode_seconds = stats.encode_seconds - encode
        return WindowAnswer(
            number=number,
            start=window.start,
            end=window.end,
            text=text,
            num_frames=window.media.num_frames,
            num_tokens=window.media.num_tokens,
            pruning=rule,
            kept=window.media.kept_share,
            grids_encoded=stats.grids_encoded - encoded,
            grids_found=vision.num_found - found,
            seconds=StageSeconds(
                window.decode_seconds, encode_seconds, first - started - encode_seconds, ended - first
            ),
        )
