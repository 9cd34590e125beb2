"""Quantised folders in vLLM, one after the other: `python -m tests.vllm.real.quantised_engine SPEC` prints JSON.

    {"folders": {NAME: [FOLDER, DTYPE], …}, "prompts": [[…], …], "max_tokens": …}

A folder that this CPU has no kernel for is told as `refused`. It is loaded once more, with plain torch in the place of
the missing kernels: what vLLM reads from the file is the same.
"""

from __future__ import annotations

import gc
import json
import math
import sys
from typing import Any

import torch
from torch import Tensor

from tests.vllm.real import drafting  # noqa: F401 (sets the environment)

FP8 = torch.finfo(torch.float8_e4m3fn).max
NO_KERNEL = (
    "requires AMX",
    "scaled_fp8_quant",
    "narrow() cannot be applied",
    "silu_and_mul_quant",
)  # in the errors of a CPU


def round_static(output: Tensor, given: Tensor, scale: Tensor, group_shape: Any = None) -> None:
    output.copy_((given.float() / scale).clamp(-FP8, FP8))


def round_dynamic(output: Tensor, given: Tensor, scale: Tensor) -> None:
    scale.copy_(given.abs().amax().float() / FP8)
    round_static(output, given, scale)


def activate_and_round(output: Tensor, given: Tensor, scale: Tensor) -> None:
    gate, up = given.float().chunk(2, dim=-1)
    round_static(output, torch.nn.functional.silu(gate) * up, scale)


def multiply_blocks(self: Any, layer: Any, x: Tensor, bias: Tensor | None = None, **_: Any) -> Tensor:
    held = self._get_layer_params(layer)
    scale = held.weight_scale if held.weight_scale_inv is None else held.weight_scale_inv
    (rows, columns), (n, k) = self.weight_group_shape, held.weight.shape
    wide = scale.repeat_interleave(rows, 0)[:n].repeat_interleave(columns, 1)[:, :k]
    return torch.nn.functional.linear(x, (held.weight.float() * wide).to(x.dtype), bias)


def stand_in() -> None:
    """Plain torch for kernels that need AMX, or that the build for CPUs leaves out."""
    from vllm.model_executor.kernels.linear.scaled_mm import cpu, pytorch

    blocks, channels = cpu.CPUFp8BlockScaledMMKernel, pytorch.ChannelWiseTorchFP8ScaledMMLinearKernel
    blocks.is_supported = staticmethod(lambda compute_capability=None: (True, None))
    blocks.process_weights_after_loading = lambda self, layer: None
    blocks.apply_weights = multiply_blocks
    torch.ops._C.static_scaled_fp8_quant = round_static
    torch.ops._C.dynamic_scaled_fp8_quant = round_dynamic
    torch.ops._C.silu_and_mul_quant = activate_and_round
    multiply = channels.apply_scaled_mm

    def multiply_channels(self: Any, *, As: Tensor, output_shape: list[int], **given: Any) -> Tensor:  # noqa: N803
        by_row = As.expand(math.prod(output_shape[:-1]), 1) if As.dim() == 0 else As  # it takes no single scale
        return multiply(self, As=by_row, output_shape=output_shape, **given)

    channels.apply_scaled_mm = multiply_channels


def generate(folder: str, dtype: str, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
    from vllm import LLM, SamplingParams

    llm = LLM(
        folder, dtype=dtype, skip_tokenizer_init=True, max_model_len=64, max_num_seqs=8,
        max_num_batched_tokens=128, enforce_eager=True, block_size=32, enable_prefix_caching=False,
    )  # fmt: skip
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": each} for each in prompts], params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def attempt(name: str, spec: dict[str, Any]) -> dict[str, Any]:
    from vllm.distributed import cleanup_dist_env_and_memory

    try:
        return {"tokens": generate(*spec["folders"][name], spec["prompts"], spec["max_tokens"])}
    except (AttributeError, NotImplementedError, RuntimeError, ValueError) as error:
        return {"refused": f"{type(error).__name__}: {error}"}
    finally:
        gc.collect()
        cleanup_dist_env_and_memory()


def run_all(spec: dict[str, Any]) -> dict[str, Any]:
    done = {name: attempt(name, spec) for name in spec["folders"]}
    stand_in()
    for name, found in done.items():
        if any(each in found.get("refused", "") for each in NO_KERNEL):
            again = attempt(name, spec)
            done[name] = {"refused": found["refused"], "tokens": again.get("tokens", again.get("refused"))}
    return done


if __name__ == "__main__":
    print("RESULT " + json.dumps(run_all(json.loads(sys.argv[1]))))
