"""Prompt lookup on a GPU: the plan brings the drafts, and one kernel writes them behind the contexts.

Wraps the drafter of a model or a head, which never meets requests whose drafts were looked up. A step planned ahead
does not know where a context ends; the kernel does, and takes the tokens that belong behind it.
"""

# mypy: disable-error-code="import-untyped, import-not-found, untyped-decorator, no-untyped-def"
from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
import triton
import triton.language as tl

from faser.arrays import NONE, IntArray
from faser.limits import HARD_MAX_LENGTH
from faser.runtime.cuda.drafter import CudaDrafter, Draft
from faser.runtime.cuda.graphs import Shape
from faser.runtime.cuda.model import CudaModel
from faser.runtime.cuda.sampling import RECENT, Slots
from faser.runtime.cuda.transfer import send
from faser.step import PageWrites, StepPlan

NUM_FIELDS = 5  # of a packed request, before its tokens


class CudaLookupDrafter(CudaDrafter):
    """Without `inner` all drafts are looked up."""

    def __init__(self, inner: CudaDrafter | None, slots: Slots) -> None:
        self._inner = inner
        self._slots = slots
        self.models = () if inner is None else inner.models

    def graphs(self, num_requests: Sequence[int], length: int) -> list[tuple[CudaModel, Shape | None]]:
        return [] if self._inner is None else self._inner.graphs(num_requests, length)

    def dry_runs(self) -> list[Callable[[], None]]:
        own = [partial(_write, np.zeros((1, NUM_FIELDS + 1), dtype=np.int32), self._slots)]
        return own + ([] if self._inner is None else self._inner.dry_runs())

    def apply(self, writes: PageWrites) -> None:
        if self._inner is not None:
            self._inner.apply(writes)

    def begin(self, plan: StepPlan) -> Draft:
        if plan.lookup is not None:
            write_found(plan, self._slots)
        elif self._inner is not None:
            return self._inner.begin(plan)
        return LookupDraft(None if self._inner is None else self._inner.begin(plan.by_draft), plan)


class LookupDraft:
    """Drafts that are written already, beside those that `inner` makes."""

    def __init__(self, inner: Draft | None, plan: StepPlan) -> None:
        self._inner = inner
        self._written = plan.lengths if inner is None else plan.looked_up
        self.is_whole = inner is None or inner.is_whole

    @property
    def num_tokens(self) -> IntArray:
        return self._written if self._inner is None else self._written + self._inner.num_tokens

    @property
    def requests(self) -> IntArray:
        return NONE if self._inner is None else self._inner.requests

    @property
    def num_unfinished(self) -> int:
        return 0 if self._inner is None else self._inner.num_unfinished

    @property
    def confidence(self) -> torch.Tensor | None:
        return None if self._inner is None else self._inner.confidence

    def extend(self, num_sms: int = 0) -> bool:
        return self._inner is not None and self._inner.extend(num_sms)


def write_found(plan: StepPlan, slots: Slots) -> None:
    """Write the drafts that a plan brings into the history, behind each context as it is on the device."""
    assert plan.lookup is not None
    some = np.flatnonzero(plan.looked_up)
    fields = (plan.slots, plan.lookup.start, plan.num_tokens, plan.unsettled, plan.lengths)
    packed = np.column_stack([*fields, plan.lookup.token_ids])[some]
    _write(packed.astype(np.int32), slots)


def _write(packed: IntArray, slots: Slots) -> None:
    history = slots.history
    _write_kernel[(packed.shape[0],)](
        send(packed, history.device), history, slots.refused, slots.recent_confidence, packed.shape[1],
        history.stride(0), num_fields=NUM_FIELDS, block=HARD_MAX_LENGTH, recent=RECENT, num_warps=1,
    )  # fmt: skip


@triton.jit(do_not_specialize=["packed_stride", "history_stride"])
def _write_kernel(
    packed, history, refused, confidence, packed_stride, history_stride,
    num_fields: tl.constexpr, block: tl.constexpr, recent: tl.constexpr,
):  # fmt: skip
    """One program for a request. An unsettled context is shorter by the drafts that the step before refused."""
    packed += tl.program_id(0).to(tl.int64) * packed_stride
    slot = tl.load(packed).to(tl.int64)
    start = tl.load(packed + 1)
    begin = tl.load(packed + 2) - tl.load(packed + 3) * tl.load(refused + slot)
    # [block]
    offset = tl.arange(0, block)
    is_draft = offset < tl.load(packed + 4)
    token = tl.load(packed + num_fields + begin - start + offset, mask=is_draft, other=0)
    position = begin + offset
    tl.store(history + slot * history_stride + position, token, mask=is_draft)
    # no model was asked
    tl.store(confidence + slot * recent + position % recent, float("nan"), mask=is_draft)
