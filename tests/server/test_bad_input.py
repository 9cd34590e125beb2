"""A small campaign of mutated requests; benchmarks/bad_input.py has the large one."""

from __future__ import annotations

from benchmarks import bad_input


def test_no_mutated_request_brings_the_server_down(server):
    campaign, _ = bad_input.run(server.url, seed=1, numbers=range(600), concurrency=4)
    assert campaign.faults == []
    assert campaign.statuses[200] > 20
    assert campaign.statuses[400] > 300
    assert bad_input.at_rest(server.url) == []
