"""FASER inside vLLM: a draft length for every request, by one flag on the engine that people already run.

    vllm serve T --speculative-config '{…}' --additional-config '{"faser": {"policy": "faser"}}'

vLLM calls `register` in each of its processes (entry point `vllm.general_plugins`). This module imports neither vLLM
nor torch. docs/vllm.md says what changes inside vLLM.
"""

from __future__ import annotations


def register() -> None:
    """Patch vLLM so that it looks for FASER's options. Without them it serves as it would without FASER."""
    from faser.vllm.patches import apply

    apply()
