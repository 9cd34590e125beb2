"""Tests with a real vLLM: `make test-vllm` runs them, once for each version.

One pair of tiny models serves all that draft by a model, one target with heads all that draft by a head.
"""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from tests.vllm.real.pair import write_pair


def pytest_collection_modifyitems(items):
    if find_spec("vllm") is None:
        reason = pytest.mark.skip(reason="no vLLM: `make test-vllm` sets up an environment with one and runs these")
        for item in items:
            if "tests/vllm/real/" in item.path.as_posix():
                item.add_marker(reason)


@pytest.fixture(scope="session")
def pair(tmp_path_factory):
    """A folder with a target and a draft that agrees with it most of the time."""
    folder = tmp_path_factory.mktemp("pair")
    write_pair(folder)
    return folder


@pytest.fixture(scope="session")
def heads(tmp_path_factory):
    """A folder with a target, draft heads for it, and prompts whose answers the trained one guesses."""
    from tests.vllm.real.heads import write_heads  # trains: not before a test asks for it

    folder = tmp_path_factory.mktemp("heads")
    write_heads(folder)
    return folder
