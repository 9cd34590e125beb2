"""Models with quantised weights on the CUDA executor: the tokens of the CPU's plain products, drafted or not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from faser.build import build_engine
from faser.config import EngineOptions
from faser.models.quantised import Weight
from faser.models.quantised.matrix import Fp8Matrix, plain
from faser.models.quantised.packed import for_cpu
from faser.models.quantised.placement import PARTS, for_gpu, with_weights
from faser.models.quantised.rounding import to_fp8, to_groups
from faser.models.transformer import Transformer
from faser.policy import Fixed
from tests.runtime.cuda.test_executor import chosen, on
from tests.test_exactness import reference, serve
from tests.tiny import CONFIGS

pytest.importorskip("triton")

FORMATS: dict[str, Callable[[torch.Tensor], Weight]] = {
    "fp8 rows": to_fp8,
    "fp8 blocks": lambda weight: to_fp8(weight, 128),
    "int4": lambda weight: to_groups(weight, 4, 32),
    "int4 with zeros": lambda weight: to_groups(weight, 4, 32, symmetric=False),
}


def converted(model: Transformer, convert: Callable[[torch.Tensor], Weight]) -> Transformer:
    """Every matrix of the layers and the head."""
    layers = tuple(
        replace(layer, **{name: convert(plain(getattr(layer, name)).contiguous()) for name in PARTS})
        for layer in model.layers
    )
    return with_weights(model, layers, convert(plain(model.head).contiguous()))


def plain_twin(weight: Weight) -> Weight:
    """On a CPU; rows for 8-bit floats are rounded, as a GPU rounds them."""
    return weight if isinstance(weight, Fp8Matrix) else for_cpu(weight, torch.float32, packs=False)


def cut(tokens: dict[str, list[int]], length: int | None) -> dict[str, list[int]]:
    return {name: some[:length] for name, some in tokens.items()}


@pytest.mark.parametrize("name", FORMATS)
def test_requests_get_the_tokens_of_the_plain_products(name, device):
    """The draft is quantised too, and agrees with its target."""
    from faser.runtime.cuda.device import CudaDevice

    def on_device(weight: torch.Tensor) -> Weight:
        kept = for_gpu(FORMATS[name](weight), torch.device(device))
        assert kept is not None
        return kept

    sizes = {"head_dim": 16, "hidden_size": 64, "intermediate_size": 128}
    config = replace(CONFIGS["llama3"], **sizes, num_layers=1 if device == "cpu" else 3)
    model = Transformer.random(config, 0, std=0.3)
    requests = [r for r in chosen(model, device) if device == "cuda" or r.id == "sampled"]
    expected = reference(converted(model, lambda w: plain_twin(FORMATS[name](w))), requests)
    moved = model if device == "cpu" else on(model, device)
    options = EngineOptions(
        policy=Fixed(2), max_running=2, max_batch_tokens=16, max_step_ms=0, page_size=4, num_pages=300
    )
    place = CudaDevice()
    place.runs_ahead = False
    engine = build_engine(converted(moved, on_device), converted(moved, on_device), options, None, place)
    outcome = serve(engine, requests, {request.id: i for i, request in enumerate(requests)})
    # A GPU sums products of 8-bit floats with fewer bits, and rows rounded to 8 bits make much of a small difference.
    first = 4 if device == "cuda" and name.startswith("fp8") else None
    assert cut(outcome.tokens, first) == cut(expected.tokens, first)
    assert outcome.total.accepted > 0
