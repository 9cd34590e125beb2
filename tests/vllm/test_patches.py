"""What FASER changes in vLLM, with modules that stand for vLLM's."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from faser.errors import ConfigError
from faser.vllm import patches, versions
from tests.vllm.fakes import FakeAsyncScheduler, FakeOutput, FakeRequest, FakeScheduler, make_config

ROOT = Path(__file__).parents[2]


class GraphMode(Enum):
    FULL = 1
    FULL_AND_PIECEWISE = 2


@dataclass
class EngineArgs:
    additional_config: dict[str, Any] = field(default_factory=dict)
    speculative_config: dict[str, Any] | None = None
    async_scheduling: bool | None = None
    distributed_executor_backend: str | None = None
    enforce_eager: bool = False
    compilation_config: Any = field(default_factory=lambda: SimpleNamespace(cudagraph_mode=None))

    def create_engine_config(self, usage_context: Any = None, headless: bool = False) -> Any:
        config = make_config(None, is_async=bool(self.async_scheduling))
        config.additional_config = self.additional_config
        if self.speculative_config is None:
            config.speculative_config = None
        return config


class VllmConfig:
    def __init__(self, additional_config: dict[str, Any], head_size: int = 128, **given: Any) -> None:
        self.additional_config = additional_config
        target = SimpleNamespace(get_head_size=lambda: head_size)
        self.speculative_config = SimpleNamespace(num_speculative_tokens=4, target_model_config=target)
        self.scheduler_config = SimpleNamespace(max_num_seqs=256, max_num_batched_tokens=8192)
        graphs = {"cudagraph_capture_sizes": None, "max_cudagraph_capture_size": None, "cudagraph_mode": GraphMode.FULL}
        graphs |= given
        self.compilation_config = SimpleNamespace(**graphs)

    def _set_cudagraph_sizes(self) -> None:
        pass


class VLLMValidationError(ValueError):
    pass


class SamplingParams:
    def __init__(self, **extra_args: Any) -> None:
        self.extra_args = extra_args


class InputProcessor:
    def __init__(self, additional_config: dict[str, Any]) -> None:
        self.vllm_config = SimpleNamespace(additional_config=additional_config)

    def _validate_params(self, params: Any, supported_tasks: Any) -> str:
        return "valid"


@pytest.fixture
def vllm(monkeypatch):
    """Modules under vLLM's names, with the patches made. The version and the platform can be set."""
    copies = {each.__name__: type(each.__name__, (each,), {}) for each in (EngineArgs, VllmConfig, InputProcessor)}
    platform = SimpleNamespace(is_cuda=lambda: True, is_cpu=lambda: False, device_name="a device")
    modules = {
        "vllm": {"__version__": "0.26.0"},
        "vllm.platforms": {"current_platform": platform},
        "vllm.config": {"CUDAGraphMode": GraphMode},
        "vllm.config.vllm": {"VllmConfig": copies["VllmConfig"]},
        "vllm.engine": {},
        "vllm.exceptions": {"VLLMValidationError": VLLMValidationError},
        "vllm.engine.arg_utils": {"EngineArgs": copies["EngineArgs"]},
        "vllm.sampling_params": {"SamplingParams": SamplingParams},
        "vllm.v1": {},
        "vllm.v1.engine": {},
        "vllm.v1.engine.input_processor": {"InputProcessor": copies["InputProcessor"]},
    }
    for name, contents in modules.items():
        module = ModuleType(name)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(patches, "_applied", set())
    patches.apply()
    return SimpleNamespace(root=sys.modules["vllm"], platform=platform, **copies)


PAIR = {"method": "draft_model", "model": "d", "num_speculative_tokens": 4}
FLAG = {"faser": {"policy": "faser"}}


def test_without_the_flag_nothing_changes(vllm, caplog):
    args = vllm.EngineArgs(speculative_config=PAIR)
    config = args.create_engine_config()
    assert config.scheduler_config.scheduler_cls is None
    assert args.async_scheduling is None
    assert args.compilation_config.cudagraph_mode is None
    assert not caplog.records


def test_one_flag_sets_what_the_user_left_and_says_what(vllm, caplog):
    caplog.set_level("INFO", logger="vllm.faser")
    args = vllm.EngineArgs(FLAG, PAIR)
    config = args.create_engine_config()
    assert args.async_scheduling is True
    assert args.compilation_config.cudagraph_mode is GraphMode.FULL
    assert config.scheduler_config.scheduler_cls == versions.ADAPTERS["0.26"].ahead
    said = caplog.records[-1].message
    for words in ("asynchronous scheduling", "CUDA graphs FULL", config.scheduler_config.scheduler_cls):
        assert words in said


def test_what_the_user_set_stays(vllm):
    args = vllm.EngineArgs(FLAG, PAIR, async_scheduling=False)
    args.compilation_config.cudagraph_mode = "mine"
    config = args.create_engine_config()
    assert args.async_scheduling is False
    assert args.compilation_config.cudagraph_mode == "mine"
    assert config.scheduler_config.scheduler_cls == versions.ADAPTERS["0.26"].after


@pytest.mark.parametrize("version", ["0.25.1", "0.27.0", "0.33.0", "1.26.0", "dev"])
def test_another_version_is_warned_of_in_one_line_and_left_alone(vllm, caplog, version):
    vllm.root.__version__ = version
    args = vllm.EngineArgs(FLAG, PAIR)
    config = args.create_engine_config()
    assert config.scheduler_config.scheduler_cls is None
    assert args.async_scheduling is None
    assert [record.message for record in caplog.records] == [
        f"FASER changes nothing: vLLM {version} is none of the versions it knows, 0.26 and 0.32. "
        "vLLM serves without it."
    ]


def test_another_platform_is_warned_of_in_one_line_and_left_alone(vllm, caplog):
    vllm.platform.is_cuda = lambda: False
    config = vllm.EngineArgs(FLAG, PAIR).create_engine_config()
    assert config.scheduler_config.scheduler_cls is None
    assert ["platform a device" in record.message for record in caplog.records] == [True]


@pytest.mark.parametrize(
    ("flag", "pair", "reason"),
    [
        ({"policy": "best"}, PAIR, "policy 'best'"),
        ({"speed": 2}, PAIR, "has no speed"),
        ({}, None, "nothing drafts here"),
    ],
)
def test_a_wrong_configuration_is_refused_at_start(vllm, flag, pair, reason):
    with pytest.raises(ConfigError, match=reason):
        vllm.EngineArgs({"faser": flag}, pair).create_engine_config()


def test_graphs_reach_as_many_rows_as_the_largest_batch_verifies(vllm):
    config = vllm.VllmConfig(FLAG)
    config._set_cudagraph_sizes()
    sizes = config.compilation_config.cudagraph_capture_sizes
    assert sizes[:5] == [1, 2, 4, 8, 16]
    assert sizes[-1] == config.compilation_config.max_cudagraph_capture_size == 1280
    assert sizes == sorted(set(sizes))
    assert len(sizes) < 70


@pytest.mark.parametrize("given", [{"cudagraph_capture_sizes": [1, 2]}, {"max_cudagraph_capture_size": 64}])
def test_graph_sizes_of_the_user_stay(vllm, given):
    config = vllm.VllmConfig(FLAG, **given)
    config._set_cudagraph_sizes()
    assert {name: vars(config.compilation_config)[name] for name in given} == given


@pytest.mark.parametrize(
    ("head_size", "mode"),
    [
        (32, GraphMode.FULL_AND_PIECEWISE),
        (64, GraphMode.FULL_AND_PIECEWISE),
        (80, GraphMode.FULL),
        (128, GraphMode.FULL),
        (256, GraphMode.FULL_AND_PIECEWISE),
    ],
)
def test_full_graphs_are_kept_where_attention_in_them_is_right(vllm, caplog, head_size, mode):
    config = vllm.VllmConfig(FLAG, head_size)
    config._set_cudagraph_sizes()
    assert config.compilation_config.cudagraph_mode is mode
    assert bool(caplog.records) == (mode is not GraphMode.FULL)
    plain = vllm.VllmConfig({}, head_size)
    plain._set_cudagraph_sizes()
    assert plain.compilation_config.cudagraph_mode is GraphMode.FULL


def test_graph_sizes_stay_vllm_s_without_the_flag_and_on_0_32(vllm):
    plain = vllm.VllmConfig({})
    plain._set_cudagraph_sizes()
    vllm.root.__version__ = "0.32.0"
    newer = vllm.VllmConfig(FLAG)
    newer._set_cudagraph_sizes()
    assert plain.compilation_config.cudagraph_capture_sizes is None
    assert newer.compilation_config.cudagraph_capture_sizes is None


def test_a_wrong_max_draft_is_refused_before_it_reaches_the_engine(vllm):
    processor = vllm.InputProcessor(FLAG)
    assert processor._validate_params(SamplingParams(max_draft=2), ()) == "valid"
    assert processor._validate_params(object(), ()) == "valid"
    with pytest.raises(VLLMValidationError, match="max_draft: expected a whole number"):
        processor._validate_params(SamplingParams(max_draft="two"), ())
    assert vllm.InputProcessor({})._validate_params(SamplingParams(max_draft="two"), ()) == "valid"


def test_patches_are_made_once(vllm):
    once = vars(vllm.EngineArgs)["create_engine_config"]
    patches.apply()
    assert vars(vllm.EngineArgs)["create_engine_config"] is once


def test_registering_imports_neither_vllm_nor_torch_before_it_is_called():
    code = "import sys, faser.vllm; sys.exit(any(name.split('.')[0] in ('torch', 'vllm') for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_every_patch_is_a_declared_hook():
    assert {(each.module, each.owner, each.name) for each in patches.PATCHES} <= {
        (hook.module, hook.owner, hook.name) for hook in versions.HOOKS
    }


# ---- the stand-ins keep to the hooks that FASER declares ----


@pytest.mark.parametrize("hook", versions.HOOKS, ids=lambda hook: f"{hook.owner}.{hook.name}")
def test_the_stand_ins_have_the_declared_parameters(hook):
    owners = {
        "Scheduler": FakeScheduler, "AsyncScheduler": FakeAsyncScheduler, "EngineArgs": EngineArgs,
        "VllmConfig": VllmConfig, "InputProcessor": InputProcessor,
    }  # fmt: skip
    method = getattr(owners[hook.owner], hook.name)
    assert method.__code__.co_varnames[: method.__code__.co_argcount] == hook.parameters


def test_the_stand_ins_have_the_declared_attributes():
    scheduler = FakeScheduler(make_config())
    declared = versions.ATTRIBUTES
    assert set(declared["vllm.v1.core.sched.scheduler.Scheduler"]) <= set(dir(scheduler))
    assert set(declared["vllm.v1.request.Request"]) <= set(dir(FakeRequest("r", 1, 1, None)))
    assert set(declared["vllm.v1.core.sched.output.SchedulerOutput"]) <= set(FakeOutput.__dataclass_fields__)
