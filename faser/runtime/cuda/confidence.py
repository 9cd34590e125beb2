"""How sure the draft model is of its tokens, read back by the host while drafts are made.

Knows drafts and the rule that ends them (faser/rules/stopping.py). Knows nothing of the target.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from faser.arrays import FloatArray, IntArray
from faser.rules.stopping import Stopping
from faser.runtime.cuda.drafter import Draft
from faser.runtime.cuda.launched import LaunchedStep


class Readback:
    """Rows of float32 copied from the device to page-locked memory. Taking them waits for the latest copy."""

    def __init__(self, num_rows: int, num_columns: int, device: torch.device) -> None:
        memory = torch.zeros(num_rows, num_columns, dtype=torch.float32)
        self._memory = memory.pin_memory() if device.type == "cuda" else memory
        self._values: NDArray[np.float32] = self._memory.numpy()
        make: Any = torch.cuda.Event
        self._event = make() if device.type == "cuda" else None

    def request(self, values: torch.Tensor, row: int = 0) -> None:
        """Copy values [n] behind everything that was launched so far."""
        self._memory[row, : values.shape[0]].copy_(values, non_blocking=True)
        if self._event is not None:
            self._event.record()

    def take(self) -> NDArray[np.float32]:
        """[num_rows, num_columns]; valid until the next request."""
        if self._event is not None:
            self._event.synchronize()
        return self._values


class DraftConfidence:
    """The confidence of the drafts of one step, token by token. A step starts it anew."""

    def __init__(self, max_length: int, max_requests: int, device: torch.device) -> None:
        self._readback = Readback(max(1, max_length), max_requests, device)
        self._requests: list[IntArray] = []  # of each token: who drafted it, by index in the plan

    def draft(self, step: LaunchedStep, draft: Draft, num_sms: int = 0, *, reads: bool = False) -> Iterator[None]:
        """Draft by the rule of the plan, else to the full lengths. `reads`: `values` tells the confidence later."""
        if step.plan.stopping is not None:
            yield from self.draft_by_rule(step, step.plan.stopping, draft, num_sms)
            return
        self._requests.clear()
        while draft.extend(num_sms):
            if reads:
                self._request(draft)
        step.num_drafted = draft.num_tokens

    def draft_by_rule(self, step: LaunchedStep, stopping: Stopping, draft: Draft, num_sms: int = 0) -> Iterator[None]:
        """Draft as long as the rule says so. It is asked between two tokens, which waits for the device.

        Of drafts that were made all at once it says how much is verified.
        """
        self._requests.clear()
        if draft.extend(num_sms):
            self._request(draft)
        if not self._requests:
            step.num_drafted = draft.num_tokens
            return
        if draft.is_whole:
            while draft.extend(num_sms):
                self._request(draft)
            yield
            step.confidence = self.values(step.plan.lengths.size, stopping.rates.shape[1])
            step.num_drafted = stopping.cut(step.confidence, step.plan.lengths)
            return
        yield
        watch = stopping.watch(self._requests[0])
        while num_unfinished := draft.num_unfinished:
            latest = self._readback.take()[len(self._requests) - 1]
            if not watch.goes_on(latest[:num_unfinished].tolist()):
                break
            draft.extend(num_sms)
            self._request(draft)
        step.num_drafted = draft.num_tokens
        step.confidence = self.values(step.plan.lengths.size, stopping.rates.shape[1])

    def values(self, num_requests: int, depth: int = 1) -> FloatArray:
        """[B, depth or more] by index in the plan; NaN where nothing was drafted. Waits for the device."""
        values = self._readback.take()
        found = np.full((num_requests, max(depth, len(self._requests))), np.nan)
        for token, requests in enumerate(self._requests):
            found[requests, token] = values[token, : requests.size]
        return found

    def _request(self, draft: Draft) -> None:
        requests, confidence = draft.requests, draft.confidence
        if confidence is not None and requests.size:
            self._readback.request(confidence[: requests.size], len(self._requests))
            self._requests.append(requests)
