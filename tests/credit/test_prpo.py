"""PRPO: its weights, what it asks for and what it keeps.

Planted in a copy of the package and seen caught here: tokens below the threshold lowered; the boost not scaled;
masked tokens counted; no log1p; weights whose sum is not kept; collapsed groups measured.
"""

from __future__ import annotations

import random
from math import exp
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from pydantic import ValidationError

import reference_answers as slow
from apportion.credit.method import CreditMethod
from apportion.credit.prpo import PRPO
from apportion.errors import InputError
from apportion.groups import Base
from apportion.measure.evidence import Evidence, Importance
from apportion.measure.plan import DivergenceJob
from apportion.rollouts import Rollouts
from apportion.testing.laws import LAWS, Law
from apportion.testing.tools import measure, mixed_batch
from strategies import Batch, batches

SETTINGS: list[CreditMethod] = [
    PRPO(),
    PRPO(beta=0.5, threshold=0.0),
    PRPO(beta=6.0, threshold=0.9, disturb=1.0, seed=4),
]


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
@pytest.mark.parametrize("method", SETTINGS, ids=lambda m: f"{m.beta}-{m.threshold}")
def test_law(method: CreditMethod, law: Law) -> None:
    law(method)


def test_numbers() -> None:
    """log1p(I) = (0, 2, 3.5, 5), and a masked token of 9: n = (0, .4, .7, 1). β = 2, τ = .4: the second token is at
    the threshold and gets 1 + 0, the third 1 + 2·.3/.6 = 2, the last 3. Σ = 7 over 4 tokens: times 4/7.
    """
    rollouts = Rollouts.from_lists([[1] * 5, [1]], ["a", "a"], [1.0, 0.0], mask=[[1, 1, 0, 1, 1], [1]])
    values = [exp(v) - 1 for v in (0, 2, 9, 3.5, 5)]
    evidence = Evidence(importance=Importance.from_rows(rollouts, [values, [0.7]]))
    base = Base(torch.tensor([2.0, -2.0]), torch.full((2,), 0.5).double(), torch.ones(2).double(), torch.ones(2).bool())
    credit = PRPO().assign(rollouts, evidence, base)
    # A single token has range 1 and n = 0: its weight is 1.
    wanted = [2 * 4 / 7, 2 * 4 / 7, 0, 4 * 4 / 7, 6 * 4 / 7, -2]
    torch.testing.assert_close(credit.token, torch.tensor(wanted))
    # τ = 0 boosts every token: w = 1 + 2n = (1, 1.8, 2.4, 3), Σ = 8.2.
    weight = PRPO(threshold=0).assign(rollouts, evidence, base).weight
    assert weight is not None
    torch.testing.assert_close(weight[[0, 1, 3, 4]], torch.tensor([1, 1.8, 2.4, 3]).double() * 4 / 8.2)


@examples(max_examples=60)
@given(
    batch=batches(), seed=st.integers(0, 2**32), beta=st.sampled_from([0.0, 2.0, 5.0]),
    threshold=st.sampled_from([0.0, 0.4, 0.95]),
)  # fmt: skip
def test_equals_reference(batch: Batch, seed: int, beta: float, threshold: float) -> None:
    fill, rollouts = random.Random(seed), batch.rollouts()
    values = slow.drawn_importance(fill, batch.responses)
    evidence = Evidence(importance=Importance.from_rows(rollouts, [values[i] for i in range(len(rollouts))]))
    method = PRPO(beta=beta, threshold=threshold)
    credit = method.assign(rollouts, evidence, method.base(rollouts))
    wanted = slow.prpo(batch.responses, values, beta, threshold)
    torch.testing.assert_close(credit.token, torch.tensor([a for row in wanted for a in row]), rtol=1e-5, atol=1e-5)
    assert credit.invariants["conserved"] < 1e-5


def test_plan_asks_for_every_live_response() -> None:
    rollouts = mixed_batch()
    method = PRPO(disturb=0.5, seed=7)
    base = method.base(rollouts)
    live = base.live.nonzero()[:, 0].tolist()
    assert len(live) > 4
    assert method.plan(rollouts, base) == [DivergenceJob(row, 0.5, 7) for row in live]
    assert set(measure(method, rollouts).importance) == set(live)


def test_what_is_missing_is_named() -> None:
    rollouts = mixed_batch()
    base = PRPO().base(rollouts)
    given = [None if i == 5 else [0.0] * n for i, n in enumerate(rollouts.length.tolist())]
    with pytest.raises(InputError, match=r"prpo: evidence\.importance of row 5.*apportion plan --method prpo"):
        PRPO().assign(rollouts, Evidence(importance=Importance.from_rows(rollouts, given)), base)
    with pytest.raises(InputError, match=r"prpo: evidence\.importance of row 0"):
        PRPO().assign(rollouts, Evidence(), base)


@pytest.mark.parametrize("bad", [{"threshold": 1}, {"threshold": -0.1}, {"beta": -1}, {"disturb": 0}, {"disturb": 1.5}])
def test_settings_are_checked(bad: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=next(iter(bad))):
        PRPO(**bad)


def test_the_record_says_whose_rule_it_is() -> None:
    assert "ours" in PRPO.marks and "abstract" in PRPO.marks and "ours" in (PRPO.__doc__ or "")
