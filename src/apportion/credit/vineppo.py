"""VinePPO: every step boundary is measured and each step gets the change in value across it.

Shapes: _N flat tokens, _K pivots, _S segments.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field

from apportion.credit.boundaries import per_token, step_positions, value_changes
from apportion.credit.method import CreditMethod, Need
from apportion.credit.record import Conserves, Credit, nothing
from apportion.credit.reinforce_pp import whiten
from apportion.errors import InputError
from apportion.groups import Base
from apportion.measure.evidence import Continuations, Evidence
from apportion.measure.plan import Job, jobs_of
from apportion.rollouts import Rollouts
from apportion.segments import vineppo_steps


class VinePPO(CreditMethod):
    """VinePPO [paper: authors' code, arXiv 2410.01679]: A_step = V(next) − V(here); the last step r − V.

    `plan` asks for `samples` (K = 9) continuations at the query and after each step but the last, whatever
    the group's rewards. No group statistic enters. Tokens before the first measured state, which happens only
    where a measurement was lost, get 0 and are counted as `unmeasured_tokens`.

    Numbers [note]: V = (.5, .75, .25), r = 1 gives (.25, −.5, .75).
    """

    name: ClassVar[str] = "vineppo"
    needs: ClassVar[frozenset[Need]] = frozenset({"steps", "continuations"})
    conserves: ClassVar[Conserves] = "none"
    uses_base: ClassVar[bool] = False
    grouped: ClassVar[bool] = False
    learns_when_collapsed: ClassVar[bool] = True
    cost: ClassVar[str] = "samples × steps continuations a response"
    paper: ClassVar[str] = "VinePPO, arXiv 2410.01679"
    marks: ClassVar[str] = "[paper: authors' code]"

    samples: int = Field(9, ge=1, description="continuations a state (K in the paper)")
    whiten: bool = Field(False, description="whiten advantages over the batch, as the released code does")
    fresh_budget: int = Field(
        0, ge=0, description="tokens a continuation may use, 1024 in the released code; 0: T_max − prefix"
    )

    @property
    def batch_wide(self) -> bool:
        return self.whiten

    def plan(self, rollouts: Rollouts, base: Base) -> list[Job]:
        steps = step_positions(rollouts, vineppo_steps, self.name)
        scored = rollouts.scored.tolist()
        pivots = [(i, p) for i, ps in enumerate(steps) if scored[i] for p in dict.fromkeys([0, *ps])]
        row, position = torch.tensor(pivots, dtype=torch.int64).reshape(-1, 2).unbind(1)
        return jobs_of(rollouts, row, position, self.samples, torch.full((len(row),), float("nan")))

    def assign(self, rollouts: Rollouts, evidence: Evidence, base: Base) -> Credit:
        pivots = evidence.continuations
        if pivots is None and rollouts.scored.any():
            raise InputError(
                "vineppo: evidence.continuations", "none in any row", "values at step boundaries",
                "measure what `apportion plan --method vineppo` lists",
            )  # fmt: skip
        pivots = pivots or Continuations.from_rewards(rollouts, [])
        segments, error = value_changes(rollouts, pivots)
        residual = per_token(segments, segments.increment)
        if self.whiten:
            residual = whiten(residual, rollouts.counted, self.ddof, self.epsilon)
        unmeasured = per_token(segments, segments.samples == 0)
        return Credit.form(
            rollouts, base.advantage, weight=nothing(residual), residual=residual, segments=segments,
            method=self.name, settings=self.settings, conserves=self.keeps,
            invariants={"telescoping": error},
            counts={
                "pivots": int(rollouts.scored[pivots.row].sum()),
                "dropped_pivots": pivots.dropped,
                "unmeasured_tokens": int((unmeasured & rollouts.counted).sum()),
            },
        )  # fmt: skip
