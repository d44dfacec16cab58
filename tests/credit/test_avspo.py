"""AVSPO: which groups are repaired, with what, and how the threshold moves.

Planted in a copy of the package and seen caught here: K by ACR instead of its root, rounded down, or of the group's
size instead of its rewards; repair at the threshold; each formula of virtual rewards off by one; a residue taken for a
reward; statistics of the virtual rewards alone; `ddof` ignored; repaired groups left live; abstained members repaired;
single rewards in the rate; a deviation compared with 0; negative rewards not mapped, their mean or scale not mapped
back, or divided by a range of 0; the sign of ΔJ turned, its size used, a step at the first batch, no clipping, the mean
forgotten; a mean whose last bit depends on the order of rows.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import reference_weights as slow
from apportion.credit.avspo import AVSPO, collapse_rate
from apportion.credit.registry import make_method
from apportion.groups import Base, group_stats, grpo_base
from apportion.measure.evidence import Evidence
from apportion.rollouts import Rollouts
from apportion.testing.laws import LAWS, Law
from strategies import Batch, batches

VARIANTS: list[dict[str, Any]] = [{}, {"threshold": 0.0}, {"threshold": 0.2, "ddof": 1, "epsilon": 1e-4}]


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
@pytest.mark.parametrize("chosen", VARIANTS, ids=str)
def test_law(chosen: dict[str, Any], law: Law) -> None:
    law(AVSPO(**chosen))


@pytest.mark.parametrize("chosen", [{"threshold": 0.0}, {"threshold": 0.4}, {"threshold": 0.3, "ddof": 1}], ids=str)
@settings(max_examples=60)
@given(batch=batches(), rewards=st.sampled_from([(0.0, 1.0), (-1.0, 1.0), (0.0,), (-2.0,), (0.25, 0.9)]))
def test_equals_reference(chosen: dict[str, Any], batch: Batch, rewards: tuple[float, ...]) -> None:
    """Rewards of few kinds, so that many groups collapse."""
    for i, y in enumerate(batch.responses):
        y.reward = rewards[i % 7 % len(rewards)] if y.reward == y.reward else y.reward
    rollouts, method = batch.rollouts(), AVSPO(**chosen)
    base = method.base(rollouts)
    credit = method.assign(rollouts, Evidence(), base)
    wanted, made = slow.avspo(batch.responses, base.advantage.tolist(), **chosen)
    torch.testing.assert_close(credit.base, torch.tensor(wanted), rtol=1e-5, atol=1e-5)
    assert credit.counts["virtual_rewards"] == made
    assert collapse_rate(rollouts) == pytest.approx(slow.acr(batch.responses))


def rewards_of(*groups: list[float | None], mask: list[list[int]] | None = None) -> Rollouts:
    rows = [(str(g), r) for g, values in enumerate(groups) for r in values]
    return Rollouts.from_lists([[1]] * len(rows), [g for g, _ in rows], [r for _, r in rows], mask=mask)


MIXED = [1.0, 0.0] * 4


@pytest.mark.parametrize("reward, sign", [(1.0, 1), (0.0, -1)])
@pytest.mark.parametrize(
    "collapsed, kept, k, published",
    [(1, 3, 4, 0.6202), (1, 1, 6, 0.7276), (3, 1, 7, 0.7718), (1, 0, 8, 0.8115)],
)
def test_published_numbers(collapsed: int, kept: int, k: int, published: float, reward: float, sign: int) -> None:
    """G = 8, ACR = collapsed/(collapsed + kept), K = ⌈8·√ACR⌉ = 4, ⌈5.66⌉, ⌈6.93⌉, 8.

    All right: v_j = 1 − j/(K+1), Σv = K/2, so mean = (8 + K/2)/(8 + K) and the distance of a 1 from it is
    K/2/(8 + K). Σ(1−v)² = Σj²/(K+1)² = K(2K+1)/(6(K+1)); variance = that/(8+K) − distance². All wrong:
    v_j = .1·(K−j+1)/K, Σv = .1(K+1)/2 and Σv² = .01(K+1)(2K+1)/(6K); a 0 lies Σv/(8+K) below the mean.
    """
    rollouts = rewards_of(*([reward] * 8 for _ in range(collapsed)), *([MIXED] * kept))
    credit = AVSPO(threshold=0.2).assign(rollouts, Evidence(), grpo_base(rollouts))
    if reward:
        distance, squares = k / 2 / (8 + k), k * (2 * k + 1) / (6 * (k + 1))
    else:
        distance, squares = 0.05 * (k + 1) / (8 + k), 0.01 * (k + 1) * (2 * k + 1) / (6 * k)
    wanted = distance / (math.sqrt(squares / (8 + k) - distance**2) + 1e-8)
    assert wanted == pytest.approx(published, abs=5e-5)
    assert credit.base[: 8 * collapsed].tolist() == pytest.approx([sign * wanted] * 8 * collapsed, abs=1e-6)
    assert credit.counts == {"repaired_groups": collapsed, "virtual_rewards": k * collapsed}


def test_only_above_the_threshold() -> None:
    rollouts = rewards_of([1.0, 1.0], [1.0, 0.0])
    base = grpo_base(rollouts)
    for threshold, repaired in ((0.5, False), (0.49, True)):
        credit = AVSPO(threshold=threshold).assign(rollouts, Evidence(), base)
        assert bool(credit.base[:2].any()) is repaired
        assert credit.counts["repaired_groups"] == repaired
        assert torch.equal(credit.base[2:], base.advantage[2:])


def test_who_counts_in_the_rate() -> None:
    """Groups with one reward are left out, whether by size, by abstention or by their mask."""
    assert collapse_rate(rewards_of([1.0, 1.0], [1.0, 0.0], [1.0], [1.0, None], [None, None])) == 0.5
    masks = [[1], [1], [1], [0]]
    assert collapse_rate(rewards_of([1.0, 1.0], [1.0, 1.0], mask=masks)) == 1.0
    assert collapse_rate(rewards_of([1.0, 0.0], [1.0, 1.0], mask=masks)) == 0.0
    assert collapse_rate(rewards_of([1.0])) == 0.0
    # A deviation below 1e-6, though law 3 tells the rewards apart; and float32's .9.
    assert collapse_rate(rewards_of([1.0, 1.0 + 1e-6], [1.0, 1.0 + 4e-6])) == 0.5
    single = rewards_of([0.9] * 15)
    assert collapse_rate(replace(single, reward=single.reward.float())) == 1.0


def test_a_hosts_base_comes_through_where_nothing_is_repaired() -> None:
    rollouts = rewards_of([1.0, 1.0], [1.0, 0.0], [0.5], [1.0, None])
    odd = torch.tensor([0.1, 0.2, 0.3, -0.7, 0.4, 0.5, 0.6])
    live = torch.tensor([False, False, True, True, False, False, False])
    host = Base(odd, torch.full((7,), 0.25, dtype=torch.float64), torch.full((7,), 3.0, dtype=torch.float64), live)
    got = AVSPO(threshold=0.4).rebase(rollouts, host)
    assert torch.equal(got.advantage[2:], odd[2:]) and torch.equal(got.live, live)
    assert got.mean[2:].tolist() == [0.25] * 5 and got.scale[2:].tolist() == [3.0] * 5
    # v = 2/3 and 1/3 beside 1, 1: mean 3/4; squares 2/16 + 1/144 + 25/144 = 11/36; σ = √(11/144); A = 3/√11.
    assert got.advantage[:2].tolist() == pytest.approx([3 / math.sqrt(11)] * 2, abs=1e-6)
    assert got.mean[:2].tolist() == pytest.approx([0.75] * 2)
    assert got.scale[:2].tolist() == pytest.approx([math.sqrt(11) / 12 + 1e-8] * 2)


def test_an_abstained_sibling_stays_out() -> None:
    """G counts rewards: two, not three."""
    rollouts = rewards_of([1.0, None, 1.0], [0.0, 0.0])
    credit = AVSPO(threshold=0.9).assign(rollouts, Evidence(), grpo_base(rollouts))
    assert credit.counts == {"repaired_groups": 2, "virtual_rewards": 4}
    assert credit.base.tolist() == pytest.approx([3 / 11**0.5, 0, 3 / 11**0.5, -3 / 11**0.5, -3 / 11**0.5], abs=1e-6)


def test_negative_rewards_count_from_0_to_1() -> None:
    """−1 and 1 count as 0 and 1, and the means are told in the rewards' unit.

    ACR 2/3, G = 2: K = ⌈1.63⌉ = 2. Wrong: 0, 0, .1, .05: mean .0375, σ = √(.006875/4) = √11/80; right: as above.
    """
    rollouts = rewards_of([-1.0, -1.0], [1.0, -1.0], [1.0, 1.0])
    base = AVSPO(threshold=0.5, epsilon=0.0).rebase(rollouts, grpo_base(rollouts))
    assert base.advantage[[0, 4]].tolist() == pytest.approx([-3 / 11**0.5, 3 / 11**0.5], abs=1e-6)
    assert base.mean[[0, 4]].tolist() == pytest.approx([2 * 0.0375 - 1, 2 * 0.75 - 1])
    assert base.scale[[0, 4]].tolist() == pytest.approx([2 * 11**0.5 / 80, 2 * 11**0.5 / 12])
    consistent = (rollouts.reward - base.mean) / base.scale
    torch.testing.assert_close(base.advantage[[0, 1, 4, 5]], consistent[[0, 1, 4, 5]].float())
    # With nothing but −1 there is no better answer to be measured by: all are wrong.
    alone = AVSPO().assign(rewards_of([-1.0, -1.0]), Evidence(), grpo_base(rewards_of([-1.0, -1.0])))
    assert alone.base.tolist() == pytest.approx([-3 / 11**0.5] * 2, abs=1e-6)


@pytest.mark.parametrize("reward", [1e-9, 3 * 0.1 - 0.3])
def test_a_residue_is_no_reward(reward: float) -> None:
    """Else virtual rewards of its own tiny size would turn it into a success of the full size."""
    rollouts = rewards_of([reward] * 8)
    got = AVSPO().assign(rollouts, Evidence(), grpo_base(rollouts)).base.tolist()
    assert got == pytest.approx([-0.8115] * 8, abs=5e-5)


@settings(max_examples=40)
@given(size=st.integers(2, 16), reward=st.sampled_from([0.0, 1.0, 0.3, 5.0]), rate=st.floats(0.01, 1.0))
def test_repaired_advantages_are_bounded_and_have_the_sign_of_the_outcome(
    size: int, reward: float, rate: float
) -> None:
    kept = round((1 - rate) / rate)
    rollouts = rewards_of([reward] * size, *([[0.0, 1.0]] * kept))
    base = AVSPO(threshold=0.0).rebase(rollouts, grpo_base(rollouts))
    mine = base.advantage[:size]
    assert (mine > 0).all() if reward > 0 else (mine < 0).all()
    assert mine.abs().max() < 1 and mine.unique().numel() == 1
    assert not base.live[:size].any() and base.live[size:].all()


def test_threshold() -> None:
    """τ + .01·sign(ΔJ)(ACR − τ): .5 at first; J rises, ACR 1: .505; falls, ACR 0: .505 − .01·(0 − .505) = .51005."""
    right, mixed, wrong = rewards_of([1.0] * 4), rewards_of([1.0, 0.0]), rewards_of([0.0] * 3)
    method = AVSPO().after(mixed)
    assert (method.threshold, method.last_mean) == (0.5, 0.5)
    method = method.after(right)
    assert (method.threshold, method.last_mean) == (pytest.approx(0.505), 1.0)
    method = method.after(mixed)
    assert (method.threshold, method.last_mean) == (pytest.approx(0.51005), 0.5)
    assert method.after(mixed) == method, "an unchanged mean moves nothing"
    assert method.after(wrong).threshold == pytest.approx(0.51005 - 0.01 * (1 - 0.51005))
    assert method.after(rewards_of([None, None])) == method, "nothing was scored"
    # Away from the rate, and no further than the end.
    assert AVSPO(threshold=0.99, rate=1.0, last_mean=2.0).after(mixed).threshold == 1.0
    assert AVSPO(threshold=0.1, rate=1.0, last_mean=2.0).after(right).threshold == 0.0


def test_order_of_rows_gives_an_unchanged_mean_no_sign() -> None:
    """.1 + .2 + .3 and .3 + .2 + .1 differ in float64."""
    one, other = rewards_of([0.1, 0.2, 0.3]), rewards_of([0.3, 0.2, 0.1])
    method = AVSPO().after(one)
    assert method.after(other) == method


def test_state_is_settings() -> None:
    method = AVSPO().after(rewards_of([0.1, 0.2])).after(rewards_of([0.7, 0.7]))
    assert make_method("avspo", method.settings) == method
    assert method.threshold == pytest.approx(0.505)
    assert make_method("avspo", {"last_mean": "0.25", "threshold": "0.75"}) == AVSPO(last_mean=0.25, threshold=0.75)


def test_its_own_base_has_the_population_deviation() -> None:
    rollouts = rewards_of([1.0, 0.0, 0.0, 0.0])
    assert AVSPO().base(rollouts).advantage.tolist() == pytest.approx([3**0.5, *[-(3**-0.5)] * 3])
    assert group_stats(rollouts, 0).std[0] == pytest.approx(3**0.5 / 4)
