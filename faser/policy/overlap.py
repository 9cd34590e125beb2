"""Whether the draft goes on while the target verifies what it drafted before.

Knows the batch about to decode and what its policy would draft; no tensors and no clocks. Lengths are the policy's
either way. In a step that overlaps they are the next chunk, drafted as if the frontier (the chunk before) were
accepted.
"""

from __future__ import annotations

from faser.policy.base import BatchView
from faser.types import IntArray

MODES = ("auto", "on", "off")


class Overlap:
    """Every step overlaps."""

    def overlaps(self, view: BatchView, lengths: IntArray) -> bool:
        """Whether the step for these requests does, that are to draft so many tokens."""
        return True
