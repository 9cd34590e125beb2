"""What the commands measure, print and keep."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from faser import build
from faser.bench import command as bench_command
from faser.build import build_engine, load_pair
from faser.cli.main import main
from faser.config import EngineOptions
from faser.cost.profile import Profile
from faser.policy import Fixed
from tests.runtime.profiling.engines import Costly, stub
from tests.runtime.profiling.machine import CPU, machine


@pytest.mark.parametrize("command", [["generate", "a b"], ["generate", "--chat", "a b"]])
def test_generate_does_not_profile(folder, cache, monkeypatch, command):
    for name in ("measure", "measure_quick"):
        monkeypatch.setattr(build, name, lambda *_: pytest.fail("measured"))
    template = folder.parent / "template.jinja"
    template.write_text("{{ messages[0].content }}")
    chat = ["--chat-template", str(template)] if "--chat" in command else []
    given = ["--model", str(folder), "--draft", str(folder), "--device", "cpu", "--max-model-len", "64"]
    assert main([*command, *chat, *given, "--max-tokens", "4"]) == 0
    assert not (cache / "profiles").exists()


def test_the_command_keeps_no_profile_that_a_server_would_not(model, folder, cache, capsys, monkeypatch):
    noisy = replace(machine(CPU), errors={"verify": 0.9, "draft": 0.1})
    monkeypatch.setattr(build, "measure", lambda subject, about, *_: replace(noisy, about=about))
    assert main(["profile", *model, "--draft", str(folder)]) == 0
    assert "not kept: its predictions are off by more than 20 % (verify 90 %)" in capsys.readouterr().out
    assert not (cache / "profiles").exists()


def test_the_command_prints_tables_and_one_line_and_keeps_the_profile(model, folder, cache, capsys, monkeypatch):
    monkeypatch.setattr("faser.cost.profile.MAX_KEPT_ERROR", 100.0)  # a busy machine may be off by much
    assert main(["profile", *model, "--draft", str(folder), "--budget", "1"]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    found = Profile.from_dict(json.loads(last))
    assert any(line.startswith("verification, by rows") for line in lines)
    assert any("µs per 1,000 tokens" in line for line in lines)
    assert any("on batches it was not made from: " in line for line in lines)
    (path,) = (cache / "profiles").iterdir()
    assert Profile.load(path) == found
    assert any(line.endswith(f"kept in {path}") for line in lines)
    options = EngineOptions(policy=Costly(), device="cpu", max_model_len=64, max_running=4)
    loaded = load_pair(str(folder), str(folder), options)
    assert build_engine(loaded.target, loaded.draft, options).cost.profile == found


def test_the_command_says_plainly_when_predictions_are_off(model, folder, cache, capsys, monkeypatch):
    stub(monkeypatch)
    assert main(["profile", *model, "--draft", "ngram", "--out", str(cache / "here" / "p.json")]) == 0
    out = capsys.readouterr().out
    assert "verify: above the 7.5 % aimed at" in out
    assert "first drafted token" in out
    assert Profile.load(cache / "here" / "p.json").errors["verify"] == 0.1
    assert not (cache / "profiles").exists()


@pytest.mark.parametrize(
    ("wrong", "says"), [(["--budget", "0"], "seconds above 0"), (["--out", "/dev/null/x"], "cannot be written")]
)
def test_a_bad_budget_or_file_is_refused(model, monkeypatch, capsys, wrong, says):
    stub(monkeypatch)
    assert main(["profile", *model, *wrong]) == 1
    assert says in capsys.readouterr().err


def test_bench_profiles_for_any_of_its_policies(model, cache, monkeypatch, capsys):
    measured = stub(monkeypatch)
    asking = {"costly": Costly(), "off": Fixed(0)}
    monkeypatch.setattr(bench_command, "make_policy", asking.__getitem__)
    monkeypatch.setattr("faser.config.make_policy", asking.__getitem__)
    monkeypatch.setattr("faser.traffic.play.make_policy", asking.__getitem__)
    traffic = ["--arrivals", "poisson:60", "--duration", "0.1", "--prompt-len", "8", "--output-len", "4"]
    assert main(["bench", *model, "--draft", "ngram", "--policies", "off,costly", *traffic]) == 0
    assert len(measured) == 1
    assert [run["system"] for run in json.loads(capsys.readouterr().out.splitlines()[-1])["runs"]] == ["off", "costly"]
