"""Small random vision-language models of transformers, and the inputs that both sides read.

Knows transformers, the oracle, and grids. Everything here favours being obviously right over being fast.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor
from transformers import Qwen2_5_VLConfig, Qwen2VLConfig

from faser.models.config import ModelConfig
from faser.models.source import FolderSource
from faser.models.transformer import Transformer
from faser.vision import Grid, Vision
from tests.models.reference import SIZES, dense_attend, save_hf

PATCH, MERGE, FRAMES = 4, 2, 2
IMAGE, VIDEO = 90, 91  # token ids
MEAN, STD = (0.5, 0.4, 0.3), (0.2, 0.25, 0.3)
_TEXT = SIZES | {"rope_parameters": {"rope_type": "default", "rope_theta": 1000.0, "mrope_section": [2, 2, 2]}}
_SHARED: dict[str, Any] = {
    "depth": 3, "num_heads": 2, "patch_size": PATCH, "spatial_merge_size": MERGE, "temporal_patch_size": FRAMES,
}  # fmt: skip
_TOKENS = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": 92, "vision_end_token_id": 93}
EYES = {
    "qwen2_vl": _SHARED | {"embed_dim": 16, "hidden_size": 48, "mlp_ratio": 2},
    "qwen2_5_vl": _SHARED
    | {
        "hidden_size": 16, "intermediate_size": 20, "out_hidden_size": 48, "window_size": 16,
        "fullatt_block_indexes": [1], "tokens_per_second": 2,
    },
}  # fmt: skip
KINDS = tuple(EYES)


def hf_config(kind: str, **text: Any) -> transformers.PreTrainedConfig:
    tied = text.pop("tie_word_embeddings", False)
    make = {"qwen2_vl": Qwen2VLConfig, "qwen2_5_vl": Qwen2_5_VLConfig}[kind]
    return make(text_config=_TEXT | text, vision_config=dict(EYES[kind]), tie_word_embeddings=tied, **_TOKENS)


def save_pair(folder: Path, kind: str, **text: Any) -> tuple[transformers.PreTrainedModel, Transformer]:
    """The same model for transformers and for FASER, by way of a folder."""
    oracle = save_hf(folder, hf_config(kind, **text))
    write_processor(folder)
    return oracle, load_folder(folder)


def write_processor(folder: Path, **changes: Any) -> None:
    fields = {"image_mean": MEAN, "image_std": STD, "patch_size": PATCH, "merge_size": MERGE, **changes}
    (folder / "preprocessor_config.json").write_text(json.dumps(fields))


def load_folder(folder: Path) -> Transformer:
    source = FolderSource(folder, ModelConfig.from_folder(folder))
    return source.load(torch.float32, 128, lambda done, total: None, "cpu")


def random_grid(height: int, width: int, frames: int, seed: int) -> Grid:
    shape = (height * width, 3, frames, PATCH, PATCH)
    return Grid(np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8), height, width, MERGE)


def pixel_values(grids: Sequence[Grid]) -> Tensor:
    """What the processors of transformers would make of the same pixels: [patches, numbers of a patch]."""
    mean, std = (np.array(values).reshape(3, 1, 1, 1) for values in (MEAN, STD))
    normal = [(np.repeat(grid.patches, FRAMES // grid.patches.shape[2], 2) / 255 - mean) / std for grid in grids]
    return torch.from_numpy(np.concatenate(normal)).float().flatten(1)


@dataclass(frozen=True)
class Prompt:
    """Text with two pictures of odd sizes and a video of three grids between it."""

    token_ids: list[int]
    pictures: tuple[Grid, ...]
    video: tuple[Grid, ...]  # grids of the same size

    @classmethod
    def example(cls) -> Prompt:
        pictures = (random_grid(6, 10, 1, 1), random_grid(2, 6, 1, 2))
        video = tuple(random_grid(6, 4, 2, 3 + i) for i in range(3))
        first, second = ([IMAGE] * grid.num_tokens for grid in pictures)
        watched = [VIDEO] * sum(grid.num_tokens for grid in video)
        return cls([5, 6, 92, *first, 93, 7, 92, *second, 93, 8, 9, 92, *watched, 93, 10, 11], pictures, video)

    def hf_inputs(self) -> dict[str, Tensor]:
        ids = torch.tensor([self.token_ids])
        height, width = self.video[0].height, self.video[0].width
        return {
            "input_ids": ids,
            "mm_token_type_ids": (ids == IMAGE).int() + 2 * (ids == VIDEO).int(),
            "pixel_values": pixel_values(self.pictures),
            "image_grid_thw": torch.tensor([[1, grid.height, grid.width] for grid in self.pictures]),
            "pixel_values_videos": pixel_values(self.video),
            "video_grid_thw": torch.tensor([[len(self.video), height, width]]),
        }

    def vision(self, oracle: transformers.PreTrainedModel) -> Vision:
        """The grids, with the positions that transformers computes."""
        inputs = self.hf_inputs()
        names = ("input_ids", "mm_token_type_ids", "image_grid_thw", "video_grid_thw")
        positions, _ = oracle.model.get_rope_index(**{name: inputs[name] for name in names})
        grids = (*self.pictures, *self.video)
        places = np.flatnonzero(np.isin(self.token_ids, (IMAGE, VIDEO)))
        counts = np.array([grid.num_tokens for grid in grids])
        return Vision(grids, places[np.cumsum(counts) - counts], positions[:, 0].t().numpy())


@torch.inference_mode()
def hidden_states(model: Transformer, token_ids: Sequence[int], vision: Vision) -> Tensor:
    """[tokens, hidden] behind the last layer, of one sequence with its pictures."""
    assert model.vision is not None
    hidden = model.embed(torch.tensor(token_ids))
    seen = model.vision.encode(vision.grids)
    hidden[[row for start, end in zip(vision.starts, vision.ends, strict=True) for row in range(start, end)]] = seen
    positions = torch.from_numpy(vision.rotary_positions(len(token_ids)))
    return model.run_layers(hidden, dense_attend(model, positions))
