"""A machine whose seconds can be added up in the head, and small workloads for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from faser.cost.curve import Curve
from faser.cost.profile import Profile
from faser.sim.oracle import Oracle, runs_of
from faser.sim.replica import Machine, Replica, make_replica
from faser.traffic.document import Item, Run, Workload
from faser.traffic.play import play
from faser.traffic.prompts import Blank

# A verification takes 8 ms and 1 ms a row; with prompts 10 ms and 2 ms a row. A draft takes
# 3 ms, a further one 2 ms, and one that catches up 5 ms and 1 ms a row. Context costs nothing, the host 0.5 ms.
PROFILE = Profile(
    about={"device": "toy", "model": "large", "draft": "small"},
    verify=Curve((1, 101), (0.009, 0.109), (0.0, 0.0)),
    prompts=Curve((1, 101), (0.012, 0.212), (0.0, 0.0)),
    first_draft=Curve((1,), (0.003,), (0.0,)),
    next_draft=Curve((1,), (0.002,), (0.0,)),
    catch_up=Curve((1, 101), (0.006, 0.106), (0.0, 0.0)),
    host=0.0005,
)
TOY = Machine(profile=PROFILE, max_running=8, max_batch_tokens=64, max_model_len=128, page_size=8)


@dataclass(frozen=True)
class Known:
    """An oracle that is told: the same sequence for all requests."""

    agreement: Sequence[int]
    sure: Sequence[float] = ()

    def runs(self, request: int, size: int) -> np.ndarray:
        return runs_of(np.resize(np.array(self.agreement, dtype=np.bool_), size))

    def confidence(self, request: int, first: int, size: int) -> np.ndarray:
        return np.resize(np.array(self.sure), first + size)[first:]


def make_workload(
    size: int, rate: float = 20.0, concurrency: int | None = None, prompt: int = 8, output: int = 12
) -> Workload:
    """Requests at even distances, of two categories; prompts and outputs differ a little."""
    items = (
        Item(i / rate, Blank(prompt + i % 5), output + 3 * (i % 4), category=("maths", "prose")[i % 2])
        for i in range(size)
    )
    return Workload(tuple(items), concurrency, {"source": "even distances"})


def simulate(
    workload: Workload, policy: str, oracle: Oracle, machine: Machine = TOY, **changes: object
) -> tuple[Run, Replica]:
    replica = make_replica(replace(machine, **changes) if changes else machine, policy, oracle)  # type: ignore[arg-type]
    return play(replica.engine, workload, policy, clock=replica.time.clock), replica
