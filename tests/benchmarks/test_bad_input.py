"""That benchmarks/bad_input.py makes requests of all kinds and finds faults."""

from __future__ import annotations

import json

import pytest

from benchmarks import bad_input
from benchmarks.bad_input import Answer, Campaign, Case, find_fault, make_case

CASE = Case(7, "POST", "/v1/completions", b"{}")
ERROR = json.dumps({"error": {"message": "no"}}).encode()


def test_a_number_always_makes_the_same_request_and_another_seed_makes_others():
    assert [make_case(3, number) for number in range(50)] == [make_case(3, number) for number in range(50)]
    assert [make_case(3, number) for number in range(50)] != [make_case(4, number) for number in range(50)]


def test_requests_are_of_all_kinds():
    cases = [make_case(0, number) for number in range(3000)]
    for path in (bad_input.COMPLETIONS, bad_input.CHAT, bad_input.SESSIONS, bad_input.CHUNK, *bad_input.GETS):
        assert sum(case.path.startswith(path) for case in cases) > 5, path
    assert len({case.method for case in cases}) > 5
    good, broken = 0, 0
    for case in cases:
        try:
            good += isinstance(json.loads(case.body), dict)
        except (ValueError, RecursionError):
            broken += 1
    assert good > 1000
    assert broken > 200


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (Answer(CASE, 200, 0.1, b"{}"), None),
        (Answer(CASE, 400, 0.1, ERROR), None),
        (Answer(CASE, 503, 0.1, ERROR), None),
        (Answer(CASE, 0, 0.1, error="BrokenPipeError: "), None),
        (Answer(CASE, 200, 11.0, b"{}"), "took 11.0 s"),
        (Answer(CASE, 500, 0.1, ERROR), "status 500"),
        (Answer(CASE, 400, 0.1, b"Bad Request"), "without OpenAI's error"),
        (Answer(CASE, 0, 0.1, error="TimeoutError: "), "no answer"),
    ],
)
def test_what_counts_as_a_fault(answer, says):
    fault = find_fault(answer, bound=10.0)
    assert (fault is None) if says is None else (fault is not None and says in fault)


def test_a_campaign_counts_statuses_and_names_the_number_of_a_fault():
    campaign = Campaign()
    campaign.add(Answer(CASE, 200, 0.1), 10.0)
    campaign.add(Answer(CASE, 500, 0.2, ERROR), 10.0)
    assert (campaign.statuses, campaign.slowest) == ({200: 1, 500: 1}, 0.2)
    assert campaign.faults[0].startswith("number 7, POST /v1/completions: status 500")
