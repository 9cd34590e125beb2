"""Drafts for other outcomes of the verification in flight, on the device (`StepPlan.outcomes`).

A branch is a request of the draft model that nobody sent: it has a slot of its own behind those of the requests, and
pages of its own behind those of the pool. It shares the pages of its parent's context; the page that the branch begins
in is copied, up to there. Its first token is one that the draft found nearly as good as its own (`Slots.rivals`).
After the verdict a branch that begins with the token that was said is copied to where its parent goes on.

Knows plans, slots, pages and verdicts; knows nothing of models.
"""

# mypy: disable-error-code="import-untyped, import-not-found, untyped-decorator, no-untyped-def"
from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl

from faser.arrays import IntArray
from faser.runtime.cuda.sampling import HIT, MOST_RIVALS, RECENT, Slots, draw
from faser.runtime.cuda.transfer import send
from faser.step import MOST_DRAFT_ROWS, StepPlan

MOST_DRAFTS = 8  # of each, behind its first token


def pages_of_branch(page_size: int) -> int:
    """All it may reach into."""
    return (MOST_DRAFTS + page_size - 2) // page_size + 1


@dataclass(frozen=True)
class Branches:
    """Of one step: arrays [N] of N branches, one parent's side by side; and [P] of P parents."""

    slots: IntArray
    parent_slots: IntArray
    positions: IntArray  # of the first token
    ranks: IntArray  # of it, among its rivals
    sizes: IntArray  # drafts behind it
    parents: IntArray  # [P] index in the plan
    num_tokens: IntArray  # [P]
    first: IntArray  # [P] the first of each parent's
    counts: IntArray  # [P]

    @classmethod
    def one(cls, slot: int) -> Branches:
        """Of the first request, at its very beginning: to see what kernels there are."""
        zero = np.zeros(1, dtype=np.int64)
        return cls(zero + slot, zero, zero, zero, zero + 1, zero, zero, zero, zero + 1)

    @classmethod
    def of(cls, plan: StepPlan, first_slot: int) -> Branches | None:
        """As many as there is room for; None where there is nothing to branch off.

        What is not settled has no branches, for nobody knows where they would begin.
        """
        sizes = plan.chunks_of(plan.lengths) - 1
        parents = np.flatnonzero((plan.branch_points > 0) & (sizes <= MOST_DRAFTS))
        if plan.unsettled.any() or not parents.size:
            return None
        points = plan.branch_points[parents]
        num_ranks = min(MOST_RIVALS, plan.guesses(int(points.sum())))
        if not num_ranks:
            return None
        counts = points * num_ranks
        owners = np.repeat(parents, counts)
        place = np.arange(owners.size) - np.repeat(np.cumsum(counts) - counts, counts)
        return cls(
            first_slot + np.arange(owners.size),
            plan.slots[owners],
            plan.num_tokens[owners] + place // num_ranks,
            place % num_ranks,
            sizes[owners],
            parents,
            plan.num_tokens[parents],
            np.cumsum(counts) - counts,
            counts,
        )


def fork(branches: Branches, slots: Slots, table: torch.Tensor, pages: torch.Tensor) -> None:
    """Begin them: tables, first tokens, and the KV of the page they begin in.

    pages [layers, pages, page size, heads, head size], the branches' own last; table [slots, columns].
    """
    num_layers, num_pages, page_size = pages.shape[:3]
    own_pages = pages_of_branch(page_size)
    columns = [branches.slots, branches.parent_slots, branches.positions, branches.ranks]
    told = send(np.stack(columns).astype(np.int32), pages.device)
    _fork_kernel[(branches.slots.size, num_layers)](
        *told, slots.history, slots.seeds, slots.inverse_temperatures, slots.rivals, table, pages,
        int(branches.slots[0]), num_pages - own_pages * MOST_DRAFT_ROWS, table.shape[1],
        slots.history.stride(0), table.stride(0), pages.stride(0), page_size,
        entry=pages.stride(2), own_pages=own_pages, recent=RECENT, most_rivals=MOST_RIVALS, block=1024, num_warps=4,
    )  # fmt: skip


def adopt(
    branches: Branches,
    slots: Slots,
    table: torch.Tensor,
    pages: torch.Tensor,
    packed: torch.Tensor,
    chance: torch.Tensor | None = None,
) -> None:
    """Behind the verdict: where a branch begins with the last token of a request, that is what it goes on with.

    The column HIT of `packed` is then 2, and what lay behind the drafts is not missed. With `chance` (float32 [1]) one
    of the branches that begin there is taken with this probability, whatever the token: for measuring.
    """
    parents, page_size = branches.parents, pages.shape[2]
    columns = [parents, branches.parent_slots[branches.first], branches.num_tokens, branches.first, branches.counts]
    told = send(np.stack(columns).astype(np.int32), pages.device)
    own = send(np.stack([branches.slots, branches.positions, branches.sizes]).astype(np.int32), pages.device)
    _adopt_kernel[(parents.size, pages.shape[0])](
        *told, *own, slots.history, slots.seeds, slots.rivals, slots.missed, table, pages, packed, chance,
        slots.history.stride(0), table.stride(0), pages.stride(0), packed.stride(0), page_size,
        entry=pages.stride(2), hit=HIT, recent=RECENT, most_rivals=MOST_RIVALS, block=1024, num_warps=4,
    )  # fmt: skip


VARYING = [
    "own_slots", "parents", "positions", "ranks", "first_slot", "first_page", "num_columns", "history_stride",
    "table_stride", "layer_stride", "page_size", "indices", "parent_slots", "num_tokens", "first", "counts", "sizes",
    "packed_stride",
]  # fmt: skip


@triton.jit
def _copy(source, target, count, block: tl.constexpr):
    for begin in range(0, count, block):
        i = begin + tl.arange(0, block)
        tl.store(target + i, tl.load(source + i, mask=i < count), mask=i < count)


@triton.jit(do_not_specialize=VARYING)
def _fork_kernel(
    own_slots, parents, positions, ranks, history, seeds, inverse_temperatures, rivals, table, pages,
    first_slot, first_page, num_columns, history_stride, table_stride, layer_stride, page_size,
    entry: tl.constexpr, own_pages: tl.constexpr, recent: tl.constexpr, most_rivals: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    branch, layer = tl.program_id(0), tl.program_id(1).to(tl.int64)
    slot, parent = tl.load(own_slots + branch).to(tl.int64), tl.load(parents + branch).to(tl.int64)
    position = tl.load(positions + branch)
    column, page = position // page_size, (first_page + (slot - first_slot) * own_pages).to(tl.int64)
    shared = tl.load(table + parent * table_stride + column).to(tl.int64)
    here = pages + layer * layer_stride
    _copy(here + shared * page_size * entry, here + page * page_size * entry, position % page_size * entry, block)
    if layer == 0:
        _copy(table + parent * table_stride, table + slot * table_stride, column, block)
        for each in tl.static_range(own_pages):
            if column + each < num_columns:
                tl.store(table + slot * table_stride + column + each, (page + each).to(tl.int32))
        rank = tl.load(ranks + branch)
        token = tl.load(rivals + (parent * recent + position % recent) * most_rivals + rank)
        tl.store(history + slot * history_stride + position, token)
        tl.store(seeds + slot, tl.load(seeds + parent))
        tl.store(inverse_temperatures + slot, tl.load(inverse_temperatures + parent))


@triton.jit(do_not_specialize=VARYING)
def _adopt_kernel(
    indices, parent_slots, num_tokens, first, counts, own_slots, positions, sizes,
    history, seeds, rivals, missed, table, pages, packed, chance,
    history_stride, table_stride, layer_stride, packed_stride, page_size,
    entry: tl.constexpr, hit: tl.constexpr, recent: tl.constexpr, most_rivals: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """All programs of a parent come to the same: what one writes, no other asks for."""
    parent, layer = tl.program_id(0), tl.program_id(1).to(tl.int64)
    packed += tl.load(indices + parent) * packed_stride
    if tl.load(packed + hit) == 1:
        return
    slot = tl.load(parent_slots + parent).to(tl.int64)
    last = tl.load(num_tokens + parent) + tl.load(packed)
    said = tl.load(history + slot * history_stride + last)
    begin, found = tl.load(first + parent), -1
    takes = 1
    if chance is not None:
        takes = (draw(tl.load(seeds + slot), last + 1) < tl.load(chance)).to(tl.int32)
    for branch in range(begin, begin + tl.load(counts + parent)):
        own = tl.load(own_slots + branch).to(tl.int64)
        starts_here = tl.load(positions + branch) == last
        if chance is None:
            starts_here = starts_here & (tl.load(history + own * history_stride + last) == said)
        found = tl.where(starts_here & (takes != 0) & (found < 0), branch, found)
    if found < 0:
        return
    own, size = tl.load(own_slots + found).to(tl.int64), tl.load(sizes + found)
    here = pages + layer * layer_stride
    for position in range(last, last + size):
        column, offset = position // page_size, position % page_size
        source = tl.load(table + own * table_stride + column).to(tl.int64)
        target = tl.load(table + slot * table_stride + column).to(tl.int64)
        _copy(here + (source * page_size + offset) * entry, here + (target * page_size + offset) * entry, entry, block)
    if layer == 0:
        _copy(history + own * history_stride + last + 1, history + slot * history_stride + last + 1, size, block)
        for position in range(last + 1, last + size + 1):
            there = position % recent * most_rivals
            _copy(rivals + own * recent * most_rivals + there, rivals + slot * recent * most_rivals + there,
                  most_rivals, most_rivals)  # fmt: skip
        tl.store(packed + hit, 2)
        tl.store(missed + slot, 0)
