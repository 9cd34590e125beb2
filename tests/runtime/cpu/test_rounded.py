"""Models that round on the CPU: right, and the same bits however rows are computed together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from faser.models.layers import rotate
from faser.models.quantised.packed import for_cpu
from faser.models.quantised.placement import packed_matrices, with_weights
from faser.models.quantised.rounding import to_groups
from faser.models.transformer import Layer, Transformer
from faser.request import Request, SamplingParams
from faser.runtime.cpu.rounded import BlockRunner, RoundedAttention, WideAttention
from faser.runtime.cpu.runner import ModelRunner, Rows
from faser.runtime.kv_cache import ROUNDED, KvFormat, bytes_per_page, pages_over, round_kv
from faser.step import KvCopies, PageMoves, PageWrites
from tests.oracle import RandomLengths
from tests.test_exactness import make_engine, serve
from tests.tiny import CONFIGS, make_draft, make_model

PAGE_SIZE, NUM_TOKENS, NUM_SLOTS = 4, 40, 3
SCALES = (0.7, 0.03)
# Products of these shapes have other last bits at other numbers of rows.
LARGE = replace(CONFIGS["llama3"], hidden_size=192, num_heads=6, num_kv_heads=3, head_dim=32, intermediate_size=320)


def pack(model: Transformer, fields: Sequence[str]) -> Transformer:
    """With these matrices of every layer packed, four bits a weight."""

    def packed(layer: Layer) -> Layer:
        codes = {name: to_groups(getattr(layer, name), 4, 32) for name in fields}
        return replace(layer, **{name: for_cpu(each, model.dtype, packs=True) for name, each in codes.items()})

    return with_weights(model, tuple(map(packed, model.layers)), model.head)


PACKED = {"all": ("qkv", "out", "gate_up", "down"), "some": ("gate_up", "down")}


MODELS = {**{name: lambda name=name: make_model(name) for name in CONFIGS},
          "large": lambda: Transformer.random(LARGE, 0, std=0.1),
          **{f"packed: {name}": lambda fields=fields: pack(Transformer.random(LARGE, 0, std=0.1), fields)
             for name, fields in PACKED.items()}}  # fmt: skip


def make_runner(model: Transformer) -> ModelRunner:
    """With a page table in which every slot has all its pages. A plain model has keys and values of 8 bits."""
    num_pages, packed = NUM_SLOTS * NUM_TOKENS // PAGE_SIZE, packed_matrices(model)
    dtype = ROUNDED if packed == "none" else model.dtype
    memory = torch.full((num_pages * bytes_per_page(model.config, PAGE_SIZE, dtype),), 0x7F, dtype=torch.uint8)
    pages = pages_over(memory, model.config, PAGE_SIZE, dtype)  # NaN wherever nothing is written
    attention = WideAttention
    if packed == "none":
        attention = partial(RoundedAttention, kv=KvFormat(ROUNDED, (SCALES,) * model.num_layers))
    make = ModelRunner if packed == "all" else BlockRunner
    runner = make(model, pages, NUM_SLOTS, NUM_TOKENS, attention=attention)
    table = np.random.default_rng(0).permutation(num_pages).reshape(NUM_SLOTS, -1)
    slots, columns = np.indices(table.shape)
    runner.apply(PageWrites(slots.ravel(), columns.ravel(), table.ravel()))
    return runner


def run(model: Transformer, tokens: torch.Tensor, steps: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states [slots, tokens, hidden], and the bytes of all pages; `steps` are rows of each slot."""
    runner, done = make_runner(model), np.zeros(NUM_SLOTS, dtype=np.int64)
    hidden = torch.empty(NUM_SLOTS, NUM_TOKENS, model.config.hidden_size)
    for step in steps:
        rows = Rows.of(np.arange(NUM_SLOTS), done.copy(), np.array(step))
        hidden[rows.owners, rows.positions] = runner.run(rows, model.embed(tokens[rows.owners, rows.positions]))
        done += step
    assert (done == NUM_TOKENS).all()
    return hidden, runner._pages.view(torch.uint8)


STEPS = {
    "all at once": [[40, 40, 40]],
    "one by one": [[1, 1, 1]] * 40,
    "one alone": [[1, 0, 0]] * 40 + [[0, 1, 0]] * 40 + [[0, 0, 1]] * 40,
    "ragged": [[7, 0, 1], [1, 1, 1], [5, 13, 2], [1, 6, 5], [9, 1, 1], [17, 19, 30]],
}


@pytest.fixture(scope="module", params=MODELS, ids=MODELS)
def runs(request):
    model = MODELS[request.param]()
    tokens = torch.randint(3, 61, (NUM_SLOTS, NUM_TOKENS), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        return model, tokens, {name: run(model, tokens, steps) for name, steps in STEPS.items()}


@pytest.mark.parametrize("steps", [name for name in STEPS if name != "all at once"])
def test_a_row_has_the_same_bits_whatever_it_is_computed_with(runs, steps):
    _, _, by_steps = runs
    (hidden, pages), (expected, expected_pages) = by_steps[steps], by_steps["all at once"]
    assert torch.equal(pages, expected_pages)
    assert torch.equal(hidden, expected)


def test_rows_attend_like_whole_sequences_of_rounded_keys_and_values(runs):
    model, tokens, by_steps = runs
    if packed_matrices(model) != "none":
        pytest.skip("its keys and values are not rounded")
    hidden = by_steps["ragged"][0]
    with torch.inference_mode():
        for row in range(NUM_SLOTS):
            wanted = model.run_layers(model.embed(tokens[row]), rounding_attention(model))
            error = (hidden[row] - wanted).norm() / wanted.norm()
            assert error < 1e-3, "a number near the middle of two may be rounded the other way"


def rounding_attention(model: Transformer):
    """Attention of one sequence to itself in float32, its keys and values rounded first."""
    config = model.config

    def attend(layer: int, qkv: torch.Tensor) -> torch.Tensor:
        rows, (key_scale, value_scale) = qkv.shape[0], SCALES
        cos, sin = (each[:, None] for each in model.rotation(torch.arange(rows)))
        query, key, value = qkv.clone().split((config.num_heads, config.num_kv_heads, config.num_kv_heads), dim=1)
        key = (rotate(key, cos, sin) / key_scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * key_scale
        value = (value / value_scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * value_scale
        fold = config.num_heads // config.num_kv_heads
        query, key, value = (
            each.transpose(0, 1)
            for each in (rotate(query, cos, sin), key.repeat_interleave(fold, 1), value.repeat_interleave(fold, 1))
        )
        scores = query @ key.transpose(1, 2) * config.head_dim**-0.5
        scores.masked_fill_(torch.ones(rows, rows, dtype=torch.bool).triu(1), -torch.inf)
        return (scores.softmax(-1) @ value).transpose(0, 1).flatten(1)

    return attend


def test_what_is_out_of_range_becomes_the_largest_number():
    x = torch.tensor([447.0, 465.0, 1e9, -1e9, torch.inf, -torch.inf, 1e-9, -0.0])
    wanted = [448.0, 448.0, 448.0, -448.0, 448.0, -448.0, 0.0, 0.0]
    assert round_kv(x, 1.0).float().tolist() == wanted
    assert round_kv(x * 0.01, 0.01).float().tolist() == wanted
    assert round_kv(x.bfloat16(), 1.0).float().tolist() == wanted


def test_entries_and_pages_are_copied_byte_by_byte():
    runner = make_runner(make_model())
    entries = runner._pages.view(torch.uint8).flatten(1, 2)
    entries.copy_(torch.randint(0, 256, entries.shape, generator=torch.Generator().manual_seed(0)))
    before = entries.clone()
    runner.copy(KvCopies(np.array([5, 9, 17]), np.array([9, 17, 2])))
    assert torch.equal(entries[:, [9, 17, 2]], before[:, [5, 9, 17]])
    runner.move(PageMoves(np.array([8]), np.array([6])))
    assert torch.equal(entries[:, 24:28], before[:, 32:36])


@pytest.mark.parametrize("packed", PACKED)
def test_packed_weights_let_no_output_depend_on_speculation(packed):
    target = MODELS[f"packed: {packed}"]()
    params = SamplingParams(max_tokens=40, temperature=1.0, ignore_eos=True)
    requests = [Request(id=str(i), prompt_token_ids=(5 + i, 9, 30 - i), params=params, seed=i) for i in range(12)]
    right = [serve(make_engine(target), [each]).tokens[each.id] for each in requests]
    outcome = serve(make_engine(target, make_draft(MODELS["large"]()), RandomLengths()), requests)
    assert [outcome.tokens[each.id] for each in requests] == right
    assert outcome.total.drafted > 100
