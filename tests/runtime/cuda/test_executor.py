"""The CUDA executor against the CPU's: the same requests get the same tokens.

Without a GPU its kernels run in Triton's interpreter, in float32, and equality is strict. On a GPU sums are made in
another order, and a token may differ if the best two scores nearly tie.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from faser.build import build_engine
from faser.config import EngineOptions
from faser.models.transformer import Transformer
from faser.policy import Fixed
from faser.request import Grammar, Request, SamplingParams
from faser.text.tokenizer import Tokenizer
from tests.engine.test_engine import Sometimes
from tests.oracle import RandomLengths, RandomStops
from tests.test_exactness import Outcome, make_requests, reference, serve
from tests.tiny import CONFIGS, make_draft

pytest.importorskip("triton")


def on(model: Transformer, device: str) -> Transformer:
    """The same weights on a device, in the storage order of a GPU."""
    moved = Transformer.empty(model.config, model.dtype, device, model.max_positions)
    for mine, theirs in zip(moved.weights(), model.weights(), strict=True):
        mine.copy_(theirs)
    moved.kv_scales = model.kv_scales
    if device == "cpu":  # kernels take rows, the CPU's own storage has columns
        moved = _row_major(moved)
    return moved


def _row_major(model: Transformer) -> Transformer:
    layers = tuple(
        type(layer)(**{name: None if w is None else w.contiguous() for name, w in vars(layer).items()})
        for layer in model.layers
    )
    head = model.embedding if model.head is model.embedding else model.head.contiguous()
    parts = model.embedding, layers, model.final_norm, head
    moved = Transformer(model.config, *parts, model.max_positions, vision=model.vision)
    moved.kv_scales = model.kv_scales
    return moved


def make_engine(device: str, target: Transformer, draft=None, policy=None, tokenizer=None, ahead=False, **sizes):
    from faser.runtime.cuda.device import CudaDevice

    place = CudaDevice()
    place.runs_ahead = ahead
    # without a bound on seconds both devices run the same steps
    options = {"max_running": 6, "max_batch_tokens": 64, "max_step_ms": 0, "page_size": 4, "num_pages": 300, **sizes}
    moved = on(draft, device) if isinstance(draft, Transformer) else draft
    return build_engine(on(target, device), moved, EngineOptions(policy=policy, **options), tokenizer, place)


@pytest.fixture(params=["llama3", "qwen3"])
def target(request, device):
    """The interpreter is slow: it gets one layer."""
    if device == "cpu" and request.param == "qwen3":
        pytest.skip("norms of queries and keys are tested with the kernel; the rest is the same")
    config = replace(CONFIGS[request.param], head_dim=16, num_layers=1 if device == "cpu" else 3)
    return Transformer.random(config, 0, std=0.3)


def chosen(target: Transformer, device: str) -> list[Request]:
    """Requests with and without filters and penalties; fewer and shorter ones for the interpreter."""
    requests = make_requests(target.config)
    if device == "cuda":
        return requests
    return [
        replace(r, params=replace(r.params, max_tokens=4, min_tokens=min(2, r.params.min_tokens)))
        for r in requests
        if r.id in ("greedy", "sampled", "top-p", "everything")
    ]


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


def test_rounded_keys_and_values_let_no_token_depend_on_speculation(target, device):
    target.kv_scales = ((0.02, 0.5),) * target.num_layers
    requests = chosen(target, device)[:2]
    expected = reference(target, requests, kv_dtype="fp8")
    if device == "cuda":  # rounding makes much of the last bits, which differ from a CPU's
        expected = serve(make_engine(device, target, kv_dtype="fp8"), requests)
    engine = make_engine(device, target, make_draft(target), Fixed(3), kv_dtype="fp8", ahead=True)
    assert engine.executor.target.pages.dtype is torch.float8_e4m3fn
    assert engine.executor.drafter.models[0].pages.dtype is target.dtype
    outcome = serve(engine, requests)
    assert outcome.total.accepted > 0
    assert outcome.tokens == expected.tokens


def test_more_prompt_rows_than_graphs_have_run_kernel_by_kernel(target, device, monkeypatch):
    """Prompts of the target, and the draft that catches up with them."""
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
    """Also if requests come and go in between, and if steps with filtered drafts are not planned ahead of."""
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
    """Three rows at a time are filtered, so that the rows of one request are filtered in several calls."""
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


@pytest.mark.gpu
def test_synthetic_acceptance_can_differ_by_position():
    config = replace(CONFIGS["llama3"], head_dim=16)
    target, draft = (Transformer.random(config, seed, std=0.3) for seed in (0, 9))
    requests = [r for r in make_requests(target.config) if r.id == "greedy with end token ignored"]
    engine = make_engine("cuda", target, draft, Fixed(3), acceptance=(1.0, 0.0))
    serve(engine, requests)
    stats = engine.stats
    assert stats.verified_per_position[1] > 0
    assert stats.accepted_per_position.tolist() == stats.verified_per_position[:1].tolist()


def test_a_windowed_draft_drafts_as_on_the_cpu(device):
    """A window of 64 in a context of 85 tokens: the draft computes the sinks, then begins again at its window."""
    config = replace(CONFIGS["llama3"], head_dim=16, num_layers=1)
    target = Transformer.random(config, 0, std=0.3)
    draft = make_draft(target)
    sizes = {"max_running": 3, "max_batch_tokens": 128, "max_step_ms": 0, "page_size": 4, "num_pages": 100}
    params = SamplingParams(max_tokens=5, ignore_eos=True)
    requests = [Request(id="long", prompt_token_ids=tuple(range(3, 43)) * 2, params=params, seed=0)]
    options = EngineOptions(policy=Fixed(2), draft_window=64, **sizes)
    expected = serve(build_engine(target, draft, options), requests)
    engine = make_engine(device, target, draft, Fixed(2), draft_window=64, **sizes)
    outcome = serve(engine, requests)
    assert outcome.tokens == expected.tokens == reference(target, requests).tokens
    assert outcome.total.accepted > 0
    assert outcome.stats == expected.stats, "the same drafts"


def test_a_target_with_sliding_windows_gets_the_tokens_of_the_cpu(device):
    target = Transformer.random(replace(CONFIGS["mistral"], head_dim=16, num_layers=2, windows=(9, 0)), 0, std=0.3)
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    requests = [Request(id="a", prompt_token_ids=tuple(range(3, 27)), params=params, seed=0)]
    outcome = serve(make_engine(device, target, make_draft(target), Fixed(2)), requests)
    assert outcome.tokens == reference(target, requests).tokens
    assert outcome.total.drafted > 0
