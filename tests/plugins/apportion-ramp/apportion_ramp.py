"""Ramp: later tokens get a growing share of their response's advantage."""

from typing import ClassVar

from pydantic import Field

from apportion import Base, Credit, CreditMethod, Evidence, Rollouts


class Ramp(CreditMethod):
    """Ramp [ours]: A_t = A_i·w_t, w_t rising evenly from 1 − slope at the first token to 1 + slope at the last."""

    name: ClassVar[str] = "ramp"
    paper: ClassVar[str] = "none"
    marks: ClassVar[str] = "[ours]"

    slope: float = Field(0.5, ge=-1, le=1, description="what the last token gains; below 0 the first gains it")

    def assign(self, rollouts: Rollouts, evidence: Evidence, base: Base) -> Credit:
        after = rollouts.trainable.cumsum(0)[rollouts.row] - rollouts.mask.double().cumsum(0)
        steps = rollouts.trainable[rollouts.row] - 1
        weight = 1 + self.slope * (steps - 2 * after) / steps.clamp(min=1)
        return Credit.form(
            rollouts, base.advantage, weight=weight, method=self.name, settings=self.settings, conserves=self.keeps
        )
