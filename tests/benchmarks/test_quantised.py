"""What benchmarks/quantised.py measures and says; speed itself is measured elsewhere."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks import quantised


def test_it_all_runs_on_a_tiny_model(capsys):
    with torch.inference_mode():
        quantised.main(["--tiny", "--device", "cpu", "--formats", "bf16", "fp8-block", "int4"])
    *said, last = capsys.readouterr().out.strip().splitlines()
    document = json.loads(last)
    kinds = ("bf16", "fp8-block", "int4")
    found = [(each["format"], each["rows"], each["product"]) for each in document["products"]]
    assert found == [(kind, rows, name) for kind in kinds for rows in (1, 4) for name in quantised.PARTS]
    assert [(each["format"], each["rows"]) for each in document["steps"]] == [(k, r) for k in kinds for r in (1, 4)]
    assert all(each["speedup"] == 1 for each in document["steps"] if each["format"] == "bf16")
    assert all(each["of_floor"] > 0 for each in document["products"] + document["steps"])
    assert len(said) == 2 + len(document["products"]) + len(document["steps"])


def test_the_floor_of_a_product_is_the_bytes_of_its_weights():
    shape = quantised.MODELS["tiny"]
    sizes = []
    for kind in ("fp8-channel", "int4"):
        matrix = quantised.FORMATS[kind](torch.randn(2 * shape.intermediate_size, shape.hidden_size))
        sizes.append(quantised.num_bytes(matrix))
    weights = 2 * shape.intermediate_size * shape.hidden_size
    assert sizes == [weights + 4 * 2 * shape.intermediate_size, weights // 2 + 2 * 2 * shape.intermediate_size]


@pytest.mark.parametrize("name", ["down", "gate_up"])
@pytest.mark.parametrize("num_rows", [1, 64])
def test_plans_to_try_fit_the_memory_that_products_share(name, num_rows):
    # here, because modules with kernels ask when they are imported whether Triton's interpreter is to run them
    from benchmarks.lib.quantised_cuda import LinearWorkspace, candidates
    from faser.runtime.cuda.quantised_plans import padded

    partials = LinearWorkspace.allocate("cpu").partials.numel()
    plans = list(candidates("int4", num_rows, name, (4096, 14336)))
    assert {plan.block_n for plan in plans} >= {16, 32, 64}
    assert len(plans) == len(set(plans))
    for plan in plans:
        assert plan.split == 1 or 4096 // plan.block_n * plan.split * plan.block_n * padded(num_rows) <= partials
        assert plan.split == 1 or name == "down"
