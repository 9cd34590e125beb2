"""The journal of a run on a GPU: JSON lines that several processes append to, each as soon as it is measured.

Imports the standard library alone: it is also loaded inside vLLM's process, where nothing of FASER may be.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Figures = dict[str, Any]


@dataclass(frozen=True)
class Journal:
    """`session` tells apart the runs of the command that share the file."""

    path: Path
    session: float

    def add(self, kind: str, **fields: Any) -> None:
        record = {"kind": kind, "session": self.session, **rounded(fields)}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    def attempt(self, section: str, engine: str, work: Callable[[], None]) -> None:
        """Do the work; an exception becomes a record, and the caller goes on with the next section."""
        try:
            work()
        except Exception as error:
            traceback.print_exc()
            why = f"{type(error).__name__}: {error}".splitlines()[0]
            self.add("failed", section=section, engine=engine, why=why[:300])

    def read(self) -> list[Figures]:
        """Every complete line: the last may have been cut short."""
        records = []
        for line in self.path.read_text("utf-8", errors="replace").splitlines() if self.path.is_file() else ():
            with suppress(ValueError):
                records.append(json.loads(line))
        return records


def describe(record: Figures) -> str:
    """A record in one line: its single values."""
    shown = (f"{key} {value}" for key, value in record.items() if not isinstance(value, (list, dict)))
    return "  ".join(each for each in shown if not each.startswith("session "))


def latest(records: Iterable[Figures], kind: str, *names: str) -> dict[tuple[Any, ...], Figures]:
    """Records of a kind by the values of these fields, the last of each combination."""
    return {tuple(record[name] for name in names): record for record in records if record["kind"] == kind}


def failures(records: Sequence[Figures]) -> list[str]:
    """What failed in the last session."""
    last = max((record["session"] for record in records), default=0)
    failed = [record for record in records if record["kind"] == "failed" and record["session"] == last]
    return [f"{each['engine']}, {each['section']}: {each['why']}" for each in failed]


def rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    if isinstance(value, list):
        return [rounded(each) for each in value]
    return round(value, 5) if isinstance(value, float) else value


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def atomic_write(path: Path, text: str) -> None:
    """A reader finds the old content or the new, never a part."""
    new = path.with_name(f"{path.name}.new")
    new.write_text(text, encoding="utf-8")
    new.replace(path)
