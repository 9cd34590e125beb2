"""Scenes are functions of their seed, their truth holds in every frame, and answers follow from it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tools.watch.questions import PLURALS, QUESTIONS, ZONES, Truth, ask, ask_some, chance
from tools.watch.scenes import Plan, SceneSettings, Thing, plan_scene, render
from tools.watch.sprites import FAMILIES, KINDS, draw_sprites, pick_family, sprite_size
from tools.watch.targets import TARGETS, dense_targets

SMALL = SceneSettings(side=56, num_frames=6)
plans = st.builds(
    plan_scene,
    st.builds(
        SceneSettings,
        side=st.sampled_from([56, 112, 224]),
        num_frames=st.sampled_from([4, 8, 16]),
        max_things=st.integers(0, 8),
        held_out=st.booleans(),
    ),
    st.integers(0, 1 << 41),
)
quick = settings(max_examples=60)


def scene_of(*things: Thing) -> Plan:
    return Plan(SceneSettings(side=100, num_frames=8), 0, things)


def thing(kind: str = "car", **changes: object) -> Thing:
    given = {"family": 0, "width": 20, "height": 10, "seed": 1, "centre": (50.0, 50.0)} | changes
    return Thing(kind, **given)  # type: ignore[arg-type]


# ---- scenes ----


@pytest.mark.parametrize("held_out", [False, True])
def test_a_seed_decides_every_pixel(held_out):
    scene = SceneSettings(side=56, num_frames=4, held_out=held_out)
    first, again, other = (render(plan_scene(scene, seed)) for seed in (7, 7, 8))
    assert first.shape == (4, 56, 56, 3)
    assert first.dtype == np.uint8
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


@quick
@given(plans)
def test_boxes_lie_inside_the_picture_and_no_scene_is_fuller_than_allowed(plan):
    side, most = plan.settings.side, plan.settings.max_things
    assert plan.boxes.min(initial=0) >= 0
    assert plan.boxes.max(initial=0) <= side
    assert (plan.boxes[..., 2:] >= plan.boxes[..., :2]).all()
    assert plan.seen[-1].sum() <= most
    assert not (plan.moving & ~plan.seen).any()


@quick
@given(plans)
def test_in_the_first_and_last_frames_every_thing_is_clearly_seen_or_clearly_not(plan):
    checked = [0, 1, -2, -1]
    boxes, exists = plan.full_boxes[checked], plan.exists[checked]
    area = np.prod(boxes[..., 2:] - boxes[..., :2], -1)
    cut = np.clip(boxes, 0, plan.settings.side)
    share = np.prod(cut[..., 2:] - cut[..., :2], -1) / area
    assert ((share >= 0.6) | (share <= 0.05) | ~exists).all()


@quick
@given(plans)
def test_events_say_what_changes_between_frames(plan):
    seen = plan.seen[0].copy()
    by_frame = {frame: [e for e in plan.events if e.frame == frame] for frame in range(1, plan.settings.num_frames)}
    for frame, events in by_frame.items():
        for event in events:
            if event.name in ("appears", "leaves"):
                seen[event.thing] = event.name == "appears"
            elif event.name == "stops":
                assert plan.moving[frame - 1, event.thing]
                assert not plan.moving[frame, event.thing]
        assert np.array_equal(seen, plan.seen[frame])


def test_every_number_of_things_and_every_event_occurs():
    found = [plan_scene(SceneSettings(), seed) for seed in range(200)]
    numbers = np.bincount([int(plan.seen[-1].sum()) for plan in found], minlength=9)
    assert (numbers >= 8).all(), numbers
    for name in ("appears", "leaves", "stops"):
        share = np.mean([any(event.name == name for event in plan.events) for plan in found])
        assert 0.4 < share < 0.6, (name, share)


def test_training_draws_no_held_out_family():
    random = np.random.default_rng(0)
    for kind in KINDS:
        last = len(FAMILIES[kind]) - 1
        assert {pick_family(kind, False, random) for _ in range(60)} == set(range(last))
        assert pick_family(kind, True, random) == last


def test_every_family_draws_a_thing_that_fills_its_box():
    for kind in KINDS:
        for family in range(len(FAMILIES[kind])):
            size = sprite_size(kind, 0.25, 224)
            phases = draw_sprites(kind, family, size, 3, flipped=False)
            opaque = np.max([sprite.alpha[..., 0] for sprite in phases], axis=0) > 0.5
            assert opaque.any(0).mean() > 0.55, (kind, family, "columns")
            assert opaque.any(1).mean() > 0.75, (kind, family, "rows")


def test_a_thing_is_drawn_in_its_box_and_nowhere_else():
    standing = thing(width=30, height=20)
    empty, full = render(scene_of()), render(scene_of(standing))
    differs = (empty != full).any(-1)  # [frames, height, width]
    assert not differs[:, :40].any()
    assert not differs[:, :, :35].any()
    assert differs[:, 40:60, 35:65].mean() > 0.5


# ---- questions ----


@quick
@given(plans, st.integers(0, 1 << 30))
def test_counts_and_kinds_agree_with_the_boxes_of_the_last_frame(plan, seed):
    truth, random = Truth.of(plan), np.random.default_rng(seed)
    boxes = plan.boxes[-1]
    has_area = np.prod(boxes[:, 2:] - boxes[:, :2], -1) > 0
    count = ask(truth, "count", random)
    assert count is not None
    assert int(count.answer) == plan.seen[-1].sum() <= has_area.sum()
    moving = ask(truth, "count moving", random)
    assert moving is not None
    assert int(moving.answer) <= int(count.answer)
    present = ask(truth, "present", random)
    if present is not None:
        (kind,) = (kind for kind in KINDS if kind in present.text)
        shown = {plan.things[index].kind for index in np.flatnonzero(plan.seen[-1])}
        assert (present.answer == "yes") == (kind in shown)


@quick
@given(plans, st.integers(0, 1 << 30))
def test_answers_about_change_agree_with_the_events(plan, seed):
    truth, random = Truth.of(plan), np.random.default_rng(seed)
    names = {(event.name, event.thing) for event in plan.events}
    appeared, left = (ask(truth, kind, random) for kind in ("appeared", "left"))
    assert appeared is not None
    assert left is not None
    assert appeared.answer == "no" or any(name == "appears" for name, _ in names)
    assert left.answer == "no" or any(name == "leaves" for name, _ in names)
    stopped = ask(truth, "stopped", random)
    if stopped is not None and stopped.answer == "yes":
        assert any(name == "stops" and plan.things[index].kind in stopped.text for name, index in names)
    direction = ask(truth, "direction", random)
    if direction is not None:
        (mover,) = (each for each in plan.things if each.kind in direction.text)
        unit = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}[direction.answer]
        assert np.dot(unit, mover.velocity) > 0.8 * np.hypot(*mover.velocity)


@quick
@given(plans, st.integers(0, 1 << 30))
def test_a_zone_is_answered_by_centres_alone_and_never_near_its_border(plan, seed):
    question = ask(Truth.of(plan), "zone", np.random.default_rng(seed))
    if question is None:
        return
    (zone,) = (name for name in ZONES if name in question.text)
    x0, y0, x1, y1 = (share * plan.settings.side for share in ZONES[zone])
    boxes = plan.boxes[-1][plan.seen[-1]]
    centres = (boxes[:, :2] + boxes[:, 2:]) / 2
    inside = ((centres >= (x0, y0)) & (centres <= (x1, y1))).all(-1)
    assert (question.answer == "yes") == bool(inside.any())


def test_one_scene_answered_by_hand():
    car = thing(velocity=(1.0, 0.0), direction="right", end=7, centre=(20.0, 20.0))
    dog = thing("dog", centre=(80.0, 80.0), velocity=(-4.0, 0.0), direction="left", end=3)
    ball = thing("ball", centre=(20.0, 80.0), born=4)
    plan = scene_of(car, dog, ball)
    truth, random = Truth.of(plan), np.random.default_rng(0)
    answers = {kind: {each.answer for _ in range(40) if (each := ask(truth, kind, random))} for kind in QUESTIONS}
    assert answers["count"] == {"3"}
    assert answers["count moving"] == {"1"}
    assert answers["which"] == {"car"}
    assert answers["direction"] == {"right"}
    assert answers["appeared"] == {"yes"}
    assert answers["left"] == {"no"}
    assert answers["zone"] == {"yes", "no"}
    assert [(event.name, event.frame) for event in plan.events] == [("stops", 4), ("appears", 4)]


def test_answers_are_balanced():
    """A constant answer to a yes-or-no question is right in little more than half of the cases."""
    questions = [q for seed in range(250) for q in ask_some(plan_scene(SceneSettings(), seed), 6, seed)]
    shares = chance(questions)
    assert set(shares) == set(QUESTIONS)
    for kind in ("present", "stopped", "zone", "appeared", "left"):
        assert shares[kind] < 0.62, (kind, shares[kind])
    assert shares["count"] < 0.2
    assert shares["direction"] < 0.4


def test_chance_is_the_share_of_the_most_common_answer():
    plan = plan_scene(SMALL, 1)
    question = ask_some(plan, 1, 0, kinds=("count",))[0]
    assert chance([question] * 3) == {"count": 1.0}


def test_held_out_phrasings_are_never_used_in_training():
    fillings = [{"kind": k, "plural": PLURALS[k], "zone": zone} for k in KINDS for zone in ZONES]
    held_out = {phrasings[-1].format(**each) for _, _, phrasings in QUESTIONS.values() for each in fillings}
    for seed in range(40):
        plan = plan_scene(SMALL, seed)
        assert held_out.isdisjoint(question.text for question in ask_some(plan, 4, seed))
        assert held_out.issuperset(question.text for question in ask_some(plan, 4, seed, held_out=True))


def test_questions_are_a_function_of_scene_and_seed():
    plan = plan_scene(SMALL, 3)
    assert ask_some(plan, 5, 1) == ask_some(plan, 5, 1)
    assert ask_some(plan, 5, 1) != ask_some(plan, 5, 2)


# ---- dense targets ----


@quick
@given(plans, st.sampled_from([2, 4, 8]))
def test_dense_targets_count_what_is_seen(plan, cells):
    labels = dense_targets(plan, cells)
    grids = plan.settings.num_frames // 2
    assert {name: each.shape for name, each in labels.items()} == dict.fromkeys(TARGETS, (grids, cells, cells))
    assert all(each.min() >= 0 and each.max() < TARGETS[name] for name, each in labels.items())
    assert (labels["count"][-1] == plan.seen[-1].sum()).all()
    assert (labels["centre"].sum((1, 2)) <= labels["count"][:, 0, 0]).all()
    assert ((labels["kind"] > 0).any((1, 2)) == (labels["count"][:, 0, 0] > 0)).all()
    assert not ((labels["motion"] > 0) & (labels["kind"] == 0)).any()


def test_a_cell_knows_the_nearest_thing_and_its_direction():
    far = thing("box", width=60, height=60)
    near = thing("dog", width=30, height=30, velocity=(-1.0, 0.0), direction="left", end=7, centre=(40.0, 40.0))
    labels = dense_targets(scene_of(far, near), 4)
    assert labels["kind"][-1, 1, 1] == 1 + KINDS.index("dog")
    assert labels["motion"][-1, 1, 1] == 1
    assert labels["kind"][-1, 2, 2] == 1 + KINDS.index("box")
    assert labels["motion"][-1, 2, 2] == 0
