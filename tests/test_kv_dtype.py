"""Keys and values as 8-bit floats (`--kv-dtype fp8`): room for more tokens, and still no effect of speculation.

Every run is compared, token for token, with each request served alone under policy off, its KV rounded too.
"""

from __future__ import annotations

import pytest
import torch

from faser.config import EngineOptions
from faser.engine.residency import Place
from faser.errors import ConfigError
from faser.policy import Fixed
from faser.request import FinishReason, Request, SamplingParams
from faser.runtime.kv_cache import KvFormat, bytes_per_page
from faser.runtime.profiling.saved import describe, path_of
from tests import test_vision
from tests.oracle import RandomLengths, RandomStops
from tests.test_exactness import Immovable, assert_equal, make_engine, make_requests, move_at_random, reference, serve
from tests.test_sliding import NO_ANCHOR, serve_one, sliding, video
from tests.tiny import make_draft, make_grid, make_head, make_model, make_vision_model


@pytest.fixture(scope="module")
def pair():
    target = make_model("qwen2")
    target.kv_scales = ((0.5, 0.02), (0.03, 1.5), (0.01, 0.7))
    requests = make_requests(target.config)
    return target, make_draft(target), requests, reference(target, requests, kv_dtype="fp8")


RUNS = {
    "fixed": ("model", lambda: Fixed(4), {}),
    "stops anywhere": ("model", RandomStops, {}),
    "prompt lookup": ("ngram", lambda: Fixed(4), {}),
    "a head": ("eagle3", lambda: Fixed(3), {}),
    "a block head": ("dspark", RandomLengths, {"num_pages": 30}),
    "pieces of prompts": ("model", RandomLengths, {"max_batch_tokens": 9}),
    "preemption": ("model", RandomLengths, {"num_pages": 24}),
    "early exit": ("model", lambda: Fixed(4), {"early_exit": "on"}),
    "overlap": ("model", lambda: Fixed(3), {"overlap": "on"}),
}


@pytest.mark.parametrize("run", RUNS)
def test_rounded_keys_and_values_let_no_output_depend_on_speculation(pair, run):
    target, draft, requests, right = pair
    kind, policy, sizes = RUNS[run]
    drafts = {"model": draft, "ngram": "ngram"}.get(kind) or make_head(target, kind)
    outcome = serve(make_engine(target, drafts, policy(), kv_dtype="fp8", **sizes), requests)
    assert_equal(outcome, right)
    assert outcome.total.drafted > 20


def test_rounding_changes_the_output(pair):
    target, _, requests, right = pair
    plain = reference(target, requests)
    assert sum(plain.tokens[name] != tokens for name, tokens in right.tokens.items()) > 3


def test_cached_prompts_change_no_token(pair):
    target, draft, requests, right = pair
    engine = make_engine(target, draft, Fixed(3), kv_dtype="fp8")
    for _ in range(2):
        assert_equal(serve(engine, requests), right)
    assert engine.scheduler.prefixes.num_hits > 0


def test_a_draft_that_leaves_and_returns_changes_no_token(pair):
    """Pages of the target in the draft's memory are moved as bytes."""
    target, draft, requests, right = pair
    engine = make_engine(target, draft, Immovable(3), num_pages=40, offload="on", kv_dtype="fp8")
    places = move_at_random(engine)
    assert_equal(serve(engine, requests), right)
    assert {Place.RESIDENT, Place.AWAY} <= places
    assert engine.residency.stats.moves >= 2


def test_pictures_and_sessions_speak_the_same_with_drafts():
    target = make_vision_model()
    requests, sizes = test_vision.make_requests(target)[:3], {"kv_dtype": "fp8", "vision_memory": 2**16}
    right = reference(target, requests, **sizes)
    assert_equal(serve(make_engine(target, "ngram", Fixed(4), **sizes), requests), right)
    grids, outputs = [make_grid(seed=n) for n in range(6)], []
    for draft, policy in ((None, None), ("ngram", "fixed:3")):
        prompts, engine = sliding(target), make_engine(target, draft, policy, **sizes)
        served = [serve_one(engine, prompts.next(video(*grids[i : i + 4]), NO_ANCHOR, 8)) for i in range(3)]
        assert served[2].stats["r"].reused
        outputs.append([each.tokens for each in served])
    assert outputs[0] == outputs[1]


def test_a_request_that_overflows_fails_alone():
    """Its keys and values are NaN, in pages that others use again, and in blocks of rows beside theirs."""
    target = make_model("llama3")
    target.embedding[3] = torch.nan
    params = SamplingParams(max_tokens=12)
    good = [Request(id=f"good {n}", prompt_token_ids=tuple(range(5, 9 + n)), params=params, seed=n) for n in range(3)]
    bad = Request(id="bad", prompt_token_ids=(5, 6, 3, 7), params=params, seed=9)
    engine = make_engine(target, make_draft(target), Fixed(3), num_pages=12, max_running=4, kv_dtype="fp8")
    for _ in range(2):
        outcome = serve(engine, [good[0], bad, *good[1:]])
        assert outcome.reasons.pop("bad") is FinishReason.FAILED
        outcome.tokens.pop("bad")
        assert outcome.tokens == reference(target, good, kv_dtype="fp8").tokens


# ── room ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_same_memory_holds_more_pages_of_the_target_and_none_more_of_the_draft():
    target, memory = make_model(), 2**16
    draft_page = bytes_per_page(target.config, 4, torch.float32)

    def num_pages(draft, kv_dtype):
        given = make_engine(target, draft, Fixed(1), num_pages=None, kv_memory=memory, kv_dtype=kv_dtype)
        return given.scheduler.target_pages.num_pages

    assert num_pages("ngram", "auto") == memory // draft_page
    assert num_pages("ngram", "fp8") == memory // (draft_page // 4), "a quarter of float32"
    assert num_pages(make_draft(target), "fp8") == memory // (draft_page + draft_page // 4)


def test_a_draft_that_leaves_gives_room_in_pages_of_eight_bits(pair):
    target, draft, *_ = pair
    sizes = {"offload": "on", "num_pages": 40, "max_running": 64}
    plain, rounded = (make_engine(target, draft, Fixed(1), kv_dtype=each, **sizes) for each in ("auto", "fp8"))
    assert rounded.executor.draft_memory.pages_gained // 4 == plain.executor.draft_memory.pages_gained


def test_a_profile_of_plain_keys_and_values_is_not_one_of_rounded_ones():
    target = make_model()
    limits = make_engine(target).scheduler.limits
    abouts = [describe(target, None, limits, 16, kv) for kv in (KvFormat.of(target), KvFormat.rounded(target))]
    assert path_of(abouts[0]) != path_of(abouts[1])
    assert "8" not in str(abouts[0]["target"]).partition("float32")[2]
    assert abouts[1]["target"].endswith("keys and values in float8_e4m3fn")


def test_a_dtype_that_is_not_known_is_refused():
    with pytest.raises(ConfigError, match="kv_dtype='fp4': expected one of auto, fp8"):
        EngineOptions(kv_dtype="fp4")
