"""What FASER's workers share: follow the scheduler, capture graphs after vLLM's own, measure costs, save them."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any, Protocol

from faser.vllm.config import FaserConfig
from faser.vllm.costs import table_path

if TYPE_CHECKING:
    from faser.cost.profile import Profile

log = logging.getLogger("vllm.faser")  # below vLLM's logger, which prints


class DraftPart(Protocol):
    """FASER's part of a model runner."""

    def begin_step(self, output: Any) -> None:
        """The scheduler's message, before the target's forward."""

    def prepare(self) -> str:
        """Capture graphs; returns what was done, in one line."""

    def measure(self) -> Profile:
        """Costs of both models, through the graphs that will run."""


class DraftingWorker:
    """Mixed into a worker of vLLM, before its class. `draft_part` is set by `find_draft_part`."""

    vllm_config: Any
    rank: int
    draft_part: DraftPart | None = None

    def find_draft_part(self) -> DraftPart | None:
        """FASER's part of the model runner; None where drafting stays vLLM's. Called when the models are loaded."""
        raise NotImplementedError

    def compile_or_warm_up_model(self) -> Any:
        result = super().compile_or_warm_up_model()  # type: ignore[misc]
        self.draft_part = self.find_draft_part()
        if self.draft_part is not None:
            log.info("FASER: %s", self.draft_part.prepare())
            self._save_costs(self.draft_part)
        return result

    def execute_model(self, scheduler_output: Any) -> Any:
        if self.draft_part is not None:
            self.draft_part.begin_step(scheduler_output)
        return super().execute_model(scheduler_output)  # type: ignore[misc]

    def say_why_not(self, reason: str) -> None:
        log.warning("FASER: drafting stays vLLM's (%s); the draft then runs in every step", reason)

    def _save_costs(self, part: DraftPart) -> None:
        """All workers measure, for they compute together; the first one saves."""
        config = FaserConfig.find(self.vllm_config.additional_config) or FaserConfig()
        path = table_path(config, self.vllm_config.instance_id)
        if config.costs is not None and path.exists():
            log.info("FASER: costs are those of %s", path)
            return
        began = time.perf_counter()
        profile = part.measure()
        if self.rank == 0:
            path.parent.mkdir(parents=True, exist_ok=True)
            profile.save(path)
            log.info("FASER: costs measured in %.1f s", time.perf_counter() - began)
