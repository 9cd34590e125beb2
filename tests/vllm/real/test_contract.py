"""Every method and attribute of the installed vLLM that FASER relies on."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from importlib import import_module

import pytest

from faser.vllm.versions import ADAPTERS, ATTRIBUTES, HOOKS, adapter_for


def load(name: str):
    module, _, member = name.rpartition(".")
    return getattr(import_module(module), member)


@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: f"{hook.owner}.{hook.name}")
def test_the_hook_has_the_parameters_that_faser_relies_on(hook):
    method = getattr(load(f"{hook.module}.{hook.owner}"), hook.name)
    parameters = tuple(inspect.signature(inspect.unwrap(method)).parameters)
    assert parameters[: len(hook.parameters)] == hook.parameters
    more = list(inspect.signature(inspect.unwrap(method)).parameters.values())[len(hook.parameters) :]
    assert all(each.default is not inspect.Parameter.empty for each in more)


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_the_class_has_the_attributes_that_faser_relies_on(name):
    owner = load(name)
    source = "".join(inspect.getsource(each) for each in owner.__mro__ if each.__module__.startswith("vllm"))
    stated = set(re.findall(r"self\.(\w+)(?:: [^=\n]+)? = ", source)) | set(re.findall(r"^    (\w+):", source, re.M))
    assert set(ATTRIBUTES[name]) <= stated | set(dir(owner))


def test_this_version_has_an_adapter_whose_classes_load():
    adapter = adapter_for(import_module("vllm").__version__)
    assert adapter is not None
    assert issubclass(load(adapter.ahead), load("vllm.v1.core.sched.async_scheduler.AsyncScheduler"))
    assert issubclass(load(adapter.after), load("vllm.v1.core.sched.scheduler.Scheduler"))
    for theirs, ours in adapter.workers.items():
        assert issubclass(load(ours), load("vllm.v1.worker.worker_base.WorkerBase")), theirs


def test_vllm_finds_the_plugin_s_entry_points():
    metadata = import_module("importlib.metadata")
    for group, value in (
        ("vllm.general_plugins", "faser.vllm:register"),
        ("vllm.stat_logger_plugins", "faser.vllm.metrics:FaserMetrics"),
        ("vllm.endpoint_plugins", "faser.vllm.dashboard:FaserEndpoint"),
    ):
        found = {each.name: each for each in metadata.entry_points(group=group)}
        assert found["faser"].value == value
        assert found["faser"].load() is not None


@pytest.mark.parametrize(("names", "is_made"), [(None, True), ("faser,other", True), ("other", False)])
def test_vllm_plugins_decides_whether_patches_are_made(names, is_made):
    code = "import vllm.plugins as p, faser.vllm.patches as f; p.load_general_plugins(); print('MADE', len(f._applied))"
    environment = {name: value for name, value in os.environ.items() if name != "VLLM_PLUGINS"}
    environment |= {} if names is None else {"VLLM_PLUGINS": names}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    expected = len(import_module("faser.vllm.patches").PATCHES) if is_made else 0
    assert f"MADE {expected}" in done.stdout


def test_the_stat_logger_and_the_endpoint_are_what_vllm_expects():
    base = load("vllm.v1.metrics.loggers.StatLoggerBase")
    metrics = load("faser.vllm.metrics.FaserMetrics")
    assert issubclass(metrics, base)
    assert not inspect.isabstract(metrics)
    endpoint = load("vllm.plugins.endpoint_plugins.interface.EndpointPlugin")
    ours = load("faser.vllm.dashboard.FaserEndpoint")()
    for name in ("attach_router", "init_state"):
        expected = list(inspect.signature(getattr(endpoint, name)).parameters)
        assert list(inspect.signature(getattr(type(ours), name)).parameters) == expected
    assert ours.name == "faser"


def test_all_versions_are_covered_by_make_test_vllm():
    makefile = import_module("tools.vllm_cpu")
    assert {".".join(version.split(".")[:2]) for version in makefile.TORCH} == set(ADAPTERS)


@pytest.mark.parametrize("name", ["faser.vllm.runner_v1.DraftProposerV1", "faser.vllm.runner_v2.DraftSpeculatorV2"])
def test_methods_of_the_worker_take_what_vllm_gives_them(name):
    if "v2" in name and import_module("vllm").__version__.startswith("0.26"):
        pytest.skip("vLLM 0.26 drafts in its V1 runner")
    ours, checked = load(name), 0
    for method, mine in vars(ours).items():
        theirs = getattr(ours.__mro__[1], method, None)
        if method != "__init__" and inspect.isfunction(mine) and inspect.isfunction(theirs):
            given = tuple(inspect.signature(theirs).parameters)
            taken = inspect.signature(mine).parameters
            takes_all = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in taken.values())
            assert takes_all or tuple(taken)[: len(given)] == given, method
            checked += 1
    assert checked
