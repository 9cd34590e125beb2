"""What a step's tokens mean to their requests: progress, or an end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np

from faser.arrays import BoolArray, IntArray
from faser.engine.slots import OpenRequest, SlotTable
from faser.request import FinishReason, Progress, TokenLogprobs
from faser.step import StepResult


class Reporter:
    """Most requests just get their tokens. Those that may end here, or asked for more than tokens, are examined."""

    def __init__(self, slots: SlotTable) -> None:
        self.slots = slots
        self._asks_more: BoolArray = np.zeros(slots.max_running, dtype=np.bool_)  # by slot: stop strings or logprobs
        self._stop_counts: Counter[int] = Counter()  # stop id → running requests that have it
        self._stop_ids: IntArray = np.zeros(0, dtype=np.int64)

    def admit(self, request: OpenRequest) -> None:
        self._asks_more[request.slot] = request.checker is not None or request.request.params.logprobs is not None
        self._stop_counts.update(request.request.stop_ids)
        self._list_stop_ids(request)

    def leave(self, request: OpenRequest) -> None:
        self._stop_counts.subtract(request.request.stop_ids)
        self._stop_counts = +self._stop_counts  # without zeros
        self._list_stop_ids(request)

    def report(self, slots: IntArray, emitted: IntArray, result: StepResult) -> Iterator[Progress]:
        """Progress of the requests in `slots`. The caller takes a request out of its slot when it has a finish."""
        examined = (self.slots.num_known[slots] >= self.slots.end[slots]) | self._asks_more[slots]
        cu_emitted = np.concatenate(([0], np.cumsum(emitted)))
        if self._stop_ids.size:
            stops = np.flatnonzero(np.isin(result.token_ids, self._stop_ids))
            examined[np.searchsorted(cu_emitted, stops, side="right") - 1] = True
        requests, tokens, bounds = self.slots.requests, result.token_ids.tolist(), cu_emitted.tolist()
        rows = zip(slots.tolist(), bounds, bounds[1:], examined.tolist(), strict=False)
        for i, (slot, first, last, may_end) in enumerate(rows):
            request = requests[slot]
            if request is None or first == last:
                continue
            if may_end:
                yield self._examine(request, tokens[first:last], result.logprobs.get(i))
            else:
                yield Progress(request.request.id, tokens[first:last], None, None)

    def _examine(self, open_request: OpenRequest, new: list[int], logprobs: list[TokenLogprobs] | None) -> Progress:
        """Cut new tokens behind the first stop: they are as if never made."""
        request, checker, slot = open_request.request, open_request.checker, open_request.slot
        num_output = int(self.slots.num_known[slot] - self.slots.num_prompt[slot]) - len(new)
        reason, stop_id = None, None
        for i, token in enumerate(new):
            if token in request.stop_ids and num_output + i >= request.params.min_tokens:
                reason, stop_id = FinishReason.STOP, token
            elif checker is not None and checker.push(token):
                reason = FinishReason.STOP
            if reason is not None:
                self.slots.counts.accepted[slot] -= len(new) - (i + 1)
                new = new[: i + 1]
                break
        if reason is None and num_output + len(new) >= request.params.max_tokens:
            reason = FinishReason.LENGTH
        logprobs = logprobs[: len(new)] if logprobs is not None else None
        if reason is None:
            return Progress(request.id, new, logprobs, None)
        return Progress(request.id, new, logprobs, open_request.finish(reason, self.slots.stats(open_request), stop_id))

    def _list_stop_ids(self, changed: OpenRequest) -> None:
        if changed.request.stop_ids:
            self._stop_ids = np.array(list(self._stop_counts), dtype=np.int64)
