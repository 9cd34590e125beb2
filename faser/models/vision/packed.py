"""Packed eyes: the weights of an encoder in four and eight bits, in a folder of their own, without a language model.

Knows the format, its version and its checksum, and how numbers are unpacked. Knows nothing of training and of the
language model behind the eyes. tools/watch/ writes such folders (docs/watch.md).

A folder holds config.json, in which `packed_eyes` has a version and the checksum of model.safetensors. There a tensor
of few bits is two, NAME.quants and NAME.scale: blocks of 32 numbers that share a scale, as in llama.cpp's Q4_0. The
others are float16 under their own names.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from faser.errors import ModelError
from faser.models.fields import read_object
from faser.models.vision.config import VisionConfig
from faser.models.vision.encoder import VisionEncoder
from faser.models.vision.names import vision_tensors

KEY, VERSION = "packed_eyes", 1
FILE = "model.safetensors"
BLOCK = 32
QUANTS, SCALE = ".quants", ".scale"
MAX_BYTES = 256 * 2**20  # of the file
_REMEDY = "fetch it or pack it again"


def is_packed(folder: Path) -> bool:
    file = folder / "config.json"
    return file.is_file() and KEY in read_object(file)


def seal(folder: Path) -> dict[str, Any]:
    """What config.json says under KEY, of the file that is there."""
    return {"version": VERSION, "checksum": _checksum((folder / FILE).read_bytes())}


def read_tensors(folder: Path, shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
    """All tensors in float32, by name. `shapes`: of every tensor that must be there."""
    file = folder / FILE
    data = checked_bytes(folder)
    try:
        return unpack(load(data), shapes)
    except (SafetensorError, KeyError, RuntimeError, ValueError, TypeError) as error:
        raise ModelError(f"{file}: not the eyes of its config.json ({error}); {_REMEDY}") from error


def checked_bytes(folder: Path) -> bytes:
    """The file with the weights, which is what config.json was written for."""
    file, about = folder / FILE, read_object(folder / "config.json").get(KEY)
    version = about.get("version") if isinstance(about, dict) else None
    if not isinstance(about, dict) or version != VERSION:
        raise ModelError(
            f"{folder}: packed eyes of version {version!r:.40}; this FASER reads version {VERSION}: "
            f"pack them again with its tools, or upgrade FASER"
        )
    if not file.is_file() or file.stat().st_size > MAX_BYTES:
        raise ModelError(f"{file}: missing or larger than {MAX_BYTES} bytes; {_REMEDY}")
    data = file.read_bytes()
    if _checksum(data) != about.get("checksum"):
        raise ModelError(f"{file}: damaged, its checksum is not that in config.json; {_REMEDY}")
    return data


def load_eyes(folder: Path, config: VisionConfig, dtype: torch.dtype, device: torch.device | str) -> VisionEncoder:
    """The encoder in memory, rounded to the dtype."""
    shapes = {name: each.shape for name, each in vision_tensors(VisionEncoder(config, dtype, "meta")).items()}
    tensors = read_tensors(folder, shapes)
    encoder = VisionEncoder(config, dtype, device)
    for name, destination in vision_tensors(encoder).items():
        destination.copy_(tensors[name])
    return encoder


def unpack(packed: Mapping[str, Tensor], shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
    """In float32. Raises KeyError, ValueError or RuntimeError where the tensors are not those of `shapes`."""
    tensors: dict[str, Tensor] = {}
    for name, shape in shapes.items():
        tensor = packed[name].float() if name in packed else _unpacked(packed[name + QUANTS], packed[name + SCALE])
        tensors[name] = tensor.view(shape)
        if not tensor.isfinite().all():
            raise ValueError(f"{name} has numbers that are not finite")
    return tensors


def _unpacked(numbers: Tensor, scale: Tensor) -> Tensor:
    """[blocks, 32]: eight bits a number, or [blocks, 16]: four."""
    bits = 8 if numbers.shape[1] == BLOCK else 4
    if bits == 4:
        numbers = torch.stack((numbers & 15, numbers >> 4), -1).reshape(-1, BLOCK)
    return dequantise(numbers, scale.reshape(-1, 1), bits)


def dequantise(numbers: Tensor, scale: Tensor, bits: int) -> Tensor:
    return (numbers.float() - 2 ** (bits - 1)) * scale.float()


def _checksum(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()
