"""What holds for all policies, by name: what they are called, what they answer, and that no output depends on them."""

from __future__ import annotations

from itertools import count

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from faser.arrays import IntArray
from faser.config import EngineOptions
from faser.cost.profile import Profile
from faser.cost.profiled_cost import ProfiledCost
from faser.engine.engine import Engine
from faser.errors import ConfigError
from faser.limits import ADAPTIVE_MAX_LENGTH, HARD_MAX_LENGTH
from faser.policy import POLICIES, Fixed, Policy, make_policy
from faser.policy.base import BatchView, Outcome
from tests.engine.test_engine import Ahead, drain
from tests.oracle import SEED, World, expected_output, make_request
from tests.policy.profiles import H200, SMOOTH, make_outcome, make_view

NAMES = [*POLICIES, "fixed:3", "table:2=5/6=1"]


@pytest.mark.parametrize("name", NAMES)
def test_a_policys_name_makes_the_same_policy(name):
    policy = make_policy(name)
    again = make_policy(policy.name)
    assert type(again) is type(policy)
    assert again.name == policy.name
    assert again is not policy


def test_the_names_are_those_of_the_policies():
    assert [make_policy(name).name for name in POLICIES] == [
        name if name != "table" else "table:64=3/128=1" for name in POLICIES
    ]


@pytest.mark.parametrize(
    "name", ["", "warp", "fixed", "fixed:", "fixed:-1", "fixed:1.5", "fixed:²", f"fixed:{HARD_MAX_LENGTH + 1}", "off:1",
             "goodput:3", "ema:", "FASER", "nightjar "]
)  # fmt: skip
def test_an_unknown_name_is_refused_with_a_list_of_all_names(name):
    with pytest.raises(ConfigError) as refused:
        make_policy(name)
    said = str(refused.value)
    assert repr(name) in said
    assert "fixed:K" in said
    assert all(each in said for each in POLICIES)


def test_an_object_that_is_no_policy_is_refused():
    with pytest.raises(ConfigError, match=r"faser\.policy\.Policy"):
        EngineOptions(policy=object()).make_policy(has_draft=True)


class OnlyLengths(Policy):
    name = "only lengths"

    def lengths(self, view: BatchView) -> IntArray:
        return np.ones(view.num_requests, dtype=np.int64)


def test_a_policy_needs_a_name_and_lengths_and_has_defaults_for_the_rest():
    policy = OnlyLengths()
    policy.learn(make_outcome([1], [1]))
    assert (policy.max_length, policy.needs_cost, policy.learns) == (ADAPTIVE_MAX_LENGTH, False, False)
    assert policy.stopping() is None


def test_no_outcome_is_made_for_a_policy_that_does_not_learn(monkeypatch):
    monkeypatch.setattr("faser.engine.drafting.Outcome", lambda **_: pytest.fail("made for nobody"))
    assert serve(OnlyLengths(), 1.0, ahead=False).tokens == serve(Fixed(0), 1.0, ahead=False).tokens


def test_a_malformed_table_is_refused_with_an_example():
    with pytest.raises(ConfigError, match="table:64=3/128=1"):
        make_policy("table:64")


@st.composite
def histories(draw):
    """Views of a few batches, some steps each, from a seed: requests come, differ and have limits."""
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    sizes = draw(st.lists(st.one_of(st.just(1), st.integers(1, 300)), min_size=1, max_size=4))
    profile = draw(st.sampled_from([H200, SMOOTH]))
    return [random_view(random, size, profile) for size in sizes for _ in range(draw(st.integers(1, 4)))], random


def random_view(random: np.random.Generator, size: int, profile: Profile) -> BatchView:
    tried = random.integers(0, 200, size)
    return make_view(
        size,
        profile=profile,
        limit=0 if random.random() < 0.2 else random.choice([0, 1, 2, 5, 32], size).tolist(),
        accepted=(tried * random.random(size)).astype(np.int64).tolist(),
        tried=tried.tolist(),
        lag=random.choice([0, 1, 2, 300], size).tolist(),
        num_tokens=random.integers(1, 3000, size).tolist(),
        prefill_rows=int(random.choice([0, 0, 700])),
    )


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=40)
@given(history=histories())
def test_lengths_are_whole_numbers_from_0_to_the_longest_announced(name, history):
    views, random = history
    policy = make_policy(name)
    for view in views:
        lengths = policy.lengths(view)
        assert lengths.shape == view.slots.shape
        assert np.issubdtype(lengths.dtype, np.integer)
        assert lengths.min() >= 0
        assert lengths.max() <= policy.max_length <= HARD_MAX_LENGTH
        if policy.learns:
            drafted = np.minimum(lengths, view.limit)
            accepted = np.minimum(drafted, random.geometric(0.4, drafted.size) - 1)
            seconds = float(random.choice([0.0, 1e-6, 5e-3, 10.0]))
            lag = np.where(drafted > 0, view.lag, 0)
            policy.learn(Outcome(view.slots, drafted, accepted, lag, view.num_prefill_rows, seconds))


@pytest.mark.parametrize("name", [name for name in NAMES if make_policy(name).learns])
def test_a_policy_that_learns_survives_steps_that_teach_nothing(name):
    policy = make_policy(name)
    odd = [
        make_outcome([], 0),  # nobody
        make_outcome([0, 0], 0, lag=0),  # nobody drafted
        make_outcome([0], 0, seconds=0.0),  # in no time
        make_outcome([HARD_MAX_LENGTH] * 3, HARD_MAX_LENGTH),  # more than it ever gives
        make_outcome([2] * 400, 2),  # requests it was never asked about
        make_outcome([0] * 3, 0, lag=900, prefill_rows=3000),
    ]
    for outcome in odd + odd:
        policy.learn(outcome)
        assert policy.lengths(make_view(3)).size == 3


@pytest.mark.parametrize("name", NAMES)
def test_a_fresh_policy_knows_nothing_of_another(name):
    taught, view = make_policy(name), make_view(16)
    before = make_policy(name).lengths(view).tolist()
    if taught.learns:
        for _ in range(200):
            lengths = taught.lengths(view)
            taught.learn(make_outcome(lengths.tolist(), 0, seconds=1.0))
    assert make_policy(name).lengths(view).tolist() == before


PROMPTS = {name: [number % 5, 2, number % 3] + [1, 2, 3] * (number % 4) for number, name in enumerate("abcdefghij")}


def serve(policy, agreement: float, ahead: bool) -> World:
    world = World(policy, agreement=agreement, max_running=6, max_batch_tokens=24)
    cost = ProfiledCost(H200)
    world.scheduler.drafts.cost = cost
    ticks = count()
    executor = Ahead(world.executor) if ahead else world.executor
    engine = Engine(world.scheduler, executor, clock=lambda: 1e-3 * next(ticks), cost=cost)
    for name, prompt in PROMPTS.items():
        world.add(make_request(name, prompt, 30, max_draft={"c": 0, "d": 1}.get(name)))
        world.receive(engine.step())
    drain(engine, world)
    return world


@pytest.mark.parametrize("ahead", [False, True], ids=["behind", "ahead"])
@pytest.mark.parametrize("agreement", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("name", [name for name in NAMES if name != "off"])
def test_the_output_is_that_of_policy_off(name, agreement, ahead):
    world, plain = serve(make_policy(name), agreement, ahead), serve(Fixed(0), agreement, ahead)
    assert world.tokens == plain.tokens
    assert world.tokens == {each: expected_output(prompt, SEED, 30) for each, prompt in PROMPTS.items()}
    assert world.target.num_held == 0
