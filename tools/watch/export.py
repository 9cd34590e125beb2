"""Eyes to files and back: packed alone, and in one folder with the language model.

Knows the names and files of a Hugging Face folder for the architecture FaserWatchForConditionalGeneration. Knows
nothing of training.

* Packed: the tensors of the eyes in four and eight bits (tools/watch/pack.py), and a chat template with places for
  pictures and video. faser loads it with the default language model (faser/models/vision/packed.py).
* Full: the same in floats, with the language model and its tokenizer.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from faser.errors import ConfigError
from faser.models import weights
from faser.models.config import config_dict
from faser.models.transformer import Transformer
from faser.models.vision import packed
from faser.text.tokenizer import Tokenizer
from tools.distill import SYSTEM
from tools.watch.pack import pack
from tools.watch.reader import IMAGE_TOKEN, VIDEO_TOKEN
from tools.watch.vit import MEAN, STD, Eyes, EyesConfig

ARCHITECTURE = "FaserWatchForConditionalGeneration"
PREFIX = "visual."
IMAGE_TOKEN_ID, VIDEO_TOKEN_ID = 15, 16  # of IMAGE_TOKEN and VIDEO_TOKEN in SmolLM2's vocabulary
_PIXELS = 224 * 224  # the size that was trained

# SmolLM2's own template for texts; a part that is a picture or a video becomes its placeholder and a line break.
CHAT_TEMPLATE = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '"
    + SYSTEM.replace("\n", "\\n")
    + "' }}{% endif %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    f"{{% if part['type'] in ('image', 'image_url') %}}{{{{ '{IMAGE_TOKEN}\\n' }}}}"
    f"{{% elif part['type'] in ('video', 'video_url') %}}{{{{ '{VIDEO_TOKEN}\\n' }}}}"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def describe(eyes: EyesConfig, model: Transformer) -> dict[str, Any]:
    """config.json"""
    dtype = str(model.dtype).removeprefix("torch.")
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "faser_watch",
        "image_token_id": IMAGE_TOKEN_ID,
        "video_token_id": VIDEO_TOKEN_ID,
        "tie_word_embeddings": model.config.tie_embeddings,
        "torch_dtype": dtype,
        "text_config": config_dict(model.config, dtype),
        "vision_config": eyes.to_dict(),
    }


def preprocessing() -> dict[str, Any]:
    """preprocessor_config.json"""
    return {
        "image_processor_type": "Qwen2VLImageProcessor",
        "min_pixels": _PIXELS,
        "max_pixels": _PIXELS,
        "patch_size": 14,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": list(MEAN),
        "image_std": list(STD),
        "rescale_factor": 1 / 255,
    }


def write_eyes(eyes: Eyes, model: Transformer, folder: Path) -> int:
    """The packed folder; files of the same names are replaced. Returns the bytes of all files."""
    folder.mkdir(parents=True, exist_ok=True)
    named = {PREFIX + name: tensor for name, tensor in eyes.state_dict().items()}
    save_file(pack(named), folder / packed.FILE, metadata={"format": "pt"})
    _write_json(folder / "config.json", {**describe(eyes.config, model), packed.KEY: packed.seal(folder)})
    _write_settings(folder)
    return sum(file.stat().st_size for file in folder.iterdir())


def read_eyes(folder: Path) -> Eyes:
    """From a packed folder."""
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{folder}: no config.json there; expected a folder that tools.train_watch wrote")
    description = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    eyes = Eyes(EyesConfig.from_dict(description["vision_config"]))
    shapes = {PREFIX + name: tensor.shape for name, tensor in eyes.state_dict().items()}
    tensors = packed.read_tensors(folder, shapes)
    eyes.load_state_dict({name.removeprefix(PREFIX): tensor for name, tensor in tensors.items()})
    return eyes


def write_full(folder: Path, model: Transformer, tokenizer: Tokenizer, full: Path) -> None:
    """Make a folder with the eyes and the language model in floats, which faser loads."""
    if full.exists() and (not full.is_dir() or any(full.iterdir())):
        raise ConfigError(f"{full}: expected a new or an empty folder; remove it or choose another")
    eyes = read_eyes(folder)
    full.mkdir(parents=True, exist_ok=True)
    _write_json(full / "config.json", describe(eyes.config, model))
    _write_settings(full)
    (full / "tokenizer.json").write_text(tokenizer.to_json(), encoding="utf-8")
    save_file(full_tensors(eyes, model), full / weights.SINGLE_FILE, metadata={"format": "pt"})


def full_tensors(eyes: Eyes, model: Transformer) -> dict[str, Tensor]:
    """By public name, in the dtype of the language model."""
    text = {name: destination.tensor for name, destination in weights.destinations_of(model).items()}
    vision = {PREFIX + name: tensor for name, tensor in eyes.state_dict().items()}
    return {
        name: each.detach().to("cpu", model.dtype, copy=True).contiguous() for name, each in (text | vision).items()
    }


def _write_settings(folder: Path) -> None:
    """How pixels and conversations become prompts. Answers are greedy, as in training and evaluation."""
    _write_json(folder / "preprocessor_config.json", preprocessing())
    _write_json(folder / "tokenizer_config.json", {"chat_template": CHAT_TEMPLATE, "eos_token": "<|im_end|>"})
    _write_json(folder / "generation_config.json", {"temperature": 0.0})


def _write_json(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
