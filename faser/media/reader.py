"""Frames of a video, one after the other, with their times: a file of any length in bounded memory.

Knows containers, codecs and timestamps, and what of them is allowed. Knows nothing of models, and not which frames a
request wants. FFmpeg is set up here alone.

FFmpeg can do more than decode: playlists and scripts make it open other files and addresses. So the container's format
is recognised by its first bytes (containers.py), FFmpeg is told which one to read, and it may open nothing besides.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, NoReturn, cast

import av
import numpy as np
from av.container import InputContainer
from av.stream import Disposition
from av.video.frame import PictureType, VideoFrame
from av.video.reformatter import VideoReformatter
from av.video.stream import VideoStream
from numpy.typing import NDArray

from faser.errors import InvalidRequest
from faser.media.containers import sniff
from faser.media.limits import MediaLimits
from faser.media.live import LiveFile
from faser.media.motion import FrameMotion

Pixels = NDArray[np.uint8]  # [height, width, 3]
Clock = Callable[[], float]

CODECS = (
    "h264", "hevc", "av1", "libdav1d", "vp8", "libvpx", "vp9", "libvpx-vp9",
    "mpeg4", "mpeg2video", "mpeg1video", "mjpeg", "gif",
)  # fmt: skip
ASSUMED_RATE = 25.0  # frames a second where a stream says nothing
MOTION_CODECS = ("h264",)  # whose vectors cover every block that is not coded anew; HEVC's are not exported
KINDS = {PictureType.I: "I", PictureType.P: "P", PictureType.B: "B"}
MAX_RATE = 1000.0  # a declared rate beyond it is taken for damage


class FrameReader:
    """Reads one video. Iterating gives (seconds, frame) for every frame, in the order in which they are shown.

        with FrameReader("clip.mp4") as reader:
            for seconds, frame in reader.frames_at(2.0):
                ...  # frame: uint8 RGB [height, width, 3], upright

    `source` is a path, a binary file that can seek, or a live stream (live.py). It is read once, from the start, as
    frames are asked for; nothing of it is kept but what the codec needs. `seconds` count from the stream's start and
    always increase, whatever the file's timestamps say: a missing, repeated or decreasing timestamp counts as one frame
    after the last.

    Bad files raise InvalidRequest, when they are opened or when the bad place is reached; a live stream goes on behind
    a damaged packet. With a `deadline` (a time of `clock`), a frame that is asked for later raises it too. One thread
    at a time may use a reader; FFmpeg works in that thread and without the GIL, so that several readers run side by
    side.
    """

    def __init__(
        self,
        source: str | Path | BinaryIO | LiveFile,
        limits: MediaLimits | None = None,
        *,
        deadline: float = math.inf,
        clock: Clock = time.monotonic,
    ) -> None:
        self._limits = limits or MediaLimits()
        self._deadline, self._clock = deadline, clock
        self._owns_file = isinstance(source, (str, Path))
        self._file = _open_file(source) if isinstance(source, (str, Path)) else cast(BinaryIO, source)
        self._is_live = isinstance(source, LiveFile)
        self.num_decoded = 0  # frames so far
        self._reformatter = VideoReformatter()  # one for all frames: to make its tables takes longer than to use them
        self._container: InputContainer | None = None
        try:
            self._container = _open_container(self._file, self._limits, self._is_live)
            self._stream = _video_stream(self._container, self._limits)
        except BaseException:
            self.close()
            raise

    # ---- what the file declares ----

    @property
    def width(self) -> int:
        """Pixels, as encoded: a frame that is turned upright may have them as its height."""
        return self._stream.codec_context.width

    @property
    def height(self) -> int:
        return self._stream.codec_context.height

    @property
    def codec(self) -> str:
        return self._stream.codec_context.codec.canonical_name

    @property
    def fps(self) -> float:
        """Frames a second, as declared; of a stream that says nothing, an assumption."""
        rate = float(self._stream.average_rate or self._stream.guessed_rate or 0)
        return rate if 0 < rate <= MAX_RATE else ASSUMED_RATE

    @property
    def has_motion(self) -> bool:
        """Whether the codec's motion can be had with the frames."""
        return self.codec in MOTION_CODECS

    # ---- frames ----

    def __iter__(self) -> Iterator[tuple[float, Pixels]]:
        for seconds, frame in self.decoded():
            yield seconds, self.to_rgb(frame)

    def frames_at(
        self, fps: float, observe: Callable[[FrameMotion], None] | None = None
    ) -> Iterator[tuple[float, Pixels]]:
        """About `fps` frames a second: the first frame at or behind each multiple of 1 / fps, as it is decoded.

        Other frames are not converted. A video with fewer frames a second gives each of them once. `observe` gets the
        motion of every decoded frame, also of those in between, before the frame itself is given.
        """
        assert fps > 0
        if observe is not None:
            self._export_motion()
        half = 0.5 / self.fps  # timestamps are rounded, so a tick may come shortly before its frame
        next_tick = -math.inf
        for seconds, frame in self.decoded():
            if observe is not None:
                observe(_motion(frame))
            if seconds + half >= next_tick:
                yield seconds, self.to_rgb(frame)
                next_tick = (math.floor((seconds + half) * fps + 1e-9) + 1) / fps

    def _export_motion(self) -> None:
        context = self._stream.codec_context
        assert self.has_motion
        assert not context.is_open, "motion is asked for before the first frame"
        context.options = {**context.options, "flags2": "+export_mvs"}

    def decoded(self) -> Iterator[tuple[float, VideoFrame]]:
        """Seconds and frames in the decoder's own pixel format, for callers that convert few of them with `to_rgb`."""
        times = _Times(self._origin, self.fps)
        for frame in self._decoded_frames():
            self._check_frame(frame)
            yield times.of(frame.time), frame

    def to_rgb(self, frame: VideoFrame) -> Pixels:
        """[height, width, 3], turned upright as the file asks."""
        with _damage_named():
            converted = self._reformatter.reformat(frame, format="rgb24", threads=1)
            pixels = np.asarray(converted.to_ndarray(), dtype=np.uint8)
        turns = _turns(frame)
        return np.ascontiguousarray(np.rot90(pixels, turns)) if turns else pixels

    def packet_times(self) -> list[float | None]:
        """Without decoding: the seconds of every frame, in the order of the file; None: it has no timestamp.

        Uses up the reader.
        """
        assert self._container is not None
        times: list[float | None] = []
        tick = float(self._stream.time_base or 0)  # seconds; a fraction would be slow for each of many packets
        with _damage_named():
            for packet in self._container.demux(self._stream):
                self._check_time()
                if packet.size and not packet.is_discard:
                    times.append(None if packet.pts is None else packet.pts * tick - self._origin)
        return times

    def _decoded_frames(self) -> Iterator[VideoFrame]:
        assert self._container is not None
        has_begun = False
        with _damage_named():
            for packet in self._container.demux(self._stream):
                self._check_time()
                try:
                    frames = packet.decode()
                except av.error.InvalidDataError:
                    if has_begun and not self._is_live:
                        raise
                    continue  # a recording may begin between two key frames
                for frame in frames:
                    has_begun = True
                    self.num_decoded += 1
                    self._check_time()
                    yield frame

    @property
    def _origin(self) -> float:
        """Seconds at which the stream starts."""
        start = self._stream.start_time
        return 0.0 if start is None or self._stream.time_base is None else float(start * self._stream.time_base)

    def _check_time(self) -> None:
        if self._clock() > self._deadline:
            raise InvalidRequest(
                "video that takes too long to decode: send a shorter one, or one with fewer or smaller frames"
            )

    def _check_frame(self, frame: VideoFrame) -> None:
        """A stream may change its size in the middle."""
        if frame.width * frame.height > self._limits.max_pixels:
            raise _too_many_pixels(frame.width, frame.height, self._limits)

    # ---- end ----

    def close(self) -> None:
        if self._container is not None:
            self._container.close()
        if self._owns_file:
            self._file.close()

    def __enter__(self) -> FrameReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _turns(frame: VideoFrame) -> int:
    """Quarter turns, anticlockwise, that make the frame upright."""
    return round(frame.rotation / 90) % 4


def _motion(frame: VideoFrame) -> FrameMotion:
    """Vectors of interlaced frames are those of fields, and those of a damaged frame are guesses: not used."""
    usable = not (frame.is_corrupt or frame.interlaced_frame)
    kind = KINDS.get(PictureType(frame.pict_type), "?") if usable else "?"
    found = frame.side_data.get("MOTION_VECTORS") if kind in ("P", "B") else None
    vectors = None if found is None else found.to_ndarray()
    return FrameMotion(kind, frame.height, frame.width, _turns(frame), vectors)


class _Times:
    """Seconds that always increase, from timestamps that may be missing or wrong."""

    def __init__(self, origin: float, fps: float) -> None:
        self._origin, self._step = origin, 1 / fps
        self._last: float | None = None

    def of(self, time: float | None) -> float:
        """`time`: the frame's own, in seconds; None: it has none."""
        expected = 0.0 if self._last is None else self._last + self._step
        seconds = expected if time is None or not math.isfinite(time) else max(0.0, time - self._origin)
        self._last = seconds if self._last is None or seconds > self._last else expected
        return self._last


# ---- FFmpeg's set-up ----


def _open_file(path: str | Path) -> BinaryIO:
    try:
        return open(path, "rb")
    except OSError as error:
        raise InvalidRequest(f"video {str(path)!r} cannot be read: {error.strerror}") from None


def _open_container(file: BinaryIO, limits: MediaLimits, is_live: bool) -> InputContainer:
    options = {
        "protocol_whitelist": "none",
        "codec_whitelist": ",".join(CODECS),
        "max_streams": str(limits.max_streams),
        "max_pixels": str(limits.max_pixels),  # of a decoder: checked before it takes memory for a frame
    }
    if is_live:
        options["fflags"] = "+ignidx"  # no step forward to an index
    with _damage_named():
        return av.open(
            file,
            "r",
            format=sniff(file),
            options=options,
            metadata_errors="ignore",
            io_open=_refuse_to_open,
            timeout=None if is_live else limits.max_decode_seconds,  # a live stream may pause
        )


def _video_stream(container: InputContainer, limits: MediaLimits) -> VideoStream:
    """The first video, ready to decode in the thread that reads."""
    streams = [s for s in container.streams.video if not s.disposition & Disposition.attached_pic]
    if not streams:
        raise InvalidRequest("video file without a video stream (sound or a cover picture alone): expected one")
    stream = streams[0]
    context = stream.codec_context
    if context is None or context.codec.name not in CODECS:
        raise InvalidRequest(f"video of a codec that is not supported: expected one of {', '.join(CODECS)}")
    if not 0 < context.width * context.height <= limits.max_pixels:
        raise _too_many_pixels(context.width, context.height, limits)
    context.thread_count = 1
    context.options = {"max_pixels": str(limits.max_pixels)}
    return stream


def _too_many_pixels(width: int, height: int, limits: MediaLimits) -> InvalidRequest:
    return InvalidRequest(
        f"video of {width} × {height} pixels: expected 1 to {limits.max_pixels} pixels a frame; send a smaller one"
    )


def _refuse_to_open(url: str, flags: int, options: object) -> NoReturn:
    raise PermissionError("a video may not refer to other files")


@contextmanager
def _damage_named() -> Iterator[None]:
    """Errors of FFmpeg and PyAV as the user's. PyAV stumbles (LookupError) over streams that appear in the middle."""
    try:
        yield
    except InvalidRequest:
        raise
    except (av.error.FFmpegError, OSError, ValueError, LookupError, ArithmeticError, MemoryError) as error:
        reason = getattr(error, "strerror", None) or "unexpected content"
        raise InvalidRequest(f"video that cannot be decoded: {reason}; it is damaged or was cut") from None
