"""Every registered method against every law, and every law against a method that breaks it.

The broken methods below are the planted faults: each must be caught by the law that it was written to break.
"""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from apportion.credit.method import CreditMethod
from apportion.credit.record import Conserves, Credit
from apportion.credit.registry import make_method, method_names
from apportion.groups import Base
from apportion.measure.evidence import Evidence
from apportion.measure.plan import Job
from apportion.rollouts import Rollouts
from apportion.testing import LAWS, Law, laws

# Settings that take another path through a method.
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in method_names()),
    ("grpo", {"ddof": 0, "epsilon": 1e-8}),
    ("reinforce_pp", {"gamma": 0.9}),
    ("vineppo", {"whiten": True}),
    ("probepo", {"alpha": 1.0, "n0": 0}),
    ("probepo", {"placement": "random", "budget": 24}),
    ("probepo", {"allocation": "neyman", "min_gap": 4, "shortlist": 1.0}),
]


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
@pytest.mark.parametrize("name, settings", VARIANTS, ids=lambda v: v if isinstance(v, str) else "-".join(v))
def test_law(name: str, settings: dict[str, Any], law: Law) -> None:
    law(make_method(name, settings))


class Own(CreditMethod):
    """What another package would write: each token gets the response's base."""

    name: ClassVar[str] = "own"
    paper: ClassVar[str] = "none"
    marks: ClassVar[str] = "[ours]"

    def assign(self, rollouts: Rollouts, evidence: Evidence, base: Base) -> Credit:
        return self.formed(rollouts, self.values(rollouts, evidence, base))

    def values(self, rollouts: Rollouts, evidence: Evidence, base: Base) -> Tensor:
        return base.advantage

    def formed(self, rollouts: Rollouts, values: Tensor, residual: Tensor | None = None) -> Credit:
        return Credit.form(
            rollouts, values, residual=residual,
            method=self.name, settings=self.settings, conserves=self.conserves,
        )  # fmt: skip


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_a_method_of_another_package_passes(law: Law) -> None:
    law(Own())


class ByRowNumber(Own):
    def values(self, rollouts: Rollouts, evidence: Evidence, base: Base) -> Tensor:
        return base.advantage * (1 + torch.arange(len(rollouts)))


class ByGroupNumber(Own):
    def values(self, rollouts: Rollouts, evidence: Evidence, base: Base) -> Tensor:
        return base.advantage * (1 + rollouts.group)


class LeaksAcrossGroups(Own):
    def values(self, rollouts: Rollouts, evidence: Evidence, base: Base) -> Tensor:
        mean = base.advantage.sum() / max(len(rollouts), 1) + rollouts.reward.nansum().float() * 1e-3
        return torch.where(base.live, base.advantage + mean, 0.0)


class CountsTheMissing(Own):
    def values(self, rollouts: Rollouts, evidence: Evidence, base: Base) -> Tensor:
        size = torch.bincount(rollouts.group, minlength=rollouts.groups)[rollouts.group]
        return base.advantage * size


class PaysTheAbstained(Own):
    def values(self, rollouts: Rollouts, evidence: Evidence, base: Base) -> Tensor:
        return torch.where(rollouts.scored, base.advantage, -0.1)


class LearnsFromEqualRewards(Own):
    def values(self, rollouts: Rollouts, evidence: Evidence, base: Base) -> Tensor:
        return torch.where(rollouts.scored, rollouts.reward - base.mean + 1e-6, 0.0).float()


class ReadsMaskedTokens(Own):
    conserves: ClassVar[Conserves] = "none"

    def assign(self, rollouts: Rollouts, evidence: Evidence, base: Base) -> Credit:
        return self.formed(rollouts, base.advantage, rollouts.row_sum(rollouts.token_ids)[rollouts.row] * 1e-3)


class KeepsNothing(Own):
    def assign(self, rollouts: Rollouts, evidence: Evidence, base: Base) -> Credit:
        live = base.live[rollouts.row]
        return self.formed(rollouts, base.advantage, torch.where(live, rollouts.position * 0.1, 0.0))


class Forgets(Own):
    """Different at every call."""

    def values(self, rollouts: Rollouts, evidence: Evidence, base: Base) -> Tensor:
        return base.advantage * torch.rand(())


class WritesIntoItsBase(Own):
    def values(self, rollouts: Rollouts, evidence: Evidence, base: Base) -> Tensor:
        return base.advantage.mul_(2)


class Loops(Own):
    def values(self, rollouts: Rollouts, evidence: Evidence, base: Base) -> Tensor:
        return torch.tensor([round(a, 3) for a in base.advantage.tolist()], dtype=torch.float32)


class Attached(Own):
    def assign(self, rollouts: Rollouts, evidence: Evidence, base: Base) -> Credit:
        credit = self.formed(rollouts, base.advantage)
        return Credit(base.advantage[rollouts.row] * rollouts.mask, credit.base, self.name, self.settings)


class ProbesAnything(Own):
    def plan(self, rollouts: Rollouts, base: Base) -> list[Job]:
        return [Job(row, 0, 1, ((row, 0),)) for row in range(len(rollouts))]


BROKEN: list[tuple[type[Own], Law]] = [
    (ByRowNumber, laws.row_order),
    (ByGroupNumber, laws.group_names),
    (LeaksAcrossGroups, laws.micro_batches),
    (LeaksAcrossGroups, laws.one_group_alone),
    (CountsTheMissing, laws.abstained),
    (CountsTheMissing, laws.untrainable_rows),
    (PaysTheAbstained, laws.abstained),
    (PaysTheAbstained, laws.no_rewards),
    (LearnsFromEqualRewards, laws.equal_rewards),
    (LearnsFromEqualRewards, laws.group_of_one),
    (ReadsMaskedTokens, laws.masked_tokens),
    (KeepsNothing, laws.conservation),
    (Forgets, laws.determinism),
    (WritesIntoItsBase, laws.inputs_untouched),
    (Loops, laws.no_loop_over_responses),
    (Attached, laws.detached),
    (ProbesAnything, laws.plan_sound),
    (ProbesAnything, laws.equal_rewards),
]


@pytest.mark.parametrize("broken, law", BROKEN, ids=lambda v: v.__name__)
def test_laws_catch_what_they_forbid(broken: type[Own], law: Law) -> None:
    with pytest.raises(AssertionError):
        law(broken())
