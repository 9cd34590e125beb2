"""How far a head's drafts are from the target: the loss, its gradient, and how many drafts would be accepted.

The label of a draft is the target's whole distribution after the text before it. *Overlap* is the sum of the minima of
both distributions, 1 - their total variation: the best probability of acceptance at temperature 1. With a short
vocabulary the target's other tokens count as missed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from faser.models.transformer import Transformer
from tools.heads.modules import HeadModule


@dataclass(frozen=True)
class LossMix:
    """loss = kl * KL(target || head) + (1 - kl) * total variation + confidence * binary cross-entropy.

    Summed over the drafts of a chain with `weights` [drafts], which sum to 1; the mean over chains.
    """

    kl: float
    weights: Tensor
    confidence: float = 1.0


def decaying(num_drafts: int, factor: float) -> Tensor:
    """[drafts]: 1, factor, factor², …, scaled to the sum 1."""
    weights = factor ** torch.arange(num_drafts, dtype=torch.float32)
    return weights / weights.sum()


@dataclass(frozen=True)
class Judged:
    """Means over all chains of a batch, by draft. Tensors on the device: reading them waits for it."""

    loss: Tensor  # scalar
    overlap: Tensor  # [drafts]
    agreement: Tensor  # [drafts]: the best tokens are the same


@torch.no_grad()
def labels(target: Transformer, right: Tensor, vocabulary: Tensor | None) -> tuple[Tensor, Tensor]:
    """The target's log-probabilities of the vocabulary's tokens [..., vocabulary], and its best tokens [...]."""
    whole = F.linear(right, target.head).float()
    best, log_p = whole.argmax(dim=-1), whole.log_softmax(dim=-1)
    return log_p if vocabulary is None else log_p[..., vocabulary], best


def compare(logits: Tensor, log_p: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """KL(target || head) within the vocabulary, times the target's probability of the vocabulary; the overlap; and the
    head's best column. logits and log_p [..., vocabulary]; all results [...]
    """
    log_q, p = logits.float().log_softmax(dim=-1), log_p.exp()
    mass = p.sum(dim=-1)
    kl = (p * (log_p - log_q)).sum(dim=-1) - torch.xlogy(mass, mass)
    overlap = torch.minimum(p, log_q.exp()).sum(dim=-1)
    return kl, overlap, logits.detach().argmax(dim=-1)


Comparison = Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]  # `compare`, or the same compiled


def backward(
    module: HeadModule,
    target: Transformer,
    tokens: Tensor,
    right: Tensor,
    states: Tensor,
    anchors: Tensor,
    mix: LossMix,
    comparison: Comparison = compare,
    chunk: int = 8192,
) -> Judged:
    """Add the gradient of one batch to the module's.

    tokens [sequences, tokens]; right [sequences, tokens, hidden]: the target's normed output; states and anchors as
    in HeadModule.states. Logits exist for about `chunk` tokens at a time; the target's serve all drafts.
    """
    num_sequences, num_tokens = tokens.shape
    num_chains, device = anchors.shape[1], tokens.device
    leaf = states.detach().requires_grad_(True)
    sums = torch.zeros(3, module.num_drafts, device=device)
    step = max(1, chunk // num_tokens)
    for first in range(0, num_sequences, step):
        part = slice(first, first + step)
        log_p, best = labels(target, right[part], module.vocabulary)
        sequence = torch.arange(len(log_p), device=device)[:, None]
        for draft in range(module.num_drafts):
            place = anchors[part] + draft  # of the token before the draft, whose label is the draft's
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                before, rows = tokens[part].gather(1, place), leaf[part, :, draft]
                logits, odds = module.logits(rows, before), module.confidence(rows, before)
            kl, overlap, guess = comparison(logits, log_p[sequence, place])
            loss = mix.kl * kl + (1 - mix.kl) * (1 - overlap)
            if odds is not None:
                loss = loss + mix.confidence * F.binary_cross_entropy_with_logits(
                    odds.float(), overlap.detach(), reduction="none"
                )
            (loss.sum() * (mix.weights[draft] / (num_sequences * num_chains))).backward()
            guess = guess if module.vocabulary is None else module.vocabulary[guess]
            agrees = guess == best[sequence, place]
            sums[:, draft] += torch.stack((loss.detach().sum(), overlap.detach().sum(), agrees.sum()))
    states.backward(leaf.grad)
    loss_by_draft, overlap, agreement = sums / (num_sequences * num_chains)
    return Judged((loss_by_draft * mix.weights.to(device)).sum(), overlap, agreement)
