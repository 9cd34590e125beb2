"""The command, end to end on a small model."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from dataclasses import replace

import pytest

from faser.bench import command
from faser.bench.command import Asked
from faser.bench.estimate import Estimate, MeasuredPace
from faser.bench.results import read_against
from faser.bench.table import render
from faser.cli.main import main, make_parser
from faser.errors import ConfigError, EngineError
from faser.traffic import play as player
from faser.traffic.document import FIGURES, Document
from faser.traffic.workload import Load
from tests.bench.make_example import PATH, make_example
from tests.bench.stub_server import BUSY, FINE, serving
from tests.test_imports import run as behind_the_wall

TRAFFIC = ["--arrivals", "poisson:60", "--duration", "0.2", "--prompt-len", "8..20", "--output-len", "2..9",
           "--warmup", "2"]  # fmt: skip


@pytest.fixture
def model(folder):
    return ["--model", str(folder), "--draft", "ngram", "--device", "cpu"]


def bench(capsys, *given, status=0):
    assert main(["bench", *given]) == status
    captured = capsys.readouterr()
    *lines, last = captured.out.splitlines()
    return lines, json.loads(last), captured.err


def asked(*given):
    return Asked.of(make_parser().parse_args(["bench", *given]))


def test_policies_get_the_same_requests_and_the_result_is_a_table_and_one_line(model, capsys, tmp_path):
    out, saved = tmp_path / "results" / "a.json", tmp_path / "w.jsonl"
    lines, document, err = bench(
        capsys, *model, *TRAFFIC, "--policies", "off,fixed:1..2", "--repeats", "2", "--slo", "ttft=5",
        "--out", str(out), "--save-workload", str(saved),
    )  # fmt: skip
    assert re.search(r"^faser: .* requests/s: \d+ requests, 3 policies, 2 repeats, about \d+ s$", err, re.M)
    assert [line.split()[0] for line in lines[2:5]] == ["off", "fixed:1", "fixed:2"]
    assert [(run["system"], run["repeat"]) for run in document["runs"]] == [
        (system, repeat) for repeat in (0, 1) for system in ("off", "fixed:1", "fixed:2")
    ]
    assert len({run["summary"]["output_tokens"] for run in document["runs"]}) == 1
    assert all(run["summary"]["lost"] == 0 and tuple(run["summary"]) == FIGURES for run in document["runs"])
    assert all(not run["records"] and not run["moments"] for run in document["runs"])
    assert [group["repeats"] for group in document["groups"]] == [2, 2, 2]
    assert document["command"][:2] == ["faser", "bench"]
    whole = json.loads(out.read_text())
    assert all(len(run["records"]) == len(saved.read_text().splitlines()) for run in whole["runs"])
    assert Document.from_dict(whole).to_dict() == whole

    lines, again, _ = bench(capsys, *model, "--workload", str(saved), "--policies", "off", "--against", f"old={out}")
    assert again["runs"][0]["summary"]["output_tokens"] == document["runs"][0]["summary"]["output_tokens"]
    assert [group["system"] for group in again["groups"]] == ["off", "old off", "old fixed:1", "old fixed:2"]
    assert "against old off" in lines[-2]


def test_every_rate_and_every_concurrency_is_a_table(model, capsys):
    lines, document, _ = bench(capsys, *model, *TRAFFIC, "--rate", "40", "--loads", "1,2", "--policies", "fixed:1")
    assert [group["rate"] for group in document["groups"]] == [40.0, 80.0]
    assert [load["rate"] for load in document["workload"]["loads"]] == [40.0, 80.0]
    assert lines[0] == "40 requests/s"
    closed = ["--concurrency", "1,3", "--requests", "5", "--prompt-len", "8", "--output-len", "3", "--warmup", "0"]
    lines, document, _ = bench(capsys, *model, *closed, "--policies", "off", "--prompts", "random")
    assert [group["concurrency"] for group in document["groups"]] == [1, 3]
    assert lines[0] == "1 at a time"


SIGNALS = [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")]
ENDED_EARLY = ["--concurrency", "2", "--requests", "12", "--prompt-len", "8", "--output-len", "4", "--warmup", "0"]


@pytest.fixture(params=[signal.default_int_handler, signal.SIG_IGN], ids=["in the foreground", "in the background"])
def handlers(request):
    """As a shell leaves them: a job in the background has SIGINT ignored."""
    before = {number: signal.getsignal(number) for number, _, _ in SIGNALS}
    signal.signal(signal.SIGINT, request.param)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield {signal.SIGINT: request.param, signal.SIGTERM: signal.SIG_DFL}
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def uncalibrated(monkeypatch):
    """Every request that is sent is one of a run."""
    estimate = Estimate((MeasuredPace(1, 100.0, 100.0),))
    monkeypatch.setattr(command, "size_traffic", lambda asked, system, vocabulary: (asked, estimate))


def raise_at(monkeypatch, *numbers):
    """A signal after each of these requests, counted over all runs."""
    send, sent = player.Ledger.send, []

    def interrupted(self, engine, index, item, arrival):
        accepted = send(self, engine, index, item, arrival)
        sent.append(index)
        for at, number in numbers:
            if len(sent) == at:
                signal.raise_signal(number)
        return accepted

    monkeypatch.setattr(player.Ledger, "send", interrupted)


@pytest.mark.parametrize(("number", "status", "word"), SIGNALS)
def test_a_signal_still_writes_what_was_measured(
    number, status, word, model, capsys, monkeypatch, tmp_path, handlers, uncalibrated
):
    raise_at(monkeypatch, (20, number))
    monkeypatch.setattr("faser.bench.report.page.browser", lambda: None)
    out, page = tmp_path / "a.json", tmp_path / "page"
    lines, document, err = bench(
        capsys, *model, *ENDED_EARLY, "--policies", "off,fixed:1,fixed:2", "--out", str(out), "--report", str(page),
        status=status,
    )  # fmt: skip
    assert [(run["system"], run["partial"]) for run in document["runs"]] == [("off", False), ("fixed:1", True)]
    assert err.endswith(f"faser: {word}; the runs measured so far are kept\n")
    assert any("fixed:1 (partial)" in line for line in lines)
    assert len(json.loads(out.read_text())["runs"]) == 2
    assert "fixed:1" in (page / "report.html").read_text()
    assert {number: signal.getsignal(number) for number in handlers} == handlers


@pytest.mark.parametrize(("number", "status", "word"), SIGNALS)
def test_a_signal_in_the_warm_up_of_the_first_run_leaves_nothing(
    number, status, word, model, capsys, monkeypatch, handlers, uncalibrated
):
    raise_at(monkeypatch, (1, number))
    assert main(["bench", *model, *ENDED_EARLY[:-1], "1"]) == status
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines()[-1] == f"faser: {word}"


def test_a_second_sigterm_ends_the_command_at_once(model, monkeypatch, handlers, uncalibrated):
    raise_at(monkeypatch, (5, signal.SIGTERM), (6, signal.SIGTERM))
    monkeypatch.setattr(command.Interrupts, "__call__", lambda self: False)  # a step that takes long
    with pytest.raises(SystemExit) as ended:
        main(["bench", *model, *ENDED_EARLY])
    assert ended.value.code == 143


def test_a_sigterm_while_a_model_is_loaded_ends_the_command(model, monkeypatch, handlers):
    monkeypatch.setattr(command, "load_engine", lambda *_: signal.raise_signal(signal.SIGTERM))
    with pytest.raises(SystemExit) as ended:
        main(["bench", *model])
    assert ended.value.code == 143
    assert signal.getsignal(signal.SIGTERM) == handlers[signal.SIGTERM]


BROWSER = """#!/bin/sh
exec 3> {fifo}
(sleep 60; echo survived >&3) &
kill -INT $PPID
kill -TERM $PPID
wait
"""


PROGRAM = """
import subprocess, sys, time
import faser.cli.main

start = subprocess.Popen.__init__

def slow_start(self, *given, **named):
    start(self, *given, **named)
    time.sleep({delay})

subprocess.Popen.__init__ = slow_start
sys.exit(faser.cli.main.main({given!r}))
"""


@pytest.mark.parametrize("delay", [0, 1], ids=["once started", "while it starts"])
def test_a_run_cut_by_sigterm_leaves_no_process_and_no_temporary_file(delay, folder, tmp_path):
    """Two signals while a browser draws the report. The browser's helper holds a pipe, which closes when it ends.

    The signals differ: two of one kind that come close together are delivered as one.
    """
    fifo, temporary, browser = tmp_path / "fifo", tmp_path / "temporary", tmp_path / "bin" / "chromium"
    os.mkfifo(fifo)
    temporary.mkdir()
    browser.parent.mkdir()
    browser.write_text(BROWSER.format(fifo=fifo))
    browser.chmod(0o755)
    given = ["bench", "--model", str(folder), "--draft", "ngram", "--device", "cpu", "--policies", "off", *ENDED_EARLY,
             "--report", str(tmp_path / "page"), "--out", str(tmp_path / "a.json")]  # fmt: skip
    environment = {**os.environ, "TMPDIR": str(temporary), "PATH": f"{browser.parent}:{os.environ['PATH']}"}
    held = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(delay=delay, given=given)],
        env=environment, capture_output=True, text=True,
    )  # fmt: skip
    os.set_blocking(held, True)
    assert os.read(held, 100) == b""
    os.close(held)
    assert done.returncode == 143, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["runs"]
    assert {path.name for path in tmp_path.iterdir()} >= {"a.json", "page"}
    assert (tmp_path / "page" / "report.html").is_file()
    assert list(temporary.iterdir()) == []


def test_runs_measured_before_an_error_are_kept(model, capsys, monkeypatch):
    given = [*model, "--concurrency", "1", "--requests", "2", "--prompt-len", "8", "--output-len", "2"]

    def fails_later(engine, policy):
        if policy == "fixed:1":
            raise EngineError("no graphs today")

    monkeypatch.setattr("faser.bench.systems.set_policy", fails_later)
    _, document, err = bench(capsys, *given, "--policies", "off,fixed:1", status=1)
    assert [run["system"] for run in document["runs"]] == ["off"]
    assert err.endswith("\nfaser: no graphs today\n")


def test_the_engine_is_driven_without_what_only_servers_need(folder):
    """A machine with a GPU may have torch and little else."""
    given = ["bench", "--model", str(folder), "--draft", "ngram", "--device", "cpu", *TRAFFIC]
    lacking = ("msgspec", "starlette", "uvicorn", "uvloop", "httptools", "gguf", "matplotlib", "prometheus_client",
               "shtab", "llguidance", "huggingface_hub")  # fmt: skip
    done = behind_the_wall(f"import sys, faser.cli.main; sys.exit(faser.cli.main.main({given!r}))", lacking)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["version"] == 1


def workload_file(tmp_path, *kinds):
    path = tmp_path / "w.jsonl"
    items = [{"arrival": 0.0, "prompt_token_ids": [kind, 1], "max_tokens": 3} for kind in kinds]
    path.write_text("\n".join(map(json.dumps, items)))
    return str(path)


def test_a_server_is_played_without_a_model_and_its_losses_are_counted(capsys, tmp_path):
    with serving() as stub:
        given = ["--url", stub.url, "--workload", workload_file(tmp_path, FINE, BUSY, FINE), "--api-key", "secret"]
        _, document, err = bench(capsys, *given)
        assert (document["runs"][0]["summary"]["requests"], document["runs"][0]["summary"]["lost"]) == (3, 1)
        assert document["runs"][0]["summary"]["acceptance"] == 0.5
        assert "1 of 3 requests lost: status 503: try again later" in err
        assert "secret" not in json.dumps(document)
        _, _, err = bench(capsys, "--url", stub.url, "--workload", workload_file(tmp_path, BUSY, BUSY), status=1)
        assert "no request of the calibration was answered, so the duration is unknown" in err
        assert "all at once: 2 requests, 1 system, 0 s or more" in err


def test_another_server_is_a_row_of_the_table(model, capsys, tmp_path):
    with serving() as stub:
        lines, document, _ = bench(
            capsys, *model, "--workload", workload_file(tmp_path, FINE, FINE), "--policies", "off",
            "--against", f"vLLM K=4={stub.url}",
        )  # fmt: skip
    assert [run["system"] for run in document["runs"]] == ["off", "vLLM K=4"]
    assert "against vLLM K=4" in lines[-2]


def test_an_unreachable_server_is_an_error_in_one_line(capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        assert main(["bench", "--url", f"http://127.0.0.1:{taken.getsockname()[1]}"]) == 1
    assert "cannot be reached" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["--policies", "warp"], "policy 'warp': expected off, or fixed:K"),
        (["--policies", "fixed:3..1"], "expected a rising range"),
        (["--policies", "fixed:1..99"], "to 32 at most"),
        (["--model", "x", "--policies", "fixed:1"], "needs a draft"),
        (["--url", "http://x", "--policies", "off"], "--policies is for FASER in this process"),
        (["--rate", "fast"], "--rate fast: expected numbers above 0"),
        (["--rate", "1,2", "--loads", "1"], "multiples of one --rate"),
        (["--rate", "1", "--scale", "2"], "both set the rate"),
        (["--concurrency", "4", "--rate", "1"], "closed loop"),
        (["--concurrency", "1.5"], "whole numbers"),
        (["--repeats", "0"], "--repeats 0"),
        (["--warmup", "-1"], "--warmup -1"),
        (["--request-timeout", "0"], "--request-timeout 0"),
        (["--prompt-len", "many"], "--prompt-len many"),
        (["--slo", "fast"], "expected seconds by name"),
        (["--against", "nowhere.json"], "no such file"),
        (["--workload", "w", "--trace", "azure-conv"], "--trace makes a workload"),
        (["--workload", "nowhere.jsonl"], "--workload nowhere.jsonl: cannot be read"),
        (["--trace", "nowhere"], "trace nowhere: no such file"),
        (["--prompts", "nowhere"], "--prompts nowhere: no such file"),
        (["--trace", "nowhere", "--loads", "1,2"], "trace nowhere: no such file"),
        (["--arrivals", "steady:1", "--loads", "1"], "--arrivals steady:1"),
    ],
)
def test_what_cannot_work_is_refused_before_a_model_is_loaded(given, says):
    with pytest.raises(ConfigError, match=says):
        asked(*given)


def test_ranges_are_expanded():
    assert asked("--policies", "off,fixed:0,fixed:1..3,fixed:2").policies == ("off", "fixed:1", "fixed:2", "fixed:3")
    assert [load.rate for load in asked("--rate", "2", "--loads", "0.5..1.5:3,4").loads] == [1.0, 2.0, 3.0, 8.0]
    assert asked().policies == ("off", "faser")
    assert asked("--model", "x").policies == ("off",)


# ── documents and the results of others ──────────────────────────────────────────────────────────────────────────────


def test_the_example_is_what_its_script_makes_and_survives_a_round():
    written = json.loads(PATH.read_text())
    assert json.loads(json.dumps(Document.from_dict(written).to_dict())) == written
    made = json.loads(json.dumps(make_example().to_dict()))
    assert made["groups"] == written["groups"]


@pytest.mark.parametrize("given", [{}, {"version": 2}, {"version": 1}, {"version": 1, "command": [], "runs": [1]}])
def test_a_file_that_is_not_a_document_is_refused(given):
    with pytest.raises(ConfigError, match="not a document of faser bench"):
        Document.from_dict(given)


@pytest.fixture(scope="module")
def example():
    return Document.from_dict(json.loads(PATH.read_text()))


def test_the_table_marks_the_best_and_compares(example):
    lines = render(example, "off").splitlines()
    assert lines[0] == "4 requests/s"
    off, fixed = lines[2].split(), lines[3].split()
    assert off[-2:] == ["1.00", "1.00"]
    assert float(fixed[-1]) > 1
    assert fixed[2].endswith("*")


RECORD = {"arrival": 1.0, "ttft": 0.5, "latency": 2.5, "finished_at": 3.5, "prompt_tokens": 9, "token_ids": [1] * 5}


def test_the_records_of_another_system_get_the_same_figures(tmp_path):
    path = tmp_path / "vllm.jsonl"
    others = [RECORD, RECORD | {"arrival": 2.0, "finished_at": 4.5}]
    path.write_text("".join(json.dumps(record) + "\n" for record in others))
    (run,) = read_against(path, "vLLM", [Load(3.0)], None)
    assert (run.system, run.policy, run.rate) == ("vLLM", None, 3.0)
    assert run.summary["latency_per_token_mean"] == pytest.approx(0.5)
    assert run.summary["tpot_mean"] == pytest.approx(0.5)
    assert run.summary["seconds"] == pytest.approx(3.5)
    (run,) = read_against(path, "vLLM", [Load(0.99), Load(5.0)], None)
    assert run.rate == 0.99


SUMMARY = {"requests": 2, "output_tokens": 10, "makespan_s": 4.0, "output_tokens_per_s": 2.5, "mean_ms_per_token": 500,
           "p99_ms_per_token": 600, "mean_tpot_ms": 400, "mean_ttft_ms": 50, "p99_ttft_ms": 70}  # fmt: skip


def test_the_summary_of_another_system_is_converted_to_our_units(tmp_path):
    path = tmp_path / "vllm.json"
    path.write_text(json.dumps(SUMMARY))
    (run,) = read_against(path, "vLLM", [Load(3.0)], None)
    assert run.summary["latency_per_token_p99"] == pytest.approx(0.6)
    assert run.summary["tpot_p99"] is None
    path.write_text(json.dumps({"closed_loop": [SUMMARY | {"batch": 1}, SUMMARY | {"batch": 8}]}))
    runs = read_against(path, "vLLM", [Load(concurrency=1), Load(concurrency=8)], None)
    assert [run.concurrency for run in runs] == [1, 8]


@pytest.mark.parametrize("text", ["", "{}", "[1]", "x", '{"version": 9}', '{"token_ids": []}'])
def test_a_file_without_results_is_refused(tmp_path, text):
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match="--against"):
        read_against(path, "x", [Load()], None)


def test_a_line_of_output_holds_no_records(example):
    short = example.without_details()
    assert replace(short, runs=()) == replace(example, runs=())
    assert not any(run.records or run.moments for run in short.runs)


def test_without_a_draft_off_is_the_default_policy():
    args = make_parser().parse_args(["bench", "--draft", "none"])
    assert command._policies(args) == ("off",)
