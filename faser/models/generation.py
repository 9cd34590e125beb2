"""The sampling that a model's generation_config.json recommends, for requests that leave fields out.

Knows the file and which of its fields are taken: the same as in vLLM. models/config.py reads the end tokens of the
file. Knows no model, no tensors and no requests.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from faser.errors import ConfigError, InvalidRequest, ModelError
from faser.models.fields import read_object
from faser.request import SamplingParams

log = logging.getLogger("faser.generation")

FILE = "generation_config.json"
MODES = ("auto", "none")  # the model's recommendation, or no recommendation

# The fields taken, and their names in SamplingParams.
_TAKEN = {name: name for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")}
_TAKEN["max_new_tokens"] = "max_tokens"
# Fields that say nothing about sampling, or are used elsewhere.
_OTHER = {
    "_from_model_config", "_commit_hash", "transformers_version", "bos_token_id", "eos_token_id", "pad_token_id",
    "decoder_start_token_id", "use_cache", "cache_implementation", "chat_format", "output_attentions",
    "output_hidden_states", "output_scores", "output_logits", "return_dict_in_generate", "max_length",
}  # fmt: skip
# Values that change nothing.
_NEUTRAL: dict[str, Any] = {
    "do_sample": True, "num_beams": 1, "num_beam_groups": 1, "num_return_sequences": 1, "length_penalty": 1,
    "typical_p": 1, "encoder_repetition_penalty": 1, "early_stopping": False, "diversity_penalty": 0,
    "no_repeat_ngram_size": 0, "encoder_no_repeat_ngram_size": 0, "epsilon_cutoff": 0, "eta_cutoff": 0, "min_length": 0,
    "remove_invalid_values": False, "renormalize_logits": False,
}  # fmt: skip


@dataclass(frozen=True)
class Recommendation:
    """Fields of SamplingParams, and where they come from."""

    values: Mapping[str, Any] = field(default_factory=dict)
    origin: str = f"the model has no {FILE}"
    ignored: tuple[str, ...] = ()  # fields of the file that FASER does not take, as name=value

    @property
    def params(self) -> SamplingParams:
        """For requests without parameters. Fields that the file lacks have the defaults of SamplingParams."""
        return SamplingParams(**self.values)

    def log_ignored(self) -> None:
        if self.ignored:
            log.warning("%s: ignored %s", self.origin, ", ".join(self.ignored))


NOTHING = Recommendation()
SWITCHED_OFF = Recommendation(origin="--generation-config none")


def check_mode(mode: str) -> None:
    if mode not in MODES:
        raise ConfigError(f"generation_config={mode!r}: expected one of {', '.join(MODES)}")


def read(path: Path, origin: str | None = None) -> Recommendation:
    """The recommendation of a file; NOTHING if the file is missing."""
    if not path.is_file():
        return NOTHING
    found = {name: value for name, value in read_object(path).items() if value is not None}
    values = {_TAKEN[name]: value for name, value in found.items() if name in _TAKEN}
    if values.get("top_k") == -1:  # some files mean "all"
        values["top_k"] = 0
    try:
        SamplingParams(**values)
    except InvalidRequest as error:
        raise ModelError(f"{path}: {error}; correct the file, or use --generation-config none") from None
    known = _TAKEN.keys() | _OTHER
    ignored = (f"{n}={value!r}" for n, value in found.items() if n not in known and value != _NEUTRAL.get(n))
    origin = origin or str(path)
    return Recommendation(values, origin if values else f"none in {origin}", tuple(ignored))


def describe(values: Mapping[str, Any]) -> str:
    """For people: "temperature 0.2, top_p 0.9"."""
    return ", ".join(f"{name} {value:g}" for name, value in values.items())
