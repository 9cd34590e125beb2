"""Who holds which KV pages of one model: page tables, sharing, and the prefix cache.

Knows page numbers, hashes and slots. Knows nothing of tensors, models or requests. A page is in one of three states:
free; held (by the tables of one or more slots); or idle (held by no slot, but published under the hash of its tokens,
so that a later prompt with the same beginning can take it instead of computing it). When no free page is left, the
least recently used idle page is given out.

Only full pages with committed tokens are published, so a shared page is never written again.

A pool of a model that sees a window of each context gives back the pages that no further row sees. The columns of a
table between the sinks and the window then have no page: its hole. Their entries are never read again.

A pool may grow, and shrink again (residency.py). A page at or beyond the end of a pool that shrank is given out no
more; `compact` moves those that are still held to pages below the end.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

import numpy as np

from faser.arrays import NONE, BoolArray, IntArray
from faser.errors import EngineError
from faser.limits import KeyWindow
from faser.step import PageMoves, PageWrites

NO_WRITES = PageWrites(NONE, NONE, NONE)


def page_hash(previous: bytes, tokens: IntArray, salt: bytes = b"") -> bytes:
    """The name of a full page: its tokens and, through `previous`, all tokens before it.

    `salt` says what else its content depends on: the pictures that tokens stand for.
    """
    return blake2b(previous + tokens.tobytes() + salt, digest_size=16).digest()


class PagePool:
    """The pages of one model's KV cache and a page table row for each slot.

    It has `num_pages` pages to begin with (`base_pages`), and may grow to `most_pages`.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        max_slots: int,
        max_tokens: int,
        caching: bool = True,
        most_pages: int | None = None,
        window: KeyWindow | None = None,
    ) -> None:
        self.window = window  # what the model sees of a context; None: all of it
        self.num_pages = self.base_pages = num_pages
        self.page_size = page_size
        most = most_pages or num_pages
        self.table: IntArray = np.zeros((max_slots, self.pages_for(max_tokens)), dtype=np.int64)
        self.count: IntArray = np.zeros(max_slots, dtype=np.int64)  # columns, the hole included
        self._hole_end: IntArray = np.zeros(max_slots, dtype=np.int64)  # columns from the sinks' on to here: no page
        self._caching = caching
        self._free: IntArray = np.zeros(most, dtype=np.int64)  # a stack: the first num_free are free
        self._free[:num_pages] = np.arange(num_pages)[::-1]
        self.num_free = num_pages  # neither held nor idle
        self._holders: IntArray = np.zeros(most, dtype=np.int64)
        self._detached: IntArray = np.zeros(most, dtype=np.int64)  # of the holders, those that are no slots
        self._published: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._writes: list[tuple[IntArray, IntArray]] = []  # (slots, columns) of the table

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    @property
    def num_available(self) -> int:
        """Pages that can be given out now, idle ones included."""
        return self.num_free + len(self._idle)

    @property
    def num_held(self) -> int:
        return self.num_pages - self.num_available + self.num_beyond

    @property
    def num_beyond(self) -> int:
        """Held pages beyond the end of a pool that shrank."""
        return int(np.count_nonzero(self._holders[self.num_pages :]))

    def reserve(self, slots: IntArray, num_tokens: IntArray) -> bool:
        """Grow each slot's table to num_tokens [B] tokens. If pages are short: False, and nothing is changed."""
        held = self.count[slots]
        needed = -(-num_tokens // self.page_size) - held
        grows = needed > 0
        if not grows.any():
            return True
        slots, held, needed = slots[grows], held[grows], needed[grows]
        cu_needed = needed.cumsum()
        total = int(cu_needed[-1])
        if total > self.num_available:
            return False
        pages = self._take(total)
        columns = np.arange(total) + (held + needed - cu_needed).repeat(needed)
        self._write(slots.repeat(needed), columns, pages)
        self._holders[pages] = 1
        self.count[slots] = held + needed
        return True

    def truncate(self, slots: IntArray, num_tokens: IntArray) -> None:
        """Give back the pages beyond num_tokens [B]. They held rejected drafts alone: unpublished, held by one slot."""
        kept = np.maximum(-(-num_tokens // self.page_size), self._hole_end[slots])
        while (over := np.flatnonzero(self.count[slots] > kept)).size:
            slots, kept = slots[over], kept[over]
            self.count[slots] -= 1
            pages = self.table[slots, self.count[slots]]
            self._holders[pages] = 0
            self._push(pages)

    def release(self, slot: int) -> None:
        """Give back all pages of a slot. Published pages become idle; the end of the context is given out first."""
        if not self.count[slot]:
            return
        pages = self.table[slot, self._held_columns(slot)][::-1]
        self.count[slot] = self._hole_end[slot] = 0
        self._give_back(pages)

    def slide(self, slots: IntArray, positions: IntArray) -> None:
        """Give back the pages that no row of a slot from `positions` [B] on sees. They were committed."""
        ends = self._unseen_end(positions)
        for i in np.flatnonzero(self.is_due(slots, positions)).tolist():
            self.skip(int(slots[i]), int(ends[i]) * self.page_size)

    def is_due(self, slots: IntArray, positions: IntArray) -> BoolArray:
        """[B] whether `slide` would give back a page."""
        due: BoolArray = self._unseen_end(positions) > np.maximum(self._hole_end[slots], self._sink_columns)
        return due & (self.count[slots] > 0)

    def skip(self, slot: int, start: int) -> None:
        """A slot's window begins at token `start` or later. Pages before it are given back, and none is reserved."""
        stop = start // self.page_size
        first = max(self._sink_columns, int(self._hole_end[slot]))
        if stop <= first:
            return
        pages = self.table[slot, first : min(stop, int(self.count[slot]))][::-1]
        self._hole_end[slot], self.count[slot] = stop, max(stop, int(self.count[slot]))
        self._give_back(pages)

    def detach(self, slot: int) -> IntArray:
        """Take all pages from a slot and keep them held, until `give_back_detached`."""
        assert self.window is None, "a context that is kept is whole"
        pages = self.table[slot, : self.count[slot]].copy()
        self.count[slot] = 0
        self._detached[pages] += 1
        return pages

    def give_back_detached(self, pages: IntArray) -> None:
        self._detached[pages] -= 1
        self._give_back(pages[::-1])

    def _give_back(self, pages: IntArray) -> None:
        """One holder less of each page."""
        self._holders[pages] -= 1
        if not self._hash_of:  # then no page is shared
            self._push(pages)
            return
        unheld = pages[self._holders[pages] == 0]
        for page in unheld.tolist():
            if page not in self._hash_of:
                self._push(np.array([page]))
            elif page < self.num_pages:
                self._idle[page] = None
            else:
                self._unpublish(page)

    def find(self, hashes: Sequence[bytes]) -> tuple[int, int]:
        """The number of pages that `match` would take, and how many of them are idle now."""
        pages = self._published_run(hashes)
        return len(pages), sum(page in self._idle for page in pages)

    def match(self, slot: int, hashes: Sequence[bytes]) -> int:
        """Take the longest published run of `hashes` into an empty slot; returns its number of pages.

        With a window, those that the next row sees.
        """
        pages = self._published_run(hashes)
        if pages:
            self.count[slot] = len(pages)
            if self.window is not None:
                end = int(self._unseen_end(np.array(len(pages) * self.page_size)))
                self._hole_end[slot] = end if end > self._sink_columns else 0
            columns = self._held_columns(slot)
            taken = np.array(pages)[columns]
            for page in taken.tolist():
                self._idle.pop(page, None)
            self._holders[taken] += 1
            self._write(np.full(taken.size, slot), columns, taken)
        return len(pages)

    def publish(self, slot: int, column: int, name: bytes) -> None:
        """Publish a slot's full, committed page. Of two equal pages the first stays published."""
        page = int(self.table[slot, column])
        if self._caching and name not in self._published and page not in self._hash_of:
            self._published[name] = page
            self._hash_of[page] = name

    def take_writes(self) -> PageWrites:
        """Page-table entries written since the last call. One written twice is listed twice, with its last value."""
        if not self._writes:
            return NO_WRITES
        slots, columns = (np.concatenate(parts) for parts in zip(*self._writes, strict=True))
        self._writes = []
        return PageWrites(slots, columns, self.table[slots, columns])

    # ── growing and shrinking ────────────────────────────────────────────────────────────────────────────────────────

    def grow(self, num_pages: int) -> None:
        """Take in the pages up to `num_pages`. They are given out last."""
        new = np.arange(self.num_pages, num_pages)
        new = new[self._holders[new] == 0][::-1]
        self._free[new.size : new.size + self.num_free] = self._free[: self.num_free].copy()
        self._free[: new.size] = new
        self.num_free += new.size
        self.num_pages = num_pages

    def shrink(self, num_pages: int) -> None:
        """Give out no page from `num_pages` on. Idle ones there are dropped from the cache; held ones stay."""
        self.num_pages = num_pages
        for page in [page for page in self._idle if page >= num_pages]:
            del self._idle[page]
            self._unpublish(page)
        free, self.num_free = self._free[: self.num_free], 0
        self._push(free.copy())

    def compact(self, num_kept: int) -> PageMoves | None:
        """Move the held pages beyond the end to pages below it, if `num_kept` pages then stay available.

        A moved page keeps its name and its holders. None: there was nothing to move, or too little room.
        """
        sources = np.flatnonzero(self._holders[self.num_pages :]) + self.num_pages
        if not sources.size or sources.size + num_kept > self.num_available:
            return None
        destinations = self._take(sources.size)
        moved = np.arange(self._holders.size)  # by page: where it is now
        moved[sources] = destinations
        slots, columns = np.nonzero(self._held_mask())
        beyond = self.table[slots, columns] >= self.num_pages
        slots, columns = slots[beyond], columns[beyond]
        self._write(slots, columns, moved[self.table[slots, columns]])
        self._holders[destinations], self._holders[sources] = self._holders[sources], 0
        for source, destination in zip(sources.tolist(), destinations.tolist(), strict=True):
            name = self._hash_of.pop(source, None)
            if name is not None:
                self._hash_of[destination], self._published[name] = name, destination
        return PageMoves(sources, destinations)

    def forget(self, pages: IntArray) -> None:
        """Offer these pages to nobody any more: what they hold is not known."""
        for page in pages.tolist():
            if page in self._hash_of:
                self._unpublish(page)
            if page in self._idle:
                del self._idle[page]
                self._push(np.array([page]))

    def clear(self) -> None:
        """Empty the pool: no slot holds a page, and the cache forgets all."""
        self.count[:] = self._hole_end[:] = self._holders[:] = self._detached[:] = 0
        self._published.clear()
        self._hash_of.clear()
        self._idle.clear()
        self._writes = []
        self._free[: self.num_pages] = np.arange(self.num_pages)[::-1]
        self.num_free = self.num_pages

    def check(self) -> None:
        """Raise EngineError unless every page is in exactly one state and the counts agree with the tables."""
        held = Counter(self.table[self._held_mask()].tolist())
        held.update({int(p): int(self._detached[p]) for p in np.flatnonzero(self._detached)})
        free = self._free[: self.num_free].tolist()
        idle = list(self._idle)
        problems = {
            "a page is lost or in two states": sorted([*(p for p in held if p < self.num_pages), *free, *idle])
            != list(range(self.num_pages)),
            "holder counts differ from the tables": any(held[p] != n for p, n in enumerate(self._holders.tolist())),
            "an idle page is not published": any(p not in self._hash_of for p in idle),
            "a free page is published": any(p in self._hash_of for p in free),
            "hashes and pages disagree": {p: h for h, p in self._published.items()} != self._hash_of,
        }
        found = [text for text, wrong in problems.items() if wrong]
        if found:
            raise EngineError(f"KV page accounting is broken ({self.num_pages} pages): {'; '.join(found)}")

    @property
    def _sink_columns(self) -> int:
        return 0 if self.window is None else self.pages_for(self.window.sinks)

    def _unseen_end(self, positions: IntArray) -> IntArray:
        """Columns from the sinks' on to here are not seen by rows from `positions` on."""
        if self.window is None:
            return np.zeros_like(positions)
        return self.window.first(positions) // self.page_size

    def _held_columns(self, slot: int) -> IntArray:
        count, end = int(self.count[slot]), int(self._hole_end[slot])
        if not end:
            return np.arange(count)
        return np.concatenate((np.arange(self._sink_columns), np.arange(end, count)))

    def _held_mask(self) -> BoolArray:
        """[slots, columns] which entries of the table are pages."""
        columns = np.arange(self.table.shape[1])
        in_hole = (columns >= self._sink_columns) & (columns < self._hole_end[:, None])
        return (columns < self.count[:, None]) & ~in_hole

    def _published_run(self, hashes: Sequence[bytes]) -> list[int]:
        pages: list[int] = []
        for name in hashes:
            page = self._published.get(name)
            if page is None:
                break
            pages.append(page)
        return pages

    def _unpublish(self, page: int) -> None:
        del self._published[self._hash_of.pop(page)]

    def _take(self, total: int) -> IntArray:
        while self.num_free < total:
            page, _ = self._idle.popitem(last=False)
            self._unpublish(page)
            self._push(np.array([page]))
        self.num_free -= total
        return self._free[self.num_free : self.num_free + total][::-1].copy()

    def _push(self, pages: IntArray) -> None:
        if self.num_pages < self._holders.size:
            pages = pages[pages < self.num_pages]
        self._free[self.num_free : self.num_free + pages.size] = pages
        self.num_free += pages.size

    def _write(self, slots: IntArray, columns: IntArray, pages: IntArray) -> None:
        self.table[slots, columns] = pages
        self._writes.append((slots, columns))


class PagePools:
    """The pools of both models; `draft` is None where drafts need no KV."""

    def __init__(self, target: PagePool, draft: PagePool | None) -> None:
        self.target = target
        self.draft = draft
        self._all = [target] if draft is None else [target, draft]

    def release(self, slot: int) -> None:
        for pool in self._all:
            pool.release(slot)

    def truncate(self, slots: IntArray, num_tokens: IntArray, num_draft_tokens: IntArray) -> None:
        self.target.truncate(slots, num_tokens)
        if self.draft is not None:
            self.draft.truncate(slots, num_draft_tokens)

    def take_writes(self) -> tuple[PageWrites, PageWrites]:
        return self.target.take_writes(), self.draft.take_writes() if self.draft is not None else NO_WRITES

    def lend(self, num_tokens: IntArray) -> bool:
        """Reserve pages of both models for the first slots; False where free pages are short: idle ones stay."""
        needed = int((-(-num_tokens // self.target.page_size)).sum())
        if any(pool.num_free < needed for pool in self._all):
            return False
        return all(pool.reserve(np.arange(num_tokens.size), num_tokens) for pool in self._all)

    def check(self, empty: BoolArray) -> None:
        """Raise EngineError unless both pools are consistent and slots without a request hold no page."""
        for pool in self._all:
            pool.check()
            if pool.count[empty].any():
                raise EngineError("a slot without a request holds pages")
