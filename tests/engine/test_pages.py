"""The page pool on its own; tests/engine/test_scheduler.py drives it through whole steps."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from faser.engine.pages import PagePool, page_hash
from faser.errors import EngineError
from faser.limits import KeyWindow

SLOTS, PAGES, SIZE, MOST = 4, 12, 4, 40


def make_pool(caching: bool = True) -> PagePool:
    return PagePool(PAGES, SIZE, SLOTS, MOST, caching)


def one(value: int) -> np.ndarray:
    return np.array([value])


def names_of(tokens: list[int]) -> list[bytes]:
    names: list[bytes] = []
    for start in range(0, len(tokens) // SIZE * SIZE, SIZE):
        names.append(page_hash(names[-1] if names else b"", np.array(tokens[start : start + SIZE])))
    return names


def test_reserve_is_all_or_nothing():
    pool = make_pool()
    assert pool.reserve(np.array([0, 1]), np.array([9, 4]))
    assert pool.count.tolist() == [3, 1, 0, 0]
    before = pool.table.copy(), pool.count.copy(), pool.num_available
    assert not pool.reserve(np.array([2, 3]), np.array([4, 36]))
    assert (pool.table == before[0]).all()
    assert (pool.count == before[1]).all()
    assert pool.num_available == before[2] == 8
    pool.check()


def test_reserve_of_less_than_held_takes_nothing():
    pool = make_pool()
    pool.reserve(one(0), one(16))
    assert pool.reserve(one(0), one(1))
    assert pool.count[0] == 4


def test_truncate_gives_back_only_what_is_beyond():
    pool = make_pool()
    pool.reserve(np.array([0, 1]), np.array([20, 8]))
    kept = pool.table[0, :2].tolist()
    pool.truncate(np.array([0, 1]), np.array([5, 8]))
    assert pool.count.tolist() == [2, 2, 0, 0]
    assert pool.table[0, :2].tolist() == kept
    assert pool.num_available == PAGES - 4
    pool.check()


def test_a_published_prefix_is_shared_and_outlives_its_first_holder():
    pool = make_pool()
    names = names_of([1] * 12)
    pool.reserve(one(0), one(14))
    for column, name in enumerate(names):
        pool.publish(0, column, name)
    assert pool.match(1, names[:2]) == 2
    assert pool.table[1, :2].tolist() == pool.table[0, :2].tolist()
    pool.release(0)
    pool.check()
    assert pool.num_held == 2
    pool.release(1)
    assert pool.num_available == PAGES
    assert pool.match(2, names) == 3
    pool.check()


def test_a_match_stops_at_the_first_page_that_differs():
    pool = make_pool()
    pool.reserve(one(0), one(12))
    for column, name in enumerate(names_of([1] * 12)):
        pool.publish(0, column, name)
    assert pool.match(1, names_of([1] * 4 + [2] * 4 + [1] * 4)) == 1


def test_the_least_recently_used_idle_page_goes_first_and_a_prefix_goes_after_its_continuation():
    pool = make_pool()
    old, new = names_of([1] * 8), names_of([2] * 8)
    for slot, names in ((0, old), (1, new)):
        pool.reserve(one(slot), one(8))
        for column, name in enumerate(names):
            pool.publish(slot, column, name)
    pool.release(0)
    pool.release(1)
    assert pool.reserve(one(2), one(36))  # 9 pages: 8 free and one idle
    assert pool.match(0, old) == 1
    pool.release(0)  # used again: now the most recent
    assert pool.reserve(one(2), one(40))
    assert pool.match(0, old) == 1
    assert pool.match(1, new) == 1
    pool.check()


def test_without_caching_nothing_is_published():
    pool = make_pool(caching=False)
    pool.reserve(one(0), one(8))
    pool.publish(0, 0, b"name")
    pool.release(0)
    assert pool.match(1, [b"name"]) == 0
    pool.check()


def test_writes_are_the_table_entries_that_changed():
    pool = make_pool()
    copy = np.full_like(pool.table, -1)
    pool.reserve(one(0), one(8))
    pool.release(0)
    pool.reserve(np.array([1, 0]), np.array([8, 12]))
    writes = pool.take_writes()
    for i in np.random.default_rng(0).permutation(writes.slots.size):  # any order
        copy[writes.slots[i], writes.columns[i]] = writes.pages[i]
    for slot in (0, 1):
        assert copy[slot, : pool.count[slot]].tolist() == pool.table[slot, : pool.count[slot]].tolist()
    assert pool.take_writes().slots.size == 0


@pytest.mark.parametrize(
    ("break_it", "found"),
    [
        (lambda pool: pool.count.__setitem__(0, 1), "lost or in two states"),
        (lambda pool: pool._holders.__setitem__(int(pool.table[0, 0]), 2), "holder counts"),
        (lambda pool: pool._published.__setitem__(b"x", 3), "hashes and pages disagree"),
        (lambda pool: pool._free.__setitem__(0, pool._free[1]), "lost or in two states"),
    ],
)
def test_check_finds_broken_page_accounting(break_it, found):
    pool = make_pool()
    pool.reserve(one(0), one(8))
    break_it(pool)
    with pytest.raises(EngineError, match=found):
        pool.check()


@given(st.lists(st.integers(0, 3), max_size=20), st.lists(st.integers(0, 3), max_size=20))
def test_page_names_are_equal_exactly_when_all_tokens_so_far_are(first, second):
    for column, (a, b) in enumerate(zip(names_of(first), names_of(second), strict=False)):
        end = (column + 1) * SIZE
        assert (a == b) == (first[:end] == second[:end])


def test_new_pages_are_given_out_last_and_dropped_first():
    pool = PagePool(4, SIZE, SLOTS, MOST, most_pages=6)
    assert not pool.reserve(one(0), one(5 * SIZE))
    pool.grow(6)
    assert pool.reserve(one(0), one(4 * SIZE))
    assert sorted(pool.table[0, :4]) == [0, 1, 2, 3]
    assert pool.reserve(one(1), one(2 * SIZE))
    pool.shrink(4)
    assert (pool.num_beyond, pool.num_held, pool.num_available) == (2, 6, 0)
    pool.release(1)
    assert (pool.num_beyond, pool.num_held, pool.num_available) == (0, 4, 0)
    pool.check()


def test_a_page_moves_below_the_end_with_its_name_and_for_all_its_holders():
    pool = PagePool(2, SIZE, SLOTS, MOST, most_pages=5)
    pool.grow(5)
    tokens = [0] * SIZE
    assert pool.reserve(one(0), one(2 * SIZE))
    assert pool.reserve(one(1), one(SIZE))
    pool.publish(1, 0, names_of(tokens)[0])
    assert pool.match(2, names_of(tokens)) == 1
    pool.take_writes()
    pool.shrink(2)
    assert pool.compact(0) is None, "there is no room"
    pool.release(0)
    assert pool.compact(2) is None, "it would leave fewer pages than are to be kept"
    moves = pool.compact(1)
    page = int(pool.table[1, 0])
    assert (moves.sources.tolist(), moves.destinations.tolist()) == ([2], [page])
    assert page == pool.table[2, 0] < 2
    writes = pool.take_writes()
    assert sorted(zip(writes.slots.tolist(), writes.pages.tolist(), strict=True)) == [(1, page), (2, page)]
    assert pool.find(names_of(tokens)) == (1, 0)
    pool.check()


def test_a_pool_may_grow_again_before_it_is_compactd():
    pool = PagePool(2, SIZE, SLOTS, MOST, most_pages=5)
    pool.grow(5)
    assert pool.reserve(one(0), one(3 * SIZE))
    pool.shrink(2)
    pool.grow(5)
    assert (pool.num_beyond, pool.num_held, pool.num_available) == (0, 3, 2)
    pool.check()


def test_what_a_page_holds_can_be_forgotten():
    pool = make_pool()
    name = names_of([0] * SIZE)[0]
    pool.reserve(one(0), one(SIZE))
    pool.publish(0, 0, name)
    pool.release(0)
    assert pool.find([name]) == (1, 1)
    pool.forget(np.arange(PAGES))
    assert pool.find([name]) == (0, 0)
    pool.check()


class PoolMachine(RuleBasedStateMachine):
    """Any sequence of calls keeps the books; a table never loses or changes what it holds."""

    window: KeyWindow | None = None

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(PAGES, SIZE, SLOTS, MOST, most_pages=2 * PAGES, window=self.window)
        self.tokens: dict[int, list[int]] = {}  # by slot: what its pages are meant to hold

    @rule(num_pages=st.integers(PAGES, 2 * PAGES))
    def resize(self, num_pages: int) -> None:
        if num_pages >= self.pool.num_pages:
            self.pool.grow(num_pages)
        else:
            self.pool.shrink(num_pages)

    @rule(num_kept=st.integers(0, 3))
    def compact(self, num_kept: int) -> None:
        available, beyond = self.pool.num_available, self.pool.num_beyond
        moves = self.pool.compact(num_kept)
        if moves is None:
            assert not beyond or beyond + num_kept > available
        else:
            assert not self.pool.num_beyond
            assert self.pool.num_available >= num_kept

    @rule(slot=st.integers(0, SLOTS - 1), tokens=st.lists(st.integers(0, 1), min_size=1, max_size=MOST))
    def start(self, slot: int, tokens: list[int]) -> None:
        if slot in self.tokens:
            return
        matched = self.pool.match(slot, names_of(tokens))
        if self.pool.reserve(one(slot), one(len(tokens))):
            self.tokens[slot] = tokens
            for column, name in enumerate(names_of(tokens)):
                if column >= matched:  # the others are published
                    self.pool.publish(slot, column, name)
        else:
            self.pool.release(slot)

    @precondition(lambda self: self.tokens)
    @rule(data=st.data(), extra=st.integers(1, 12))
    def look_ahead_and_back(self, data: st.DataObject, extra: int) -> None:
        slots = np.array(sorted(self.tokens))
        now = np.array([len(self.tokens[slot]) for slot in slots.tolist()])
        held = self.pool.table.copy(), self.pool.count.copy()
        if self.pool.reserve(slots, np.minimum(now + extra, MOST)):
            self.pool.truncate(slots, now)
        assert (self.pool.count == held[1]).all()
        for slot in slots.tolist():
            columns = self.pool._held_columns(slot)
            assert (self.pool.table[slot, columns] == held[0][slot, columns]).all()

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.tokens)))
        del self.tokens[slot]
        self.pool.release(slot)

    @invariant()
    def books_agree(self) -> None:
        self.pool.check()

    @invariant()
    def equal_prefixes_share_or_copy_but_never_mix(self) -> None:
        owners: dict[int, tuple[int, ...]] = {}
        for slot, tokens in self.tokens.items():
            for column in self.pool._held_columns(slot).tolist():
                prefix = tuple(tokens[: (column + 1) * SIZE])
                page = int(self.pool.table[slot, column])
                assert owners.setdefault(page, prefix) == prefix

    def teardown(self) -> None:
        for slot in list(self.tokens):
            self.pool.release(slot)
        self.pool.check()
        assert self.pool.num_available == self.pool.num_pages


class WindowedPoolMachine(PoolMachine):
    """The same, and pages leave from the middle of tables."""

    window = KeyWindow(7, 2)

    @precondition(lambda self: self.tokens)
    @rule(data=st.data(), less=st.integers(0, 3))
    def slide(self, data: st.DataObject, less: int) -> None:
        slots = np.array(sorted(self.tokens))
        positions = np.array([max(0, len(self.tokens[slot]) - less) for slot in slots.tolist()])
        available = self.pool.num_available
        due = self.pool.is_due(slots, positions)
        self.pool.slide(slots, positions)
        assert self.pool.num_available >= available
        assert due.any() or self.pool.num_available == available
        assert not self.pool.is_due(slots, positions).any()

    @precondition(lambda self: self.tokens)
    @rule(data=st.data(), ahead=st.integers(0, 12))
    def skip(self, data: st.DataObject, ahead: int) -> None:
        """A window begins anew, maybe beyond the pages that there are; what it needs fits then."""
        slot = data.draw(st.sampled_from(sorted(self.tokens)))
        start = min(len(self.tokens[slot]) + ahead, MOST) // SIZE * SIZE
        self.tokens[slot] += [2] * (start - len(self.tokens[slot]))
        self.pool.skip(slot, start)
        assert self.pool._held_columns(slot).size <= 1 + self.pool.pages_for(len(self.tokens[slot])) - start // SIZE

    @invariant()
    def a_window_has_its_pages(self) -> None:
        for slot in self.tokens:
            columns = self.pool._held_columns(slot)
            assert columns[0] == 0, "the sinks stay"
            assert np.count_nonzero(np.diff(columns) > 1) <= 1, "one hole"


TestPoolMachine = PoolMachine.TestCase
TestWindowedPoolMachine = WindowedPoolMachine.TestCase
