"""Weights in fewer bits: how they are stored, read and multiplied.

matrix.py     the kinds of matrices, and what numbers they stand for
rounding.py   weights rounded to a format
folders.py    the layouts of Hugging Face folders; GGUF files are read by gguf/blocks.py
packed.py     products of codes on a CPU
placement.py  where a device keeps which matrix; a model around its matrices
"""

from faser.models.quantised.matrix import (
    Fp8Matrix,
    GroupMatrix,
    QuantisedMatrix,
    Stack,
    Weight,
    add_linear,
    dequantise,
    linear,
    stack,
    tensors_of,
)

__all__ = [
    "Fp8Matrix",
    "GroupMatrix",
    "QuantisedMatrix",
    "Stack",
    "Weight",
    "add_linear",
    "dequantise",
    "linear",
    "stack",
    "tensors_of",
]
