"""What a head would draft along a text that its target wrote, and how many verifications the text would take.

Runs faser's own heads over whole texts. All chains of a text are drafted at once, each with the tokens of the text in
the place of the drafts before; up to the first draft that differs from the text this is what an engine drafts, and
drafts behind it are never accepted. So acceptance is exact up to the rounding of batched arithmetic, greedy and with
the noise that target and head share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from faser.errors import ConfigError
from faser.models.heads import DraftHead
from faser.models.heads.whole import chain_logits, chain_states
from faser.models.transformer import Transformer
from tools.distill import features_of, gumbel

Choose = Callable[[Tensor, Tensor], Tensor]  # (logits [rows, head's rows], positions of the new tokens [rows]) → tokens


@torch.inference_mode()
def matches(
    head: DraftHead, target: Transformer, text: Tensor, num_prompt: int, num_drafts: int, temperature: float, seed: int
) -> np.ndarray:
    """[outputs, drafts]: whether draft k behind the token before each output token is what the text has there.

    False behind the end of the text. text [tokens]: `num_prompt` tokens, at least 2, then those that the target chose.
    """
    if num_prompt < 2:
        raise ConfigError(f"a prompt of {num_prompt} tokens: expected at least 2; a head reads features before a token")
    anchors = torch.arange(num_prompt - 1, len(text) - 1, device=text.device)
    padded = torch.cat((text, text.new_full((num_drafts,), -1)))
    features = features_of(target, text[None, :-1], _features(head))[0][0]
    states = chain_states(head, padded.clamp_min(0), features, anchors, num_drafts)
    choose = chooser(head, temperature, seed)
    found = []
    for draft in range(num_drafts):
        guess = choose(chain_logits(head, states[:, draft], padded[anchors + draft].clamp_min(0)), anchors + draft + 1)
        found.append(guess == padded[anchors + draft + 1])
    return torch.stack(found, dim=1).cpu().numpy()


def _features(head: DraftHead) -> tuple[int, ...]:
    assert head.head_config.feature_layers is not None
    return head.head_config.feature_layers


def chooser(head: DraftHead, temperature: float, seed: int) -> Choose:
    """The best token, or at a temperature the best with the noise of the target's sampler."""

    def choose(logits: Tensor, positions: Tensor) -> Tensor:
        if temperature:
            noise = gumbel(torch.full_like(positions, seed), positions, head.config.vocab_size)
            logits = logits / temperature + (noise if head.vocabulary is None else noise[:, head.vocabulary])
        guess = logits.argmax(dim=-1)
        return guess if head.vocabulary is None else head.vocabulary[guess]

    return choose


# ---- counting ----


def verifications(matched: np.ndarray, length: int) -> Iterator[tuple[int, int]]:
    """(drafts tried, drafts accepted) of each verification of one text, if each tries up to `length` drafts.

    matched [outputs, drafts]. A verification emits the accepted drafts and one token more; no draft reaches behind the
    last token of the text.
    """
    place = 0
    while place < len(matched):
        run = matched[place, : min(length, len(matched) - place)]
        accepted = len(run) if run.all() else int(np.argmin(run))
        yield len(run), accepted
        place += accepted + 1


def tabulate(
    matched: Sequence[np.ndarray], categories: Sequence[str], lengths: Sequence[int]
) -> dict[str, dict[str, object]]:
    """By category and over all: tokens per verification at each length, and acceptance by position at the longest.

    Acceptance at position k is among the verifications that tried draft k with all drafts before it accepted.
    """
    table: dict[str, dict[str, object]] = {}
    for name in [*dict.fromkeys(categories), "all"]:
        chosen = [m for m, category in zip(matched, categories, strict=True) if name in (category, "all")]
        line: dict[str, object] = {"requests": len(chosen)}
        for length in lengths:
            steps = [step for m in chosen for step in verifications(m, length)]
            line[f"tokens_{length}"] = sum(map(len, chosen)) / len(steps)
        line["acceptance"] = [_share(steps, draft) for draft in range(max(lengths))]
        table[name] = line
    return table


def _share(steps: Sequence[tuple[int, int]], draft: int) -> float:
    reached = [accepted > draft for tried, accepted in steps if tried > draft and accepted >= draft]
    return sum(reached) / len(reached) if reached else 0.0
