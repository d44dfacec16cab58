"""Step-verified credit: a verifier's verdict on each step is laid on the step's first token.

Shapes: _N flat tokens, _R responses, _K steps.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from apportion.credit.method import CreditMethod, Need
from apportion.credit.record import Conserves, Credit
from apportion.groups import Base, compared_rows
from apportion.measure.evidence import Evidence, StepLabels
from apportion.rollouts import Rollouts


class StepVerified(CreditMethod):
    """Step-verified credit: A_t = A_i + 1[t is a step's first token]·(φ − mean outcome of the group).

    With the whole proof right φ = 1; else −.05 on steps before the first failure and −.1 from it on [note]. A_i and
    the mean outcome are the base's.

    [ours]: the proof is right where every step is ok and the reward is above `reward_threshold`, so that steps
    which are all ok under a wrong answer get −.05; a response without a step gets A_i alone; a step reaches to the
    next one or to the response's end, and its first token is its first trainable one, so that no verdict is lost
    on a masked token; `placement="last"` takes its last trainable token, `"all"` each of them, undivided.

    Source: step-verified rewards (Lean), arXiv 2606.20068.
    """

    name: ClassVar[str] = "step_verified"
    needs: ClassVar[frozenset[Need]] = frozenset({"step_labels"})
    conserves: ClassVar[Conserves] = "none"
    learns_when_collapsed: ClassVar[bool] = True
    cost: ClassVar[str] = "a step verifier's run a response"
    paper: ClassVar[str] = "step-verified rewards, arXiv 2606.20068"
    marks: ClassVar[str] = "[note]; what a right proof is, masked first tokens, placements last and all [ours]"

    placement: Literal["first", "last", "all"] = Field("first", description="tokens of a step that get its verdict")
    right: float = Field(1.0, allow_inf_nan=False, description="φ of every step of a right proof")
    before_failure: float = Field(-0.05, allow_inf_nan=False, description="φ of steps before the first failure")
    from_failure: float = Field(-0.1, allow_inf_nan=False, description="φ from the first failure on")
    reward_threshold: float = Field(0.5, allow_inf_nan=False, description="reward above which the outcome is right")

    def assign(self, rollouts: Rollouts, evidence: Evidence, base: Base) -> Credit:
        steps = evidence.steps
        compared = compared_rows(rollouts)
        fix = "give `steps` for every row, empty where it has none"
        self.demand("evidence.steps", None if steps is None else steps.given, compared, fix)
        residual = torch.zeros(len(rollouts.token_ids), dtype=torch.float64)
        checked = failed = 0
        if steps is not None:
            kept = compared[steps.row]
            checked, failed = int(kept.sum()), int((kept & ~steps.ok).sum())
            gain = self._verdict(rollouts, steps) - base.mean[steps.row]
            step, laid = self._laid(rollouts, steps)
            residual[laid] = torch.where(compared[rollouts.row[laid]], gain[step[laid]], 0.0)
        return Credit.form(
            rollouts, base.advantage, residual=residual, counts={"steps": checked, "failed_steps": failed},
            method=self.name, settings=self.settings, conserves=self.keeps,
        )  # fmt: skip

    def _verdict(self, rollouts: Rollouts, steps: StepLabels) -> Tensor:
        """[K] float64 φ of each step."""
        index = torch.arange(len(steps.row))
        first_failure = torch.full((len(rollouts),), len(index))
        first_failure.scatter_reduce_(0, steps.row[~steps.ok], index[~steps.ok], "amin")
        proven = (first_failure == len(index)) & (rollouts.reward.double() > self.reward_threshold)
        verdict = torch.full((len(index),), self.from_failure, dtype=torch.float64)
        verdict[index < first_failure[steps.row]] = self.before_failure
        verdict[proven[steps.row]] = self.right
        return verdict

    def _laid(self, rollouts: Rollouts, steps: StepLabels) -> tuple[Tensor, Tensor]:
        """[N] the step that each token is in, and [N] bool, whether it gets the step's verdict."""
        tokens = torch.arange(len(rollouts.token_ids))
        step = torch.searchsorted(rollouts.offsets[steps.row] + steps.start, tokens, right=True) - 1
        # Tokens before a response's first step fall to the step before it, which is another response's.
        inside = step >= 0
        inside[inside.clone()] = steps.row[step[inside]] == rollouts.row[inside]
        inside &= rollouts.mask & rollouts.scored[rollouts.row]
        if self.placement == "all":
            return step, inside
        how: Literal["amin", "amax"] = "amin" if self.placement == "first" else "amax"
        at = torch.full_like(steps.row, -1).scatter_reduce_(0, step[inside], tokens[inside], how, include_self=False)
        laid = torch.zeros_like(inside)
        laid[at[at >= 0]] = True
        return step, laid
