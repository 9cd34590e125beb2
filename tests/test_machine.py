"""Files that are never half written."""

from __future__ import annotations

from pathlib import Path

import pytest

from faser.machine import atomic_write


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
