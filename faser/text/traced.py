"""Texts that remember who wrote each of their characters: the chat template, or somebody else.

Knows strings. Knows no template and no tokens. A trace survives what templates do with texts: they are joined, cut,
stripped, split, and parts of them replaced. An operation that is not traced gives a plain str, whose characters count
as somebody else's: a lost trace never makes a user's text the template's own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any, Self, SupportsIndex

_RUNS = re.compile(rb"\x00+|\x01+")


class Traced(str):
    """A str with a byte for each character: 1 for the template's own, 0 for all others."""

    __slots__ = ("_own",)
    _own: bytes

    def __new__(cls, text: str, own: bytes | None = None) -> Self:
        """Without `own`: the trace of the text, or somebody else's where it has none."""
        made = super().__new__(cls, str.__str__(text))  # an enum of texts would give its name
        made._own = _trace(text) if own is None else own
        return made

    @classmethod
    def by_template(cls, text: str) -> Self:
        return cls(text, b"\1" * len(text))

    def is_own(self, start: int, end: int) -> bool:
        """Whether the template wrote all characters from start to end."""
        return 0 not in self._own[start:end]

    def runs(self) -> Iterator[tuple[str, bool]]:
        """The text in its longest parts of one origin, and whether a part is the template's own."""
        text = str.__str__(self)
        for run in _RUNS.finditer(self._own):
            yield text[run.start() : run.end()], self._own[run.start()] == 1

    def __str__(self) -> str:
        return self

    # ── what templates do with texts ─────────────────────────────────────────────────────────────────────────────────

    def __add__(self, other: str) -> Traced:
        return joined((self, other)) if isinstance(other, str) else NotImplemented

    def __radd__(self, other: str) -> Traced:
        return joined((other, self)) if isinstance(other, str) else NotImplemented

    def __mul__(self, times: SupportsIndex) -> Traced:
        return Traced(super().__mul__(times), self._own * times.__index__())

    __rmul__ = __mul__

    def __getitem__(self, index: SupportsIndex | slice) -> Traced:
        found = super().__getitem__(index)
        place = index if isinstance(index, slice) else index.__index__()
        own = self._own[place]
        return Traced(found, own if isinstance(own, bytes) else bytes((own,)))

    def strip(self, characters: str | None = None, /) -> Traced:
        return self.lstrip(characters).rstrip(characters)

    def lstrip(self, characters: str | None = None, /) -> Traced:
        return self[len(self) - len(super().lstrip(characters)) :]

    def rstrip(self, characters: str | None = None, /) -> Traced:
        return self[: len(super().rstrip(characters))]

    def removeprefix(self, prefix: str, /) -> Traced:
        return self[len(prefix) :] if self.startswith(prefix) else self

    def removesuffix(self, suffix: str, /) -> Traced:
        return self[: len(self) - len(suffix)] if suffix and self.endswith(suffix) else self

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[Any]:
        return self._located(super().split(sep, maxsplit), sep)

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[Any]:
        return self._located(super().rsplit(sep, maxsplit), sep)

    def splitlines(self, keepends: bool = False) -> list[Any]:
        lines = self._located(super().splitlines(True), "")
        return lines if keepends else [line[: len(str.splitlines(line)[0])] for line in lines]

    def partition(self, sep: str, /) -> tuple[Any, Any, Any]:
        parts = super().partition(sep)
        return tuple(self._located(list(parts), ""))  # type: ignore[return-value]

    def rpartition(self, sep: str, /) -> tuple[Any, Any, Any]:
        parts = super().rpartition(sep)
        return tuple(self._located(list(parts), ""))  # type: ignore[return-value]

    def replace(self, old: str, new: str, count: SupportsIndex = -1, /) -> Traced:
        if not old:  # `new` between all characters: not traced
            return Traced(super().replace(old, new, count), None)
        return joined(self.split(old, count), new)

    def join(self, texts: Iterable[str], /) -> Traced:
        return joined(texts, self)

    def upper(self) -> Traced:
        return self._changed(super().upper())

    def lower(self) -> Traced:
        return self._changed(super().lower())

    def capitalize(self) -> Traced:
        return self._changed(super().capitalize())

    def title(self) -> Traced:
        return self._changed(super().title())

    def _located(self, parts: list[str], sep: str | None) -> list[Traced]:
        """Parts in their order with their traces. `sep` stands between two; None: any white space."""
        found, place = [], 0
        for part in parts:
            start = self.index(part, place) if sep is None else place
            found.append(self[start : start + len(part)])
            place = start + len(part) + len(sep or "")
        return found

    def _changed(self, text: str) -> Traced:
        """The same characters in another case. Some become two: then the trace is lost."""
        return Traced(text, self._own if len(text) == len(self) else bytes(len(text)))


def joined(texts: Iterable[str], sep: str = "") -> Traced:
    """`sep.join(texts)` with the traces of all."""
    parts = list(texts)
    return Traced(str.join(sep, parts), _trace(sep).join(map(_trace, parts)))


def _trace(text: str) -> bytes:
    return text._own if isinstance(text, Traced) else bytes(len(text))


def traced(value: Any) -> Any:
    """The same value, with its texts as somebody else's: lists and dicts are gone through, keys are not."""
    if isinstance(value, str):
        return Traced(value)
    if isinstance(value, dict):
        return {key: traced(item) for key, item in value.items()}
    return [traced(item) for item in value] if isinstance(value, list) else value
