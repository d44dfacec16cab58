"""OAR: outcome-grounded advantage reshaping. Tokens that the answer hangs on get more of the advantage.

Shapes: _N flat tokens, _R responses, _K values, each with the response it belongs to.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from apportion.credit.answers import BOXED, AnswerPattern, stated_answers
from apportion.credit.method import CreditMethod, Need
from apportion.credit.record import Conserves, Credit
from apportion.groups import Base
from apportion.measure.evidence import Evidence
from apportion.measure.plan import Representation, SensitivityJob
from apportion.rollouts import Rollouts


class _OAR(CreditMethod):
    """What OAR-P and OAR-G have in common: where the answer is, and the bi-level reshaping [paper]."""

    needs: ClassVar[frozenset[Need]] = frozenset({"sensitivity"})
    paper: ClassVar[str] = "OAR, arXiv 2601.07408"
    marks: ClassVar[str] = "[paper]; answer_pattern, no measurement where the base is 0 [ours]"

    beta: float = Field(1.0, ge=0, allow_inf_nan=False, description="boost of the tokens above the quantile")
    quantile: float = Field(0.25, ge=0, le=1, description="share of a response's tokens that is held down (q)")
    floor: float = Field(0.1, ge=0, le=1, description="least weight before the mass is kept")
    normalize: bool = Field(True, description="keep the sum of weights at the number of reasoning tokens")
    representation: Representation = Field("last", description="what of the answer is compared")
    answer_pattern: AnswerPattern = BOXED

    @property
    def keeps(self) -> Conserves:
        return "token_mean" if self.normalize else "none"

    def plan(self, rollouts: Rollouts, base: Base) -> list[SensitivityJob]:
        """One job for each live response with a stated answer and a trainable token before it."""
        live, first = base.live.tolist(), _first_trainable(rollouts).tolist()
        return [
            self._job(row, stated.cue, (stated.start, stated.end))
            for row, stated in enumerate(stated_answers(rollouts, self.answer_pattern, self.name, base.live))
            if live[row] and stated is not None and first[row] < stated.cue
        ]

    @abstractmethod
    def _job(self, row: int, reasoning: int, answer: tuple[int, int]) -> SensitivityJob: ...

    def assign(self, rollouts: Rollouts, evidence: Evidence, base: Base) -> Credit:
        start = rollouts.length if evidence.answer_start is None else evidence.answer_start
        # A response without an answer starts it at −1, and so has no token before it.
        reasoning = rollouts.mask & (rollouts.position < start[rollouts.row])
        wanted = base.live & (rollouts.row_sum(reasoning.long()) > 0)
        measured = evidence.importance
        self.demand(
            "evidence.importance", None if measured is None else measured.given, wanted,
            f"measure what `apportion plan --method {self.name}` lists; `answer_start` null where there is no answer",
        )  # fmt: skip
        weight = torch.ones(len(rollouts.row), dtype=torch.float64)
        if measured is not None:
            use = reasoning & measured.given[rollouts.row]
            weight[use] = bilevel(
                measured.value[use], rollouts.row[use], len(rollouts),
                self.beta, self.quantile, self.floor, self.normalize,
            )  # fmt: skip
        return Credit.form(
            rollouts, base.advantage, weight=weight,
            method=self.name, settings=self.settings, conserves=self.keeps,
            counts={"unweighted": int((base.live & ~wanted).sum())},
        )  # fmt: skip


class OARP(_OAR):
    """OAR-P [paper]: importance by replacing each reasoning token, one forward pass a token.

    I_t = KL(p ‖ p with token t replaced by the pad id, still attended) at the answer. A_t = A_i·w_t with the weights
    of `bilevel` on the trainable reasoning tokens and 1 on the others. Without a stated answer the weights are 1.

    `plan` asks only where the base is not 0 by rule: elsewhere a weight changes nothing [ours]. `unweighted` counts
    the live responses that keep weight 1 throughout.
    """

    name: ClassVar[str] = "oar_p"
    cost: ClassVar[str] = "a forward pass for each reasoning token"

    def _job(self, row: int, reasoning: int, answer: tuple[int, int]) -> SensitivityJob:
        return SensitivityJob(row, reasoning, answer, "perturb", self.representation)


class OARG(_OAR):
    """OAR-G [paper]: importance from one backward pass to the embeddings, otherwise as OAR-P.

    I_t = |Σ_h ∂J/∂e_{t,h} · e_{t,h}| with J = KL(p₀ ‖ p under noise of deviation `noise` on the embeddings).
    """

    name: ClassVar[str] = "oar_g"
    cost: ClassVar[str] = "two forward passes and a backward pass a response"

    representation: Representation = Field("answer_mean", description="what of the answer is compared")
    noise: float = Field(1e-3, gt=0, allow_inf_nan=False, description="deviation of the noise on embeddings")
    seed: int = Field(0, ge=0, description="of that noise")

    def _job(self, row: int, reasoning: int, answer: tuple[int, int]) -> SensitivityJob:
        return SensitivityJob(row, reasoning, answer, "gradient", self.representation, self.noise, self.seed)


def bilevel(
    importance: Tensor, row: Tensor, rows: int, beta: float, quantile: float, floor: float, normalize: bool
) -> Tensor:
    """[K] weights: tokens below their response's quantile are held down, those above it boosted.

    Bi-level reshaping of OAR [paper]: n = min-max of log1p(I) over the response; θ its quantile;
    w = max(n/(θ + 1e-8), floor) where n < θ, else 1 + β(n − θ)/(1 − θ + 1e-8); then w·K_i/Σw.
    I = (0, .1, .5, 2) gives n = (0, .0868, .3691, 1), θ = .0651 and w = (.1, 1.0232, 1.3252, 2).

    Args:
        importance: [K] float64 from 0. row: [K] int64 below `rows`.
    """
    n = row_minmax(torch.log1p(importance), row, rows)
    theta = row_quantile(n, row, rows, quantile)[row]
    above = 1 + beta * (n - theta) / (1 - theta + 1e-8)
    weight = torch.where(n < theta, (n / (theta + 1e-8)).clamp(min=floor), above)
    return keep_mass(weight, row, rows) if normalize else weight


def keep_mass(weight: Tensor, row: Tensor, rows: int) -> Tensor:
    """[K] weights times the number of the response's weights over their sum, which is above 0."""
    total = torch.zeros(rows, dtype=torch.float64).index_add_(0, row, weight)
    return weight * (torch.bincount(row, minlength=rows) / total)[row]


def row_minmax(values: Tensor, row: Tensor, rows: int) -> Tensor:
    """[K] (x − min)/(max − min) over the values of the same response; the range is 1 where they are all equal."""

    def extreme(how: str) -> Tensor:
        return torch.zeros(rows, dtype=torch.float64).scatter_reduce_(0, row, values, how, include_self=False)

    low, high = extreme("amin"), extreme("amax")
    return (values - low[row]) / torch.where(high > low, high - low, 1.0)[row]


def row_quantile(values: Tensor, row: Tensor, rows: int, q: float) -> Tensor:
    """[R] the q-quantile of each response's values, between order statistics linearly; 0 where it has none."""
    order = torch.argsort(values)
    order = order[torch.argsort(row[order], stable=True)]
    count = torch.bincount(row, minlength=rows)
    place = (count - 1).clamp(min=0).double() * q
    # The zero at the end is what a response without values points at.
    ranked = torch.cat([values[order], values.new_zeros(1)])
    first = count.cumsum(0) - count
    low, high = (ranked[first + rank.long()] for rank in (place.floor(), place.ceil()))
    return torch.where(count > 0, low + (high - low) * (place - place.floor()), 0.0)


def _first_trainable(rollouts: Rollouts) -> Tensor:
    """[R] the position of the first trainable token; the response's length where it has none."""
    return rollouts.length.scatter_reduce(0, rollouts.row[rollouts.mask], rollouts.position[rollouts.mask], "amin")
