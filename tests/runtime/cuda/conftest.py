"""Kernels run on the GPU if there is one, else in Triton's interpreter."""

import os
import sys

import pytest
import torch

INTERPRETED = not torch.cuda.is_available()


def _interpret() -> None:
    """Triton reads its mode when a kernel is defined, in its own library too. Other tests may have imported it."""
    os.environ["TRITON_INTERPRET"] = "1"
    for name in [name for name in sys.modules if name.split(".")[0] == "triton" and "_C" not in name]:
        del sys.modules[name]


if INTERPRETED:
    _interpret()

_DTYPES = [torch.float32, torch.bfloat16, torch.float16]
_PLACES = [pytest.param(("cpu", torch.float32), id="interpreted")]
_PLACES += [pytest.param(("cuda", dtype), id=f"cuda-{str(dtype)[6:]}", marks=pytest.mark.gpu) for dtype in _DTYPES]


@pytest.fixture(params=_PLACES)
def place(request):
    """A device the kernels run on, and a dtype."""
    if (request.param[0] == "cpu") != INTERPRETED:
        pytest.skip("the interpreter serves where there is no CUDA device, and only there")
    return request.param


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    """A device the kernels run on."""
    if (request.param == "cpu") != INTERPRETED:
        pytest.skip("the interpreter serves where there is no CUDA device, and only there")
    return request.param
