"""The table of limits in docs/security.md says what the code says."""

from __future__ import annotations

import argparse
import re
from importlib import import_module
from pathlib import Path

import pytest

from faser.cli import arguments

PAGE = (Path(__file__).parents[2] / "docs" / "security.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| ([^|]+) \| ([^|]+) \| (?:`(--[a-z-]+)` )?\| `(faser\.[\w.]+)` \|$", re.MULTILINE)
ROWS = ROW.findall(PAGE)


def value_of(path: str) -> object:
    """Of a constant, or the default of a class's field."""
    parts = path.split(".")
    names = parts[-2:] if parts[-2][0].isupper() else parts[-1:]
    found = import_module(".".join(parts[: -len(names)]))
    for name in names:
        found = getattr(found, name)
    return found


def test_the_table_has_rows_of_all_kinds():
    assert len(ROWS) == len(re.findall(r"^\|.*`faser\.", PAGE, re.MULTILINE)), "every row is read"
    assert len(ROWS) > 30


@pytest.mark.parametrize(("limit", "default", "option", "path"), ROWS)
def test_a_default_of_the_table_is_the_code_s(limit, default, option, path):
    value, number = value_of(path), re.match(r"\d+", default)
    assert value == (None if number is None else int(number[0]))


def test_the_options_of_the_table_exist():
    parser = argparse.ArgumentParser()
    arguments.add_server(parser)
    known = {name for action in parser._actions for name in action.option_strings}
    assert {option for _, _, option, _ in ROWS if option} <= known
