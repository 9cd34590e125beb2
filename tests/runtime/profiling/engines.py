"""Engines of tiny models whose policy needs a profile."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from faser import build
from faser.arrays import IntArray
from faser.policy import BatchView, Policy
from faser.runtime.profiling.batches import Subject
from tests.runtime.profiling.machine import CPU, machine
from tests.test_exactness import make_engine


class Costly(Policy):
    """Drafts three tokens, and is only asked by who knows what they cost."""

    name = "costly"
    needs_cost = True
    max_length = 3

    def lengths(self, view: BatchView) -> IntArray:
        assert view.cost is not None
        assert float(view.cost.verify(view.num_requests, 100)) >= 0  # an interpreter measures nothing
        return np.full(view.num_requests, 3, dtype=np.int64)


def make_full(*args, **others):
    return make_engine(*args, profiling="full", **others)


def stub(monkeypatch) -> list[Subject]:
    """Measuring takes no time, and is counted."""
    measured: list[Subject] = []

    def fake(subject, about, seconds, update):
        measured.append(subject)
        return replace(machine(CPU), about=about, errors={"verify": 0.1, "verify_worst": 0.1, "draft": 0.05})

    monkeypatch.setattr(build, "measure", fake)
    return measured
