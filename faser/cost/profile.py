"""What the forwards of one pair of models cost on one machine: measured curves, saved as JSON.

A `Profile` is plain numbers. `ProfiledCost` (profiled_cost.py) predicts with it. faser/runtime/profiling measures it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from faser.cost.curve import Curve
from faser.cost.overlap import OverlapProfile
from faser.cost.residency import ResidencyProfile
from faser.errors import ConfigError
from faser.machine import atomic_write

VERSION = 4
CURVES = ("verify", "prompts", "first_draft", "next_draft", "catch_up")
# measured: completely; idle: all but early exit and overlap; quick: a few steps, the rest assumed; assumed: nothing
KINDS = ("measured", "idle", "quick", "assumed")
MAX_KEPT_ERROR = 0.2  # mean error of predictions, as a share, of a profile that is worth keeping


@dataclass(frozen=True)
class Profile:
    """The forwards of a target and its draft. Without a draft model its curves are NOTHING."""

    about: Mapping[str, Any]  # what it holds for: hardware, models, dtype, versions
    verify: Curve  # by rows of decoding requests, drafts included; for steps without prompts
    prompts: Curve  # by all rows; for steps with prompts
    first_draft: Curve  # first drafted token, by requests; for steps in which no draft fell behind
    next_draft: Curve  # each further drafted token, by requests
    catch_up: Curve  # first drafted token, by rows; for steps in which a draft fell behind
    host: float  # seconds of a step outside both models
    stop_seconds: float | None = None  # of a confidence check between two drafted tokens; None: not possible
    exit_check: Curve | None = None  # of an early exit's check, by drafts; None: not possible
    exit_candidates: int = 0  # vocabulary entries that the check compares drafts with; 0: all
    besides: tuple[OverlapProfile, ...] = ()  # drafting beside verification, by split of the device
    await_seconds: float = 0.0  # added to a step that cannot begin before the result of the step before it
    residency: ResidencyProfile | None = None  # of moving the draft out and back; None: not measured, or not possible
    errors: Mapping[str, float] = field(default_factory=dict)  # on held-out batches, mean and worst, as shares
    kind: str = "measured"  # one of KINDS

    def why_not_kept(self) -> str | None:
        """Why the profile is not good enough to be saved; None: it is. All commands go by this."""
        if self.kind == "assumed":
            return "nothing was measured"
        names = ["verify"] + ["draft"] * any(self.first_draft.seconds)
        unknown = [name for name in names if name not in self.errors]
        if unknown:
            return f"there was no time to check its predictions ({', '.join(unknown)})"
        wrong = [f"{name} {100 * self.errors[name]:.0f} %" for name in names if self.errors[name] > MAX_KEPT_ERROR]
        return (
            f"its predictions are off by more than {100 * MAX_KEPT_ERROR:.0f} % ({', '.join(wrong)})" if wrong else None
        )

    @property
    def accuracy(self) -> str:
        """The errors, in a line for people."""
        said = [
            f"{name} {100 * self.errors[name]:.1f} % off (worst {100 * self.errors.get(f'{name}_worst', 0.0):.1f} %)"
            for name in ("verify", "draft")
            if name in self.errors
        ]
        return ", ".join(said) or "how far it is off was not measured"

    def to_dict(self) -> dict[str, Any]:
        return {"version": VERSION, **asdict(self)}

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> Self:
        """Raises ConfigError if `to_dict` cannot have given it."""
        version = given.get("version") if isinstance(given, Mapping) else None
        if version != VERSION:
            raise ConfigError(f"no profile: version {version!r}; expected {VERSION}")
        try:
            stop_seconds, exit_check = given["stop_seconds"], given.get("exit_check")
            residency = given.get("residency")
            return cls(
                dict(given["about"]),
                host=float(given["host"]),
                stop_seconds=None if stop_seconds is None else float(stop_seconds),
                exit_check=None if exit_check is None else Curve.from_dict(exit_check),
                exit_candidates=int(given.get("exit_candidates", 0)),
                besides=tuple(OverlapProfile.from_dict(each) for each in given.get("besides", ())),
                await_seconds=float(given.get("await_seconds", 0.0)),
                residency=None if residency is None else ResidencyProfile.from_dict(residency),
                errors={str(name): float(error) for name, error in given["errors"].items()},
                kind=_known_kind(given.get("kind", "measured")),
                **{name: Curve.from_dict(given[name]) for name in CURVES},
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"no profile of version {VERSION} ({type(error).__name__}: {error})") from None

    def save(self, path: Path) -> None:
        atomic_write(path, json.dumps(self.to_dict()) + "\n")

    @classmethod
    def load(cls, path: Path) -> Self:
        try:
            return cls.from_dict(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path}: cannot be read as a profile ({error})") from None


def _known_kind(given: object) -> str:
    if given not in KINDS:
        raise ValueError(f"kind {given!r} is none of {', '.join(KINDS)}")
    return str(given)
