"""A tiny target, and draft heads for it in every public form: one that guesses well, and random ones.

The streams of the target are mostly its embeddings, so that a head learns its text in a hundred steps. The other heads
guess nothing; drafts of theirs that two programs agree on tell as much of a format, and need no training.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from faser.models.config import ModelConfig
from faser.models.heads import BlockHead, Eagle3Head, HeadConfig, write_head
from faser.models.quantised.matrix import plain
from faser.models.transformer import Transformer
from tests.models.heads import rig
from tools.distill import write_answers
from tools.heads.convert import serving_head
from tools.inflate import write_folder
from tools.train_head import Settings, Training, fit, plan_head

LENGTH = 4  # drafts of a step
PROMPT, OUTPUT, NUM_PROMPTS = 9, 61, 12
VOCABULARY = 128
STEPS = 100  # of the training
TARGET = ModelConfig(
    family="llama", vocab_size=VOCABULARY, hidden_size=64, num_layers=8, num_heads=2, num_kv_heads=2, head_dim=32,
    intermediate_size=128, norm_eps=1e-5, max_positions=256, eos_token_ids=(),
)  # fmt: skip


@dataclass(frozen=True)
class HeadFolder:
    """How a head is loaded in vLLM."""

    name: str  # of its folder
    method: str
    needs_triton: bool = False  # runs on vLLM's V2 runner alone


TRAINED = (HeadFolder("eagle3", "eagle3"), HeadFolder("eagle3-speculators", "eagle3"))
RANDOM = (
    HeadFolder("eagle3.1", "eagle3"),  # norm_before_residual, fc_norm, norm_output
    HeadFolder("norm-before-fc", "eagle3"),  # with its own output, and the default features
    HeadFolder("default-residual", "eagle3"),  # speculators, layers.0, and norm_before_residual not said
    HeadFolder("qwen3-layer", "eagle3"),  # norms of queries and keys
    HeadFolder("wide", "eagle3"),  # wider than the target, with its own embedding and output
    HeadFolder("dflash", "dflash"),
    HeadFolder("dflash-speculators", "dflash"),
)
DSPARK = (HeadFolder("dspark", "dspark", needs_triton=True), HeadFolder("dspark-speculators", "dspark", True))


def make_target() -> Transformer:
    target = Transformer.random(TARGET, seed=0, std=0.2)
    target.embedding.mul_(5)
    for layer in target.layers:
        plain(layer.out).mul_(0.1)
        plain(layer.down).mul_(0.1)
    return target


def make_prompts(number: int = NUM_PROMPTS) -> list[list[int]]:
    generator = torch.Generator().manual_seed(9)
    return torch.randint(3, VOCABULARY, (number, PROMPT), generator=generator).tolist()


def write_heads(folder: Path) -> None:
    """The target and all heads, each in a folder of its name."""
    target = make_target()
    write_folder(target, folder / "target")
    prompts = make_prompts(2 * NUM_PROMPTS)
    data = torch.stack(write_answers(target, prompts, OUTPUT, 0.0)).numpy().astype(np.uint16)
    write_trained(folder, target, data)
    write_random_eagle3(folder, target, data)
    write_random_blocks(folder, target, data)
    (folder / "prompts.json").write_text(json.dumps(prompts[:NUM_PROMPTS]))


def write_trained(folder: Path, target: Transformer, data: np.ndarray) -> None:
    settings = Settings(
        kind="eagle3", block=LENGTH, features=(2, 4, 5), short_vocabulary=110, batch=16, rate=6e-3, clip=0.5
    )
    training = Training(target, data, settings)
    fit(training, lambda step: step / STEPS, lambda judged, done: None)
    write_head(serving_head(training.module, target, torch.float32), folder / "eagle3")
    copy_as_speculators(folder / "eagle3", "eagle3")


def write_random_eagle3(folder: Path, target: Transformer, data: np.ndarray) -> None:
    plan = Settings(kind="eagle3", features=(1, 3, 6), short_vocabulary=0)
    config = plan_head(target.config, counts_of(data), plan)
    layers = config.layers
    variants: dict[str, tuple[HeadConfig, dict[str, bool]]] = {
        "eagle3.1": (replace(config, norm_before_residual=True, fc_norm=True, norm_output=True), {}),
        "norm-before-fc": (replace(config, norm_before_fc=True, feature_layers=(2, 4, 5)), {"own_head": True}),
        "default-residual": (replace(config, norm_before_residual=True, draft_vocab_size=90), {}),
        "qwen3-layer": (replace(config, layers=replace(layers, family="qwen3", qk_norm=True)), {}),
        "wide": (
            replace(config, layers=replace(layers, hidden_size=96)),
            {"own_embedding": True, "own_head": True},
        ),
    }
    for seed, (name, (shape, own)) in enumerate(variants.items()):
        write_head(Eagle3Head.random(shape, target, seed, std=0.2, **own), folder / name)
    told = ("eagle_aux_hidden_state_layer_ids", "eagle_config", "num_aux_hidden_states")
    rig.edit_config(folder / "norm-before-fc", **dict.fromkeys(told, ...))
    rig.rename_layer(folder / "default-residual")
    rig.to_speculators(folder / "default-residual", "eagle3")
    rig.edit_config(folder / "default-residual", norm_before_residual=...)


def write_random_blocks(folder: Path, target: Transformer, data: np.ndarray) -> None:
    for kind in ("dflash", "dspark"):
        plan = Settings(kind=kind, block=LENGTH, features=(2, 5), short_vocabulary=0, markov_rank=8)
        config = plan_head(target.config, counts_of(data), plan)
        write_head(with_equal_key_norms(BlockHead.random(config, target, 7, std=0.2)), folder / kind)
        copy_as_speculators(folder / kind, kind)


def with_equal_key_norms(head: BlockHead) -> BlockHead:
    """vLLM on a CPU norms the context's keys of every layer with the weights of the first one (docs/lab.md)."""
    first, keys = head.layers[0].qk_norm, slice(head.config.num_heads, None)
    for layer in head.layers[1:]:
        assert first is not None
        assert layer.qk_norm is not None
        layer.qk_norm[keys] = first[keys]
    return head


def copy_as_speculators(folder: Path, kind: str) -> None:
    copy = folder.with_name(folder.name + "-speculators")
    shutil.copytree(folder, copy)
    rig.to_speculators(copy, kind)


def counts_of(data: np.ndarray) -> Any:
    return np.bincount(data.ravel(), minlength=VOCABULARY)
