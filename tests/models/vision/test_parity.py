"""Encoder, hidden states, logits and greedy text are those of transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.models.vision.reference import KINDS, Prompt, hidden_states, pixel_values, random_grid, save_pair

TOLERANCE = 1e-5  # of values up to about 3

SIZES = {
    "one picture": [(6, 10)],
    "pictures of several odd sizes": [(2, 2), (6, 10), (14, 2), (10, 6), (4, 4)],
    "a picture larger than many windows": [(18, 22)],
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", SIZES)
def test_pictures_are_encoded_as_by_transformers(kind: str, sizes: str, tmp_path: Path) -> None:
    oracle, model = save_pair(tmp_path, kind)
    grids = [random_grid(height, width, 1, seed) for seed, (height, width) in enumerate(SIZES[sizes])]
    shapes = torch.tensor([[1, grid.height, grid.width] for grid in grids])
    with torch.inference_mode():
        expected = oracle.model.visual(pixel_values(grids), grid_thw=shapes).pooler_output
        encoded = model.vision.encode(grids)
    assert expected.abs().max() > 0.5
    assert (encoded - expected).abs().max() < TOLERANCE


@pytest.mark.parametrize("kind", KINDS)
def test_videos_are_encoded_as_by_transformers(kind: str, tmp_path: Path) -> None:
    oracle, model = save_pair(tmp_path, kind)
    long, short = ([random_grid(6, size, 2, seed) for seed in range(size)] for size in (4, 2))
    shapes = torch.tensor([[4, 6, 4], [2, 6, 2]])
    with torch.inference_mode():
        expected = oracle.model.visual(pixel_values([*long, *short]), grid_thw=shapes).pooler_output
        encoded = model.vision.encode([*long, *short])
    assert (encoded - expected).abs().max() < TOLERANCE


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_hidden_states_and_logits_equal_those_of_transformers(kind: str, tied: bool, tmp_path: Path) -> None:
    oracle, model = save_pair(tmp_path, kind, tie_word_embeddings=tied)
    prompt = Prompt.example()
    with torch.inference_mode():
        expected = oracle(**prompt.hf_inputs(), output_hidden_states=True)
        hidden = hidden_states(model, prompt.token_ids, prompt.vision(oracle))
        logits = model.logits(hidden)
        normed = oracle.model.language_model.norm(hidden)
    assert expected.logits.abs().max() > 1
    assert (normed - expected.hidden_states[-1][0]).abs().max() < 1e-4
    assert (logits - expected.logits[0]).abs().max() < 1e-4


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_text_equals_that_of_transformers(kind: str, tmp_path: Path) -> None:
    oracle, model = save_pair(tmp_path, kind)
    prompt = Prompt.example()
    vision, token_ids = prompt.vision(oracle), list(prompt.token_ids)
    expected = oracle.generate(
        **prompt.hf_inputs(), max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    for _ in range(8):
        token_ids.append(int(model.logits(hidden_states(model, token_ids, vision)[-1:]).argmax()))
    assert token_ids == expected[0].tolist()


def test_yarn_and_sections_go_together(tmp_path: Path) -> None:
    rope = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 32}
    oracle, model = save_pair(tmp_path, "qwen2_5_vl", rope_parameters=rope | {"mrope_section": [1, 2, 3]})
    prompt = Prompt.example()
    with torch.inference_mode():
        expected = oracle(**prompt.hf_inputs()).logits[0]
        logits = model.logits(hidden_states(model, prompt.token_ids, prompt.vision(oracle)))
    assert (logits - expected).abs().max() < 1e-4
