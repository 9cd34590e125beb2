"""An exception in a launch on the GPU's code costs the requests that ran; then the engine is as before."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("triton")

from faser.models.transformer import Transformer
from faser.policy import Fixed
from faser.request import Request, SamplingParams
from tests.faults import armed
from tests.runtime.cuda.test_executor import make_engine
from tests.test_exactness import reference, serve
from tests.test_faults import assert_only_some_failed, serve_through
from tests.tiny import CONFIGS, make_draft


@pytest.fixture(scope="module")
def scene():
    """One layer and few tokens, because the interpreter is slow; three requests, and what they get."""
    target = Transformer.random(replace(CONFIGS["llama3"], head_dim=16, num_layers=1), 0, std=0.3)
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    requests = [Request(id=str(n), prompt_token_ids=(5, 7 + n), params=params, seed=n) for n in range(3)]
    return target, make_draft(target), requests, reference(target, requests)


def test_faults_on_the_way_to_the_device_and_back_cost_one_request_each(scene, device):
    target, draft, requests, right = scene
    plan = "launch:2:error,collect:2:no_memory"
    engine = make_engine(device, target, draft, Fixed(2), ahead=True, max_running=1)
    with armed(plan):
        outcome, num_raised = serve_through(engine, requests)
    assert num_raised == 2
    assert outcome.reasons.keys() == right.reasons.keys(), "every request is answered"
    again = serve(engine, requests)
    assert again.reasons == right.reasons
    if device == "cpu":  # a GPU sums in another order
        assert_only_some_failed(outcome, right, most=num_raised)
        assert again.tokens == right.tokens
