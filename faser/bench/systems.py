"""The systems `faser bench` measures: FASER in this process under a policy, and a server elsewhere.

Knows how each is loaded, warmed up and described. torch is imported when a model is loaded, not before.
"""

from __future__ import annotations

import os
import platform
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
from faser.traffic.document import Run, Workload
from faser.traffic.play import REAL_CLOCK, Clock, Stopped, Update, play, set_policy, warm_ups_of
from faser.traffic.prompts import enclosing_tokens
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
    import torch

    from faser.build import build_engine, load_pair
    from faser.models.source import open_target

    source = open_target(model)
    pair = load_pair(model, draft, options)
    kind = pair.target.device.type
    engine = build_engine(pair.target, pair.draft, options, pair.tokenizer)
    return Loaded(
        engine,
        _vocabulary(source, pair.tokenizer, engine.scheduler.limits.max_model_len, chat),
        {
            "model": Path(model or source.path).name,
            "draft": draft_name(model, draft),
            "device": torch.cuda.get_device_name() if kind == "cuda" else kind,
            "dtype": str(pair.target.dtype).removeprefix("torch."),
            "kv_dtype": options.kv_dtype,
            "max_running": engine.scheduler.limits.max_running,
            "prefix_caching": options.prefix_caching,
            "acceptance": options.acceptance,
        },
    )


def load_vocabulary(model: str | None, max_model_len: int | None, chat: bool) -> Vocabulary:
    """The vocabulary of a model that a server elsewhere has loaded."""
    from faser.models.source import open_target

    source = open_target(model)
    most = min(max_model_len or source.config.max_positions, source.config.max_positions)
    return _vocabulary(source, source.tokenizer(), most, chat)


def _vocabulary(source: Any, tokenizer: Any, max_model_len: int, chat: bool) -> Vocabulary:
    if tokenizer is None:
        return Vocabulary(source.config.vocab_size, max_model_len, None)
    encode = partial(tokenizer.encode, add_special_tokens=False)
    template = source.chat_template(None) if chat else None
    around = ([], []) if template is None else enclosing_tokens(template.render, encode)
    return Vocabulary(source.config.vocab_size, max_model_len, encode, around)


def describe_machine() -> dict[str, Any]:
    versions = {"python": platform.python_version()}
    for package in ("faser", "torch"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return {"machine": f"{processor_name()}, {os.cpu_count()} cores, {platform.system()}", "versions": versions}
