"""Is choosing tokens on the GPU a matter of microseconds, beside a forward of milliseconds?

`sample` over R rows of V logits in bfloat16, greedy and at temperature 1, beside the floor (the logits' bytes over 4.3
TB/s, the bandwidth this card was measured to copy at) and torch.argmax. `confidence` adds the probability of the chosen
token. Then the kernels around a forward: `expand` and `judge` for B requests of 5 rows, `next_draft_rows`.

Every figure is the time per call inside a CUDA graph of many calls, the median of several replays; calls of a graph go
round over enough copies of the logits that the cache does not hold them. At one row the launch of an empty kernel is
the floor that counts: it is printed too.

    python benchmarks/cuda_sampling.py

The last line is one JSON document.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable

import torch
import triton

from faser.runtime.cuda.rows import DeviceRows, Requests, expand, next_draft_rows
from faser.runtime.cuda.sampling import Choices, Slots, inverse_temperature, mixed_seed, sample
from faser.runtime.cuda.verifier import FIRST_TOKEN, judge

BYTES_PER_SECOND = 4.3e12
CACHE_BYTES = 150_000_000  # several times what the L2 keeps of a stream of reads
LENGTH = 4
MAX_SLOTS = 1024


@triton.jit
def _nothing(memory):
    pass


def microseconds(call: Callable[[int], None], num_copies: int, calls: int = 0) -> float:
    """Microseconds per call: median of 7 replays of a graph of calls, call i on copy i of the inputs."""
    calls = calls or max(20, num_copies)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(calls):
            call(i % num_copies)
    times = []
    for _ in range(9):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / calls)
    return statistics.median(times[2:])


def make_slots(temperature: float) -> Slots:
    slots = Slots.allocate(MAX_SLOTS, 4096, "cuda")
    slots.seeds.copy_(torch.tensor([mixed_seed(seed) for seed in range(MAX_SLOTS)]))
    slots.inverse_temperatures.fill_(inverse_temperature(temperature))
    return slots


def time_sampling(num_rows: int, num_columns: int) -> dict[str, float]:
    num_copies = max(1, CACHE_BYTES // (2 * num_rows * num_columns))
    logits = [torch.randn(num_rows, num_columns, device="cuda", dtype=torch.bfloat16) * 4 for _ in range(num_copies)]
    rows = torch.arange(num_rows, device="cuda", dtype=torch.int32)
    count = torch.tensor([num_rows], device="cuda", dtype=torch.int32)
    choices = Choices.allocate(num_rows, num_columns, "cuda")

    def timed(temperature: float, confidence: bool) -> float:
        slots = make_slots(temperature)
        return microseconds(
            lambda i: sample(logits[i], rows, rows, count, slots, choices, confidence=confidence), num_copies
        )

    return {
        "floor": 2e6 * num_rows * num_columns / BYTES_PER_SECOND,
        "argmax": microseconds(lambda i: torch.argmax(logits[i], dim=-1), num_copies),
        "greedy": timed(0.0, False),
        "greedy_confidence": timed(0.0, True),
        "tempered": timed(1.0, False),
        "tempered_confidence": timed(1.0, True),
    }


def time_rows(num_requests: int) -> dict[str, float]:
    slots, requests = make_slots(1.0), Requests.allocate(num_requests, "cuda")
    requests.slots.copy_(torch.randperm(MAX_SLOTS)[:num_requests])
    requests.start.fill_(1000)
    requests.num_rows.fill_(1)
    requests.num_drafted.fill_(LENGTH)
    requests.samples.fill_(1)
    requests.num_requests.fill_(num_requests)
    total = num_requests * (LENGTH + 1)
    rows = DeviceRows.allocate(num_requests, total, total, "cuda")
    draft_rows = DeviceRows.allocate(num_requests, num_requests, num_requests, "cuda")
    choices = Choices.allocate(total, 1024, "cuda")
    packed = torch.zeros(num_requests, FIRST_TOKEN + LENGTH + 1, dtype=torch.int32, device="cuda")
    lengths, step = torch.full_like(requests.slots, LENGTH), torch.ones(1, dtype=torch.int32, device="cuda")
    acceptance = torch.full((LENGTH,), 0.7, device="cuda")
    return {
        "expand": microseconds(lambda _: expand(requests, slots.history, rows), 1),
        "next_draft_rows": microseconds(
            lambda _: next_draft_rows(requests, lengths, step, slots.history, draft_rows), 1
        ),
        "judge": microseconds(lambda _: judge(choices, requests, rows.cu_wanted, slots, packed), 1),
        "judge_synthetic": microseconds(
            lambda _: judge(choices, requests, rows.cu_wanted, slots, packed, acceptance=acceptance), 1
        ),
    }


def main() -> None:
    memory = torch.zeros(1, device="cuda")
    result: dict[str, object] = {"device": torch.cuda.get_device_name(), "unit": "microseconds"}
    result["empty_kernel"] = microseconds(lambda _: _nothing[(1,)](memory), 1)
    print(f"an empty kernel: {result['empty_kernel']:.2f} us")
    for name, time, cases in (
        (
            "sample",
            time_sampling,
            [(rows, columns) for columns in (49_152, 128_256) for rows in (1, 16, 64, 256, 1024)],
        ),
        ("rows", time_rows, [(1,), (64,), (256,)]),
    ):
        result[name] = []
        for case in cases:
            times = {key: round(value, 2) for key, value in time(*case).items()}
            print(f"{name} {' x '.join(map(str, case)):>14}  ", "  ".join(f"{k} {v:.1f}" for k, v in times.items()))
            result[name].append({"case": case, **times})
    print(json.dumps(result))


if __name__ == "__main__":
    main()
