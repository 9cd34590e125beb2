"""The systems `faser bench` measures: FASER in this process under a policy, and a server elsewhere.

Knows how each is loaded, warmed up and described. torch is imported when a model is loaded, not before.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol

from faser.bench.remote import Remote, play_remote
from faser.config import EngineOptions, draft_name
from faser.engine.engine import Engine
from faser.errors import EngineError
from faser.machine import processor_name
from faser.traffic.play import REAL_CLOCK, Clock, Stopped, Update, play, set_policy, warm_ups_of
from faser.traffic.prompts import Encode, enclosing_tokens
from faser.traffic.records import Run, Workload
from faser.traffic.workload import Vocabulary


class System(Protocol):
    """Plays workloads; one row of the result."""

    @property
    def name(self) -> str: ...

    @property
    def policy(self) -> str | None: ...

    def warm_up(self, workload: Workload, size: int, stopped: Stopped) -> None:
        """Prepare for a measurement; counts in no figure."""
        ...

    def play(self, workload: Workload, stopped: Stopped, update: Update) -> Run: ...


@dataclass(frozen=True)
class PolicySystem:
    """An engine of this process under one policy. Several systems share one engine and take turns."""

    engine: Engine
    name: str
    temperature: float
    clock: Clock = field(default=REAL_CLOCK, kw_only=True)

    @property
    def policy(self) -> str:
        return self.name

    def warm_up(self, workload: Workload, size: int, stopped: Stopped) -> None:
        set_policy(self.engine, self.name)
        for warm in warm_ups_of(workload, size):
            run = play(self.engine, warm, self.name, clock=self.clock, stopped=stopped)
            lost = [record.error for record in run.records if record.error is not None]
            if lost and len(lost) == len(run.records):
                raise EngineError(f"{self.name}: no request of the warm-up was answered: {lost[0]}")

    def play(self, workload: Workload, stopped: Stopped, update: Update) -> Run:
        return play(
            self.engine,
            workload,
            self.name,
            temperature=self.temperature,
            clock=self.clock,
            stopped=stopped,
            update=update,
        )


@dataclass(frozen=True)
class RemoteSystem:
    remote: Remote
    name: str
    policy: str | None = None

    def warm_up(self, workload: Workload, size: int, stopped: Stopped) -> None:
        for warm in warm_ups_of(workload, size):
            play_remote(self.remote, warm, self.name, stopped=stopped)

    def play(self, workload: Workload, stopped: Stopped, update: Update) -> Run:
        return play_remote(self.remote, workload, self.name, stopped=stopped, update=update)


@dataclass(frozen=True)
class Loaded:
    """An engine, the vocabulary of its prompts, and its description."""

    engine: Engine
    vocabulary: Vocabulary
    about: dict[str, Any]


def load_engine(model: str | None, draft: str | None, options: EngineOptions, chat: bool) -> Loaded:
    from faser.build import build_engine, load_pair
    from faser.models.source import open_target

    source = open_target(model)
    pair = load_pair(model, draft, options)
    engine = build_engine(pair.target, pair.draft, options, pair.tokenizer)
    encode = None if pair.tokenizer is None else partial(pair.tokenizer.encode, add_special_tokens=False)
    return Loaded(
        engine,
        Vocabulary(
            pair.target.config.vocab_size,
            engine.scheduler.limits.max_model_len,
            encode,
            _around(source, encode) if chat else ([], []),
        ),
        {
            "model": Path(model or source.path).name,
            "draft": draft_name(model, draft),
            "device": _device_name(pair.target.device.type),
            "dtype": str(pair.target.dtype).removeprefix("torch."),
            "max_running": engine.scheduler.limits.max_running,
            "prefix_caching": options.prefix_caching,
            "acceptance": options.acceptance,
        },
    )


def load_vocabulary(model: str | None, max_model_len: int | None, chat: bool) -> Vocabulary:
    """The vocabulary of a model that a server elsewhere has loaded."""
    from faser.models.source import open_target

    source = open_target(model)
    tokenizer = source.tokenizer()
    encode = None if tokenizer is None else partial(tokenizer.encode, add_special_tokens=False)
    most = min(max_model_len or source.config.max_positions, source.config.max_positions)
    return Vocabulary(source.config.vocab_size, most, encode, _around(source, encode) if chat else ([], []))


def _around(source: Any, encode: Encode | None) -> tuple[list[int], list[int]]:
    template = source.chat_template(None)
    return ([], []) if template is None or encode is None else enclosing_tokens(template.render, encode)


def _device_name(kind: str) -> str:
    if kind != "cuda":
        return kind
    import torch

    return str(torch.cuda.get_device_name())


def describe_machine(packages: Sequence[str] = ("faser", "torch")) -> dict[str, Any]:
    versions = {"python": platform.python_version()}
    for package in packages:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return {"machine": f"{processor_name()}, {os.cpu_count()} cores, {platform.system()}", "versions": versions}
