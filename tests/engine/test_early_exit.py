"""Early exit drops drafts in the midst of a verification: whatever it drops, the output is that of plain decoding."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from faser.errors import ConfigError
from faser.models.transformer import Transformer
from faser.policy import Fixed
from faser.policy.early_exit import EarlyExit
from faser.request import SamplingParams
from faser.rules.early_exit import ExitPoint, ExitRule
from tests.oracle import RandomLengths, RandomStops
from tests.test_exactness import assert_equal, make_engine, make_requests, reference, serve
from tests.tiny import CONFIGS, make_draft, make_model

LAYERS = 3


class Whims:
    """Drops drafts for no reason at all."""

    layer = 1
    candidates = 0

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)

    def drops(self, features):
        return self.random.random(len(features)) < 0.3


RULES = {
    "nearly everything at the first layer": lambda: ExitRule((ExitPoint.by_rank(1, 1),)),
    "few at the first, more at the second": lambda: ExitRule((ExitPoint.by_rank(1, 12), ExitPoint.by_rank(2, 2))),
    "everything": lambda: ExitRule((ExitPoint(1, (1.0, 0.0, 0.0, 0.0, 0.0), 0.0),)),
    "by confidence, before the first layer": lambda: ExitRule((ExitPoint(0, (0.0, 0.0, 0.0, -1.0, 0.0), 2.0),)),
    "before the first layer and behind it": lambda: ExitRule(
        (ExitPoint(0, (0.0, 0.0, 0.0, -1.0, 0.3), 2.5), ExitPoint.by_rank(1, 8))
    ),
    "against a shortlist": lambda: ExitRule((ExitPoint.by_rank(1, 2, 24),)),
    "nothing": lambda: ExitRule((ExitPoint.by_rank(2, 10**6),)),
    "by whim, twice": lambda: ExitRule((Whims(1), replace_layer(Whims(2), 2))),
    "a trial": lambda: ExitRule((ExitPoint.by_rank(1, 1), ExitPoint.by_rank(2, 1)), is_trial=True),
}


def replace_layer(whims: Whims, layer: int) -> Whims:
    whims.layer = layer
    return whims


def three_layers(name: str) -> Transformer:
    return Transformer.random(replace(CONFIGS[name], num_layers=LAYERS), 0, std=0.3)


def exiting(engine, rule=None, mode="on", **given):
    engine.exits = EarlyExit(mode, LAYERS, rule=rule, **given)
    return engine


@pytest.fixture(scope="module", params=CONFIGS)
def pair(request):
    target = three_layers(request.param)
    requests = make_requests(target.config)
    return target, make_draft(target), requests, reference(target, requests)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("policy", [lambda: Fixed(4), RandomLengths, RandomStops], ids=["fixed", "random", "stops"])
def test_whatever_is_dropped_the_tokens_are_those_of_plain_decoding(pair, rule, policy):
    target, draft, requests, right = pair
    engine = exiting(make_engine(target, draft, policy()), RULES[rule]())
    outcome = serve(engine, requests)
    assert_equal(outcome, right)
    stats = engine.stats
    if rule in ("nothing", "a trial"):
        assert stats.verified == stats.drafted
    elif rule == "everything":
        assert stats.verified == stats.accepted == 0 < stats.drafted
    else:
        assert 0 < stats.verified < stats.drafted
    if rule != "a trial":
        assert sum(engine.exits.stats.pruned.values()) == stats.drafted - stats.verified
    for name, each in outcome.stats.items():
        assert each.steps + each.accepted == len(outcome.tokens[name]), "every step emits accepted + 1 bonus"


@pytest.mark.parametrize("draft_kind", ["model", "ngram"])
def test_with_prompts_in_pieces_arrivals_and_preemption(pair, draft_kind):
    target, draft, requests, right = pair
    arrivals = {request.id: 2 * number for number, request in enumerate(requests)}
    engine = make_engine(
        target, draft if draft_kind == "model" else "ngram", RandomLengths(seed=3), max_batch_tokens=14, num_pages=24
    )
    assert_equal(serve(exiting(engine, RULES["by whim, twice"]()), requests, arrivals), right)
    assert engine.scheduler.num_preemptions > 0
    assert engine.stats.verified < engine.stats.drafted


def test_pages_in_the_prefix_cache_hold_what_all_layers_computed(pair):
    target, draft, requests, right = pair
    engine = exiting(make_engine(target, draft, Fixed(4)), RULES["nearly everything at the first layer"]())
    assert_equal(serve(engine, requests), right)
    rows = engine.stats.context_rows
    assert_equal(serve(engine, requests), right)
    assert engine.stats.context_rows - rows < rows, "the second run found prompts in the cache"


def test_all_drafts_of_a_perfect_draft_model_that_early_exit_keeps_are_accepted(pair):
    """A draft equal to the target: after all layers but one, some of its tokens stand first."""
    target, _, requests, right = pair
    engine = exiting(make_engine(target, target, Fixed(4)), ExitRule((ExitPoint.by_rank(LAYERS - 1, 4),)))
    assert_equal(serve(engine, requests), right)
    assert 0 < engine.stats.accepted == engine.stats.verified < engine.stats.drafted


def test_trials_make_a_rule_that_drops_bad_drafts():
    """The target's later layers do next to nothing: a middle one knows which drafts will be refused."""
    target = Transformer.random(replace(CONFIGS["llama3"], num_layers=8), 0, std=0.3)
    for layer in target.layers[4:]:
        layer.out.mul_(0.01)
        layer.down.mul_(0.01)
    plain = ("greedy with end token ignored", "sampled", "hot")
    requests = [request for request in make_requests(target.config) if request.id in plain]
    right = reference(target, requests)
    engine = make_engine(target, make_draft(target), Fixed(4))
    engine.exits = exits = EarlyExit("on", 8, trials=8)
    for _ in range(12):
        assert_equal(serve(engine, requests), right)
    assert [point.layer for point in exits.rules] == [0, 4, 6]
    stats = exits.stats
    assert stats.steps > 0 < stats.trials < stats.steps + stats.trials
    assert stats.steps > stats.trials
    before = engine.stats.drafted, engine.stats.verified, engine.stats.accepted
    assert_equal(serve(engine, requests), right)
    drafted, verified, accepted = np.subtract(
        (engine.stats.drafted, engine.stats.verified, engine.stats.accepted), before
    )
    assert drafted - verified > 0.7 * (drafted - accepted), "most refused drafts left early"
    assert stats.false_share < 0.03


def test_auto_without_a_cost_and_off_never_exit():
    target = three_layers("llama3")
    requests = make_requests(target.config)
    for mode in ("auto", "off"):
        engine = exiting(make_engine(target, make_draft(target), Fixed(3)), mode=mode)
        serve(engine, requests)
        assert engine.exits.stats.trials == engine.exits.stats.steps == 0
        assert engine.stats.verified == engine.stats.drafted > 0


def test_the_option_reaches_the_engine_and_a_wrong_one_is_refused():
    target = make_model("llama3")
    draft = make_draft(target)
    assert make_engine(target, draft, Fixed(2), early_exit="on").exits is not None
    assert make_engine(target, draft, Fixed(2), early_exit="off").exits is None
    assert make_engine(target, draft, Fixed(2)).exits is None, "no profile, nothing to decide by"
    assert make_engine(target, None, "off", early_exit="on").exits is None
    with pytest.raises(ConfigError, match="early_exit='sometimes': expected one of auto, on, off"):
        make_engine(target, draft, Fixed(2), early_exit="sometimes")


def test_what_trials_taught_is_kept_for_the_same_weights(tmp_path, monkeypatch):
    monkeypatch.setenv("FASER_CACHE", str(tmp_path))
    target = three_layers("llama3")
    engine = make_engine(target, make_draft(target), Fixed(4), early_exit="on")
    engine.exits._trial_interval = 1
    for _ in range(4):
        serve(engine, make_requests(target.config))
    assert engine.exits.rules
    assert make_engine(target, make_draft(target), Fixed(4), early_exit="on").exits.rules == []
    engine.close()
    assert make_engine(target, make_draft(target), Fixed(4), early_exit="on").exits.rules == engine.exits.rules
    other = Transformer.random(target.config, 7, std=0.3)
    assert make_engine(other, make_draft(other), Fixed(4), early_exit="on").exits.rules == []
    (kept,) = tmp_path.rglob("*.exits.json")
    kept.write_text("{]")
    assert make_engine(target, make_draft(target), Fixed(4), early_exit="on").exits.rules == []


def test_a_request_that_overflows_still_fails_alone():
    target = three_layers("llama3")
    target.embedding[3] = torch.nan
    good, bad = make_requests(target.config)[:2]
    good = replace(good, prompt_token_ids=(5, 6, 7), params=SamplingParams(max_tokens=12))
    bad = replace(bad, prompt_token_ids=(5, 3, 7), params=SamplingParams(max_tokens=12))
    right = reference(target, [good]).tokens[good.id]
    engine = exiting(make_engine(target, make_draft(target), Fixed(3)), RULES["nearly everything at the first layer"]())
    outcome = serve(engine, [good, bad])
    assert outcome.tokens[good.id] == right
    assert outcome.tokens[bad.id] == []
