"""That benchmarks/parity.py finds differences and measures them as the sampler does."""

from __future__ import annotations

import pytest

from benchmarks import parity
from benchmarks.parity import Comparison, Difference, Scores
from faser.build import build_engine
from faser.config import EngineOptions
from tests.tiny import make_draft, make_model

PROMPTS = [[5, 9, 11], [7, 3, 8, 20, 31], [40] * 6]
TOKENS = 12


@pytest.fixture(scope="module", params=[0.0, 1.0])
def written(request):
    """A model's texts at a temperature, and its scores."""
    target = make_model()
    engine = build_engine(target, make_draft(target), EngineOptions(device="cpu", num_pages=100, page_size=4))
    off, drafting = (parity.write(engine, length, PROMPTS, TOKENS, request.param) for length in (0, 3))
    assert off == drafting
    return off, Scores(target, target.head, request.param)


def test_the_best_score_is_the_token_that_was_written(written):
    texts, scores = written
    for seed, (prompt, text) in enumerate(zip(PROMPTS, texts, strict=True)):
        assert scores.at(prompt, text[:-1], seed, range(TOKENS)).argmax(-1).tolist() == text


def test_the_first_difference_is_found_with_its_gap(written):
    texts, scores = written
    other = [list(text) for text in texts]
    second = scores.at(PROMPTS[1], texts[1][:4], 1, [4])[0].topk(2)
    other[1][4], other[1][7] = int(second.indices[1]), -1
    found = parity.compare("x", "float32", scores, PROMPTS, texts, other)
    (difference,) = found.differences
    assert (difference.prompt, difference.position) == (1, 4)
    assert difference.token_ids == (texts[1][4], other[1][4])
    assert difference.gap == pytest.approx(float(second.values[0] - second.values[1]), abs=1e-4)
    assert found.count == 3


def test_margins_are_those_of_every_position(written):
    texts, scores = written
    margins = parity.find_margins(scores, PROMPTS, texts)
    assert len(margins) == 3 * TOKENS
    assert min(margins) >= 0


def test_equal_texts_differ_nowhere_and_a_large_gap_is_no_near_tie():
    assert Comparison("x", 3, 0.5, 2.0, ()).holds
    near, far = (Difference(0, 1, (2, 3), gap) for gap in (0.5, 0.6))
    assert Comparison("x", 3, 0.5, 2.0, (near,)).holds
    assert not Comparison("x", 3, 0.5, 2.0, (near, far)).holds
