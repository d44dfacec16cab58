"""CW-GRPO: tokens whose log-probability moves most with the advantage weigh less.

Shapes: _N flat tokens, _R responses.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from apportion.credit.method import Need
from apportion.credit.stages import Reweighting
from apportion.errors import InputError
from apportion.rollouts import Rollouts, keep, keep_


class CWGRPO(Reweighting):
    """CW-GRPO: A_t = w_t·A_i with w_t = exp(−c_t²/(2σ_c²)), c_t the token's part of the covariance with A.

    c_t = (log π_t − mean log π)(A_t − mean A) over the tokens of the scope, σ_c the population deviation of c, which
    leaves no hyper-parameter; then w ← w·N/Σw over the scope's N tokens; σ_c < 1e-12: w = 1 [note]. The scope is the
    prompt group [ours], or the batch.

    [ours]: w = 1 too where the scope's log π, its A or its c are all equal to 1e-8 of their size, as rounding would
    make the weights there; the tokens of a scope are the trainable ones of responses with a reward; after another
    method A is that method's token advantage. Weights are computed relative to the scope's largest, which the last
    step cancels, so that none is lost below float64.

    Source: covariance-weighted GRPO, arXiv 2605.11538. Numbers [note]: log π = (−.1, −2, −.05, −.3, −1.5, −.2),
    A = (1, 1, 1, −1, −1, −1): c = (.5917, −1.3083, .6417, −.3917, .8083, −.4917), σ_c = .7658,
    w = (1.1292, .3536, 1.0714, 1.3354, .8719, 1.2385).
    """

    name: ClassVar[str] = "cw_grpo"
    needs: ClassVar[frozenset[Need]] = frozenset({"old_logprob"})
    paper: ClassVar[str] = "CW-GRPO, arXiv 2605.11538"
    marks: ClassVar[str] = "[note]; scope and bounds of rounding [ours]"

    scope: Literal["group", "batch"] = Field("group", description="tokens that are compared and share their weight")

    @property
    def batch_wide(self) -> bool:
        return self.scope == "batch"

    def reweigh(self, rollouts: Rollouts, advantage: Tensor) -> Tensor:
        if rollouts.old_logprob is None:
            raise InputError(
                f"{self.name}: old_logprob", "none", "one value a token", "give `old_logprob` for every row"
            )
        scope = _Scope(rollouts, self.scope)
        logprob = rollouts.old_logprob.double()
        c = scope.deviations(logprob).mul_(scope.deviations(advantage))
        deviation = scope.mean(scope.deviations(c).square_()).sqrt()
        flat = (deviation < 1e-12) | scope.equal(logprob) | scope.equal(advantage) | scope.equal(c)
        exponent = c.square_().div_(rollouts.spread(2 * deviation.masked_fill(flat, 1.0) ** 2))
        least = scope.least(exponent)
        nearer = exponent.sub_(rollouts.spread(torch.where(torch.isfinite(least), least, 0.0))).neg_()
        weight = nearer.exp_()
        weight /= rollouts.spread(scope.mean(weight))
        return keep_(weight, scope.use & ~rollouts.spread(flat), 1.0)

    def invariants(self, rollouts: Rollouts, weight: Tensor) -> Mapping[str, float]:
        """`mean_weight`: the largest distance of a scope's mean weight from 1."""
        gap = _Scope(rollouts, self.scope).mean(weight - 1).abs()
        return {"mean_weight": float(gap.max()) if len(gap) else 0.0}


class _Scope:
    """Statistics over the tokens that are compared: a scope's, as the [R] value of each response in it.

    Attributes:
        use: [N] bool, the tokens that count.
    """

    def __init__(self, rollouts: Rollouts, scope: Literal["group", "batch"]) -> None:
        self.use, self._rollouts = rollouts.counted, rollouts
        self._group = rollouts.group if scope == "group" else torch.zeros_like(rollouts.group)
        self._count = self._total(rollouts.row_count(self.use)).clamp(min=1)

    def _total(self, values_R: Tensor) -> Tensor:
        total = values_R.new_zeros(len(values_R)).index_add_(0, self._group, values_R)
        return total[self._group]

    def mean(self, values: Tensor) -> Tensor:
        return self._total(self._rollouts.row_sum(keep(values, self.use))) / self._count

    def deviations(self, values: Tensor) -> Tensor:
        """[N] each value's distance from the mean of its scope; no number that means anything where none counts."""
        return values - self._rollouts.spread(self.mean(values))

    def least(self, values: Tensor) -> Tensor:
        """The smallest value of the tokens that count; ∞ without one."""
        return self._lowest(self._rollouts.row_min(keep(values, self.use, torch.inf)))

    def _lowest(self, values_R: Tensor) -> Tensor:
        found = torch.full_like(values_R, torch.inf).scatter_reduce(0, self._group, values_R, "amin")
        return found[self._group]

    def equal(self, values: Tensor) -> Tensor:
        """Whether the values are equal to 1e-8 of the largest. Their mean may be off by what a sum rounds."""
        low, high = self.least(values), -self._lowest(-self._rollouts.row_max(keep(values, self.use, -torch.inf)))
        return high - low <= 1e-8 * torch.maximum(low.abs(), high.abs())
