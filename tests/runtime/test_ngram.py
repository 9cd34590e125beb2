"""Prompt lookup against a version slow enough to be obviously right."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from faser.runtime.ngram import lookup


def slow_lookup(tokens: list[int], length: int, max_ngram: int, min_ngram: int) -> list[int]:
    for size in range(max_ngram, min_ngram - 1, -1):
        for start in range(len(tokens) - size - 1, -1, -1):
            if tokens[start : start + size] == tokens[-size:]:
                known = list(tokens)
                for i in range(length):
                    known.append(known[start + size + i])
                return known[len(tokens) :]
    return []


def find(tokens: list[int], length: int, **options: int) -> list[int]:
    return lookup(np.array(tokens, dtype=np.int64), length, **options).tolist()


@given(
    tokens=st.lists(st.integers(0, 3), max_size=40),
    length=st.integers(0, 12),
    sizes=st.tuples(st.integers(1, 6), st.integers(1, 6)),
)
def test_equals_the_slow_version(tokens: list[int], length: int, sizes: tuple[int, int]) -> None:
    low, high = sorted(sizes)
    assert find(tokens, length, max_ngram=high, min_ngram=low) == slow_lookup(tokens, length, high, low)


def test_the_longest_suffix_wins_over_a_more_recent_shorter_one() -> None:
    assert find([1, 2, 3, 7, 9, 2, 3, 8, 1, 2, 3], 1) == [7]


def test_of_equal_suffixes_the_most_recent_wins() -> None:
    assert find([2, 3, 7, 2, 3, 8, 2, 3], 2) == [8, 2]


@pytest.mark.parametrize("period", [1, 2, 3, 5])
def test_periodic_text_is_continued_at_full_length(period: int) -> None:
    text = [i % period for i in range(40)]
    assert find(text[:20], 20) == text[20:]


@pytest.mark.parametrize("tokens", [[], [1], [1, 1], [1, 2], [1, 2, 3, 4], [2, 9, 2]])
def test_nothing_repeated_gives_nothing(tokens: list[int]) -> None:
    assert find(tokens, 4) == []


def test_the_answer_does_not_share_memory_with_the_history() -> None:
    tokens = np.array([1, 2, 3, 4, 5, 1, 2])
    found = lookup(tokens, 3)
    assert found.tolist() == [3, 4, 5]
    assert found.dtype == np.int64
    assert not np.shares_memory(found, tokens)
