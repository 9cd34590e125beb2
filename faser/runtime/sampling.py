"""Exact sampling: a token is a function of its row of logits, its prefix, its parameters, its seed and its position.

Token t of a request is argmax over v of log p_t(v) + g_t(v), where p_t is the distribution `SamplingParams` describes
and g_t is Gumbel noise keyed by (seed, t, v). That is an exact sample from p_t, and a draft that uses the same noise
agrees with the target far more often than an independent draw would.

Knows the parameters of each slot and reads the tokens of its history. Knows no models and no steps, and does not tell
drafted from committed tokens. Every row is computed by itself, by operations whose result for a row does not depend on
the number of rows. A plain greedy batch stays on the logits' device; the rest is numpy on the host, where argmax,
partition and sort are several times faster than torch's.

The noise needs no state and only 32-bit integers, so that a kernel can recompute it: two keys per (seed, position),
made on the host, then h = mix32(mix32(v * WEYL + key0) ^ key1) per token. mix32 is a two-multiply xorshift finaliser
from Wellons' search for the smallest avalanche bias (hash-prospector). With one round, rows whose key0 differ by a
small multiple of WEYL would repeat each other, shifted; the second round with the second key prevents it. Both rounds
are bijections, so a row's hashes are distinct: V draws without replacement out of 2^32, which no test of this size can
tell from independent draws.

Shapes: N rows of one call, R a subset of them, V the tokens of the vocabulary, L a shortlist of tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from faser.arrays import IntArray
from faser.errors import EngineError, InvalidRequest
from faser.request import Grammar, SamplingParams, TokenLogprobs
from faser.text.grammar import GrammarCompiler, Matcher

UInt32Array = NDArray[np.uint32]
Float32Array = NDArray[np.float32]
Shortlist = tuple[IntArray, Float32Array]

WEYL = np.uint32(0x9E3779B1)  # odd, near 2^32 / golden ratio: consecutive token ids land far apart
MULTIPLIERS = (np.uint32(0x21F0AAAD), np.uint32(0xD35A2D97))
SHIFTS = (np.uint32(16), np.uint32(15), np.uint32(15))
_WEYL64 = np.uint64(0x9E3779B97F4A7C15)
_BLOCK = 1 << 16  # elements worked on at a time: a handful of 256 KiB arrays fit a core's cache
LARGEST_UNIFORM = np.float32(1 - 2**-24)

_MIN_TEMPERATURE = 1e-30  # a gap between logits divided by this is still a finite float32
_LOWEST = np.finfo(np.float32).min

NO_TOKENIZER = "a grammar needs a tokenizer, and the model has none; leave the grammar out"
BROKEN = "the model gave no finite logits for this request (overflow in its dtype?); try another dtype"
NO_TOKEN = "none of the tokens the grammar allows has a chance here; give a simpler grammar"


# --- noise ---------------------------------------------------------------------------------------------------------


def gumbel(seeds: NDArray[np.uint64], positions: IntArray, num_tokens: int) -> Float32Array:
    """Standard Gumbel noise of the tokens 0..num_tokens-1 at each (seed, position): [N], [N] -> [N, num_tokens]."""
    key0, key1 = noise_keys(seeds, positions)
    num_rows = len(key0)
    # [num_tokens]
    steps = np.arange(num_tokens, dtype=np.uint32) * WEYL
    noise = np.empty((num_rows, num_tokens), np.float32)
    for rows in _blocks(num_rows, num_tokens):
        hashed = _hash(steps + key0[rows, None], key1[rows, None])
        _to_gumbel(hashed.reshape(-1), noise[rows])
    return noise


def gumbel_of(seeds: NDArray[np.uint64], positions: IntArray, rows: IntArray, token_ids: IntArray) -> Float32Array:
    """Only the entries [rows[i], token_ids[i]] of `gumbel(seeds, positions, ...)`: -> [L]."""
    key0, key1 = noise_keys(seeds, positions)
    noise = np.empty(len(rows), np.float32)
    _to_gumbel(_hash(token_ids.astype(np.uint32) * WEYL + key0[rows], key1[rows]), noise)
    return noise


def _blocks(num_rows: int, num_tokens: int) -> Iterator[slice]:
    """Rows to work on at a time: few enough for a core's cache, many enough to be worth a call."""
    size = max(1, _BLOCK // num_tokens)
    return (slice(start, start + size) for start in range(0, num_rows, size))


def noise_keys(seeds: NDArray[np.uint64], positions: IntArray) -> tuple[UInt32Array, UInt32Array]:
    """Two words per (seed, position): output `position` of a splitmix64 stream that starts at the mixed seed."""
    key = _mix64(_mix64(np.asarray(seeds, np.uint64)) + np.asarray(positions).astype(np.uint64) * _WEYL64)
    return key.astype(np.uint32), (key >> np.uint64(32)).astype(np.uint32)


def _mix64(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of splitmix64; the constant added first keeps 0 from being a fixed point."""
    x = x + _WEYL64
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _hash(x: UInt32Array, key1: UInt32Array) -> UInt32Array:
    """mix32(mix32(x) ^ key1), in the memory of x."""
    scratch = np.empty_like(x)
    _mix32(x, scratch)
    np.bitwise_xor(x, key1, out=x)
    _mix32(x, scratch)
    return x


def _mix32(x: UInt32Array, scratch: UInt32Array) -> None:
    for shift, factor in zip(SHIFTS, (*MULTIPLIERS, None), strict=True):
        np.right_shift(x, shift, out=scratch)
        np.bitwise_xor(x, scratch, out=x)
        if factor is not None:
            np.multiply(x, factor, out=x)


def _to_gumbel(hashed: UInt32Array, out: Float32Array) -> None:
    """-log(E) with E = -log1p(-u), u = (h + 1/2) / 2^32: [L] -> out, of L elements.

    The winner has a small E, and it is near u = 0 that float32 has resolution to spare. The float work runs on a
    multiple of 64 elements: whole vectors only, so an element's value does not depend on where it stands.
    """
    u = np.full(-(-hashed.size // 64) * 64, 0.5, np.float32)
    u[: hashed.size] = hashed
    u += np.float32(0.5)
    u *= np.float32(-(2.0**-32))
    np.maximum(u, -LARGEST_UNIFORM, out=u)  # the 128 largest hashes round up to 1
    np.log1p(u, out=u)
    np.negative(u, out=u)
    np.log(u, out=u)
    np.negative(u[: hashed.size].reshape(out.shape), out=out)


def broken_rows(logits: torch.Tensor) -> NDArray[np.bool_]:
    """[N] rows with a NaN, or without a finite best logit: the model overflowed."""
    return ~torch.isfinite(logits.amax(dim=-1)).cpu().numpy()


# --- sampler -------------------------------------------------------------------------------------------------------


class _Kind(IntEnum):
    """How a row is sampled, cheapest first: best score, noise on every token, noise on the tokens that filters keep."""

    GREEDY = 0
    TEMPERATURE = 1
    FILTERED = 2


class Sampler:
    """Samples rows of logits for the requests admitted to its slots.

    `history` is int64 [max_slots, max_len] in CPU memory and belongs to the executor; row `slot` holds that request's
    tokens, drafted ones included, and a row that samples position t sees the prefix history[slot, :t].
    """

    def __init__(
        self, max_slots: int, vocab_size: int, history: torch.Tensor, compiler: GrammarCompiler | None = None
    ) -> None:
        self.failed_rows: dict[int, str] = {}  # why rows of the last `sample` have no token
        self._compiler = compiler
        self._token_ids = np.arange(vocab_size)
        self._history: IntArray = history.numpy()
        # each [max_slots]
        self._kind = np.zeros(max_slots, np.int64)
        self._seeds = np.zeros(max_slots, np.uint64)
        self._num_prompt = np.zeros(max_slots, np.int64)
        self._inverse_temperature = np.zeros(max_slots, np.float32)
        self._top_k = np.zeros(max_slots, np.int64)
        self._top_p = np.ones(max_slots, np.float64)
        self._log_min_p = np.full(max_slots, -np.inf, np.float32)
        self._repetition = np.ones(max_slots, np.float32)
        self._presence = np.zeros(max_slots, np.float32)
        self._frequency = np.zeros(max_slots, np.float32)
        self._constrained = np.zeros(max_slots, bool)  # has a grammar
        self._adjusted = np.zeros(max_slots, bool)  # has a bias, a penalty or a grammar
        self._num_banned = np.zeros(max_slots, np.int64)  # leading outputs that may not be a stop id
        self._num_logprobs = np.full(max_slots, -1, np.int64)  # -1: not asked for
        self._bias: dict[int, tuple[IntArray, Float32Array]] = {}
        self._stop_ids: dict[int, IntArray] = {}
        self._matchers: dict[int, Matcher | str] = {}  # of slots with a grammar; a str: why it cannot be served

    def admit(self, slot: int, params: SamplingParams, seed: int, num_prompt: int, stop_ids: Sequence[int]) -> None:
        """Give `slot` to a request. `stop_ids` are banned while it has fewer than min_tokens outputs."""
        bias = params.logit_bias or {}
        self._kind[slot] = _kind(params)
        self._seeds[slot] = seed % 2**64
        self._num_prompt[slot] = num_prompt
        self._inverse_temperature[slot] = 1 / max(params.temperature, _MIN_TEMPERATURE)
        self._top_k[slot] = min(params.top_k, len(self._token_ids))
        self._top_p[slot] = params.top_p
        self._log_min_p[slot] = math.log(params.min_p) if params.min_p > 0 else -math.inf
        self._repetition[slot] = params.repetition_penalty
        self._presence[slot] = params.presence_penalty
        self._frequency[slot] = params.frequency_penalty
        self._constrained[slot] = params.grammar is not None
        self._adjusted[slot] = bool(bias) or params.penalised or params.grammar is not None
        self._num_banned[slot] = params.min_tokens if stop_ids else 0
        self._num_logprobs[slot] = -1 if params.logprobs is None else params.logprobs
        self._bias[slot] = (np.array(list(bias), np.int64), np.array(list(bias.values()), np.float32))
        self._stop_ids[slot] = np.array(list(stop_ids), np.int64)
        self._matchers.pop(slot, None)
        if params.grammar is not None:
            self._matchers[slot] = self._make_matcher(params.grammar, stop_ids)

    def release(self, slot: int) -> None:
        """Take the slot back: its rows are plain greedy rows until the next request is admitted."""
        self.admit(slot, SamplingParams(), 0, 0, ())

    def sample(self, logits: torch.Tensor, slots: IntArray, positions: IntArray) -> IntArray:
        """The tokens at `positions`: logits float32 [N, V], slots and positions [N] -> [N]. Leaves `logits` as it was.

        V may be smaller than the vocabulary (a draft's may be): bias, penalties and bans of ids from V on are skipped.
        A row that is no distribution (`broken_rows`), or has no token that its grammar allows (`failed_rows`, until the
        next call), yields an arbitrary token. The caller must check both.
        """
        self.failed_rows = {}
        broken = broken_rows(logits)
        if broken.any():
            logits = logits.clone()
            logits[torch.from_numpy(broken).to(logits.device)] = 0.0
        kinds = self._kind[slots]
        adjusted = self._adjusted[slots] | self._bans(slots, positions)
        if not adjusted.any() and not kinds.any():
            return _argmax(logits)
        # [N, V]
        scores: Float32Array = logits.cpu().numpy()
        if adjusted.any():
            scores = scores.copy()
            for row in np.flatnonzero(adjusted).tolist():
                self._adjust(scores[row], int(slots[row]), int(positions[row]))
                if self._constrained[slots[row]]:
                    self._constrain(scores[row], row, int(slots[row]), int(positions[row]))
        token_ids = np.empty(len(slots), np.int64)
        for kind, choose in enumerate((self._take_best, self._draw, self._draw_filtered)):
            rows = np.flatnonzero(kinds == kind)
            if rows.size:
                some = scores if rows.size == len(scores) else scores[rows]  # no copy of all rows
                token_ids[rows] = choose(some, slots[rows], positions[rows])
        return token_ids

    def confidence(self, logits: torch.Tensor, slots: IntArray, token_ids: IntArray) -> NDArray[np.float64]:
        """[N] probability of each row's token, without filters, at the row's temperature (greedy: at 1)."""
        scale = np.where(self._kind[slots] == _Kind.GREEDY, np.float32(1), self._inverse_temperature[slots])
        scaled = logits.float() * torch.from_numpy(scale).to(logits.device)[:, None]
        chosen = torch.from_numpy(token_ids).to(logits.device)[:, None]
        log_p = scaled.gather(1, chosen)[:, 0] - scaled.logsumexp(dim=1)
        return log_p.exp().nan_to_num(0.0).double().cpu().numpy()

    def rank_drafts(
        self, logits: torch.Tensor, slots: IntArray, positions: IntArray, token_ids: IntArray, shortlist: int = 0
    ) -> tuple[IntArray, NDArray[np.float64]]:
        """Rank [N]: how many candidates score above each row's token. Margin [N]: best score - the token's score.

        Scores include the noise of rows that draw, as in `sample`; they ignore bias, penalties and filters. Candidates
        are all tokens, or the first `shortlist`; then the last column of the logits is the score of token_ids.
        """
        rank, margin = np.empty(len(slots), np.int64), np.empty(len(slots), np.float64)
        scores: Float32Array = logits.float().cpu().numpy()
        draws = self._kind[slots] != _Kind.GREEDY
        num_candidates = shortlist or scores.shape[1]
        where = np.where(token_ids < num_candidates, token_ids, -1)  # [N] column of each row's token
        for rows in _blocks(len(slots), scores.shape[1]):
            some = scores[rows]
            if draws[rows].any():
                some = np.where(draws[rows, None], self._scale(some, slots[rows]), some)
                which = self._seeds[slots[rows]], positions[rows]
                some[:, :num_candidates] += draws[rows, None] * gumbel(*which, num_candidates)
                if shortlist:
                    some[:, -1] += draws[rows] * gumbel_of(*which, np.arange(len(some)), token_ids[rows])
            own, others = some[np.arange(len(some)), where[rows], None], some[:, :num_candidates]
            rank[rows], margin[rows] = (others > own).sum(axis=1), (others.max(axis=1, keepdims=True) - own)[:, 0]
        return rank, np.maximum(np.nan_to_num(margin, nan=0.0, posinf=0.0), 0.0)

    def logprobs(self, logits: torch.Tensor, slots: IntArray, token_ids: IntArray) -> list[TokenLogprobs | None]:
        """The model's own log-probabilities, from raw logits [N, V]. None for rows whose request did not ask.

        The list is empty if no request asked.
        """
        asking = np.flatnonzero(self._num_logprobs[slots] >= 0)
        if asking.size == 0:
            return []
        answers: list[TokenLogprobs | None] = [None] * len(slots)
        # [R, V]
        log_p = torch.log_softmax(logits[torch.from_numpy(asking).to(logits.device)], dim=-1).cpu().numpy()
        for row, row_log_p in zip(asking.tolist(), log_p, strict=True):
            token_id = int(token_ids[row])
            top = _best(row_log_p, int(self._num_logprobs[slots[row]]))
            answers[row] = TokenLogprobs(token_id, float(row_log_p[token_id]), top)
        return answers

    # --- bias, penalties, ban: one row of scores, [V], in place ----------------------------------------------------

    def _bans(self, slots: Any, positions: Any) -> Any:
        """Whether stop ids are banned, for one row or for [N]: position t has t - num_prompt outputs before it."""
        return positions - self._num_prompt[slots] < self._num_banned[slots]

    def _adjust(self, score: Float32Array, slot: int, position: int) -> None:
        token_ids, bias = self._bias[slot]
        known = token_ids < len(score)
        score[token_ids[known]] += bias[known]
        if self._repetition[slot] != 1:
            self._penalise_repetition(score, slot, position)
        if self._presence[slot] != 0 or self._frequency[slot] != 0:
            self._penalise_outputs(score, slot, position)
        if self._bans(slot, position):
            stop_ids = self._stop_ids[slot]
            score[stop_ids[stop_ids < len(score)]] = -np.inf

    def _penalise_repetition(self, score: Float32Array, slot: int, position: int) -> None:
        """For each token of the prefix, prompt included: divide a positive score, multiply a negative one."""
        token_ids, _ = _count(self._history[slot, :position], len(score))
        penalty = self._repetition[slot]
        seen = score[token_ids]
        score[token_ids] = np.where(seen > 0, seen / penalty, seen * penalty)

    def _penalise_outputs(self, score: Float32Array, slot: int, position: int) -> None:
        """For each token of the output: subtract presence once, and frequency for each occurrence."""
        token_ids, counts = _count(self._outputs(slot, position), len(score))
        score[token_ids] -= self._presence[slot] + self._frequency[slot] * counts.astype(np.float32)

    # --- grammar ---------------------------------------------------------------------------------------------------

    def num_valid(self, slots: IntArray, num_tokens: IntArray, num_drafted: IntArray) -> IntArray:
        """[B] drafted tokens behind each context that the request's grammar allows. Arguments are [B]."""
        if not self._matchers:
            return num_drafted
        num_valid = num_drafted.copy()
        for i in np.flatnonzero(self._constrained[slots] & (num_drafted > 0)).tolist():
            matcher, end = self._matchers[int(slots[i])], int(num_tokens[i])
            drafted = self._history[slots[i], end : end + num_drafted[i]]
            num_valid[i] = 0 if isinstance(matcher, str) else matcher.num_valid(self._outputs(slots[i], end), drafted)
        return num_valid

    def _make_matcher(self, grammar: Grammar, stop_ids: Sequence[int]) -> Matcher | str:
        """Grammars are checked when a request is added. One that cannot be served even so fails that request alone."""
        if self._compiler is None:
            return NO_TOKENIZER
        try:
            return self._compiler.matcher(grammar, stop_ids)
        except InvalidRequest as error:
            return str(error)

    def _constrain(self, score: Float32Array, row: int, slot: int, position: int) -> None:
        """Set the scores [V] of tokens to -inf that the grammar does not allow at a position."""
        matcher = self._matchers[slot]
        if isinstance(matcher, str):
            self.failed_rows[row] = matcher
            return
        try:
            allowed = matcher.mask(self._outputs(slot, position), len(score))
        except EngineError as error:
            self.failed_rows[row] = str(error)
            return
        if allowed is not None:
            score[~allowed] = -np.inf
            if score.max() == -np.inf:
                self.failed_rows[row] = NO_TOKEN
                score[:] = 0

    def _outputs(self, slot: int, position: int) -> IntArray:
        return self._history[slot, self._num_prompt[slot] : position]

    # --- the three kinds: scores [R, V], slots [R], positions [R] -> token ids [R] ----------------------------------

    def _take_best(self, scores: Float32Array, slots: IntArray, positions: IntArray) -> IntArray:
        return scores.argmax(axis=-1)

    def _draw(self, scores: Float32Array, slots: IntArray, positions: IntArray) -> IntArray:
        chosen = np.empty(len(slots), np.int64)
        for rows in _blocks(len(slots), scores.shape[1]):
            perturbed = self._scale(scores[rows], slots[rows])
            perturbed += gumbel(self._seeds[slots[rows]], positions[rows], scores.shape[1])
            perturbed.argmax(axis=-1, out=chosen[rows])
        return chosen

    def _draw_filtered(self, scores: Float32Array, slots: IntArray, positions: IntArray) -> IntArray:
        """As `_draw`, with noise only for tokens that the filters keep: the others cannot win."""
        kept = [self._filter(row, slot) for row, slot in zip(self._scale(scores, slots), slots.tolist(), strict=True)]
        # one entry per (row, token kept): [L]
        rows = np.repeat(np.arange(len(kept)), [token_ids.size for token_ids, _ in kept])
        noise = gumbel_of(self._seeds[slots], positions, rows, np.concatenate([token_ids for token_ids, _ in kept]))
        chosen, start = np.empty(len(kept), np.int64), 0
        for row, (token_ids, score) in enumerate(kept):
            chosen[row] = token_ids[(score + noise[start : start + token_ids.size]).argmax()]
            start += token_ids.size
        return chosen

    def _scale(self, scores: Float32Array, slots: IntArray) -> Float32Array:
        """log p up to a constant: the best score becomes 0, so that no temperature overflows. [R, V], fresh memory."""
        best = np.maximum(scores.max(axis=-1, keepdims=True), _LOWEST)  # finite even where everything is banned
        scaled = scores - best
        scaled *= self._inverse_temperature[slots, None]
        return scaled

    def _filter(self, score: Float32Array, slot: int) -> Shortlist:
        """The tokens of one scaled row [V] that top_k, top_p and min_p keep."""
        shortlist: Shortlist = (self._token_ids[: len(score)], score)
        if 0 < self._top_k[slot] < len(score):
            shortlist = _keep_top_k(shortlist, int(self._top_k[slot]))
        if self._top_p[slot] < 1:
            shortlist = _keep_top_p(shortlist, float(self._top_p[slot]))
        if self._log_min_p[slot] > -np.inf:
            # p < min_p * max p, and the best score is 0 and always kept
            shortlist = _select(shortlist, shortlist[1] >= self._log_min_p[slot])
        return shortlist


def _kind(params: SamplingParams) -> _Kind:
    if params.temperature == 0:
        return _Kind.GREEDY
    filtered = params.top_k > 0 or params.top_p < 1 or params.min_p > 0
    return _Kind.FILTERED if filtered else _Kind.TEMPERATURE


# --- filters: the token ids still in play, ascending, and their scores: [L], [L] --------------------------------------


def _select(shortlist: Shortlist, keep: NDArray[np.bool_]) -> Shortlist:
    token_ids, score = shortlist
    kept = np.flatnonzero(keep)
    return token_ids[kept], score[kept]


def _keep_top_k(shortlist: Shortlist, top_k: int) -> Shortlist:
    """Drop scores below the k-th best; ties with it stay, as in Hugging Face's sampler."""
    score = shortlist[1]
    return _select(shortlist, score >= np.partition(score, -top_k)[-top_k])


def _keep_top_p(shortlist: Shortlist, top_p: float) -> Shortlist:
    """Keep the smallest set whose probability reaches top_p; of equally likely tokens the lower ids come first.

    Tokens with a probability below (1 - top_p) / L together have less than 1 - top_p, so the set contains none of them
    and only the others are sorted. Half of that bound leaves room for rounding.
    """
    weight = np.exp(shortlist[1])
    total = weight.sum(dtype=np.float64)
    likely = np.flatnonzero(weight >= 0.5 * (1 - top_p) / len(weight) * total)
    weight = weight[likely]
    best_first = np.sort(weight)[::-1]
    mass = np.cumsum(best_first, dtype=np.float64)
    size = min(int(np.searchsorted(mass, top_p * total)) + 1, len(mass))
    least = best_first[size - 1]
    keep = weight > least
    keep[np.flatnonzero(weight == least)[: size - np.count_nonzero(keep)]] = True
    return _select((shortlist[0][likely], shortlist[1][likely]), keep)


# --- small pieces --------------------------------------------------------------------------------------------------


def _argmax(logits: torch.Tensor) -> IntArray:
    """The first best token of each row: [N, V] -> [N]."""
    if logits.device.type == "cpu":
        return logits.numpy().argmax(axis=-1)
    return logits.argmax(dim=-1).cpu().numpy()


def _count(tokens: IntArray, num_tokens: int) -> tuple[IntArray, IntArray]:
    """The distinct ids below num_tokens, and the occurrences of each."""
    token_ids, counts = np.unique(tokens, return_counts=True)
    num_known = np.searchsorted(token_ids, num_tokens)
    return token_ids[:num_known], counts[:num_known]


def _best(log_p: Float32Array, count: int) -> tuple[tuple[int, float], ...]:
    """The `count` most likely tokens of one row [V], best first, ties by id."""
    count = min(count, len(log_p))
    if count == 0:
        return ()
    contenders = np.flatnonzero(log_p >= np.partition(log_p, -count)[-count])
    order = contenders[np.argsort(-log_p[contenders], kind="stable")][:count]
    return tuple((int(token_id), float(log_p[token_id])) for token_id in order)
