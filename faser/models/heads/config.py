"""What a draft head is, read from its config.json: kind, layers, the features it reads, its vocabulary.

Knows the layouts of EAGLE-3 (raw and speculators), DFlash and DSpark. Refuses by name every feature FASER does not
implement, before a weight is read. Knows nothing of torch or weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from faser.errors import ModelError
from faser.models.config import ModelConfig, layer_slides
from faser.models.fields import Fields, optional_id, read_object
from faser.models.heads import fields as known_fields

EAGLE3, BLOCK = "eagle3", "block"
_EAGLE3_FEATURES = 3  # by default

_EAGLE3_NAMES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Qwen3ForCausalLM")
_DFLASH_NAMES = ("DFlashDraftModel",)
_DSPARK_NAMES = ("Qwen3DSparkModel", "DSparkDraftModel")
_SPECULATORS = ("eagle3", "dflash", "dspark")
_FAMILIES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}  # of the head's layers, by model_type


@dataclass(frozen=True, kw_only=True)
class HeadConfig:
    """The shape of one draft head.

    A feature is the residual stream of the target before one of its layers; feature 0 is the embedding. DFlash counts
    the outputs of layers from 0, so its number 1 is 2 here.
    """

    kind: str  # EAGLE3 or BLOCK
    layers: ModelConfig  # of the head's own layers; vocab_size is the target's
    target_hidden_size: int
    feature_layers: tuple[int, ...] | None  # ascending; None: the default of EAGLE-3, known once the target is
    draft_vocab_size: int | None = None  # rows of the head's output; None: the target's vocabulary

    # EAGLE-3
    norm_before_residual: bool = False  # the residual stream begins with the normed features, not with the features
    norm_before_fc: bool = False  # one norm over all features
    fc_norm: bool = False  # a norm per feature
    norm_output: bool = False  # the next step gets the output behind the last norm, not before it

    # block heads
    num_drafts: int = 0  # tokens that one block yields
    mask_token_id: int = 0
    anchor_predicts: bool = False  # every row predicts the token behind it; else a mask predicts its own token
    markov_rank: int = 0  # 0: no Markov head
    confidence: bool = False
    confidence_with_markov: bool = False

    @property
    def num_features(self) -> int:
        return _EAGLE3_FEATURES if self.feature_layers is None else len(self.feature_layers)

    @property
    def feature_size(self) -> int:
        """Numbers in the features of one row."""
        return self.num_features * self.target_hidden_size

    @property
    def num_block_rows(self) -> int:
        """The anchor and the masks."""
        return self.num_drafts if self.anchor_predicts else self.num_drafts + 1

    @property
    def num_output_rows(self) -> int:
        """Tokens that the head can propose."""
        return self.draft_vocab_size or self.layers.vocab_size

    @property
    def is_short(self) -> bool:
        """Whether the head proposes only some tokens of the target."""
        return self.num_output_rows != self.layers.vocab_size

    @property
    def can_share(self) -> bool:
        """Whether the target's embedding and head have the head's width."""
        return self.layers.hidden_size == self.target_hidden_size

    def resolve(self, target: ModelConfig, where: str = "the head") -> HeadConfig:
        """Check the head against its target; the default features become layer numbers."""
        for key, ours, theirs in (
            ("target_hidden_size", self.target_hidden_size, target.hidden_size),
            ("vocab_size", self.layers.vocab_size, target.vocab_size),
        ):
            if ours != theirs:
                raise ModelError(f"{where}: {key}={ours}, but the target has {theirs}; choose a head of this target")
        n = target.num_layers
        features = tuple(sorted({2, n // 2, n - 3})) if self.feature_layers is None else self.feature_layers
        if len(features) != self.num_features or features[0] < 0 or features[-1] >= n:
            raise ModelError(
                f"{where}: features of layers {', '.join(map(str, features))} with a target of {n} layers; "
                f"expected {self.num_features} numbers from 0 to {n - 1}: choose a head of this target"
            )
        return replace(self, feature_layers=features)


def read_head_config(folder: str | Path) -> HeadConfig | None:
    """The head in a folder; None where config.json does not describe a head."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        return None
    data = read_object(path)
    fields = Fields(data, str(path))
    if "speculators_model_type" in data or "speculators_config" in data:
        return _read_speculators(fields)
    names = data.get("architectures")
    name = names[0] if isinstance(names, list) and len(names) == 1 else None
    if name in _EAGLE3_NAMES:
        _refuse_unknown(fields, known_fields.EAGLE3 | known_fields.LAYER)
        return _read_eagle3(fields, _read_layers(data, fields.where, "llama"), norm_before_residual=False)
    if name in _DFLASH_NAMES or name in _DSPARK_NAMES:
        _refuse_unknown(fields, known_fields.BLOCK_OUTER | known_fields.LAYER)
        layers = _read_layers(data, fields.where, "qwen3", _swa_size(fields))
        return _read_block(fields, layers, is_dspark=name in _DSPARK_NAMES)
    return None


def _read_speculators(fields: Fields) -> HeadConfig:
    kind = fields.get("speculators_model_type")
    if kind not in _SPECULATORS:
        raise fields.refuse(f"speculators_model_type={kind!r}", f"expected one of {', '.join(_SPECULATORS)}")
    known = known_fields.EAGLE3 if kind == "eagle3" else known_fields.BLOCK_OUTER
    outer = {"layer_types", "sliding_window", "use_sliding_window", "max_window_layers", "dtype", "torch_dtype"}
    outer.add("quantization_config")
    _refuse_unknown(fields, known | outer | {"speculators_model_type", "transformer_layer_config"})
    inner = _inner(fields, "transformer_layer_config")
    _refuse_unknown(inner, known_fields.LAYER)
    # What both objects may say: the outer one is the head's, the inner one often a copy of the target's.
    given = {key: fields.data[key] for key in sorted(outer) if fields.get(key) is not None}
    merged = {**inner.data, **given}
    layers = _read_layers(merged, inner.where, "llama" if kind == "eagle3" else "qwen3")
    if any(layer_slides(Fields(merged, inner.where))):
        _check_windows(fields, inner, kind)
    if kind == "eagle3":
        return _read_eagle3(fields, layers, norm_before_residual=True)
    return _read_block(fields, layers, is_dspark=kind == "dspark")


def _check_windows(fields: Fields, inner: Fields, kind: str) -> None:
    """Refuse what the two objects give differently, and block heads.

    Those of speculators are causal in sliding layers, or their windows count from the anchor.
    """
    if kind != "eagle3":
        raise inner.refuse(f"sliding_attention in a {kind} head of speculators")
    for key in ("layer_types", "sliding_window"):
        _holder(fields, inner, key)


def _read_layers(data: Mapping[str, Any], where: str, default_type: str, swa_size: int | None = None) -> ModelConfig:
    """`swa_size`: the sliding window as DSpark heads name it."""
    fields = Fields(data, where)
    model_type = data.get("model_type") or default_type
    if model_type not in _FAMILIES:
        raise fields.refuse(f"model_type={model_type!r} of a head", f"expected one of {', '.join(_FAMILIES)}")
    rope = data.get("rope_parameters") or data.get("rope_scaling")
    theta = rope.get("rope_theta") if isinstance(rope, dict) else None
    if model_type == "qwen3" and data.get("rope_theta") is None and theta is None:
        raise fields.wrong("rope_theta", None, "a positive number, for which programs assume different defaults")
    plain = {key: value for key, value in data.items() if key not in ("layer_types", "use_sliding_window")}
    layers = ModelConfig.from_dict({**plain, "architectures": [_FAMILIES[model_type]]}, where=where)
    windows = _windows(fields, layers, swa_size)
    return replace(layers, tie_embeddings=False, eos_token_ids=(), bos_token_id=None, windows=windows)


def _windows(fields: Fields, layers: ModelConfig, swa_size: int | None) -> tuple[int, ...]:
    """By layer, as in ModelConfig. Heads of every family name their sliding layers, whatever its models do."""
    slides = layer_slides(fields) or [swa_size is not None] * layers.num_layers
    if not any(slides):
        for key, is_on in (("use_sliding_window", fields.flag("use_sliding_window")), ("use_swa", swa_size)):
            if is_on:
                raise fields.refuse(f"{key} without sliding_attention in layer_types")
        return ()
    if len(slides) != layers.num_layers:
        raise fields.wrong("layer_types", fields.get("layer_types"), f"the types of {layers.num_layers} layers")
    if swa_size is None and (fields.get("sliding_window") is None or not fields.flag("use_sliding_window", True)):
        raise fields.refuse("sliding_attention in layer_types without a sliding_window that is in use")
    size = swa_size or fields.integer("sliding_window")
    windows = tuple(size if slide and size < layers.max_positions else 0 for slide in slides)
    return windows if any(windows) else ()


# ---- EAGLE-3 ----


def _read_eagle3(fields: Fields, layers: ModelConfig, norm_before_residual: bool) -> HeadConfig:
    """`norm_before_residual`: what it means that the field is missing."""
    nested = _inner(fields, "eagle_config", optional=True)
    _refuse_unknown(nested, known_fields.EAGLE_CONFIG)
    if layers.num_layers != 1:
        raise fields.refuse(f"num_hidden_layers={layers.num_layers} of an EAGLE-3 head", "expected 1")
    if fields.flag("bias"):
        raise fields.refuse("bias (a bias of fc)")
    if not nested.flag("use_aux_hidden_state", True):
        raise nested.refuse("use_aux_hidden_state=false (features of the last layer alone)")
    features = _feature_layers(_holder(fields, nested, "eagle_aux_hidden_state_layer_ids"))
    count = fields.integer("num_aux_hidden_states", len(features or ()) or _EAGLE3_FEATURES)
    if count != (len(features) if features is not None else _EAGLE3_FEATURES):
        raise fields.wrong("num_aux_hidden_states", count, "as many as eagle_aux_hidden_state_layer_ids")

    def flag(key: str, default: bool = False) -> bool:
        return _holder(fields, nested, key).flag(key, default)

    return HeadConfig(
        kind=EAGLE3,
        layers=layers,
        target_hidden_size=fields.integer("target_hidden_size", layers.hidden_size, null=layers.hidden_size),
        feature_layers=features,
        draft_vocab_size=_draft_vocab_size(fields, layers),
        norm_before_residual=flag("norm_before_residual", norm_before_residual),
        norm_before_fc=flag("norm_before_fc"),
        fc_norm=flag("fc_norm"),
        norm_output=flag("norm_output"),
    )


def _feature_layers(fields: Fields) -> tuple[int, ...] | None:
    key = "eagle_aux_hidden_state_layer_ids"
    return _layer_numbers(fields, key, lowest=0) if fields.get(key) else None


# ---- block heads ----


def _read_block(fields: Fields, layers: ModelConfig, is_dspark: bool) -> HeadConfig:
    nested = _same_names(_inner(fields, "dflash_config", optional=True))
    _refuse_unknown(nested, known_fields.BLOCK)
    is_dspark = _is_dspark(nested, is_dspark)

    def holder(key: str) -> Fields:
        return _holder(fields, nested, key)

    for key in ("causal", "is_causal"):
        if holder(key).flag(key):
            raise holder(key).refuse(f"{key} (a block that is causal)")
    if any(layer_slides(fields)) and all(holder(key).get(key) is None for key in ("causal", "is_causal")):
        raise fields.refuse("sliding_attention in layer_types without is_causal, for which programs differ")
    if not holder("use_aux_hidden_state").flag("use_aux_hidden_state", True):
        raise holder("use_aux_hidden_state").refuse("use_aux_hidden_state=false")
    block_size = fields.integer("block_size")
    anchor_predicts = _anchor_predicts(fields, holder("sample_from_anchor"), block_size, is_dspark)
    if block_size == 1 and not anchor_predicts:
        raise fields.wrong("block_size", block_size, "at least 2, where the anchor predicts nothing")
    if any(0 < size < block_size for size in layers.windows):
        raise fields.refuse(f"block_size={block_size} with sliding windows of {max(layers.windows)} tokens")
    rank = _markov_rank(holder("markov_rank"), holder("markov_head_type"), is_dspark)
    confidence = holder("enable_confidence_head").flag("enable_confidence_head")
    reads_markov = holder("confidence_head_with_markov").flag("confidence_head_with_markov", default=rank > 0)
    with_markov = confidence and reads_markov
    if with_markov and not rank:
        raise holder("confidence_head_with_markov").wrong("confidence_head_with_markov", True, "a markov_rank above 0")
    return HeadConfig(
        kind=BLOCK,
        layers=layers,
        target_hidden_size=fields.integer("target_hidden_size", layers.hidden_size, null=layers.hidden_size),
        feature_layers=_block_features(fields, nested),
        draft_vocab_size=_draft_vocab_size(fields, layers),
        num_drafts=block_size if anchor_predicts else block_size - 1,
        mask_token_id=_mask_token_id(holder("mask_token_id"), layers.vocab_size),
        anchor_predicts=anchor_predicts,
        markov_rank=rank,
        confidence=confidence,
        confidence_with_markov=with_markov,
    )


def _swa_size(fields: Fields) -> int | None:
    nested = _inner(fields, "dflash_config", optional=True)
    if not _holder(fields, nested, "use_swa").flag("use_swa"):
        return None
    return _holder(fields, nested, "swa_window_size").integer("swa_window_size")


def _same_names(nested: Fields) -> Fields:
    """The object with one name for each field: some DSpark heads are published with others."""
    data = dict(nested.data)
    for other, name in known_fields.OTHER_BLOCK_NAMES.items():
        if other in data:
            value = data.pop(other)
            if data.setdefault(name, value) != value:
                raise nested.wrong(other, value, f"{data[name]!r} as in {name}")
    return Fields(data, nested.where)


def _is_dspark(nested: Fields, is_dspark: bool) -> bool:
    """A DFlash head by its architecture may say that it has DSpark's parts."""
    kind = nested.get("projector_type")
    if kind is not None and str(kind).lower() not in ("dflash", "dspark"):
        raise nested.refuse(f"projector_type={kind!r}", "expected dflash or dspark")
    if nested.get("attention_mode") not in (None, "gqa"):
        raise nested.refuse(f"attention_mode={nested.get('attention_mode')!r}", "expected gqa")
    return is_dspark or str(kind).lower() == "dspark"


def _block_features(fields: Fields, nested: Fields) -> tuple[int, ...]:
    if fields.get("aux_hidden_state_layer_ids") is not None:  # of speculators, counted as here
        return _layer_numbers(fields, "aux_hidden_state_layer_ids", lowest=0)
    outputs = _layer_numbers(_holder(fields, nested, "target_layer_ids"), "target_layer_ids", lowest=-1)
    return tuple(output + 1 for output in outputs)


def _anchor_predicts(fields: Fields, holder: Fields, block_size: int, is_dspark: bool) -> bool:
    if holder.get("sample_from_anchor") is not None:
        return holder.flag("sample_from_anchor")
    # Early DSpark heads of speculators: the anchor predicts nothing, and only the number of drafts tells.
    if fields.flag("dspark_bonus_anchor") or _speculative_tokens(fields) == block_size - 1:
        return False
    return is_dspark


def _speculative_tokens(fields: Fields) -> int | None:
    described = fields.get("speculators_config")
    methods = described.get("proposal_methods") if isinstance(described, dict) else None
    first = methods[0] if isinstance(methods, list) and methods else None
    return first.get("speculative_tokens") if isinstance(first, dict) else None


def _markov_rank(rank_holder: Fields, type_holder: Fields, is_dspark: bool) -> int:
    key = "markov_rank"
    if rank_holder.get(key) == 0 or (not is_dspark and rank_holder.get(key) is None):
        return 0
    kind = type_holder.get("markov_head_type") or "vanilla"
    if kind != "vanilla":
        raise type_holder.refuse(f"markov_head_type={kind!r}", "expected vanilla")
    return rank_holder.integer(key)


def _mask_token_id(holder: Fields, vocab_size: int) -> int:
    token_id = optional_id(holder, "mask_token_id")
    if token_id is None or token_id >= vocab_size:
        raise holder.wrong("mask_token_id", token_id, f"a token id below vocab_size ({vocab_size})")
    return token_id


# ---- fields ----


def _draft_vocab_size(fields: Fields, layers: ModelConfig) -> int | None:
    size = fields.integer("draft_vocab_size", layers.vocab_size, null=layers.vocab_size)
    if size > layers.vocab_size:
        raise fields.wrong("draft_vocab_size", size, f"at most vocab_size ({layers.vocab_size})")
    return size if size < layers.vocab_size else None


def _layer_numbers(fields: Fields, key: str, lowest: int) -> tuple[int, ...]:
    value = fields.get(key)
    numbers = value if isinstance(value, list) else []
    are_numbers = all(isinstance(each, int) and not isinstance(each, bool) for each in numbers)
    if not numbers or not are_numbers or numbers != sorted(set(numbers)) or numbers[0] < lowest:
        raise fields.wrong(key, value, f"ascending layer numbers from {lowest}")
    return tuple(numbers)


def _inner(fields: Fields, key: str, optional: bool = False) -> Fields:
    value = fields.get(key)
    if value is None and optional:
        value = {}
    if not isinstance(value, dict):
        raise fields.wrong(key, value, "an object")
    return Fields(value, f"{fields.where}: {key}")


def _holder(outer: Fields, nested: Fields, key: str) -> Fields:
    """The object that gives `key`; both may, if they agree."""
    if nested.get(key) is None:
        return outer
    if outer.get(key) is not None and outer.get(key) != nested.get(key):
        raise nested.wrong(key, nested.get(key), f"{outer.get(key)!r} as in the outer object")
    return nested


def _refuse_unknown(fields: Fields, known: Set[str]) -> None:
    """Refuse fields that nobody here knows, unless they switch something off: null, false, 0 or empty."""
    for key, value in fields.data.items():
        if value and key not in known and key not in known_fields.NEUTRAL and not key.startswith("_"):
            raise fields.refuse(f"the field {key}={value!r}", "choose a head without it")
