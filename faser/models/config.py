"""What a model is, read from its config.json: shapes, rotary embedding, end tokens.

Knows the config layouts of the supported families, old (`rope_theta`, `rope_scaling`, `torch_dtype`) and new
(`rope_parameters`, `dtype`), and refuses by name every feature FASER does not implement, before a weight is read.
Knows nothing of torch, weights or tokenizers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from faser.errors import ConfigError, ModelError, UnsupportedModel
from faser.limits import KeyWindow
from faser.models.fields import REQUIRED, Fields, is_id, optional_id, read_object
from faser.models.quantisation import Quantisation, read_quantisation
from faser.models.vision import config as eyes
from faser.models.vision.config import VisionConfig
from faser.models.vision.settings import read_pixels

FAMILIES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
ROPE_KINDS = ("default", "linear", "llama3", "yarn")
DTYPES = ("float32", "bfloat16", "float16")

_MIXTURES = ("Moe", "MoE", "Mixtral")
_EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")
# Ten times what models have. A file with more is damaged or hostile.
_MOST = {
    "num_layers": 1024, "num_heads": 4096, "num_kv_heads": 4096, "head_dim": 4096, "hidden_size": 2**18,
    "intermediate_size": 2**21, "vocab_size": 2**24, "max_positions": 2**27,
}  # fmt: skip
_MAX_ROTARY = 2**31  # positions × head_dim: 8 GiB of rotary tables
# defaults of transformers, where a config leaves a key out
_MISTRAL_WINDOW = _QWEN_WINDOW = 4096  # sliding_window
_QWEN_FULL_LAYERS = 28  # max_window_layers: the first layers, which see whole contexts


@dataclass(frozen=True)
class Rope:
    """The rotary embedding. Fields a kind does not use keep their defaults."""

    theta: float = 10_000.0
    kind: str = "default"  # one of ROPE_KINDS
    factor: float = 1.0  # context length / context length in pre-training
    original_max_positions: int = 0  # llama3, yarn: positions seen in pre-training
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn: frequencies with more rotations are kept
    beta_slow: float = 1.0  # yarn: frequencies with fewer rotations are interpolated
    truncate: bool = True  # yarn: round the bounds of the ramp to whole dimensions
    attention_factor: float = 1.0  # yarn: multiplies both tables, so every attention score by its square
    factors: tuple[float, ...] = ()  # GGUF: one divisor per frequency, [head_dim // 2]; none where empty
    sections: tuple[int, ...] = ()  # M-RoPE: frequencies that turn by time, height, width; none where empty


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The shape of one decoder-only transformer, and its end tokens."""

    family: str  # a value of FAMILIES
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    norm_eps: float
    max_positions: int
    tie_embeddings: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: bool = False
    rope: Rope = field(default_factory=Rope)
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    dtype: str = "float32"  # of the checkpoint, not of the loaded model
    quantisation: Quantisation | None = None  # of the checkpoint's matrices
    vision: VisionConfig | None = None  # the eyes of a vision-language model
    windows: tuple[int, ...] = ()  # by layer: keys that a row attends to, up to its own; 0: all. Empty: all, everywhere

    @property
    def layer_windows(self) -> tuple[KeyWindow | None, ...]:
        """By layer. None: rows see their whole contexts."""
        sizes = self.windows or (0,) * self.num_layers
        return tuple(KeyWindow(size) if size else None for size in sizes)

    @property
    def page_window(self) -> KeyWindow | None:
        """What any layer sees of a context; None: there is a layer that sees all of it."""
        return KeyWindow(max(self.windows)) if self.windows and all(self.windows) else None

    @classmethod
    def from_folder(cls, folder: str | Path) -> ModelConfig:
        """Read config.json and, where they are there, generation_config.json and, of a model with eyes, its pixels."""
        path = Path(folder) / "config.json"
        if not path.is_file():
            raise ModelError(f"{folder}: no config.json there; expected a Hugging Face model folder")
        generation_path = Path(folder) / "generation_config.json"
        generation = read_object(generation_path) if generation_path.is_file() else None
        config = cls.from_dict(read_object(path), generation, where=str(path))
        if config.vision is None:
            return config
        return replace(config, vision=read_pixels(config.vision, Path(folder)))

    @classmethod
    def from_dict(
        cls, data: Mapping[str, Any], generation: Mapping[str, Any] | None = None, where: str = "config.json"
    ) -> ModelConfig:
        """From the contents of config.json; end tokens of `generation` (generation_config.json) take precedence."""
        fields = Fields(data, where)
        architecture = _architecture(fields)
        if architecture in eyes.COMPOSITES:
            return cls._from_composite(fields, architecture, generation)
        family = _family(fields, architecture)
        _refuse_unsupported(fields, family)
        num_heads = fields.integer("num_attention_heads")
        kv_heads_default = num_heads if family == "llama" else REQUIRED
        attention_bias = family in ("llama", "qwen3") and fields.flag("attention_bias")
        config = cls(
            family=family,
            vocab_size=fields.integer("vocab_size"),
            hidden_size=fields.integer("hidden_size"),
            num_layers=fields.integer("num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=fields.integer("num_key_value_heads", kv_heads_default, null=num_heads),
            head_dim=_head_dim(fields, family, num_heads),
            intermediate_size=fields.integer("intermediate_size"),
            norm_eps=fields.number("rms_norm_eps", 1e-6),
            max_positions=fields.integer("max_position_embeddings"),
            tie_embeddings=fields.flag("tie_word_embeddings"),
            qkv_bias=attention_bias or family == "qwen2",
            out_bias=attention_bias,
            qk_norm=family == "qwen3",
            rope=_rope(fields),
            eos_token_ids=_eos_token_ids(fields, generation),
            bos_token_id=optional_id(fields, "bos_token_id"),
            dtype=_dtype(fields),
            quantisation=read_quantisation(fields),
        )
        config = replace(config, windows=_windows(fields, config))
        refuse_shapes(config, where)
        return config

    @classmethod
    def _from_composite(cls, fields: Fields, architecture: str, generation: Mapping[str, Any] | None) -> ModelConfig:
        """A language model and its eyes."""
        data = eyes.text_fields(fields, architecture)
        text = Fields(data, fields.where if fields.get("text_config") is None else f"{fields.where}: text_config")
        if _architecture(text) not in FAMILIES:
            raise text.refuse(f"the architecture {_architecture(text)}", f"expected one of {', '.join(FAMILIES)}")
        config = cls.from_dict(data, generation, text.where)
        if config.windows or text.flag("use_sliding_window"):
            raise text.refuse("use_sliding_window (a sliding window in a model with eyes)")
        vision = eyes.read_vision_config(fields, architecture, config.hidden_size, config.vocab_size)
        if vision.has_spatial_positions:
            config = replace(config, rope=replace(config.rope, sections=_sections(text, config.head_dim)))
        return replace(config, vision=vision)


def _family(fields: Fields, architecture: str) -> str:
    eyes.refuse_other_eyes(fields, architecture)
    if any(word in architecture for word in _MIXTURES) or any(fields.get(key) for key in _EXPERT_KEYS):
        raise fields.refuse(f"mixture of experts (MoE, {architecture})")
    if architecture not in FAMILIES:
        raise fields.refuse(f"the architecture {architecture}", f"expected one of {', '.join(FAMILIES)}")
    return FAMILIES[architecture]


def _architecture(fields: Fields) -> str:
    names = fields.get("architectures")
    if isinstance(names, list) and len(names) == 1 and isinstance(names[0], str):
        return names[0]
    if names is not None:
        raise fields.wrong("architectures", names, f"a list of one of {', '.join((*FAMILIES, *eyes.COMPOSITES))}")
    model_type = fields.get("model_type")  # all that a config has that was saved without its model
    if model_type is None:
        raise ModelError(f"{fields.where}: the key 'architectures' is missing; expected a list of one name")
    known = {**FAMILIES, **eyes.COMPOSITES}
    return next((name for name, family in known.items() if family == model_type), str(model_type))


def _refuse_unsupported(fields: Fields, family: str) -> None:
    activation = fields.data.get("hidden_act", "silu")
    if activation != "silu":
        raise fields.refuse(f"hidden_act={activation!r} (an activation other than 'silu')")
    if fields.flag("mlp_bias"):
        raise fields.refuse("mlp_bias (biases in the MLP)")


def _windows(fields: Fields, config: ModelConfig) -> tuple[int, ...]:
    """By layer, the keys that a row sees. A window as long as the context is full attention."""
    layers = range(config.num_layers)
    if config.family == "mistral":
        size = fields.integer("sliding_window", _MISTRAL_WINDOW, null=config.max_positions)
        slides = [True for _ in layers]
    elif config.family in ("qwen2", "qwen3") and fields.flag("use_sliding_window"):
        size = fields.integer("sliding_window", _QWEN_WINDOW, null=config.max_positions)
        first = 0 if fields.get("max_window_layers") == 0 else fields.integer("max_window_layers", _QWEN_FULL_LAYERS)
        slides = layer_slides(fields) or [layer >= first for layer in layers]
        if len(slides) != config.num_layers:
            raise fields.refuse(f"layer_types of {len(slides)} layers", f"expected a list of {config.num_layers} types")
    else:
        if any(layer_slides(fields)):
            raise fields.refuse("layer_types with sliding_attention, without a window that is in use")
        return ()
    windows = tuple(size if slide and size < config.max_positions else 0 for slide in slides)
    return windows if any(windows) else ()


def layer_slides(fields: Fields) -> list[bool]:
    """Which layers have a sliding window, if the config says so by layer; else an empty list."""
    layer_types = fields.get("layer_types") or []
    if not isinstance(layer_types, list):
        raise fields.wrong("layer_types", layer_types, "a list")
    others = sorted({str(each) for each in layer_types} - {"full_attention", "sliding_attention"})
    if others:
        raise fields.refuse(f"layer_types with {', '.join(others)}")
    return [each == "sliding_attention" for each in layer_types]


def refuse_shapes(config: ModelConfig, where: str) -> None:
    """Refuse numbers that no model has before anything is allocated or counted by them."""
    for name, most in _MOST.items():
        value = getattr(config, name)
        if value > most:
            raise UnsupportedModel(f"{where}: {name}={value} is not supported; expected at most {most}: check the file")
    if config.max_positions * config.head_dim > _MAX_ROTARY:
        raise UnsupportedModel(
            f"{where}: {config.max_positions} positions with a head_dim of {config.head_dim} are not supported; "
            f"expected a product of at most {_MAX_ROTARY}: lower max_position_embeddings"
        )
    if config.num_heads % config.num_kv_heads:
        raise UnsupportedModel(
            f"{where}: num_attention_heads={config.num_heads} with num_key_value_heads={config.num_kv_heads} is not "
            "supported; expected the first to be a multiple of the second"
        )
    if config.head_dim % 2:
        raise UnsupportedModel(f"{where}: head_dim={config.head_dim} is not supported; expected an even number")


def _head_dim(fields: Fields, family: str, num_heads: int) -> int:
    if family == "qwen3":  # independent of hidden_size there
        return fields.integer("head_dim")
    hidden_size = fields.integer("hidden_size")
    if fields.get("head_dim") is None and hidden_size % num_heads:
        shape = f"hidden_size={hidden_size} with num_attention_heads={num_heads} and no head_dim"
        raise fields.refuse(shape, "expected a multiple")
    inferred = hidden_size // num_heads
    return fields.integer("head_dim", inferred, null=inferred)


def _rope(fields: Fields) -> Rope:
    scaling = _rope_fields(fields)
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind not in ROPE_KINDS:
        raise fields.refuse(f"the rope type {kind!r}", f"expected one of {', '.join(ROPE_KINDS)}")
    for each in (fields, scaling):
        share = each.get("partial_rotary_factor")
        if share is not None and share != 1:
            raise each.refuse(f"partial_rotary_factor={share!r} (a partly rotated head)")
    outer_theta = fields.number("rope_theta", 10_000.0, null=10_000.0)
    theta = scaling.number("rope_theta", outer_theta, null=outer_theta)
    if kind == "linear":
        return Rope(theta, kind, scaling.number("factor"))
    if kind == "llama3":
        return _llama3_rope(fields, scaling, theta)
    if kind == "yarn":
        return _yarn_rope(fields, scaling, theta)
    return Rope(theta)


def _sections(fields: Fields, head_dim: int) -> tuple[int, ...]:
    """M-RoPE: how many frequencies turn by time, by height and by width."""
    scaling = _rope_fields(fields)
    value = scaling.data.get("mrope_section", eyes.QWEN_SECTIONS)
    if not isinstance(value, list) or len(value) != 3 or not all(is_id(each) for each in value):
        raise scaling.wrong("mrope_section", value, "three numbers of frequencies")
    if sum(value) != head_dim // 2:
        raise scaling.wrong("mrope_section", value, f"numbers that add up to {head_dim // 2}, half of head_dim")
    return tuple(value)


def _rope_fields(fields: Fields) -> Fields:
    """The rope object under its old or new name; the old name takes precedence, as in transformers."""
    name = "rope_scaling" if fields.get("rope_scaling") else "rope_parameters"
    value = fields.get(name) or {}
    if not isinstance(value, dict):
        raise fields.wrong(name, value, "an object")
    nested = [key for key, inner in value.items() if isinstance(inner, dict)]
    if nested:
        raise fields.refuse(f"{name} per layer type ({', '.join(nested)})")
    return Fields(value, f"{fields.where}: {name}")


def _original_max_positions(fields: Fields, scaling: Fields) -> int:
    inner = scaling.integer("original_max_position_embeddings", fields.integer("max_position_embeddings"))
    return fields.integer("original_max_position_embeddings", inner, null=inner)


def _llama3_rope(fields: Fields, scaling: Fields, theta: float) -> Rope:
    low, high = scaling.number("low_freq_factor"), scaling.number("high_freq_factor")
    if high <= low:
        raise scaling.wrong("high_freq_factor", high, f"more than low_freq_factor ({low})")
    return Rope(theta, "llama3", scaling.number("factor"), _original_max_positions(fields, scaling), low, high)


def _yarn_rope(fields: Fields, scaling: Fields, theta: float) -> Rope:
    original = _original_max_positions(fields, scaling)
    factor = scaling.number("factor", null=fields.integer("max_position_embeddings") / original)
    return Rope(
        theta,
        "yarn",
        factor,
        original,
        beta_fast=scaling.number("beta_fast", 32.0, null=32.0),
        beta_slow=scaling.number("beta_slow", 1.0, null=1.0),
        truncate=scaling.flag("truncate", True),
        attention_factor=_yarn_attention_factor(scaling, factor),
    )


def _yarn_attention_factor(scaling: Fields, factor: float) -> float:
    """0.1 ln(factor) + 1 as in the paper, unless the config gives the factor or two scales, whose ratio it then is."""

    def scale(multiplier: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * multiplier * math.log(factor) + 1.0

    if scaling.get("attention_factor") is not None:
        return scaling.number("attention_factor")
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return scale(scaling.number("mscale")) / scale(scaling.number("mscale_all_dim"))
    return scale(1.0)


def _eos_token_ids(fields: Fields, generation: Mapping[str, Any] | None) -> tuple[int, ...]:
    value = (generation or {}).get("eos_token_id")
    if value is None:
        value = fields.get("eos_token_id")
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    if not all(is_id(each) for each in ids):
        raise fields.wrong("eos_token_id", value, "a token id or a list of them")
    return tuple(ids)


def _dtype(fields: Fields) -> str:
    value = str(fields.get("dtype") or fields.get("torch_dtype") or "float32").removeprefix("torch.")
    if value not in DTYPES:
        raise fields.refuse(f"the dtype {value!r}", f"expected one of {', '.join(DTYPES)}")
    return value


# ---- writing ----


def config_dict(config: ModelConfig, dtype: str) -> dict[str, Any]:
    """The contents of config.json of a Llama or Qwen3, in the older format, which every reader knows."""
    names = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
    if config.family not in names or config.qkv_bias != config.out_bias:
        raise ConfigError(f"a {config.family} with its biases cannot be written; expected a Llama or Qwen3 as usual")
    if config.windows:
        raise ConfigError("a model with sliding windows cannot be written; expected one whose layers see all")
    if config.vision is not None:
        raise ConfigError("a model with eyes cannot be written; write its language model, whose config has no vision")
    if config.rope.factors:
        raise ConfigError(
            "the rope has a factor for each frequency, as in GGUF files, which a config.json cannot hold; "
            "keep the model in memory, or start from the Hugging Face original"
        )
    eos = list(config.eos_token_ids)
    return {
        "architectures": [names[config.family]],
        "model_type": config.family,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "max_position_embeddings": config.max_positions,
        "rope_theta": config.rope.theta,
        "rope_scaling": _rope_scaling(config.rope),
        "tie_word_embeddings": config.tie_embeddings,
        "attention_bias": config.qkv_bias,
        "mlp_bias": False,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
        "torch_dtype": dtype,
    }


def _rope_scaling(rope: Rope) -> dict[str, Any] | None:
    if rope.kind == "default":
        return None
    scaling: dict[str, Any] = {"rope_type": rope.kind, "factor": rope.factor}
    names = {
        "linear": (),
        "llama3": ("low_freq_factor", "high_freq_factor"),
        "yarn": ("beta_fast", "beta_slow", "truncate", "attention_factor"),
    }[rope.kind]
    if names:
        scaling["original_max_position_embeddings"] = rope.original_max_positions
    return scaling | {name: getattr(rope, name) for name in names}
