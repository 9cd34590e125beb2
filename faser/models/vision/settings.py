"""What a model folder says of pixels: how pictures are resized and normalised.

Knows the files that transformers writes: processor_config.json, which holds both processors, or
preprocessor_config.json for pictures and video_preprocessor_config.json for videos. What is missing has the default of
transformers. Refuses by name what FASER does not do. Knows nothing of torch, and resizes nothing itself.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from faser.errors import ModelError
from faser.models.fields import Fields, read_object
from faser.models.vision.config import VisionConfig
from faser.vision import VisionSettings

PROCESSOR_FILE = "processor_config.json"
PICTURE_FILE = "preprocessor_config.json"
VIDEO_FILE = "video_preprocessor_config.json"

_PICTURE_PIXELS = (56 * 56, 28 * 28 * 1280)  # least and most, after resizing
_VIDEO_PIXELS = (128 * 28 * 28, 28 * 28 * 768)  # of a frame
_BICUBIC = 3


def read_pixels(config: VisionConfig, folder: Path) -> VisionConfig:
    """The config with the folder's own mean, standard deviation and scale of pixels."""
    pictures, videos = read_processors(config, folder)
    if _normalisation(config, pictures) != _normalisation(config, videos):
        raise videos.refuse(
            "a normalisation of videos that is not that of pictures", f"expected that of {PICTURE_FILE}"
        )
    rescale, mean, std = _normalisation(config, pictures)
    return replace(config, rescale=rescale, mean=mean, std=std)


def read_settings(config: VisionConfig, folder: Path) -> VisionSettings:
    pictures, videos = read_processors(config, folder)
    least, most = _pixels(pictures, *_PICTURE_PIXELS)
    video_least, video_most = _pixels(videos, *_VIDEO_PIXELS)
    return VisionSettings(
        patch_size=config.patch_size,
        merge_size=config.merge_size,
        frames_per_grid=config.temporal_patch_size,
        min_pixels=least,
        max_pixels=most,
        video_min_pixels=video_least,
        video_max_pixels=video_most,
        image_token_id=config.image_token_id,
        video_token_id=config.video_token_id,
        has_spatial_positions=config.has_spatial_positions,
        positions_per_second=config.tokens_per_second,
    )


def read_processors(config: VisionConfig, folder: Path) -> tuple[Fields, Fields]:
    """The fields for pictures and for videos. Without fields of their own, videos have those of pictures."""
    pictures = _nested(folder, "image_processor") or _file(folder, PICTURE_FILE)
    videos = _nested(folder, "video_processor") or _file(folder, VIDEO_FILE) or pictures
    nothing = Fields({}, str(folder / PICTURE_FILE))
    for fields in (pictures, videos):
        if fields is not None:
            _refuse_unsupported(fields, config)
    return pictures or nothing, videos or nothing


def _file(folder: Path, name: str) -> Fields | None:
    path = folder / name
    return Fields(read_object(path), str(path)) if path.is_file() else None


def _nested(folder: Path, key: str) -> Fields | None:
    outer = _file(folder, PROCESSOR_FILE)
    inner = None if outer is None else outer.get(key)
    return Fields(inner, f"{folder / PROCESSOR_FILE}: {key}") if isinstance(inner, dict) else None


def _refuse_unsupported(fields: Fields, config: VisionConfig) -> None:
    for key in ("do_resize", "do_rescale", "do_normalize"):
        if not fields.flag(key, True):
            raise fields.refuse(f"{key}=false", "expected pictures that are resized, rescaled and normalised")
    for key in ("do_center_crop", "do_pad"):
        if fields.flag(key):
            raise fields.refuse(f"{key}=true", "expected whole pictures")
    if fields.integer("resample", _BICUBIC, null=_BICUBIC) != _BICUBIC:
        raise fields.refuse(f"resample={fields.get('resample')}", f"expected {_BICUBIC} (bicubic)")
    for key, expected in (
        ("patch_size", config.patch_size),
        ("temporal_patch_size", config.temporal_patch_size),
        ("merge_size", config.merge_size),
    ):
        if fields.integer(key, expected, null=expected) != expected:
            raise fields.wrong(key, fields.get(key), f"{expected}, as in config.json")


def _normalisation(config: VisionConfig, fields: Fields) -> tuple[float, tuple[float, ...], tuple[float, ...]]:
    """Scale, mean and standard deviation."""
    mean = _by_channel(fields, "image_mean", config.mean)
    std = _by_channel(fields, "image_std", config.std)
    if not all(each > 0 for each in std):
        raise fields.wrong("image_std", list(std), "positive numbers")
    return fields.number("rescale_factor", config.rescale, null=config.rescale), mean, std


def _by_channel(fields: Fields, key: str, default: tuple[float, ...]) -> tuple[float, ...]:
    value = fields.get(key)
    if value is None:
        return default
    values = value if isinstance(value, list) else [value] * len(default)
    if len(values) != len(default) or not all(_is_number(each) for each in values):
        raise fields.wrong(key, value, f"{len(default)} numbers")
    return tuple(float(each) for each in values)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _pixels(fields: Fields, least: int, most: int) -> tuple[int, int]:
    """The least and most pixels: min_pixels and max_pixels, there or in `size`, where they may also be called edges."""
    size = fields.get("size")
    if size is not None and not isinstance(size, dict):
        raise fields.wrong("size", size, "an object")
    least = _bound(fields, size or {}, ("min_pixels", "shortest_edge"), least)
    most = _bound(fields, size or {}, ("max_pixels", "longest_edge"), most)
    if least > most:
        raise ModelError(
            f"{fields.where}: at least {least} and at most {most} pixels; expected the first to be smaller"
        )
    return least, most


def _bound(fields: Fields, size: dict[str, Any], names: tuple[str, str], default: int) -> int:
    if fields.get(names[0]) is not None:
        return fields.integer(names[0])
    inner = Fields(size, f"{fields.where}: size")
    name = next((each for each in reversed(names) if size.get(each) is not None), names[0])
    return inner.integer(name, default, null=default)
