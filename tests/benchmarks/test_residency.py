"""What benchmarks/residency.py plays and says; speed itself is measured elsewhere."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from benchmarks import residency
from benchmarks.lib.journal import Journal
from benchmarks.lib.residency_traffic import COLUMNS, ratios


@pytest.fixture
def out(tmp_path, monkeypatch):
    monkeypatch.setenv("OUT", str(tmp_path))
    monkeypatch.setenv("FASER_CACHE", str(tmp_path / "cache"))
    return tmp_path


def test_it_all_runs_on_tiny_models(out, capsys):
    assert residency.main(["--tiny", "--device", "cpu"]) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert document["failed"] == []
    (capacity,) = document["capacity"]
    assert capacity["tokens_out"] > capacity["tokens_in"] == capacity["tokens_after"]
    (moves,) = document["moves"]
    assert len(moves["rounds"]) == residency.TINY_MOVES.rounds
    played = [(each["pattern"], each["column"]) for each in document["traffic"]]
    assert played == [(pattern, column) for pattern in ("azure", "spike", "swing") for column in COLUMNS]
    assert [each["column"] for each in document["wave"]] == ["faser", "faser+offload"]
    assert all(each["lost"] == each["pages_lost"] == 0 for each in document["traffic"] + document["wave"])
    assert json.loads((out / "residency.json").read_text()) == document
    kinds = [json.loads(line)["kind"] for line in (out / "residency.jsonl").read_text().splitlines()]
    assert kinds[:3] == ["call", "engine", "capacity"], "the journal has every figure as it is measured"


def test_a_run_that_is_cut_off_leaves_what_it_did_so_far(tmp_path):
    pool, moved = SimpleNamespace(num_held=3, num_pages=8), SimpleNamespace(moves=2, away_seconds=1.5)
    scheduler = SimpleNamespace(num_landed=7, num_preemptions=1, target_pages=pool)
    engine = SimpleNamespace(scheduler=scheduler, residency=SimpleNamespace(stats=moved))
    times = iter([0.0, 20.0, 31.0, 40.0, 70.0])
    journal = Journal(tmp_path / "journal.jsonl", 0.0)
    stopped = residency.ProgressRecords(engine, journal, lambda: False, clock=lambda: next(times))
    assert [stopped() for _ in range(4)] == [False] * 4
    records = journal.read()
    assert [each["elapsed_s"] for each in records] == [31.0, 70.0]
    assert records[0]["steps"] == 7
    assert (records[0]["moves"], records[0]["held_pages"]) == (2, 3)


def test_what_fails_is_said_and_the_rest_goes_on(out, capsys, monkeypatch):
    def fail(*args):
        raise RuntimeError("no such memory")

    monkeypatch.setattr(residency, "moves", fail)
    assert residency.main(["--tiny", "--device", "cpu", "--parts", "moves,capacity"]) == 1
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert document["failed"] == ["faser, moves 8b-1b:24: RuntimeError: no such memory"]
    assert len(document["capacity"]) == 1


def test_the_simulator_predicts_the_same_traffic(out, capsys):
    given = ["--parts", "predict", "--machines", "8b-3b:24", "--columns", "fixed:3,faser,faser+offload"]
    assert residency.main([*given, "--traffic-seconds", "2", "--wave-seconds", "1", "--wave-periods", "0.5"]) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert document["predicted_capacity"][0]["ratio"] > residency.AIMS["8b-3b"]
    assert len(document["predicted_traffic"]) == 9
    assert {each["column"] for each in document["predicted_wave"]} == {"faser", "faser+offload"}


def test_a_card_leaves_less_for_kv_beside_a_larger_draft():
    one, three = residency.PAIRS.values()
    assert one.kv_memory(48) > three.kv_memory(48) > three.kv_memory(24) > 0


def test_ratios_are_against_fixed_and_without_offload():
    def figures(speed):
        return {"output_tokens_per_s": speed, "latency_per_token_mean": 1 / speed}

    found = ratios({"fixed:3": figures(2.0), "faser": figures(4.0), "faser+offload": figures(5.0)})
    assert found["faser"]["output_tokens_per_s"] == 2.0
    assert found["faser+offload"]["latency_per_token_mean"] == pytest.approx(0.4)
    assert found["faser+offload by offload"]["output_tokens_per_s"] == 1.25
