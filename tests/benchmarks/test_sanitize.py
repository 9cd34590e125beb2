"""That benchmarks/sanitize.py hears what the sanitizer says, or that it says nothing."""

from __future__ import annotations

import json

import pytest

from benchmarks import sanitize

CLEAN = "========= COMPUTE-SANITIZER\n1 passed\n========= ERROR SUMMARY: 0 errors\n"
DIRTY = """========= COMPUTE-SANITIZER
========= Invalid __global__ write of size 4 bytes
=========     at kernel+0x90
========= ERROR SUMMARY: 3 errors
"""
RACE = "========= RACECHECK SUMMARY: 2 hazards displayed (1 error, 1 warning)\n"


@pytest.mark.parametrize(
    ("text", "status", "errors", "reports", "clean"),
    [
        (CLEAN, 0, 0, 0, True),
        (CLEAN, 1, 0, 0, False),  # a test failed
        (DIRTY, 0, 3, 1, False),
        (RACE, 0, 2, 0, False),
        (DIRTY.splitlines()[1], None, None, 1, False),  # ended before its summary
        ("Device not supported", 0, None, 0, False),
    ],
)
def test_only_a_summary_without_errors_is_clean(text, status, errors, reports, clean):
    found = sanitize.read_log(text, "kernels", "memcheck", 1.0, status)
    assert (found.errors, found.reports, found.is_clean) == (errors, reports, clean)


def test_without_a_sanitizer_the_exit_status_counts():
    assert sanitize.read_log("3 passed", "kernels", "plain", 1.0, 0).is_clean
    assert not sanitize.read_log("1 failed", "kernels", "plain", 1.0, 1).is_clean


def test_every_process_is_reported(tmp_path, capsys, monkeypatch):
    """A sanitizer that hangs in one run and finds nothing in the other."""
    monkeypatch.setenv("OUT", str(tmp_path / "out"))
    fake = tmp_path / "compute-sanitizer"
    fake.write_text(
        "#!/bin/sh\n"
        'echo "uncached=$PYTORCH_NO_CUDA_MEMORY_CACHING $*"\n'
        'case "$*" in *graphs*) sleep 60;; esac\n'
        'echo "========= ERROR SUMMARY: 0 errors"\n'
    )
    fake.chmod(0o755)
    given = ["--sanitizer", str(fake), "--tools", "memcheck", "--runs", "eager,graphs", "--seconds", "2"]
    assert sanitize.main(given) == 1
    eager, graphs = json.loads(capsys.readouterr().out.splitlines()[-1])["found"]
    assert (eager["status"], eager["clean"]) == (0, True)
    assert (graphs["status"], graphs["clean"]) == (None, False)
    assert (tmp_path / "out" / "sanitize-eager-memcheck.log").read_text().startswith("uncached=1 --tool memcheck")
    assert (tmp_path / "out" / "sanitize-graphs-memcheck.log").read_text().startswith("uncached= --tool memcheck")


def test_an_unknown_tool_is_refused(capsys):
    with pytest.raises(SystemExit):
        sanitize.main(["--sanitizer", "x", "--tools", "memchek"])
    assert "expected some of plain,memcheck" in capsys.readouterr().err
