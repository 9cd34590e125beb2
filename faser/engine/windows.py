"""Drafts that see a window of each context: where a draft begins again, and pages that nobody sees any more.

Knows positions of the draft, its pages and the prefix cache. A draft that fell behind computes only what its next
drafts see: the sinks, in a step of their own, and then the window. Keys between the sinks and the window's beginning
do not exist then, which the executor is told (`StepPlan.draft_first`). Pages whose keys depend on such a beginning are
not published: they are not a function of their tokens alone.
"""

from __future__ import annotations

import numpy as np

from faser.arrays import BoolArray, IntArray
from faser.engine.pages import PagePool, PagePools
from faser.engine.prefixes import Prefixes
from faser.engine.slots import SlotTable
from faser.limits import KeyWindow
from faser.step import KeyStarts


class DraftWindows:
    """The beginning of the draft's window in every slot."""

    def __init__(self, window: KeyWindow, slots: SlotTable, pages: PagePool, prefixes: Prefixes) -> None:
        self._window = window
        self._slots = slots
        self._pages = pages
        self._prefixes = prefixes
        self._told: IntArray = np.zeros(slots.max_running, dtype=np.int64)  # what the executor knows of draft_first

    def lag(self, slots: IntArray, begin: IntArray) -> IntArray:
        """[B] rows that the draft has to compute before it can draft at `begin`."""
        computed, window = self._slots.draft_computed[slots], self._window
        lag: IntArray = np.minimum(begin - computed, np.maximum(window.sinks - computed, 0) + window.size)
        return lag

    def begin_again(self, slots: IntArray, begin: IntArray) -> None:
        """Give up the keys that drafts at `begin` [B] do not see, of requests that fell behind by more than a page.

        So a catch-up takes no more pages than a window has.
        """
        window, state = self._window, self._slots
        start = begin - window.size
        behind = (begin - state.draft_computed[slots] > self._pages.page_size) & (start > window.sinks)
        behind &= state.draft_computed[slots] >= window.sinks
        for slot, first in zip(slots[behind].tolist(), start[behind].tolist(), strict=True):
            self._prefixes.publish(slot)
            state.draft_first[slot] = max(first, int(state.draft_first[slot]))
            state.draft_computed[slot] = max(first, int(state.draft_computed[slot]))
            self._pages.skip(slot, first)

    def lacks_sinks(self, slots: IntArray, begin: IntArray) -> BoolArray:
        """[B] whose sinks are to be computed before all else, because the window does not reach them."""
        window = self._window
        lacks: BoolArray = (self._slots.draft_computed[slots] < window.sinks) & (begin > window.span)
        return lacks

    def rows(self, slots: IntArray, begin: IntArray, lag: IntArray) -> IntArray:
        """[B] rows to compute now: the lag, or the rest of the sinks."""
        sinks = self._window.sinks - self._slots.draft_computed[slots]
        return np.where(self.lacks_sinks(slots, begin), sinks, lag)

    def forget(self) -> None:
        """What the executor knows is not known: a step failed."""
        self._told[:] = -1

    def take_changes(self, slots: IntArray) -> KeyStarts | None:
        """What the executor must learn before the draft computes rows of these slots."""
        changed = slots[self._told[slots] != self._slots.draft_first[slots]]
        if not changed.size:
            return None
        self._told[changed] = self._slots.draft_first[changed]
        return KeyStarts(changed, self._told[changed])


def slide(pools: PagePools, slots: SlotTable, prefixes: Prefixes, some: IntArray) -> None:
    """Give back what no further row of `some` slots sees, after a step. Full pages are published before they go."""
    settled = slots.num_tokens[some] - 1  # no step takes these tokens back
    target, draft = pools.target, pools.draft
    if target.window is not None:
        _slide(target, prefixes, some, np.minimum(slots.num_computed[some], settled))
    if draft is not None and draft.window is not None:
        _slide(draft, prefixes, some, np.minimum(slots.draft_computed[some], settled))


def _slide(pool: PagePool, prefixes: Prefixes, slots: IntArray, positions: IntArray) -> None:
    due = pool.is_due(slots, positions)
    for slot in slots[due].tolist():
        prefixes.publish(slot)
    pool.slide(slots[due], positions[due])
