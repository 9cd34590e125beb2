"""Draft heads in plain torch, from the description of their formats: whole sequences, dense attention, no cache.

Works on the files of a checkpoint and shares no code with faser.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor


class Checkpoint:
    """The files of a head, with the embedding and output matrix of its target where it has none."""

    def __init__(self, folder: Path, embedding: Tensor, head: Tensor) -> None:
        data = json.loads((folder / "config.json").read_text())
        self.outer = data
        self.sizes = data.get("transformer_layer_config", data)
        self.is_speculators = "transformer_layer_config" in data
        self.tensors = load_file(folder / "model.safetensors")
        self.embedding = self.tensors.get("embed_tokens.weight", embedding)
        self.head = self.tensors.get("lm_head.weight", head)
        self.eps = self.sizes["rms_norm_eps"]

    def flag(self, name: str) -> bool:
        return bool(self.outer.get(name, (self.outer.get("eagle_config") or {}).get(name, False)))

    def norm(self, x: Tensor, name: str) -> Tensor:
        return rms(x, self.tensors[name + ".weight"], self.eps)

    def linear(self, x: Tensor, name: str) -> Tensor:
        y = x @ self.tensors[name + ".weight"].T
        return y + self.tensors[name + ".bias"] if name + ".bias" in self.tensors else y

    def token_ids(self, rows: Tensor) -> Tensor:
        """Target ids of rows of the head."""
        return rows + self.tensors["d2t"][rows] if "d2t" in self.tensors else rows

    def heads(self, x: Tensor, name: str, norm: str | None, positions: Tensor | None) -> Tensor:
        """A projection as [heads, rows, head_dim], normed and rotated where told to."""
        dim = self.sizes["head_dim"]
        y = self.linear(x, name).view(len(x), -1, dim)
        if norm is not None and norm + ".weight" in self.tensors:
            y = self.norm(y, norm)
        if positions is not None:
            theta = self.sizes["rope_theta"]
            angles = positions[:, None].double() * theta ** (-torch.arange(0, dim, 2).double() / dim)
            cos, sin = angles.cos()[:, None].float(), angles.sin()[:, None].float()
            first, second = y[..., : dim // 2], y[..., dim // 2 :]
            y = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
        return y.transpose(0, 1)

    def attention(self, prefix: str, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        groups = queries.shape[0] // keys.shape[0]
        keys, values = keys.repeat_interleave(groups, 0), values.repeat_interleave(groups, 0)
        scores = (queries @ keys.transpose(1, 2) / queries.shape[-1] ** 0.5).masked_fill(~mask, float("-inf"))
        mixed = (scores.softmax(-1) @ values).transpose(0, 1).flatten(1)
        return self.linear(mixed, prefix + "self_attn.o_proj")

    def window(self, layer: int) -> int:
        """Keys that a row of a layer sees on each side, its own included; more than there are where it sees all."""
        dflash = self.outer.get("dflash_config") or {}
        size = dflash.get("swa_window_size") or self.sizes.get("sliding_window")
        types = self.sizes.get("layer_types") or [f"{'sliding' if dflash.get('use_swa') else 'full'}_attention"] * 99
        return size if types[layer] == "sliding_attention" else 10**6

    def mlp(self, prefix: str, x: Tensor) -> Tensor:
        gate, up = self.linear(x, prefix + "mlp.gate_proj"), self.linear(x, prefix + "mlp.up_proj")
        return self.linear(torch.nn.functional.silu(gate) * up, prefix + "mlp.down_proj")


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * weight


def eagle3_drafts(file: Checkpoint, token_ids: Tensor, features: Tensor, num_drafts: int) -> tuple[Tensor, Tensor]:
    """Logits of every row over the context, [tokens - 1, rows of head], then those of `num_drafts` greedy drafts."""
    if file.flag("norm_before_fc"):
        features = file.norm(features, "input_norm")
    if file.flag("fc_norm"):
        parts = features.chunk(file.outer.get("num_aux_hidden_states", 3), dim=-1)
        features = torch.cat([file.norm(part, f"fc_norm.{index}") for index, part in enumerate(parts)], dim=-1)
    states = file.linear(features, "fc")[: len(token_ids) - 1]
    tokens = token_ids[1:]
    drafted = []
    logits, outputs = _eagle3_pass(file, tokens, states)
    context_logits = logits
    for _ in range(num_drafts):
        drafted.append(logits[-1])
        states = torch.cat((states, outputs[-1:]))
        tokens = torch.cat((tokens, file.token_ids(logits[-1:].argmax(-1))))
        logits, outputs = _eagle3_pass(file, tokens, states)
    return context_logits, torch.stack(drafted)


def _eagle3_pass(file: Checkpoint, tokens: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
    """Logits, and what the next step gets as its states."""
    prefix = "midlayer." if "midlayer.hidden_norm.weight" in file.tensors else "layers.0."
    embedded = file.norm(file.embedding[tokens], prefix + "input_layernorm")
    normed = file.norm(states, prefix + "hidden_norm")
    x = torch.cat((embedded, normed), dim=-1)
    before = file.outer.get("norm_before_residual", file.is_speculators)
    residual = normed if before else states
    positions = torch.arange(len(tokens))
    attention = prefix + "self_attn."
    queries = file.heads(x, attention + "q_proj", attention + "q_norm", positions)
    keys = file.heads(x, attention + "k_proj", attention + "k_norm", positions)
    values = file.heads(x, attention + "v_proj", None, None)
    causal = torch.ones(len(tokens), len(tokens)).tril().triu(1 - file.window(0)).bool()
    hidden = residual + file.attention(prefix, queries, keys, values, causal)
    hidden = hidden + file.mlp(prefix, file.norm(hidden, prefix + "post_attention_layernorm"))
    normed_hidden = file.norm(hidden, "norm")
    return normed_hidden @ file.head.T, normed_hidden if file.flag("norm_output") else hidden


def block_hidden(file: Checkpoint, features: Tensor, block_ids: Tensor, mask_row: Tensor | None) -> Tensor:
    """The normed output [block rows, hidden] of a block behind a context with these features."""
    context = file.norm(file.linear(features, "fc"), "hidden_norm")
    n, rows = len(context), len(block_ids)
    hidden = file.embedding[block_ids].clone()
    if mask_row is not None:
        hidden[1:] = mask_row
    positions = torch.arange(n + rows)
    for index in range(file.sizes["num_hidden_layers"]):
        prefix = f"layers.{index}."
        attention = prefix + "self_attn."
        normed = file.norm(hidden, prefix + "input_layernorm")
        both = torch.cat((context, normed))
        queries = file.heads(normed, attention + "q_proj", attention + "q_norm", positions[n:])
        keys = file.heads(both, attention + "k_proj", attention + "k_norm", positions)
        values = file.heads(both, attention + "v_proj", None, None)
        seen = (positions[n:, None] - positions).abs() < file.window(index)
        hidden = hidden + file.attention(prefix, queries, keys, values, seen)
        hidden = hidden + file.mlp(prefix, file.norm(hidden, prefix + "post_attention_layernorm"))
    return file.norm(hidden, "norm")


def block_drafts(
    file: Checkpoint, features: Tensor, block_ids: Tensor, mask_row: Tensor | None, anchor_predicts: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Greedy drafts by target id, their logits, and their confidence."""
    hidden = block_hidden(file, features, block_ids, mask_row)
    hidden = hidden if anchor_predicts else hidden[1:]
    before = block_ids[0]
    tokens, all_logits, confidence = [], [], []
    for row in hidden:
        logits = row @ file.head.T
        inputs = row
        if "markov_head.markov_w1.weight" in file.tensors:
            embedded = file.tensors["markov_head.markov_w1.weight"][before]
            logits = logits + embedded @ file.tensors["markov_head.markov_w2.weight"].T
            if file.outer.get("confidence_head_with_markov"):
                inputs = torch.cat((row, embedded))
        if "confidence_head.proj.weight" in file.tensors:
            confidence.append(file.linear(inputs, "confidence_head.proj").sigmoid())
        before = file.token_ids(logits.argmax())
        tokens.append(before)
        all_logits.append(logits)
    return torch.stack(tokens), torch.stack(all_logits), torch.cat(confidence) if confidence else None
