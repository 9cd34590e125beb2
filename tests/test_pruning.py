"""Pruned windows: what their grids keep, that an exact twin answers alike, and that answers tell the rule."""

from __future__ import annotations

import io
import json
import math
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

pytest.importorskip("av", reason="the package av is missing: pip install 'faser[vision]'")

from faser import LLM, SamplingParams
from faser.cli.main import main
from faser.errors import ConfigError, InvalidRequest
from faser.llm import MediaPrompt
from faser.media.pruning import DifferencePruner, PruningOptions, group_differences
from faser.media.reader import FrameReader
from faser.vision import Grid
from faser.watch import VideoWatcher, WatchOptions, WindowAnswer, windows
from tests.media.clips import noise
from tests.media.scenes import VISION, Sprite, encode, scene
from tests.server.seeing import write_seeing_checkpoint

QUESTION = "How many are moving?"
PARAMS = SamplingParams(max_tokens=6, ignore_eos=True, temperature=1.0, seed=5)
SMALL = replace(VISION, video_max_pixels=112 * 112)  # 4 × 4 groups
MOVER = Sprite(20, 40, 10, 0, 11, side=96)
CODEC = PruningOptions(rule="codec", refresh=math.inf)
DIFFERENCE = PruningOptions(rule="difference", refresh=math.inf)


@cache
def video(codec: str = "libx264", kind: str = "mp4", gop: int = 16, num_frames: int = 32) -> bytes:
    return encode(scene([MOVER]), num_frames, codec=codec, kind=kind, gop=gop)


def read(*args: object) -> FrameReader:
    return FrameReader(io.BytesIO(video(*args)))


def grids(
    reader: FrameReader, pruning: PruningOptions, window: int = 2, stride: int = 2, fps: float = 10
) -> list[Grid]:
    """Each grid once, in the order of time."""
    options = WatchOptions(window, stride, fps, pruning=pruning)
    found = {id(grid): grid for each in list(windows(reader, SMALL, options)) for grid in each.media.grids}
    return list(found.values())


def whole(found: list[Grid]) -> list[int]:
    return [i for i, grid in enumerate(found) if grid.kept is None]


# ---- which groups ----


def test_a_grid_keeps_what_moves_and_whole_ones_have_an_i_frame():
    found = grids(read(), CODEC)
    assert whole(found) == [0, 8]
    rows = [set(grid.kept // 4) for grid in found if grid.kept is not None]
    assert all({0} <= row <= {0, 1} for row in rows), "the sprite is in the upper part"


def test_anchors_are_whole_grids_and_not_those_in_which_everything_changed():
    everything = PruningOptions(rule="codec", refresh=math.inf, tau=1e-9)
    found = list(windows(read("libx264", "mp4", 16), SMALL, WatchOptions(2, 2, 10, pruning=everything)))
    anchors = [i for i, each in enumerate(found) if each.is_anchor.all()]
    assert anchors == [0, 8], "those with an I-frame"
    unpruned = list(windows(read("libx264", "mp4", 16), SMALL, WatchOptions(2, 2, 10)))
    assert [i for i, each in enumerate(unpruned) if each.is_anchor.all()] == [0, 8], "one grid in eight"


def test_a_grid_is_cut_from_the_stream_alone_whatever_the_windows():
    names = [[grid.name for grid in grids(read(), CODEC, *shape)] for shape in ((2, 2), (8, 2), (16, 16))]
    assert names[0] == names[1] == names[2]


def test_patches_of_a_pruned_grid_are_those_of_the_whole_one():
    for pruned, full in zip(grids(read(), CODEC), grids(read(), PruningOptions()), strict=True):
        patches = full.patches.reshape(full.num_groups, -1)[pruned.groups]
        assert np.array_equal(pruned.patches.reshape(len(patches), -1), patches)


def test_motion_between_sampled_frames_counts():
    """Frames 0, 5, 10, 15 are sampled; the sprite moves in frames 6 to 8 alone."""
    draw = scene([Sprite(20, 40, 20, 0, 11, side=96, first=6, last=8)])
    reader = FrameReader(io.BytesIO(encode(draw, 20, gop=100)))
    first, second = grids(reader, CODEC, fps=2)
    assert first.kept is None
    assert 2 <= len(second.kept) <= 8


def test_an_i_frame_that_is_not_sampled_makes_the_next_grid_whole():
    """Sampled: 0, 5 | 10, 15 | 20, 25. Frame 12 is an I-frame, and so is frame 24."""
    assert whole(grids(read("libx264", "mp4", 12), CODEC, fps=2)) == [0, 1, 2]
    assert whole(grids(read("libx264", "mp4", 12, 24), CODEC, fps=2)) == [0, 1]
    assert whole(grids(read("libx264", "mp4", 28), CODEC, fps=2)) == [0, 3]


@pytest.mark.parametrize("rule", ["codec", "difference"])
def test_a_refresh_shows_everything_and_starts_anew(rule):
    draw = scene([replace(MOVER, last=5)])
    found = grids(FrameReader(io.BytesIO(encode(draw, gop=100))), PruningOptions(rule=rule, refresh=0.8))
    assert whole(found) == [0, 4, 8, 12], "grids are 0.2 seconds apart"
    assert len(found[3].kept) > 2 >= len(found[5].kept), "what stood still before the refresh is no longer kept"


def test_every_window_as_long_as_the_refresh_has_a_whole_grid():
    found = grids(read("libx264", "mp4", 100), PruningOptions(rule="codec", refresh=0.8))
    assert all(whole(found[i : i + 4]) for i in range(len(found) - 3))


# ---- pixels ----


def test_differences_are_means_over_a_group():
    before = noise(56, 84) // 2
    after = before.copy()
    after[30:40, 60:70] += 50
    expected = np.zeros((2, 3))
    expected[1, 2] = 50 * 100 / 28**2
    assert np.allclose(group_differences(before, after, 28), expected)


def test_a_difference_at_the_threshold_counts_and_stays():
    pruner = DifferencePruner(replace(DIFFERENCE, threshold=6.0), SMALL)
    black = np.zeros((56, 56, 3), np.uint8)
    brighter, slightly = black.copy(), black.copy()
    brighter[:28, 28:] = 6
    slightly[28:, :28] = 5
    pruner.see(black)
    assert pruner.kept(0.0) is None
    for frame in (brighter, brighter, slightly + brighter):
        pruner.see(frame)
        assert pruner.kept(1.0).tolist() == [1]


# ---- which rule was used ----


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("seeing")
    write_seeing_checkpoint(folder)
    return folder


@pytest.fixture(scope="module")
def llm(folder):
    with LLM(str(folder), max_running=2, num_pages=64) as llm:
        yield llm


def watch(llm: LLM, pruning: PruningOptions, *args: object, params: SamplingParams = PARAMS) -> list[WindowAnswer]:
    options = WatchOptions(8, 4, fps=10, pruning=pruning)
    return list(VideoWatcher(llm, QUESTION, options, params).watch(read(*args)))


@pytest.mark.parametrize(("codec", "kind"), [("libx265", "mp4"), ("mpeg4", "avi")])
def test_codecs_without_vectors_fall_back_to_pixels_and_say_so(llm, codec, kind):
    fallen = watch(llm, CODEC, codec, kind)
    asked = watch(llm, DIFFERENCE, codec, kind)
    assert {answer.pruning for answer in fallen} == {"difference"}
    assert [answer.text for answer in fallen] == [answer.text for answer in asked]
    assert fallen[-1].kept < 0.8


def test_answers_tell_the_rule_and_the_share(llm):
    for pruning in (CODEC, DIFFERENCE):
        answers = watch(llm, pruning)
        assert {answer.pruning for answer in answers} == {pruning.rule}
        assert all(answer.kept == answer.num_tokens / (4 * 16) for answer in answers)
        assert min(answer.kept for answer in answers) < 0.5
    plain = watch(llm, PruningOptions())
    assert {(answer.pruning, answer.kept, answer.num_tokens) for answer in plain} == {("none", 1.0, 64)}


# ---- answers ----


@pytest.mark.parametrize("pruning", [CODEC, DIFFERENCE])
def test_pruned_answers_are_those_of_windows_served_alone_and_each_grid_is_encoded_once(llm, folder, pruning):
    llm.engine.scheduler.vision.grids.clear()
    answers = watch(llm, pruning)
    assert [answer.grids_encoded for answer in answers] == [4, 2, 2, 2, 2, 2, 2]
    prompt = llm.chat_prompt([{"role": "user", "content": [{"type": "video"}, {"type": "text", "text": QUESTION}]}])
    options = WatchOptions(8, 4, fps=10, pruning=pruning)
    with LLM(str(folder), prefix_caching=False) as alone:
        for answer, window in zip(answers, windows(read(), llm.vision_settings, options), strict=True):
            alone.engine.scheduler.vision.grids.clear()
            (twin,) = alone.generate(MediaPrompt(prompt, [window.media]), PARAMS)
            assert answer.text == twin.text
    assert [answer.text for answer in answers] != [answer.text for answer in watch(llm, PruningOptions())]


def test_speculation_changes_no_pruned_answer(llm, folder):
    greedy = SamplingParams(max_tokens=24, ignore_eos=True, temperature=0.0)
    with LLM(str(folder), draft="ngram", policy="fixed:3") as drafting:
        found = [answer.text for answer in watch(drafting, CODEC, params=greedy)]
        assert drafting.stats.drafted > 0
    assert found == [answer.text for answer in watch(llm, CODEC, params=greedy)]


# ---- users ----


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"rule": "motion"}, "pruning 'motion': expected one of none, codec, difference"),
        ({"tau": 0.0}, "tau=0.0: expected a positive number"),
        ({"tau": math.nan}, "tau=nan"),
        ({"threshold": -1.0}, "threshold=-1.0"),
        ({"refresh": 0.0}, "refresh=0.0: expected a positive number of seconds"),
    ],
)
def test_settings_out_of_range_are_refused(options, says):
    with pytest.raises(ConfigError, match=says):
        PruningOptions(**options)


@pytest.mark.parametrize("rule", ["none", "codec", "difference"])
def test_a_video_that_changes_its_size_between_grids_is_refused(rule):
    small = lambda i: np.ascontiguousarray(scene([MOVER])(i)[:224])  # noqa: E731
    data = encode(scene([MOVER]), 4, kind="h264") + encode(small, 4, kind="h264")
    with pytest.raises(InvalidRequest, match="change their size"):
        grids(FrameReader(io.BytesIO(data)), PruningOptions(rule=rule), fps=25)


def test_the_command_prunes_and_reports_it(folder, tmp_path, capsys):
    file = tmp_path / "clip.mp4"
    file.write_bytes(video())
    options = ["--model", str(folder), "--window", "8", "--stride", "8", "--fps", "10", "--max-tokens", "2"]
    options += ["--pruning", "codec", "--tau", "1", "--refresh", "inf"]
    assert main(["watch", str(file), QUESTION, *options]) == 0
    assert all("% of patches kept by codec]" in line for line in capsys.readouterr().out.splitlines())
    assert main(["watch", str(file), QUESTION, *options, "--json"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {each["pruning"] for each in found} == {"codec"}
    assert 0 < found[1]["kept"] < 0.5
