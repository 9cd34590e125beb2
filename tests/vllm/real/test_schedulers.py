"""vLLM's own schedulers with FASER's lengths against a made-up worker: two steps in flight, preemption, aborts."""

from __future__ import annotations

import inspect
from importlib import import_module
from random import Random

import pytest

from faser.vllm import patches
from faser.vllm.versions import adapter_for
from tests.vllm.simulation import Simulation

BLOCK_SIZE = 16


def load(name: str):
    module, _, member = name.rpartition(".")
    return getattr(import_module(module), member)


@pytest.fixture(scope="module")
def vllm_config(pair):
    patches.apply()
    return load("vllm.engine.arg_utils.EngineArgs")(
        model=str(pair / "target"), dtype="float32", max_model_len=512, max_num_seqs=16, max_num_batched_tokens=512,
        enable_prefix_caching=False, additional_config={"faser": {"policy": "faser"}},
        speculative_config={"method": "draft_model", "model": str(pair / "draft"), "num_speculative_tokens": 4},
    ).create_engine_config()  # fmt: skip


class Bench:
    """A scheduler of vLLM and requests for it."""

    def __init__(self, config, policy: str, is_async: bool, num_blocks: int) -> None:
        adapter = adapter_for(import_module("vllm").__version__)
        interface = import_module("vllm.v1.kv_cache_interface")
        torch = import_module("torch")
        config.additional_config = {"faser": {"policy": policy}}
        config.scheduler_config.async_scheduling = is_async
        config.cache_config.num_gpu_blocks = self.num_blocks = num_blocks
        spec = interface.FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=1, dtype=torch.float32)
        groups = [interface.KVCacheGroupSpec(["layer"], spec)]
        self.scheduler = load(adapter.ahead if is_async else adapter.after)(
            vllm_config=config,
            kv_cache_config=interface.KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=groups),
            structured_output_manager=load("vllm.v1.structured_output.StructuredOutputManager")(config),
            block_size=BLOCK_SIZE,
            hash_block_size=BLOCK_SIZE,
            log_stats=True,
        )
        self.num_preemptions = 0
        preempt = self.scheduler._preempt_request

        def counted(*args, **kwargs):
            self.num_preemptions += 1
            return preempt(*args, **kwargs)

        self.scheduler._preempt_request = counted
        self.sim = Simulation(self.scheduler, self.make_result, is_async)
        self.wanted: dict[str, int] = {}

    @staticmethod
    def make_result(ids, sampled):
        given = {
            "req_ids": ids, "req_id_to_index": {each: index for index, each in enumerate(ids)},
            "sampled_token_ids": sampled, "logprobs": None, "prompt_logprobs_dict": {}, "pooler_output": [],
        }  # fmt: skip
        output = load("vllm.v1.outputs.ModelRunnerOutput")
        known = inspect.signature(output).parameters
        return output(**{name: value for name, value in given.items() if name in known})

    def add(self, number: int, seed: int = 0) -> None:
        random = Random(seed)
        params, request = load("vllm.sampling_params.SamplingParams"), load("vllm.v1.request.Request")
        for index in range(number):
            name = f"r{index}"
            self.wanted[name], self.sim.rates[name] = random.randint(1, 60), random.random()
            own = {"max_draft": index % 5} if index % 3 == 0 else None
            sampling = params(max_tokens=self.wanted[name], ignore_eos=True, temperature=0.0, extra_args=own)
            prompt = [7] * random.randint(1, 300)
            self.scheduler.add_request(
                request(request_id=name, prompt_token_ids=prompt, sampling_params=sampling, pooling_params=None)
            )

    def abort(self, name: str) -> None:
        self.scheduler.finish_requests(name, load("vllm.v1.request.RequestStatus").FINISHED_ABORTED)
        del self.wanted[name]

    def assert_nothing_is_held(self) -> None:
        self.scheduler.schedule()  # tells who is finished
        assert len(self.scheduler.faser.planner.requests) == 0
        # vLLM keeps one block for itself
        assert self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == self.num_blocks - 1


@pytest.mark.parametrize("num_blocks", [2000, 90], ids=["room", "preemption"])
@pytest.mark.parametrize("is_async", [True, False], ids=["ahead", "after"])
@pytest.mark.parametrize("policy", ["off", "fixed:3", "faser", "tetris"])
def test_every_request_gets_exactly_its_tokens_and_nothing_leaks(vllm_config, policy, is_async, num_blocks):
    bench = Bench(vllm_config, policy, is_async, num_blocks)
    bench.add(40)
    bench.sim.run()
    assert dict(bench.sim.emitted) == bench.wanted
    assert bench.scheduler.faser.planner.num_failures == 0
    assert (bench.num_preemptions > 0) == (num_blocks == 90)
    if policy == "off":
        assert not any(bench.sim.depths)
    if policy == "fixed:3":
        assert max(bench.sim.depths) == 3
        assert bench.sim.num_ragged > 0
        limited = [f"r{index}" for index in range(0, 40, 15)]  # max_draft 0
        assert not any(number for name in limited for number in bench.sim.lengths[name])
    bench.assert_nothing_is_held()


@pytest.mark.parametrize("is_async", [True, False], ids=["ahead", "after"])
def test_aborts_at_any_time_leak_nothing(vllm_config, is_async):
    bench, random = Bench(vllm_config, "fixed:3", is_async, 90), Random(3)
    bench.add(40)
    while bench.scheduler.requests:
        bench.sim.step()
        if random.random() < 0.2 and bench.scheduler.requests:
            bench.abort(random.choice(sorted(bench.scheduler.requests)))
    bench.sim.run()
    assert {name: bench.sim.emitted[name] for name in bench.wanted} == bench.wanted
    bench.assert_nothing_is_held()
