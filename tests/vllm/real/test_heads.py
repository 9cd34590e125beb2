"""Draft heads that FASER writes, loaded by vLLM: the same drafts, the same text, as many accepted tokens."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from faser import LLM, SamplingParams
from faser.models.heads import DraftHead, load_head, read_head_config
from faser.models.source import open_target
from faser.models.transformer import Transformer
from tests.tools.heads.toys import drafted
from tests.vllm.real.heads import DSPARK, LENGTH, RANDOM, TRAINED, HeadFolder
from tests.vllm.real.test_drafting import vllm_version

ROOT = Path(__file__).parents[3]
MAX_TOKENS = {False: 60, True: 16}  # by whether Triton is interpreted
Engines = dict[str, dict[str, Any]]


def run_engines(folder: Path, heads: tuple[HeadFolder, ...], v2: bool = False) -> Engines:
    """What vLLM made of each head; `none` is vLLM without a draft."""
    spec = {"folder": str(folder), "v2": v2, "max_tokens": MAX_TOKENS[v2]}
    spec["heads"] = [None, *((head.name, head.method) for head in heads)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "VLLM_LOGGING_LEVEL": "WARNING"}
    command = [sys.executable, "-m", "tests.vllm.real.head_engine", json.dumps(spec)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    results = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert results, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads(results[-1].removeprefix("RESULT "))


@pytest.fixture(scope="module")
def prompts(heads) -> list[list[int]]:
    return json.loads((heads / "prompts.json").read_text())


@pytest.fixture(scope="module")
def target(heads) -> Transformer:
    return open_target(str(heads / "target")).load(torch.float32, 128, lambda *_: None, "cpu")


@pytest.fixture(scope="module")
def engines(heads) -> Engines:
    return run_engines(heads, (*TRAINED, *RANDOM))


@pytest.fixture(scope="module")
def interpreted(heads) -> Engines:
    if vllm_version() != "0.32":
        pytest.skip("the V2 runner of vLLM 0.26 is not run in Triton's interpreter")
    return run_engines(heads, DSPARK, v2=True)


def load(folder: Path, target: Transformer) -> DraftHead:
    config = read_head_config(folder)
    assert config is not None
    return load_head(folder, config, target, torch.float32)


def assert_same_drafts(done: dict[str, Any], head: DraftHead, target: Transformer, texts: list[Tensor]) -> None:
    """Every draft of vLLM is the one that our head makes on the same context."""
    assert len(done["drafts"]) >= done["steps"] > 0
    for index, num_tokens, drafts in done["drafts"]:
        context = texts[index][:num_tokens]
        assert drafts == drafted(head, target, context, LENGTH, 0.0, 0), (index, num_tokens)


def texts_of(prompts: list[list[int]], done: dict[str, Any]) -> list[Tensor]:
    return [torch.tensor(prompt + tokens) for prompt, tokens in zip(prompts, done["tokens"], strict=True)]


@pytest.mark.parametrize("head", [*TRAINED, *RANDOM], ids=lambda head: head.name)
def test_vllm_drafts_with_a_head_what_ours_drafts(heads, target, prompts, engines, head):
    done, plain = engines[head.name], engines["none"]
    assert done["tokens"] == plain["tokens"]
    assert_same_drafts(done, load(heads / head.name, target), target, texts_of(prompts, plain))


@pytest.mark.parametrize("head", DSPARK, ids=lambda head: head.name)
def test_vllm_drafts_with_dspark_what_ours_drafts(heads, target, prompts, interpreted, head):
    done, plain = interpreted[head.name], interpreted["none"]
    assert done["tokens"] == plain["tokens"]
    assert_same_drafts(done, load(heads / head.name, target), target, texts_of(prompts, plain))


@pytest.mark.parametrize("head", TRAINED, ids=lambda head: head.name)
def test_faser_s_engine_writes_the_same_text_in_as_many_steps(heads, prompts, engines, head):
    """So as many drafts are accepted. vLLM also counts drafts behind the last token, which FASER does not make."""
    done = engines[head.name]
    llm = LLM(
        str(heads / "target"), draft=str(heads / head.name), policy=f"fixed:{LENGTH}", device="cpu", dtype="float32"
    )
    with llm:
        outputs = llm.generate(prompts, SamplingParams(max_tokens=MAX_TOKENS[False], temperature=0.0, ignore_eos=True))
    assert [list(output.token_ids) for output in outputs] == done["tokens"]
    steps = sum(output.stats.steps for output in outputs) - len(prompts)  # one step of each reads the prompt
    assert steps == done["steps"]
    accepted = sum(output.stats.accepted for output in outputs)
    assert 0 <= done["accepted"] - accepted <= LENGTH * len(prompts)
    assert accepted > 0.3 * steps
