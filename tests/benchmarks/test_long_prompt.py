"""What benchmarks/long_prompt.py plays and says; speed itself is measured elsewhere."""

from __future__ import annotations

import json

import pytest

from benchmarks import long_prompt


def test_it_all_runs_on_a_tiny_model(capsys):
    assert long_prompt.main(["--tiny", "--device", "cpu", "--max-step-ms", "2", "--repeats", "1"]) == 0
    said = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert said["bound_ms"] == 2.0
    assert list(said["beside"]) == ["on", "off"]
    for figures in said["beside"].values():
        assert figures["gaps"] >= 2
        assert figures["long_tokens_per_s"] > 0
    assert said["beside"]["on"]["gaps"] > said["beside"]["off"]["gaps"], "the bound cuts the prompt into more steps"
    assert {len(said["mixed"][name]) for name in ("on", "off")} == {1}
    assert said["mixed"]["lost"] < 1


def test_only_one_part_without_the_bound(capsys):
    assert long_prompt.main(["--tiny", "--parts", "beside", "--bounds", "off"]) == 0
    said = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert (list(said["beside"]), "mixed" in said) == (["off"], False)


@pytest.mark.parametrize("given", [["--parts", "some"], ["--bounds", "no"], ["--tiny", "--policy", "fixed:2"]])
def test_what_it_cannot_play_is_refused(given, capsys):
    with pytest.raises(SystemExit):
        long_prompt.main(given)
    assert "expected" in (said := capsys.readouterr().err) or "leave out" in said
