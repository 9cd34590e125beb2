"""What benchmarks/overlap.py plays and says; speed itself is measured elsewhere."""

from __future__ import annotations

import json

from benchmarks import overlap


def test_it_all_runs_on_tiny_models(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("OUT", str(tmp_path))
    overlap.main(["--tiny", "--device", "cpu", "--repeats", "2"])
    *said, last = capsys.readouterr().out.strip().splitlines()
    document = json.loads(last)
    played = [(line["batch"], line["policy"], line["overlap"]) for line in document["lines"]]
    kinds = [
        ("fixed:1", "off"), ("fixed:3", "off"), ("fixed:1", "lead"), ("fixed:3", "lead"), ("fixed:3", "ride"),
        *[("faser", "off"), ("faser", "auto")] * 2,
    ]  # fmt: skip
    assert played == [(batch, *kind) for batch in (1, 2) for kind in kinds]
    assert all(line["hit_rate"] == 1 for line in document["lines"] if line["overlap"] in ("ride", "lead")), (
        "it is right"
    )
    assert sum("best" in line for line in said) == 1
    assert all(line.count("×") == 5 for line in said[-2:]), "two ways, the medians of auto, and each pair"
    assert json.loads((tmp_path / "overlap-llama-8b-llama-1b.json").read_text()) == document
