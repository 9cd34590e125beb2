"""Quantised folders, those of tools/quantise.py and those of every layout that FASER reads, in vLLM on a CPU.

vLLM mostly computes in bfloat16, so its texts may part from ours at near-ties. So each of its tokens is compared with
the best one of our model on the same context, in float32, with rows of 8-bit floats rounded as vLLM rounds them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.perplexity import logits_of
from faser.models.config import ModelConfig
from faser.models.quantised import dequantise
from faser.models.quantised.matrix import QuantisedMatrix, fp8_scale, round_fp8
from faser.models.quantised.placement import PARTS, with_weights
from faser.models.source import open_target
from faser.models.transformer import Transformer
from tests.checkpoint import write_tokenizer
from tests.models.quantised.layouts import LAYOUTS, VOCAB, write_layout
from tools import quantise
from tools.inflate import write_folder

ROOT = Path(__file__).parents[3]
WRITTEN = tuple(kind for kind in quantise.FORMATS if kind != "plain")
# vLLM takes GPTQ of four bits with the zero point 8 alone, and blocks whose rows are whole for each of q, k and v.
READ = [name for name in LAYOUTS if name != "fp8 blocks" and (not name.startswith("gptq") or "symmetric" in name)]
PROMPT, OUTPUT, NUM_PROMPTS = 9, 24, 6
GAP = 0.1  # of a token of vLLM to the best one, in standard deviations of the logits
SHAPE = ModelConfig(
    family="llama", vocab_size=320, hidden_size=128, num_layers=2, num_heads=4, num_kv_heads=4, head_dim=32,
    intermediate_size=256, norm_eps=1e-5, max_positions=128, eos_token_ids=(2,),
)  # fmt: skip


def make_prompts(vocabulary: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(3, vocabulary, (NUM_PROMPTS, PROMPT), generator=generator).tolist()


def dtype_of(name: str) -> str:
    """Rounded rows make much of small differences, so float32 where vLLM takes it."""
    return "float32" if name.startswith(("fp8-channel", "fp8-static", "compressed fp8")) else "bfloat16"


def run_engines(folders: dict[str, Path], vocabulary: int) -> dict[str, dict[str, Any]]:
    spec = {"folders": {name: [str(path), dtype_of(name)] for name, path in folders.items()}, "max_tokens": OUTPUT}
    spec["prompts"] = make_prompts(vocabulary)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "VLLM_LOGGING_LEVEL": "WARNING"}
    command = [sys.executable, "-m", "tests.vllm.real.quantised_engine", json.dumps(spec)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    results = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert results, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads(results[-1].removeprefix("RESULT "))


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> dict[str, Path]:
    """A folder in each format of tools/quantise.py, of one model."""
    path = tmp_path_factory.mktemp("written")
    write_folder(Transformer.random(SHAPE, 0, std=0.2), path / "original")
    write_tokenizer(path / "original")
    (path / "text.txt").write_text("the quick brown fox jumps over the lazy dog " * 20)
    for kind in WRITTEN:
        learns = ["--calibrate", str(path / "text.txt")] if kind == "fp8-static" else []
        assert quantise.main([str(path / "original"), str(path / kind), "--format", kind, *learns]) == 0
    return {kind: path / kind for kind in WRITTEN}


@pytest.fixture(scope="module")
def engines(written) -> dict[str, dict[str, Any]]:
    return run_engines(written, SHAPE.vocab_size)


@pytest.fixture(scope="module")
def layouts(tmp_path_factory) -> dict[str, Path]:
    folders = {name: tmp_path_factory.mktemp("layout") for name in READ}
    for name, folder in folders.items():
        write_layout(folder, name)
    return folders


@pytest.fixture(scope="module")
def layout_engines(layouts) -> dict[str, dict[str, Any]]:
    return run_engines(layouts, VOCAB)


@dataclass(frozen=True)
class RoundsRows(QuantisedMatrix):
    """A dequantised matrix whose products round their rows to 8-bit floats."""

    weight: Tensor  # [N, K]
    input_scale: Tensor | None  # None: one for each row

    @property
    def shape(self) -> tuple[int, int]:
        return self.weight.shape[0], self.weight.shape[1]

    @property
    def format(self) -> str:
        return "rounded rows"

    def dequantise(self) -> Tensor:
        return self.weight

    def product(self, x: Tensor) -> Tensor:
        scale = fp8_scale(x.abs().amax(-1, keepdim=True)) if self.input_scale is None else self.input_scale
        return torch.nn.functional.linear(round_fp8(x, scale), self.weight)

    def select(self, rows: slice | Tensor) -> RoundsRows:
        return RoundsRows(self.weight[rows], self.input_scale)


def with_rounded_rows(model: Transformer, folder: Path) -> Transformer:
    tensors, layers = load_file(folder / "model.safetensors"), []
    for index, layer in enumerate(model.layers):
        scales = {name: tensors.get(f"model.layers.{index}.{parts[0]}.input_scale") for name, parts in PARTS.items()}
        changed = {name: RoundsRows(dequantise(getattr(layer, name)), scale) for name, scale in scales.items()}
        layers.append(replace(layer, **changed))
    return with_weights(model, tuple(layers), model.head)


@torch.inference_mode()
def gaps(folder: Path, texts: list[list[int]], vocabulary: int, rounds_rows: bool = False) -> Tensor:
    """[tokens]: by how much our model prefers its own token to that of the text, in standard deviations of logits."""
    model = open_target(str(folder)).load(torch.float32, 64, lambda *_: None, "cpu", "off")
    model = with_rounded_rows(model, folder) if rounds_rows else model
    found = []
    for prompt, text in zip(make_prompts(vocabulary), texts, strict=True):
        logits = logits_of(model, torch.tensor(prompt + text[:-1]))[PROMPT - 1 :]
        chosen = logits.gather(1, torch.tensor(text)[:, None])[:, 0]
        found.append((logits.max(dim=-1).values - chosen) / logits.std())
    return torch.cat(found)


def assert_near_ties(done: dict[str, Any], folder: Path, vocabulary: int, rounds_rows: bool) -> None:
    assert isinstance(done.get("tokens"), list), done
    found = gaps(folder, done["tokens"], vocabulary, rounds_rows)
    print(f"{(found > 0).sum()} of {len(found)} tokens are not ours; largest gap {found.max():.4f}")
    assert found.max() < GAP
    assert (found == 0).float().mean() > 0.9


@pytest.mark.parametrize("kind", WRITTEN)
def test_vllm_reads_what_tools_quantise_writes(written, engines, kind):
    assert_near_ties(engines[kind], written[kind], SHAPE.vocab_size, kind in ("fp8-channel", "fp8-static"))


@pytest.mark.parametrize("name", READ)
def test_vllm_reads_the_layouts_that_we_read(layouts, layout_engines, name):
    assert_near_ties(layout_engines[name], layouts[name], VOCAB, "fp8" in name)


def test_another_text_has_no_near_ties(written, engines):
    """The bounds would notice a wrong layout."""
    other = gaps(written["int4"], engines["fp8-channel"]["tokens"][::-1], SHAPE.vocab_size)
    assert other.max() > 10 * GAP
    assert (other == 0).float().mean() < 0.3


@pytest.mark.parametrize(("kind", "reason"), [("fp8-block", "requires AMX"), ("fp8-static", "narrow() cannot")])
def test_what_a_cpu_refuses_it_refuses_for_its_kernels(engines, kind, reason):
    refused = engines[kind].get("refused")
    if refused is None:
        pytest.skip("this CPU has the kernel")
    assert reason in refused
