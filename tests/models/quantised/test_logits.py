"""Logits of every format against a float32 model whose weights were dequantised first."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks.perplexity import logits_of
from faser.models.config import ModelConfig
from faser.models.quantised import dequantise, folders
from faser.models.quantised.placement import PARTS, with_weights
from faser.models.source import open_target
from faser.models.transformer import Transformer
from tests.models.quantised.layouts import LAYOUTS, VOCAB, write_layout

# Of the norm of the logits. Rows are rounded to 8-bit floats in each of 14 products: the mean error of a number is 2 %.
# Packed products are those of bfloat16. Static scales of these layouts are made up, and rows overflow them.
BOUNDS = {"fp8": 0.1, "packed": 0.01, "plain": 1e-5}


def bound(layout: str, quantised: str) -> float:
    if "fp8" in layout:
        return BOUNDS["fp8"]
    return BOUNDS["plain" if quantised == "off" or "act-order" in layout else "packed"]


def dequantised(model: Transformer) -> Transformer:
    layers = tuple(replace(each, **{name: dequantise(getattr(each, name)) for name in PARTS}) for each in model.layers)
    return with_weights(model, layers, dequantise(model.head))


def error(model: Transformer, expected: Transformer, num_rows: int) -> float:
    token_ids = torch.randint(3, VOCAB, (num_rows,), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        wanted = logits_of(expected, token_ids)
        return float((logits_of(model, token_ids) - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if "static" not in name])
@pytest.mark.parametrize("quantised", ["off", "on"])
def test_a_random_model_has_the_logits_of_its_weights(tmp_path, layout, quantised):
    write_layout(tmp_path, layout)
    config = ModelConfig.from_folder(tmp_path)
    model, plain = (folders.load(tmp_path, config, torch.float32, quantised=mode) for mode in (quantised, "off"))
    assert error(model, dequantised(plain), 24) < bound(layout, quantised)


def test_the_default_model_has_the_logits_of_its_weights():
    source = open_target(None)
    packed, plain = (source.load(torch.float32, 64, lambda *_: None, "cpu", mode) for mode in ("on", "off"))
    assert packed.formats != plain.formats
    assert error(packed, plain, 24) < 0.02
