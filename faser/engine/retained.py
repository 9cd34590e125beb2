"""Contexts that sessions keep, and what later requests take from them.

Knows pages of the target, sessions by name, and ranges of prompts. Knows no tensors. When a request of a session ends,
its pages are kept. The next request of the session names ranges of its prompt that stood in that context: their KV is
copied, and the request computes what is left between them. A context is taken once.

Nothing relies on a context being there: where pages are short, the least recently kept context is given up, and the
request that would have taken from it computes its whole prompt.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np

from faser.arrays import IntArray
from faser.engine.pages import PagePool
from faser.engine.slots import OpenRequest, SlotTable
from faser.errors import EngineError, InvalidRequest
from faser.request import Request, Reuse
from faser.step import KvCopies

KEPT_SHARE = 0.5  # of the target's pages that contexts may hold together


def check_reuse(request: Request) -> None:
    """Refuse ranges that cannot be meant."""
    reuse = request.reuse
    if reuse is None:
        return
    bounds = np.stack([reuse.starts, reuse.ends], axis=1).reshape(-1)
    is_ordered = bool((np.diff(bounds) >= 0).all()) and bool((reuse.ends > reuse.starts).all())
    if request.session is None or not bounds.size or not is_ordered or bounds[0] < 0:
        raise InvalidRequest("reuse: expected ascending ranges of the prompt, in a request of a session")
    if bounds[-1] >= len(request.prompt_token_ids) or (reuse.sources < 0).any():
        raise InvalidRequest("reuse: expected ranges that end before the last token of the prompt")


@dataclass(frozen=True, eq=False)
class _KeptContext:
    pages: IntArray
    num_tokens: int


class RetainedContexts:
    """The kept contexts, and the ranges that running requests have taken and not reached."""

    def __init__(self, slots: SlotTable, pool: PagePool) -> None:
        self.num_taken = 0  # tokens, since the engine started
        self._slots = slots
        self._pool = pool
        self._contexts: OrderedDict[str, _KeptContext] = OrderedDict()  # least recently kept first
        self._num_pages = 0  # of all contexts
        self._ranges: dict[int, list[tuple[int, int]]] = {}  # by slot, first range first
        self._copies: list[tuple[IntArray, IntArray]] = []  # entries to copy in the next step

    def __len__(self) -> int:
        return len(self._contexts)

    def keep(self, request: OpenRequest) -> None:
        """Keep the context of a request of a session that has ended and still has its slot."""
        name, slot = request.request.session, request.slot
        assert name is not None
        self.drop(name)
        pages = self._pool.detach(slot)
        self._contexts[name] = _KeptContext(pages, int(self._slots.num_computed[slot]))
        self._num_pages += pages.size
        while self._num_pages > KEPT_SHARE * self._pool.num_pages and self.drop_oldest():
            pass

    def take(self, request: OpenRequest) -> int:
        """Copy what a request takes from its session's context into its own pages; returns the number of tokens.

        The request has its slot and pages. The context is given up. 0: there is none, or it is too short.
        """
        name, reuse = request.request.session, request.request.reuse
        if name is None or name not in self._contexts:
            return 0
        context = self._contexts[name]
        num_taken = 0
        if reuse is not None and (reuse.sources + reuse.ends - reuse.starts).max() <= context.num_tokens:
            self._copies.append(self._entries(reuse, context, request.slot))
            self._ranges[request.slot] = list(zip(reuse.starts.tolist(), reuse.ends.tolist(), strict=True))
            num_taken = reuse.num_tokens
            self.num_taken += num_taken
        self.drop(name)  # its pages are read before anything is written to them
        return num_taken

    def _entries(self, reuse: Reuse, context: _KeptContext, slot: int) -> tuple[IntArray, IntArray]:
        """Entries to copy from, and to."""
        size, counts = self._pool.page_size, reuse.ends - reuse.starts
        inside = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        source, own = (np.repeat(first, counts) + inside for first in (reuse.sources, reuse.starts))
        pages = self._pool.table[slot]
        return context.pages[source // size] * size + source % size, pages[own // size] * size + own % size

    def skip(self) -> None:
        """Move requests that have reached a range behind it."""
        for slot, ranges in list(self._ranges.items()):
            while ranges and ranges[0][0] == self._slots.num_computed[slot]:
                self._slots.num_computed[slot] = ranges.pop(0)[1]
            if not ranges:
                del self._ranges[slot]

    def limit(self, slots: IntArray, start: IntArray, pending: IntArray) -> IntArray:
        """Of the rows that requests have not computed [B], those before the next range that they have taken."""
        if not self._ranges:
            return pending
        able = pending.copy()
        for i, slot in enumerate(slots.tolist()):
            if slot in self._ranges:
                able[i] = min(able[i], self._ranges[slot][0][0] - start[i])
        return able

    def take_copies(self) -> KvCopies | None:
        """The copies of the next step."""
        if not self._copies:
            return None
        sources, destinations = (np.concatenate(parts) for parts in zip(*self._copies, strict=True))
        self._copies = []
        return KvCopies(sources, destinations)

    def vacate(self, slot: int) -> None:
        self._ranges.pop(slot, None)

    def drop(self, name: str) -> None:
        """Give up a context, if there is one of this name."""
        context = self._contexts.pop(name, None)
        if context is not None:
            self._pool.give_back_detached(context.pages)
            self._num_pages -= context.pages.size

    def drop_oldest(self) -> bool:
        """Give up the context that was kept first; False where there is none."""
        if not self._contexts:
            return False
        self.drop(next(iter(self._contexts)))
        return True

    def clear_kept(self) -> None:
        """Give up all contexts. Copies from them that are planned are still made."""
        while self.drop_oldest():
            pass

    def clear(self) -> None:
        """A step failed: what contexts hold is not known."""
        self.clear_kept()
        self._copies = []

    def check(self) -> None:
        """Raise EngineError unless the books agree."""
        if self._num_pages != sum(context.pages.size for context in self._contexts.values()):
            raise EngineError("pages of kept contexts are counted wrongly")
        if self._ranges.keys() - set(self._slots.running.tolist()):
            raise EngineError("a request that does not run has ranges of a kept context")
