"""A stream that is still arriving is read as the whole file would be, whatever the sizes of its pieces."""

from __future__ import annotations

import io
import random
from contextlib import suppress
from threading import Thread

import pytest

pytest.importorskip("av", reason="the package av is missing: pip install 'faser[vision]'")

from faser.errors import InvalidRequest
from faser.media.live import KEPT_BYTES, LiveFile, StreamAborted
from faser.media.reader import FrameReader
from tests.media.clips import clip, noise


def detailed(number: int, height: int, width: int):
    return noise(height, width, number)


def large(kind: str, **options) -> bytes:
    """More bytes than FFmpeg buffers and the file keeps."""
    return clip(24, kind=kind, size=(160, 240), draw=detailed, **options)


FRAGMENTED = {"movflags": "frag_keyframe+empty_moov+default_base_moof"}
STREAMS = {
    "mpegts": lambda: large("mpegts"),
    "fragmented mp4": lambda: large("mp4", options=FRAGMENTED),
    "matroska": lambda: large("matroska"),
    "webm": lambda: clip(24, kind="webm", codec="libvpx"),
    "raw": lambda: large("h264"),
}


def feed(file: LiveFile, data: bytes, most: int, seed: int = 0) -> Thread:
    """Feeds the data from another thread, in pieces of odd sizes."""

    def run() -> None:
        sizes, start = random.Random(seed), 0
        while start < len(data):
            size = sizes.randint(1, most)
            file.feed(data[start : start + size])
            start += size
        file.finish()

    thread = Thread(target=run, daemon=True)
    thread.start()
    return thread


def frames(source) -> list[tuple[float, bytes]]:
    with FrameReader(source) as reader:
        return [(seconds, frame.tobytes()) for seconds, frame in reader]


@pytest.mark.parametrize("kind", STREAMS)
@pytest.mark.parametrize("most", [37, 3000])
def test_a_stream_in_pieces_gives_the_frames_of_the_whole_file(kind, most):
    data, file = STREAMS[kind](), LiveFile()
    thread = feed(file, data, most)
    assert frames(file) == frames(io.BytesIO(data))
    thread.join()


def test_a_reader_waits_for_pieces_and_never_takes_more_than_there_are():
    data = clip(kind="mpegts")
    file = LiveFile(on_read=lambda: reads.append(file.tell()))
    reads: list[int] = []
    for start in range(0, len(data), 100):
        file.feed(data[start : start + 100])
        assert file.num_waiting == start + min(100, len(data) - start)
    file.finish()
    assert len(frames(file)) == 30
    assert (file.num_waiting, max(reads)) == (0, len(data))


def test_memory_behind_the_reader_is_bounded():
    file = LiveFile()
    for _ in range(100):
        file.feed(bytes(10_000))
        assert len(file.read(10_000)) == 10_000
        assert len(file._bytes) <= 2 * KEPT_BYTES + 10_000


def test_a_seek_goes_a_little_back_or_forward_and_never_from_the_end():
    file = LiveFile()
    file.feed(bytes(range(200)) * 2000)
    file.read(300_000)
    assert file.seek(300_000 - KEPT_BYTES) == 300_000 - KEPT_BYTES
    assert (file.seek(0), file.seek(-1, io.SEEK_END)) == (-1, -1)
    assert file.seek(350_007) == 350_007
    assert file.read(1) == bytes([350_007 % 200])
    file.finish()
    assert file.seek(10**9) == 400_000
    assert file.read(1) == b""


def test_an_aborted_stream_ends_its_reader():
    file, ends = LiveFile(), []

    def read() -> None:
        try:
            frames(file)
        except StreamAborted:
            ends.append("aborted")

    thread = Thread(target=read)
    thread.start()
    file.feed(clip(kind="mpegts")[:5000])
    file.abort()
    thread.join(60)
    assert ends == ["aborted"]
    file.feed(b"late")
    assert file.num_waiting == 0


def test_bytes_lost_in_the_middle_of_a_transport_stream_cost_some_frames():
    data, file = large("mpegts"), LiveFile()
    file.feed(data[:60_000] + data[90_000:])
    file.finish()
    assert 10 < len(frames(file)) <= 24


@pytest.mark.parametrize("data", [b"", b"hello", bytes(10_000), b"<html>" * 500])
def test_a_stream_of_an_unknown_format_is_refused(data):
    file = LiveFile()
    file.feed(data)
    file.finish()
    with pytest.raises(InvalidRequest, match="unknown format"):
        FrameReader(file)


@pytest.mark.parametrize("kind", STREAMS)
def test_damage_anywhere_costs_frames_or_is_named(kind):
    data, places = STREAMS[kind](), random.Random(1)
    for _ in range(12):
        damaged, file = bytearray(data), LiveFile()
        for _ in range(places.randint(1, 40)):
            damaged[places.randrange(len(data))] = places.randrange(256)
        file.feed(bytes(damaged[: places.randint(1, len(data))]))
        file.finish()
        with suppress(InvalidRequest):
            assert len(frames(file)) <= 30
