"""SPAE: the potential, what solved steps lose, what a step's change is worth, and where it is measured.

Planted in a copy of the package and seen caught here: Acc and Conf exchanged; the sign in f; a solved prompt counted
as a step; the step just before not counted; solved steps of other responses counted; answer tokens that lose credit;
the answer's start ignored; min-max over the batch; masked tokens in the mean, or the mean over all tokens; tokens of
responses without a reward whitened; r − μ divided by σ; `first="zero"` without effect; steps behind the answer
measured, the end of the reasoning not.
"""

from __future__ import annotations

import random
from dataclasses import replace
from math import e
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from pydantic import ValidationError

import reference_answers as slow
from apportion.credit.method import CreditMethod
from apportion.credit.spae import SPAE, potential
from apportion.errors import InputError
from apportion.measure.evidence import Confidence, Evidence
from apportion.measure.plan import ConfidenceJob
from apportion.rollouts import Rollouts
from apportion.testing.laws import LAWS, Law
from apportion.testing.tools import measure, mixed_batch
from strategies import Batch, batches

SETTINGS: list[CreditMethod] = [
    SPAE(), SPAE(whiten=False, first="zero"), SPAE(threshold=-0.2, alpha=1.0, xi=2.0, ddof=0),
]  # fmt: skip


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
@pytest.mark.parametrize("method", SETTINGS, ids=lambda m: f"{m.first}-{m.threshold}")
def test_law(method: CreditMethod, law: Law) -> None:
    law(method)


def test_potential() -> None:
    """(Acc, Conf) = (1, 1), (0, 1), (0, 0), (1, 0); and 1.5·.5·.4 + .5·.5 − .4 = .15."""
    acc, conf = torch.tensor([[1, 1], [0, 1], [0, 0], [1, 0], [0.5, 0.4]]).unbind(1)
    torch.testing.assert_close(potential(acc, conf), torch.tensor([1, -1, 0, 0.5, 0.15]))


def two_responses() -> tuple[Rollouts, Evidence]:
    """Φ = 0 at the prompt, then .5, 1 and −1 after the three steps of the first response; its fourth token is the
    answer. The second has no gold answer.
    """
    rollouts = Rollouts.from_lists([[1] * 4, [2, 2]], ["a", "a"], [1.0, 0.0])
    entries = [(0, 2, 1.0, 1.0), (0, 0, 0.0, 0.0), (0, 3, 1.0, 0.0), (0, 1, 0.0, 1.0)]
    return rollouts, Evidence(confidence=Confidence.from_entries(rollouts, entries, [0, 1]))


def test_numbers() -> None:
    """ΔΦ = .5, .5, −2: min-max 1, 1, 0 and exp e, e, 1, with mean (2e + 1)/3 over the three tokens, so
    g = (e − 1)/3, (e − 1)/3, −2(e − 1)/3. Before the third step one step ended above .9: f = 1 − .5(1 − 1/e). The
    answer, and the response without a gold answer, get r − μ = ±.5.
    """
    rollouts, evidence = two_responses()
    method = SPAE(whiten=False)
    credit = method.assign(rollouts, evidence, method.base(rollouts))
    g = (e - 1) / 3
    wanted = [0.5 + 0.5 * g, 0.5 + 0.5 * g, 0.5 * (0.5 + 0.5 / e) - g, 0.5, -0.5, -0.5]
    torch.testing.assert_close(credit.token, torch.tensor(wanted))
    assert credit.counts == {"unmeasured": 1, "solved_states": 1}
    cut = credit.segments
    assert cut is not None and cut.start.tolist() == [0, 1, 2, 3, 0]
    torch.testing.assert_close(cut.raw, torch.tensor([0, 0.5, 1, -1, torch.nan]).double(), equal_nan=True)
    torch.testing.assert_close(cut.increment, torch.tensor([0.5, 0.5, -2, 0, 0]).double())
    # Whitening: minus the mean of the six, over their deviation.
    plain = torch.tensor(wanted, dtype=torch.float64)
    for ddof in (0, 1):
        white = SPAE(ddof=ddof, epsilon=0).assign(rollouts, evidence, method.base(rollouts)).token
        torch.testing.assert_close(white, ((plain - plain.mean()) / plain.std(correction=ddof)).float())


def test_a_first_step_without_a_change() -> None:
    """`first="zero"`: ΔΦ = 0, .5, −2 whatever was read at the prompt; min-max .8, 1, 0."""
    rollouts, evidence = two_responses()
    method = SPAE(whiten=False, first="zero")
    token = method.assign(rollouts, evidence, method.base(rollouts)).token
    mean = (e**0.8 + e + 1) / 3
    wanted = [0.5 + 0.5 * (e**0.8 - mean), 0.5 + 0.5 * (e - mean), 0.5 * (0.5 + 0.5 / e) + 0.5 * (1 - mean)]
    torch.testing.assert_close(token[:3], torch.tensor(wanted))
    late = [(0, 2, 1.0, 1.0), (0, 3, 1.0, 0.0), (0, 1, 0.0, 1.0)]
    unread = Evidence(confidence=Confidence.from_entries(rollouts, late, [0, 1]))
    assert torch.equal(method.assign(rollouts, unread, method.base(rollouts)).token, token)


def test_a_solved_prompt_takes_nothing_from_the_first_steps() -> None:
    """Φ = 1 at the prompt and after both steps. The prompt is no step: f = 1, then 1 − .5(1 − 1/e). All ΔΦ are equal:
    g = 0. From the answer's start on f = 1, though a state was measured behind it.
    """
    rollouts = Rollouts.from_lists([[1] * 3, [2]], ["a", "a"], [1.0, 0.0])
    entries = [(0, p, 1.0, 1.0) for p in (0, 1, 3)]
    confidence = Confidence.from_entries(rollouts, entries, [0, 1])
    method, base = SPAE(whiten=False), SPAE().base(rollouts)
    solved = 0.5 * (0.5 + 0.5 / e)
    for start, last in ((None, solved), (torch.tensor([-1, -1]), solved), (torch.tensor([2, -1]), 0.5)):
        token = method.assign(rollouts, Evidence(confidence=confidence, answer_start=start), base).token
        torch.testing.assert_close(token, torch.tensor([0.5, solved, last, -0.5]))


@examples(max_examples=80)
@given(
    batch=batches(), seed=st.integers(0, 2**32), alpha=st.sampled_from([0.0, 0.5, 1.0]),
    xi=st.sampled_from([0.0, 0.5, 3.0]), threshold=st.sampled_from([-0.5, 0.1, 0.9]),
    first=st.sampled_from(["prompt", "zero"]), whiten=st.booleans(),
)  # fmt: skip
def test_equals_reference(batch: Batch, seed: int, whiten: bool, **rest: Any) -> None:
    fill, rollouts = random.Random(seed), batch.rollouts()
    read = (0.0, 1.0, 0.5, fill.random(), fill.random())
    states = {at: (fill.choice(read), fill.choice(read)) for at in slow.drawn_positions(fill, batch.responses)}
    answers = slow.drawn_answers(fill, batch.responses)
    entries = [(*at, *value) for at, value in states.items()]
    evidence = Evidence(
        confidence=Confidence.from_entries(rollouts, entries, range(len(rollouts))), answer_start=torch.tensor(answers)
    )
    method = SPAE(whiten=whiten, **rest)
    token = method.assign(rollouts, evidence, method.base(rollouts)).token
    wanted = slow.spae(batch.responses, states, answers, whiten=whiten, **rest)
    torch.testing.assert_close(token, torch.tensor([a for row in wanted for a in row]), rtol=1e-4, atol=1e-5)


def spoken(text: str, **rest: Any) -> Rollouts:
    """Two responses of one text, a token a character and EOS."""
    starts = [*range(len(text)), len(text)]
    return Rollouts.from_lists(
        [[1] * len(starts)] * 2, ["a", "a"], [1.0, 0.0], text=(text, text), char_start=[starts, starts], **rest
    )


def test_plan() -> None:
    """States: the prompt, the starts of steps, and where the answer's cue begins or else EOS."""
    for method, rollouts, wanted in (
        (SPAE(), spoken("aa\n\nbb\n\n\\boxed{7}"), (0, 4, 8)),
        (SPAE(), spoken("aa\n\nbb \\boxed{7}\n\ncc"), (0, 4, 7)),
        (SPAE(), spoken("aa\n\nbb"), (0, 4, 6)),
        (SPAE(), spoken("aa\n\nbb", truncated=[True, True]), (0, 4, 7)),
        (SPAE(), spoken("aa\n# bb\n2. cc"), (0, 8, 13)),
        (SPAE(markers=("#",)), spoken("aa\n# bb\n2. cc"), (0, 3, 13)),
        (SPAE(first="zero"), spoken("aa\n\nbb"), (4, 6)),
        (SPAE(), spoken("\\boxed{7}"), (0,)),
        (SPAE(first="zero"), spoken("\\boxed{7}"), (0,)),
        (SPAE(samples=2, tokens=7, cue="?"), spoken("", mask=[[1], [1]]), (0,)),
    ):
        jobs = method.plan(rollouts, method.base(rollouts))
        asked = [ConfidenceJob(row, wanted, method.cue, method.samples, method.tokens) for row in (0, 1)]
        assert jobs == asked
        # Nobody to be compared with: no reward, or alone in the group.
        alone = replace(rollouts, reward=torch.tensor([1.0, torch.nan]))
        assert method.plan(alone, method.base(alone)) == []


def test_boundaries_of_the_host_are_steps() -> None:
    flags = [[0, 1, 0, 0, 1, 0, 0]] * 2
    rollouts = spoken("aa\n\nbb", boundary=flags)
    job = SPAE().plan(rollouts, SPAE().base(rollouts))[0]
    assert job.positions == (0, 1, 4, 6)


def test_laws_have_something_to_spread() -> None:
    rollouts = mixed_batch()
    for method in SETTINGS:
        assert len(measure(method, rollouts).confidence) > 20


def test_what_is_missing_is_named() -> None:
    rollouts, _ = two_responses()
    base = SPAE().base(rollouts)
    with pytest.raises(InputError, match=r"spae: evidence\.confidence of row 0.*apportion plan --method spae"):
        SPAE().assign(rollouts, Evidence(), base)
    late = Confidence.from_entries(rollouts, [(0, 0, 0.0, 0.0), (1, 2, 0.5, 0.5)], [0, 1])
    with pytest.raises(
        InputError, match=r"spae: evidence\.confidence of row 1: got states from position 2.*position 0"
    ):
        SPAE().assign(rollouts, Evidence(confidence=late), base)
    with pytest.raises(InputError, match="spae: text"):
        SPAE().plan(rollouts, base)
    with pytest.raises(InputError, match="spae: text"):
        SPAE().plan(replace(rollouts, boundary=torch.zeros(6).bool()), base)


@pytest.mark.parametrize(
    "bad",
    [{"alpha": 1.1}, {"xi": -1}, {"threshold": 2}, {"samples": 0}, {"tokens": 0}, {"cue": ""}, {"first": "x"},
     {"answer_pattern": "x"}],
)  # fmt: skip
def test_settings_are_checked(bad: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=next(iter(bad))):
        SPAE(**bad)


def test_markers_are_checked() -> None:
    with pytest.raises(ValidationError, match="no regular expression"):
        SPAE(markers=("(",))
