"""A model that sees, as the HTTP process knows it: settings, a tokenizer with placeholders, a template, pictures."""

from __future__ import annotations

import io
import json
from base64 import b64encode
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import tokenizers
from PIL import Image

from faser.engine.engine import Engine
from faser.request import Request
from faser.server.messages import About, Start
from faser.server.worker import Served
from faser.text.tokenizer import StopChecker, Tokenizer
from faser.vision import VisionSettings
from tests.checkpoint import write_tokenizer
from tests.server.paced_engine import make

PLACEHOLDERS = ["<|image_pad|>", "<|video_pad|>"]
TEMPLATE = (
    "{% for message in messages %}<s>{{ message.role }}: {% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content %}{% if part.type == 'image' %}<|image_pad|>{% elif part.type == 'video' "
    "%}<|video_pad|>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}</s>{% endfor %}<s>assistant:"
)


def with_placeholders(text: str) -> tuple[str, list[int]]:
    """A tokenizer.json with the placeholders, and their ids."""
    backend = tokenizers.Tokenizer.from_str(text)
    backend.add_special_tokens(PLACEHOLDERS)
    return backend.to_str(), [backend.token_to_id(each) for each in PLACEHOLDERS]


def settings(image_token_id: int, video_token_id: int) -> VisionSettings:
    return VisionSettings(
        patch_size=14, merge_size=2, frames_per_grid=2, min_pixels=56 * 56, max_pixels=448 * 448,
        video_min_pixels=56 * 56, video_max_pixels=112 * 112, image_token_id=image_token_id,
        video_token_id=video_token_id, has_spatial_positions=True,
    )  # fmt: skip


def seeing(about: About) -> About:
    """The same model with eyes."""
    assert about.tokenizer is not None
    text, ids = with_placeholders(about.tokenizer)
    template = (TEMPLATE, "<s>", "</s>")
    return msgspec.structs.replace(about, tokenizer=text, vision=settings(*ids), chat_template=template)


class Watched(Engine):
    """Writes the names of the grids that it gets to the log. The paced executor has no eyes, so they go no further."""

    def add(self, request: Request, checker: StopChecker | None = None) -> None:
        names = [grid.name.hex() for grid in request.vision.grids] if request.vision is not None else []
        print("grids", *names, flush=True)
        super().add(replace(request, vision=None), checker)


def make_seeing(start: Start) -> Served:
    served = make(start)
    about = seeing(served.about)
    assert about.tokenizer is not None
    engine = Watched(served.engine.scheduler, served.engine.executor)
    return Served(engine, about, Tokenizer.from_json(about.tokenizer))


EYES = {"depth": 2, "num_heads": 2, "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2}
EYES_OF = {
    "Qwen2VLConfig": {**EYES, "embed_dim": 16, "mlp_ratio": 2, "hidden_size": 48},
    "Qwen2_5_VLConfig": {
        **EYES, "hidden_size": 16, "intermediate_size": 32, "out_hidden_size": 48, "window_size": 56,
        "fullatt_block_indexes": [1], "tokens_per_second": 2,
    },
}  # fmt: skip


def write_seeing_checkpoint(folder: Path, kind: str = "Qwen2VLConfig") -> None:
    """A small random model of a kind in EYES_OF with tokenizer, chat template and processor, as people download it."""
    import torch
    import transformers

    write_tokenizer(folder)
    file = folder / "tokenizer.json"
    text, (image, video) = with_placeholders(file.read_text())
    file.write_text(text)
    rope = {"rope_type": "default", "rope_theta": 1000.0, "mrope_section": [2, 2, 2]}
    config = getattr(transformers, kind)(
        text_config={
            "vocab_size": 320, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "bos_token_id": 1,
            "eos_token_id": 2, "rope_parameters": rope,
        },
        vision_config=EYES_OF[kind],
        image_token_id=image, video_token_id=video, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    for weight in model.parameters():
        torch.nn.init.normal_(weight, 0.0, 0.3)
    model.save_pretrained(folder)
    pixels = {"patch_size": 14, "merge_size": 2, "temporal_patch_size": 2, "min_pixels": 56 * 56, "max_pixels": 112**2}
    (folder / "preprocessor_config.json").write_text(json.dumps(pixels))
    names = {"chat_template": TEMPLATE, "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))


def picture(width: int = 56, height: int = 56, seed: int = 0) -> bytes:
    """The bytes of a PNG file."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def data_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{b64encode(data).decode()}"


def image_part(url: str) -> dict[str, object]:
    return {"type": "image_url", "image_url": {"url": url}}


def video_part(url: str) -> dict[str, object]:
    return {"type": "video_url", "video_url": {"url": url}}


def text_part(text: str) -> dict[str, object]:
    return {"type": "text", "text": text}


def write_gif(path: Path, num_frames: int = 4) -> None:
    """A video that Pillow can write: two frames a second."""
    frames = [Image.fromarray(np.full((56, 56, 3), 40 * i, np.uint8)) for i in range(num_frames)]
    frames[0].save(path, save_all=True, append_images=frames[1:], duration=500)
