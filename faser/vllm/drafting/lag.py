"""How far the draft is behind the context of each request, as the host can know it.

The draft runs in some steps and not in others. Its lag is the number of context tokens that it has yet to compute:
1 or 2 where it drafted in the step before, everything since its last step where it did not, and a whole prompt at
first. While a step is in flight the host knows only bounds of a context, so a lag here is an upper bound: a few
tokens may be computed twice.

With prefix caching a request begins on blocks that another one filled. Draft and target share the block tables, so
such a block holds the target's KV entries, and those of the draft only if it ran. Blocks are remembered by number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from faser.arrays import BoolArray, IntArray

STEADY_LAG = 2  # tokens that the draft computes first where it kept up: the bonus, and the last draft if accepted


@dataclass(frozen=True)
class DraftBatch:
    """The requests of a step, in the order of its rows. Arrays are [B]."""

    request_ids: Sequence[str]
    computed: IntArray  # tokens that the target had computed before the step; drafts in flight count as accepted
    scheduled: IntArray  # rows of the step
    verified: IntArray  # drafts among these rows
    samples: BoolArray  # whether a token follows the rows; False: a part of a prompt

    @property
    def longest(self) -> IntArray:
        """Context tokens after the step, if every draft is accepted: the rows, and the token that follows them."""
        return self.computed + self.scheduled + 1


@dataclass
class _Tracked:
    slot: int
    blocks: list[int] = field(default_factory=list)


class DraftLag:
    """Slots of requests, and what the draft has computed of each. A slot is the same for as long as a request runs."""

    def __init__(self, max_requests: int, block_size: int) -> None:
        self.block_size = block_size
        self._requests: dict[str, _Tracked] = {}
        self._free = list(range(max_requests - 1, -1, -1))
        zeros = np.zeros(max_requests, dtype=np.int64)
        self._seen = zeros.copy()  # context tokens whose draft KV entries surely stand
        self._depth = zeros.copy()  # tokens drafted in the last step; 0: the draft did not run, or not over all of it
        self._verified = zeros.copy()  # drafts in the last step, of which the host may not know yet how many stand
        self._blocks_seen: set[int] = set()  # full blocks that hold the draft's KV entries

    def begin(self, request_id: str, blocks: Sequence[int], num_cached: int) -> int:
        """A request enters, or comes back after a preemption; its first `num_cached` tokens are in the prefix cache.

        Returns how many of them the draft has.
        """
        self.end(request_id)
        tracked = self._requests[request_id] = _Tracked(self._free.pop())
        cached = num_cached // self.block_size
        missing = (index for index, block in enumerate(blocks[:cached]) if block not in self._blocks_seen)
        seen = next(missing, cached) * self.block_size
        tracked.blocks.extend(blocks[:cached])
        self.extend(request_id, blocks[cached:])
        slot = tracked.slot
        self._seen[slot], self._depth[slot], self._verified[slot] = seen, 0, 0
        return seen

    def extend(self, request_id: str, blocks: Sequence[int]) -> None:
        """Give the request blocks that nobody has filled."""
        self._requests[request_id].blocks.extend(blocks)
        self._blocks_seen.difference_update(blocks)

    def end(self, request_id: str) -> None:
        """The request finished or was preempted; unknown ones are ignored."""
        tracked = self._requests.pop(request_id, None)
        if tracked is not None:
            self._free.append(tracked.slot)

    def slots(self, request_ids: Sequence[str]) -> IntArray:
        return np.fromiter((self._requests[each].slot for each in request_ids), np.int64, len(request_ids))

    def lags(self, batch: DraftBatch) -> IntArray:
        """[B] context tokens that the draft has yet to compute after this step, at most; at least 1."""
        slots = self.slots(batch.request_ids)
        depth = self._depth[slots]
        # of d drafted tokens the draft has computed all but the last
        steady = np.where(batch.verified < depth, 1, STEADY_LAG)
        lags: IntArray = np.where(depth > 0, steady, np.maximum(batch.longest - self._seen[slots], 1))
        return lags

    def drafted(self, batch: DraftBatch, depth: int) -> None:
        """The draft has caught up with every request of the batch and drafted `depth` tokens."""
        slots = self.slots(batch.request_ids)
        shortest = batch.longest - batch.verified - self._verified[slots]  # if all drafts in flight are rejected
        seen = np.where(batch.samples, shortest, batch.computed + batch.scheduled)
        seen = np.maximum(seen, self._seen[slots])
        self._name_blocks(batch.request_ids, self._seen[slots], seen)
        self._seen[slots] = seen
        # after a part of a prompt vLLM gives the draft a made-up token: what was computed from it does not count
        self._depth[slots] = np.where(batch.samples, depth, 0)
        self._verified[slots] = batch.verified

    def skipped(self, batch: DraftBatch) -> None:
        """The draft did not run in this step."""
        slots = self.slots(batch.request_ids)
        self._depth[slots] = 0
        self._verified[slots] = batch.verified

    def _name_blocks(self, request_ids: Sequence[str], before: IntArray, after: IntArray) -> None:
        """Remember the blocks that the draft has just filled."""
        first, last = before // self.block_size, after // self.block_size
        for index in np.flatnonzero(first < last).tolist():
            blocks = self._requests[request_ids[index]].blocks
            self._blocks_seen.update(blocks[first[index] : last[index]])
