"""Frames come one by one with sensible times, from allowed containers and codecs alone, in bounded memory."""

from __future__ import annotations

import io
import struct
from itertools import islice

import numpy as np
import pytest
from PIL import Image

pytest.importorskip("av", reason="the package av is missing: pip install 'faser[vision]'")

import av

from faser.errors import InvalidRequest
from faser.media import reader as module
from faser.media.limits import MediaLimits
from faser.media.reader import FrameReader
from tests.media.clips import clip, noise, number, save, sound

KINDS = [
    ("mp4", "libx264"), ("mov", "libx264"), ("matroska", "libx264"), ("webm", "libvpx"), ("webm", "libvpx-vp9"),
    ("avi", "mpeg4"), ("mpegts", "libx264"), ("mpegts", "mpeg2video"),
]  # fmt: skip


def message(data: bytes, limits: MediaLimits | None = None) -> str:
    with pytest.raises(InvalidRequest) as caught, FrameReader(io.BytesIO(data), limits) as reader:
        list(reader)
    return str(caught.value)


@pytest.fixture(scope="session")
def mp4() -> bytes:
    return clip()


@pytest.mark.parametrize(("kind", "codec"), KINDS)
def test_every_frame_comes_in_order_with_its_time(kind, codec):
    rate = 25 if codec == "mpeg2video" else 10
    with FrameReader(io.BytesIO(clip(12, kind=kind, codec=codec, rate=rate))) as reader:
        found = list(reader)
    assert [number(frame) for _, frame in found] == list(range(12))
    assert [seconds for seconds, _ in found] == pytest.approx(np.arange(12) / rate, abs=1e-3)
    assert all(frame.shape == (48, 64, 3) and frame.dtype == np.uint8 for _, frame in found)


def test_a_raw_stream_has_assumed_times():
    with FrameReader(io.BytesIO(clip(12, kind="h264"))) as reader:
        assert [seconds for seconds, _ in reader] == pytest.approx(np.arange(12) / 25)


def test_an_animated_gif_is_a_video():
    frames = [Image.new("L", (64, 48), 40 + 5 * i) for i in range(4)]
    data = save(frames[0], "GIF", save_all=True, append_images=frames[1:], duration=500)
    with FrameReader(io.BytesIO(data)) as reader:
        assert [(seconds, number(frame)) for seconds, frame in reader] == [(0, 0), (0.5, 1), (1.0, 2), (1.5, 3)]


def test_a_reader_tells_what_the_file_declares(mp4, tmp_path):
    path = tmp_path / "clip.mp4"
    path.write_bytes(mp4)
    for source in (path, str(path), io.BytesIO(mp4)):
        with FrameReader(source) as reader:
            assert (reader.width, reader.height, reader.codec, reader.fps) == (64, 48, "h264", 10.0)


def test_a_path_that_is_missing_is_refused(tmp_path):
    with pytest.raises(InvalidRequest, match="cannot be read"):
        FrameReader(tmp_path / "missing.mp4")


def test_a_reader_does_not_close_a_file_that_it_did_not_open(mp4):
    file = io.BytesIO(mp4)
    with FrameReader(file):
        pass
    assert not file.closed


# ---- sampling as frames arrive ----


@pytest.mark.parametrize(
    ("fps", "expected"),
    [
        (2, [0, 5, 10, 15, 20, 25]),
        (1, [0, 10, 20]),
        (4, [0, 2, 5, 7, 10, 12, 15, 17, 20, 22, 25, 27]),
        (100, list(range(30))),
    ],
)
def test_frames_are_sampled_on_the_fly(mp4, fps, expected):
    with FrameReader(io.BytesIO(mp4)) as reader:
        assert [number(frame) for _, frame in reader.frames_at(fps)] == expected


def test_rounded_timestamps_do_not_shift_samples():
    with FrameReader(io.BytesIO(clip(40, kind="matroska", rate=30))) as reader:  # milliseconds: 0, 33, 67, 100
        assert [number(frame) for _, frame in reader.frames_at(10)] == list(range(0, 40, 3))


def test_sampling_follows_time_where_the_rate_varies():
    times = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 40, 41, 42, 43, 44, 45, 46]
    with FrameReader(io.BytesIO(clip(times=times, kind="matroska"))) as reader:
        found = [round(seconds, 3) for seconds, _ in reader.frames_at(2)]
    assert found == [0, 0.5, 4.0, 4.5]


def test_frames_that_are_not_sampled_are_not_converted(mp4, monkeypatch):
    converted = []
    monkeypatch.setattr(FrameReader, "to_rgb", lambda _, frame: converted.append(frame.pts))
    with FrameReader(io.BytesIO(mp4)) as reader:
        list(reader.frames_at(1))
    assert len(converted) == 3


def test_a_reader_reads_as_far_as_it_is_asked():
    data = clip(60, gop=1, kind="matroska", size=(144, 176), draw=lambda i, height, width: noise(height, width, i))
    file = io.BytesIO(data)
    with FrameReader(file) as reader:
        list(islice(reader, 3))
        assert file.tell() < len(data) / 2


# ---- timestamps ----


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([0.0, 0.5, 1.0], [0.0, 0.5, 1.0]),
        ([None, None, None], [0.0, 0.1, 0.2]),
        ([3.0, 3.5], [3.0, 3.5]),
        ([-5.0, -4.0, 1.0], [0.0, 0.1, 1.0]),
        ([1.0, 0.5, 0.5, 1.15, 1.4], [1.0, 1.1, 1.2, 1.3, 1.4]),
        ([float("nan"), float("inf"), 0.5], [0.0, 0.1, 0.5]),
    ],
)
def test_times_always_increase_whatever_the_timestamps_say(given, expected):
    times = module._Times(0.0, 10.0)
    assert [times.of(time) for time in given] == pytest.approx(expected)


def test_a_stream_that_starts_late_counts_from_its_start():
    with FrameReader(io.BytesIO(clip(times=range(50, 60), kind="mpegts"))) as reader:
        assert next(iter(reader))[0] == 0.0


MATRICES = {  # a, b, c, d of x' = a x + c y, y' = b x + d y, by the counterclockwise quarter turns that they ask for
    0: (1, 0, 0, 1),
    1: (0, -1, 1, 0),
    2: (-1, 0, 0, -1),
    3: (0, 1, -1, 0),
}


@pytest.mark.parametrize("turns", MATRICES)
def test_frames_are_turned_upright(turns):
    """A phone that is held upright writes frames that lie, and a matrix that says so."""
    half = np.zeros((48, 64, 3), dtype=np.uint8)
    half[:24, :32] = 255
    data = bytearray(clip(2, draw=lambda *_: half))
    at = data.index(b"tkhd") + 44
    a, b, c, d = (value << 16 for value in MATRICES[turns])
    data[at : at + 36] = struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 1 << 30)
    with FrameReader(io.BytesIO(bytes(data))) as reader:
        _, frame = next(iter(reader))
    assert np.array_equal(frame > 128, np.rot90(half > 128, turns))


# ---- refused ----


@pytest.mark.parametrize(
    "text",
    [
        "#EXTM3U\n#EXT-X-TARGETDURATION:3\n#EXTINF:3,\n{path}\n#EXT-X-ENDLIST\n",
        "ffconcat version 1.0\nfile '{path}'\n",
        "v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nm=video 5004 RTP/AVP 96\n",
        '<?xml version="1.0"?><MPD xmlns="urn:mpeg:dash:schema:mpd:2011"><BaseURL>{path}</BaseURL></MPD>',
        "file:{path}",
    ],
)
def test_playlists_and_scripts_are_refused(mp4, tmp_path, text):
    path = tmp_path / "secret.mp4"
    path.write_bytes(mp4)
    assert "unknown format" in message(text.format(path=path).encode())


@pytest.mark.parametrize("kind", ["hls", "concat"])
def test_ffmpeg_may_open_no_other_file_even_if_a_playlist_reached_it(mp4, tmp_path, monkeypatch, kind):
    path = tmp_path / "secret.mp4"
    path.write_bytes(mp4)
    text = {
        "hls": f"#EXTM3U\n#EXT-X-TARGETDURATION:3\n#EXTINF:3,\n{path}\n#EXT-X-ENDLIST\n",
        "concat": f"ffconcat version 1.0\nfile '{path.name}'\n",
    }[kind]
    monkeypatch.setattr(module, "sniff", lambda _: kind)
    monkeypatch.chdir(tmp_path)
    assert "cannot be decoded" in message(text.encode())


@pytest.mark.parametrize(
    "data", [b"", b"RIFF", b"\0\0\0\1", b"\0\0\1\xba" + bytes(99), b"hello" * 99, bytes(600), b"G" * 600]
)
def test_unknown_data_is_refused(data):
    assert message(data).startswith("video")


def test_sound_alone_is_refused_and_sound_beside_video_is_ignored():
    assert "without a video stream" in message(sound())
    with FrameReader(io.BytesIO(sound(with_video=True))) as reader:
        assert len(list(reader)) == 5


def test_a_codec_outside_the_list_is_refused():
    assert "codec" in message(clip(4, kind="avi", codec="ffv1"))


def test_a_codec_that_ffmpeg_does_not_know_is_refused(mp4):
    assert "codec" in message(mp4.replace(b"avc1", b"xyz1"))


def test_the_work_is_bounded_by_a_deadline(mp4):
    ticks = iter(range(1000))
    with FrameReader(io.BytesIO(mp4), deadline=15, clock=lambda: next(ticks)) as reader:
        frames = iter(reader)
        next(frames)
        with pytest.raises(InvalidRequest, match="too long"):
            list(frames)


@pytest.mark.parametrize("limits", [MediaLimits(max_pixels=64 * 48 - 1), MediaLimits(max_pixels=10)])
def test_large_frames_are_refused(mp4, limits):
    assert "pixels" in message(mp4, limits) or "cannot be decoded" in message(mp4, limits)


def test_a_frame_that_grows_in_the_middle_is_refused():
    data = clip(4, kind="h264", size=(48, 64)) + clip(4, kind="h264", size=(480, 640))
    assert message(data, MediaLimits(max_pixels=10_000)).startswith("video")
    with FrameReader(io.BytesIO(data)) as reader:
        assert {frame.shape for _, frame in reader} == {(48, 64, 3), (480, 640, 3)}


def h264_of(width: int, height: int) -> bytes:
    """A raw stream whose parameters declare this size, and whose pictures are small."""
    bits = f"{66:08b}{0:08b}{51:08b}"  # profile, constraints, level
    for value in (0, 0, 2, 1):  # id, frame numbers, order, references
        bits += exp_golomb(value)
    bits += "0" + exp_golomb(width // 16 - 1) + exp_golomb(height // 16 - 1) + "1" + "1" + "0" + "0" + "1"
    bits += "0" * (-len(bits) % 8)
    parameters = bytes([0x67]) + int(bits, 2).to_bytes(len(bits) // 8, "big")
    small = clip(4, kind="h264")
    return b"\0\0\0\1" + parameters + small[small.index(b"\0\0\0\1", 4) :]


def exp_golomb(value: int) -> str:
    code = f"{value + 1:b}"
    return "0" * (len(code) - 1) + code


@pytest.mark.parametrize("size", [(30000, 30000), (16000, 16000)])
def test_a_stream_that_declares_a_huge_size_is_refused(size):
    assert "pixels a frame" in message(h264_of(*size))


def test_an_mp4_that_declares_a_huge_size_is_refused():
    file = io.BytesIO()
    with (
        av.open(io.BytesIO(h264_of(16000, 16000)), format="h264") as raw,
        av.open(file, "w", format="mp4") as container,
    ):
        stream = container.add_stream_from_template(raw.streams.video[0])
        for i, packet in enumerate(raw.demux(video=0)):
            if packet.size:
                packet.pts = packet.dts = 100 * i
                packet.stream = stream
                container.mux(packet)
    assert "16000 × 16000" in message(file.getvalue())


def test_a_size_that_the_container_alone_declares_is_not_believed():
    data = bytearray(clip(4))
    at = data.index(b"avc1", data.index(b"stsd")) + 28
    assert struct.unpack(">HH", data[at : at + 4]) == (64, 48)
    data[at : at + 4] = struct.pack(">HH", 30000, 30000)
    with FrameReader(io.BytesIO(bytes(data))) as reader:
        assert {frame.shape for _, frame in reader} == {(48, 64, 3)}


def test_a_vp8_frame_that_declares_a_huge_size_is_refused():
    data = bytearray(clip(4, kind="webm", codec="libvpx"))
    at = data.index(b"\x9d\x01\x2a") + 3
    data[at : at + 4] = struct.pack("<HH", 16383, 16383)
    assert message(bytes(data)).startswith("video")


def test_more_streams_than_allowed_are_not_read():
    file = io.BytesIO()
    with av.open(file, "w", format="matroska") as container:
        streams = [container.add_stream("libx264", rate=10, width=64, height=48, pix_fmt="yuv420p") for _ in range(5)]
        for stream in streams:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.zeros((48, 64, 3), np.uint8), "rgb24")))
            container.mux(stream.encode(None))
    data = file.getvalue()
    for limits, read in ((MediaLimits(), 5), (MediaLimits(max_streams=3), 3)):
        with FrameReader(io.BytesIO(data), limits) as reader:
            assert len(reader._container.streams) == read
            assert len(list(reader)) == 1
