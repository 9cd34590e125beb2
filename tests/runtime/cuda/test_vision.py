"""Pictures on the GPU's code: the output of the CPU, whatever the batch, the graphs and the drafts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from faser.build import build_engine
from faser.config import EngineOptions
from faser.engine.vision import BLOCK_ROWS
from faser.models.config import Rope
from faser.models.transformer import Transformer
from faser.policy import Fixed
from faser.request import Request, SamplingParams
from faser.runtime.cuda import vision as cuda_vision
from faser.runtime.cuda.device import CudaDevice
from faser.runtime.cuda.rows import DeviceRows
from faser.runtime.cuda.vision import CudaEyes, EncoderGraphs, RowAngles
from faser.step import Admission, GridWrite, VisionPlan
from tests.oracle import RandomLengths
from tests.runtime.cuda.test_executor import on
from tests.test_exactness import make_engine, reference, serve
from tests.test_sliding import request_of, sliding, video
from tests.test_vision import ROW_BYTES, make_prompt, replace_eyes
from tests.tiny import VISION_CONFIGS, make_draft, make_grid

CONFIGS = {
    "spatial": replace(VISION_CONFIGS["qwen2_5_vl"], head_dim=16, num_layers=2, rope=Rope(sections=(2, 3, 3))),
    "plain": replace(VISION_CONFIGS["watch"], head_dim=16, num_layers=2),
}


@pytest.fixture(scope="module")
def models() -> dict[str, Transformer]:
    return {name: Transformer.random(config, 0, std=0.3) for name, config in CONFIGS.items()}


def requests(target: Transformer, count: int = 4, max_tokens: int = 5) -> list[Request]:
    made = []
    for number in range(count):
        parts = [
            [[5, 6, 7], make_grid(4, 4, seed=1), [8]],
            [make_grid(4, 6, 1, seed=2), [9, 10], make_grid(4, 4, seed=1)],
            [[11, 12, 13, 14]],
            [[5], make_grid(4, 4, seed=1, kept=np.array([0, 3])), [8, 9]],
        ][number % 4]
        token_ids, vision = make_prompt(parts, bool(target.config.rope.sections))
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=1.0 * (number % 2))
        vision = vision if vision.grids else None
        made.append(Request(id=str(number), prompt_token_ids=token_ids, params=params, seed=number, vision=vision))
    return made


def engine_of(target: Transformer, device: str, draft=None, policy=None, *, ahead: bool = True, **sizes):
    place = CudaDevice()
    place.runs_ahead = ahead
    options = {"max_running": 4, "max_batch_tokens": 64, "max_step_ms": 0, "page_size": 4, "num_pages": 64, **sizes}
    moved = on(draft, device) if isinstance(draft, Transformer) else draft
    return build_engine(on(target, device), moved, EngineOptions(policy=policy, **options), device=place)


@pytest.mark.parametrize(
    ("eyes", "draft", "sizes"),
    [
        ("plain", None, {}),
        ("spatial", None, {"max_batch_tokens": 8, "vision_memory": 2 * BLOCK_ROWS * ROW_BYTES}),
        ("spatial", "model", {"policy": RandomLengths}),
        ("spatial", "model", {"policy": lambda: Fixed(3), "early_exit": "on"}),
    ],
    ids=["off", "pieces", "drafts", "early exit"],
)
def test_the_output_is_that_of_the_cpu(models, device, eyes, draft, sizes):
    target = models[eyes]
    some = requests(target)
    right = reference(target, some).tokens
    policy = sizes["policy"]() if "policy" in sizes else None
    sizes = {name: value for name, value in sizes.items() if name != "policy"}
    drafting = make_draft(replace_eyes(target)) if draft == "model" else draft
    engine = engine_of(target, device, drafting, policy, **sizes)
    assert serve(engine, some).tokens == right
    if draft is None:
        assert serve(engine, some).tokens == right, "with pages and encoded pictures of before"


def test_a_session_says_what_it_says_on_the_cpu(models, device):
    """Windows of a stream whose KV is taken over: the same approximation on both devices."""
    target = models["spatial"]
    grids = [make_grid(4, 4, seed=i) for i in range(4)]

    def say(engine) -> list[list[int]]:
        prompts, said = sliding(target), []
        for first in range(3):
            prompt = prompts.next(video(*grids[first : first + 2]), np.zeros(2, dtype=bool), 3)
            params = SamplingParams(max_tokens=3, ignore_eos=True)
            engine.add(replace(request_of(prompt), params=params))
            tokens: list[int] = []
            while engine.has_work:
                for item in engine.step():
                    tokens += item.token_ids
                    if item.finish is not None:
                        assert item.finish.stats.reused == (4 if first else 0)
            said.append(tokens)
        return said

    assert say(engine_of(target, device, num_pages=64)) == say(make_engine(target))


def test_failed_encodings_cost_their_requests_and_nothing_else(models, device, monkeypatch):
    target = models["plain"]
    engine = engine_of(target, device)
    picture, _, text, _ = requests(target)

    def fail(self, plan) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patched:
        patched.setattr(CudaEyes, "encode", fail)
        for _ in range(3):
            engine.add(picture)
            with pytest.raises(RuntimeError, match="out of memory"):
                engine.step()
            engine.abandon()
    assert serve(engine, [text]).tokens == reference(target, [text]).tokens


# ── the parts ────────────────────────────────────────────────────────────────────────────────────────────────────────


def device_rows(slots: list[int], positions: list[int], num_rows: int, device: str) -> DeviceRows:
    """Rows of a forward, some of them padding."""
    rows = DeviceRows.allocate(2, len(slots), len(slots), device)
    rows.slots.copy_(torch.tensor(slots))
    rows.positions.copy_(torch.tensor(positions))
    rows.cu_rows[-1] = num_rows
    return rows


def test_only_rows_of_pictures_are_replaced(models, device):
    target = on(models["plain"], device)
    grid = make_grid(4, 4, seed=5)
    history = torch.zeros(3, 20, dtype=torch.int32, device=device)
    eyes = CudaEyes(target.vision, 40, 32, history)
    places = np.arange(grid.num_tokens) + 7
    plan = VisionPlan((GridWrite(grid, places),), np.array([1, 1]), np.array([4, 5]), places[:2])
    hidden = torch.ones(4, 32, device=device)
    with torch.inference_mode():
        eyes.encode(plan)
        eyes.set_sources(plan)
        eyes.replace_rows(device_rows([1, 1, 0, 1], [3, 4, 4, 5], 3, device), hidden)
        seen = target.vision.encode([grid])
    torch.testing.assert_close(hidden[1], seen[0], atol=1e-5, rtol=1e-5)
    assert (hidden[[0, 2, 3]] == 1).all(), "text, another slot, padding"
    with torch.inference_mode():
        eyes.admit([Admission(1, np.zeros(6, np.int64), 6, SamplingParams(), 0, frozenset())])
        hidden.fill_(1)
        eyes.replace_rows(device_rows([1, 1, 0, 1], [3, 4, 4, 5], 4, device), hidden)
    assert (hidden == 1).all(), "the slot has another request now"


@pytest.mark.parametrize("eyes", CONFIGS)
def test_a_forward_whose_shape_comes_again_is_captured(models, device, eyes):
    """Every result is right: before the capture, in it and after it. Kept groups differ in place, not in number."""
    encoder = on(models[eyes], device).vision
    kept = [np.array(each) for each in ([0, 1, 4], [1, 2, 5], [0, 3, 4], [2, 3, 5])]  # one to three in a window
    with torch.inference_mode():
        buffer = torch.full((30, encoder.config.output_size), 7.0, device=device)
        graphs, used = EncoderGraphs(encoder, buffer), np.zeros(30, dtype=bool)
        for number, groups in enumerate(kept):
            grids = [make_grid(4, 4, seed=number), make_grid(4, 6, seed=9 - number, kept=groups)]
            rows = np.random.default_rng(number).permutation(np.flatnonzero(~used))[:7]
            graphs.encode(grids, rows)
            used[rows] = True
            torch.testing.assert_close(buffer[torch.from_numpy(rows)], encoder.encode(grids), atol=1e-5, rtol=1e-5)
            assert (buffer[torch.from_numpy(~used)] == 7).all(), "rows of others stay"
    assert 1 <= graphs.num_captured <= 2


def test_neither_large_forwards_nor_too_many_are_captured(models, device, monkeypatch):
    encoder = on(models["plain"], device).vision
    monkeypatch.setattr(cuda_vision, "MAX_GRAPH_PATCHES", 20)
    monkeypatch.setattr(cuda_vision, "MAX_GRAPHS", 1)
    buffer = torch.zeros(30, encoder.config.output_size, device=device)
    graphs = EncoderGraphs(encoder, buffer)
    with torch.inference_mode():
        for number in range(9):
            grid = make_grid(*[(4, 4), (2, 4), (4, 6)][number % 3], seed=number)
            graphs.encode([grid], np.arange(grid.num_tokens))
            torch.testing.assert_close(buffer[: grid.num_tokens], encoder.encode([grid]), atol=1e-5, rtol=1e-5)
    assert graphs.num_captured == 1


def test_a_forward_that_cannot_be_captured_runs_without_a_graph(models, device, monkeypatch):
    def fail(*_):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(cuda_vision, "capture", fail)
    encoder, grid = on(models["plain"], device).vision, make_grid(4, 4, seed=3)
    buffer = torch.full((8, encoder.config.output_size), 7.0, device=device)
    graphs = EncoderGraphs(encoder, buffer)
    with torch.inference_mode():
        for _ in range(3):
            graphs.encode([grid], np.arange(4, 8))
        torch.testing.assert_close(buffer[4:], encoder.encode([grid]), atol=1e-5, rtol=1e-5)
    assert graphs.num_captured == 0
    assert (buffer[:4] == 7).all()


def test_angles_are_those_of_the_model(models, device):
    target = on(models["spatial"], device)
    history = torch.zeros(3, 20, dtype=torch.int32, device=device)
    angles = RowAngles(target, 5, history)
    token_ids, vision = make_prompt([[5, 6], make_grid(4, 6), [7]], spatial=True)
    vision = replace(vision, shift=9)
    admission = Admission(2, np.array(token_ids), len(token_ids), SamplingParams(), 0, frozenset(), vision)
    text = Admission(0, np.zeros(4, np.int64), 4, SamplingParams(), 0, frozenset(), None)
    slots, index = [2, 2, 2, 0, 0], [1, 5, 12, 3, 12]
    with torch.inference_mode():
        angles.admit([admission, text])
        angles.compute(device_rows(slots, index, 4, device))
    positions = torch.from_numpy(vision.rotary_positions(20))[[1, 5, 12]]
    wanted = torch.cat([positions, torch.full((1, 3), 3)])
    cos, sin = target.rotation(wanted.to(device))
    torch.testing.assert_close(angles.cos[:4], cos)
    torch.testing.assert_close(angles.sin[:4], sin)
    assert (angles.cos[4] == 0).all(), "padding is left alone"
