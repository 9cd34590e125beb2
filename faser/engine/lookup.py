"""Prompt lookup: drafts are what followed the last time the same tokens occurred in a request's context.

Knows the tokens of running requests; no model, and nothing of other requests' contexts. Every request has an index of
its n-grams, so a proposal costs the same in a context of 200 tokens and of 100,000. An index takes up to 260 bytes of
host memory a token.

A step planned ahead does not know the latest tokens. Its proposals begin behind the last known token, and the executor
takes from them what stands behind the context then (`LookupDrafts`).
"""

from __future__ import annotations

from array import array
from typing import NamedTuple

import numpy as np

from faser.arrays import IntArray
from faser.engine.slots import SlotTable
from faser.policy.base import LookupView
from faser.policy.lookup import CLASSES, LookupAcceptance
from faser.step import LookupDrafts

MIN_NGRAM, MAX_NGRAM = 2, 4  # tokens that must have occurred before
MOST_AGREED = CLASSES[-1]  # tokens before a proposal that are compared: more say nothing more
INDEXED_PER_STEP = 2048  # context tokens of all requests that enter their indexes in one step: some milliseconds
BITS = 24  # of a token id in a key


class Match(NamedTuple):
    """The latest earlier occurrence of the longest repeated suffix of a context."""

    end: int  # index of its last token
    agreed: int  # tokens that agree with the end of the context, at most MOST_AGREED


class NgramIndex:
    """The tokens of one context, and where each n-gram of 2, 3 and 4 tokens last ended. The context only grows."""

    def __init__(self) -> None:
        self._tokens = array("q")
        # by the tokens of the n-gram, each + 1
        self._pairs: dict[int, int] = {}
        self._triples: dict[int, int] = {}
        self._fours: dict[int, int] = {}
        self._last = (0, 0, 0)  # keys of the last token, pair and triple; missing tokens count as 0
        self._end, self._size = -1, 0  # of the longest repeated suffix

    def __len__(self) -> int:
        return len(self._tokens)

    def extend(self, token_ids: list[int]) -> None:
        """Append tokens: some microseconds for each. A longer n-gram has occurred only where a shorter one has."""
        pairs, triples, fours = self._pairs, self._triples, self._fours
        (one, two, three), end, size = self._last, self._end, self._size
        for last, token in enumerate(token_ids, start=len(self._tokens)):
            word = token + 1
            four, three, two, one = three << BITS | word, two << BITS | word, one << BITS | word, word
            size, earlier = 0, pairs.get(two)
            pairs[two] = last
            if earlier is not None:
                end, size, earlier = earlier, 2, triples.get(three)
            triples[three] = last
            if earlier is not None:
                end, size, earlier = earlier, 3, fours.get(four)
            fours[four] = last
            if earlier is not None:
                end, size = earlier, 4
        self._last, self._end, self._size = (one, two, three), end, size
        self._tokens.extend(token_ids)

    @property
    def match(self) -> Match | None:
        """None: no suffix of MIN_NGRAM tokens has occurred before. The occurrence may overlap the suffix."""
        return Match(self._end, self._num_agreed()) if self._size else None

    def following(self, match: Match, length: int) -> list[int]:
        """The `length` tokens that followed a match.

        A continuation that reaches the end of the context repeats itself, so periodic text goes on at its period.
        """
        first, tokens = match.end + 1, self._tokens
        period = len(tokens) - first
        return [tokens[first + i % period] for i in range(length)]

    def _num_agreed(self) -> int:
        tokens, size = self._tokens, self._size
        if size < MAX_NGRAM:
            return size
        last = len(tokens) - 1
        while size < MOST_AGREED and size <= self._end and tokens[self._end - size] == tokens[last - size]:
            size += 1
        return size


class Proposal(NamedTuple):
    """The tokens behind a match, which may follow the known tokens of a request. Those in flight come first."""

    match: Match
    length: int


class PromptLookup:
    """The indexes of all slots, and what their latest proposals were worth."""

    def __init__(self, slots: SlotTable) -> None:
        self.acceptance = LookupAcceptance()
        self._slots = slots
        self._indexes = [NgramIndex() for _ in range(slots.max_running)]
        self._proposals: dict[int, Proposal] = {}  # by slot

    def forget(self, slot: int) -> None:
        """The request has left the slot."""
        self._indexes[slot] = NgramIndex()
        self._proposals.pop(slot, None)

    def look(self, slots: IntArray, room: IntArray, is_alone: bool) -> LookupView:
        """What these requests could draft, at most `room` [B] tokens each. Drafts are taken by `take`."""
        known = self._slots.num_known[slots]
        self._read(slots.tolist(), known.tolist())
        skipped = self._slots.num_tokens[slots] - known
        matches = self._matches(slots.tolist(), known.tolist())
        limit = np.where([match is not None for match in matches], room, 0)
        for slot, match, length in zip(slots.tolist(), matches, (skipped + limit).tolist(), strict=True):
            if match is not None:
                self._proposals[slot] = Proposal(match, length)
        agreed = np.array([MIN_NGRAM if match is None else match.agreed for match in matches], dtype=np.int64)
        return LookupView(limit, self.acceptance.survival(agreed, skipped, limit), is_alone)

    def take(self, slots: IntArray, lengths: IntArray) -> LookupDrafts:
        """The drafts of a plan: `lengths` [B], within the limits that `look` gave."""
        start = self._slots.num_known[slots]
        needed = np.where(lengths > 0, self._slots.num_tokens[slots] - start + lengths, 0)
        token_ids = np.zeros((slots.size, int(needed.max())), dtype=np.int64)
        for i in np.flatnonzero(lengths).tolist():
            slot = int(slots[i])
            token_ids[i, : needed[i]] = self._indexes[slot].following(self._proposals[slot].match, int(needed[i]))
        return LookupDrafts(lengths > 0, start, token_ids)

    def _matches(self, slots: list[int], known: list[int]) -> list[Match | None]:
        """None also where an index has not read all known tokens yet."""
        indexes = [self._indexes[slot] for slot in slots]
        return [index.match if len(index) == size else None for index, size in zip(indexes, known, strict=True)]

    def _read(self, slots: list[int], known: list[int]) -> None:
        """Take in the tokens that came since the last call, and learn from them what proposals are worth."""
        left, seen, tokens = INDEXED_PER_STEP, [], self._slots.tokens
        for slot, size in zip(slots, known, strict=True):
            index, proposal = self._indexes[slot], self._proposals.pop(slot, None)
            new = tokens[slot, len(index) : min(size, len(index) + left)].tolist()
            if new and proposal is not None:
                given = index.following(proposal.match, min(proposal.length, len(new)))
                seen.append((proposal.match.agreed, _num_equal(given, new), len(given)))
            index.extend(new)
            left -= len(new)
        if seen:
            self.acceptance.learn(*np.array(seen, dtype=np.int64).T)


def _num_equal(some: list[int], others: list[int]) -> int:
    """How many leading entries are equal."""
    count = 0
    for one, other in zip(some, others, strict=False):
        if one != other:
            break
        count += 1
    return count
