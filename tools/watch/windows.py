"""Windows of scenes with questions, as tensors: what a training or an evaluation reads.

Knows how an index becomes a scene, its questions and its dense targets. Knows nothing of models. A window is a function
of its index and the settings, so a training that goes on needs no state of a generator. Evaluations draw from indices
that training never reaches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from tools.watch.questions import QUESTIONS, ask_some
from tools.watch.reader import Prompts
from tools.watch.scenes import Plan, SceneSettings, plan_scene, render
from tools.watch.targets import TARGETS, dense_targets

KIND_NAMES = tuple(sorted(QUESTIONS))  # of questions
EVALUATION = 1 << 40  # first seed that training never reaches

Key = tuple[int, int]  # seed, number of frames
Batch = dict[str, Tensor]
Draw = Callable[[Plan], NDArray[np.uint8]]


@dataclass(frozen=True, kw_only=True)
class WindowSettings:
    scene: SceneSettings
    cells: int  # of a side of a grid, one per token
    questions: int  # a window
    kinds: tuple[str, ...] = KIND_NAMES  # of questions
    held_out_words: bool = False  # phrasings that training never uses


class Windows(Dataset[Batch]):
    """By key: frames, tokens of the questions, dense labels. `draw` makes the frames."""

    def __init__(self, settings: WindowSettings, prompts: Prompts, draw: Draw = render) -> None:
        self.settings, self.prompts, self._draw = settings, prompts, draw

    def __getitem__(self, key: Key) -> Batch:
        settings, (seed, num_frames) = self.settings, key
        plan = plan_scene(replace(settings.scene, num_frames=num_frames), seed)
        questions = ask_some(plan, settings.questions, seed, settings.held_out_words, settings.kinds)
        ids, answer_at = self.prompts.branches(questions)
        labels = dense_targets(plan, settings.cells)
        return {
            "frames": torch.from_numpy(self._draw(plan)),  # [frames, side, side, 3]
            "ids": ids,  # [questions, tokens]
            "answer_at": answer_at,  # [questions]
            "kind": torch.tensor([KIND_NAMES.index(question.kind) for question in questions]),  # [questions]
            "labels": torch.from_numpy(np.stack([labels[name] for name in TARGETS])),  # [targets, grids, cells, cells]
        }


def training_keys(batch: int, num_frames: tuple[int, ...], seed: int, first_step: int) -> Iterator[list[Key]]:
    """Batches of keys without end. Each step has one number of frames, in turn."""
    assert seed < 256, "seeds share out the indices"
    step = first_step
    while True:
        start = (seed << 32) + step * batch
        yield [(start + index, num_frames[step % len(num_frames)]) for index in range(batch)]
        step += 1


def evaluation_keys(num_windows: int, batch: int, num_frames: int) -> list[list[Key]]:
    seeds = range(EVALUATION, EVALUATION + num_windows)
    return [[(seed, num_frames) for seed in seeds[start : start + batch]] for start in range(0, num_windows, batch)]


def load(windows: Windows, keys: Iterator[list[Key]] | list[list[Key]], workers: int, pin: bool) -> Iterator[Batch]:
    """Batches in the order of their keys; `workers` processes draw them, or this one if 0."""
    loader: DataLoader[Batch] = DataLoader(
        windows,
        batch_sampler=keys,  # type: ignore[arg-type]  # any iterable of lists of keys will do
        num_workers=workers,
        pin_memory=pin,
        prefetch_factor=2 if workers else None,
        worker_init_fn=_one_thread,
    )
    yield from loader


def _one_thread(worker: int) -> None:
    torch.set_num_threads(1)
