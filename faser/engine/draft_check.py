"""Does the draft fit its target? Found out in passing, from the drafts that are verified anyway.

A wrong tokenizer map, a draft of another checkpoint of the same shape, or a head that reads the wrong layers load and
run, and the output stays right: only the guesses are bad. Knows counts of first tokens, and what is known before any is
drafted (`faser/models/heads/shift.py`); nothing of models or policies.
"""

from __future__ import annotations

import logging
import math

import numpy as np

from faser.step import StepPlan, StepResult

LEAST_ACCEPTED = 0.1  # share of first tokens: below it not even the cheapest head pays, so no useful draft is accused
ERRORS = 3.0  # standard errors by which the share must be lower
MEMORY = 4096  # tried first tokens, after which all counts are halved

log = logging.getLogger(__name__)


class DraftCheck:
    """Told of every step. `misfit` says what is wrong with the draft, None: nothing is known to be.

    `known`: what is wrong whatever is accepted.
    """

    def __init__(self, known: str | None = None) -> None:
        self._known = known
        self.misfit = known
        if known is not None:
            _warn(known)
        self._tried = self._accepted = 0.0  # first tokens of drafts

    def learn(self, plan: StepPlan, result: StepResult) -> None:
        verified, accepted = result.num_verified, result.num_accepted
        if plan.lookup is not None:  # what was looked up says nothing of the draft
            by_draft = ~plan.lookup.is_looked_up
            verified, accepted = verified[by_draft], accepted[by_draft]
        tried = int(np.count_nonzero(verified))
        if not tried:
            return
        self._tried += tried
        self._accepted += int(np.count_nonzero(accepted))
        if self._tried >= MEMORY:
            self._tried, self._accepted = self._tried / 2, self._accepted / 2
        self._judge()

    def _judge(self) -> None:
        """The log says it once, even if the draft gets better and worse again."""
        share = self._accepted / self._tried
        if self.misfit != self._known:
            self.misfit = self._known if share > LEAST_ACCEPTED else self.misfit
        elif highest_share(share, self._tried) < LEAST_ACCEPTED:
            self.misfit = (
                f"only {100 * share:.1f} % of {self._tried:.0f} first tokens were accepted; is it made for this target "
                "and its tokenizer?"
            )
            _warn(self.misfit)


def _warn(misfit: str) -> None:
    log.warning("the draft guesses badly: %s The output is right all the same.", misfit)


def highest_share(share: float, count: float) -> float:
    """The highest chance that explains a share of `count` trials within ERRORS (Wilson's bound)."""
    squared = ERRORS**2 / count
    spread = ERRORS * math.sqrt(share * (1 - share) / count + squared / (4 * count))
    return (share + squared / 2 + spread) / (1 + squared)
