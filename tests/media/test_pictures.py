"""Pictures of every allowed kind become RGB; bombs and broken ones are refused before they cost anything."""

from __future__ import annotations

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

pytest.importorskip("av", reason="the package av is missing: pip install 'faser[vision]'")

from faser.errors import InvalidRequest
from faser.media.limits import MediaLimits
from faser.media.pictures import decode_picture
from tests.media.clips import noise, picture, save

LIMITS = MediaLimits()


def message(data: bytes, limits: MediaLimits = LIMITS) -> str:
    with pytest.raises(InvalidRequest) as caught:
        decode_picture(data, limits)
    return str(caught.value)


@pytest.mark.parametrize("kind", ["PNG", "BMP"])
def test_a_lossless_picture_keeps_its_pixels(kind):
    decoded = decode_picture(picture(kind), LIMITS)
    assert decoded.dtype == np.uint8
    assert np.array_equal(decoded, noise(30, 40))


@pytest.mark.parametrize("kind", ["JPEG", "WEBP"])
def test_a_lossy_picture_is_what_pillow_decodes(kind):
    data = picture(kind)
    assert np.array_equal(decode_picture(data, LIMITS), np.array(Image.open(io.BytesIO(data)).convert("RGB")))


def test_an_animation_gives_its_first_frame():
    frames = [Image.new("RGB", (20, 10), colour) for colour in ("red", "blue", "lime")]
    for kind in ("GIF", "WEBP", "PNG"):
        data = save(frames[0], kind, save_all=True, append_images=frames[1:], lossless=True)
        assert np.array_equal(decode_picture(data, LIMITS), np.array(frames[0]))


def test_orientation_is_applied():
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90° clockwise
    pixels = noise(30, 40)
    decoded = decode_picture(save(Image.fromarray(pixels), "PNG", exif=exif), LIMITS)
    assert np.array_equal(decoded, np.rot90(pixels, -1))


def test_transparency_is_laid_over_white():
    pixels = np.zeros((2, 2, 4), dtype=np.uint8)
    pixels[0, 0] = (200, 100, 0, 255)
    pixels[0, 1] = (0, 0, 0, 128)
    decoded = decode_picture(save(Image.fromarray(pixels), "PNG"), LIMITS)
    assert decoded[0, 0].tolist() == [200, 100, 0]
    assert decoded[0, 1].tolist() == [127, 127, 127]
    assert decoded[1, 1].tolist() == [255, 255, 255]


def test_a_transparent_palette_is_laid_over_white():
    image = Image.new("P", (2, 1), 0)
    image.putpalette([255, 0, 0, 0, 0, 255])
    image.putpixel((1, 0), 1)
    assert decode_picture(save(image, "PNG"), LIMITS).tolist() == [[[255, 0, 0], [0, 0, 255]]]
    for kind in ("PNG", "GIF"):
        assert decode_picture(save(image, kind, transparency=0), LIMITS).tolist() == [[[255, 255, 255], [0, 0, 255]]]


@pytest.mark.parametrize(("mode", "grey"), [("L", 77), ("1", 255), ("LA", 77)])
def test_grey_pictures_become_rgb(mode, grey):
    image = Image.new(mode, (3, 2), grey if mode != "LA" else (grey, 255))
    assert (decode_picture(save(image, "PNG"), LIMITS) == grey).all()


def test_sixteen_bits_of_grey_keep_their_upper_eight():
    levels = np.arange(0, 65536, 257, dtype=np.uint16).reshape(16, 16)
    decoded = decode_picture(save(Image.fromarray(levels), "PNG"), LIMITS)
    assert np.array_equal(decoded[..., 0], levels >> 8)


def test_cmyk_becomes_rgb():
    assert decode_picture(save(Image.new("CMYK", (8, 8), (0, 0, 0, 0)), "JPEG"), LIMITS).min() > 250


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "L", "RGB"])
def test_the_conversion_is_that_of_transformers(mode):
    transforms = pytest.importorskip("transformers.image_transforms")
    image = Image.fromarray(np.dstack([noise(9, 9), noise(9, 9, 1)[..., 0]])).convert(mode)
    data = save(image, "PNG")
    right = transforms.convert_to_rgb(Image.open(io.BytesIO(data)), return_numpy=True)
    assert np.array_equal(decode_picture(data, LIMITS), right)


# ---- refused ----


def png_header(width: int, height: int) -> bytes:
    body = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunk = struct.pack(">I", 13) + body + struct.pack(">I", zlib.crc32(body))
    data = b"IDAT" + zlib.compress(bytes(1000))
    return b"\x89PNG\r\n\x1a\n" + chunk + struct.pack(">I", len(data) - 4) + data + struct.pack(">I", zlib.crc32(data))


@pytest.mark.parametrize("size", [(10**4, 10**4), (30000, 30000), (2**31 - 1, 2**31 - 1), (2**25 + 1, 1)])
def test_a_bomb_is_refused_by_its_header(size, monkeypatch):
    monkeypatch.setattr(Image.Image, "load", None)  # no pixel is decoded
    assert "pixels" in message(png_header(*size))


def test_a_webp_bomb_is_refused():
    data = bytearray(picture("WEBP", 16, 16))
    start = data.index(b"\x9d\x01\x2a") + 3
    data[start : start + 4] = struct.pack("<HH", 16383, 16383)
    assert "picture" in message(bytes(data))


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_a_cut_picture_is_refused(kind):
    data = picture(kind)
    assert "picture" in message(data[: len(data) // 2])


@pytest.mark.parametrize("data", [b"", b"GIF89a", b"hello", b"<svg/>", b"%!PS-Adobe-3.0 EPSF-3.0\n", bytes(100)])
def test_unknown_data_is_refused(data):
    assert "expected one of PNG, JPEG, WEBP, GIF, BMP" in message(data) or "cannot be decoded" in message(data)


def test_other_formats_of_pillow_are_refused():
    assert "unknown format" in message(save(Image.new("RGB", (4, 4)), "TIFF"))


def test_too_many_bytes_are_refused():
    assert "bytes" in message(picture(), MediaLimits(max_bytes=10))
