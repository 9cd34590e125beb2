"""A simulated machine: the real engine and scheduler over a profile.

Puts the parts together. A `Machine` holds the options, the same for every replica and policy.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path

from faser.arrays import IntArray
from faser.cost.profile import Profile
from faser.cost.profiled_cost import ProfiledCost
from faser.engine.engine import Engine
from faser.engine.pages import PagePool
from faser.engine.prompt_pace import GPU, StepPace
from faser.engine.reporter import Reporter
from faser.engine.residency import Place, Residency
from faser.engine.scheduler import Scheduler
from faser.errors import ConfigError, RequestTooLong
from faser.limits import DRAFT_SINKS, KeyWindow, Limits
from faser.policy import make_policy
from faser.policy.overlap import Overlap
from faser.request import Progress
from faser.sim.draft_memory import SimDraftMemory
from faser.sim.executor import Noise, SimExecutor, VirtualTime, Watch, no_noise
from faser.sim.oracle import Oracle
from faser.step import StepPlan, StepResult, StepSeconds

PROFILES = Path(__file__).parent / "profiles"
NOBODY = ""  # no request has this id
IDLE_SECONDS = 0.05  # between two looks at the draft's place while there are no requests


def load_profile(name: str) -> Profile:
    """A shipped profile by name, or a file."""
    shipped = {path.stem: path for path in sorted(PROFILES.glob("*.json"))}
    path = shipped.get(name) or Path(name).expanduser()
    if not path.is_file():
        raise ConfigError(
            f"--profile {name}: no such file; give one that `faser profile` wrote, or one of {', '.join(shipped)}"
        )
    return Profile.load(path)


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One GPU and the options of its engine."""

    profile: Profile
    max_running: int = 256
    max_batch_tokens: int = 4096
    max_step_ms: float = 0.0  # bounds the prompt rows of a step; 0: no bound
    max_model_len: int = 4096
    kv_tokens: int | None = None  # of the target's pool; None: enough for max_running full requests
    page_size: int = 16
    runs_ahead: bool = True  # the next step is planned while one runs
    noise: float = 0.0  # relative standard deviation of a step's seconds
    overlap: str = "off"  # drafting beside verification, if the profile has measured it
    offload: str = "off"  # auto: the draft's memory holds KV pages while they are short, if the profile has its sizes
    draft_window: int | None = None  # tokens of a context that the draft sees behind its first ones; None: all

    def __post_init__(self) -> None:
        for name in ("max_running", "max_batch_tokens", "max_model_len", "kv_tokens", "page_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"--{name.replace('_', '-')} {value}: expected an integer of at least 1")
        if self.max_running > self.max_batch_tokens:
            raise ConfigError(
                f"--max-running {self.max_running} exceeds --max-batch-tokens {self.max_batch_tokens}: every running "
                "request needs a row; raise the second or lower the first"
            )
        if not 0 <= self.max_step_ms < inf:
            raise ConfigError(f"--max-step-ms {self.max_step_ms:g}: expected milliseconds above 0, or 0 for no bound")
        if not 0 <= self.noise < 1:
            raise ConfigError(f"--noise {self.noise:g}: expected a share, from 0 to below 1")
        if self.offload not in ("auto", "off"):
            raise ConfigError(f"--offload {self.offload}: expected auto or off")
        if self.draft_window is not None and self.draft_window < KeyWindow.LEAST_SIZE:
            raise ConfigError(f"--draft-window {self.draft_window}: expected off or at least {KeyWindow.LEAST_SIZE}")

    @property
    def limits(self) -> Limits:
        window = None if self.draft_window is None else KeyWindow(self.draft_window, DRAFT_SINKS)
        if window is not None and window.span >= self.max_model_len:
            window = None
        return Limits(self.max_running, self.max_batch_tokens, self.max_model_len, draft_window=window)

    @property
    def num_pages(self) -> int:
        """Pages of the target while the draft is resident."""
        most = self._most_pages
        return most if self.kv_tokens is None else min(most, max(1, self.kv_tokens // self.page_size))

    @property
    def num_draft_pages(self) -> int:
        """As many, or what the draft's windows need."""
        return self.limits.draft_pages(self.num_pages, self.page_size)

    @property
    def _most_pages(self) -> int:
        """More than these no requests can hold."""
        return self.max_running * -(-self.max_model_len // self.page_size)

    @property
    def pages_gained(self) -> int:
        """Pages of the target that the draft's memory can hold; 0 where it does not leave."""
        residency = self.profile.residency
        if self.offload == "off" or residency is None:
            return 0
        return min(residency.pages_gained(self.num_draft_pages, self.page_size), self._most_pages - self.num_pages)

    def check_size(self, num_prompt: int, num_output: int) -> None:
        """Raises RequestTooLong for a request that can never be served, like the scheduler."""
        total, most = num_prompt + num_output, min(self.max_model_len, self.num_pages * self.page_size)
        if total > most:
            raise RequestTooLong(f"{num_prompt} prompt tokens + {num_output} = {total}, but a replica takes {most}")


@dataclass(frozen=True)
class Replica:
    """An engine and its time."""

    engine: Engine
    time: VirtualTime

    def idle_until(self, seconds: float) -> None:
        """Time without requests, in which the draft may come back."""
        residency = self.engine.residency
        while residency is not None and residency.place is not Place.RESIDENT and self.time.now() < seconds:
            residency.proceed()
            self.time.reach(min(seconds, self.time.now() + IDLE_SECONDS))
        self.time.reach(seconds)


class _SilentCost(ProfiledCost):
    """Saves the time of predictions, which a simulation does not report."""

    def predict(self, plan: StepPlan) -> float:
        return 0.0


class _IdleCost(_SilentCost):
    """Saves the time of learning too, for a policy that uses no cost."""

    def learn(self, plan: StepPlan, spent: StepSeconds, seconds: float) -> None: ...


class _QuietReporter(Reporter):
    """Saves the time of reporting one more token of each request in every step, which nobody reads.

    The tokens of requests that neither begin nor end in a step are reported together.
    """

    def report(self, slots: IntArray, emitted: IntArray, result: StepResult) -> Iterator[Progress]:
        known = self.slots.num_known[slots]
        begins = known - emitted == self.slots.num_prompt[slots]
        told = (emitted > 0) & (begins | (known >= self.slots.end[slots]))
        count = int(emitted[told].sum())
        yield from super().report(slots[told], emitted[told], replace(result, token_ids=result.token_ids[:count]))
        yield Progress(NOBODY, [0] * (result.token_ids.size - count), None, None)


def make_replica(machine: Machine, policy: str, oracle: Oracle, seed: int = 0, watch: Watch | None = None) -> Replica:
    """Empty, at second 0, under a policy that has learned nothing. `seed` is that of the noise."""
    chosen, limits, time = make_policy(policy), machine.limits, VirtualTime()
    given = machine.profile, limits.draft_span
    cost = _SilentCost(*given) if chosen.needs_cost else _IdleCost(*given)
    executor = SimExecutor(
        limits,
        ProfiledCost(*given),
        oracle,
        time,
        runs_ahead=machine.runs_ahead,
        noise=Noise(machine.noise, seed) if machine.noise else no_noise,
        watch=watch,
    )
    speculates = chosen.max_length > 0
    gained = machine.pages_gained if speculates else 0
    sizes = machine.page_size, machine.max_running, machine.max_model_len
    pacing = replace(GPU, row_sizes=machine.profile.prompts.sizes)
    scheduler = Scheduler(
        limits,
        chosen,
        PagePool(machine.num_pages, *sizes, caching=False, most_pages=machine.num_pages + gained),
        PagePool(machine.num_draft_pages, *sizes, caching=False, window=limits.draft_window),
        speculates=speculates,
        prefix_caching=False,
        cost=cost if chosen.needs_cost else None,
        overlap=None if machine.overlap == "off" else Overlap(machine.overlap),
        pace=StepPace(machine.max_step_ms / 1e3, pacing) if machine.max_step_ms else None,
        reporter=_QuietReporter,
    )
    residency = None
    if gained and machine.profile.residency is not None:
        residency = Residency(scheduler, SimDraftMemory(machine.profile.residency, gained, time), time.now)
    return Replica(Engine(scheduler, executor, time.now, cost, residency=residency), time)
