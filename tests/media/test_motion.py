"""The mask of motion vectors against scenes whose truth is known, and against vectors that are damaged."""

from __future__ import annotations

import io
from dataclasses import replace
from functools import cache
from itertools import pairwise

import numpy as np
import pytest

pytest.importorskip("av", reason="the package av is missing: pip install 'faser[vision]'")

from faser.media.motion import CELL, ChangedCells, FrameMotion
from faser.media.pruning import CodecPruner, PruningOptions
from faser.media.reader import FrameReader
from tests.media.scenes import RATE, SIZE, SPRITES, VISION, Sprite, encode, scene, texture

BOUNDS = (VISION.video_min_pixels, VISION.video_max_pixels)
SIDE = SIZE // VISION.factor  # groups
VECTOR = np.dtype([(name, np.int32) for name in ("w", "h", "dst_x", "dst_y", "motion_x", "motion_y", "motion_scale")])


@cache
def clip(name: str, preset: str = "medium", crf: int = 23) -> bytes:
    draw = {
        "moving": scene(SPRITES),
        "still": scene([replace(sprite, dx=0, dy=0) for sprite in SPRITES]),
        "cut": lambda i: scene(SPRITES, background=1 if i < 7 else 2)(i),
        "appearing": scene([Sprite(200, 200, 0, 0, 11, side=96, appears=7)]),
        "stopping": scene([Sprite(200, 200, 4, 0, 11, last=5)]),
    }[name]
    return encode(draw, preset=preset, crf=crf)


def motions(data: bytes) -> list[FrameMotion]:
    found: list[FrameMotion] = []
    with FrameReader(io.BytesIO(data)) as reader:
        list(reader.frames_at(1e-3, found.append))
    return found


def frame_masks(data: bytes, tau: float = 1.0) -> list[np.ndarray | None]:
    """[SIDE, SIDE] of each frame as a grid of its own; None: whole."""
    pruner = CodecPruner(PruningOptions(rule="codec", tau=tau, refresh=np.inf), VISION, BOUNDS)
    masks: list[np.ndarray | None] = []
    for i, motion in enumerate(motions(data)):
        pruner.observe(motion)
        kept = pruner.kept(i / RATE)
        mask = np.zeros(SIDE * SIDE, dtype=bool)
        if kept is not None:
            mask[kept] = True
        masks.append(None if kept is None else mask.reshape(SIDE, SIDE))
    return masks


def pixels(mask: np.ndarray) -> np.ndarray:
    return np.kron(mask, np.ones((VISION.factor, VISION.factor), dtype=bool))


# ---- the truth of rendered scenes ----


@pytest.mark.parametrize(("preset", "crf"), [("ultrafast", 23), ("medium", 23), ("medium", 28)])
def test_the_mask_covers_what_moves_and_little_else_whatever_the_encoder(preset, crf):
    seen = total = 0
    kept = []
    for i, mask in enumerate(frame_masks(clip("moving", preset, crf))):
        if mask is not None:
            objects = np.any([sprite.box(i) for sprite in SPRITES], axis=0)
            seen, total = seen + (objects & pixels(mask)).sum(), total + objects.sum()
            kept.append(mask.mean())
    assert seen / total >= 0.95
    assert np.mean(kept) <= 0.25


def test_an_i_frame_keeps_everything_and_a_still_scene_next_to_nothing_else():
    masks = frame_masks(clip("still"))
    assert [i for i, mask in enumerate(masks) if mask is None] == [0, 16]
    assert np.mean([mask.mean() for mask in masks if mask is not None]) < 0.01


def test_a_grid_is_never_empty_and_keeps_its_middle_where_nothing_changed():
    mask = frame_masks(clip("still"))[1]
    assert np.argwhere(mask).tolist() == [[SIDE // 2, SIDE // 2]]


def test_a_hard_cut_without_an_i_frame_keeps_nearly_everything():
    masks = frame_masks(clip("cut"))
    assert masks[6].mean() < 0.25
    assert masks[7] is None or masks[7].mean() > 0.95


@pytest.mark.parametrize(("preset", "latest"), [("ultrafast", 7), ("medium", 10)])
def test_a_thing_that_appears_is_kept_where_it_is_from_the_next_p_frame_on(preset, latest):
    """A B-frame may copy the thing from a later frame, with the vector zero; medium has up to three in a row."""
    data = clip("appearing", preset)
    kinds, masks = [motion.kind for motion in motions(data)], frame_masks(data)
    first = kinds.index("P", 7)
    box = Sprite(200, 200, 0, 0, 11, side=96, appears=7).box(first)
    assert first <= latest
    assert masks[6].mean() < 0.05
    assert (pixels(masks[first]) & box).sum() / box.sum() >= 0.95
    assert masks[first].mean() < 0.25


def test_what_moved_stays_kept_until_the_next_i_frame():
    masks = frame_masks(clip("stopping"))
    stopped = Sprite(200, 200, 4, 0, 11, last=5).box(15)
    for before, after in pairwise(masks[1:16]):
        assert not (before & ~after).any()
    assert (pixels(masks[15]) & stopped).sum() / stopped.sum() >= 0.95
    assert masks[16] is None
    assert masks[31].mean() < 0.01, "it has not moved since the I-frame"


def test_a_greater_tau_keeps_no_more():
    shares = [np.mean([m.mean() for m in frame_masks(clip("moving"), tau) if m is not None]) for tau in (0.25, 1, 2.5)]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] > shares[2]


# ---- sizes ----


def test_vectors_count_in_pixels_of_the_model():
    """A sprite that moves 3 pixels a frame moves 1.5 in a frame of half the size."""
    half = (VISION.video_min_pixels, SIZE * SIZE // 4)
    shares = []
    for tau in (1.25, 2.0):
        pruner = CodecPruner(PruningOptions(rule="codec", tau=tau), VISION, half)
        for motion in motions(encode(scene([Sprite(60, 200, 3, 0, 13)]), 8, preset="ultrafast")):
            pruner.observe(motion)
        shares.append(pruner.changed().mean())
    assert pruner.changed().shape == (SIDE // 2, SIDE // 2)
    assert shares[0] > 0.05 > 0.02 > shares[1]


@pytest.mark.parametrize("turns", [0, 1, 2, 3])
def test_the_mask_is_turned_with_the_frame(turns):
    height, width = 64, 128
    vectors = blocks(height, width)
    vectors["motion_x"][0] = 400  # the upper left block
    pruner = CodecPruner(PruningOptions(rule="codec"), replace(VISION, patch_size=8), (64, 1 << 20))
    for kind in ("I", "P"):
        pruner.observe(FrameMotion(kind, height, width, turns, vectors))
    changed = np.zeros((4, 8), dtype=bool)
    changed[0, 0] = True
    assert np.array_equal(pruner.changed(), np.rot90(changed, turns))


def test_a_clip_of_odd_size_gets_masks():
    draw = lambda i: texture(120, 200, 3)[:100, :170]  # noqa: E731
    found = motions(encode(draw, 4))
    assert {(motion.height, motion.width) for motion in found} == {(100, 170)}
    cells = ChangedCells(100, 170, 1.0, 1.0, 1.0)
    assert cells.cells.shape == (14, 22), "whole macroblocks"
    cells.add(found[1])
    assert cells.cells.mean() < 0.05


# ---- what a reader gives ----


def test_motion_comes_for_every_frame_and_before_it():
    order: list[object] = []
    with FrameReader(io.BytesIO(clip("moving"))) as reader:
        for seconds, _ in reader.frames_at(2.0, lambda motion: order.append(motion.kind)):
            order.append(seconds)
    assert [i for i, each in enumerate(order) if isinstance(each, float)] == [1, 7, 13, 19, 25, 31, 37]
    kinds = "".join(each for each in order if isinstance(each, str))
    assert len(kinds) == 32
    assert [i for i, kind in enumerate(kinds) if kind == "I"] == [0, 16]
    assert set(kinds) == {"I", "P", "B"}


def test_vectors_are_exported_only_when_they_are_asked_for():
    with FrameReader(io.BytesIO(clip("moving"))) as reader:
        assert all(frame.side_data.get("MOTION_VECTORS") is None for _, frame in reader.decoded())


# ---- damage ----


def blocks(height: int, width: int) -> np.ndarray:
    """A vector of zero for each block of 16 × 16 pixels."""
    y, x = np.mgrid[8:height:16, 8:width:16]
    vectors = np.zeros(y.size, dtype=VECTOR)
    vectors["w"] = vectors["h"] = 16
    vectors["dst_x"], vectors["dst_y"], vectors["motion_scale"] = x.ravel(), y.ravel(), 4
    return vectors


def changed(vectors: np.ndarray | None, kind: str = "P", height: int = 64) -> np.ndarray:
    cells = ChangedCells(64, 64, 1.0, 1.0, 1.0)
    cells.add(FrameMotion(kind, height, 64, 0, vectors))
    return cells.cells


def test_blocks_that_stay_are_not_changed_and_a_missing_one_is():
    assert not changed(blocks(64, 64)).any()
    found = changed(blocks(64, 64)[1:])
    assert np.argwhere(found).tolist() == [[0, 0], [0, 1], [1, 0], [1, 1]]
    assert CELL == 8


@pytest.mark.parametrize(
    ("field", "value"),
    [("w", 0), ("w", 255), ("h", 12), ("dst_x", -32768), ("dst_x", 32767), ("dst_y", 9), ("dst_y", 64 + 8),
     ("motion_scale", 0), ("motion_x", -(1 << 31)), ("motion_y", (1 << 31) - 1)],
)  # fmt: skip
def test_a_damaged_vector_keeps_its_area_and_no_other(field, value):
    vectors = blocks(64, 64)
    vectors[field][5] = value
    assert np.argwhere(changed(vectors)).tolist() == [[2, 2], [2, 3], [3, 2], [3, 3]]


@pytest.mark.parametrize("vectors", [None, blocks(64, 64)[:0]])
def test_a_predicted_frame_without_vectors_is_all_new(vectors):
    assert changed(vectors).all()


def test_vectors_that_cannot_be_used_keep_everything():
    assert changed(blocks(64, 64), kind="?").all()
    assert changed(blocks(64, 64), height=128).all()


def test_random_vectors_never_raise():
    random = np.random.default_rng(0)
    for _ in range(50):
        vectors = random.integers(0, 256, 40 * VECTOR.itemsize, dtype=np.uint8).view(VECTOR)
        assert changed(vectors).shape == (8, 8)


def test_damage_in_the_bitstream_keeps_everything_from_there():
    data = bytearray(encode(scene(SPRITES), 12, kind="h264"))
    clean = [motion.kind for motion in motions(bytes(data))]
    at = [i for i in range(len(data) - 4) if data[i : i + 3] == b"\0\0\1" and data[i + 3] & 31 == 1][2]
    data[at + 12 : at + 40] = bytes(28 * [255])
    damaged = motions(bytes(data))
    assert "?" not in clean
    assert "?" in [motion.kind for motion in damaged]
    pruner = CodecPruner(PruningOptions(rule="codec"), VISION, BOUNDS)
    for motion in damaged:
        pruner.observe(motion)
    assert pruner.changed().all()
