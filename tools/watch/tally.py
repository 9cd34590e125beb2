"""Right answers by kind of question, beside chance.

Knows counts. Knows nothing of models.
"""

from __future__ import annotations

from collections import Counter

from torch import Tensor

from tools.watch.windows import KIND_NAMES


class Tally:
    def __init__(self) -> None:
        self._right: Counter[int] = Counter()
        self._answers: dict[int, Counter[int]] = {}

    def add(self, kind: Tensor, answer: Tensor, is_right: Tensor) -> None:
        """All [windows, questions]: index of the kind, token of the right answer, whether it was given."""
        for each, token, right in zip(*(t.flatten().tolist() for t in (kind, answer, is_right)), strict=True):
            self._answers.setdefault(each, Counter())[token] += 1
            self._right[each] += right

    def table(self) -> dict[str, dict[str, float]]:
        """By kind: questions, the share of right answers, and that of the most common answer (chance)."""
        return {
            KIND_NAMES[kind]: {
                "questions": counts.total(),
                "accuracy": self._right[kind] / counts.total(),
                "chance": max(counts.values()) / counts.total(),
            }
            for kind, counts in sorted(self._answers.items())
        }

    def text(self) -> str:
        """One line: accuracy/chance by kind; empty without answers."""
        return " ".join(f"{name} {row['accuracy']:.2f}/{row['chance']:.2f}" for name, row in self.table().items())
