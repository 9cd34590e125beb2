"""The draft leaves when pages are short and comes back when they are not; and not more often than it pays."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from faser.cost.curve import Curve
from faser.cost.profile import Profile
from faser.cost.residency import ResidencyProfile
from faser.engine.residency import Place
from faser.errors import ConfigError
from faser.sim.cluster import play_cluster
from faser.sim.draft_memory import PART_SECONDS, SimDraftMemory
from faser.sim.executor import VirtualTime
from faser.sim.replica import Machine, Replica, load_profile, make_replica
from faser.traffic.document import Item, Run, Workload
from faser.traffic.play import play
from faser.traffic.prompts import Blank
from faser.traffic.summary import summarize
from faser.traffic.traces import parse_arrivals
from tests.sim.toy import Known

# A decoding step takes 40 ms for any number of requests, so that a larger batch is faster in proportion. Three drafted
# tokens take 20 ms, and two of three are accepted. A request has 32 tokens, in 4 pages: 4 requests run beside the
# draft, 12 without it.
MOVES = ResidencyProfile(
    weight_bytes=128, target_token_bytes=1, draft_token_bytes=1, lend_seconds=0.015, load_seconds=0.05
)
PROFILE = Profile(
    about={},
    verify=Curve((1, 101), (0.040, 0.042), (0.0, 0.0)),
    prompts=Curve((1, 101), (0.040, 0.045), (0.0, 0.0)),
    first_draft=Curve((1,), (0.008,), (0.0,)),
    next_draft=Curve((1,), (0.006,), (0.0,)),
    catch_up=Curve((1, 101), (0.008, 0.010), (0.0, 0.0)),
    host=0.0005,
    residency=MOVES,
)
SMALL = Machine(
    profile=PROFILE, max_running=12, max_batch_tokens=128, max_model_len=64, page_size=8, kv_tokens=128, offload="auto"
)
AMPLE = replace(SMALL, kv_tokens=400)
AGREEMENT = Known([1, 1, 0])


def square_wave(low: float, high: float, period: float, seconds: float) -> Workload:
    """Requests at even distances, dense in the second half of each period."""
    arrivals = replace(parse_arrivals(f"square:{low}:{high}:{period}"), shape=1e6)
    times = arrivals.times(seconds, np.random.default_rng(0))
    return Workload(tuple(Item(time, Blank(8), 24) for time in times.tolist()))


def run(workload: Workload, machine: Machine = SMALL, policy: str = "faser") -> tuple[Run, Replica]:
    replica = make_replica(machine, policy, AGREEMENT)
    return play(replica.engine, workload, policy, clock=replica.time.clock), replica


def throughput(workload: Workload, machine: Machine, policy: str = "faser") -> float:
    speed = summarize(run(workload, machine, policy)[0])["output_tokens_per_s"]
    assert speed is not None
    return speed


def moves(replica: Replica) -> int:
    assert replica.engine.residency is not None
    return replica.engine.residency.stats.moves


def test_lending_takes_the_time_of_its_parts_and_loading_its_own():
    time = VirtualTime()
    memory = SimDraftMemory(MOVES, 32, time)
    assert [memory.offload(), memory.offload(), memory.offload()] == [False, False, True]
    assert time.now() == pytest.approx(3 * PART_SECONDS)
    started = time.now()
    assert not memory.load()
    assert time.now() == started, "loading takes no time of the host"
    time.reach(started + 0.04)
    assert not memory.load()
    time.reach(started + MOVES.load_seconds)
    assert memory.load()
    assert not memory.offload(), "it can leave again"


def test_a_machine_gains_what_the_drafts_memory_holds():
    assert SMALL.pages_gained == (128 + 16 * 8) // 8
    assert replace(SMALL, offload="off").pages_gained == 0
    assert replace(SMALL, profile=replace(PROFILE, residency=None)).pages_gained == 0
    assert replace(SMALL, kv_tokens=None).pages_gained == 0, "no request could use another page"
    with pytest.raises(ConfigError, match="--offload maybe"):
        replace(SMALL, offload="maybe")


@pytest.mark.parametrize(("name", "least"), [("h200-8b-1b", 1.2), ("h200-32b-0.6b", 1.2)])
def test_shipped_profiles_have_the_sizes_of_their_drafts(name, least):
    machine = Machine(profile=load_profile(name), kv_tokens=35_000, offload="auto")
    assert machine.profile.residency.is_assumed
    assert 1 + machine.pages_gained / machine.num_pages > least


@pytest.mark.parametrize("high", [10, 14])
def test_a_wave_as_short_as_a_move_causes_nearly_no_moves_and_loses_nothing(high):
    period = 2 * (MOVES.lend_seconds + MOVES.load_seconds)
    wave = square_wave(1, high, period, 20.0)
    found, replica = run(wave)
    assert moves(replica) <= 2
    speed = summarize(found)["output_tokens_per_s"]
    assert speed >= 0.995 * throughput(wave, replace(SMALL, offload="off"))


def test_in_a_long_wave_the_draft_leaves_and_returns_once_per_period():
    wave = square_wave(1, 10, 40.0, 140.0)  # three periods and a quiet half
    found, replica = run(wave)
    assert moves(replica) == 2 * 3
    assert replica.engine.residency.place is Place.RESIDENT
    with_it, without = (summarize(each) for each in (found, run(wave, replace(SMALL, offload="off"))[0]))
    assert with_it["output_tokens_per_s"] >= without["output_tokens_per_s"]
    assert with_it["latency_per_token_mean"] < 0.7 * without["latency_per_token_mean"]


def test_where_memory_is_plentiful_the_draft_never_leaves():
    wave = square_wave(1, 10, 20.0, 40.0)
    _, replica = run(wave, AMPLE)
    assert replica.engine.residency is not None
    assert moves(replica) == 0


def test_without_drafts_nothing_moves():
    _, replica = run(square_wave(1, 10, 2.0, 4.0), policy="off")
    assert replica.engine.residency is None


def slower(curve: Curve, factor: float) -> Curve:
    return replace(curve, seconds=tuple(factor * seconds for seconds in curve.seconds))


def test_ten_minutes_of_a_square_wave_end_as_they_began():
    """Steps take four times as long, so that there are fewer of them."""
    names = ("verify", "prompts", "first_draft", "next_draft", "catch_up")
    curves = {name: slower(getattr(PROFILE, name), 4.0) for name in names}
    machine = replace(SMALL, profile=replace(PROFILE, **curves))
    wave = square_wave(0.2, 2.5, 60.0, 600.0)
    found, replica = run(wave, machine)
    pool = replica.engine.scheduler.target_pages
    assert replica.time.now() > 560
    assert moves(replica) >= 10
    replica.idle_until(replica.time.now() + 60.0)
    assert replica.engine.residency.place is Place.RESIDENT
    assert pool.num_pages == pool.base_pages == pool.num_available == machine.num_pages
    replica.engine.scheduler.check()
    assert all(record.error is None and record.num_tokens == 24 for record in found.records)


def test_the_draft_of_an_idle_replica_comes_back():
    """A burst, then nothing for a minute."""
    burst = square_wave(0, 12, 16.0, 16.0)
    last = replace(burst.items[-1], arrival=burst.items[-1].arrival + 60.0)
    replicas = [make_replica(SMALL, "faser", AGREEMENT) for _ in range(2)]
    doubled = tuple(item for item in burst.items for _ in range(2))
    play_cluster(replicas, Workload((*doubled, last)), "faser")
    assert all(moves(replica) for replica in replicas), "both were short of pages"
    for replica in replicas:
        replica.idle_until(100.0)
        assert replica.engine.residency.place is Place.RESIDENT
