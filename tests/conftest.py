"""What all tests share."""

import os

import pytest
from hypothesis import HealthCheck, settings

# Tests run in one process per core: a thread that waits at a barrier must not burn another test's time.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch

pytest_plugins = ["tests.skips"]

# No example fails because the machine is busy. The rest is Hypothesis's own: in CI the examples are always the same.
settings.register_profile("any speed", settings.default, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any speed")

# Tiny models gain nothing from threads and lose much to their barriers, most of all on a busy machine.
torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory):
    """What FASER keeps between runs stays out of the user's folders, and is the same for all tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FASER_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A small checkpoint with a tokenizer."""
    from tests.checkpoint import write_checkpoint  # imports transformers: seconds that most tests need not wait

    path = tmp_path_factory.mktemp("model")
    write_checkpoint(path)
    return path


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") is not None and not torch.cuda.is_available():
        pytest.skip("no NVIDIA GPU: `make test-gpu` runs these on a machine that has one")
