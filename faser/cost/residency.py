"""What moving the draft out of the device and back costs, and the KV pages that its memory holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ResidencyProfile:
    """Sizes in bytes, so that they hold for every size of pool and page."""

    weight_bytes: int  # of the draft, as far as they leave: not what it shares with the target
    target_token_bytes: int  # of a token's KV entries
    draft_token_bytes: int
    lend_seconds: float  # of giving the memory to the target's pages, all parts
    load_seconds: float  # of taking it back and loading the weights
    is_assumed: bool = False  # nothing was measured

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> ResidencyProfile:
        return cls(
            weight_bytes=int(given["weight_bytes"]),
            target_token_bytes=int(given["target_token_bytes"]),
            draft_token_bytes=int(given["draft_token_bytes"]),
            lend_seconds=float(given["lend_seconds"]),
            load_seconds=float(given["load_seconds"]),
            is_assumed=bool(given.get("is_assumed", False)),
        )

    def pages_gained(self, num_pages: int, page_size: int) -> int:
        """Pages of the target that fit where the draft's weights and its `num_pages` pages were."""
        freed = self.weight_bytes + num_pages * page_size * self.draft_token_bytes
        return freed // (page_size * self.target_token_bytes)
