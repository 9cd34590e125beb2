"""From measured steps to the curves of a profile. Knows seconds, rows and context; runs nothing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from faser.cost.curve import NOTHING, Curve
from faser.cost.profile import Profile
from faser.cost.profiled_cost import ProfiledCost, work_of
from faser.runtime.profiling.batches import SHORT_DRAFT, Subject
from faser.runtime.profiling.steps import Measured

MIN_NEXT_SHARE = 0.3  # of the first drafted token's seconds, that each further one takes: it reads the same weights


@dataclass(frozen=True)
class Sample:
    rows: int
    context: int
    seconds: float


class Samples:
    """Measured steps, by the curve they belong to."""

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self._verify: list[Sample] = []
        self._prompts: list[Sample] = []
        self._catch_up: list[Sample] = []
        # by requests, rows and context of the first forward: seconds of drafting, by length
        self._drafts: defaultdict[tuple[int, int, int], dict[int, float]] = defaultdict(dict)
        self._host: list[float] = []

    @property
    def _drafts_blocks(self) -> bool:
        """Whether all tokens of a draft come from one forward: then further ones may be free."""
        return self._subject.limits.head is not None and self._subject.limits.head.block_rows > 0

    def add(self, several: Iterable[Measured]) -> None:
        graphs = self._subject.how.graph_rows
        for measured in several:
            plan, work = measured.plan, work_of(measured.plan, self._subject.limits.draft_span)
            only_decodes = not work.prompt_rows and (not graphs or work.rows <= graphs[-1])
            if only_decodes:
                rows = self._subject.graph_size(work.rows)
                self._verify.append(Sample(rows, work.context, measured.verify))
            if not only_decodes or not graphs:  # without graphs all rows cost alike
                self._prompts.append(Sample(work.rows + work.prompt_rows, work.context, measured.verify))
            if work.catch_up_rows:
                self._catch_up.append(Sample(work.catch_up_rows, work.draft_context, measured.draft))
            elif work.num_drafting:
                key = work.num_drafting, int(plan.draft_rows.sum()), work.draft_context
                self._drafts[key][int(plan.lengths.max())] = measured.draft
            if not work.prompt_rows and not work.catch_up_rows:
                self._host += measured.host.tolist()

    def profile(self, about: Mapping[str, Any]) -> Profile:
        limits, max_length = self._subject.limits, self._subject.max_length
        assumed = self._subject.assumed
        target, draft = (None, None) if assumed is None else (assumed.verify, assumed.first_draft)
        verify = make_curve(self._verify, prior=target)
        first_tokens, next_tokens, first_forwards = self._draft_samples()
        first = make_curve(first_tokens, prior=draft)
        if self._drafts_blocks:
            following = make_curve(next_tokens)
        else:
            following = make_curve(next_tokens, default=first, prior=draft)
        has_graphs = bool(self._subject.how.graph_rows)
        catch_up = self._catch_up if has_graphs else self._catch_up + first_forwards
        return Profile(
            about=about,
            verify=self._stepped(verify, limits.max_running * (1 + max_length)),
            prompts=self._stepped_below(make_curve(self._prompts, verify, has_graphs, target)),
            first_draft=self._stepped(first, limits.max_running),
            next_draft=self._stepped(following, limits.max_running),
            catch_up=self._stepped_below(make_curve(catch_up, first, has_graphs, draft)),
            host=float(np.median(self._host)) if self._host else assumed.host if assumed is not None else 0.0,
        )

    def _draft_samples(self) -> tuple[list[Sample], list[Sample], list[Sample]]:
        """Of the first drafted token and of each further one, by requests; of the first by rows, as catching up is."""
        first, following, forwards = [], [], []
        for (requests, rows, context), seconds in self._drafts.items():
            size, token = self._subject.graph_size(requests), _first_token(seconds)
            first.append(Sample(size, context, token))
            forwards.append(Sample(rows, context, token))
            longer = ((length, whole) for length, whole in seconds.items() if length > SHORT_DRAFT)
            least = 0.0 if self._drafts_blocks else MIN_NEXT_SHARE * token
            following += [Sample(size, context, _next_token(token, whole, length, least)) for length, whole in longer]
        return first, following, forwards

    def _stepped(self, curve: Curve, most_rows: int) -> Curve:
        """A point for every graph size up to the one that holds `most_rows`; sizes not measured are interpolated."""
        graphs = self._subject.how.graph_rows
        if not graphs or curve is NOTHING:
            return curve
        sizes = [size for size in graphs if size <= self._subject.graph_size(min(most_rows, graphs[-1]))]
        return _with_steps(curve, sizes, sizes[-1])

    def _stepped_below(self, curve: Curve) -> Curve:
        """A point for every graph size of steps with prompts; larger row counts run without graphs."""
        sizes = [size for size in self._subject.how.mixed_rows if size <= self._subject.limits.max_batch_tokens]
        if not sizes or curve is NOTHING:
            return curve
        return _with_steps(curve, [*sizes, *(rows for rows in curve.rows if rows > sizes[-1])], sizes[-1])


def _with_steps(curve: Curve, sizes: Sequence[int], stepped_to: int) -> Curve:
    seconds = curve(np.array(sizes), 0.0)
    per_token = np.maximum(curve(np.array(sizes), 1.0) - seconds, 0.0)
    return Curve(tuple(sizes), tuple(seconds.tolist()), tuple(per_token.tolist()), stepped_to)


def _first_token(seconds: Mapping[int, float]) -> float:
    """Of a draft, from seconds by length. If no draft of one token was measured, all its tokens count alike."""
    length = min(seconds)
    return seconds[length] / max(length, SHORT_DRAFT)


def _next_token(first: float, whole: float, length: int, least: float) -> float:
    """Of each token behind the first, but no less than `least`, whatever noise says."""
    return max((whole - first) / (length - SHORT_DRAFT), least)


def make_curve(
    samples: Iterable[Sample], default: Curve = NOTHING, one_slope: bool = False, prior: Curve | None = None
) -> Curve:
    """A point for each row count; more rows never take less time.

    Row counts with one measured context take the seconds per token from the others. `one_slope`: all row counts share
    the median seconds per token, so that noise of large steps is not taken for a cost of context. `prior`, an assumed
    curve, gives the seconds per token where no row count has two contexts, and continues the curve below and above the
    measured row counts. `default`: the curve if there are no samples.
    """
    groups: defaultdict[int, list[Sample]] = defaultdict(list)
    for sample in samples:
        groups[sample.rows].append(sample)
    if not groups:
        return default if default is not NOTHING or prior is None else prior
    ordered = sorted(groups.items())
    lines = {rows: fit_line(group) for rows, group in ordered if len({each.context for each in group}) > 1}
    slopes = [slope for _, slope in lines.values()]
    points = []
    for rows, group in ordered:
        if rows in lines and not one_slope:
            points.append((rows, *lines[rows]))
            continue
        slope = 0.0
        if lines:
            slope = float(np.median(slopes) if one_slope else np.interp(rows, list(lines), slopes))
        elif prior is not None:
            slope = _ratio_to(prior, group) * float(prior(rows, 1.0) - prior(rows, 0.0))
        without_context = float(np.median([each.seconds - slope * each.context for each in group]))
        points.append((rows, max(0.0, without_context), slope))
    if prior is not None and prior is not NOTHING:
        points = _continued(points, prior)
    rows_of, seconds, per_token = zip(*points, strict=True)
    return Curve(rows_of, seconds, per_token).monotone()


def _ratio_to(prior: Curve, samples: Sequence[Sample]) -> float:
    """Median of measured / assumed seconds."""
    assumed = [float(prior(each.rows, each.context)) for each in samples]
    ratios = [each.seconds / seconds for each, seconds in zip(samples, assumed, strict=True) if seconds > 0]
    return float(np.median(ratios)) if ratios else 1.0


def _continued(points: list[tuple[int, float, float]], prior: Curve) -> list[tuple[int, float, float]]:
    """With the prior's points below and above the measured row counts, scaled to meet the nearest measured point."""

    def scaled(rows: int, nearest: tuple[int, float, float]) -> tuple[int, float, float]:
        base = float(prior(nearest[0], 0.0))
        factor = nearest[1] / base if base > 0 and nearest[1] > 0 else 1.0
        return rows, factor * float(prior(rows, 0.0)), nearest[2]

    first, last = points[0], points[-1]
    below = [scaled(rows, first) for rows in prior.rows if rows < first[0]]
    above = [scaled(rows, last) for rows in prior.rows if rows > last[0]]
    return [*below, *points, *above]


def fit_line(samples: Sequence[Sample]) -> tuple[float, float]:
    """Seconds without context and per token, both at least 0: least squares of relative errors."""
    context, seconds = (np.array([getattr(each, name) for each in samples], float) for name in ("context", "seconds"))
    if not seconds.all():
        return float(np.median(seconds)), 0.0
    base, slope = np.linalg.lstsq(np.stack((1 / seconds, context / seconds), axis=1), np.ones_like(seconds))[0]
    if slope < 0:
        return float(np.median(seconds)), 0.0
    if base < 0:
        return 0.0, float(np.median(seconds / context))
    return float(base), float(slope)


def errors_of(cost: ProfiledCost, several: Iterable[Measured]) -> dict[str, float]:
    """Mean and worst error of predictions, as shares, on steps that the profile was not made from."""
    found = defaultdict(list)
    for measured in several:
        predicted = cost.parts(measured.plan)
        for name in ("verify", "draft"):
            seconds = getattr(measured, name)
            if seconds > 0 and getattr(predicted, name) > 0:
                found[name].append(abs(getattr(predicted, name) / seconds - 1))
    means = {name: float(np.mean(errors)) for name, errors in found.items()}
    return means | {f"{name}_worst": max(errors) for name, errors in found.items()}
