"""What a model is shown of a scene, in ways that are compared at equal windows (benchmarks/watch_quality.py).

Knows scenes, grids and which of their groups are kept. Knows nothing of engines, questions' answers or statistics.

A stream is a drawn scene through x264. Its last window is asked about; the windows before it are there for KV reuse.
Other rules than the codec's keep as many groups of each grid as the codec does at tau 1, and the same whole grids:

  random      groups drawn at random
  difference  groups whose pixels changed most since the last whole grid, between two frames
  fewer       whole grids with about the tokens of the codec's window, evenly spread, the last one among them
  after       all groups enter the encoder, and the window keeps the tokens that differ most (cosine) from those of the
              same place in the grid before: its first grid first, at least one a grid. vLLM's EVS does so
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import blake2b

import numpy as np
import torch
from numpy.typing import NDArray

from faser.arrays import BoolArray, FloatArray, IntArray
from faser.media.media import Media
from faser.media.options import PictureOptions
from faser.media.pruning import PruningOptions
from faser.media.reader import FrameReader
from faser.models.vision.encoder import EncoderInput, ForwardShape, VisionEncoder
from faser.models.vision.layout import offsets
from faser.vision import NAME_BYTES, Grid, VisionSettings
from faser.watch import WatchOptions, windows
from tools.watch.codec import encode_x264
from tools.watch.questions import QUESTIONS, Question, ask_some
from tools.watch.scenes import Plan, SceneSettings, inside_share, plan_scene, render

FPS = 4
QUALITIES = (20, 26, 32)  # crf of x264, in turn
CODEC, SLIGHT = "codec 1", "codec 0.25"  # rules by their tau; the first decides how much the others keep
RULES = {
    "all": PruningOptions(),
    CODEC: PruningOptions(rule="codec", tau=1.0),
    SLIGHT: PruningOptions(rule="codec", tau=0.25),
}
FIRST_FRAME = ("appeared", "left", "stopped")  # kinds of questions that compare with the first frame
CLEARLY = (0.1, 0.6)  # share of a thing in the picture: at most and at least this much is clear


@dataclass(frozen=True, kw_only=True)
class StreamSettings:
    scene: SceneSettings  # its frames are those of all windows
    window: int  # frames
    stride: int
    gop: int  # frames from one I-frame to the next, at most
    questions: int  # about the last window
    vision: VisionSettings

    @property
    def watch(self) -> WatchOptions:
        pixels = self.scene.side**2
        return WatchOptions(self.window, self.stride, FPS, PictureOptions(min_pixels=pixels, max_pixels=pixels))


@dataclass(frozen=True, eq=False)
class Stream:
    """The grids of one scene by rule, which of them are whole, and questions about its last window."""

    questions: list[Question]
    grids: dict[str, list[Grid]]
    is_whole: dict[str, BoolArray]  # [grids]
    seconds_per_grid: float
    size: int  # grids of a window
    step: int  # grids from one window to the next

    @property
    def num_windows(self) -> int:
        return 1 + (len(self.grids["all"]) - self.size) // self.step

    def window(self, rule: str, number: int) -> tuple[Media, BoolArray]:
        """A window, and which of its grids are whole."""
        part = slice(number * self.step, number * self.step + self.size)
        return self._media(self.grids[rule][part], self.seconds_per_grid), self.is_whole[rule][part]

    def _media(self, grids: Sequence[Grid], seconds_per_grid: float) -> Media:
        return Media("video", tuple(grids), seconds_per_grid, 2 * len(grids))

    def fewer(self) -> Media:
        """The last window with fewer grids, of about as many tokens as the codec keeps of it."""
        last = self.num_windows - 1
        whole, wanted = self.window("all", last)[0].grids, self.window(CODEC, last)[0].num_tokens
        number = max(1, round(wanted / whole[0].num_groups))
        chosen = np.linspace(len(whole) - 1, 0, number).round().astype(int)[::-1]
        return self._media([whole[i] for i in chosen], self.seconds_per_grid * len(whole) / number)

    def after(self, encoder: VisionEncoder) -> Media:
        """The last window, pruned after the encoder to as many tokens as the codec keeps of it."""
        last = self.num_windows - 1
        whole, wanted = self.window("all", last)[0].grids, self.window(CODEC, last)[0].num_tokens
        tokens = encoder.encode(whole).float().view(len(whole), whole[0].num_groups, -1)
        kept = most_different(tokens, wanted)
        grids = [
            grid if groups.size == grid.num_groups else cut_after(grid, groups)
            for grid, groups in zip(whole, kept, strict=True)
        ]
        return self._media(grids, self.seconds_per_grid)


def make_stream(seed: int, settings: StreamSettings) -> Stream:
    plan = plan_scene(settings.scene, seed)
    clip = encode_x264(render(plan), QUALITIES[seed % len(QUALITIES)], FPS, gop=settings.gop)
    seen = {name: _grids(clip, replace(settings.watch, pruning=rule), settings.vision) for name, rule in RULES.items()}
    grids = {name: found for name, (found, _) in seen.items()}
    is_whole = {name: flags for name, (_, flags) in seen.items()}
    counts = [grid.num_tokens for grid in grids[CODEC]]
    for name, scores in (
        ("random", np.random.default_rng((seed, 4)).random((len(counts), grids["all"][0].num_groups))),
        ("difference", changes(grids["all"], is_whole[CODEC])),
    ):
        grids[name] = [keep_most(*each) for each in zip(grids["all"], scores, counts, strict=True)]
        is_whole[name] = is_whole[CODEC]
    per_grid = settings.vision.frames_per_grid
    return Stream(
        questions_about(last_window(plan, settings.window), settings.questions, seed), grids, is_whole, per_grid / FPS,
        settings.window // per_grid, settings.stride // per_grid,
    )  # fmt: skip


def _grids(clip: bytes, options: WatchOptions, vision: VisionSettings) -> tuple[list[Grid], BoolArray]:
    """All grids of a clip, and which of them are whole, or every eighth where nothing is pruned."""
    found: dict[float, tuple[Grid, bool]] = {}
    for window in windows(FrameReader(io.BytesIO(clip)), vision, options):
        found |= zip(
            window.times[:, 0].tolist(), zip(window.media.grids, window.is_anchor.tolist(), strict=True), strict=True
        )
    grids, flags = zip(*found.values(), strict=True)
    return list(grids), np.array(flags)


# ── questions ────────────────────────────────────────────────────────────────────────────────────────────────────────


def last_window(plan: Plan, num_frames: int) -> Plan:
    """The plan of the last frames alone."""
    first = plan.settings.num_frames - num_frames
    things = (
        replace(t, begin=t.begin - first, end=t.end - first, born=t.born - first, gone=t.gone - first)
        for t in plan.things
    )
    return Plan(replace(plan.settings, num_frames=num_frames), plan.seed, tuple(things))


def questions_about(plan: Plan, number: int, seed: int) -> list[Question]:
    """Where a thing is half seen in the first frames, nothing is asked that compares with them."""
    shares = inside_share(plan.full_boxes[:2], plan.settings.side)
    is_clear = ((shares <= CLEARLY[0]) | (shares >= CLEARLY[1]) | ~plan.exists[:2]).all()
    kinds = [kind for kind in QUESTIONS if is_clear or kind not in FIRST_FRAME]
    return ask_some(plan, number, seed, plan.settings.held_out, kinds)


# ── which groups are kept ────────────────────────────────────────────────────────────────────────────────────────────


def changes(grids: Sequence[Grid], is_whole: BoolArray) -> FloatArray:
    """[grids, groups] the largest mean difference of a group's pixels between two frames since the last whole grid."""
    scores = np.zeros((len(grids), grids[0].num_groups))
    before = None
    for index, grid in enumerate(grids):
        frames = _by_frame(grid)
        joined = frames if before is None else np.concatenate((before, frames), axis=1)
        largest = np.abs(np.diff(joined.astype(np.int16), axis=1)).mean(-1).max(-1)
        scores[index] = largest if index == 0 or is_whole[index - 1] else np.maximum(scores[index - 1], largest)
        before = frames[:, -1:]
    return scores


def _by_frame(grid: Grid) -> NDArray[np.uint8]:
    """[groups, frames, numbers] the pixels of a whole grid."""
    patches = grid.patches.reshape(grid.num_groups, grid.merge_size**2, *grid.patches.shape[1:])
    by_frame = np.moveaxis(patches, 3, 1)  # [groups, frames, patches of a group, channels, height, width]
    return by_frame.reshape(*by_frame.shape[:2], -1)


def keep_most(grid: Grid, scores: FloatArray, number: int) -> Grid:
    """The grid with the groups of the highest scores."""
    if number == grid.num_groups:
        return grid
    return cut(grid, np.sort(np.argsort(-scores, kind="stable")[:number]))


def cut(grid: Grid, kept: IntArray) -> Grid:
    """A whole grid with these groups alone."""
    patches = grid.patches.reshape(grid.num_groups, -1, *grid.patches.shape[1:])[kept]
    return Grid(patches.reshape(-1, *grid.patches.shape[1:]), grid.height, grid.width, grid.merge_size, kept)


# ── pruning after the encoder ────────────────────────────────────────────────────────────────────────────────────────


def most_different(tokens: torch.Tensor, wanted: int) -> list[IntArray]:
    """By grid, the groups to keep of tokens [grids, groups, hidden]: `wanted` in all, at least one a grid."""
    similar = torch.nn.functional.cosine_similarity(tokens[1:], tokens[:-1], dim=-1)
    scores = torch.cat((torch.full_like(tokens[:1, :, 0], 3.0), 1 - similar)).cpu().numpy()  # 1 - similar is at most 2
    scores[np.arange(len(scores)), scores.argmax(1)] += 4  # of each grid, its best comes first
    kept = np.zeros(scores.size, dtype=bool)
    kept[np.argsort(-scores.reshape(-1), kind="stable")[: max(wanted, len(scores))]] = True
    return [np.flatnonzero(each) for each in kept.reshape(scores.shape)]


@dataclass(frozen=True, eq=False)
class SeenWhole(Grid):
    """A grid that the encoder sees whole, of which the prompt has some tokens."""

    whole: Grid | None = None

    @cached_property
    def name(self) -> bytes:
        assert self.whole is not None
        return blake2b(self.whole.name + self.groups.tobytes(), digest_size=NAME_BYTES).digest()


def cut_after(grid: Grid, kept: IntArray) -> SeenWhole:
    return SeenWhole(**vars(cut(grid, kept)), whole=grid)


@dataclass(frozen=True)
class SelectedShape(ForwardShape):
    """A forward whose output has fewer tokens than groups."""

    num_tokens: int = 0


class SelectingEncoder(VisionEncoder):
    """The same encoder, which gives of a SeenWhole the tokens that were kept."""

    @classmethod
    def of(cls, encoder: VisionEncoder) -> SelectingEncoder:
        selecting = cls.__new__(cls)
        vars(selecting).update(vars(encoder))
        return selecting

    def prepare(self, grids: Sequence[Grid]) -> EncoderInput[NDArray]:
        whole = [grid.whole if isinstance(grid, SeenWhole) and grid.whole is not None else grid for grid in grids]
        given = super().prepare(whole)
        if not any(isinstance(grid, SeenWhole) for grid in grids):
            return given
        starts = offsets([grid.num_tokens for grid in whole])
        kept = np.concatenate([
            start + (grid.groups if isinstance(grid, SeenWhole) else np.arange(grid.num_tokens))
            for start, grid in zip(starts, grids, strict=False)
        ])  # fmt: skip
        shape = SelectedShape(**{**vars(given.shape), "is_ordered": False}, num_tokens=len(kept))
        return replace(given, shape=shape, places=given.places[kept])
