"""Group statistics: mean, standard deviation and the base advantage that credit is spread from.

Shapes: _R responses, _G groups (prompts).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from apportion.errors import InputError
from apportion.rollouts import Rollouts

# Rewards this close, relative to their size, are equal: float32 cannot hold .9, and an epsilon must never be
# what a group's residue is divided by (methods.md, law 3).
_EQUAL = 1e-8


@dataclass(frozen=True)
class GroupStats:
    """Statistics of each group over its scored members (see `Rollouts.scored`), in float64.

    Attributes:
        mean: [G], 0 for a group without a scored member.
        std: [G], exactly 0 where `collapsed`.
        count: [G] scored members.
        collapsed: [G] bool: all rewards equal, or fewer than two scored members. Nothing can be learnt from
            comparing its members, and no probe is spent on it.
    """

    mean: Tensor
    std: Tensor
    count: Tensor
    collapsed: Tensor


def group_stats(rollouts: Rollouts, ddof: int = 1) -> GroupStats:
    """Statistics of each group's rewards over its scored members.

    Args:
        ddof: 1 divides by n−1 (sample; TRL, verl), 0 by n (population; SPO, AVSPO).
    """
    reward, group = rollouts.reward[rollouts.scored].double(), rollouts.group[rollouts.scored]
    return stats_by(reward, group, rollouts.groups, ddof)


def stats_by(values: Tensor, owner: Tensor, owners: int, ddof: int) -> GroupStats:
    """Mean and standard deviation of each owner's values, two-pass so that no float residue is left.

    Values are added up in rising order, so that their own order cannot change a bit.

    Args:
        values: [K] float64. owner: [K] int64 from 0 to `owners` − 1.
    """
    order = np.argsort(values.numpy())
    x, of = values.numpy()[order], owner.numpy()[order]

    def total(terms: np.ndarray) -> Tensor:
        # Without a single value numpy counts in whole numbers.
        return torch.from_numpy(np.bincount(of, terms, owners)).double()

    count = total(np.ones(len(x)))
    mean = total(x) / count.clamp(min=1)
    low, high = np.zeros((2, owners))
    # Of several values for one place the last one stays: the largest going up, the smallest going down.
    high[of], low[of[::-1]] = x, x[::-1]
    collapsed = ~differ(torch.from_numpy(low), torch.from_numpy(high)) | (count < 2)
    variance = total((x - mean.numpy()[of]) ** 2) / (count - ddof).clamp(min=1)
    return GroupStats(mean, variance.sqrt().masked_fill(collapsed, 0.0), count, collapsed)


def differ(a: Tensor, b: Tensor) -> Tensor:
    """[K] bool: whether values are further apart than law 3's tolerance, relative to b where |b| is above 1.

    NaN differs from nothing.
    """
    return (a - b).abs() > _EQUAL * b.abs().clamp(min=1)


@dataclass(frozen=True)
class Base:
    """What the host (TRL, verl, our own loop) gives credit to spread. Credit never recomputes a deviation.

    Attributes:
        advantage: [R] float32, the host's own advantage of each response; 0 where it has none.
        mean: [R] float64, μ: the mean reward of the response's group.
        scale: [R] float64, what the host divided r − μ by (σ + ε, or 1 where it does not divide).
        live: [R] bool, False where the response is unscored or its group collapsed: no probe is spent there.

    Raises:
        InputError: fields of different shapes, an advantage that is not finite, or, for a live response, a
            mean that is not finite or a scale that is not above 0.
    """

    advantage: Tensor
    mean: Tensor
    scale: Tensor
    live: Tensor

    def __post_init__(self) -> None:
        shape = self.advantage.shape
        for field, value in (("mean", self.mean), ("scale", self.scale), ("live", self.live)):
            if value.shape != shape:
                raise InputError(f"base.{field}", f"shape {tuple(value.shape)}", f"shape {tuple(shape)}")
        for field, good in (
            ("advantage", torch.isfinite(self.advantage)),
            ("mean", torch.isfinite(self.mean) | ~self.live),
            ("scale", torch.isfinite(self.scale) & (self.scale > 0) | ~self.live),
        ):
            if not good.all():
                row = int((~good).nonzero()[0])
                wanted = "a finite number" if field != "scale" else "a finite number above 0"
                raise InputError(f"base.{field} of row {row}", float(getattr(self, field)[row]), wanted)


def compared_rows(rollouts: Rollouts) -> Tensor:
    """[R] bool: scored, and not alone in its group. A group of one gets nothing and costs nothing (law 4)."""
    return rollouts.scored & (group_stats(rollouts).count >= 2)[rollouts.group]


def live_rows(rollouts: Rollouts, stats: GroupStats) -> Tensor:
    """[R] bool: scored, and in a group whose rewards differ."""
    return rollouts.scored & ~stats.collapsed[rollouts.group]


def grpo_base(rollouts: Rollouts, ddof: int = 1, epsilon: float = 1e-4) -> Base:
    """A_i = (r_i − μ)/(σ + ε), 0 where the group is collapsed or the response unscored.

    Source: GRPO [paper]; conventions of methods.md, law 7. r = [1,0,0,0] gives 1.4997 and −0.4999 with the
    defaults (TRL), 1.73205 and −0.57735 with ddof 0 and ε 1e-8 (SPO).
    """
    stats = group_stats(rollouts, ddof)
    live = live_rows(rollouts, stats)
    mean = stats.mean[rollouts.group]
    scale = torch.where(live, stats.std[rollouts.group] + epsilon, 1.0)
    advantage = torch.where(live, (rollouts.reward.double() - mean) / scale, 0.0)
    return Base(advantage.float(), mean, scale, live)


def centred(rollouts: Rollouts, base: Base) -> Tensor:
    """[R] r − μ, exactly 0 where there is nothing to compare with."""
    return torch.where(base.live, rollouts.reward.double() - base.mean, 0.0)


def group_sum(rollouts: Rollouts, values: Tensor) -> Tensor:
    """[R] the sum of [R] values over each response's group."""
    total = values.new_zeros(rollouts.groups).index_add_(0, rollouts.group, values)
    return total[rollouts.group]
