"""A vLLM that answers at once: the package and the script that the commands on an H200 are given."""

from __future__ import annotations

from pathlib import Path

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
