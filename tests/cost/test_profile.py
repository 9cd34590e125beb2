"""How a profile is saved, and what is no profile."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from faser.cost.profile import VERSION, Profile
from faser.cost.residency import ResidencyProfile
from faser.errors import ConfigError
from tests.cost.machine import GPU


def test_a_saved_profile_comes_back_as_it_was(tmp_path):
    path = tmp_path / "some" / "where" / "p.json"
    GPU.save(path)
    assert Profile.load(path) == GPU
    assert [each.name for each in path.parent.iterdir()] == ["p.json"]


def test_overlap_profiles_are_saved_and_may_be_missing():
    given = json.loads(json.dumps(GPU.to_dict()))
    assert [each["draft_sms"] for each in given["besides"]] == [0, 32]
    assert given["besides"][1]["share"]["seconds"] == pytest.approx([0.25])
    assert given["besides"][1]["draft_factor"]["seconds"] == pytest.approx([1.5])
    found = Profile.from_dict(given)
    assert found.besides == GPU.besides
    assert found.await_seconds == GPU.await_seconds
    older = Profile.from_dict({key: value for key, value in given.items() if key not in ("besides", "await_seconds")})
    assert older == replace(GPU, besides=(), await_seconds=0.0)


def test_the_residency_of_a_profile_is_saved_and_may_be_missing():
    moves = ResidencyProfile(2_470_000_000, 131_072, 32_768, lend_seconds=0.015, load_seconds=0.05)
    profile = replace(GPU, residency=moves)
    given = json.loads(json.dumps(profile.to_dict()))
    assert Profile.from_dict(given) == profile
    assert Profile.from_dict({key: value for key, value in given.items() if key != "residency"}) == GPU
    with pytest.raises(ConfigError, match="weight_bytes"):
        Profile.from_dict({**given, "residency": {}})


def test_the_drafts_memory_holds_whole_pages():
    moves = ResidencyProfile(1000, target_token_bytes=4, draft_token_bytes=1, lend_seconds=0.0, load_seconds=0.0)
    assert moves.pages_gained(num_pages=100, page_size=16) == (1000 + 1600) // 64
    assert moves.pages_gained(num_pages=0, page_size=16) == 15


def test_accuracy_is_one_line():
    assert GPU.accuracy == "verify 2.0 % off (worst 5.0 %)"
    assert "not measured" in replace(GPU, errors={}).accuracy


def without(name):
    return {key: value for key, value in GPU.to_dict().items() if key != name}


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("no JSON", "cannot be read"),
        ("[]", "version None"),
        ("{}", "version None"),
        (json.dumps({**GPU.to_dict(), "version": VERSION + 1}), f"expected {VERSION}"),
        (json.dumps(without("catch_up")), "catch_up"),
        (json.dumps({**GPU.to_dict(), "verify": [1]}), "TypeError"),
        (json.dumps({**GPU.to_dict(), "errors": [0.1]}), "AttributeError"),
        (json.dumps({**GPU.to_dict(), "host": "long"}), "long"),
        (json.dumps({**GPU.to_dict(), "kind": "guessed"}), "guessed"),
        (json.dumps({**GPU.to_dict(), "besides": [{"draft_sms": 0}]}), "draft"),
    ],
)
def test_a_file_that_is_no_profile_is_refused_by_name(tmp_path, content, says):
    path = tmp_path / "broken.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=says) as refused:
        Profile.load(path)
    assert str(path) in str(refused.value)


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="nowhere"):
        Profile.load(tmp_path / "nowhere.json")
