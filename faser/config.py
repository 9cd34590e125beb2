"""The options of an engine, checked. Shared by `LLM(…)` and the command line; no torch."""

from __future__ import annotations

from dataclasses import dataclass

from faser.errors import ConfigError
from faser.models import config as model_config
from faser.policy import Policy, make_policy

NGRAM = "ngram"
DEFAULT_LENGTH = 1  # of the fixed policy where none is named: the best on a CPU (docs/lab.md)
DTYPES = ("auto", *model_config.DTYPES)
DEVICES = ("auto", "cpu")


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Sizes and choices that do not depend on the model. None lets FASER choose."""

    policy: str | Policy | None = None  # None: fixed:1 with a draft, off without
    device: str = "auto"
    dtype: str = "auto"
    max_running: int = 64  # requests in one batch
    max_batch_tokens: int = 1024  # rows in one step: decoding, drafts and prompt chunks together
    max_model_len: int | None = None  # None: what the model knows
    page_size: int = 16  # tokens
    kv_memory: int | None = None  # bytes for the KV pages of target and draft; None: the device's choice
    num_pages: int | None = None  # pages of each pool, instead of kv_memory
    prefix_caching: bool = True

    def __post_init__(self) -> None:
        for name in ("max_running", "max_batch_tokens", "max_model_len", "page_size", "kv_memory", "num_pages"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ConfigError(f"{name}={value!r}: expected an integer of at least 1")
        if self.max_running > self.max_batch_tokens:
            raise ConfigError(
                f"max_running={self.max_running} exceeds max_batch_tokens={self.max_batch_tokens}: "
                "every running request needs a row; raise the second or lower the first"
            )
        if self.kv_memory is not None and self.num_pages is not None:
            raise ConfigError("kv_memory and num_pages both size the KV cache; give one of them")
        if self.dtype not in DTYPES:
            raise ConfigError(f"dtype={self.dtype!r}: expected one of {', '.join(DTYPES)}")
        if self.device not in DEVICES:
            raise ConfigError(
                f"device={self.device!r}: expected one of {', '.join(DEVICES)}; CUDA is not in this version"
            )

    def make_policy(self, has_draft: bool) -> Policy:
        """The policy by name, or as given; refused where it would speculate without a draft."""
        policy = self.policy
        if policy is None:
            policy = f"fixed:{DEFAULT_LENGTH}" if has_draft else "off"
        if isinstance(policy, str):
            policy = make_policy(policy)
        if not has_draft and policy.name != "off":
            raise ConfigError(
                f'policy {policy.name!r} needs a draft: give draft="…" or draft="{NGRAM}", or policy="off"'
            )
        return policy
