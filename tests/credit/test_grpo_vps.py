"""GRPO-VPS: where segments end, what a change in belief is worth and who keeps it.

Planted in a copy of the package and seen caught here: the sign of the change; a difference of logs; r − μ divided by
σ; the process term on the answer's tokens, on its first one, and on responses without a reward; changes across
responses; the response's end not taken for a state; a missing prompt accepted, or not asked for; collapsed groups not
measured; cutpoints in the answer or on masked tokens; the number of segments rounded up, or its cap a floor; segments
with uneven shares of cutpoints.
"""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise
from math import exp, log
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from pydantic import ValidationError

import reference_answers as slow
from apportion.credit.answers import CUE
from apportion.credit.grpo_vps import GRPOVPS
from apportion.credit.method import CreditMethod
from apportion.errors import InputError
from apportion.measure.evidence import Belief, Evidence
from apportion.measure.plan import BeliefJob
from apportion.rollouts import Rollouts
from apportion.testing.laws import LAWS, Law
from apportion.testing.tools import measure, mixed_batch
from reference import compared
from strategies import Batch, batches

SETTINGS: list[CreditMethod] = [
    GRPOVPS(), GRPOVPS(quantile=0.5, per_segment=1, alpha=0.3), GRPOVPS(quantile=0.0, per_segment=2, segments=20),
]  # fmt: skip


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
@pytest.mark.parametrize("method", SETTINGS, ids=lambda m: f"{m.quantile}-{m.segments}")
def test_law(method: CreditMethod, law: Law) -> None:
    law(method)


def two_responses(**rest: Any) -> Rollouts:
    return Rollouts.from_lists([[1] * 6, [2, 2]], ["a", "a"], [1.0, 0.0], **rest)


BELIEFS = [(0, 5, log(0.2)), (0, 0, log(0.1)), (0, 2, log(0.4))]


def test_numbers() -> None:
    """C = .1, .4, .2 at states 0, 2 and 5; μ = .5, α = 1.2. Tokens 0 and 1: .5 + 1.2·.3; tokens 2 to 4:
    .5 − 1.2·.2; the last lies behind the last state. The other response has no gold answer.
    """
    rollouts = two_responses()
    belief = Belief.from_entries(rollouts, BELIEFS, [0, 1])
    method = GRPOVPS()
    credit = method.assign(rollouts, Evidence(belief=belief), method.base(rollouts))
    torch.testing.assert_close(credit.token, torch.tensor([0.86, 0.86, 0.26, 0.26, 0.26, 0.5, -0.5, -0.5]))
    cut = credit.segments
    assert cut is not None and credit.counts == {"unmeasured": 1}
    assert list(zip(cut.row.tolist(), cut.start.tolist(), cut.end.tolist(), strict=True)) == [
        (0, 0, 2), (0, 2, 5), (0, 5, 6), (1, 0, 2),
    ]  # fmt: skip
    wanted = torch.tensor([0.1, 0.4, 0.2, torch.nan]).double()
    torch.testing.assert_close(cut.raw, wanted, equal_nan=True)
    torch.testing.assert_close(cut.increment, torch.tensor([0.3, -0.2, 0, 0]).double())
    assert not cut.stderr.any() and not cut.samples.any()
    # The answer's tokens, from 4 on, get r − μ whatever was measured behind them.
    answered = Evidence(belief=belief, answer_start=torch.tensor([4, -1]))
    token = method.assign(rollouts, answered, method.base(rollouts)).token
    torch.testing.assert_close(token, torch.tensor([0.86, 0.86, 0.26, 0.26, 0.5, 0.5, -0.5, -0.5]))


def test_the_end_of_a_response_is_a_state() -> None:
    rollouts = two_responses(truncated=[True, True])
    belief = Belief.from_entries(rollouts, [(0, 0, log(0.5)), (0, 6, 0.0), (1, 0, log(0.25))], [0, 1])
    credit = GRPOVPS(alpha=1).assign(rollouts, Evidence(belief=belief), GRPOVPS().base(rollouts))
    # .5 + (1 − .5) over all six tokens; the second response was measured at its prompt alone.
    assert credit.token.tolist() == [1.0] * 6 + [-0.5] * 2
    assert credit.segments is not None and credit.segments.end.tolist() == [6, 2]


def test_equal_rewards_keep_the_process_term_and_a_group_of_one_gets_none() -> None:
    rollouts = Rollouts.from_lists([[1], [1], [1], [1]], ["a", "a", "b", "b"], [1.0, 1.0, None, 0.0])
    entries = [(i, p, log(v)) for i in range(4) for p, v in ((0, 0.25), (1, 0.75))]
    credit = GRPOVPS(alpha=1).assign(
        rollouts, Evidence(belief=Belief.from_entries(rollouts, entries, range(4))), GRPOVPS().base(rollouts)
    )  # fmt: skip
    torch.testing.assert_close(credit.token, torch.tensor([0.5, 0.5, 0.0, 0.0]))


@examples(max_examples=60)
@given(batch=batches(), seed=st.integers(0, 2**32), alpha=st.sampled_from([0.0, 1.2, 4.0]))
def test_equals_reference(batch: Batch, seed: int, alpha: float) -> None:
    fill, rollouts = random.Random(seed), batch.rollouts()
    belief = {state: log(1 - fill.random()) for state in slow.drawn_positions(fill, batch.responses)}
    answers = slow.drawn_answers(fill, batch.responses)
    evidence = Evidence(
        belief=Belief.from_entries(rollouts, [(*state, v) for state, v in belief.items()], range(len(rollouts))),
        answer_start=torch.tensor(answers),
    )
    method = GRPOVPS(alpha=alpha)
    credit = method.assign(rollouts, evidence, method.base(rollouts))
    wanted = slow.grpo_vps(batch.responses, belief, answers, alpha)
    torch.testing.assert_close(credit.token, torch.tensor([a for row in wanted for a in row]), rtol=1e-5, atol=1e-5)


def with_text(rollouts: Rollouts, texts: list[slow.Text]) -> Rollouts:
    return replace(
        rollouts, text=tuple(y.text for y in texts), truncated=torch.tensor([not y.stopped for y in texts]),
        char_start=torch.tensor([s for y in texts for s in y.starts], dtype=torch.int64),
    )  # fmt: skip


def test_where_segments_end() -> None:
    """Entropies 0 … 19, q = .5: τ = 9.5, so tokens 10 … 19 are cutpoints. The box starts at token 17, so seven of
    them count. per_segment = 2: ⌊7/2⌋ = 3 segments of 2, 2 and 3, which start at the prompt, at 12 and at 14.
    """
    text = slow.Text("." * 17 + r"\boxed{7}", [*range(17), 17, 24, 25], True)
    rollouts = Rollouts.from_lists([[1] * 20] * 2, ["a"] * 2, [1.0, 0.0], entropy=[[float(t) for t in range(20)]] * 2)
    rollouts = with_text(rollouts, [text, text])

    def positions(**rest: Any) -> tuple[int, ...]:
        method = GRPOVPS(**rest)
        job, other = method.plan(rollouts, method.base(rollouts))
        assert job == BeliefJob(0, job.positions, method.cue) and other == replace(job, row=1)
        return job.positions

    assert positions(quantile=0.5, per_segment=2) == (0, 12, 14, 17)
    assert positions(quantile=0.5, per_segment=2, segments=2) == (0, 13, 17)
    # 97th percentile: τ = 18.43, one cutpoint, and that lies in the answer.
    assert positions() == (0, 17) and GRPOVPS().cue == CUE
    # Without an answer the last state lies before EOS, or behind the last token of a response that was cut off.
    assert positions(quantile=0.5, per_segment=4, answer_pattern="(z)") == (0, 14, 19)
    rollouts = replace(rollouts, truncated=torch.tensor([True, True]))
    assert positions(quantile=0.5, per_segment=4, answer_pattern="(z)") == (0, 15, 20)
    # Masked tokens are no cutpoints and do not move τ: 0 … 9 remain, τ = 4.5.
    rollouts = replace(rollouts, mask=(torch.arange(20) < 10).repeat(2))
    assert positions(quantile=0.5, per_segment=1, segments=9) == (0, 6, 7, 8, 9, 17)


@examples(max_examples=100)
@given(
    batch=batches(), seed=st.integers(0, 2**32), q=st.sampled_from([0.0, 0.5, 0.97]),
    n=st.integers(1, 4), cap=st.integers(1, 6),
)  # fmt: skip
def test_segments_hold_equal_shares_of_the_cutpoints(batch: Batch, seed: int, q: float, n: int, cap: int) -> None:
    fill = random.Random(seed)
    texts = [slow.drawn_text(fill, len(y.ids)) for y in batch.responses]
    rollouts = with_text(batch.rollouts(), texts)
    method = GRPOVPS(quantile=q, per_segment=n, segments=cap)
    jobs = method.plan(rollouts, method.base(rollouts))
    assert [job.row for job in jobs] == [i for i, y in enumerate(batch.responses) if compared(batch.responses, y)]
    for job in jobs:
        end = slow.reasoning_end(texts[job.row])
        cuts = slow.cutpoints(batch.responses[job.row], q, end)
        assert job.positions[0] == 0 and job.positions[-1] == end
        if end == 0:
            assert job.positions == (0,)
            continue
        assert len(job.positions) - 1 == max(1, min(cap, len(cuts) // n))
        assert set(job.positions[1:-1]) <= set(cuts)
        shares = [sum(a <= t < b for t in cuts) for a, b in pairwise(job.positions)]
        assert max(shares) - min(shares) <= 1


def test_laws_have_something_to_spread() -> None:
    rollouts = mixed_batch()
    for method in SETTINGS:
        entries = measure(method, rollouts)
        assert len(entries.belief) > 10
    assert len({p for _, p, _ in entries.belief}) > 10


def test_what_is_missing_is_named() -> None:
    rollouts = two_responses()
    base = GRPOVPS().base(rollouts)
    with pytest.raises(InputError, match=r"grpo_vps: evidence\.belief of row 0.*apportion plan --method grpo_vps"):
        GRPOVPS().assign(rollouts, Evidence(), base)
    with pytest.raises(InputError, match=r"grpo_vps: evidence\.belief of row 1"):
        GRPOVPS().assign(rollouts, Evidence(belief=Belief.from_entries(rollouts, BELIEFS, [0])), base)
    late = Belief.from_entries(rollouts, [*BELIEFS, (1, 1, -1.0), (1, 2, -2.0)], [0, 1])
    with pytest.raises(
        InputError, match=r"grpo_vps: evidence\.belief of row 1: got states from position 1.*position 0"
    ):
        GRPOVPS().assign(rollouts, Evidence(belief=late), base)
    with pytest.raises(InputError, match="grpo_vps: entropy"):
        GRPOVPS().plan(rollouts, base)
    silent = replace(rollouts, entropy=torch.zeros(8))
    with pytest.raises(InputError, match="grpo_vps: text"):
        GRPOVPS().plan(silent, base)


def test_geometric_means_are_asked_for_and_taken_as_they_come() -> None:
    """Only who scores the answer knows how many tokens it has; C is exp of what is handed in, C = e^(−6/3) here."""
    rollouts = two_responses(entropy=[[0.0] * 6, [0.0] * 2], text=("", ""), char_start=[[0] * 6, [0] * 2])
    method = GRPOVPS(geometric=True, alpha=1)
    belief = Belief.from_entries(rollouts, [(0, 0, -6 / 3), (0, 6, 0.0)], [0, 1])
    token = method.assign(rollouts, Evidence(belief=belief), method.base(rollouts)).token
    torch.testing.assert_close(token[:6], torch.full((6,), 0.5 + 1 - exp(-2)))
    base = method.base(rollouts)
    assert [job.per_token for job in method.plan(rollouts, base)] == [True, True]
    assert [job.per_token for job in GRPOVPS().plan(rollouts, base)] == [False, False]


@pytest.mark.parametrize(
    "bad", [{"alpha": -1}, {"quantile": 97}, {"per_segment": 0}, {"segments": 0}, {"cue": ""}, {"answer_pattern": "x"}]
)
def test_settings_are_checked(bad: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=next(iter(bad))):
        GRPOVPS(**bad)
