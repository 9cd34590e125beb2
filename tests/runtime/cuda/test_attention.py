"""Ragged paged attention against a plain twin that gathers each row's keys and takes a softmax."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="pip install triton")

from faser.limits import KeyWindow
from faser.models.config import Rope
from faser.models.layers import rms_norm_heads_, rope_tables, rotate
from faser.runtime.cuda import attention
from faser.runtime.cuda.attention import AttentionConfig, Memory, Tiles, build_tiles

PAGE_SIZE, NUM_SLOTS, COLUMNS = 4, 6, 24
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
DECODES = [(3, 1), (0, 1), (37, 1), (15, 1)]
MIXED = [(17, 1), (30, 5), (0, 23), (9, 2), (40, 9)]  # (start, rows): decode, verification and prefill
UNEVEN = 12, 80, 96  # head dimensions that are no power of two
PADDED = 7  # rows, requests and tiles past the real ones


@dataclass(frozen=True)
class Shape:
    num_heads: int = 4
    num_kv_heads: int = 1
    head_dim: int = 16


@dataclass
class Step:
    """One layer's inputs, with garbage in the padding and wherever nothing was written yet."""

    shape: Shape
    requests: list[tuple[int, int]]
    slots: np.ndarray  # [B]
    table: torch.Tensor  # [NUM_SLOTS, COLUMNS]
    pages: torch.Tensor  # [num_pages, PAGE_SIZE, 2 * num_kv_heads, head_dim]
    qkv: torch.Tensor  # [R + PADDED, num_heads + 2 * num_kv_heads, head_dim]

    @property
    def start(self):
        return np.array([start for start, _ in self.requests])

    @property
    def counts(self):
        return np.array([count for _, count in self.requests])

    @property
    def num_rows(self):
        return int(self.counts.sum())

    def rows(self):
        """(row, request, position) of every row."""
        pairs = [(i, start + k) for i, (start, count) in enumerate(self.requests) for k in range(count)]
        return [(row, request, position) for row, (request, position) in enumerate(pairs)]

    def entry(self, request, position):
        """The page and the place in it of a request's token."""
        return int(self.table[self.slots[request], position // PAGE_SIZE]), position % PAGE_SIZE


def make_step(shape, requests, place, seed=0):
    device, dtype = place
    random = np.random.default_rng(seed)
    generator = torch.Generator().manual_seed(seed)
    num_rows = sum(count for _, count in requests)
    table = torch.from_numpy(random.permutation(NUM_SLOTS * COLUMNS).astype(np.int32)).view(NUM_SLOTS, COLUMNS)
    pages = torch.full((NUM_SLOTS * COLUMNS, PAGE_SIZE, 2 * shape.num_kv_heads, shape.head_dim), torch.nan)
    pages.view(-1)[::3] = torch.inf
    slots = random.permutation(NUM_SLOTS)[: len(requests)]
    qkv = torch.randn(num_rows, shape.num_heads + 2 * shape.num_kv_heads, shape.head_dim, generator=generator)
    qkv = torch.cat([qkv, torch.full((PADDED, *qkv.shape[1:]), torch.nan)])
    step = Step(shape, requests, slots, table, pages, qkv)
    for request, (start, _) in enumerate(requests):
        for position in range(start):
            page, inside = step.entry(request, position)
            pages[page, inside] = torch.randn(pages.shape[2:], generator=generator)
    return replace(step, table=table.to(device), pages=pages.to(device, dtype), qkv=qkv.to(device, dtype))


def padded(values, num, garbage, device):
    """int32 [len(values) + num], the rest garbage that must not be followed."""
    return torch.tensor([*map(int, values), *[garbage] * num], dtype=torch.int32, device=device)


def make_tiles(step, rows_per_tile):
    device, counts = step.qkv.device, step.counts
    request, offset = build_tiles(counts, rows_per_tile, step.start)
    first_row = counts.cumsum() - counts
    values = [padded(each, PADDED, 10**6, device) for each in (first_row, counts, step.start, step.slots)]
    return Tiles(*values, *(padded(each, PADDED, 10**6, device) for each in (request, offset)),
                 padded([request.size], 0, 0, device))  # fmt: skip


def attend(step, config, first_key=0, windowed=None, **more):
    """The kernel's result for the real rows; the padding must be unchanged."""
    shape, device = step.shape, step.qkv.device
    tiles = make_tiles(step, config.rows_per_tile)
    out = torch.full((len(step.qkv), shape.num_heads * shape.head_dim), 7.0, dtype=step.qkv.dtype, device=device)
    sizes = (shape.num_heads, shape.num_kv_heads, shape.head_dim)
    workspace = Memory(device).workspace(config, len(out), len(tiles.request), *sizes)
    workspace.partial.fill_(torch.nan)
    workspace.log_sums.fill_(torch.nan)
    for _ in range(2):  # the second finds the workspace as the first left it
        out[: step.num_rows] = torch.nan
        more |= {"first_key": first_key, "windowed": windowed}
        attention.attend(step.qkv, step.pages, step.table, tiles, out, workspace, config, **more)
    assert (out[step.num_rows :] == 7).all()
    assert not workspace.arrived.any()
    return out[: step.num_rows]


def plain_attend(step, first_key=0):
    """[R, num_heads * head_dim] in float32, row by row and head by head."""
    shape = step.shape
    out = torch.zeros(step.num_rows, shape.num_heads, shape.head_dim)
    pages, qkv = step.pages.cpu().float(), step.qkv.cpu().float()
    for row, request, position in step.rows():
        # [position + 1 - first_key, 2 * num_kv_heads, head_dim]
        seen = torch.stack([pages[step.entry(request, key)] for key in range(first_key, position + 1)])
        for head in range(shape.num_heads):
            kv_head = head // (shape.num_heads // shape.num_kv_heads)
            scores = seen[:, kv_head] @ qkv[row, head] * shape.head_dim**-0.5
            out[row, head] = scores.softmax(0) @ seen[:, shape.num_kv_heads + kv_head]
    return out.flatten(1)


def write_rows(step):
    """The step's own keys and values, as they are in qkv, to their pages."""
    for row, request, position in step.rows():
        step.pages[step.entry(request, position)] = step.qkv[row, step.shape.num_heads :]


def assert_attends(step, config, first_key=0):
    write_rows(step)
    tolerance = TOLERANCE[step.qkv.dtype]
    found, wanted = attend(step, config, first_key).float().cpu(), plain_attend(step, first_key)
    torch.testing.assert_close(found, wanted, atol=tolerance, rtol=tolerance)


def config_of(shape, rows_per_tile, num_splits=1, min_split=16):
    group = shape.num_heads // shape.num_kv_heads
    block_m = max(16, 1 << (group * rows_per_tile - 1).bit_length())
    return AttentionConfig(rows_per_tile, block_m, 16, num_splits, 1000, min_split, 4, 2)


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(2, 2), (4, 1), (16, 2), (6, 2)])
@pytest.mark.parametrize("num_splits", [1, 3])
def test_mixed_rows_attend_like_the_plain_twin(place, num_heads, num_kv_heads, num_splits):
    shape = Shape(num_heads, num_kv_heads)
    assert_attends(make_step(shape, MIXED, place), config_of(shape, 4, num_splits))


@pytest.mark.parametrize("num_splits", [1, 2, 5])
def test_decodes_attend_like_the_plain_twin(place, num_splits):
    assert_attends(make_step(Shape(), DECODES, place), config_of(Shape(), 1, num_splits))


def test_large_tiles_mask_only_their_last_keys(place):
    """Tiles of 64 rows and more also run the loop without masks."""
    requests = [(0, 70), (33, 30), (50, 1)]
    assert_attends(make_step(Shape(), requests, place), config_of(Shape(), 16))
    assert_attends(make_step(Shape(), requests, place, seed=1), config_of(Shape(), 32, 3))


@pytest.mark.parametrize("rows_per_tile", [4, 16])
def test_keys_that_a_head_never_wrote_are_not_read(place, rows_per_tile):
    """Their memory may hold anything: a weight of zero times NaN is NaN."""
    step = make_step(Shape(), [(1, 40), (30, 5), (16, 1)], place)
    for request in range(3):
        step.pages[step.entry(request, 0)] = torch.nan
    assert_attends(step, config_of(Shape(), rows_per_tile, 3), first_key=1)


def test_a_context_shorter_than_a_split_is_not_split(place):
    step = make_step(Shape(), [(2, 1), (70, 3)], place)
    assert_attends(step, config_of(Shape(), 4, 4, min_split=32))


@pytest.mark.parametrize("head_dim", [64, 128, *UNEVEN])
def test_heads_of_common_sizes(place, head_dim):
    shape = Shape(4, 2, head_dim)
    assert_attends(make_step(shape, [(9, 3), (20, 1)], place), config_of(shape, 4, 2))


@pytest.mark.parametrize("head_dim", UNEVEN)
def test_large_tiles_of_uneven_heads(place, head_dim):
    """Also the loop without masks of keys."""
    shape = Shape(4, 2, head_dim)
    assert_attends(make_step(shape, [(0, 40), (33, 5)], place), config_of(shape, 32))


def test_requests_may_share_pages(place):
    step = make_step(Shape(), [(16, 1), (16, 4), (16, 2)], place)
    step.table[step.slots, :4] = step.table[int(step.slots[0]), :4].clone()
    assert_attends(step, config_of(Shape(), 4, 2))


@pytest.mark.parametrize("rows_per_tile", [4, 16])
def test_entries_of_the_table_behind_a_context_are_not_followed(place, rows_per_tile):
    """They may name pages whose memory was given to others."""
    step = make_step(Shape(), [(0, 70), (30, 5), (15, 1), (16, 16)], place)
    used = -(-(step.start + step.counts) // PAGE_SIZE)
    for slot, num_used in zip(step.slots.tolist(), used.tolist(), strict=True):
        step.table[slot, num_used:] = 10**9
    assert_attends(step, config_of(Shape(), rows_per_tile, 3))


def test_workspaces_share_memory_and_keep_their_addresses():
    memory = Memory("cpu")
    sizes = [(1, 9), (3, 10), (2, 4)]  # splits, rows
    made = [memory.workspace(config_of(Shape(), 4, splits), rows, 7, 4, 2, 16) for splits, rows in sizes]
    assert [list(each.partial.shape) for each in made] == [[9, 4, 0, 16], [10, 4, 3, 16], [4, 4, 2, 16]]
    assert made[1].partial.data_ptr() == made[2].partial.data_ptr()
    larger = memory.workspace(config_of(Shape(), 4, 3), 20, 30, 4, 2, 16)
    assert larger.partial.data_ptr() != made[1].partial.data_ptr()
    larger.partial.zero_()
    made[1].partial.fill_(1.0)  # a graph that was captured with it may still run
    assert not larger.partial.any()
    assert not any(each.arrived.any() for each in (*made, larger))


def test_no_real_tile_means_no_write(place):
    step = make_step(Shape(), DECODES, place)
    write_rows(step)
    config = config_of(Shape(), 1, 2)
    tiles = make_tiles(step, 1)
    tiles.num_tiles.zero_()
    out = torch.full((len(step.qkv), 64), 7.0, dtype=step.qkv.dtype, device=step.qkv.device)
    workspace = Memory(out.device).workspace(config, len(out), len(tiles.request), 4, 1, 16)
    attention.attend(step.qkv, step.pages, step.table, tiles, out, workspace, config)
    assert (out == 7).all()


@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize(
    "shape", [Shape(), Shape(9, 3, 64), Shape(2, 2, 128), *(Shape(9, 3, head_dim) for head_dim in UNEVEN)]
)
def test_rotation_and_writing_match_the_models_own(place, shape, normalise):
    step = make_step(shape, MIXED, place)
    device, dtype = place
    real = slice(0, step.num_rows)
    cos, sin = rope_tables(Rope(theta=10000.0), shape.head_dim, 64, device)
    weight = (torch.rand(shape.num_heads + shape.num_kv_heads, shape.head_dim) + 0.5).to(device, dtype)
    positions = torch.tensor([position for _, _, position in step.rows()], dtype=torch.int32, device=device)
    slots = [int(step.slots[request]) for _, request, _ in step.rows()]

    wanted = replace(step, qkv=step.qkv.clone(), pages=step.pages.clone())
    turning = wanted.qkv[real, : -shape.num_kv_heads]
    if normalise:
        rms_norm_heads_(turning, weight, 1e-5)
    rotate(turning, cos[positions].unsqueeze(1), sin[positions].unsqueeze(1))
    write_rows(wanted)

    attention.rotate_and_write(
        step.qkv, padded(positions, PADDED, 10**6, device), padded(slots, PADDED, 10**6, device),
        padded([step.num_rows], 0, 0, device), step.table, cos, sin, step.pages, weight if normalise else None, 1e-5,
    )  # fmt: skip
    close = {"atol": 1e-5, "rtol": 1e-5} if dtype is torch.float32 else {"atol": 1e-2, "rtol": 8e-3}
    queries = slice(0, shape.num_heads)
    torch.testing.assert_close(step.qkv[real, queries], wanted.qkv[real, queries], **close)
    assert step.qkv[step.num_rows :].isnan().all()
    torch.testing.assert_close(step.pages, wanted.pages, equal_nan=True, **close)


KV_SCALES = 0.03, 0.6


def rounded_pages(pages, scales=KV_SCALES):
    """Pages of 8-bit floats. Garbage stays NaN."""
    parts = zip(pages.float().chunk(2, dim=2), scales, strict=True)
    return torch.cat([(part / scale).clamp(-448, 448) for part, scale in parts], dim=2).to(torch.float8_e4m3fn)


def dequantised(pages, scales=KV_SCALES):
    return torch.cat([part * scale for part, scale in zip(pages.float().chunk(2, dim=2), scales, strict=True)], dim=2)


@pytest.mark.parametrize(
    ("rows_per_tile", "num_splits", "head_dim"), [(4, 3, 16), (16, 1, 16), (4, 3, 80), (16, 1, 96), (16, 1, 12)]
)
def test_pages_of_eight_bits_attend_like_the_plain_twin(place, rows_per_tile, num_splits, head_dim):
    """Tiles of 64 rows also run the loop without masks."""
    step = make_step(Shape(4, 2, head_dim), [(0, 36), (33, 7), (50, 1)], place)
    write_rows(step)
    config = config_of(step.shape, rows_per_tile * 2, num_splits)
    rounded = replace(step, pages=rounded_pages(step.pages))
    found = attend(rounded, config, kv_scales=KV_SCALES).float().cpu()
    wanted = plain_attend(replace(step, pages=dequantised(rounded.pages)))
    torch.testing.assert_close(found, wanted, atol=TOLERANCE[place[1]], rtol=TOLERANCE[place[1]])


@pytest.mark.parametrize(("normalise", "head_dim"), [(False, 64), (True, 64), (False, 80), (True, 96)])
def test_rotation_writes_what_the_cpu_writes_in_eight_bits(place, normalise, head_dim):
    """Rounded as torch rounds, and never NaN: what is out of range becomes the largest number."""
    step = make_step(Shape(4, 2, head_dim), MIXED, place)
    step.qkv[: step.num_rows] *= 10  # many keys exceed 448 of their scales
    weight = (torch.rand(6, head_dim) + 0.5).to(step.qkv) if normalise else None
    plain = replace(step, qkv=step.qkv.clone(), pages=step.pages.clone())
    found = replace(step, qkv=step.qkv.clone(), pages=torch.full_like(step.pages, torch.nan, dtype=torch.float8_e4m3fn))
    for each in (plain, found):
        positions = padded([position for _, _, position in step.rows()], PADDED, 10**6, place[0])
        slots = padded([step.slots[request] for _, request, _ in step.rows()], PADDED, 10**6, place[0])
        attention.rotate_and_write(
            each.qkv, positions, slots, padded([step.num_rows], 0, 0, place[0]), step.table,
            *rope_tables(Rope(theta=10000.0), head_dim, 64, place[0]), each.pages, weight, 1e-5, kv_scales=KV_SCALES,
        )  # fmt: skip
    wanted, saturated = rounded_pages(plain.pages), 0
    for _, request, position in step.rows():
        entry = found.pages[step.entry(request, position)].float()
        assert torch.equal(entry, wanted[step.entry(request, position)].float())
        saturated += int((entry.abs() == 448).sum())
    assert saturated > 10 or normalise
    assert torch.equal(found.qkv[: step.num_rows, :4], plain.qkv[: step.num_rows, :4]), "queries are not rounded"


def test_every_number_is_rounded_as_torch_rounds_it(place):
    """Halves between neighbours, numbers below the least normal one, zeros of both signs, and what is out of range."""
    numbers = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    x = torch.cat([numbers, (numbers[1:] + numbers[:-1]) / 2, numbers * 1.0301, torch.tensor([449.0, 1e5, 1e-9])])
    x = torch.cat([x, -x])
    x = torch.nn.functional.pad(x, (0, -len(x) % 32)).view(-1, 2, 16)
    rows = len(x)
    qkv = torch.cat([torch.zeros(rows, 2, 16), x], dim=1).to(*place)
    pages = torch.zeros(rows, PAGE_SIZE, 2, 16, device=place[0]).to(torch.float8_e4m3fn)
    places = torch.arange(rows, dtype=torch.int32, device=place[0])
    at_once = torch.tensor([rows], dtype=torch.int32, device=place[0])
    cos, sin = torch.ones(1, 8, device=place[0]), torch.zeros(1, 8, device=place[0])
    attention.rotate_and_write(qkv, places * 0, places, at_once, places[:, None], cos, sin, pages)
    wanted = qkv[:, 2:].float().clamp(-448, 448).to(torch.float8_e4m3fn)
    assert torch.equal(pages[:, 0].float(), wanted.float())


def test_a_context_longer_than_usual_takes_more_splits(place, monkeypatch):
    monkeypatch.setattr(attention, "MAX_SPLIT", 32)
    config = replace(config_of(Shape(), 4, 3), num_sms=1)
    assert_attends(make_step(Shape(), [(20, 3), (80, 2), (45, 6)], place), config)


def rotate_and_attend(step, tiles, config, overlap):
    """Both kernels as a layer launches them. Returns `launch`, and the queries and output it will fill."""
    device, shape = step.qkv.device, step.shape
    cos, sin = rope_tables(Rope(theta=10000.0), shape.head_dim, COLUMNS * PAGE_SIZE, device)
    positions = padded([position for _, _, position in step.rows()], PADDED, 10**6, device)
    slots = padded([step.slots[request] for _, request, _ in step.rows()], PADDED, 10**6, device)
    num_rows = padded([step.num_rows], 0, 0, device)
    out = torch.zeros(len(step.qkv), shape.num_heads * shape.head_dim, dtype=step.qkv.dtype, device=device)
    sizes = (shape.num_heads, shape.num_kv_heads, shape.head_dim)
    workspace = Memory(device).workspace(config, len(out), len(tiles.request), *sizes)
    qkv = step.qkv.clone()

    def launch():
        qkv.copy_(step.qkv)
        step.pages.mul_(1)  # a launch between the buffers' last writing and the kernels that read them early
        attention.rotate_and_write(qkv, positions, slots, num_rows, step.table, cos, sin, step.pages, overlap=overlap)
        attention.attend(qkv, step.pages, step.table, tiles, out, workspace, config, overlap=overlap)

    return launch, qkv, out


def test_the_kernels_work_in_turn(place):
    step = make_step(Shape(4, 2, 64), MIXED, place)
    config = config_of(step.shape, 4, 3)
    launch, qkv, out = rotate_and_attend(step, make_tiles(step, 4), config, overlap=place[0] == "cuda")
    launch()
    wanted = plain_attend(replace(step, qkv=qkv))
    tolerance = TOLERANCE[place[1]]
    torch.testing.assert_close(out[: step.num_rows].float().cpu(), wanted, atol=tolerance, rtol=tolerance)


@pytest.mark.gpu
def test_a_captured_launch_serves_a_smaller_step():
    place = ("cuda", torch.bfloat16)
    step = make_step(Shape(), MIXED, place)
    config = config_of(step.shape, 4, 3)
    tiles = make_tiles(step, 4)
    launch, qkv, out = rotate_and_attend(step, tiles, config, overlap=True)
    launch()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    for num_requests in (len(MIXED), 2):
        request, offset = build_tiles(step.counts[:num_requests], 4)
        tiles.request[: request.size] = torch.from_numpy(request).cuda()
        tiles.offset[: offset.size] = torch.from_numpy(offset).cuda()
        tiles.num_tiles.fill_(request.size)
        out.fill_(7)
        graph.replay()
        served = int(step.counts[:num_requests].sum())
        wanted = plain_attend(replace(step, qkv=qkv))[:served]
        torch.testing.assert_close(out[:served].float().cpu(), wanted, atol=3e-2, rtol=3e-2)
        assert (out[served:] == 7).all()


def test_tiles_cover_every_row_once_and_the_longest_come_first():
    random = np.random.default_rng(0)
    for _ in range(50):
        counts, start = random.integers(1, 40, size=9), random.integers(0, 100, size=9)
        rows_per_tile = int(random.integers(1, 9))
        request, offset = build_tiles(counts, rows_per_tile, start)
        covered = sorted(
            (int(i), int(k))
            for i, first in zip(request, offset, strict=True)
            for k in range(first, min(first + rows_per_tile, counts[i]))
        )
        assert covered == [(i, k) for i, count in enumerate(counts) for k in range(count)]
        assert (np.diff(start[request] + offset) <= 0).all()
        some = counts <= rows_per_tile
        parts = [build_tiles(counts, rows_per_tile, start, part) for part in (some, ~some)]
        assert all(some[parts[0][0]])
        assert not any(some[parts[1][0]])
        both = sorted(zip(*map(np.concatenate, zip(*parts, strict=True)), strict=True))
        assert both == sorted(zip(request, offset, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [16, 64, 80, 96, 128, 256])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(32, 8), (9, 3), (28, 4), (32, 1)])
def test_the_chosen_tile_holds_its_rows_and_splits_fill_the_device(dtype, head_dim, num_heads, num_kv_heads):
    for num_requests in (1, 7, 64, 256):
        for rows in (1, 5, 33, 2048):
            config = attention.choose(num_requests, rows, 131072, num_heads, num_kv_heads, head_dim, dtype)
            assert 1 <= config.rows_per_tile <= rows
            assert config.rows_per_tile * num_heads // num_kv_heads <= config.block_m
            assert config.min_split % config.block_n == 0
            assert config.block_n.bit_count() == 1
            if num_requests == 1 and rows == 1:
                assert config.num_splits * num_kv_heads >= 32


YARN = Rope(500.0, "yarn", 4.0, 32, attention_factor=1.3)


def windowed_attend(step, windowed, first_key=0, sees_all=False):
    """As plain_attend, with the keys of each row's window, and queries that turn back to the sinks."""
    shape, window = step.shape, windowed.window
    out = torch.zeros(step.num_rows, shape.num_heads, shape.head_dim)
    pages, qkv = step.pages.cpu().float(), step.qkv.cpu().float()
    cos, sin = (each.cpu() / windowed.factor for each in (windowed.cos, windowed.sin))
    for row, request, position in step.rows():
        start = 0 if windowed.starts is None else int(windowed.starts[step.slots[request]])
        end = int(step.start[request] + step.counts[request]) if sees_all else position + 1
        run = range(max(window.sinks, position - window.size + 1, start, first_key), end)
        near = qkv[row, : shape.num_heads].clone()
        if window.sinks:
            back = max(0, position - (window.span - 1))
            rotate(near[None], cos[back][None, None], -sin[back][None, None])
        keys = [*range(first_key, min(window.sinks, end)), *run]
        seen = torch.stack([pages[step.entry(request, key)] for key in keys])
        is_sink = torch.tensor([key < window.sinks for key in keys])
        for head in range(shape.num_heads):
            kv_head = head // (shape.num_heads // shape.num_kv_heads)
            scores = torch.where(is_sink, seen[:, kv_head] @ near[head], seen[:, kv_head] @ qkv[row, head])
            weights = (scores * shape.head_dim**-0.5).softmax(0)
            out[row, head] = weights @ seen[:, shape.num_kv_heads + kv_head]
    return out.flatten(1)


def assert_attends_windowed(step, config, window, starts=None, rounded=False, **more):
    """What no row sees is another request's, or has no page."""
    device = step.qkv.device
    cos, sin = rope_tables(YARN, step.shape.head_dim, COLUMNS * PAGE_SIZE, device)
    if starts is not None:
        starts = torch.tensor(starts, dtype=torch.int32, device=device)
    windowed = attention.Windowed(window, starts, cos, sin, YARN.attention_factor)
    write_rows(step)
    for request, (start, _) in enumerate(step.requests):
        begin = 0 if starts is None else int(starts[step.slots[request]])
        unseen = max(window.sinks, start - window.size + 1, begin)
        for key in range(window.sinks, min(unseen, start)):
            step.pages[step.entry(request, key)] = torch.nan
        step.table[step.slots[request], -(-window.sinks // PAGE_SIZE) : unseen // PAGE_SIZE] = 10**9
    scales = KV_SCALES if rounded else (1.0, 1.0)
    plain = step
    if rounded:
        step = replace(step, pages=rounded_pages(step.pages))
        plain = replace(step, pages=dequantised(step.pages))
    found = attend(step, config, windowed=windowed, kv_scales=scales, **more).float().cpu()
    tolerance = TOLERANCE[step.qkv.dtype]
    torch.testing.assert_close(found, windowed_attend(plain, windowed, **more), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("window", [KeyWindow(9, 3), KeyWindow(20), KeyWindow(90, 5)])
@pytest.mark.parametrize(("rows_per_tile", "num_splits"), [(1, 1), (4, 3)])
def test_rows_attend_to_sinks_and_windows_alone(place, window, rows_per_tile, num_splits):
    requests = DECODES if rows_per_tile == 1 else MIXED
    assert_attends_windowed(make_step(Shape(), requests, place), config_of(Shape(), rows_per_tile, num_splits), window)


@pytest.mark.parametrize("window", [KeyWindow(40, 2), KeyWindow(17)])
def test_large_tiles_mask_only_the_ends_of_windows(place, window):
    requests = [(0, 70), (50, 30), (90, 1)]
    assert_attends_windowed(make_step(Shape(), requests, place), config_of(Shape(), 16), window)
    assert_attends_windowed(make_step(Shape(), requests, place, seed=1), config_of(Shape(), 32, 3), window)


@pytest.mark.parametrize("head_dim", UNEVEN)
@pytest.mark.parametrize("rounded", [False, True])
def test_uneven_heads_attend_to_sinks_and_windows_alone(place, head_dim, rounded):
    shape = Shape(4, 2, head_dim)
    requests = [(50, 3), (0, 40)] if rounded else [(70, 2), (30, 30)]
    for rows_per_tile, num_splits in ((4, 3), (32, 1)):
        config = config_of(shape, rows_per_tile, num_splits)
        assert_attends_windowed(make_step(shape, requests, place), config, KeyWindow(20, 3), rounded=rounded)


@pytest.mark.parametrize("num_splits", [1, 3])
def test_keys_before_a_new_beginning_do_not_exist(place, num_splits):
    step = make_step(Shape(), [(60, 3), (75, 1), (40, 2), (2, 1)], place)
    starts = [0] * NUM_SLOTS
    for request, begin in enumerate([52, 75, 0, 0]):
        starts[step.slots[request]] = begin
    assert_attends_windowed(step, config_of(Shape(), 4, num_splits), KeyWindow(24, 3), starts)


@pytest.mark.parametrize("window", [KeyWindow(9, 3), KeyWindow(20), KeyWindow(90, 5)])
@pytest.mark.parametrize("seen", [{"first_key": 1}, {"sees_all": True}], ids=["no key 0", "blocks"])
@pytest.mark.parametrize(("rows_per_tile", "num_splits"), [(4, 1), (16, 3)])
def test_rows_of_heads_attend_to_sinks_and_windows_alone(place, window, seen, rows_per_tile, num_splits):
    step = make_step(Shape(), [(60, 7), (75, 16), (30, 1), (1, 5)], place)
    if "first_key" in seen:
        for request in range(len(step.requests)):
            step.pages[step.entry(request, 0)] = torch.nan
    starts = [0] * NUM_SLOTS
    starts[step.slots[0]] = 52
    assert_attends_windowed(step, config_of(Shape(), rows_per_tile, num_splits), window, starts, **seen)
