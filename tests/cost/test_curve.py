"""Seconds by rows and context."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from faser.cost.curve import NOTHING, Curve
from faser.errors import ConfigError

SMOOTH = Curve((1, 4, 10), (1.0, 4.0, 16.0), (0.0, 0.0, 0.3))
STEPPED = replace(SMOOTH, stepped_to=SMOOTH.rows[-1])


@pytest.mark.parametrize(
    ("rows", "seconds"), [(0, 0.0), (1, 1.0), (2, 2.0), (4, 4.0), (7, 10.0), (10, 16.0), (12, 20.0)]
)
def test_between_measured_rows_a_curve_is_straight_and_beyond_them_its_last_rise_goes_on(rows, seconds):
    assert float(SMOOTH(rows, 0)) == pytest.approx(seconds)


@pytest.mark.parametrize(("rows", "seconds"), [(0, 0.0), (1, 1.0), (2, 4.0), (4, 4.0), (5, 16.0), (10, 16.0)])
def test_rows_between_two_graphs_cost_what_the_larger_does(rows, seconds):
    assert float(STEPPED(rows, 0)) == pytest.approx(seconds)


def test_context_costs_by_the_token_and_arrays_keep_their_shape():
    assert SMOOTH(np.array([0, 4, 7, 10]), 100) == pytest.approx([0.0, 4.0, 10.0 + 15, 16.0 + 30])
    assert SMOOTH(np.array([10, 10]), np.array([0, 10])) == pytest.approx([16.0, 19.0])
    assert SMOOTH(np.ones((2, 3), dtype=np.int64), 0).shape == (2, 3)


def test_a_forward_that_does_not_exist_takes_no_time():
    assert float(NOTHING(5, 1000)) == 0


@pytest.mark.parametrize(
    "wrong",
    [
        ((), (), ()),
        ((1, 2), (1.0,), (0.0,)),
        ((2, 1), (1.0, 1.0), (0.0, 0.0)),
        ((1, 1), (1.0, 1.0), (0.0, 0.0)),
        ((0, 1), (1.0, 1.0), (0.0, 0.0)),
        ((1,), (-1.0,), (0.0,)),
        ((1,), (float("nan"),), (0.0,)),
        ((1,), (1.0,), (float("inf"),)),
    ],
)
def test_a_malformed_curve_is_refused(wrong):
    with pytest.raises(ConfigError, match="curve"):
        Curve(*wrong)
