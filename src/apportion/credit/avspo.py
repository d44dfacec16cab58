"""AVSPO: virtual rewards give collapsed groups a mean and a deviation when too many groups collapse.

Shapes: _R responses, _G groups, _V virtual rewards of all groups.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from pydantic import Field
from torch import Tensor

from apportion.credit.stages import BaseEstimator
from apportion.groups import Base, group_stats
from apportion.rollouts import Rollouts

# Deviation below which a group's rewards are equal [note], and height below which its highest is 0.
_EQUAL = 1e-6
# Taken off before rounding up, because 7 · √(1/49) may come out above 1.
_HAIR = 1e-9


@dataclass(frozen=True)
class _Repair:
    """What is done about the groups of a batch.

    Attributes:
        virtual: [G] virtual rewards added to each group (K), 0 where it keeps its base.
        mean, scale: [G] float64 over real and virtual rewards, the divisor with ε, in the unit of the rewards.
    """

    virtual: Tensor
    mean: Tensor
    scale: Tensor


class AVSPO(BaseEstimator):
    """AVSPO: where the share of collapsed groups (ACR) exceeds a threshold, virtual rewards repair them.

    ACR is taken over the groups of the whole batch with at least two rewards; a group is collapsed where their
    population deviation is below 1e-6 [note] or they are equal by law 3, which is the wider of the two for
    rewards above 100. Each collapsed group of G rewards gets K = max(1, min(G, ⌈G·√ACR⌉)) virtual ones,
    k = 1 … K: r_obs·(1 − k/(K+1)) where its highest reward r_obs is above 0, else .1·(K−k+1)/K. Mean and
    deviation are taken over both; only real responses get an advantage. The others keep the base they were given
    [note]. No probe is spent on a repaired group: `live` stays False.

    `after` moves the threshold: τ ← τ + rate·sign(ΔJ)(ACR − τ), J the mean reward of the batch, nothing at the
    first step [note], clipped to 0 … 1 [ours]. Both are settings, so that they are saved with the method.

    [ours]: a highest reward up to 1e-6 counts as 0; where any reward of the batch is negative, rewards count as
    (r − min)/(max − min) of the batch, 0 where all are equal; mean and scale are given in the rewards' own unit; σ
    is the population's unless `ddof` says otherwise, and ε = 1e-8.

    Source: AVSPO, arXiv 2605.21125. Numbers [note], G = 8: ACR .25 gives K = 4 and |A| = .6202; .5: 6, .7276;
    .75: 7, .7718; 1: 8, .8115; plus where all are right, minus where all are wrong.
    """

    name: ClassVar[str] = "avspo"
    repairs: ClassVar[bool] = True
    learns_when_collapsed: ClassVar[bool] = True
    paper: ClassVar[str] = "AVSPO, arXiv 2605.21125"
    marks: ClassVar[str] = "[note]; negative rewards mapped to 0 to 1, threshold clipped [ours]"

    ddof: int = Field(0, ge=0, le=1, description="σ: 1 sample, 0 population")
    epsilon: float = Field(1e-8, ge=0, allow_inf_nan=False, description="added to σ")
    threshold: float = Field(0.5, ge=0, le=1, description="share of collapsed groups above which they are repaired")
    rate: float = Field(0.01, ge=0, le=1, description="step of the threshold towards the share after each batch")
    last_mean: float | None = Field(None, allow_inf_nan=False, description="state: mean reward of the batch before")

    @property
    def batch_wide(self) -> bool:
        return True

    def rebase(self, rollouts: Rollouts, base: Base) -> Base:
        repair = self._repair(rollouts)
        mean, scale = repair.mean[rollouts.group], repair.scale[rollouts.group]
        repaired = rollouts.scored & (repair.virtual > 0)[rollouts.group]
        advantage = (rollouts.reward.double() - mean) / scale
        return Base(
            torch.where(repaired, advantage.float(), base.advantage),
            torch.where(repaired, mean, base.mean),
            torch.where(repaired, scale, base.scale),
            base.live & ~repaired,
        )

    def counts(self, rollouts: Rollouts) -> Mapping[str, int]:
        virtual = self._repair(rollouts).virtual
        return {"repaired_groups": int((virtual > 0).sum()), "virtual_rewards": int(virtual.sum())}

    def after(self, rollouts: Rollouts) -> Self:
        rewards = rollouts.reward[rollouts.scored].tolist()
        if not rewards:
            return self
        # Rounded once, so that the order of rows cannot give an unchanged mean a sign.
        mean = math.fsum(rewards) / len(rewards)
        change = 0.0 if self.last_mean is None else mean - self.last_mean
        step = self.rate * ((change > 0) - (change < 0)) * (collapse_rate(rollouts) - self.threshold)
        threshold = min(1.0, max(0.0, self.threshold + step))
        return self.model_copy(update={"threshold": threshold, "last_mean": mean})

    def _repair(self, rollouts: Rollouts) -> _Repair:
        count, acr = group_stats(rollouts).count, collapse_rate(rollouts)
        # From 1 to G as it is, because ACR is above 0 and at most 1 where it exceeds the threshold.
        wanted = torch.ceil(count * acr**0.5 - _HAIR)
        virtual = torch.where(collapsed(rollouts) & (acr > self.threshold), wanted, 0.0).long()
        low, span = _range(rollouts)
        real, group = (rollouts.reward.double()[rollouts.scored] - low) / span, rollouts.group[rollouts.scored]
        highest = torch.zeros_like(count).scatter_reduce_(0, group, real, "amax", include_self=False)
        owner = torch.repeat_interleave(torch.arange(rollouts.groups), virtual)
        k = torch.arange(len(owner)) - (virtual.cumsum(0) - virtual)[owner] + 1.0
        top, size = highest[owner], virtual.double()[owner]
        made = torch.where(top > _EQUAL, top * (1 - k / (size + 1)), 0.1 * (size - k + 1) / size)

        values, member = torch.cat([real, made]), torch.cat([group, owner])
        both = count + virtual
        mean = torch.zeros_like(count).index_add_(0, member, values) / both.clamp(min=1)
        squares = torch.zeros_like(count).index_add_(0, member, (values - mean[member]) ** 2)
        deviation = (squares / (both - self.ddof).clamp(min=1)).sqrt()
        return _Repair(virtual, low + span * mean, span * (deviation + self.epsilon))


def collapse_rate(rollouts: Rollouts) -> float:
    """ACR: the share of groups with at least two rewards in which they are equal; 0 where there is no such group."""
    compared = group_stats(rollouts).count >= 2
    return float(collapsed(rollouts).sum() / compared.sum().clamp(min=1))


def collapsed(rollouts: Rollouts) -> Tensor:
    """[G] bool: at least two rewards, all equal. `group_stats` has a deviation of exactly 0 by law 3."""
    stats = group_stats(rollouts, ddof=0)
    return (stats.count >= 2) & (stats.std < _EQUAL)


def _range(rollouts: Rollouts) -> tuple[Tensor, Tensor]:
    """What is taken off every reward and what it is divided by: 0 and 1 unless one is negative."""
    reward = rollouts.reward[rollouts.scored].double()
    low = torch.cat([reward, reward.new_zeros(1)]).min()
    if low == 0:
        return low, torch.ones_like(low)
    span = reward.max() - low
    return low, torch.where(span > 0, span, 1.0)
