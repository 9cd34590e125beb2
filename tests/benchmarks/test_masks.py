"""benchmarks/masks.py on rendered clips: shares of every rule, and one JSON document."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("av", reason="the package av is missing: pip install 'faser[vision]'")

from benchmarks.masks import main
from tests.media.scenes import SPRITES, encode, scene


@pytest.mark.parametrize("options", [[], ["--recode", "ultrafast:23"]])
def test_shares_and_times_of_a_clip_are_printed(options, tmp_path, capsys):
    clip = tmp_path / "clip.mp4"
    clip.write_bytes(encode(scene(SPRITES), 24))
    main(["--fps", "10", *options, str(clip)])
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    (result,) = document["results"]
    assert result["kept"]["tau 0.25"]["all"] >= result["kept"]["tau 2"]["all"] > 0
    assert result["kept"]["tau 1"]["of_pruned_grids"] < 0.3
    assert result["kept"]["difference"]["whole_grids"] < 0.2
    assert set(result["milliseconds"]) == {"decode", "with_vectors", "mask", "difference"}
