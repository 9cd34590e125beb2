"""The simulation along a text accepts what drafting token by token would have accepted."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from faser.errors import ConfigError
from tests.tools.heads.toys import KINDS, drafted, make_head_module, make_toy
from tools.distill import num_steps, write_answers
from tools.heads.convert import serving_head
from tools.heads.simulate import matches, tabulate, verifications

PROMPTS = [[5, 9, 11], [7, 8]]
OUTPUT = 16


@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", KINDS)
def test_verifications_are_those_of_drafting_token_by_token(name, temperature):
    target = make_toy()
    module = make_head_module(name, target)
    head, length = serving_head(module, target, torch.float32), module.num_drafts
    texts = write_answers(target, PROMPTS, OUTPUT, temperature)
    for seed, (text, prompt) in enumerate(zip(texts, PROMPTS, strict=True)):
        found = list(verifications(matches(head, target, text, len(prompt), length, temperature, seed), length))
        place, right = len(prompt), []
        while place < len(text):
            drafts = drafted(head, target, text[:place], length, temperature, seed)[: len(text) - place]
            agrees = [draft == token for draft, token in zip(drafts, text[place:].tolist(), strict=False)]
            accepted = len(agrees) if all(agrees) else agrees.index(False)
            right.append((len(drafts), accepted))
            place += accepted + 1
        assert found == right


def test_a_prompt_of_one_token_is_refused():
    target = make_toy()
    head = serving_head(make_head_module("dflash", target), target, torch.float32)
    with pytest.raises(ConfigError, match="at least 2"):
        matches(head, target, torch.arange(5), 1, 2, 0.0, 0)


@given(st.lists(st.booleans(), min_size=1, max_size=30), st.integers(1, 6))
def test_a_draft_whose_agreement_only_depends_on_the_token_takes_the_distillers_steps(agreed, length):
    padded = np.array(agreed + [False] * length)
    matched = np.stack([padded[place : place + length] for place in range(len(agreed))])
    steps = list(verifications(matched, length))
    assert len(steps) == num_steps(np.array(agreed), length)
    tokens = sum(accepted + 1 for _, accepted in steps)
    assert len(agreed) <= tokens <= len(agreed) + 1, "the last verification may emit one token behind the text"


def test_a_table_has_tokens_by_length_and_acceptance_by_position():
    never, always = np.zeros((4, 2), bool), np.ones((6, 2), bool)
    table = tabulate([never, always], ["chat", "maths"], [1, 2])
    assert list(table) == ["chat", "maths", "all"]
    assert table["chat"] == {"requests": 1, "tokens_1": 1.0, "tokens_2": 1.0, "acceptance": [0.0, 0.0]}
    assert table["maths"] == {"requests": 1, "tokens_1": 2.0, "tokens_2": 3.0, "acceptance": [1.0, 1.0]}
    assert table["all"]["tokens_2"] == pytest.approx(10 / 6)
    assert table["all"]["acceptance"] == [pytest.approx(2 / 6), 1.0]
