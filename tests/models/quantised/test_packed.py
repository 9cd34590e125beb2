"""Products of packed codes on a CPU: close to those of the weights, and the same at any number of rows."""

from __future__ import annotations

import pytest
import torch

from faser.models.quantised import Stack, linear
from faser.models.quantised.packed import PackedMatrix, can_pack, for_cpu
from tests.models.quantised.matrices import GROUP_KINDS, every_kind, group_matrix

PACKED_KINDS = [kind for kind in GROUP_KINDS if can_pack(group_matrix(16, 256, kind))]


def test_all_groups_but_those_of_16_can_be_packed():
    assert [kind for kind in GROUP_KINDS if kind not in PACKED_KINDS] == ["Q6_K"]
    assert not can_pack(group_matrix(24, 256, "Q4_0"))  # 24 outputs


@pytest.mark.parametrize("kind", PACKED_KINDS)
def test_a_packed_product_is_within_bfloat16_of_the_weights(kind):
    matrix, x = group_matrix(96, 512, kind), torch.randn(7, 512)
    exact = x @ matrix.dequantise().t()
    error = (PackedMatrix.pack(matrix).product(x) - exact).abs().max() / exact.abs().max()
    assert error < 2**-7  # rows, scales and results are each rounded by at most 2^-9


@pytest.mark.parametrize("kind", PACKED_KINDS)
def test_a_row_has_the_same_bits_at_any_number_of_rows(kind):
    packed, x = PackedMatrix.pack(group_matrix(96, 256, kind)), torch.randn(70, 256)
    whole = packed.product(x)
    for num_rows in (1, 2, 3, 4, 5, 8, 17, 33, 64):
        assert torch.equal(packed.product(x[:num_rows]), whole[:num_rows])
        assert torch.equal(packed.product(x[-num_rows:]), whole[-num_rows:])


@pytest.mark.parametrize("kind", PACKED_KINDS)
def test_packed_weights_can_be_read_back(kind):
    matrix = group_matrix(32, 256, kind)
    packed = PackedMatrix.pack(matrix)
    assert packed.shape == matrix.shape
    scale = matrix.dequantise().abs().max()
    assert (packed.dequantise() - matrix.dequantise()).abs().max() < 2**-7 * scale


def test_the_first_rows_of_a_packed_matrix_are_a_packed_matrix():
    packed, x = PackedMatrix.pack(group_matrix(192, 256, "Q8_0")), torch.randn(3, 256)
    assert torch.equal(packed.select(slice(128)).product(x), packed.product(x)[:, :128])
    assert torch.equal(packed.select(slice(1000)).product(x), packed.product(x))
    with pytest.raises(AssertionError, match="packed with others"):
        packed.select(slice(100))


@pytest.mark.parametrize("kind", list(every_kind(16, 256)))
def test_a_cpu_holds_every_kind_in_a_form_that_multiplies(kind):
    matrix, x = every_kind(96, 256)[kind], torch.randn(4, 256)
    expected = x @ matrix.dequantise().t()  # rows are not rounded
    plain, kept = (for_cpu(matrix, torch.float32, packs) for packs in (False, True))
    assert torch.allclose(linear(x, plain), expected, atol=1e-5 * expected.abs().max())
    assert torch.allclose(linear(x, kept), expected, atol=2**-7 * expected.abs().max())
    assert isinstance(kept, PackedMatrix) == (kind in PACKED_KINDS)


def test_a_stack_is_packed_part_by_part():
    parts = (group_matrix(32, 256, "Q4_K"), group_matrix(16, 256, "Q6_K"))
    stacked, x = for_cpu(Stack(parts), torch.float32, packs=True), torch.randn(2, 256)
    assert isinstance(stacked, Stack)
    assert [type(part) for part in stacked.parts] == [PackedMatrix, torch.Tensor]
    expected = torch.cat([part.product(x) for part in parts], 1)
    assert torch.allclose(linear(x, stacked), expected, atol=2**-7 * expected.abs().max())
    assert isinstance(for_cpu(Stack(parts), torch.float32, packs=False), torch.Tensor)
