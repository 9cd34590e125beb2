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
from faser.models.heads import BlockHead, DraftHead, Eagle3Head
from faser.models.layers import rotate
from faser.models.transformer import Transformer
from tools.distill import features_of, gumbel
from tools.heads.modules import KeysValues, attend

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


def chain_logits(head: DraftHead, states: Tensor, before: Tensor) -> Tensor:
    """Of one draft of each chain: states [chains, hidden], before [chains] the tokens before the drafts."""
    logits = head.logits(states)
    bias = head.markov_bias(before) if isinstance(head, BlockHead) else None
    return logits if bias is None else logits + bias


def chooser(head: DraftHead, temperature: float, seed: int) -> Choose:
    """The best token, or at a temperature the best with the noise of the target's sampler."""

    def choose(logits: Tensor, positions: Tensor) -> Tensor:
        if temperature:
            noise = gumbel(torch.full_like(positions, seed), positions, head.config.vocab_size)
            logits = logits / temperature + (noise if head.vocabulary is None else noise[:, head.vocabulary])
        guess = logits.argmax(dim=-1)
        return guess if head.vocabulary is None else head.vocabulary[guess]

    return choose


# ---- the forwards ----


def chain_states(head: DraftHead, tokens: Tensor, features: Tensor, anchors: Tensor, num_drafts: int) -> Tensor:
    """hidden of every draft, [chains, drafts, hidden].

    tokens: of the text and `num_drafts` more; features [tokens of the text but the last, feature_size]; anchors
    [chains] positions, each with a token before it.
    """
    fused = head.fuse(features)
    if isinstance(head, BlockHead):
        return _block_states(head, tokens, fused, anchors)[:, :num_drafts]
    assert isinstance(head, Eagle3Head)
    return _eagle3_states(head, tokens, fused, anchors, num_drafts)


def _eagle3_states(head: Eagle3Head, tokens: Tensor, fused: Tensor, anchors: Tensor, num_drafts: int) -> Tensor:
    rows = torch.arange(len(fused), device=tokens.device)
    kept: list[KeysValues] = []

    def keep(layer: int, qkv: Tensor) -> Tensor:
        query, key, value = _turned(head, qkv[:, None], rows[:, None])
        kept.append((key[:, 0], value[:, 0]))
        context = key[None, :, 0], value[None, :, 0]
        return _attended(query, context, (key[:, :0], value[:, :0]), rows <= rows[:, None])

    hidden = head.extend(head.embed(tokens[1 : len(fused) + 1]), fused, keep)[anchors - 1]
    states, (context,) = [hidden], kept
    own = tuple(each[:0].unsqueeze(0).expand(len(anchors), -1, -1, -1) for each in context)
    for draft in range(1, num_drafts):

        def follow(layer: int, qkv: Tensor, places: Tensor = anchors - 1 + draft) -> Tensor:
            nonlocal own
            query, key, value = _turned(head, qkv[:, None], places[:, None])
            own = torch.cat((own[0], key), dim=1), torch.cat((own[1], value), dim=1)
            return _attended(query, (context[0][None], context[1][None]), own, rows < anchors[:, None])

        hidden = head.extend(head.embed(tokens[anchors + draft]), head.next_states(hidden), follow)
        states.append(hidden)
    return torch.stack(states, dim=1)


def _block_states(head: BlockHead, tokens: Tensor, fused: Tensor, anchors: Tensor) -> Tensor:
    config = head.head_config
    rows = torch.arange(len(fused), device=tokens.device)
    places = anchors[:, None] + torch.arange(config.num_block_rows, device=tokens.device)
    block = torch.full_like(places, config.mask_token_id)
    block[:, 0] = tokens[anchors]

    def attend_block(layer: int, qkv: Tensor) -> Tensor:
        context = head.context_kv(layer, fused)
        keys, values = context.chunk(2, dim=1)
        rotate(keys, head.cos[rows, None], head.sin[rows, None])
        query, key, value = _turned(head, qkv.unflatten(0, places.shape), places)
        return _attended(query, (keys[None], values[None]), (key, value), rows < anchors[:, None])

    hidden = head.run_block(head.embed(block.flatten()), attend_block).unflatten(0, places.shape)
    return hidden if config.anchor_predicts else hidden[:, 1:]


def _turned(head: DraftHead, qkv: Tensor, places: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """qkv [chains, rows, heads + 2 * KV heads, head_dim] -> queries, keys, values, rotated to places [chains, rows]."""
    config, flat = head.config, qkv.flatten(0, 1)
    places = places.flatten().clamp_max(head.max_positions - 1)  # rows past the text's end are never accepted
    rotate(flat[:, : -config.num_kv_heads], head.cos[places, None], head.sin[places, None])
    query, key, value = flat.view_as(qkv).split([config.num_heads, config.num_kv_heads, config.num_kv_heads], dim=2)
    return query, key, value


def _attended(query: Tensor, context: KeysValues, own: KeysValues, visible: Tensor) -> Tensor:
    """[rows of all chains, heads * head_dim]"""
    return attend(query[None], context, (own[0][None], own[1][None]), visible[None])[0].flatten(0, 1)


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
