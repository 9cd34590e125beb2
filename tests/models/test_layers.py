"""The small operations, against formulas written out."""

from __future__ import annotations

import math

import pytest
import torch

from faser.models.config import Rope
from faser.models.layers import rms_norm, rms_norm_heads_, rope_tables, rotate, silu_mul


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def exact_norm(x: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.double()
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt()


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e3])
def test_rms_norm_is_the_formula_even_where_eps_matters(scale: float) -> None:
    x, weight = scale * torch.randn(5, 64, generator=generator()), torch.rand(64, generator=generator())
    torch.testing.assert_close(rms_norm(x, weight, 1e-5).double(), exact_norm(x, 1e-5) * weight, rtol=1e-6, atol=1e-7)


def test_rms_norm_in_bfloat16_computes_in_float32() -> None:
    x = torch.randn(5, 512, generator=generator()).bfloat16()
    weight = torch.rand(512, generator=generator()).bfloat16()
    result = rms_norm(x, weight, 1e-5)
    assert result.dtype is torch.bfloat16
    torch.testing.assert_close(result.double(), exact_norm(x, 1e-5) * weight, rtol=2**-7, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_head_norms_write_only_their_slice(dtype: torch.dtype) -> None:
    heads = torch.randn(3, 6, 8, generator=generator()).to(dtype)
    weight = torch.rand(4, 8, generator=generator()).to(dtype)
    before = heads.clone()
    rms_norm_heads_(heads[:, :4], weight, 1e-6)
    assert torch.equal(heads[:, 4:], before[:, 4:])
    torch.testing.assert_close(heads[:, :4].double(), exact_norm(before[:, :4], 1e-6) * weight, rtol=2**-6, atol=1e-5)


def test_silu_mul_gates_the_second_half_by_the_first() -> None:
    gate_up = torch.randn(3, 10, generator=generator())
    before = gate_up.clone()
    gate, up = gate_up[:, :5], gate_up[:, 5:]
    torch.testing.assert_close(silu_mul(gate_up), gate * torch.sigmoid(gate) * up)
    assert torch.equal(gate_up, before)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
def test_rotate_turns_each_pair_by_its_angle_in_place_on_a_slice(dtype: torch.dtype, tolerance: float) -> None:
    whole = torch.randn(4, 5, 8, generator=generator()).to(dtype)
    before = whole.clone()
    angles = torch.rand(4, 1, 4, generator=generator()) * 6
    rotate(whole[:, :3], angles.cos(), angles.sin())
    first, second = before[:, :3, :4].float(), before[:, :3, 4:].float()
    turned = torch.complex(first, second) * torch.polar(torch.ones_like(angles), angles)
    torch.testing.assert_close(whole[:, :3, :4].float(), turned.real, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(whole[:, :3, 4:].float(), turned.imag, rtol=tolerance, atol=tolerance)
    assert torch.equal(whole[:, 3:], before[:, 3:])


def test_default_tables_hold_position_times_frequency() -> None:
    cos, sin = rope_tables(Rope(theta=100.0), head_dim=8, num_positions=50)
    assert cos.shape == sin.shape == (50, 4)
    assert cos.dtype is torch.float32
    angle = 49 * 100.0 ** (-2 / 8)
    assert cos[49, 1].item() == pytest.approx(math.cos(angle), abs=1e-5)
    assert sin[49, 1].item() == pytest.approx(math.sin(angle), abs=1e-5)


def test_linear_tables_stretch_the_default_ones() -> None:
    plain, _ = rope_tables(Rope(), 8, 10)
    stretched, _ = rope_tables(Rope(kind="linear", factor=4.0), 8, 40)
    torch.testing.assert_close(stretched[::4], plain)
