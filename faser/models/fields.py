"""A JSON object of a model folder, read field by field; every error names the file and the key.

Knows types and null values. Knows nothing of what a field means.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from faser.errors import ModelError, UnsupportedModel

REQUIRED: Any = object()
MAX_NUMBER = 2**53  # beyond it, no number of a config is meant, and JSON's are no longer exact
MAX_SHOWN = 200  # characters of a wrong value in an error
MAX_BYTES = 256 * 2**20  # of a file of JSON; the largest tokenizer.json have 40 MiB


class Fields:
    """A JSON object with typed reads; errors name the file and the key."""

    def __init__(self, data: Mapping[str, Any], where: str) -> None:
        self.data = data
        self.where = where

    def get(self, key: str) -> Any:
        return self.data.get(key)

    def integer(self, key: str, default: Any = REQUIRED, null: Any = REQUIRED) -> int:
        """A positive integer; `default` where the key is missing, `null` where its value is null."""
        value = self._value(key, default, null)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_NUMBER:
            raise self.wrong(key, value, f"a positive integer, at most {MAX_NUMBER}")
        return value

    def number(self, key: str, default: Any = REQUIRED, null: Any = REQUIRED) -> float:
        """A positive number; `default` and `null` as for `integer`."""
        value = self._value(key, default, null)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
            raise self.wrong(key, value, "a positive number")
        try:
            return float(value)
        except OverflowError:  # of an integer
            raise self.wrong(key, value, "a positive number that a float can hold") from None

    def flag(self, key: str, default: bool = False) -> bool:
        value = self._value(key, default, default)
        if not isinstance(value, bool):
            raise self.wrong(key, value, "true or false")
        return value

    def wrong(self, key: str, value: object, expected: str) -> ModelError:
        shown = repr(value)
        shown = shown if len(shown) <= MAX_SHOWN else f"{shown[:MAX_SHOWN]}…"
        return ModelError(f"{self.where}: {key}={shown}: expected {expected}; fix the file or fetch the model again")

    def refuse(self, feature: str, advice: str = "choose a model without it") -> UnsupportedModel:
        return UnsupportedModel(f"{self.where}: {feature} is not supported; {advice}")

    def _value(self, key: str, default: Any, null: Any) -> Any:
        value = self.data.get(key, default)
        if value is None and null is not REQUIRED:
            return null
        if value is REQUIRED:
            raise ModelError(f"{self.where}: the key {key!r} is missing; every model of this kind has it")
        return value


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object from a file, or a ModelError that names the file."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ModelError(f"{path}: has {path.stat().st_size} bytes; expected at most {MAX_BYTES}: fetch it again")
        data = json.loads(path.read_text(encoding="utf-8"))
    except RecursionError:
        raise ModelError(f"{path}: nested too deeply; fetch the model again") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot be read as JSON ({error}); fetch the model again") from error
    if not isinstance(data, dict):
        raise ModelError(f"{path}: expected a JSON object, got {type(data).__name__}; fetch the model again")
    return data


def is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def optional_id(fields: Fields, key: str) -> int | None:
    value = fields.get(key)
    if value is not None and not is_id(value):
        raise fields.wrong(key, value, "a token id or null")
    return value
