"""From the bytes of a picture to RGB pixels.

Knows formats and their oddities: orientation, transparency, palettes, 16 bits. Knows nothing of models. The size is
checked from the header, before a pixel is decoded.
"""

from __future__ import annotations

import io

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

from faser.errors import InvalidRequest
from faser.media.limits import MediaLimits

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
WHITE = (255, 255, 255, 255)


def decode_picture(data: bytes, limits: MediaLimits) -> NDArray[np.uint8]:
    """[height, width, 3] RGB, upright. Of an animation: the first frame."""
    if len(data) > limits.max_bytes:
        raise InvalidRequest(f"picture of {len(data)} bytes: expected at most {limits.max_bytes}; send a smaller one")
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            _check_size(image.width, image.height, limits)
            image.load()
            return np.array(_rgb(ImageOps.exif_transpose(image)))
    except InvalidRequest:
        raise
    except UnidentifiedImageError:
        raise InvalidRequest(f"picture of an unknown format: expected one of {', '.join(FORMATS)}") from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise InvalidRequest(f"picture that is too large: expected at most {limits.max_pixels} pixels") from None
    except Exception as error:  # for damaged data, the readers of formats raise whatever they stumble over
        raise InvalidRequest(f"picture that cannot be decoded: {error}; it is damaged or was cut") from None


def _check_size(width: int, height: int, limits: MediaLimits) -> None:
    if not 0 < width * height <= limits.max_pixels:
        raise InvalidRequest(
            f"picture of {width} × {height} pixels: expected at most {limits.max_pixels} pixels; send a smaller one"
        )


def _rgb(image: Image.Image) -> Image.Image:
    """Transparency is laid over white, as in the processors the models were trained with."""
    if image.mode.startswith("I"):  # 16 bits of grey; Pillow alone would clip them at 255
        return Image.fromarray((np.asarray(image).astype(np.uint32) >> 8).astype(np.uint8)).convert("RGB")
    if "A" in image.getbands() or image.info.get("transparency") is not None:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, WHITE), image)
    return image.convert("RGB")
