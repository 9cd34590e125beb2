"""What `benchmarks.h200 trace` plays and leaves behind, whatever fails; speed itself is measured elsewhere."""

from __future__ import annotations

import json
import shutil
from types import SimpleNamespace

import pytest

from benchmarks import h200
from benchmarks.lib import trace
from benchmarks.lib.documents import read_document
from benchmarks.lib.trace import Work
from faser.bench.report import page
from faser.bench.systems import PolicySystem
from faser.policy.overlap import Overlap
from faser.traffic.document import Record
from faser.traffic.traces import Timing
from faser.traffic.workload import Vocabulary, WorkloadOptions
from tests.benchmarks.fake_vllm import SCRIPT, write_fake_vllm

LOADS = (0.5, 2.0)


# ── time ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_run_above_saturation_takes_longer_than_its_span():
    assert Work("faser", ("off",)).num_spans(LOADS) == 1 + 2
    assert Work("vllm", ("vLLM K=2",), 2).num_spans(LOADS) > Work("vllm", ("vLLM off",)).num_spans(LOADS)


@pytest.mark.parametrize("seconds", [280.0, 340.0])
def test_the_span_is_what_fits_the_time(seconds):
    works = [Work("faser", ("off", "fixed:2")), Work("vllm", ("vLLM off",))]
    span = trace.fitting_span(works, LOADS, seconds)
    assert sum(work.seconds(LOADS, span) for work in works) == pytest.approx(seconds, abs=0.5)


@pytest.mark.parametrize(("seconds", "span"), [(1.0, trace.LEAST_SPAN), (1e6, trace.MOST_SPAN)])
def test_the_span_has_bounds(seconds, span):
    assert trace.fitting_span([Work("faser", ("off",))], LOADS, seconds) == span


def test_a_process_gets_what_later_ones_leave_and_at_least_its_share(monkeypatch):
    monkeypatch.setattr(trace.time, "time", lambda: 1000.0)
    assert trace.until_of(1100.0, own=20.0, later=30.0) == 1070.0
    assert trace.until_of(1100.0, own=100.0, later=300.0) == 1025.0


class ScriptedOff:
    """A closed loop of which two end every second, from the fifth on."""

    def warm_up(self, workload, size, stopped):
        pass

    def play(self, workload, stopped, update):
        ends = []
        while not stopped():
            ends += [5.0 + len(ends) / 2] * 2
            update(len(ends))
        ended = [Record(i, "", 4, 0.0, 1.0, end, 1) for i, end in enumerate(ends)]
        return SimpleNamespace(records=[*ended, Record(len(ended), "", 4, 6.0, None, None, 0)])


def test_the_saturation_rate_is_that_of_a_full_loop():
    args = SimpleNamespace(max_running=4, span=1.0, until=float("inf"))
    traffic = WorkloadOptions(trace="azure-conv", timing=Timing(span=1.0), max_prompt=8, max_output=4, prompts="random")
    vocabulary = Vocabulary(64, 64, None)
    assert trace.saturation_rate(args, ScriptedOff(), traffic, vocabulary) == pytest.approx(2.0)
    args.until = 0.0
    with pytest.raises(TimeoutError, match="give --rate"):
        trace.saturation_rate(args, ScriptedOff(), traffic, vocabulary)


def test_every_rung_of_the_ladder_sets_its_mechanisms(monkeypatch):
    engine = SimpleNamespace(exits="exits", scheduler=SimpleNamespace(overlap="overlap"))
    seen = []
    monkeypatch.setattr(
        PolicySystem, "warm_up", lambda self, *_: seen.append((self.name, engine.exits, engine.scheduler.overlap))
    )
    rungs = trace.ladder(engine, ["fixed:2", "faser"])
    for rung in rungs:
        rung.warm_up(None, 1, None)
    assert [rung.name for rung in rungs] == ["fixed:2", "faser", "+ early exit", "+ overlap", "+ overlap on"]
    *others, (name, exits, forced) = seen
    assert others == [
        ("fixed:2", None, None), ("faser", None, None), ("faser", "exits", None), ("faser", "exits", "overlap"),
    ]  # fmt: skip
    assert (name, exits, type(forced)) == ("faser", "exits", Overlap)


# ── the command ──────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--policies", "off,quick"], "quick"),
        (["--loads", "0.5,0"], "above 0"),
        (["--slo", "speed=1"], "expected seconds by name"),
        (["--trace", "no.csv"], "no such file"),
        (["--target", "no.gguf"], "does not exist"),
        (["--vllm-trace", __file__], "together"),
        (["--resume"], "holds no workloads"),
        (["--report-only", "nowhere"], "does not exist"),
    ],
)
def test_what_cannot_work_is_refused_at_once(flags, message, capsys, tmp_path):
    with pytest.raises(SystemExit):
        h200.parse_args(["trace", *flags, "--folder", str(tmp_path)])
    assert message in capsys.readouterr().err


def test_a_resumed_run_has_the_same_traffic(capsys, tmp_path):
    given = ["trace", "--tiny", "--folder", str(tmp_path), "--rate", "7"]
    args = h200.parse_args(given)
    args.work.mkdir()
    plan = {"traffic": trace.traffic_of(args), "saturation": 7.0, "rates": []}
    trace.plan_file(args).write_text(json.dumps(plan))
    assert h200.parse_args([*given[:4], "--resume"]).rate == 7.0
    with pytest.raises(SystemExit):
        h200.parse_args([*given, "--resume", "--loads", "0.5"])
    assert "the last call had --loads [0.5, 1.5]" in capsys.readouterr().err


TINY = ["trace", "--tiny", "--device", "cpu", "--folder"]
OUTPUTS = {"results.json", "tables.txt", "report.html", "trace.jsonl", "trace.log"}


@pytest.fixture(scope="module")
def faser_alone(tmp_path_factory):
    """A folder in which FASER has played: tiny models on the CPU, every process as on the GPU."""
    folder = tmp_path_factory.mktemp("faser")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("OUT", raising=False)
        patch.setenv("OMP_NUM_THREADS", "1")  # tiny products wait for threads longer than they compute
        patch.setattr(page, "browser", lambda: None)
        assert h200.main([*TINY, str(folder)]) == 0
    return folder


@pytest.fixture
def given(faser_alone, tmp_path, monkeypatch):
    """The flags of a second call."""
    shutil.copytree(faser_alone, tmp_path / "work")
    monkeypatch.setenv("OUT", str(tmp_path / "out"))
    monkeypatch.setattr(page, "browser", lambda: None)
    return [*TINY, str(tmp_path / "work"), "--resume"]


def last_line(capsys):
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_faser_plays_every_load_under_every_policy(faser_alone):
    document = read_document(faser_alone / "results.json")
    slow, fast = (load["rate"] for load in document.workload["loads"])
    assert fast == pytest.approx(3 * slow, rel=0.01)
    assert [(run.system, run.rate) for run in document.runs] == [
        ("off", slow), ("fixed:1", slow), ("off", fast), ("fixed:1", fast)
    ]  # fmt: skip
    assert all(run.records and not run.partial and not run.summary["lost"] for run in document.runs)
    assert {path.name for path in faser_alone.iterdir()} >= OUTPUTS


def test_vllm_plays_the_same_files_and_all_is_one_document(given, faser_alone, tmp_path, capsys):
    """A vLLM that answers at once, in processes of its own."""
    assert h200.main([*given, *write_fake_vllm(tmp_path)]) == 0
    line = last_line(capsys)
    before = read_document(faser_alone / "results.json").without_details().to_dict()["runs"]
    assert line["runs"][:4] == before
    theirs = line["runs"][4:]
    assert [run["system"] for run in theirs] == ["vLLM off"] * 2 + ["vLLM K=2"] * 2
    for ours, other in zip([before[0], before[2]] * 2, theirs, strict=True):
        assert ours["rate"] == other["rate"]
        for name in ("requests", "output_tokens", "lost"):
            assert ours["summary"][name] == other["summary"][name]
        assert ours["categories"].keys() == other["categories"].keys()
    assert line["about"]["failed"] == []
    assert line["about"]["vLLM K=2"]["version"] == "untold"
    assert {path.name for path in (tmp_path / "out").iterdir()} == OUTPUTS


def test_the_report_is_made_again_from_the_document_alone(faser_alone, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(page, "browser", lambda: None)
    assert h200.main(["trace", "--report-only", str(faser_alone), "--folder", str(tmp_path)]) == 0
    assert len(last_line(capsys)["runs"]) == 4
    assert {path.name for path in tmp_path.iterdir()} == {"results.json", "tables.txt", "report.html"}
    assert (tmp_path / "report.html").read_text() == (faser_alone / "report.html").read_text()


def test_a_process_that_dies_is_reported_and_the_others_run(given, tmp_path, capsys):
    script = "import sys\nif '--only-length=0' in sys.argv:\n    raise ImportError('no vLLM here')\n" + SCRIPT
    assert h200.main([*given, *write_fake_vllm(tmp_path, script)]) == 1
    printed = capsys.readouterr().out
    assert "no vLLM here" in printed
    line = json.loads(printed.splitlines()[-1])
    assert {run["system"] for run in line["runs"]} == {"off", "fixed:1", "vLLM K=2"}
    assert line["about"]["failed"] == ["vLLM off, all: ended with status 1"]


def test_without_models_nothing_is_played(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("OUT", raising=False)
    (tmp_path / "models.json").write_text('{"tiny": false}')
    assert h200.main([*TINY, str(tmp_path)]) == 1
    assert last_line(capsys)["failed"] == ["models, all: ended with status 1"]
