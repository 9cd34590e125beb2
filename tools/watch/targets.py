"""What each token should know about its place: the dense targets of the first stage of training.

Knows a plan and a grid of cells, one per token of the vision encoder. Knows nothing of torch. A cell is as large as a
group of patches; a grid covers a pair of frames and is judged by the later one.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tools.watch.scenes import DIRECTIONS, Plan
from tools.watch.sprites import KINDS

Labels = NDArray[np.int64]

# Name -> number of classes. The first class of kind and motion is nothing, or standing still.
TARGETS = {
    "kind": 1 + len(KINDS),  # of the nearest thing at the cell's centre
    "motion": 1 + len(DIRECTIONS),  # of that thing
    "centre": 2,  # whether a thing's centre is in this cell
    "column": 4,  # where the cell is, in quarters
    "row": 4,
    "count": 10,  # of all things that are seen, the same in every cell
    "moving": 10,  # of these, how many move
}


def dense_targets(plan: Plan, cells: int) -> dict[str, Labels]:
    """Labels [grids, cells, cells] by name."""
    frames = np.arange(1, plan.settings.num_frames, 2)
    shape = (len(frames), cells, cells)
    labels: dict[str, Labels] = {name: np.zeros(shape, dtype=np.int64) for name in TARGETS}
    quarter = np.arange(cells) * 4 // cells
    labels["column"][:], labels["row"][:] = quarter[None, None, :], quarter[None, :, None]
    labels["count"][:] = plan.seen[frames].sum(-1)[:, None, None]
    labels["moving"][:] = plan.moving[frames].sum(-1)[:, None, None]
    for grid, frame in enumerate(frames):
        for index in np.flatnonzero(plan.seen[frame]):
            _mark({name: each[grid] for name, each in labels.items()}, plan, int(frame), int(index))
    return labels


def _mark(labels: dict[str, Labels], plan: Plan, frame: int, index: int) -> None:
    """Write one thing over the cells of one grid; nearer things come later."""
    thing, cells = plan.things[index], len(labels["kind"])
    cell = plan.settings.side / cells
    x0, y0, x1, y1 = plan.boxes[frame, index] / cell
    x, y = int(min((x0 + x1) / 2, cells - 1)), int(min((y0 + y1) / 2, cells - 1))
    columns = _centres_between(x0, x1, x)
    rows = _centres_between(y0, y1, y)
    labels["kind"][rows, columns] = 1 + KINDS.index(thing.kind)
    is_moving = plan.moving[frame, index] and thing.direction is not None
    labels["motion"][rows, columns] = 1 + DIRECTIONS.index(str(thing.direction)) if is_moving else 0
    labels["centre"][y, x] = 1


def _centres_between(low: float, high: float, middle: int) -> slice:
    """The cells whose centre lies between; at least the middle one."""
    first, last = int(np.ceil(low - 0.5)), int(np.floor(high - 0.5))
    return slice(first, last + 1) if last >= first else slice(middle, middle + 1)
