"""Compiles kernels for an absent GPU, in a process of its own: the process of the tests runs them in the interpreter.

Prints what came of it as one JSON line. Tensors are the CPU's, so a kernel that is launched after all would crash.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from faser.limits import KeyWindow
from faser.models.config import Rope
from faser.models.quantised.placement import for_gpu
from faser.models.transformer import Transformer
from faser.runtime.cuda import linear, quantised
from faser.runtime.cuda.attention import AttentionConfig, Memory, Tiles, Windowed, attend, rotate_and_write
from faser.runtime.cuda.compile import compile_all
from faser.runtime.cuda.linear import rms_norm, silu_mul
from faser.runtime.cuda.linear_plans import CUBLAS, Plan
from faser.runtime.cuda.lookup import CudaLookupDrafter
from faser.runtime.cuda.page_moves import move_pages
from faser.runtime.cuda.rows import DeviceRows
from faser.runtime.cuda.sampling import Slots
from faser.runtime.cuda.vision import CudaEyes, RowAngles
from faser.runtime.kv_cache import ROUNDED
from faser.step import PageMoves
from tests.models.quantised.matrices import every_kind
from tests.tiny import VISION_CONFIGS

launchers: list[str] = []


class Driver:
    """What the compiler asks of a GPU."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def launcher_cls(self, source, metadata) -> None:
        launchers.append(source.fn.__name__)


@triton.jit
def _impossible_kernel(out):
    tl.static_assert(False, "never")
    tl.store(out, 1.0)


def rows(size: int) -> torch.Tensor:
    return torch.full((2, size), 7.0, dtype=torch.bfloat16)


def attend_with(
    rows_per_tile: int,
    num_splits: int,
    num_tiles: int,
    windowed: Windowed | None = None,
    block_m: int = 16,
    dtype: torch.dtype = torch.bfloat16,
    head_dim: int = 16,
    **more: Any,
) -> None:
    """Rows of two heads over pages of 4."""
    config = AttentionConfig(rows_per_tile, block_m, 16, num_splits, num_splits, 16, 4, 2)
    qkv, pages = torch.zeros(8, 4, head_dim, dtype=torch.bfloat16), torch.zeros(3, 4, 2, head_dim, dtype=dtype)
    counts = torch.zeros(9, dtype=torch.int32)
    tiles = Tiles(*(counts[:num_tiles] for _ in range(6)), counts[num_tiles : num_tiles + 1])
    workspace = Memory("cpu").workspace(config, 8, num_tiles, 2, 1, head_dim)
    table = torch.zeros(4, 16, dtype=torch.int32)
    attend(qkv, pages, table, tiles, rows(2 * head_dim), workspace, config, windowed=windowed, **more)


HEADS = ({"first_key": 1}, {"sees_all": True})


def windows() -> list[Callable[[], None]]:
    """A draft with sinks and a target without, in small tiles and in large ones; heads of both kinds."""
    starts, turns = torch.zeros(4, dtype=torch.int32), torch.zeros(64, 8)
    draft = Windowed(KeyWindow(24, 4), starts, turns, turns, 1.0)
    target = Windowed(KeyWindow(24), None, turns, turns, 1.0)
    shapes = [(1, 1, 1, 16), (8, 3, 1, 16), (32, 3, 1, 64)]
    of_models = [
        partial(attend_with, rows, splits, tiles, each, block)
        for each in (draft, target)
        for rows, splits, tiles, block in shapes
    ]
    of_heads = [partial(attend_with, *shape, draft, **seen) for shape in [(1, 1, 1), (8, 3, 1)] for seen in HEADS]
    return of_models + of_heads


def uneven_heads() -> list[Callable[[], None]]:
    """Heads of 80 numbers, in pages of bfloat16 and of 8-bit floats: few rows, many rows, a window, a write."""
    rows, turns = DeviceRows.allocate(2, 8, 8, "cpu"), torch.zeros(64, 40)
    window = Windowed(KeyWindow(24, 4), None, turns, turns, 1.0)
    qkv = torch.zeros(8, 4, 80, dtype=torch.bfloat16)
    places = rows.positions, rows.slots, rows.num_rows, torch.zeros(4, 16, dtype=torch.int32), turns, turns
    runs: list[Callable[[], None]] = []
    for dtype in (torch.bfloat16, ROUNDED):
        runs += [
            partial(attend_with, 1, 2, 1, dtype=dtype, head_dim=80),
            partial(attend_with, 32, 2, 1, block_m=64, dtype=dtype, head_dim=80),
            partial(attend_with, 32, 2, 1, window, 64, dtype, 80),
            partial(rotate_and_write, qkv, *places, torch.zeros(3, 4, 2, 80).to(dtype), overlap=True),
        ]
    return runs


def seeing() -> list[Callable[[], None]]:
    """What a target with eyes does in a forward."""
    model = Transformer.random(replace(VISION_CONFIGS["qwen2_vl"], head_dim=16, rope=Rope(sections=(2, 3, 3))), 0)
    assert model.vision is not None
    rows, history = DeviceRows.allocate(2, 8, 8, "cpu"), torch.zeros(4, 64, dtype=torch.int32)
    eyes, angles = CudaEyes(model.vision, 32, 32, history), RowAngles(model, 8, history)
    qkv, pages = torch.zeros(8, 8, 16), torch.zeros(3, 4, 4, 16)
    table = torch.zeros(4, 16, dtype=torch.int32)
    places = rows.positions, rows.slots, rows.num_rows, table
    return [
        lambda: eyes.replace_rows(rows, torch.zeros(8, 32)),
        lambda: angles.compute(rows),
        lambda: rotate_and_write(qkv, *places, angles.cos, angles.sin, pages, by_row=True, overlap=True),
    ]


def rounded_kv() -> list[Callable[[], None]]:
    """Pages of 8-bit floats: few rows, many rows, and what writes them."""
    rows = DeviceRows.allocate(2, 8, 8, "cpu")
    qkv, pages = torch.zeros(8, 4, 16, dtype=torch.bfloat16), torch.zeros(3, 4, 2, 16).to(ROUNDED)
    places, angles = (
        (rows.positions, rows.slots, rows.num_rows, torch.zeros(4, 16, dtype=torch.int32)),
        torch.zeros(9, 8),
    )
    return [
        lambda: attend_with(1, 2, 1, dtype=ROUNDED),
        lambda: attend_with(32, 2, 1, dtype=ROUNDED, block_m=64),
        lambda: rotate_and_write(qkv, *places, angles, angles, pages, overlap=True, kv_scales=(0.5, 0.25)),
        lambda: rotate_and_write(qkv, *places, angles, angles, pages, overlap=True, kv_scales=(2.0, 4.0)),
        lambda: move_pages(pages[None], PageMoves(np.zeros(1, np.int64), np.ones(1, np.int64))),
    ]


def quantised_products() -> list[Callable[[], None]]:
    """One row of bfloat16 through two formats, launched early; codes also by cuBLAS."""
    quantised._has_pairs = lambda x: True
    quantised.dependent_launch = lambda x: {"EARLY": True, "launch_pdl": True}
    return [partial(multiply, *each) for each in (("fp8 blocks", None), ("symmetric", None), ("symmetric", CUBLAS))]


def multiply(kind: str, plan: Plan | None) -> None:
    x = torch.zeros(1, 256, dtype=torch.bfloat16)
    matrix, gate_up = (for_gpu(every_kind(n, 256)[kind], x.device) for n in (256, 512))
    assert matrix is not None
    assert gate_up is not None
    workspace = linear.LinearWorkspace.allocate("cpu", [matrix, gate_up], 1)
    linear.linear_residual(x, matrix, x.clone(), None, workspace, plan)
    linear.norm_gate_up(x, x[0], 1e-5, gate_up, x.clone(), x.clone(), x.repeat(1, 2), plan, workspace=workspace)


def cubins() -> list[str]:
    return [path.stem for path in Path(triton.knobs.cache.dir).rglob("*.cubin")]


def fails() -> None:
    raise RuntimeError("no such buffer")


def main() -> None:
    driver.set_active(Driver())
    small, large, out = rows(64), rows(128), rows(64)
    runs = [
        lambda: rms_norm(small, small[0], 1e-5, out),
        lambda: rms_norm(small[:1], small[1], 1e-5, out),  # the same variant
        lambda: rms_norm(large, large[0], 1e-5, rows(128)),
        lambda: _impossible_kernel[(1,)](out),
        lambda: silu_mul(large, out),
        lambda: attend_with(rows_per_tile=1, num_splits=2, num_tiles=1),
        lambda: attend_with(rows_per_tile=2, num_splits=3, num_tiles=8),
        lambda: attend_with(rows_per_tile=8, num_splits=16, num_tiles=4),
        fails,
    ]
    steps, again = [], []
    compile_all(runs, lambda done, total: steps.append((done, total)))
    compile_all(runs[:3], lambda done, total: again.append((done, total)))
    found = {"cubins": cubins(), "launchers": list(launchers), "steps": steps, "again": again}
    compile_all(seeing())
    found["seeing"] = cubins()
    compile_all(CudaLookupDrafter(None, Slots.allocate(2, 8, "cpu")).dry_runs())
    found["looking up"] = cubins()
    compile_all(rounded_kv())
    found["rounded KV"] = cubins()
    compile_all(windows())
    found["windows"] = cubins()
    compile_all(quantised_products())
    found["quantised"] = cubins()
    compile_all(uneven_heads())
    print(json.dumps({**found, "uneven heads": cubins(), "untouched": bool((out == 7).all())}))


if __name__ == "__main__":
    main()
