"""The prefix cache as requests use it: names of full pages, which to look for and which to publish.

A page's name is the hash of all tokens up to its end (pages.py). Pages of both models have the same names, each in its
own pool. Without caching every method does nothing and finds nothing. The pages of a request that takes KV from another
context are its own: their content is not what its tokens alone would give.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from faser.arrays import IntArray
from faser.engine.pages import PagePool, page_hash
from faser.engine.slots import OpenRequest, SlotTable


class Prefixes:
    """Prompt pages are published as soon as they are computed, output pages when their request leaves."""

    def __init__(self, slots: SlotTable, target_pages: PagePool, draft_pages: PagePool | None, caching: bool) -> None:
        self.num_queries = 0  # tokens looked for
        self.num_hits = 0  # tokens found
        self._slots = slots
        self._target_pages = target_pages
        self._draft_pages = draft_pages
        self._caching = caching
        self._size = target_pages.page_size
        # [max_running] leading pages of each slot that are published
        self._published, self._draft_published = np.zeros((2, slots.max_running), dtype=np.int64)

    def num_unnamed(self, waiting: OpenRequest) -> int:
        """Full pages that `look_for` would have to name."""
        if not self._caching or waiting.is_private:
            return 0
        return waiting.token_ids.size // self._size - len(waiting.page_names)

    def look_for(self, waiting: OpenRequest) -> None:
        """Update `num_found`: the leading pages of a waiting request that are cached."""
        if self._caching:
            self._name_pages(waiting, waiting.token_ids, waiting.token_ids.size)
            rest = waiting.page_names[waiting.num_found : self._last_useful(waiting)]
            waiting.num_found += self._target_pages.find(rest)[0]

    def find(self, waiting: OpenRequest) -> tuple[list[bytes], int]:
        """Names of the leading pages that are cached now, and how many of these pages are idle."""
        if not self._caching:
            return [], 0
        names = waiting.page_names[: self._last_useful(waiting)]
        num_found, num_idle = self._target_pages.find(names)
        return names[:num_found], num_idle

    def admit(self, request: OpenRequest, num_found: int) -> None:
        """A request has its slot, with `num_found` cached pages."""
        self._published[request.slot], self._draft_published[request.slot] = num_found, 0
        if not self._caching:
            return
        num_cached = num_found * self._size
        self.num_queries += request.token_ids.size
        self.num_hits += num_cached
        if num_cached and not (request.stats.steps or request.stats.cached):
            request.stats = replace(request.stats, cached=num_cached)

    def next_page(self, request: OpenRequest) -> bytes | None:
        """The name of the first full page of a prompt that is not cached and could be."""
        if not self._caching:
            return None
        if request.runs:
            column, end = int(self._published[request.slot]), len(request.page_names)
        else:
            column, end = request.num_found, min(self._last_useful(request), len(request.page_names))
        return request.page_names[column] if column < end else None

    def pages_in_flight(self, decoding: IntArray) -> set[bytes]:
        """The next pages of prompts whose last rows are in flight: the next commit publishes these pages."""
        if not self._caching:
            return set()
        unpublished = decoding[self._published[decoding] < self._slots.num_prompt[decoding] // self._size]
        names = (self.next_page(self._slots[slot]) for slot in unpublished.tolist())
        return {name for name in names if name is not None}

    def match_draft(self, slot: int) -> None:
        """Take the draft's pages of a request from the cache; the draft has computed nothing of it yet."""
        if self._caching and self._draft_pages is not None:
            last = (int(self._slots.num_tokens[slot]) - 1) // self._size
            num_found = self._draft_pages.match(slot, self._slots[slot].page_names[:last])
            self._slots.draft_computed[slot] = num_found * self._size
            self._draft_published[slot] = num_found

    def release_draft(self, slot: int) -> None:
        """Publish the draft's pages of a request and take them from it."""
        assert self._draft_pages is not None
        self.publish(slot)
        self._draft_pages.release(slot)
        self._slots.draft_computed[slot] = self._slots.draft_first[slot] = self._draft_published[slot] = 0

    def forget_draft(self) -> None:
        """The draft's pages are gone, those of the cache too."""
        self._slots.draft_computed[:] = self._slots.draft_first[:] = self._draft_published[:] = 0

    def publish_prompts(self, slots: IntArray) -> None:
        """Publish prompt pages that became full. A request that failed has left, and publishes nothing."""
        if not self._caching:
            return
        num_prompt = self._slots.num_prompt[slots] // self._size
        lacks = self._published[slots] < num_prompt
        if self._draft_pages is not None:
            is_whole = (self._slots.draft_computed[slots] > 0) & (self._slots.draft_first[slots] == 0)
            lacks |= (self._draft_published[slots] < num_prompt) & is_whole
        for i in np.flatnonzero(lacks).tolist():
            if self._slots.requests[slots[i]] is not None:
                self.publish(int(slots[i]), int(num_prompt[i]))

    def publish(self, slot: int, most: int | None = None) -> None:
        """Publish a slot's leading full pages, at most `most`. Rows beyond num_computed may hold rejected drafts."""
        if not self._caching or self._slots[slot].is_private:
            return
        size, request, num_known = self._size, self._slots[slot], int(self._slots.num_known[slot])
        self._name_pages(request, self._slots.tokens[slot], num_known)
        for pool, computed, published in (
            (self._target_pages, self._slots.num_computed, self._published),
            (self._draft_pages, self._slots.draft_computed, self._draft_published),
        ):
            if pool is self._draft_pages and self._slots.draft_first[slot]:
                continue  # what these pages hold depends on where the draft began again
            full = min(int(computed[slot]), num_known) // size
            full = full if most is None else min(full, most)
            if pool is not None and full > published[slot]:
                for column in range(int(published[slot]), full):
                    pool.publish(slot, column, request.page_names[column])
                published[slot] = full

    def _last_useful(self, waiting: OpenRequest) -> int:
        """Pages that may come from the cache: at least one row is computed, to sample from."""
        return (waiting.token_ids.size - 1) // self._size

    def _name_pages(self, request: OpenRequest, tokens: IntArray, num_tokens: int) -> None:
        names, size, vision = request.page_names, self._size, request.request.vision
        if request.is_private:
            return
        for column in range(len(names), num_tokens // size):
            previous, start, stop = names[-1] if names else b"", column * size, (column + 1) * size
            salt = vision.page_salt(start, stop) if vision is not None else b""
            names.append(page_hash(previous, tokens[start:stop], salt))
