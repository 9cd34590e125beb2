"""Tiny models, and a cache of their own."""

from __future__ import annotations

import pytest

from tests.tiny import make_draft, make_model


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FASER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def pair():
    target = make_model()
    return target, make_draft(target)


@pytest.fixture
def model(folder):
    return ["--model", str(folder), "--max-model-len", "64", "--device", "cpu", "--max-running", "4"]
