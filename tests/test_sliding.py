"""KV over a sliding window: exact where nothing has left, the same window at any shift, and approximate otherwise."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from faser.media.media import Media
from faser.media.sliding import PlacedPrompt, SlidingPrompts
from faser.models.transformer import Transformer
from faser.request import Request, SamplingParams
from faser.vision import VisionSettings
from tests.test_exactness import make_engine, reference, serve
from tests.tiny import VISION, VISION_CONFIGS, make_grid, make_vision_model

PROMPT = [5, 6, VISION.video_token_id, 7, 8]
NO_ANCHOR = np.zeros(4, dtype=bool)
PARAMS = SamplingParams(max_tokens=8, ignore_eos=True, logprobs=4)


def settings_of(target: Transformer) -> VisionSettings:
    eyes = target.config.vision
    return VisionSettings(
        patch_size=eyes.patch_size, merge_size=2, frames_per_grid=2, min_pixels=1, max_pixels=10**6, video_min_pixels=1,
        video_max_pixels=10**6, image_token_id=eyes.image_token_id, video_token_id=eyes.video_token_id,
        has_spatial_positions=eyes.has_spatial_positions, positions_per_second=eyes.tokens_per_second,
    )  # fmt: skip


def sliding(target: Transformer, max_positions: int = 128) -> SlidingPrompts:
    return SlidingPrompts(PROMPT, settings_of(target), "s", max_positions)


def video(*grids, seconds_per_grid: float = 1.0) -> Media:
    return Media("video", grids, seconds_per_grid, 2 * len(grids))


def request_of(prompt: PlacedPrompt, name: str = "r") -> Request:
    return Request(
        id=name, prompt_token_ids=tuple(prompt.token_ids), params=PARAMS, seed=1, vision=prompt.vision,
        session=prompt.session, reuse=prompt.reuse,
    )  # fmt: skip


@pytest.fixture(scope="module", params=VISION_CONFIGS)
def target(request) -> Transformer:
    return make_vision_model(request.param)


@pytest.fixture
def grids() -> list:
    return [make_grid(4, 4, seed=i) for i in range(9)]


# ── prompts ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_grid_keeps_its_position_while_it_stays(target, grids):
    prompts = sliding(target)
    seen: dict[int, int] = {}
    for first in range(4):
        prompt = prompts.next(video(*grids[first : first + 4]), NO_ANCHOR, 8)
        positions = prompt.vision.rotary_positions(len(prompt.token_ids))
        for grid, start in zip(prompt.vision.grids, prompt.vision.starts, strict=True):
            assert seen.setdefault(id(grid), positions[start, 0]) == positions[start, 0]


def test_all_but_new_grids_and_anchors_are_taken_over(target, grids):
    prompts = sliding(target)
    assert prompts.next(video(*grids[:4]), NO_ANCHOR, 8).reuse is None
    reuse = prompts.next(video(*grids[1:5]), NO_ANCHOR, 8).reuse
    assert (reuse.starts.tolist(), reuse.ends.tolist(), reuse.sources.tolist()) == ([2], [14], [6])
    reuse = prompts.next(video(*grids[2:6]), np.array([False, True, False, False]), 8).reuse
    assert (reuse.starts.tolist(), reuse.ends.tolist(), reuse.sources.tolist()) == ([2, 10], [6, 14], [6, 14])


def test_a_gap_in_the_stream_begins_anew(target, grids):
    prompts = sliding(target)
    prompts.next(video(*grids[:4]), NO_ANCHOR, 8)
    prompt = prompts.next(video(*grids[5:9]), NO_ANCHOR, 8)
    assert (prompt.reuse, prompt.vision.shift) == (None, 0)
    prompts.forget()
    assert prompts.next(video(*grids[5:9]), NO_ANCHOR, 8).reuse is None


def test_positions_begin_anew_before_they_exceed_the_model(target, grids):
    whole = sliding(target).next(video(*grids[:4]), NO_ANCHOR, 8)
    end = len(whole.token_ids) + 8 + whole.vision.offset
    prompts = sliding(target, max_positions=end + 4)
    shifts = [prompts.next(video(*grids[i : i + 4]), NO_ANCHOR, 8).vision.shift for i in range(6)]
    assert shifts[0] == 0 < shifts[1]
    assert 0 in shifts[1:]


@pytest.mark.parametrize("seconds", [0.3, 0.74, 1.3])
def test_positions_between_grids_are_whole_numbers(grids, seconds):
    target = make_vision_model("qwen2_5_vl")
    prompts = sliding(target)
    first = prompts.next(video(*grids[:4], seconds_per_grid=seconds), NO_ANCHOR, 8).vision
    second = prompts.next(video(*grids[1:5], seconds_per_grid=seconds), NO_ANCHOR, 8).vision
    assert second.shift == first.positions[first.starts[1], 0] - first.positions[first.starts[0], 0] >= 1


# ── answers ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_what_did_not_change_before_a_grid_makes_no_difference(target, grids):
    """Grids are added and none leaves: the KV that is taken over is what would be computed."""
    prompts, engine = sliding(target), make_engine(target)
    for count in (2, 3, 4):
        prompt = prompts.next(video(*grids[:count]), NO_ANCHOR, 8)
        found = serve_one(engine, prompt)
        right = reference(target, [request_of(prompt.exact)])
        assert found.tokens == right.tokens
        assert found.stats["r"].reused == (0 if count == 2 else 4 * (count - 1))


def serve_one(engine, prompt: PlacedPrompt):
    """Serve one window; its session keeps the context."""
    pages = engine.scheduler.target_pages
    engine.add(request_of(prompt))
    tokens, logprobs, stats = [], [], {}
    while engine.has_work:
        for item in engine.step():
            tokens += item.token_ids
            logprobs += item.logprobs or []
            if item.finish is not None:
                stats["r"] = item.finish.stats
    engine.scheduler.check()
    assert pages.num_held > 0
    return Served({"r": tokens}, logprobs, stats)


class Served:
    def __init__(self, tokens, logprobs, stats) -> None:
        self.tokens, self.logprobs, self.stats = tokens, logprobs, stats


def test_a_window_says_the_same_at_any_shift(target, grids):
    """A rotary embedding sees differences of positions alone."""
    prompt = sliding(target).next(video(*grids[:4]), NO_ANCHOR, 8)
    found = []
    for shift in (0, 17, 60):
        moved = replace(prompt.exact, vision=replace(prompt.vision, shift=shift))
        found.append(serve(make_engine(target, prefix_caching=False), [request_of(moved)]))
    assert found[0].tokens == found[1].tokens == found[2].tokens
    for other in found[1:]:
        for mine, theirs in zip(found[0].logprobs["r"], other.logprobs["r"], strict=True):
            assert theirs.logprob == pytest.approx(mine.logprob, abs=1e-3)


def test_a_sliding_window_computes_less_and_stays_near_its_exact_twin(target, grids):
    prompts, engine = sliding(target), make_engine(target, vision_memory=2**20)
    gaps = []
    for first in range(5):
        prompt = prompts.next(video(*grids[first : first + 4]), NO_ANCHOR, 8)
        found = serve_one(engine, prompt)
        right = reference(target, [request_of(prompt.exact)])
        assert found.stats["r"].reused == (12 if first else 0)
        gaps.append(abs(found.logprobs[0].logprob - right.logprobs["r"][0].logprob))
    assert gaps[0] == 0
    assert max(gaps) < 2.0, "random weights attend to everything, so what has left is missed"
    assert engine.stats.grids_encoded == 8


def test_anchors_alone_make_a_window_exact(target, grids):
    """Everything is an anchor: nothing is taken over."""
    prompts, engine = sliding(target), make_engine(target)
    everything = np.ones(4, dtype=bool)
    for first in range(3):
        prompt = prompts.next(video(*grids[first : first + 4]), everything, 8)
        assert prompt.reuse is None
        assert serve_one(engine, prompt).tokens == reference(target, [request_of(prompt.exact)]).tokens


def test_speculation_does_not_change_what_a_session_says(target, grids):
    outputs = []
    for draft, policy in ((None, None), ("ngram", "fixed:3")):
        prompts, engine = sliding(target), make_engine(target, draft, policy)
        outputs.append(
            [serve_one(engine, prompts.next(video(*grids[i : i + 4]), NO_ANCHOR, 8)).tokens for i in range(4)]
        )
    assert outputs[0] == outputs[1]
