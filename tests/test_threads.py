"""How threads wait, how many there are, and how their number follows the machine."""

import pytest

from faser.threads import CoreWaits, ThreadTuner, available_cpus, prepare_openmp


class Machine:
    """Forwards on a machine whose speed by threads can change; it notes which count each ran with."""

    def __init__(self, seconds_by_threads, most):
        self.seconds = seconds_by_threads
        self.threads = most
        self.counts = []
        self.waits = None  # the share of their time that threads wait for a core
        self.tuner = ThreadTuner(most, self.set_threads, lambda: self.waits)

    def set_threads(self, count):
        self.threads = count

    def run(self, steps, rows=1):
        for number in range(steps):
            self.tuner.begin(rows)
            self.counts.append(self.threads)
            noise = 1 + 0.03 * ((number * 7919) % 11 - 5) / 5
            self.tuner.end(rows, self.seconds[self.threads] * noise)


def test_openmp_is_told_to_sleep_soon_before_torch_loads():
    environment = {}
    assert prepare_openmp(environment, torch_is_loaded=False)
    assert int(environment["GOMP_SPINCOUNT"]) < 300_000
    assert environment["KMP_BLOCKTIME"] == "1"


@pytest.mark.parametrize("name", ["OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"])
def test_what_the_user_said_of_waiting_stands(name):
    environment = {name: "7"}
    assert not prepare_openmp(environment, torch_is_loaded=False)
    assert environment == {name: "7"}


def test_it_is_too_late_once_torch_is_loaded():
    environment = {}
    assert not prepare_openmp(environment, torch_is_loaded=True)
    assert environment == {}


@pytest.mark.parametrize(
    ("files", "most"),
    [
        ({"cpu.max": "150000 100000"}, 2),
        ({"cpu.max": "50000 100000"}, 1),
        ({"cpu.max": "max 100000"}, 10**6),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 10**6),
        ({"cpu/cpu.cfs_quota_us": "100000", "cpu/cpu.cfs_period_us": "100000"}, 1),
        ({}, 10**6),
    ],
)
def test_a_quota_bounds_the_cpus(tmp_path, monkeypatch, files, most):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(64)))
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert available_cpus(tmp_path) == min(64, most)


def test_threads_that_help_stay():
    machine = Machine({2: 1.0, 1: 1.6}, most=2)
    machine.run(2000)
    assert machine.tuner.num_threads(1) == 2
    assert machine.counts.count(1) < 40  # 2 % of the steps


def test_a_busy_machine_gets_one_thread_and_an_idle_one_all_again():
    machine = Machine({2: 1.0, 1: 1.6}, most=2)
    machine.run(300)
    machine.seconds = {2: 4.0, 1: 2.4}  # others hold the cores
    machine.run(100)
    assert machine.tuner.num_threads(1) == 1
    machine.seconds = {2: 1.0, 1: 1.6}
    machine.run(100)
    assert machine.tuner.num_threads(1) == 2


def test_a_rare_size_follows_what_a_common_one_found():
    """A prompt comes with every answer: it would take as many answers as a trial has forwards."""
    machine = Machine({2: 1.0, 1: 1.6}, most=2)
    for _ in range(20):
        machine.run(20, rows=1)
        machine.run(1, rows=500)
    machine.seconds = {2: 4.0, 1: 2.4}
    machine.run(40, rows=1)
    assert machine.tuner.num_threads(1) == 1
    assert machine.tuner.num_threads(500) == 1


def test_of_many_threads_the_best_number_is_found_by_halves():
    machine = Machine({16: 3.0, 8: 1.5, 4: 1.0, 2: 1.4, 1: 2.5}, most=16)
    machine.run(1000)
    assert machine.tuner.num_threads(1) == 4


def test_every_size_of_forward_has_its_own_threads():
    machine = Machine({2: 1.0, 1: 0.8}, most=2)
    for _ in range(200):
        machine.run(3, rows=1)
        machine.seconds = {2: 100.0, 1: 160.0}
        machine.run(1, rows=1000)
        machine.seconds = {2: 1.0, 1: 0.8}
    assert machine.tuner.num_threads(1) == 1
    assert machine.tuner.num_threads(1000) == 2


def test_a_single_slow_step_starts_no_trial():
    machine = Machine({2: 1.0, 1: 1.6}, most=2)
    machine.run(1000)
    before = machine.counts.count(1)
    machine.seconds = {2: 50.0, 1: 50.0}
    machine.run(1)
    machine.seconds = {2: 1.0, 1: 1.6}
    machine.run(20)
    assert machine.counts.count(1) == before


def test_long_forwards_of_a_busy_machine_are_decided_by_one_pair():
    machine = Machine({2: 0.5, 1: 0.8}, most=2)
    machine.run(300)
    machine.waits, machine.seconds = 0.4, {2: 2.0, 1: 1.2}
    machine.run(3)  # one tells, two are compared
    assert machine.tuner.num_threads(1) == 1


def test_a_short_forward_decides_nothing_alone():
    machine = Machine({2: 0.010, 1: 0.016}, most=2)
    machine.run(300)
    machine.waits, machine.seconds = 0.4, {2: 0.040, 1: 0.024}
    machine.run(3)
    assert machine.tuner.num_threads(1) == 2
    machine.run(20)
    assert machine.tuner.num_threads(1) == 1


def test_forwards_of_many_rows_keep_all_threads_while_nobody_waits_for_a_core():
    machine = Machine({2: 1.0, 1: 1.9}, most=2)
    machine.waits = 0.0
    machine.run(500, rows=256)
    assert set(machine.counts) == {2}
    machine.waits, machine.seconds = 0.5, {2: 4.0, 1: 2.4}
    machine.run(4, rows=256)
    assert machine.tuner.num_threads(256) == 1


def test_a_new_size_begins_like_its_neighbour_on_a_crowded_machine():
    machine = Machine({2: 4.0, 1: 2.4}, most=2)
    machine.waits = 0.5
    machine.run(20, rows=8)
    assert machine.tuner.num_threads(8) == 1
    assert machine.tuner.num_threads(600) == 1


def test_waiting_for_a_core_is_read_from_the_scheduler(tmp_path):
    now = 0.0

    def write(ran, waited):
        for task in ("11", "12"):
            (tmp_path / task).mkdir(exist_ok=True)
            (tmp_path / task / "schedstat").write_text(f"{ran} {waited} 5\n")

    waits = CoreWaits(tmp_path, lambda: now)
    write(1000, 0)
    assert waits.share() is None  # nothing to compare with
    now = 1.0
    write(1600, 400)
    assert waits.share() == pytest.approx(0.4)
    assert waits.share() is None  # that was just now
    assert CoreWaits(tmp_path / "none", lambda: now).share() is None


def test_one_thread_is_left_alone():
    machine = Machine({1: 1.0}, most=1)
    machine.run(500)
    assert set(machine.counts) == {1}
