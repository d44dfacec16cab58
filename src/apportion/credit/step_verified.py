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
from apportion.rollouts import Rollouts, repeated


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
            residual = self._laid(rollouts, steps, torch.where(kept, gain, 0.0))
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

    def _laid(self, rollouts: Rollouts, steps: StepLabels, gain: Tensor) -> Tensor:
        """[N] each step's one of [K] gains on the tokens that get it."""
        n = len(rollouts.token_ids)
        first = rollouts.offsets[steps.row] + steps.start
        # A step reaches to the next one, or to the end of its response.
        end = torch.minimum(torch.cat([first, first.new_tensor([n])])[1:], rollouts.offsets[steps.row + 1])
        laid = torch.zeros(n, dtype=torch.float64)
        if self.placement == "all":
            inside = torch.zeros(n + 1, dtype=torch.int64).index_add_(0, first, torch.ones_like(first))
            inside = inside.index_add_(0, end, -torch.ones_like(end)).cumsum(0)[:-1] > 0
            laid[inside] = repeated(gain, end - first)
            return torch.where(rollouts.counted, laid, 0.0)
        tokens = torch.arange(n)
        if self.placement == "first":
            # The next counted token from each token on, found from the back.
            at = torch.where(rollouts.counted, tokens, n).flip(0).cummin(0).values.flip(0)[first]
            kept = at < end
        else:
            at = torch.where(rollouts.counted, tokens, -1).cummax(0).values[end - 1]
            kept = at >= first
        laid[at[kept]] = gain[kept]
        return laid
