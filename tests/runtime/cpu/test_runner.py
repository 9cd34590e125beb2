"""Paged, grouped attention against plain dense attention."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from faser.limits import KeyWindow
from faser.models.config import Rope
from faser.models.transformer import Transformer
from faser.runtime.cpu import runner as cpu
from faser.runtime.cpu.runner import CpuAttention, ModelRunner, Rows
from faser.runtime.kv_cache import bytes_per_page, pages_over
from faser.step import KeyStarts
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
        num_groups.add(len(attend._groups[None]))
        hidden = model.run_layers(model.embed(tokens[rows.owners, rows.positions]), attend)
        wanted = torch.stack([right[o][p] for o, p in zip(rows.owners, rows.positions, strict=True)])
        torch.testing.assert_close(model.logits(hidden), wanted, atol=1e-4, rtol=1e-4)
    assert max(num_groups) > (2 if group_bytes < 10**9 else 1)


YARN = replace(CONFIGS["llama3"], rope=Rope(1000.0, "yarn", 4.0, 32, attention_factor=1.2))
MIXED = replace(CONFIGS["qwen2"], windows=(11, 0, 7))


@pytest.mark.parametrize("group_bytes", [1, 10**9])
@pytest.mark.parametrize(
    ("config", "window"),
    [
        (CONFIGS["llama3"], KeyWindow(9, 3)),
        (CONFIGS["qwen3"], KeyWindow(12)),
        (YARN, KeyWindow(10, 5)),
        (CONFIGS["qwen2"], KeyWindow(50, 4)),
        (MIXED, None),
    ],
)
def test_rows_see_their_windows_and_no_page_outside(config, window, group_bytes, monkeypatch):
    """In the third step the last request begins again at token 17: what was there before is gone."""
    monkeypatch.setattr(cpu, "GROUP_BYTES", group_bytes)
    model = Transformer.random(config, 0, std=0.3)
    windows = (window,) * 3 if window is not None else config.layer_windows
    tokens = torch.randint(0, 61, (NUM_SLOTS, NUM_TOKENS), generator=torch.Generator().manual_seed(0))
    begin = 17 if window is not None else 0
    first = torch.where(torch.arange(NUM_TOKENS) < begin, 0, begin)
    right = [forward(model, row, windows, first if slot == NUM_SLOTS - 1 else None) for slot, row in enumerate(tokens)]
    num_pages = NUM_SLOTS * NUM_TOKENS // PAGE_SIZE
    memory = torch.zeros(num_pages * bytes_per_page(config, PAGE_SIZE, torch.float32), dtype=torch.uint8)
    pages = pages_over(memory, config, PAGE_SIZE, torch.float32)
    pages.fill_(torch.nan)
    runner = ModelRunner(model, pages, NUM_SLOTS, NUM_TOKENS, window=window)
    runner._table[:] = np.random.default_rng(0).permutation(num_pages).reshape(NUM_SLOTS, -1)
    for number, step in enumerate(STEPS):
        start, count = (np.array(column) for column in zip(*step, strict=True))
        rows = Rows.of(np.arange(NUM_SLOTS), start, count)
        if number == 2 and begin:
            runner.begin_again(KeyStarts(np.array([NUM_SLOTS - 1]), np.array([begin])))
        if window is not None:  # pages that no row sees may be another request's
            for slot, position in enumerate(start.tolist()):
                unseen = int(window.first(np.array(position))) // PAGE_SIZE
                pages[:, runner._table[slot, -(-window.sinks // PAGE_SIZE) : unseen]] = torch.nan
        hidden = runner.run(rows, model.embed(tokens[rows.owners, rows.positions]))
        wanted = torch.stack([right[o][p] for o, p in zip(rows.owners, rows.positions, strict=True)])
        torch.testing.assert_close(model.logits(hidden), wanted, atol=1e-4, rtol=1e-4)


def test_a_window_that_holds_the_context_gives_the_same_bits():
    model = make_model("llama3")
    tokens = torch.randint(0, 61, (NUM_TOKENS,), generator=torch.Generator().manual_seed(0))
    found = []
    for window in (None, KeyWindow(NUM_TOKENS - 4, 4)):
        memory = torch.zeros(15 * bytes_per_page(model.config, PAGE_SIZE, torch.float32), dtype=torch.uint8)
        runner = ModelRunner(
            model, pages_over(memory, model.config, PAGE_SIZE, torch.float32), 1, NUM_TOKENS, window=window
        )
        runner._table[:] = np.arange(15)
        for start, count in [(0, 30), (30, 1), (31, 5), (36, 24)]:
            rows = Rows.of(np.array([0]), np.array([start]), np.array([count]))
            found.append(runner.run(rows, model.embed(tokens[rows.positions])))
    for whole, windowed in zip(found[:4], found[4:], strict=True):
        assert torch.equal(whole, windowed)
