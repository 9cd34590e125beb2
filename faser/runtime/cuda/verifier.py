"""The target's part of a step: a forward over contexts and drafts, and the verdict.

Knows the target, its graphs and where verdicts are packed. Does not know who drafts. A draft is accepted if it equals
the target's token and all drafts before it are accepted.

Shapes: B requests, W tokens one request can emit in a step at most.
"""

# mypy: disable-error-code="import-untyped, import-not-found, untyped-decorator, no-untyped-def"
from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl

from faser.arrays import IntArray
from faser.runtime.cuda.graphs import Shape, on_part, verification
from faser.runtime.cuda.launched import LaunchedStep
from faser.runtime.cuda.model import CudaModel
from faser.runtime.cuda.resampling import Resampler
from faser.runtime.cuda.rows import Requests
from faser.runtime.cuda.sampling import Choices, Slots, noise_keys, noise_word, uniform
from faser.step import StepPlan

# columns of a packed verdict
NUM_ACCEPTED, IS_BROKEN, HIT, FIRST_TOKEN = 0, 1, 2, 3

_COIN = tl.constexpr(0xFFFFFFFF)  # no token has this id: its noise decides synthetic acceptance


class CudaVerifier:
    """`acceptance`, for measuring: the probability to accept a draft, or one by position, whatever the target says."""

    def __init__(
        self,
        target: CudaModel,
        slots: Slots,
        resampler: Resampler,
        max_length: int,
        acceptance: float | Sequence[float] | None,
    ) -> None:
        max_requests, device = target.requests.slots.shape[0], target.model.device
        self.target = target
        self.resampler = resampler
        self.packed = torch.zeros(max_requests, FIRST_TOKEN + max_length + 1, dtype=torch.int32, device=device)
        self.usual_rows = 1  # rows of a request that drafts; fewer run as this many, so that there are few graphs
        self._slots = slots
        self.acceptance: torch.Tensor | None = None  # [max_length] by position in the draft
        if acceptance is not None:
            self.acceptance = torch.tensor(chances_by_position(acceptance, max(1, max_length)), device=device)

    def launch(self, plan: StepPlan, num_drafted: IntArray, num_sms: int = 0) -> Shape:
        """The forward of a step with num_drafted [B] drafts to verify; the shape that ran."""
        self.set_requests(plan, num_drafted)
        return self.launch_requests(plan, num_drafted, num_sms)

    def set_requests(self, plan: StepPlan, num_drafted: IntArray) -> None:
        self.target.set_requests(
            plan.slots, plan.start, plan.num_rows, num_drafted, plan.samples, plan.unsettled, plan.judged, plan.frontier
        )

    def launch_requests(self, plan: StepPlan, num_drafted: IntArray, num_sms: int = 0) -> Shape:
        """As `launch`, for requests that were set."""
        num_rows = plan.num_rows + num_drafted
        shape = None
        if plan.only_decodes:
            most = int(num_rows.max())
            shape = verification(int(num_rows.sum()), most if most == 1 else max(most, self.usual_rows))
        num_wanted = int(self._num_judged(plan, num_drafted).sum())
        return self.target.launch_rows(on_part(shape, num_sms), num_rows, plan.start, num_wanted)

    def resample(self, step: LaunchedStep, shape: Shape) -> None:
        """Replace the tokens of requests that need more than a temperature."""
        num_judged = self._num_judged(step.plan, step.num_verified)
        step.answers = self.resampler.resample(step.plan, num_judged, shape)

    def judge(self, shape: Shape, *, overlaps: bool = False) -> None:
        """The verdict over the latest forward, into `packed`."""
        target = self.target
        judge(
            target.choices, target.requests_of(shape), target.rows.cu_wanted[: shape.num_requests + 1], self._slots,
            self.packed[: shape.num_requests], overlaps=overlaps, acceptance=self.acceptance,
        )  # fmt: skip

    def _num_judged(self, plan: StepPlan, num_drafted: IntArray) -> IntArray:
        """[B] rows whose token is judged: the last context row and the drafts of each request that samples."""
        return np.where(plan.samples, num_drafted + 1, 0)


def chances_by_position(acceptance: float | Sequence[float], max_length: int) -> list[float]:
    """One probability for each position of a draft; the last one given holds for all that follow."""
    given = [acceptance] if isinstance(acceptance, (int, float)) else list(acceptance)
    return [float(given[min(position, len(given) - 1)]) for position in range(max_length)]


def judge(
    choices: Choices,
    requests: Requests,
    cu_wanted: torch.Tensor,
    slots: Slots,
    packed: torch.Tensor,
    *,
    overlaps: bool = False,
    acceptance: torch.Tensor | None = None,
) -> None:
    """The verdict over each request's drafts, packed for one copy to the host. Emitted tokens go into the history.

    The wanted rows cu_wanted[i] … cu_wanted[i + 1] - 1 (int32 [B + 1]) are those of the last context token and of the
    drafts of request i; a request that does not sample has none. packed is int32 [B, FIRST_TOKEN + W]: the number of
    accepted drafts; whether an emitted row is broken; whether all drafts were accepted and the bonus equals the token
    behind them in the history (a hit, with `overlaps`); the accepted tokens and the bonus; then -1.

    slots.refused, slots.short and slots.missed keep what the next step must know, on the device.

    With `acceptance` (float32 [W - 1], by position in the draft) drafts are accepted with these probabilities instead:
    it measures the cost of a step where weights are random.
    """
    num_bucket_requests, width = packed.shape
    width -= FIRST_TOKEN
    _judge_kernel[(num_bucket_requests,)](
        choices.tokens, choices.broken, cu_wanted, requests.slots, requests.start, requests.num_rows, requests.planned,
        requests.num_requests, slots.history, slots.seeds, slots.refused, slots.short, slots.missed, acceptance, packed,
        slots.history.stride(0), packed.stride(0), width,
        padded_width=triton.next_power_of_2(width), first_token=FIRST_TOKEN, overlaps=overlaps, num_warps=1,
    )  # fmt: skip


@triton.jit(do_not_specialize=["cu_wanted", "num_requests", "history_stride", "packed_stride", "width"])
def _judge_kernel(
    target_tokens, broken, cu_wanted, request_slots, start, num_rows, planned,
    num_requests, history, seeds, refused, short, missed, acceptance, packed,
    history_stride, packed_stride, width, padded_width: tl.constexpr, first_token: tl.constexpr, overlaps: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0)
    if request >= tl.load(num_requests):
        return
    slot = tl.load(request_slots + request).to(tl.int64)
    num_tokens = tl.load(start + request) + tl.load(num_rows + request)
    first = tl.load(cu_wanted + request)
    num_judged = tl.load(cu_wanted + request + 1) - first

    # [padded_width]
    offset = tl.arange(0, padded_width)
    is_judged = offset < num_judged
    is_draft = offset < num_judged - 1  # the last row judges no draft
    place = history + slot * history_stride + num_tokens + offset
    chosen = tl.load(target_tokens + first + offset, mask=is_judged, other=-1)
    drafted = tl.load(place, mask=is_judged, other=-1).to(tl.int32)
    agrees = chosen == drafted
    if acceptance is not None:
        key0, key1 = noise_keys(tl.load(seeds + slot), num_tokens + offset)
        coin = uniform(noise_word(tl.full([padded_width], _COIN, tl.uint32), key0, key1))
        agrees = coin < tl.load(acceptance + offset, mask=is_judged & (offset < width - 1), other=0.0)
    num_accepted = tl.min(tl.where(is_draft & agrees, padded_width, offset), axis=0)
    hits = is_judged & (offset == num_judged - 1) & (offset == num_accepted) & agrees
    hit = tl.max(hits.to(tl.int32), axis=0)
    tl.store(missed + slot, 1 - hit)
    num_planned = tl.load(planned + request)
    tl.store(refused + slot, num_planned - num_accepted)
    num_drafted = tl.maximum(num_judged - 1, 0)
    tl.store(short + slot, ((num_drafted < num_planned) & (num_accepted == num_drafted)).to(tl.int32))
    emitted = is_judged & (offset <= num_accepted)
    token = tl.where(offset < num_accepted, drafted, chosen)
    if overlaps:  # differs only under synthetic acceptance
        token = tl.where(hits, drafted, token)
    tl.store(place, token, mask=emitted)
    is_broken = tl.max(tl.load(broken + first + offset, mask=emitted, other=0), axis=0)
    packed += request * packed_stride
    tl.store(packed, num_accepted)
    tl.store(packed + 1, is_broken)
    tl.store(packed + 2, hit)
    tl.store(packed + first_token + offset, tl.where(emitted, token, -1), mask=offset < width)
