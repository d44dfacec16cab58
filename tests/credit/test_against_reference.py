"""Every method against its slow reference, and the properties that its paper promises, on random batches.

Planted in a copy of the package and seen caught here: the sign of the increment; a segment that starts one
token late (off by one at τ); the wrong ddof; centring over masked tokens too; the mean of the whole batch (a
reward that leaks across groups); shrinkage towards 0 instead of μ; the increment divided by its segment's
length; masked entropies inside the forward window; a window one too long; the shortlist rounded down; ties
given to the higher response; a discount that counts masked tokens; OPO weighted by all tokens; RLOO by group
size instead of scored members; a shared state that counts more than once against the budget.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import reference
from apportion.credit.registry import make_method
from apportion.groups import Base, grpo_base
from apportion.measure.evidence import Continuations, Evidence
from strategies import Batch, batches

SLOW = {
    "grpo": lambda b, s: reference.grpo(b.responses, **s),
    "dr_grpo": lambda b, s: reference.dr_grpo(b.responses),
    "rloo": lambda b, s: reference.rloo(b.responses),
    "opo": lambda b, s: reference.opo(b.responses),
    "reinforce_pp": lambda b, s: reference.reinforce_pp(b.responses, **s),
    "reinforce_pp_baseline": lambda b, s: reference.reinforce_pp_baseline(b.responses, **s),
    "vineppo": lambda b, s: reference.vineppo(b.responses, b.measured()),
    "probepo": lambda b, s: reference.probepo(b.responses, b.measured(), **s),
}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("grpo", {"ddof": 1, "epsilon": 1e-4}),
    ("grpo", {"ddof": 0, "epsilon": 1e-8}),
    ("dr_grpo", {}),
    ("rloo", {}),
    ("opo", {}),
    ("reinforce_pp", {"gamma": 1.0}),
    ("reinforce_pp", {"gamma": 0.5, "ddof": 0}),
    ("reinforce_pp", {"gamma": 0.0}),
    ("reinforce_pp_baseline", {}),
    ("reinforce_pp_baseline", {"ddof": 0, "epsilon": 1e-4}),
    ("vineppo", {}),
    ("probepo", {"alpha": 0.5, "n0": 4.0}),
    ("probepo", {"alpha": 1.0, "n0": 0.0, "ddof": 0, "epsilon": 1e-8}),
]


@pytest.mark.parametrize("name, settings_", CASES, ids=lambda v: v if isinstance(v, str) else str(v))
@settings(max_examples=60)
@given(batch=batches())
def test_equals_reference(name: str, settings_: dict[str, Any], batch: Batch) -> None:
    rollouts, method = batch.rollouts(), make_method(name, settings_)
    token = method.assign(rollouts, batch.evidence(), method.base(rollouts)).token
    wanted = torch.tensor([a for row in SLOW[name](batch, settings_) for a in row])
    torch.testing.assert_close(token, wanted, rtol=1e-5, atol=1e-5)


PLANS: list[dict[str, Any]] = [
    {"budget": 8, "samples": 4, "window": 3, "shortlist": 0.5, "min_gap": 4},
    {"budget": 3, "samples": 1, "window": 1, "shortlist": 0.3, "min_gap": 1},
    {"budget": 40, "samples": 8, "window": 8, "shortlist": 1.0, "min_gap": 16},
]


@pytest.mark.parametrize("plan", PLANS, ids=str)
@settings(max_examples=80)
@given(batch=batches())
def test_probepo_plan_equals_reference(plan: dict[str, Any], batch: Batch) -> None:
    rollouts, method = batch.rollouts(), make_method("probepo", plan)
    jobs = method.plan(rollouts, method.base(rollouts))
    wanted = reference.probepo_plan(batch.responses, **plan)
    assert sorted(sorted(job.pivots) for job in jobs) == sorted(sorted(state) for state in wanted)
    assert all(job.samples == plan["samples"] for job in jobs)
    for group in range(rollouts.groups):
        spent = sum(job.samples for job in jobs if rollouts.group[job.row] == group)
        assert spent <= plan["budget"]


@settings(max_examples=60)
@given(batch=batches(), alpha=st.sampled_from([0.25, 1.0, 3.0]), n0=st.sampled_from([0, 1, 8]))
def test_probepo_proposition_1(batch: Batch, alpha: float, n0: int) -> None:
    """The mean of A over trainable tokens is A_base, and Σ increments = r − μ in every live response."""
    rollouts = batch.rollouts()
    base = grpo_base(rollouts)
    credit = make_method("probepo", {"alpha": alpha, "n0": n0}).assign(rollouts, batch.evidence(), base)
    tokens, masks = (t.split(rollouts.length.tolist()) for t in (credit.token, rollouts.mask))
    cut = credit.segments
    assert cut is not None
    for row, y in enumerate(batch.responses):
        if not base.live[row]:
            assert not tokens[row].any()
            continue
        mean = tokens[row][masks[row]].double().mean()
        assert mean.item() == pytest.approx(base.advantage[row].item(), abs=1e-5)
        total = cut.increment[cut.row == row].sum().item()
        assert total == pytest.approx(y.reward - base.mean[row].item(), abs=1e-9)
    assert credit.invariants["telescoping"] < 1e-9
    assert credit.invariants["conserved"] < 1e-5


@settings(max_examples=40)
@given(batch=batches())
def test_vineppo_telescopes(batch: Batch) -> None:
    """From the first measured state on, what the steps get adds up to r − V there."""
    rollouts = batch.rollouts()
    method = make_method("vineppo")
    cut = method.assign(rollouts, batch.evidence(), method.base(rollouts)).segments
    assert cut is not None
    for row, y in enumerate(batch.responses):
        mine = cut.row == row
        first = [value for value in cut.raw[mine].tolist() if value == value]
        if y.scored and first:
            assert cut.increment[mine].sum().item() == pytest.approx(y.reward - first[0], abs=1e-9)


@settings(max_examples=40)
@given(batch=batches(), scale=st.sampled_from([1e-3, 1.0, 7.0]))
@example(Batch([], []), 1.0)
def test_host_base_comes_through_bit_for_bit(batch: Batch, scale: float) -> None:
    """GRPO, and ProbePO with α = 0 or without a pivot, hand back whatever numbers the host gave."""
    rollouts = batch.rollouts()
    base = grpo_base(rollouts)
    odd = torch.linspace(-1, 1, len(rollouts)) / 3 * scale
    host = Base(odd, base.mean + 0.1, base.scale * 3, base.live)
    wanted = torch.where(rollouts.mask, odd[rollouts.row], 0.0)
    no_pivot = Evidence(Continuations.from_rewards(rollouts, []))
    for method, evidence in (
        (make_method("grpo"), Evidence()),
        (make_method("probepo", {"alpha": 0}), Evidence()),
        (make_method("probepo", {"alpha": 0}), batch.evidence()),
        (make_method("probepo", {"alpha": 1}), no_pivot),
    ):
        credit = method.assign(rollouts, evidence, host)
        assert torch.equal(credit.token, wanted)
        assert torch.equal(credit.base, odd)


@settings(max_examples=40)
@given(batch=batches(), shift=st.integers(1, 1000))
def test_token_ids_are_only_names(batch: Batch, shift: int) -> None:
    """Renaming the vocabulary changes neither what is measured nor what is assigned."""
    method = make_method("probepo", {"window": 2, "min_gap": 2})
    rollouts = batch.rollouts()
    for response in batch.responses:
        response.ids = [token * 17 + shift for token in response.ids]
    renamed = batch.rollouts()
    base = method.base(rollouts)
    assert method.plan(rollouts, base) == method.plan(renamed, base)
    one, other = (method.assign(b, batch.evidence(), base).token for b in (rollouts, renamed))
    assert torch.equal(one, other)


@settings(max_examples=40)
@given(batch=batches(), by=st.sampled_from([0.5, 2.0, 8.0]), shift=st.sampled_from([-4.0, 0.5, 16.0]))
def test_probepo_does_not_depend_on_the_unit_of_reward(batch: Batch, by: float, shift: float) -> None:
    """With ε = 0 a reward of a·r + b gives the same credit: values shrink towards μ and are divided by σ."""
    method = make_method("probepo", {"epsilon": 0.0})
    rollouts = batch.rollouts()
    token = method.assign(rollouts, batch.evidence(), method.base(rollouts)).token
    for response in batch.responses:
        response.reward = by * response.reward + shift
    batch.entries = [
        (row, at, [None if r is None else by * r + shift for r in rewards]) for row, at, rewards in batch.entries
    ]
    rollouts = batch.rollouts()
    again = method.assign(rollouts, batch.evidence(), method.base(rollouts)).token
    torch.testing.assert_close(again, token, rtol=1e-4, atol=1e-4)
