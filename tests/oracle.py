"""A torch-free executor that remembers what every KV slot holds, and complains when a plan reads anything else.

Each row "computes" the hash of its prefix and writes it to its page, as a model would write keys and values. Before a
row is computed, every earlier position must hold the hash of the right prefix: a page that was freed too early, shared
too late or published with rejected drafts shows at once. The next token is a function of prefix and seed, as exact
sampling is, so the right output of every request is known.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields

import numpy as np

from faser.arrays import IntArray
from faser.engine.pages import PagePool
from faser.engine.prompt_pace import StepPace
from faser.engine.scheduler import Scheduler
from faser.errors import MoveError
from faser.limits import HeadLimits, KeyWindow, Limits, VisionLimits
from faser.policy import BatchView, Policy
from faser.policy.base import Guesses
from faser.policy.overlap import Chunks, Overlap
from faser.policy.residency import ExpectedGain, ResidencyRule, ResidencyView
from faser.request import Progress, Request, SamplingParams
from faser.rules.stopping import Stopping
from faser.step import (
    Admission,
    KeyStarts,
    KvCopies,
    PageMoves,
    PageWrites,
    Settling,
    StepPlan,
    StepResult,
    StepSeconds,
)
from faser.vision import Grid, Vision

VOCABULARY = 5
SEED = 7
LATE = -3  # an entry of a draft that has begun again holds LATE - its content
TAKEN = -2  # an entry that was copied from the context of a session holds TAKEN - its content
HEADS = {"chain head": HeadLimits(), "block head": HeadLimits(block_rows=5, max_length=4)}


def prefix_hash(previous: int, token: int) -> int:
    return hash((previous, token)) & 0x7FFF_FFFF_FFFF_FFFF


def hash_of(tokens: Sequence[int]) -> int:
    value = 0
    for token in tokens:
        value = prefix_hash(value, int(token))
    return value


def next_token(prefix: int, seed: int) -> int:
    return hash((prefix, seed)) % VOCABULARY


def picture_word(grid: Grid, token: int) -> int:
    """What stands for a token of a picture: it depends on the pixels alone."""
    return hash((grid.name, token)) & 0x7FFF_FFFF_FFFF_FFFF


def seen_prompt(prompt: Sequence[int], vision: Vision | None) -> list[int]:
    """The prompt with what its placeholder tokens stand for."""
    words = [int(token) for token in prompt]
    if vision is not None:
        for grid, start in zip(vision.grids, vision.starts.tolist(), strict=True):
            words[start : start + grid.num_tokens] = [picture_word(grid, i) for i in range(grid.num_tokens)]
    return words


def expected_output(prompt: Sequence[int], seed: int, max_tokens: int) -> list[int]:
    prefix, output = hash_of(prompt), []
    for _ in range(max_tokens):
        output.append(next_token(prefix, seed))
        prefix = prefix_hash(prefix, output[-1])
    return output


class _Memory:
    """What one model's pages hold."""

    def __init__(
        self, num_pages: int, page_size: int, max_slots: int, max_tokens: int, window: KeyWindow | None = None
    ) -> None:
        self.page_size = page_size
        self.window = window or KeyWindow(max_tokens)
        self.first = np.zeros(max_slots, dtype=np.int64)  # keys between the sinks and here do not exist
        self.takes = False  # whether entries were copied from the context of a session
        self.num_backed = num_pages  # pages that have memory
        self.table = np.full((max_slots, -(-max_tokens // page_size)), -1)
        self.held = np.zeros((num_pages, page_size), dtype=np.int64)

    def back(self, num_pages: int) -> None:
        """Give memory to this number of pages; new ones hold nothing."""
        held = np.full((num_pages, self.page_size), -1)
        kept = min(num_pages, self.num_backed)
        held[:kept] = self.held[:kept]
        self.held, self.num_backed = held, num_pages

    def move(self, moves: PageMoves) -> None:
        assert not set(moves.sources.tolist()) & set(moves.destinations.tolist())
        self.held[moves.destinations] = self.held[moves.sources]

    def apply(self, writes: PageWrites) -> None:
        self.table[writes.slots, writes.columns] = writes.pages

    def begin_again(self, starts: KeyStarts | None) -> None:
        if starts is not None:
            self.first[starts.slots] = starts.positions

    def sees(self, slot: int, row: int, position: int) -> bool:
        """Whether a row attends to a position before it."""
        in_window = position > row - self.window.size and position >= self.first[slot]
        return position < self.window.sinks or bool(in_window)

    def copy(self, copies: KvCopies) -> None:
        """What is copied is right where it comes from, and need not fit the tokens that stand before it now."""
        self.takes = True
        entries = self.held.reshape(-1)
        content = entries[copies.sources]
        assert (content != -1).all()
        entries[copies.destinations] = np.where(content < 0, content, TAKEN - content)  # taken once or more often

    def require(self, slot: int, tokens: Sequence[int], start: int, end: int) -> None:
        """Rows start … end - 1 must have been computed over `tokens`."""
        prefix = 0
        for position, token in enumerate(tokens[:end]):
            prefix = prefix_hash(prefix, int(token))
            if position >= start:
                held = self.held[self.table[slot, position // self.page_size], position % self.page_size]
                assert held == prefix, f"slot {slot}, {position}: was not computed"

    def scribble(self, slot: int, start: int, end: int) -> None:
        """Write what nobody may read."""
        for position in range(start, end):
            page = self.table[slot, position // self.page_size]
            assert 0 <= page < self.num_backed, f"slot {slot}, {position}: page {page} has no memory"
            self.held[page, position % self.page_size] = -1

    def compute(self, slot: int, tokens: Sequence[int], start: int, count: int) -> int:
        """Rows start … start + count - 1 over `tokens`; returns the hash of the last row's prefix.

        Rows of a draft that has begun again are marked: what they hold is not a function of their tokens alone.
        """
        prefix, late = 0, bool(self.first[slot])
        for position, token in enumerate(tokens[: start + count]):
            prefix = prefix_hash(prefix, int(token))
            page, offset = self.table[slot, position // self.page_size], position % self.page_size
            assert page < self.num_backed, f"slot {slot}, {position}: page {page} has no memory"
            if position >= start:
                self.held[page, offset] = LATE - prefix if late else prefix
            elif self.sees(slot, start, position):
                held, is_late = int(self.held[page, offset]), late and position >= self.first[slot]
                is_right = held == prefix or (held == LATE - prefix if is_late else self.takes and held <= TAKEN)
                assert is_right, f"slot {slot}, {position}: page {page} is wrong"
        return prefix


class OracleExecutor:
    """Drafts are right with probability `agreement`, from a seeded generator."""

    def __init__(
        self, limits: Limits, target: PagePool, draft: PagePool | None, agreement: float, seed: int = 0
    ) -> None:
        def memory(pool: PagePool) -> _Memory:
            return _Memory(pool.num_pages, pool.page_size, limits.max_running, limits.max_model_len, pool.window)

        self.limits = limits
        self.target = memory(target)
        self.draft = memory(draft) if draft is not None else None
        # One more column: a step planned ahead may sample behind the end of a request that has ended.
        self.history = np.zeros((limits.max_running, limits.max_model_len + 1), dtype=np.int64)
        self.seeds = np.zeros(limits.max_running, dtype=np.int64)
        self.agreement = agreement
        self.random = np.random.default_rng(seed)
        self.num_draft_rows = 0
        none = np.zeros(limits.max_running, dtype=np.bool_)
        self.settling = Settling(none.astype(np.int64), none, none.copy())  # of each slot's latest step
        self.stops = False  # whether drafts end at random before their length
        self.encoded: dict[int, int] = {}  # what the rows of the buffer of encoded tokens hold
        self.num_encoded = 0  # grids
        self.pictures: dict[int, Vision | None] = {}  # by slot

    def execute(self, plan: StepPlan) -> StepResult:
        for new in plan.admitted:
            self._admit(new)
        self._see(plan)
        plan = plan.settle(self.settling[plan.slots])
        if plan.copies is not None:
            self.target.copy(plan.copies)
        if plan.moves is not None:
            self.target.move(plan.moves)
        self.target.apply(plan.target_pages)
        if plan.lookup is not None:
            slots, positions, token_ids = plan.found_tokens()
            self.history[slots, positions] = token_ids
        assert plan.num_rows.min() > 0
        assert (plan.num_rows + plan.judged).sum() <= self.limits.max_batch_tokens, "more rows than a step may have"
        assert plan.draft_rows.sum() <= self.limits.max_batch_tokens, "more draft rows than a step may have"
        assert not (plan.lengths[~plan.samples]).any()
        num_drafted = np.array([self._draft(plan, i) for i in range(plan.slots.size)])
        judged = plan.judged_of(num_drafted)
        behind = self.history[plan.slots, np.minimum(plan.num_tokens + judged, self.history.shape[1] - 1)]
        emitted = [self._verify(plan, i, int(judged[i])) for i in range(plan.slots.size)]
        accepted = np.array([max(0, len(tokens) - 1) for tokens in emitted])
        flat = np.array([token for tokens in emitted for token in tokens], dtype=np.int64)
        said = np.array([tokens[-1] if tokens else -1 for tokens in emitted])
        hits = None
        if plan.drafts_beside:
            hits = (plan.overlap.chunk_of(num_drafted) > 0) & (accepted == judged) & (said == behind)
        result = StepResult(num_drafted, judged, accepted, flat, hits=hits)
        came = Settling.of(plan, result)
        for mine, theirs in zip(fields(self.settling), fields(came), strict=True):
            getattr(self.settling, mine.name)[plan.slots] = getattr(came, theirs.name)
        return result

    def _admit(self, new: Admission) -> None:
        self.history[new.slot, : new.token_ids.size] = seen_prompt(new.token_ids.tolist(), new.vision)
        self.seeds[new.slot] = new.seed
        self.pictures[new.slot] = new.vision

    def _see(self, plan: StepPlan) -> None:
        """Encode what the plan says; every row of a picture must then be given the right row of the buffer."""
        given: dict[tuple[int, int], int] = {}
        if plan.vision is not None:
            for write in plan.vision.writes:
                assert max(write.buffer_rows) < self.limits.vision.buffer_rows
                self.encoded |= {row: picture_word(write.grid, i) for i, row in enumerate(write.buffer_rows.tolist())}
                self.num_encoded += 1
            places = zip(plan.vision.slots.tolist(), plan.vision.positions.tolist(), strict=True)
            given = dict(zip(places, plan.vision.buffer_rows.tolist(), strict=True))
        for slot, start, count in zip(plan.slots.tolist(), plan.start.tolist(), plan.num_rows.tolist(), strict=True):
            vision = self.pictures.get(slot)
            for i in range(len(vision.grids) if vision is not None else 0):
                for place in range(max(start, vision.starts[i]), min(start + count, vision.ends[i])):
                    assert self.encoded[given.pop((slot, place))] == self.history[slot, place], "another picture"
        assert not given, "rows that are no pictures"

    def agrees(self, position: int) -> bool:
        """Whether the draft of that token is right."""
        return bool(self.random.random() < self.agreement)

    def _draft(self, plan: StepPlan, i: int) -> int:
        slot, length = int(plan.slots[i]), int(plan.by_draft.lengths[i])
        num_tokens = int(plan.num_tokens[i] + plan.frontier[i])
        if self.draft is not None:
            if i == 0:
                self.draft.apply(plan.draft_pages)
                self.draft.begin_again(plan.draft_first)
            rows = int(plan.draft_rows[i])
            assert plan.draft_start[i] >= 0
            self.num_draft_rows += rows
            if rows:
                self.draft.compute(slot, self.history[slot], int(plan.draft_start[i]), rows)
                if self.limits.head is not None:  # the target has the features that these rows read
                    first, end = int(plan.draft_start[i]), int(plan.draft_start[i]) + rows
                    self.target.require(slot, self.history[slot], max(first - 1, 0), end - 1)
            assert not length or plan.draft_start[i] + rows == num_tokens, "drafts before it has caught up"
        if self.stops and length and not plan.drafts_beside:
            length = int(self.random.integers(1, length + 1))
        for position in range(num_tokens, num_tokens + length):
            right = next_token(hash_of(self.history[slot, :position]), int(self.seeds[slot]))
            wrong = (right + 1) % VOCABULARY
            self.history[slot, position] = right if self.agrees(position) else wrong
            if self.draft is not None and self.limits.head is None and position < num_tokens + length - 1:
                self.draft.compute(slot, self.history[slot], position, 1)
        if self.draft is not None and self.limits.head is not None and length:
            self._leave_drafts(self.draft, self.limits.head, slot, num_tokens, length)
        assert not plan.looked_up[i] or not (length or plan.draft_rows[i]), "two guessers of one request"
        return length + int(plan.looked_up[i])

    def _leave_drafts(self, draft: _Memory, head: HeadLimits, slot: int, num_tokens: int, length: int) -> None:
        """The rows of drafts, and those of a block, are not what the target's features would give."""
        if head.block_rows:
            assert length <= head.max_length
            draft.scribble(slot, num_tokens - 1, num_tokens - 1 + head.block_rows)
        else:
            draft.scribble(slot, num_tokens, num_tokens + length - 1)

    def _verify(self, plan: StepPlan, i: int, num_drafted: int) -> list[int]:
        slot, start, rows = int(plan.slots[i]), int(plan.start[i]), int(plan.num_rows[i])
        self.target.compute(slot, self.history[slot], start, rows + num_drafted)
        if not plan.samples[i]:
            return []
        position, emitted = int(plan.num_tokens[i]), []
        prefix = hash_of(self.history[slot, :position])
        while True:
            said = next_token(prefix, int(self.seeds[slot]))
            emitted.append(said)
            agreed = len(emitted) <= num_drafted and said == self.history[slot, position]
            self.history[slot, position] = said
            if not agreed:
                return emitted
            prefix, position = prefix_hash(prefix, said), position + 1

    def close(self) -> None:
        pass


class Never(ResidencyRule):
    """The draft moves when a test asks for it."""

    def why_leave(self, view: ResidencyView, gain: ExpectedGain) -> None:
        return None

    def why_return(self, view: ResidencyView, gain: ExpectedGain) -> None:
        return None


class OracleDraftMemory:
    """A `DraftMemory` over an oracle: what it takes away is gone at once, whatever is still in flight.

    A move takes `parts` calls. `failures`: how many of the next calls raise MoveError.
    """

    load_seconds = 0.0

    def __init__(self, executor: OracleExecutor, base_pages: int, pages_gained: int, parts: int = 1) -> None:
        assert executor.draft is not None
        self.pages_gained = pages_gained
        self.failures = 0
        self.is_lent = False
        self._target, self._draft = executor.target, executor.draft
        self._num_draft_pages, self._base_pages = executor.draft.num_backed, base_pages
        self._parts, self._done = parts, 0

    def offload(self) -> bool:
        self._draft.back(0)
        if not self._is_complete():
            return False
        self._target.back(self._base_pages + self.pages_gained)
        self.is_lent = True
        return True

    def load(self) -> bool:
        self._target.back(self._base_pages)
        self.is_lent = False
        if not self._is_complete():
            return False
        self._draft.back(self._num_draft_pages)
        return True

    def _is_complete(self) -> bool:
        if self.failures:
            self.failures, self._done = self.failures - 1, 0
            raise MoveError("for a test")
        self._done = (self._done + 1) % self._parts
        return self._done == 0


class RandomLengths(Policy):
    """A policy that draws the length of each request at random in every step, 0 included."""

    name = "random"

    def __init__(self, most: int = 6, seed: int = 0) -> None:
        self.most = most
        self.random = np.random.default_rng(seed)

    def lengths(self, view: BatchView) -> IntArray:
        return self.random.integers(0, self.most + 1, size=view.num_requests)


class RandomGuesses(RandomLengths):
    """RandomLengths, and who looks up is drawn too."""

    name = "random guesses"

    def guesses(self, view: BatchView) -> Guesses:
        lengths = self.lengths(view)
        if view.lookup is None:
            return Guesses(lengths, np.zeros(lengths.size, dtype=np.bool_))
        return Guesses(lengths, (view.lookup.limit > 0) & (self.random.random(lengths.size) < 0.5))


class SometimesOverlap(Overlap):
    """Some steps overlap and some do not; in some the requests lead, in others they ride."""

    def __init__(self, seed: int = 0, splits: Sequence[int] = (0,)) -> None:
        super().__init__()
        self.random = np.random.default_rng(seed)
        self.splits = splits

    def chunks(self, view: BatchView, lengths: IntArray) -> Chunks | None:
        if self.random.random() > 0.7:
            return None
        lead = self.random.integers(0, 4, lengths.size) if self.random.random() < 0.5 else np.zeros_like(lengths)
        return Chunks(lengths, lead, int(self.random.choice(self.splits)))


class RandomStops(RandomLengths):
    """RandomLengths with a rule by which drafts stop early."""

    name = "random stops"

    def __init__(self, most: int = 6, seed: int = 0) -> None:
        super().__init__(most, seed)
        self.size = 0

    def lengths(self, view: BatchView) -> IntArray:
        self.size = view.num_requests
        return super().lengths(view)

    def stopping(self) -> Stopping:
        rates = self.random.random((self.size, self.most + 1))
        return Stopping(rates, self.random.random(self.most + 1), 0.7, (1.0, 1.0))


def make_request(
    name: str, prompt: Sequence[int], max_tokens: int = 8, vision: Vision | None = None, **params: object
) -> Request:
    return Request(
        id=name,
        prompt_token_ids=tuple(int(token) for token in prompt),
        params=SamplingParams(max_tokens=max_tokens, **params),  # type: ignore[arg-type]
        seed=SEED,
        vision=vision,
    )


PICTURE_TOKEN = 4  # the id of placeholder tokens


def make_grid(pixel: int, num_tokens: int, width: int | None = None) -> Grid:
    """A grid of one colour with this number of groups, each of one patch of one pixel."""
    patches = np.full((num_tokens, 3, 1, 1, 1), pixel, dtype=np.uint8)
    return Grid(patches, 1, num_tokens if width is None else width, 1)


def make_picture_request(
    name: str, parts: Sequence[Sequence[int] | Grid], max_tokens: int = 8, shift: int = 0, **params: object
) -> Request:
    """A prompt of tokens and grids, in order. `shift`: positions of everything behind the first grid move by it."""
    prompt: list[int] = []
    grids, starts = [], []
    for part in parts:
        if isinstance(part, Grid):
            grids.append(part)
            starts.append(len(prompt))
        prompt += [PICTURE_TOKEN] * part.num_tokens if isinstance(part, Grid) else list(part)
    positions = np.repeat(np.arange(len(prompt))[:, None], 3, axis=1)
    positions[starts[0] + 1 :] += shift
    vision = Vision(tuple(grids), np.array(starts), positions)
    return make_request(name, prompt, max_tokens, vision, **params)


class World:
    """A scheduler and its oracle, with the tokens every request has received."""

    def __init__(
        self,
        policy: Policy,
        *,
        num_pages: int = 64,
        num_draft_pages: int | None = 64,
        pages_gained: int = 0,
        page_size: int = 4,
        max_running: int = 4,
        max_batch_tokens: int = 16,
        max_model_len: int = 64,
        agreement: float = 0.6,
        caching: bool = True,
        draft_max_len: int | None = None,
        head: HeadLimits | None = None,
        vision: VisionLimits | None = None,
        overlap: Overlap | None = None,
        pace: StepPace | None = None,
        looks_up: bool = False,
        seconds: Callable[[StepPlan], StepSeconds] = lambda plan: StepSeconds(),
        target_window: KeyWindow | None = None,
        draft_window: KeyWindow | None = None,
    ) -> None:
        self.seconds = seconds  # of a step; the pace learns from them
        self.limits = Limits(max_running, max_batch_tokens, max_model_len, draft_max_len, head, vision, draft_window)
        most_pages = num_pages + pages_gained
        self.target = PagePool(num_pages, page_size, max_running, max_model_len, caching, most_pages, target_window)
        self.draft = (
            PagePool(num_draft_pages, page_size, max_running, max_model_len, caching, window=draft_window)
            if num_draft_pages is not None
            else None
        )
        self.scheduler = Scheduler(
            self.limits, policy, self.target, self.draft, speculates=True, prefix_caching=caching, overlap=overlap,
            looks_up=looks_up, pace=pace,
        )  # fmt: skip
        self.executor = OracleExecutor(self.limits, self.target, self.draft, agreement)
        self.tokens: dict[str, list[int]] = {}
        self.finished: dict[str, Progress] = {}
        self.plans: list[StepPlan] = []

    def add(self, request: Request) -> None:
        self.scheduler.add(request)
        self.tokens[request.id] = []

    def receive(self, progress: Sequence[Progress]) -> None:
        for item in progress:
            assert item.request_id not in self.finished, "a request was heard of after its end"
            self.tokens[item.request_id] += item.token_ids
            if item.finish is not None:
                self.finished[item.request_id] = item

    def step(self) -> bool:
        plan = self.scheduler.plan()
        if plan is None:
            self.receive(self.scheduler.take_ended())
            return False
        self.plans.append(plan)
        self.receive(self.scheduler.commit(plan, self.executor.execute(plan)).progress)
        if self.scheduler.drafts.pace is not None:
            spent = self.seconds(plan)
            self.scheduler.drafts.pace.learn(plan, spent, spent.total)
        return True

    def drain(self, most_steps: int = 10_000) -> None:
        for _ in range(most_steps):
            if not self.scheduler.has_work:
                return
            self.step()
        raise AssertionError("the scheduler did not finish its requests")
