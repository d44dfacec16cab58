"""Group statistics and the base advantage.

Planted in a copy of the package and seen caught here: variance in one pass; ddof swapped; the equality test
left out, so that an epsilon is divided by; abstained rewards counted as 0; wholly masked responses counted.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import reference
from apportion.errors import InputError
from apportion.groups import Base, group_stats, grpo_base, live_rows
from apportion.rollouts import Rollouts
from strategies import Batch, batches


def rewards(*groups: Sequence[float | None]) -> Rollouts:
    """One-token responses, group after group."""
    rows = [(str(g), r) for g, group in enumerate(groups) for r in group]
    return Rollouts.from_lists([[1]] * len(rows), [g for g, _ in rows], [r for _, r in rows])


def test_both_conventions() -> None:
    # Σ(r − ¼)² = 9/16 + 3/16 = 3/4; divided by 3 and by 4.
    assert group_stats(rewards([1, 0, 0, 0]), ddof=1).std.tolist() == [0.5]
    assert group_stats(rewards([1, 0, 0, 0]), ddof=0).std.item() == pytest.approx(math.sqrt(3) / 4)


def test_missing_rewards_are_left_out() -> None:
    stats = group_stats(rewards([1, None, 0], [None, None], [None, 1.0]))
    assert stats.mean.tolist() == [0.5, 0.0, 1.0] and stats.count.tolist() == [2, 0, 1]
    assert stats.collapsed.tolist() == [False, True, True]


def test_equal_rewards_collapse_whatever_their_size() -> None:
    tiny = 1 + 1e-9
    stats = group_stats(
        rewards([0.9] * 15, [1e6, 1e6 * tiny], [1.0, 1.0 + 1e-6], [-5.0, -5.0], [1e-9, 0], [3e-4, 1e-4])
    )
    # 1e6·1e-9 = 1e-3 is within 1e-8·1e6 = 1e-2, and 1e-9 within 1e-8; 1e-6 and 2e-4 are not.
    assert stats.collapsed.tolist() == [True, True, False, True, True, False]
    assert not stats.std[stats.collapsed].any()


def test_variance_keeps_no_residue() -> None:
    """Seven float32 .95 and a .951: in one pass E[x²] − E[x]² is off in the third digit in float32."""
    values = [0.95] * 7 + [0.951]
    stats = group_stats(rewards(values), ddof=0)
    # .001·√(7/64) = .001·√7/8
    assert stats.std.item() == pytest.approx(0.001 * math.sqrt(7) / 8, rel=1e-9)
    # Squares near 1e14 are held to 1/64, far too coarse for a variance of .36.
    big = group_stats(rewards([1e7 + 0.1, 1e7 + 1.3]), ddof=0)
    assert big.std.item() == pytest.approx(0.6, rel=1e-7)


@given(batch=batches())
def test_equals_reference(batch: Batch) -> None:
    rollouts = batch.rollouts()
    for ddof in (0, 1):
        stats = group_stats(rollouts, ddof)
        base = grpo_base(rollouts, ddof, 1e-3)
        for i, y in enumerate(batch.responses):
            group = int(rollouts.group[i])
            alive = reference.live(batch.responses, y)
            assert bool(live_rows(rollouts, stats)[i]) == bool(base.live[i]) == alive
            if alive:
                mean = reference.mean_of(batch.responses, y.group)
                std = reference.deviation_of(batch.responses, y.group, ddof)
                assert stats.mean[group].item() == pytest.approx(mean, abs=1e-12)
                assert stats.std[group].item() == pytest.approx(std, abs=1e-12)
                assert base.scale[i].item() == pytest.approx(std + 1e-3, abs=1e-12)
            else:
                assert base.advantage[i] == 0 and base.scale[i] == 1


@given(values=st.lists(st.floats(-3, 3), min_size=2, max_size=5))
def test_row_order_changes_no_bit(values: list[float]) -> None:
    stats = group_stats(rewards(list(values)))
    for shuffled in itertools.permutations(values):
        again = group_stats(rewards(list(shuffled)))
        assert torch.equal(again.mean, stats.mean) and torch.equal(again.std, stats.std)


def test_interleaved_groups() -> None:
    rollouts = Rollouts.from_lists([[1]] * 4, ["a", "b", "a", "b"], [1.0, 0.5, 0.0, 0.5])
    assert group_stats(rollouts).mean.tolist() == [0.5, 0.5]
    assert grpo_base(rollouts, epsilon=0).advantage.tolist() == pytest.approx([0.5**0.5, 0, -(0.5**0.5), 0])


def test_a_host_base_is_checked() -> None:
    base = grpo_base(rewards([1, 0], [1, 1]))
    live = base.live
    fine = Base(base.advantage, torch.where(live, base.mean, torch.nan), base.scale * live, live)
    assert fine.scale.tolist()[2:] == [0, 0], "a collapsed group may have no scale"
    for field, value in (
        ("advantage", torch.tensor([1.0, torch.nan, 0.0, 0.0])),
        ("mean", torch.tensor([torch.inf, 0.0, 0.0, 0.0])),
        ("scale", torch.tensor([1.0, 0.0, 1.0, 1.0])),
        ("scale", torch.tensor([1.0, -1.0, 1.0, 1.0])),
    ):
        with pytest.raises(InputError, match=rf"base\.{field} of row"):
            replace(base, **{field: value})
    with pytest.raises(InputError, match=r"base\.mean: got shape \(3,\)"):
        Base(base.advantage, base.mean[:3], base.scale, live)
