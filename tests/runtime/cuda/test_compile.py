"""Compiling ahead: the kernels of a dry run are compiled, and nothing is launched."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter

import pytest
import torch

triton = pytest.importorskip("triton")

from faser.runtime.cuda.compile import compile_all  # noqa: E402
from faser.runtime.cuda.linear import rms_norm  # noqa: E402


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """The output of tests/runtime/cuda/cross_compile.py."""
    cache = str(tmp_path_factory.mktemp("triton"))
    env = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": cache}
    command = [sys.executable, "-m", "tests.runtime.cuda.cross_compile"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_every_variant_is_compiled_once_and_nothing_is_launched(compiled):
    assert compiled["cubins"].count("norm_kernel") == 2
    assert compiled["cubins"].count("silu_mul_kernel") == 1
    assert compiled["untouched"]


def test_attention_is_compiled_once_however_it_is_split(compiled):
    assert compiled["cubins"].count("attend_kernel") == 1


def test_kernels_of_one_signature_share_a_launcher(compiled):
    assert set(compiled["launchers"]) == {"norm_kernel", "silu_mul_kernel", "attend_kernel"}


def test_other_kernels_are_compiled_if_a_kernel_or_a_run_fails(compiled):
    # five kernels, the impossible one among them
    assert compiled["steps"] == [[done, 5] for done in range(1, 6)]


def test_the_kernels_of_a_target_with_eyes_compile(compiled):
    assert {"_replace_kernel", "_angles_kernel", "rotate_kernel"} <= set(compiled["seeing"])


def test_attention_over_windows_compiles(compiled):
    assert Counter(compiled["windows"]) - Counter(compiled["rounded KV"]) == {"attend_kernel": 10}


def test_attention_over_heads_of_any_size_compiles(compiled):
    new = Counter(compiled["uneven heads"]) - Counter(compiled["quantised"])
    assert new == {"attend_kernel": 6, "rotate_kernel": 2}


def test_the_kernel_of_prompt_lookup_compiles(compiled):
    assert compiled["looking up"].count("_write_kernel") == 1


def test_the_kernels_of_eight_bit_keys_and_values_compile_once_for_all_scales(compiled):
    new = Counter(compiled["rounded KV"]) - Counter(compiled["looking up"])
    assert new == {"attend_kernel": 2, "rotate_kernel": 1, "_move_kernel": 1}


def test_the_kernels_of_quantised_weights_compile(compiled):
    kernels = ("round_rows_kernel", "fp8_tiles_kernel", "group_tiles_kernel", "dequantise_kernel")
    counts = {kernel: compiled["quantised"].count(kernel) for kernel in kernels}
    assert set(counts.values()) == {2}  # one matrix that is added to a residual, and one of gate and up


def test_a_kernel_is_not_compiled_twice(compiled):
    assert compiled["again"] == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter serves where there is no CUDA device")
def test_in_the_interpreter_nothing_is_run():
    compile_all([lambda: pytest.fail("was run")])


@pytest.mark.gpu
def test_a_launch_after_a_dry_run_compiles_nothing(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    compilations = []
    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", lambda **what: compilations.append(what["repr"]))
    x = torch.randn(3, 328, device="cuda", dtype=torch.bfloat16)  # a size no other test has
    out = torch.full_like(x, 7)
    weight = torch.randn(328, device="cuda", dtype=torch.bfloat16)
    compile_all([lambda: rms_norm(x, weight, 1e-5, out)])
    torch.cuda.synchronize()
    assert len(compilations) == 1
    assert (out == 7).all()
    rms_norm(x, weight, 1e-5, out)
    assert len(compilations) == 1
    wanted = torch.nn.functional.rms_norm(x.float(), (328,), weight.float(), 1e-5)
    torch.testing.assert_close(out.float(), wanted, atol=3e-2, rtol=3e-2)
