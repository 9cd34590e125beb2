"""Steps of vLLM as the draft sees them: follows the scheduler's messages, and drafts at the end of a step.

Reads vLLM's SchedulerOutput by its fields, which both supported versions have.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from faser.arrays import BoolArray, IntArray
from faser.vllm.drafting.lag import DraftBatch, DraftLag
from faser.vllm.drafting.loop import DraftLoop, Sample


@dataclass(frozen=True)
class CachedTokens:
    """The first tokens of a request, which it found in the prefix cache: no row of the target will bring them."""

    slot: int
    tokens: Sequence[int]


class DraftSteps:
    """One step is `begin`, the target's forward, and `draft`."""

    def __init__(self, lag: DraftLag, loop: DraftLoop, group: int) -> None:
        """`group`: the KV cache group of the draft's layers."""
        self.lag, self.loop, self._group = lag, loop, group
        self._output: Any = None
        self.num_skipped = 0  # steps in which the draft did not run
        self.num_catch_ups = 0  # requests that were further behind than a draft that kept up

    def begin(self, output: Any) -> list[CachedTokens]:
        """Take in what the scheduler decided."""
        self._output = output
        for request_id in (*output.finished_req_ids, *(output.preempted_req_ids or ())):
            self.lag.end(request_id)
        found = list(self._begin_requests(output))
        cached = output.scheduled_cached_reqs
        for request_id, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if blocks is not None and request_id not in cached.resumed_req_ids:
                self.lag.extend(request_id, blocks[self._group])
        return found

    def _begin_requests(self, output: Any) -> Iterator[CachedTokens]:
        cached = output.scheduled_cached_reqs
        entering = [
            (each.req_id, each.block_ids, each.num_computed_tokens, each.prefill_token_ids or each.prompt_token_ids)
            for each in output.scheduled_new_reqs
        ]
        entering += [
            (request_id, blocks, computed, cached.all_token_ids.get(request_id))
            for request_id, blocks, computed in zip(
                cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
            )
            if request_id in cached.resumed_req_ids
        ]
        for request_id, blocks, computed, tokens in entering:
            self.lag.begin(request_id, blocks[self._group], computed)
            if computed and tokens is not None:
                yield CachedTokens(int(self.lag.slots([request_id])[0]), tokens[:computed])

    def batch(self, request_ids: Sequence[str], computed: IntArray, samples: BoolArray) -> DraftBatch:
        """The step that `begin` announced. Arrays are [B], in the order of its rows."""
        drafts, rows = self._output.scheduled_spec_decode_tokens, self._output.num_scheduled_tokens
        return DraftBatch(
            request_ids,
            computed=computed.astype(np.int64),
            scheduled=np.fromiter((rows[each] for each in request_ids), np.int64, len(request_ids)),
            verified=np.fromiter((len(drafts.get(each, ())) for each in request_ids), np.int64, len(request_ids)),
            samples=samples,
        )

    def draft(
        self, batch: DraftBatch, lengths: Tensor, history_rows: Tensor, depth: int, sample: Sample | None = None
    ) -> Tensor:
        """[B, depth] drafts. `lengths`: [B] context tokens after the step, on the device. Depth 0: nothing runs."""
        number = len(batch.request_ids)
        if not depth:
            self.num_skipped += 1
            self.lag.skipped(batch)
            return self.loop.drafts.new_empty(number, 0)
        lags = self.lag.lags(batch)
        self.num_catch_ups += int(np.count_nonzero(batch.samples & (lags > batch.scheduled + 1)))
        self.loop.load(lengths, history_rows)
        drafts = self.loop.draft(lags, depth, sample)
        self.lag.drafted(batch, depth)
        return drafts
