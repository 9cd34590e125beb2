"""Policies by name: what `--policy` and `LLM(policy=…)` accept."""

from __future__ import annotations

from faser.errors import ConfigError
from faser.policy.base import BatchView, Policy
from faser.policy.fixed import Fixed

__all__ = ["MAX_LENGTH", "BatchView", "Fixed", "Policy", "make_policy"]

MAX_LENGTH = 32  # no policy drafts more in one step


def make_policy(text: str) -> Policy:
    """`off`, or `fixed:K` with K from 0 to MAX_LENGTH."""
    kind, _, argument = text.partition(":")
    if text == "off":
        return Fixed(0)
    if kind == "fixed" and argument.isascii() and argument.isdigit() and int(argument) <= MAX_LENGTH:
        return Fixed(int(argument))
    raise ConfigError(f"policy {text!r}: expected off, or fixed:K with K from 0 to {MAX_LENGTH}")
