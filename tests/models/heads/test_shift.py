"""A head that reads its target one layer off is found by its guesses along one text; a good head is never accused."""

from __future__ import annotations

import re
from copy import copy
from dataclasses import replace
from functools import lru_cache

import numpy as np
import pytest
import torch

from faser.models.heads import DraftHead, shift
from faser.models.heads.shift import LEAST_TOKENS, Shift, find_shift, is_better
from faser.models.heads.whole import chain_logits, chain_states
from faser.models.transformer import Transformer
from tests.tools.heads.toys import KINDS, TOY, random_tokens, toy_text
from tools.distill import features_of, write_answers
from tools.heads.convert import serving_head
from tools.train_head import Training, fit

TRAINED = {"eagle3 short": (1, 2, 3), "dspark short": (1, 3)}  # layers that their features come from
TOKENS = 272
STEPS = 100


@lru_cache
def make_target(seed: int) -> Transformer:
    return Transformer.random(replace(TOY, num_layers=5, max_positions=TOKENS + 8, eos_token_ids=()), seed, std=0.2)


@lru_cache
def trained(name: str, seed: int) -> DraftHead:
    """On random tokens and on what the target writes. After fewer steps other layers are sometimes as good."""
    target, layers = make_target(seed), TRAINED[name]
    data = np.concatenate((random_tokens(128, 64), toy_text(target, 128, 64, 1.0))).astype(np.uint16)
    block = 1 if name == "eagle3 short" else 3
    settings = replace(KINDS[name], features=layers, block=block, batch=16, rate=1e-2, anchors=24, seed=seed)
    training = Training(target, data, settings)
    fit(training, lambda step: step / STEPS, lambda judged, done: None)
    return serving_head(training.module, target, torch.float32)


def told(head: DraftHead, layers: tuple[int, ...]) -> DraftHead:
    """The same head, whose config.json says that it reads these layers."""
    other = copy(head)
    other.head_config = replace(head.head_config, feature_layers=layers)
    return other


def text_of(target: Transformer, kind: str) -> list[int]:
    """A varied one, as that of a start is: random tokens, or many short answers one behind the other."""
    if kind == "random":
        return random_tokens(TOKENS, seed=5).tolist()
    answers = write_answers(target, random_tokens(24, 4, seed=6).tolist(), 8, 1.0 if kind == "sampled" else 0.0)
    return torch.cat(answers)[:TOKENS].tolist()


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("name", TRAINED)
def test_a_head_with_the_layers_it_was_trained_on_is_never_accused(name, seed):
    head, target = trained(name, seed), make_target(seed)
    for kind in ("greedy", "sampled", "random"):
        assert find_shift(head, target, text_of(target, kind)) is None, kind


@torch.inference_mode()
def mean_overlap(head: DraftHead, target: Transformer, text: list[int], layers: tuple[int, ...]) -> float:
    """With the forward of the training: of each draft with the target's distribution behind the token before it."""
    tokens = torch.tensor(text)
    features, right = features_of(target, tokens[None], layers)
    anchors = torch.arange(1, len(tokens))
    states = chain_states(head, tokens, features[0, :-1], anchors, 1)[:, 0]
    guessed = chain_logits(head, states, tokens[anchors]).softmax(-1)
    expected = (right[0] @ target.head.t()).softmax(-1)[anchors][:, head.vocabulary]
    return float(torch.minimum(guessed, expected).sum(-1).mean())


@pytest.mark.parametrize(
    ("name", "seed", "by", "kind"),
    [("eagle3 short", 1, -1, "random"), ("eagle3 short", 2, -1, "greedy"), ("dspark short", 2, 1, "greedy")],
)
def test_a_head_that_is_off_by_a_layer_is_told_the_right_ones(name, seed, by, kind):
    head, target = trained(name, seed), make_target(seed)
    wrong = tuple(layer + by for layer in TRAINED[name])
    found = find_shift(told(head, wrong), target, text_of(target, kind))
    assert found is not None
    assert (found.by, found.told, found.better) == (-by, wrong, TRAINED[name])
    expected = [mean_overlap(head, target, text_of(target, kind), layers) for layers in (wrong, TRAINED[name])]
    assert found.overlaps == pytest.approx(expected, rel=1e-3)


def test_a_head_that_was_never_trained_is_not_told_to_read_other_layers():
    target = make_target(0)
    for seed in range(3):
        head = type(trained("dspark short", 0)).random(trained("dspark short", 0).head_config, target, seed)
        assert find_shift(head, target, text_of(target, "random")) is None


def test_where_few_tokens_may_be_read_nobody_is_accused(monkeypatch):
    """Those that a window shows, and those that a CPU can afford."""
    wrong, target = told(trained("eagle3 short", 1), (0, 1, 2)), make_target(1)
    narrow = copy(target)
    narrow.config = replace(target.config, windows=(0, 0, LEAST_TOKENS - 1, 0, 0))
    assert find_shift(wrong, target, text_of(target, "random")) is not None
    assert find_shift(wrong, narrow, text_of(target, "random")) is None
    monkeypatch.setattr(shift, "MOST_OPERATIONS", 1e6)
    assert find_shift(wrong, target, text_of(target, "random")) is None


def test_a_short_text_and_foreign_tokens_accuse_nobody():
    wrong, target = told(trained("eagle3 short", 1), (0, 1, 2)), make_target(1)
    text = text_of(target, "random")
    assert find_shift(wrong, target, text) is not None
    assert find_shift(wrong, target, text[: LEAST_TOKENS - 1]) is None
    assert find_shift(wrong, target, [*text[:-1], target.config.vocab_size]) is None


def test_chance_makes_no_layers_better():
    """Overlaps of the same mean, and as much noise as there can be; neighbours are alike."""
    for seed in range(100):
        generator = torch.Generator().manual_seed(seed)
        ours, others = torch.rand(2, LEAST_TOKENS // 4, generator=generator).repeat_interleave(4, dim=1)
        assert not is_better(others, ours)
    assert is_better(1.1 * ours, ours)
    assert not is_better(1.02 * ours, ours), "too little to be worth a change"


@pytest.mark.parametrize(
    ("is_eagle3", "advice"),
    [(True, r"eagle_aux_hidden_state_layer_ids=\[1, 2, 3\]"), (False, "every layer number lower by 1")],
)
def test_the_advice_can_be_followed(is_eagle3, advice):
    found = Shift(-1, (2, 3, 4), (1, 2, 3), (0.25, 0.5), 511, is_eagle3)
    expected = rf"inputs of layers 1, 2, 3 instead of 2, 3, 4 .*overlap 0\.500, not 0\.250, over 511 tokens.*{advice}"
    assert re.search(expected, str(found))
