"""REINFORCE++ and its group-baseline form: advantages whitened over the whole batch's tokens.

Shapes: _N flat tokens, _R responses.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from apportion.credit.method import CreditMethod
from apportion.credit.record import Conserves, Credit, nothing
from apportion.groups import Base, centred
from apportion.measure.evidence import Evidence
from apportion.rollouts import Rollouts, keep, keep_


def whiten(values: Tensor, tokens: Tensor, ddof: int, epsilon: float) -> Tensor:
    """(x − mean)/(std + ε) over tokens, 0 where a value stands for none.

    With a single token there is no deviation to divide by: its value is returned as it came. With values that are
    all equal the result is exactly 0; with no token it is all 0.

    Args:
        values: [K] float64.
        tokens: [K] how many tokens each value stands for; True and False where it is one token's.
        ddof: 1 for the sample deviation (verl), 0 for the population's.
    """
    use = tokens > 0
    chosen = use.numpy()
    x, count = values.numpy()[chosen], float(tokens.numpy().sum())
    if count < 2:
        return keep(values, use)
    low, high = x.min(), x.max()
    if high - low <= 1e-8 * max(1.0, abs(low), abs(high)):
        return torch.zeros_like(values)
    times = 1 if tokens.dtype == torch.bool else tokens.numpy()[chosen]
    mean = float((x * times).sum() / count)
    x -= mean
    x *= x
    x *= times
    deviation = float(x.sum() / (count - ddof)) ** 0.5
    return keep_((values - mean).div_(deviation + epsilon), use)


class _Whitened(CreditMethod):
    """What the two have in common: token values whitened over the batch are the advantages."""

    conserves: ClassVar[Conserves] = "none"
    uses_base: ClassVar[bool] = False
    marks: ClassVar[str] = "[paper]; ε and the sample deviation after verl, ε added to the deviation [ours]"

    epsilon: float = Field(1e-8, ge=0, allow_inf_nan=False, description="added to the batch's deviation")

    @property
    def batch_wide(self) -> bool:
        return True

    def _credit(self, rollouts: Rollouts, residual: Tensor) -> Credit:
        return Credit.form(
            rollouts, rollouts.row_mean(residual), weight=nothing(residual), residual=residual,
            method=self.name, settings=self.settings, conserves=self.keeps,
        )  # fmt: skip


class ReinforcePP(_Whitened):
    """REINFORCE++ [paper, arXiv 2501.03262]: discounted return of each token, whitened over the batch.

    R_t = γ^(number of trainable tokens after t)·r_i, then `whiten` over the batch's trainable tokens. It uses
    no group statistic: a prompt with one response is an ordinary prompt here. The KL term is the trainer's.
    """

    name: ClassVar[str] = "reinforce_pp"
    grouped: ClassVar[bool] = False
    learns_when_collapsed: ClassVar[bool] = True
    paper: ClassVar[str] = "REINFORCE++, arXiv 2501.03262"

    gamma: float = Field(1.0, ge=0, le=1, description="discount a token")

    def assign(self, rollouts: Rollouts, evidence: Evidence, base: Base) -> Credit:
        reward = torch.where(rollouts.scored, rollouts.reward.double(), 0.0)
        if self.gamma == 1:
            white = whiten(reward, rollouts.trainable * rollouts.scored, self.ddof, self.epsilon)
            return self._credit(rollouts, rollouts.spread(white))
        after = rollouts.spread(rollouts.trainable) - rollouts.running_sum(rollouts.mask.double())
        returns = rollouts.spread(reward).mul_(self.gamma**after)
        return self._credit(rollouts, whiten(returns, rollouts.counted, self.ddof, self.epsilon))


class ReinforcePPBaseline(_Whitened):
    """REINFORCE++-baseline [paper, arXiv 2501.03262]: r_i − μ on every token, whitened over the batch.

    Responses of a collapsed group count in the batch's statistics (as in verl) but get exactly 0.
    """

    name: ClassVar[str] = "reinforce_pp_baseline"
    paper: ClassVar[str] = "REINFORCE++-baseline, arXiv 2501.03262"

    def assign(self, rollouts: Rollouts, evidence: Evidence, base: Base) -> Credit:
        white = whiten(centred(rollouts, base), rollouts.trainable * rollouts.scored, self.ddof, self.epsilon)
        return self._credit(rollouts, rollouts.spread(torch.where(base.live, white, 0.0)))
