"""What do the rules of pruning keep of real clips, and what does it cost to know it?

For each clip: the share of patches that the grids keep by motion vectors (codec, at several tau) and by differences of
pixels, at a number of frames a second that the model sees. `anew` is the mean share of groups, in a single P- or
B-frame, with a block that the encoder coded anew: no tau prunes these. Milliseconds are of one decoded frame on one
core, the best of three passes: decoding alone, decoding with vectors, and the mask of a frame that is sampled
(measured on vectors that are already in memory).

    python3 -m benchmarks.masks CLIP…                          # as recorded, 2 frames a second
    python3 -m benchmarks.masks --fps 1000 CLIP…               # the model sees every frame
    python3 -m benchmarks.masks --recode medium:23 CLIP…       # sampled and resized, then encoded again with x264

Nothing is read but the clips. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import io
import json
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from statistics import mean
from time import perf_counter
from typing import Any

import av
import numpy as np

from faser.media.grids import resized
from faser.media.motion import FrameMotion
from faser.media.pruning import CodecPruner, DifferencePruner, Pruner, PruningOptions, make_pruner
from faser.media.reader import FrameReader, Pixels
from faser.vision import VisionSettings

TAUS = (0.25, 1.0, 2.0)
PASSES = 3
TIMED_FRAMES = 400
GOP = 16  # frames, of a clip that is encoded again


def settings(size: int) -> VisionSettings:
    """Patches of 14 pixels in groups of four, as in Qwen2-VL; frames have about size × size pixels."""
    return VisionSettings(
        patch_size=14, merge_size=2, frames_per_grid=2, min_pixels=56**2, max_pixels=size**2, video_min_pixels=56**2,
        video_max_pixels=size**2, image_token_id=1, video_token_id=2, has_spatial_positions=True,
    )  # fmt: skip


def bounds(vision: VisionSettings) -> tuple[int, int]:
    return vision.video_min_pixels, vision.video_max_pixels


def kept_shares(clip: bytes, options: PruningOptions, vision: VisionSettings, fps: float) -> list[float]:
    """Of each grid."""
    with FrameReader(io.BytesIO(clip)) as reader:
        pruner = make_pruner(reader, options, vision, bounds(vision))
        assert pruner is not None
        observe = pruner.observe if pruner.needs_motion else None
        return list(_shares(pruner, reader.frames_at(fps, observe), vision))


def _shares(pruner: Pruner, frames: Iterator[tuple[float, Pixels]], vision: VisionSettings) -> Iterator[float]:
    start = 0.0
    for i, (seconds, frame) in enumerate(frames):
        pixels = resized(frame, vision, bounds(vision))
        pruner.see(pixels)
        if i % vision.frames_per_grid == 0:
            start = seconds
        else:
            kept = pruner.kept(start)
            groups = pixels.shape[0] * pixels.shape[1] // vision.factor**2
            yield 1.0 if kept is None else len(kept) / groups


def motions(clip: bytes) -> list[FrameMotion]:
    found: list[FrameMotion] = []
    with FrameReader(io.BytesIO(clip)) as reader:
        for _ in reader.frames_at(1000.0, found.append):
            if len(found) == TIMED_FRAMES:
                break
    return found


def coded_anew(clip: bytes, vision: VisionSettings) -> float:
    """Mean share of groups of a predicted frame with a block without a vector."""
    pruner, shares = CodecPruner(PruningOptions(rule="codec", tau=1e9), vision, bounds(vision)), []
    for motion in motions(clip):
        pruner.observe(motion)
        if motion.kind in ("P", "B"):
            shares.append(float(pruner.changed().mean()))
        pruner.forget()
    return mean(shares)


# ---- milliseconds ----


def milliseconds(clip: bytes, vision: VisionSettings) -> dict[str, float]:
    plain, exported = (min(_decode(clip, with_motion) for _ in range(PASSES)) for with_motion in (False, True))
    found, pictures = motions(clip), _pictures(clip, vision)
    masks = min(_mask(found, vision) for _ in range(PASSES))
    differences = min(_difference(pictures, vision) for _ in range(PASSES))
    figures = {"decode": plain, "with_vectors": exported, "mask": masks, "difference": differences}
    return {name: round(1e3 * seconds, 3) for name, seconds in figures.items()}


def _decode(clip: bytes, with_motion: bool) -> float:
    """Seconds a frame, without conversion to RGB: only the first frame is sampled."""
    count = 0

    def observe(motion: FrameMotion) -> None:
        nonlocal count
        count += 1

    with FrameReader(io.BytesIO(clip)) as reader:
        started = perf_counter()
        if with_motion:
            for _ in reader.frames_at(1e-9, observe):
                pass
        else:
            count = sum(1 for _ in reader.decoded())
        return (perf_counter() - started) / count


def _mask(found: Sequence[FrameMotion], vision: VisionSettings) -> float:
    """Seconds a frame, if every frame is sampled and a grid by itself."""
    pruner = CodecPruner(PruningOptions(rule="codec"), vision, bounds(vision))
    started = perf_counter()
    for i, motion in enumerate(found):
        pruner.observe(motion)
        pruner.kept(float(i))
    return (perf_counter() - started) / len(found)


def _pictures(clip: bytes, vision: VisionSettings) -> list[Pixels]:
    with FrameReader(io.BytesIO(clip)) as reader:
        return [resized(frame, vision, bounds(vision)) for _, frame in islice(reader, 20)]


def _difference(pictures: Sequence[Pixels], vision: VisionSettings) -> float:
    pruner = DifferencePruner(PruningOptions(rule="difference"), vision)
    pruner.see(pictures[0])
    started = perf_counter()
    for pixels in pictures[1:]:
        pruner.see(pixels)
    return (perf_counter() - started) / (len(pictures) - 1)


# ---- clips that are encoded again ----


def recoded(clip: bytes, vision: VisionSettings, fps: float, preset: str, crf: str) -> bytes:
    """The frames that the model sees, at its own size, as a camera could send them: every GOP-th is an I-frame."""
    file = io.BytesIO()
    with FrameReader(io.BytesIO(clip)) as reader, av.open(file, "w", format="mp4") as container:
        rate = round(min(fps, reader.fps))
        stream: Any = None
        for i, (_, frame) in enumerate(reader.frames_at(fps)):
            pixels = np.ascontiguousarray(resized(frame, vision, bounds(vision)))
            if stream is None:
                stream = container.add_stream("libx264", rate=rate, options={"preset": preset, "crf": crf})
                stream.height, stream.width = pixels.shape[:2]
                stream.pix_fmt, stream.gop_size = "yuv420p", GOP
            picture = av.VideoFrame.from_ndarray(pixels, "rgb24")
            picture.pts = i
            container.mux(stream.encode(picture))
        container.mux(stream.encode(None))
    return file.getvalue()


def measure(path: Path, args: argparse.Namespace) -> dict[str, Any]:
    vision, clip, fps = settings(args.size), path.read_bytes(), args.fps
    if args.recode:
        preset, crf = args.recode.split(":")
        clip, fps = recoded(clip, vision, fps, preset, crf), 1000.0  # every frame of what was sampled before
    arms = {f"tau {tau:g}": PruningOptions(rule="codec", tau=tau, refresh=args.refresh) for tau in TAUS}
    arms["difference"] = PruningOptions(rule="difference", refresh=args.refresh)
    kept = {}
    for name, options in arms.items():
        shares = kept_shares(clip, options, vision, fps)
        pruned = [share for share in shares if share < 1]
        kept[name] = {
            "all": round(mean(shares), 3),
            "of_pruned_grids": round(mean(pruned), 3) if pruned else None,
            "whole_grids": round(1 - len(pruned) / len(shares), 3),
        }
    ms = milliseconds(clip, vision)
    return {"clip": path.name, "kept": kept, "anew": round(coded_anew(clip, vision), 3), "milliseconds": ms}


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clips", type=Path, nargs="+", metavar="CLIP", help="H.264")
    parser.add_argument("--fps", type=float, default=2.0, help="frames a second that the model sees; default: 2")
    parser.add_argument("--size", type=int, default=448, help="frames have about SIZE × SIZE pixels; default: 448")
    parser.add_argument("--refresh", type=float, default=8.0, help="seconds; default: 8")
    parser.add_argument("--recode", metavar="PRESET:CRF", help="encode the sampled frames again with x264 first")
    args = parser.parse_args(argv)
    results = [measure(path, args) for path in args.clips]
    arms = list(results[0]["kept"])
    print(f"share of patches kept, {args.fps:g} frames/s, {args.size} px, refresh {args.refresh:g} s")
    print(f"{'clip':34}" + "".join(f"{name:>12}" for name in [*arms, "whole grids", "anew"]))
    for found in results:
        shares = [found["kept"][name]["all"] for name in arms]
        shares += [found["kept"]["tau 1"]["whole_grids"], found["anew"]]
        print(f"{found['clip']:34}" + "".join(f"{share:12.3f}" for share in shares))
    print(f"{'milliseconds a frame':34}{'decode':>12}{'+ vectors':>12}{'mask':>12}{'difference':>12}")
    for found in results:
        print(f"{found['clip']:34}" + "".join(f"{value:12.3f}" for value in found["milliseconds"].values()))
    document = {"fps": args.fps, "size": args.size, "refresh": args.refresh, "recode": args.recode, "results": results}
    print(json.dumps(document))
    return document


if __name__ == "__main__":
    main()
