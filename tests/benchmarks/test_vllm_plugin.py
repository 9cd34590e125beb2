"""What `benchmarks.vllm_plugin` plays and leaves behind, whatever fails; speed itself is measured elsewhere."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import vllm_plugin
from benchmarks.lib.journal import Journal
from benchmarks.vllm_plugin import TINY, Mode, Shape, first_difference, summarize
from tests.benchmarks.fake_vllm import write_fake_engine

pytest.importorskip("torch")  # the models are written with it

FOLDER = Path("/models")


# ── modes ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_modes_without_speculation_name_no_draft():
    for name in ("off-v1", "off-v2"):
        given = Mode(name).engine_args(FOLDER, Shape(), on_gpu=True)
        assert "speculative_config" not in given
        assert "additional_config" not in given
    assert Mode("off-v1").environment == {"VLLM_USE_V2_MODEL_RUNNER": "0"}
    assert not Mode("off-v2").environment


def test_vllms_speculation_has_graphs_for_its_largest_batch():
    given = Mode("vllm:4").engine_args(FOLDER, Shape(), on_gpu=True)
    assert given["speculative_config"]["num_speculative_tokens"] == 4
    assert given["compilation_config"] == {"max_cudagraph_capture_size": 256 * 5}
    assert given["async_scheduling"]


@pytest.mark.parametrize("mode", ["off-v2", "vllm:4", "plugin:faser"])
def test_steps_are_as_large_as_those_of_vllms_server(mode):
    assert Mode(mode).engine_args(FOLDER, Shape(), on_gpu=True)["max_num_batched_tokens"] == 8192


def test_vllms_table_ends_without_drafts():
    table = Mode("table:4").engine_args(FOLDER, Shape(), True)["speculative_config"]
    assert table["num_speculative_tokens_per_batch_size"] == [[1, 32, 4], [33, 128, 2], [129, 1024, 0]]


@pytest.mark.parametrize(("mode", "policy", "length"), [("plugin:faser", "faser", 8), ("plugin:fixed:3", "fixed:3", 3)])
def test_the_plugin_is_one_flag(mode, policy, length):
    given = Mode(mode).engine_args(FOLDER, Shape(), on_gpu=True)
    assert given["additional_config"] == {"faser": {"policy": policy}}
    assert given["speculative_config"]["num_speculative_tokens"] == length
    assert "async_scheduling" not in given  # the plugin sets it, as for a user


def test_an_unknown_mode_is_refused(capsys):
    with pytest.raises(SystemExit):
        vllm_plugin.parse_args(["--modes", "off-v1,sglang"])
    assert "sglang: expected modes such as off-v2" in capsys.readouterr().err


# ── figures ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_parting_tells_ties_from_errors():
    likeliest = [[(1, -0.1), (5, -3.0)], [(2, -0.7), (3, -0.75)]]
    assert first_difference([1, 2], [1, 2], likeliest) is None
    assert first_difference([1, 3], [1, 2], likeliest) == {"position": 1, "gap": 0.05}
    assert first_difference([5, 2], [1, 2], likeliest) == {"position": 0, "gap": 2.9}
    assert first_difference([9, 2], [1, 2], likeliest) == {"position": 0, "gap": None}
    assert first_difference([1], [1, 2], likeliest) == {"position": 1, "gap": None}


def record(kind: str, **fields) -> dict:
    return {"kind": kind, "session": 1.0, **fields}


def test_the_plugin_is_compared_with_the_best_of_vllm():
    tpot = {"off-v1": 5.0, "vllm:2": 4.0, "vllm:4": 6.0, "plugin:fixed:4": 1.0, "plugin:faser": 2.0}
    summary = summarize([record("loop", mode=mode, batch=16, tpot_ms=value) for mode, value in tpot.items()])
    assert summary["loop_gain"] == {16: 2.0}
    decode = {"off-v1": 90.0, "vllm:2": 60.0, "vllm:4": 50.0, "plugin:faser": 96.0}
    summary = summarize([record("decode", mode=mode, tokens_per_s=value) for mode, value in decode.items()])
    assert summary["decode_gain_over_speculation"] == 1.6


def test_a_mode_that_lacks_a_load_has_no_mean_over_the_trace():
    figures = [("off-v1", 0.1, 4.0), ("off-v1", 1.2, 8.0), ("vllm:2", 0.1, 1.0), ("plugin:faser", 0.1, 2.0)]
    figures.append(("plugin:faser", 1.2, 4.0))
    summary = summarize([record("trace", mode=mode, load=load, per_token_ms=value) for mode, load, value in figures])
    assert summary["trace_gain"] == {"over_speculation": None, "over_best": 2.0}


def test_only_starts_with_warm_caches_are_compared():
    starts = [("vllm:2", "cold", 90.0), ("plugin:faser", "cold", 60.0)]
    assert summarize([record("start", mode=m, caches=c, seconds=s) for m, c, s in starts])["start_more_s"] is None
    starts += [("off-v1", "warm", 20.0), ("vllm:2", "warm", 30.0), ("plugin:faser", "warm", 41.5)]
    summary = summarize([record("start", mode=m, caches=c, seconds=s) for m, c, s in starts])
    assert summary["start_more_s"] == 11.5
    assert summary["first_start_s"] == {"vllm:2": 90.0, "plugin:faser": 60.0}


# ── the command ──────────────────────────────────────────────────────────────────────────────────────────────────────


def run(folder: Path, capfd, *flags: str) -> tuple[int, dict]:
    """The exit status and the document of the last line."""
    status = vllm_plugin.main(["--tiny", "--device", "cpu", "--folder", str(folder / "run"), *flags])
    return status, json.loads(capfd.readouterr().out.splitlines()[-1])


def test_all_parts_of_all_kinds_of_modes(tmp_path, capfd, monkeypatch):
    monkeypatch.delenv("OUT", raising=False)
    bundle = write_fake_engine(tmp_path)
    modes = ["off-v1", "vllm:2", "plugin:faser"]
    status, summary = run(tmp_path, capfd, *bundle, "--rate", "20", "--modes", ",".join(modes))
    assert (status, summary["failed"]) == (0, [])
    assert summary["tpot_ms"].keys() == {str(size) for size in TINY.batches}
    assert summary["trace_per_token_ms"].keys() == {str(load) for load in TINY.loads}
    for figures in (summary["tpot_ms"]["1"], summary["decode_tokens_per_s"], summary["start_s"]):
        assert list(figures) == modes
    assert list(summary["first_start_s"]) == modes
    assert summary["equal_texts"] == {"off-v1": 1.0, "vllm:2": 0.0, "plugin:faser": 0.0}
    assert summary["partings"]["vllm:2"] == [{"answer": index, "position": 2, "gap": 0.125} for index in range(2)]

    status, again = vllm_plugin.main(["--report-only", str(tmp_path / "run")]), capfd.readouterr().out
    assert status == 0
    assert json.loads(again.splitlines()[-1])["partings"] == summary["partings"]


def test_a_run_that_is_killed_has_left_its_figures(tmp_path, monkeypatch):
    monkeypatch.delenv("OUT", raising=False)
    args = vllm_plugin.parse_args(["--tiny", "--device", "cpu", "--folder", str(tmp_path)])
    args.work.mkdir()
    journal = Journal(args.journal, args.session)
    for batch, value in ((1, 5.0), (16, 6.0)):
        journal.add("loop", mode="plugin:faser", batch=batch, tpot_ms=value)
        vllm_plugin.save_results(args, journal)  # as after every record
        found = json.loads((tmp_path / "plugin.json").read_text())
        assert found["tpot_ms"][str(batch)] == {"plugin:faser": value}
    assert Journal(tmp_path / "plugin.jsonl", 0.0).read() == journal.read()


def test_a_mode_that_does_not_start_leaves_the_others(tmp_path, capfd, monkeypatch):
    monkeypatch.delenv("OUT", raising=False)
    bundle = write_fake_engine(tmp_path)
    status, summary = run(tmp_path, capfd, *bundle, "--modes", "vllm:13,vllm:2", "--parts", "decode")
    assert status == 1
    assert summary["failed"] == ["vllm:13, all: ended with status 1"]
    assert list(summary["decode_tokens_per_s"]) == ["vllm:2"]
