"""Kernels run on the GPU if there is one, else in Triton's interpreter."""

import os
import sys
from importlib.util import find_spec

import pytest
import torch

INTERPRETED = not torch.cuda.is_available()


def _interpret() -> None:
    """Triton reads its mode when a kernel is defined, in its own library too. Other tests may have imported it."""
    os.environ["TRITON_INTERPRET"] = "1"
    for name in [name for name in sys.modules if name.split(".")[0] == "triton" and "_C" not in name]:
        del sys.modules[name]


def _prepare_language_once() -> None:
    """Triton's interpreter prepares its language whenever a kernel calls a function: most of the time of these tests.

    Once for each launch suffices, since it is undone when the launch ends. Other versions of Triton stay as they are.
    """
    from triton.runtime import interpreter

    if not (hasattr(interpreter, "_patch_lang") and hasattr(interpreter, "_LangPatchScope")):
        return
    prepare, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    languages = (interpreter.tl, interpreter.tl.core)
    prepared: set[str] = set()

    def prepare_once(function):
        modules = {each.__name__ for each in languages if any(value is each for value in function.__globals__.values())}
        if modules and modules <= prepared:
            return interpreter._LangPatchScope()
        prepared.update(modules)
        return prepare(function)

    def launch_prepared(self, *args, **kwargs):
        prepared.clear()
        return launch(self, *args, **kwargs)

    interpreter._patch_lang = prepare_once
    interpreter.GridExecutor.__call__ = launch_prepared


if INTERPRETED:
    _interpret()
    if find_spec("triton") is not None:
        _prepare_language_once()

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
