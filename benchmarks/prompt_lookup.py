"""What does prompt lookup cost the host? Microseconds to index a token, and of a step over many long contexts.

An index must take a token in under 20 µs, and a step over 256 requests of 32k tokens must hide behind a forward of some
8 ms. The plain search reads the whole context for every request and step; it finds the same tokens.

Contexts are Zipf-distributed tokens with copies of earlier passages in them, so that matches of all lengths occur.

    .venv/bin/python benchmarks/prompt_lookup.py [--requests 256] [--tokens 32768] [--steps 50]

Prints a table, and one JSON document on the last line.
"""

from __future__ import annotations

import argparse
import json
import statistics
from time import perf_counter

import numpy as np

from faser.arrays import IntArray
from faser.engine.lookup import MAX_NGRAM, MIN_NGRAM, NgramIndex, PromptLookup
from faser.engine.slots import SlotTable

VOCABULARY = 49_152
ROOM = 7  # tokens that a request may draft
EMITTED = 3  # tokens of a request and step
COPIED = 64  # tokens of a passage that is copied
SAMPLE = 4  # contexts that are timed token by token


def make_context(size: int, random: np.random.Generator) -> IntArray:
    tokens = np.minimum(random.zipf(1.3, size=size), VOCABULARY - 1).astype(np.int64)
    for start in range(1024, size - COPIED, 512):
        source = int(random.integers(0, start - COPIED))
        tokens[start : start + COPIED] = tokens[source : source + COPIED]
    return tokens


def search(tokens: IntArray, length: int) -> IntArray:
    """What followed the latest earlier occurrence of the longest repeated suffix, by reading the whole context."""
    last, found = len(tokens) - 1, None
    ends = np.flatnonzero(tokens[:last] == tokens[last])
    for size in range(2, MAX_NGRAM + 1):
        ends = ends[np.searchsorted(ends, size - 1) :]
        ends = ends[tokens[ends - (size - 1)] == tokens[last - (size - 1)]]
        if ends.size == 0:
            break
        if size >= MIN_NGRAM:
            found = int(ends[-1])
    return np.zeros(0, np.int64) if found is None else np.resize(tokens[found + 1 :][:length], length)


def time_index(context: IntArray) -> tuple[float, float]:
    """Microseconds a token: of a whole context at once, and of tokens that come one by one behind it."""
    index, tail = NgramIndex(), context[-1000:].tolist()
    head = context[:-1000].tolist()
    started = perf_counter()
    index.extend(head)
    middle = perf_counter()
    for token in tail:
        index.extend([token])
    return 1e6 * (middle - started) / len(head), 1e6 * (perf_counter() - middle) / len(tail)


def time_steps(contexts: list[IntArray], num_steps: int) -> list[float]:
    """Milliseconds of the host, for each step in which every request looks up and emits EMITTED tokens."""
    size, most = len(contexts), contexts[0].size
    table, slots = SlotTable(size, most), np.arange(size)
    for slot, context in enumerate(contexts):
        table.tokens[slot] = context
    lookup, room = PromptLookup(table), np.full(size, ROOM)
    table.num_known[:] = table.num_tokens[:] = most - num_steps * EMITTED
    while min(len(index) for index in lookup._indexes) < table.num_known[0]:
        lookup.look(slots, room, False)
    times = []
    for _ in range(num_steps):
        table.num_known += EMITTED
        table.num_tokens += EMITTED
        started = perf_counter()
        lookup.take(slots, lookup.look(slots, room, False).limit)
        times.append(1e3 * (perf_counter() - started))
    return times


def time_search(contexts: list[IntArray]) -> float:
    """Milliseconds of a step that searches every context."""
    started = perf_counter()
    for context in contexts:
        search(context, ROOM)
    return 1e3 * (perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=32_768)
    parser.add_argument("--steps", type=int, default=50)
    args = parser.parse_args()
    random = np.random.default_rng(0)
    contexts = [make_context(args.tokens, random) for _ in range(args.requests)]
    whole, single = zip(*(time_index(context) for context in contexts[:SAMPLE]), strict=True)
    steps = time_steps(contexts, args.steps)
    found = {
        "requests": args.requests,
        "tokens": args.tokens,
        "index_us_per_token": round(statistics.median(whole), 2),
        "index_us_per_single_token": round(statistics.median(single), 2),
        "step_ms": round(statistics.median(steps), 2),
        "step_ms_p90": round(float(np.quantile(steps, 0.9)), 2),
        "plain_search_ms": round(statistics.median([time_search(contexts) for _ in range(3)]), 2),
    }
    for name, value in found.items():
        print(f"{name:28} {value}")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
