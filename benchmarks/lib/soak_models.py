"""The models and media of benchmarks/soak.py: tiny random ones, which see and are fast on a CPU.

The draft model is the target's language model with its weights shaken, so that it agrees now and then. The head is
random: its drafts are hardly ever accepted. torch, transformers and FASER's tests are imported inside functions.
"""

from __future__ import annotations

import io
from base64 import b64encode
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

KINDS = ("model", "head", "ngram", "both")  # of drafts
NOISE = 0.02  # of the draft's weights; the target's have a standard deviation of 0.3
NUM_MEDIA = 8  # different pictures, and videos: many requests show the same
NUM_FRAMES, WINDOW, STRIDE, RATE = 24, 8, 4, 10  # of a stream; its frames are those that are sampled


@dataclass(frozen=True)
class Models:
    """What a server loads. None: the default model or draft; a draft that is missing cannot be soaked."""

    target: str | None
    draft: str | None
    head: str | None
    sees: bool
    kv_memory: str  # GiB, little enough that requests are preempted
    most_tokens: int  # of an answer
    longest: int  # words of a prompt
    vocabulary: int

    def flags(self, kind: str | None, policy: str | None = None) -> tuple[str, ...]:
        """Of a server with a kind of draft; None: without speculation.

        The policy is `faser`, but for a head `fixed:2`: `faser` would never let a random head draft.
        """
        target = ("--model", self.target) if self.target is not None else ()
        memory = ("--kv-memory", self.kv_memory)
        if kind is None:
            return (*target, *memory, "--policy", "off")
        drafts = {"head": self.head, "ngram": "ngram", "model": self.draft, "both": f"{self.draft or ''}+ngram"}
        draft = drafts[kind]
        moves = ("--offload", "on") if kind in ("model", "both") else ()
        chosen = ("--policy", policy or ("fixed:2" if kind == "head" else "faser"))
        return (*target, *memory, *(("--draft", draft) if draft is not None else ()), *moves, *chosen)


DEFAULT_PAIR = Models(None, None, None, sees=False, kv_memory="0.06", most_tokens=48, longest=130, vocabulary=900)


def tiny_models(folder: Path) -> Models:
    """A target that sees, a draft and a head, written to a folder."""
    names = {name: folder / name for name in ("target", "draft", "head")}
    for path in names.values():
        path.mkdir(parents=True, exist_ok=True)
    _write_target(names["target"])
    _write_draft(names["target"], names["draft"])
    _write_head(names["target"], names["head"])
    target, draft, head = map(str, names.values())
    return Models(target, draft, head, sees=True, kv_memory="0.0015", most_tokens=160, longest=35, vocabulary=300)


def _write_target(folder: Path) -> None:
    from tests.server.seeing import write_seeing_checkpoint

    write_seeing_checkpoint(folder)


def _write_draft(target: Path, folder: Path) -> None:
    import torch
    import transformers

    seeing = transformers.AutoModelForImageTextToText.from_pretrained(target)
    text = seeing.config.text_config
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
             "num_key_value_heads", "max_position_embeddings", "bos_token_id", "eos_token_id")  # fmt: skip
    rope = {"rope_type": "default", "rope_theta": text.rope_parameters["rope_theta"]}
    fields = {name: getattr(text, name) for name in names}
    config = transformers.Qwen2Config(**fields, rope_parameters=rope, tie_word_embeddings=False)
    draft = transformers.Qwen2ForCausalLM(config)
    weights = {name.replace("model.language_model.", "model."): value for name, value in seeing.state_dict().items()}
    draft.load_state_dict({name: weights[name] for name in draft.state_dict()})
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in draft.parameters():
            weight += NOISE * torch.randn_like(weight)
    draft.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((target / name).read_bytes())


def _write_head(target: Path, folder: Path) -> None:
    from benchmarks.lib.head_models import eagle3_config, random_head
    from faser.models.config import Rope
    from faser.models.heads import write_head
    from tools.inflate import load_source

    small = load_source(target)
    layer = replace(small.config, family="llama", qkv_bias=False, vision=None, rope=Rope(small.config.rope.theta))
    write_head(random_head(eagle3_config(layer, 200), small, std=0.3), folder)


# ── media ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Media:
    """What requests show: data URLs, and streams for sessions as their bytes."""

    pictures: tuple[str, ...]
    videos: tuple[str, ...]
    streams: tuple[bytes, ...]


def make_media() -> Media:
    from PIL import Image

    def grey(shade: int, size: int = 56) -> Image.Image:
        return Image.effect_noise((size, size + 28 * (shade % 3)), 10 + shade).convert("RGB")

    def gif(shade: int) -> bytes:
        frames = [Image.new("RGB", (56, 56), (25 * shade, 40 * i, 90)) for i in range(4)]
        return _bytes(lambda file: frames[0].save(file, "GIF", save_all=True, append_images=frames[1:], duration=500))

    pictures = [_bytes(lambda file, shade=shade: grey(shade).save(file, "PNG")) for shade in range(NUM_MEDIA)]
    return Media(
        tuple(_data_url(data, "image/png") for data in pictures),
        tuple(_data_url(gif(shade), "image/gif") for shade in range(NUM_MEDIA)),
        tuple(_stream(shade) for shade in range(NUM_MEDIA // 2)),
    )


def _stream(shade: int) -> bytes:
    """MPEG-TS, which can be cut anywhere."""
    import av
    import numpy as np

    file = io.BytesIO()
    with av.open(file, "w", format="mpegts") as container:
        stream = container.add_stream("libx264", rate=RATE)
        stream.width = stream.height = 56
        stream.pix_fmt = "yuv420p"
        for i in range(NUM_FRAMES):
            pixels = np.full((56, 56, 3), 20 * shade, np.uint8)
            pixels[:, 2 * i : 2 * i + 8] = 200
            frame = av.VideoFrame.from_ndarray(pixels, "rgb24")
            frame.pts = i
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return file.getvalue()


def _bytes(write: Callable[[io.BytesIO], object]) -> bytes:
    file = io.BytesIO()
    write(file)
    return file.getvalue()


def _data_url(data: bytes, kind: str) -> str:
    return f"data:{kind};base64,{b64encode(data).decode()}"
