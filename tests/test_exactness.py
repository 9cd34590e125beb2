"""The promise: the output does not depend on speculation, nor on who else is in the batch.

Every run here is compared, token for token, with each request served alone under policy off in a roomy pool.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch

from faser.build import Draft, build_engine
from faser.config import EngineOptions
from faser.engine.engine import Engine
from faser.engine.residency import Place
from faser.models.transformer import Transformer
from faser.policy import Fixed, Policy
from faser.request import FinishReason, Request, SamplingParams, Stats
from tests.oracle import Never, RandomLengths, RandomStops
from tests.tiny import CONFIGS, VOCABULARY, make_draft, make_model

PARAMS = {
    "greedy": SamplingParams(max_tokens=24),
    "greedy with end token ignored": SamplingParams(max_tokens=30, ignore_eos=True),
    "penalised": SamplingParams(max_tokens=24, presence_penalty=0.7, frequency_penalty=0.4, repetition_penalty=1.3),
    "biased": SamplingParams(max_tokens=16, logit_bias={5: 4.0, 7: -100.0}),
    "sampled": SamplingParams(max_tokens=28, temperature=1.0, ignore_eos=True),
    "hot": SamplingParams(max_tokens=20, temperature=1.7),
    "top-k": SamplingParams(max_tokens=20, temperature=0.9, top_k=7),
    "top-p": SamplingParams(max_tokens=26, temperature=1.1, top_p=0.8, min_tokens=12),
    "min-p and logprobs": SamplingParams(max_tokens=18, temperature=0.8, min_p=0.1, logprobs=3),
    "everything": SamplingParams(
        max_tokens=30, temperature=0.7, top_k=20, top_p=0.9, min_p=0.02, presence_penalty=0.3, frequency_penalty=0.2,
        repetition_penalty=1.1, logit_bias={3: 1.5}, min_tokens=6, stop_token_ids=[9], logprobs=0,
    ),
    "opted out": SamplingParams(max_tokens=20, temperature=0.6, max_draft=0),
    "one token": SamplingParams(max_tokens=1),
}  # fmt: skip


def make_requests(config, seed: int = 0) -> list[Request]:
    """One request per set of parameters; some prompts share their beginning, some repeat themselves."""
    random = np.random.default_rng(seed)
    shared = random.integers(3, VOCABULARY, size=20).tolist()
    requests = []
    for number, (name, params) in enumerate(PARAMS.items()):
        own = random.integers(3, VOCABULARY, size=int(random.integers(1, 18))).tolist()
        prompt = [shared + own, own, own * 3][number % 3][:48]
        requests.append(
            Request(
                id=name,
                prompt_token_ids=tuple(prompt),
                params=params,
                seed=1000 + number,
                stop_ids=params.stop_ids(config.eos_token_ids),
            )
        )
    return requests


@dataclass
class Outcome:
    tokens: dict[str, list[int]] = field(default_factory=dict)
    reasons: dict[str, FinishReason] = field(default_factory=dict)
    logprobs: dict[str, list] = field(default_factory=dict)
    stats: dict[str, Stats] = field(default_factory=dict)

    @property
    def total(self) -> Stats:
        each = self.stats.values()
        return Stats(*(sum(getattr(s, name) for s in each) for name in ("drafted", "verified", "accepted", "steps")))


def serve(engine: Engine, requests, arrivals=None, cancels=None) -> Outcome:
    """Run requests, each added before its arrival's step and cancelled before its cancel's."""
    outcome, step = Outcome(), 0
    pending = sorted(requests, key=lambda r: (arrivals or {}).get(r.id, 0))
    while pending or engine.has_work:
        while pending and (arrivals or {}).get(pending[0].id, 0) <= step:
            request = pending.pop(0)
            outcome.tokens[request.id], outcome.logprobs[request.id] = [], []
            engine.add(request)
        for name, when in (cancels or {}).items():
            if when == step:
                engine.cancel(name)
        for item in engine.step():
            outcome.tokens[item.request_id] += item.token_ids
            outcome.logprobs[item.request_id] += item.logprobs or []
            if item.finish is not None:
                outcome.reasons[item.request_id] = item.finish.reason
                outcome.stats[item.request_id] = item.finish.stats
        engine.scheduler.check()
        step += 1
    assert engine.scheduler.target_pages.num_held == 0
    return outcome


def make_engine(target: Transformer, draft: Draft = None, policy=None, **sizes) -> Engine:
    # without a bound on seconds the steps of two runs are the same
    options = {"max_running": 8, "max_batch_tokens": 64, "max_step_ms": 0, "page_size": 4, "num_pages": 400, **sizes}
    return build_engine(target, draft, EngineOptions(policy=policy, **options))


def reference(target: Transformer, requests, **sizes) -> Outcome:
    """Each request alone, no speculation, no sharing."""
    whole = Outcome()
    for request in requests:
        alone = serve(make_engine(target, prefix_caching=False, max_running=1, **sizes), [request])
        for name in ("tokens", "reasons", "logprobs", "stats"):
            getattr(whole, name).update(getattr(alone, name))
    return whole


def assert_equal(outcome: Outcome, right: Outcome) -> None:
    assert outcome.tokens == right.tokens
    assert outcome.reasons == right.reasons


@pytest.fixture(scope="module", params=CONFIGS)
def pair(request):
    target = make_model(request.param)
    requests = make_requests(target.config)
    return target, make_draft(target), requests, reference(target, requests)


POLICIES = {
    "fixed:1": lambda: Fixed(1),
    "fixed:4": lambda: Fixed(4),
    "fixed:9": lambda: Fixed(9),
    "random": RandomLengths,
    "stops anywhere": RandomStops,
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("draft_kind", ["model", "ngram"])
def test_speculation_in_a_mixed_batch_gives_the_tokens_of_plain_decoding(pair, policy, draft_kind):
    target, draft, requests, right = pair
    engine = make_engine(target, draft if draft_kind == "model" else "ngram", POLICIES[policy]())
    outcome = serve(engine, requests)
    assert_equal(outcome, right)
    total = outcome.total
    assert 0 < total.accepted < total.verified == total.drafted
    assert outcome.stats["opted out"].drafted == 0
    for name, stats in outcome.stats.items():
        assert stats.steps + stats.accepted == len(outcome.tokens[name]), "every step emits accepted + 1 bonus"
    assert engine.stats.emitted == sum(map(len, right.tokens.values()))


@pytest.mark.parametrize("draft_kind", ["model", "ngram"])
def test_a_bound_that_no_step_can_keep_changes_no_token(pair, draft_kind):
    target, draft, requests, right = pair
    arrivals = {request.id: number for number, request in enumerate(requests)}
    engine = make_engine(target, draft if draft_kind == "model" else "ngram", RandomLengths(seed=3), max_step_ms=0.001)
    assert_equal(serve(engine, requests, arrivals), right)
    assert engine.scheduler.drafts.pace.prompts.per_row > 0, "it learned"


@pytest.mark.parametrize("draft_kind", ["model", "ngram"])
def test_staggered_arrivals_and_chunked_prefill_change_nothing(pair, draft_kind):
    target, draft, requests, right = pair
    arrivals = {request.id: 2 * number for number, request in enumerate(requests)}
    engine = make_engine(
        target, draft if draft_kind == "model" else "ngram", RandomLengths(seed=3), max_batch_tokens=12, max_running=6
    )
    assert_equal(serve(engine, requests, arrivals), right)


class Immovable(Fixed):
    """A fixed length, and a draft that moves when the test asks for it."""

    def residency_rule(self):
        return Never()


def move_at_random(engine):
    """The draft of the engine leaves or comes back at random steps; returns the places where it was, as they come."""
    random, places, step = np.random.default_rng(5), set(), engine.step

    def moving_step():
        if random.random() < 0.15:
            (engine.residency.leave if engine.residency.place is Place.RESIDENT else engine.residency.come_back)()
        places.add(engine.residency.place)
        return step()

    engine.step = moving_step
    return places


@pytest.mark.parametrize("num_pages", [24, 100])
def test_a_draft_that_leaves_and_returns_changes_nothing(pair, num_pages):
    target, draft, requests, right = pair
    engine = make_engine(target, draft, RandomLengths(seed=4), num_pages=num_pages, offload="on")
    places = move_at_random(engine)
    assert_equal(serve(engine, requests), right)
    assert {Place.RESIDENT, Place.AWAY} <= places
    assert engine.residency.stats.moves >= 2


def test_a_draft_that_returned_is_accepted_as_before(pair):
    target, draft, requests, _ = pair
    engine = make_engine(target, draft, Immovable(4), num_pages=100, offload="on", prefix_caching=False)
    before = serve(engine, requests).total
    engine.residency.leave()
    assert engine.residency.place is Place.AWAY
    assert not any(weight.any() for weight in draft.layers[0].tensors().values()), "its memory is released"
    assert serve(engine, requests).total.drafted == 0
    engine.residency.come_back()
    assert engine.residency.place is Place.RESIDENT
    after = serve(engine, requests).total
    assert (after.drafted, after.accepted) == (before.drafted, before.accepted)
    assert after.accepted


def test_preemption_changes_nothing(pair):
    target, draft, requests, right = pair
    engine = make_engine(target, draft, RandomLengths(seed=4), num_pages=24)
    outcome = serve(engine, requests)
    assert_equal(outcome, right)
    assert engine.scheduler.num_preemptions > 0
    for name, stats in outcome.stats.items():
        assert stats.steps + stats.accepted == len(outcome.tokens[name])


def test_preemption_without_prefix_caching_changes_nothing(pair):
    target, draft, requests, right = pair
    engine = make_engine(target, draft, Fixed(3), num_pages=24, prefix_caching=False)
    assert_equal(serve(engine, requests), right)
    assert engine.scheduler.num_preemptions > 0


def test_prefix_cache_hits_change_nothing(pair):
    target, draft, requests, right = pair
    engine = make_engine(target, draft, Fixed(3))
    cold = serve(engine, requests)
    rows = engine.stats.context_rows
    warm = serve(engine, requests)
    assert_equal(cold, right)
    assert_equal(warm, right)
    saved = rows - (engine.stats.context_rows - rows)
    assert saved > sum(len(r.prompt_token_ids) for r in requests) / 3, "the second run found prompts in the cache"


def test_cancelling_some_changes_nothing_for_the_others(pair):
    target, draft, requests, right = pair
    cancels = {request.id: 1 + number for number, request in enumerate(requests) if number % 3 == 1}
    engine = make_engine(target, draft, RandomLengths(seed=5), num_pages=30)
    outcome = serve(engine, requests, cancels=cancels)
    assert FinishReason.CANCELLED in outcome.reasons.values()
    for name, tokens in outcome.tokens.items():
        if outcome.reasons[name] is FinishReason.CANCELLED:
            assert tokens == right.tokens[name][: len(tokens)]
        else:
            assert tokens == right.tokens[name]
            assert outcome.reasons[name] == right.reasons[name]


def test_off_with_a_draft_loaded_never_runs_it(pair):
    target, draft, requests, right = pair
    engine = make_engine(target, draft, Fixed(0))
    assert_equal(serve(engine, requests), right)
    assert engine.stats.draft_seconds == 0
    assert engine.stats.drafted == 0


def test_a_perfect_draft_is_always_accepted_even_when_sampling(pair):
    """The draft samples with the target's noise, so the same model as draft agrees at every temperature."""
    target, _, requests, right = pair
    engine = make_engine(target, target, Fixed(4))
    outcome = serve(engine, requests)
    assert_equal(outcome, right)
    assert engine.stats.accepted == engine.stats.drafted > 0


def test_a_draft_of_another_kind_changes_nothing():
    """A draft with other shapes and a smaller padded vocabulary is still only a guess."""
    target = make_model("llama3")
    requests = make_requests(target.config)
    small = replace(CONFIGS["qwen3"], vocab_size=40, max_positions=128)
    draft = Transformer.random(small, 5, std=0.3)
    engine = make_engine(target, draft, Fixed(3))
    assert_equal(serve(engine, requests), reference(target, requests))


class OnOff(Policy):
    """All speculate for a few steps, then none, then all again: the draft must catch up."""

    name = "on-off"

    def __init__(self) -> None:
        self.step = 0

    def lengths(self, view):
        self.step += 1
        return np.full(view.num_requests, 4 if self.step % 10 < 4 else 0)


def test_after_catching_up_the_draft_is_as_good_as_ever():
    """Switched off and on again, a draft equal to the target is still accepted whole: its KV is right."""
    target = make_model("qwen2")
    requests = make_requests(target.config)
    engine = make_engine(target, target, OnOff())
    outcome = serve(engine, requests)
    assert_equal(outcome, reference(target, requests))
    assert engine.stats.accepted == engine.stats.drafted > 0


def test_logprobs_are_the_models_own_whatever_the_policy(pair):
    target, draft, requests, right = pair
    outcome = serve(make_engine(target, draft, Fixed(4)), requests)
    for name in ("min-p and logprobs", "everything"):
        ours, theirs = outcome.logprobs[name], right.logprobs[name]
        assert [entry.token_id for entry in ours] == outcome.tokens[name]
        assert [[t for t, _ in entry.top] for entry in ours] == [[t for t, _ in entry.top] for entry in theirs]
        np.testing.assert_allclose([e.logprob for e in ours], [e.logprob for e in theirs], atol=1e-4)


def test_a_stop_inside_a_run_of_accepted_tokens_cuts_tokens_logprobs_and_counts():
    target = make_model("qwen2")
    prompt = tuple(range(3, 12))
    free = Request(id="free", prompt_token_ids=prompt, params=SamplingParams(max_tokens=30, logprobs=1), seed=1)
    tokens = reference(target, [free]).tokens["free"]
    stop = tokens[7]
    end = tokens.index(stop) + 1
    request = Request(**{**free.__dict__, "stop_ids": frozenset({stop})})
    engine = make_engine(target, target, Fixed(9))
    outcome = serve(engine, [request])
    assert outcome.tokens["free"] == tokens[:end]
    assert [entry.token_id for entry in outcome.logprobs["free"]] == tokens[:end]
    assert outcome.stats["free"].steps + outcome.stats["free"].accepted == end
    assert outcome.stats["free"].accepted < outcome.stats["free"].verified, "the step went on behind the stop"
    assert engine.stats.emitted == end


def test_a_draft_that_sees_less_of_the_context_than_the_target_shortens_no_request():
    target = make_model("llama3")
    requests = make_requests(target.config)
    short = Transformer.random(replace(CONFIGS["llama2"], max_positions=24), 3, std=0.3)
    outcome = serve(make_engine(target, short, Fixed(3)), requests)
    assert_equal(outcome, reference(target, requests))
    assert outcome.total.drafted > 0


@pytest.mark.parametrize(
    "params", [SamplingParams(max_tokens=12), SamplingParams(max_tokens=12, temperature=1, top_p=0.9)]
)
def test_a_request_that_overflows_fails_alone_and_leaves_nothing_behind(params):
    """Token 3 has no finite embedding: its keys and values are NaN, in pages others will use again."""
    target = make_model("llama3")
    target.embedding[3] = torch.nan
    good = [Request(id=f"good {n}", prompt_token_ids=tuple(range(5, 9 + n)), params=params, seed=n) for n in range(3)]
    bad = Request(id="bad", prompt_token_ids=(5, 6, 3, 7), params=params, seed=9)
    engine = make_engine(target, make_draft(target), Fixed(3), num_pages=12, max_running=4)
    right = {request.id: serve(engine, [request]).tokens[request.id] for request in good}
    for _ in range(3):
        outcome = serve(engine, [good[0], bad, *good[1:]])
        assert outcome.reasons.pop("bad") is FinishReason.FAILED
        assert outcome.tokens.pop("bad") == []
        assert outcome.tokens == right


def test_a_draft_that_overflows_costs_time_and_never_a_token():
    target = make_model("llama3")
    requests = make_requests(target.config)
    draft = make_draft(target)
    draft.layers[1].down.fill_(torch.inf)
    outcome = serve(make_engine(target, draft, Fixed(3)), requests)
    assert_equal(outcome, reference(target, requests))


def test_the_output_depends_on_the_seed():
    target = make_model()
    base = make_requests(target.config)[4]
    again, other = (Request(**{**base.__dict__, "id": str(seed), "seed": seed}) for seed in (base.seed, 77))
    outcome = reference(target, [base, again, other])
    assert outcome.tokens[base.id] == outcome.tokens[again.id] != outcome.tokens[other.id]
