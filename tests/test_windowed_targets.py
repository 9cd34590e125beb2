"""Targets whose layers see a sliding window: the tokens of a dense forward, on fewer pages."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from faser.models.transformer import Transformer
from faser.policy import Fixed
from faser.request import Request, SamplingParams
from tests.models.reference import forward
from tests.oracle import RandomLengths
from tests.test_exactness import make_engine, serve
from tests.tiny import CONFIGS, VOCABULARY, make_draft, make_head

SIZES = {"max_model_len": 256, "max_batch_tokens": 128}
WINDOWS = {"all layers": (20, 20, 20), "some layers": (20, 0, 12)}


def make_target(windows: tuple[int, ...]) -> Transformer:
    return Transformer.random(replace(CONFIGS["mistral"], max_positions=256, windows=windows), 0, std=0.3)


def make_requests(num_prompt: int, num_output: int, count: int = 3) -> list[Request]:
    random = np.random.default_rng(0)
    params = SamplingParams(max_tokens=num_output, ignore_eos=True)
    prompts = random.integers(3, VOCABULARY, (count, num_prompt)).tolist()
    return [
        Request(id=str(i), prompt_token_ids=tuple(prompt), params=params, seed=i) for i, prompt in enumerate(prompts)
    ]


def assert_greedy(target: Transformer, request: Request, output: list[int]) -> None:
    """Every token is the best one of a dense forward over what stands before it."""
    assert len(output) == request.params.max_tokens
    tokens = torch.tensor([*request.prompt_token_ids, *output])
    best = forward(target, tokens, target.config.layer_windows).argmax(-1)
    assert output == best[len(request.prompt_token_ids) - 1 : -1].tolist()


@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize("kind", ["off", "draft", "head"])
def test_output_is_that_of_a_dense_forward(windows, kind):
    target = make_target(WINDOWS[windows])
    draft = {"off": None, "draft": make_draft(target), "head": make_head(target)}[kind]
    engine = make_engine(target, draft, None if draft is None else RandomLengths(), **SIZES)
    assert (engine.scheduler.target_pages.window is None) == (windows == "some layers" or kind == "head")
    requests = make_requests(70, 30)
    outcome = serve(engine, requests, {request.id: 5 * i for i, request in enumerate(requests)})
    for request in requests:
        assert_greedy(target, request, outcome.tokens[request.id])
    assert kind == "off" or outcome.total.drafted > 0


def test_pages_outside_all_windows_serve_other_requests():
    requests = make_requests(10, 140)
    found = {}
    for windows in ((), WINDOWS["all layers"]):
        target = make_target(windows)
        engine = make_engine(target, make_draft(target), Fixed(2), **{**SIZES, "num_pages": 50})
        outcome = serve(engine, requests)
        for request in requests:
            assert_greedy(target, request, outcome.tokens[request.id])
        found[windows] = engine.scheduler.num_preemptions
    assert found[()] > 0
    assert found[WINDOWS["all layers"]] == 0


def test_the_prefix_cache_has_what_fell_out_of_the_window():
    target = make_target(WINDOWS["all layers"])
    engine = make_engine(target, make_draft(target), Fixed(3), **SIZES)
    (request,) = make_requests(60, 60, count=1)
    first = serve(engine, [request])
    longer = (*request.prompt_token_ids, *first.tokens["0"])
    again = replace(request, id="again", prompt_token_ids=longer, params=replace(request.params, max_tokens=20))
    outcome = serve(engine, [again])
    assert_greedy(target, again, outcome.tokens["again"])
    assert outcome.stats["again"].cached >= 110
