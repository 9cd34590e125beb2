"""Answers about a video, window by window: the windows, the answers, and that each frame is encoded once."""

from __future__ import annotations

import gc
import io
import json
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("av", reason="the package av is missing: pip install 'faser[vision]'")

from faser import LLM, SamplingParams
from faser.cli.main import main
from faser.errors import ConfigError
from faser.media.media import MediaPrompt
from faser.media.options import PictureOptions
from faser.media.reader import FrameReader
from faser.request import RequestOutput
from faser.watch import VideoWatcher, VideoWindow, WatchOptions, frame_bounds, windows
from tests.media.clips import SETTINGS, clip
from tests.server.seeing import write_seeing_checkpoint

QUESTION = "How many are moving?"
PARAMS = SamplingParams(max_tokens=10, ignore_eos=True, temperature=1.0, seed=5)


def read(num_frames: int = 30, **options) -> FrameReader:
    return FrameReader(io.BytesIO(clip(num_frames, **options)))


def windows_of(num_frames: int, options: WatchOptions, rate: int = 10) -> list[VideoWindow]:
    return list(windows(read(num_frames, rate=rate), SETTINGS, options))


# ── windows ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_windows_overlap_and_move_by_the_stride():
    found = windows_of(30, WatchOptions(8, 4, fps=10))
    assert [round(10 * window.start) for window in found] == [0, 4, 8, 12, 16, 20, 22]
    assert [round(10 * window.end) for window in found] == [7, 11, 15, 19, 23, 27, 29]
    assert all(window.media.num_frames == 8 for window in found)
    assert all(window.media.seconds_per_grid == 0.2 for window in found)


def test_consecutive_windows_share_their_grids():
    first, second, *_ = windows_of(30, WatchOptions(8, 4, fps=10))
    assert [id(grid) for grid in first.media.grids[2:]] == [id(grid) for grid in second.media.grids[:2]]


def test_frames_are_sampled_and_a_slow_video_gives_all_it_has():
    (window,) = windows_of(30, WatchOptions(4, 4, fps=1))
    assert (window.media.num_frames, window.media.seconds_per_grid) == (3, 2.0)
    slow = windows_of(8, WatchOptions(4, 4, fps=100))
    assert [window.media.seconds_per_grid for window in slow] == [0.2, 0.2]


@pytest.mark.parametrize("num_frames", [1, 2, 3, 7])
def test_a_video_shorter_than_a_window_makes_one_window(num_frames):
    (window,) = windows_of(num_frames, WatchOptions(8, 2, fps=10))
    assert window.media.num_frames == num_frames
    assert len(window.media.grids) == -(-num_frames // 2)


def test_no_frame_is_left_out_and_a_window_is_not_repeated():
    found = windows_of(12, WatchOptions(4, 4, fps=10))
    assert [window.media.num_frames for window in found] == [4, 4, 4]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (WatchOptions(window=7), "window=7: expected a multiple of 2"),
        (WatchOptions(stride=0), "stride=0: expected a multiple of 2"),
        (WatchOptions(window=4, stride=6), "stride=6: expected at most the window"),
        (WatchOptions(fps=0.0), "fps=0.0: expected 0.001 to 1000"),
        (WatchOptions(fps=1e-39), "fps=1e-39: expected 0.001 to 1000"),
        (WatchOptions(fps=float("nan")), "fps=nan: expected 0.001 to 1000"),
    ],
)
def test_what_cannot_be_watched_is_refused(options, says):
    with pytest.raises(ConfigError, match=says):
        options.check(2)


# ── answers ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("seeing")
    write_seeing_checkpoint(folder)
    return folder


@pytest.fixture
def llm(folder):
    with LLM(str(folder), max_running=2, num_pages=64) as llm:
        yield llm


def answer_alone(llm: LLM, window: VideoWindow) -> RequestOutput:
    prompt = llm.chat_prompt([{"role": "user", "content": [{"type": "video"}, {"type": "text", "text": QUESTION}]}])
    return llm.generate(MediaPrompt(prompt, [window.media]), PARAMS)[0]


def blocks(i: int, height: int, width: int) -> np.ndarray:
    """A frame of random blocks, another one for each number."""
    small = np.random.default_rng(i).integers(0, 256, (height // 8, width // 8, 3), dtype=np.uint8)
    return small.repeat(8, axis=0).repeat(8, axis=1)


def test_answers_are_those_of_whole_windows_and_each_grid_is_encoded_once(llm, folder):
    options = WatchOptions(8, 4, fps=10)
    answers = list(VideoWatcher(llm, QUESTION, options, PARAMS).watch(read(24, draw=blocks)))
    assert [answer.grids_encoded for answer in answers] == [4, 2, 2, 2, 2]
    assert [answer.grids_found for answer in answers] == [0, 2, 2, 2, 2]
    with LLM(str(folder), prefix_caching=False) as other:
        for answer, window in zip(answers, windows(read(24, draw=blocks), llm.vision_settings, options), strict=True):
            other.engine.scheduler.vision.grids.clear()
            assert answer.text == answer_alone(other, window).text
    assert len({answer.text for answer in answers}) > 1


def test_speculation_changes_no_answer(llm, folder):
    def answers(some: LLM) -> list[str]:
        greedy = replace(PARAMS, temperature=0.0)
        return [each.text for each in VideoWatcher(some, QUESTION, WatchOptions(4, 2, 10), greedy).watch(read(12))]

    with LLM(str(folder), draft="ngram", policy="fixed:3") as drafting:
        assert answers(drafting) == answers(llm)
        assert drafting.stats.drafted > 0


def test_kv_reuse_computes_less_and_anchors_again(llm):
    options = WatchOptions(8, 2, fps=10, kv_reuse=True)
    answers = list(VideoWatcher(llm, QUESTION, options, PARAMS).watch(read(30, draw=blocks)))
    per_grid = answers[0].num_tokens // 4
    # 15 grids, of which 0 and 8 are anchors: windows 6 to 8 take one grid less over
    assert [answer.reuse.num_tokens // per_grid for answer in answers] == [0, 3, 3, 3, 3, 3, 2, 2, 2, 3, 3, 3]
    assert answers[-1].reuse.num_checks == 1
    assert len(llm.engine.scheduler.retained) == 0, "the context is given up at the end"


def test_reuse_stops_where_answers_differ_too_often(llm, monkeypatch):
    monkeypatch.setattr("faser.watch.CHECKED_WINDOWS", 1)
    monkeypatch.setattr("faser.watch.MAX_DIFFERING", -1.0)
    options = WatchOptions(8, 2, fps=10, kv_reuse=True)
    answers = list(VideoWatcher(llm, QUESTION, options, PARAMS).watch(read(30, draw=blocks)))
    assert [answer.reuse.is_on for answer in answers] == [True] * 4 + [False] * 8
    assert [answer.reuse.num_checks for answer in answers] == [0, 1, 2, 3] + [4] * 8
    exact = list(VideoWatcher(llm, QUESTION, replace(options, kv_reuse=False), PARAMS).watch(read(30, draw=blocks)))
    assert [a.text for a in answers[5:]] == [a.text for a in exact[5:]]


def test_frames_are_no_larger_than_the_models_own_tools_take_them():
    wide = replace(SETTINGS, video_max_pixels=28 * 28 * 16384)
    assert frame_bounds(wide, WatchOptions())[1] == 768 * 28 * 28
    assert frame_bounds(wide, WatchOptions(pictures=PictureOptions(max_pixels=10**6)))[1] == 10**6
    assert frame_bounds(SETTINGS, WatchOptions())[1] == SETTINGS.video_max_pixels


def test_stages_are_measured(llm):
    (answer,) = VideoWatcher(llm, QUESTION, WatchOptions(8, 8, fps=10), PARAMS).watch(read(8))
    stages = answer.seconds
    assert min(stages.decode, stages.encode, stages.prefill, stages.answer) > 0
    assert answer.num_tokens == sum(grid.num_tokens for grid in next(iter(windows_for(llm))).media.grids)


def windows_for(llm: LLM) -> list[VideoWindow]:
    return list(windows(read(8), llm.vision_settings, WatchOptions(8, 8, fps=10)))


def test_memory_is_flat_over_a_thousand_windows(folder):
    """Grids that no window needs any more are forgotten, by the watcher and by the engine."""
    with LLM(str(folder), num_pages=64, vision_memory=24 * 16 * 48 * 4) as llm:
        watcher = VideoWatcher(llm, QUESTION, WatchOptions(4, 2, fps=10), replace(PARAMS, max_tokens=1))
        long = read(2002, draw=lambda i, h, w: np.full((h, w, 3), i % 251, dtype=np.uint8), size=(32, 32))
        sizes = []
        tracemalloc.start()
        for answer in watcher.watch(long):
            if answer.number in (300, 999):
                gc.collect()  # garbage in cycles is up to a megabyte, and goes when the collector happens to run
                sizes.append(tracemalloc.get_traced_memory()[0])
        tracemalloc.stop()
        assert answer.number == 999
        assert len(llm.engine.scheduler.vision.grids) <= 24
        assert sizes[1] - sizes[0] < 200_000, "bytes between the 300th window and the last"


# ── the command ──────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def video(tmp_path):
    file = tmp_path / "clip.mp4"
    file.write_bytes(clip(12, draw=blocks))
    return file


def test_the_command_prints_a_line_for_each_window(folder, video, capsys):
    options = ["--model", str(folder), "--window", "4", "--stride", "4", "--fps", "10", "--max-tokens", "4"]
    assert main(["watch", str(video), QUESTION, *options]) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert [line.strip().split("  ")[0] for line in lines] == ["0.0 to 0.3 s", "0.4 to 0.7 s", "0.8 to 1.1 s"]
    assert all("ms; 2 of 2 grids encoded]" in line for line in lines)
    assert "3 windows; median of each stage: decode" in err


def test_the_command_prints_json_for_machines(folder, video, capsys):
    options = ["--model", str(folder), "--window", "4", "--stride", "2", "--fps", "10", "--json", "--max-tokens", "4"]
    assert main(["watch", str(video), QUESTION, *options, "--kv-reuse"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [each["number"] for each in found] == [0, 1, 2, 3, 4]
    assert [each["grids_encoded"] for each in found] == [2, 1, 1, 1, 1]
    assert set(found[0]["milliseconds"]) == {"decode", "encode", "prefill", "answer"}
    assert found[2]["reuse"]["num_tokens"] == found[2]["num_tokens"] // 2


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["no such file.mp4", QUESTION], "cannot be read"),
        ([__file__, QUESTION], "video of an unknown format"),
    ],
)
def test_the_command_refuses_what_is_no_video(folder, arguments, says, capsys):
    assert main(["watch", *arguments, "--model", str(folder)]) == 1
    assert says in capsys.readouterr().err


def test_the_command_says_where_a_video_has_no_frame(folder, tmp_path, capsys):
    data = clip(12)
    start = data.index(b"mdat") + 4
    file = tmp_path / "empty.mp4"
    file.write_bytes(data[:start] + bytes(2000) + data[start + 2000 :])
    assert main(["watch", str(file), QUESTION, "--model", str(folder)]) == 1
    assert "faser: video " in capsys.readouterr().err


def test_the_command_refuses_a_model_without_eyes(video, capsys):
    assert main(["watch", str(video), QUESTION]) == 1
    assert "the model cannot see" in capsys.readouterr().err
