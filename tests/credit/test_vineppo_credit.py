"""VinePPO: which states it measures, its whitening switch and what it counts.

Planted in a copy of the package and seen caught here: no measurement of the query; responses without a reward
measured; whitening over masked tokens.
"""

from __future__ import annotations

import pytest
import torch

from apportion.credit.registry import make_method
from apportion.credit.vineppo import VinePPO
from apportion.errors import InputError
from apportion.measure.evidence import Evidence
from apportion.measure.plan import Job
from apportion.rollouts import Rollouts
from apportion.testing.tools import Entries, evidence_of


def two_prompts() -> Rollouts:
    return Rollouts.from_lists(
        [[1, 2, 3, 4], [1, 2, 5], [6, 7], [8, 9]],
        ["p", "p", "q", "r"],
        [1.0, 1.0, 0.0, None],
        boundary=[[0, 0, 1, 0], [1, 0, 1], [0, 0], [0, 1]],
        mask=[[1, 1, 1, 1], [1, 0, 1], [1, 1], [1, 1]],
    )


def test_the_query_once_a_group_and_every_step_once_a_state() -> None:
    """Equal rewards and a single response are measured too; a response without a reward is not."""
    rollouts = two_prompts()
    method = VinePPO(samples=3)
    assert method.plan(rollouts, method.base(rollouts)) == [
        Job(0, 0, 3, ((0, 0), (1, 0))),
        Job(0, 2, 3, ((0, 2), (1, 2))),
        Job(2, 0, 3, ((2, 0),)),
    ]
    assert method.refine(rollouts, method.base(rollouts), Evidence()) == []


def test_steps_come_from_text() -> None:
    rollouts = Rollouts.from_lists([[1, 2, 3, 4, 5]], ["p"], [1.0], text=("ab\ncd",), char_start=[[0, 1, 2, 3, 5]])
    jobs = VinePPO().plan(rollouts, VinePPO().base(rollouts))
    assert [(job.position, job.samples) for job in jobs] == [(0, 9), (3, 9)]


def test_whitening_is_over_the_trainable_tokens_of_the_batch() -> None:
    rollouts = two_prompts()
    entries = Entries([(0, 0, [1.0, 0.0]), (1, 0, [1.0, 0.0]), (1, 2, [0.0]), (2, 0, [1.0, 1.0])])
    evidence, base = evidence_of(rollouts, entries), VinePPO().base(rollouts)
    plain = VinePPO().assign(rollouts, evidence, base).token
    # Row 0: 1 − .5. Row 1: 0 − .5, masked, 1 − 0. Row 2: 0 − 1.
    assert plain.tolist() == [0.5, 0.5, 0.5, 0.5, -0.5, 0, 1, -1, -1, 0, 0]
    white = VinePPO(whiten=True, ddof=0, epsilon=0).assign(rollouts, evidence, base).token
    used = plain[:9][rollouts.mask[:9]].double()
    # Eight tokens: Σ = 2 − .5 + 1 − 2 = .5, Σ² = 4·.25 + .25 + 1 + 2 = 4.25; σ² = 4.25/8 − (.5/8)².
    wanted = (used - 0.0625) / (4.25 / 8 - 0.0625**2) ** 0.5
    torch.testing.assert_close(white[:9][rollouts.mask[:9]], wanted.float())
    assert white[5] == 0 and not white[9:].any()


def test_what_was_not_measured_is_counted() -> None:
    rollouts = two_prompts()
    method = VinePPO()
    credit = method.assign(
        rollouts, evidence_of(rollouts, Entries([(0, 2, [1.0]), (1, 0, [None])])), method.base(rollouts)
    )
    # Row 0 has two tokens before its first value; rows 1 and 2 have no value: 2 + 2 trainable tokens.
    assert credit.counts == {"pivots": 1, "dropped_pivots": 1, "unmeasured_tokens": 6}
    assert not credit.token.any(), "1 − 1 after the only value, and nothing before it"


def test_missing_evidence_is_named() -> None:
    method = make_method("vineppo")
    with pytest.raises(InputError, match=r"vineppo: evidence\.continuations"):
        method.assign(two_prompts(), Evidence(), method.base(two_prompts()))
