"""`faser-gp`: a Gaussian process learns what tokens cost beyond the prediction, and doubt is given the benefit."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from faser.arrays import FloatArray, IntArray
from faser.cost.profile import KEPT_UP, Cost
from faser.policy.acceptance import Acceptance
from faser.policy.base import MOST_LENGTH, BatchView, Outcome
from faser.policy.estimates import ragged_seconds, reaches, request_rates, step_seconds

BANDS = 6  # of acceptance, even
BOLDNESS = 1.0  # β: standard deviations by which doubt lowers a cost
AMPLITUDE = 0.2  # standard deviation of the logarithm of cost over prediction, before anything was seen
SCALES = np.array([2.0, 1.5, 0.3])  # over which it changes: doublings of the batch, tokens of length, acceptance
SPREAD = 0.5  # standard deviation of the same logarithm for one request in one step
LEAST_NOISE = 0.03  # and for any number of them
WINDOW = 64  # observations: no product is then so large that BLAS wakes its threads, which takes longer than it
CHANGES = 3  # of one band's length, after the best that is the same for all
FADING = 0.9  # weight of an observation against the next of its kind
AGEING = 0.999  # and against every step

_RATES = (np.arange(BANDS) + 0.5) / BANDS  # [BANDS] of acceptance
_LENGTHS = np.arange(MOST_LENGTH + 1)
_TOKENS = np.cumsum(_RATES[:, None] ** _LENGTHS, axis=1)  # [BANDS, lengths] expected of one request in a step


class _Window:
    """The latest observations, at most one for each batch size (in half doublings), length and band."""

    def __init__(self) -> None:
        self._at: dict[tuple[int, int, int], int] = {}  # row of an observation, the oldest first
        self._inputs: FloatArray = np.zeros((WINDOW, 3))
        # [WINDOW, 4] faded: requests, their measured over predicted seconds, expected tokens, emitted tokens
        self._sums: FloatArray = np.zeros((WINDOW, 4))
        self._fit: tuple[FloatArray, FloatArray] | None = None  # weights of the mean, and the inverse of the kernel

    def add(self, num_requests: int, length: int, band: int, sums: FloatArray) -> None:
        key = (round(2 * np.log2(num_requests)), length, band)
        row = self._at.pop(key, None)
        if row is None:
            row = len(self._at) if len(self._at) < WINDOW else self._at.pop(next(iter(self._at)))
            self._sums[row] = 0.0
            self._inputs[row] = _inputs(num_requests, np.array(band), np.array(length))
        self._at[key] = row
        self._sums[row] = FADING * self._sums[row] + sums
        self._fit = None

    def age(self) -> None:
        """What is not seen again comes into doubt."""
        self._sums = np.maximum(AGEING * self._sums, 1e-12)

    def predict(self, num_requests: int, bands: IntArray) -> tuple[FloatArray, FloatArray]:
        """[P, lengths] mean and standard deviation of the logarithm of cost over prediction."""
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
        seen = np.log(ratios / requests * expected / emitted)
        noise = LEAST_NOISE**2 + SPREAD**2 / requests
        kernel = _kernel(self._inputs[:count], self._inputs[:count])
        inverse = np.linalg.inv(kernel + np.diag(noise)).astype(np.float64)
        return inverse @ seen, inverse


@dataclass(frozen=True)
class _Batch:
    """The requests of a view by band: the steps among which the search is."""

    view: BatchView
    cost: Cost
    present: IntArray  # [P] bands that have requests
    drafting: IntArray  # [P, MOST_LENGTH] requests that may draft so deep
    read: IntArray  # [P, MOST_LENGTH] the context of these

    @classmethod
    def of(cls, view: BatchView, bands: IntArray) -> _Batch:
        assert view.cost is not None
        present = np.unique(bands)
        member = (bands == present[:, None]).astype(np.float64)  # products of integers are slow
        reached = reaches(view.limit, MOST_LENGTH).T.astype(np.float64)
        drafting, read = member @ reached, (member * view.num_tokens) @ reached
        return cls(view, view.cost, present, drafting.astype(np.int64), read.astype(np.int64))

    def tokens(self, bands: IntArray) -> FloatArray:
        """[P, lengths] expected of a band's requests, each drafting so much or up to its limit."""
        chances = _RATES[self.present, None] ** _LENGTHS[1:]
        count = np.bincount(bands, minlength=BANDS)[self.present]
        tokens: FloatArray = np.cumsum(np.column_stack((count, chances * self.drafting)), axis=1)
        return tokens

    def search(self, tokens: FloatArray) -> IntArray:
        """[P] lengths: the best that is the same for all bands, then a few times the best change of one band's."""
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
        deep = (options[:, :, None] >= _LENGTHS[1:]).astype(np.int64)  # [N, P, MOST_LENGTH]
        drafting, read = (deep * self.drafting).sum(axis=1), (deep * self.read).sum(axis=1)
        context = float(view.num_tokens.sum())
        seconds = ragged_seconds(self.cost, view.num_requests, context, drafting, read, view.num_prefill_rows)
        costs: FloatArray = seconds / tokens[np.arange(self.present.size), options].sum(axis=1)
        return costs


class FaserGP:
    """Looks for the lengths of the least cost per committed token, doubt counted in their favour (GP-LCB).

    The search of the FASER paper. A step's cost is its profiled seconds over the tokens that the acceptance of its
    requests lets expect. A Gaussian process over batch size, length and acceptance learns how far from that the tokens
    of such requests have cost, as a logarithm; its mean less β standard deviations corrects their tokens. Deviations:
    requests are taken in six bands of acceptance, their own shrunk to that of all, and those of a band are given one
    length, found by changing one band's at a time, since what it costs depends on all; the window keeps the 64 latest
    kinds of observations, averaged and ageing, for 64 steps would be half a second; there is no share of the SMs; and
    lengths start at 0, not 2. Steps with prompt rows teach nothing.
    """

    name = "faser-gp"
    max_length = MOST_LENGTH
    needs_cost = True

    def __init__(self) -> None:
        self._acceptance = Acceptance(MOST_LENGTH)
        self._window = _Window()
        self._cost: Cost | None = None
        # By slot, of the latest view: an outcome names its requests by slot alone.
        self._num_tokens: IntArray = np.zeros(0, dtype=np.int64)
        self._bands: IntArray = np.zeros(0, dtype=np.int64)

    def lengths(self, view: BatchView) -> IntArray:
        bands = np.minimum(BANDS * request_rates(view, self._acceptance.mean), BANDS - 1).astype(np.int64)
        self._remember(view, bands)
        batch = _Batch.of(view, bands)
        mean, deviation = self._window.predict(view.num_requests, batch.present)
        found = batch.search(batch.tokens(bands) * np.exp(BOLDNESS * deviation - mean))
        return np.minimum(found[np.searchsorted(batch.present, bands)], view.limit)

    def learn(self, outcome: Outcome) -> None:
        self._acceptance.learn(outcome)
        slots, lengths = outcome.slots, outcome.lengths
        if self._cost is None or outcome.num_prefill_rows or outcome.seconds <= 0 or slots.size == 0:
            return
        if lengths.max() > MOST_LENGTH or slots.max() >= self._bands.size:
            return
        self._window.age()
        catch_up = int(outcome.lag.sum()) if outcome.lag.max() > KEPT_UP else 0
        ratio = outcome.seconds / step_seconds(self._cost, lengths, self._num_tokens[slots], catch_up)
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
    """[…, 3] in units of the scales."""
    size = np.full(lengths.shape, np.log2(num_requests))
    inputs: FloatArray = np.stack((size, lengths, _RATES[bands]), axis=-1) / SCALES
    return inputs


def _kernel(left: FloatArray, right: FloatArray) -> FloatArray:
    """[len(left), len(right)] covariances: a radial basis function."""
    squares = (left**2).sum(axis=1)[:, None] + (right**2).sum(axis=1) - 2 * left @ right.T
    covariances: FloatArray = AMPLITUDE**2 * np.exp(-0.5 * np.maximum(squares, 0.0))
    return covariances
