"""The model as the rest of the system uses it: layer ranges, no memory between calls, sizes."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from faser.errors import ConfigError
from faser.models.transformer import Transformer
from tests.models.reference import dense_attend, forward, small_config

ODD = small_config(
    family="qwen3", qk_norm=True, qkv_bias=True, out_bias=True, tie_embeddings=True, head_dim=16, max_positions=64
)


def token_ids(rows: int) -> torch.Tensor:
    return torch.randint(0, 96, (rows,), generator=torch.Generator().manual_seed(rows))


@pytest.mark.parametrize("middle", [0, 1, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_running_in_pieces_gives_the_same_bits_as_running_whole(middle: int, dtype: torch.dtype) -> None:
    model = Transformer.random(ODD, seed=0, dtype=dtype, std=0.2)
    attend = dense_attend(model)
    with torch.inference_mode():
        hidden = model.embed(token_ids(7))
        whole = model.run_layers(hidden, attend)
        pieces = model.run_layers(model.run_layers(hidden, attend, 0, middle), attend, middle)
    assert torch.equal(whole, pieces)


def test_two_forwards_may_be_in_flight_at_once() -> None:
    model = Transformer.random(ODD, seed=0, std=0.2)
    alone = [forward(model, token_ids(rows)) for rows in (5, 9)]
    with torch.inference_mode():
        hidden = [model.embed(token_ids(rows)) for rows in (5, 9)]
        for layer in range(model.num_layers):
            hidden = [model.run_layers(each, dense_attend(model), layer, layer + 1) for each in hidden]
        together = [model.logits(each) for each in hidden]
    assert all(torch.equal(*pair) for pair in zip(alone, together, strict=True))


def test_layers_do_not_write_to_the_hidden_they_are_given() -> None:
    model = Transformer.random(ODD, seed=0, std=0.2)
    with torch.inference_mode():
        hidden = model.embed(token_ids(6))
        before = hidden.clone()
        model.run_layers(hidden, dense_attend(model))
        model.logits(hidden)
    assert torch.equal(hidden, before)


def test_attend_sees_each_layer_once_with_queries_keys_and_values() -> None:
    model = Transformer.random(ODD, seed=0)
    seen: list[tuple[int, tuple[int, ...]]] = []

    def attend(layer_index: int, qkv: torch.Tensor) -> torch.Tensor:
        seen.append((layer_index, tuple(qkv.shape)))
        return qkv[:, :4].flatten(1)

    with torch.inference_mode():
        model.run_layers(model.embed(token_ids(3)), attend, first=1, last=3)
    assert seen == [(1, (3, 8, 16)), (2, (3, 8, 16))]


def test_a_forward_of_no_rows_is_empty() -> None:
    model = Transformer.random(ODD, seed=0)
    with torch.inference_mode():
        hidden = model.run_layers(model.embed(token_ids(0)), lambda _, qkv: qkv[:, :4].flatten(1))
        assert model.logits(hidden).shape == (0, 96)


def test_random_models_repeat_by_seed_and_differ_between_seeds() -> None:
    first, again, other = (forward(Transformer.random(ODD, seed=seed), token_ids(4)) for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_random_models_have_norms_near_one_and_biases_that_are_not_zero() -> None:
    layer = Transformer.random(ODD, seed=0).layers[0]
    for norm in (layer.attention_norm, layer.mlp_norm, layer.qk_norm):
        assert norm is not None
        assert 0.9 < norm.mean() < 1.1
        assert norm.std() > 0.01
    assert layer.qkv_bias is not None
    assert layer.qkv_bias.abs().min() > 0


def test_num_bytes_counts_a_tied_head_once() -> None:
    tied = Transformer.random(ODD, seed=0)
    untied = Transformer.random(dataclasses.replace(ODD, tie_embeddings=False), seed=0)
    assert tied.head is tied.embedding
    assert untied.num_bytes - tied.num_bytes == 96 * 48 * 4


def test_position_tables_are_as_long_as_asked_and_no_longer_than_the_model_knows() -> None:
    assert Transformer.random(ODD, seed=0, max_positions=10).cos.shape == (10, 8)
    assert Transformer.random(ODD, seed=0).sin.shape == (64, 8)
    with pytest.raises(ConfigError, match="max_positions=65: expected 1 to 64"):
        Transformer.random(ODD, seed=0, max_positions=65)
