"""The products at few rows against plain torch in float32: every kernel, ragged shapes, padding rows, graphs."""

import itertools
from dataclasses import dataclass

import pytest
import torch

pytest.importorskip("triton", reason="the kernels are written in Triton: pip install triton")

from faser.errors import ConfigError
from faser.models import layers
from faser.runtime.cuda import linear
from faser.runtime.cuda.linear import LinearWorkspace
from faser.runtime.cuda.linear_plans import CUBLAS, MAX_SPLIT_PROGRAMS, NUM_SMS, TILE_ROWS, Plan, choose

EPS = 1e-5
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}  # of the norm of the result

ROW_PLANS = {
    "chunks": Plan("chunks", 8, 64, 2),
    "persistent, in one step": Plan("persistent", 16, 256, 2, programs=5),
    "persistent, in two steps": Plan("persistent", 8, 256, 2, programs=6),
    "persistent, in many steps": Plan("persistent", 4, 256, 1, programs=3),
}
TILE_PLANS = {
    "tiles": Plan("tiles", 64, 64, 4, num_stages=2),
    "tiles that split K": Plan("tiles", 64, 32, 4, split=4, num_stages=3),
    "cublas": CUBLAS,
}
ODD, EVEN, TINY = (75, 200), (64, 256), (33, 51)  # N, K
CASES = [(name, rows, shape) for name in ROW_PLANS for rows, shape in ((1, ODD), (2, EVEN), (5, TINY))]
CASES += [(name, rows, ODD) for name in TILE_PLANS for rows in (1, 2, 5, 16)]
CASES += [(name, rows, shape) for name in TILE_PLANS for rows, shape in ((17, TINY), (64, EVEN), (64, ODD))]


@dataclass
class Layer:
    """Random weights for one product of each kind, and rows to go through them."""

    x: torch.Tensor  # [R, K]
    norm: torch.Tensor  # [K]
    weight: torch.Tensor  # [N, K]
    gate_up: torch.Tensor  # [2 * N, K]
    bias: torch.Tensor  # [N]
    residual: torch.Tensor  # [R, N]

    @classmethod
    def random(cls, num_rows, n, k, place, seed=0):
        device, dtype = place
        generator = torch.Generator().manual_seed(seed)

        def make(*shape):
            return torch.randn(shape, generator=generator).to(device, dtype)

        norm = (1 + 0.1 * torch.randn(k, generator=generator)).to(device, dtype)
        weight, gate_up = make(n, k) / k**0.5, make(2 * n, k) / k**0.5
        return cls(make(num_rows, k), norm, weight, gate_up, make(n), make(num_rows, n))

    def normed(self):
        return layers.rms_norm(self.x.float(), self.norm.float(), EPS)


def unwritten(num_rows, n, like):
    return torch.full((num_rows, n), torch.nan, device=like.device, dtype=like.dtype)


def scratch(layer, n):
    """normed and gate_up, not yet written."""
    num_rows, k = layer.x.shape
    return unwritten(num_rows, k, layer.x), unwritten(num_rows, 2 * n, layer.x)


def assert_near(out, expected):
    error = (out.float() - expected).norm() / expected.norm()
    assert error < TOLERANCE[out.dtype], f"relative error {error:.2e}"


def assert_all_near(layer, workspace=None, plan=None):
    """Every product of the layer with one plan, or with the chosen plans."""
    num_rows, n = layer.residual.shape
    normed, gate_up = scratch(layer, n)
    out = unwritten(num_rows, n, layer.x)
    weight = layer.weight.float()

    linear.norm_linear(layer.x, layer.norm, EPS, layer.weight, layer.bias, out, normed, workspace, plan)
    assert_near(out, layer.normed() @ weight.T + layer.bias.float())
    linear.norm_linear(layer.x, layer.norm, EPS, layer.weight, None, out.fill_(torch.nan), normed, workspace, plan)
    assert_near(out, layer.normed() @ weight.T)

    whole = plan if plan is None or plan.split == 1 else Plan("tiles", 64, plan.block_k, num_stages=2)
    linear.norm_gate_up(layer.x, layer.norm, EPS, layer.gate_up, out.fill_(torch.nan), normed, gate_up, whole)
    assert_near(out, layers.silu_mul(layer.normed() @ layer.gate_up.float().T))

    logits = unwritten(num_rows, n, torch.empty(0, device=out.device))
    linear.norm_linear(layer.x, layer.norm, EPS, layer.weight, None, logits, normed, None, whole, product="head")
    error = (logits - layer.normed() @ weight.T).norm() / logits.norm()
    assert error < TOLERANCE[out.dtype]

    added = layer.residual.clone()
    linear.linear_residual(layer.x, layer.weight, added, layer.bias, workspace, plan)
    assert_near(added, layer.residual.float() + layer.x.float() @ weight.T + layer.bias.float())


@pytest.mark.parametrize(("name", "num_rows", "shape"), CASES)
def test_every_kernel_computes_the_product(name, num_rows, shape, place):
    workspace = LinearWorkspace.allocate(place[0])
    assert_all_near(Layer.random(num_rows, *shape, place), workspace, (ROW_PLANS | TILE_PLANS)[name])
    assert not workspace.counters.any()


@pytest.mark.parametrize("num_rows", [1, 2, 3, 5, 64, 65])
def test_the_plans_chosen_for_a_small_model_are_right(num_rows, place):
    assert_all_near(Layer.random(num_rows, 72, 144, place), LinearWorkspace.allocate(place[0]))


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 2, 4, 5, 16, 17, 64, 128])
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((3072, 2048), torch.bfloat16),
        ((2048, 8192), torch.float16),
        ((4096, 14336), torch.bfloat16),
        ((5120, 5120), torch.bfloat16),
        ((5120, 25600), torch.bfloat16),
        ((8512, 8192), torch.bfloat16),
        ((1024, 3072), torch.bfloat16),
        ((3072, 2048), torch.float32),
    ],
)
def test_the_plans_chosen_for_real_shapes_are_right(shape, dtype, num_rows):
    layer = Layer.random(num_rows, *shape, ("cuda", dtype))
    assert_all_near(layer, LinearWorkspace.allocate("cuda"))
    assert_all_near(layer)


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 2, 4, 16, 64, 128])
def test_kernels_that_overlap_in_a_graph_give_the_bits_of_kernels_that_do_not(num_rows):
    place = ("cuda", torch.bfloat16)
    stack = [
        (Layer.random(num_rows, 1024, 2048, place, i), Layer.random(num_rows, 2048, 1024, place, i)) for i in range(6)
    ]
    workspace = LinearWorkspace.allocate("cuda")
    hidden, start = torch.empty_like(stack[0][0].x), stack[0][0].x
    normed, gate_up = scratch(stack[0][0], 1024)
    activated = unwritten(num_rows, 1024, hidden)

    def run(pause):
        hidden.copy_(start)
        for into, back in stack:
            linear.norm_gate_up(hidden, into.norm, EPS, into.gate_up, activated, normed, gate_up)
            pause()
            linear.linear_residual(activated, back.weight, hidden, None, workspace)
            pause()
            linear.norm_linear(hidden, into.norm, EPS, into.weight, into.bias, activated, normed, workspace)
            pause()
            linear.linear_residual(activated, back.weight, hidden, back.bias, workspace)
            pause()

    run(torch.cuda.synchronize)
    expected = hidden.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(lambda: None)
    for _ in range(50):
        hidden.fill_(torch.nan)
        graph.replay()
        assert torch.equal(hidden, expected)


def test_norms_and_activation_around_cublas(place):
    layer = Layer.random(5, 75, 200, place)
    out = unwritten(5, 200, layer.x)
    linear.rms_norm(layer.x, layer.norm, EPS, out)
    assert_near(out, layer.normed())

    halved = unwritten(5, 100, layer.x)
    linear.silu_mul(layer.x, halved)
    assert_near(halved, layers.silu_mul(layer.x.float()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("k", [576, 896, 1024, 2048, 4096, 5120, 8192, 14336, 25600])
def test_every_chosen_plan_fits_its_buffers(k, dtype):
    products = ("norm", "gate_up", "residual", "head")
    outputs = (1, 192, 1536, 2048, 3072, 5120, 6656, 10240, 25600, 128256)
    rows, parts = (1, 2, 3, 4, 5, 8, 16, 17, 32, 33, 64, 65, 256), (0, 8, 32, 68, 100, 156)
    for product, n, num_rows, num_sms in itertools.product(products, outputs, rows, parts):
        plan = choose(product, num_rows, n, k, dtype, num_sms=num_sms)
        assert plan.split == 1 or -(-n // plan.block_n) * plan.split <= MAX_SPLIT_PROGRAMS
        assert plan.split == 1 or (product == "residual" and plan.split * plan.block_k <= k)
        assert plan.kernel != "tiles" or num_rows <= TILE_ROWS
        if plan.kernel == "persistent":
            assert plan.block_k >= k
            assert plan.programs * plan.block_n >= n or plan.programs <= 4 * (num_sms or NUM_SMS), "they run at once"
        assert choose(product, num_rows, n, k, dtype, can_split=False, num_sms=num_sms).split == 1


def test_a_gpu_with_less_shared_memory_loads_less_ahead(monkeypatch):
    """Triton refuses a kernel that needs more shared memory than the GPU has."""
    launched = []
    monkeypatch.setattr(linear, "_shared_bytes", lambda device: 48 * 1024)
    monkeypatch.setattr(linear, "tiles_kernel", {(2, 1): lambda *args, **options: launched.append(options["STAGES"])})
    layer = Layer.random(5, 75, 200, ("cpu", torch.bfloat16))
    for plan in Plan("tiles", 64, 64, num_stages=8), Plan("tiles", 64, 512, num_stages=3):
        linear.norm_linear(layer.x, layer.norm, EPS, layer.weight, None, layer.residual, layer.x, None, plan)
    assert launched == [4, 1]  # of 10 KB each, and of 80


def test_strided_rows_are_refused(place):
    layer = Layer.random(4, 75, 200, place)
    with pytest.raises(ConfigError, match="contiguous"):
        linear.linear_residual(layer.x[:, :100], layer.weight[:, :100], layer.residual, plan=ROW_PLANS["chunks"])
