"""A video becomes evenly sampled frames, within bounds; a damaged one becomes a clear refusal."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

pytest.importorskip("av", reason="the package av is missing: pip install 'faser[vision]'")

import av

from faser.errors import InvalidRequest
from faser.media.containers import SEGMENT
from faser.media.limits import MediaLimits
from faser.media.options import VideoOptions
from faser.media.prepare import check_num_media, picture_media, video_media
from faser.media.reader import FrameReader
from faser.media.video import decode_video, num_sampled
from tests.media.clips import SETTINGS, clip, number, picture, save

LIMITS = MediaLimits()


@pytest.fixture(scope="session")
def mp4() -> bytes:
    return clip()


def numbers(data: bytes, **options: float) -> list[int]:
    return [number(frame) for frame in decode_video(data, VideoOptions(**options), LIMITS).frames]


def message(data: bytes, limits: MediaLimits = LIMITS, **options: float) -> str:
    with pytest.raises(InvalidRequest) as caught:
        decode_video(data, VideoOptions(**options), limits)
    return str(caught.value)


# ---- sampling ----


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [0, 5, 10, 15, 20, 25]),
        ({"fps": 2}, [0, 5, 10, 15, 20, 25]),
        ({"fps": 1}, [0, 7, 15, 22]),  # 3 would not fill two grids, and 4 is the least
        ({"fps": 100}, list(range(30))),
        ({"num_frames": 4}, [0, 7, 15, 22]),
        ({"num_frames": 5}, [0, 7, 15, 22]),
        ({"num_frames": 1}, [0, 15]),
        ({"num_frames": 500}, list(range(30))),
    ],
)
def test_frames_are_sampled_evenly_in_whole_grids(mp4, options, expected):
    assert numbers(mp4, **options) == expected


def test_times_and_rate_are_those_of_the_samples(mp4):
    frames = decode_video(mp4, VideoOptions(num_frames=6), LIMITS)
    assert frames.seconds == pytest.approx([0, 0.5, 1, 1.5, 2, 2.5])
    assert frames.fps == pytest.approx(2.0)


def reference_count(total: int, source_fps: float, fps: float, most: int) -> int:
    """The rule of transformers' video processor, for pairs of frames."""
    most = min(most, total) // 2 * 2
    return math.floor(min(max(total / source_fps * fps, 4), most, total) / 2) * 2


@given(st.integers(2, 2000), st.sampled_from([10, 24, 25, 30, 60]), st.sampled_from([0.5, 1, 2, 4]))
def test_as_many_frames_are_sampled_as_by_transformers(total, source_fps, fps):
    count = num_sampled(total, total / source_fps, VideoOptions(fps=fps), 768, 2)
    assert count == reference_count(total, source_fps, fps, 768)


def test_a_bound_below_a_grid_holds():
    assert num_sampled(100, 10.0, VideoOptions(), 1, 2) == 1


@pytest.mark.parametrize(("total", "expected"), [(1, [0]), (2, [0, 1]), (3, [0, 1]), (5, [0, 1, 2, 3])])
def test_short_videos_give_what_they_have(total, expected):
    assert numbers(clip(total)) == expected


def test_frames_are_sampled_by_time_where_the_rate_varies():
    times = [*range(10), *range(40, 50)]
    frames = decode_video(clip(times=times, kind="matroska"), VideoOptions(num_frames=8), LIMITS)
    shown = [times[number(frame)] / 10 for frame in frames.frames]
    wanted = np.arange(8) * (4.9 * 20 / 19) / 8
    assert all(at <= target + 0.05 for at, target in zip(shown, wanted, strict=True))
    assert shown == pytest.approx([0, 0.6, 0.9, 0.9, 0.9, 0.9, 0.9, 4.5])
    assert frames.seconds == pytest.approx(shown)


def test_only_sampled_frames_become_rgb(mp4, monkeypatch):
    converted = []
    to_rgb = FrameReader.to_rgb
    monkeypatch.setattr(FrameReader, "to_rgb", lambda self, frame: converted.append(frame.pts) or to_rgb(self, frame))
    numbers(mp4, num_frames=4)
    assert len(converted) == 4


def test_decoding_ends_behind_the_last_sample(mp4, monkeypatch):
    decoded = []
    original = FrameReader.decoded
    monkeypatch.setattr(FrameReader, "decoded", lambda self: (decoded.append(pair) or pair for pair in original(self)))
    assert numbers(mp4, num_frames=2) == [0, 15]
    assert len(decoded) == 16


# ---- bounds ----


def test_bytes_frames_pixels_and_seconds_are_bounded(mp4):
    assert "bytes" in message(mp4, MediaLimits(max_bytes=100))
    assert "num_frames=9" in message(mp4, MediaLimits(max_frames=8), num_frames=9)
    assert "fewer frames" in message(mp4, MediaLimits(max_video_pixels=6 * 64 * 48 - 1))
    assert "expected at most 2 s" in message(mp4, MediaLimits(max_video_seconds=2))
    assert len(decode_video(mp4, VideoOptions(fps=100), MediaLimits(max_frames=8)).frames) == 8


def test_absurd_timestamps_are_refused():
    assert "3600 s" in message(clip(times=[0, 1, 10**7, 10**7 + 1], kind="matroska"))


def test_the_work_is_bounded_by_the_clock(mp4):
    ticks = iter(range(10**6))
    with pytest.raises(InvalidRequest, match="too long"):
        decode_video(mp4, VideoOptions(), MediaLimits(max_decode_seconds=40), clock=lambda: next(ticks))


def test_a_gif_of_thousands_of_frames_costs_its_samples_alone():
    frames = [Image.new("1", (8, 8), i % 2) for i in range(3000)]
    data = save(frames[0], "GIF", save_all=True, append_images=frames[1:], duration=20)
    found = decode_video(data, VideoOptions(), MediaLimits(max_frames=16))
    assert found.frames.shape == (16, 8, 8, 3)


def test_frames_that_change_their_size_are_refused():
    data = clip(4, kind="h264") + clip(4, kind="h264", size=(96, 128))
    assert "one size" in message(data, num_frames=8)


# ---- damage ----


@pytest.mark.parametrize("share", [0.01, 0.3, 0.6, 0.9, 0.99])
@pytest.mark.parametrize(
    ("kind", "codec"), [("mp4", "libx264"), ("matroska", "libx264"), ("webm", "libvpx"), ("avi", "mpeg4")]
)
def test_a_cut_file_is_refused(kind, codec, share):
    data = clip(kind=kind, codec=codec)
    assert numbers(data) == [0, 5, 10, 15, 20, 25]
    assert message(data[: int(len(data) * share)]).startswith("video")


@pytest.mark.parametrize("share", [0.5, 0.8, 0.97])
def test_a_stream_may_end_anywhere(share):
    data = clip(kind="mpegts")
    found = numbers(data[: int(len(data) * share)])
    assert len(found) >= 2
    assert found == sorted(found)


def test_streams_that_were_joined_are_read():
    """The second starts its timestamps again."""
    assert numbers(clip(10, kind="mpegts") * 2, num_frames=20) == [*range(10)] * 2


def test_a_live_recording_without_sizes_is_read():
    data = clip(kind="matroska")
    segment = data.index(SEGMENT) + 4
    assert data[segment] == 1  # a size of 8 bytes follows
    assert len(numbers(data[:segment] + b"\x01" + b"\xff" * 7 + data[segment + 8 :])) == 6


@pytest.mark.parametrize("cut", [1, 30, 300])
def test_a_cut_mp4_with_its_index_in_front_is_refused(tmp_path, cut):
    path = tmp_path / "clip.mp4"
    with av.open(str(path), "w", format="mp4", options={"movflags": "faststart"}) as container:
        stream = container.add_stream("libx264", rate=10, width=64, height=48, pix_fmt="yuv420p")
        for i in range(20):
            pixels = np.random.default_rng(i).integers(0, 256, (48, 64, 3), dtype=np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, "rgb24")))
        container.mux(stream.encode(None))
    data = path.read_bytes()
    assert len(decode_video(data, VideoOptions(), LIMITS).frames) == 4
    assert "was cut" in message(data[:-cut])


# ---- media ----


def test_a_video_becomes_media(mp4):
    media = video_media(mp4, SETTINGS, LIMITS)
    assert (media.kind, media.num_frames, len(media.grids)) == ("video", 6, 3)
    assert media.seconds_per_grid == pytest.approx(1.0)
    assert (media.num_patches, media.num_tokens) == (3 * 4 * media.grids[0].num_tokens, 3 * media.grids[0].num_tokens)


def test_a_video_of_one_frame_becomes_one_grid():
    media = video_media(clip(1), SETTINGS, LIMITS)
    assert (media.num_frames, len(media.grids)) == (1, 1)
    assert media.grids[0].patches.shape[2] == 2


def test_the_frames_of_a_long_video_share_the_pixels():
    data = clip(20, size=(224, 224))
    wide = video_media(data, SETTINGS, LIMITS, VideoOptions(num_frames=20))
    shared = video_media(data, SETTINGS, MediaLimits(max_video_pixels=20 * 28 * 28 * 16), VideoOptions(num_frames=20))
    assert (wide.grids[0].num_tokens, shared.grids[0].num_tokens) == (25, 16)
    with pytest.raises(InvalidRequest, match="fewer frames"):
        video_media(data, SETTINGS, MediaLimits(max_video_pixels=1000), VideoOptions(num_frames=20))


def test_the_number_of_media_is_bounded():
    check_num_media(3, MediaLimits(max_media=3))
    with pytest.raises(InvalidRequest, match="4 pictures and videos"):
        check_num_media(4, MediaLimits(max_media=3))


def test_a_picture_becomes_media():
    media = picture_media(picture("JPEG", 100, 60), SETTINGS, LIMITS)
    assert (media.kind, media.num_frames, media.seconds_per_grid) == ("image", 1, None)
    assert media.num_patches == 4 * media.num_tokens == 32
