"""The set-up of the Makefile: what it says while pip works. No package is installed here."""

from __future__ import annotations

import os
import pty
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PIP = '#!/bin/sh\necho "pip $*"\n'


@pytest.fixture
def checkout(tmp_path):
    """The Makefile beside an environment whose pip only repeats its arguments."""
    if shutil.which("make") is None:
        pytest.skip("needs make")
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    programs = tmp_path / ".venv" / "bin"
    programs.mkdir(parents=True)
    for name in ("pip", "python"):
        (programs / name).write_text(PIP)
        (programs / name).chmod(0o755)
    return tmp_path


def setup(checkout: Path, stderr: int) -> list[str]:
    outside = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
    done = subprocess.run(
        ["make", "setup"], cwd=checkout, env=outside, stdout=subprocess.PIPE, stderr=stderr, text=True, check=True
    )
    return done.stdout.splitlines()


def test_set_up_says_what_it_installs_how_large_it_is_and_how_long_it_takes(checkout):
    lines = setup(checkout, subprocess.STDOUT)
    said = [line for line in lines if not line.startswith("pip ")]
    assert said[0] == "Installing FASER into .venv: about 1.3 GB on disk. The first time takes minutes."
    assert [line[:5] for line in said if line.startswith("[")] == ["[1/4]", "[2/4]", "[3/4]", "[4/4]"]
    assert any("tools for tests" in line and "1.5 GB" in line for line in said)
    assert said[-1].startswith("Installed: .venv takes ")
    asked = [line for line in lines if line.startswith("pip ")]
    assert len(asked) == 4
    assert lines.index(asked[0]) > lines.index(said[0]), "the size is known before anything is downloaded"
    assert all("--quiet" in line for line in asked)


def test_pip_shows_its_own_progress_on_a_terminal(checkout):
    ours, theirs = pty.openpty()
    try:
        asked = [line for line in setup(checkout, theirs) if line.startswith("pip ")]
    finally:
        os.close(theirs)
        os.close(ours)
    assert len(asked) == 4
    assert not any("--quiet" in line for line in asked)


def test_a_second_set_up_says_and_installs_nothing(checkout):
    setup(checkout, subprocess.STDOUT)
    assert not any("nstall" in line for line in setup(checkout, subprocess.STDOUT))
