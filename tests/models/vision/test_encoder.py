"""Grids that keep some of their groups, grids encoded together, and the memory of the eyes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from faser.models.transformer import Transformer
from faser.models.vision.encoder import VisionEncoder
from faser.models.vision.names import vision_tensors
from faser.vision import Grid
from tests.tiny import CONFIGS, VISION, VISION_CONFIGS, WINDOWED_VISION, make_grid, make_model, make_vision_model

KEPT = {
    "every second group": (6, 10, [0, 2, 4, 6, 8, 10, 12, 14]),
    "one group": (6, 10, [7]),
    "whole windows dropped": (10, 10, [0, 1, 5, 6, 18, 19, 24]),
    "all groups": (4, 6, list(range(6))),
}


@torch.inference_mode()
def encode_masked(encoder: VisionEncoder, grid: Grid, kept: list[int]) -> Tensor:
    """All patches of a whole grid, with the keys of dropped groups masked; the tokens of the kept groups."""
    config, weights = encoder.config, {name[7:]: value.double() for name, value in vision_tensors(encoder).items()}
    gh, gw = grid.height // 2, grid.width // 2
    # [patches] height, width and group of each patch, in the order of the grid's patches
    places = [(2 * (g // gw) + p // 2, 2 * (g % gw) + p % 2, g) for g in range(gh * gw) for p in range(4)]
    y, x, group = torch.tensor(places).T
    seen = torch.isin(group, torch.tensor(kept))[None, :]
    mean, std = (torch.tensor(each).double().view(3, 1, 1, 1) for each in (config.mean, config.std))
    pixels = (torch.from_numpy(grid.patches).double() / 255 - mean) / std
    pixels = pixels.expand(-1, -1, 2, -1, -1).flatten(1)
    hidden = pixels @ weights["patch_embed.proj.weight"].flatten(1).T
    quarter = config.head_dim // 4
    frequencies = 10_000.0 ** (-torch.arange(quarter).double() / quarter)
    angles = torch.cat((y[:, None] * frequencies, x[:, None] * frequencies), dim=1).repeat(1, 2)[:, None]

    def norm(x: Tensor, name: str) -> Tensor:
        if f"{name}.bias" in weights:
            return F.layer_norm(x, x.shape[-1:], weights[f"{name}.weight"], weights[f"{name}.bias"], 1e-6)
        return F.rms_norm(x, x.shape[-1:], weights[f"{name}.weight"], 1e-6)

    def linear(x: Tensor, name: str) -> Tensor:
        return F.linear(x, weights[f"{name}.weight"], weights[f"{name}.bias"])

    def rotated(x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return x * angles.cos() + torch.cat((-second, first), dim=-1) * angles.sin()

    for index in range(config.depth):
        block = f"blocks.{index}"
        query, key, value = (
            linear(norm(hidden, f"{block}.norm1"), f"{block}.attn.qkv")
            .view(len(places), 3, config.num_heads, -1)
            .unbind(1)
        )
        mask = seen.expand(len(places), -1)
        if config.window_size is not None and index not in config.full_attention_layers:
            window = torch.stack((y, x)) * config.patch_size // config.window_size
            mask = mask & (window[:, :, None] == window[:, None]).all(0)
        mask = mask | torch.eye(len(places), dtype=torch.bool)  # a dropped row sees itself: no empty softmax
        query, key, value = (part.transpose(0, 1) for part in (rotated(query), rotated(key), value))
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        hidden = hidden + linear(attended.transpose(0, 1).flatten(1), f"{block}.attn.proj")
        normed = norm(hidden, f"{block}.norm2")
        if config.activation == "silu":
            inner = F.silu(linear(normed, f"{block}.mlp.gate_proj")) * linear(normed, f"{block}.mlp.up_proj")
            hidden = hidden + linear(inner, f"{block}.mlp.down_proj")
        else:
            inner = linear(normed, f"{block}.mlp.fc1")
            hidden = hidden + linear(inner * torch.sigmoid(1.702 * inner), f"{block}.mlp.fc2")
    merged = norm(hidden, "merger.ln_q").view(gh * gw, -1)
    return linear(F.gelu(linear(merged, "merger.mlp.0")), "merger.mlp.2")[kept]


@pytest.mark.parametrize("config", [VISION, WINDOWED_VISION], ids=lambda config: config.kind)
@pytest.mark.parametrize("case", KEPT)
def test_keeping_some_groups_equals_masking_the_keys_of_the_others(config, case):
    height, width, kept = KEPT[case]
    encoder = VisionEncoder.random(config, seed=0, std=0.15)
    grid = make_grid(height, width, frames=2, seed=3, kept=np.array(kept))
    with torch.inference_mode():
        encoded = encoder.encode([grid])
    expected = encode_masked(encoder, make_grid(height, width, frames=2, seed=3), kept)
    assert expected.abs().max() > 0.5
    assert (encoded - expected).abs().max() < 1e-5


@pytest.mark.parametrize("config", [VISION, WINDOWED_VISION], ids=lambda config: config.kind)
def test_what_is_kept_changes_the_tokens(config):
    encoder = VisionEncoder.random(config, seed=0, std=0.15)
    kept = np.array([0, 1, 4])
    with torch.inference_mode():
        whole, part = encoder.encode([make_grid()]), encoder.encode([make_grid(kept=kept)])
    assert (whole[kept] - part).abs().max() > 1e-3


GRIDS = [
    make_grid(4, 6, frames=2, seed=0),
    make_grid(10, 6, frames=1, seed=1),
    make_grid(6, 6, frames=2, seed=2, kept=np.array([1, 4, 8])),
    make_grid(2, 2, frames=1, seed=3),
    make_grid(4, 6, frames=2, seed=4),
]


@pytest.mark.parametrize("config", [VISION, WINDOWED_VISION], ids=lambda config: config.kind)
def test_a_grid_has_the_same_bits_alone_and_with_others(config):
    encoder = VisionEncoder.random(config, seed=0, std=0.15)
    with torch.inference_mode():
        together = encoder.encode(GRIDS)
        alone = [encoder.encode([grid]) for grid in GRIDS]
    assert torch.equal(together, torch.cat(alone))


@pytest.mark.parametrize("config", [VISION, WINDOWED_VISION], ids=lambda config: config.kind)
def test_one_forward_of_many_grids_equals_many_forwards(config):
    encoder = VisionEncoder.random(config, seed=0, std=0.15)
    with torch.inference_mode():
        difference = encoder.encode_together(GRIDS) - encoder.encode(GRIDS)
    assert difference.abs().max() < 1e-5


def test_a_picture_stands_for_all_frames():
    encoder = VisionEncoder.random(VISION, seed=0, std=0.15)
    picture = make_grid(frames=1)
    doubled = Grid(np.repeat(picture.patches, 2, axis=2), picture.height, picture.width, picture.merge_size)
    with torch.inference_mode():
        assert torch.equal(encoder.encode([picture]), encoder.encode([doubled]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_near_float32(dtype):
    encoder = VisionEncoder.random(WINDOWED_VISION, seed=0, std=0.15)
    small = VisionEncoder(WINDOWED_VISION, dtype)
    for weight, wide in zip(small.weights(), encoder.weights(), strict=True):
        weight.copy_(wide)
    with torch.inference_mode():
        expected, encoded = encoder.encode(GRIDS), small.encode(GRIDS)
    assert encoded.dtype is dtype
    assert (encoded.float() - expected).abs().max() < 0.05 * expected.abs().max()


def test_the_weights_of_a_model_are_those_of_its_decoder_and_its_eyes():
    seeing, blind = make_vision_model("watch"), make_model("llama3")
    assert blind.vision is None
    assert seeing.vision is not None
    assert seeing.num_bytes == blind.num_bytes + seeing.vision.num_bytes
    for weight, same in zip(blind.weights(), seeing.weights(), strict=False):
        assert torch.equal(weight, same)


def test_a_draft_that_shares_weights_has_no_eyes():
    target = make_vision_model()
    assert Transformer.shared(target, CONFIGS["qwen2"]).vision is None
    assert target.config is VISION_CONFIGS["qwen2_vl"]
