"""The draft's memory: chunks go to the target's layers and come back, whatever call fails in between."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from faser.errors import ConfigError, MoveError
from faser.models.transformer import Transformer
from faser.runtime.cuda import draft_memory, pinned
from faser.runtime.cuda.draft_memory import LOAD_SPEED, CudaDraftMemory, Layout
from faser.runtime.cuda.pinned import HUGE_PAGE, SPARE_BYTES, PinnedBlock, require_host_memory
from faser.runtime.weights_home import WeightsHome, own_weights
from tests.runtime.cuda.host_driver import HostDriver
from tests.tiny import CONFIGS

PAGE_SIZE = 16
CONFIG = replace(CONFIGS["llama3"], head_dim=16)  # a page of one layer: 16 * 2 * 2 * 16 floats, 4 KiB
DRAFT_CONFIG = replace(CONFIG, num_layers=2)


@pytest.fixture
def driver():
    return HostDriver()


class Rig:
    """A target and a draft whose memory can be lent. The loader may be slow."""

    def __init__(self, driver: HostDriver, num_pages: int = 10, most_pages: int = 1000) -> None:
        self.target = Transformer.random(CONFIG, 0)
        self.draft = Transformer.random(DRAFT_CONFIG, 1)
        self.weights = [weight.clone() for weight in self.draft.weights()]
        home = WeightsHome(own_weights(self.draft, self.target))
        kinds = (CONFIG, torch.float32), (DRAFT_CONFIG, torch.float32)
        self.layout = Layout.of(
            *kinds, PAGE_SIZE, home.num_bytes, num_pages, most_pages, driver.granularity, exact=False
        )
        self.driver = driver
        self.memory = CudaDraftMemory(self.layout, home, driver)
        self.target_pages = self.memory.target_pages(CONFIG, PAGE_SIZE, torch.float32)
        self.draft_pages = self.memory.draft_pages(DRAFT_CONFIG, PAGE_SIZE, torch.float32)

    def weights_are_right(self) -> bool:
        return all(torch.equal(a, b) for a, b in zip(self.draft.weights(), self.weights, strict=True))


@pytest.fixture
def rig(driver):
    return Rig(driver)


def finish(move) -> int:
    """Do all parts of a move; how many there were."""
    parts = 1
    while not move():
        parts += 1
        assert parts < 1000
    return parts


# ── layout ───────────────────────────────────────────────────────────────────────────────────────────────────────────

MIB = 2**20


def layout_of(num_pages: int, most_pages: int = 10**6, exact: bool = False, **shape: int) -> Layout:
    """An 8B's target and a 1B's draft in bf16."""
    target = replace(CONFIG, **{"num_layers": 32, "num_kv_heads": 8, "head_dim": 128, **shape})
    draft = replace(CONFIG, num_layers=16, num_kv_heads=8, head_dim=64)
    kinds = (target, torch.bfloat16), (draft, torch.bfloat16)
    return Layout.of(*kinds, 16, 2500 * MIB, num_pages, most_pages, 2 * MIB, exact=exact)


@pytest.mark.parametrize("num_pages", [33, 500, 1024, 1025, 20_000])
def test_rounding_loses_less_than_a_granule_of_each_layer(num_pages):
    layout = layout_of(num_pages)
    page, draft_page = 32 * 64 * 1024, 16 * 32 * 1024
    assert num_pages - 32 < layout.base_pages <= num_pages
    assert layout.base_bytes % (2 * MIB) == layout.chunk_bytes % (2 * MIB) == 0
    draft_bytes = 2500 * MIB + layout.base_pages * draft_page
    assert draft_bytes <= layout.num_layers * layout.chunk_bytes < draft_bytes + 32 * 2 * MIB
    assert layout.num_layers * layout.layer_bytes < num_pages * (page + draft_page) + 2500 * MIB + 32 * 2 * MIB
    gained = (layout.num_layers * layout.chunk_bytes) // page
    assert layout.pages_gained == gained


def test_a_number_of_pages_that_the_user_chose_stays():
    layout = layout_of(1000, exact=True)
    assert layout.base_pages == 1000
    assert layout.base_bytes == 64 * MIB, "62.5 rounded up"
    assert layout.most_pages * layout.page_bytes <= layout.layer_bytes


def test_fewer_pages_than_a_granule_stay():
    assert layout_of(20).base_pages == 20


def test_no_more_pages_than_all_slots_can_use_are_gained():
    assert layout_of(1024, most_pages=1100).pages_gained == 76
    assert layout_of(1024, most_pages=1024).pages_gained == 0


def test_pages_need_not_divide_a_granule():
    layout = layout_of(1000, num_kv_heads=3)  # 24 KiB a layer
    assert layout.base_pages == layout.base_bytes // layout.page_bytes
    assert layout.most_pages == layout.layer_bytes // layout.page_bytes


# ── moves ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_at_first_the_draft_is_there(rig):
    assert rig.weights_are_right()
    assert rig.target_pages.shape[1] == rig.layout.base_pages + rig.memory.pages_gained
    assert all(layer.is_contiguous() for layer in rig.target_pages)


def test_lent_memory_holds_pages_of_every_layer(rig):
    rig.target_pages[:, : rig.layout.base_pages] = 3.0
    rig.draft_pages.fill_(float("nan"))
    finish(rig.memory.offload)
    rig.target_pages[:, rig.layout.base_pages :] = 5.0
    assert (rig.target_pages[:, rig.layout.base_pages :] == 5.0).all()
    assert (rig.target_pages[:, : rig.layout.base_pages] == 3.0).all()


def test_after_a_return_the_weights_are_right(rig):
    address = next(rig.draft.weights()).data_ptr()
    rig.target_pages[:, : rig.layout.base_pages] = 3.0
    for _ in range(3):
        rig.draft_pages.fill_(float("nan"))
        finish(rig.memory.offload)
        rig.target_pages[:, rig.layout.base_pages :] = float("nan")
        finish(rig.memory.load)
        assert rig.weights_are_right()
        assert (rig.target_pages[:, : rig.layout.base_pages] == 3.0).all()
    assert next(rig.draft.weights()).data_ptr() == address


def test_no_memory_is_taken_or_given_up_by_moves(rig):
    before, reserved = rig.driver.num_bytes, dict(rig.driver.ranges)
    for _ in range(3):
        finish(rig.memory.offload)
        finish(rig.memory.load)
    assert rig.driver.num_bytes == before
    assert rig.driver.ranges == reserved
    layout = rig.layout
    assert before == layout.num_layers * layout.layer_bytes == layout.kv_bytes + layout.weights_bytes


def test_a_move_is_done_in_small_parts(rig, monkeypatch):
    monkeypatch.setattr(draft_memory, "CHUNKS_PER_PART", 1)
    assert finish(rig.memory.offload) == CONFIG.num_layers
    assert finish(rig.memory.load) == CONFIG.num_layers
    assert rig.weights_are_right()


def test_a_layer_takes_one_call_of_the_driver_each_way(rig):
    before = rig.driver.calls.copy()
    finish(rig.memory.offload)
    made = rig.driver.calls - before
    assert made == {"map": CONFIG.num_layers, "unmap": CONFIG.num_layers}


def test_a_return_before_anything_left_loads_the_weights_again(rig):
    next(rig.draft.weights()).zero_()
    finish(rig.memory.load)
    assert rig.weights_are_right()


@pytest.mark.parametrize("call", ["map", "unmap"])
@pytest.mark.parametrize("after", range(CONFIG.num_layers))
@pytest.mark.parametrize("move", ["offload", "load"])
def test_whatever_call_fails_the_draft_can_come_back(rig, call, after, move):
    rig.target_pages[:, : rig.layout.base_pages] = 3.0
    if move == "load":
        finish(rig.memory.offload)
    rig.driver.fail(call, after)
    with pytest.raises(MoveError, match=f"CUDA_ERROR_OF_{call.upper()}"):
        finish(getattr(rig.memory, move))
    finish(rig.memory.load)
    assert rig.weights_are_right()
    assert (rig.target_pages[:, : rig.layout.base_pages] == 3.0).all()
    finish(rig.memory.offload)
    rig.target_pages[:, rig.layout.base_pages :] = 5.0  # the memory is there


class SlowLoader:
    """Loads when it is asked for the third time; may fail first."""

    seconds = 0.5

    def __init__(self, loader, failures: int = 0) -> None:
        self._loader = loader
        self._failures = failures
        self._asked = 0
        self.num_begun = 0

    def begin(self) -> None:
        self._asked = 0
        self.num_begun += 1

    def is_done(self) -> bool:
        self._asked += 1
        if self._asked == 2 and self._failures:
            self._failures -= 1
            raise RuntimeError("CUDA error: out of breath\nand a long explanation")
        if self._asked >= 3:
            self._loader.begin()
        return self._asked >= 3


def test_a_load_is_polled_not_waited_for(rig):
    finish(rig.memory.offload)
    rig.memory.loader = SlowLoader(rig.memory.loader)
    assert [rig.memory.load() for _ in range(3)] == [False, False, True]
    assert rig.weights_are_right()
    assert rig.memory.load_seconds == 0.5


def test_a_load_that_fails_can_be_tried_again(rig):
    finish(rig.memory.offload)
    rig.memory.loader = SlowLoader(rig.memory.loader, failures=1)
    assert not rig.memory.load()
    with pytest.raises(MoveError, match=r"the device failed \(CUDA error: out of breath\)$"):
        rig.memory.load()
    finish(rig.memory.load)
    assert rig.memory.loader.num_begun == 2
    assert rig.weights_are_right()


def test_memory_that_is_being_loaded_is_not_lent(rig):
    finish(rig.memory.offload)
    rig.memory.loader = SlowLoader(rig.memory.loader)
    assert not rig.memory.load()
    before = dict(rig.driver.mappings)
    assert not rig.memory.offload()
    assert rig.driver.mappings == before
    finish(rig.memory.offload)
    assert rig.driver.mappings != before


def test_the_expected_seconds_of_a_load_follow_from_the_bytes(rig):
    assert rig.memory.load_seconds == rig.layout.weights_bytes / LOAD_SPEED


# ── beginning and end ────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("state", ["resident", "lent", "broken"])
def test_close_gives_all_memory_back_and_leaves_a_whole_model(rig, state):
    if state != "resident":
        finish(rig.memory.offload)
    if state == "broken":
        rig.driver.fail("map", 1)
        with pytest.raises(MoveError):
            finish(rig.memory.load)
    rig.memory.close()
    rig.memory.close()
    assert rig.driver.is_empty
    assert rig.weights_are_right()


@pytest.mark.parametrize(("call", "after"), [("create", 0), ("create", 3), ("map", 2), ("reserve", 1)])
def test_a_start_without_memory_is_refused_and_leaves_a_whole_model(driver, monkeypatch, call, after):
    driver.fail(call, after)
    drafts = []
    monkeypatch.setattr(WeightsHome, "leave", lambda home, leave=WeightsHome.leave: (drafts.append(home), leave(home)))
    with pytest.raises(ConfigError, match=rf"lower --kv-memory.* \(CUDA_ERROR_OF_{call.upper()}\)"):
        Rig(driver)
    assert driver.is_empty
    assert all(weight.numel() for weight in drafts[0]._weights)


def test_host_memory_that_cannot_be_locked_is_refused(driver):
    driver.fail("pin")
    with pytest.raises(ConfigError, match=r"--offload off \(CUDA_ERROR_OF_PIN\)"):
        Rig(driver)
    assert driver.is_empty


def test_the_host_keeps_a_reserve(monkeypatch):
    monkeypatch.setattr(pinned, "free_memory_bytes", lambda: SPARE_BYTES + 100)
    require_host_memory(100)
    with pytest.raises(ConfigError, match=r"takes 0\.0 GiB beside a reserve of 2 GiB, and 2\.0 GiB are free"):
        require_host_memory(101)


@pytest.mark.parametrize("num_bytes", [1, HUGE_PAGE, HUGE_PAGE + 5])
def test_a_pinned_block_has_its_size_and_begins_at_a_huge_page(driver, num_bytes):
    block = PinnedBlock(num_bytes, driver)
    assert block.bytes.shape == (num_bytes,)
    assert block.bytes.data_ptr() % HUGE_PAGE == 0
    assert driver.pinned == {block.bytes.data_ptr(): -(-num_bytes // HUGE_PAGE) * HUGE_PAGE}
    block.close()
    assert not driver.pinned
