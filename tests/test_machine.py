"""Files that are never half written, and memory that is free."""

from __future__ import annotations

from pathlib import Path

import pytest

from faser.machine import atomic_write, free_memory_bytes, memory_bytes


def test_a_text_replaces_the_one_before_in_folders_that_are_made_for_it(tmp_path):
    path = tmp_path / "a" / "b.json"
    atomic_write(path, "old")
    atomic_write(path, "new")
    assert path.read_text() == "new"
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("failing", ["write_text", "replace"])
def test_a_failed_write_keeps_the_old_text_and_leaves_no_other_file(tmp_path, monkeypatch, failing):
    path = tmp_path / "kept.json"
    atomic_write(path, "old")
    right = Path.write_text

    def fail(self: Path, *given: object, **options: object) -> None:
        right(self, "half a te")
        raise OSError("no space left on device")

    monkeypatch.setattr(Path, failing, fail)
    with pytest.raises(OSError, match="no space left"):
        atomic_write(path, "new")
    assert list(tmp_path.iterdir()) == [path]
    assert path.read_text() == "old"


def test_free_memory_is_a_part_of_the_memory():
    assert 0 < free_memory_bytes() <= memory_bytes()


def test_without_the_systems_word_all_memory_is_free(monkeypatch):
    def fail(self: Path, *_given: object, **_options: object) -> str:
        raise OSError("no such file")

    monkeypatch.setattr(Path, "read_text", fail)
    assert free_memory_bytes() == memory_bytes()
