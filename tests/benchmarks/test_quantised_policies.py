"""Profiles of quantised targets by arithmetic, and the scores of `faser` in their cells."""

from __future__ import annotations

import json

import pytest

from benchmarks import quantised_policies as bench
from faser.sim.replica import load_profile


def test_profiles_begin_where_fewer_bytes_put_them_and_never_fall_below_nothing():
    base = load_profile(bench.BASE)
    fp8, int4 = bench.as_fp8(base), bench.as_int4(base)
    assert fp8.verify.seconds[0] == pytest.approx(2.1e-3)
    assert int4.verify.seconds[0] == pytest.approx(1.4e-3)
    for rows, plain, less, least in zip(
        base.verify.rows, base.verify.seconds, fp8.verify.seconds, int4.verify.seconds, strict=True
    ):
        assert 0 < less < plain
        assert (least < plain) == (rows < bench.INT4_ROWS)
    assert int4.prompts == base.prompts
    assert fp8.first_draft == int4.first_draft == base.first_draft
    assert "arithmetic" in str(fp8.about["model"])


def test_faser_is_scored_against_the_best_fixed_length_and_against_off(monkeypatch, capsys):
    rates = {"off": 100.0, "faser": 120.0, **dict.fromkeys(bench.FIXED, 90.0), "fixed:3": 125.0}
    monkeypatch.setattr(bench, "play", lambda profile, size, acceptance: rates)
    bench.main(["--sizes", "1,4", "--acceptance", "0.75", "--targets", "fp8"])
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [each["size"] for each in document["cells"]] == [1, 4]
    assert document["cells"][0]["best_fixed"] == "fixed:3"
    assert document["worst"] == {"of_best_fixed": 0.96, "gain": 1.2}
