"""What a credit method is: a frozen config with pure functions, `plan` and `assign` the main ones."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from apportion.credit.record import Conserves, Credit
from apportion.errors import InputError
from apportion.groups import Base, grpo_base
from apportion.measure.evidence import Evidence
from apportion.measure.plan import AnyJob, Job
from apportion.rollouts import Rollouts

Need = Literal[
    "old_logprob", "ref_logprob", "entropy", "steps", "tree", "step_labels",
    "continuations", "belief", "sensitivity", "confidence", "divergence",
]  # fmt: skip
Stage = Literal["base", "credit", "reweight"]


class CreditMethod(BaseModel, ABC):
    """Base class of every method. Subclass it, set the class variables, write `assign`, register the class.

    Settings are fields: validated, frozen, and named as in methods.md. `plan` and `assign` are pure and
    deterministic; they know nothing of engines, trainers, ranks or disk.

    Class variables:
        name: registered name.
        stage: its place in a pipeline (see `credit.pipeline`). "base" methods give each response one advantage
            and have `rebase`; "credit" methods spread it over tokens; "reweight" methods multiply what others
            spread and have `reweigh`.
        needs: what the host must supply: per-token fields of the batch (`entropy`, `old_logprob`,
            `ref_logprob`), step boundaries or text to find them in (`steps`), node paths (`tree`), verdicts on
            steps (`step_labels`), or kinds of measurement (`measure.plan.Kind`).
        per_token: whether tokens of one response may get different advantages. Where False, a trainer may keep
            its one advantage a response.
        conserves: what holds between the credit and its base (see `conservation_error`); `keeps` says where a
            setting gives it up.
        uses_base: whether it spreads the base it is given. Where False it has its own (r − μ, or none), and a
            base estimator before it would be lost.
        grouped: whether it compares the responses of a group, so that a group of one teaches nothing.
        learns_when_collapsed: whether a group whose rewards are all equal still gets credit (law 3 gives it exactly
            0 otherwise). A group of one gets it only where `grouped` is False (law 4).
        cost: what it spends beyond GRPO, in words for `apportion methods`.
        paper: where the rule was published.
        marks: which parts are [paper], [note] or [ours].
    """

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    name: ClassVar[str]
    stage: ClassVar[Stage] = "credit"
    needs: ClassVar[frozenset[Need]] = frozenset()
    per_token: ClassVar[bool] = True
    conserves: ClassVar[Conserves] = "token_mean"
    uses_base: ClassVar[bool] = True
    grouped: ClassVar[bool] = True
    learns_when_collapsed: ClassVar[bool] = False
    cost: ClassVar[str] = "none"
    paper: ClassVar[str]
    marks: ClassVar[str]

    ddof: int = Field(1, ge=0, le=1, description="σ where no host supplies the base: 1 sample, 0 population")
    epsilon: float = Field(1e-4, ge=0, allow_inf_nan=False, description="added to σ where no host supplies it")

    def base(self, rollouts: Rollouts) -> Base:
        """The base to spread where there is no host that supplies one: GRPO's, with `ddof` and `epsilon`."""
        return grpo_base(rollouts, self.ddof, self.epsilon)

    def plan(self, rollouts: Rollouts, base: Base) -> Sequence[AnyJob]:
        """The measurements this method would have made; none for methods that measure nothing.

        Where it is not `batch_wide`, what it plans for a group may not depend on others: a trainer may ask as soon as a
        group is complete, with `rollouts` and `base` of that group alone.
        """
        return []

    def refine(self, rollouts: Rollouts, base: Base, evidence: Evidence) -> Sequence[Job]:
        """A second wave of continuations, made once after `plan`'s were answered; none for most methods."""
        return []

    @abstractmethod
    def assign(self, rollouts: Rollouts, evidence: Evidence, base: Base) -> Credit:
        """Spreads each response's base over its tokens."""

    def after(self, rollouts: Rollouts) -> Self:
        """The method for the next batch. What a method remembers from batch to batch is a setting of it."""
        return self

    @property
    def batch_wide(self) -> bool:
        """Whether a token's credit depends on other groups, so that it changes where a batch is split."""
        return False

    @property
    def keeps(self) -> Conserves:
        """What is conserved with these settings."""
        return self.conserves

    @property
    def settings(self) -> Mapping[str, Any]:
        """Every setting as used, for the record."""
        return self.model_dump()

    def demand(self, field: str, given: Tensor | None, wanted: Tensor, fix: str) -> None:
        """Raises InputError for the first of the `wanted` [R] responses that `field` was not `given` for."""
        lacking = wanted if given is None else wanted & ~given
        if lacking.any():
            row = int(lacking.nonzero()[0])
            raise InputError(f"{self.name}: {field} of row {row}", "nothing", "a measurement", fix)
