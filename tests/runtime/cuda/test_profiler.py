"""The profiler over the CUDA executor measures the graphs that serve, and leaves no trace in them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from faser.cost.profiled_cost import ProfiledCost
from faser.models.transformer import Transformer
from faser.runtime.device import Profiling
from tests.runtime.cuda.test_executor import chosen, make_engine
from tests.runtime.profiling.engines import Costly
from tests.test_exactness import reference, serve
from tests.tiny import CONFIGS, make_draft

pytest.importorskip("triton")


@pytest.fixture
def profiling(device, tmp_path, monkeypatch):
    """No profile is kept. The interpreter gets no time, so that only the steps every profile needs are measured."""
    from faser.runtime.cuda.device import CudaDevice

    monkeypatch.setenv("FASER_CACHE", str(tmp_path))
    how = replace(CudaDevice.profiling, seconds=2.0)
    if device == "cpu":
        how = replace(how, seconds=0.0, most_context=24, most_prompt_rows=12, has_lanes=False)
    monkeypatch.setattr(CudaDevice, "profiling", how)
    return how


@pytest.mark.parametrize(("kind", "ahead"), [("model", True), ("model", False), ("ngram", False)])
def test_requests_get_the_same_tokens_after_profiling(device, profiling: Profiling, kind, ahead):
    if device == "cpu" and not ahead:
        pytest.skip("slow in Triton's interpreter: `make test-gpu` runs these on a GPU")
    config = replace(CONFIGS["llama3"], head_dim=16, num_layers=1 if device == "cpu" else 3)
    target = Transformer.random(config, 0, std=0.3)
    requests = chosen(target, device)
    draft = make_draft(target) if kind == "model" else "ngram"
    engine = make_engine(device, target, draft, Costly(), ahead=ahead, profiling="full")
    assert isinstance(engine.cost, ProfiledCost)
    outcome = serve(engine, requests, {request.id: i for i, request in enumerate(requests)})
    assert outcome.tokens == reference(target, requests).tokens


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "ahead"), [("model", True), ("model", False), ("ngram", False)])
def test_idle_moments_complete_a_quick_profile_and_leave_requests_alone(profiling: Profiling, kind, ahead):
    target = Transformer.random(replace(CONFIGS["llama3"], head_dim=16), 0, std=0.3)
    requests = chosen(target, "cuda")
    right = reference(target, requests).tokens
    engine = make_engine("cuda", target, make_draft(target) if kind == "model" else "ngram", Costly(), ahead=ahead)
    assert engine.cost.profile.kind == "quick"
    moments = 0
    while engine.use_idle_moment():
        if moments % 16 == 5:
            assert serve(engine, requests, {request.id: i for i, request in enumerate(requests)}).tokens == right
        moments += 1
    assert moments > 16
    assert engine.cost.profile.kind in ("idle", "quick")  # as good as the machine allows
    assert engine.scheduler.prefixes.num_hits > 0
    assert serve(engine, requests, {request.id: i for i, request in enumerate(requests)}).tokens == right


@pytest.mark.gpu
def test_the_profile_of_a_gpu_has_a_point_for_every_graph(profiling: Profiling):
    target = Transformer.random(replace(CONFIGS["llama3"], head_dim=16), 0, std=0.3)
    profile = make_engine("cuda", target, make_draft(target), Costly(), ahead=True, profiling="full").cost.profile
    graphs = profiling.graph_rows
    assert profile.verify.rows == tuple(size for size in graphs if size <= 24)
    assert profile.first_draft.rows == profile.next_draft.rows == tuple(size for size in graphs if size <= 6)
    context = 16.0  # tokens; noise may put a line through the contexts measured to zero at none
    for curve in (profile.verify, profile.first_draft):
        assert (curve(np.array(curve.rows), context) > 0).all()
    assert profile.verify.is_stepped
    assert profile.prompts.stepped_to == profile.catch_up.stepped_to == max(profile.prompts.rows)
