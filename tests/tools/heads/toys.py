"""Toy targets, the text they write, and heads of every kind in training."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from faser.models.heads import DraftHead
from faser.models.heads.whole import chain_logits, chain_states
from faser.models.transformer import Transformer
from tests.tiny import CONFIGS, VOCABULARY
from tools.distill import Writer, features_of, sample_top_p, write_sequences
from tools.heads.modules import HeadModule
from tools.heads.simulate import chooser
from tools.train_head import Settings, make_module

TOY = replace(CONFIGS["llama3"], num_layers=4)
KINDS = {
    "eagle3": Settings(kind="eagle3", block=3, features=(1, 2, 3), short_vocabulary=0),
    "eagle3 short": Settings(kind="eagle3", block=3, features=(1, 2, 3), short_vocabulary=40),
    "dflash": Settings(kind="dflash", block=3, features=(1, 3), short_vocabulary=0),
    "dspark": Settings(kind="dspark", block=4, features=(0, 2), short_vocabulary=0, markov_rank=5),
    "dspark short": Settings(kind="dspark", layers=1, block=3, features=(1, 2), short_vocabulary=40, markov_rank=5),
    "dspark without Markov": Settings(kind="dspark", block=3, features=(3,), short_vocabulary=0, markov_rank=0),
}


def make_toy(seed: int = 0) -> Transformer:
    return Transformer.random(TOY, seed, std=0.2)


def random_tokens(*shape: int, seed: int = 1) -> Tensor:
    return torch.randint(VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


def toy_text(target: Transformer, num_sequences: int, length: int, temperature: float = 0.7) -> np.ndarray:
    """What the target writes behind two random tokens."""
    torch.manual_seed(0)
    with torch.inference_mode():
        choose = sample_top_p(torch.full((num_sequences, 1), temperature))
        writer = Writer(target, num_sequences, length)
        texts = write_sequences(writer, random_tokens(num_sequences, 2).tolist(), length, choose)
    return texts.numpy().astype(np.uint16)


def shaken(module: HeadModule, seed: int = 2) -> HeadModule:
    """With noise in every parameter, so that no norm is 1 and no matrix 0."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return module


def make_head_module(name: str, target: Transformer) -> HeadModule:
    data = random_tokens(4, 16).numpy().astype(np.uint16)
    return shaken(make_module(target, data, KINDS[name]))


@torch.inference_mode()
def drafted(head: DraftHead, target: Transformer, context: Tensor, length: int, temperature: float, seed: int) -> list:
    """Drafts behind the context, each from the drafts before it, as an engine makes them."""
    choose, anchor = chooser(head, temperature, seed), torch.tensor([len(context) - 1])
    features = features_of(target, context[None, :-1], head.head_config.feature_layers)[0][0]
    drafts: list[int] = []
    for draft in range(length):
        tokens = torch.cat((context, torch.tensor(drafts + [0] * (length - draft), dtype=torch.int64)))
        states = chain_states(head, tokens, features, anchor, length)
        logits = chain_logits(head, states[:, draft], tokens[anchor + draft])
        drafts.append(int(choose(logits, anchor + draft + 1)))
    return drafts
