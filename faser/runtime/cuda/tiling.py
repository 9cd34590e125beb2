"""How the rows of a forward are cut into tiles for attention, and the memory its launches share.

Knows shapes, requests and rows; knows nothing of layers or keys. A step whose requests all decode has one tile a
request. In a step with prompts the host cuts each request's rows, and requests of few rows are attended apart, in tiles
of their size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from numpy.typing import NDArray
from torch import Tensor

from faser.arrays import IntArray
from faser.models.transformer import Decoder
from faser.runtime.cuda import attention
from faser.runtime.cuda.attention import AttentionConfig, AttentionWorkspace, Tiles
from faser.runtime.cuda.graphs import Shape
from faser.runtime.cuda.linear_plans import NUM_SMS
from faser.runtime.cuda.rows import DeviceRows, Requests
from faser.runtime.cuda.transfer import Staging, send

FEW_ROWS = 8  # the most rows of a request that is attended apart from prompts


@dataclass(frozen=True)
class Attending:
    """One launch of attention, the same in each layer."""

    tiles: Tiles
    config: AttentionConfig
    workspace: AttentionWorkspace


class Tiling:
    """The tiles of one model's forwards."""

    def __init__(self, model: Decoder, max_requests: int, max_rows: int, max_context: int) -> None:
        self._model = model
        self._max_requests = max_requests
        self._max_context = max_context
        device = model.device
        self._arange = torch.arange(max_requests, dtype=torch.int32, device=device)
        self._zeros, self._ones = torch.zeros_like(self._arange), torch.ones_like(self._arange)
        self._totals = torch.zeros_like(self._arange)
        self._splits = attention.Memory(device)
        self._wide, self._narrow = _TileMemory(max_rows, device), _TileMemory(max_requests, device)
        self.memories = self._wide.memory, self._narrow.memory  # the tiles that `stage` writes
        self.counts = self._wide.num_tiles, self._narrow.num_tiles  # how many of them are real, [1] each

    def stage(self, shape: Shape, num_rows: IntArray, start: IntArray) -> None:
        """Write the tiles for the next launch of the graph of a mixed shape."""
        few = self._narrow_config(shape).rows_per_tile
        self._wide.write(attention.build_tiles(num_rows, self.config(shape).rows_per_tile, start, num_rows > few))
        self._narrow.write(attention.build_tiles(num_rows, few, start, num_rows <= few))

    def config(self, shape: Shape) -> AttentionConfig:
        num_requests = max(1, shape.num_rows // shape.rows_per_request)
        return self._config_for(num_requests, shape.rows_per_request, num_sms=shape.num_sms)

    def _narrow_config(self, shape: Shape) -> AttentionConfig:
        """For the requests of few rows in a mixed step."""
        return self._config_for(self._max_requests, min(FEW_ROWS, shape.num_rows), shape.num_rows)

    def _config_for(
        self, num_requests: int, rows_per_request: int, step_rows: int | None = None, num_sms: int = 0
    ) -> AttentionConfig:
        config = self._model.config
        return attention.choose(
            num_requests, rows_per_request, self._max_context, config.num_heads, config.num_kv_heads, config.head_dim,
            self._model.dtype, num_sms or NUM_SMS, step_rows,
        )  # fmt: skip

    def _attending(self, shape: Shape, config: AttentionConfig, tiles: Tiles) -> Attending:
        model, num_tiles = self._model.config, tiles.request.shape[0]
        workspace = self._splits.workspace(
            config, shape.num_rows, num_tiles, model.num_heads, model.num_kv_heads, model.head_dim
        )
        return Attending(tiles, config, workspace)

    def whole(self, shape: Shape, requests: Requests, rows: DeviceRows) -> list[Attending]:
        """One tile a request: it holds all of its rows."""
        size = shape.num_requests
        tile = self._arange[:size], self._zeros[:size]
        if shape.drafts_on:
            tiles = Tiles(self._arange[:size], self._ones[:size], rows.positions, rows.slots, *tile, rows.num_rows)
        else:
            tiles = Tiles(*self._request_rows(requests, rows), *tile, requests.num_requests)
        return [self._attending(shape, self.config(shape), tiles)]

    def _request_rows(self, requests: Requests, rows: DeviceRows) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """First row, number of rows, first position and slot of each request: what tiles are cut from."""
        totals = torch.add(requests.num_rows, requests.num_drafted, out=self._totals[: requests.slots.shape[0]])
        return rows.cu_rows[:-1], totals, requests.start, requests.slots

    def staged(self, shape: Shape, requests: Requests, rows: DeviceRows) -> list[Attending]:
        """The tiles that `stage` wrote before the launch. A request without rows has none."""
        wide, narrow = self.config(shape), self._narrow_config(shape)
        few, shared = narrow.rows_per_tile, self._request_rows(requests, rows)
        # the last tile of a request may have only one row
        most_wide = min(shape.num_rows, shape.num_rows // wide.rows_per_tile + shape.num_rows // (few + 1))
        most_narrow = min(shape.num_requests, shape.num_rows)
        narrow_tiles = Tiles(*shared, *self._narrow.tiles(most_narrow), self._narrow.num_tiles)
        attending = [self._attending(shape, narrow, narrow_tiles)]
        if shape.num_rows > few:
            wide_tiles = Tiles(*shared, *self._wide.tiles(most_wide), self._wide.num_tiles)
            attending.append(self._attending(shape, wide, wide_tiles))
        return attending

    def cut(
        self, shape: Shape, requests: Requests, rows: DeviceRows, num_rows: IntArray, start: IntArray
    ) -> list[Attending]:
        """Tiles cut by the host and sent now."""
        wide, narrow, device = self.config(shape), self._narrow_config(shape), self._model.device
        few, shared = narrow.rows_per_tile, self._request_rows(requests, rows)
        attending = []
        for config, some in ((narrow, num_rows <= few), (wide, num_rows > few)):
            request, offset = attention.build_tiles(num_rows, config.rows_per_tile, start, some)
            if request.size:
                count = torch.full((1,), request.size, dtype=torch.int32, device=device)
                tiles = Tiles(*shared, send(request, device), send(offset, device), count)
                attending.append(self._attending(shape, config, tiles))
        return attending


class _TileMemory:
    """Device memory for the tiles of the next launch of a graph."""

    def __init__(self, most_tiles: int, device: torch.device) -> None:
        self.memory = torch.zeros(2 * most_tiles + 1, dtype=torch.int32, device=device)
        self.num_tiles = self.memory[-1:]
        self._staging = Staging(self.memory, 2)

    def tiles(self, most: int) -> tuple[Tensor, Tensor]:
        """The requests and the offsets of the first `most` tiles."""
        request, offset = self.memory[:-1].view(2, -1)
        return request[:most], offset[:most]

    def write(self, tiles: tuple[NDArray, NDArray]) -> None:
        self._staging.write(tiles, tiles[0].size)
