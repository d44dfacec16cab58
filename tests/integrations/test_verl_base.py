"""μ and divisor of verl's GRPO: by hand, and against verl's own function."""

import random
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from apportion.errors import InputError
from apportion.integrations.verl.base import verl_base

needs_verl = pytest.mark.skipif(
    find_spec("verl") is None, reason="verl is not installed; `make cluster` installs it and runs this"
)

EPSILON = np.float32(1e-6)


def f32(*values):
    return torch.tensor(values, dtype=torch.float32)


def test_numbers_by_hand():
    """Rewards 1, 0, 0, 0: μ .25, σ .5. Rewards 3, 1: μ 2, σ √2. Members stand anywhere."""
    reward, group = f32(1, 3, 0, 0, 1, 0), torch.tensor([7, 2, 7, 7, 2, 7])
    four, two = np.float32(0.5) + EPSILON, np.float32(2**0.5) + EPSILON
    advantage = f32(0.75 / four, 1 / two, -0.25 / four, -0.25 / four, -1 / two, -0.25 / four)
    mean, scale = verl_base(reward, group, advantage, True)
    assert mean.tolist() == [0.25, 2, 0.25, 0.25, 2, 0.25]
    assert torch.equal(scale, f32(four, two, four, four, two, four))
    mean, scale = verl_base(reward, group, f32(0.75, 1, -0.25, -0.25, -1, -0.25), False)
    assert mean.tolist() == [0.25, 2, 0.25, 0.25, 2, 0.25] and scale.tolist() == [1] * 6


def test_a_group_of_one_has_mean_0_and_deviation_1():
    one = np.float32(1) + EPSILON
    mean, scale = verl_base(f32(3), torch.tensor([0]), f32(np.float32(3) / one), True)
    assert mean.tolist() == [0] and scale.tolist() == [float(one)]
    mean, scale = verl_base(f32(3), torch.tensor([0]), f32(3), False)
    assert (mean.tolist(), scale.tolist()) == ([0], [1])


def test_no_rows():
    mean, scale = verl_base(f32(), torch.tensor([], dtype=torch.int64), f32(), True)
    assert len(mean) == len(scale) == 0


@pytest.mark.parametrize(("advantage", "normalised"), [((0.5, -0.5), True), ((0.70710, -0.70711), False)])
def test_another_rule_stops_the_run_and_names_verl(monkeypatch, advantage, normalised):
    monkeypatch.setattr("apportion.integrations.verl.base.found_version", lambda package: "0.9.77")
    with pytest.raises(RuntimeError, match=r"verl 0\.9\.77 computed no advantage of GRPO.*row 0.*2 rows of 2"):
        verl_base(f32(1, 0), torch.tensor([0, 0]), f32(*advantage), normalised)


def test_the_last_bit_counts():
    right = f32(0.5, -0.5)
    verl_base(f32(1, 0), torch.tensor([0, 0]), right, False)
    with pytest.raises(RuntimeError, match="row 1 "):
        verl_base(f32(1, 0), torch.tensor([0, 0]), torch.stack([right[0], torch.nextafter(right[1], f32(0)[0])]), False)


def test_what_cannot_be_compared_is_not():
    """A response without a trainable token counts in verl's μ, and no advantage of it is to be seen."""
    reward, group = f32(1, 0), torch.tensor([0, 0])
    mean, _ = verl_base(reward, group, f32(0.5, 0), False, torch.tensor([True, False]))
    assert mean.tolist() == [0.5, 0.5]
    with pytest.raises(RuntimeError, match="row 1 "):
        verl_base(reward, group, f32(0.5, 0), False)


@pytest.mark.parametrize(
    ("reward", "advantage", "field"),
    [
        (torch.zeros(2, dtype=torch.float64), torch.zeros(2), "rewards"),
        (torch.zeros(2), torch.zeros(2, dtype=torch.float64), "advantage"),
        (torch.zeros(3), torch.zeros(2), "rewards"),
        (torch.zeros(2), torch.zeros(2, 1), "advantage"),
    ],
)
def test_other_shapes_and_precisions_are_refused(reward, advantage, field):
    with pytest.raises(InputError, match=rf"^{field}: "):
        verl_base(reward, torch.tensor([0, 0]), advantage, True)


def verls(reward, group, normalised):
    from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage

    uid = np.array([f"u{g}" for g in group.tolist()], dtype=object)
    return compute_grpo_outcome_advantage(
        reward[:, None].clone(), torch.ones(len(reward), 1), uid, norm_adv_by_std_in_grpo=normalised
    )[0][:, 0]


@needs_verl
@settings(max_examples=60)
@given(st.integers(0, 2**31), st.booleans(), st.sampled_from(["bits", "tenths", "any", "huge", "equal"]))
def test_bit_for_bit_verls(seed, normalised, kind):
    """Ragged groups in any order; (r − μ)/divisor is what verl made, or `verl_base` would have raised."""
    rng = random.Random(seed)
    rows = [g for g in range(rng.randint(1, 6)) for _ in range(rng.choice([1, 2, 3, 7, 15]))]
    rng.shuffle(rows)
    draw = {
        "bits": lambda: rng.randint(0, 1), "tenths": lambda: rng.randint(-10, 10) / 10, "any": lambda: rng.gauss(0, 1),
        "huge": lambda: rng.gauss(0, 1e20), "equal": lambda: 0.9,
    }[kind]  # fmt: skip
    reward, group = f32(*[draw() for _ in rows]), torch.tensor(rows)
    advantage = verls(reward, group, normalised)
    mean, scale = verl_base(reward, group, advantage, normalised)
    assert torch.equal((reward - mean) / scale, advantage)
    assert mean.dtype == scale.dtype == torch.float32


@needs_verl
def test_a_missing_reward_makes_its_group_nan_as_in_verl():
    reward, group = f32(1, float("nan"), 1, 0), torch.tensor([0, 0, 1, 1])
    mean, scale = verl_base(reward, group, verls(reward, group, True), True)
    assert mean[:2].isnan().all() and scale[:2].isnan().all()
    assert mean[2:].tolist() == [0.5, 0.5]


@needs_verl
def test_rows_in_another_order_than_verls_may_miss_by_a_bit():
    """Why the rewards have to come in the order of verl's rows."""
    rng = random.Random(0)
    missed = 0
    for _ in range(50):
        reward, group = f32(*[rng.gauss(0, 1) for _ in range(8)]), torch.zeros(8, dtype=torch.int64)
        order = torch.tensor(rng.sample(range(8), 8))
        advantage = verls(reward, group, True)
        try:
            verl_base(reward[order], group, advantage[order], True)
        except RuntimeError:
            missed += 1
    assert missed > 0
