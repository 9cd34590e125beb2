"""Where drafts come from on a GPU: a draft model here; heads in eagle3.py and block.py, prompt lookup in lookup.py.

A drafter writes its tokens into the device's history, behind each request's context and the drafts that wait there.
Knows plans and its own model; knows nothing of the target.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
import torch

from faser.arrays import IntArray
from faser.runtime.cuda.graphs import Shape, first_draft, next_draft, on_part
from faser.runtime.cuda.model import CudaModel
from faser.step import KeyStarts, PageWrites, StepPlan

FirstShape = Callable[[int, int], Shape | None]  # (requests, most rows of one) → the graph of the first launch


class Draft(Protocol):
    """The drafts of one step while they are made. B requests of the plan, n that drafted in the latest launch."""

    is_whole: bool  # the first launch drafts all tokens

    @property
    def num_tokens(self) -> IntArray: ...  # [B] tokens drafted so far

    @property
    def requests(self) -> IntArray: ...  # [n] by index in the plan, in the order of the rows of the launch

    @property
    def num_unfinished(self) -> int: ...  # how many of the first of these have not reached their lengths

    @property
    def confidence(self) -> torch.Tensor | None: ...  # [n or more] probabilities of the latest tokens, if known

    def extend(self, num_sms: int = 0) -> bool:
        """Launch the next token of every request that has not reached its length. False: nobody had one to come.

        `num_sms` is the part of the device that the launch keeps to; 0: the whole device.
        """
        ...


class CudaDrafter(ABC):
    """Makes the drafts of a step."""

    models: tuple[CudaModel, ...] = ()  # whose graphs are captured

    def graphs(self, num_requests: Sequence[int], length: int) -> list[tuple[CudaModel, Shape | None]]:
        """What drafts of `length` tokens replay, for these batch sizes."""
        return []

    def dry_runs(self) -> list[Callable[[], None]]:
        """Launches of kernels that no graph has, to compile them at start."""
        return []

    def apply(self, writes: PageWrites) -> None:
        for model in self.models:
            model.apply(writes)

    def begin_again(self, starts: KeyStarts) -> None:
        """A draft that sees a window begins again in these slots."""
        for model in self.models:
            model.begin_again(starts)

    @abstractmethod
    def begin(self, plan: StepPlan) -> Draft:
        """The drafts of a step. No model runs before the first `extend`."""


class CudaModelDrafter(CudaDrafter):
    """A small model that samples with the target's noise, so that it agrees as often as it can."""

    def __init__(self, model: CudaModel) -> None:
        self.models = (model,)
        self.ragged = True  # False, for measuring: every token of a draft costs as if everybody drafted it

    def graphs(self, num_requests: Sequence[int], length: int) -> list[tuple[CudaModel, Shape | None]]:
        (model,) = self.models
        first: list[tuple[CudaModel, Shape | None]] = [(model, first_draft(size, 2)) for size in num_requests]
        return first + [(model, next_draft(size)) for size in num_requests if length > 1]

    def begin(self, plan: StepPlan) -> ModelDraft:
        return ModelDraft(self.models[0], plan, self.ragged)


class ModelDraft:
    """Ragged: a request leaves at its own length. The longest drafts come first, so active rows are the first rows.

    The first launch also computes the context tokens the draft lags behind by, for requests that will not draft yet as
    well.
    """

    is_whole = False

    def __init__(
        self,
        model: CudaModel,
        plan: StepPlan,
        ragged: bool,
        first_shape: FirstShape = first_draft,
        first_row: int = 0,
    ) -> None:
        """`first_row`: the first token of a context that has a row. `first_shape`: of the first launch."""
        order = np.argsort(-plan.lengths, kind="stable")
        self._start = np.maximum(plan.draft_start, first_row)  # [B]
        self._rows = np.where(plan.draft_rows > 0, plan.draft_start + plan.draft_rows - self._start, 0)  # [B]
        self._order = order[self._rows[order] > 0]  # [n] by index in the plan
        self._first_shape = first_shape
        self._lengths = plan.lengths[self._order]
        depths = np.arange(int(self._lengths.max(initial=0)) + 2)
        self._num_active: list[int] = np.searchsorted(-self._lengths, -depths).tolist()  # [k] draft more than k
        self._depth = 0  # tokens launched
        self._model = model
        self._plan = plan
        self._ragged = ragged

    @property
    def num_tokens(self) -> IntArray:
        lengths = self._plan.lengths
        return np.minimum(lengths, self._depth) if self.num_unfinished else lengths

    @property
    def requests(self) -> IntArray:
        return self._order[: self._num_active[self._depth - 1]]

    @property
    def num_unfinished(self) -> int:
        return self._num_active[self._depth]

    @property
    def confidence(self) -> torch.Tensor:
        return self._model.choices.confidence

    def extend(self, num_sms: int = 0) -> bool:
        if not self._order.size or (self._depth and not self.num_unfinished):
            return False
        if self._depth == 0:
            self._launch_first(num_sms)
        else:
            shape = next_draft(self.num_unfinished if self._ragged else self._order.size)
            self._model.launch(replace(shape, num_sms=num_sms))
        self._depth += 1
        return True

    def _launch_first(self, num_sms: int) -> None:
        plan, order, model = self._plan, self._order, self._model
        rows, start = self._rows[order], self._start[order]
        none = np.zeros_like(rows)
        model.set_requests(
            plan.slots[order], start, rows, none, self._lengths > 0, plan.unsettled[order], none, plan.frontier[order]
        )
        model.set_lengths(self._lengths)
        shape = on_part(self._first_shape(rows.size, int(rows.max())), num_sms)
        model.launch_rows(shape, rows, start, self.num_unfinished)
