"""How an engine's process ended, the likely cause, and what to do about it.

Knows return codes and signals; knows nothing of what the process did.
"""

from __future__ import annotations

import resource
import signal
import sys

from faser.machine import memory_bytes

HUNG = "it hung and was killed; if its steps are long, raise --engine-timeout"
_TRACE = "set PYTHONFAULTHANDLER=1 to get a stack trace in the log, and try --device cpu or another version of torch"
_ADVICE: dict[int, str] = {
    signal.SIGSEGV: f"native code crashed; {_TRACE}",
    signal.SIGABRT: f"native code gave up; {_TRACE}",
    signal.SIGFPE: f"native code crashed; {_TRACE}",
    signal.SIGILL: "the processor lacks an instruction that torch uses; install a torch built for this processor",
    signal.SIGBUS: "a file could not be read to its end; check the model's files, the disk and /dev/shm",
}


def status(code: int) -> str:
    """A return code of `subprocess` in words; a negative code is a signal."""
    if code >= 0:
        return f"exit status {code}"
    try:
        return f"signal {-code}, {signal.Signals(-code).name}"
    except ValueError:  # a real-time signal
        return f"signal {-code}"


def advice(code: int) -> str:
    if code >= 0:
        return "the log above says why"
    if -code == signal.SIGKILL:
        return out_of_memory(_peak_bytes(), memory_bytes())
    return _ADVICE.get(-code, "another process sent the signal; find out which and why")


def out_of_memory(used: int, has: int) -> str:
    """The advice after SIGKILL, which the kernel sends when memory runs out."""
    return (
        "the machine ran out of memory, or somebody killed the process. It used up to "
        f"{used / 2**30:.1f} GiB, and the machine has {has / 2**30:.1f} GiB. If memory ran out, use a smaller model or "
        "draft, --dtype bfloat16, or a lower --kv-memory, --max-model-len or --max-running"
    )


def _peak_bytes() -> int:
    """The most memory that any ended engine process had. Engines are the only child processes."""
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
