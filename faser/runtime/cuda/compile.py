"""Kernels compiled ahead of their first launch, many at a time.

Knows Triton's kernels and its compiler; knows nothing of models, shapes or graphs. Triton compiles a variant of a
kernel when it is first launched, and an engine launches some seventy of them: half a minute, one after the other. Here
launches are made dry: they are looked at and not carried out, and what they need is compiled by all cores.

Threads do, because the compiler's passes and the assembler run outside Python's lock: two threads are 1.8 times as fast
as one. What needs the lock is an eighth of the work, building a kernel's first form from its source. Processes would
escape that, but each would import torch and the kernels first, which takes longer than is left to gain. Nothing is
compiled before all launches have been seen, for those would wait for the lock at every turn.

Older versions of Triton also have a C compiler make a launcher for each signature, at the first launch; that is done
here, too. All of it ends up in Triton's cache on disk, so the next start finds it there.
"""

# mypy: disable-error-code="import-untyped, import-not-found"
from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from triton import AsyncCompileMode, knobs
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from faser.progress import Update

log = logging.getLogger("faser.engine")

ALIGNED = 16  # bytes; a variant is for pointers that are multiples of this, or for any


def compile_all(runs: Iterable[Callable[[], None]], update: Update = lambda done, total: None) -> None:
    """Compile whatever kernels `runs` would launch. Each is called once, and its kernels are not launched.

    What else a run does is done: torch's own operations see buffers that no kernel has written. A kernel that cannot be
    compiled here is left to its first launch, which says why. In Triton's interpreter there is nothing to compile.
    """
    if knobs.runtime.interpret:
        return
    with _Compilers(len(os.sched_getaffinity(0))) as compilers, AsyncCompileMode(compilers, ignore_errors=True):
        try:
            with _dry_launches():
                for run in runs:
                    run()
        except Exception as error:
            log.warning("not every kernel is compiled ahead: %s: %s", type(error).__name__, error)
        finally:
            compilers.start()
        for done, _ in enumerate(as_completed(compilers.futures)):
            update(done + 1, len(compilers.futures))


@contextmanager
def _dry_launches() -> Iterator[None]:
    """Within it a launch compiles, as the active mode has it, and does no more; those that look alike do so once."""
    run, seen = JITFunction.run, set()

    def dry_run(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        looks = (id(kernel), *map(_looks, args), *((name, _looks(value)) for name, value in options.items()))
        if looks not in seen:
            seen.add(looks)
            run(kernel, *args, grid=grid, warmup=True, **options)

    JITFunction.run = dry_run
    try:
        yield
    finally:
        JITFunction.run = run


def _looks(argument: Any) -> tuple[Any, ...]:
    """At least what tells variants of a kernel apart."""
    if isinstance(argument, Tensor):
        return Tensor, argument.dtype, argument.data_ptr() % ALIGNED == 0
    return type(argument), argument


class _Compilers(ThreadPoolExecutor):
    """Threads that begin when told to. A kernel whose launcher nobody has made yet gets it as well."""

    def __init__(self, num_threads: int) -> None:
        super().__init__(num_threads)
        self.futures: list[Future[Any]] = []
        self._begin = threading.Event()
        self._signatures: set[tuple[str, ...]] = set()

    def submit(self, compile_kernel: Callable[[], Any]) -> Future[Any]:  # type: ignore[override]
        future = super().submit(self._work, compile_kernel)
        self.futures.append(future)
        return future

    def start(self) -> None:
        self._begin.set()

    def _work(self, compile_kernel: Callable[[], Any]) -> Any:
        self._begin.wait()
        kernel = compile_kernel()
        signature = tuple(kernel.src.signature.values())
        if signature not in self._signatures:
            self._signatures.add(signature)
            driver.active.launcher_cls(kernel.src, kernel.metadata)
        return kernel
