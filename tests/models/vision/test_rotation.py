"""M-RoPE: which position turns which frequency."""

from __future__ import annotations

import torch

from tests.tiny import make_head, make_vision_model


def test_every_frequency_turns_by_the_position_of_its_section():
    model = make_vision_model()  # sections of 2, 1 and 1 frequencies
    cos, sin = model.rotation(torch.tensor([[5, 70, 9], [3, 0, 127]]))
    for row, parts in enumerate(((5, 5, 70, 9), (3, 3, 0, 127))):
        for column, position in enumerate(parts):
            assert cos[row, column] == model.cos[position, column]
            assert sin[row, column] == model.sin[position, column]


def test_text_has_the_same_bits_with_one_position_and_with_three():
    model = make_vision_model("qwen2_5_vl")
    positions = torch.tensor([0, 1, 77, 127])
    for one, three in zip(model.rotation(positions), model.rotation(positions[:, None].expand(-1, 3)), strict=True):
        assert torch.equal(one, three)


def test_a_model_without_sections_turns_by_the_first_position():
    model = make_vision_model("watch")
    positions = torch.tensor([[4, 90, 91], [5, 92, 93]])
    for of_model in (model, make_head(model)):
        cos, sin = of_model.rotation(positions)
        assert torch.equal(cos, of_model.cos[positions[:, 0]])
        assert torch.equal(sin, of_model.sin[positions[:, 0]])
