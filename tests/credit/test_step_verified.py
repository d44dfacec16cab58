"""Step-verified credit: φ of each step and the token it is laid on.

Planted in a copy of the package and seen caught here: the mean outcome not taken off; the failed step counted before
its failure; the last failure taken for the first; a proof right by its steps alone or by its outcome alone; verdicts on
masked tokens; first and last swapped; a step that reaches into the next response; one token late; steps of responses
without a reward counted; verdicts not demanded.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings

import reference_weights as slow
from apportion.credit.step_verified import StepVerified
from apportion.errors import InputError
from apportion.groups import Base, grpo_base
from apportion.measure.evidence import Evidence, StepLabels
from apportion.rollouts import Rollouts
from apportion.testing.laws import LAWS, Law
from strategies import Batch, batches

VARIANTS: list[dict[str, Any]] = [
    {},
    {"placement": "last"},
    {"placement": "all", "right": 0.5, "before_failure": 0.25, "from_failure": -1.0, "reward_threshold": 0.0},
]


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
@pytest.mark.parametrize("chosen", VARIANTS, ids=str)
def test_law(chosen: dict[str, Any], law: Law) -> None:
    law(StepVerified(**chosen))


@pytest.mark.parametrize("chosen", VARIANTS, ids=str)
@settings(max_examples=60)
@given(batch=batches())
def test_equals_reference(chosen: dict[str, Any], batch: Batch) -> None:
    fill = random.Random(sum(len(y.ids) for y in batch.responses))
    steps = {i: [(t, fill.random() < 0.8) for t in y.starts] for i, y in enumerate(batch.responses)}
    rollouts = batch.rollouts()
    base = grpo_base(rollouts)
    entries = [(i, t, ok) for i, found in steps.items() for t, ok in found]
    fill.shuffle(entries)
    labels = StepLabels.from_entries(rollouts, entries, range(len(rollouts)))
    token = StepVerified(**chosen).assign(rollouts, Evidence(steps=labels), base).token
    wanted = slow.step_verified(batch.responses, base.advantage.tolist(), base.mean.tolist(), steps, **chosen)
    torch.testing.assert_close(token, torch.tensor([a for row in wanted for a in row]), rtol=1e-6, atol=1e-6)


def four() -> tuple[Rollouts, Base]:
    """A proof that is right, one that fails at its second step, one that is all ok and wrong, one without a step."""
    rollouts = Rollouts.from_lists(
        [[1] * 6, [1] * 5, [1] * 3, [1] * 2], ["p"] * 4, [1.0, 0.0, 0.0, 1.0],
        mask=[[1, 1, 1, 1, 1, 1], [1, 1, 0, 1, 1], [1, 1, 1], [1, 1]],
    )  # fmt: skip
    ones = torch.ones(4, dtype=torch.float64)
    return rollouts, Base(torch.tensor([2.0, -2.0, -2.0, 2.0]), 0.5 * ones, 0.25 * ones, ones.bool())


ENTRIES = [(0, 1, True), (0, 4, True), (1, 0, True), (1, 2, False), (1, 4, True), (2, 0, True)]


def assigned(method: StepVerified, entries: list[tuple[int, int, bool]] = ENTRIES) -> list[float]:
    rollouts, base = four()
    steps = StepLabels.from_entries(rollouts, entries, range(4))
    return method.assign(rollouts, Evidence(steps=steps), base).token.tolist()


def test_numbers() -> None:
    """The group's mean outcome is .5: φ − .5 = .5 in a right proof, −.55 before the failure, −.6 from it on.

    The second step of row 1 starts at a masked token: its verdict goes to the next one. All of row 2's steps are
    ok, its answer is not: −.05.
    """
    assert assigned(StepVerified()) == pytest.approx(
        [2, 2.5, 2, 2, 2.5, 2, -2.55, -2, 0, -2.6, -2.6, -2.55, -2, -2, 2, 2]
    )


def test_placements() -> None:
    assert assigned(StepVerified(placement="last")) == pytest.approx(
        [2, 2, 2, 2.5, 2, 2.5, -2, -2.55, 0, -2.6, -2.6, -2, -2, -2.55, 2, 2]
    )
    assert assigned(StepVerified(placement="all")) == pytest.approx(
        [2, 2.5, 2.5, 2.5, 2.5, 2.5, -2.55, -2.55, 0, -2.6, -2.6, -2.55, -2.55, -2.55, 2, 2]
    )


def test_a_failed_step_makes_a_right_answer_no_right_proof() -> None:
    got = assigned(StepVerified(), [(0, 0, True), (0, 3, False)])
    assert got[:6] == pytest.approx([2 - 0.55, 2, 2, 2 - 0.6, 2, 2])


def test_a_step_without_a_trainable_token_is_laid_nowhere() -> None:
    got = assigned(StepVerified(), [(1, 0, True), (1, 2, False), (1, 3, True)])
    assert got[6:11] == pytest.approx([-2.55, -2, 0, -2.6, -2])


def test_settings() -> None:
    method = StepVerified(right=3, before_failure=1, from_failure=-1, reward_threshold=-1)
    # A threshold of −1 takes row 2 for right: 3 − .5.
    assert assigned(method) == pytest.approx(
        [2, 4.5, 2, 2, 4.5, 2, -2 + 0.5, -2, 0, -2 - 1.5, -2 - 1.5, -2 + 2.5, -2, -2, 2, 2]
    )


def test_counts_leave_out_responses_without_a_reward() -> None:
    rollouts = Rollouts.from_lists([[1], [1], [1]], ["p"] * 3, [1.0, 0.0, None])
    steps = StepLabels.from_entries(rollouts, [(0, 0, True), (1, 0, False), (2, 0, False)], range(3))
    credit = StepVerified().assign(rollouts, Evidence(steps=steps), grpo_base(rollouts))
    assert credit.counts == {"steps": 2, "failed_steps": 1}


def test_missing_verdicts_are_named() -> None:
    rollouts, base = four()
    with pytest.raises(InputError, match=r"step_verified: evidence\.steps of row 0: got nothing"):
        StepVerified().assign(rollouts, Evidence(), base)
    steps = StepLabels.from_entries(rollouts, ENTRIES, [0, 1, 3])
    with pytest.raises(InputError, match=r"step_verified: evidence\.steps of row 2: got nothing"):
        StepVerified().assign(rollouts, Evidence(steps=steps), base)
