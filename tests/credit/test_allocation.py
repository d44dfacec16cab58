"""Neyman allocation: shares, whole numbers, and the weight of a pivot.

Planted in a copy of the package and seen caught here: shares by variance instead of deviation; the pilot's mean
without the plug-in; the remainder unspent, or given to the smallest first; the floor not held; the reach of a
pivot counted to one side, or into the next response; shared states whose weights are not added up.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import reference
from apportion.credit.allocation import integers, neyman, neyman_shares
from apportion.groups import Base, grpo_base
from apportion.measure.evidence import Continuations
from apportion.measure.plan import Job, jobs_of
from apportion.rollouts import Rollouts
from strategies import Batch, batches


def test_published_shares() -> None:
    # √(3·.25) = .8660, √(7·.09) = .7937; divided by their sum 1.6598.
    p, weight = torch.tensor([0.5, 0.1], dtype=torch.float64), torch.tensor([3.0, 7.0])
    assert neyman_shares(p, weight).tolist() == pytest.approx([0.522, 0.478], abs=5e-4)
    assert neyman_shares(p, weight).tolist() == pytest.approx(reference.neyman([0.5, 0.1], [3, 7]), abs=1e-12)


def test_no_noise_anywhere_gives_equal_shares() -> None:
    assert neyman_shares(torch.tensor([0.0, 1.0, 1.0]), torch.ones(3)).tolist() == pytest.approx([1 / 3] * 3)


@pytest.mark.parametrize(
    "shares, total, floor, wanted",
    [
        ([0.522, 0.478], 10, 0, [5, 5]),  # 5.22, 4.78: the larger remainder gets the tenth
        ([0.5, 0.5], 5, 0, [3, 2]),  # a tie goes to the earlier
        ([0.9, 0.06, 0.04], 10, 2, [6, 2, 2]),  # two are held at the floor, the rest goes to the first
        ([0.7, 0.25, 0.05], 20, 4, [12, 4, 4]),  # 16·.7/.95 = 11.8, 16·.25/.95 = 4.2 → 12, 4
        ([0.6, 0.3, 0.1], 9, 3, [3, 3, 3]),
        ([1.0, 0.0, 0.0], 10, 0, [10, 0, 0]),
        ([1.0, 0.0, 0.0], 10, 1, [8, 1, 1]),
        ([1.0], 7, 2, [7]),
    ],
)
def test_whole_numbers(shares: list[float], total: int, floor: int, wanted: list[int]) -> None:
    assert integers(torch.tensor(shares, dtype=torch.float64), total, floor) == wanted


@given(
    weights=st.lists(st.floats(0, 1e6), min_size=1, max_size=12),
    floor=st.integers(0, 5),
    over=st.integers(0, 200),
)
def test_whole_numbers_sum_to_the_total(weights: list[float], floor: int, over: int) -> None:
    total = floor * len(weights) + over
    scale = sum(weights)
    shares = [w / scale for w in weights] if scale > 1e-300 else [1 / len(weights)] * len(weights)
    whole = integers(torch.tensor(shares, dtype=torch.float64), total, floor)
    assert sum(whole) == total and min(whole) >= floor
    for (a, n), (b, m) in zip(zip(shares, whole, strict=True), zip(shares[1:], whole[1:], strict=True), strict=False):
        assert (a < b) <= (n <= m) or math.isclose(a, b), "a larger share got less"


def test_a_floor_that_cannot_be_paid() -> None:
    with pytest.raises(ValueError, match="7 cannot be split over 4 pivots with at least 2 each"):
        integers(torch.full((4,), 0.25), 7, 2)


def neyman_by_hand(batch: Batch, base: Base, asked: int, samples: int) -> dict[tuple[int, int], int]:
    """Second-wave samples of every pivot, state by state, with the reference's arithmetic."""
    measured = {key: rewards for key, rewards in batch.measured().items() if rewards and key[1] > 0}
    cuts = [sorted(at for row, at in measured if row == i) for i in range(len(batch.responses))]
    out: dict[tuple[int, int], int] = {}
    for group in dict.fromkeys(y.group for y in batch.responses):
        states: dict[tuple[int, ...], list[tuple[int, int]]] = {}
        for row, at in sorted(measured):
            y = batch.responses[row]
            if y.group == group and reference.live(batch.responses, y):
                states.setdefault(tuple(y.ids[:at]), []).append((row, at))
        if not states:
            continue
        p, weight = [], []
        for pivots in states.values():
            rewards = measured[pivots[0]]
            p.append((sum(rewards) + 1) / (len(rewards) + 2))
            weight.append(
                sum(
                    reference.reach(
                        len(batch.responses[row].ids), cuts[row], cuts[row].index(at), base.scale[row].item()
                    )
                    for row, at in pivots
                )
            )
        shares = reference.neyman(p, weight)
        whole = integers(torch.tensor(shares, dtype=torch.float64), samples * len(states), asked)
        out |= {pivot: n - asked for pivots, n in zip(states.values(), whole, strict=True) for pivot in pivots}
    return {pivot: n for pivot, n in out.items() if n}


@given(batch=batches(rewards=(0.0, 1.0)), asked=st.integers(1, 3), more=st.integers(0, 6))
def test_equals_reference(batch: Batch, asked: int, more: int) -> None:
    rollouts = batch.rollouts()
    # A shared state has one measurement, and every pivot that it serves carries it.
    rows = torch.tensor([row for row, _, _ in batch.entries], dtype=torch.int64)
    positions = torch.tensor([at for _, at, _ in batch.entries], dtype=torch.int64)
    rewards = {(row, at): values for row, at, values in batch.entries}
    jobs = jobs_of(rollouts, rows, positions, asked, torch.zeros(len(rows)))
    batch.entries = [(row, at, rewards[job.pivots[0]]) for job in jobs for row, at in job.pivots]
    base = grpo_base(rollouts)
    pilot = batch.evidence().continuations
    assert pilot is not None
    wave = neyman(rollouts, base, pilot, asked, asked + more)
    got = {pivot: job.samples for job in wave for pivot in job.pivots}
    wanted = neyman_by_hand(batch, base, asked, asked + more)
    # Equal shares may be told apart by the last bit of a float64, so whole numbers may trade places there.
    assert sum(got.values()) == sum(wanted.values()) or len(wave) != len(got)
    assert all(abs(got.get(pivot, 0) - wanted.get(pivot, 0)) <= 1 for pivot in got.keys() | wanted.keys())


def test_noise_draws_the_second_wave() -> None:
    """Two pivots of equal reach: p = (1+1)/(2+2) = .5 against (2+1)/(2+2) = .75; √.25 : √.1875 = .536 : .464."""
    rollouts = Rollouts.from_lists([[1] * 9, [2] * 9], ["p", "p"], [1.0, 0.0])
    pilot = Continuations.from_rewards(rollouts, [(0, 3, [1.0, 0.0]), (0, 6, [1.0, 1.0])])
    # 40 in all: 21.4 and 18.6 → 21 and 19; two each are spent.
    assert neyman(rollouts, grpo_base(rollouts), pilot, 2, 20) == [Job(0, 3, 19, ((0, 3),)), Job(0, 6, 17, ((0, 6),))]
