"""Questions about a scene and their exact answers, from its plan alone.

Knows the plan's truth and English. Knows nothing of pixels, tokens or models. An answer is one word or one digit.

* `there` means in the last frame; `moving` means between the last two frames.
* `appeared` means not seen in the first frame and seen in the last; `left` is the reverse; `stopped` means moving in
  the first frame, seen in the last, and not moving there.

Answers are balanced where a question has a free word: the wanted answer is drawn first, then a word that gives it. What
a guesser without eyes would reach is counted, not assumed: `chance` is the share of the most common answer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from tools.watch.scenes import DIRECTIONS, Plan
from tools.watch.sprites import KINDS, Random

PLURALS = {"person": "people", "car": "cars", "dog": "dogs", "ball": "balls", "box": "boxes"}
# Shares of the picture: x0, y0, x1, y1.
ZONES = {
    "the left half": (0.0, 0.0, 0.5, 1.0),
    "the right half": (0.5, 0.0, 1.0, 1.0),
    "the upper half": (0.0, 0.0, 1.0, 0.5),
    "the lower half": (0.0, 0.5, 1.0, 1.0),
    "the top left corner": (0.0, 0.0, 0.5, 0.5),
    "the top right corner": (0.5, 0.0, 1.0, 0.5),
    "the bottom left corner": (0.0, 0.5, 0.5, 1.0),
    "the bottom right corner": (0.5, 0.5, 1.0, 1.0),
}
YES_NO = ("yes", "no")


@dataclass(frozen=True)
class Question:
    kind: str  # of the question
    text: str
    answer: str


@dataclass(frozen=True)
class Truth:
    """What the questions ask about."""

    kinds: tuple[str, ...]  # of all things
    directions: tuple[str | None, ...]
    there: tuple[int, ...]  # indices of things
    moving: tuple[int, ...]
    appeared: tuple[int, ...]
    left: tuple[int, ...]
    stopped: tuple[int, ...]
    centres: tuple[tuple[float, float], ...]  # at the end, as shares of the picture

    @classmethod
    def of(cls, plan: Plan) -> Truth:
        first, last, moving = plan.seen[0], plan.seen[-1], plan.moving
        boxes = plan.boxes[-1] / plan.settings.side
        return cls(
            kinds=tuple(thing.kind for thing in plan.things),
            directions=tuple(thing.direction for thing in plan.things),
            there=_indices(last),
            moving=_indices(moving[-1]),
            appeared=_indices(last & ~first),
            left=_indices(first & ~last),
            stopped=_indices(moving[0] & last & ~moving[-1]),
            centres=tuple((float(x), float(y)) for x, y in (boxes[:, :2] + boxes[:, 2:]) / 2),
        )

    def only(self, kind: str) -> int | None:
        """The one thing of this kind that was ever seen; None if there are none or several."""
        found = [index for index, each in enumerate(self.kinds) if each == kind]
        return found[0] if len(found) == 1 else None


def _indices(flags: np.ndarray) -> tuple[int, ...]:
    return tuple(int(index) for index in np.flatnonzero(flags))


# ── one maker per kind of question ───────────────────────────────────────────────────────────────────────────────────
# Each returns the words that fill the phrasing, and the answer; None where the scene does not allow the question.

Filled = tuple[dict[str, str], str] | None


def _count(truth: Truth, random: Random) -> Filled:
    return {}, str(len(truth.there))


def _count_moving(truth: Truth, random: Random) -> Filled:
    return {}, str(len(truth.moving))


def _count_kind(truth: Truth, random: Random) -> Filled:
    counts = Counter(truth.kinds[index] for index in truth.there)
    wanted = random.choice(sorted({counts[kind] for kind in KINDS}))
    kind = _pick([kind for kind in KINDS if counts[kind] == wanted], random)
    return {"plural": PLURALS[kind]}, str(wanted)


def _present(truth: Truth, random: Random) -> Filled:
    shown = {truth.kinds[index] for index in truth.there}
    return _coin(random, {kind: kind in shown for kind in KINDS}, "kind")


def _which(truth: Truth, random: Random) -> Filled:
    kinds = {truth.kinds[index] for index in truth.moving}
    return ({}, kinds.pop()) if len(kinds) == 1 else None


def _direction(truth: Truth, random: Random) -> Filled:
    only = [index for index in truth.moving if truth.only(truth.kinds[index]) is not None]
    if not only:
        return None
    index = only[int(random.integers(len(only)))]
    direction = truth.directions[index]
    assert direction is not None, "a moving thing has a direction"
    return {"kind": truth.kinds[index]}, direction


def _stopped(truth: Truth, random: Random) -> Filled:
    there = {truth.kinds[index]: index in truth.stopped for index in truth.there}
    only = {kind: is_so for kind, is_so in there.items() if truth.only(kind) is not None}
    return _coin(random, only, "kind", yes=0.75)


def _zone(truth: Truth, random: Random) -> Filled:
    """A thing whose centre is near a zone's edge would be a matter of opinion: such zones are not asked about."""
    places = [truth.centres[index] for index in truth.there]
    answers = {zone: _in_zone(places, box) for zone, box in ZONES.items()}
    return _coin(random, {zone: is_so for zone, is_so in answers.items() if is_so is not None}, "zone", yes=0.37)


def _in_zone(places: Iterable[tuple[float, float]], box: Sequence[float], margin: float = 0.06) -> bool | None:
    """Whether any place is inside; None if that hangs on less than the margin."""
    depths = [min(x - box[0], y - box[1], box[2] - x, box[3] - y) for x, y in _widened(places)]
    if any(depth >= margin for depth in depths):
        return True
    return None if any(depth > -margin for depth in depths) else False


def _widened(places: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Places moved away from the picture's own edges, which are no borders of a zone."""
    return [(min(max(x, 0.1), 0.9), min(max(y, 0.1), 0.9)) for x, y in places]


def _appeared(truth: Truth, random: Random) -> Filled:
    return {}, YES_NO[not truth.appeared]


def _left(truth: Truth, random: Random) -> Filled:
    return {}, YES_NO[not truth.left]


def _pick(words: Sequence[str], random: Random) -> str:
    return words[int(random.integers(len(words)))]


def _coin(random: Random, answers: dict[str, bool], name: str, yes: float = 0.5) -> Filled:
    """A word whose answer is what the coin says; None where no word has this answer.

    `yes` is the coin's share of yes: less than a half where scenes seldom allow a no, so that asked questions balance.
    """
    wanted = bool(random.random() < yes)
    words = [word for word, is_so in answers.items() if is_so == wanted]
    return ({name: _pick(words, random)}, YES_NO[not wanted]) if words else None


DIGITS = tuple("0123456789")
Maker = Callable[[Truth, Random], Filled]
# Kind -> maker, possible answers, phrasings. The last phrasing of each is held out.
QUESTIONS: dict[str, tuple[Maker, tuple[str, ...], tuple[str, ...]]] = {
    "count": (
        _count,
        DIGITS,
        (
            "How many things are there?",
            "Count the things.",
            "What is the number of things?",
            "How many things do you see?",
        ),
    ),
    "count moving": (
        _count_moving,
        DIGITS,
        ("How many things are moving?", "Count the moving things.", "How many things move?", "How many are in motion?"),
    ),
    "count kind": (
        _count_kind,
        DIGITS,
        (
            "How many {plural} are there?",
            "Count the {plural}.",
            "What is the number of {plural}?",
            "How many {plural} do you see?",
        ),
    ),
    "present": (
        _present,
        YES_NO,
        ("Is there a {kind}?", "Can you see a {kind}?", "Does the video show a {kind}?", "Do you see any {kind}?"),
    ),
    "which": (
        _which,
        KINDS,
        ("What is moving?", "Which kind of thing is moving?", "What moves?", "What sort of thing is in motion?"),
    ),
    "direction": (
        _direction,
        DIRECTIONS,
        (
            "Which way is the {kind} moving?",
            "In which direction does the {kind} move?",
            "Where is the {kind} going: left, right, up or down?",
            "Which way does the {kind} go?",
        ),
    ),
    "stopped": (
        _stopped,
        YES_NO,
        (
            "Did the {kind} stop?",
            "Has the {kind} stopped?",
            "Did the {kind} come to a halt?",
            "Did the {kind} stop moving?",
        ),
    ),
    "zone": (
        _zone,
        YES_NO,
        (
            "Is anything in {zone}?",
            "Is there something in {zone}?",
            "Is a thing in {zone}?",
            "Do you see anything in {zone}?",
        ),
    ),
    "appeared": (
        _appeared,
        YES_NO,
        (
            "Did something appear?",
            "Did anything come into view?",
            "Has something new appeared?",
            "Did anything appear?",
        ),
    ),
    "left": (
        _left,
        YES_NO,
        ("Did something leave?", "Did anything go out of view?", "Has something left?", "Did anything leave?"),
    ),
}


def ask(truth: Truth, kind: str, random: Random, held_out: bool = False) -> Question | None:
    """A question of one kind; None where the scene does not allow one, or not with the answer that was drawn."""
    maker, answers, phrasings = QUESTIONS[kind]
    filled = maker(truth, random)
    if filled is None:
        return None
    words, answer = filled
    assert answer in answers, f"{answer!r} is no answer to {kind!r}"
    phrasing = phrasings[-1] if held_out else _pick(phrasings[:-1], random)
    return Question(kind, phrasing.format(**words), answer)


def ask_some(
    plan: Plan, number: int, seed: int, held_out: bool = False, kinds: Sequence[str] = tuple(QUESTIONS)
) -> list[Question]:
    """`number` questions about one scene, of different kinds as far as it allows; always as many as asked for."""
    random = np.random.default_rng((seed, 3))
    truth = Truth.of(plan)
    found: list[Question] = []
    while len(found) < number:
        for kind in random.permutation(sorted(kinds)):
            question = ask(truth, str(kind), random, held_out)
            found += [question] if question is not None and len(found) < number else []
    return found


def chance(questions: Iterable[Question]) -> dict[str, float]:
    """By kind: the share of the most common answer, which a guesser without eyes can reach."""
    answers: dict[str, Counter[str]] = {}
    for question in questions:
        answers.setdefault(question.kind, Counter())[question.answer] += 1
    return {kind: max(counts.values()) / counts.total() for kind, counts in sorted(answers.items())}
