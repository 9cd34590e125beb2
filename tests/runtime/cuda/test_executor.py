"""The CUDA executor against the CPU's: the same requests, the same tokens.

Without a GPU its kernels run through Triton's interpreter, in float32, and equality is strict. On a GPU in float32 sums
are made in another order, and a token may differ where the best two scores nearly tie.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from faser.config import EngineOptions
from faser.models.transformer import Transformer
from faser.policy import Fixed
from faser.runtime.build import build_engine
from faser.types import Request
from tests.oracle import RandomLengths
from tests.test_exactness import make_requests, reference, serve
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


def make_engine(device: str, target: Transformer, draft=None, policy=None, **sizes):
    from faser.runtime.cuda.device import CudaDevice

    options = {"max_running": 6, "max_batch_tokens": 64, "page_size": 4, "num_pages": 300, **sizes}
    moved = on(draft, device) if isinstance(draft, Transformer) else draft
    return build_engine(on(target, device), moved, EngineOptions(policy=policy, **options), device=CudaDevice())


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
    """Some whose rows the device samples, some whose rows the host does; shorter where an interpreter runs them."""
    requests = make_requests(target.config)
    if device == "cuda":
        return requests
    return [
        replace(r, params=replace(r.params, max_tokens=5, min_tokens=min(2, r.params.min_tokens)))
        for r in requests
        if r.id in ("greedy", "sampled", "everything")
    ]


POLICIES = {
    "off": (None, None),
    "a draft model": ("model", Fixed(3)),
    "a draft model with random lengths": ("model", RandomLengths(seed=1)),
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
    for name, logprobs in expected.logprobs.items():
        assert [item.token_id for item in outcome.logprobs[name]] == [item.token_id for item in logprobs]


@pytest.mark.gpu
def test_preemption_changes_nothing():
    target = Transformer.random(replace(CONFIGS["llama3"], head_dim=16), 0, std=0.3)
    requests = chosen(target, "cuda")
    engine = make_engine("cuda", target, make_draft(target), Fixed(2), num_pages=40)
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
