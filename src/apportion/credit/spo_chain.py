"""SPO-chain: values are measured at tokens the policy was unsure of, and only such tokens are trained.

Shapes: _N flat tokens, _R responses, _K pivots, _S segments.
"""

from __future__ import annotations

from itertools import pairwise
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from apportion.credit.boundaries import per_token, value_changes
from apportion.credit.method import CreditMethod, Need
from apportion.credit.record import Conserves, Credit, nothing
from apportion.errors import InputError
from apportion.groups import Base
from apportion.measure.evidence import Continuations, Evidence
from apportion.measure.plan import Job, jobs_of
from apportion.rollouts import Rollouts, keep_
from apportion.segments import low_probability_cuts


class SPOChain(CreditMethod):
    """SPO-chain [paper, arXiv 2505.23564]: A_segment = V(next cutpoint) − V(its own); the last ends at r.

    A cutpoint is the state just before a trainable token with old probability < `threshold`: of each scored
    response every `interval`-th such token, from the first. `plan` asks for `samples` continuations there,
    whatever the group's rewards. Tokens before the first measured state get 0, and so does a response without one.
    Tokens below the threshold stand there only where a measurement was lost: these are `unmeasured_tokens`.

    `probability_mask` [paper]: tokens with probability ≥ `threshold` get 0. That takes them out of the policy
    term; the trainer still counts them in its token mean and KL term. Where no trainable token is below the
    threshold, all of them stay in. The paper's code decides so for a micro-batch; here each response does so for
    itself [ours], or a token's advantage would depend on what else is in the batch. It makes no difference where
    the planned states were measured: such a response has no cutpoint, so its advantages are 0 under either rule.

    Numbers [note]: p = (.95, .5, .99, .8, .3, .97, .6), interval 2, V = (.6, .2) just before tokens 1 and 4,
    r = 1 gives (0, −.4, 0, −.4, .8, 0, .8).
    """

    name: ClassVar[str] = "spo_chain"
    needs: ClassVar[frozenset[Need]] = frozenset({"old_logprob", "continuations"})
    conserves: ClassVar[Conserves] = "none"
    uses_base: ClassVar[bool] = False
    grouped: ClassVar[bool] = False
    learns_when_collapsed: ClassVar[bool] = True
    cost: ClassVar[str] = "samples × cutpoints continuations a response"
    paper: ClassVar[str] = "SPO-chain, arXiv 2505.23564"
    marks: ClassVar[str] = "[paper]; the mask's fallback a response [ours]"

    threshold: float = Field(0.9, gt=0, le=1, description="tokens of lower probability are candidates for a cut")
    interval: int = Field(5, ge=1, description="every how many-th candidate is a cutpoint")
    samples: int = Field(9, ge=1, description="continuations a cutpoint")
    probability_mask: bool = Field(True, description="credit for tokens below the threshold only")

    def plan(self, rollouts: Rollouts, base: Base) -> list[Job]:
        logprob, mask = self._logprob(rollouts), rollouts.mask
        rows = zip(pairwise(rollouts.offsets.tolist()), rollouts.scored.tolist(), strict=True)
        pivots = [
            (i, p)
            for i, ((a, b), scored) in enumerate(rows) if scored
            for p in low_probability_cuts(logprob[a:b], self.threshold, self.interval, mask[a:b])
        ]  # fmt: skip
        row, position = torch.tensor(pivots, dtype=torch.int64).reshape(-1, 2).unbind(1)
        return jobs_of(rollouts, row, position, self.samples, torch.full((len(row),), float("nan")))

    def assign(self, rollouts: Rollouts, evidence: Evidence, base: Base) -> Credit:
        unsure = (self._logprob(rollouts).exp() < self.threshold) & rollouts.mask
        has_cut = rollouts.row_count(unsure) > 0
        pivots = evidence.continuations
        if pivots is None:
            wanted = has_cut & rollouts.scored
            fix = "measure what `apportion plan --method spo_chain` lists"
            self.demand("evidence.continuations", None, wanted, fix)
            pivots = Continuations.from_rewards(rollouts, [])
        segments, error = value_changes(rollouts, pivots)
        residual = per_token(segments, segments.increment)
        trained = scored = rollouts.counted
        if self.probability_mask:
            trained = scored & (unsure | ~rollouts.spread(has_cut))
        residual = keep_(residual, trained)
        unmeasured = per_token(segments, segments.samples == 0)
        return Credit.form(
            rollouts, base.advantage, weight=nothing(residual), residual=residual, segments=segments,
            method=self.name, settings=self.settings, conserves=self.keeps,
            invariants={"telescoping": error},
            counts={
                "pivots": int(rollouts.scored[pivots.row].sum()),
                "dropped_pivots": pivots.dropped,
                "unmeasured_tokens": int((unmeasured & scored & unsure).sum()),
                "confident_tokens": int((scored & ~trained).sum()),
            },
        )  # fmt: skip

    def _logprob(self, rollouts: Rollouts) -> Tensor:
        """[N] the old log-probabilities, in nats."""
        if rollouts.old_logprob is None:
            raise InputError(
                f"{self.name}: old_logprob", "none", "one value a token, in nats", "give `old_logprob` for every row"
            )
        return rollouts.old_logprob
