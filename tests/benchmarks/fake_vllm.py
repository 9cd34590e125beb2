"""A vLLM that answers at once: the package that the commands on an H200 are given, and for h200.py its script."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

SCRIPT = """
import asyncio
import time
from types import SimpleNamespace


class Engine:
    async def generate(self, prompt, params, request_id):
        for _ in range(params.max_tokens):
            await asyncio.sleep(0)
            yield SimpleNamespace(outputs=[SimpleNamespace(token_ids=[5])])

    def shutdown(self):
        pass


def make_engine(args):
    assert args.model.endswith("target")
    return Engine()


async def play_one(engine, request, start):
    await asyncio.sleep(max(0.0, start + request["arrival"] - time.perf_counter()))
    sent, first, tokens = time.perf_counter(), None, []
    async for output in engine.generate(request, SimpleNamespace(max_tokens=request["max_tokens"]), ""):
        first = first or time.perf_counter()
        tokens += output.outputs[0].token_ids
    done = time.perf_counter()
    return {
        "arrival": request["arrival"], "ttft": first - sent, "latency": done - sent, "finished_at": done - start,
        "prompt_tokens": len(request["prompt_token_ids"]), "token_ids": tokens,
    }


async def play(engine, workload, temperature):
    start = time.perf_counter()
    return await asyncio.gather(*(play_one(engine, request, start) for request in workload))
"""


def write_fake_vllm(folder: Path, script: str = SCRIPT) -> list[str]:
    """The flags that name it."""
    package = folder / "bundle" / "vllm"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("from types import SimpleNamespace as SamplingParams\n")
    (package / "sampling_params.py").write_text("class RequestOutputKind:\n    DELTA = 1\n")
    (folder / "trace.py").write_text(script)
    return ["--vllm-bundle", str(folder / "bundle"), "--vllm-trace", str(folder / "trace.py")]


# The modules of vLLM that benchmarks/vllm_plugin.py and the plugin's patches look for. Token i of an answer is 10 + i;
# with a draft the third token is another one. A draft of 13 tokens does not start.
ENGINE = {
    "__init__.py": """
        from types import SimpleNamespace as SamplingParams
        __version__ = "0.26.0"
    """,
    "platforms.py": """
        from types import SimpleNamespace
        current_platform = SimpleNamespace(is_cuda=lambda: False, is_cpu=lambda: True, device_name="cpu")
    """,
    "sampling_params.py": """
        class RequestOutputKind:
            DELTA = 1
    """,
    "config/vllm.py": """
        class VllmConfig:
            def _set_cudagraph_sizes(self):
                pass
    """,
    "engine/arg_utils.py": """
        class EngineArgs:
            def __init__(self, **given):
                self.given = given
            def create_engine_config(self):
                pass
        class AsyncEngineArgs(EngineArgs):
            pass
    """,
    "v1/engine/input_processor.py": """
        class InputProcessor:
            def _validate_params(self, params):
                pass
    """,
    "v1/engine/async_llm.py": """
        import asyncio
        from types import SimpleNamespace
        class AsyncLLM:
            def __init__(self, given):
                self.length = given.get("speculative_config", {}).get("num_speculative_tokens", 0)
                if self.length == 13:
                    raise ValueError("unlucky")
            @classmethod
            def from_engine_args(cls, args):
                return cls(args.given)
            async def generate(self, prompt, params, request_id):
                for index in range(params.max_tokens):
                    await asyncio.sleep(0)
                    token = 7 if index == 2 and self.length else 10 + index
                    likeliest = {10 + index: -0.5, 7: -0.625} if params.logprobs else {}
                    logprobs = [{each: SimpleNamespace(logprob=value) for each, value in likeliest.items()}]
                    yield SimpleNamespace(outputs=[SimpleNamespace(token_ids=[token], logprobs=logprobs)])
            def shutdown(self):
                pass
    """,
}


def write_fake_engine(folder: Path) -> list[str]:
    """The flags that name it."""
    for name, source in ENGINE.items():
        path = folder / "bundle" / "vllm" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dedent(source))
    return ["--vllm-bundle", str(folder / "bundle")]
