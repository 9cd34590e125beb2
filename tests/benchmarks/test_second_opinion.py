"""Words of every four-bit layout stand for the weights that other packages read from them."""

from __future__ import annotations

import pytest

from benchmarks.second_opinion import GROUP, READERS, digest, stored
from faser.models.quantisation import Quantisation
from faser.models.quantised import dequantise, folders

# What autoawq 0.2.9, gptqmodel 7.6.0 and compressed-tensors 0.20.0 read: `benchmarks/second_opinion.py check`.
DIGESTS = {
    "awq": "d4e02dbbf5efa099",
    "gptq": "5f833b3c41e7985b",
    "gptq v2": "b070d44908079264",
    "gptq act-order": "ba77a0b31e1813d3",
    "compressed int4": "725ebc45a5559149",
    "compressed int4 zeros": "77e03d3c3f5734ba",
}


@pytest.mark.parametrize("layout", READERS)
def test_made_up_words_are_read_as_other_packages_read_them(layout):
    kind = layout.split()[0]
    scheme = Quantisation(
        kind, 4, group=GROUP, symmetric=layout == "compressed int4", zeros_are_less_one=layout.startswith("gptq")
        and "v2" not in layout,
    )  # fmt: skip
    assert digest(dequantise(folders._LAYOUTS[f"{kind} 4"](stored(layout), scheme, layout))) == DIGESTS[layout]
