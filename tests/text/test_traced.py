"""A traced text is the same text, and every character keeps the mark of who wrote it."""

from __future__ import annotations

from enum import StrEnum

import pytest
from hypothesis import given
from hypothesis import strategies as st

from faser.text.traced import Traced, joined, traced

letters = st.text("aB<|> \n\té", max_size=12)
mixed = st.lists(st.tuples(st.booleans(), letters), max_size=5).map(
    lambda parts: joined([Traced.by_template(text) if own else traced(text) for own, text in parts])
)


def marks(text: str) -> list[tuple[str, bool]]:
    """Each character with its mark."""
    assert isinstance(text, Traced)
    return [(character, is_own) for part, is_own in text.runs() for character in part]


OPERATIONS = {
    "strip": lambda text, other: text.strip(),
    "strip some": lambda text, other: text.strip("a<\n"),
    "lstrip": lambda text, other: text.lstrip(),
    "rstrip": lambda text, other: text.rstrip("é "),
    "prefix": lambda text, other: text.removeprefix(other[:1]),
    "suffix": lambda text, other: text.removesuffix(other[:1]),
    "slice": lambda text, other: text[1:-1],
    "steps": lambda text, other: text[::-2],
    "split": lambda text, other: text.split(),
    "split once": lambda text, other: text.split(None, 1),
    "split at": lambda text, other: text.split("<"),
    "rsplit": lambda text, other: text.rsplit(None, 1),
    "rsplit at": lambda text, other: text.rsplit("a", 1),
    "lines": lambda text, other: text.splitlines(),
    "whole lines": lambda text, other: text.splitlines(True),
    "partition": lambda text, other: text.partition("a"),
    "rpartition": lambda text, other: text.rpartition("zz"),
    "add": lambda text, other: text + other,
    "add to a str": lambda text, other: "plin" + text,
    "times": lambda text, other: 2 * text,
    "replace": lambda text, other: text.replace("a", other),
    "replace once": lambda text, other: text.replace("<", other, 1),
    "replace nothing": lambda text, other: text.replace("", other),
    "join": lambda text, other: text.join([other, "plin", other]),
    "upper": lambda text, other: text.upper(),
    "lower": lambda text, other: text.lower(),
    "capitalize": lambda text, other: text.capitalize(),
    "title": lambda text, other: text.title(),
}


@pytest.mark.parametrize("name", OPERATIONS)
@given(text=mixed, other=mixed)
def test_an_operation_gives_what_it_gives_of_a_plain_text(name, text, other):
    plain = OPERATIONS[name](str.__str__(text), str.__str__(other))
    found = OPERATIONS[name](text, other)
    assert found == plain
    assert type(found) is (Traced if isinstance(plain, str) else type(plain))


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("own", [True, False])
@given(text=st.text("aB<|> \n\té", max_size=12), other=st.text("xyz", max_size=3))
def test_every_character_keeps_its_mark(name, own, text, other):
    """Letters tell here who wrote a character: x, y and z are of one origin, all others of the other."""
    made, given = (Traced.by_template(text), traced(other)) if own else (traced(text), Traced.by_template(other))
    found = OPERATIONS[name](made, given)
    for part in [found] if isinstance(found, str) else found:
        for character, is_own in marks(part):
            assert is_own == (name not in LOST and character not in PLAIN and own == (character.lower() not in "xyz"))


LOST = {"replace nothing"}  # operations that are not traced
PLAIN = "plin"  # letters of a str without a trace


@pytest.mark.parametrize("make", [lambda text: text.center(9), lambda text: f"{text}!"])
def test_an_operation_that_is_not_traced_gives_somebody_else_s_text(make):
    assert not any(is_own for _, is_own in marks(traced(make(Traced.by_template("abc")))))


def test_a_text_that_gets_longer_in_another_case_loses_its_trace():
    assert marks(Traced.by_template("ß").upper()) == [("S", False), ("S", False)]


def test_an_enum_of_texts_is_its_text():
    class Role(StrEnum):
        USER = "user"

        def __str__(self) -> str:
            return "Role.USER"

    made = Traced.by_template(Role.USER) + Traced("<b>")
    assert marks(made) == [*((c, True) for c in "user"), *((c, False) for c in "<b>")]


def test_texts_within_lists_and_objects_are_traced():
    found = traced({"a": ["b", {"c": "d"}], "n": 7})
    assert found == {"a": ["b", {"c": "d"}], "n": 7}
    assert isinstance(found["a"][1]["c"], Traced)
    assert list(found) == ["a", "n"]
