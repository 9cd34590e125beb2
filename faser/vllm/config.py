"""The options under `additional_config["faser"]`, and which configurations of vLLM they can work with.

Knows plain values. What it reads of vLLM's configuration comes as attributes; vLLM is not imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from faser.errors import ConfigError, InvalidRequest
from faser.policy import make_policy

KEY = "faser"  # in vLLM's additional_config
MAX_DRAFT = "max_draft"  # in a request's vllm_xargs
LENGTHS_ONLY = ("eagle", "eagle3", "mtp", "ngram", "ngram_gpu")  # methods whose drafting stays vLLM's
METHODS = ("draft_model", *LENGTHS_ONLY)


@dataclass(frozen=True)
class FaserConfig:
    """FASER's own options. A policy is spelt as for `faser serve --policy`."""

    policy: str = "faser"
    costs: str | None = None  # file of a profile that the worker writes and the scheduler reads; None: a temporary one

    def __post_init__(self) -> None:
        if not isinstance(self.policy, str):
            raise ConfigError(f"faser.policy: expected a name such as 'faser' or 'fixed:3', got {self.policy!r}")
        make_policy(self.policy)
        if self.costs is not None and not isinstance(self.costs, str):
            raise ConfigError(f"faser.costs: expected the path of a file, got {self.costs!r}")

    @classmethod
    def find(cls, additional_config: object) -> FaserConfig | None:
        """The options in vLLM's `additional_config`; None if there are none."""
        if not isinstance(additional_config, Mapping) or KEY not in additional_config:
            return None
        given = additional_config[KEY]
        if not isinstance(given, Mapping):
            raise ConfigError(
                f"additional_config['{KEY}']: expected an object such as {{'policy': 'faser'}}, got {given!r}"
            )
        known = [field.name for field in fields(cls)]
        unknown = [str(name) for name in given if name not in known]
        if unknown:
            raise ConfigError(f"additional_config['{KEY}'] has no {', '.join(unknown)}; it has {', '.join(known)}")
        return cls(**given)


def check(config: FaserConfig, vllm_config: Any) -> None:
    """Raise ConfigError if FASER cannot work with this configuration of vLLM, with the reason."""
    speculative = vllm_config.speculative_config
    if speculative is None:
        raise ConfigError("FASER gives drafts their lengths, and nothing drafts here: add --speculative-config")
    if speculative.method not in METHODS:
        raise ConfigError(f"speculative method {speculative.method!r}: FASER works with {', '.join(METHODS)}")
    if speculative.num_speculative_tokens_per_batch_size:
        raise ConfigError(
            "num_speculative_tokens_per_batch_size is vLLM's own rule for lengths: drop it, or give FASER the policy "
            "table:SIZE=LENGTH/…"
        )
    if vllm_config.parallel_config.pipeline_parallel_size > 1:
        raise ConfigError("pipeline parallelism: the first stage would draft without the last one's tokens; use 1")
    if vllm_config.lora_config is not None and speculative.method == "draft_model":
        raise ConfigError(
            "LoRA with a draft model: the draft has no adapters and would agree with none; use one of them"
        )
    longest, given = make_policy(config.policy), speculative.num_speculative_tokens
    if config.policy.startswith("fixed:") and longest.max_length > given:
        raise ConfigError(f"policy {config.policy} needs num_speculative_tokens of {longest.max_length}, not {given}")


def max_draft_of(extra_args: Mapping[str, Any] | None) -> int | None:
    """A request's own limit on its drafts; None without one. Raises InvalidRequest."""
    given = (extra_args or {}).get(MAX_DRAFT)
    if given is None:
        return None
    if isinstance(given, bool) or not isinstance(given, int) or given < 0:
        raise InvalidRequest(f"vllm_xargs.{MAX_DRAFT}: expected a whole number from 0 on, got {given!r}")
    return given
