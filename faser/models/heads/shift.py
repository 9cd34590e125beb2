"""Does a head read the layers that it was trained on? Told by its guesses along one text.

Programs number layers by their inputs or by their outputs, and config.json does not say which. A head whose features
are one layer off loads, runs and guesses a little worse: too little for counts of accepted drafts to show. Here the
head guesses the same tokens three times, with its features and with those one layer lower and one layer higher. The
overlap of its distribution with the target's is compared token by token, which shows small differences.

Knows nothing of pages, requests or devices; costs one forward of the target over the text and three of the head.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from faser.models.heads.config import EAGLE3
from faser.models.heads.head import DraftHead
from faser.models.heads.whole import chain_logits, chain_states
from faser.models.layers import rotate
from faser.models.transformer import Transformer, matrices_of

LEAST_TOKENS, MOST_TOKENS = 256, 1024
MOST_OPERATIONS = 1e11  # on a CPU: a second or two; larger models are not checked there
RUN = 16  # tokens that count as one: neighbours are alike
ERRORS = 4.0  # standard errors by which other layers must be better
LEAST_GAIN = 0.02  # share by which the overlap must be higher; less is not worth a change
_CHUNK = 256  # rows whose logits exist at a time


@dataclass(frozen=True)
class Shift:
    """Layers that a head agrees with better than with those it was told to read."""

    by: int  # -1 or 1
    told: tuple[int, ...]
    better: tuple[int, ...]
    overlaps: tuple[float, float]  # with the layers that it was told, and with the better ones: means
    num_tokens: int
    is_eagle3: bool

    def __str__(self) -> str:
        told, better = (", ".join(map(str, layers)) for layers in (self.told, self.better))
        if self.is_eagle3:  # its numbers are read as they are (config.py)
            advice = f"eagle_aux_hidden_state_layer_ids=[{better}]"
        else:
            advice = f"every layer number {'lower' if self.by < 0 else 'higher'} by 1"
        return (
            f"its features seem to be off by a layer: with the inputs of layers {better} instead of {told} it agrees "
            f"better with the target (overlap {self.overlaps[1]:.3f}, not {self.overlaps[0]:.3f}, over "
            f"{self.num_tokens} tokens); try {advice} in its config.json."
        )


@torch.inference_mode()
def find_shift(head: DraftHead, target: Transformer, token_ids: Sequence[int]) -> Shift | None:
    """None where the head guesses best with the layers that it was told, or where too few tokens tell."""
    told = head.head_config.feature_layers
    assert told is not None  # resolved against the target
    token_ids = token_ids[: _most_tokens(head, target)]
    if len(token_ids) < LEAST_TOKENS or max(token_ids) >= target.config.vocab_size:
        return None
    tokens = torch.tensor(token_ids, device=target.device)
    layers = {by: tuple(layer + by for layer in told) for by in (0, -1, 1)}
    layers = {by: some for by, some in layers.items() if some[0] >= 0 and some[-1] < target.num_layers}
    streams, right = _read(target, tokens, set().union(*layers.values()), head.vocabulary)
    overlaps = {
        by: _overlaps(head, tokens, torch.cat([streams[layer] for layer in some], dim=-1), right)
        for by, some in layers.items()
    }
    ours = overlaps.pop(0)
    better = [by for by, overlap in overlaps.items() if is_better(overlap, ours)]
    if not better:
        return None
    by = max(better, key=lambda each: float(overlaps[each].mean()))
    means = float(ours.mean()), float(overlaps[by].mean())
    return Shift(by, told, layers[by], means, len(ours), head.head_config.kind == EAGLE3)


def is_better(others: Tensor, ours: Tensor) -> bool:
    """Whether chance does not explain how much larger `others` are than `ours`, numbers of the same tokens."""
    gain = torch.stack([run.mean() for run in torch.split(others - ours, RUN) if len(run) == RUN])
    return float(gain.mean()) > max(LEAST_GAIN * float(ours.mean()), ERRORS * float(gain.std()) / math.sqrt(len(gain)))


def _most_tokens(head: DraftHead, target: Transformer) -> int:
    """No token may see further than a window, and blocks behind the last token have positions too."""
    windows = [window for window in (*target.config.windows, *head.config.windows) if window]
    positions = min(target.max_positions, head.max_positions - head.head_config.num_block_rows)
    return min(MOST_TOKENS, positions, affordable_tokens(head, target), *windows)


def affordable_tokens(head: DraftHead, target: Transformer) -> int:
    """The target computes each token once, the head three times, and a block head all rows of a block."""
    if target.device.type != "cpu":
        return MOST_TOKENS
    in_head = sum(matrix.numel() for layer in head.layers for matrix in layer.tensors().values())
    in_target = sum(matrix.numel() for matrix in matrices_of(target))
    return int(MOST_OPERATIONS / (2 * (in_target + 3 * max(1, head.head_config.num_block_rows) * in_head)))


def _read(
    target: Transformer, tokens: Tensor, layers: set[int], vocabulary: Tensor | None
) -> tuple[dict[int, Tensor], Tensor]:
    """The residual streams before these layers, and the target's probabilities behind each token but the first.

    [tokens, hidden] each; [tokens - 1, the head's rows], the target's other tokens left out.
    """
    config = target.config
    cos, sin = (table[:, None] for table in target.rotation(torch.arange(len(tokens), device=tokens.device)))

    def attend(layer: int, qkv: Tensor) -> Tensor:
        rotate(qkv[:, : -config.num_kv_heads], cos, sin)
        sizes = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
        query, key, value = torch.split(qkv.transpose(0, 1), sizes)
        mixed = F.scaled_dot_product_attention(query[None], key[None], value[None], is_causal=True, enable_gqa=True)
        return mixed[0].transpose(0, 1).flatten(1)

    hidden, streams = target.embed(tokens), {}
    for layer in range(target.num_layers):
        if layer in layers:
            streams[layer] = hidden
        hidden = target.run_layers(hidden, attend, layer, layer + 1)
    right = [target.logits(rows).softmax(-1) for rows in torch.split(hidden[1:], _CHUNK)]
    return streams, torch.cat(right if vocabulary is None else [each[:, vocabulary] for each in right])


def _overlaps(head: DraftHead, tokens: Tensor, features: Tensor, right: Tensor) -> Tensor:
    """[tokens - 1]: how much of both distributions is the same, for the first draft behind each token but the first."""
    anchors = torch.arange(1, len(tokens), device=tokens.device)
    overlaps = []
    for some in torch.split(anchors, _CHUNK):
        states = chain_states(head, tokens, features[:-1], some, 1)[:, 0]
        guessed = chain_logits(head, states, tokens[some]).softmax(-1)
        overlaps.append(torch.minimum(guessed, right[some - 1]).sum(-1))
    return torch.cat(overlaps)
