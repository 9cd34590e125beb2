"""Steps that draft beside their verification emit the tokens of the CPU, and wait for what they need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle

import numpy as np
import pytest
import torch

from faser.arrays import IntArray
from faser.limits import ADAPTIVE_MAX_LENGTH
from faser.models.transformer import Transformer
from faser.policy import BatchView, Fixed
from faser.policy.overlap import Chunks, Overlap, Way
from faser.request import SamplingParams
from tests.oracle import RandomLengths, SometimesOverlap
from tests.runtime.cuda.test_executor import assert_same_logprobs, chosen, make_engine
from tests.test_exactness import make_requests, reference, serve
from tests.tiny import CONFIGS, make_draft

pytest.importorskip("triton")


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("policy", ["chunks of 1", "chunks of 3", "any length"])
def test_drafting_while_drafts_are_verified_changes_no_token(device, policy, ahead):
    target = Transformer.random(replace(CONFIGS["llama3"], head_dim=16, num_layers=2), 0, std=0.3)
    requests = chosen(target, device)
    expected = reference(target, requests)
    lengths = {"chunks of 1": Fixed(1), "chunks of 3": Fixed(3), "any length": RandomLengths(seed=2)}[policy]
    engine = make_engine(device, target, make_draft(target), lengths, ahead=ahead, overlap="on")
    outcome = serve(engine, requests, {r.id: i for i, r in enumerate(requests)})
    assert outcome.tokens == expected.tokens
    assert outcome.reasons == expected.reasons
    assert_same_logprobs(outcome, expected)
    assert 0 < engine.stats.hits < engine.stats.chunks


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("kind", ["right", "in turns"])
def test_frontiers_are_settled_on_the_device(device, kind, ahead):
    """Requests without filters, so that steps are planned ahead."""
    target = Transformer.random(replace(CONFIGS["llama3"], head_dim=16, num_layers=2), 0, std=0.3)
    plain = [r for r in chosen(target, device) if r.id in ("greedy", "sampled", "greedy with end token ignored")]
    requests = [replace(r, params=replace(r.params, max_tokens=8), stop_ids=frozenset()) for r in plain]
    expected = reference(target, requests)
    draft = target if kind == "right" else make_draft(target)
    engine = make_engine(device, target, draft, Fixed(2), ahead=ahead, overlap="on")
    if kind == "in turns":
        engine.scheduler.overlap = SometimesOverlap(1)
    assert serve(engine, requests).tokens == expected.tokens
    if kind == "right":
        assert engine.stats.hits == engine.stats.chunks > 0


class AnyWay(Overlap):
    """All ways to overlap that `auto` might choose, in turn, for each split; each is followed by a plain step."""

    def __init__(self, splits: Sequence[int]) -> None:
        super().__init__()
        leads = [(ADAPTIVE_MAX_LENGTH + 1, ADAPTIVE_MAX_LENGTH), (4, 3), (2, 1)]
        ways = [Way(0.0, *each, split) for each in [*leads, (5, 0)] for split in splits]
        self.ways = cycle([each for way in ways for each in (way, None)])

    def chunks(self, view: BatchView, lengths: IntArray) -> Chunks | None:
        way = next(self.ways)
        return None if way is None else way.chunks(lengths.size)


@pytest.mark.gpu
@pytest.mark.parametrize("is_right", [True, False])
def test_all_graphs_of_a_few_requests_that_overlap_were_captured_ahead(is_right):
    """Capturing a graph of a large model takes a tenth of a second."""
    target = Transformer.random(replace(CONFIGS["llama3"], head_dim=16, num_layers=1), 0, std=0.3)
    plain = [r for r in make_requests(target.config) if r.id in ("greedy", "hot")]
    requests = [replace(r, params=replace(r.params, max_tokens=48), stop_ids=frozenset()) for r in plain]
    draft = target if is_right else make_draft(target, noise=0.05)
    engine = make_engine("cuda", target, draft, Fixed(3), ahead=True, overlap="on")
    executor = engine.executor
    splits = (0, *executor.overlap.lanes.splits)
    executor.prepare_overlap(set(splits))
    engine.scheduler.overlap = AnyWay(splits)
    models = (executor.target, *executor.drafter.models)
    before = [set(model._graphs) for model in models]
    assert serve(engine, requests).tokens == reference(target, requests).tokens
    assert engine.stats.hits > 0
    late = [set(model._graphs) - had for model, had in zip(models, before, strict=True)]
    assert late == [set(), set()]


def test_a_verification_in_which_all_requests_ride_is_captured_for_each_part(device, monkeypatch):
    from faser.runtime.cuda.graphs import verification

    target = Transformer.random(replace(CONFIGS["llama3"], head_dim=16), 0, std=0.3)
    executor = make_engine(device, target, target, Fixed(3), ahead=True, overlap="on").executor
    captured = []
    monkeypatch.setattr(executor.overlap.lanes, "num_sms", 132)
    monkeypatch.setattr(type(executor.target), "capture", lambda model, shape: captured.append((model, shape)))
    executor.prepare_overlap({32})
    for size in (1, 2, 4):
        assert (executor.target, replace(verification(size, 1), num_sms=100)) in captured


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(8))
def test_lanes_wait_for_one_another_however_long_each_takes(seed):
    """Before some launches the stream sleeps: a launch that does not wait for its inputs computes other tokens."""
    target = Transformer.random(replace(CONFIGS["llama3"], head_dim=16, num_layers=2), 0, std=0.3)
    requests = make_requests(target.config)
    expected = reference(target, requests)
    engine = make_engine("cuda", target, make_draft(target), RandomLengths(seed=seed), ahead=True, overlap="on")
    engine.scheduler.overlap = SometimesOverlap(seed, (0, *engine.executor.overlap.lanes.splits))
    random = np.random.default_rng(seed)
    for model in (engine.executor.target, *engine.executor.drafter.models):
        model.launch = late(model.launch, random)
    assert serve(engine, requests, {r.id: i for i, r in enumerate(requests)}).tokens == expected.tokens
    assert engine.stats.hits > 0
    engine.close()


def late(launch, random):
    def launch_late(shape):
        if random.random() < 0.5:
            torch.cuda._sleep(int(random.integers(1, 1_000_000)))  # cycles: up to half a millisecond
        launch(shape)

    return launch_late


def test_rows_to_be_filtered_are_found_behind_frontiers_that_were_missed(device):
    """On the device a plan made ahead may have fewer rows than it says. Requests with filters join meanwhile."""
    target = Transformer.random(replace(CONFIGS["llama3"], head_dim=16, num_layers=1), 0, std=0.3)
    plain = next(r for r in make_requests(target.config) if r.id == "greedy")
    plain = replace(plain, params=replace(plain.params, max_tokens=16), stop_ids=frozenset())
    filtered = replace(plain, params=SamplingParams(max_tokens=1, logit_bias={7: 100.0}))
    joining = {f"filtered {step}": step for step in range(2, 8)}
    requests = [plain, *(replace(filtered, id=name) for name in joining)]
    engine = make_engine(device, target, make_draft(target), Fixed(3), ahead=True, overlap="on")
    outcome = serve(engine, requests, {plain.id: 0, **joining})
    assert outcome.tokens == reference(target, requests).tokens
    assert 0 < engine.stats.hits < engine.stats.chunks
