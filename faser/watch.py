"""Answers about a video, window by window.

Knows frames, windows, and how the time of an answer divides into stages. Knows nothing of codecs or tensors. Windows
overlap: a grid is cut once, and the engine keeps it encoded while later windows may need it. Which of its groups a grid
keeps is decided in faser/media/pruning.py; what a window takes over from the one before, in faser/media/sliding.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np

from faser.arrays import BoolArray, FloatArray
from faser.errors import ConfigError, InvalidRequest
from faser.media.grids import make_grid, resized, video_bounds
from faser.media.media import Media, MediaPrompt
from faser.media.options import DEFAULT_FPS, EXPECTED_FPS, PictureOptions, is_frame_rate
from faser.media.pruning import Pruner, PruningOptions, make_pruner, rule_for
from faser.media.reader import FrameReader, Pixels
from faser.media.sliding import PlacedPrompt, SlidingPrompts
from faser.request import FinishReason, SamplingParams, Stats, draw_seed
from faser.vision import Grid, VisionSettings

if TYPE_CHECKING:
    from faser.llm import LLM  # imports torch, which windows do not need

MAX_FRAME_PIXELS = 768 * 28 * 28  # where the request says nothing; folders may allow twenty times as many
ANCHOR_GRIDS = 8  # without pruning one grid in eight is an anchor, as in streams with an I-frame every 16 frames
CHECKED_WINDOWS = 8  # with KV reuse: one window of this many is also answered exactly
LEAST_CHECKS = 4  # before reuse may stop
MAX_DIFFERING = 0.25  # share of checked answers that differ, above which reuse stops
_sessions = count()


@dataclass(frozen=True)
class WatchOptions:
    """Which frames each answer is about. All counts are of sampled frames."""

    window: int = 16  # frames that one answer is about
    stride: int = 4  # frames from one answer to the next
    fps: float = DEFAULT_FPS  # frames a second; a video with fewer gives all it has
    pictures: PictureOptions | None = None  # sizes of frames
    pruning: PruningOptions = field(default_factory=PruningOptions)  # which of their groups the model sees
    kv_reuse: bool = False  # approximate: grids that stay in the window are not computed again

    def check(self, frames_per_grid: int) -> None:
        """Raise ConfigError unless windows are made of whole grids."""
        for name in ("window", "stride"):
            value = getattr(self, name)
            if value < 1 or value % frames_per_grid:
                raise ConfigError(f"{name}={value}: expected a multiple of {frames_per_grid}, the frames of a grid")
        if self.stride > self.window:
            raise ConfigError(f"stride={self.stride}: expected at most the window ({self.window}), or frames are lost")
        if not is_frame_rate(self.fps):
            raise ConfigError(f"fps={self.fps!r}: expected {EXPECTED_FPS}")


@dataclass(frozen=True, eq=False)
class VideoWindow:
    """Consecutive frames of a video."""

    start: float  # seconds of the first frame
    end: float  # seconds of the last one
    media: Media
    is_anchor: BoolArray  # [grids] those that KV reuse computes again in every window
    times: FloatArray  # [grids, 2] seconds of the first and the last frame
    decode_seconds: float  # since the window before: reading, decoding, resizing and cutting its new frames


@dataclass(frozen=True)
class ReuseState:
    """What KV reuse did so far. A check answers a window exactly too, and compares."""

    is_on: bool = False
    num_tokens: int = 0  # of this window, whose KV was taken over
    num_checks: int = 0  # since the video began
    num_differing: int = 0  # of these, answers that were not those of the exact twin

    def checked(self, differs: bool) -> ReuseState:
        """After another check. Where answers differ too often, reuse stops."""
        num_checks, num_differing = self.num_checks + 1, self.num_differing + differs
        is_on = num_checks < LEAST_CHECKS or num_differing <= MAX_DIFFERING * num_checks
        return replace(self, is_on=is_on, num_checks=num_checks, num_differing=num_differing)


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
    reuse: ReuseState
    seconds: StageSeconds


@dataclass(frozen=True, eq=False)
class _TimedGrid:
    grid: Grid
    start: float
    end: float
    num_frames: int
    is_anchor: bool


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
    is_anchor = np.array([each.is_anchor for each in grids])
    times = np.array([(each.start, each.end) for each in grids])
    return VideoWindow(grids[0].start, grids[-1].end, media, is_anchor, times, decode_seconds)


def _grids(reader: FrameReader, settings: VisionSettings, options: WatchOptions) -> Iterator[_TimedGrid]:
    """Grids as they become complete; the last frame of a video fills its last grid."""
    pruner = make_pruner(reader, options.pruning, settings, frame_bounds(settings, options))
    frames: list[tuple[float, Pixels]] = []
    number = count()
    for seconds, pixels in _resized_frames(reader, settings, options, pruner):
        frames.append((seconds, pixels))
        if len(frames) == settings.frames_per_grid:
            yield _timed(frames, settings, pruner, next(number))
            frames = []
    if frames:
        yield _timed(frames, settings, pruner, next(number))


def frame_bounds(settings: VisionSettings, options: WatchOptions) -> tuple[int, int]:
    """Fewest and most pixels of a frame: as asked, else no more than the models' own tools take of a video."""
    low, high = video_bounds(settings, options.pictures)
    is_asked = options.pictures is not None and options.pictures.max_pixels is not None
    return low, high if is_asked else max(low, min(high, MAX_FRAME_PIXELS))


def _resized_frames(
    reader: FrameReader, settings: VisionSettings, options: WatchOptions, pruner: Pruner | None
) -> Iterator[tuple[float, Pixels]]:
    """Sampled frames of one size. The pruner follows."""
    bounds = frame_bounds(settings, options)
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


def _timed(
    frames: Sequence[tuple[float, Pixels]], settings: VisionSettings, pruner: Pruner | None, number: int
) -> _TimedGrid:
    """A grid. One that pruning keeps whole is an anchor: it has an I-frame, or refreshes what stands still."""
    start, end = frames[0][0], frames[-1][0]
    pixels = [pixels for _, pixels in frames]
    pixels += pixels[-1:] * (settings.frames_per_grid - len(pixels))
    kept = None if pruner is None else pruner.kept(start)
    is_anchor = pruner.is_whole if pruner is not None else number % ANCHOR_GRIDS == 0
    return _TimedGrid(make_grid(np.stack(pixels), settings, kept), start, end, len(frames), is_anchor)


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
        params = params or SamplingParams(max_tokens=32)
        self._params = replace(params, seed=draw_seed(params.seed))  # the same for all windows and their exact twins
        content = [{"type": "video"}, {"type": "text", "text": question}]
        self._prompt = llm.chat_prompt([{"role": "user", "content": content}])
        self._rule = "none"
        self._reuse = ReuseState()

    def watch(self, reader: FrameReader) -> Iterator[WindowAnswer]:
        """An answer for each window, as soon as its frames are there."""
        self._rule = rule_for(reader, self._options.pruning)
        self._reuse = ReuseState(is_on=self._options.kv_reuse)
        session, scheduler = f"watch {next(_sessions)}", self._llm.engine.scheduler
        assert scheduler.limits.vision is not None
        prompts = SlidingPrompts(self._prompt, self._settings, session, scheduler.limits.vision.max_positions)
        try:
            for number, window in enumerate(windows(reader, self._settings, self._options)):
                yield self._answer(number, window, prompts)
        finally:
            scheduler.retained.drop(session)

    def _answer(self, number: int, window: VideoWindow, prompts: SlidingPrompts) -> WindowAnswer:
        if not self._reuse.is_on:
            return self._ask(number, window, MediaPrompt(self._prompt, (window.media,)))
        prompt = prompts.next(window.media, window.is_anchor, self._params.max_tokens)
        answer = self._ask(number, window, prompt)
        if prompt.reuse is None or number % CHECKED_WINDOWS:
            return answer
        return replace(answer, reuse=self._check(answer, self._ask(number, window, prompt.exact)))

    def _check(self, answer: WindowAnswer, exact: WindowAnswer) -> ReuseState:
        """Compare an answer with that of its exact twin."""
        self._reuse = self._reuse.checked(answer.text != exact.text)
        return replace(self._reuse, num_tokens=answer.reuse.num_tokens)

    def _ask(self, number: int, window: VideoWindow, prompt: MediaPrompt | PlacedPrompt) -> WindowAnswer:
        stats, vision = self._llm.stats, self._llm.engine.scheduler.vision
        assert vision is not None
        encode, encoded, found = stats.encode_seconds, stats.grids_encoded, vision.num_found
        started, first, text, own = perf_counter(), None, "", Stats()
        for chunk in self._llm.stream(prompt, self._params):
            first = perf_counter() if first is None else first
            text += chunk.text
            own = chunk.stats or own
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
            pruning=self._rule,
            kept=window.media.kept_share,
            grids_encoded=stats.grids_encoded - encoded,
            grids_found=vision.num_found - found,
            reuse=replace(self._reuse, num_tokens=own.reused),
            seconds=StageSeconds(
                window.decode_seconds, encode_seconds, first - started - encode_seconds, ended - first
            ),
        )
