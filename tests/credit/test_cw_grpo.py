"""CW-GRPO: the weights, their scope and their mean.

Planted in a copy of the package and seen caught here: A or log π not centred; σ_c about 0; the factor 2 dropped;
weights that grow with c; weights not normalised; exp that underflows; equal A, log π or c, or a σ_c of rounding, taken
for a spread; equality by an absolute bound; masked tokens or responses without a reward in the scope; the two scopes
swapped; an invariant that is always 0; `batch_wide` always False.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings

import reference_weights as slow
from apportion.credit.cw_grpo import CWGRPO
from apportion.errors import InputError
from apportion.groups import grpo_base
from apportion.measure.evidence import Evidence
from apportion.rollouts import Rollouts
from apportion.testing.laws import LAWS, Law
from strategies import Batch, batches

VARIANTS: list[dict[str, Any]] = [{}, {"scope": "batch"}]


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
@pytest.mark.parametrize("chosen", VARIANTS, ids=str)
def test_law(chosen: dict[str, Any], law: Law) -> None:
    law(CWGRPO(**chosen))


@pytest.mark.parametrize("scope", ["group", "batch"])
@pytest.mark.parametrize("varies", [False, True])
@settings(max_examples=60)
@given(batch=batches())
def test_equals_reference(scope: str, varies: bool, batch: Batch) -> None:
    """On the base, and on advantages that another method has spread over the tokens."""
    logprob = slow.eighths(batch.responses, "policy")
    rollouts = replace(batch.rollouts(), old_logprob=torch.tensor([x for row in logprob for x in row]))
    base, method = grpo_base(rollouts), CWGRPO(scope=scope)
    fill = random.Random(len(rollouts.token_ids))
    spread = [
        [(a + varies * fill.randrange(-8, 9) / 8) * m for m in y.mask]
        for y, a in zip(batch.responses, base.advantage.tolist(), strict=True)
    ]
    weights = slow.cw_weights(batch.responses, spread, logprob, scope)
    given_ = torch.tensor([a for row in spread for a in row], dtype=torch.float64)
    weight = method.reweigh(rollouts, given_)
    wanted = torch.tensor([w for row in weights for w in row], dtype=torch.float64)
    torch.testing.assert_close(weight, wanted, rtol=1e-9, atol=1e-9)
    assert method.invariants(rollouts, weight)["mean_weight"] < 1e-12
    if not varies:
        token = method.assign(rollouts, Evidence(), base).token
        torch.testing.assert_close(token, (wanted * given_).float(), rtol=1e-5, atol=1e-6)


def of_logprobs(logprob: list[list[float]], reward: list[float | None], group: str, **rest: Any) -> Rollouts:
    return Rollouts.from_lists([[1] * len(row) for row in logprob], list(group), reward, old_logprob=logprob, **rest)


GOLDEN = [[-0.1, -2.0, -0.05], [-0.3, -1.5, -0.2]]


def test_published_numbers() -> None:
    """Mean log π = −4.15/6 = −.69167 and mean A = 0: c = (.59167, −1.30833, .64167, −.39167, .80833, −.49167).

    Mean c = −.15/6 = −.025; Σc² = 3.52213; σ_c = √(3.52213/6 − .025²) = .76578. w = exp(−c²/1.17285) =
    (.7420, .2323, .7039, .8774, .5729, .8137), Σ = 3.9422, and w·6/Σ as below.
    """
    advantage = torch.tensor([1.0, 1, 1, -1, -1, -1], dtype=torch.float64)
    weight = CWGRPO().reweigh(of_logprobs(GOLDEN, [1.0, 0.0], "pp"), advantage)
    assert weight.tolist() == pytest.approx([1.1292, 0.3536, 1.0714, 1.3354, 0.8719, 1.2385], abs=5e-5)


def test_what_is_in_the_scope() -> None:
    """Masked tokens, responses without a reward and, for `group`, other groups neither count nor get a weight."""
    rollouts = of_logprobs(
        [[-0.1, -2.0, -9.0, -0.05], [-0.3, -1.5, -0.2], [-7.0, -3.0], [-1.0, -2.0], [-4.0]],
        [1.0, 0.0, None, 1.0, 0.0], "pppqq", mask=[[1, 1, 0, 1], [1, 1, 1], [1, 1], [1, 1], [1]],
    )  # fmt: skip
    base = grpo_base(rollouts, ddof=0, epsilon=0.0)
    credit = CWGRPO().assign(rollouts, Evidence(), base)
    assert credit.weight is not None
    golden = [1.1292, 0.3536, 1.0, 1.0714, 1.3354, 0.8719, 1.2385, 1.0, 1.0]
    assert credit.weight[:9].tolist() == pytest.approx(golden, abs=5e-5)
    assert credit.token[:9].tolist() == pytest.approx(
        [1.1292, 0.3536, 0, 1.0714, -1.3354, -0.8719, -1.2385, 0, 0], abs=5e-5
    )
    wide = CWGRPO(scope="batch").assign(rollouts, Evidence(), base).weight
    assert wide is not None and (wide[:9] - credit.weight[:9]).abs().max() > 0.1
    assert CWGRPO(scope="batch").batch_wide and not CWGRPO().batch_wide


def test_the_sign_of_the_advantage_does_not_matter() -> None:
    rollouts = of_logprobs(GOLDEN, [1.0, 0.0], "pp")
    advantage = torch.tensor([0.3, 2, 1, -1, -1, -0.5], dtype=torch.float64)
    torch.testing.assert_close(CWGRPO().reweigh(rollouts, advantage), CWGRPO().reweigh(rollouts, -advantage))


@pytest.mark.parametrize("size", [1 / 7, 1e6 / 7])
def test_equal_parts_leave_the_weights_at_1(size: float) -> None:
    """Two values of each, opposite: every c is the same. A mean over many is off by what the sum rounds."""
    rollouts = of_logprobs([[-0.1] * 9000, [-2.3] * 9000], [1.0, 0.0], "pp")
    advantage = torch.tensor([0.7, -0.9], dtype=torch.float64)[rollouts.row] * size
    assert (CWGRPO().reweigh(rollouts, advantage) == 1).all()


@pytest.mark.parametrize("size", [1 / 7, 1e6 / 7])
def test_one_value_for_all_leaves_the_weights_at_1(size: float) -> None:
    """Of the advantages, or of the log-probabilities (a host may give them in float64)."""
    rollouts = of_logprobs([[-0.1, -1.0, -3.0] * 6000], [1.0], "p")
    constant = torch.full((18000,), size, dtype=torch.float64)
    assert (CWGRPO().reweigh(rollouts, constant) == 1).all()
    flat = replace(rollouts, old_logprob=-constant)
    assert (CWGRPO().reweigh(flat, torch.arange(18000, dtype=torch.float64)) == 1).all()


def test_a_covariance_of_nothing_but_rounding_leaves_the_weights_at_1() -> None:
    """σ_c < 1e-12."""
    rollouts = of_logprobs(GOLDEN, [1.0, 0.0], "pp")
    residue = torch.tensor([1.0, 0, -1, 2, 0, 1], dtype=torch.float64) * 1e-16
    assert CWGRPO().reweigh(rollouts, residue).tolist() == [1.0] * 6


def test_small_advantages_are_weighed_as_large_ones() -> None:
    rollouts = of_logprobs(GOLDEN, [1.0, 0.0], "pp")
    advantage = torch.tensor([1.0, 1, 1, -1, -1, -1], dtype=torch.float64)
    torch.testing.assert_close(CWGRPO().reweigh(rollouts, advantage * 1e-9), CWGRPO().reweigh(rollouts, advantage))


def test_a_covariance_far_above_its_deviation_underflows_to_nothing() -> None:
    """c = 1, 511/512, 1, 511/512 and σ_c = 1/1024: exp(−c²/2σ_c²) is 0 in float64, and the weights average 1 anyway."""
    step = 1 / 512
    rollouts = of_logprobs([[-1.0, -1.0 - step], [-3.0, -3.0 + step]], [1.0, 0.0], "pp")
    weight = CWGRPO().reweigh(rollouts, torch.tensor([1.0, 1.0, -1.0, -1.0], dtype=torch.float64))
    assert torch.isfinite(weight).all() and weight.mean().item() == pytest.approx(1.0)
    # The two with the smaller c share it all.
    assert weight.tolist() == pytest.approx([0.0, 2.0, 0.0, 2.0], abs=1e-6)


def test_the_invariant_measures() -> None:
    rollouts = of_logprobs([*GOLDEN, [-1.0]], [1.0, 0.0, 1.0], "ppq")
    weight = torch.ones(7, dtype=torch.float64)
    assert CWGRPO().invariants(rollouts, weight) == {"mean_weight": 0.0}
    weight[:3] = 1.5
    # Group p: 1.5·3/6 + 3/6 = 1.25.
    assert CWGRPO().invariants(rollouts, weight)["mean_weight"] == pytest.approx(0.25)
    assert CWGRPO().assign(rollouts, Evidence(), grpo_base(rollouts)).invariants["mean_weight"] < 1e-12


def test_missing_logprobs_are_named() -> None:
    rollouts = replace(of_logprobs(GOLDEN, [1.0, 0.0], "pp"), old_logprob=None)
    with pytest.raises(InputError, match="cw_grpo: old_logprob: got none"):
        CWGRPO().assign(rollouts, Evidence(), grpo_base(rollouts))
