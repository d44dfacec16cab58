"""CW-GRPO: tokens whose log-probability moves most with the advantage weigh less.

Shapes: _N flat tokens, _G scopes (prompt groups, or the batch).
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
from apportion.rollouts import Rollouts


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
        use, scope, scopes = self._scope(rollouts)
        logprob, spread = rollouts.old_logprob.double()[use], advantage[use]
        c = _deviations(logprob, scope, scopes) * _deviations(spread, scope, scopes)
        deviation = _mean(_deviations(c, scope, scopes) ** 2, scope, scopes).sqrt()
        flat = deviation < 1e-12
        for values in (logprob, spread, c):
            flat |= _equal(values, scope, scopes)
        exponent = c**2 / (2 * deviation.masked_fill(flat, 1.0)[scope] ** 2)
        raw = torch.exp(_extreme(exponent, scope, scopes, "amin")[scope] - exponent)
        weight = torch.ones_like(advantage)
        weight[use] = torch.where(flat[scope], 1.0, raw / _mean(raw, scope, scopes)[scope])
        return weight

    def invariants(self, rollouts: Rollouts, weight: Tensor) -> Mapping[str, float]:
        """`mean_weight`: the largest distance of a scope's mean weight from 1."""
        use, scope, scopes = self._scope(rollouts)
        gap = _mean(weight[use] - 1, scope, scopes).abs()
        return {"mean_weight": float(gap.max()) if scopes else 0.0}

    def _scope(self, rollouts: Rollouts) -> tuple[Tensor, Tensor, int]:
        """[N] bool, the tokens that count; the scope of each of those; the number of scopes."""
        use = rollouts.mask & rollouts.scored[rollouts.row]
        if self.scope == "batch":
            return use, torch.zeros_like(rollouts.row[use]), 1
        return use, rollouts.group[rollouts.row[use]], rollouts.groups


def _mean(values: Tensor, scope: Tensor, scopes: int) -> Tensor:
    """[G] means over each scope; 0 for one without tokens."""
    total = values.new_zeros(scopes).index_add_(0, scope, values)
    return total / torch.bincount(scope, minlength=scopes).clamp(min=1)


def _deviations(values: Tensor, scope: Tensor, scopes: int) -> Tensor:
    """Each value's distance from the mean of its scope."""
    return values - _mean(values, scope, scopes)[scope]


def _equal(values: Tensor, scope: Tensor, scopes: int) -> Tensor:
    """[G] bool: a scope's values are equal to 1e-8 of the largest. Their mean may be off by what a sum rounds."""
    largest = _extreme(values.abs(), scope, scopes, "amax")
    return _extreme(values, scope, scopes, "amax") - _extreme(values, scope, scopes, "amin") <= 1e-8 * largest


def _extreme(values: Tensor, scope: Tensor, scopes: int, how: Literal["amax", "amin"]) -> Tensor:
    """[G] the largest or smallest value of each scope; 0 for one without tokens."""
    return values.new_zeros(scopes).scatter_reduce_(0, scope, values, how, include_self=False)
