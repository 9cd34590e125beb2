"""Filters, penalties and bias of requests on the device, and log-probabilities.

Knows the parameters of each slot and reads the tokens of its history: bias, penalties, the ban on end tokens, top_k,
top_p and min_p turn a row of logits into one in which forbidden tokens are minus infinity. Does not know noise, models,
drafts or grammars. Sampling does not know of filters: the noise of a token depends only on its id.

The reference is faser/runtime/sampling.py: the same float32 operations in the same order, the same rules for ties. The
last bit of an exp or a log may differ, and float64 sums are made in another order. So top_p may cut one token earlier
or later if the mass up to a token is top_p to seven digits, or if two weights differ by one unit in the last place. All
other filters, the adjustments and the order of log-probabilities are exact.

The host never waits for the device: the parameters of a call's rows travel in a few small copies from page-locked
memory, and no shape depends on the content of a tensor. Nothing here is captured in a graph.

Shapes: S rows of one call, R some rows of the call, V tokens of the vocabulary, K log-probabilities asked for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from faser.arrays import BoolArray, FloatArray, IntArray
from faser.request import SamplingParams, TokenLogprobs
from faser.runtime.cuda.sampling import inverse_temperature
from faser.runtime.cuda.transfer import send

SMALL_TOP_K = 256  # up to this top_k, top_p reads only the best tokens; otherwise it sorts the row

_LOWEST = float(np.finfo(np.float32).min)


@dataclass(frozen=True)
class _FilteredRows:
    """Parameters of rows, on the device: float64 [S, 1] each. The fields name the columns of `Filters._table`."""

    slot: Tensor
    position: Tensor
    num_prompt: Tensor
    inverse_temperature: Tensor
    repetition: Tensor
    presence: Tensor
    frequency: Tensor
    top_k: Tensor  # 0 keeps all
    top_p: Tensor  # 1 keeps all
    log_min_p: Tensor  # minus infinity keeps all


_COLUMN = {each.name: column for column, each in enumerate(fields(_FilteredRows))}


class Filters:
    """Filters rows of logits for the requests admitted to its slots. Stop ids and bias beyond V are left out."""

    def __init__(self, max_slots: int, vocab_size: int, device: torch.device | str) -> None:
        self._vocab_size = vocab_size
        self._device = torch.device(device)
        # each [max_slots]
        self.is_special = np.zeros(max_slots, np.bool_)  # some rows of the slot may need `apply` or `logprobs`
        self.num_logprobs = np.full(max_slots, -1, np.int64)  # -1: not asked for
        self._always = np.zeros(max_slots, np.bool_)  # all rows of the slot are changed
        self._penalised = np.zeros(max_slots, np.bool_)
        self._filtered = np.zeros(max_slots, np.bool_)
        self._num_banned = np.zeros(max_slots, np.int64)  # first outputs that must not be a stop id
        # [max_slots, columns]
        self._table = np.zeros((max_slots, len(_COLUMN)))
        self._bias: dict[int, tuple[IntArray, NDArray[np.float32]]] = {}  # by slot, only of slots that have a bias
        self._stop_ids: dict[int, IntArray] = {}  # by slot

    def admit(self, slot: int, params: SamplingParams, num_prompt: int, stop_ids: Sequence[int]) -> None:
        """Give `slot` to a request. `stop_ids` are banned while it has fewer than min_tokens outputs."""
        self._fill_table(slot, params, num_prompt)
        self._bias.pop(slot, None)
        if params.logit_bias:
            token_ids = np.array(list(params.logit_bias), np.int64)
            bias = np.array(list(params.logit_bias.values()), np.float32)
            known = token_ids < self._vocab_size
            self._bias[slot] = token_ids[known], bias[known]
        self._stop_ids[slot] = np.array([each for each in stop_ids if each < self._vocab_size], np.int64)
        self._num_banned[slot] = params.min_tokens if self._stop_ids[slot].size else 0
        self._penalised[slot] = params.penalised
        self._always[slot] = self._filtered[slot] | params.penalised | (slot in self._bias)
        self.num_logprobs[slot] = -1 if params.logprobs is None else params.logprobs
        self.is_special[slot] = self._always[slot] | (self._num_banned[slot] > 0) | (params.logprobs is not None)

    def _fill_table(self, slot: int, params: SamplingParams, num_prompt: int) -> None:
        """A greedy request has no filters: its parameters for them are ignored."""
        sampled = params.temperature > 0
        values = {
            "num_prompt": num_prompt,
            "inverse_temperature": inverse_temperature(params.temperature) if sampled else 1.0,
            "repetition": params.repetition_penalty,
            "presence": params.presence_penalty,
            "frequency": params.frequency_penalty,
            "top_k": params.top_k if sampled and params.top_k < self._vocab_size else 0,
            "top_p": params.top_p if sampled else 1.0,
            "log_min_p": math.log(params.min_p) if sampled and params.min_p > 0 else -math.inf,
        }
        for name, value in values.items():
            self._table[slot, _COLUMN[name]] = value
        self._filtered[slot] = values["top_k"] > 0 or values["top_p"] < 1 or values["log_min_p"] > -math.inf

    def changes(self, slots: IntArray, positions: IntArray) -> BoolArray:
        """Which rows `apply` changes: [S], [S] -> [S]."""
        return self._always[slots] | self._bans(slots, positions)

    def apply(self, logits: Tensor, slots: IntArray, positions: IntArray, history: Tensor) -> Tensor:
        """The logits to choose from: float32 [S, V], [S], [S], history int32 [max_slots, max_len] -> float32 [S, V].

        A row that samples position t sees the prefix history[slot, :t], drafts included. `logits` is not changed. The
        result for a row with a NaN or without a finite maximum is undefined.
        """
        table = self._table[slots]
        table[:, _COLUMN["slot"]] = slots
        table[:, _COLUMN["position"]] = positions
        # [columns, S, 1]
        rows = _FilteredRows(*send(np.ascontiguousarray(table.T), self._device).unsqueeze(-1).unbind(0))
        scores = self._adjust(logits, slots, positions, rows, history)
        return self._filter(scores, slots, rows) if self._filtered[slots].any() else scores

    def _bans(self, slots: IntArray, positions: IntArray) -> BoolArray:
        """Position t has t - num_prompt outputs before it."""
        return np.asarray(positions - self._column("num_prompt", slots) < self._num_banned[slots])

    def _adjust(
        self, logits: Tensor, slots: IntArray, positions: IntArray, rows: _FilteredRows, history: Tensor
    ) -> Tensor:
        scores = logits.clone()
        biased = [row for row, slot in enumerate(slots.tolist()) if slot in self._bias]
        if biased:
            where = self._places(biased, [self._bias[int(slots[row])][0] for row in biased])
            bias = send(np.concatenate([self._bias[int(slots[row])][1] for row in biased]), self._device)
            flat = scores.view(-1)
            flat[where] = flat[where] + bias
        if self._penalised[slots].any():
            scores = self._penalise(scores, slots, rows, history[:, : int(positions.max())])
        banned = np.flatnonzero(self._bans(slots, positions)).tolist()
        if banned:
            where = self._places(banned, [self._stop_ids[int(slots[row])] for row in banned])
            scores.view(-1).index_fill_(0, where, -math.inf)
        return scores

    def _places(self, rows: Sequence[int], token_ids: Sequence[IntArray]) -> Tensor:
        """Indices of the tokens of some rows in the flat scores, [S * V]; on the device."""
        flat = [row * self._vocab_size + some for row, some in zip(rows, token_ids, strict=True)]
        return send(np.concatenate(flat), self._device)

    def _penalise(self, scores: Tensor, slots: IntArray, rows: _FilteredRows, history: Tensor) -> Tensor:
        """Repetition for each token of the prefix; presence and frequency for each output token so far."""
        # [S, longest prefix]
        token_ids = history.index_select(0, rows.slot.view(-1).long()).long()
        column = torch.arange(token_ids.shape[1], device=token_ids.device)
        known = (column < rows.position) & (token_ids >= 0) & (token_ids < self._vocab_size)
        token_ids.clamp_(0, self._vocab_size - 1)
        if (self._column("repetition", slots) != 1).any():
            penalty = rows.repetition.float()
            penalised = torch.where(scores > 0, scores / penalty, scores * penalty)
            scores = torch.where(_count(token_ids, known, scores) > 0, penalised, scores)
        if (self._column("presence", slots) != 0).any() or (self._column("frequency", slots) != 0).any():
            counts = _count(token_ids, known & (column >= rows.num_prompt), scores)
            less = rows.presence.float() + rows.frequency.float() * counts.float()
            scores = torch.where(counts > 0, scores - less, scores)
        return scores

    def _filter(self, scores: Tensor, slots: IntArray, rows: _FilteredRows) -> Tensor:
        """Tokens that are dropped, by their probabilities at the row's temperature, get the score minus infinity."""
        # log p up to a constant: the best token has 0, so that no temperature overflows. [S, V]
        scaled = scores - scores.amax(dim=-1, keepdim=True).clamp(min=_LOWEST)
        scaled *= rows.inverse_temperature.float()
        top_k, top_p = self._column("top_k", slots), self._column("top_p", slots)
        if top_k.any():
            _keep_top_k(scaled, rows.top_k.long(), int(top_k.max()))
        is_narrow = (top_k > 0) & (top_k <= SMALL_TOP_K)
        for some in (np.flatnonzero(is_narrow & (top_p < 1)), np.flatnonzero(~is_narrow & (top_p < 1))):
            if some.size:
                num_best = int(top_k[some].max()) if is_narrow[some[0]] else self._vocab_size
                where = send(some, self._device)
                scaled[where] = _keep_top_p(scaled[where], rows.top_p[where], num_best)
        if (self._column("log_min_p", slots) > -math.inf).any():
            scaled.masked_fill_(scaled < rows.log_min_p.float(), -math.inf)
        return scores.masked_fill(scaled == -math.inf, -math.inf)

    def _column(self, name: str, slots: IntArray) -> FloatArray:
        return self._table[slots, _COLUMN[name]]


def _count(token_ids: Tensor, counted: Tensor, scores: Tensor) -> Tensor:
    """How often each token occurs: ids int64 [S, L], which of them count bool [S, L] -> int32, shaped like scores."""
    counts = torch.zeros_like(scores, dtype=torch.int32)
    return counts.scatter_add_(1, token_ids, counted.int())


def _keep_top_k(scaled: Tensor, top_k: Tensor, largest: int) -> None:
    """In place: drop tokens below the k-th best of a row; ties stay. [S, V], int64 [S, 1]; 0 keeps all."""
    kth = scaled.topk(largest, dim=-1).values.gather(1, (top_k - 1).clamp(min=0))
    scaled.masked_fill_((scaled < kth) & (top_k > 0), -math.inf)


def _keep_top_p(scaled: Tensor, top_p: Tensor, num_best: int) -> Tensor:
    """Keep the smallest set whose probability reaches top_p; of equally likely tokens the lower ids come first.

    [R, V], float64 [R, 1] -> [R, V]. For `num_best` see `_cut`.
    """
    weight = scaled.exp()
    size, least = _cut(weight, top_p, num_best)
    above, ties = weight > least, weight == least
    room = size - above.sum(dim=-1, keepdim=True)
    ties &= ties.cumsum(dim=-1, dtype=torch.int32) <= room
    return scaled.masked_fill_(~(above | ties), -math.inf)


def _cut(weight: Tensor, top_p: Tensor, num_best: int) -> tuple[Tensor, Tensor]:
    """How many of the heaviest tokens reach top_p, and the weight of the last one: [R, V], [R, 1] -> [R, 1] each.

    Only the num_best heaviest are read: V, or at least a row's top_k. In the latter case all other tokens that have a
    weight tie with the k-th best, and so with the last one read.
    """
    num_tokens = weight.shape[1]
    # [R, num_best]
    best = weight.topk(num_best, dim=-1).values if num_best < num_tokens else weight.sort(descending=True).values
    mass = best.cumsum(dim=-1, dtype=torch.float64)
    wanted = top_p * weight.sum(dim=-1, keepdim=True, dtype=torch.float64)
    size = torch.searchsorted(mass, wanted) + 1
    least = best.gather(1, size.clamp(max=num_best) - 1)
    missing = (wanted - mass[:, -1:]) / best[:, -1:]  # tokens like the last one; negative or NaN if none is missing
    more = missing.ceil().clamp(0, num_tokens).nan_to_num().long()
    return torch.where(size > num_best, num_best + more, size), least


def logprobs(logits: Tensor, chosen: Tensor, count: int) -> Tensor:
    """The model's own log-probabilities, for one copy to the host: float32 [S, V], int32 [S] -> int32 [S, 2 + 2K].

    A row holds the chosen token, the bits of its log-probability, the `count` most likely tokens, best first and ties
    by id, and the bits of their log-probabilities. The order is that of unique integer keys, so it is deterministic.
    """
    count = min(count, logits.shape[1])
    # [S, V]
    log_p = torch.log_softmax(logits, dim=-1)
    # ascending where log p descends, since no log p is above 0; then by id
    keys = (log_p.abs().view(torch.int32).long() << 32) | torch.arange(logits.shape[1], device=logits.device)
    # [S, K]
    top = keys.topk(count, dim=-1, largest=False).values & 0xFFFFFFFF
    tokens = torch.cat([chosen.long().unsqueeze(-1), top], dim=-1)
    values = log_p.gather(1, tokens).view(torch.int32)
    return torch.cat([tokens[:, :1].int(), values[:, :1], top.int(), values[:, 1:]], dim=-1)


def unpack_logprobs(packed: NDArray[np.int32], counts: IntArray) -> list[TokenLogprobs]:
    """Rows that `logprobs` packed, [S, 2 + 2K], for requests that asked for `counts` [S] most likely tokens."""
    num_top = packed.shape[1] // 2 - 1
    token_ids = packed[:, 2 : 2 + num_top].tolist()
    values = np.ascontiguousarray(packed[:, 2 + num_top :]).view(np.float32).tolist()
    own = np.ascontiguousarray(packed[:, 1]).view(np.float32).tolist()
    return [
        TokenLogprobs(token, mine, tuple(zip(top[:count], top_values[:count], strict=True)))
        for token, mine, top, top_values, count in zip(
            packed[:, 0].tolist(), own, token_ids, values, counts.tolist(), strict=True
        )
    ]
