"""What the eyes of a model are, read from its config.json: shapes, windows, token ids.

Knows which composite models FASER sees with, and both of their layouts: old (text fields at the top level) and new
(`text_config`). Refuses by name every other vision model and every field FASER does not implement, before a weight is
read. Knows nothing of torch, weights or files of pixels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from faser.models.fields import REQUIRED, Fields, is_id

QWEN2_VL, QWEN2_5_VL = "qwen2_vl", "qwen2_5_vl"
CHANNELS = 3

# By architecture: the model_type of a config that was saved without its model.
COMPOSITES = {
    "Qwen2VLForConditionalGeneration": QWEN2_VL,
    "Qwen2_5_VLForConditionalGeneration": QWEN2_5_VL,
    "FaserWatchForConditionalGeneration": "faser_watch",
}
# The language model of both Qwens, where its fields are missing. FASER's own model names its family.
QWEN_TEXT = {"architectures": ["Qwen2ForCausalLM"], "rms_norm_eps": 1e-5, "rope_theta": 1e6}
QWEN_SECTIONS = [16, 24, 24]

_VISION_KEYS = ("vision_config", "vision_cfg", "visual", "vision_tower", "mm_vision_tower", "thinker_config")
_VISION_WORDS = ("VL", "Vision", "Llava", "LLaVA", "Idefics", "Mllama", "Omni", "PaliGemma", "Pixtral", "SmolVLM")
_OUTER_KEYS = ("quantization_config", "dtype", "torch_dtype", "bos_token_id", "eos_token_id")  # of both layouts

_ACTIVATIONS = {QWEN2_VL: ("quick_gelu", "gelu"), QWEN2_5_VL: ("silu",)}
# Fields of vision_config that say nothing about the forward pass. spatial_patch_size is checked against patch_size.
_NEUTRAL_FIELDS = frozenset(
    {
        "model_type", "architectures", "transformers_version", "initializer_range", "dtype", "torch_dtype",
        "attn_implementation", "_attn_implementation_autoset", "_name_or_path", "return_dict", "use_cache", "id2label",
        "label2id", "chunk_size_feed_forward", "is_encoder_decoder", "output_attentions", "output_hidden_states",
        "problem_type",
    }
)  # fmt: skip
_SHARED_FIELDS = frozenset(
    {
        "depth", "num_heads", "in_channels", "in_chans", "hidden_size", "hidden_act", "patch_size",
        "spatial_patch_size", "spatial_merge_size", "temporal_patch_size", "rope_parameters",
    }
)  # fmt: skip
_KIND_FIELDS = {
    QWEN2_VL: frozenset({"embed_dim", "mlp_ratio"}),
    QWEN2_5_VL: frozenset(
        {"intermediate_size", "out_hidden_size", "window_size", "fullatt_block_indexes", "tokens_per_second"}
    ),
}


@dataclass(frozen=True, kw_only=True)
class VisionConfig:
    """The shape of one vision encoder, how it sees pixels, and the tokens that stand for what it saw."""

    kind: str  # QWEN2_VL: LayerNorm, plain MLP; QWEN2_5_VL: RMSNorm, gated MLP, windows
    depth: int
    hidden_size: int
    num_heads: int
    mlp_size: int
    output_size: int  # the hidden size of the language model
    patch_size: int  # pixels
    temporal_patch_size: int  # frames
    merge_size: int  # patches: merge_size × merge_size of them become one token
    activation: str
    image_token_id: int
    video_token_id: int
    in_channels: int = CHANNELS
    norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    window_size: int | None = None  # pixels; None: every layer attends to the whole grid
    full_attention_layers: tuple[int, ...] = ()  # ascending; the others attend within windows, if there are any
    tokens_per_second: float | None = None  # positions in time; None: one a grid
    has_spatial_positions: bool = True  # the language model knows positions in time, height and width (M-RoPE)
    rescale: float = 1 / 255
    mean: tuple[float, ...] = (0.48145466, 0.4578275, 0.40821073)  # of rescaled pixels, by channel
    std: tuple[float, ...] = (0.26862954, 0.26130258, 0.27577711)

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def has_rms_norm(self) -> bool:
        """And a gated MLP; else LayerNorm and a plain MLP."""
        return self.kind == QWEN2_5_VL

    @property
    def pixels_per_patch(self) -> int:
        """Numbers that the encoder reads for one patch."""
        return self.in_channels * self.temporal_patch_size * self.patch_size**2

    @property
    def groups_per_window(self) -> int | None:
        """Groups of a window's side; None without windows."""
        return None if self.window_size is None else self.window_size // self.merge_size // self.patch_size

    def is_windowed(self, layer: int) -> bool:
        return self.window_size is not None and layer not in self.full_attention_layers


def refuse_other_eyes(fields: Fields, architecture: str) -> None:
    """Refuse a vision model that is none of COMPOSITES."""
    has_eyes = any(fields.get(key) for key in _VISION_KEYS) or any(word in architecture for word in _VISION_WORDS)
    if has_eyes:
        raise fields.refuse(
            f"the architecture {architecture}, a vision model FASER does not see with,",
            f"expected one of {', '.join(COMPOSITES)}",
        )


def text_fields(fields: Fields, architecture: str) -> dict[str, Any]:
    """config.json of the language model alone, in either layout."""
    inner = fields.get("text_config")
    if inner is None:
        text = {key: value for key, value in fields.data.items() if key not in _VISION_KEYS}
    elif isinstance(inner, dict):
        given = {key: value for key, value in inner.items() if value is not None}
        text = {key: fields.data[key] for key in _OUTER_KEYS if key in fields.data} | given
    else:
        raise fields.wrong("text_config", inner, "an object")
    tied = [each["tie_word_embeddings"] for each in (fields.data, text) if each.get("tie_word_embeddings") is not None]
    text["tie_word_embeddings"] = any(tied)
    if COMPOSITES[architecture] not in (QWEN2_VL, QWEN2_5_VL):
        return text
    for key in ("rope_scaling", "rope_parameters"):
        rope = text.get(key)
        if isinstance(rope, dict) and (rope.get("rope_type") or rope.get("type")) == "mrope":
            text[key] = {**rope, "rope_type": "default"}  # what remains beside the sections
    return {**QWEN_TEXT, **text, "architectures": QWEN_TEXT["architectures"]}


def read_vision_config(fields: Fields, architecture: str, hidden_size: int, vocab_size: int) -> VisionConfig:
    """From config.json of a composite model; `hidden_size` and `vocab_size` are those of its language model."""
    inner = fields.get("vision_config")
    if not isinstance(inner, dict):
        raise fields.wrong("vision_config", inner, "an object")
    eyes = Fields(inner, f"{fields.where}: vision_config")
    name = COMPOSITES[architecture]
    is_qwen = name in (QWEN2_VL, QWEN2_5_VL)
    kind = name if is_qwen else QWEN2_VL
    _refuse_fields(eyes, kind)
    config = VisionConfig(
        **(_read_qwen2_5_vl(eyes) if kind == QWEN2_5_VL else _read_qwen2_vl(eyes)),
        kind=kind,
        depth=eyes.integer("depth", 32),
        num_heads=eyes.integer("num_heads", 16),
        patch_size=eyes.integer("patch_size", 14),
        temporal_patch_size=eyes.integer("temporal_patch_size", 2),
        merge_size=eyes.integer("spatial_merge_size", 2),
        activation=_activation(eyes, kind),
        image_token_id=_token_id(fields, "image_token_id", 151655 if is_qwen else REQUIRED, vocab_size),
        video_token_id=_token_id(fields, "video_token_id", 151656 if is_qwen else REQUIRED, vocab_size),
        rope_theta=_theta(eyes),
        has_spatial_positions=is_qwen,
    )
    _refuse_shapes(eyes, config, hidden_size)
    return config


def _refuse_fields(eyes: Fields, kind: str) -> None:
    unknown = eyes.data.keys() - _NEUTRAL_FIELDS - _SHARED_FIELDS - _KIND_FIELDS[kind]
    if unknown:
        raise eyes.refuse(f"the field {min(unknown)}", f"expected a vision_config of the kind {kind}")
    for key in ("in_channels", "in_chans"):
        if eyes.integer(key, CHANNELS, null=CHANNELS) != CHANNELS:
            raise eyes.refuse(f"{key}={eyes.get(key)}", f"expected {CHANNELS}: pictures are in RGB")
    patch_size = eyes.integer("patch_size", 14)
    if eyes.integer("spatial_patch_size", patch_size, null=patch_size) != patch_size:
        raise eyes.refuse(f"spatial_patch_size={eyes.get('spatial_patch_size')}", f"expected patch_size={patch_size}")


def _read_qwen2_vl(eyes: Fields) -> dict[str, Any]:
    hidden_size = eyes.integer("embed_dim", 1280)
    return {
        "hidden_size": hidden_size,
        "mlp_size": int(hidden_size * eyes.number("mlp_ratio", 4)),
        "output_size": eyes.integer("hidden_size", 3584),
    }


def _read_qwen2_5_vl(eyes: Fields) -> dict[str, Any]:
    layers = eyes.data.get("fullatt_block_indexes", [7, 15, 23, 31])
    if not isinstance(layers, list) or not all(is_id(each) for each in layers):
        raise eyes.wrong("fullatt_block_indexes", layers, "a list of layer numbers")
    return {
        "hidden_size": eyes.integer("hidden_size", 3584),
        "mlp_size": eyes.integer("intermediate_size", 3420),
        "output_size": eyes.integer("out_hidden_size", 3584),
        "window_size": eyes.integer("window_size", 112),
        "full_attention_layers": tuple(sorted(layers)),
        "tokens_per_second": eyes.number("tokens_per_second", 4),
    }


def _activation(eyes: Fields, kind: str) -> str:
    known = _ACTIVATIONS[kind]
    activation = eyes.data.get("hidden_act", known[0])
    if activation not in known:
        raise eyes.refuse(f"hidden_act={activation!r}", f"expected one of {', '.join(known)}")
    return str(activation)


def _theta(eyes: Fields) -> float:
    """The base of the rotary embedding over height and width. Only newer configs have it."""
    rope = eyes.get("rope_parameters") or {}
    if not isinstance(rope, dict):
        raise eyes.wrong("rope_parameters", rope, "an object")
    fields = Fields(rope, f"{eyes.where}: rope_parameters")
    kind = rope.get("rope_type", "axial")
    if kind != "axial" or rope.keys() - {"rope_type", "rope_theta"}:
        raise fields.refuse(f"the rope {rope!r} of the encoder", "expected the rope_type axial and its rope_theta")
    return fields.number("rope_theta", 10_000.0)


def _token_id(fields: Fields, key: str, default: Any, vocab_size: int) -> int:
    value = fields.data.get(key, default)
    if not is_id(value) or value >= vocab_size:
        raise fields.wrong(key, None if value is REQUIRED else value, f"a token id below vocab_size={vocab_size}")
    return int(value)


def _refuse_shapes(eyes: Fields, config: VisionConfig, hidden_size: int) -> None:
    if config.hidden_size % config.num_heads or config.head_dim % 4:
        shape = f"a hidden size of {config.hidden_size} with num_heads={config.num_heads}"
        raise eyes.refuse(shape, "expected heads of the same size, a multiple of 4")
    if config.output_size != hidden_size:
        shape = f"an output size of {config.output_size}"
        raise eyes.refuse(shape, f"expected hidden_size={hidden_size} of the language model")
    if config.groups_per_window == 0:
        shape = f"window_size={config.window_size}"
        raise eyes.refuse(shape, f"expected at least {config.merge_size * config.patch_size}, the pixels of a group")
    if any(layer >= config.depth for layer in config.full_attention_layers):
        layers = list(config.full_attention_layers)
        raise eyes.refuse(f"fullatt_block_indexes={layers}", f"expected layers below depth={config.depth}")
