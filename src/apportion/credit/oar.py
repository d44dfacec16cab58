"""OAR: outcome-grounded advantage reshaping. Tokens that the answer hangs on get more of the advantage.

Shapes: _N flat tokens, _R responses.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from apportion.credit.answers import BOXED, AnswerPattern, stated_answers
from apportion.credit.method import CreditMethod, Need
from apportion.credit.record import Conserves, Credit
from apportion.groups import Base
from apportion.measure.evidence import Evidence
from apportion.measure.plan import Representation, SensitivityJob
from apportion.rollouts import Rollouts, in_blocks, keep_


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
        reasoning = rollouts.mask & rollouts.before(start)
        wanted = base.live & (rollouts.row_count(reasoning) > 0)
        measured = evidence.importance
        self.demand(
            "evidence.importance", None if measured is None else measured.given, wanted,
            f"measure what `apportion plan --method {self.name}` lists; `answer_start` null where there is no answer",
        )  # fmt: skip
        weight = None
        if measured is not None:
            use = reasoning & rollouts.spread(measured.given)
            weight = bilevel(
                rollouts, measured.value, use, self.beta, self.quantile, self.floor, self.normalize
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
    rollouts: Rollouts, importance: Tensor, use: Tensor, beta: float, quantile: float, floor: float, normalize: bool
) -> Tensor:
    """[N] weights: tokens below their response's quantile are held down, those above it boosted; 1 out of `use`.

    Bi-level reshaping of OAR [paper]: n = min-max of log1p(I) over the response; θ its quantile;
    w = max(n/(θ + 1e-8), floor) where n < θ, else 1 + β(n − θ)/(1 − θ + 1e-8); then w·K_i/Σw.
    I = (0, .1, .5, 2) gives n = (0, .0868, .3691, 1), θ = .0651 and w = (.1, 1.0232, 1.3252, 2).

    Args:
        importance: [N] float64 from 0. use: [N] bool, the tokens that are weighed.
    """
    chosen, count = use.numpy(), rollouts.row_count(use)
    found = np.ones(len(chosen))
    kept = importance.numpy()[chosen]
    for block in in_blocks(kept, count.long().numpy(), np.inf):
        n, tokens = torch.from_numpy(block.values).log1p_(), count[torch.from_numpy(block.rows)][:, None]
        ranked = torch.from_numpy(np.sort(n.numpy(), axis=1))
        low, high, theta = (ranked_quantile(ranked, tokens, q) for q in (0, 1, quantile))
        span = torch.where(high > low, high - low, 1.0)
        theta = (theta - low) / span
        n.sub_(low).div_(span)
        above, held = (n - theta).mul_(beta / (1 - theta + 1e-8)).add_(1), n < theta
        weight = torch.where(held, n.div_(theta + 1e-8).clamp_(min=floor), above, out=n)
        if normalize:
            weight *= tokens / keep_(weight, torch.from_numpy(block.present)).sum(1, keepdim=True)
        block.into(kept)
    found[chosen] = kept
    return torch.from_numpy(found)


def ranked_quantile(ranked: Tensor, count: Tensor, q: float) -> Tensor:
    """(r, 1) the q-quantile of the first `count` (r, 1) of each row's rising values, linearly between two of them."""
    place = (count - 1) * q
    low, high = (ranked.gather(1, rank.long()) for rank in (place.floor(), place.ceil()))
    return low + (high - low) * (place - place.floor())


def _first_trainable(rollouts: Rollouts) -> Tensor:
    """[R] the position of the first trainable token; ∞ where there is none."""
    return rollouts.row_min(torch.where(rollouts.mask, rollouts.position.double(), torch.inf))
