"""Whether `faser` is ever slower than `off`: does the benchmark run, and does it compare outputs?"""

from __future__ import annotations

from benchmarks.never_slower import OUTPUT_TOKENS, compare
from faser import LLM
from faser.policy import make_policy
from tests.tiny import make_draft, make_model


def test_both_policies_write_the_same_and_drafts_are_counted():
    target = make_model()
    with LLM(target, make_draft(target), policy="fixed:2", max_model_len=64, num_pages=64) as llm:
        policies = {name: make_policy(name) for name in ("off", "fixed:2")}
        found = compare(llm, policies, [[1, 2, 3], [4, 5, 6], [7, 8]], 2, 0.0, 0, turns=2)
    assert found["differing"] == 0
    assert found["drafted"] > OUTPUT_TOKENS
    assert len(found["ratios"]) == 2
