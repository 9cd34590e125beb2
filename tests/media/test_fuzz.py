"""Whatever bytes a user sends: pixels within the bounds, or InvalidRequest. Nothing else is ever raised."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

pytest.importorskip("av", reason="the package av is missing: pip install 'faser[vision]'")

from faser.errors import InvalidRequest
from faser.media.fetch import fetch
from faser.media.limits import MediaAccess, MediaLimits
from faser.media.options import VideoOptions, parse_options
from faser.media.pictures import decode_picture
from faser.media.video import decode_video
from tests.media.clips import clip, picture, save

LIMITS = MediaLimits(max_pixels=20_000, max_frames=16, max_video_pixels=200_000, max_video_seconds=60)

PICTURES = {
    **{kind: picture(kind) for kind in ("PNG", "JPEG", "WEBP", "BMP")},
    "GIF": save(Image.new("P", (20, 20)), "GIF", save_all=True, append_images=[Image.new("P", (20, 20), 3)]),
}
VIDEOS = {
    "mp4": clip(12),
    "matroska": clip(12, kind="matroska"),
    "webm": clip(12, kind="webm", codec="libvpx"),
    "avi": clip(12, kind="avi", codec="mpeg4"),
    "mpegts": clip(12, kind="mpegts"),
    "h264": clip(12, kind="h264"),
}


@st.composite
def damaged(draw, files: dict[str, bytes]) -> bytes:
    """A file with some bytes changed, a piece lost or doubled, or the end cut off."""
    data = bytearray(files[draw(st.sampled_from(sorted(files)))])
    for _ in range(draw(st.integers(0, 8))):
        data[draw(st.integers(0, len(data) - 1))] = draw(st.integers(0, 255))
    how = draw(st.sampled_from(["whole", "cut", "lost", "doubled"]))
    start, stop = sorted((draw(st.integers(0, len(data))), draw(st.integers(0, len(data)))))
    if how == "cut":
        return bytes(data[:stop])
    if how == "lost":
        return bytes(data[:start] + data[stop:])
    return bytes(data[:stop] + data[start:]) if how == "doubled" else bytes(data)


@settings(max_examples=400)
@given(damaged(PICTURES))
def test_damaged_pictures_are_decoded_or_refused(data):
    with contextlib.suppress(InvalidRequest):
        pixels = decode_picture(data, LIMITS)
        assert pixels.dtype == np.uint8
        assert pixels.shape[2:] == (3,)
        assert 0 < pixels.shape[0] * pixels.shape[1] <= LIMITS.max_pixels


@settings(max_examples=400)
@given(damaged(VIDEOS))
def test_damaged_videos_are_decoded_or_refused(data):
    with contextlib.suppress(InvalidRequest):
        video = decode_video(data, VideoOptions(), LIMITS)
        assert 0 < len(video.frames) <= LIMITS.max_frames
        assert video.frames[..., 0].size <= LIMITS.max_video_pixels
        assert len(video.seconds) == len(video.frames)
        assert (np.diff(video.seconds) >= 0).all()
        assert 0 < video.fps < np.inf


@settings(max_examples=100)
@given(st.binary(max_size=300))
def test_random_bytes_are_refused(data):
    for decode in (lambda: decode_picture(data, LIMITS), lambda: decode_video(data, VideoOptions(), LIMITS)):
        with pytest.raises(InvalidRequest):
            decode()


@settings(max_examples=200)
@given(
    st.text(max_size=40), st.sampled_from(["", "data:", "data:;base64,", "file://", "/", "http:", "file:///allowed/"])
)
def test_random_urls_are_refused_or_read(text, start):
    with contextlib.suppress(InvalidRequest):
        assert isinstance(fetch(start + text, MediaAccess(), LIMITS), bytes)
        assert (start + text).lower().startswith("data:")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
NAMES = st.sampled_from(["fps", "num_frames", "size", "min_pixels", "max_pixels", "other"])


@given(st.dictionaries(NAMES, JSON, max_size=3))
def test_random_options_are_parsed_or_refused(given_options):
    with contextlib.suppress(InvalidRequest):
        assert isinstance(parse_options(given_options), VideoOptions)
