"""The loss is what its formula says, its gradient is exact, and chunks change neither."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.tools.heads.toys import KINDS, make_head_module, make_toy, random_tokens
from tools.distill import features_of
from tools.heads.loss import LossMix, backward, compare, decaying
from tools.heads.modules import all_anchors

LENGTH = 12


def test_weights_decay_and_sum_to_one():
    assert decaying(3, 0.5).tolist() == pytest.approx([4 / 7, 2 / 7, 1 / 7])


def test_equal_distributions_have_no_divergence_and_overlap_wholly():
    logits = torch.randn(5, 9, generator=torch.Generator().manual_seed(0))
    kl, overlap, best = compare(logits, logits.log_softmax(-1))
    torch.testing.assert_close(kl, torch.zeros(5), atol=1e-6, rtol=0)
    torch.testing.assert_close(overlap, torch.ones(5))
    assert torch.equal(best, logits.argmax(-1))


def test_what_a_short_vocabulary_misses_never_overlaps():
    """The head is certain of one of two tokens that have 0.3 and 0.1 of the target's probability."""
    log_p = torch.tensor([[0.3, 0.1]]).log()
    kl, overlap, _ = compare(torch.tensor([[50.0, 0.0]]), log_p)
    assert overlap.item() == pytest.approx(0.3)
    kl, overlap, _ = compare(log_p, log_p)  # the right proportion
    assert kl.item() == pytest.approx(0, abs=1e-6)
    assert overlap.item() == pytest.approx(0.4)


def test_a_vocabulary_without_any_probability_gives_a_finite_loss():
    kl, overlap, _ = compare(torch.zeros(1, 2), torch.full((1, 2), -200.0))
    assert kl.item() == 0
    assert overlap.item() == 0


@pytest.mark.parametrize("chunk", [1, 2 * LENGTH, 1000])
@pytest.mark.parametrize("name", KINDS)
def test_loss_and_gradient_are_those_of_the_whole_batch_at_once(name, chunk):
    target, tokens = make_toy(), random_tokens(3, LENGTH)
    module = make_head_module(name, target)
    features, right = features_of(target, tokens, module.head_config.feature_layers)
    anchors = all_anchors(3, LENGTH, module.num_drafts, torch.device("cpu"))
    mix = LossMix(0.3, decaying(module.num_drafts, 0.8))

    states = module.states(tokens, features, anchors)
    places = anchors[..., None] + torch.arange(module.num_drafts)
    rows = torch.arange(3)[:, None, None]
    before, p = tokens[rows, places], F.linear(right, target.head).softmax(-1)[rows, places]
    chosen = torch.arange(61) if module.vocabulary is None else module.vocabulary
    q = module.logits(states, before).softmax(-1)
    kept = p[..., chosen]
    mass = kept.sum(-1, keepdim=True)
    kl = (kept * (kept / mass / q).log()).sum(-1)
    variation = 0.5 * ((kept - q).abs().sum(-1) + 1 - mass[..., 0])
    loss = 0.3 * kl + 0.7 * variation
    odds = module.confidence(states, before)
    if odds is not None:
        loss = loss + F.binary_cross_entropy(odds.sigmoid(), 1 - variation.detach(), reduction="none")
    expected = (loss.mean(dim=(0, 1)) * mix.weights).sum()
    gradients = torch.autograd.grad(expected, list(module.parameters()))

    again = module.states(tokens, features, anchors)
    judged = backward(module, target, tokens, right, again, anchors, mix, chunk=chunk)
    torch.testing.assert_close(judged.loss, expected.detach(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(judged.overlap, 1 - variation.detach().mean(dim=(0, 1)), rtol=1e-4, atol=1e-5)
    agreement = (chosen[q.argmax(-1)] == p.argmax(-1)).float().mean(dim=(0, 1))
    torch.testing.assert_close(judged.agreement, agreement)
    for parameter, gradient in zip(module.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-3, atol=1e-5)
