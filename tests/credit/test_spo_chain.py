"""SPO-chain: its published numbers, which states it measures, its probability mask, and its slow reference.

Planted in a copy of the package and seen caught here: the mask without its fallback, with a fallback for the whole
batch, or reversed; a probability at the threshold taken for one below it; the interval ignored; responses without a
reward measured; the prompt's value dropped; a first segment that starts from 0; a shifted value; confident tokens
counted as unmeasured; evidence asked for where there is no cut.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import reference_trees
from apportion.credit.spo_chain import SPOChain
from apportion.errors import InputError
from apportion.measure.evidence import Continuations, Evidence
from apportion.measure.plan import Job
from apportion.rollouts import Rollouts
from apportion.testing.laws import LAWS, Law
from strategies import Batch, batches

P = [0.95, 0.5, 0.99, 0.8, 0.3, 0.97, 0.6]


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
@pytest.mark.parametrize(
    "settings_", [{}, {"probability_mask": False, "interval": 1, "samples": 2}, {"threshold": 0.4}], ids=str
)
def test_law(settings_: dict[str, Any], law: Law) -> None:
    law(SPOChain(**settings_))


def rollouts_of(*rows: list[float], reward: float = 1.0, **rest: Any) -> Rollouts:
    """Responses of one prompt that open with the same tokens, by their tokens' probabilities."""
    return Rollouts.from_lists(
        [list(range(len(row))) for row in rows], ["q"] * len(rows), [reward] * len(rows),
        old_logprob=[[math.log(p) for p in row] for row in rows], **rest,
    )  # fmt: skip


def credit_of(method: SPOChain, rollouts: Rollouts, entries: list[tuple[int, int, list[float | None]]]) -> list[float]:
    evidence = Evidence(Continuations.from_rewards(rollouts, entries))
    return method.assign(rollouts, evidence, method.base(rollouts)).token.tolist()


def test_published_numbers() -> None:
    """Below .9: tokens 1, 3, 4, 6; every second of them: 1 and 4. .2 − .6 = −.4 on tokens 1 to 3, 1 − .2 after."""
    rollouts, method = rollouts_of(P), SPOChain(interval=2)
    assert method.plan(rollouts, method.base(rollouts)) == [Job(0, 1, 9, ((0, 1),)), Job(0, 4, 9, ((0, 4),))]
    values: list[tuple[int, int, list[float | None]]] = [(0, 1, [1, 1, 1, 0, 0]), (0, 4, [1, 0, 0, 0, 0])]
    assert credit_of(method, rollouts, values) == pytest.approx([0, -0.4, 0, -0.4, 0.8, 0, 0.8])
    unmasked = SPOChain(interval=2, probability_mask=False)
    assert credit_of(unmasked, rollouts, values) == pytest.approx([0, -0.4, -0.4, -0.4, 0.8, 0.8, 0.8])


def test_a_cut_at_the_first_token_measures_the_prompt() -> None:
    """V(prompt) = .25, V(2) = .75, r = 0: .75 − .25 = .5, then 0 − .75. Token 1 has probability .95."""
    rollouts, method = rollouts_of([0.5, 0.95, 0.5], reward=0.0), SPOChain(interval=1)
    assert [job.position for job in method.plan(rollouts, method.base(rollouts))] == [0, 2]
    assert credit_of(method, rollouts, [(0, 0, [1, 0, 0, 0]), (0, 2, [1, 1, 1, 0])]) == pytest.approx([0.5, 0, -0.75])


def test_a_probability_at_the_threshold_is_not_below_it() -> None:
    rollouts, method = rollouts_of([1.0, 0.5]), SPOChain(threshold=1.0, interval=1)
    assert [job.position for job in method.plan(rollouts, method.base(rollouts))] == [1]
    assert credit_of(method, rollouts, [(0, 0, [0.0]), (0, 1, [0.5])]) == [0, 0.5]


def test_states_are_shared_and_only_trainable_tokens_of_scored_responses_are_cut() -> None:
    rollouts = rollouts_of([0.95, 0.5, 0.5], [0.95, 0.5, 0.5], [0.5, 0.5, 0.5], mask=[[1, 1, 1], [1, 0, 1], [1, 1, 1]])
    rollouts = replace(rollouts, reward=torch.tensor([1.0, 1.0, torch.nan], dtype=torch.float64))
    method = SPOChain(interval=1, samples=3)
    # Equal rewards are measured all the same. The masked token of row 1 is no cut, so its first one is at 2.
    assert method.plan(rollouts, method.base(rollouts)) == [Job(0, 1, 3, ((0, 1),)), Job(0, 2, 3, ((0, 2), (1, 2)))]


def test_without_a_cut_there_is_no_credit_and_nothing_to_measure() -> None:
    rollouts, method = rollouts_of([0.95, 0.99], [0.99, 0.99]), SPOChain()
    assert method.plan(rollouts, method.base(rollouts)) == []
    credit = method.assign(rollouts, Evidence(), method.base(rollouts))
    assert not credit.token.any()
    assert credit.counts == {"pivots": 0, "dropped_pivots": 0, "unmeasured_tokens": 0, "confident_tokens": 0}


def test_the_mask_falls_back_to_the_plain_one_response_by_response() -> None:
    """A host may measure where we would not: row 0 has no token below .9, row 1 one, and each decides for itself."""
    rollouts, method = rollouts_of([0.95, 0.99, 0.95], [0.95, 0.99, 0.5]), SPOChain()
    entries: list[tuple[int, int, list[float | None]]] = [(0, 1, [0.0]), (1, 1, [0.0])]
    assert credit_of(method, rollouts, entries) == [0, 1, 1, 0, 0, 1]
    alone = rollouts.select([0])
    assert credit_of(method, alone, entries[:1]) == [0, 1, 1]


def test_a_lost_measurement_is_counted() -> None:
    """Row 0 keeps its value at 2 only: its token at 1 wanted one. Tokens before the first cut never had one."""
    rollouts, method = rollouts_of([0.95, 0.5, 0.5], [0.99, 0.95, 0.5]), SPOChain(interval=1)
    evidence = Evidence(Continuations.from_rewards(rollouts, [(0, 1, [None]), (0, 2, [0.0]), (1, 2, [1.0])]))
    credit = method.assign(rollouts, evidence, method.base(rollouts))
    assert credit.token.tolist() == [0, 0, 1, 0, 0, 0]
    assert credit.counts == {"pivots": 2, "dropped_pivots": 1, "unmeasured_tokens": 1, "confident_tokens": 3}


def test_what_is_missing_is_named() -> None:
    rollouts, method = rollouts_of([0.95], P), SPOChain()
    base = method.base(rollouts)
    with pytest.raises(InputError, match=r"spo_chain: evidence\.continuations of row 1: .* --method spo_chain"):
        method.assign(rollouts, Evidence(), base)
    bare = replace(rollouts, old_logprob=None)
    for call in (lambda: method.plan(bare, base), lambda: method.assign(bare, Evidence(), base)):
        with pytest.raises(InputError, match="spo_chain: old_logprob"):
            call()


@settings(max_examples=40)
@given(batch=batches(), threshold=st.sampled_from([0.9, 0.5, 0.2, 1.0]), masked=st.booleans())
def test_equals_reference(batch: Batch, threshold: float, masked: bool) -> None:
    rollouts, method = batch.rollouts(), SPOChain(threshold=threshold, probability_mask=masked)
    token = method.assign(rollouts, batch.evidence(), method.base(rollouts)).token
    wanted = reference_trees.spo_chain(batch.responses, batch.measured(), threshold, masked)
    torch.testing.assert_close(token, torch.tensor([a for row in wanted for a in row]), rtol=1e-5, atol=1e-5)


@settings(max_examples=40)
@given(batch=batches(), threshold=st.sampled_from([0.9, 0.5, 0.2]), interval=st.sampled_from([1, 2, 5]))
def test_plan_equals_reference(batch: Batch, threshold: float, interval: int) -> None:
    rollouts, method = batch.rollouts(), SPOChain(threshold=threshold, interval=interval)
    jobs = method.plan(rollouts, method.base(rollouts))
    wanted = reference_trees.spo_chain_plan(batch.responses, threshold, interval)
    assert len(jobs) == len(wanted) and {frozenset(job.pivots) for job in jobs} == wanted
    assert all(job.samples == 9 for job in jobs)


@settings(max_examples=40)
@given(batch=batches())
def test_increments_add_up_to_r_less_the_first_value(batch: Batch) -> None:
    rollouts, method = batch.rollouts(), SPOChain()
    credit = method.assign(rollouts, batch.evidence(), method.base(rollouts))
    cut = credit.segments
    assert cut is not None and credit.invariants["telescoping"] < 1e-9
    for row, y in enumerate(batch.responses):
        mine = cut.row == row
        first = [value for value in cut.raw[mine].tolist() if value == value]
        if y.scored and first:
            assert cut.increment[mine].sum().item() == pytest.approx(y.reward - first[0], abs=1e-9)
