"""What quantised matrices stand for, and what joining and cutting them keeps."""

from __future__ import annotations

import pytest
import torch

from faser.models.quantised import Stack, add_linear, dequantise, linear, stack
from faser.models.quantised.matrix import FP8_MAX
from tests.models.quantised.matrices import every_kind, fp8_matrix, group_matrix

KINDS = list(every_kind(2, 256))


@pytest.mark.parametrize("kind", KINDS)
def test_a_stack_of_one_format_is_one_matrix_with_the_same_weights(kind):
    parts = [every_kind(n, 512, seed)[kind] for seed, n in enumerate((128, 256, 48))]
    joined = stack(parts)
    assert type(joined) is type(parts[0])
    assert torch.equal(joined.dequantise(), torch.cat([part.dequantise() for part in parts]))


def test_blocks_that_end_within_a_part_are_joined_by_rows():
    parts = [fp8_matrix(n, 256, n, block=128) for n in (100, 60)]
    joined = stack(parts)
    assert joined.rows_per_scale == 1
    assert torch.equal(joined.dequantise(), torch.cat([part.dequantise() for part in parts]))


def test_formats_that_differ_are_stacked_and_multiply_as_their_parts():
    parts = [group_matrix(32, 256, "Q4_K"), group_matrix(16, 256, "Q6_K"), torch.randn(8, 256)]
    stacked, x = stack(parts), torch.randn(3, 256)
    assert isinstance(stacked, Stack)
    assert stacked.shape == (56, 256)
    assert stacked.num_bytes == parts[0].num_bytes + parts[1].num_bytes + 8 * 256 * 4
    assert torch.equal(linear(x, stacked), torch.cat([linear(x, part) for part in parts], 1))


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_a_matrix_are_rows_of_its_weights(kind):
    matrix = every_kind(160, 256)[kind]
    some = torch.tensor([3, 150, 0])
    assert torch.equal(matrix.select(some).dequantise(), matrix.dequantise()[some])
    assert torch.equal(matrix.select(slice(5, 130)).dequantise(), matrix.dequantise()[5:130])


@pytest.mark.parametrize("kind", KINDS)
def test_a_product_is_that_of_the_dequantised_weights(kind):
    matrix, x = every_kind(96, 256)[kind], torch.randn(4, 256) * 0.1
    exact = x @ matrix.dequantise().t()
    tolerance = 0.05 if kind.startswith("fp8") else 1e-5  # rows are rounded to 3 bits behind the point there
    assert torch.allclose(linear(x, matrix), exact, atol=tolerance * exact.abs().max())
    residual = torch.randn(4, 96)
    assert torch.allclose(add_linear(residual, x, matrix), residual + linear(x, matrix))


def test_each_row_of_an_8_bit_product_is_rounded_by_itself():
    """Other rows of the batch do not change it."""
    for matrix in (fp8_matrix(32, 256), fp8_matrix(32, 256, block=128), fp8_matrix(32, 256, input_scale=0.01)):
        x = torch.randn(5, 256) * torch.tensor([1, 100, 0.01, 0, 1])[:, None]
        assert torch.equal(matrix.round_input(x)[2:3], matrix.round_input(x[2:3]))


def test_rounding_keeps_zeros_and_clips_what_is_too_large():
    static = fp8_matrix(8, 256, input_scale=0.01)
    assert torch.equal(static.round_input(torch.full((1, 256), 1e4)), torch.full((1, 256), FP8_MAX * 0.01))
    dynamic = fp8_matrix(8, 256)
    assert torch.equal(dynamic.round_input(torch.zeros(1, 256)), torch.zeros(1, 256))
    assert dequantise(dynamic).isfinite().all()


def test_6_bit_codes_are_put_together_from_both_planes():
    matrix = group_matrix(2, 256, "Q6_K")
    low = [(int(matrix.codes[1, 3]) >> shift) & 15 for shift in (0, 4)]
    high = [(int(matrix.high[1, 1]) >> shift) & 3 for shift in (4, 6)]
    assert matrix.unpacked()[1, 6:8].tolist() == [low[0] + 16 * high[0], low[1] + 16 * high[1]]
