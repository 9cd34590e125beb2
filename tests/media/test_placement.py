"""Placeholders become tokens, and positions are those the models were trained with."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("av", reason="the package av is missing: pip install 'faser[vision]'")

from faser.errors import InvalidRequest
from faser.media.media import Media
from faser.media.placement import place_media
from faser.vision import Grid
from tests.media.clips import SETTINGS

I, V = SETTINGS.image_token_id, SETTINGS.video_token_id
TIMED = dataclasses.replace(SETTINGS, positions_per_second=2.0)


def grid(rows: int, columns: int, kept: list[int] | None = None) -> Grid:
    num_groups = rows * columns if kept is None else len(kept)
    patches = np.zeros((num_groups * 4, 3, 1, 14, 14), dtype=np.uint8)
    return Grid(patches, rows * 2, columns * 2, 2, None if kept is None else np.array(kept))


def image(rows: int, columns: int) -> Media:
    return Media("image", (grid(rows, columns),), None, 1)


def video(num_grids: int, rows: int, columns: int, seconds: float = 1.0) -> Media:
    return Media("video", tuple(grid(rows, columns) for _ in range(num_grids)), seconds, 2 * num_grids)


def transformers_positions(prompt, media, settings) -> np.ndarray:
    """[tokens, 3] from the model's own function, without a model."""
    module = pytest.importorskip("transformers.models.qwen2_5_vl.modeling_qwen2_5_vl")
    torch = pytest.importorskip("torch")
    rate = settings.positions_per_second or 1  # one a grid, where a grid lasts a second
    model = SimpleNamespace(
        config=SimpleNamespace(vision_config=SimpleNamespace(spatial_merge_size=2, tokens_per_second=rate)),
    )
    model.get_vision_position_ids = lambda *given, **named: module.Qwen2_5_VLModel.get_vision_position_ids(
        model, *given, **named
    )
    shapes = {"image": [], "video": []}
    for medium in media:
        first = medium.grids[0]
        shapes[medium.kind].append([len(medium.grids), first.height, first.width])
    ids = torch.tensor([prompt])
    positions, _ = module.Qwen2_5_VLModel.get_rope_index(
        model,
        ids,
        mm_token_type_ids=(ids == I).int() + 2 * (ids == V).int(),
        image_grid_thw=torch.tensor(shapes["image"]) if shapes["image"] else None,
        video_grid_thw=torch.tensor(shapes["video"]) if shapes["video"] else None,
        second_per_grid_ts=torch.tensor([m.seconds_per_grid for m in media if m.kind == "video"]),
    )
    return positions[:, 0].T.numpy()


# ---- tokens ----


def test_each_placeholder_becomes_the_tokens_of_its_medium():
    media = [image(2, 3), video(2, 1, 2)]
    prompt, vision = place_media([5, I, 6, 7, V], media, SETTINGS)
    assert prompt == [5, *[I] * 6, 6, 7, *[V] * 4]
    assert vision.starts.tolist() == [1, 9, 11]
    assert vision.grids == (*media[0].grids, *media[1].grids)
    assert len(vision.positions) == len(prompt)


def test_a_model_without_spatial_positions_counts_tokens():
    settings = dataclasses.replace(SETTINGS, has_spatial_positions=False)
    assert place_media([5, I], [image(2, 2)], settings)[1].positions is None


def test_one_id_may_stand_for_pictures_and_videos():
    settings = dataclasses.replace(SETTINGS, video_token_id=I)
    assert place_media([I, 5, I], [video(1, 1, 1), image(1, 2)], settings)[0] == [I, 5, I, I]


def test_text_alone_keeps_its_positions():
    prompt, vision = place_media([1, 2, 3], [], SETTINGS)
    assert prompt == [1, 2, 3]
    assert (vision.grids, vision.offset) == ((), 0)


@pytest.mark.parametrize(
    ("prompt", "media"),
    [
        ([5], [image(1, 1)]),
        ([I], []),
        ([I, I], [image(1, 1)]),
        ([V], [image(1, 1)]),
        ([I, V], [video(1, 1, 1), image(1, 1)]),
    ],
)
def test_placeholders_and_media_must_agree(prompt, media):
    with pytest.raises(InvalidRequest, match="placeholders"):
        place_media(prompt, media, SETTINGS)


def test_media_count_what_they_cost():
    medium = video(3, 2, 2)
    assert (medium.num_frames, medium.num_patches, medium.num_tokens) == (6, 48, 12)


# ---- positions ----


@pytest.mark.parametrize(
    ("prompt", "media", "settings"),
    [
        ([5, 6, I, 7, 8], [image(3, 2)], SETTINGS),
        ([I, I, 5], [image(1, 4), image(2, 2)], SETTINGS),
        ([5, V, 6, I, 7], [video(3, 2, 4), image(2, 3)], SETTINGS),
        ([5, V, 6], [video(4, 7, 3, 0.5)], TIMED),
        ([5, V, 6, V], [video(5, 8, 3, 0.7), video(3, 6, 2, 1.1)], TIMED),
        ([V], [video(9, 9, 2, 0.33)], TIMED),
    ],
)
def test_positions_are_those_of_transformers(prompt, media, settings):
    """Where pictures follow each other, transformers wants text between them."""
    if prompt[:2] == [I, I]:
        prompt = [I, 4, *prompt[1:]]
    expanded, vision = place_media(prompt, media, settings)
    assert np.array_equal(vision.positions, transformers_positions(expanded, media, settings))


def test_text_behind_a_long_video_begins_behind_its_last_position_in_time():
    """The example of the models' authors: 25 positions a second, grids of 2 s, text at 101. transformers differs."""
    settings = dataclasses.replace(SETTINGS, positions_per_second=25.0)
    media = [video(3, 2, 2, 2.0)]
    expanded, vision = place_media([V, 5, 6], media, settings)
    assert vision.positions[:, 0].tolist() == [0] * 4 + [50] * 4 + [100] * 4 + [101, 102]
    assert vision.positions[:4, 1:].tolist() == [[0, 0], [0, 1], [1, 0], [1, 1]]
    assert vision.positions[-2:].tolist() == [[101] * 3, [102] * 3]
    theirs = transformers_positions(expanded, media, settings)
    assert np.array_equal(theirs[:-2], vision.positions[:-2])
    assert theirs[-2].tolist() == [2, 2, 2]


def test_fractional_seconds_are_rounded_down_only_at_the_end():
    positions = place_media([V], [video(5, 1, 1, 0.75)], TIMED)[1].positions
    assert positions[:, 0].tolist() == [0, 1, 3, 4, 6]


def test_without_times_each_grid_is_one_position():
    assert place_media([V], [video(4, 1, 1, 5.0)], SETTINGS)[1].positions[:, 0].tolist() == [0, 1, 2, 3]


def test_text_behind_does_not_depend_on_what_is_kept():
    whole = Media("video", (grid(3, 4), grid(3, 4)), 1.0, 4)
    some = Media("video", (grid(3, 4, [0]), grid(3, 4, [5, 6])), 1.0, 4)
    _, all_of_it = place_media([9, V, 9], [whole], SETTINGS)
    prompt, part = place_media([9, V, 9], [some], SETTINGS)
    assert prompt == [9, V, V, V, 9]
    kept = [0, 1, 1 + 12 + 5, 1 + 12 + 6, 25]
    assert np.array_equal(part.positions, all_of_it.positions[kept])
    assert part.starts.tolist() == [1, 2]
