"""A fault plan: what goes wrong inside an engine, at which place and which moment. For tests alone.

A fault is written PLACE:CALL:WHAT, or PLACE:FIRST-LAST:WHAT: at the calls of that number, from 1, WHAT happens there.
Faults are separated by commas. PLACE is a name of PLACES, or module:Class.method. Nothing in the package knows of this
module: no option, variable or request arms a fault. Within a process a test uses `armed`; in a server's engine the
factories below arm the plan in the file that the variable FASER_FAULTS names, whenever an engine starts.
"""

from __future__ import annotations

import errno
import os
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from faser.server.messages import Start
from faser.server.worker import Served

PLACES = {
    "start": "tests.faults:begin",  # of an engine
    "plan": "faser.engine.scheduler:Scheduler.plan",
    "reserve": "faser.engine.pages:PagePool.reserve",  # within plan
    "commit": "faser.engine.scheduler:Scheduler.commit",
    "publish": "faser.engine.prefixes:Prefixes.publish_prompts",  # within commit
    "execute": "faser.runtime.cpu.executor:TorchExecutor.execute",
    "draft": "faser.runtime.cpu.drafter:ChainDrafter.draft",
    "verify": "faser.runtime.cpu.verifier:Verifier.verify",
    "logits": "faser.runtime.cpu.runner:ModelRunner.logits",
    "offload": "faser.runtime.cpu.draft_memory:CpuDraftMemory.offload",
    "load": "faser.runtime.cpu.draft_memory:CpuDraftMemory.load",
    "launch": "faser.runtime.cuda.model:CudaModel.launch_rows",
    "submit": "faser.runtime.cuda.executor:CudaExecutor.submit",
    "collect": "faser.runtime.cuda.executor:CudaExecutor.collect",
    "write": "pathlib:Path.write_text",
}


@dataclass(frozen=True)
class Fault:
    place: str
    first: int
    last: int
    what: str


def parse(text: str) -> list[Fault]:
    found = []
    for written in filter(None, re.split(r"[,\s]+", text)):
        place, moment, what = re.fullmatch(r"(.+):(\d+(?:-\d+)?):(\w+)", written).groups()  # type: ignore[union-attr]
        first, _, last = moment.partition("-")
        assert what in _WHAT, f"{written}: expected one of {', '.join(_WHAT)}"
        found.append(Fault(place, int(first), int(last or first), what))
    return found


@contextmanager
def armed(text: str) -> Iterator[None]:
    """The faults of a plan, until the end of the block."""
    undo = [_arm(fault) for fault in parse(text)]
    try:
        yield
    finally:
        for each in reversed(undo):
            each()


def begin() -> None:
    """Called when an engine starts."""


def paced(start: Start) -> Served:
    """An engine whose steps compute nothing."""
    _arm_from_file()
    from tests.server.paced_engine import make

    return make(start)


def rapid(start: Start) -> Served:
    """The same, with steps of 2 ms."""
    served = paced(start)
    import tests.server.paced_engine

    tests.server.paced_engine.STEP_SECONDS = 0.002
    return served


def moving(start: Start) -> Served:
    """An engine with a draft that leaves in the first step, and comes back when there are no requests."""
    _arm_from_file()
    from tests.server.paced_engine import make_moving

    return make_moving(start)


def _arm_from_file() -> None:
    for fault in parse(Path(os.environ["FASER_FAULTS"]).read_text()):
        _arm(fault)
    begin()


def _arm(fault: Fault) -> Callable[[], None]:
    """Replace the function at the place by one that counts its calls. Returns what puts the old one back."""
    module, _, path = PLACES.get(fault.place, fault.place).partition(":")
    *outer, name = path.split(".")
    holder: Any = import_module(module)
    for each in outer:
        holder = getattr(holder, each)
    function, happens = getattr(holder, name), _WHAT[fault.what]
    calls = 0

    def replaced(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if fault.first <= calls <= fault.last:
            return happens(lambda: function(*args, **kwargs))
        return function(*args, **kwargs)

    setattr(holder, name, replaced)
    return lambda: setattr(holder, name, function)


# ── what can happen ──────────────────────────────────────────────────────────────────────────────────────────────────


def _fail(error: Callable[[], Exception]) -> Callable[[Callable[[], Any]], Any]:
    def fail(_: Callable[[], Any]) -> Any:
        raise error()

    return fail


def _die(_: Callable[[], Any]) -> Any:
    """What the kernel does when memory runs out."""
    os.kill(os.getpid(), signal.SIGKILL)


def _spoil(call: Callable[[], Any]) -> Any:
    """A tensor whose first row is no number."""
    result = call()
    result[:1] = float("nan")
    return result


def _device_error() -> Exception:
    import torch

    return torch.AcceleratorError("CUDA error: an illegal memory access was encountered\nCompile with …")


def _lack_of_memory() -> Exception:
    import torch

    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")


_WHAT: dict[str, Callable[[Callable[[], Any]], Any]] = {
    "error": _fail(lambda: RuntimeError("secret details")),
    "no_memory": _fail(_lack_of_memory),
    "device": _fail(_device_error),
    "triton": _fail(lambda: RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered")),
    "full_disk": _fail(lambda: OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))),
    "nan": _spoil,
    "kill": _die,
}
