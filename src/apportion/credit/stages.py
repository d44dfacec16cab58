"""The two kinds of method that stand before and after the one that spreads credit over tokens.

Shapes: _N flat tokens, _R responses.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor

from apportion.credit.method import CreditMethod, Stage
from apportion.credit.record import Conserves, Credit
from apportion.groups import Base
from apportion.measure.evidence import Evidence
from apportion.rollouts import Rollouts, keep_


class BaseEstimator(CreditMethod):
    """Gives each response one advantage, which by itself is every token's.

    Class variables:
        repairs: whether it changes only groups that no comparison teaches anything and keeps the base it was given
            for the others, so that it may follow another estimator.
    """

    stage: ClassVar[Stage] = "base"
    per_token: ClassVar[bool] = False
    repairs: ClassVar[bool] = False

    @abstractmethod
    def rebase(self, rollouts: Rollouts, base: Base) -> Base:
        """The base with this estimator's advantage, and the mean and divisor by which values count beside it."""

    def counts(self, rollouts: Rollouts) -> Mapping[str, int]:
        """Name → number of things that happened in `rebase`, for the record; none for most estimators."""
        return {}

    def assign(self, rollouts: Rollouts, evidence: Evidence, base: Base) -> Credit:
        return Credit.form(
            rollouts, self.rebase(rollouts, base).advantage, counts=self.counts(rollouts),
            method=self.name, settings=self.settings, conserves=self.keeps,
        )  # fmt: skip


class Reweighting(CreditMethod):
    """Multiplies each token's advantage by a weight; by itself it weighs the base."""

    stage: ClassVar[Stage] = "reweight"
    conserves: ClassVar[Conserves] = "none"

    @abstractmethod
    def reweigh(self, rollouts: Rollouts, advantage: Tensor) -> Tensor:
        """[N] float64 weights for [N] float64 advantages, which are 0 on masked tokens."""

    def invariants(self, rollouts: Rollouts, weight: Tensor) -> Mapping[str, float]:
        """Name → measured error of what [N] weights made by `reweigh` promise; nothing for most methods."""
        return {}

    def assign(self, rollouts: Rollouts, evidence: Evidence, base: Base) -> Credit:
        spread = keep_(rollouts.spread(base.advantage.detach().double()), rollouts.mask)
        weight = self.reweigh(rollouts, spread)
        return Credit.form(
            rollouts, base.advantage, weight=weight, invariants=self.invariants(rollouts, weight),
            method=self.name, settings=self.settings, conserves=self.keeps,
        )  # fmt: skip
