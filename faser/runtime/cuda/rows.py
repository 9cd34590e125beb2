"""The flat rows of a forward, laid out on the device from per-request arrays.

Knows slots, positions and the tokens of the history; knows nothing of models, logits or pages. The twin of
faser/runtime/cpu/runner.py over static buffers. Buffers have the size of a bucket. How many entries are real is read on
the device, so that a graph can be replayed for any smaller batch.

Shapes: B requests of a bucket, R rows, W wanted rows (rows whose logits are computed). All tensors are int32.
"""

# mypy: disable-error-code="import-untyped, import-not-found, untyped-decorator, no-untyped-def"
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

NO_SLOT = -1  # the slot of a padding row
NUM_COLUMNS = 8  # arrays of `Requests`
LEAST_BLOCK = 256  # kernels are compiled for at least this many requests: for fewer they would be no faster

# Arguments that differ from bucket to bucket, by name. Kernels are not specialised for their values.
VARYING = [
    "num_rows", "num_requests", "unsettled", "slots", "start", "request_slots", "num_context", "num_drafted", "samples",
    "lengths", "step", "cu_rows", "cu_wanted", "wanted", "history_stride", "last_token", "max_rows", "max_wanted",
    "num_bucket_requests", "before", "planned", "frontier",
]  # fmt: skip


@dataclass(frozen=True)
class Requests:
    """The requests of a plan: rows of context tokens from `start` on, then rows of drafts."""

    memory: torch.Tensor  # [8 * B + 1] all arrays below, so that one copy brings a plan
    num_requests: torch.Tensor  # [1] how many of B are real
    slots: torch.Tensor  # [B]
    start: torch.Tensor  # [B] position of the first row
    num_rows: torch.Tensor  # [B] rows of context tokens
    num_drafted: torch.Tensor  # [B] rows of drafts behind them
    samples: torch.Tensor  # [B] 1 where the last context row and the drafts are wanted, else 0
    unsettled: torch.Tensor  # [B] 1 where start and num_rows count on all drafts of the step before being accepted
    planned: torch.Tensor  # [B] drafts that the plan is to verify; fewer may have been made
    frontier: torch.Tensor  # [B] drafts of an earlier step behind the context, if they did not turn out void

    @classmethod
    def allocate(cls, max_requests: int, device: torch.device | str) -> Requests:
        memory = torch.zeros(NUM_COLUMNS * max_requests + 1, dtype=torch.int32, device=device)
        return cls.of(memory, max_requests)

    @classmethod
    def of(cls, memory: torch.Tensor, size: int) -> Requests:
        """The first `size` requests in a memory."""
        return cls(memory, memory[-1:], *memory[:-1].view(NUM_COLUMNS, -1)[:, :size])


@dataclass(frozen=True)
class DeviceRows:
    """Rows of one forward. Rows from num_rows on are padding: slot NO_SLOT, position, token and index 0."""

    cu_rows: torch.Tensor  # [B + 1] where each request's rows begin; a padding request has none
    cu_wanted: torch.Tensor  # [B + 1] where each request's wanted rows begin
    slots: torch.Tensor  # [R]
    positions: torch.Tensor  # [R]
    token_ids: torch.Tensor  # [R]
    wanted: torch.Tensor  # [W] row indices
    wanted_slots: torch.Tensor  # [W]
    wanted_positions: torch.Tensor  # [W] position of the token sampled from the row: one behind the row

    @classmethod
    def allocate(cls, max_requests: int, max_rows: int, max_wanted: int, device: torch.device | str) -> DeviceRows:
        sizes = (max_requests + 1,) * 2 + (max_rows,) * 3 + (max_wanted,) * 3
        return cls(*(torch.zeros(size, dtype=torch.int32, device=device) for size in sizes))

    @property
    def num_rows(self) -> torch.Tensor:
        """[1] the number of real rows."""
        return self.cu_rows[-1:]

    @property
    def num_wanted(self) -> torch.Tensor:
        """[1] the number of real wanted rows."""
        return self.cu_wanted[-1:]


def settle(requests: Requests, refused: torch.Tensor, missed: torch.Tensor, short: torch.Tensor | None = None) -> None:
    """Correct the numbers of unsettled requests by the results of the step before, which are by slot.

    The same as StepPlan.settle. `short` is given for the rows of a draft. In place, so once for each plan.
    """
    _settle_kernel[(1,)](
        requests.slots, requests.start, requests.num_rows, requests.num_drafted, requests.planned, requests.frontier,
        requests.unsettled, requests.num_requests, refused, missed, short,
        block=_power_of_two(requests.slots.shape[0]), num_warps=4,
    )  # fmt: skip


def expand(requests: Requests, history: torch.Tensor, rows: DeviceRows, *, vocab_size: int = 2**31 - 1) -> None:
    """Lay out the rows of `requests`: num_rows + num_drafted each, in the order of the requests, wanted ones last.

    Tokens come from history [max_slots, max_len]. Ids from vocab_size on become vocab_size - 1: a target's vocabulary
    may be padded beyond the draft's, and padding tokens have no text. A plan must fit its bucket: rows beyond it are
    lost.
    """
    num_bucket_requests = requests.slots.shape[0]
    _expand_kernel[(num_bucket_requests + 1,)](
        requests.slots, requests.start, requests.num_rows, requests.num_drafted, requests.samples,
        requests.num_requests, history,
        rows.cu_rows, rows.cu_wanted, rows.slots, rows.positions, rows.token_ids,
        rows.wanted, rows.wanted_slots, rows.wanted_positions,
        history.stride(0), vocab_size - 1, rows.slots.shape[0], rows.wanted.shape[0], num_bucket_requests,
        padded_requests=_power_of_two(num_bucket_requests), block=256, no_slot=NO_SLOT, num_warps=4,
    )  # fmt: skip


def regather(requests: Requests, before: torch.Tensor, rows: DeviceRows, index: torch.Tensor) -> None:
    """Where each row was before the last rows of some requests were dropped: index [R], 0 for padding.

    before [B + 1] is rows.cu_rows from before.
    """
    index.zero_()
    _regather_kernel[(requests.slots.shape[0],)](
        before, rows.cu_rows, requests.num_requests, index, index.shape[0], block=256, num_warps=1
    )


def next_draft_rows(
    requests: Requests,
    lengths: torch.Tensor,
    step: torch.Tensor,
    history: torch.Tensor,
    rows: DeviceRows,
    *,
    vocab_size: int = 2**31 - 1,
) -> None:
    """One row for each request that drafts its token number step[0] >= 1, counted from 0; then step[0] += 1.

    lengths [B] never rise, so requests that still draft come first. The row is that of the token drafted before, at
    position start + num_rows + step - 1. All rows are wanted. rows.slots must be [B] at least.
    """
    num_bucket_requests = lengths.shape[0]
    _draft_kernel[(1,)](
        requests.slots, requests.start, requests.num_rows, requests.num_requests, lengths, step, history,
        rows.cu_rows, rows.cu_wanted, rows.slots, rows.positions, rows.token_ids,
        rows.wanted, rows.wanted_slots, rows.wanted_positions,
        history.stride(0), vocab_size - 1, rows.slots.shape[0], rows.wanted.shape[0], num_bucket_requests,
        block=_power_of_two(max(num_bucket_requests + 1, rows.slots.shape[0], rows.wanted.shape[0])),
        no_slot=NO_SLOT, num_warps=4,
    )  # fmt: skip


def _power_of_two(count: int) -> int:
    return max(LEAST_BLOCK, triton.next_power_of_2(count))


@triton.jit(do_not_specialize=VARYING)
def _settle_kernel(
    slots, start, num_rows, num_drafted, planned, frontier, unsettled, num_requests, refused, missed, short,
    block: tl.constexpr,
):  # fmt: skip
    # [block]
    request = tl.arange(0, block)
    real = request < tl.load(num_requests)
    moves = real & (tl.load(unsettled + request, mask=real, other=0) != 0)
    slot = tl.load(slots + request, mask=moves, other=0)
    first = tl.load(start + request, mask=moves, other=0)
    end = first + tl.load(num_rows + request, mask=moves, other=0) - tl.load(refused + slot, mask=moves, other=0)
    gone = tl.load(frontier + request, mask=moves, other=0) * tl.load(missed + slot, mask=moves, other=0)
    if short is not None:  # the rows of a draft reach to the end of the frontier
        end -= gone
        last = end - 1 - tl.load(short + slot, mask=moves, other=0)
    else:
        last = end - 1
        tl.store(num_drafted + request, tl.load(num_drafted + request, mask=moves, other=0) - gone, mask=moves)
        tl.store(planned + request, tl.load(planned + request, mask=moves, other=0) - gone, mask=moves)
    first = tl.minimum(first, last)
    tl.store(start + request, first, mask=moves)
    tl.store(num_rows + request, end - first, mask=moves)


@triton.jit
def _fill_padding(slots, positions, values, first, capacity, block: tl.constexpr, no_slot: tl.constexpr):
    for begin in range(first, capacity, block):
        row = begin + tl.arange(0, block)
        tl.store(slots + row, no_slot, mask=row < capacity)
        tl.store(positions + row, 0, mask=row < capacity)
        tl.store(values + row, 0, mask=row < capacity)


@triton.jit(do_not_specialize=VARYING)
def _expand_kernel(
    request_slots, start, num_context, num_drafted, samples,
    num_requests, history,
    cu_rows, cu_wanted, row_slots, positions, token_ids,
    wanted, wanted_slots, wanted_positions,
    history_stride, last_token, max_rows, max_wanted, num_bucket_requests,
    padded_requests: tl.constexpr, block: tl.constexpr, no_slot: tl.constexpr,
):  # fmt: skip
    """One program per request, which sums the rows before it; the program behind the last fills the padding."""
    request = tl.program_id(0)
    num_real = tl.load(num_requests)

    # [padded_requests]
    other = tl.arange(0, padded_requests)
    before = (other < request) & (other < num_real)
    drafted = tl.load(num_drafted + other, mask=before, other=0)
    first_row = tl.sum(tl.load(num_context + other, mask=before, other=0) + drafted, axis=0)
    first_wanted = tl.sum(tl.load(samples + other, mask=before, other=0) * (drafted + 1), axis=0)
    tl.store(cu_rows + request, first_row)
    tl.store(cu_wanted + request, first_wanted)
    if request < num_real:
        slot = tl.load(request_slots + request)
        position = tl.load(start + request)
        drafted_rows = tl.load(num_drafted + request)
        count = tl.load(num_context + request) + drafted_rows
        count_wanted = tl.load(samples + request) * (drafted_rows + 1)
        for begin in range(0, count, block):
            # [block]
            offset = begin + tl.arange(0, block)
            row = first_row + offset
            real = (offset < count) & (row < max_rows)
            token = tl.load(history + slot.to(tl.int64) * history_stride + position + offset, mask=real, other=0)
            tl.store(row_slots + row, slot, mask=real)
            tl.store(positions + row, position + offset, mask=real)
            tl.store(token_ids + row, tl.minimum(token, last_token).to(tl.int32), mask=real)
            wanted_offset = offset - (count - count_wanted)
            place = first_wanted + wanted_offset
            real = real & (wanted_offset >= 0) & (place < max_wanted)
            tl.store(wanted + place, row, mask=real)
            tl.store(wanted_slots + place, slot, mask=real)
            tl.store(wanted_positions + place, position + offset + 1, mask=real)
    if request == num_bucket_requests:
        _fill_padding(row_slots, positions, token_ids, first_row, max_rows, block, no_slot)
        _fill_padding(wanted_slots, wanted_positions, wanted, first_wanted, max_wanted, block, no_slot)


@triton.jit(do_not_specialize=VARYING)
def _regather_kernel(before, cu_rows, num_requests, index, max_rows, block: tl.constexpr):
    request = tl.program_id(0)
    if request >= tl.load(num_requests):
        return
    was, first = tl.load(before + request), tl.load(cu_rows + request)
    count = tl.load(cu_rows + request + 1) - first
    for begin in range(0, count, block):
        offset = begin + tl.arange(0, block)
        tl.store(index + first + offset, was + offset, mask=(offset < count) & (first + offset < max_rows))


@triton.jit(do_not_specialize=VARYING)
def _draft_kernel(
    request_slots, start, num_context, num_requests, lengths, step, history,
    cu_rows, cu_wanted, row_slots, positions, token_ids,
    wanted, wanted_slots, wanted_positions,
    history_stride, last_token, max_rows, max_wanted, num_bucket_requests,
    block: tl.constexpr, no_slot: tl.constexpr,
):  # fmt: skip
    """One program for all requests, so that the step is raised after everybody has read it."""
    done = tl.load(step)
    # [block]
    row = tl.arange(0, block)
    real = row < tl.load(num_requests)
    active = real & (tl.load(lengths + row, mask=real, other=0) > done)
    num_active = tl.sum(active.to(tl.int32), axis=0)
    slot = tl.load(request_slots + row, mask=active, other=no_slot)
    num_tokens = tl.load(start + row, mask=active, other=0) + tl.load(num_context + row, mask=active, other=0)
    position = tl.where(active, num_tokens + done - 1, 0)
    token = tl.load(history + slot.to(tl.int64) * history_stride + position, mask=active, other=0)
    token = tl.minimum(token, last_token).to(tl.int32)
    cu = tl.minimum(row, num_active)
    tl.store(cu_rows + row, cu, mask=row <= num_bucket_requests)
    tl.store(cu_wanted + row, cu, mask=row <= num_bucket_requests)
    tl.store(row_slots + row, slot, mask=row < max_rows)
    tl.store(positions + row, position, mask=row < max_rows)
    tl.store(token_ids + row, token, mask=row < max_rows)
    tl.store(wanted + row, tl.where(active, row, 0), mask=row < max_wanted)
    tl.store(wanted_slots + row, slot, mask=row < max_wanted)
    tl.store(wanted_positions + row, tl.where(active, position + 1, 0), mask=row < max_wanted)
    tl.debug_barrier()
    tl.store(step, done + 1)
