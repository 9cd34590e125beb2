"""`faser-gp`: the paper's search. A Gaussian process learns how far costs deviate from predictions (GP-LCB)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from faser.arrays import FloatArray, IntArray
from faser.cost.profiled_cost import ProfiledCost, catch_up_rows
from faser.limits import ADAPTIVE_MAX_LENGTH
from faser.policy.acceptance import Acceptance
from faser.policy.base import BatchView, Outcome, Policy
from faser.policy.estimates import ragged_seconds, reaches, step_seconds

BANDS = 6  # of acceptance rates, of equal width
BETA = 1.0  # standard deviations that are subtracted from the mean of a cost
AMPLITUDE = 0.2  # prior standard deviation of log(cost / prediction)
SCALES = np.array([2.0, 1.5, 0.3])  # length scales: doublings of the batch, drafted tokens, acceptance rate
REQUEST_NOISE = 0.5  # standard deviation of log(cost / prediction) of one request in one step
MIN_NOISE = 0.03  # standard deviation of log(cost / prediction), however many requests are averaged
WINDOW = 64  # observations; with more, BLAS starts its threads, which takes longer than the product
CHANGES = 3  # changes of one band's length, after the best length that all bands share
OBSERVATION_DECAY = 0.9  # of an observation, at the next one of its kind: half-life 7 observations
AGE_DECAY = 0.999  # of all observations, at every step: half-life 693 steps

_RATES = (np.arange(BANDS) + 0.5) / BANDS  # [BANDS] acceptance rate at the middle of each band
_LENGTHS = np.arange(ADAPTIVE_MAX_LENGTH + 1)
_TOKENS = np.cumsum(_RATES[:, None] ** _LENGTHS, axis=1)  # [BANDS, lengths] expected tokens of one request in a step


class _Window:
    """The latest observations: at most one for each batch size (in half doublings), length and band."""

    def __init__(self) -> None:
        self._at: dict[tuple[int, int, int], int] = {}  # row of each observation, the oldest first
        self._inputs: FloatArray = np.zeros((WINDOW, 3))
        # [WINDOW, 4] decaying sums: requests, measured / predicted seconds, expected tokens, emitted tokens
        self._sums: FloatArray = np.zeros((WINDOW, 4))
        self._fit: tuple[FloatArray, FloatArray] | None = None  # weights of the mean, inverse of the kernel matrix

    def add(self, num_requests: int, length: int, band: int, sums: FloatArray) -> None:
        key = (round(2 * np.log2(num_requests)), length, band)
        row = self._at.pop(key, None)
        if row is None:
            row = len(self._at) if len(self._at) < WINDOW else self._at.pop(next(iter(self._at)))
            self._sums[row] = 0.0
            self._inputs[row] = _inputs(num_requests, np.array(band), np.array(length))
        self._at[key] = row
        self._sums[row] = OBSERVATION_DECAY * self._sums[row] + sums
        self._fit = None

    def age(self) -> None:
        """Observations that are not repeated become less certain."""
        self._sums = np.maximum(AGE_DECAY * self._sums, 1e-12)

    def predict(self, num_requests: int, bands: IntArray) -> tuple[FloatArray, FloatArray]:
        """[P, lengths] mean and standard deviation of log(cost / prediction)."""
        shape, count = (bands.size, _LENGTHS.size), len(self._at)
        if count == 0:
            return np.zeros(shape), np.full(shape, AMPLITUDE)
        if self._fit is None:
            self._fit = self._fitted(count)
        weights, inverse = self._fit
        every = _inputs(num_requests, np.repeat(bands, _LENGTHS.size), np.tile(_LENGTHS, bands.size))
        across = _kernel(every, self._inputs[:count])
        variance = AMPLITUDE**2 - ((across @ inverse) * across).sum(axis=1)
        mean: FloatArray = across @ weights
        deviation: FloatArray = np.sqrt(np.maximum(variance, 0.0))
        return mean.reshape(shape), deviation.reshape(shape)

    def _fitted(self, count: int) -> tuple[FloatArray, FloatArray]:
        requests, ratios, expected, emitted = self._sums[:count].T
        log_ratio = np.log(ratios / requests * expected / emitted)
        noise = MIN_NOISE**2 + REQUEST_NOISE**2 / requests
        kernel = _kernel(self._inputs[:count], self._inputs[:count])
        inverse = np.linalg.inv(kernel + np.diag(noise)).astype(np.float64)
        return inverse @ log_ratio, inverse


@dataclass(frozen=True)
class _GpBatch:
    """The requests of a view by band, and the steps that the search compares."""

    view: BatchView
    cost: ProfiledCost
    present: IntArray  # [P] bands that have requests
    drafting: IntArray  # [P, depth] requests that may draft each position
    read: IntArray  # [P, depth] their context

    @classmethod
    def of(cls, view: BatchView, bands: IntArray) -> _GpBatch:
        assert view.cost is not None
        present = np.unique(bands)
        member = (bands == present[:, None]).astype(np.float64)  # BLAS multiplies floats only
        reached = reaches(view.limit, ADAPTIVE_MAX_LENGTH).T.astype(np.float64)
        drafting, read = member @ reached, (member * view.num_tokens) @ reached
        return cls(view, view.cost, present, drafting.astype(np.int64), read.astype(np.int64))

    def tokens(self, bands: IntArray) -> FloatArray:
        """[P, lengths] expected of a band's requests at each length, cut to their limits."""
        chances = _RATES[self.present, None] ** _LENGTHS[1:]
        count = np.bincount(bands, minlength=BANDS)[self.present]
        return np.cumsum(np.column_stack((count, chances * self.drafting)), axis=1)

    def search(self, tokens: FloatArray) -> IntArray:
        """[P] lengths: the best that all bands share, then up to CHANGES times the best change of one band's."""
        num_bands = self.present.size
        options: IntArray = np.repeat(_LENGTHS[:, None], num_bands, axis=1)
        costs = self._costs(options, tokens)
        lengths: IntArray = options[costs.argmin()]
        least = costs.min()
        for _ in range(CHANGES if num_bands > 1 else 0):
            options = np.tile(lengths, (num_bands, _LENGTHS.size, 1))
            options[np.arange(num_bands), :, np.arange(num_bands)] = _LENGTHS
            options = options.reshape(-1, num_bands)
            costs = self._costs(options, tokens)
            if costs.min() >= least:
                break
            lengths, least = options[costs.argmin()], costs.min()
        return lengths

    def _costs(self, options: IntArray, tokens: FloatArray) -> FloatArray:
        """[N] seconds per token of the batch, for lengths [N, P]."""
        view = self.view
        deep = (options[:, :, None] >= _LENGTHS[1:]).astype(np.int64)  # [N, P, depth]
        drafting, read = (deep * self.drafting).sum(axis=1), (deep * self.read).sum(axis=1)
        context = float(view.num_tokens.sum())
        seconds = ragged_seconds(self.cost, view.num_requests, context, drafting, read, view.num_prefill_rows)
        costs: FloatArray = seconds / tokens[np.arange(self.present.size), options].sum(axis=1)
        return costs


class FaserGP(Policy):
    """Searches for the lengths with the lowest cost per token; uncertainty lowers a cost (GP-LCB).

    The search of the FASER paper. Predicted cost of a step = profiled seconds / tokens expected from acceptance rates.
    A Gaussian process over batch size, length and acceptance rate learns log(measured cost / predicted cost). Its mean
    less β standard deviations corrects the expected tokens.

    Deviations from the paper:
    * Requests are grouped into six bands of acceptance rates (acceptance.py). All requests of a band get one length;
      the search changes one band's length at a time, because the cost depends on all of them.
    * The window keeps the 64 latest kinds of observations, averaged with decay. 64 single steps last half a second.
    * The search does not choose a share of the SMs.
    * Lengths begin at 0, not at 2.
    * Steps with prompt rows are not observed.
    """

    name = "faser-gp"
    needs_cost = True

    def __init__(self) -> None:
        self._acceptance = Acceptance(ADAPTIVE_MAX_LENGTH)
        self._window = _Window()
        self._cost: ProfiledCost | None = None
        # By slot, of the latest view: an outcome identifies requests by slot.
        self._num_tokens: IntArray = np.zeros(0, dtype=np.int64)
        self._bands: IntArray = np.zeros(0, dtype=np.int64)

    def lengths(self, view: BatchView) -> IntArray:
        bands = np.minimum(BANDS * self._acceptance.request_rates(view), BANDS - 1).astype(np.int64)
        self._remember(view, bands)
        batch = _GpBatch.of(view, bands)
        mean, deviation = self._window.predict(view.num_requests, batch.present)
        found = batch.search(batch.tokens(bands) * np.exp(BETA * deviation - mean))
        return np.minimum(found[np.searchsorted(batch.present, bands)], view.limit)

    def learn(self, outcome: Outcome) -> None:
        self._acceptance.learn(outcome)
        slots, lengths = outcome.slots, outcome.lengths
        if self._cost is None or outcome.num_prefill_rows or outcome.seconds <= 0 or slots.size == 0:
            return
        if lengths.max() > ADAPTIVE_MAX_LENGTH or slots.max() >= self._bands.size:
            return
        self._window.age()
        caught_up = catch_up_rows(outcome.lag)
        ratio = outcome.seconds / step_seconds(self._cost, lengths, self._num_tokens[slots], caught_up)
        kinds, kind = np.unique(self._bands[slots] * _LENGTHS.size + lengths, return_inverse=True)
        bands, drafted = np.divmod(kinds, _LENGTHS.size)
        count = np.bincount(kind).astype(np.float64)
        emitted = count + np.bincount(kind, outcome.accepted)
        sums = np.stack((count, count * ratio, count * _TOKENS[bands, drafted], emitted), axis=1)
        for band, length, each in zip(bands.tolist(), drafted.tolist(), sums, strict=True):
            self._window.add(slots.size, length, band, each)

    def _remember(self, view: BatchView, bands: IntArray) -> None:
        self._cost = view.cost
        more = int(view.slots.max()) + 1 - self._bands.size
        if more > 0:
            self._num_tokens = np.append(self._num_tokens, np.zeros(more, dtype=np.int64))
            self._bands = np.append(self._bands, np.zeros(more, dtype=np.int64))
        self._num_tokens[view.slots] = view.num_tokens
        self._bands[view.slots] = bands


def _inputs(num_requests: int, bands: IntArray, lengths: IntArray) -> FloatArray:
    """[…, 3] in units of SCALES."""
    size = np.full(lengths.shape, np.log2(num_requests))
    inputs: FloatArray = np.stack((size, lengths, _RATES[bands]), axis=-1) / SCALES
    return inputs


def _kernel(left: FloatArray, right: FloatArray) -> FloatArray:
    """[len(left), len(right)] covariances: radial basis functions."""
    squares = (left**2).sum(axis=1)[:, None] + (right**2).sum(axis=1) - 2 * left @ right.T
    covariances: FloatArray = AMPLITUDE**2 * np.exp(-0.5 * np.maximum(squares, 0.0))
    return covariances
