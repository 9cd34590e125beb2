from __future__ import annotations

import pytest

from faser.errors import ConfigError
from faser.policy.rivals.batch_size import Table
from tests.policy.profiles import make_view


@pytest.mark.parametrize(("size", "length"), [(1, 3), (64, 3), (65, 1), (128, 1), (129, 0), (256, 0)])
def test_the_length_is_that_of_the_range_the_batch_is_in(size, length):
    assert Table().lengths(make_view(size, profile=None)).tolist() == [length] * size


def test_prompts_that_share_the_step_do_not_count_as_load():
    assert Table().lengths(make_view(64, profile=None, prefill_rows=4000)).tolist() == [3] * 64


def test_commas_may_replace_slashes():
    assert Table.parse("4=2,8=1") == Table.parse("4=2/8=1") == Table(((4, 2), (8, 1)))


@pytest.mark.parametrize(
    "text", ["", "64", "64=", "=3", "64=3/", "64=-1", "64=3/32=1", "64=3/64=1", "0=1", "8=33", "a=b"]
)
def test_a_malformed_table_is_refused_with_an_example(text):
    with pytest.raises(ConfigError, match=r"table:64=3/128=1"):
        Table.parse(text)


def test_the_longest_length_of_the_table_is_announced():
    assert Table.parse("4=2/8=6/16=1").max_length == 6
