"""Options are checked, and unknown ones are refused by name."""

from __future__ import annotations

import pytest

from faser.errors import InvalidRequest
from faser.media.options import VideoOptions, parse_options


def test_options_may_use_either_name_for_sizes():
    right = VideoOptions(fps=1.5, min_pixels=100, max_pixels=200)
    assert parse_options({"fps": 1.5, "min_pixels": 100, "max_pixels": 200}) == right
    assert parse_options({"fps": 1.5, "size": {"shortest_edge": 100, "longest_edge": 200}}) == right
    assert parse_options({}) == VideoOptions()


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"frames": 3}, "'frames'"),
        ({"size": {"height": 3}}, "'size.height'"),
        ({"size": 3}, "size=3"),
        ({"size": {"longest_edge": 3}, "max_pixels": 4}, "differ"),
        ({"fps": 0}, "fps=0"),
        ({"fps": True}, "fps=True"),
        ({"fps": float("nan")}, "fps=nan"),
        ({"fps": "2"}, "fps='2'"),
        ({"num_frames": 0}, "num_frames=0"),
        ({"num_frames": 2.5}, "num_frames=2.5"),
        ({"num_frames": 2, "fps": 2}, "exclude"),
        ({"min_pixels": 5, "max_pixels": 4}, "min_pixels=5"),
        ({"max_pixels": -1}, "max_pixels=-1"),
    ],
)
def test_bad_options_are_refused_by_name(given, says):
    with pytest.raises(InvalidRequest) as caught:
        parse_options(given)
    assert says in str(caught.value)
