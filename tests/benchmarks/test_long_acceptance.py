"""benchmarks/long_acceptance.py on a tiny model that drafts for itself."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from benchmarks.long_acceptance import SEED, agreement, draft_logits, longest, parse, table, windows_of
from faser.limits import KeyWindow
from faser.runtime.sampling import gumbel
from tests.models.reference import forward
from tests.tiny import VOCABULARY, make_model


def test_a_prompt_is_the_longest_that_fits():
    assert len(longest(lambda parts: [0] * (3 * parts + 2), 30, 1000)) == 29
    assert len(longest(lambda parts: [0] * (3 * parts + 2), 30, 4)) == 14


@pytest.mark.parametrize("sampled", [False, True])
def test_a_model_that_drafts_for_itself_is_always_right_and_with_a_narrow_window_not(sampled):
    model = make_model("qwen2")
    prompt = torch.randint(3, VOCABULARY, (90,), generator=torch.Generator().manual_seed(0)).tolist()
    output: list[int] = []
    for position in range(90, 110):
        scores = forward(model, torch.tensor(prompt + output))[-1].numpy()
        if sampled:
            scores = scores + gumbel(np.array([SEED], dtype=np.uint64), np.array([position]), VOCABULARY)[0]
        output.append(int(scores.argmax()))
    rates = []
    for window in (None, KeyWindow(120), KeyWindow(4, 1)):
        (logits,) = draft_logits(model, prompt, [output], window)
        rates.append(agreement(model, logits, output, len(prompt), sampled))
    assert rates[:2] == [1.0, 1.0]
    assert rates[2] < 1


def test_windows_that_do_not_fit_a_context_are_left_out_and_shown_as_such():
    args = parse(["--document", "a", "--chat", "b", "--windows", "256,2048"])
    assert list(windows_of(args, 1024)) == ["whole", "256", "4+256"]
    lines = table({"x": {"whole": 0.5, "tokens": 9.0}, "y": {"whole": 0.25, "256": 1.0, "tokens": 8.0}}).splitlines()
    assert lines[2] == "| x | 0.500 | 9 | – |"
    assert lines[3] == "| y | 0.250 | 8 | 1.000 |"
