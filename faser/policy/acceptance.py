"""How likely a drafted token is accepted: for each request and each position of a draft.

Knows counts of accepted and tried tokens; no lengths and no costs. All policies that estimate acceptance do it here.
A token whose predecessors were accepted is itself accepted more often than the first token of a draft, so every
position has a rate of its own: over all requests, with decaying weights. A request differs from the others by one
factor on the odds of all its positions, taken from its own counts, which are shrunk to the mean of all requests with
contexts about as long: a draft may know a long context worse than a short one, or see only a window of it.
"""

from __future__ import annotations

import numpy as np

from faser.arrays import FloatArray, IntArray
from faser.policy.base import PRIOR_RATE, PRIOR_WEIGHT, BatchView, Outcome
from faser.rules.stopping import accepted_chance, log_odds

REQUEST_PRIOR_WEIGHT = 16.0  # tried tokens the mean of all requests counts as against a request's own
CONTEXT_BOUNDS = np.array([512, 2048, 8192, 32_768])  # tokens; contexts between two bounds are about as long
CONTEXT_PRIOR_WEIGHT = 128.0  # tried tokens the mean of all requests counts as against those of about that context
ACCEPTANCE_DECAY = 0.998  # of counts, at every step with drafts: half-life 346 steps
RECENT_DECAY = 0.95  # of the counts of recent steps: half-life 14 steps
CHANGE_ERRORS = 4.0  # standard errors by which recent steps differ once the text has changed
CHANGE_INTERVAL = 4  # steps with drafts between two looks
CHANGED_WEIGHT = 8.0  # tried tokens that the steps which showed it then count as
LEAST_PAUSE, MOST_PAUSE = 128, 512  # steps without drafts before drafts get another chance
PAUSE_FALL = 4  # steps by which a pause is shorter, for every step with drafts
HELD_WEIGHT = 32.0  # tried tokens that what is known counts as, at least, during a pause
CHANCE_WEIGHT = 0.25  # tried tokens that what is known of a request then counts as; all else is forgotten
HOPED_RATE, HOPED_WEIGHT = 0.9, 4.0  # a rate that a hardly tried draft may have, and tried tokens it counts as
MOST_TRIED = 64  # first tokens after which tries end
TRY_GAP = 8  # steps without drafts that do not end tries
PROVEN = 4.0  # accepted first tokens that end the caution with an unknown draft
CALIBRATION_WEIGHT = 4.0  # tried tokens that the initial calibration counts as, about
MIN_CALIBRATION, MAX_CALIBRATION = (-8.0, 0.0), (8.0, 8.0)  # bounds of offset and factor
MIN_RATE, MAX_RATE = 0.02, 0.99  # bounds of every estimate


class Acceptance:
    """Rates of all requests together, by position, and each request's own.

    Old steps count less and less. If recent steps differ from the estimate by more than chance explains, the text has
    changed its character: what was known before them is forgotten, of single requests too. While nothing is drafted
    nothing is learned, and what is known stays; after a pause it is forgotten, so that drafts get another chance.
    Pauses double as long as drafting ends again soon.
    """

    def __init__(self, depth: int, *, is_checked: bool = False) -> None:
        self._is_checked = is_checked  # deep tokens were drafted only where the draft was confident
        self._counts: FloatArray = np.zeros((2, depth))  # tried and accepted
        self._recent: FloatArray = np.zeros((2, depth))  # of the latest steps
        self._own = _OwnCounts()
        self._contexts = _ContextCounts()
        self._num_steps = 0  # with drafts
        self._num_tried = 0  # first tokens, since what was known was forgotten
        self._num_idle = 0  # steps without drafts since the last one with drafts, or since the last chance
        self._pause = LEAST_PAUSE

    @property
    def rates(self) -> FloatArray:
        """[depth] of all requests: P(accepted | all predecessors in the draft accepted)."""
        tried, accepted = self._counts
        rates: FloatArray = (accepted + PRIOR_RATE * PRIOR_WEIGHT) / (tried + PRIOR_WEIGHT)
        return rates

    @property
    def likely_rates(self) -> FloatArray:
        """[depth] the same, but a position that was hardly tried is taken to be like the one before it.

        Not where drafts were checked: there a position says nothing of the next one.
        """
        return self.rates if self._is_checked else self._chained(PRIOR_RATE, PRIOR_WEIGHT)

    def _chained(self, before: float, weight: float) -> FloatArray:
        """[depth] rates, each shrunk to the one before it."""
        rates = []
        for tried, accepted in zip(*self._counts.tolist(), strict=True):
            before = (accepted + before * weight) / (tried + weight)
            rates.append(before)
        return np.array(rates)

    @property
    def num_accepted(self) -> float:
        """First tokens, as they count now."""
        return float(self._counts[1, 0])

    @property
    def is_unknown(self) -> bool:
        """Whether no drafts were made, or what they taught is forgotten."""
        return not self._counts[0, 0]

    @property
    def is_proven(self) -> bool:
        """Whether the rates are to be believed; else drafts are only tried."""
        return self.num_accepted >= PROVEN

    @property
    def may_be_tried(self) -> bool:
        """Whether tries may begin or go on."""
        return self.is_unknown or (self._num_idle < TRY_GAP and self._num_tried < MOST_TRIED)

    @property
    def mean(self) -> float:
        """Of all requests, over all positions, each weighted by how often it was tried."""
        tried, accepted = self._counts.sum(axis=1).tolist()
        weight = PRIOR_WEIGHT * self._counts.shape[1]
        return float((accepted + PRIOR_RATE * weight) / (tried + weight))

    def learn(self, outcome: Outcome, depth: int | None = None) -> None:
        """Count each request's accepted tokens and its first rejected one; only the first `depth` positions."""
        size = self._counts.shape[1]
        lengths, accepted = outcome.of_draft
        if depth is not None:
            accepted, lengths = np.minimum(accepted, depth), np.minimum(lengths, depth)
        if not lengths.any():
            self._idle()
            return
        self._num_idle, self._pause = 0, max(LEAST_PAUSE, self._pause - PAUSE_FALL)
        tried = np.minimum(accepted + 1, lengths)
        counts = np.array((_count_above(tried, size), _count_above(accepted, size)))
        self._counts *= ACCEPTANCE_DECAY
        self._counts += counts
        self._recent *= RECENT_DECAY
        self._recent += counts
        self._contexts.learn(outcome.num_tokens, tried, accepted)
        self._num_steps += 1
        self._num_tried += int(counts[0, 0])
        if self._num_steps % CHANGE_INTERVAL == 0 and self._has_changed():
            self._counts[:] = self._recent
            self._weigh(CHANGED_WEIGHT)
            self._own.forget(REQUEST_PRIOR_WEIGHT)
            self._contexts.forget()

    def _has_changed(self) -> bool:
        """Whether recent steps cannot be explained by the rates of all steps."""
        rates, (tried, accepted) = self.rates, self._recent
        expected = tried * rates
        gap = float(accepted.sum() - expected.sum())
        return gap * gap > CHANGE_ERRORS**2 * (float(expected @ (1 - rates)) + 1.0)

    def _idle(self) -> None:
        """A step without drafts. After a pause drafts get another chance: what is known is forgotten."""
        self._num_idle += 1
        if self._counts[0, 0] > HELD_WEIGHT:
            self._scale(ACCEPTANCE_DECAY)
        elif self._num_idle >= self._pause and not self.is_unknown:
            self._num_idle, self._pause = 0, min(MOST_PAUSE, 2 * self._pause)
            self._num_tried = 0
            self._scale(0.0)
            self._own.forget(CHANCE_WEIGHT)

    def _weigh(self, most: float) -> None:
        """Let what is known count as at most `most` tried tokens."""
        self._scale(most / max(most, float(self._counts[0, 0])))

    def _scale(self, factor: float) -> None:
        self._counts *= factor
        self._recent *= factor
        self._contexts.scale(factor)

    def request_rates(self, view: BatchView) -> FloatArray:
        """[B] one rate for all positions of a request."""
        accepted, tried = self._own.of(view)
        expected = REQUEST_PRIOR_WEIGHT * self._contexts.rates(view.num_tokens, self.mean)
        return _bounded((accepted + expected) / (tried + REQUEST_PRIOR_WEIGHT))

    def position_rates(self, view: BatchView, depth: int | None = None, *, hopes: bool = False) -> FloatArray:
        """[B, depth] of each request and position; their cumulative product is the survival of its draft.

        `hopes`: what they may turn out to be, for the little that is known.
        """
        factor = _odds(self.request_rates(view)) / _odds(_bounded(np.array(self.mean)))
        rates = self._chained(HOPED_RATE, HOPED_WEIGHT) if hopes else self.likely_rates
        odds = _odds(_bounded(rates[:depth])) * factor[:, None]
        return _bounded(odds / (1 + odds))


class _ContextCounts:
    """Accepted and tried tokens of all requests, by the length of their contexts."""

    def __init__(self) -> None:
        self._counts: FloatArray = np.zeros((2, CONTEXT_BOUNDS.size + 1))  # tried and accepted

    def learn(self, num_tokens: IntArray | None, tried: IntArray, accepted: IntArray) -> None:
        """Of one step; [B] tokens of context, None where they are not known."""
        self._counts *= ACCEPTANCE_DECAY
        if num_tokens is not None:
            place = np.searchsorted(CONTEXT_BOUNDS, num_tokens)
            np.add.at(self._counts[0], place, tried)
            np.add.at(self._counts[1], place, accepted)

    def rates(self, num_tokens: IntArray, mean: float) -> FloatArray:
        """[B] over all positions, shrunk to the mean of all requests."""
        tried, accepted = self._counts
        rates: FloatArray = (accepted + CONTEXT_PRIOR_WEIGHT * mean) / (tried + CONTEXT_PRIOR_WEIGHT)
        return rates[np.searchsorted(CONTEXT_BOUNDS, num_tokens)]

    def scale(self, factor: float) -> None:
        self._counts *= factor

    def forget(self) -> None:
        self._counts[:] = 0.0


class _OwnCounts:
    """Accepted and tried tokens of each request, without those that were forgotten. A view has only totals."""

    def __init__(self) -> None:
        self._latest: BatchView | None = None
        self._forgotten: FloatArray | None = None  # [2, slots] of the totals; None: nothing

    def of(self, view: BatchView) -> tuple[FloatArray | IntArray, FloatArray | IntArray]:
        """[B] accepted, and [B] tried."""
        self._latest = view
        if self._forgotten is None:
            return view.accepted, view.tried
        forgotten = self._forgotten_of(view)
        return view.accepted - forgotten[0], view.tried - forgotten[1]

    def forget(self, weight: float) -> None:
        """Every request's counts weigh at most this much."""
        view = self._latest
        if view is None or not view.num_requests:
            return
        share = 1 - weight / np.maximum(weight, view.tried)
        self._forgotten = np.zeros((2, int(view.slots.max()) + 1))
        self._forgotten[:, view.slots] = view.accepted * share, view.tried * share

    def _forgotten_of(self, view: BatchView) -> FloatArray:
        """[2, B]; nothing where another request has taken the slot."""
        assert self._forgotten is not None
        is_known = view.slots < self._forgotten.shape[1]
        slots = view.slots[is_known]
        taken = slots[view.tried[is_known] < self._forgotten[1, slots]]
        self._forgotten[:, taken] = 0.0
        found: FloatArray = np.zeros((2, view.num_requests))
        found[:, is_known] = self._forgotten[:, slots]
        return found


class Calibration:
    """P(accepted) from the draft's confidence: log-odds of acceptance = offset + factor × log-odds of the confidence.

    Fitted online to the tried tokens, one Newton step for each step of the engine.
    """

    def __init__(self) -> None:
        self._weights: FloatArray = np.array([1.0, 1.0])  # draft models are underconfident: an offset above 0
        self._gram: FloatArray = CALIBRATION_WEIGHT * np.eye(2)

    @property
    def weights(self) -> tuple[float, float]:
        """Offset and factor."""
        offset, factor = self._weights.tolist()
        return offset, factor

    def learn(self, outcome: Outcome) -> None:
        if outcome.confidence is None:
            return
        position = np.arange(outcome.confidence.shape[1])
        lengths, right = outcome.of_draft
        tried = position < np.minimum(right + 1, lengths)[:, None]
        accepted = (position < right[:, None])[tried]
        confidence = outcome.confidence[tried]
        expected = accepted_chance(confidence, self.weights)
        features = np.stack([np.ones_like(confidence), log_odds(confidence)])
        gram = (expected * (1 - expected) * features) @ features.T
        prior = (1 - ACCEPTANCE_DECAY) * CALIBRATION_WEIGHT * np.eye(2)
        self._gram = ACCEPTANCE_DECAY * self._gram + gram + prior
        step = np.linalg.solve(self._gram, features @ (accepted - expected))
        self._weights = np.clip(self._weights + step, MIN_CALIBRATION, MAX_CALIBRATION)


def _count_above(counts: IntArray, depth: int) -> FloatArray:
    """[depth] how many of the counts are above 0, above 1, …"""
    histogram = np.bincount(np.minimum(counts, depth), minlength=depth + 1)
    return histogram[::-1].cumsum()[::-1][1:].astype(np.float64)


def _odds(rates: FloatArray) -> FloatArray:
    return rates / (1 - rates)


def _bounded(rates: FloatArray) -> FloatArray:
    return rates.clip(MIN_RATE, MAX_RATE)
