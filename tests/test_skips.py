"""What the end of a test run says about skipped tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TESTS = """
import pytest

@pytest.mark.parametrize("number", range(3))
def test_on_a_gpu(number):
    pytest.skip("no GPU: buy one")

@pytest.mark.skipif(True, reason="no browser")
def test_in_a_browser(): ...

def test_here(): ...
"""


@pytest.mark.parametrize("flags", [[], ["-n", "1", "-p", "xdist"]], ids=["one process", "xdist"])
def test_skipped_tests_are_counted_by_reason_at_the_end(tmp_path, flags):
    (tmp_path / "test_some.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.skips", *flags, "--rootdir", str(tmp_path), "."]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert [line for line in lines if " skipped: " in line] == ["3 skipped: no GPU: buy one", "1 skipped: no browser"]


def test_this_repository_s_tests_use_it(request):
    assert request.config.pluginmanager.has_plugin("tests.skips")
