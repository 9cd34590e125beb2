"""benchmarks/watch.py on a tiny model: what each arm encodes and computes."""

from __future__ import annotations

import pytest

from benchmarks.watch import ARMS, SHAPES, flops_per_patch, main


def test_each_arm_computes_less_than_the_one_before(capsys):
    arguments = ["--shape", "tiny", "--size", "32", "--streams", "2", "--rounds", "2", "--window", "8", "--stride", "2"]
    found = main([*arguments, "--answer", "3", "--kept", "0.25"])
    (result,) = found["results"]
    patches = {arm.name: result[arm.name]["patches"] for arm in ARMS}
    rows = {arm.name: result[arm.name]["rows"] for arm in ARMS}
    assert patches == {"whole": 2 * 4 * 64, "once": 2 * 64, "pruned": 2 * 16, "reuse": 2 * 64, "all": 2 * 16}
    text = 2 * (64 + 2)  # of the question, and of the answer behind its first token
    assert rows["whole"] == rows["once"] == text + 2 * 4 * 16
    assert rows["pruned"] == text + 2 * 4 * 4
    assert rows["reuse"] == text + 2 * 16
    assert rows["all"] == text + 2 * 4
    assert capsys.readouterr().out.splitlines()[-1].startswith('{"shape": "tiny"')


@pytest.mark.parametrize(("shape", "gflops"), [("qwen2.5-vl-3b", 1.31), ("watch", 0.0449)])
def test_the_floor_counts_the_products_of_the_encoder(shape, gflops):
    """Qwen2.5-VL-3B: 10.72 TFLOP for 8 grids of 1,024 patches, attention included."""
    assert flops_per_patch(SHAPES[shape].vision) == pytest.approx(gflops * 1e9, rel=0.03)
