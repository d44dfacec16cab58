"""Pipelines: several methods one after the other, which together are a method again.

Shapes: _N flat tokens, _R responses.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any, ClassVar, Self, cast

import torch
from pydantic import SerializationInfo, model_serializer
from torch import Tensor

from apportion.credit.method import CreditMethod
from apportion.credit.record import Conserves, Credit, conservation_error
from apportion.credit.stages import BaseEstimator, Reweighting
from apportion.errors import InputError
from apportion.groups import Base
from apportion.measure.evidence import Evidence
from apportion.measure.plan import AnyJob, Job
from apportion.rollouts import Rollouts


class Pipeline(CreditMethod):
    """Base estimator, then a repair of collapsed groups, then one method that spreads credit, then reweightings.

    Each part may be left out. Every stage gets what those before it made: the estimators' base, its μ and its scale
    reach the method that spreads it, and each reweighting multiplies the token advantages so far. The credit is
    formed once, at the end. Make one with `compose` or `registry.make_method` [ours].

    `invariants` has each stage's own under "NAME/INVARIANT", "NAME/conserved" measured here and not taken from the
    stage. `settings` is one table a stage.
    """

    # A stage's σ is the stage's setting; a pipeline has none of its own.
    ddof: ClassVar[int]  # type: ignore[misc]
    epsilon: ClassVar[float]  # type: ignore[misc]

    stages: tuple[CreditMethod, ...]

    @model_serializer
    def _by_stage(self, info: SerializationInfo) -> dict[str, Any]:
        return {stage.name: stage.model_dump(mode=info.mode) for stage in self.stages}

    def __reduce__(self) -> tuple[Any, ...]:
        # Its class is made in `compose` and stands in no module where pickle could find it.
        return compose, (self.stages,)

    def base(self, rollouts: Rollouts) -> Base:
        """The base of the first stage."""
        return self.stages[0].base(rollouts)

    def plan(self, rollouts: Rollouts, base: Base) -> list[AnyJob]:
        base = self._rebased(rollouts, base)
        return [job for stage in self.stages for job in stage.plan(rollouts, base)]

    def refine(self, rollouts: Rollouts, base: Base, evidence: Evidence) -> list[Job]:
        base = self._rebased(rollouts, base)
        return [job for stage in self.stages for job in stage.refine(rollouts, base, evidence)]

    def assign(self, rollouts: Rollouts, evidence: Evidence, base: Base) -> Credit:
        """The pipeline's credit.

        Raises:
            RuntimeError: a stage did not keep what it declares to keep.
        """
        base = self._rebased(rollouts, base)
        counts = {name: n for stage in self._estimators for name, n in stage.counts(rollouts).items()}
        credit, invariants = self._credit(rollouts, evidence, base)
        advantage, weight, residual = _spread(rollouts, credit), credit.weight, credit.residual
        for stage in self._reweightings:
            factor = stage.reweigh(rollouts, advantage)
            advantage = advantage * factor
            weight = factor if weight is None else weight * factor
            residual = None if residual is None else residual * factor
            alone = self._of_base(rollouts, base, factor)
            named = {**stage.invariants(rollouts, factor), **_kept(stage, rollouts, alone)}
            invariants |= {f"{stage.name}/{name}": error for name, error in named.items()}
        return Credit.form(
            rollouts, credit.base, weight=weight, residual=residual, segments=credit.segments,
            method=self.name, settings=self.settings, conserves=self.keeps,
            invariants=invariants, counts={**counts, **credit.counts},
        )  # fmt: skip

    def _credit(self, rollouts: Rollouts, evidence: Evidence, base: Base) -> tuple[Credit, dict[str, float]]:
        """The base as spread by the method for that, if there is one, and that method's invariants."""
        for stage in self._of("credit"):
            credit = stage.assign(rollouts, evidence, base)
            named = {**credit.invariants, **_kept(stage, rollouts, credit)}
            return credit, {f"{stage.name}/{name}": error for name, error in named.items()}
        return self._of_base(rollouts, base, None), {}

    def _of_base(self, rollouts: Rollouts, base: Base, weight: Tensor | None) -> Credit:
        return Credit.form(
            rollouts, base.advantage, weight=weight, method=self.name, settings=self.settings, conserves="none"
        )

    def after(self, rollouts: Rollouts) -> Self:
        return self.model_copy(update={"stages": tuple(stage.after(rollouts) for stage in self.stages)})

    @property
    def batch_wide(self) -> bool:
        return any(stage.batch_wide for stage in self.stages)

    @property
    def keeps(self) -> Conserves:
        return _together((stage.keeps, stage.per_token) for stage in self.stages)

    @property
    def _estimators(self) -> tuple[BaseEstimator, ...]:
        return cast(tuple[BaseEstimator, ...], self._of("base"))

    @property
    def _reweightings(self) -> tuple[Reweighting, ...]:
        return cast(tuple[Reweighting, ...], self._of("reweight"))

    def _of(self, place: str) -> tuple[CreditMethod, ...]:
        return tuple(stage for stage in self.stages if stage.stage == place)

    def _rebased(self, rollouts: Rollouts, base: Base) -> Base:
        for stage in self._estimators:
            base = stage.rebase(rollouts, base)
        return base


def compose(methods: Sequence[CreditMethod]) -> CreditMethod:
    """The pipeline of these methods, in this order; of one, that method itself. A pipeline counts as its stages.

    Raises:
        InputError: no method, or methods that cannot follow each other; names them and the reason.
    """
    stages = tuple(stage for method in methods for stage in stages_of(method))
    if len(stages) == 1:
        return stages[0]
    return pipeline_class(*map(type, stages))(stages=stages)


def stages_of(method: CreditMethod) -> tuple[CreditMethod, ...]:
    """The methods of a pipeline in their order; a method by itself is its only stage."""
    return method.stages if isinstance(method, Pipeline) else (method,)


def fresh_budget(method: CreditMethod) -> int:
    """Tokens that a continuation may use whatever its prefix has used (VinePPO's switch); 0: what the prefix left."""
    return max(getattr(stage, "fresh_budget", 0) for stage in stages_of(method))


@cache
def pipeline_class(*classes: type[CreditMethod]) -> type[Pipeline]:
    """The class of pipelines of these methods, whose class variables are computed from theirs.

    needs are all of theirs; what they cost, where they are from and their marks stand one after the other. A pipeline
    learns from collapsed groups where one of its stages does, and teaches nothing with a group of one where that
    is so of all.

    Raises:
        InputError: see `compose`.
    """
    _check_order(classes)
    names = [cls.name for cls in classes]
    costs = [f"{cls.name}: {cls.cost}" for cls in classes if cls.cost != "none"]
    variables = {
        "__doc__": f"{', then '.join(names)}.",
        "__module__": __name__,
        "name": "+".join(names),
        "needs": frozenset[Any]().union(*(cls.needs for cls in classes)),
        "per_token": any(cls.per_token for cls in classes),
        "conserves": _together((cls.conserves, cls.per_token) for cls in classes),
        "uses_base": all(cls.uses_base for cls in classes),
        "grouped": all(cls.grouped for cls in classes),
        "learns_when_collapsed": any(cls.learns_when_collapsed for cls in classes),
        "cost": "; ".join(costs) or "none",
        "paper": "; ".join(cls.paper for cls in classes),
        "marks": "; ".join(f"{cls.name}: {cls.marks}" for cls in classes),
    }
    return type("+".join(names), (Pipeline,), variables)


def _check_order(classes: Sequence[type[CreditMethod]]) -> None:
    """Raises InputError for the first stage that cannot stand where it does."""
    names = [cls.name for cls in classes]

    def refuse(expected: str, fix: str) -> None:
        raise InputError("method", ", ".join(names) or "an empty list", expected, fix)

    if not classes:
        refuse("at least one method", "name one, for example probepo")
    for i, (cls, name) in enumerate(zip(classes, names, strict=True)):
        earlier = classes[:i]
        if name in names[:i]:
            refuse(f"each method once: {name} would run on its own result", f"leave one {name} out")
        for other in earlier:
            if _place(other) == _place(cls) < _LAST:
                refuse(f"one {_PLACES[_place(cls)]}: {other.name} and {name} each are one", f"leave {name} out")
            if _place(other) > _place(cls):
                refuse(
                    f"{', then '.join(_PLACES)}: {name}, a {_PLACES[_place(cls)]}, cannot follow {other.name}",
                    f"put {name} before {other.name}",
                )
        if not cls.uses_base and (lost := next((other for other in earlier if other.stage == "base"), None)):
            refuse(
                f"no base estimator before {name}: it has its own and would lose that of {lost.name}",
                f"leave {lost.name} out",
            )


_PLACES = ("base estimator", "repair of collapsed groups", "method that spreads credit", "reweighting")
_LAST = len(_PLACES) - 1


def _place(cls: type[CreditMethod]) -> int:
    """Where in a pipeline a method belongs, by its number in `_PLACES`."""
    if cls.stage == "base":
        return int(cast(type[BaseEstimator], cls).repairs)
    return 2 if cls.stage == "credit" else _LAST


def _together(stages: Iterable[tuple[Conserves, bool]]) -> Conserves:
    """What (keeps, per_token) stages in a row keep: what the one that spreads the base keeps.

    Weights that keep the mean of a constant do not keep that of what varies, so a further stage keeps nothing.
    """
    kept: Conserves = "token_mean"
    varies = False
    for keeps, per_token in stages:
        kept = keeps if kept == "token_mean" and not varies else "none"
        varies = varies or per_token
    return kept


def _spread(rollouts: Rollouts, credit: Credit) -> Tensor:
    """[N] float64 weight · base + residual, 0 on masked tokens: the credit before it was rounded."""
    value = rollouts.spread(credit.base.double())
    value = value if credit.weight is None else value * credit.weight
    value = value if credit.residual is None else value + credit.residual
    return torch.where(rollouts.mask, value, 0.0)


def _kept(stage: CreditMethod, rollouts: Rollouts, credit: Credit) -> Mapping[str, float]:
    """The measured error of what a stage declares to keep, as an invariant; nothing where it declares nothing.

    Measured before rounding to float32, of which a sum over many tokens would show more than the tolerance.

    Raises:
        RuntimeError: it is above 1e-4, relative to the largest advantage where that is above 1.
    """
    advantage = _spread(rollouts, credit)
    error = conservation_error(rollouts, advantage, credit.base, stage.keeps)
    if error is None:
        return {}
    if error > 1e-4 * float(torch.cat([advantage.abs(), advantage.new_ones(1)]).max()):
        raise RuntimeError(
            f"{stage.name} declares to keep {stage.keeps} and misses it by {error:.3g}: its credit is not what it "
            "says, so no use is made of it"
        )
    return {"conserved": error}
