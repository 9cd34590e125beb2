"""An error about GPU memory says which flag to lower, and start-up logs how memory is divided."""

import logging
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from faser.build import build_engine, load_pair
from faser.config import EngineOptions
from faser.errors import ConfigError, EngineError
from faser.limits import KeyWindow, Limits
from faser.models import weights
from faser.models.transformer import Transformer
from faser.policy import Fixed
from faser.request import Request, SamplingParams
from faser.runtime.cuda.memory import GIB, RESERVED_BYTES, Division, explained_shortage, fitting_pages
from tests.runtime.cuda.test_executor import on
from tests.tiny import CONFIGS, make_draft


@pytest.mark.parametrize("kind", [ConfigError, EngineError])
def test_a_shortage_names_the_flags(kind):
    advice = r"lower --kv-memory, --max-batch-tokens or --max-running \(tried 7 GiB\)"
    with pytest.raises(kind, match=advice), explained_shortage(kind):
        raise torch.OutOfMemoryError("tried 7 GiB\nand a long explanation")


def test_other_errors_pass():
    with pytest.raises(KeyError), explained_shortage(EngineError):
        raise KeyError("x")


def test_the_division_adds_up_to_the_whole():
    division = Division(140 * GIB, GIB, 17 * GIB, GIB // 2, 118 * GIB, GIB // 2, 1_000_000)
    assert division.left == 3 * GIB
    text = str(division)
    for part in (
        "140.0 GiB",
        "weights 17.0",
        "KV pages 118.0 (1,000,000 tokens)",
        "buffers 0.5",
        "graphs 0.5",
        "left 3.0",
    ):
        assert part in text


def test_a_model_too_large_for_the_memory_is_refused_with_advice(folder, monkeypatch):
    def fail(*_args, **_kwargs):
        raise torch.OutOfMemoryError("tried 70 GiB\nand a long explanation")

    monkeypatch.setattr(weights, "load", fail)
    with pytest.raises(ConfigError, match=r"loading the target in float32: .* --device cpu \(tried 70 GiB\)"):
        load_pair(str(folder), None, EngineOptions(device="cpu"))


def parts(kv_memory, max_model_len=4096):
    return SimpleNamespace(kv_memory=kv_memory, page_size=16, limits=Limits(8, 64, max_model_len), most_pages=1000)


MIB = 2**20


def test_pages_on_a_gpu_are_those_of_the_budget():
    assert fitting_pages(parts(100 * MIB), MIB, 8 * GIB, 9 * GIB) == 100
    assert fitting_pages(parts(None), MIB, RESERVED_BYTES + 70 * MIB, 9 * GIB) == 70
    assert fitting_pages(parts(4 * GIB), MIB, 8 * GIB, 9 * GIB) == 1000, "more could never be used"


def test_what_a_windowed_draft_leaves_goes_to_the_target_of_a_gpu():
    windowed = parts(None)
    windowed.limits = Limits(2, 64, 4096, draft_window=KeyWindow(100, 4))
    room = RESERVED_BYTES + 120 * MIB
    assert fitting_pages(parts(None), MIB, room, 9 * GIB, MIB) == 60
    assert fitting_pages(windowed, MIB, room, 9 * GIB, MIB) == 120 - windowed.limits.most_draft_pages(16) == 100


@pytest.mark.parametrize(
    ("given", "free", "says"),
    [
        (parts(100 * GIB), 8 * GIB, r"kv_memory of 100 GiB: there is room for at most 6\.5 GiB; give less"),
        (parts(10 * MIB), 8 * GIB, r"holds 160 tokens, too few for a request of 256; give at least 0\.016 GiB"),
        (parts(MIB // 2), 8 * GIB, r"holds 0 tokens, too few for a request of 256"),
        (parts(MIB, max_model_len=20), 8 * GIB, r"holds 16 tokens, too few for a request of 32"),
        (parts(None), RESERVED_BYTES + 10 * MIB, r"1\.5 of 9\.0 GiB are free beside the models, too little"),
    ],
)
def test_kv_memory_that_does_not_fit_or_serves_no_useful_request_is_refused_on_a_gpu(given, free, says):
    with pytest.raises(ConfigError, match=says):
        fitting_pages(given, MIB, free, 9 * GIB)


@pytest.fixture
def models():
    target = Transformer.random(replace(CONFIGS["llama3"], head_dim=16), 0)
    return on(target, "cuda"), on(make_draft(target), "cuda")


@pytest.mark.gpu
def test_more_pages_than_memory_are_refused_with_advice(models):
    with pytest.raises(ConfigError, match="lower --kv-memory"):
        build_engine(*models, EngineOptions(num_pages=10**9, device="cuda", max_running=4))


@pytest.mark.gpu
def test_start_up_says_how_memory_is_divided(models, caplog):
    with caplog.at_level(logging.INFO, "faser.engine"):
        engine = build_engine(*models, EngineOptions(kv_memory=2**28, device="cuda", max_running=4))
    (line,) = [record.getMessage() for record in caplog.records if "GPU memory" in record.getMessage()]
    pool = engine.scheduler.target_pages
    assert f"({pool.num_pages * pool.page_size:,} tokens)" in line
    engine.close()


@pytest.mark.gpu
def test_a_step_without_memory_fails_with_advice_and_the_engine_goes_on(models, monkeypatch):
    engine = build_engine(*models, EngineOptions(policy=Fixed(2), num_pages=64, device="cuda", max_running=4))
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    engine.add(Request(id="a", prompt_token_ids=(1, 2, 3), params=params, seed=0))
    with monkeypatch.context() as patch:

        def fail(*_):
            torch.empty(2**50, device="cuda")

        patch.setattr(engine.executor.verifier, "launch", fail)
        with pytest.raises(EngineError, match="lower --kv-memory"):
            engine.step()
    assert len(engine.abandon()) == 1
    engine.add(Request(id="b", prompt_token_ids=(1, 2, 3), params=params, seed=0))
    tokens = []
    while engine.has_work:
        tokens += [token for item in engine.step() for token in item.token_ids]
    assert len(tokens) == 4
