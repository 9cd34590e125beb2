"""How long a benchmark says it takes, and how long it does, in virtual time."""

from __future__ import annotations

import re

import pytest

from faser.bench.command import Asked, Interrupts, Session, make_workloads, size_traffic
from faser.bench.estimate import SIZES, Estimate, MeasuredPace, calibrate, default_rate, in_words, rounded_up
from faser.bench.systems import PolicySystem
from faser.cli.main import make_parser
from faser.traffic.document import Item, Record, Run, Workload
from faser.traffic.workload import Vocabulary
from tests.traffic.simulated import SlowOracle, Time, make_engine

VOCABULARY = Vocabulary(5, 128, None)
LENGTHS = ("--prompts", "random", "--prompt-len", "32", "--output-len", "48")


class Machine:
    """Policies over one simulated engine whose steps take `slowness` times as long, and what they were asked for."""

    def __init__(self, *given: str, slowness: float = 1.0) -> None:
        self.time = Time()
        engine = make_engine(self.time)
        execute = engine.executor.execute

        def slowly(plan):
            before = self.time.seconds
            result = execute(plan)
            self.time.pass_by((slowness - 1) * (self.time.seconds - before))
            return result

        engine.executor.execute = slowly
        assert isinstance(engine.executor, SlowOracle)
        asked = Asked.of(make_parser().parse_args(["bench", *LENGTHS, "--policies", "off,fixed:3", *given]))
        self.systems = [PolicySystem(engine, name, 0.0, clock=self.time.clock) for name in asked.policies]
        self.asked, self.estimate = size_traffic(asked, self.systems[0], VOCABULARY)
        played = make_workloads(self.asked, VOCABULARY)
        self.session = Session(
            self.asked, self.systems, played, Interrupts(), estimate=self.estimate, clock=self.time.clock
        )

    def play(self) -> float:
        """The seconds it took."""
        before = self.time.seconds
        self.session.play()
        return self.time.seconds - before


def said_seconds(announcement: str) -> int:
    found = re.search(r"about (?:(\d+) min)? ?(?:(\d+) s)?$", announcement)
    assert found is not None, announcement
    return 60 * int(found[1] or 0) + int(found[2] or 0)


@pytest.mark.parametrize("slowness", [1.0, 4.0, 20.0])
def test_the_default_takes_no_longer_than_it_says(slowness, capsys):
    machine = Machine(slowness=slowness)
    said = said_seconds(machine.session.announcement())
    taken = machine.play()
    assert taken <= said <= 1.5 * taken
    assert capsys.readouterr().err == ""
    assert all(run.summary["seconds"] < 40 for run in machine.session.runs)


def test_the_default_says_the_traffic_it_chose():
    machine = Machine()
    words = machine.session.announcement()
    number = len(machine.session.played[0][1].items)
    rate = machine.asked.loads[0].rate
    assert words.startswith(f"poisson:{rate:g} for 30 s, about half of what this machine can do: {number} requests,")
    assert "2 policies, about 1 min 20 s" in words
    assert machine.asked.traffic.arrivals == f"poisson:{rate:g}"


def test_a_slower_machine_gets_less_traffic_and_every_policy_the_same():
    fast, slow = Machine(), Machine(slowness=4.0)
    assert fast.asked.loads[0].rate == pytest.approx(4 * slow.asked.loads[0].rate, rel=0.1)
    slow.play()
    assert [run.system for run in slow.session.runs] == ["off", "fixed:3"]
    assert len({run.summary["output_tokens"] for run in slow.session.runs}) == 1


def test_the_default_load_is_about_half_of_what_the_machine_can_do():
    rate = Machine().asked.loads[0].rate
    full = Machine("--concurrency", "8", "--requests", "64", "--policies", "off")
    full.play()
    assert rate == pytest.approx(full.session.runs[0].summary["requests_per_s"] / 2, rel=0.35)


def test_the_same_machine_gets_the_same_traffic():
    assert Machine().asked == Machine().asked


def test_a_machine_that_answers_nothing_in_time_still_gets_four_requests():
    machine = Machine(slowness=300.0)
    (_, workload) = machine.session.played[0]
    assert len(workload.items) >= 4
    assert said_seconds(machine.session.announcement()) > 120


@pytest.mark.parametrize(
    ("given", "rates"),
    [
        (("--rate", "3"), [3.0]),
        (("--arrivals", "poisson:2"), [None]),
        (("--duration", "7"), [None]),
        (("--requests", "5"), [None]),
        (("--rate", "2", "--loads", "1,2"), [2.0, 4.0]),
    ],
)
def test_a_given_load_is_used(given, rates):
    machine = Machine(*given)
    assert not machine.asked.is_sized
    assert [load.rate for load in machine.asked.loads] == rates
    assert machine.asked.traffic.arrivals == (given[1] if given[0] == "--arrivals" else None)


@pytest.mark.parametrize(
    "given", [("--concurrency", "1,8", "--requests", "30"), ("--rate", "3"), ("--rate", "40", "--duration", "10")]
)
def test_the_duration_of_a_given_load_is_estimated(given):
    machine = Machine(*given, "--policies", "off")
    said = said_seconds(machine.session.announcement())
    assert machine.play() == pytest.approx(said, rel=0.4, abs=5)


def test_loads_systems_and_repeats_are_counted():
    words = Machine("--concurrency", "1,8", "--requests", "3", "--repeats", "2").session.announcement()
    assert words.startswith("1 at a time, 8 at a time: 6 requests, 2 policies, 2 repeats, about ")
    assert Machine("--rate", "1,2,3,4,5", "--policies", "off").session.announcement().startswith("5 loads: ")


def test_a_run_that_takes_longer_than_estimated_says_so_once(capsys):
    machine = Machine("--rate", "4", "--duration", "20", "--policies", "off")
    machine.session.estimate = Estimate((MeasuredPace(1, 1e9, 1e9),))
    execute = machine.systems[0].engine.executor.execute

    def slowly(plan):
        machine.time.pass_by(1.0)
        return execute(plan)

    machine.systems[0].engine.executor.execute = slowly
    machine.play()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("faser: off at 4 requests/s takes longer than estimated: ")
    assert "about 20 s expected" in line


# ── calibration ──────────────────────────────────────────────────────────────────────────────────────────────────────

ITEM = Item(0.0, (1,) * 100, 64)


class Player:
    """Reads 1,000 tokens a second and decodes `rates` tokens a second with as many requests at once."""

    def __init__(self, rates: dict[int, float]) -> None:
        self.rates = rates
        self.sizes: list[int] = []

    def __call__(self, workload: Workload) -> Run:
        size, item = len(workload.items), workload.items[0]
        self.sizes.append(size)
        first = size * len(item.prompt_token_ids) / 1000
        end = first + (item.max_tokens - 1) * size / self.rates[size]
        record = Record(0, "", len(item.prompt_token_ids), 0.0, first, end, item.max_tokens)
        return Run("x", (record,) * size, end)


def test_more_requests_are_tried_at_once_while_that_pays():
    player = Player({1: 100.0, 4: 380.0, 16: 400.0})
    paces = calibrate(player, [ITEM])
    assert player.sizes == [1, 1, 4, 4, 16, 16]
    assert [pace.output for pace in paces] == pytest.approx([100.0, 380.0, 400.0])
    assert [pace.prompt for pace in paces] == pytest.approx([1000.0] * 3)
    assert default_rate(paces, [ITEM]) == pytest.approx(0.5 / (0.1 + 64 / 400), rel=0.05)


def test_a_slow_machine_is_calibrated_with_one_request():
    player = Player({1: 2.0})
    calibrate(player, [ITEM])
    assert player.sizes == [1, 1]


def test_a_calibration_without_answers_has_no_pace():
    lost = Record(0, "", 100, 0.0, None, None, 0, error="busy")
    assert calibrate(lambda workload: Run("x", (lost,), 1.0), [ITEM]) == ()


def test_without_a_pace_the_arrivals_are_a_lower_bound():
    machine = Machine("--rate", "3", "--policies", "off", "--warmup", "0")
    machine.session.estimate = Estimate(())
    assert re.search(r"1 policy, (29|30) s or more$", machine.session.announcement())


def test_a_noisy_first_request_does_not_make_decoding_free():
    slow_prompt = Record(0, "", 100, 0.0, 2.0, 2.0, 1)  # should have taken 0.1 s
    decoded = Record(0, "", 100, 0.0, 0.1, 1.6, 16)
    runs = iter([slow_prompt, decoded] * 5)
    paces = calibrate(lambda workload: Run("x", (next(runs),), 2.0), [ITEM])
    assert paces[0].output == pytest.approx(10.0)


def test_requests_of_one_token_have_a_pace():
    record = Record(0, "", 100, 0.0, 0.5, 0.5, 1)
    paces = calibrate(lambda workload: Run("x", (record,), 0.5), [Item(0.0, (1,) * 100, 1)])
    assert paces[0].seconds([Item(0.0, (1,) * 200, 1)]) == pytest.approx(1.0)
    assert len(paces) <= len(SIZES)


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.0, "5 s"), (31.0, "35 s"), (60.0, "1 min"), (71.0, "1 min 20 s"), (601.0, "11 min"), (7300.0, "2 h 2 min")],
)
def test_seconds_are_rounded_up_and_read_well(seconds, words):
    assert in_words(rounded_up(seconds)) == words
