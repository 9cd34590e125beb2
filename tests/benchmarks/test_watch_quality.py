"""benchmarks/watch_quality.py: the harness on a tiny model, its arms, its truth and its statistics."""

from __future__ import annotations

import json
import shlex
from collections import Counter
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO

import numpy as np
import pytest
import torch

from benchmarks.lib.watch_arms import (
    CODEC,
    SLIGHT,
    SelectingEncoder,
    StreamSettings,
    changes,
    cut_after,
    keep_most,
    last_window,
    make_stream,
    most_different,
)
from benchmarks.watch_quality import ARMS, TINY, TINY_VISION, Figures, Said, Words, main, mcnemar
from faser.models.vision.encoder import VisionEncoder
from faser.vision import Grid
from tools.watch.questions import Question
from tools.watch.reader import Prompts
from tools.watch.scenes import SceneSettings, plan_scene
from tools.watch.windows import EVALUATION

pytest.importorskip("av")

SIZES = shlex.split("--tiny --side 84 --window 8 --stride 2 --before 3 --gop 8 --things 3 --questions 1")
SETTINGS = StreamSettings(
    scene=SceneSettings(side=84, num_frames=14, max_things=3, held_out=True), window=8, stride=2, gop=8, questions=1,
    vision=TINY_VISION,
)  # fmt: skip


# ---- a whole run ----


@pytest.fixture(scope="module")
def run():
    """The document of a run, and its streams: x264 does not give the same bytes twice."""
    streams, printed = [], StringIO()

    def make(seed, settings):
        streams.append(make_stream(seed, settings))
        return streams[-1]

    with pytest.MonkeyPatch.context() as patch, redirect_stdout(printed):
        patch.setattr("benchmarks.watch_quality.make_stream", make)
        assert main([*SIZES, "--windows", "36", "--batch", "36"]) == 0
    return json.loads(printed.getvalue().splitlines()[-1]), streams


@pytest.fixture
def found(run):
    return run[0]


def test_encode_once_answers_as_dense_does_and_pruning_does_not(found):
    assert found["questions"] == found["windows"] == 36
    assert found["once_differs"] == 0
    assert found["arms"]["once"]["agreement"] == 1
    assert found["arms"][CODEC]["agreement"] < 1, "the model sees"


def test_each_arm_keeps_the_share_that_it_says(run):
    found, streams = run
    kept = {name: arm["kept"] for name, arm in found["arms"].items()}
    windows = [stream.window(CODEC, stream.num_windows - 1)[0] for stream in streams]
    share = sum(each.num_tokens for each in windows) / (36 * 4 * 9)
    assert 0.1 < share < 0.9
    for name in (CODEC, "random", "difference", "after"):
        assert kept[name] == pytest.approx(share), name
    assert kept["dense"] == kept["once"] == 1
    assert share < kept[SLIGHT] < 1
    assert kept["fewer"] == pytest.approx(share, abs=0.5 / 4)
    assert all(kept[f"{rule} reuse"] == kept[f"{rule} reuse bare"] == kept[rule] for rule in ("once", CODEC, "random"))


def test_reuse_takes_tokens_over_and_fewer_with_anchors(found):
    taken = {name: arm["taken_over"] for name, arm in found["arms"].items()}
    assert all((taken[arm.name] > 0) == arm.reuses for arm in ARMS)
    assert taken[f"{CODEC} reuse"] < taken[f"{CODEC} reuse bare"]


def test_pairs_and_kinds_add_up(found):
    assert {(each["arm"], each["other"]) for each in found["pairs"]} >= {("once", "dense"), (CODEC, "random")}
    kinds = set(found["chance"])
    assert all(set(arm["accuracy"]) == kinds for arm in found["arms"].values())
    for pair in found["pairs"]:
        one, other = (found["arms"][pair[name]]["accuracy"]["all"] for name in ("arm", "other"))
        assert pair["points"] == pytest.approx(100 * (one - other))


def test_shares_of_scenes_need_no_model_and_less_noise_is_pruned_more(capsys):
    def kept(noise: str) -> float:
        assert main([*SIZES[1:], "--shares", "--windows", "3", "--noise", noise]) == 0
        found = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert set(found["kept"][CODEC]) == {"crf 20", "crf 26", "crf 32"}
        return sum(found["kept"][CODEC].values())

    assert kept("0.5") < kept("20")


def test_a_model_tiny_or_shares_must_be_given(capsys):
    for arguments in ([], ["--tiny", "--shares"], ["--tiny", "folder"]):
        with pytest.raises(SystemExit):
            main(arguments)
        assert "give a model, --tiny or --shares" in capsys.readouterr().err


# ---- statistics ----


@pytest.mark.parametrize(
    ("alone", "other", "p"),
    [(0, 0, 1.0), (3, 3, 1.0), (5, 0, 2 / 32), (1, 5, 2 * 7 / 64), (8, 1, 2 * 10 / 512), (0, 10, 2 / 1024)],
)
def test_mcnemar_is_exact(alone, other, p):
    assert mcnemar(alone, other) == pytest.approx(p, abs=1e-15)


def test_figures_of_answers_counted_by_hand():
    prompts = Prompts(Words())
    ids = prompts.answer_ids
    questions = [Question("count", "", "3"), Question("count", "", "5"), Question("zone", "", "yes")]
    figures = Figures(prompts, questions)
    answers = {"dense": ("3", "4", "yes"), "codec 1": ("3", "left", "no")}
    for arm, words in answers.items():
        figures.said[arm] = [Said((ids[word], prompts.end), 20, 5, 4, 8) for word in words]
    figures.said["codec 1"][0] = replace(figures.said["codec 1"][0], token_ids=(ids["3"], ids["3"]))
    assert figures.accuracy("dense") == {"count": 0.5, "zone": 1.0, "all": pytest.approx(2 / 3)}
    assert figures.accuracy("codec 1")["all"] == 0, "an answer that goes on is wrong"
    assert figures.chance() == {"count": 0.5, "zone": 1.0, "all": pytest.approx(2 / 3)}
    assert figures.count_error("dense") == (0.5, 0)
    assert figures.count_error("codec 1") == (0.0, 1)
    assert figures.pair("codec 1", "dense") == {
        "alone": 0, "other_alone": 2, "points": pytest.approx(-200 / 3), "p": 0.5,
    }  # fmt: skip
    arm = figures.arm("codec 1")
    assert (arm["kept"], arm["taken_over"], arm["agreement"]) == (0.5, 0.25, 0)


# ---- what the arms show ----


def test_the_last_window_has_the_truth_of_its_frames():
    for seed in range(6):
        plan = plan_scene(SceneSettings(side=84, num_frames=14), seed)
        part = last_window(plan, 8)
        for name in ("boxes", "seen", "exists"):
            assert np.array_equal(getattr(part, name), getattr(plan, name)[6:]), name
        assert np.array_equal(part.moving[1:], plan.moving[7:])
    stream = make_stream(EVALUATION, replace(SETTINGS, questions=4))
    assert len(stream.questions) == 4


def test_pruned_grids_are_whole_where_the_codec_s_are_and_as_large():
    stream = make_stream(EVALUATION + 1, SETTINGS)
    assert stream.is_whole[CODEC].tolist() == [True, False, False, False, True, False, False]
    for rule in ("random", "difference"):
        assert [each.num_tokens for each in stream.grids[rule]] == [each.num_tokens for each in stream.grids[CODEC]]
        assert all(
            grid.kept is None for grid, flag in zip(stream.grids[rule], stream.is_whole[rule], strict=True) if flag
        )
    fewer = stream.fewer()
    assert fewer.grids[-1] is stream.grids["all"][-1], "questions are about the last frame"
    assert fewer.seconds_per_grid * len(fewer.grids) == pytest.approx(4 * stream.seconds_per_grid)


def whole(pixels: np.ndarray) -> Grid:
    """A grid of 2 × 2 groups; pixels [groups, frames] give each a grey."""
    patches = np.repeat(pixels.astype(np.uint8), 4, axis=0)[:, None, :, None, None]
    return Grid(np.broadcast_to(patches, (16, 3, 2, 14, 14)).copy(), 4, 4, 2)


def test_differences_are_the_largest_since_the_last_whole_grid():
    grids = [whole(np.array(each)) for each in (
        [[10, 10], [10, 10], [10, 10], [10, 10]],
        [[10, 10], [15, 15], [10, 10], [10, 10]],
        [[10, 10], [15, 15], [10, 40], [11, 11]],
        [[10, 10], [15, 15], [40, 40], [11, 11]],
    )]  # fmt: skip
    scores = changes(grids, np.array([True, False, False, True]))
    assert scores.tolist() == [[0, 0, 0, 0], [0, 5, 0, 0], [0, 5, 30, 1], [0, 5, 30, 1]]
    assert keep_most(grids[2], scores[2], 2).groups.tolist() == [1, 2]
    anew = changes(grids, np.array([True, False, True, False]))
    assert anew[3].tolist() == [0, 0, 0, 0]


def test_tokens_that_differ_most_are_kept_the_first_grid_first_and_one_of_each():
    tokens = torch.ones(3, 4, 2)
    tokens[1, 2] = torch.tensor([1.0, -1.0])
    tokens[2, 2] = torch.tensor([1.0, -1.0])
    tokens[2, 3] = torch.tensor([-1.0, -1.0])
    kept = [each.tolist() for each in most_different(tokens, 6)]
    assert kept[0] == [0, 1, 2, 3]
    assert kept[1] == [2]
    assert kept[2] == [3]
    assert [each.tolist() for each in most_different(tokens, 2)] == [[0], [2], [3]]


@pytest.mark.parametrize("window_size", [None, 56])
def test_a_grid_that_is_pruned_behind_the_encoder_has_the_tokens_of_the_whole_one(window_size):
    config = TINY.vision
    if window_size is not None:
        config = replace(
            config, kind="qwen2_5_vl", activation="silu", window_size=window_size, full_attention_layers=(1,)
        )
    encoder = VisionEncoder.random(config, 0, std=0.3)
    random = np.random.default_rng(0)
    first, second = (Grid(random.integers(0, 256, (36, 3, 2, 14, 14), np.uint8), 6, 6, 2) for _ in range(2))
    kept = np.array([1, 4, 5, 8])
    with torch.inference_mode():
        right = encoder.encode([first, second])
        selecting = SelectingEncoder.of(encoder)
        pruned = cut_after(second, kept)
        both = selecting.encode_together([first, pruned])
        torch.testing.assert_close(both, torch.cat((right[:9], right[9:][kept])), rtol=1e-5, atol=1e-5)
        assert torch.equal(selecting.encode([pruned]), right[9:][kept])
        assert torch.equal(selecting.encode([first]), right[:9])
    names = Counter(
        each.name for each in (first, second, pruned, cut_after(second, kept), keep_most(second, -np.arange(9.0), 4))
    )
    assert sorted(names.values()) == [1, 1, 1, 2], "equal tokens, and only those, have equal names"
