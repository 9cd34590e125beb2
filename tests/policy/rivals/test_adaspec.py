from __future__ import annotations

from dataclasses import replace

import pytest

from faser.policy.rivals.goodput import AdaSpec, Goodput
from tests.policy.profiles import H200, SMOOTH, curve, make_view

# Verification in three sizes of which the last is hardly dearer, and a draft that costs nearly nothing.
COARSE = replace(
    H200,
    verify=curve((4, 10, 16), (10.0, 10.0, 11.0), 0.0, is_stepped=True),
    first_draft=curve((1, 256), (0.1, 0.1), 0.0),
    next_draft=curve((1, 256), (0.1, 0.1), 0.0),
)


def test_drafts_lengthen_while_predicted_goodput_rises():
    # by hand, tokens per ms at acceptance 0.7: 0.98, 1.31, 1.45, 1.47, 1.31
    assert AdaSpec().lengths(make_view(4, num_tokens=0)).tolist() == [3] * 4


def test_nothing_is_drafted_if_the_first_token_does_not_pay_although_more_would():
    dear_start = replace(
        H200, first_draft=curve((1, 256), (4.0, 4.0), 0.0), next_draft=curve((1, 256), (0.1, 0.1), 0.0)
    )
    view = make_view(4, profile=dear_start)
    assert Goodput().lengths(view).all()
    assert not AdaSpec().lengths(view).any()


def test_rows_are_trimmed_to_a_graph_size_the_least_likely_drafts_first():
    # 16 rows are wanted; 10 keep all that is likely and run faster
    lengths = AdaSpec().lengths(make_view(4, profile=COARSE, accepted=[90, 90, 0, 0], tried=100, num_tokens=0))
    assert lengths.tolist() == [3, 3, 0, 0]


def test_rows_that_are_all_likely_are_not_trimmed():
    lengths = AdaSpec().lengths(make_view(4, profile=COARSE, accepted=90, tried=100, num_tokens=0))
    assert lengths.tolist() == [3] * 4


def test_steps_with_prompts_are_not_trimmed():
    cheap = replace(COARSE, prompts=curve((512, 4096), (13.5, 13.5), 0.0))
    view = make_view(4, profile=cheap, accepted=[90, 90, 0, 0], tried=100, prefill_rows=300)
    (length,) = set(AdaSpec().lengths(view).tolist())
    assert length > 0


def test_a_busier_batch_never_drafts_more():
    given = [int(AdaSpec().lengths(make_view(size, profile=SMOOTH)).max()) for size in range(1, 257)]
    assert given[0] >= 3
    assert given[-1] == 0
    assert given == sorted(given, reverse=True)


def test_a_batch_of_hopeless_requests_does_not_speculate():
    assert not AdaSpec().lengths(make_view(8, accepted=2, tried=100)).any()


@pytest.mark.parametrize("limit", [0, 1, [0, 1, 2, 32]])
def test_no_request_is_given_more_than_its_limit(limit):
    view = make_view(4, limit=limit)
    assert (AdaSpec().lengths(view) <= view.limit).all()
