"""What `benchmarks.h200 table` reports, whatever fails; speed itself is measured elsewhere."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import pytest

from benchmarks import h200
from benchmarks.lib import models, table, table_report
from benchmarks.lib.journal import Journal
from benchmarks.lib.table import Played, Seen
from tests.benchmarks.fake_vllm import write_fake_vllm
from tools.inflate import SHAPES

MODELS = {
    "kind": "models", "session": 1.0, "vocabulary": 49152, "prompt": 128, "output": 256, "prefill": [16, 2048],
    "target": vars(SHAPES["llama-8b"]), "draft": vars(SHAPES["llama-1b"]),
}  # fmt: skip


def run(engine, length, batch, tpot, session=1.0, **figures):
    given = {"tpot_ms": tpot, "steady_ms": tpot - 0.1, "spread": 0.0, "tokens_per_step": 1.0 + length / 2}
    about = {"kind": "run", "session": session, "engine": engine, "length": length, "batch": batch}
    return about | given | {"texts": [[1, 2, 3]], **figures}


def seen(*chunks, started=0.0):
    """Chunks (tokens, when)."""
    request = Seen(started, sum(tokens for tokens, _ in chunks))
    for tokens, now in chunks:
        request.add([7] * tokens, now)
    return request


# ── floors ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_floor_of_one_row_is_the_bytes_of_the_weights():
    assert table_report.floor_ms(MODELS["target"], 49152, 1, 0) == pytest.approx(3.34, abs=0.02)
    assert table_report.floor_ms(MODELS["draft"], 49152, 1, 0) == pytest.approx(0.5, abs=0.01)


def test_the_floor_of_many_rows_is_their_flops():
    expected = 1e3 * 2 * table_report.num_weights(MODELS["target"], 49152) * 1024 / table_report.FLOPS
    assert table_report.floor_ms(MODELS["target"], 49152, 1024, 0) == pytest.approx(expected)


def test_a_step_that_drafts_costs_its_draft_steps_more():
    plain, drafting = (table_report.step_floor_ms(MODELS, 1, length) for length in (0, 4))
    one = table_report.floor_ms(MODELS["draft"], 49152, 1, 256)
    assert drafting - plain == pytest.approx(4 * one, rel=0.01)


def test_the_prefill_floor_is_the_mean_wait_of_prompts_one_after_another():
    alone = table_report.prefill_floor_ms(MODELS | {"prefill": [1, 2048]})
    assert alone == pytest.approx(38, abs=2)
    assert table_report.prefill_floor_ms(MODELS) == pytest.approx(8.5 * alone)


# ── requests ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("size", [12, 30, 200])
def test_prompts_have_one_length_and_end_with_their_question(size):
    questions = ["why", "a much longer question than that", "how so"] * 10
    prompts = models.chat_prompts(lambda text: list(text.encode()), ("<<", ">>"), questions, 40, size)
    assert len(prompts) == 40
    assert {len(prompt) for prompt in prompts} == {size}
    for index, prompt in enumerate(prompts):
        text, question = bytes(prompt), f"{questions[index % 30]}\n\n".encode()
        assert text[:2] == b"<<"
        assert text.endswith(question[-(size - 4) :] + b">>")


def test_too_little_text_for_a_prompt_is_refused():
    with pytest.raises(ValueError, match="6 tokens in all"):
        models.chat_prompts(lambda text: list(text.encode()), ("<", ">"), ["a", "b"], 1, 40)


@pytest.mark.parametrize("batch", [1, 2, 4, 16, 64, 256])
def test_small_batches_are_several_with_other_prompts(batch):
    groups = table.groups_of([[i] for i in range(512)], batch)
    used = [prompt[0] for group in groups for prompt in group]
    assert all(len(group) == batch for group in groups)
    assert len(set(used)) == len(used) >= models.LEAST_REQUESTS
    assert len(groups) >= 2 or batch > 64


# ── figures of a run ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_time_per_token_counts_tokens_and_not_chunks():
    figures = table.run_figures([Played([seen((1, 1.0), (4, 2.0), (4, 3.0))])], length=4)
    assert figures["tpot_ms"] == pytest.approx(1e3 * 2.0 / 8)
    assert figures["ttft_ms"] == pytest.approx(1e3)
    assert figures["tokens_per_step"] == 4
    assert figures["acceptance"] == pytest.approx(3 / 4)


def test_the_mean_is_over_requests_and_the_spread_over_batches():
    batches = [Played([seen((1, 0.0), (1, 1.0))]), Played([seen((1, 0.0), (1, 3.0))])]
    figures = table.run_figures(batches, length=0)
    assert figures["tpot_ms"] == pytest.approx(2e3)
    assert figures["spread"] == pytest.approx(1.0)


def test_the_steady_time_per_token_leaves_out_prompts_and_ends():
    """From 2.0, when the second request has its first token, to 4.0, when the first ends: three tokens."""
    early = seen((1, 0.0), (1, 3.0), (1, 4.0))
    late = seen((1, 2.0), (1, 4.0), (1, 9.0))
    assert table.steady_ms([[early, late]]) == pytest.approx(1e3 * 2 * 2.0 / 3)
    assert table.steady_ms([[seen((1, 0.0), (1, 1.0)), seen((1, 2.0), (1, 3.0))]]) is None


def test_a_request_with_too_few_tokens_fails_the_run():
    short = Seen(0.0, wanted=8)
    short.add([1, 2], 1.0)
    with pytest.raises(RuntimeError, match="1 of 2 requests"):
        table.run_figures([Played([seen((1, 0.0), (1, 1.0)), short])], length=0)


def test_steps_count_while_all_requests_decode():
    """Of five steps the first two bring first tokens and in the fourth a request ends."""
    names = ("steps", "step_seconds", "draft_seconds", "verify_seconds")
    steps = []
    for number, who in enumerate(["0", "1", "0", "1", "0"]):
        progress = [SimpleNamespace(request_id=who, token_ids=[1])]
        steps.append((float(number), progress, SimpleNamespace(**dict.fromkeys(names, number))))
    played = table.played_of([Seen(0.0, 3), Seen(0.0, 2)], steps)
    assert played.steps == dict.fromkeys(names, 2)
    assert [each.token_ids for each in played.seen] == [[1, 1, 1], [1, 1]]


def test_step_figures_are_means_over_all_batches():
    totals = [{"steps": n, "step_seconds": 0.4 * n, "draft_seconds": 0.1 * n, "verify_seconds": 0.2} for n in (1, 3)]
    expected = {"step_ms": 400.0, "draft_ms": 100.0, "verify_ms": 100.0}
    assert table.step_figures(totals) == pytest.approx(expected)
    assert table.step_figures([]) == {}


# ── the summary ──────────────────────────────────────────────────────────────────────────────────────────────────────


def full_records():
    return [
        MODELS,
        run("faser", 0, 1, 4.1, step_ms=4.0, draft_ms=0.0, verify_ms=3.9),
        run("faser", 4, 1, 2.0, step_ms=6.0, draft_ms=2.5, verify_ms=3.4),
        run("faser", 2, 1, 2.5, step_ms=5.0, draft_ms=1.1, verify_ms=3.4),
        run("vllm", 0, 1, 5.0),
        run("vllm", 4, 1, 3.2),
        {"kind": "prefill", "session": 1.0, "engine": "faser", "ttft_ms": 500.0, "last_ms": 900.0},
        {"kind": "prefill", "session": 1.0, "engine": "vllm", "ttft_ms": 480.0, "last_ms": 870.0},
        {"kind": "startup", "session": 1.0, "engine": "faser", "mode": "off", "caches": "cold", "seconds": 60.0},
        {"kind": "startup", "session": 1.0, "engine": "vllm", "mode": "off", "caches": "cold", "seconds": 50.0},
    ]


def alone():
    return [record for record in full_records() if record.get("engine") != "vllm"]


def test_a_row_says_where_the_time_goes():
    (row,) = table_report.summarize(full_records())["off"]
    assert row["ratio"] == pytest.approx(5.0 / 4.1, abs=1e-3)
    assert row["gap"] == pytest.approx(0.1 / 4.0)
    assert row["host_ms"] == pytest.approx(0.1)
    assert row["prompts_ms"] == pytest.approx(0.1)
    assert row["floor_ms"] + row["kernels_ms"] == pytest.approx(3.9)
    assert row["same_text"] == 3


def test_the_best_length_of_each_system_is_compared():
    (row,) = table_report.summarize(full_records())["speculation"]
    assert (row["faser_length"], row["faser_tpot_ms"]) == (4, 2.0)
    assert (row["vllm_length"], row["vllm_tpot_ms"]) == (4, 3.2)
    assert row["ratio"] == pytest.approx(1.6)
    assert row["floor_ms"] == pytest.approx(table_report.step_floor_ms(MODELS, 1, 4) / 3.0, abs=1e-4)
    assert row["host_ms"] == pytest.approx(0.1 / 3.0, abs=1e-4)


def test_no_speculation_is_one_of_the_modes():
    records = [*full_records(), run("vllm", 4, 1, 9.0, session=2.0)]
    assert table_report.summarize(records)["speculation"][0]["vllm_length"] == 0


def test_a_draft_step_is_what_a_further_token_adds():
    (row,) = table_report.summarize(full_records())["draft_step"]
    assert row["rows"] == 1
    assert row["ms"] == pytest.approx((2.5 - 1.1) / 2)
    assert row["floor_ms"] == pytest.approx(0.5, abs=0.01)


def test_every_target_is_judged():
    found = {each["name"]: each["reached"] for each in table_report.summarize(full_records())["targets"]}
    assert found == {
        "off, batch 1: vLLM over FASER": True,
        "off, batch 1: share without kernels": True,
        "speculation, batch 1: vLLM's best over FASER's": True,
        "draft step, 1 row, ms": True,
        "prefill: FASER over vLLM": True,
        "start-up, off, cold caches: FASER over vLLM": False,
    }


def test_targets_without_a_figure_are_neither_reached_nor_missed():
    found = {each["name"]: each["reached"] for each in table_report.summarize(alone())["targets"]}
    assert found["off, batch 1: vLLM over FASER"] is None
    assert found["off, batch 1: share without kernels"] is True
    assert found["prefill: FASER over vLLM"] is None


@pytest.mark.parametrize(("batch", "least"), [(1, 1.5), (16, 1.5), (64, 1.2), (128, 1.0), (256, 1.0)])
def test_speculation_must_win_by_less_at_higher_load(batch, least):
    assert table_report.least_speculation(batch) == least


def test_a_later_figure_replaces_an_earlier_one_and_the_rest_stays():
    (row,) = table_report.summarize([*full_records(), run("faser", 0, 1, 3.0, session=2.0)])["off"]
    assert (row["faser_tpot_ms"], row["vllm_tpot_ms"]) == (3.0, 5.0)


@pytest.mark.parametrize("records", [[], [MODELS]])
def test_an_empty_journal_gives_an_empty_summary(records):
    summary = table_report.summarize(records)
    assert summary["off"] == summary["targets"] == []
    assert table_report.tables(summary) == ""


def test_tables_are_markdown_with_empty_cells_where_nothing_was_measured():
    lines = table_report.tables(table_report.summarize(alone())).strip().splitlines()
    assert lines[0] == "**Without speculation, ms a token**"
    heads, rule, row = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:5])
    assert len(heads) == len(rule) == len(row)
    assert row[heads.index("FASER TPOT")] == "4.10"
    assert row[heads.index("vLLM TPOT")] == row[heads.index("ratio")] == ""


def test_failures_of_the_last_session_are_shown():
    failed = {"kind": "failed", "session": 1.0, "section": "prefill", "engine": "faser", "why": "out of memory"}
    summary = table_report.summarize([*full_records(), failed])
    assert "FAILED faser, prefill: out of memory" in table_report.tables(summary)
    assert table_report.summarize([failed, run("faser", 0, 1, 3.0, session=2.0)])["failed"] == []


# ── journal and sections ─────────────────────────────────────────────────────────────────────────────────────────────


def test_a_line_cut_short_loses_only_itself(tmp_path):
    journal = Journal(tmp_path / "table.jsonl", 1.0)
    journal.add("run", tpot_ms=1.0)
    with journal.path.open("a") as file:
        file.write('{"kind": "run", "tp')
    assert [record["tpot_ms"] for record in journal.read()] == [1.0]


class ScriptedPlayer:
    """Seconds for every token, by length and batch, on no clock but its own."""

    name = "scripted"

    def __init__(self, seconds=lambda length, batch: 1.0):
        self.seconds = seconds
        self.played = []

    def prepare(self, length):
        self.length = length

    def play(self, prompts, output):
        if self.length == 7:
            raise RuntimeError("no such graph")
        self.played.append((self.length, len(prompts), output))
        each = self.seconds(self.length, len(prompts))
        return Played([seen(*((1, each * i) for i in range(output))) for _ in prompts])


@pytest.fixture
def worker(tmp_path):
    for name in ("requests", "prefill"):
        (tmp_path / f"{name}.json").write_text(json.dumps([[1]] * 8))
    args = h200.parse_args(["table", "--tiny", "--worker", "faser", "--folder", str(tmp_path), "--batches", "1,4"])
    return table.Worker(args, Journal(tmp_path / "table.jsonl", 1.0), "scripted", sys.maxsize)


def journal_of(worker):
    return worker.journal.read()


def test_every_setting_is_warmed_up_and_written_at_once(worker):
    player = ScriptedPlayer()
    table.measure(worker, player, [0])
    assert player.played == [(0, 1, 8)] * 7 + [(0, 4, 8)] * 3
    assert [(r["length"], r["batch"], r["tpot_ms"]) for r in journal_of(worker)] == [(0, 1, 1e3), (0, 4, 1e3)]


def test_longer_drafts_are_left_out_where_shorter_ones_already_lose(worker):
    table.measure(worker, ScriptedPlayer(), [0])
    table.measure(worker, ScriptedPlayer(lambda length, batch: 1.0 / length if batch == 1 else 1.4), [1, 2])
    assert [(r["length"], r["batch"]) for r in journal_of(worker)] == [(0, 1), (0, 4), (1, 1), (1, 4), (2, 1)]


def test_a_section_that_fails_keeps_what_it_measured_and_lets_others_run(worker):
    player = ScriptedPlayer()
    worker.section("speculation", lambda: table.measure(worker, player, [2, 7]))
    worker.section("prefill", lambda: table.measure_prefill(worker, player))
    records = journal_of(worker)
    assert [record["kind"] for record in records] == ["run", "run", "failed", "prefill"]
    assert records[2]["why"] == "RuntimeError: no such graph"


def test_without_time_a_section_says_what_it_left_out(worker):
    worker.until = 0.0
    worker.section("off", lambda: table.measure(worker, ScriptedPlayer(), [0]))
    assert "no time for length 0, batch 1" in journal_of(worker)[0]["why"]


def test_a_second_start_finds_the_caches_warm(worker):
    player = ScriptedPlayer()
    player.prepare(0)
    for length in (0, 4, 4):
        worker.start(length, player)
    found = [(record["mode"], record["caches"]) for record in journal_of(worker)]
    assert found == [("off", "cold"), ("length 4", "cold"), ("length 4", "warm")]


# ── the command ──────────────────────────────────────────────────────────────────────────────────────────────────────


TINY = ["table", "--tiny", "--device", "cpu"]


def processes(sections, *flags):
    args = h200.parse_args(["table", "--tiny", "--worker", "faser", "--sections", sections, *flags])
    return [process.name for process in table.plan_processes(args)]


def test_vllm_starts_once_for_all_batches_and_once_for_each_length(tmp_path):
    vllm = ("--vllm-bundle", str(tmp_path), "--vllm-trace", "trace.py", "--vllm-lengths", "2,4")
    assert processes("off,speculation,prefill", *vllm) == ["vllm 0", "faser", "vllm 2", "vllm 4"]
    assert processes("speculation", *vllm) == ["faser", "vllm 2", "vllm 4"]


def test_faser_is_measured_alone_where_there_is_no_vllm():
    assert processes("off,startup") == ["faser", "startup", "startup"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [(["--sections", "of"], "expected some of"), (["--target", "no.gguf"], "does not exist")],
)
def test_what_cannot_work_is_refused_at_once(flags, message, capsys, tmp_path):
    with pytest.raises(SystemExit):
        h200.parse_args(["table", *flags, "--folder", str(tmp_path)])
    assert message in capsys.readouterr().err


def test_two_commands_run_both_and_end_in_one_json_line(tmp_path, capsys, monkeypatch):
    """Tiny models on the CPU, and a vLLM that answers at once: every process, as on the GPU."""
    monkeypatch.setenv("OUT", str(tmp_path / "out"))
    given = [*TINY, "--folder", str(tmp_path / "work"), "--batches", "2", "--lengths", "1"]
    given += [*write_fake_vllm(tmp_path), "--vllm-lengths", "2"]
    assert h200.main([*given, "--sections", "off"]) == 0
    assert h200.main([*given, "--sections", "speculation"]) == 0
    printed = capsys.readouterr().out
    summary = json.loads(printed.splitlines()[-1])
    assert summary["off"][0]["ratio"] > 0
    assert set(summary["lengths"][0]) == {"batch", "faser 0", "faser 1", "vllm 0", "vllm 2"}
    assert [(row["mode"], row["caches"]) for row in summary["startup"] if row["faser_s"]] == [
        ("length 2", "cold"),
        ("length 2", "warm"),
    ]
    assert summary["failed"] == []
    names = {f"table.{end}" for end in ("json", "jsonl", "log", "md")}
    assert {path.name for path in (tmp_path / "out").iterdir()} == names
    assert "**Without speculation, ms a token**" in printed


def test_a_process_that_dies_is_reported_and_the_others_run(tmp_path, capsys):
    given = [*TINY, "--folder", str(tmp_path / "work"), "--batches", "2", "--sections", "off"]
    vllm = write_fake_vllm(tmp_path, "raise ImportError('no vLLM here')")
    assert h200.main([*given, *vllm]) == 1
    printed = capsys.readouterr().out
    assert "no vLLM here" in printed
    summary = json.loads(printed.splitlines()[-1])
    assert summary["failed"] == ["vllm 0, all: ended with status 1"]
    assert summary["off"][0]["faser_tpot_ms"] > 0
