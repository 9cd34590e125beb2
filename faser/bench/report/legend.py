"""The systems of a report: how each is drawn and what each is.

One sentence for each policy; `docs/policies.md` has more. A benchmark with other systems explains them in the document,
in `about["systems"]` by name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import cycle
from typing import Any

from faser.bench.report.svg import MARKERS, Look
from faser.traffic.document import GroupDocument

OTHER_LOOKS = tuple(Look(colour, dash, 2) for dash in ("6 4", "2 4") for colour in ("violet", "pink", "sky", "red"))
POLICY_LOOKS = tuple(
    Look(colour, dash)
    for dash in ("", "9 3", "9 3 2 3")
    for colour in ("orange", "purple", "brown", "red", "sky", "pink", "violet")
)
NUM_GREENS = 6  # green-1 to green-6 of the palette, from light to dark

POLICIES = {
    "off": "no speculation: the target makes one token per request and step, the draft never runs",
    "faser": "FASER's default: for every request and step the length that pays, from acceptance and measured costs; "
    "it may be 0",
    "goodput": "SmartSpec: in every step one length for the whole batch, the one with the most expected tokens/s",
    "ema": "SGLang's adaptive length: a range by batch size, moved up and down by an average of accepted lengths",
    "adaspec": "AdaSpec: drafts grow while the predicted goodput rises, then are cut to sizes that have a graph",
    "tetris": "TETRIS: a fixed capacity of rows, filled with the drafts most likely to be accepted",
    "nightjar": "Nightjar: a bandit learns the best length for each batch size; switching on has a price",
    "faser-gp": "the search of the FASER paper: Bayesian optimisation over lengths",
}
UNKNOWN = "a policy of this benchmark; the document does not explain it"
OTHER = "not FASER in this process: a server, or results from a file"


@dataclass(frozen=True)
class SystemLook:
    name: str
    other: bool  # not FASER
    look: Look
    meaning: str  # one sentence


def systems_of(groups: Iterable[GroupDocument], about: Mapping[str, Any]) -> tuple[SystemLook, ...]:
    """In the order of the document. Each has its own marker; when markers run out, colour and dash differ."""
    policies = {group.system: group.policy for group in groups}
    given, looks = about.get("systems"), _looks(policies)
    told = given if isinstance(given, Mapping) else {}
    return tuple(
        SystemLook(name, policy is None, looks[name], str(told.get(name) or explain(name, policy)))
        for name, policy in policies.items()
    )


def explain(name: str, policy: str | None) -> str:
    """What a system is, by its policy."""
    if policy is None:
        return OTHER
    meaning = _explain_policy(policy)
    return meaning if name == policy or meaning == UNKNOWN else f"{meaning}; from a file of results"


def _explain_policy(policy: str) -> str:
    kind, _, argument = policy.partition(":")
    if kind == "fixed" and argument.isdigit():
        return f"every request drafts {argument} token{'' if argument == '1' else 's'} in every step"
    tiers = re.findall(r"(\d+)=(\d+)", argument)
    if kind == "table" and tiers:
        parts = [f"{length} up to {size} requests" for size, length in tiers]
        return f"a length by batch size, as in vLLM: {', '.join(parts)}, 0 above"
    return POLICIES.get(policy, UNKNOWN)


def _looks(policies: Mapping[str, str | None]) -> dict[str, Look]:
    """Fixed lengths are shades of green; systems that are not FASER are dashed."""
    fixed = [name for name, policy in policies.items() if policy is not None and policy.startswith("fixed:")]
    spare, others = cycle(POLICY_LOOKS), cycle(OTHER_LOOKS)
    found: dict[str, Look] = {}
    for number, (name, policy) in enumerate(policies.items()):
        if policy is None:
            look = next(others)
        elif policy == "off" and "grey" not in {each.colour for each in found.values()}:
            look = Look("grey", thickness=2)
        elif policy == "faser" and "blue" not in {each.colour for each in found.values()}:
            look = Look("blue", thickness=2.75)
        elif name in fixed:
            look = Look(f"green-{_shade(fixed.index(name), len(fixed))}")
        else:
            look = next(spare)
        found[name] = replace(look, marker=MARKERS[number % len(MARKERS)])
    return found


def _shade(index: int, count: int) -> int:
    """From light to dark; the lightest only for NUM_GREENS or more."""
    least = 1 if count >= NUM_GREENS else 2
    return NUM_GREENS - 2 if count == 1 else least + (NUM_GREENS - least) * index // (count - 1)
