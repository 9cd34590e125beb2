"""The loss of the first stage: what every token says about its place, by a probe and in words.

Knows tokens of the eyes and labels of cells. Knows nothing of the language model but its embedding. The probe is a
linear map that is thrown away after the training. The second part pulls each token towards the sum of the embeddings
of the words for its cell, so that the frozen language model meets inputs near those it knows.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tools.watch.reader import Prompts
from tools.watch.scenes import DIRECTIONS
from tools.watch.sprites import KINDS
from tools.watch.targets import TARGETS

# Targets that are spelled in words. Empty cells and things that stand still have words of their own.
WORDS: dict[str, tuple[str, ...]] = {
    "kind": ("none", *KINDS),
    "motion": ("still", *DIRECTIONS),
    "count": tuple("0123456789"),
}
_RARE = {"kind": 4.0, "motion": 4.0, "centre": 4.0}  # weight of every class but the first, which most cells have


def word_table(prompts: Prompts, embedding: Tensor) -> dict[str, Tensor]:
    """[classes, hidden] by target: the embedding of each class's word, in float32."""
    ids = {name: torch.tensor([prompts.word(word) for word in words]) for name, words in WORDS.items()}
    return {name: embedding[each.to(embedding.device)].detach().float() for name, each in ids.items()}


class Probe(nn.Module):
    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden_size)
        self.classes = nn.Linear(hidden_size, sum(TARGETS.values()))

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        """tokens [..., hidden] -> logits [..., classes] by target."""
        parts = self.classes(self.norm(tokens)).float().split(list(TARGETS.values()), dim=-1)
        return dict(zip(TARGETS, parts, strict=True))


def probe_loss(logits: dict[str, Tensor], labels: dict[str, Tensor]) -> Tensor:
    """Cross-entropy, averaged over the targets. labels [grids, cells] by target."""
    losses = []
    for name, each in logits.items():
        weight = each.new_ones(each.shape[-1])
        weight[1:] *= _RARE.get(name, 1.0)
        losses.append(F.cross_entropy(each.flatten(0, -2), labels[name].flatten(), weight))
    return torch.stack(losses).mean()


def word_loss(tokens: Tensor, labels: dict[str, Tensor], table: dict[str, Tensor]) -> Tensor:
    """The mean square of what is missing to the words, in units of the words' own mean square."""
    words = torch.stack([table[name][labels[name]] for name in WORDS]).sum(0)
    return F.mse_loss(tokens.float(), words) / words.square().mean().clamp(min=1e-9)


def probe_accuracy(logits: dict[str, Tensor], labels: dict[str, Tensor]) -> dict[str, float]:
    """By target: the share of right classes, averaged over the classes that occur, so that guessing one gives 1/n."""
    shares = {}
    for name, each in logits.items():
        right, label = each.argmax(-1) == labels[name], labels[name]
        shares[name] = torch.stack([right[label == value].float().mean() for value in label.unique()]).mean().item()
    return shares


def labels_by_target(labels: Tensor) -> dict[str, Tensor]:
    """[windows, targets, grids, cells, cells] -> [windows * grids, cells²] by target."""
    flat = labels.transpose(0, 1).flatten(3).flatten(1, 2)
    return dict(zip(TARGETS, flat, strict=True))
