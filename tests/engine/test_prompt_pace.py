"""Prompt rows by the second: what the pace learns, and who gets the rows."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from faser.engine.prompt_pace import CPU, OLDEST_SHARE, Pace, Room, StepPace, fill_size, pairs_of, share, turns

BOUND = 0.3


@dataclass
class Machine:
    """Takes its seconds by the formula that the pace fits."""

    base: float = 0.06
    per_row: float = 0.002
    per_pair: float = 0.7e-6

    def seconds(self, rows: int, pairs: float) -> float:
        return self.base + self.per_row * rows + self.per_pair * pairs


def read(pace: Pace, machine: Machine, prompt: int, context: int = 0, least: int = CPU.least_rows) -> list[float]:
    """The seconds of the steps that read one prompt."""
    taken = []
    end = context + prompt
    while context < end:
        room = pace.room(4096, BOUND - pace.base, least)
        rows = share(room, [end - context], [context])[0]
        seconds = machine.seconds(rows, pairs_of(rows, context))
        pace.learn(rows, pairs_of(rows, context), seconds)
        taken.append(seconds)
        context += rows
    return taken


def known(machine: Machine, prompt: int = 8000) -> Pace:
    """A pace that has seen steps without prompts, and a long prompt."""
    pace = Pace(CPU.first_rows)
    for _ in range(5):
        pace.learn(0, 0.0, machine.base)
    read(pace, machine, prompt)
    return pace


def test_before_anything_is_known_a_step_has_the_first_rows_and_then_at_most_doubles():
    pace = Pace(32)
    rows = []
    for _ in range(5):
        rows.append(share(pace.room(4096, BOUND, 8), [10_000], [0])[0])
        pace.learn(rows[-1], pairs_of(rows[-1], 0), 1e-6)
    assert rows == [32, 64, 128, 256, 512]


def test_a_context_far_longer_than_any_seen_begins_with_few_rows():
    pace = Pace(32)
    read(pace, Machine(per_pair=1e-9), 500)
    room = pace.room(4096, BOUND, 8)
    assert share(room, [5000], [10_000_000])[0] == 8, "this many pairs were never measured"


@settings(max_examples=100)
@given(
    base=st.floats(0.0, 0.15), row=st.floats(1e-5, 0.01), context=st.floats(1000.0, 50_000.0), speed=st.floats(0.01, 10)
)
def test_steps_fill_the_bound_and_do_not_exceed_it(base, row, context, speed):
    """Whatever the machine: its base, a row's seconds, the context that doubles them."""
    machine = Machine(base, speed * row, speed * row / context)
    pace = Pace(CPU.first_rows)
    pace.learn(0, 0.0, machine.base)
    first = machine.seconds(CPU.first_rows, pairs_of(CPU.first_rows, 0))  # before anything is known
    least = machine.seconds(CPU.least_rows, pairs_of(CPU.least_rows, 3000))
    for prompt in (3000, 200, 3000):
        taken = read(pace, machine, prompt)
        assert max(taken) <= max(1.6 * BOUND, least, first)
        assert max(taken[8:], default=0.0) <= max(1.25 * BOUND, least)
        assert len(taken) < 20 or min(taken[10:-1]) > 0.6 * BOUND


def test_after_a_long_context_a_short_prompt_does_not_stall():
    machine = Machine()
    pace = known(machine, 3000)
    read(pace, machine, 1000, context=7000)
    assert max(read(pace, machine, 600)) < 1.3 * BOUND


@pytest.mark.parametrize("times", [0.1, 10.0, 100.0])
def test_one_outlier_changes_little_and_is_forgotten(times):
    machine = Machine()
    pace = known(machine)
    read(pace, machine, 600, context=1000)
    before = pace.room(4096, BOUND - pace.base, 8).take(4096, 1000)
    pace.learn(before, pairs_of(before, 1000), times * BOUND)
    after = pace.room(4096, BOUND - pace.base, 8).take(4096, 1000)
    assert 0.5 * before < after < 1.6 * before
    read(pace, machine, 600, context=1000)
    assert pace.room(4096, BOUND - pace.base, 8).take(4096, 1000) == pytest.approx(before, rel=0.15)


@pytest.mark.parametrize("times", [0.25, 4.0])
def test_a_machine_that_becomes_slower_or_faster_is_followed_within_ten_steps(times):
    machine = Machine()
    pace = known(machine)
    changed = Machine(machine.base, times * machine.per_row, times * machine.per_pair)
    taken = read(pace, changed, 3000)
    assert min(taken[10:-1]) > 0.7 * BOUND
    assert max(taken[10:]) < 1.2 * BOUND


def test_the_base_follows_steps_without_prompts_and_one_of_them_moves_it_by_a_quarter():
    pace = Pace(32)
    for _ in range(20):
        pace.learn(0, 0.0, 0.1)
    pace.learn(0, 0.0, 5.0)
    assert pace.base == pytest.approx(0.125)
    for _ in range(30):
        pace.learn(0, 0.0, 0.2)
    assert pace.base == pytest.approx(0.2, rel=0.01)
    for _ in range(60):
        pace.learn(0, 0.0, 0.0)
    assert pace.base < 0.001


def test_a_step_without_seconds_to_spare_still_reads_the_least_rows_of_the_oldest_prompt():
    pace = known(Machine())
    assert share(pace.room(4096, -1.0, 8), [500, 500], [0, 0]) == [8, 0]
    assert share(pace.room(4096, -1.0, 8), [3, 500], [0, 0]) == [3, 0]


def test_where_no_request_decodes_a_step_may_take_twice_as_long():
    pace = StepPace(BOUND, CPU)
    for _ in range(3):
        pace.prompts.learn(0, 0.0, 0.06)
    assert pace.prompt_room(1024, is_alone=False).seconds == pytest.approx(BOUND - 0.06)
    assert pace.prompt_room(1024, is_alone=True).seconds == pytest.approx(2 * BOUND - 0.06)


def test_catching_up_leaves_half_of_the_seconds_to_prompts():
    pace = StepPace(BOUND, CPU)
    assert pace.catch_up_room(1024, beside_prompts=False).seconds == pytest.approx(BOUND)
    assert pace.catch_up_room(1024, beside_prompts=True).seconds == pytest.approx(BOUND / 2)
    assert pace.prompt_room(1024, is_alone=False, taken=0.1).seconds == pytest.approx(BOUND - 0.1)


# ── who gets the rows ────────────────────────────────────────────────────────────────────────────────────────────────

rooms = st.builds(
    Room,
    rows=st.integers(0, 300),
    seconds=st.floats(-0.1, 1.0),
    pairs=st.floats(0.0, 1e6),
    per_row=st.floats(0.0, 0.01),
    per_pair=st.floats(0.0, 1e-5),
    least_rows=st.integers(1, 16),
)
prompts = st.lists(st.tuples(st.integers(1, 400), st.integers(0, 3000)), min_size=1, max_size=12)


@settings(max_examples=300)
@given(room=rooms, prompts=prompts)
def test_shares_fit_the_room_and_the_oldest_always_moves_on(room, prompts):
    left, context = [p[0] for p in prompts], [p[1] for p in prompts]
    rows, seconds, pairs = room.rows, room.seconds, room.pairs
    given_rows = share(room, left, context)
    assert sum(given_rows) == rows - room.rows <= rows
    assert all(0 <= got <= wanted for got, wanted in zip(given_rows, left, strict=True))
    assert given_rows[0] >= min(left[0], rows, room.least_rows), "progress"
    spent = sum(pairs_of(got, before) for got, before in zip(given_rows, context, strict=True))
    cost = room.per_row * sum(given_rows) + room.per_pair * spent
    if sum(given_rows) > min(left[0], room.least_rows):
        assert cost <= seconds + 1e-9 or given_rows[0] <= room.least_rows
        assert spent <= pairs * (1 + 1e-9) or given_rows[0] <= room.least_rows
    assert room.seconds == pytest.approx(seconds - cost, abs=1e-9)


@given(left=st.lists(st.integers(1, 50), min_size=1, max_size=10), rows=st.integers(1, 200))
def test_the_oldest_has_a_quarter_and_the_fewest_rows_left_come_next(left, rows):
    got = share(Room(rows), left, [0] * len(left))
    assert got[0] >= min(left[0], max(1, int(OLDEST_SHARE * rows)))
    assert sum(got) == min(rows, sum(left)), "no row is wasted"
    others = sorted(range(1, len(left)), key=lambda i: left[i])
    for fewer, more in itertools.pairwise(others):
        assert not got[more] or got[fewer] == left[fewer]


def test_a_short_prompt_gets_all_its_rows_beside_an_older_long_one():
    assert share(Room(100), [5000, 60], [0, 0]) == [40, 60]
    assert share(Room(100), [5000, 90, 30], [0, 0, 0]) == [25, 45, 30]
    assert list(turns([5, 9, 3, 3])) == [(0, True), (2, False), (3, False), (0, False), (1, False)]


@settings(max_examples=100)
@given(
    arriving=st.lists(st.lists(st.integers(1, 60), max_size=4), min_size=1, max_size=15),
    rows=st.integers(4, 40),
    least=st.integers(1, 4),
)
def test_no_prompt_starves_however_many_short_ones_keep_coming(arriving, rows, least):
    """A prompt is read at the latest when it and all older ones were read at the least pace, one after the other."""
    endless = itertools.cycle(arriving)
    left: list[int] = [200]
    limits: list[int] = [-(-200 // least)]
    for step in range(300):
        for size in next(endless):
            left.append(size)
            limits.append(max(limits[-1], step) + -(-size // least))
        unread = [i for i, rest in enumerate(left) if rest]
        given_rows = share(Room(rows, least_rows=least), [left[i] for i in unread], [0] * len(unread))
        for i, got in zip(unread, given_rows, strict=True):
            left[i] -= got
        assert all(step < limit for rest, limit in zip(left, limits, strict=True) if rest)


@pytest.mark.parametrize(
    ("rows", "left", "others", "filled"),
    [
        ([1000], [9000], 30, [994]),  # 1,030 rows would run as 1,152: 1,024 are filled
        ([1130], [9000], 22, [1002]),  # 1,152 is a size, but its last tile is half empty
        ([200, 800], [200, 9000], 24, [200, 800]),  # 1,024 as it is
        ([200, 830], [200, 9000], 24, [200, 800]),  # a chunk that completes its prompt stays
        ([200, 830], [200, 830], 24, [200, 830]),  # all are completed: nothing is left for later
        ([300], [9000], 30, [300]),  # few rows cost about the same
        ([3000], [9000], 30, [3000]),  # beyond the largest size nothing is rounded
        ([128] * 5, [999] * 5, 100, [128] * 5),  # 740 → 512 would take a chunk whole
    ],
)
def test_a_step_fills_the_size_it_runs_as(rows, left, others, filled):
    assert fill_size(rows, left, others, (256, 384, 512, 640, 768, 896, 1024, 1152)) == filled


def test_on_a_slow_machine_a_prompt_that_is_alone_still_gets_half_of_a_step():
    pace = StepPace(0.3, CPU)
    for _ in range(20):
        pace.prompts.learn(0, 0.0, 1.0)  # a decoding step takes longer than twice the bound
    for _ in range(20):
        pace.prompts.learn(8, 32.0, 1.2)
    alone = pace.prompt_room(1000, is_alone=True)
    assert alone.per_row * 8 < alone.seconds
    assert share(alone, [500], [0])[0] > 8


def test_a_step_that_two_clocks_measured_never_makes_the_base_negative():
    pace = Pace(32)
    for seconds in (-0.01, 0.02, 0.02):
        pace.learn(0, 0.0, seconds)
    assert 0 <= pace.base <= 0.02
