"""How the weights of a folder are quantised, from `quantization_config` of its config.json.

Knows the methods fp8, compressed-tensors, awq and gptq, and refuses by name what FASER cannot compute with. Knows
nothing of torch or tensors.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from faser.models.fields import Fields

METHODS = ("fp8", "compressed-tensors", "awq", "gptq")
BLOCK = 128  # rows and columns of weights that share a scale
_GROUPS = (-1, 16, 32, 64, 128, 256)  # -1: all columns

Layout = Literal["fp8", "compressed", "awq", "gptq"]


@dataclass(frozen=True)
class Quantisation:
    """What the quantised matrices of a checkpoint hold. Others are plain."""

    layout: Layout  # how their tensors are named and ordered
    bits: int  # 8: floats; 4: integers in groups
    block: int | None = None  # fp8: rows and columns that share a scale; None: a row or the whole matrix does
    by_rows: bool = False  # fp8 without blocks: each row has a scale, else the whole matrix has one
    group: int = -1  # 4 bits: columns that share a scale; -1: all
    symmetric: bool = True  # 4 bits: no zero points
    has_input_scale: bool = False  # fp8: rows are rounded by a scale of the checkpoint, else each by its own
    zeros_are_less_one: bool = False  # gptq: zero points are stored less one
    targets: tuple[str, ...] = ("Linear",)  # names or re:patterns of what is quantised
    ignored: tuple[str, ...] = ()  # names or re:patterns of what is not
    has_head: bool = False  # the head may be quantised
    kv_scheme: bool = False  # keys and values are meant to be stored in 8 bits

    def covers(self, module: str) -> bool:
        """Whether the matrix of this name, such as model.layers.0.mlp.up_proj, is quantised."""
        if module == "lm_head" and not self.has_head:
            return False
        return any(_matches(each, module) for each in self.targets) and not any(
            _matches(each, module) for each in self.ignored
        )


def _matches(pattern: str, module: str) -> bool:
    if pattern == "Linear":
        return True
    if pattern.startswith("re:"):
        return re.match(pattern[3:], module) is not None
    return module == pattern or module.endswith(f".{pattern}") or module.startswith(f"{pattern}.")


def read_quantisation(config: Fields) -> Quantisation | None:
    """None for a model that is not quantised."""
    value = config.get("quantization_config")
    if value is None:
        return None
    if not isinstance(value, dict):
        raise config.wrong("quantization_config", value, "an object")
    fields = Fields(value, f"{config.where}: quantization_config")
    readers = {"fp8": _read_fp8, "compressed-tensors": _read_compressed, "awq": _read_awq, "gptq": _read_gptq}
    method = fields.get("quant_method")
    if method not in readers:
        raise fields.refuse(f"quant_method={method!r}", f"expected one of {', '.join(METHODS)}")
    return readers[method](fields)


def _read_fp8(fields: Fields) -> Quantisation:
    scheme = fields.data.get("activation_scheme", "dynamic")
    if scheme not in ("dynamic", "static"):
        raise fields.wrong("activation_scheme", scheme, "dynamic or static")
    _expect(fields, "fmt", "e4m3", None)
    _expect(fields, "scale_fmt", None, "float")
    block = fields.get("weight_block_size")
    if block not in (None, [BLOCK, BLOCK]):
        raise fields.refuse(f"weight_block_size={block!r}", f"expected [{BLOCK}, {BLOCK}]")
    if block is not None and scheme == "static":
        raise fields.refuse("weight_block_size with activation_scheme='static'")
    ignored = _names(fields, "modules_to_not_convert") + _names(fields, "ignored_layers")
    return Quantisation(
        "fp8", 8, BLOCK if block is not None else None, has_input_scale=scheme == "static", ignored=ignored
    )


def _read_awq(fields: Fields) -> Quantisation:
    _expect(fields, "bits", 4)
    _expect(fields, "version", "gemm", "GEMM", None)
    _expect(fields, "zero_point", True, None)
    ignored = _names(fields, "modules_to_not_convert")
    return Quantisation("awq", 4, group=_group(fields, "group_size"), symmetric=False, ignored=ignored)


def _read_gptq(fields: Fields) -> Quantisation:
    _expect(fields, "bits", 4)
    _expect(fields, "checkpoint_format", "gptq", "gptq_v2", "", None)
    for key in ("dynamic", "modules_in_block_to_quantize"):
        if fields.get(key):
            raise fields.refuse(f"{key} (matrices that differ in their quantisation)")
    return Quantisation(
        "gptq", 4, group=_group(fields, "group_size"), symmetric=False,
        zeros_are_less_one=fields.get("checkpoint_format") != "gptq_v2", has_head=fields.flag("lm_head"),
    )  # fmt: skip


def _read_compressed(fields: Fields) -> Quantisation:
    kv_scheme = _has_kv_scheme(fields)
    groups = fields.get("config_groups")
    if not groups and kv_scheme:
        return Quantisation("compressed", 8, targets=(), kv_scheme=True)
    if not isinstance(groups, dict) or not all(isinstance(group, dict) for group in groups.values()):
        raise fields.wrong("config_groups", groups, "an object of objects")
    if len(groups) != 1:
        raise fields.refuse(f"config_groups with {len(groups)} groups (matrices that differ in their quantisation)")
    sparsity = fields.get("sparsity_config")
    if sparsity and not (isinstance(sparsity, dict) and sparsity.get("format") == "dense"):
        raise fields.refuse("sparsity_config (sparse weights)")
    if fields.get("transform_config"):
        raise fields.refuse("transform_config (rotated weights)")
    name, group = next(iter(groups.items()))
    inner = Fields(group, f"{fields.where}: {name}")
    if group.get("output_activations"):
        raise inner.refuse("output_activations (rounded outputs)")
    arguments = _part(inner, "weights")
    read = {"float": _compressed_floats, "int": _compressed_integers}.get(str(arguments.get("type")))
    if read is None:
        raise arguments.refuse(f"type={arguments.get('type')!r}", "expected float or int")
    names = {"targets": _names(inner, "targets") or ("Linear",), "ignored": _names(fields, "ignore")}
    return read(fields, inner, arguments, {**names, "kv_scheme": kv_scheme})


def _has_kv_scheme(fields: Fields) -> bool:
    """Whether keys and values are meant to be 8-bit floats with a scale for each layer. Other schemes are refused."""
    if not fields.get("kv_cache_scheme"):
        return False
    scheme = _part(fields, "kv_cache_scheme")
    _expect(scheme, "type", "float")
    _expect(scheme, "num_bits", 8)
    _expect(scheme, "strategy", "tensor")
    _expect(scheme, "dynamic", False, None)
    _expect(scheme, "symmetric", True, None)
    return True


def _compressed_floats(fields: Fields, group: Fields, weights: Fields, names: Mapping[str, Any]) -> Quantisation:
    _expect(fields, "format", "float-quantized", "naive-quantized", None)
    _expect(weights, "num_bits", 8)
    strategy = weights.get("strategy")
    if strategy not in ("channel", "tensor", "block"):
        raise weights.refuse(f"strategy={strategy!r} of 8-bit floats", "expected channel, tensor or block")
    block = BLOCK if strategy == "block" else None
    if block is not None:
        _expect(weights, "block_structure", [BLOCK, BLOCK], f"{BLOCK}x{BLOCK}")
    inputs = group.get("input_activations")
    if inputs is None:
        raise group.refuse("8-bit float weights without input_activations (rows that are not rounded)")
    inputs = _part(group, "input_activations")
    _expect(inputs, "type", "float")
    _expect(inputs, "num_bits", 8)
    is_dynamic = inputs.flag("dynamic")
    # One scale for all rows of a batch would let the output depend on the other requests.
    _expect(inputs, "strategy", *((("group",) if block else ("token",)) if is_dynamic else ("tensor",)))
    if block is not None:
        _expect(inputs, "group_size", BLOCK)
    return Quantisation(
        "compressed", 8, block, strategy == "channel", has_input_scale=not is_dynamic, has_head=True, **names
    )


def _compressed_integers(fields: Fields, group: Fields, weights: Fields, names: Mapping[str, Any]) -> Quantisation:
    _expect(fields, "format", "pack-quantized")
    _expect(weights, "num_bits", 4)
    strategy = weights.get("strategy")
    if strategy not in ("group", "channel"):
        raise weights.refuse(f"strategy={strategy!r} of 4-bit integers", "expected group or channel")
    if group.get("input_activations"):
        raise group.refuse("4-bit weights with input_activations (rounded rows)")
    size = _group(weights, "group_size") if strategy == "group" else -1
    return Quantisation("compressed", 4, group=size, symmetric=weights.flag("symmetric", True), has_head=True, **names)


def _part(fields: Fields, key: str) -> Fields:
    value = fields.get(key)
    if not isinstance(value, dict):
        raise fields.wrong(key, value, "an object")
    return Fields(value, f"{fields.where}: {key}")


def _expect(fields: Fields, key: str, *allowed: Any) -> None:
    """Refuse other values; None stands for a key that is not there."""
    value = fields.get(key)
    if value not in allowed:
        expected = " or ".join("no such key" if each is None else repr(each) for each in allowed)
        raise fields.refuse(f"{key}={value!r}", f"expected {expected}")


def _group(fields: Fields, key: str) -> int:
    value = fields.get(key)
    if isinstance(value, bool) or value not in _GROUPS:
        raise fields.refuse(f"{key}={value!r}", f"expected one of {', '.join(map(str, _GROUPS))}")
    return int(value)


def _names(fields: Fields, key: str) -> tuple[str, ...]:
    """A list of names; re:patterns must be valid."""
    value = fields.get(key) or []
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise fields.wrong(key, value, "a list of names")
    for each in value:
        try:
            re.compile(each.removeprefix("re:") if each.startswith("re:") else "")
        except re.error as error:
            raise fields.wrong(key, each, f"a regular expression ({error})") from error
    return tuple(value)
