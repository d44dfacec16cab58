"""PRPO: tokens that hang on what the response was shown, and not on its details, get more of the advantage.

Shapes: _N flat tokens, _R responses.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from apportion.credit.method import CreditMethod, Need
from apportion.credit.record import Credit
from apportion.groups import Base
from apportion.measure.evidence import Evidence
from apportion.measure.plan import DivergenceJob
from apportion.rollouts import Rollouts, keep_


class PRPO(CreditMethod):
    """PRPO: tokens that hang on what was shown, and are stable under its disturbance, get more of the advantage.

    arXiv 2606.08708 [ours: only the abstract could be read]. What was shown is an image, or a marked span of the
    prompt; the host knows which. The importance of a token is KL(p ‖ p with what was shown blanked) · exp(−KL(p ‖ p
    with it disturbed)). With n the min-max of log1p of it over the response's trainable tokens (range 1 where all are
    equal), w = 1 where n < threshold, else 1 + β(n − threshold)/(1 − threshold). Then w ← w·T/Σw over the T trainable
    tokens, and A_t = A_i·w_t.

    Numbers: n = (0, .4, .7, 1), β = 2, threshold = .4: w = (1, 1, 2, 3), times 4/7 (.5714, .5714, 1.1429, 1.7143).
    """

    name: ClassVar[str] = "prpo"
    needs: ClassVar[frozenset[Need]] = frozenset({"divergence"})
    cost: ClassVar[str] = "three forward passes a response"
    paper: ClassVar[str] = "PRPO, arXiv 2606.08708"
    marks: ClassVar[str] = "[ours: only the abstract could be read]"

    beta: float = Field(2.0, ge=0, allow_inf_nan=False, description="boost of the token that hangs on it most")
    threshold: float = Field(0.4, ge=0, lt=1, description="scaled importance from which a token is boosted (τ)")
    disturb: float = Field(0.3, gt=0, le=1, description="share of the shown tokens that is replaced to disturb")
    seed: int = Field(0, ge=0, description="of the disturbance")

    def plan(self, rollouts: Rollouts, base: Base) -> list[DivergenceJob]:
        return [DivergenceJob(row, self.disturb, self.seed) for row in base.live.nonzero()[:, 0].tolist()]

    def assign(self, rollouts: Rollouts, evidence: Evidence, base: Base) -> Credit:
        measured = evidence.importance
        self.demand(
            "evidence.importance", None if measured is None else measured.given, base.live,
            "measure what `apportion plan --method prpo` lists",
        )  # fmt: skip
        weight = None
        if measured is not None:
            use = rollouts.mask & rollouts.spread(measured.given)
            n = row_minmax_(rollouts, torch.log1p(measured.value), use)
            boost = n.sub_(self.threshold).clamp_(min=0).mul_(self.beta / (1 - self.threshold))
            weight = keep_mass_(rollouts, boost.add_(1), use)
        return Credit.form(
            rollouts, base.advantage, weight=weight,
            method=self.name, settings=self.settings, conserves=self.keeps,
        )  # fmt: skip


def keep_mass_(rollouts: Rollouts, weight: Tensor, use: Tensor) -> Tensor:
    """[N] weights times the number of the response's tokens in `use` over their sum, which is above 0; 1 elsewhere.

    Writes into `weight`.
    """
    total = rollouts.row_sum(keep_(weight, use))
    return keep_(weight.mul_(rollouts.spread(rollouts.row_count(use) / total)), use, 1.0)


def row_minmax_(rollouts: Rollouts, values: Tensor, use: Tensor) -> Tensor:
    """[N] (x − min)/(max − min) over the response's tokens in `use`, −∞ elsewhere; the range is 1 where all are equal.

    Writes into `values`.
    """
    low = rollouts.row_min(keep_(values, use, torch.inf))
    high = rollouts.row_max(keep_(values, use, -torch.inf))
    return values.sub_(rollouts.spread(low)).div_(rollouts.spread(torch.where(high > low, high - low, 1.0)))
