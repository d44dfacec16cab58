"""Base estimators that give each response one advantage: GRPO, Dr.GRPO, RLOO, OPO.

Shapes: _R responses, _G groups.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from apportion.credit.method import CreditMethod
from apportion.credit.record import Credit
from apportion.groups import Base
from apportion.measure.plan import Evidence
from apportion.rollouts import Rollouts


class _Broadcast(CreditMethod):
    """A method that gives every token of a response the same advantage."""

    per_token: ClassVar[bool] = False

    def assign(self, rollouts: Rollouts, evidence: Evidence, base: Base) -> Credit:
        return Credit.form(
            rollouts, self.advantage(rollouts, base),
            method=self.name, settings=self.settings, conserves=self.conserves,
        )  # fmt: skip

    @abstractmethod
    def advantage(self, rollouts: Rollouts, base: Base) -> Tensor:
        """[R] advantage of each response."""


class GRPO(_Broadcast):
    """GRPO [paper, arXiv 2402.03300]: A_i = (r_i − μ)/(σ + ε), broadcast. The host's base as it came."""

    name: ClassVar[str] = "grpo"
    paper: ClassVar[str] = "GRPO, arXiv 2402.03300"
    marks: ClassVar[str] = "[paper]"

    def advantage(self, rollouts: Rollouts, base: Base) -> Tensor:
        return base.advantage


class DrGRPO(_Broadcast):
    """Dr.GRPO [paper, arXiv 2503.20783]: A_i = r_i − μ, broadcast; no division by σ."""

    name: ClassVar[str] = "dr_grpo"
    paper: ClassVar[str] = "Dr.GRPO, arXiv 2503.20783"
    marks: ClassVar[str] = "[paper]"

    def advantage(self, rollouts: Rollouts, base: Base) -> Tensor:
        return _centred(rollouts, base).float()


class RLOO(_Broadcast):
    """RLOO [paper, arXiv 2402.14740]: r_i minus the mean of the others, which is n/(n−1)·(r_i − μ).

    n counts the scored members of the group, so an abstained sibling is no zero.
    """

    name: ClassVar[str] = "rloo"
    paper: ClassVar[str] = "RLOO, arXiv 2402.14740"
    marks: ClassVar[str] = "[paper]"

    def advantage(self, rollouts: Rollouts, base: Base) -> Tensor:
        n = _group_sum(rollouts, rollouts.scored.double())
        return (_centred(rollouts, base) * n / (n - 1).clamp(min=1)).float()


class OPO(_Broadcast):
    """OPO [paper, arXiv 2505.23585]: A_i = r_i − Σ len·r / Σ len over the group.

    The length of a response is its number of trainable tokens, so that Σ over the group's tokens of A is 0.
    """

    name: ClassVar[str] = "opo"
    paper: ClassVar[str] = "OPO, arXiv 2505.23585"
    marks: ClassVar[str] = "[paper]"

    def advantage(self, rollouts: Rollouts, base: Base) -> Tensor:
        length = torch.where(rollouts.scored, rollouts.trainable, 0.0)
        reward = torch.where(rollouts.scored, rollouts.reward.double(), 0.0)
        baseline = _group_sum(rollouts, length * reward) / _group_sum(rollouts, length).clamp(min=1)
        return torch.where(base.live, reward - baseline, 0.0).float()


def _centred(rollouts: Rollouts, base: Base) -> Tensor:
    """[R] r − μ, exactly 0 where there is nothing to compare with."""
    return torch.where(base.live, rollouts.reward.double() - base.mean, 0.0)


def _group_sum(rollouts: Rollouts, values: Tensor) -> Tensor:
    """[R] the sum of [R] values over each response's group."""
    total = values.new_zeros(rollouts.groups).index_add_(0, rollouts.group, values)
    return total[rollouts.group]
