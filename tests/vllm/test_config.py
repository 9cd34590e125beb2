"""FASER's options in vLLM's configuration: what is accepted, and what is refused with which reason."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from faser.errors import ConfigError, InvalidRequest
from faser.vllm.config import FaserConfig, check, max_draft_of
from tests.vllm.fakes import make_config


@pytest.mark.parametrize("given", [{}, {"other": 1}, None, SimpleNamespace()])
def test_without_the_flag_there_is_nothing(given):
    assert FaserConfig.find(given) is None


def test_the_options_are_found_by_name():
    assert FaserConfig.find({"faser": {}}) == FaserConfig(policy="faser")
    assert FaserConfig.find({"faser": {"policy": "fixed:3", "costs": "c.json"}}) == FaserConfig("fixed:3", "c.json")


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"polcy": "off"}, "has no polcy; it has policy, costs"),
        ({"policy": "fastest"}, "policy 'fastest': expected off, or fixed:K"),
        ({"policy": 3}, "faser.policy: expected a name such as 'faser' or 'fixed:3', got 3"),
        ({"costs": 3}, "faser.costs: expected the path of a file, got 3"),
        ("faser", "expected an object such as {'policy': 'faser'}, got 'faser'"),
        (True, "expected an object such as {'policy': 'faser'}, got True"),
    ],
)
def test_wrong_options_are_refused_by_name(given, reason):
    with pytest.raises(ConfigError) as refused:
        FaserConfig.find({"faser": given})
    assert reason in str(refused.value)


def without_speculation(config):
    config.speculative_config = None


def with_pipeline(config):
    config.parallel_config.pipeline_parallel_size = 2


def with_lora(config):
    config.lora_config = object()


def with_table(config):
    config.speculative_config.num_speculative_tokens_per_batch_size = [(1, 8, 4)]


def with_medusa(config):
    config.speculative_config.method = "medusa"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (without_speculation, "add --speculative-config"),
        (with_pipeline, "pipeline parallelism"),
        (with_lora, "LoRA with a draft model"),
        (with_table, "num_speculative_tokens_per_batch_size is vLLM's own rule"),
        (with_medusa, "speculative method 'medusa': FASER works with draft_model, eagle"),
    ],
)
def test_what_cannot_work_is_refused_with_the_reason(change, reason):
    config = make_config()
    check(FaserConfig(), config)
    change(config)
    with pytest.raises(ConfigError, match=reason):
        check(FaserConfig(), config)


def test_a_fixed_length_beyond_vllm_s_is_refused():
    with pytest.raises(ConfigError, match="policy fixed:5 needs num_speculative_tokens of 5, not 4"):
        check(FaserConfig("fixed:5"), make_config(num_drafts=4))


def test_lora_works_where_vllm_drafts():
    config = make_config(method="ngram")
    with_lora(config)
    check(FaserConfig(), config)


@pytest.mark.parametrize(("given", "limit"), [(None, None), ({}, None), ({"max_draft": 0}, 0), ({"max_draft": 9}, 9)])
def test_a_request_may_limit_its_drafts(given, limit):
    assert max_draft_of(given) == limit


@pytest.mark.parametrize("given", [-1, "2", 1.5, True, [1]])
def test_a_limit_that_is_no_number_is_refused(given):
    with pytest.raises(InvalidRequest, match="max_draft: expected a whole number from 0 on"):
        max_draft_of({"max_draft": given})
