"""The queue of waiting requests, and who leaves it.

Knows waiting requests, free slots and target pages. A request that overtakes the head of the queue leaves the head a
slot and pages, so where either is short the queue is first come, first served.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import islice
from operator import attrgetter

import numpy as np

from faser.arrays import IntArray
from faser.engine.pages import PagePool
from faser.engine.prefixes import Prefixes
from faser.engine.prompt_pace import Room, turns
from faser.engine.slots import OpenRequest, SlotTable
from faser.errors import InvalidRequest, RequestTooLong
from faser.request import Request

MAX_CANDIDATES = 128  # waiting requests that compete for a step, oldest first: bounds the work of a plan
MAX_NAMED = 1024  # pages of waiting requests that one plan names; a prompt with more pages is named alone


def check_size(request: Request, max_model_len: int, target_pages: PagePool) -> None:
    """Refuse a request that can never be served."""
    num_prompt, max_tokens = len(request.prompt_token_ids), request.params.max_tokens
    total = num_prompt + max_tokens
    asked = f"{num_prompt} prompt tokens + max_tokens {max_tokens} = {total}"
    if num_prompt == 0:
        raise InvalidRequest("the prompt holds no token; give at least one")
    if total > max_model_len:
        raise RequestTooLong(f"{asked}, but the model takes {max_model_len}; shorten the prompt or max_tokens")
    if target_pages.pages_for(total) > target_pages.base_pages:
        raise RequestTooLong(
            f"{asked}, but the KV pool holds {target_pages.base_pages * target_pages.page_size} "
            f"({target_pages.base_pages} pages of {target_pages.page_size}); shorten the request or enlarge the pool"
        )


class AdmissionQueue:
    def __init__(self, slots: SlotTable, target_pages: PagePool, prefixes: Prefixes) -> None:
        self.waiting: deque[OpenRequest] = deque()  # oldest first
        self._slots = slots
        self._target_pages = target_pages
        self._prefixes = prefixes

    @property
    def lacks_pages(self) -> bool:
        """Whether the oldest waiting request fits into a slot but not into the pages."""
        return bool(self.waiting and self._slots.free) and self._find(self.waiting[0])[1] > 0

    def put_back(self, request: OpenRequest) -> None:
        """A preempted request goes before all requests that came later."""
        older = sum(other.number < request.number for other in self.waiting)
        self.waiting.insert(older, request)

    def admit(self, reading: IntArray, room: Room, computed: set[bytes]) -> Iterator[tuple[OpenRequest, int]]:
        """Requests that leave the queue, each with its number of cached pages: those whose prompts get rows of a step.

        The caller occupies a slot for each before it asks for the next. `reading` are the slots of running requests
        whose prompts are not computed; they compete for `room` too, in the order of `turns`. `computed` are names of
        pages that are being computed. A waiting prompt whose next page is one of these stays in the queue: it then
        finds the page in the prefix cache.
        """
        requests = [self._slots[slot] for slot in reading.tolist()]
        requests += self._candidates()
        requests.sort(key=attrgetter("number"))
        left, context = self._rows_left(requests)
        has_rows: set[int] = set()
        for i, is_oldest in turns(left):
            request = requests[i]
            name = self._prefixes.next_page(request)
            if not request.runs and name in computed:
                continue
            rows = room.take(left[i], context[i], is_oldest, i in has_rows)
            if not rows:
                continue
            has_rows.add(i)
            left[i], context[i] = left[i] - rows, context[i] + rows
            if not request.runs:
                is_head = request is self.waiting[0]
                num_found = self._reserve(request, overtakes=not is_head)
                if num_found is not None:
                    self.waiting.remove(request)
                    yield request, num_found
                elif is_head:
                    return
                else:
                    continue  # it may not overtake; the head is asked in its own turn
            if name is not None:
                computed.add(name)

    def _candidates(self) -> Iterator[OpenRequest]:
        """The oldest waiting requests, their pages looked for in the prefix cache. Takes a bounded time."""
        most = MAX_NAMED
        for request in islice(self.waiting, MAX_CANDIDATES):
            new = self._prefixes.num_unnamed(request)
            if new > most and most < MAX_NAMED:
                return
            most -= new
            self._prefixes.look_for(request)
            yield request

    def _rows_left(self, requests: list[OpenRequest]) -> tuple[list[int], list[int]]:
        """Of each context, the rows that the target has yet to compute, and the tokens before them."""
        slots, size = self._slots, self._target_pages.page_size
        known = [int(slots.num_tokens[r.slot]) if r.runs else r.token_ids.size for r in requests]
        computed = [int(slots.num_computed[r.slot]) if r.runs else r.num_found * size for r in requests]
        return [total - done for total, done in zip(known, computed, strict=True)], computed

    def _reserve(self, request: OpenRequest, overtakes: bool) -> int | None:
        """Take target pages for the whole context in the next free slot, as many as possible from the prefix cache.

        Returns the number of cached pages, or None where slots or pages are short. One page for each running request
        must stay available, or one of the next steps would preempt. A request that overtakes also leaves the head of
        the queue a slot and the pages of its whole context.
        """
        pool = self._target_pages
        if len(self._slots.free) <= overtakes:
            return None
        num_kept = pool.pages_for(self.waiting[0].token_ids.size) if overtakes else 0
        names, num_lacking = self._find(request)
        if num_lacking + num_kept > 0:
            return None
        slot = self._slots.free[-1]
        pool.match(slot, names)
        pool.reserve(np.array([slot]), np.array([request.token_ids.size]))
        return len(names)

    def _find(self, request: OpenRequest) -> tuple[list[bytes], int]:
        """Names of its cached pages, and how many pages more than there are it needs; spare pages count as negative."""
        pool = self._target_pages
        names, num_idle = self._prefixes.find(request)
        needed = pool.pages_for(request.token_ids.size) - len(names) + int(self._slots.running.size)
        return names, needed - (pool.num_available - num_idle)
