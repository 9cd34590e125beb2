"""Heads through faser's own functions, with a dense cache of keys and values, and folders in other public forms."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from faser.models.heads import BLOCK, EAGLE3, BlockHead, DraftHead, Eagle3Head, HeadConfig
from faser.models.layers import rotate
from faser.models.transformer import Transformer
from tests.tiny import CONFIGS

TARGET = replace(CONFIGS["llama2"], num_layers=8)
WIDE_TARGET = replace(TARGET, hidden_size=48, num_heads=6, num_kv_heads=2)


def make_target(config: Any = TARGET) -> Transformer:
    return Transformer.random(config, seed=5, std=0.3)


def eagle3_config(**changes: Any) -> HeadConfig:
    layers = replace(TARGET, num_layers=1, num_kv_heads=2, eos_token_ids=())
    config = HeadConfig(kind=EAGLE3, layers=layers, target_hidden_size=32, feature_layers=(2, 4, 5))
    return replace(config, **changes)


def block_config(**changes: Any) -> HeadConfig:
    layers = replace(CONFIGS["qwen3"], num_layers=2, num_kv_heads=2, eos_token_ids=())
    config = HeadConfig(
        kind=BLOCK, layers=layers, target_hidden_size=32, feature_layers=(0, 2, 3, 7), num_drafts=4, mask_token_id=7
    )
    return replace(config, **changes)


DSPARK = {"anchor_predicts": True, "markov_rank": 6, "confidence": True, "confidence_with_markov": True}


class DenseCache:
    """Keys and values by layer, rotated; `attend` works for rows at given positions."""

    def __init__(self, head: DraftHead) -> None:
        self.head = head
        # [rows, num_kv_heads, head_dim]
        self.keys: list[list[Tensor]] = [[] for _ in head.layers]
        self.values: list[list[Tensor]] = [[] for _ in head.layers]

    def store(self, layer: int, kv: Tensor, positions: Tensor) -> None:
        keys, values = kv.chunk(2, dim=1)
        self.keys[layer].append(self._rotated(keys, positions))
        self.values[layer].append(values)

    def causal(self, positions: Tensor) -> Any:
        """An attend that stores its rows; a row sees those up to itself, which are stored in order from position 0."""

        def attend(layer: int, qkv: Tensor) -> Tensor:
            num_heads = self.head.config.num_heads
            self.store(layer, qkv[:, num_heads:], positions)
            keys, values = torch.cat(self.keys[layer]), torch.cat(self.values[layer])
            mask = torch.arange(len(keys)) <= positions[:, None]
            mask &= self._window(layer, positions, len(keys))
            return _attention(self._rotated(qkv[:, :num_heads], positions), keys, values, mask)

        return attend

    def block(self, positions: Tensor) -> Any:
        """An attend whose rows see all stored rows and each other, and are not stored."""

        def attend(layer: int, qkv: Tensor) -> Tensor:
            config = self.head.config
            queries, keys, values = qkv.split([config.num_heads, config.num_kv_heads, config.num_kv_heads], dim=1)
            keys = torch.cat((*self.keys[layer], self._rotated(keys, positions)))
            values = torch.cat((*self.values[layer], values))
            mask = self._window(layer, positions, len(keys))
            return _attention(self._rotated(queries, positions), keys, values, mask)

        return attend

    def _window(self, layer: int, positions: Tensor, num_keys: int) -> Tensor:
        window = self.head.config.layer_windows[layer]
        return torch.arange(num_keys) > positions[:, None] - (num_keys + 1 if window is None else window.size)

    def _rotated(self, x: Tensor, positions: Tensor) -> Tensor:
        return rotate(x.clone(), self.head.cos[positions, None], self.head.sin[positions, None])


def _attention(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    mixed = torch.nn.functional.scaled_dot_product_attention(
        queries.transpose(0, 1), keys.transpose(0, 1), values.transpose(0, 1), mask, enable_gqa=True
    )
    return mixed.transpose(0, 1).flatten(1)


def eagle3_drafts(head: Eagle3Head, token_ids: Tensor, features: Tensor, num_drafts: int) -> tuple[Tensor, Tensor]:
    """As in the reference. The context in two calls, then a row at a time."""
    cache, fused, n = DenseCache(head), head.fuse(features), len(token_ids)
    parts = []
    for rows in (torch.arange(1, 4), torch.arange(4, n)):
        attend = cache.causal(rows - 1)
        parts.append(head.extend(head.embed(token_ids[rows]), fused[rows - 1], attend))
    hidden = torch.cat(parts)
    context_logits = logits = head.logits(hidden)
    drafted = []
    for step in range(num_drafts):
        drafted.append(logits[-1])
        token = target_ids(head, logits[-1:].argmax(-1))
        attend = cache.causal(torch.tensor([n - 1 + step]))
        hidden = head.extend(head.embed(token), head.next_states(hidden[-1:]), attend)
        logits = head.logits(hidden)
    return context_logits, torch.stack(drafted)


def block_drafts(head: BlockHead, features: Tensor, block_ids: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """As in the reference: tokens, logits, confidence."""
    cache, fused, n = DenseCache(head), head.fuse(features), len(features)
    for layer in range(head.num_layers):
        cache.store(layer, head.context_kv(layer, fused), torch.arange(n))
    hidden = head.run_block(head.embed(block_ids), cache.block(torch.arange(n, n + len(block_ids))))
    hidden = hidden if head.head_config.anchor_predicts else hidden[1:]
    before, tokens, logits = block_ids[:1], [], []
    for row in head.logits(hidden).split(1):
        bias = head.markov_bias(before)
        logits.append(row if bias is None else row + bias)
        before = target_ids(head, logits[-1].argmax(-1))
        tokens.append(before)
    guessed = torch.cat(tokens)
    return guessed, torch.cat(logits), head.confidence(hidden, torch.cat((block_ids[:1], guessed[:-1])))


def target_ids(head: DraftHead, rows: Tensor) -> Tensor:
    return rows if head.vocabulary is None else head.vocabulary[rows]


# ---- other public forms of a written folder ----


def edit_config(folder: Path, **changes: Any) -> None:
    """Change fields of config.json; `...` removes one."""
    path = folder / "config.json"
    data = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in data.items() if value is not ...}))


def edit_dflash_config(folder: Path, **changes: Any) -> None:
    inner = json.loads((folder / "config.json").read_text())["dflash_config"]
    edit_config(folder, dflash_config={**inner, **changes})


def edit_tensors(folder: Path, **changes: Tensor | None) -> None:
    path = folder / "model.safetensors"
    tensors = {**load_file(path), **changes}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path)


def rename_layer(folder: Path) -> None:
    """midlayer. becomes layers.0."""
    path = folder / "model.safetensors"
    save_file({name.replace("midlayer.", "layers.0."): tensor for name, tensor in load_file(path).items()}, path)


def use_other_names(folder: Path, tensors: bool) -> None:
    """A DSpark head as public trainers write it: its fields in dflash_config, some by other names."""
    path = folder / "config.json"
    data = json.loads(path.read_text())
    names = ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov")
    nested = data["dflash_config"] | {name: data.pop(name) for name in names}
    nested |= {"projector_type": "dspark", "attention_mode": "gqa", "confidence_head_alpha": 1.0}
    removed = ("mask_token_id", "target_layer_ids", "sample_from_anchor", "dspark_bonus_anchor")
    data = {name: value for name, value in data.items() if name not in removed}
    if tensors:
        nested |= {"shift_label": True, "use_confidence_head": nested.pop("enable_confidence_head")}
        del nested["confidence_head_with_markov"]
        path = folder / "model.safetensors"
        others = {"confidence_head.proj.": "confidence_proj.", "markov_head.": ""}
        renamed = load_file(path)
        for usual, other in others.items():
            renamed = {name.replace(usual, other): tensor for name, tensor in renamed.items()}
        save_file(renamed, path)
    (folder / "config.json").write_text(json.dumps({**data, "dflash_config": nested}))


def pickle(folder: Path) -> None:
    """The weights as some EAGLE-3 heads are published."""
    path = folder / "model.safetensors"
    torch.save(load_file(path), folder / "pytorch_model.bin")
    path.unlink()


def to_speculators(folder: Path, kind: str) -> None:
    """The config of a raw head in the wrapper of speculators."""
    path = folder / "config.json"
    data = json.loads(path.read_text())
    outer_names = (
        "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "eagle_aux_hidden_state_layer_ids",
        "draft_vocab_size", "target_hidden_size", "block_size", "markov_rank", "markov_head_type",
        "enable_confidence_head", "confidence_head_with_markov", "sample_from_anchor",
    )  # fmt: skip
    outer = {name: data.pop(name) for name in outer_names if name in data}
    nested = data.pop("dflash_config", None)
    if nested is not None:
        outer["mask_token_id"] = nested["mask_token_id"]
        outer["aux_hidden_state_layer_ids"] = [number + 1 for number in nested["target_layer_ids"]]
    for name in ("eagle_config", "num_aux_hidden_states", "mask_token_id", "target_layer_ids", "dspark_bonus_anchor"):
        data.pop(name, None)
    path.write_text(
        json.dumps(
            {
                "architectures": ["Speculator"],
                "speculators_model_type": kind,
                "speculators_version": "0.5.0",
                "speculators_config": {
                    "algorithm": kind,
                    "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
                    "verifier": {"name_or_path": "org/target"},
                },
                "transformer_layer_config": {**data, "architectures": None},
                **outer,
            }
        )
    )
