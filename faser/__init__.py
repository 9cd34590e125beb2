"""FASER: an LLM server that manages speculative decoding per request and per phase, and never changes the output.

Importing this package imports nothing else: a name is loaded when it is first used, and torch only with `LLM`.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from faser.llm import LLM
    from faser.media.media import MediaPrompt
    from faser.request import FinishReason, RequestOutput, SamplingParams, Stats, TokenLogprobs

__all__ = ["LLM", "FinishReason", "MediaPrompt", "RequestOutput", "SamplingParams", "Stats", "TokenLogprobs"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'faser' has no attribute {name!r}")
    if name in ("LLM", "MediaPrompt"):
        from faser.extras import require
        from faser.threads import prepare_openmp

        require("engine")
        prepare_openmp()  # before torch loads
        return getattr(import_module("faser.llm"), name)
    return getattr(import_module("faser.request"), name)
