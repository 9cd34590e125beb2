"""A head in training computes what the head that serves computes, and mixes exactly the rows it should."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from faser.models.heads import BlockHead
from faser.models.heads.whole import attend, chain_logits, chain_states
from tests.tools.heads.toys import KINDS, make_head_module, make_toy, random_tokens
from tools.distill import features_of
from tools.heads.convert import serving_head
from tools.heads.modules import HeadModule, all_anchors, random_anchors

LENGTH = 14


def plain_attention(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """One row: query [heads, head_dim], keys and values [rows, KV heads, head_dim]."""
    group = query.shape[0] // keys.shape[1]
    mixed = []
    for head, row in enumerate(query):
        scores = keys[:, head // group] @ row / len(row) ** 0.5
        mixed.append(scores.softmax(0) @ values[:, head // group])
    return torch.cat(mixed)


@pytest.mark.parametrize("num_own", [0, 1, 3])
def test_rows_attend_to_the_visible_context_and_to_their_own_chain(num_own):
    torch.manual_seed(0)
    query = torch.randn(2, 3, 2, 4, 6)
    context = torch.randn(2, 5, 2, 6), torch.randn(2, 5, 2, 6)
    own = torch.randn(2, 3, num_own, 2, 6), torch.randn(2, 3, num_own, 2, 6)
    visible = torch.arange(5) <= torch.tensor([[1, 3, 2], [0, 4, 4]])[..., None]
    result = attend(query, context, own, visible)
    for s, chain, row in torch.cartesian_prod(torch.arange(2), torch.arange(3), torch.arange(2)):
        seen = visible[s, chain]
        keys, values = (torch.cat((far[s, seen], near[s, chain])) for far, near in zip(context, own, strict=True))
        torch.testing.assert_close(result[s, chain, row], plain_attention(query[s, chain, row], keys, values))


def anchors_of(module: HeadModule, num_sequences: int) -> Tensor:
    return all_anchors(num_sequences, LENGTH, module.num_drafts, torch.device("cpu"))


@pytest.mark.parametrize("name", KINDS)
@torch.no_grad()
def test_the_trained_function_is_the_function_that_serves(name):
    target, tokens = make_toy(), random_tokens(2, LENGTH)
    module = make_head_module(name, target)
    head = serving_head(module, target, torch.float32)
    features, _ = features_of(target, tokens, head.head_config.feature_layers)
    anchors = anchors_of(module, 2)
    states = module.states(tokens, features, anchors)
    assert states.shape == (2, LENGTH - module.num_drafts, module.num_drafts, 32)
    for s in range(2):
        served = chain_states(head, tokens[s], features[s, :-1], anchors[s], module.num_drafts)
        torch.testing.assert_close(states[s], served, rtol=1e-5, atol=1e-5)
        for draft in range(module.num_drafts):
            before = tokens[s, anchors[s] + draft]
            logits = module.logits(states[s, :, draft], before)
            torch.testing.assert_close(logits, chain_logits(head, served[:, draft], before), rtol=1e-5, atol=1e-5)
            odds = module.confidence(states[s, :, draft], before)
            if isinstance(head, BlockHead) and head.head_config.confidence:
                torch.testing.assert_close(odds.sigmoid(), head.confidence(served[:, draft], before))
            else:
                assert odds is None


@pytest.mark.parametrize("name", KINDS)
def test_a_draft_depends_on_the_features_before_the_anchor_and_the_tokens_up_to_itself(name):
    target, tokens = make_toy(), random_tokens(1, LENGTH)
    module = make_head_module(name, target)
    features, _ = features_of(target, tokens, module.head_config.feature_layers)
    features.requires_grad_(True)
    anchors = anchors_of(module, 1)
    chain, last = 4, module.num_drafts - 1
    states = module.states(tokens, features, anchors)
    (gradient,) = torch.autograd.grad(states[0, chain, last].sum(), features)
    touched = gradient[0].abs().sum(-1) > 0
    assert touched.tolist() == [place < anchors[0, chain] for place in range(LENGTH)]
    # A later token changes nothing; the token before the draft does, but in a block only through the Markov head.
    for place in range(LENGTH):
        changed = tokens.clone()
        changed[0, place] = (changed[0, place] + 1) % 61
        other = module.states(changed, features, anchors)
        same = torch.equal(other[0, chain, last], states[0, chain, last])
        if place > anchors[0, chain] + last:
            assert same
        if place == anchors[0, chain]:
            assert not same
        if place == anchors[0, chain] + last:
            assert same == (module.head_config.kind == "block")


def test_all_anchors_have_a_token_before_and_all_labels_behind():
    assert all_anchors(2, 6, 3, torch.device("cpu")).tolist() == [[1, 2, 3]] * 2


def test_random_anchors_are_distinct_positions_among_all():
    generator = torch.Generator().manual_seed(0)
    drawn = random_anchors(50, 20, 4, 5, generator)
    assert drawn.shape == (50, 5)
    for row in drawn.tolist():
        assert row == sorted(set(row))
    assert set(drawn.flatten().tolist()) == set(range(1, 17))
    assert random_anchors(1, 6, 3, 100, generator).tolist() == [[1, 2, 3]]


@pytest.mark.parametrize("name", ["eagle3 short", "dspark short"])
def test_bfloat16_autocast_computes_nearly_the_same_and_has_gradients(name):
    target, tokens = make_toy(), random_tokens(1, LENGTH)
    module = make_head_module(name, target)
    features, _ = features_of(target, tokens, module.head_config.feature_layers)
    anchors = anchors_of(module, 1)
    exact = module.states(tokens, features, anchors)
    with torch.autocast("cpu", torch.bfloat16):
        states = module.states(tokens, features, anchors)
        logits = module.logits(states, tokens[:, :1, None].expand(states.shape[:-1]))
    assert F.cosine_similarity(states.flatten(), exact.flatten(), dim=0) > 0.999
    logits.float().square().sum().backward()
    assert all(p.grad is not None for n, p in module.named_parameters() if not n.startswith("confidence"))
