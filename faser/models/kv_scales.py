"""Scales of 8-bit keys and values that a checkpoint brings: one of the keys and one of the values, for each layer.

Knows what the scales are called and what they may be. Whether keys and values are rounded is decided elsewhere.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from pathlib import Path

from faser.errors import ModelError
from faser.models.config import ModelConfig
from faser.models.weights import CheckpointTensor, check_number, list_names, read_tensor

log = logging.getLogger("faser.engine")

KvScales = tuple[tuple[float, float], ...]  # of keys and of values, by layer; empty: the checkpoint has none

# A number x is stored as x / scale. The names are those of compressed-tensors, of other tools, and of older versions.
_NAME = re.compile(
    r"model\.layers\.(?P<layer>\d+)\.self_attn\."
    r"((attn\.)?(?P<both>kv_scale)|(attn\.|(?P<module>[kv])_proj\.)?(?P<kind>[kv])_scale"
    r"|(?P<output>[kv])_proj\.output_scale)"
)


def take_kv_scales(
    folder: Path, catalogue: Mapping[str, CheckpointTensor], config: ModelConfig
) -> tuple[KvScales, dict[str, CheckpointTensor]]:
    """The scales, and the catalogue without them."""
    found: dict[tuple[int, str], float] = {}  # by layer and by k or v
    rest = {}
    for name, entry in catalogue.items():
        match = _NAME.fullmatch(name)
        if match is None or match["module"] not in (None, match["kind"]):
            rest[name] = entry
            continue
        for kind in "kv" if match["both"] else match["kind"] or match["output"]:
            if (int(match["layer"]), kind) in found:
                raise ModelError(f"{entry.path}: {name} is a second scale of the same numbers; expected one")
            found[int(match["layer"]), kind] = _read(name, entry)
    if not found:
        if config.quantisation is not None and config.quantisation.kv_scheme:
            log.warning("%s has a kv_cache_scheme and no scales of keys and values: they are 1", folder)
        return (), rest
    expected = {(layer, kind) for layer in range(config.num_layers) for kind in "kv"}
    if expected ^ found.keys():
        names = list_names(f"model.layers.{n}.self_attn.{kind}_scale" for n, kind in expected ^ found.keys())
        raise ModelError(f"{folder}: keys and values need two scales a layer, or none; missing or too many: {names}")
    return tuple((found[layer, "k"], found[layer, "v"]) for layer in range(config.num_layers)), rest


def _read(name: str, entry: CheckpointTensor) -> float:
    check_number(name, entry)
    scale = float(read_tensor(entry).float().reshape(()))
    if not 0 < scale < float("inf"):
        raise ModelError(f"{entry.path}: {name} is {scale:g}; expected a positive number: quantise the model again")
    return scale
