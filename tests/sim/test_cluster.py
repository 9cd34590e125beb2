"""Replicas behind a router: exact where they are few, and a flow that agrees with that where they are many."""

from dataclasses import replace

import pytest

from faser.errors import ConfigError
from faser.sim.cluster import Router, play_cluster
from faser.sim.fluid import play_fluid
from faser.sim.oracle import Draw
from faser.sim.replica import make_replica
from faser.sim.throughput import measure_throughput, sizes_up_to
from faser.traffic.document import Item, Workload
from faser.traffic.prompts import Blank
from faser.traffic.summary import summarize
from tests.sim.toy import TOY, Known, make_workload, simulate

ACCEPTANCE = Draw(0.75, 0.1)
MACHINE = replace(TOY, max_running=16, max_batch_tokens=128, max_model_len=256)


def test_the_router_takes_the_least_loaded_and_alternates_among_equals():
    router = Router(3)
    assert [router.choose() for _ in range(4)] == [0, 1, 2, 0]  # open: 2, 1, 1
    router.ended(2)
    assert router.choose() == 2
    assert [router.choose() for _ in range(2)] == [1, 2]  # all have two now
    router.ended(0, 2)
    assert [router.choose() for _ in range(3)] == [0, 0, 1]


def cluster(workload, policy, number, machine=MACHINE, acceptance=ACCEPTANCE):
    oracle = acceptance.oracle([item.category for item in workload.items], 0)
    return play_cluster([make_replica(machine, policy, oracle) for _ in range(number)], workload, policy)


@pytest.mark.parametrize("policy", ["off", "fixed:2"])
@pytest.mark.parametrize("concurrency", [None, 5])
@pytest.mark.parametrize("runs_ahead", [True, False])
def test_a_cluster_of_one_is_one_machine(policy, concurrency, runs_ahead):
    workload = make_workload(60, rate=15.0, concurrency=concurrency)
    machine = replace(MACHINE, runs_ahead=runs_ahead)
    oracle = ACCEPTANCE.oracle([item.category for item in workload.items], 0)
    alone, _ = simulate(workload, policy, oracle, machine)
    together = cluster(workload, policy, 1, machine)
    assert together.records == alone.records
    assert together.seconds == alone.seconds
    assert together.phases == pytest.approx(alone.phases)
    assert together.accepted_per_position == alone.accepted_per_position
    assert together.context_rows == alone.context_rows
    assert together.about["busy_share"] == pytest.approx(1 - alone.phases["idle"] / sum(alone.phases.values()))


def test_replicas_share_the_work_and_every_request_ends():
    workload = make_workload(120, rate=60.0)
    one, four = cluster(workload, "off", 1), cluster(workload, "off", 4)
    assert [record.num_tokens for record in four.records] == [item.max_tokens for item in workload.items]
    assert four.seconds < one.seconds
    assert summarize(four)["ttft_mean"] < summarize(one)["ttft_mean"]
    tokens = sum(item.max_tokens for item in workload.items)
    assert four.about["output_tokens_per_s_per_gpu"] == pytest.approx(tokens / four.seconds / 4)
    assert 0 < four.about["busy_share"] <= 1
    assert four == cluster(workload, "off", 4)


def test_the_router_does_not_know_ends_that_are_still_in_the_future():
    """The second request comes while the first one runs; the third when both have ended."""
    items = (Item(0.0, Blank(4), 2), Item(0.02, Blank(4), 2), Item(1.0, Blank(4), 2))
    run = cluster(Workload(items), "off", 2, acceptance=Draw(1.0))
    waited = [record.first - record.arrival for record in run.records]
    assert waited == pytest.approx([0.0185] * 3)


def test_a_stopped_cluster_leaves_a_partial_run():
    workload, asked = make_workload(50, rate=50.0), iter(range(1000))
    oracle = Known([1])
    replicas = [make_replica(MACHINE, "off", oracle) for _ in range(2)]
    run = play_cluster(replicas, workload, "off", stopped=lambda: next(asked) > 40)
    assert run.partial
    assert 0 < len(run.records) < 50
    asked = iter(range(1000))
    assert measure_throughput(MACHINE, "off", workload, ACCEPTANCE, 0, stopped=lambda: next(asked) > 200) is None
    table = measure_throughput(MACHINE, "off", workload, ACCEPTANCE, 0)
    assert play_fluid(MACHINE, table, 2, workload, "off", stopped=lambda: True).partial


def test_batch_sizes_of_the_table_end_with_the_largest():
    assert sizes_up_to(16) == [1, 2, 3, 4, 6, 8, 12, 16]
    assert sizes_up_to(20) == [1, 2, 3, 4, 6, 8, 12, 16, 20]
    assert sizes_up_to(1) == [1]


@pytest.fixture(scope="module", params=["off", "fixed:2"])
def measured(request):
    workload = make_workload(400, prompt=30, output=20)
    return request.param, measure_throughput(MACHINE, request.param, workload, ACCEPTANCE, 0)


def test_the_throughput_table_of_a_machine_follows_its_profile(measured):
    policy, table = measured
    if policy == "off":
        for size in (1, 4, 12, 16):
            assert table.step[size] == pytest.approx(0.0085 + 0.001 * size, rel=0.03)
        assert table.gain == [1.0] * 17
        assert table.prompt_row[0] == pytest.approx(0.002, rel=0.1)
    else:
        assert table.gain[8] == pytest.approx(1 + 0.75 + 0.75**2, rel=0.12)
        assert table.prompt_width[8] == pytest.approx(3, abs=0.4)


@pytest.mark.parametrize("rate", [1.0, 3.0, 5.0])  # of each replica: quiet, busy, almost too much
def test_the_flow_agrees_with_every_step(measured, rate):
    policy, table = measured
    workload = make_workload(300, rate=3 * rate, prompt=30, output=20)
    exact, flow = cluster(workload, policy, 3), play_fluid(MACHINE, table, 3, workload, policy)
    assert [record.num_tokens for record in flow.records] == [record.num_tokens for record in exact.records]
    said, right = summarize(flow), summarize(exact)
    assert said["output_tokens_per_s"] == pytest.approx(right["output_tokens_per_s"], rel=0.05)
    assert said["latency_per_token_mean"] == pytest.approx(right["latency_per_token_mean"], rel=0.15)
    assert said["tpot_mean"] == pytest.approx(right["tpot_mean"], rel=0.15)
    assert flow.about["busy_share"] == pytest.approx(exact.about["busy_share"], abs=0.1)


def test_the_flow_saturates_where_the_exact_simulation_does(measured):
    policy, table = measured
    workload = make_workload(300, rate=60.0, prompt=30, output=20)
    exact, flow = cluster(workload, policy, 3), play_fluid(MACHINE, table, 3, workload, policy)
    assert flow.seconds == pytest.approx(exact.seconds, rel=0.1)


def test_a_flow_is_deterministic_and_loses_requests_too_long_for_a_replica():
    workload = make_workload(50, rate=30.0)
    items = (*workload.items, Item(10.0, Blank(250), 20))
    table = measure_throughput(MACHINE, "off", workload, ACCEPTANCE, 0)
    run = play_fluid(MACHINE, table, 3, Workload(items), "off")
    assert run == play_fluid(MACHINE, table, 3, Workload(items), "off")
    assert "270, but a replica takes 256" in run.records[-1].error
    assert summarize(run)["lost"] == 1


def test_a_workload_that_fits_no_replica_is_refused():
    with pytest.raises(ConfigError, match="no request of the workload fits a replica"):
        measure_throughput(MACHINE, "off", Workload((Item(0.0, Blank(250), 20),)), ACCEPTANCE, 0)


def test_a_small_pool_holds_requests_back():
    workload = make_workload(100, rate=60.0, prompt=30, output=20)
    table = measure_throughput(MACHINE, "off", workload, ACCEPTANCE, 0)
    wide = play_fluid(MACHINE, table, 2, workload, "off")
    tight = play_fluid(replace(MACHINE, kv_tokens=256), table, 2, workload, "off")
    assert summarize(tight)["ttft_mean"] > 1.5 * summarize(wide)["ttft_mean"]
    assert all(record.end is not None for record in tight.records)
