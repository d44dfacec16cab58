"""EP-GRPO: its gate, its progress coordinate and what is standardised with what.

Planted in a copy of the package and seen caught here: the gate's slope turned; a sample deviation of entropies or
inside a bucket; progress not gated; log π_ref − log π; λ dropped; direction by the advantage in collapsed groups, by
the reward in the others, or of a rounding residue; buckets of the batch instead of the group; edges closed below;
progress up to and without the token; rounding at an edge; masked tokens counted in t/T; masked tokens or responses
without a reward in the statistics; a mean gate over masked tokens; negative entropies left in; W = 1 where σ_H is 0;
θ_r ignored.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings

import reference_weights as slow
from apportion.credit.ep_grpo import EPGRPO
from apportion.errors import InputError
from apportion.groups import Base, grpo_base
from apportion.measure.evidence import Evidence
from apportion.rollouts import Rollouts
from apportion.testing.laws import LAWS, Law
from strategies import Batch, batches

VARIANTS: list[dict[str, Any]] = [
    {},
    {"buckets": 3, "gamma": -0.5, "eta": 0.7},
    {"buckets": 1, "reward_threshold": 0.0, "lambda_": 2.0},
    {"mean_gate": True},
]


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
@pytest.mark.parametrize("chosen", VARIANTS, ids=str)
def test_law(chosen: dict[str, Any], law: Law) -> None:
    law(EPGRPO(**chosen))


@pytest.mark.parametrize("chosen", VARIANTS, ids=str)
@settings(max_examples=60)
@given(batch=batches())
def test_equals_reference(chosen: dict[str, Any], batch: Batch) -> None:
    logprob, ref = (slow.eighths(batch.responses, name) for name in ("policy", "reference"))
    flat = {"old_logprob": logprob, "ref_logprob": ref}
    rollouts = replace(batch.rollouts(), **{k: torch.tensor([x for row in v for x in row]) for k, v in flat.items()})
    base = grpo_base(rollouts)
    token = EPGRPO(**chosen).assign(rollouts, Evidence(), base).token
    wanted = slow.ep_grpo(batch.responses, base.advantage.tolist(), logprob, ref, **chosen)
    torch.testing.assert_close(token, torch.tensor([a for row in wanted for a in row]), rtol=1e-4, atol=1e-5)


def batch_of(
    entropy: list[list[float]],
    signal: list[list[float]],
    reward: list[float | None],
    group: str | None = None,
    mask: list[list[int]] | None = None,
) -> Rollouts:
    """log π − log π_ref is `signal`, exactly."""
    return Rollouts.from_lists(
        [[1] * len(row) for row in entropy], list(group or "p" * len(entropy)), reward, mask=mask, entropy=entropy,
        old_logprob=[[-16.0] * len(row) for row in entropy], ref_logprob=[[-16.0 - s for s in row] for row in signal],
    )  # fmt: skip


def assigned(method: EPGRPO, rollouts: Rollouts, advantage: list[float] | None = None) -> list[float]:
    base = grpo_base(rollouts)
    if advantage is not None:
        base = Base(torch.tensor(advantage), base.mean, base.scale, base.live)
    return method.assign(rollouts, Evidence(), base).token.tolist()


def test_numbers() -> None:
    """Entropies 0, 2 | 2, 0: μ_H = σ_H = 1, W = sigmoid(−1), sigmoid(1), sigmoid(1), sigmoid(−1).

    τ = 0, 1 | 1, 1, so with K = 2 the first token is alone in bucket 0. In bucket 1, with A = 1 and −1:
    p = 1, −.25, .5: mean 5/12; distances 7/12, −8/12, 1/12; variance (49 + 64 + 1)/144/3 = 19/72.
    """
    rollouts = batch_of([[0, 2], [2, 0]], [[0.5, 1.0], [0.25, -0.5]], [1.0, 0.0])
    got = assigned(EPGRPO(buckets=2), rollouts, [1.0, -1.0])
    low, high = 1 / (1 + math.e), math.e / (1 + math.e)
    scale = math.sqrt(19 / 72) + 1e-6
    wanted = [low, high * (1 + 0.1 * 7 / 12 / scale), high * (-1 - 0.1 * 8 / 12 / scale), low * (-1 + 0.1 / 12 / scale)]
    assert got == pytest.approx(wanted, abs=1e-6)


def test_tokens_at_the_same_progress_are_compared() -> None:
    """Ten equal entropies: the token at t has τ = (t + 1)/10, the end of bucket t.

    σ_H = 0, so W = .5; a pair of values is ±1 after standardisation. Tokens of other places must not enter.
    """
    one, other = [0.3 * (t + 1) for t in range(10)], [2.0 - t for t in range(10)]
    rollouts = batch_of([[0.7] * 10] * 2, [one, other], [1.0, 0.0])
    got = assigned(EPGRPO(), rollouts, [1.0, -1.0])
    # Row 1 is a failure: its p is −s. Places where the two agree would standardise to 0; there are none.
    up = [1 if a > -b else -1 for a, b in zip(one, other, strict=True)]
    assert got[:10] == pytest.approx([0.5 + 0.05 * s for s in up], abs=1e-6)
    assert got[10:] == pytest.approx([-0.5 - 0.05 * s for s in up], abs=1e-6)


def test_rounding_moves_no_token_into_the_next_bucket() -> None:
    """10·(.1 + .2) comes out above 3, yet the second token ends bucket 2, as row 1's first with its .3 does."""
    rollouts = batch_of([[0.0] * 3, [0.0] * 2], [[1.0, 1.0, 1.0], [3.0, 3.0]], [1.0, 1.0])
    rollouts = replace(rollouts, entropy=torch.tensor([0.1, 0.2, 0.7, 0.3, 0.7], dtype=torch.float64))
    credit = EPGRPO().assign(rollouts, Evidence(), grpo_base(rollouts))
    assert credit.weight is not None
    assert (credit.token / credit.weight).tolist() == pytest.approx([0, -0.1, -0.1, 0.1, 0.1], abs=1e-6)


def test_without_entropy_progress_is_the_place_among_trainable_tokens() -> None:
    """τ = t/T with T = 3 in both rows, masked tokens not counted: signals .5 and 3, then 1 and .25, then 2 and 5.

    All are right, so A = 0 and d = 1; a pair is ±1 when standardised; W = .5, η = .1. −.005 is a bf16 engine's 0.
    """
    rollouts = batch_of(
        [[0.0] * 5, [-0.005] * 3], [[0.5, 9.0, 9.0, 1.0, 2.0], [3.0, 0.25, 5.0]], [1.0, 1.0],
        mask=[[1, 0, 0, 1, 1], [1, 1, 1]],
    )  # fmt: skip
    got = assigned(EPGRPO(buckets=3), rollouts)
    assert got == pytest.approx([-0.05, 0, 0, 0.05, -0.05, 0.05, -0.05, 0.05], abs=1e-6)


@pytest.mark.parametrize("reward, direction", [(1.0, 1), (0.0, -1), (0.5, 0), (0.5 + 1e-7, 0)])
def test_collapsed_groups_go_by_the_reward_threshold(reward: float, direction: int) -> None:
    rollouts = batch_of([[1.0], [1.0]], [[1.0], [3.0]], [reward, reward])
    assert assigned(EPGRPO(), rollouts) == pytest.approx([-0.05 * direction, 0.05 * direction], abs=1e-6)


def test_a_residue_of_the_mean_has_no_direction() -> None:
    """.1, .3 and .2 have the mean .20000000000000004 in float64: the third is neither good nor bad."""
    rollouts = batch_of([[1.0]] * 3, [[1.0], [1.0], [1.0]], [0.1, 0.3, 0.2])
    base = grpo_base(rollouts)
    nudged = replace(base, advantage=base.advantage + torch.tensor([0.0, 0.0, 1e-7]))
    # p = −1, 1, 0: mean 0, deviation √(2/3).
    token = EPGRPO(eta=1.0).assign(rollouts, Evidence(), nudged).token
    assert token[2].item() == pytest.approx(0.0, abs=1e-6)
    assert token[1].item() - 0.5 * base.advantage[1].item() == pytest.approx(0.5 * math.sqrt(1.5), abs=1e-5)


def test_groups_are_not_compared_with_each_other() -> None:
    """Each bucket holds one token of its group, so that nothing is left of the signal."""
    rollouts = batch_of([[1.0]] * 2, [[1.0], [9.0]], [1.0, 1.0], group="pq")
    assert assigned(EPGRPO(), rollouts) == [0.0, 0.0]


def test_mean_gate() -> None:
    rollouts = batch_of([[0.1, 2.0, 9.0], [0.3, 0.0]], [[1.0] * 3, [1.0] * 2], [1.0, 0.0], mask=[[1, 1, 1], [1, 0]])
    weight = EPGRPO(mean_gate=True).assign(rollouts, Evidence(), grpo_base(rollouts)).weight
    assert weight is not None and weight[rollouts.mask].mean().item() == pytest.approx(1.0, abs=1e-12)


def test_lambda_turns_the_signal() -> None:
    rollouts = batch_of([[1.0], [1.0]], [[1.0], [3.0]], [1.0, 1.0])
    assert assigned(EPGRPO(lambda_=0.0), rollouts) == [0.0, 0.0]
    assert assigned(EPGRPO(lambda_=-2.0), rollouts) == pytest.approx([0.05, -0.05], abs=1e-6)


@pytest.mark.parametrize("field", ["entropy", "old_logprob", "ref_logprob"])
def test_a_missing_field_is_named(field: str) -> None:
    rollouts = replace(batch_of([[1.0]], [[1.0]], [1.0]), **{field: None})
    with pytest.raises(InputError, match=f"ep_grpo: {field}: got none"):
        assigned(EPGRPO(), rollouts)
