"""From seconds to curves."""

from __future__ import annotations

import pytest

from faser.cost.curve import Curve
from faser.runtime.profiling.fit import Sample, fit_line, make_curve


@pytest.mark.parametrize(
    ("samples", "right"),
    [
        ([(100, 2.0), (300, 4.0)], (1.0, 0.01)),
        ([(100, 2.0), (300, 1.0)], (1.5, 0.0)),  # noise: more context is never faster
        ([(100, 1.0), (300, 5.0)], (0.0, (1 / 100 + 5 / 300) / 2)),
        ([(100, 0.0), (300, 0.0)], (0.0, 0.0)),
    ],
)
def test_a_fitted_line_has_no_negative_part(samples, right):
    assert fit_line([Sample(1, *each) for each in samples]) == pytest.approx(right)


def test_rows_measured_at_one_context_take_the_cost_of_context_from_others():
    found = make_curve([Sample(1, 100, 2.0), Sample(1, 300, 4.0), Sample(8, 100, 5.0), Sample(4, 1000, 13.0)])
    assert (found.rows, found.seconds) == ((1, 4, 8), pytest.approx((1.0, 3.0, 4.0)))
    assert found.per_token == pytest.approx((0.01, 0.01, 0.01))
    assert make_curve([Sample(1, 100, 2.0), Sample(1, 100, 4.0)]) == Curve((1,), (3.0,), (0.0,))


def test_a_curve_continues_as_assumed_where_nothing_was_measured():
    assumed = Curve((1, 8, 64), (1.0, 2.0, 10.0), (0.1, 0.1, 0.1))
    found = make_curve([Sample(8, 0, 6.0)], prior=assumed)
    assert found.rows == (1, 8, 64)
    assert found.seconds == pytest.approx((3.0, 6.0, 30.0))
    assert found.per_token == pytest.approx((0.3, 0.3, 0.3))
    assert make_curve([], prior=assumed) == assumed


def test_more_rows_never_take_less_time():
    """64 rows that were measured to be slower than 128 were disturbed."""
    found = make_curve([Sample(1, 0, 1.0), Sample(64, 0, 9.0), Sample(128, 0, 7.0), Sample(256, 0, 20.0)])
    assert found.seconds == pytest.approx((1.0, 8.0, 8.0, 20.0))
