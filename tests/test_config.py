"""What options mean, decided in one place."""

from __future__ import annotations

import pytest

from faser.config import DEFAULT_DRAFT, EngineOptions, draft_name, model_name, resolve_draft, split_draft
from faser.errors import ConfigError


@pytest.mark.parametrize(
    ("model", "draft", "resolved", "name"),
    [
        (None, None, str(DEFAULT_DRAFT), "smollm2-135m-6"),
        (None, "none", None, None),
        (None, "ngram", "ngram", "ngram"),
        ("org/model", None, None, None),
        ("org/model", "none", None, None),
        ("org/model", "org/small", "org/small", "small"),
        ("org/model", "a/draft.gguf", "a/draft.gguf", "draft"),
        ("org/model", "./none", "./none", "none"),
        (None, "+ngram", f"{DEFAULT_DRAFT}+ngram", "smollm2-135m-6+ngram"),
        ("org/model", "a/draft.gguf+ngram", "a/draft.gguf+ngram", "draft+ngram"),
        ("org/model", "+ngram", "ngram", "ngram"),
        ("org/model", "none+ngram", "ngram", "ngram"),
        ("org/model", "ngram+ngram", "ngram", "ngram"),
    ],
)
def test_a_draft_that_is_not_given_belongs_to_the_default_model_alone(model, draft, resolved, name):
    assert resolve_draft(model, draft) == resolved
    assert draft_name(model, draft) == name


def test_a_model_in_memory_has_no_draft_unless_one_is_given():
    model, draft = object(), object()
    assert resolve_draft(model, None) is None
    assert resolve_draft(model, draft) is draft


@pytest.mark.parametrize(
    ("draft", "parts"), [("ngram", (None, True)), ("a+b", ("a+b", False)), ("a+b+ngram", ("a+b", True))]
)
def test_a_draft_is_split_into_its_guessers(draft, parts):
    assert split_draft(draft) == parts


@pytest.mark.parametrize(("model", "name"), [("org/model", "model"), ("a/b.gguf", "b"), ("/", "/")])
def test_a_model_is_called_by_the_last_part_of_its_name(model, name):
    assert model_name(model) == name


@pytest.mark.parametrize("acceptance", [-0.1, 1.5, (), (0.5, 2.0)])
def test_synthetic_acceptance_takes_probabilities_alone(acceptance):
    with pytest.raises(ConfigError, match="acceptance="):
        EngineOptions(acceptance=acceptance)


@pytest.mark.parametrize("acceptance", [None, 0.0, 1, (0.7,), (0.9, 0.5)])
def test_synthetic_acceptance_is_one_probability_or_one_by_position(acceptance):
    assert EngineOptions(acceptance=acceptance).acceptance == acceptance
