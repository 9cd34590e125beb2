"""The command, end to end, and without what it does not need."""

import json
from dataclasses import replace

import pytest

from faser.bench.results import run_document
from faser.bench.simulate import SimulatedSystem
from faser.cli.main import main, make_parser
from faser.policy import POLICIES, make_policy
from faser.sim.oracle import Replay
from faser.sim.replica import PROFILES, Machine, load_profile, make_replica
from faser.traffic.document import FIGURES, Document
from faser.traffic.play import play
from faser.traffic.summary import Slo
from faser.traffic.traces import Timing
from faser.traffic.workload import Load, Vocabulary, WorkloadOptions, make_workload
from tests.bench.make_example import PATH
from tests.sim.toy import PROFILE
from tests.test_imports import run as behind_the_wall

TRAFFIC = ["--arrivals", "poisson:20", "--duration", "1", "--prompt-len", "50..200", "--output-len", "5..40"]


def simulate(capsys, *given, status=0):
    assert main(["simulate", *given]) == status
    captured = capsys.readouterr()
    *lines, last = captured.out.splitlines()
    return lines, json.loads(last), captured.err


def test_the_result_is_that_of_bench(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("faser.bench.report.page.browser", lambda: None)  # it takes seconds to draw
    out, report = tmp_path / "a.json", tmp_path / "report"
    lines, document, _ = simulate(
        capsys, *TRAFFIC, "--policies", "off,fixed:1..2", "--slo", "ttft=0.1", "--repeats", "2",
        "--out", str(out), "--report", str(report),
    )  # fmt: skip
    assert [line.split()[0] for line in lines[2:5]] == ["off", "fixed:1", "fixed:2"]
    assert all(tuple(run["summary"]) == FIGURES and run["summary"]["lost"] == 0 for run in document["runs"])
    assert not any(run["records"] for run in document["runs"])
    assert len({run["summary"]["output_tokens"] for run in document["runs"]}) == 1
    assert document["about"]["simulated"] is True
    assert document["about"]["profile"] == "h200-8b-1b"
    assert document["about"]["kv_tokens"] == 790_000
    whole = json.loads(out.read_text())
    assert all(len(run["records"]) == run["summary"]["requests"] for run in whole["runs"])
    assert Document.from_dict(whole).to_dict() == whole
    assert "simulated" in (report / "report.html").read_text()


def test_the_summary_is_that_of_a_run_through_the_engine(capsys):
    _, document, _ = simulate(capsys, *TRAFFIC, "--policies", "fixed:2", "--slo", "ttft=0.1")
    options = WorkloadOptions(
        arrivals="poisson:20", timing=Timing(duration=1.0), prompt_len=(50, 200), output_len=(5, 40)
    )
    workload = make_workload(options, Load(), Vocabulary(1, 4096, None, is_blank=True))
    oracle = Replay.shipped().oracle([item.category for item in workload.items], 0)
    machine = Machine(profile=load_profile("h200-8b-1b"), kv_tokens=790_000, max_step_ms=50.0)
    replica = make_replica(machine, "fixed:2", oracle)
    run = play(replica.engine, workload, "fixed:2", clock=replica.time.clock)
    made = run_document(run, policy="fixed:2", load=Load(), repeat=0, slo=Slo({"ttft": 0.1}))
    said = document["runs"][0]
    assert said["summary"] == {name: value and round(value, 6) for name, value in made.summary.items()}
    assert list(said["categories"]) == list(made.categories)


@pytest.mark.parametrize("replicas", ["1", "3", "40"])
def test_the_same_seed_gives_the_same_figures(capsys, replicas):
    given = [*TRAFFIC, "--policies", "off,fixed:2", "--acceptance", "0.7:0.1", "--replicas", replicas,
             "--max-running", "8", "--noise", "0.05"]  # fmt: skip
    first, again = (simulate(capsys, *given)[1] for _ in range(2))
    other = simulate(capsys, *given, "--seed", "1")[1]
    assert first["runs"] == again["runs"]
    assert [run["summary"] for run in first["runs"]] != [run["summary"] for run in other["runs"]]


def test_a_repeat_draws_other_outcomes_and_all_policies_get_the_same():
    workload = make_workload(WorkloadOptions(requests=10), Load(5.0), Vocabulary(1, 4096, None, is_blank=True))
    machine = Machine(profile=PROFILE)
    one, two = (SimulatedSystem(name, machine, Replay.shipped()) for name in ("fixed:3", "fixed:3"))
    runs = [system.play(workload, lambda: False, lambda ended: None) for system in (one, one, two)]
    assert runs[0] == runs[2]
    assert runs[0].records != runs[1].records


def test_a_cluster_reports_figures_per_gpu(capsys):
    for replicas in ("2", "30"):
        lines, document, _ = simulate(
            capsys, *TRAFFIC, "--policies", "off,fixed:2", "--replicas", replicas, "--max-running", "8"
        )
        assert any(line.startswith("per GPU") for line in lines)
        for run in document["runs"]:
            about = run["about"]
            assert about["replicas"] == int(replicas)
            assert about["output_tokens_per_s_per_gpu"] == pytest.approx(
                run["summary"]["output_tokens_per_s"] / int(replicas), rel=1e-4
            )
            assert 0 < about["busy_share"] <= 1


def test_a_trace_is_repeated_to_reach_a_higher_rate(capsys):
    given = ["--trace", "azure-code", "--duration", "60", "--span", "2", "--rate", "300", "--max-output", "8"]
    _, document, _ = simulate(capsys, *given, "--policies", "off", "--replicas", "20", "--max-running", "4")
    (load,) = document["workload"]["loads"]
    assert load["num_requests"] == 600
    assert load["seconds"] < 2


def test_measured_results_stand_beside_and_lend_their_acceptance(capsys):
    given = [*TRAFFIC, "--policies", "off,fixed:3", "--acceptance", str(PATH), "--against", f"real={PATH}"]
    lines, document, _ = simulate(capsys, *given)
    systems = {run["system"] for run in document["runs"]}
    assert systems == {"off", "fixed:3", "real off", "real fixed:3"}
    assert "against real off" in lines[-2]


def test_lost_requests_are_counted_and_reported(capsys, tmp_path):
    path = tmp_path / "w.jsonl"
    items = [{"arrival": 0.1 * i, "prompt_token_ids": [1] * 40, "max_tokens": most} for i, most in enumerate((5, 99))]
    path.write_text("\n".join(map(json.dumps, items)))
    given = ["--workload", str(path), "--policies", "off", "--max-model-len", "100"]
    _, document, err = simulate(capsys, *given)
    assert document["runs"][0]["summary"]["lost"] == 1
    assert "1 of 2 requests lost: 40 prompt tokens + max_tokens 99 = 139" in err


def test_every_policy_by_name_can_be_simulated(capsys):
    names = ",".join(POLICIES)
    _, document, _ = simulate(capsys, *TRAFFIC, "--policies", names, "--requests", "6", "--max-running", "8")
    assert [run["policy"] for run in document["runs"]] == [make_policy(name).name for name in POLICIES]
    assert all(run["summary"]["lost"] == 0 for run in document["runs"])


def test_neither_torch_nor_a_tokenizer_is_needed():
    given = ["simulate", *TRAFFIC, "--policies", "off,fixed:2", "--replicas", "2"]
    lacking = ("torch", "tokenizers", "transformers", "safetensors", "huggingface_hub", "gguf", "msgspec", "starlette",
               "uvicorn", "llguidance", "rich", "jinja2", "shtab", "prometheus_client")  # fmt: skip
    done = behind_the_wall(f"import sys, faser.cli.main; sys.exit(faser.cli.main.main({given!r}))", lacking)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["version"] == 1


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["--policies", "warp"], "policy 'warp'"),
        (
            ["--profile", "b200"],
            "--profile b200: no such file; give one that `faser profile` wrote, or one of h200-32b-0",
        ),
        (["--acceptance", "often"], "--acceptance often: cannot be read"),
        (["--acceptance", "2"], "expected a probability"),
        (["--replicas", "0"], "--replicas 0: expected"),
        (["--max-running", "0"], "--max-running 0: expected"),
        (["--max-running", "64", "--max-batch-tokens", "32"], "--max-running 64 exceeds --max-batch-tokens 32"),
        (["--kv-tokens", "0"], "--kv-tokens 0: expected"),
        (["--max-step-ms", "-1"], "--max-step-ms -1: expected milliseconds"),
        (["--page-size", "-1"], "--page-size -1: expected"),
        (["--draft-window", "63"], "--draft-window 63: expected off or at least 64"),
        (["--noise", "2"], "--noise 2: expected a share"),
        (["--replicas", "100", "--concurrency", "8"], "step by step, with 16 --replicas at most"),
        (["--replicas", "17", "--offload", "auto"], "--offload is simulated step by step"),
        (["--against", "http://localhost:1"], "no server plays in simulated time"),
        (["--repeats", "0"], "--repeats 0"),
        (["--slo", "fast"], "expected seconds by name"),
        (["--trace", "nowhere"], "trace nowhere: no such file"),
    ],
)
def test_what_cannot_work_is_refused(capsys, given, says):
    assert main(["simulate", *given]) == 1
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--url", "--save-workload", "--temperature", "--model"])
def test_options_of_bench_alone_are_refused(option, capsys):
    with pytest.raises(SystemExit):
        make_parser().parse_args(["simulate", option, "x"])
    assert f"unknown argument {option}" in capsys.readouterr().err


def test_a_profile_may_be_a_file_and_a_wrong_file_is_refused(capsys, tmp_path):
    path = tmp_path / "toy.json"
    PROFILE.save(path)
    _, document, _ = simulate(capsys, *TRAFFIC, "--profile", str(path), "--policies", "off", "--max-running", "8")
    assert document["about"]["device"] == "toy, simulated"
    assert document["about"]["kv_tokens"] == 8 * 4096
    path.write_text("{}")
    assert main(["simulate", "--profile", str(path)]) == 1
    assert "cannot be read as a profile" in capsys.readouterr().err


@pytest.mark.parametrize("path", sorted(PROFILES.glob("*.json")), ids=lambda path: path.stem)
def test_the_shipped_profiles_are_complete_and_described(path):
    profile = load_profile(path.stem)
    assert {"device", "model", "draft"} <= profile.about.keys()
    assert profile.verify.is_stepped
    assert profile.about["kv_tokens"] > 0


@pytest.mark.parametrize("path", sorted(PROFILES.glob("*.json")), ids=lambda path: path.stem)
def test_a_shipped_profile_says_how_many_tokens_the_gpu_holds(path):
    about = load_profile(path.stem).about
    assert about["kv_tokens"] > 100_000
    assert {"device", "model", "draft"} <= about.keys()


def test_the_window_is_the_one_that_is_given_or_that_of_the_profile(capsys, tmp_path):
    path = tmp_path / "toy.json"
    replace(PROFILE, about={**PROFILE.about, "draft_window": 96}).save(path)
    given = [*TRAFFIC, "--profile", str(path), "--policies", "fixed:2", "--max-running", "8"]
    for more, window in (([], 96), (["--draft-window", "80"], 80), (["--draft-window", "off"], None)):
        _, document, _ = simulate(capsys, *given, *more)
        assert document["about"]["draft_window"] == window


def test_offload_is_asked_for_and_told(capsys):
    given = ["--arrivals", "poisson:60", "--duration", "3", "--output-len", "100", "--policies", "off,nightjar"]
    _, without, _ = simulate(capsys, *given, "--kv-tokens", "4000")
    _, document, _ = simulate(capsys, *given, "--kv-tokens", "4000", "--offload", "auto")
    assert (without["about"]["offload"], document["about"]["offload"]) == ("off", "auto")
    assert not any("draft_moves" in run["about"] for run in without["runs"])
    off, nightjar = document["runs"]
    assert "draft_moves" not in off["about"], "it has no draft to move"
    assert nightjar["about"]["draft_moves"] > 0
    assert nightjar["about"]["draft_away_s"] > 0
