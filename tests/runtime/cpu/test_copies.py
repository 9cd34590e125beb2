"""KV that is taken over: what was there before pages moved is copied, in every layer."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from faser.runtime.cpu.runner import ModelRunner
from faser.step import KvCopies, PageMoves
from tests.oracle import make_request
from tests.test_exactness import make_engine
from tests.tiny import make_model


def test_entries_are_copied_in_every_layer_and_sources_are_read_first():
    pages = torch.randn(3, 6, 4, 4, 8)
    before = pages.clone().flatten(1, 2)
    runner = ModelRunner(make_model(), pages, 2, 16)
    runner.copy(KvCopies(np.array([5, 9, 17]), np.array([9, 17, 2])))
    after = pages.flatten(1, 2)
    assert torch.equal(after[:, [9, 17, 2]], before[:, [5, 9, 17]])
    others = [i for i in range(24) if i not in (9, 17, 2)]
    assert torch.equal(after[:, others], before[:, others])


def test_a_step_copies_before_it_moves_pages(monkeypatch):
    """A move may write to pages that were given up by the context that is copied from."""

    engine, order = make_engine(make_model()), []
    monkeypatch.setattr(ModelRunner, "copy", lambda self, copies: order.append("copy"))
    monkeypatch.setattr(ModelRunner, "move", lambda self, moves: order.append("move"))

    engine.add(make_request("r", [3, 4, 5], 1))
    plan = engine.scheduler.plan()
    none = np.zeros(0, dtype=np.int64)
    engine.executor.execute(replace(plan, copies=KvCopies(none, none), moves=PageMoves(none, none)))
    assert order == ["copy", "move"]
