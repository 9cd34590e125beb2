"""What FASER's workers share: follow the scheduler, capture graphs after vLLM's own, measure costs, save them."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from faser.vllm.config import FaserConfig
from faser.vllm.costs import table_path

if TYPE_CHECKING:
    from faser.cost.profile import Profile

log = logging.getLogger("vllm.faser")  # below vLLM's logger, which prints


class DraftPart(Protocol):
    """FASER's part of a model runner."""

    def why_not(self) -> str | None:
        """Why drafting stays vLLM's; None: it does not."""

    def prepare(self) -> str:
        """Capture graphs, and draft from now on; returns what was done, in one line."""

    def measure(self) -> Profile:
        """Costs of both models, through the graphs that will run."""

    def made_up_steps(self) -> Iterable[Any]:
        """Messages of the scheduler; what they compile, the first requests need. None where vLLM does it itself."""

    def begin_step(self, output: Any) -> None:
        """The scheduler's message, before the target's forward."""


class DraftingWorker:
    """Mixed into a worker of vLLM, before its class."""

    vllm_config: Any
    device: Any
    rank: int
    draft_part: DraftPart | None = None  # None: drafting is vLLM's

    def find_draft_part(self) -> DraftPart:
        """FASER's part of the model runner; asked for draft models alone, when they are loaded."""
        raise NotImplementedError

    def compile_or_warm_up_model(self) -> Any:
        result = super().compile_or_warm_up_model()  # type: ignore[misc]
        speculative = self.vllm_config.speculative_config
        if speculative is not None and speculative.uses_draft_model():
            with _unmonitored(self.device.type == "cuda"):
                self._start_drafting(self.find_draft_part())
        return result

    def execute_model(self, scheduler_output: Any) -> Any:
        if self.draft_part is not None:
            self.draft_part.begin_step(scheduler_output)
        return super().execute_model(scheduler_output)  # type: ignore[misc]

    def _start_drafting(self, part: DraftPart) -> None:
        reason = part.why_not()
        if reason is not None:
            log.warning("FASER: drafting stays vLLM's, because of this: %s. The draft then runs in every step.", reason)
            return
        log.info("FASER: %s", part.prepare())
        self._save_costs(part)
        self.draft_part = part
        self._run_made_up_steps(part)

    def _run_made_up_steps(self, part: DraftPart) -> None:
        began, number = time.perf_counter(), 0
        for output in part.made_up_steps():
            self.execute_model(output)
            if output.total_num_scheduled_tokens:
                self.sample_tokens(None)  # type: ignore[attr-defined]
                number += 1
        if number:
            log.info(
                "FASER: %d made-up steps in %.1f s, so that kernels are compiled", number, time.perf_counter() - began
            )

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


@contextmanager
def _unmonitored(has_triton: bool) -> Iterator[None]:
    """vLLM warns of kernels that are compiled after its own start: not of those compiled in FASER's."""
    if not has_triton:
        yield
        return
    from triton import knobs  # type: ignore[import-untyped]

    hook, knobs.runtime.jit_post_compile_hook = knobs.runtime.jit_post_compile_hook, None
    try:
        yield
    finally:
        knobs.runtime.jit_post_compile_hook = hook
