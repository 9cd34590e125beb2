"""Grids hold the patches that the models' own processors make."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("av", reason="the package av is missing: pip install 'faser[vision]'")

from faser.errors import InvalidRequest
from faser.media.grids import picture_grid, smart_resize, video_bounds, video_grids
from faser.media.options import PictureOptions
from faser.media.video import VideoFrames
from faser.vision import Grid
from tests.media.clips import SETTINGS, noise

SIZES = [(56, 56), (30, 40), (100, 37), (333, 517), (5, 7), (800, 20), (1, 1), (224, 224)]


@pytest.fixture(scope="module")
def processor():
    module = pytest.importorskip("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl")
    size = {"shortest_edge": SETTINGS.min_pixels, "longest_edge": SETTINGS.max_pixels}
    return module.Qwen2VLImageProcessorPil(size=size)


def pixel_values(grid: Grid, processor) -> np.ndarray:
    """[patches, channels * frames * patch_size²], normalised as the encoder will."""
    frames = np.broadcast_to(grid.patches, (*grid.patches.shape[:2], 2, *grid.patches.shape[3:]))
    mean, std = (np.array(v).reshape(1, 3, 1, 1, 1) for v in (processor.image_mean, processor.image_std))
    return ((frames / 255 - mean) / std).reshape(len(frames), -1)


def frames_of(*pictures: np.ndarray) -> VideoFrames:
    return VideoFrames(np.stack(pictures), np.arange(len(pictures)) / 2, 2.0)


@pytest.mark.parametrize("size", SIZES)
def test_a_picture_becomes_the_pixel_values_of_transformers(processor, size):
    pixels = noise(*size)
    right = processor(pixels, return_tensors="np", input_data_format="channels_last")
    grid = picture_grid(pixels, SETTINGS)
    assert [1, grid.height, grid.width] == right["image_grid_thw"][0].tolist()
    assert np.abs(pixel_values(grid, processor) - right["pixel_values"]).max() < 1e-5  # a step of uint8 is 1.4e-2


@pytest.mark.parametrize("num_frames", [1, 2, 5, 6])
def test_a_video_becomes_the_pixel_values_of_its_frames_in_pairs(processor, num_frames):
    pictures = [noise(100, 130, seed) for seed in range(num_frames)]
    settings = dataclasses.replace(SETTINGS, video_max_pixels=SETTINGS.max_pixels)
    grids = video_grids(frames_of(*pictures), settings)
    right = processor(pictures, return_tensors="np", input_data_format="channels_last")
    # [frames, patches, channels, 2 equal frames, pixels]
    single = right["pixel_values"].reshape(num_frames, -1, 3, 2, 14 * 14)[:, :, :, 0]
    single = np.concatenate([single, single[-1:]])
    assert len(grids) == (num_frames + 1) // 2
    for i, grid in enumerate(grids):
        pair = np.stack([single[2 * i], single[2 * i + 1]], axis=2)
        assert np.abs(pixel_values(grid, processor) - pair.reshape(len(pair), -1)).max() < 1e-5


def test_the_last_frame_fills_the_last_grid():
    grids = video_grids(frames_of(*(noise(56, 56, seed) for seed in range(3))), SETTINGS)
    assert len(grids) == 2
    assert np.array_equal(grids[1].patches[:, :, 0], grids[1].patches[:, :, 1])
    assert not np.array_equal(grids[0].patches[:, :, 0], grids[0].patches[:, :, 1])


def test_patches_lie_group_by_group():
    pixels = np.zeros((56, 84, 3), dtype=np.uint8)
    pixels[28 + 14 : 56, 56 : 56 + 14] = (1, 2, 3)  # group 5 of 2 × 3, its lower left patch
    patches = picture_grid(pixels, SETTINGS).patches
    assert patches.shape == (24, 3, 1, 14, 14)
    assert patches[5 * 4 + 2].reshape(3, -1).T.tolist() == [[1, 2, 3]] * 196
    assert patches.any(axis=(1, 2, 3, 4)).sum() == 1


def test_kept_groups_are_those_of_the_whole_grid():
    pixels = noise(84, 84)
    kept = np.array([0, 4, 7])
    whole, some = picture_grid(pixels, SETTINGS), picture_grid(pixels, SETTINGS, kept=kept)
    assert some.num_tokens == 3
    assert (some.height, some.width) == (whole.height, whole.width)
    assert np.array_equal(some.patches.reshape(3, 4, -1), whole.patches.reshape(9, 4, -1)[kept])
    first, second = video_grids(frames_of(pixels, pixels, pixels), SETTINGS, kept=[None, kept])
    assert (first.num_tokens, second.num_tokens) == (9, 3)


# ---- sizes ----


@given(st.integers(1, 5000), st.integers(1, 5000), st.integers(1, 64), st.integers(0, 64))
def test_sizes_are_multiples_within_the_bounds(height, width, fewest, more):
    factor = SETTINGS.factor
    if max(height, width) > 200 * min(height, width):
        return
    new = smart_resize(height, width, factor, fewest * factor**2, (fewest + more) * factor**2)
    assert all(side >= factor and side % factor == 0 for side in new)
    if more > 3 * fewest and 4 * min(height, width) > max(height, width):
        assert fewest <= new[0] * new[1] / factor**2 <= fewest + more


@given(st.integers(1, 3000), st.integers(1, 3000))
def test_sizes_are_those_of_transformers(height, width):
    module = pytest.importorskip("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl")
    if max(height, width) > 200 * min(height, width):
        return
    bounds = (56 * 56, 28 * 28 * 1280)
    assert smart_resize(height, width, 28, *bounds) == module.smart_resize(height, width, 28, *bounds)


def test_a_stripe_is_refused():
    with pytest.raises(InvalidRequest, match=r"201 × 1 pixels.*200 times"):
        picture_grid(np.zeros((1, 201, 3), dtype=np.uint8), SETTINGS)


def test_options_shrink_and_never_exceed_the_model():
    pixels = noise(224, 224)
    assert picture_grid(pixels, SETTINGS).num_tokens == 64
    assert picture_grid(pixels, SETTINGS, PictureOptions(max_pixels=28 * 28 * 16)).num_tokens == 16
    assert picture_grid(pixels, SETTINGS, PictureOptions(max_pixels=28 * 28)).num_tokens == 1
    assert picture_grid(noise(28, 28), SETTINGS, PictureOptions(min_pixels=28 * 28 * 16)).num_tokens == 16
    for options in (PictureOptions(max_pixels=28 * 28 * 65), PictureOptions(min_pixels=28 * 28 * 65)):
        with pytest.raises(InvalidRequest, match="expected at most"):
            picture_grid(pixels, SETTINGS, options)


def test_frames_of_a_long_video_share_a_bound():
    low, high = SETTINGS.video_min_pixels, SETTINGS.video_max_pixels
    assert video_bounds(SETTINGS, None) == (low, high)
    assert video_bounds(SETTINGS, None, 2 * high) == (low, high)
    assert video_bounds(SETTINGS, None, high // 2) == (low, high // 2)
    assert video_bounds(SETTINGS, None, 1) == (low, int(low * 1.05))
