"""Order, positions and segments of patches."""

from __future__ import annotations

import numpy as np

from faser.models.vision.layout import equal_segments, lay_out
from tests.tiny import VISION, WINDOWED_VISION, make_grid


def test_a_grid_without_windows_is_one_segment_in_its_own_order():
    layout = lay_out([make_grid(4, 6), make_grid(2, 4)], VISION)
    assert layout.groups.tolist() == list(range(8))
    assert layout.cu_grids.tolist() == layout.cu_windows.tolist() == [0, 24, 32]
    assert layout.positions[:8].tolist() == [[0, 0], [0, 1], [1, 0], [1, 1], [0, 2], [0, 3], [1, 2], [1, 3]]
    assert layout.positions[-1].tolist() == [1, 3]


def test_groups_are_ordered_by_window():
    layout = lay_out([make_grid(4, 6)], WINDOWED_VISION)  # 2 × 3 groups in windows of 2 × 2
    assert layout.groups.tolist() == [0, 1, 3, 4, 2, 5]
    assert layout.cu_windows.tolist() == [0, 16, 24]
    assert layout.cu_grids.tolist() == [0, 24]
    assert layout.groups[layout.places].tolist() == list(range(6))


def test_a_window_without_kept_groups_has_no_segment():
    kept = np.array([0, 1, 5, 6, 24])  # of 5 × 5 groups: of the first window and of the last
    layout = lay_out([make_grid(10, 10, kept=kept), make_grid(2, 2)], WINDOWED_VISION)
    assert layout.cu_windows.tolist() == [0, 16, 20, 24]
    assert layout.cu_grids.tolist() == [0, 20, 24]
    assert layout.positions[16].tolist() == [8, 8]


def test_segments_of_the_same_length_are_found_together():
    found = {length: starts.tolist() for length, starts in equal_segments(np.array([0, 4, 12, 16, 24]))}
    assert found == {4: [0, 12], 8: [4, 16]}
