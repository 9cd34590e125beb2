"""Paged, grouped attention against plain dense attention."""

import numpy as np
import pytest
import torch

from faser.runtime.cpu import runner as cpu
from faser.runtime.cpu.runner import CpuAttention, Rows
from faser.runtime.kv_cache import bytes_per_page, pages_over
from tests.models.reference import forward
from tests.tiny import CONFIGS, make_model

PAGE_SIZE, NUM_TOKENS, NUM_SLOTS = 4, 60, 6
STEPS = [  # (start, count) of each slot: prompts, then decodes and verifications of unequal lengths, then long chunks
    [(0, 5), (0, 20), (0, 1), (0, 9), (0, 2), (0, 16)],
    [(5, 1), (20, 1), (1, 1), (9, 1), (2, 1), (16, 1)],
    [(6, 3), (21, 1), (2, 9), (10, 2), (3, 5), (17, 4)],
    [(9, 18), (22, 1), (11, 33), (12, 7), (8, 1), (21, 39)],
]


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("group_bytes", [1, 2000, 10**9])
def test_rows_in_pages_attend_like_whole_sequences(name, group_bytes, monkeypatch):
    monkeypatch.setattr(cpu, "GROUP_BYTES", group_bytes)
    monkeypatch.setattr(cpu, "SPARE_PAGES", 2)
    model = make_model(name)
    tokens = torch.randint(0, 61, (NUM_SLOTS, NUM_TOKENS), generator=torch.Generator().manual_seed(0))
    right = [forward(model, row) for row in tokens]
    num_pages = NUM_SLOTS * NUM_TOKENS // PAGE_SIZE
    memory = torch.zeros(num_pages * bytes_per_page(model.config, PAGE_SIZE, torch.float32), dtype=torch.uint8)
    pages = pages_over(memory, model.config, PAGE_SIZE, torch.float32)
    pages.fill_(torch.nan)  # what was there before must not matter
    table = np.random.default_rng(0).permutation(num_pages).reshape(NUM_SLOTS, -1)
    num_groups = set()
    for step in STEPS:
        start, count = (np.array(column) for column in zip(*step, strict=True))
        rows = Rows.of(np.arange(NUM_SLOTS), start, count)
        attend = CpuAttention(model, pages, table, rows)
        num_groups.add(len(attend._groups))
        hidden = model.run_layers(model.embed(tokens[rows.owners, rows.positions]), attend)
        wanted = torch.stack([right[o][p] for o, p in zip(rows.owners, rows.positions, strict=True)])
        torch.testing.assert_close(model.logits(hidden), wanted, atol=1e-4, rtol=1e-4)
    assert max(num_groups) > (2 if group_bytes < 10**9 else 1)
