"""Base estimators that give each response one advantage: GRPO, Dr.GRPO, RLOO, OPO.

Shapes: _R responses, _G groups.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch

from apportion.credit.stages import BaseEstimator
from apportion.groups import Base, centred, group_sum
from apportion.rollouts import Rollouts


class GRPO(BaseEstimator):
    """GRPO [paper, arXiv 2402.03300]: A_i = (r_i − μ)/(σ + ε), broadcast. The host's base as it came."""

    name: ClassVar[str] = "grpo"
    paper: ClassVar[str] = "GRPO, arXiv 2402.03300"
    marks: ClassVar[str] = "[paper]"

    def rebase(self, rollouts: Rollouts, base: Base) -> Base:
        return base


class DrGRPO(BaseEstimator):
    """Dr.GRPO [paper, arXiv 2503.20783]: A_i = r_i − μ, broadcast; no division by σ."""

    name: ClassVar[str] = "dr_grpo"
    paper: ClassVar[str] = "Dr.GRPO, arXiv 2503.20783"
    marks: ClassVar[str] = "[paper]"

    def rebase(self, rollouts: Rollouts, base: Base) -> Base:
        return replace(base, advantage=centred(rollouts, base).float(), scale=torch.ones_like(base.scale))


class RLOO(BaseEstimator):
    """RLOO [paper, arXiv 2402.14740]: r_i minus the mean of the others, which is n/(n−1)·(r_i − μ).

    n counts the scored members of the group, so an abstained sibling is no zero.
    """

    name: ClassVar[str] = "rloo"
    paper: ClassVar[str] = "RLOO, arXiv 2402.14740"
    marks: ClassVar[str] = "[paper]"

    def rebase(self, rollouts: Rollouts, base: Base) -> Base:
        n = group_sum(rollouts, rollouts.scored.double())
        factor = torch.where(base.live, n / (n - 1).clamp(min=1), 1.0)
        return replace(base, advantage=(centred(rollouts, base) * factor).float(), scale=1 / factor)


class OPO(BaseEstimator):
    """OPO [paper, arXiv 2505.23585]: A_i = r_i − Σ len·r / Σ len over the group.

    The length of a response is its number of trainable tokens, so that Σ over the group's tokens of A is 0.
    """

    name: ClassVar[str] = "opo"
    paper: ClassVar[str] = "OPO, arXiv 2505.23585"
    marks: ClassVar[str] = "[paper]"

    def rebase(self, rollouts: Rollouts, base: Base) -> Base:
        length = rollouts.trainable * rollouts.scored
        reward = torch.where(rollouts.scored, rollouts.reward.double(), 0.0)
        baseline = group_sum(rollouts, length * reward) / group_sum(rollouts, length).clamp(min=1)
        advantage = torch.where(base.live, reward - baseline, 0.0).float()
        return replace(base, advantage=advantage, mean=baseline, scale=torch.ones_like(base.scale))
