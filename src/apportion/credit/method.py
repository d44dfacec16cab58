"""What a credit method is: a frozen config with two pure functions, `plan` and `assign`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from apportion.credit.record import Conserves, Credit
from apportion.groups import Base, grpo_base
from apportion.measure.plan import Evidence, Job
from apportion.rollouts import Rollouts

Need = Literal["old_logprob", "ref_logprob", "entropy", "steps", "continuations"]


class CreditMethod(BaseModel, ABC):
    """Base class of every method. Subclass it, set the class variables, write `assign`, register the class.

    Settings are fields: validated, frozen, and named as in methods.md. `plan` and `assign` are pure and
    deterministic; they know nothing of engines, trainers, ranks or disk.

    Class variables:
        name: registered name.
        needs: what the host must supply: per-token fields of the batch (`entropy`, `old_logprob`,
            `ref_logprob`), step boundaries or text to find them in (`steps`), or measurements.
        per_token: whether tokens of one response may get different advantages. Where False, a trainer may keep
            its one advantage a response.
        conserves: what holds between the credit and its base (see `conservation_error`).
        grouped: whether it compares the responses of a group, so that a group of one teaches nothing.
        learns_when_collapsed: whether a group whose rewards are all equal, or with one member, still gets
            credit (law 3 gives it exactly 0 otherwise).
        cost: what it spends beyond GRPO, in words for `apportion methods`.
        paper: where the rule was published.
        marks: which parts are [paper], [note] or [ours].
    """

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    name: ClassVar[str]
    needs: ClassVar[frozenset[Need]] = frozenset()
    per_token: ClassVar[bool] = True
    conserves: ClassVar[Conserves] = "token_mean"
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

    def plan(self, rollouts: Rollouts, base: Base) -> list[Job]:
        """The continuations this method would have measured; none for methods that measure nothing."""
        return []

    def refine(self, rollouts: Rollouts, base: Base, evidence: Evidence) -> list[Job]:
        """A second wave of requests, made once after `plan`'s were answered; none for most methods."""
        return []

    @abstractmethod
    def assign(self, rollouts: Rollouts, evidence: Evidence, base: Base) -> Credit:
        """Spreads each response's base over its tokens."""

    @property
    def batch_wide(self) -> bool:
        """Whether a token's credit depends on other groups, so that it changes where a batch is split."""
        return False

    @property
    def settings(self) -> Mapping[str, Any]:
        """Every setting as used, for the record."""
        return self.model_dump()
