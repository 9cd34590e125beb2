"""What the engine's process tells the HTTP process about the models it loaded."""

from __future__ import annotations

import shutil
from typing import Any

import pytest

from faser.errors import ConfigError
from faser.server.load import load
from faser.server.messages import About, Start


def about(model: str | None, draft: str | None, **engine: Any) -> About:
    mode = engine.pop("generation_config", "auto")
    served = load(Start(model, draft, {"max_model_len": 64, **engine}, None, None, "info", mode))
    served.engine.close()
    return served.about


def test_the_draft_none_is_no_draft_even_for_the_default_model():
    found = about(None, "none")
    assert (found.draft, found.policy) == (None, "off")
    assert (found.reasons["draft"], found.reasons["policy"]) == ("as asked", "the default without a draft")


def test_a_model_other_than_the_default_has_no_draft_unless_one_is_named(folder):
    found = about(str(folder), None)
    assert (found.draft, found.policy) == (None, "off")
    assert (found.reasons["draft"], found.reasons["policy"]) == ("none named", "the default without a draft")


def test_the_sampling_defaults_are_those_of_the_file_with_its_name_or_none(folder, tmp_path):
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 2, "temperature": 0.5, "max_new_tokens": 7}')
    found = about(str(tmp_path), None)
    assert found.sampling == {"temperature": 0.5, "max_tokens": 7}
    assert found.reasons["sampling"] == str(tmp_path / "generation_config.json")
    found = about(str(tmp_path), None, generation_config="none")
    assert (found.sampling, found.reasons["sampling"]) == ({}, "--generation-config none")


def test_a_policy_that_speculates_is_refused_without_a_draft(folder):
    with pytest.raises(ConfigError, match="'fixed:2' needs a draft"):
        about(str(folder), "none", policy="fixed:2")
