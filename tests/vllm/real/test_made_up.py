"""The steps that compile vLLM's kernels at start are steps that its scheduler could have sent."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="no vLLM: `make test-vllm` sets up an environment with one and runs these")

from faser.vllm.made_up import NUMBERS, MadeUpSteps


@pytest.mark.parametrize(
    ("max_length", "lengths"), [(1, [1]), (2, [1, 2]), (4, [1, 3, 4]), (7, [1, 3, 7]), (8, [1, 3, 7, 8])]
)
def test_lengths_cover_every_power_of_two(max_length, lengths):
    assert MadeUpSteps(max_length, 64, 512, 100, [16]).lengths == lengths


def test_numbers_of_requests_fit_into_the_engine():
    assert MadeUpSteps(4, 64, 512, 100, [16]).numbers == list(NUMBERS)
    assert MadeUpSteps(4, 8, 512, 100, [16]).numbers == [1, 3]  # requests
    assert MadeUpSteps(4, 64, 16, 100, [16]).numbers == [1, 3]  # rows
    assert MadeUpSteps(4, 64, 512, 5, [16, 16]).numbers == [1]  # blocks


@pytest.mark.parametrize("block_sizes", [[16], [4, 16]])
def test_every_request_has_its_own_blocks_drafts_once_and_ends(block_sizes):
    steps = MadeUpSteps(5, 16, 256, 200, block_sizes)
    open_requests: dict[str, list[int]] = {}
    drafted, rows = [], 0
    for step in steps:
        for request_id in step.finished_req_ids:
            del open_requests[request_id]
        for new in step.scheduled_new_reqs:
            blocks = [block for group in new.block_ids for block in group]
            assert all(len(group) * size >= 2 + 2 * 6 for group, size in zip(new.block_ids, block_sizes, strict=True))
            open_requests[new.req_id] = blocks
        owned = [block for blocks in open_requests.values() for block in blocks]
        assert len(owned) == len(set(owned))
        assert all(0 < block < 200 for block in owned)
        assert set(step.num_scheduled_tokens) == set(open_requests)
        assert step.total_num_scheduled_tokens <= 256
        drafted += [(len(step.num_scheduled_tokens), len(own)) for own in step.scheduled_spec_decode_tokens.values()]
        rows += step.total_num_scheduled_tokens
    assert not open_requests
    assert set(drafted) == {(number, length) for number in NUMBERS for length in (1, 3, 5)}
    assert rows > 0
