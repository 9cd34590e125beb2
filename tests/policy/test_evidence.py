"""Measured speed decides where costs cannot."""

import numpy as np
import pytest

from faser.policy.base import Outcome
from faser.policy.evidence import MAX_HOLD, RECHECK_STEPS, MeasuredGain

PLAIN = 0.05  # seconds of a step without drafts


class Traffic:
    """A batch that drafts make `gain` times as fast, with noisy steps; records which steps were allowed to draft."""

    def __init__(self, gain: float, noise: float = 0.0, size: int = 4) -> None:
        self.gain, self.noise, self.size = gain, noise, size
        self.measured = MeasuredGain()
        self.random = np.random.default_rng(0)
        self.drafted: list[bool] = []

    def run(self, steps: int, expected: float = 1.05, error: float = 0.1) -> None:
        for _ in range(steps):
            drafts = self.measured.allows(self.size, expected, error)
            self.drafted.append(drafts)
            tokens = 2 if drafts else 1
            seconds = PLAIN * (2 / self.gain if drafts else 1) * np.exp(self.noise * self.random.normal())
            self.measured.learn(self.outcome(drafts, tokens, float(seconds)), PLAIN)

    def outcome(self, drafts: bool, tokens: int, seconds: float, prompts: int = 0) -> Outcome:
        each = np.ones(self.size, dtype=np.int64)
        return Outcome(np.arange(self.size), drafts * each, (tokens - 1) * each, drafts * each, prompts, seconds)


@pytest.mark.parametrize("gain", [0.8, 0.9])
@pytest.mark.parametrize("noise", [0.0, 0.2])
def test_drafts_that_lose_are_soon_given_up_and_rarely_tried(gain, noise):
    traffic = Traffic(gain, noise)
    traffic.run(6000)
    assert np.mean(traffic.drafted) < 0.08
    assert any(traffic.drafted[200:]), "it is never tried again"


@pytest.mark.parametrize(("gain", "noise"), [(1.1, 0.0), (1.1, 0.1), (1.3, 0.0), (1.3, 0.2)])
def test_drafts_that_gain_go_on(gain, noise):
    traffic = Traffic(gain, noise)
    traffic.run(4000)
    assert np.mean(traffic.drafted) > 0.9


def test_a_small_gain_that_noise_hides_is_found_in_the_end():
    traffic = Traffic(1.1, noise=0.2)
    traffic.run(12_000)
    assert np.mean(traffic.drafted[-2000:]) > 0.9


def test_a_gain_beyond_all_error_needs_no_comparison():
    traffic = Traffic(1.8)
    traffic.run(500, expected=1.7, error=0.05)
    assert all(traffic.drafted)


def test_a_result_that_holds_rules_drafting_out_except_every_recheck_steps():
    traffic = Traffic(0.8)
    traffic.run(100)
    rechecks = []
    for _ in range(64):
        rechecks.append(not traffic.measured.rules_out(traffic.size))
        traffic.run(1)
    assert sum(rechecks) == 64 // RECHECK_STEPS
    assert not traffic.measured.rules_out(64), "batches of 64 were not compared"


def test_a_result_is_revised_when_the_machine_changes():
    traffic = Traffic(0.8)
    traffic.run(100)
    traffic.gain = 1.3
    traffic.run(MAX_HOLD)
    assert traffic.drafted[-1]


@pytest.mark.parametrize("gain", [0.6, 0.8, 0.95, 1.3])
def test_comparing_costs_less_than_a_hundredth(gain):
    traffic = Traffic(gain, noise=0.1)
    traffic.run(20_000)
    loses = gain < 1
    wrong = sum(drafted == loses for drafted in traffic.drafted)
    assert wrong * abs(1 - gain) < 0.01 * len(traffic.drafted)


def test_steps_that_draft_on_a_trusted_gain_do_not_spoil_a_comparison():
    """A step that drafts in a block without drafts is no sample of that block."""
    traffic = Traffic(1.3)
    for turn in range(600):
        traffic.run(1, expected=1.9 if turn % 3 == 0 else 1.05)
    assert all(traffic.drafted[-20:])


def test_batches_of_other_sizes_are_compared_on_their_own():
    traffic = Traffic(0.8, size=16)
    traffic.run(200)
    assert traffic.measured.rules_out(16)
    assert not traffic.measured.rules_out(1)


def test_steps_with_prompts_do_not_count():
    traffic, beside_prompts = Traffic(1.3), Traffic(1.3)
    for _ in range(200):
        traffic.run(1)
        beside_prompts.measured.learn(traffic.outcome(True, 1, 100 * PLAIN, prompts=64), PLAIN)
        beside_prompts.run(1)
    assert beside_prompts.drafted == traffic.drafted


def test_while_nothing_is_known_a_loss_is_small():
    """Drafts that make a batch a quarter slower cost 3 % at most while they are compared."""
    traffic = Traffic(0.75, noise=0.3)
    traffic.run(150)
    assert 4 <= sum(traffic.drafted) < 0.12 * 150


def test_drafts_that_only_ever_catch_up_are_given_up():
    """New requests come before the draft has caught up with the old ones: it costs time and drafts nothing."""
    measured, each = MeasuredGain(), np.ones(16, dtype=np.int64)
    allowed = []
    for _ in range(1000):
        allowed.append(measured.allows(16, 1.05, 0.1))
        seconds = PLAIN * (1.2 if allowed[-1] else 1.0)
        measured.learn(Outcome(np.arange(16), 0 * each, 0 * each, 30 * each * allowed[-1], 0, seconds), PLAIN)
    assert np.mean(allowed) < 0.05
