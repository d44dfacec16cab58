"""The two kinds of method that stand before and after the one that spreads credit over tokens.

Shapes: _N flat tokens, _R responses.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from apportion.credit.method import CreditMethod, Stage
from apportion.credit.record import Conserves, Credit
from apportion.groups import Base
from apportion.measure.evidence import Evidence
from apportion.rollouts import Rollouts


class BaseEstimator(CreditMethod):
    """Gives each response one advantage, which by itself is every token's."""

    stage: ClassVar[Stage] = "base"
    per_token: ClassVar[bool] = False

    @abstractmethod
    def rebase(self, rollouts: Rollouts, base: Base) -> Base:
        """The base with this estimator's advantage, and the mean and divisor by which values count beside it."""

    def assign(self, rollouts: Rollouts, evidence: Evidence, base: Base) -> Credit:
        return Credit.form(
            rollouts, self.rebase(rollouts, base).advantage,
            method=self.name, settings=self.settings, conserves=self.keeps,
        )  # fmt: skip


class Reweighting(CreditMethod):
    """Multiplies each token's advantage by a weight; by itself it weighs the base."""

    stage: ClassVar[Stage] = "reweight"
    conserves: ClassVar[Conserves] = "none"

    @abstractmethod
    def reweigh(self, rollouts: Rollouts, advantage: Tensor) -> Tensor:
        """[N] float64 weights for [N] float64 advantages, which are 0 on masked tokens."""

    def assign(self, rollouts: Rollouts, evidence: Evidence, base: Base) -> Credit:
        spread = torch.where(rollouts.mask, base.advantage.detach().double()[rollouts.row], 0.0)
        return Credit.form(
            rollouts, base.advantage, weight=self.reweigh(rollouts, spread),
            method=self.name, settings=self.settings, conserves=self.keeps,
        )  # fmt: skip
