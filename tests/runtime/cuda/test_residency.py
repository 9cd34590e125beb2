"""A draft that leaves the GPU in mid-generation and comes back: the same tokens, drafts as good as before.

Without a GPU the kernels run in Triton's interpreter, over the host's own virtual memory: a page that is used where no
memory is mapped ends the process.
"""

from __future__ import annotations

import gc
import logging
from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from faser.build import build_engine
from faser.config import EngineOptions
from faser.engine.residency import Place
from faser.errors import ConfigError, MoveError
from faser.models.transformer import Transformer
from faser.policy import Fixed
from faser.policy.residency import ResidencyRule
from faser.request import Request, SamplingParams
from faser.runtime.cuda.device import CudaDevice
from faser.runtime.cuda.virtual_memory import CudaMemoryDriver, open_driver
from tests.oracle import Never
from tests.runtime.cuda.host_driver import HostDriver
from tests.runtime.cuda.test_executor import on
from tests.test_exactness import reference, serve
from tests.tiny import CONFIGS, make_draft

PAGE_SIZE = 16
# Sixteen pages of a layer of these heads are the granularity of a GPU, 2 MiB.
GPU_HEADS = {"num_heads": 8, "num_kv_heads": 8, "head_dim": 128}
CPU_HEADS = {"head_dim": 16}
GRANULARITY = 4096  # of the host: one page of a layer


class MovedByHand(Fixed):
    def residency_rule(self) -> ResidencyRule:
        return Never()


class FailingDriver:
    """A GPU's driver, some of whose calls fail."""

    def __init__(self, driver) -> None:
        self._driver = driver
        self._failing: set[str] = set()

    def __getattr__(self, name):
        if name in self._failing:
            self._failing.remove(name)

            def fail(*_):
                raise MoveError(f"CUDA_ERROR_OF_{name.upper()}")

            return fail
        return getattr(self._driver, name)

    def fail(self, name: str) -> None:
        self._failing.add(name)


class Moving:
    """An engine whose draft can leave, and what it served."""

    def __init__(self, device: str, length: int = 2, num_pages: int = 16, ahead: bool = False, **sizes) -> None:
        heads = GPU_HEADS if device == "cuda" else CPU_HEADS
        config = replace(CONFIGS["llama3"], num_layers=3 if device == "cuda" else 1, **heads)
        self.target = Transformer.random(config, 0, std=0.3)
        self.draft = on(make_draft(self.target), device)
        gpu = torch.device("cuda")
        self.driver = FailingDriver(open_driver(gpu)) if device == "cuda" else HostDriver(GRANULARITY)
        place = CudaDevice()
        place.runs_ahead = ahead
        place.open_driver = lambda _device: self.driver
        options = {"max_running": 6, "max_batch_tokens": 64, "max_step_ms": 0, "page_size": PAGE_SIZE, **sizes}
        self.engine = build_engine(
            on(self.target, device), self.draft,
            EngineOptions(policy=MovedByHand(length), num_pages=num_pages, offload="on", **options), device=place,
        )  # fmt: skip
        self.memory = self.engine.executor.draft_memory
        self.most_page = 0  # that a request had
        self.page_moves = 0

    def serve(self, requests, moves=None):
        """Serve; `moves` says at which steps the draft is told to leave and to return."""
        engine, step, submit, count = self.engine, self.engine.step, self.engine.executor.submit, [0]

        def watched_step():
            told = (moves or {}).get(count[0])
            if told is not None:
                told()
            count[0] += 1
            progress = step()
            pool = engine.scheduler.target_pages
            self.most_page = max(self.most_page, int(pool.table.max()))
            return progress

        def watched_submit(plan):
            self.page_moves += 0 if plan.moves is None else plan.moves.sources.size
            submit(plan)

        engine.step, engine.executor.submit = watched_step, watched_submit
        try:
            return serve(engine, requests)
        finally:
            engine.step, engine.executor.submit = step, submit

    def settle(self, place: Place) -> None:
        """Let an engine without requests finish its move."""
        for _ in range(10_000):
            if self.engine.residency.place is place:
                return
            self.engine.use_idle_moment()
        raise AssertionError(f"the draft is {self.engine.residency.place}")

    def close(self) -> None:
        self.engine.close()


def some_requests(device: str, count: int = 6, max_tokens: int = 8) -> list[Request]:
    """On a GPU each has 40 tokens."""
    random, prompt = np.random.default_rng(0), 20
    max_tokens = 40 if device == "cuda" else max_tokens
    return [
        Request(
            id=str(number),
            prompt_token_ids=tuple(random.integers(3, 61, size=prompt + 3 * number).tolist()),
            params=SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=float(number % 2)),
            seed=number,
        )
        for number in range(count)
    ]


@pytest.fixture
def moving(device):
    made = []

    def make(**options) -> Moving:
        made.append(Moving(device, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()
        if isinstance(each.driver, HostDriver):
            assert each.driver.is_empty


@pytest.mark.parametrize("ahead", [False, True])
def test_a_draft_that_leaves_and_returns_in_mid_generation_changes_no_token(moving, device, ahead):
    rig = moving(ahead=ahead, num_pages=6 if device == "cpu" else 16)
    requests = some_requests(device)
    residency = rig.engine.residency
    # a return is given up where pages are short, so it is asked for again
    returns = dict.fromkeys(range(20 if device == "cuda" else 7, 500), residency.come_back)
    outcome = rig.serve(requests, {2: residency.leave, **returns})
    assert outcome.tokens == reference(rig.target, requests).tokens
    assert rig.memory.pages_gained > 0
    assert rig.most_page >= rig.memory.layout.base_pages, "no request had a page in the draft's memory"
    residency.come_back()
    rig.settle(Place.RESIDENT)
    assert residency.stats.moves == 2


def test_live_pages_move_out_of_the_drafts_memory(moving, device):
    """Requests that began while the draft was away are in the middle when it returns."""
    rig = moving(num_pages=24 if device == "cpu" else 32)
    requests = some_requests(device, count=3, max_tokens=14)
    residency = rig.engine.residency
    pool = rig.engine.scheduler.target_pages
    residency.leave()
    rig.settle(Place.AWAY)
    pool._free[: pool.num_free] = pool._free[: pool.num_free][::-1].copy()  # the draft's memory first
    outcome = rig.serve(requests, dict.fromkeys(range(3, 500), residency.come_back))
    assert rig.page_moves > 0
    assert outcome.tokens == reference(rig.target, requests).tokens
    assert outcome.total.accepted > 0, "the draft was back before the end"


def test_drafts_are_accepted_as_before_after_a_return(moving, device):
    rig = moving(prefix_caching=False)  # so that all three runs have the same steps
    requests = some_requests(device, count=3)
    before = rig.serve(requests)
    rig.engine.residency.leave()
    rig.settle(Place.AWAY)
    away = rig.serve([replace(r, id=f"{r.id} away") for r in requests])
    assert away.total.drafted == 0
    rig.engine.residency.come_back()
    rig.settle(Place.RESIDENT)
    after = rig.serve([replace(r, id=f"{r.id} again") for r in requests])
    assert before.total.accepted > 0
    for name in ("drafted", "accepted"):
        assert getattr(after.total, name) == getattr(before.total, name)
    assert list(after.tokens.values()) == list(away.tokens.values()) == list(before.tokens.values())


@pytest.mark.parametrize("call", ["map", "unmap"])
def test_a_failed_move_leaves_an_engine_that_serves_and_the_draft_comes_back_later(moving, device, call, caplog):
    rig = moving()
    requests = some_requests(device, count=3)
    right = reference(rig.target, requests).tokens
    residency = rig.engine.residency
    rig.driver.fail(call)
    residency.leave()
    with caplog.at_level(logging.ERROR, "faser.engine"):
        rig.settle(Place.LOADING)
    assert f"CUDA_ERROR_OF_{call.upper()}" in caplog.text
    assert f"CUDA_ERROR_OF_{call.upper()}" in residency.stats.failure
    residency._retry_at = float("inf")  # the test says when it is tried again
    without = rig.serve(requests)
    assert without.tokens == right
    assert without.total.drafted == 0
    assert rig.engine.scheduler.target_pages.num_pages == rig.memory.layout.base_pages
    residency._retry_at = 0.0
    rig.settle(Place.RESIDENT)
    assert residency.stats.failure is None
    again = rig.serve([replace(r, id=f"{r.id} again") for r in requests])
    assert list(again.tokens.values()) == list(right.values())
    assert again.total.accepted > 0


def test_a_draft_can_serve_another_engine_after_its_first_was_closed_while_away(moving, device):
    rig = moving()
    weights = [weight.cpu() for weight in make_draft(rig.target).weights()]
    rig.engine.residency.leave()
    rig.settle(Place.AWAY)
    rig.close()
    assert all(torch.equal(mine.cpu(), right) for mine, right in zip(rig.draft.weights(), weights, strict=True))


@pytest.mark.parametrize("offload", ["off", "auto", "on"])
def test_where_nothing_can_be_gained_the_memory_is_torchs(device, offload):
    """All slots together cannot use more pages than there are."""
    config = replace(CONFIGS["llama3"], num_layers=1, **CPU_HEADS)
    target = Transformer.random(config, 0, std=0.3)
    place = CudaDevice()
    place.open_driver = lambda _device: HostDriver()
    options = EngineOptions(
        policy=Fixed(2), max_running=2, page_size=PAGE_SIZE, max_batch_tokens=64, num_pages=16, offload=offload
    )
    engine = build_engine(on(target, device), on(make_draft(target), device), options, device=place)
    assert engine.executor.draft_memory is None
    assert engine.residency is None
    assert engine.executor.target.pages.is_contiguous()


def test_without_host_memory_the_draft_stays_and_the_log_says_why(device, monkeypatch, caplog):
    monkeypatch.setattr("faser.runtime.cuda.pinned.free_memory_bytes", lambda: 2**30)
    config = replace(CONFIGS["llama3"], num_layers=1, **CPU_HEADS)
    target = Transformer.random(config, 0, std=0.3)
    options = EngineOptions(policy=Fixed(2), max_running=2, page_size=PAGE_SIZE, max_batch_tokens=64, num_pages=6)
    place = CudaDevice()
    with pytest.raises(ConfigError, match="offload=on: the draft cannot leave the device: its copy in host memory"):
        build_engine(on(target, device), on(make_draft(target), device), replace(options, offload="on"), device=place)
    with caplog.at_level(logging.INFO, "faser.engine"):
        engine = build_engine(on(target, device), on(make_draft(target), device), options, device=place)
    assert engine.executor.draft_memory is None
    assert "the draft stays on the device: its copy in host memory takes" in caplog.text


# ── on a GPU ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def held_bytes(monkeypatch):
    """Memory of the GPU that this process holds, torch's and the driver's; other processes have their own."""
    created: dict[int, int] = {}
    create, release = CudaMemoryDriver.create, CudaMemoryDriver.release

    def counted_create(driver, num_bytes):
        handle = create(driver, num_bytes)
        created[int(handle)] = num_bytes
        return handle

    def counted_release(driver, handle):
        release(driver, handle)
        del created[int(handle)]

    monkeypatch.setattr(CudaMemoryDriver, "create", counted_create)
    monkeypatch.setattr(CudaMemoryDriver, "release", counted_release)

    def count() -> int:
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return sum(created.values()) + torch.cuda.memory_reserved()

    return count


@pytest.mark.gpu
def test_moves_neither_take_nor_give_up_memory(held_bytes):
    rig = Moving("cuda")
    requests = some_requests("cuda", count=2)
    rig.serve(requests)
    before = held_bytes()
    for number in range(5):
        rig.engine.residency.leave()
        rig.settle(Place.AWAY)
        assert held_bytes() == before, "memory changes hands"
        rig.engine.residency.come_back()
        rig.settle(Place.RESIDENT)
        rig.serve([replace(r, id=f"{r.id} {number}") for r in requests])
    assert held_bytes() == before
    rig.close()


@pytest.mark.gpu
def test_an_engine_that_ended_while_its_draft_was_away_gave_all_memory_back(held_bytes):
    def live_and_end() -> int:
        rig = Moving("cuda")
        rig.serve(some_requests("cuda", count=2))
        rig.engine.residency.leave()
        rig.settle(Place.AWAY)
        rig.close()
        del rig
        torch._C._cuda_clearCublasWorkspaces()  # each stream has one, and each engine other streams
        return held_bytes()

    live_and_end()  # kernels and libraries stay loaded
    assert live_and_end() == live_and_end()


@pytest.mark.gpu
def test_graphs_are_not_captured_again_after_a_move():
    rig = Moving("cuda")
    rig.serve(some_requests("cuda"))
    models = (rig.engine.executor.target, *rig.engine.executor.drafter.models)
    graphs = [dict(model._graphs) for model in models]
    addresses = [model.pages.data_ptr() for model in models]
    rig.engine.residency.leave()
    rig.settle(Place.AWAY)
    rig.engine.residency.come_back()
    rig.settle(Place.RESIDENT)
    again = [replace(r, id=f"{r.id} again") for r in some_requests("cuda")]
    assert rig.serve(again).total.accepted > 0
    assert [dict(model._graphs) for model in models] == graphs
    assert [model.pages.data_ptr() for model in models] == addresses
    rig.close()


@pytest.mark.gpu
def test_the_division_of_memory_counts_pages_and_weights_once(caplog):
    target = Transformer.random(replace(CONFIGS["llama3"], **GPU_HEADS), 0, std=0.3)
    models = on(target, "cuda"), on(make_draft(target), "cuda")
    options = EngineOptions(kv_memory=2**26, device="cuda", max_running=64, page_size=PAGE_SIZE, offload="on")
    with caplog.at_level(logging.INFO, "faser.engine"):
        engine = build_engine(*models, options)
    layout, pool = engine.executor.draft_memory.layout, engine.scheduler.target_pages
    assert pool.base_pages == layout.base_pages
    assert layout.num_layers * layout.base_bytes + layout.base_pages * layout.draft_page_bytes <= 2**26
    (line,) = [record.getMessage() for record in caplog.records if "GPU memory" in record.getMessage()]
    assert f"({pool.base_pages * pool.page_size:,} tokens)" in line
    engine.close()
