"""Pictures of masks: frames of a clip, with what a rule prunes dark and hatched. The pictures of docs/video.md.

    python3 -m benchmarks.mask_pictures docs/mask-scene.png --scene 1 --times 1.5 3 5.5
    python3 -m benchmarks.mask_pictures docs/mask-person.png --clip one-by-one-person-detection.mp4 \\
        --rules codec difference --times 14 --fps 2 --width 440

One panel for each rule and time, side by side. A scene is drawn by tools/watch, with little noise of a camera, and
encoded with x264 at four frames a second. Prints the share that each panel keeps, and as the last line one JSON
document.
"""

from __future__ import annotations

import argparse
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from faser.arrays import BoolArray
from faser.media.options import PictureOptions
from faser.media.pruning import RULES, PruningOptions
from faser.media.reader import FrameReader
from faser.vision import Grid, VisionSettings
from faser.watch import WatchOptions, windows
from tools.watch.codec import encode_x264
from tools.watch.scenes import SceneSettings, plan_scene, render

SETTINGS = VisionSettings(
    patch_size=14, merge_size=2, frames_per_grid=2, min_pixels=56**2, max_pixels=448**2, video_min_pixels=56**2,
    video_max_pixels=448**2, image_token_id=1, video_token_id=2, has_spatial_positions=True,
)  # fmt: skip
Pixels = NDArray[np.uint8]
COLOURS = 128  # of a picture
GAP = 6  # pixels between panels
SHADE, HATCH = 0.38, 0.5  # how bright pruned pixels are, and those of the hatching
EDGE = (90, 169, 255)


def scene(seed: int, num_frames: int) -> bytes:
    frames = render(plan_scene(SceneSettings(num_frames=num_frames, max_things=5, most_noise=0.5), seed))
    return encode_x264(frames, 26)


def grid_at(clip: bytes, rule: str, time: float, fps: float) -> Grid:
    """The last grid that has begun by then."""
    options = WatchOptions(2, 2, fps, PictureOptions(), PruningOptions(rule=rule))
    found: Grid | None = None
    with FrameReader(io.BytesIO(clip)) as reader:
        for window in windows(reader, SETTINGS, options):
            if found is not None and window.start > time:
                break
            found = window.media.grids[0]
    assert found is not None, "a clip has frames"
    return found


def frame_at(clip: bytes, time: float) -> Pixels:
    """[height, width, 3] the last frame that has begun by then."""
    found: Pixels | None = None
    with FrameReader(io.BytesIO(clip)) as reader:
        for seconds, frame in reader.decoded():
            if found is not None and seconds > time:
                break
            found = reader.to_rgb(frame)
    assert found is not None, "a clip has frames"
    return found


def panel(frame: Pixels, kept: BoolArray) -> Pixels:
    """The frame with pruned groups dark and hatched. `kept` [rows, columns] of groups."""
    height, width = frame.shape[:2]
    rows, columns = (np.arange(size) * count // size for size, count in zip((height, width), kept.shape, strict=True))
    is_kept = kept[rows[:, None], columns]
    hatched = (np.arange(height)[:, None] + np.arange(width)) % 8 == 0
    share = np.where(is_kept, 1.0, np.where(hatched, HATCH, SHADE))
    drawn = (frame * share[..., None]).astype(np.uint8)
    edge = np.zeros((height, width), dtype=bool)
    edge[:-1] |= is_kept[:-1] != is_kept[1:]
    edge[:, :-1] |= is_kept[:, :-1] != is_kept[:, 1:]
    drawn[edge] = EDGE
    return drawn


def mask_of(grid: Grid) -> BoolArray:
    """[rows, columns] the groups that are kept."""
    kept = np.zeros(grid.num_groups, dtype=bool)
    kept[grid.groups] = True
    return kept.reshape(grid.height // grid.merge_size, grid.width // grid.merge_size)


def resize(frame: Pixels, width: int) -> Pixels:
    height = round(frame.shape[0] * width / frame.shape[1])
    return np.asarray(Image.fromarray(frame).resize((width, height), Image.Resampling.LANCZOS))


def join(panels: Sequence[Pixels]) -> Image.Image:
    gap = np.full((panels[0].shape[0], GAP, 3), 255, dtype=np.uint8)
    parts = [part for each in panels for part in (each, gap)][:-1]
    return Image.fromarray(np.concatenate(parts, axis=1)).quantize(COLOURS)


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path, help="of the picture, a PNG file")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--scene", type=int, help="seed of a drawn scene")
    source.add_argument("--clip", type=Path, help="a video file")
    parser.add_argument("--frames", type=int, default=24, help="of a drawn scene (24)")
    parser.add_argument("--rules", nargs="+", choices=RULES, default=["codec"])
    parser.add_argument("--times", nargs="+", type=float, default=[1.0], help="seconds")
    parser.add_argument("--fps", type=float, default=4.0, help="frames a second that the model sees (4)")
    parser.add_argument("--width", type=int, default=300, help="pixels of a panel (300)")
    args = parser.parse_args(argv)
    clip = scene(args.scene, args.frames) if args.clip is None else args.clip.read_bytes()
    panels, shares = [], []
    for time in args.times:
        frame = resize(frame_at(clip, time), args.width)
        for rule in args.rules:
            grid = grid_at(clip, rule, time, args.fps)
            panels.append(panel(frame, mask_of(grid)))
            shares.append({"rule": rule, "time": time, "kept": round(grid.num_tokens / grid.num_groups, 4)})
            print(f"{time:8.1f} s  {rule:12}{shares[-1]['kept']:8.3f} kept")
    join(panels).save(args.path, "PNG", optimize=True)
    found = {"picture": args.path.name, "bytes": args.path.stat().st_size, "panels": shares}
    print(json.dumps(found))
    return found


if __name__ == "__main__":
    main()
