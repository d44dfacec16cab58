"""Pipelines: what each stage gets of those before it, what may follow what, and whose settings are whose.

Planted in a copy of the package and seen caught here: planning, refining or assigning with the base as it came; the
residual not weighed; weights replaced instead of multiplied; reweighting by the base instead of what was spread;
`after` of the first stage only; the base of the last stage; `batch_wide` where all are; `keeps` by class; a mean said
to be kept of what varies; promises not checked, or taken from the stage; the refusals of a wrong order, of two of a
kind, of a repetition and of a lost base left out; VinePPO or REINFORCE++ said to use the base; counts, segments or
the base of the credit stage lost; a class that pickle cannot find; pipelines not flattened; `grouped` where any is;
settings given to the wrong stage; true for a number; a setting given twice.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

import reference
import reference_weights as slow
from apportion.credit.avspo import AVSPO
from apportion.credit.baselines import GRPO, RLOO
from apportion.credit.cw_grpo import CWGRPO
from apportion.credit.method import CreditMethod
from apportion.credit.pipeline import Pipeline, compose
from apportion.credit.probepo import ProbePO
from apportion.credit.record import Conserves, Credit
from apportion.credit.registry import make_method, method_class, method_names_of
from apportion.credit.stages import Reweighting
from apportion.credit.vineppo import VinePPO
from apportion.errors import InputError
from apportion.groups import Base, grpo_base
from apportion.measure.evidence import Continuations, Evidence
from apportion.rollouts import Rollouts
from apportion.testing.laws import LAWS, Law
from apportion.testing.tools import credit as credit_of
from apportion.testing.tools import mixed_batch
from strategies import Batch, batches

LAWFUL: list[tuple[str, dict[str, Any]]] = [
    ("avspo,probepo,cw_grpo", {"avspo.threshold": 0, "probepo": {"alpha": 1}}),
    ("rloo,probepo", {}),
    ("opo,avspo,ep_grpo,cw_grpo", {"cw_grpo.scope": "batch"}),
    ("vineppo,cw_grpo", {}),
]


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
@pytest.mark.parametrize("names, chosen", LAWFUL, ids=lambda v: v if isinstance(v, str) else "")
def test_law(names: str, chosen: dict[str, Any], law: Law) -> None:
    law(make_method(names, chosen))


def small() -> tuple[Rollouts, Evidence]:
    """A mixed group with one pivot, and one whose two answers are both right."""
    logprob = [[-1.0, -2.0, -1.0, -2.0], [-1.0, -2.0], [-0.5, -3.0], [-1.0]]
    rollouts = Rollouts.from_lists(
        [[1, 2, 3, 4], [5, 6], [7, 8], [9]], list("ppqq"), [1.0, 0.0, 1.0, 1.0], old_logprob=logprob,
        entropy=[[1.0] * len(row) for row in logprob], boundary=[[0, 0, 1, 0], [0, 0], [0, 0], [0]],
    )  # fmt: skip
    return rollouts, Evidence(Continuations.from_rewards(rollouts, [(0, 2, [0.0] * 4)]))


def test_numbers_of_three_stages() -> None:
    """AVSPO: population σ, so A = ±1 in p; ACR ½, K = 2: q gets 3/√11 (virtual ⅔ and ⅓, mean ¾, σ² = 11/144).

    ProbePO: V = (4·0 + 4·½)/8 = ¼; Δ/σ = −½, 3/2; mean ½; with α = ½ A = ½, ½, 3/2, 3/2 and −1, −1. q has no pivot.

    CW-GRPO in p: mean log π = −3/2, mean A = 1/3, c = ½·(1/6, −1/6, 7/6, −7/6, −4/3, 4/3) = (1, −1, 7, −7, −8, 8)/12,
    mean 0; σ_c² = 2(1 + 49 + 64)/144/6 = 38/144; c²/2σ_c² = 1/76, 49/76, 64/76. In q all A are equal: w = 1.
    """
    rollouts, evidence = small()
    method = make_method("avspo,probepo,cw_grpo", {"avspo.threshold": 0.4, "avspo.epsilon": 0})
    base = method.base(rollouts)
    credit = method.assign(rollouts, evidence, base)
    raw = [math.exp(-n / 76) for n in (1, 1, 49, 49, 64, 64)]
    weight = [w * 6 / sum(raw) for w in raw]
    assert credit.weight is not None and credit.residual is not None and credit.segments is not None
    assert credit.weight.tolist() == pytest.approx([*weight, 1, 1, 1])
    spread = [0.5, 0.5, 1.5, 1.5, -1, -1]
    right = 3 / 11**0.5
    wanted = [w * a for w, a in zip(weight, spread, strict=True)]
    assert credit.token.tolist() == pytest.approx([*wanted, right, right, right], abs=1e-6)
    assert credit.base.tolist() == pytest.approx([1, -1, right, right], abs=1e-6)
    # Both parts of the credit are weighed: A_base·w and α·D̃·w.
    assert credit.residual[:4].tolist() == pytest.approx(
        [w * d for w, d in zip(weight, [-0.5, -0.5, 0.5, 0.5], strict=False)]
    )
    assert credit.segments.shrunk.tolist()[:2] == [0.5, 0.25]
    assert credit.counts == {"repaired_groups": 1, "virtual_rewards": 2, "pivots": 1, "dropped_pivots": 0}
    assert set(credit.invariants) == {"probepo/telescoping", "probepo/conserved", "cw_grpo/mean_weight"}
    assert max(credit.invariants.values()) < 1e-6
    assert credit.method == "avspo+probepo+cw_grpo"
    assert {name: table["epsilon"] for name, table in credit.settings.items()} == {
        "avspo": 0, "probepo": 1e-4, "cw_grpo": 1e-4,
    }  # fmt: skip


def test_rloo_then_probepo_counts_values_in_the_unit_of_the_base() -> None:
    """RLOO of 1, 0: ±1, where r − μ is ±½, so a change in value counts double: Σ Δ/scale = A, for every row.

    V = ¼: Δ = −¼, ¾; doubled −½, 3/2, as the population σ of ½ did above. The token mean stays ±1.
    """
    rollouts, evidence = small()
    method = make_method(["rloo", "probepo"], {"probepo": {"alpha": 1.0}})
    credit = method.assign(rollouts, evidence, method.base(rollouts))
    assert credit.token.tolist() == pytest.approx([0, 0, 2, 2, -1, -1, 0, 0, 0])
    assert credit.base.tolist() == [1, -1, 0, 0]
    assert credit.invariants["conserved"] < 1e-6 and method.keeps == "token_mean"
    rebased = RLOO().rebase(rollouts, method.base(rollouts))
    assert credit.segments is not None
    change = torch.zeros(4, dtype=torch.float64).index_add_(0, credit.segments.row, credit.segments.increment)
    assert (change / rebased.scale)[:2].tolist() == pytest.approx([1, -1])


def test_opo_moves_the_value_that_probepo_starts_from() -> None:
    """OPO's baseline is (4·1 + 2·0)/6 = ⅔; V = (4·0 + 4·⅔)/8 = ⅓; Δ = −⅓, ⅔; mean 1/6; A = ⅓ ∓ ½ with α = 1."""
    rollouts, evidence = small()
    method = make_method(["opo", "probepo"], {"probepo": {"alpha": 1.0}})
    credit = method.assign(rollouts, evidence, method.base(rollouts))
    assert credit.token[:6].tolist() == pytest.approx([-1 / 6, -1 / 6, 5 / 6, 5 / 6, -2 / 3, -2 / 3])


def test_planning_and_refining_see_the_rebased_base() -> None:
    """A repaired group is not live, so that nothing is measured there; nor is a stage planned that measures nothing."""
    rollouts = mixed_batch()
    pipe = make_method("rloo,avspo,probepo,cw_grpo", {"probepo": {"window": 2, "min_gap": 2, "allocation": "neyman"}})
    host = grpo_base(rollouts)
    everyone = replace(host, live=rollouts.scored, scale=torch.ones_like(host.scale))
    alone = make_method("probepo", {"window": 2, "min_gap": 2, "allocation": "neyman"})
    assert pipe.plan(rollouts, host) == alone.plan(rollouts, host)
    pipe = make_method("avspo,probepo", {"avspo.threshold": 0, "probepo": {"window": 2, "min_gap": 2}})
    equal = {i for i in range(len(rollouts)) if rollouts.name(i) == "equal"}
    planned = {job.row for job in pipe.plan(rollouts, everyone)}
    assert planned and not planned & equal
    assert equal & {job.row for job in alone.plan(rollouts, everyone)}
    wave = Continuations.from_rewards(rollouts, [(0, 5, [1.0, 0.0]), (4, 5, [1.0, 0.0])])
    neyman = make_method("avspo,probepo", {"avspo.threshold": 0, "probepo.allocation": "neyman"})
    assert {job.row for job in neyman.refine(rollouts, everyone, Evidence(wave))} == {0}


@settings(max_examples=60)
@given(batch=batches())
def test_equals_the_references_one_after_the_other(batch: Batch) -> None:
    logprob = slow.eighths(batch.responses, "policy")
    rollouts = replace(batch.rollouts(), old_logprob=torch.tensor([x for row in logprob for x in row]))
    method = make_method("avspo,probepo,cw_grpo", {"avspo.threshold": 0.2, "probepo.n0": 2})
    token = method.assign(rollouts, batch.evidence(), method.base(rollouts)).token
    base = grpo_base(rollouts, 0, 1e-8).advantage.tolist()
    repaired, _ = slow.avspo(batch.responses, base, 0.2)
    probed = reference.probepo(batch.responses, batch.measured(), 0.5, 2, 0, 1e-8)
    spread = [
        row if reference.live(batch.responses, y) else [a * m for m in y.mask]
        for y, row, a in zip(batch.responses, probed, repaired, strict=True)
    ]
    wanted = slow.times(slow.cw_weights(batch.responses, spread, logprob, "group"), spread)
    torch.testing.assert_close(token, torch.tensor([a for row in wanted for a in row]), rtol=1e-4, atol=1e-5)


@settings(max_examples=40)
@given(batch=batches())
def test_probepo_without_alpha_is_not_there(batch: Batch) -> None:
    """To the bit, whatever was measured."""
    rollouts = batch.rollouts()
    base = grpo_base(rollouts)
    for others in (["rloo", "probepo"], ["avspo", "probepo", "cw_grpo"], ["probepo", "cw_grpo"]):
        chosen = {"avspo.threshold": 0.1} if "avspo" in others else {}
        pipe = make_method(others, {"probepo.alpha": 0, **chosen})
        without = [name for name in others if name != "probepo"]
        plain = {key.removeprefix("avspo.") if len(without) == 1 else key: value for key, value in chosen.items()}
        one = pipe.assign(rollouts, batch.evidence(), base)
        other = make_method(without, plain).assign(rollouts, Evidence(), base)
        assert torch.equal(one.token, other.token) and torch.equal(one.base, other.base)


def test_class_variables_are_those_of_the_stages_together() -> None:
    pipe = make_method("rloo,avspo,probepo,cw_grpo")
    assert isinstance(pipe, Pipeline) and pipe.name == "rloo+avspo+probepo+cw_grpo"
    assert pipe.needs == {"steps", "entropy", "continuations", "old_logprob"}
    assert pipe.per_token and pipe.grouped and pipe.uses_base and pipe.learns_when_collapsed and pipe.batch_wide
    assert pipe.conserves == pipe.keeps == "none"
    assert pipe.cost == f"probepo: {ProbePO.cost}"
    assert "arXiv 2402.14740; AVSPO" in pipe.paper and "avspo: [note]" in pipe.marks
    flat = make_method("rloo,avspo")
    assert not flat.per_token and flat.keeps == "token_mean" and flat.cost == "none"
    assert not make_method("rloo,probepo").batch_wide and make_method("rloo,probepo").keeps == "token_mean"
    assert not make_method("probepo,cw_grpo").learns_when_collapsed
    late = make_method("vineppo,cw_grpo")
    assert not late.grouped and not late.uses_base and late.learns_when_collapsed
    assert make_method("vineppo,cw_grpo", {"vineppo.whiten": True}).batch_wide
    assert make_method("reinforce_pp_baseline,cw_grpo").batch_wide
    # A trainer that keeps one advantage a response takes it from here.
    rollouts, _ = small()
    credit = flat.assign(rollouts, Evidence(), grpo_base(rollouts))
    assert torch.equal(credit.token, credit.base[rollouts.row]) and credit.invariants == {"conserved": 0.0}


def test_of_one_and_of_pipelines() -> None:
    probe = ProbePO()
    assert compose([probe]) is probe and make_method(["probepo"], {"alpha": 1}) == ProbePO(alpha=1)
    inner = compose([RLOO(), probe])
    assert compose([inner, CWGRPO()]) == compose([RLOO(), probe, CWGRPO()])
    assert type(inner) is method_class("rloo,probepo") is method_class("rloo+probepo")


@pytest.mark.parametrize(
    "names, message",
    [
        ([], "method: got an empty list; expected at least one method"),
        (["probepo", "ep_grpo"], "got probepo, ep_grpo; expected one method that spreads credit"),
        (["grpo", "rloo"], "expected one base estimator: grpo and rloo each are one. Fix: leave rloo out"),
        (["probepo", "rloo"], "rloo, a base estimator, cannot follow probepo. Fix: put rloo before probepo"),
        (["avspo", "rloo"], "rloo, a base estimator, cannot follow avspo. Fix: put rloo before avspo"),
        (["cw_grpo", "avspo"], "avspo, a repair of collapsed groups, cannot follow cw_grpo"),
        (["cw_grpo", "probepo"], "probepo, a method that spreads credit, cannot follow cw_grpo"),
        (["cw_grpo", "cw_grpo"], "expected each method once: cw_grpo would run on its own result"),
        (["probepo", "cw_grpo", "probepo"], "probepo, a method that spreads credit, cannot follow cw_grpo|each method"),
        (["rloo", "vineppo"], "no base estimator before vineppo: it has its own and would lose that of rloo"),
        (["avspo", "reinforce_pp"], "no base estimator before reinforce_pp"),
        (["rloo", "reinforce_pp_baseline", "cw_grpo"], "before reinforce_pp_baseline: .* Fix: leave rloo out"),
    ],
)
def test_refused(names: list[str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        make_method(names)


@pytest.mark.parametrize(
    "names",
    [
        "rloo,avspo", "grpo,probepo", "opo,avspo,step_verified,cw_grpo", "reinforce_pp,cw_grpo", "rloo,cw_grpo",
        "reinforce_pp_baseline,cw_grpo", "avspo,cw_grpo",
    ],
)  # fmt: skip
def test_allowed(names: str) -> None:
    credit = credit_of(make_method(names), mixed_batch())
    assert torch.isfinite(credit.token).all() and credit.method == names.replace(",", "+")


@pytest.mark.parametrize(
    "chosen, message",
    [
        ({"alpha": 1}, "alpha: got a setting without its method; expected probepo.alpha in this pipeline"),
        ({"epsilon": 1}, "expected avspo.epsilon or probepo.epsilon or cw_grpo.epsilon in this pipeline"),
        ({"alhpa": 1}, "alhpa: got no method of this pipeline; expected METHOD.SETTING, of avspo, probepo, cw_grpo"),
        ({"probpo.alpha": 1}, "probpo.alpha: got no method of this pipeline.*did you mean 'probepo'"),
        ({"cwgrpo": {"scope": "batch"}}, "cwgrpo: got no method of this pipeline.*did you mean 'cw_grpo'"),
        ({"probepo.alhpa": 1}, "probepo.alhpa: got an unknown setting.*did you mean 'alpha'"),
        ({"probepo": {"alhpa": 1}}, "probepo.alhpa: got an unknown setting.*did you mean 'alpha'"),
        ({"probepo": {"alpha": "much"}}, "probepo.alpha: got 'much'"),
        ({"probepo.alpha": True}, "probepo.alpha: got true"),
        ({"avspo": 3}, "avspo: got 3; expected a table of its settings, or avspo.SETTING"),
        ({"probepo": {"alpha": 1}, "probepo.alpha": 2}, "probepo.alpha: got the setting twice"),
        ({"probepo": {"budget": 7}}, "probepo.budget: got 7; expected at least samples"),
    ],
)
def test_bad_settings(chosen: Mapping[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        make_method("avspo,probepo,cw_grpo", chosen)


def test_names() -> None:
    assert method_names_of("avspo, probepo+cw_grpo") == method_names_of(["avspo", "probepo", "cw_grpo"])
    assert method_names_of("probepo") == ["probepo"]
    for name in ("probepo,", "probepo,,cw_grpo", "", ["avspo", "probpo"]):
        with pytest.raises(InputError, match=r"method: got '(probpo)?'; expected one of"):
            make_method(name)


def test_no_token_at_all() -> None:
    rollouts = Rollouts.from_lists([[]], ["p"], [1.0], old_logprob=[[]])
    method = make_method("avspo,probepo,cw_grpo")
    assert method.assign(rollouts, Evidence(), method.base(rollouts)).token.shape == (0,)


def test_state_survives_a_round_trip_through_the_settings() -> None:
    """Under the record's name or the names, and through JSON's types, as a checkpoint has them."""
    rollouts, _ = small()
    harder = replace(rollouts, reward=torch.tensor([0.0, 0.0, 1.0, 0.0]))
    method = make_method("rloo,avspo,probepo,cw_grpo", {"probepo": {"alpha": "0.25"}, "cw_grpo.scope": "batch"})
    moved = method.after(rollouts).after(harder)
    assert isinstance(moved, Pipeline) and isinstance(moved.stages[1], AVSPO)
    assert moved.stages[1] == AVSPO(last_mean=0.25, threshold=0.5) and moved.stages[2] == ProbePO(alpha=0.25)
    moved = moved.after(replace(rollouts, reward=torch.zeros(4)))
    # The mean falls from .25 to 0 with ACR 1: τ = .5 − .01·(1 − .5).
    assert moved.settings["avspo"]["threshold"] == pytest.approx(0.495)
    for name in (moved.name, "rloo,avspo,probepo,cw_grpo"):
        assert make_method(name, moved.settings) == moved
        assert make_method(name, moved.model_dump(mode="json")) == moved
    assert moved != method and type(moved) is type(method)
    assert pickle.loads(pickle.dumps(moved)) == moved


@pytest.mark.parametrize("first", ["ep_grpo", "vineppo", "reinforce_pp", "probepo"])
def test_weights_multiply_what_the_method_before_has_made(first: str) -> None:
    """Both its weight on the base and its residual, and again by a second reweighting."""
    rollouts = mixed_batch()
    alone, pipe = make_method(first), compose([make_method(first), CWGRPO(), Weighs(strict=False)])
    plain, both = credit_of(alone, rollouts), credit_of(pipe, rollouts)
    factor = CWGRPO().reweigh(rollouts, plain.token.double())
    by_place = 0.5 + rollouts.position.clamp(max=1)
    torch.testing.assert_close(both.token, (plain.token * factor * by_place).float(), rtol=1e-4, atol=1e-6)
    assert torch.equal(both.base, plain.base) and both.counts == plain.counts


class Lies(CreditMethod):
    """Declares to keep what it does not."""

    name: ClassVar[str] = "lies"
    paper: ClassVar[str] = "none"
    marks: ClassVar[str] = "[ours]"
    extra: float = 0.01

    def assign(self, rollouts: Rollouts, evidence: Evidence, base: Base) -> Credit:
        residual = torch.full((len(rollouts.token_ids),), self.extra, dtype=torch.float64)
        return Credit.form(
            rollouts, base.advantage, residual=residual,
            method=self.name, settings=self.settings, conserves=self.keeps,
        )  # fmt: skip


class Weighs(Reweighting):
    """Weights by place; their mean is 1 only where every response has two tokens."""

    name: ClassVar[str] = "weighs"
    conserves: ClassVar[Conserves] = "token_mean"
    paper: ClassVar[str] = "none"
    marks: ClassVar[str] = "[ours]"

    strict: bool = True

    @property
    def keeps(self) -> Conserves:
        return "token_mean" if self.strict else "none"

    def reweigh(self, rollouts: Rollouts, advantage: Tensor) -> Tensor:
        return 0.5 + rollouts.position.double().clamp(max=1)


def test_a_stage_that_breaks_its_promise_is_named() -> None:
    rollouts, evidence = small()
    base = grpo_base(rollouts)
    with pytest.raises(RuntimeError, match=r"lies declares to keep token_mean and misses it by 0\.01"):
        compose([Lies(), CWGRPO()]).assign(rollouts, evidence, base)
    assert compose([Lies(extra=1e-5), CWGRPO()]).assign(rollouts, evidence, base)
    with pytest.raises(RuntimeError, match="weighs declares to keep token_mean"):
        compose([ProbePO(), Weighs()]).assign(rollouts, evidence, base)
    two = rollouts.select([1, 2])
    apart = replace(two, group=torch.tensor([0, 0]), names=None, reward=torch.tensor([0.0, 1.0]))
    one = compose([GRPO(), Weighs()]).assign(apart, Evidence(), grpo_base(apart))
    assert one.invariants == {"weighs/conserved": 0.0, "conserved": pytest.approx(0.0, abs=1e-7)}


def test_what_is_kept_together() -> None:
    """Weights keep the mean of a constant, not that of what a stage before them has spread."""
    assert compose([RLOO(), Weighs()]).keeps == "token_mean"
    assert compose([RLOO(), Weighs(strict=False)]).keeps == "none"
    assert compose([ProbePO(), Weighs()]).keeps == "none"
    assert compose([Weighs(), CWGRPO()]).keeps == "none"
    assert compose([VinePPO(), Weighs()]).keeps == "none"
