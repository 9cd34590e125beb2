"""Which profiles are measured, kept and found again."""

from __future__ import annotations

import json
import logging
from dataclasses import replace

import pytest

from faser import build
from faser.build import load_pair
from faser.config import EngineOptions
from faser.cost.profile import Profile
from faser.cost.profiled_cost import ProfiledCost
from faser.cost.step_cost import StepCost
from faser.errors import ConfigError
from faser.policy import Fixed
from faser.runtime.profiling import saved as saved_profiles
from tests.runtime.profiling.engines import Costly, make_full, stub
from tests.runtime.profiling.machine import CPU, machine
from tests.test_exactness import assert_equal, make_engine, make_requests, reference, serve
from tests.tiny import make_model


@pytest.mark.parametrize("kind", ["model", "ngram"])
def test_requests_get_the_same_tokens_after_profiling(pair, kind, cache):
    target, draft = pair
    requests = make_requests(target.config)
    right = reference(target, requests)
    engine = make_engine(target, draft if kind == "model" else "ngram", Costly())
    assert isinstance(engine.cost, ProfiledCost)
    assert_equal(serve(engine, requests), right)
    plain = serve(make_engine(target, draft if kind == "model" else "ngram", Fixed(3)), requests)
    assert plain.tokens == right.tokens


def test_a_policy_that_asks_for_costs_gets_a_profile_that_is_kept(pair, cache, monkeypatch, caplog):
    measured = stub(monkeypatch)
    with caplog.at_level(logging.INFO, "faser.engine"):
        engine = make_full(*pair, Costly())
        assert engine.cost is engine.scheduler.drafts.cost
        assert "profiled in" in caplog.text
        (path,) = (cache / "profiles").iterdir()
        assert Profile.load(path).about["max_running"] == 8
        again = make_full(*pair, Costly())
    assert again.cost.profile == engine.cost.profile
    assert len(measured) == 1
    assert "earlier start: verify 10.0 % off" in caplog.text


def test_a_policy_that_does_not_ask_costs_no_time(pair, cache, monkeypatch):
    monkeypatch.setattr(build, "measure", lambda *_: pytest.fail("measured for nobody"))
    engine = make_full(*pair, Fixed(3))
    assert isinstance(engine.cost, StepCost)
    assert engine.scheduler.drafts.cost is None
    assert not cache.exists()


def test_other_sizes_and_other_models_have_profiles_of_their_own(pair, cache, monkeypatch):
    measured = stub(monkeypatch)
    target, draft = pair
    for _ in range(2):
        make_full(target, draft, Costly())
        make_full(target, draft, Costly(), max_running=4)
        make_full(target, "ngram", Costly())
        make_full(make_model("qwen3"), "ngram", Costly())
    assert len(measured) == len(list((cache / "profiles").iterdir())) == 4


@pytest.mark.parametrize("content", ["{", json.dumps(replace(machine(CPU), about={"hardware": "an abacus"}).to_dict())])
def test_a_broken_or_foreign_file_is_measured_again_with_a_warning(pair, cache, monkeypatch, caplog, content):
    measured = stub(monkeypatch)
    make_full(*pair, Costly())
    (path,) = (cache / "profiles").iterdir()
    path.write_text(content)
    make_full(*pair, Costly())
    assert len(measured) == 2
    assert [record.levelname for record in caplog.records if record.levelno > logging.INFO] == ["WARNING"]
    assert "abacus" in caplog.text or "cannot be read" in caplog.text
    make_full(*pair, Costly())
    assert len(measured) == 2, "the new one was not kept"


def test_a_cache_that_cannot_be_written_is_a_warning(pair, tmp_path, monkeypatch, caplog):
    measured = stub(monkeypatch)
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("FASER_CACHE", str(tmp_path / "file"))
    assert isinstance(make_full(*pair, Costly()).cost, ProfiledCost)
    assert len(measured) == 1
    assert "cannot be kept" in caplog.text


@pytest.mark.parametrize("errors", [{"verify": 0.9}, {"verify": 0.1, "draft": 0.9}, {}])
def test_a_profile_of_a_busy_machine_is_used_and_not_kept(pair, cache, monkeypatch, caplog, errors):
    noisy = replace(machine(CPU), errors=errors)
    monkeypatch.setattr(build, "measure", lambda subject, about, *_: replace(noisy, about=about))
    assert make_full(*pair, Costly()).cost.profile.errors == noisy.errors
    assert not cache.exists()
    assert "not kept" in caplog.text


def test_folders_of_the_cache(monkeypatch, tmp_path):
    for name in ("FASER_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert saved_profiles.path_of({}).parent == tmp_path / ".cache" / "faser" / "profiles"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert saved_profiles.path_of({}).parent == tmp_path / "xdg" / "faser" / "profiles"
    monkeypatch.setenv("FASER_CACHE", str(tmp_path / "own"))
    assert saved_profiles.path_of({}).parent == tmp_path / "own" / "profiles"


def test_a_given_profile_is_used_as_it_is(pair, cache, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(build, "measure", lambda *_: pytest.fail("measured what was given"))
    path = tmp_path / "given.json"
    replace(machine(CPU), about={"hardware": "an abacus"}).save(path)
    for policy in (Costly(), Fixed(2)):
        assert make_engine(*pair, policy, profile=str(path)).cost.profile.about == {"hardware": "an abacus"}
    assert "an abacus" in caplog.text
    assert not cache.exists()


def test_a_given_profile_is_checked_before_anything_is_loaded(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read as a profile"):
        load_pair("no/such/model", None, EngineOptions(profile=str(tmp_path / "nowhere.json")))


def test_with_profiling_none_nothing_is_measured(pair, cache, monkeypatch):
    for name in ("measure", "measure_quick"):
        monkeypatch.setattr(build, name, lambda *_: pytest.fail("measured"))
    engine = make_engine(*pair, Costly(), profiling="none")
    assert engine.cost.profile.kind == "assumed"
    assert not engine.use_idle_moment()
    assert not cache.exists()


@pytest.mark.parametrize(
    ("errors", "kind", "says"),
    [
        ({"verify": 0.05, "draft": 0.05}, "measured", None),
        ({"verify": 0.05, "draft": 0.5}, "measured", "draft 50 %"),
        ({"verify": 0.05}, "measured", "no time"),
        ({"verify": 0.05, "draft": 0.05}, "assumed", "nothing was measured"),
    ],
)
def test_one_rule_says_which_profiles_are_kept(errors, kind, says):
    reason = replace(machine(CPU), errors=errors, kind=kind).why_not_kept()
    assert reason is None if says is None else says in reason
