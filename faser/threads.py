"""How many threads compute on a CPU, and how they wait for each other.

Knows environment variables, CPU quotas and seconds; no torch. Threads that share a matrix product meet at a barrier.
Where other programs use the cores, a thread spins at the barrier for its whole time slice while the thread it waits for
is not running. Two remedies:

* `prepare_openmp` shortens the spinning. It must run before torch loads its OpenMP runtime.
* `ThreadTuner` tries fewer threads on real forwards and keeps what is faster. A single thread never waits.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, MutableMapping
from contextlib import suppress
from pathlib import Path
from statistics import fmean, stdev
from time import monotonic

# libgomp spins 300,000 times (about 3 ms) before a thread sleeps; LLVM's and Intel's runtimes spin for 200 ms. A tenth
# of libgomp's count costs nothing on an idle machine; no spinning at all costs 15 to 30 % there (docs/lab.md).
SPIN_COUNT = "30000"
BLOCK_MILLISECONDS = "1"
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
WAIT_VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")


def prepare_openmp(environment: MutableMapping[str, str] | None = None, *, torch_is_loaded: bool | None = None) -> bool:
    """Let OpenMP's threads sleep soon at barriers, unless the user has set how they wait.

    Returns whether the variables were set. They are not where torch, and OpenMP with it, is already loaded. Processes
    started later inherit them.
    """
    environment = os.environ if environment is None else environment
    loaded = "torch" in sys.modules if torch_is_loaded is None else torch_is_loaded
    if loaded or any(name in environment for name in WAIT_VARIABLES):
        return False
    environment["GOMP_SPINCOUNT"] = SPIN_COUNT
    environment["KMP_BLOCKTIME"] = BLOCK_MILLISECONDS
    return True


def user_chose_threads() -> bool:
    return any(os.environ.get(name) for name in THREAD_VARIABLES)


def available_cpus(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """CPUs this process may use: the smaller of its affinity and the quota of its control group, rounded up."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _quota(cgroup)
    return affinity if quota is None else max(1, min(affinity, math.ceil(quota)))


def _quota(cgroup: Path) -> float | None:
    """The quota of a control group (version 2 or 1) in CPUs; None where there is no quota."""
    try:
        if (cgroup / "cpu.max").is_file():
            limit, period = (cgroup / "cpu.max").read_text().split()
        else:
            limit = (cgroup / "cpu" / "cpu.cfs_quota_us").read_text()
            period = (cgroup / "cpu" / "cpu.cfs_period_us").read_text()
        return float(limit) / float(period) if float(limit) > 0 and float(period) > 0 else None
    except (OSError, ValueError):  # the files are missing, or say "max"
        return None


# ── trying fewer threads ─────────────────────────────────────────────────────────────────────────────────────────────

# A gain is log(seconds with the present count / seconds with the other count).
PATTERN = (False, True, True, False)  # a round: which forwards run with the other count; linear drift cancels
MIN_ROUNDS, MAX_ROUNDS = 2, 6
MIN_GAIN = 0.05  # gain above which the other count is taken
CERTAIN = 2.0  # standard errors between the mean gain and MIN_GAIN that end a trial
FREE_ROWS = 8  # reading all weights costs as much as this many rows: seconds are divided by rows + FREE_ROWS
CHANGED = 1.4  # a forward slower or faster than usual by this factor may mean that the machine's load has changed
CHANGED_STEPS = 4  # consecutive changed forwards after which the load counts as changed
LONG_SECONDS = 0.1  # a forward this long spans many time slices of the kernel's scheduler: its seconds are not chance
CHANGED_LONG_STEPS = 2  # the same as CHANGED_STEPS for long forwards
CLEAR_GAIN = 0.4  # gain of the first pair of long forwards that decides a trial at once
MANY_ROWS = 32  # from here on arithmetic, not memory, dominates: all threads help unless other programs use the cores
PROBE_SECONDS = 0.2  # least time between two readings of the kernel's figures
CROWDED, QUIET = 0.12, 0.03  # share of time that threads wait for a core: above, others use the cores; below, nobody
FIRST_WAIT, LAST_WAIT = 64, 4096  # forwards between two trials; doubles while trials change nothing
USUAL_DECAY = 0.9  # of the mean seconds of a forward, for each new forward of its size: half-life 7 forwards
LARGE_GAIN = 0.2  # gain of one size after a change of load that the other sizes follow


class CoreWaits:
    """How long this process's threads wait for a core, as Linux's scheduler counts it."""

    def __init__(self, tasks: Path = Path("/proc/self/task"), clock: Callable[[], float] = monotonic) -> None:
        self._tasks, self._clock = tasks, clock
        self._read_at = -math.inf
        self._ran, self._waited = 0, 0  # nanoseconds, of all threads

    def share(self) -> float | None:
        """waiting / (waiting + running) since the last reading.

        None within PROBE_SECONDS of that reading, and where the system has no such figures.
        """
        now = self._clock()
        if now - self._read_at < PROBE_SECONDS:
            return None
        self._read_at, before = now, (self._ran, self._waited)
        self._ran, self._waited = self._read()
        ran, waited = self._ran - before[0], self._waited - before[1]
        return waited / (ran + waited) if before[0] and ran > 0 and waited >= 0 else None

    def _read(self) -> tuple[int, int]:
        ran = waited = 0
        for path in self._tasks.glob("*/schedstat"):
            with suppress(OSError, ValueError):  # a thread that has just ended
                ran_of_it, waited_of_it, _ = map(int, path.read_text().split())
                ran, waited = ran + ran_of_it, waited + waited_of_it
        return ran, waited


class ThreadTuner:
    """Chooses how many threads compute, separately for each size of forward, by timing real forwards.

    A trial compares the present count A with another count B in the order A B B A until the difference is certain. The
    first trial comes soon after the start, later ones ever more rarely. A trial starts at once when forwards become
    much slower or faster than usual, or when threads begin to wait for a core. `most` threads come first; halves and
    doubles are tried. Where no thread waits for a core, forwards of many rows keep all threads.
    """

    def __init__(
        self, most: int, set_threads: Callable[[int], None], core_waits: Callable[[], float | None] | None = None
    ) -> None:
        self._most = most
        self._set_threads = set_threads
        self._core_waits = core_waits or CoreWaits().share
        self._is_crowded: bool | None = None  # whether other programs use the cores; None: not known
        self._current = most  # threads set last
        self._sizes: dict[int, _SizeTuner] = {}

    def num_threads(self, num_rows: int) -> int:
        """The present choice for forwards of this many rows."""
        return self._size(num_rows).num_threads

    def begin(self, num_rows: int) -> None:
        """Set the threads of the forward that comes."""
        size = self._size(num_rows)
        wanted = size.next_threads(may_try=num_rows < MANY_ROWS or self._is_crowded is not False)
        if wanted != self._current:
            self._set_threads(wanted)
            self._current = wanted

    def end(self, num_rows: int, seconds: float) -> None:
        """Learn from the forward that ended."""
        if self._most == 1 or seconds <= 0:
            return
        size = self._size(num_rows)
        has_changed = size.add(num_rows, seconds / (num_rows + FREE_ROWS), is_long=seconds >= LONG_SECONDS)
        if self._became_crowded() or has_changed:
            for each in self._sizes.values():
                each.try_soon(after_change=True)
        elif size.took_large_gain:
            size.took_large_gain = False
            for each in self._sizes.values():
                if each is not size:
                    each.follow(size.num_threads)

    def _became_crowded(self) -> bool:
        """Whether threads have begun to wait for cores. Read only while all threads run: fewer may all find a core."""
        share = self._core_waits() if self._current == self._most else None
        was = self._is_crowded
        if share is not None and (share > CROWDED or share < QUIET):
            self._is_crowded = share > CROWDED
        return bool(self._is_crowded) and not was

    def _size(self, num_rows: int) -> _SizeTuner:
        """One tuner for 1 row, one for 2 to 7, one for 8 to 31, and so on.

        Where other programs use the cores, a new one begins with the choice of its nearest neighbour.
        """
        key = num_rows.bit_length() // 2
        if key not in self._sizes:
            begins_with = self._most
            if self._is_crowded and self._sizes:
                begins_with = self._sizes[min(self._sizes, key=lambda known: abs(known - key))].num_threads
            self._sizes[key] = _SizeTuner(self._most, begins_with)
        return self._sizes[key]


class _SizeTuner:
    """The threads for forwards of one size. The pace of a forward is seconds / (rows + FREE_ROWS)."""

    def __init__(self, most: int, num_threads: int) -> None:
        self.num_threads = num_threads
        self._most = most
        self._trial: _Trial | None = None
        self._wait, self._steps_left = FIRST_WAIT, FIRST_WAIT // 8
        self._usual: dict[int, float] = {}  # mean pace by rows
        self._num_changed = 0  # consecutive forwards far from it
        self._tries_fewer = True
        self._after_change = False  # the next trial follows a change of the machine's load
        self.took_large_gain = False  # a trial after a change gained more than LARGE_GAIN

    def next_threads(self, may_try: bool) -> int:
        may_try = self._most > 1 and (may_try or self.num_threads < self._most)
        if self._trial is None and self._steps_left <= 0 and may_try:
            self._trial = _Trial(self._other_count())
        return self._trial.other if self._trial is not None and self._trial.runs_other else self.num_threads

    def add(self, num_rows: int, pace: float, is_long: bool) -> bool:
        """Learn from a forward; returns whether the machine's load has changed."""
        if self._trial is None:
            self._steps_left -= 1
            return self._has_changed(num_rows, pace, CHANGED_LONG_STEPS if is_long else CHANGED_STEPS)
        self._trial.add(pace, is_long)
        if self._trial.is_over:
            self._conclude(self._trial)
        return False

    def try_soon(self, after_change: bool) -> None:
        self._num_changed, self._steps_left, self._wait, self._usual = 0, 0, FIRST_WAIT, {}
        self._after_change = after_change

    def follow(self, num_threads: int) -> None:
        """Take over what another size found, until a trial of its own: forwards of some sizes are rare."""
        if num_threads != self.num_threads:
            self.num_threads, self._trial = num_threads, None
            self.try_soon(after_change=False)

    def _conclude(self, trial: _Trial) -> None:
        if trial.gain > MIN_GAIN:
            self.num_threads, self._wait, self._usual = trial.other, FIRST_WAIT, {}
            self.took_large_gain = self._after_change and trial.gain > LARGE_GAIN
        else:
            self._tries_fewer = not self._tries_fewer
            self._wait = min(LAST_WAIT, 2 * self._wait)
        self._trial, self._steps_left, self._num_changed = None, self._wait, 0
        self._after_change = False

    def _other_count(self) -> int:
        """Half and twice the present count in turn; only one of them is possible at 1 and at `most`."""
        fewer, more = self.num_threads // 2, min(self._most, 2 * self.num_threads)
        if self.num_threads == self._most:
            return fewer
        return more if self.num_threads == 1 or not self._tries_fewer else fewer

    def _has_changed(self, num_rows: int, pace: float, num_steps: int) -> bool:
        """Whether `num_steps` forwards in a row were far from the usual pace for their rows."""
        usual = self._usual.get(num_rows, pace)
        if 1 / CHANGED < pace / usual < CHANGED:
            self._num_changed = 0
            self._usual[num_rows] = USUAL_DECAY * usual + (1 - USUAL_DECAY) * pace
        else:  # a single one may be a pause of the process: not learned as usual
            self._num_changed += 1
        return self._num_changed >= num_steps


class _Trial:
    """The present count of threads (A) against another (B), in rounds of A B B A. A clear first pair ends it."""

    def __init__(self, other: int) -> None:
        self.other = other
        self._paces: list[float] = []  # of the forwards of this round
        self._gains: list[float] = []  # of each round: log(A / B)
        self._is_clear = False

    @property
    def runs_other(self) -> bool:
        return PATTERN[len(self._paces)]

    def add(self, pace: float, is_long: bool) -> None:
        self._paces.append(pace)
        if is_long and len(self._paces) == 2 and not self._gains:
            first_gain = math.log(self._paces[0] / self._paces[1])
            if abs(first_gain) > CLEAR_GAIN:
                self._gains, self._is_clear = [first_gain], True
        elif len(self._paces) == len(PATTERN):
            a, b, c, d = self._paces
            self._gains.append(math.log((a + d) / (b + c)))
            self._paces = []

    @property
    def is_over(self) -> bool:
        if self._is_clear:
            return True
        if self._paces or len(self._gains) < MIN_ROUNDS:
            return False
        error = max(0.01, stdev(self._gains) / math.sqrt(len(self._gains)))  # standard error of the mean gain
        return len(self._gains) >= MAX_ROUNDS or abs(self.gain - MIN_GAIN) > CERTAIN * error

    @property
    def gain(self) -> float:
        """Mean of log(A / B)."""
        return fmean(self._gains)
