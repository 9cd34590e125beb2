"""Rows laid out on the device equal those of faser.runtime.cpu.runner.Rows, and padding rows belong to no slot."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

pytest.importorskip("triton", reason="the kernels are written in Triton: pip install triton")

from faser.arrays import IntArray
from faser.engine.pages import NO_WRITES
from faser.rules.overlap import OverlapPlan
from faser.runtime.cpu.runner import Rows
from faser.runtime.cuda.rows import NO_SLOT, DeviceRows, Requests, expand, next_draft_rows, settle
from faser.step import Settling, StepPlan

MAX_LEN = 900


@pytest.fixture
def device(place):
    """No test here reads logits: one dtype is enough."""
    if place[1] != torch.float32:
        pytest.skip("the dtype of the logits does not matter here")
    return place[0]


@dataclass(frozen=True)
class Plan:
    """The host's view of a step, [B] each."""

    slots: IntArray
    start: IntArray
    num_rows: IntArray
    num_drafted: IntArray
    samples: NDArray[np.bool_]

    def upload(self, num_bucket: int, device: str) -> Requests:
        requests = Requests.allocate(num_bucket, device)
        requests.memory.fill_(77)  # what lies behind the real ones must not matter
        count = len(self.slots)
        for name in ("slots", "start", "num_rows", "num_drafted", "samples"):
            getattr(requests, name)[:count] = ints(getattr(self, name), device)
        requests.num_requests.fill_(count)
        return requests


def ints(values: object, device: str) -> torch.Tensor:
    return torch.as_tensor(np.asarray(values), dtype=torch.int32).to(device)


def make_plan(rng: np.random.Generator, count: int, max_slots: int, most_rows: int, max_length: int) -> Plan:
    samples = rng.random(count) < 0.7
    return Plan(
        slots=rng.permutation(max_slots)[:count],
        start=rng.integers(0, 50, count),
        num_rows=np.where(rng.random(count) < 0.6, 1, rng.integers(1, most_rows + 1, count)),
        num_drafted=np.where(samples, rng.integers(0, max_length + 1, count), 0),
        samples=samples,
    )


def make_history(rng: np.random.Generator, max_slots: int, device: str) -> torch.Tensor:
    return torch.from_numpy(rng.integers(0, 1000, (max_slots, MAX_LEN)).astype(np.int32)).to(device)


def filled(rows: DeviceRows) -> DeviceRows:
    """Filled with garbage, so that entries that are not written show."""
    for buffer in vars(rows).values():
        buffer.fill_(-77)
    return rows


def padded(values: IntArray, size: int, padding: int = 0) -> list[int]:
    return values.tolist() + [padding] * (size - len(values))


def check_rows(plan: Plan, history: torch.Tensor, rows: DeviceRows, last_token: int) -> None:
    """Against the verifier's own arithmetic."""
    expected = Rows.of(plan.slots, plan.start, plan.num_rows + plan.num_drafted)
    judged = np.where(plan.samples, plan.num_drafted + 1, 0)
    offsets = [np.arange(end - count, end) for end, count in zip(expected.cu_rows[1:], judged, strict=True)]
    wanted = np.concatenate([np.zeros(0, np.int64), *offsets])
    tokens = np.minimum(history.cpu().numpy()[expected.owners, expected.positions], last_token)
    num_bucket, num_rows, num_wanted = len(rows.cu_rows), len(rows.slots), len(rows.wanted)
    assert rows.cu_rows.tolist() == padded(expected.cu_rows, num_bucket, expected.num_rows)
    assert rows.cu_wanted.tolist() == padded(np.append(0, np.cumsum(judged)), num_bucket, int(judged.sum()))
    assert rows.slots.tolist() == padded(expected.owners, num_rows, NO_SLOT)
    assert rows.positions.tolist() == padded(expected.positions, num_rows)
    assert rows.token_ids.tolist() == padded(tokens, num_rows)
    assert rows.wanted.tolist() == padded(wanted, num_wanted)
    assert rows.wanted_slots.tolist() == padded(expected.owners[wanted], num_wanted, NO_SLOT)
    assert rows.wanted_positions.tolist() == padded(expected.positions[wanted] + 1, num_wanted)
    assert rows.num_rows.tolist() == [expected.num_rows]
    assert rows.num_wanted.tolist() == [wanted.size]


@pytest.mark.parametrize(
    ("count", "num_bucket", "most_rows"),
    [(1, 1, 1), (1, 4, 300), (5, 8, 20), (7, 7, 40), (0, 2, 1), (256, 256, 30), (700, 1024, 3)],
)
def test_rows_are_those_the_host_would_lay_out(device, count, num_bucket, most_rows):
    if count > 100 and device == "cpu":
        pytest.skip("slow in Triton's interpreter: `make test-gpu` runs these on a GPU")
    for seed in range(3):
        rng = np.random.default_rng(seed)
        plan = make_plan(rng, count, num_bucket + 2, most_rows, 4)
        history = make_history(rng, num_bucket + 2, device)
        total = int((plan.num_rows + plan.num_drafted).sum())
        size = total + seed * 13 + 1
        rows = filled(DeviceRows.allocate(num_bucket, size, num_bucket * 5 + seed, device))
        expand(plan.upload(num_bucket, device), history, rows, vocab_size=900)
        check_rows(plan, history, rows, 899)


def test_rows_that_do_not_fit_their_bucket_are_lost_and_write_nothing_outside_it(device):
    rng = np.random.default_rng(0)
    plan = make_plan(rng, 4, 6, 30, 4)
    memory = torch.full((3, 40), -77, dtype=torch.int32, device=device)
    rows = DeviceRows.allocate(4, 16, 2, device)
    narrow = DeviceRows(**{**vars(rows), "slots": memory[0, :16], "positions": memory[1, :16], "wanted": memory[2, :2]})
    expand(plan.upload(4, device), make_history(rng, 6, device), narrow)
    assert (memory[:2, 16:] == -77).all()
    assert (memory[2, 2:] == -77).all()


@pytest.mark.parametrize(("count", "num_bucket"), [(1, 1), (3, 8), (8, 8), (0, 4), (256, 256), (900, 1024)])
def test_each_draft_step_has_a_row_for_every_request_that_still_drafts(device, count, num_bucket):
    rng = np.random.default_rng(count)
    plan = make_plan(rng, count, num_bucket + 2, 20, 0)
    history = make_history(rng, num_bucket + 2, device)
    lengths = np.sort(rng.integers(0, 6, count))[::-1].copy()
    device_lengths = torch.full((num_bucket,), 99, dtype=torch.int32, device=device)
    device_lengths[:count] = ints(lengths, device)
    rows = filled(DeviceRows.allocate(num_bucket, num_bucket, num_bucket, device))
    requests, step = plan.upload(num_bucket, device), ints([1], device)
    for done in range(1, 7):
        next_draft_rows(requests, device_lengths, step, history, rows, vocab_size=950)
        active = np.flatnonzero(lengths > done)
        positions = (plan.start + plan.num_rows)[active] + done - 1
        tokens = np.minimum(history.cpu().numpy()[plan.slots[active], positions], 949)
        assert rows.num_rows.tolist() == rows.num_wanted.tolist() == [active.size]
        assert rows.cu_rows.tolist() == rows.cu_wanted.tolist() == padded(active, num_bucket + 1, active.size)
        assert rows.wanted.tolist() == padded(active, num_bucket)
        assert rows.slots.tolist() == rows.wanted_slots.tolist() == padded(plan.slots[active], num_bucket, NO_SLOT)
        assert rows.positions.tolist() == padded(positions, num_bucket)
        assert rows.wanted_positions.tolist() == padded(positions + 1, num_bucket)
        assert rows.token_ids.tolist() == padded(tokens, num_bucket)
        assert step.tolist() == [done + 1]


@pytest.mark.parametrize(("count", "num_bucket"), [(0, 4), (1, 1), (5, 8), (37, 40)])
@pytest.mark.parametrize("model", ["target", "draft"])
def test_settling_on_the_device_is_settling_the_plan(device, model, count, num_bucket):
    """After a step that drafted: the target has one row, the draft two if all its tokens were accepted."""
    rng = np.random.default_rng(count)
    slots, num_tokens = rng.permutation(50)[:count], rng.integers(20, 90, count)
    unsettled, refused = rng.random(count) < 0.7, rng.integers(0, 6, 50)
    frontier, missed = rng.integers(0, 4, count), rng.random(50) < 0.5
    refused[slots] *= (frontier == 0) | missed[slots]  # of a frontier that is left all was accepted before
    short = rng.random(50) < 0.5
    short[slots] &= frontier == 0
    lag = np.where(unsettled, np.where(frontier > 0, 1, 2), rng.integers(1, 9, count))
    plan = StepPlan(
        (), (), slots, num_tokens, num_tokens - 1, np.ones_like(slots), np.full_like(slots, 3),
        num_tokens + frontier - lag, lag, unsettled, NO_WRITES, NO_WRITES,
        overlap=OverlapPlan(frontier, np.zeros_like(slots)),
    )  # fmt: skip
    settled = plan.settle(Settling(refused, short, missed)[slots])
    before, after = (
        (each.start, each.num_rows) if model == "target" else (each.draft_start, each.draft_rows)
        for each in (plan, settled)
    )
    requests = Plan(slots, *before, plan.frontier, np.ones_like(unsettled)).upload(num_bucket, device)
    for name in ("unsettled", "frontier"):
        getattr(requests, name)[:count] = ints(getattr(plan, name), device)
    requests.planned[:count] = ints(plan.judged, device)
    settle(requests, ints(refused, device), ints(missed, device), ints(short, device) if model == "draft" else None)
    if model == "target":
        assert requests.num_drafted.tolist() == requests.planned.tolist() == padded(settled.frontier, num_bucket, 77)
    assert requests.start.tolist() == padded(after[0], num_bucket, 77)
    assert requests.num_rows.tolist() == padded(after[1], num_bucket, 77)
