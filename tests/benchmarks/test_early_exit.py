"""What benchmarks/early_exit.py plays and says; speed itself is measured elsewhere."""

from __future__ import annotations

import json

from benchmarks import early_exit


def test_it_all_runs_on_tiny_models(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("OUT", str(tmp_path / "out"))
    given = ["--tiny", "--device", "cpu", "--folder", str(tmp_path), "--policies", "fixed:2,faser"]
    given += ["--requests", "24"]
    assert early_exit.main(given) == 0
    said = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    lines = said["lines"]
    played = [(line["concurrency"], line["policy"], line["mode"]) for line in lines]
    assert played == [
        (size, name, mode)
        for size in (1, 2)
        for name, turns in (("fixed:2", 1), ("faser", 2))
        for mode in turns * early_exit.MODES
    ]
    assert [(bound["concurrency"], bound["length"]) for bound in said["bounds"]] == [(1, 4), (1, 6), (2, 4), (2, 6)]
    assert all(bound["verify"] > 0 < bound["draft"] for bound in said["bounds"])
    assert all(line["exit_ratio"] == 0 and not line["trials"] for line in lines if line["mode"] == "off")
    assert any(line["trials"] for line in lines if line["mode"] == "on")
    assert json.loads((tmp_path / "out" / "early_exit.json").read_text())["lines"] == lines
