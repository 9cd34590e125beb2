"""A draft's own weights move into a block of memory, and the model computes as before."""

from __future__ import annotations

import pytest
import torch

from faser.models.transformer import Transformer
from faser.runtime.weights_home import ALIGNMENT, WeightsHome, home_bytes, move_in, own_weights
from tests.tiny import CONFIGS, make_draft, make_model


@pytest.fixture(params=["llama2", "llama3", "qwen3"])
def target(request):
    return make_model(request.param)


def snapshot(model: Transformer) -> list[torch.Tensor]:
    return [weight.clone() for weight in model.weights()]


def same(model: Transformer, weights: list[torch.Tensor]) -> bool:
    pairs = list(zip(model.weights(), weights, strict=True))
    return all(torch.equal(mine, theirs) and mine.stride() == theirs.stride() for mine, theirs in pairs)


def test_weights_that_moved_in_are_the_same_and_lie_in_the_block(target):
    draft = make_draft(target)
    before, weights = snapshot(draft), own_weights(draft, target)
    block = torch.full((home_bytes(weights),), 255, dtype=torch.uint8)
    move_in(weights, block)
    assert same(draft, before)
    first = block.data_ptr()
    for weight in draft.weights():
        assert first <= weight.data_ptr() < first + block.numel()
        assert (weight.data_ptr() - first) % ALIGNMENT == 0
    assert (draft.head is draft.embedding) == target.config.tie_embeddings


def test_weights_leave_and_enter_another_block(target):
    draft = make_draft(target)
    before = snapshot(draft)
    home = WeightsHome(own_weights(draft, target))
    first, second = (torch.empty(home.num_bytes, dtype=torch.uint8) for _ in range(2))
    home.save(first)
    home.leave()
    assert all(weight.numel() == 0 for weight in draft.weights())
    second.copy_(first)
    home.enter(second)
    assert same(draft, before)
    first.zero_()
    assert same(draft, before)


def test_what_a_draft_shares_with_its_target_stays():
    target = make_model("llama3")
    draft = Transformer.shared(target, target.config)
    own = own_weights(draft, target)
    assert all(weight is not draft.embedding for weight in own)
    assert len(own) == len(list(draft.weights())) - 1
    embedding = target.embedding.clone()
    home = WeightsHome(own)
    home.leave()
    assert torch.equal(draft.embedding, embedding)
    assert draft.embedding is target.embedding


def test_a_model_is_no_draft_of_its_own():
    model = Transformer.random(CONFIGS["qwen2"], 0)
    assert own_weights(model, model) == []
