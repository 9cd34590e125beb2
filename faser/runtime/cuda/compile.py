"""Kernels compiled ahead of their first launch, many at a time.

Knows Triton's kernels and its compiler; knows nothing of models, shapes or graphs. Triton compiles a variant of a
kernel at its first launch. An engine launches some seventy variants: half a minute if compiled one after the other.
Here launches are dry: they are recorded and not carried out, and all cores compile the variants they need.

Threads suffice: seven eighths of the work run outside Python's lock, and processes would each import torch and the
kernels first, which takes longer than the gain. Nothing is compiled before all launches are recorded, because recording
needs the lock. Older versions of Triton also have a C compiler make a launcher for each signature, at the first launch;
that is done here, too. All results are kept in Triton's cache on disk, where the next start finds them.
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

ALIGNED = 16  # bytes; a variant of a kernel is for pointers that are multiples of this, or for any pointers


def compile_all(runs: Iterable[Callable[[], None]], update: Update = lambda done, total: None) -> None:
    """Compile all kernels that `runs` would launch. Each run is called once, and its kernels are not launched.

    Other operations of a run are carried out, on buffers that no kernel has written. A kernel that cannot be compiled
    here fails at its first launch, which says why. In Triton's interpreter there is nothing to compile.
    """
    if knobs.runtime.interpret:
        return
    num_threads = len(os.sched_getaffinity(0))
    with _one_parser(), _Compilers(num_threads) as compilers, AsyncCompileMode(compilers, ignore_errors=True):
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
def _one_parser() -> Iterator[None]:
    """Python source is parsed by one thread at a time: Python 3.11 fails now and then if two threads do it."""
    parse, lock = JITFunction.parse, threading.Lock()

    def parse_alone(kernel: Any) -> Any:
        with lock:
            return parse(kernel)

    JITFunction.parse = parse_alone
    try:
        yield
    finally:
        JITFunction.parse = parse


@contextmanager
def _dry_launches() -> Iterator[None]:
    """Launches inside only compile, in the active mode, and once for each variant."""
    run, seen = JITFunction.run, set()

    def dry_run(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        variant = (id(kernel), *map(_traits, args), *((name, _traits(value)) for name, value in options.items()))
        if variant not in seen:
            seen.add(variant)
            run(kernel, *args, grid=grid, warmup=True, **options)

    JITFunction.run = dry_run
    try:
        yield
    finally:
        JITFunction.run = run


def _traits(argument: Any) -> tuple[Any, ...]:
    """All that distinguishes variants of a kernel, and perhaps more."""
    if isinstance(argument, Tensor):
        return Tensor, argument.dtype, argument.data_ptr() % ALIGNED == 0
    return type(argument), argument


class _Compilers(ThreadPoolExecutor):
    """Threads that begin at `start`. They also make the launcher of each new signature."""

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
