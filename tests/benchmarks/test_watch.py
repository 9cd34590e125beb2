"""benchmarks/watch.py on a tiny model: both arms answer alike, and one of them encodes less."""

from __future__ import annotations

import pytest

from benchmarks.watch import SHAPES, flops_per_patch, main


def test_each_frame_is_encoded_once_in_one_arm_and_for_every_window_in_the_other(capsys):
    arguments = ["--shape", "tiny", "--size", "16", "--streams", "2", "--rounds", "2", "--window", "8", "--stride", "2"]
    found = main([*arguments, "--answer", "3"])
    (result,) = found["results"]
    assert result["whole"]["grids"] == 2 * 4
    assert result["once"]["grids"] == 2 * 1
    assert capsys.readouterr().out.splitlines()[-1].startswith('{"shape": "tiny"')


@pytest.mark.parametrize(("shape", "gflops"), [("qwen2.5-vl-3b", 1.31), ("watch", 0.0449)])
def test_the_floor_counts_the_products_of_the_encoder(shape, gflops):
    """Qwen2.5-VL-3B: 10.72 TFLOP for 8 grids of 1,024 patches, attention included."""
    assert flops_per_patch(SHAPES[shape].vision) == pytest.approx(gflops * 1e9, rel=0.03)
