"""The verdict over the drafts of a step, on the device.

Knows the tokens the target chose for each judged row and the drafts in the history. A draft is accepted if it equals
the target's token and all drafts before it are accepted.

Shapes: B requests, W tokens one request can emit in a step at most.
"""

# mypy: disable-error-code="import-untyped, import-not-found, untyped-decorator, no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from faser.runtime.cuda.noise import noise_keys, noise_word, uniform
from faser.runtime.cuda.rows import Requests
from faser.runtime.cuda.sampling import Choices, Slots, power_of_two

# columns of a packed verdict
NUM_ACCEPTED, BROKEN, HIT, FIRST_TOKEN = 0, 1, 2, 3

_COIN = tl.constexpr(0xFFFFFFFF)  # no token has this id: its noise decides synthetic acceptance


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
        padded_width=power_of_two(width), first_token=FIRST_TOKEN, overlaps=overlaps, num_warps=1,
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
