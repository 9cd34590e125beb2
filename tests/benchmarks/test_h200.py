"""What benchmarks/h200.py says, and that it says it whatever fails; speed itself is measured elsewhere."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import pytest

from benchmarks import h200
from benchmarks.h200 import Journal, Played, Seen, Steps, Survey
from tools.inflate import SHAPES

MODELS = {
    "kind": "models", "session": 1.0, "vocabulary": 49152,
    "target": vars(SHAPES["llama-8b"]), "draft": vars(SHAPES["llama-1b"]),
}  # fmt: skip
SETUP = {"kind": "setup", "session": 1.0, "prompt": 128, "output": 256, "prefill": "16x2048"}


def run(engine, length, batch, tpot, session=1.0, **figures):
    given = {"tpot_ms": tpot, "ttft_ms": 9.0, "tokens_per_step": 1.0 + length / 2, "texts": [[1, 2, 3]], **figures}
    return {"kind": "run", "session": session, "engine": engine, "length": length, "batch": batch, **given}


def seen(*chunks, started=0.0):
    """Chunks (tokens, when)."""
    request = Seen(started, sum(tokens for tokens, _ in chunks))
    for tokens, now in chunks:
        request.add([7] * tokens, now)
    return request


# ── floors ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_floor_of_one_row_is_the_bytes_of_the_weights():
    assert h200.floor_ms(MODELS["target"], 49152, 1, 0) == pytest.approx(3.34, abs=0.02)
    assert h200.floor_ms(MODELS["draft"], 49152, 1, 0) == pytest.approx(0.5, abs=0.01)


def test_the_floor_of_many_rows_is_their_flops():
    rows = 1024
    expected = 1e3 * 2 * h200.num_weights(MODELS["target"], 49152) * rows / h200.FLOPS
    assert h200.floor_ms(MODELS["target"], 49152, rows, 0) == pytest.approx(expected)


def test_a_step_that_drafts_costs_its_draft_steps_more():
    plain, drafting = (h200.step_floor_ms(MODELS, 1, length, 256) for length in (0, 4))
    one = h200.floor_ms(MODELS["draft"], 49152, 1, 256)
    assert drafting - plain == pytest.approx(4 * one, rel=0.01)


# ── requests ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("size", [12, 30, 200])
def test_prompts_have_one_length_and_keep_what_surrounds_the_question(size):
    questions = ["why", "a much longer question than that", "how so"] * 10
    prompts = h200.chat_prompts(lambda text: list(text.encode()), ("<<", ">>"), questions, 40, size)
    assert len(prompts) == 40
    assert {len(prompt) for prompt in prompts} == {size}
    assert all(bytes(prompt[:2]) == b"<<" and bytes(prompt[-2:]) == b">>" for prompt in prompts)


def test_a_short_question_comes_last_and_a_long_one_loses_its_end():
    assert h200.fit_prompt([1, 2], [[8, 8, 8], [9, 9, 9]], 7) == [8, 8, 8, 9, 9, 1, 2]
    assert h200.fit_prompt([1, 2, 3, 4], [[8]], 3) == [1, 2, 3]


def test_too_little_text_for_a_prompt_is_refused():
    with pytest.raises(ValueError, match="in all"):
        h200.fit_prompt([1, 2], [[3]], 7)


def test_random_prompts_depend_on_the_seed_alone():
    assert h200.random_prompts(3, 5, 49152, seed=1) == h200.random_prompts(3, 5, 49152, seed=1)
    assert h200.random_prompts(3, 5, 49152, seed=1) != h200.random_prompts(3, 5, 49152, seed=2)


def test_a_workload_is_read_as_it_was_written(tmp_path):
    path = tmp_path / "requests.jsonl"
    h200.write_workload(path, [[1, 2], [3]], 4)
    assert h200.read_workload(path) == [
        {"arrival": 0.0, "prompt_token_ids": [1, 2], "max_tokens": 4},
        {"arrival": 0.0, "prompt_token_ids": [3], "max_tokens": 4},
    ]


@pytest.mark.parametrize("batch", [1, 2, 4, 16])
def test_small_batches_run_several_times_with_other_prompts(batch):
    lines = [{"max_tokens": 8, "prompt_token_ids": [i]} for i in range(h200.num_requests([batch]))]
    groups = h200.groups_of(lines, batch)
    assert all(len(group) == batch for group in groups)
    used = [line["prompt_token_ids"][0] for group in groups for line in group]
    assert len(set(used)) == len(used) >= h200.LEAST_REQUESTS


# ── figures of a run ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_time_per_token_counts_tokens_and_not_chunks():
    figures = h200.run_figures(Played([seen((1, 1.0), (4, 2.0), (4, 3.0))]), length=4)
    assert figures["tpot_ms"] == pytest.approx(1e3 * 2.0 / 8)
    assert figures["ttft_ms"] == pytest.approx(1e3)
    assert figures["tokens_per_step"] == 4
    assert figures["acceptance"] == pytest.approx(3 / 4)


def test_the_mean_is_over_requests():
    figures = h200.run_figures(Played([seen((1, 0.0), (1, 1.0)), seen((1, 0.0), (1, 3.0))]), length=0)
    assert figures["tpot_ms"] == pytest.approx(2e3)


def test_a_request_that_got_too_little_spoils_the_run():
    short = Seen(0.0, wanted=8)
    short.add([1, 2], 1.0)
    with pytest.raises(RuntimeError, match="1 of 2 requests"):
        h200.run_figures(Played([seen((1, 0.0), (1, 1.0)), short]), length=0)


def test_tokens_behind_the_first_end_token_are_told():
    assert h200.share_behind_end([5, 2, 5, 5], [2]) == 0.5
    assert h200.share_behind_end([5, 5], [2]) == 0


def test_steps_count_while_everybody_decodes():
    """Of five steps the first two bring first tokens and in the fourth a request ends."""
    lines = [{"max_tokens": 3}, {"max_tokens": 2}]
    given = [["0"], ["1"], ["0"], ["1"], ["0"]]
    names = ("steps", "step_seconds", "draft_seconds", "verify_seconds", "plan_seconds", "verified", "accepted")
    steps = []
    for number, ids in enumerate(given):
        progress = [SimpleNamespace(request_id=who, token_ids=[1]) for who in ids]
        steps.append((float(number), progress, SimpleNamespace(**dict.fromkeys(names, number))))
    played = h200.played_of(lines, 0.0, steps)
    assert played.steps.number == 2
    assert [each.token_ids for each in played.seen] == [[1, 1, 1], [1, 1]]


def test_the_busy_share_is_that_of_the_two_models():
    figures = (Steps(1, 1.0, 0.2, 0.6, 0.1) + Steps(1, 1.0, 0.2, 0.6, 0.1)).figures()
    assert figures["busy"] == pytest.approx(0.8)
    assert figures["step_ms"] == pytest.approx(1e3)
    assert "busy" not in Steps(1, 1.0).figures()


# ── the summary ──────────────────────────────────────────────────────────────────────────────────────────────────────


def full_records():
    return [
        SETUP,
        MODELS,
        run("faser", 0, 1, 4.0, busy=0.97, step_ms=4.0, draft_ms=0.0, verify_ms=3.9),
        run("faser", 0, 1, 4.2, busy=0.97, step_ms=4.2, draft_ms=0.0, verify_ms=4.1),
        run("faser", 4, 1, 2.0, acceptance=0.5),
        run("faser", 2, 1, 2.5, acceptance=0.6),
        run("vllm", 0, 1, 5.0),
        run("vllm", 4, 1, 3.2),
        {"kind": "prefill", "session": 1.0, "engine": "faser", "ttft_ms": 500.0, "last_ms": 900.0},
        {"kind": "prefill", "session": 1.0, "engine": "vllm", "ttft_ms": 480.0, "last_ms": 870.0},
        {"kind": "draft-step", "session": 1.0, "rows": 1, "context": 256, "ms": 0.7, "least_ms": 0.69, "most_ms": 0.8},
        {"kind": "startup", "session": 1.0, "engine": "faser", "mode": "off", "cache": "cold", "seconds": 60.0},
        {"kind": "startup", "session": 1.0, "engine": "vllm", "mode": "off", "cache": "cold", "seconds": 50.0},
    ]


def verdicts(summary):
    return {each["name"].split(":")[0]: each["reached"] for each in summary["targets"]}


def test_repeats_become_medians_and_ratios_are_theirs_over_ours():
    row = h200.summarize(full_records())["off"][0]
    assert row["faser"]["tpot_ms"] == pytest.approx(4.1)
    assert (row["faser"]["least_ms"], row["faser"]["most_ms"], row["faser"]["repeats"]) == (4.0, 4.2, 2)
    assert row["ratio"] == pytest.approx(5.0 / 4.1, abs=1e-3)
    assert row["gap"] == pytest.approx(0.03)
    assert row["same_text"] == 3


def test_the_best_length_meets_the_better_of_their_modes():
    row = h200.summarize(full_records())["speculation"][0]
    assert (row["faser_length"], row["faser_ms"]) == (4, 2.0)
    assert (row["vllm_length"], row["vllm_ms"], row["vllm_off_ms"]) == (4, 3.2, 5.0)
    assert row["ratio"] == pytest.approx(1.6)
    assert row["floor_ms"] == pytest.approx(h200.step_floor_ms(MODELS, 1, 4, 256) / 3.0, abs=1e-3)


def test_no_speculation_is_one_of_the_modes():
    records = [*full_records(), run("vllm", 4, 1, 9.0, session=2.0)]
    assert h200.summarize(records)["speculation"][0]["vllm_length"] == 0


def test_every_target_is_judged():
    assert verdicts(h200.summarize(full_records())) == {
        "off, batch 1": True,
        "speculation, batch 1": True,
        "draft step, one row, ms": True,
        "prefill": True,
        "start-up, off, cold caches": False,
    }


def test_targets_without_a_figure_are_neither_reached_nor_missed():
    alone = [record for record in full_records() if record.get("engine") != "vllm"]
    found = {each["name"]: each["reached"] for each in h200.summarize(alone)["targets"]}
    assert found["off, batch 1: vLLM over FASER"] is None
    assert found["off, batch 1: share without kernels"] is True
    assert found["prefill: FASER over vLLM"] is None


@pytest.mark.parametrize(("batch", "least"), [(1, 1.5), (16, 1.5), (64, 1.2), (128, 1.0), (256, 1.0)])
def test_speculation_must_win_by_less_at_higher_load(batch, least):
    assert h200.least_speculation(batch) == least


def test_a_later_session_replaces_what_it_measured_again_and_keeps_the_rest():
    records = [*full_records(), run("faser", 0, 1, 3.0, session=2.0), {**SETUP, "session": 2.0}]
    summary = h200.summarize(records)
    assert summary["off"][0]["faser"]["tpot_ms"] == 3.0
    assert summary["off"][0]["vllm"]["tpot_ms"] == 5.0


def test_nothing_measured_is_a_summary_too():
    for records in ([], [SETUP], [SETUP, MODELS]):
        summary = h200.summarize(records)
        assert summary["off"] == []
        assert h200.tables(summary)
        json.dumps(summary)


def test_tables_are_markdown_with_empty_cells_where_nothing_was_measured():
    alone = [record for record in full_records() if record.get("engine") != "vllm"]
    table = h200.off_table(h200.summarize(alone)).strip().splitlines()
    assert table[0] == "**Without speculation, ms**"
    heads, rule, row = ([cell.strip() for cell in line.strip("|").split("|")] for line in table[2:])
    assert len(heads) == len(rule) == len(row)
    assert row[heads.index("FASER TPOT")] == "4.10"
    assert row[heads.index("vLLM TPOT")] == row[heads.index("ratio")] == ""


def test_failures_of_the_last_session_are_shown():
    failed = {"kind": "failed", "session": 1.0, "section": "prefill", "engine": "faser", "why": "out of memory"}
    assert "out of memory" in h200.tables(h200.summarize([*full_records(), failed]))
    later = [*full_records(), failed, run("faser", 0, 1, 3.0, session=2.0)]
    assert "out of memory" not in h200.tables(h200.summarize(later))


# ── journal, survey, sections ────────────────────────────────────────────────────────────────────────────────────────


def test_a_line_cut_short_loses_only_itself(tmp_path):
    journal = Journal(tmp_path / "h200.jsonl", 1.0, prints=False)
    journal.add("run", tpot_ms=1.0)
    with journal.path.open("a") as file:
        file.write('{"kind": "run", "tp')
    assert [record["tpot_ms"] for record in h200.read_journal(journal.path)] == [1.0]


def test_longer_drafts_are_left_out_where_shorter_ones_already_lose():
    survey = Survey(tpot={(1, 256): 10.0, (2, 256): 14.0, (1, 1): 4.0, (2, 1): 3.0})
    assert survey.is_hopeless(3, 256)
    assert not survey.is_hopeless(3, 1)
    assert survey.is_contender(2, 1)
    assert not survey.is_contender(1, 1)


class ScriptedPlayer:
    """A second for every token, on no clock but its own."""

    name = "scripted"

    def __init__(self):
        self.played = []

    def prepare(self, length):
        self.length = length

    def play(self, lines):
        if self.length == 3:
            raise RuntimeError("no such graph")
        self.played.append((self.length, len(lines), lines[0]["max_tokens"]))
        chunks = [(1, float(i)) for i in range(lines[0]["max_tokens"])]
        return Played([seen(*chunks) for _ in lines])


@pytest.fixture
def worker(tmp_path):
    (tmp_path / "models.json").write_text(json.dumps({"ends": [2]}))
    h200.write_workload(tmp_path / "requests.jsonl", [[1]] * 8, 30)
    h200.write_workload(tmp_path / "prefill.jsonl", [[1]] * 2, 2)
    args = h200.parse_args(["--tiny", "--worker", "faser", "--folder", str(tmp_path), "--batches", "1,8"])
    return h200.Worker(args, Journal(tmp_path / "h200.jsonl", 1.0, prints=False), "scripted", sys.maxsize)


def test_every_setting_is_warmed_up_once_and_repeated(worker):
    player = ScriptedPlayer()
    h200.measure(worker, player, "off", [0])
    assert player.played[0] == (0, 1, h200.WARM_TOKENS)
    records = h200.read_journal(worker.journal.path)
    assert [(record["batch"], record["tpot_ms"]) for record in records] == [(1, 1e3), (8, 1e3)] * worker.args.repeats


def test_a_section_that_fails_keeps_what_it_measured_and_lets_others_run(worker):
    player = ScriptedPlayer()
    with worker.section("speculation"):
        h200.measure(worker, player, "speculation", [2, 3])
    with worker.section("prefill"):
        h200.measure_prefill(worker, player)
    kinds = [record["kind"] for record in h200.read_journal(worker.journal.path)]
    assert kinds == ["run", "run", "failed", *["prefill"] * worker.args.repeats]
    assert worker.failed


def test_without_time_a_section_says_what_it_left_out(worker):
    worker.until = 0.0
    with worker.section("off"):
        h200.measure(worker, ScriptedPlayer(), "off", [0])
    assert "no time for length 0, batch 1" in h200.read_journal(worker.journal.path)[0]["why"]


# ── the command ──────────────────────────────────────────────────────────────────────────────────────────────────────


def workers(sections, *flags):
    args = h200.parse_args(["--tiny", "--worker", "faser", "--sections", sections, *flags])
    return [(job.worker, job.sections) for job in h200.plan_jobs(args)]


def test_vllm_starts_once_for_all_batches_and_once_for_each_length(tmp_path):
    vllm = ("--vllm-bundle", str(tmp_path), "--vllm-trace", "trace.py", "--vllm-lengths", "2,4")
    assert workers("off,speculation,prefill", *vllm) == [
        ("models", ()),
        ("vllm", ("off", "prefill")),
        ("faser", ("off", "speculation", "prefill")),
        ("vllm", ("speculation",)),
        ("vllm", ("speculation",)),
    ]


def test_faser_is_measured_alone_where_there_is_no_vllm():
    assert workers("draft-step,startup") == [
        ("models", ()),
        ("faser", ("draft-step",)),
        *[("startup", ("startup",))] * 3,
    ]


@pytest.mark.parametrize("flags", [["--sections", "of"], ["--section-seconds", "of=3"]])
def test_an_unknown_section_is_refused(flags, capsys):
    with pytest.raises(SystemExit):
        h200.parse_args(["--tiny", *flags])
    assert "expected some of" in capsys.readouterr().err


FAKE_TRACE = """
import asyncio
from types import SimpleNamespace


class Engine:
    def __init__(self, draft):
        self.tokens = 3 if draft else 1

    async def generate(self, prompt, params, request_id):
        left = params.max_tokens
        while left:
            tokens = [5] * min(left, self.tokens)
            left -= len(tokens)
            await asyncio.sleep(0)
            yield SimpleNamespace(outputs=[SimpleNamespace(token_ids=tokens)])

    def shutdown(self):
        pass


def make_engine(args):
    assert args.model.endswith("target")
    return Engine(args.draft)
"""


def write_fake_vllm(folder):
    package = folder / "bundle" / "vllm"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("from types import SimpleNamespace as SamplingParams\n")
    (package / "sampling_params.py").write_text("class RequestOutputKind:\n    DELTA = 1\n")
    (folder / "trace.py").write_text(FAKE_TRACE)
    return ["--vllm-bundle", str(folder / "bundle"), "--vllm-trace", str(folder / "trace.py")]


def test_one_command_runs_both_and_ends_in_one_json_line(tmp_path, capsys):
    """Tiny models on the CPU, and a vLLM that answers at once: every process, as on the GPU."""
    given = ["--tiny", "--folder", str(tmp_path / "work"), "--out", str(tmp_path / "out"), "--sections", "off"]
    assert h200.main([*given, "--batches", "2", "--repeats", "1", *write_fake_vllm(tmp_path)]) == 0
    printed = capsys.readouterr().out
    summary = json.loads(printed.splitlines()[-1])
    (row,) = summary["off"]
    assert row["faser"]["tokens"] == row["vllm"]["tokens"] == 6 * 8
    assert row["ratio"] is not None
    assert summary["failed"] == []
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["h200.json", "h200.jsonl", "h200.log"]
    assert "**Without speculation, ms**" in printed
