"""Requests and tokens a minute, and open requests, of one key: what is refused, and when it may be asked again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from faser.config import ServerOptions
from faser.errors import ConfigError
from faser.server.quotas import MAX_NAMES, Bucket, OverQuota, Quotas


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def refused(call, *arguments) -> OverQuota:
    with pytest.raises(OverQuota) as error:
        call(*arguments)
    return error.value


def test_a_key_may_send_a_minute_s_requests_at_once_and_then_one_at_a_time():
    clock = Clock()
    quotas = Quotas(requests=6, tokens=None, clock=clock)
    for _ in range(6):
        quotas.count_request("a")
    error = refused(quotas.count_request, "a")
    assert (error.code, error.seconds) == ("requests_per_minute", pytest.approx(10.0))
    quotas.count_request("b")
    clock.now += error.seconds
    quotas.count_request("a")
    assert refused(quotas.count_request, "a").seconds == pytest.approx(10.0)


def test_a_request_may_overdraw_the_tokens_and_the_next_one_waits_until_they_are_paid():
    clock = Clock()
    quotas = Quotas(requests=None, tokens=60, clock=clock)
    quotas.count_request("a")
    lease = quotas.enter("a", 1, None)
    lease.take_tokens(50)
    quotas.count_request("a")
    lease.take_tokens(100)
    error = refused(quotas.count_request, "a")
    assert error.code == "tokens_per_minute"
    assert error.seconds == pytest.approx(91.0), "a token a second, and one must be there"
    clock.now += 92
    quotas.count_request("a")


def test_a_refused_request_costs_nothing():
    clock = Clock()
    quotas = Quotas(requests=1, tokens=None, clock=clock)
    quotas.count_request("a")
    for _ in range(5):
        assert refused(quotas.count_request, "a").seconds == pytest.approx(60.0)


def test_open_choices_of_a_key_are_bounded_and_a_lease_ends_once():
    quotas = Quotas(None, None, Clock())
    first = quotas.enter("a", 3, most=4)
    assert refused(quotas.enter, "a", 2, 4).code == "too_many_streams"
    quotas.enter("b", 4, 4)
    second = quotas.enter("a", 1, 4)
    first.end()
    first.end()
    assert refused(quotas.enter, "a", 4, 4)
    second.end()
    quotas.enter("a", 4, 4)


@given(st.integers(1, 500), st.lists(st.tuples(st.integers(0, 200), st.floats(0, 90)), max_size=20))
def test_nobody_gets_more_than_a_minute_s_worth_and_the_time_that_passed(most, steps):
    now, bucket, taken, start = 0.0, Bucket(most, 0.0), 0, 0.0
    for number, seconds in steps:
        if bucket.seconds_until(number, now) == 0.0:
            bucket.take(number, now)
            taken += number
        assert taken <= most + most * (now - start) / 60 + 1e-6
        now += seconds


@given(st.integers(1, 500), st.integers(0, 1000), st.integers(1, 500))
def test_the_seconds_that_are_told_suffice_and_half_of_them_do_not(most, spent, wanted):
    bucket, wanted = Bucket(most, 0.0), min(wanted, most)
    bucket.take(spent, 0.0)
    seconds = bucket.seconds_until(wanted, 0.0)
    if seconds > 1e-3:
        assert bucket.seconds_until(wanted, seconds / 2) > 0
    assert bucket.seconds_until(wanted, seconds) <= 1e-6


def test_names_that_nobody_needs_are_forgotten():
    clock = Clock()
    quotas = Quotas(requests=2, tokens=None, clock=clock)
    held = quotas.enter("holds", 1, None)
    for number in range(3 * MAX_NAMES):
        quotas.count_request(f"address {number}")
    assert len(quotas._accounts) <= MAX_NAMES
    assert refused(quotas.enter, "holds", 1, 1)
    held.end()


def test_of_several_keys_none_can_fill_the_queue_alone():
    assert ServerOptions().stream_limit(512) is None
    assert ServerOptions(api_keys=("a",)).stream_limit(512) is None
    assert ServerOptions(api_keys=("a", "b")).stream_limit(512) == 384
    assert ServerOptions(api_keys=("a", "b")).stream_limit(1) == 1
    assert ServerOptions(api_keys=("a", "b"), max_streams=9).stream_limit(512) == 9


@pytest.mark.parametrize("name", ["max_connections", "max_streams", "rate_limit", "token_limit"])
def test_a_limit_of_nothing_is_refused(name):
    with pytest.raises(ConfigError, match=f"{name}=0: expected at least 1"):
        ServerOptions(**{name: 0})
