"""benchmarks/mask_pictures.py: what is pruned is dark in the picture, and what is kept is as in the clip."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from benchmarks.mask_pictures import EDGE, GAP, frame_at, grid_at, main, mask_of, panel, scene

pytest.importorskip("av")


def test_pruned_groups_are_dark_and_kept_ones_are_unchanged_but_for_an_edge():
    frame = np.full((40, 60, 3), 200, np.uint8)
    drawn = panel(frame, np.array([[True, False], [False, False]]))
    assert (drawn[:19, :29] == 200).all()
    assert drawn[22:, 32:].max() <= 100
    assert (drawn[19, :30] == EDGE).all()
    assert (drawn[:20, 29] == EDGE).all()


def test_a_picture_has_a_panel_for_each_rule_and_time(tmp_path, capsys):
    path = tmp_path / "mask.png"
    arguments = ["--scene", "1", "--frames", "12", "--rules", "none", "codec", "--times", "1.5", "--width", "120"]
    found = main([str(path), *arguments])
    clip = scene(1, 12)
    mask = mask_of(grid_at(clip, "codec", 1.5, 4.0))
    assert [each["rule"] for each in found["panels"]] == ["none", "codec"]
    assert found["panels"][0]["kept"] == 1
    assert 0 < found["panels"][1]["kept"] < 0.9
    assert mask.shape == (8, 8)
    assert frame_at(clip, 1.5).shape == (224, 224, 3)
    with Image.open(path) as picture:
        assert picture.size == (2 * 120 + GAP, 120)
        pixels = np.asarray(picture.convert("L")).astype(float)
    assert pixels[:, 120 + GAP :].mean() < pixels[:, :120].mean()
    assert capsys.readouterr().out.splitlines()[-1].startswith('{"picture": "mask.png"')
