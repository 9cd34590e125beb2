"""Policies by name: what `--policy` and `LLM(policy=…)` accept."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from faser.errors import ConfigError
from faser.limits import HARD_MAX_LENGTH
from faser.policy.adaptive import Adaptive
from faser.policy.base import BatchView, Fixed, Policy
from faser.policy.gp import FaserGP
from faser.policy.rivals.batch_size import Ema, Table
from faser.policy.rivals.goodput import AdaSpec, Goodput, Tetris
from faser.policy.rivals.nightjar import Nightjar

__all__ = ["POLICIES", "BatchView", "Fixed", "Policy", "make_policy"]

POLICIES: Mapping[str, Callable[[], Policy]] = {
    "off": lambda: Fixed(0),
    "faser": Adaptive,
    "table": Table,
    "goodput": Goodput,
    "ema": Ema,
    "adaspec": AdaSpec,
    "tetris": Tetris,
    "nightjar": Nightjar,
    "faser-gp": FaserGP,
}


def make_policy(text: str) -> Policy:
    """A new policy: one of POLICIES, `fixed:K` with K from 0 to HARD_MAX_LENGTH, or `table:SIZE=LENGTH/…`."""
    kind, colon, argument = text.partition(":")
    if text in POLICIES:
        return POLICIES[text]()
    if kind == "fixed" and argument.isascii() and argument.isdigit() and int(argument) <= HARD_MAX_LENGTH:
        return Fixed(int(argument))
    if kind == "table" and colon:
        return Table.parse(argument)
    others = ", ".join(name for name in POLICIES if name != "off")
    raise ConfigError(
        f"policy {text!r}: expected off, or fixed:K with K from 0 to {HARD_MAX_LENGTH}, or one of {others}, "
        "or table:64=3/128=1 (3 up to 64 requests, 1 up to 128, 0 above)"
    )
