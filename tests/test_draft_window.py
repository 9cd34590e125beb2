"""Drafts that see a window: the tokens of plain decoding, from drafts that know less."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch

from faser.build import WithLookup
from faser.config import EngineOptions
from faser.cost.curve import Curve
from faser.cost.profile import Profile
from faser.cost.profiled_cost import ProfiledCost
from faser.errors import ConfigError
from faser.limits import HeadLimits, KeyWindow, Limits
from faser.models.transformer import Transformer
from faser.policy import Fixed
from faser.request import Request, SamplingParams
from faser.runtime.draft_window import choose_window
from faser.runtime.kv_cache import bytes_per_page, fitting_pages
from tests.engine.test_windows import Pauses
from tests.oracle import RandomGuesses, RandomLengths, RandomStops
from tests.test_exactness import Outcome, assert_equal, make_engine, serve
from tests.tiny import CONFIGS, VOCABULARY, make_draft, make_head

CONTEXT = 256
SIZES = {"max_model_len": CONTEXT, "max_batch_tokens": 128, "num_pages": 300}
LONG = replace(CONFIGS["llama3"], max_positions=CONTEXT, num_layers=2)


def long_requests() -> list[Request]:
    """Contexts of several windows."""
    random = np.random.default_rng(0)
    params = [
        SamplingParams(max_tokens=40, ignore_eos=True),
        SamplingParams(max_tokens=30, temperature=1.0, ignore_eos=True),
        SamplingParams(max_tokens=50, temperature=0.7, top_p=0.9, ignore_eos=True),
        SamplingParams(max_tokens=20),
    ]
    return [
        Request(id=str(i), prompt_token_ids=tuple(random.integers(3, VOCABULARY, size).tolist()), params=each, seed=i)
        for i, (each, size) in enumerate(zip(params, (180, 120, 40, 200), strict=True))
    ]


@pytest.fixture(scope="module")
def long_pair():
    """Requests with long contexts, and what they get without drafts."""
    target, requests = Transformer.random(LONG, 0, std=0.3), long_requests()
    return target, make_draft(target), requests, plain(target, requests)


def plain(target: Transformer, requests: list[Request]) -> Outcome:
    return serve(make_engine(target, **SIZES), requests)


POLICIES = {
    "fixed": (lambda: Fixed(4), {}),
    "random": (RandomLengths, {}),
    "late": (lambda: Pauses(12), {}),
    "stops anywhere": (RandomStops, {}),
    "two guessers": (RandomGuesses, {}),
    "overlap": (lambda: Fixed(3), {"overlap": "on"}),
    "short of pages": (RandomLengths, {"num_pages": 90}),
}


@pytest.mark.parametrize("policy", POLICIES)
def test_a_windowed_draft_gives_the_tokens_of_plain_decoding(long_pair, policy):
    target, draft, requests, right = long_pair
    make, options = POLICIES[policy]
    draft = WithLookup(draft) if policy == "two guessers" else draft
    engine = make_engine(target, draft, make(), draft_window=64, **{**SIZES, **options})
    assert engine.scheduler.limits.draft_window == KeyWindow(64, 4)
    arrivals = {request.id: 3 * i for i, request in enumerate(requests)}
    outcome = serve(engine, requests, arrivals)
    assert_equal(outcome, right)
    assert outcome.total.accepted > 0
    assert engine.scheduler.draft_pages.num_held == 0


@pytest.mark.parametrize("policy", ["fixed", "random"])
def test_a_window_beyond_the_contexts_drafts_the_same_tokens(long_pair, policy):
    target, draft, requests, _ = long_pair
    found = []
    for window in ("off", CONTEXT - 5):
        engine = make_engine(target, draft, POLICIES[policy][0](), draft_window=window, **SIZES)
        found.append(serve(engine, requests))
    assert found[0].tokens == found[1].tokens
    assert found[0].stats == found[1].stats, "the same drafts, the same verdicts"


def test_a_draft_of_a_short_context_drafts_for_a_long_one(long_pair):
    target, _, requests, right = long_pair
    draft = copy.deepcopy(make_draft(target))
    draft = Transformer(
        replace(draft.config, max_positions=100), draft.embedding, draft.layers, draft.final_norm, draft.head
    )
    engine = make_engine(target, draft, Fixed(3), draft_window="off", **SIZES)
    short = serve(engine, requests[:1])
    assert short.total.drafted == 0, "the prompt is longer than what the draft can see"
    engine = make_engine(target, draft, Fixed(3), **SIZES)
    assert engine.scheduler.limits.draft_window == KeyWindow(96, 4), "auto: the context is longer than the draft's"
    outcome = serve(engine, requests)
    assert_equal(outcome, right)
    assert outcome.stats["0"].accepted > 0


@pytest.mark.parametrize(
    ("asked", "trained", "max_model_len", "window"),
    [
        ("auto", 8192, 2048, None),
        ("auto", 8192, 8192, KeyWindow(1024, 4)),
        ("auto", 2048, 4096, KeyWindow(1024, 4)),
        ("auto", 512, 4096, KeyWindow(508, 4)),
        ("auto", 60, 4096, None),
        ("off", 512, 4096, None),
        (256, 512, 4096, KeyWindow(256, 4)),
        (4000, 8192, 4004, None),
    ],
)
def test_auto_is_for_contexts_much_longer_than_a_window_or_than_the_draft_knows(asked, trained, max_model_len, window):
    config = replace(LONG, max_positions=trained)
    assert choose_window(asked, config, is_head=False, max_model_len=max_model_len, device="cpu") == window


@pytest.mark.parametrize(("trained", "window"), [(8192, None), (2048, KeyWindow(1024, 4))])
def test_on_a_gpu_auto_is_for_drafts_that_could_not_draft_without(trained, window):
    config = replace(LONG, max_positions=trained)
    assert choose_window("auto", config, is_head=False, max_model_len=8192, device="cuda") == window


@pytest.mark.parametrize(("trained", "window"), [(8192, None), (2048, KeyWindow(1024, 4))])
def test_auto_is_for_heads_that_could_not_draft_without(trained, window):
    config = replace(LONG, max_positions=trained)
    assert choose_window("auto", config, is_head=True, max_model_len=8192, device="cpu") == window


def test_windows_that_cannot_be_are_refused_by_name(long_pair):
    target = long_pair[0]
    with pytest.raises(ConfigError, match="at least 64 tokens"):
        EngineOptions(draft_window=63)
    with pytest.raises(ConfigError, match="auto, off or"):
        EngineOptions(draft_window="wide")
    with pytest.raises(ConfigError, match="trained on 256 tokens; give at most 252"):
        make_engine(target, make_draft(target), draft_window=253, **SIZES)
    with pytest.raises(ConfigError, match="no draft model"):
        make_engine(target, "ngram", draft_window=64, **SIZES)
    with pytest.raises(ConfigError, match="trained on 256 tokens; give at most 252"):
        make_engine(target, make_head(target), draft_window=253, **SIZES)
    windowed = Transformer.random(replace(LONG, windows=(8, 0)), 1)
    with pytest.raises(ConfigError, match="windows of its own"):
        make_engine(target, windowed, draft_window=64, **SIZES)


def test_what_the_draft_does_not_take_goes_to_the_target():
    limits = Limits(2, 64, 4096, draft_window=KeyWindow(100, 4))
    assert limits.most_draft_pages(16) == 2 * (1 + 7 + 2)
    assert limits.draft_pages(15, 16) == 15
    assert limits.draft_pages(500, 16) == 20
    block = Limits(2, 64, 4096, head=HeadLimits(block_rows=16), draft_window=KeyWindow(100, 4))
    assert block.most_draft_pages(16) == 2 * (1 + 9 + 1), "a block has pages too"
    models = [(LONG, torch.float32)] * 2
    page = bytes_per_page(LONG, 16, torch.float32)
    assert fitting_pages(1000 * page, models, 16, 4096) == 500
    assert fitting_pages(1000 * page, models, 16, 4096, most_draft_pages=20) == 980
    assert fitting_pages(1000 * page, models, 16, 4096, most_draft_pages=600) == 500
    with pytest.raises(ConfigError, match="too few for a request of 256"):
        fitting_pages(20 * page, models, 16, 4096, most_draft_pages=20)


def test_a_draft_costs_no_more_than_its_window():
    curve = Curve((1, 64), (1e-3, 1e-3), (1e-6, 1e-6))
    profile = Profile({}, curve, curve, curve, curve, curve, 0.0)
    whole, windowed = ProfiledCost(profile), ProfiledCost(profile, draft_span=100)
    assert windowed.next_draft(2, 150.0) == whole.next_draft(2, 150.0)
    assert windowed.next_draft(2, 5000.0) == whole.next_draft(2, 200.0)
    assert windowed.first_draft(2, 5000.0) == whole.first_draft(2, 200.0)
    assert windowed.verify(2, 5000.0) == whole.verify(2, 5000.0)
