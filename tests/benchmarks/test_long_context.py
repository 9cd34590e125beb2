"""What `benchmarks.long_context` plays and leaves behind; speed itself is measured elsewhere."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import long_context
from benchmarks.lib.journal import Journal
from benchmarks.lib.long_report import prompt_floor_s, summarize
from benchmarks.lib.table import Seen
from benchmarks.long_context import (
    TINY,
    Case,
    LongBatch,
    LongSizes,
    LongVllmMode,
    lengthen,
    steady_rate,
    vllm_fitting,
)
from benchmarks.vllm_plugin import Shape
from tests.benchmarks.fake_vllm import write_fake_engine

pytest.importorskip("torch")  # the models are written with it

FOLDER = Path("/models")


# ── sizes and modes ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_prompts_of_real_acceptance_leave_room_for_what_is_written():
    sizes = LongSizes()
    assert sizes.prompt(Case(2048, 1), 4) == 2048
    assert sizes.prompt(Case(8192, 1), 4) + sizes.growth(4) // 2 == sizes.trained
    assert sizes.prompt(Case(32_768, 1), 4) == 32_768


def test_vllms_acceptance_beyond_training_is_synthetic():
    given = LongVllmMode("vllm:model:2", 0.5).engine_args(FOLDER, Shape(), on_gpu=True)["speculative_config"]
    assert given["synthetic_acceptance_rates"] == [0.5, 0.25]
    assert given["rejection_sample_method"] == "synthetic"
    for mode in (LongVllmMode("vllm:model:2"), LongVllmMode("vllm:off", 0.5)):
        assert "synthetic" not in str(mode.engine_args(FOLDER, Shape(), on_gpu=True))


def test_vllm_reads_prompts_in_steps_as_large_as_its_server_does():
    for mode in (LongVllmMode("vllm:model:2"), LongVllmMode("vllm:off")):
        assert mode.engine_args(FOLDER, Shape(), on_gpu=True)["max_num_batched_tokens"] == 8192


def test_requests_that_vllm_holds_are_counted_in_whole_blocks():
    cache = SimpleNamespace(num_gpu_blocks=100, block_size=16)
    engine = SimpleNamespace(vllm_config=SimpleNamespace(cache_config=cache))
    assert [vllm_fitting(engine, tokens) for tokens in (160, 161)] == [10, 9]
    assert vllm_fitting(SimpleNamespace(), 160) is None


def test_a_lengthened_folder_has_the_same_weights(tmp_path):
    source, folder = tmp_path / "source", tmp_path / "long"
    source.mkdir()
    (source / "config.json").write_text(json.dumps({"max_position_embeddings": 64, "hidden_size": 8}))
    (source / "model.safetensors").write_bytes(b"weights")
    for positions, expected in ((1000, 1000), (32, 64)):
        lengthen(source, folder, positions)
        found = json.loads((folder / "config.json").read_text())
        assert found == {"max_position_embeddings": expected, "hidden_size": 8}
        assert (folder / "model.safetensors").read_bytes() == b"weights"
    assert json.loads((source / "config.json").read_text())["max_position_embeddings"] == 64


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--cases", "2048"], "2048: expected tokens and requests"),
        (["--modes", "whole,sglang"], "sglang: expected modes such as window"),
        (["--policies", "off,quick"], "quick"),
        (["--acceptance", "1.2"], "expected a probability"),
        (["--cases", "8192:1", "--turn", "2000"], "no room for the turns"),
        (["--target", "no.gguf"], "does not exist"),
    ],
)
def test_what_cannot_work_is_refused_at_once(flags, message, capsys, tmp_path):
    with pytest.raises(SystemExit):
        long_context.parse_args([*flags, "--folder", str(tmp_path)])
    assert message in capsys.readouterr().err


# ── figures ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def seen(*chunks: tuple[float, int]) -> Seen:
    return Seen(0.0, sum(count for _, count in chunks), list(chunks))


def test_a_rate_counts_the_time_in_which_all_that_fit_decode():
    first, second = seen((1.0, 1), (2.0, 2), (4.0, 3)), seen((2.0, 1), (3.0, 2), (5.0, 4))
    assert steady_rate([first, second], fitting=9) == {"tokens_per_s": (3 + 2) / 2.0, "running": 2}
    late = seen((4.5, 1), (6.0, 1))
    assert steady_rate([first, second, late], fitting=2) == {"tokens_per_s": 2.5, "running": 2}  # it waited for room
    assert steady_rate([first, second, late], fitting=3) == {"tokens_per_s": None, "running": 2}  # it was still read
    assert steady_rate([seen((1.0, 4))], fitting=1)["tokens_per_s"] is None


def test_a_batch_of_vllm_without_a_rate_has_failed(tmp_path):
    args, journal = worker(tmp_path, "vllm:off", "--cases", "24:2")
    late = [seen((1.0, 1), (2.0, 5)), seen((3.0, 1), (4.0, 5))]
    player = SimpleNamespace(engine=None, timed=lambda prompts, output, seconds: late[: len(prompts)])
    with pytest.raises(RuntimeError, match="a request ended when 1 had begun; raise --vllm-output"):
        long_context.measure_vllm(args, journal, player, Case(24, 2))
    assert [each["tokens_per_s"] for each in journal.read()] == [None]


def record(kind: str, **fields) -> dict:
    return {"kind": kind, "session": 1.0, **fields}


def loop(mode: str, policy: str, rate: float) -> dict:
    return record("loop", mode=mode, policy=policy, context=32_768, requests=24, tokens_per_s=rate)


def test_faser_with_a_window_is_compared_with_the_best_of_each_kind():
    found = [
        loop("whole", "off", 90.0), loop("window", "off", 100.0), loop("whole", "faser", 125.0),
        loop("window", "fixed:2", 160.0), loop("window", "fixed:4", 100.0), loop("window", "faser", 200.0),
        loop("vllm:off", "vllm", 80.0), loop("vllm:model:2", "vllm", 50.0),
    ]  # fmt: skip
    (row,) = summarize(found)["loops"]
    assert row["window_faser_over"] == {"off": 2.0, "whole": 1.6, "fixed": 1.25, "vllm_off": 2.5, "vllm": 2.5}


def test_rows_are_compared_with_one_row_and_the_floor():
    about = {"context": 32_768, "requests": 24, "floor_us": 100.0}
    summary = summarize([record("kernel", rows=rows, attend_us=us, **about) for rows, us in ((1, 110.0), (5, 121.0))])
    last = summary["kernels"][-1]
    assert (last["over_one_row"], last["over_floor"]) == (pytest.approx(1.1), 1.21)
    assert [aim.rsplit("  ", 1)[1] for aim in summary["aims"]] == ["reached", "MISSED"]


def test_capacity_is_compared_with_whole_contexts():
    sizes = {"whole": 1000, "window": 1250}
    found = [record("capacity", mode=mode, tokens=size, fitting={"100": size // 100}) for mode, size in sizes.items()]
    rows = summarize(found)["capacity"]
    assert {row["mode"]: row["over_whole"] for row in rows} == {"whole": 1.0, "window": 1.25}
    assert [row["100"] for row in rows] == [10, 12]


def test_the_floor_of_a_prompt_grows_with_the_square_of_its_length():
    shape = dict.fromkeys(("hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim"), 1)
    one, two = (prompt_floor_s({**shape, "intermediate_size": 0}, tokens) for tokens in (1000, 2000))
    assert 3.9 < two / one < 4


def test_faser_under_the_trace_is_compared_with_every_length():
    def played(system: str, latency: float, rate: float) -> dict:
        figures = {"latency_per_token_mean": latency, "output_tokens_per_s": rate}
        return record("trace", mode="trace", system=system, load=0.5, **figures)

    found = [played("fixed:1", 3.0, 80.0), played("fixed:2", 2.0, 50.0), played("faser", 1.6, 100.0)]
    (row,) = summarize(found)["trace"]
    assert row["faser_over"] == {"fixed": {"latency": 1.25, "tokens_per_s": 1.25}}


# ── a batch ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def worker(folder: Path, mode: str = "window", *flags: str) -> tuple[argparse.Namespace, Journal]:
    """What a process of this mode is given, with its files."""
    given = ["--tiny", "--device", "cpu", "--folder", str(folder), "--parts", "loops", *flags]
    args = long_context.parse_args([*given, "--worker", "faser", "--only-mode", mode])
    args.work.mkdir()
    long_context.ensure_files(args)
    return args, Journal(args.journal, 1.0)


def told(journal: Journal) -> tuple[dict[str, int], list[str]]:
    """Turns by policy, and what failed."""
    records = journal.read()
    turns = {each["policy"]: each["turns"] for each in records if each["kind"] == "loop"}
    return turns, [each["why"] for each in records if each["kind"] == "failed"]


def play_turns(args: argparse.Namespace, journal: Journal, monkeypatch, most: int, last: Exception | None) -> None:
    """Play the case; the turn after `most` turns raises `last`, or tells that a request ended."""
    turn, number = LongBatch._turn, count()

    def cut(batch: LongBatch, name: str) -> dict | None:
        if next(number) < most:
            return turn(batch, name)
        if last is not None:
            raise last
        return None

    monkeypatch.setattr(LongBatch, "_turn", cut)
    long_context.work(args, journal)


FLAGS = "--cases", "24:1", "--policies", "off,fixed:2"


def test_turns_that_were_played_in_time_are_kept(tmp_path, monkeypatch):
    args, journal = worker(tmp_path, "window", *FLAGS)
    play_turns(args, journal, monkeypatch, 3, TimeoutError("no time left"))
    assert told(journal) == ({"off": 1, "fixed:2": 2}, [])


@pytest.mark.parametrize(("last", "why"), [(None, "a request ended"), (TimeoutError("no time left"), "no time left")])
def test_a_policy_without_a_turn_has_failed(last, why, tmp_path, monkeypatch):
    args, journal = worker(tmp_path, "window", *FLAGS)
    play_turns(args, journal, monkeypatch, 1, last)
    assert told(journal) == ({"off": 1}, [f"RuntimeError: no turn of fixed:2: {why}"])


def test_a_request_that_ends_before_all_have_begun_fails_the_case(tmp_path, monkeypatch):
    args, journal = worker(tmp_path, "window", *FLAGS, "--budget-seconds", "60")
    monkeypatch.setattr(LongSizes, "growth", lambda sizes, num_policies: 2)
    long_context.work(args, journal)
    assert told(journal) == ({}, ["RuntimeError: a request ended when 1 of 1 had begun"])


class Scripted:
    """An engine of two requests; the second waits for its prompt's turn, though it fits."""

    def __init__(self, waits: int) -> None:
        self.scheduler = SimpleNamespace(drafts=SimpleNamespace(), num_running=1, num_waiting=1, lacks_pages=False)
        self.waits = waits

    def add(self, request: object) -> None:
        pass

    def step(self) -> list[SimpleNamespace]:
        self.waits -= 1
        if self.waits < 0:
            self.scheduler.num_running, self.scheduler.num_waiting = 2, 0
        return [SimpleNamespace(request_id=str(each), finish=None) for each in range(self.scheduler.num_running)]


def test_a_request_that_fits_is_waited_for(tmp_path):
    args = long_context.parse_args(["--tiny", "--device", "cpu", "--folder", str(tmp_path), "--policies", "off"])
    batch, engine = LongBatch.__new__(LongBatch), Scripted(waits=10)
    batch.engine, batch.args, batch.policies = engine, args, {"off": None}
    batch._fill([[1], [1]], 8)
    assert engine.scheduler.num_running == 2


@pytest.mark.parametrize(("mode", "profiling"), [("window", "quick"), ("trace", "full")])
def test_engines_of_cases_start_with_a_quick_profile(mode, profiling, tmp_path):
    args = long_context.parse_args(["--folder", str(tmp_path)])
    assert long_context.engine_options(args, mode, 100, 1).profiling == profiling


def test_the_seconds_of_a_case_count_its_prompts_and_turns(tmp_path):
    shape = {
        "hidden_size": 4096, "num_layers": 32, "num_heads": 32, "num_kv_heads": 8, "head_dim": 128,
        "intermediate_size": 14_336, "vocab_size": 49_152,
    }  # fmt: skip

    def needed(*flags: str) -> float:
        args = long_context.parse_args(["--folder", str(tmp_path), *flags])
        return long_context.seconds_needed(args, shape, 24, 32_768) - long_context.ENGINE_SECONDS

    prompt = 1.5 * prompt_floor_s(shape, 32_768)
    assert needed("--parts", "prefill") == pytest.approx(4 * prompt)
    loops, twice = needed("--parts", "loops"), needed("--parts", "loops", "--rounds", "4")
    assert twice - loops == pytest.approx(loops - 24 * prompt)  # the turns
    assert 20 < loops - 24 * prompt < 50


# ── the command ──────────────────────────────────────────────────────────────────────────────────────────────────────


def run(folder: Path, capfd, *flags: str) -> tuple[int, dict]:
    """The exit status and the document of the last line."""
    status = long_context.main(["--tiny", "--device", "cpu", "--folder", str(folder), *flags])
    return status, json.loads(capfd.readouterr().out.splitlines()[-1])


def test_all_parts_run_on_tiny_models(tmp_path, capfd, monkeypatch):
    monkeypatch.delenv("OUT", raising=False)
    folder, bundle = tmp_path / "run", write_fake_engine(tmp_path)
    modes = ("--modes", "window,eagle3,trace,vllm:model:2", "--trace-policies", "off,fixed:1,faser", "--rate", "30")
    status, found = run(folder, capfd, *bundle, *modes)
    assert (status, found["failed"]) == (0, [])
    assert [(row["context"], row["requests"]) for row in found["loops"]] == [
        (c.context, c.requests) for c in TINY.cases
    ]
    for row in found["loops"]:
        own = [f"{mode} {policy}" for mode in ("window", "eagle3") for policy in ("fixed:4", "fixed:2", "off", "faser")]
        assert list(row["systems"]) == [*own, "vllm:model:2"]
        assert all(each["running"] == row["requests"] for each in row["systems"].values())
    assert {(row["mode"], row["policy"]) for row in found["prefill"]} == {
        ("window", "off"), ("window", "fixed:4"), ("eagle3", "off"), ("eagle3", "fixed:4"), ("vllm:model:2", "vllm"),
    }  # fmt: skip
    assert [row["mode"] for row in found["capacity"]] == ["window", "eagle3"]
    (traced,) = found["trace"]
    assert list(traced["systems"]) == ["off", "fixed:1", "faser", "vllm:model:2"]
    assert len({each["requests"] for each in traced["systems"].values()}) == 1, "all play the same file"
    lines = (folder / "long_context" / "load-0.5.jsonl").read_text().splitlines()
    sizes = [len(json.loads(line)["prompt_token_ids"]) for line in lines]
    assert sizes[::10] == [TINY.long] * len(sizes[::10])
    assert max(size for index, size in enumerate(sizes) if index % 10) <= TINY.max_prompt

    status, again = long_context.main(["--report-only", str(folder)]), capfd.readouterr().out
    assert status == 0
    assert json.loads(again.splitlines()[-1])["loops"] == found["loops"]


def test_a_mode_that_fails_leaves_the_others(tmp_path, capfd, monkeypatch):
    monkeypatch.delenv("OUT", raising=False)
    flags = ["--parts", "loops", "--modes", "vllm:model:13,whole", "--cases", "24:1", "--policies", "off"]
    status, found = run(tmp_path / "run", capfd, *write_fake_engine(tmp_path), *flags)
    assert status == 1
    assert found["failed"] == ["vllm:model:13 real, all: ended with status 1"]
    assert [list(row["systems"]) for row in found["loops"]] == [["whole off"]]


def test_requests_that_do_not_fit_wait(tmp_path, monkeypatch):
    args, journal = worker(tmp_path, "window", "--cases", "40:4", "--policies", "fixed:2,off")
    make, given = long_context.engine_options, []

    def options(*values, **more):
        # a prompt of 40 tokens takes three pages, what is written behind it a fourth
        given.append(replace(make(*values, **more), num_pages=11))
        return given[-1]

    monkeypatch.setattr(long_context, "engine_options", options)
    long_context.work(args, journal)
    loops = [each for each in journal.read() if each["kind"] == "loop"]
    assert [each["policy"] for each in loops] == ["fixed:2", "off"]
    assert all(2 <= each["running"] < 4 for each in loops)
    assert given[-1].max_step_ms == 0, "the prompts are read without a bound on the step"
