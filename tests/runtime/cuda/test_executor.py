"""The CUDA executor against the CPU's: the same requests, the same tokens.

Without a GPU its kernels run through Triton's interpreter, in float32, and equality is strict. On a GPU in float32 sums
are made in another order, and a token may differ where the best two scores nearly tie.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle

import numpy as np
import pytest
import torch

from faser.arrays import IntArray
from faser.build import build_engine
from faser.config import EngineOptions
from faser.models.transformer import Transformer
from faser.policy import Fixed
from faser.policy.base import MOST_LENGTH, BatchView
from faser.policy.early_exit import EarlyExit, ExitPoint, ExitRule
from faser.policy.overlap import Chunks, Overlap, Way
from faser.request import Grammar, Request, SamplingParams
from faser.step import ExitReadings
from faser.text.tokenizer import Tokenizer
from tests.engine.test_engine import Sometimes
from tests.oracle import RandomLengths, RandomStops, SometimesOverlap
from tests.test_exactness import Outcome, make_requests, reference, serve
from tests.tiny import CONFIGS, make_draft

pytest.importorskip("triton")


def on(model: Transformer, device: str) -> Transformer:
    """The same weights elsewhere, in the storage order of a GPU."""
    moved = Transformer.empty(model.config, model.dtype, device, model.max_positions)
    for mine, theirs in zip(moved.weights(), model.weights(), strict=True):
        mine.copy_(theirs)
    if device == "cpu":  # kernels take rows, the CPU's own storage has columns
        moved = _row_major(moved)
    return moved


def _row_major(model: Transformer) -> Transformer:
    layers = tuple(
        type(layer)(**{name: None if w is None else w.contiguous() for name, w in vars(layer).items()})
        for layer in model.layers
    )
    head = model.embedding if model.head is model.embedding else model.head.contiguous()
    return Transformer(model.config, model.embedding, layers, model.final_norm, head, model.max_positions)


def make_engine(device: str, target: Transformer, draft=None, policy=None, tokenizer=None, ahead=False, **sizes):
    from faser.runtime.cuda.device import CudaDevice

    place = CudaDevice()
    place.runs_ahead = ahead
    # without a bound on seconds the steps of two devices are the same
    options = {"max_running": 6, "max_batch_tokens": 64, "max_step_ms": 0, "page_size": 4, "num_pages": 300, **sizes}
    moved = on(draft, device) if isinstance(draft, Transformer) else draft
    return build_engine(on(target, device), moved, EngineOptions(policy=policy, **options), tokenizer, place)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    if (request.param == "cpu") == torch.cuda.is_available():
        pytest.skip("the interpreter serves where there is no CUDA device, and only there")
    return request.param


@pytest.fixture(params=["llama3", "qwen3"])
def target(request, device):
    """The kernels' products need heads of 16; an interpreter wants little to do."""
    if device == "cpu" and request.param == "qwen3":
        pytest.skip("norms of queries and keys are tested with the kernel; the rest is the same")
    config = replace(CONFIGS[request.param], head_dim=16, num_layers=1 if device == "cpu" else 3)
    return Transformer.random(config, 0, std=0.3)


def chosen(target: Transformer, device: str) -> list[Request]:
    """Some with a temperature at most, some with filters and penalties; shorter where an interpreter runs them."""
    requests = make_requests(target.config)
    if device == "cuda":
        return requests
    return [
        replace(r, params=replace(r.params, max_tokens=4, min_tokens=min(2, r.params.min_tokens)))
        for r in requests
        if r.id in ("greedy", "sampled", "top-p", "everything")
    ]


# Of the tests below that take an interpreter half a minute each, the ones it runs.
INTERPRETED = {("some, twice", True), ("any length", True), ("right", False), ("in turns", True)}


def leave_most_to_the_gpu(device: str, runs: bool) -> None:
    if device == "cpu" and not runs:
        pytest.skip("slow in Triton's interpreter: `make test-gpu` runs these on a GPU")


POLICIES = {
    "off": (None, None),
    "a draft model": ("model", Fixed(3)),
    "a draft model with random lengths": ("model", RandomLengths(seed=1)),
    "a draft model that stops anywhere": ("model", RandomStops(4)),
    "prompt lookup": ("ngram", Fixed(4)),
}


@pytest.mark.parametrize("policy", POLICIES)
def test_requests_get_the_tokens_of_the_cpu(target, device, policy):
    kind, lengths = POLICIES[policy]
    draft = make_draft(target) if kind == "model" else kind
    requests = chosen(target, device)
    expected = reference(target, requests)
    outcome = serve(make_engine(device, target, draft, lengths), requests, {r.id: i for i, r in enumerate(requests)})
    assert outcome.tokens == expected.tokens
    assert outcome.reasons == expected.reasons
    if kind == "model":
        assert outcome.total.accepted > 0
    assert_same_logprobs(outcome, expected)


def test_more_prompt_rows_than_graphs_have_run_kernel_by_kernel(target, device, monkeypatch):
    """The target's prompts, and the draft's catching up with them."""
    monkeypatch.setattr("faser.runtime.cuda.model.MIXED_BUCKETS", (8,))
    requests = chosen(target, device)
    expected = reference(target, requests)
    engine = make_engine(device, target, make_draft(target), Fixed(2))
    mixed: list[bool] = []
    for model in (engine.executor.target, *engine.executor.drafter.models):
        launch = model.launch_mixed
        monkeypatch.setattr(
            model, "launch_mixed", lambda *given, launch=launch: (mixed.append(launch(*given)), mixed[-1])[1]
        )
    assert serve(engine, requests, {r.id: i for i, r in enumerate(requests)}).tokens == expected.tokens
    assert None in mixed, "everything fitted a graph"


def test_a_budget_between_two_buckets_has_room_for_the_larger(target, device):
    """Seven rows run as a graph of eight, and a draft of six requests as one of twelve."""
    requests = chosen(target, device)[:2]
    outcome = serve(make_engine(device, target, make_draft(target), Fixed(3), max_batch_tokens=7), requests)
    assert outcome.tokens == reference(target, requests).tokens


@pytest.mark.parametrize(
    ("policy", "filtered"),
    [("off", True), ("sometimes", True), ("always", False), ("random", False), ("stops", True), ("stops", False)],
)
def test_planning_ahead_of_results_gets_the_same_tokens(target, device, policy, filtered):
    """Also where requests come and go in between, and where steps with filtered drafts are waited for."""
    leave_most_to_the_gpu(device, policy != "always" and (policy, filtered) != ("stops", False))
    draft = make_draft(target) if policy != "off" else None
    lengths = {
        "off": None, "sometimes": Sometimes(seed=2), "always": Fixed(3), "random": RandomLengths(3),
        "stops": RandomStops(4),
    }[policy]  # fmt: skip
    requests = chosen(target, device)
    if not filtered:
        requests = [r for r in requests if r.id in ("greedy", "sampled")]
        requests = [replace(r, id=f"{r.id} {i}", seed=r.seed + i) for i in range(3) for r in requests]
    engine = make_engine(device, target, draft, lengths, ahead=True)
    submitted: list[int] = []
    submit = engine.executor.submit
    engine.executor.submit = lambda plan: (submit(plan), submitted.append(len(engine.executor._steps)))
    outcome = serve(engine, requests, {r.id: i for i, r in enumerate(requests)})
    assert outcome.tokens == reference(target, requests).tokens
    assert max(submitted) == 2, "nothing was planned ahead"


def assert_same_logprobs(outcome: Outcome, expected: Outcome) -> None:
    for name, logprobs in expected.logprobs.items():
        assert [item.token_id for item in outcome.logprobs[name]] == [item.token_id for item in logprobs]
        for ours, theirs in zip(outcome.logprobs[name], logprobs, strict=True):
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
            assert [token for token, _ in ours.top] == [token for token, _ in theirs.top]


def test_a_grammar_on_the_host_goes_with_filters_and_logprobs_on_the_device(device, folder, monkeypatch):
    """Three rows at a time are filtered, so that requests and rows of one request are torn apart."""
    pytest.importorskip("llguidance")
    config = replace(CONFIGS["llama3"], head_dim=16, num_layers=1, vocab_size=320, eos_token_ids=(1, 2))
    target = Transformer.random(config, 0, std=0.3)
    monkeypatch.setattr("faser.runtime.cuda.resampling.FILTERED_LOGITS", 3 * 320)
    filters = {"temperature": 1.2, "top_k": 40, "top_p": 0.95, "min_p": 0.01}
    ways = {
        "a grammar": {"grammar": Grammar("regex", "[0-9]{2,6}"), "logprobs": 2, **filters},
        "a ban and logprobs": {"min_tokens": 2, "logprobs": 3},
        "penalties and logprobs": {"presence_penalty": 0.5, "repetition_penalty": 1.2, "logprobs": 20, **filters},
        "logprobs": {"temperature": 1.0, "logprobs": 1},
        "a bias": {"logit_bias": {7: 9.0, 8: 8.5}, "temperature": 0.8},
    }
    requests = [
        Request(
            id=name,
            prompt_token_ids=(3, 4, 5, 60 + number),
            params=SamplingParams(max_tokens=4, **way),
            seed=number,
            stop_ids=frozenset(config.eos_token_ids),
        )
        for number, (name, way) in enumerate(ways.items())
    ]
    tokenizer = Tokenizer.from_folder(folder)
    plain = build_engine(target, None, EngineOptions(num_pages=300, page_size=4, max_step_ms=0), tokenizer)
    expected = serve(plain, requests)
    outcome = serve(make_engine(device, target, make_draft(target), Fixed(2), tokenizer), requests)
    assert outcome.tokens == expected.tokens
    assert outcome.total.accepted > 0
    assert tokenizer.decode(outcome.tokens["a grammar"]).isdigit()
    assert_same_logprobs(outcome, expected)
    assert {name: len(answers) for name, answers in outcome.logprobs.items() if answers} == {
        name: len(outcome.tokens[name]) for name, way in ways.items() if "logprobs" in way
    }


@pytest.mark.gpu
def test_preemption_changes_nothing():
    target = Transformer.random(replace(CONFIGS["llama3"], head_dim=16), 0, std=0.3)
    requests = chosen(target, "cuda")
    engine = make_engine("cuda", target, make_draft(target), Fixed(2), num_pages=30)
    outcome = serve(engine, requests)
    assert outcome.tokens == reference(target, requests).tokens
    assert engine.scheduler.num_preemptions > 0


@pytest.mark.gpu
@pytest.mark.parametrize("acceptance", [0.0, 1.0])
def test_synthetic_acceptance_is_what_was_asked_for(acceptance):
    config = replace(CONFIGS["llama3"], head_dim=16)
    target, draft = (Transformer.random(config, seed, std=0.3) for seed in (0, 9))
    requests = [r for r in make_requests(target.config) if r.id == "greedy with end token ignored"]
    stats = serve(make_engine("cuda", target, draft, Fixed(1), acceptance=acceptance), requests).total
    assert stats.verified > 0
    assert stats.accepted == acceptance * stats.verified


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("policy", ["chunks of 1", "chunks of 3", "any length"])
def test_drafting_while_drafts_are_verified_changes_no_token(device, policy, ahead):
    leave_most_to_the_gpu(device, (policy, ahead) in INTERPRETED)
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
    """Plain requests, so that steps are planned ahead; a draft that is the target, in some steps only."""
    leave_most_to_the_gpu(device, (kind, ahead) in INTERPRETED)
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
    """As `auto` might choose, one after the other; in each split, and behind each a step that does not overlap."""

    def __init__(self, splits: Sequence[int]) -> None:
        super().__init__()
        leads = [(MOST_LENGTH + 1, MOST_LENGTH), (4, 3), (2, 1)]
        ways = [Way(0.0, *each, split) for each in [*leads, (5, 0)] for split in splits]
        self.ways = cycle([each for way in ways for each in (way, None)])

    def chunks(self, view: BatchView, lengths: IntArray) -> Chunks | None:
        way = next(self.ways)
        return None if way is None else way.chunks(lengths.size)


@pytest.mark.gpu
@pytest.mark.parametrize("is_right", [True, False])
def test_what_a_few_requests_replay_was_captured_ahead_whichever_way_they_overlap(is_right):
    """A graph of a large model takes a tenth of a second."""
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


def test_a_verification_of_nothing_but_rides_is_captured_for_each_part(device, monkeypatch):
    from faser.runtime.cuda.shapes import verification

    target = Transformer.random(replace(CONFIGS["llama3"], head_dim=16), 0, std=0.3)  # a GPU's products need 16
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
    """Before every launch its stream sleeps, or does not: what does not wait for what it needs, shows."""
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
    """A plan made ahead has fewer rows than it says; requests with filters join while others' chunks are in flight."""
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


EXITS = {
    "nearly everything at the first layer": ExitRule((ExitPoint.by_rank(1, 1),)),
    "some, twice": ExitRule((ExitPoint.by_rank(1, 20), ExitPoint.by_rank(2, 6))),
    "by place, before the first layer": ExitRule(
        (ExitPoint(0, (0.0, 0.0, 0.0, 0.0, 1.0), 0.5), ExitPoint.by_rank(1, 10))
    ),
    "by confidence alone": ExitRule((ExitPoint(0, (0.0, 0.0, 0.0, -1.0, 0.3), 1.0),)),
    "against a shortlist": ExitRule((ExitPoint(1, (0.0, 1.0, 0.0, 0.0, 1.0), 0.5, 24),)),
    "a trial": ExitRule((ExitPoint.by_rank(1, 1), ExitPoint.by_rank(2, 1)), is_trial=True),
}


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("exits", EXITS)
def test_drafts_that_leave_early_change_no_token(device, exits, ahead):
    leave_most_to_the_gpu(device, (exits, ahead) in INTERPRETED)
    target = Transformer.random(replace(CONFIGS["llama3"], head_dim=16, num_layers=3), 0, std=0.3)
    requests = chosen(target, device)
    expected = reference(target, requests)
    engine = make_engine(device, target, make_draft(target), Fixed(3), ahead=ahead)
    engine.exits = EarlyExit("on", 3, rule=EXITS[exits])
    outcome = serve(engine, requests, {r.id: i for i, r in enumerate(requests)})
    assert outcome.tokens == expected.tokens
    assert outcome.reasons == expected.reasons
    assert_same_logprobs(outcome, expected)
    stats = engine.stats
    if exits == "a trial":
        assert stats.verified == stats.drafted > stats.accepted > 0
    else:
        assert stats.verified < stats.drafted
        assert sum(engine.exits.stats.pruned.values()) == stats.drafted - stats.verified


@pytest.mark.parametrize("candidates", [0, 24])
def test_middle_layers_say_of_drafts_what_the_cpu_s_do(device, candidates):
    """Rank, margin, confidence and place of every draft of a step, on both sides; before the first layer, too."""
    leave_most_to_the_gpu(device, candidates > 0)
    target = Transformer.random(replace(CONFIGS["llama3"], head_dim=16, num_layers=2), 0, std=0.3)
    draft = make_draft(target)
    plain = [r for r in chosen(target, device) if r.id in ("greedy", "sampled")]
    requests = [replace(r, params=replace(r.params, max_tokens=4)) for r in plain]
    told: list[list[ExitReadings]] = []
    options = {"max_running": 6, "max_batch_tokens": 64, "max_step_ms": 0, "page_size": 4, "num_pages": 300}
    plain = build_engine(target, draft, EngineOptions(policy=Fixed(3), **options))
    for engine in (plain, make_engine(device, target, draft, Fixed(3))):
        points = ExitPoint.by_rank(0, 1), ExitPoint.by_rank(1, 1, candidates)
        engine.exits = Told("on", 2, rule=ExitRule(points, is_trial=True))
        serve(engine, requests)
        told.append(engine.exits.told)
    assert len(told[0]) == len(told[1]) > 0
    for mine, theirs in zip(*told, strict=True):
        assert mine.owner.tolist() == theirs.owner.tolist()
        assert mine.place.tolist() == theirs.place.tolist()
        torch.testing.assert_close(
            torch.from_numpy(mine.features), torch.from_numpy(theirs.features), atol=2e-3, rtol=1e-3
        )


def test_beside_prompts_drafts_leave_before_the_first_layer_or_not_at_all(device):
    target = Transformer.random(replace(CONFIGS["llama3"], head_dim=16, num_layers=2), 0, std=0.3)
    requests = chosen(target, device)
    expected = reference(target, requests)
    engine = make_engine(device, target, make_draft(target), Fixed(3), max_batch_tokens=12)
    by_place = ExitPoint(0, (0.0, 0.0, 0.0, 0.0, 1.0), 0.5)  # the first of each draft stays
    engine.exits = told = Told("on", 2, rule=ExitRule((by_place, ExitPoint.by_rank(1, 1))))
    outcome = serve(engine, requests, {r.id: 2 * i for i, r in enumerate(requests)})
    assert outcome.tokens == expected.tokens
    was_looked_at = [not np.isnan(each.features[1]).all() for each in told.told]
    assert set(was_looked_at) == {True, False}
    for readings, looked in zip(told.told, was_looked_at, strict=True):
        assert (readings.kept[0] == np.minimum(1, np.bincount(readings.owner, minlength=readings.kept.shape[1]))).all()
        assert looked or (readings.kept[1] == readings.kept[0]).all()


class Told(EarlyExit):
    """Keeps what it was told."""

    def __init__(self, *given, **named) -> None:
        super().__init__(*given, **named)
        self.told: list[ExitReadings] = []

    def learn(self, rule, plan, result) -> None:
        if result.exits is not None:
            self.told.append(result.exits)
