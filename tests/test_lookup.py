"""Prompt lookup beside a draft: the output is that of plain decoding, whoever drafted.

The rest of these runs is in tests/test_exactness.py; here requests repeat themselves, so that both guessers have work.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from faser.build import WithLookup, build_engine, load_pair
from faser.config import EngineOptions
from faser.engine.residency import Place
from faser.errors import ConfigError
from faser.policy import Fixed
from faser.request import Request, SamplingParams
from faser.rules.early_exit import ExitPoint, ExitRule
from tests.oracle import RandomGuesses, RandomStops
from tests.test_exactness import assert_equal, make_engine, make_requests, reference, serve
from tests.tiny import HEAD_KINDS, make_draft, make_head, make_model


class RandomStoppingGuesses(RandomStops, RandomGuesses):
    """RandomGuesses, with a rule that ends the drafts of the draft early."""


POLICIES = {
    "fixed:4": lambda: Fixed(4),
    "random": lambda: RandomGuesses(seed=1),
    "stops anywhere": lambda: RandomStoppingGuesses(seed=2),
}


def make_repeating(config) -> list[Request]:
    """The requests of test_exactness, and some that say one token again and again."""
    params = SamplingParams(max_tokens=24, logit_bias={7: 40.0}, ignore_eos=True)
    again = [Request(id=f"again {n}", prompt_token_ids=(5, 6, 7, 7, n), params=params, seed=n) for n in range(3)]
    return make_requests(config) + again


@pytest.fixture(scope="module", params=["llama3", "qwen2"])
def pair(request):
    target = make_model(request.param)
    requests = make_repeating(target.config)
    return target, make_draft(target), requests, reference(target, requests)


def assert_both_drafted(stats) -> None:
    assert 0 < stats.looked_up < stats.drafted
    assert 0 < stats.lookup_accepted < stats.accepted


@pytest.mark.parametrize("policy", POLICIES)
def test_two_guessers_in_a_mixed_batch_give_the_tokens_of_plain_decoding(pair, policy):
    target, draft, requests, right = pair
    engine = make_engine(target, WithLookup(draft), POLICIES[policy]())
    outcome = serve(engine, requests)
    assert_equal(outcome, right)
    assert_both_drafted(engine.stats)
    assert sum(s.looked_up for s in outcome.stats.values()) == engine.stats.looked_up
    for name, stats in outcome.stats.items():
        assert stats.steps + stats.accepted == len(outcome.tokens[name])
        assert stats.lookup_accepted <= min(stats.looked_up, stats.accepted)


def test_preemption_chunks_and_late_arrivals_change_nothing(pair):
    target, draft, requests, right = pair
    arrivals = {request.id: 2 * number for number, request in enumerate(requests)}
    sizes = {"num_pages": 24, "max_batch_tokens": 12, "max_running": 6}
    engine = make_engine(target, WithLookup(draft), RandomGuesses(seed=3), **sizes)
    outcome = serve(engine, requests, arrivals)
    assert_equal(outcome, right)
    assert engine.scheduler.num_preemptions > 0
    assert_both_drafted(engine.stats)
    assert sum(s.looked_up for s in outcome.stats.values()) == engine.stats.looked_up, "a preemption loses no count"


def test_a_perfect_draft_is_accepted_whole_behind_copied_text(pair):
    """It catches up with the tokens that it did not draft itself, so its KV is right."""
    target, _, requests, right = pair
    engine = make_engine(target, WithLookup(target), RandomGuesses(seed=4))
    assert_equal(serve(engine, requests), right)
    stats = engine.stats
    assert stats.looked_up > stats.lookup_accepted > 0
    assert stats.accepted - stats.lookup_accepted == stats.drafted - stats.looked_up > 0


@pytest.mark.parametrize("kind", HEAD_KINDS[::3])
def test_prompt_lookup_goes_with_heads(pair, kind):
    target, _, requests, right = pair
    engine = make_engine(target, WithLookup(make_head(target, kind)), RandomGuesses(seed=5))
    assert_equal(serve(engine, requests), right)
    assert 0 < engine.stats.looked_up < engine.stats.drafted


def test_requests_look_up_while_the_draft_is_away(pair):
    target, draft, requests, right = pair
    engine = make_engine(target, WithLookup(draft), RandomGuesses(seed=6), num_pages=100, offload="on")
    engine.residency.leave()
    assert engine.residency.place is Place.AWAY
    engine.residency._ask_rule = lambda: Staying()
    outcome = serve(engine, requests)
    assert_equal(outcome, right)
    stats = engine.stats
    assert stats.drafted == stats.looked_up > 0
    assert stats.draft_seconds == 0
    engine.residency.come_back()
    assert_equal(serve(engine, requests), right)
    assert stats.drafted > stats.looked_up


class Staying:
    """A rule by which the draft stays where it is."""

    def why_leave(self, view, gain):
        return None

    why_return = why_leave


def test_early_exit_drops_drafts_of_both_and_changes_nothing(pair):
    target, draft, requests, right = pair
    engine = make_engine(target, WithLookup(draft), RandomGuesses(seed=7), early_exit="on")
    engine.exits._fixed = ExitRule((ExitPoint(1, (0.0, 1.0, 0.0, 0.0, 0.0), 3.0),))
    assert_equal(serve(engine, requests), right)
    assert_both_drafted(engine.stats)
    assert engine.stats.pruned > 0


def test_max_draft_bounds_what_is_looked_up(pair):
    target, draft, _, _ = pair
    params = SamplingParams(max_tokens=20, logit_bias={7: 40.0}, ignore_eos=True)
    requests = [
        Request(id=str(most), prompt_token_ids=(5, 6, 7), params=replace(params, max_draft=most), seed=1)
        for most in (0, 2)
    ]
    outcome = serve(make_engine(target, WithLookup(draft), Fixed(5)), requests)
    assert outcome.stats["0"].drafted == 0
    assert len(outcome.stats["2"].lengths) == 3
    assert outcome.stats["2"].looked_up > 0


def test_overlap_is_refused_by_name(pair):
    target, draft, *_ = pair
    options = EngineOptions(policy="fixed:2", num_pages=64, overlap="on")
    with pytest.raises(ConfigError, match="prompt lookup"):
        build_engine(target, WithLookup(draft), options)


def test_a_folder_and_ngram_are_loaded_as_two_guessers(folder):
    options = EngineOptions(policy="fixed:3", num_pages=64, max_step_ms=0)
    pair = load_pair(str(folder), f"{folder}+ngram", options)
    assert isinstance(pair.draft, WithLookup)
    engine = build_engine(pair.target, pair.draft, options)
    tokens = tuple(np.tile(np.arange(10, 18), 4).tolist())
    request = Request(id="a", prompt_token_ids=tokens, params=SamplingParams(max_tokens=12, ignore_eos=True), seed=1)
    stats = serve(engine, [request]).total
    assert stats.accepted == stats.drafted - (engine.stats.looked_up - engine.stats.lookup_accepted), "its own draft"
