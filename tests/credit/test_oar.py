"""OAR-P and OAR-G: the weights, what is measured, and where a response states its answer.

Planted in a copy of the package and seen caught here: masked tokens in the min-max; the answer's first token
reweighted; the token at the quantile held down; no floor; no log1p; the boost scaled wrongly; a range of 0 divided by;
the quantile's place counted from the number of tokens, or in float32; values not sorted inside responses; weights that
add up to 1; `normalize` reversed; jobs for responses whose base is 0 or that have nothing trainable to weigh; the cue
taken for the answer; measurements demanded of responses without an answer. Of the stated answer: the first one, an
empty one, the last token of a shared character, the first token that starts in the match, EOS, and reasoning that ends
behind the cue.
"""

from __future__ import annotations

import random
from dataclasses import replace
from math import exp
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from pydantic import ValidationError

import reference_answers as slow
from apportion.credit.answers import BOXED, Stated, reasoning_ends, stated_answers
from apportion.credit.method import CreditMethod
from apportion.credit.oar import OARG, OARP, bilevel, ranked_quantile
from apportion.credit.registry import setting_error
from apportion.errors import InputError
from apportion.groups import Base
from apportion.measure.evidence import Evidence, Importance
from apportion.measure.plan import SensitivityJob
from apportion.rollouts import Rollouts
from apportion.testing.laws import LAWS, Law
from apportion.testing.tools import measure, mixed_batch
from strategies import Batch, batches

SETTINGS: list[CreditMethod] = [
    OARP(), OARG(), OARP(normalize=False, quantile=0.6, floor=0.0), OARG(beta=0.0, quantile=1.0, noise=0.1, seed=3),
    OARP(answer_pattern=r"(x)\\", quantile=0.0, representation="answer_joint"),
]  # fmt: skip


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
@pytest.mark.parametrize("method", SETTINGS, ids=lambda m: f"{m.name}-{m.normalize}-{m.quantile}")
def test_law(method: CreditMethod, law: Law) -> None:
    law(method)


def test_laws_have_something_to_weigh() -> None:
    """The batch that the laws are tried on is measured, and its weights are not all 1."""
    for method in SETTINGS:
        rollouts = mixed_batch()
        entries = measure(method, rollouts)
        assert len(entries.importance) > 3 and all(entries.answer[row] > 0 for row in entries.importance)


def one_response(importance: list[float], answer_start: int | None, mask: list[int] | None = None) -> Any:
    """Two responses, of which the first has the base 2 and these values; the other has no answer."""
    n = len(importance)
    rollouts = Rollouts.from_lists(
        [list(range(n)), [1, 2]], ["a", "a"], [1.0, 0.0], mask=[mask or [1] * n, [1, 1]]
    )  # fmt: skip
    base = Base(torch.tensor([2.0, -2.0]), torch.full((2,), 0.5).double(), torch.ones(2).double(), torch.ones(2).bool())
    starts = None if answer_start is None else torch.tensor([answer_start, -1])
    rows = [importance, None if answer_start is not None else [0.0, 0.0]]
    return rollouts, Evidence(importance=Importance.from_rows(rollouts, rows), answer_start=starts), base


def test_numbers_of_the_bilevel_reshaping() -> None:
    """I = (0, .1, .5, 2): log1p = (0, .09531, .40547, 1.09861), n = (0, .08676, .36907, 1); θ is .75 of the way from
    the first to the second, .06507. w = (.1, 1 + .02169/.93493, 1 + .30400/.93493, 2), Σ = 4.44836, times 4/Σ.
    The answer's two tokens keep weight 1, and so does the response without an answer.
    """
    rollouts, evidence, base = one_response([0, 0.1, 0.5, 2, 0, 0], 4)
    credit = OARP().assign(rollouts, evidence, base)
    assert credit.weight is not None
    wanted = [0.0899, 0.9201, 1.1916, 1.7984, 1, 1, 1, 1]
    torch.testing.assert_close(credit.weight, torch.tensor(wanted).double(), rtol=0, atol=5e-5)
    torch.testing.assert_close(
        credit.token, torch.tensor([2, 2, 2, 2, 2, 2, -2, -2]) * torch.tensor(wanted), rtol=0, atol=2e-4
    )
    plain = OARP(normalize=False).assign(rollouts, evidence, base).weight
    torch.testing.assert_close(plain[:4], torch.tensor([0.1, 1.0232, 1.3252, 2]).double(), rtol=0, atol=5e-5)
    assert credit.counts == {"unweighted": 1}


@pytest.mark.parametrize("beta, wanted", [(1.0, [0.1, 2 / 3, 1.2, 2]), (3.0, [0.1, 2 / 3, 1.6, 4])])
def test_below_the_quantile_a_token_keeps_its_share_of_it(beta: float, wanted: list[float]) -> None:
    """log1p(I) = (0, 1, 2, 4): n = (0, .25, .5, 1). q = .5: θ = .375, the middle of .25 and .5. Below it n/θ:
    .25/.375 = 2/3, and the floor for 0; above it 1 + β(.5 − .375)/.625 and 1 + β. The masked token counts nowhere.
    """
    values = [0, exp(1) - 1, 50.0, exp(2) - 1, exp(4) - 1]
    rollouts, evidence, base = one_response(values, None, mask=[1, 1, 0, 1, 1])
    weight = OARG(beta=beta, quantile=0.5, normalize=False).assign(rollouts, evidence, base).weight
    torch.testing.assert_close(weight[[0, 1, 3, 4]], torch.tensor(wanted).double(), rtol=0, atol=1e-6)


def test_equal_importance_is_no_reason_to_move_credit() -> None:
    """Range 1 where all are equal: n = θ = 0, so every weight is 1 + 0. One token alone is such a case."""
    for values in ([0.3, 0.3, 0.3], [0.7], [0.0, 0.0]):
        rollouts, evidence, base = one_response(values, len(values))
        assert OARP().assign(rollouts, evidence, base).weight.tolist() == [1.0] * len(rollouts.row)


def test_ranked_quantile_is_torch_quantile() -> None:
    fill = random.Random(0)
    rows = [sorted(fill.choice((0.0, 0.5, fill.random())) for _ in range(n)) for n in (1, 2, 7, 40)]
    ranked = torch.tensor([row + [torch.inf] * (40 - len(row)) for row in rows], dtype=torch.float64)
    count = torch.tensor([[len(row)] for row in rows], dtype=torch.float64)
    for q in (0.0, 0.07, 0.25, 0.5, 0.97, 1.0):
        wanted = [[torch.tensor(row, dtype=torch.float64).quantile(q).item()] for row in rows]
        found = ranked_quantile(ranked, count, q)
        torch.testing.assert_close(found, torch.tensor(wanted, dtype=torch.float64), rtol=0, atol=1e-12)


@examples(max_examples=60)
@given(
    batch=batches(), seed=st.integers(0, 2**32), beta=st.sampled_from([0.0, 1.0, 2.5]),
    q=st.sampled_from([0.0, 0.25, 0.8, 1.0]), floor=st.sampled_from([0.0, 0.1, 1.0]), normalize=st.booleans(),
)  # fmt: skip
def test_equals_reference(batch: Batch, seed: int, beta: float, q: float, floor: float, normalize: bool) -> None:
    fill, rollouts = random.Random(seed), batch.rollouts()
    values, answers = slow.drawn_importance(fill, batch.responses), slow.drawn_answers(fill, batch.responses)
    evidence = Evidence(
        importance=Importance.from_rows(rollouts, [values[i] for i in range(len(rollouts))]),
        answer_start=torch.tensor(answers),
    )
    method = OARP(beta=beta, quantile=q, floor=floor, normalize=normalize)
    credit = method.assign(rollouts, evidence, method.base(rollouts))
    wanted = slow.oar(batch.responses, values, answers, beta, q, floor, normalize)
    torch.testing.assert_close(credit.token, torch.tensor([a for row in wanted for a in row]), rtol=1e-5, atol=1e-5)
    assert ("conserved" in credit.invariants) == normalize and credit.invariants.get("conserved", 0) < 1e-5


@examples(max_examples=40)
@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=30), st.floats(0, 1), st.floats(0, 5))
def test_weights_rise_with_importance(importance: list[float], q: float, beta: float) -> None:
    values = torch.tensor(importance, dtype=torch.float64)
    rollouts = Rollouts.from_lists([[1] * len(values)], [0], [1.0])
    weight = bilevel(rollouts, values, rollouts.mask, beta, q, 0.1, normalize=True)
    assert (weight[values.argsort()].diff() >= -1e-9).all()
    assert weight.sum().item() == pytest.approx(len(values)) and (weight > 0).all()


def spoken(*texts: slow.Text, masks: list[list[int]] | None = None) -> Rollouts:
    rows = len(texts)
    rollouts = Rollouts.from_lists(
        [[1] * len(y.starts) for y in texts], ["a"] * rows, [float(i % 2) for i in range(rows)],
        mask=masks, truncated=[not y.stopped for y in texts],
    )  # fmt: skip
    chars = torch.tensor([s for y in texts for s in y.starts], dtype=torch.int64)
    return replace(rollouts, text=tuple(y.text for y in texts), char_start=chars)


def letters(text: str, stopped: bool = True) -> slow.Text:
    """A token a character, and EOS."""
    return slow.Text(text, [*range(len(text))] + [len(text)] * stopped, stopped)


@pytest.mark.parametrize(
    "text, wanted",
    [
        (letters(r"so \boxed{42}."), Stated(3, 10, 12)),
        (letters(r"\boxed{1} no, \boxed{2}"), Stated(14, 21, 22)),
        (letters(r"\boxed{\frac{\sqrt{3}}{2}}"), Stated(0, 7, 25)),
        (letters(r"\boxed{1} then \boxed{2"), Stated(0, 7, 8)),
        (letters(r"\boxed{3} and \boxed{}"), Stated(0, 7, 8)),
        (letters("the answer is 7"), None),
        (letters(""), None),
        # " \boxed" and "{42}" are one token each: what holds a part of the match belongs to it.
        (slow.Text(r"so \boxed{42}.", [0, 2, 9, 13, 14], True), Stated(1, 2, 3)),
        # The token that is EOS may carry text; it is no part of the answer.
        (slow.Text(r"x\boxed{42}", [0, 1, 8, 9], True), Stated(1, 2, 3)),
        (slow.Text(r"x\boxed{42}", [0, 1, 8, 9], False), Stated(1, 2, 4)),
        (slow.Text(r"x\boxed{42}", [0, 1, 8], True), None),
        # Three tokens hold parts of one character of the answer.
        (slow.Text("\\boxed{é}", [0, 7, 7, 7, 8, 9], True), Stated(0, 1, 4)),
    ],
)
def test_where_an_answer_is_stated(text: slow.Text, wanted: Stated | None) -> None:
    rollouts = spoken(text)
    assert stated_answers(rollouts, BOXED, "oar_p") == [wanted]
    assert slow.stated(text) == (wanted and (wanted.cue, wanted.start, wanted.end))
    assert reasoning_ends(rollouts, BOXED, "oar_p") == [text.own if wanted is None else wanted.cue]


def test_another_pattern_finds_another_answer() -> None:
    text = letters("#1 #2, \\boxed{3}")
    assert stated_answers(spoken(text), r"#(\d)", "oar_p") == [Stated(3, 4, 5)]
    # A match without an answer in it is none, wherever its empty group stands in a token.
    whole = slow.Text("#1 # end", [0, 1, 2, 8], True)
    assert stated_answers(spoken(whole), r"#(\d*)", "oar_p") == [Stated(0, 1, 2)]
    assert stated_answers(spoken(whole), r"#(\d)?", "oar_p") == [Stated(0, 1, 2)]


@examples(max_examples=150)
@given(seed=st.integers(0, 2**32), lengths=st.lists(st.integers(0, 40), min_size=1, max_size=4))
def test_stated_answers_equal_reference(seed: int, lengths: list[int]) -> None:
    fill = random.Random(seed)
    texts = [slow.drawn_text(fill, n) for n in lengths]
    found = stated_answers(spoken(*texts), BOXED, "oar_p")
    assert [s and (s.cue, s.start, s.end) for s in found] == [slow.stated(y) for y in texts]
    assert reasoning_ends(spoken(*texts), BOXED, "oar_p") == [slow.reasoning_end(y) for y in texts]


def test_long_broken_text_takes_no_time() -> None:
    """The default pattern never goes back over its text: these would take years if it did."""
    for text in ("\\boxed{" + "a" * 50_000, "\\boxed{" + "{a}" * 20_000, "\\boxed{" * 400 + "{{a}" * 400):
        stated_answers(spoken(letters(text)), BOXED, "oar_p")


def test_plan() -> None:
    """Live responses with an answer and something trainable before it, and nothing else."""
    answer = r"ab\boxed{7}"
    texts = [letters(answer), letters("no answer"), letters(r"\boxed{7}"), letters(answer), letters(answer, False)]
    masks = [[1] * len(y.starts) for y in texts]
    masks[3][:2] = [0, 0]
    rollouts = spoken(*texts, masks=masks)
    for method, rest in (
        (OARP(), ("perturb", "last")),
        (OARG(), ("gradient", "answer_mean", 1e-3, 0)),
        (OARG(representation="answer_joint", noise=0.5, seed=9), ("gradient", "answer_joint", 0.5, 9)),
    ):
        jobs = method.plan(rollouts, method.base(rollouts))
        assert jobs == [SensitivityJob(row, 2, (9, 10), *rest) for row in (0, 4)]
    equal = replace(rollouts, reward=torch.ones(5))
    assert OARP().plan(equal, OARP().base(equal)) == []


def test_what_is_missing_is_named() -> None:
    rollouts, evidence, base = one_response([0, 0.1, 0.5], 3)
    silent = replace(evidence, importance=Importance.from_rows(rollouts, [None, None]))
    with pytest.raises(InputError, match=r"oar_p: evidence\.importance of row 0.*apportion plan --method oar_p"):
        OARP().assign(rollouts, silent, base)
    with pytest.raises(InputError, match=r"oar_g: evidence\.importance of row 0"):
        OARG().assign(rollouts, Evidence(), base)
    with pytest.raises(InputError, match="oar_p: text"):
        OARP().plan(rollouts, base)
    # Where the answer is all there is, or where there is none, nothing is missing.
    for start in (-1, 0):
        none = Evidence(answer_start=torch.tensor([start, -1]))
        assert torch.equal(OARP().assign(rollouts, none, base).token, base.advantage[rollouts.row])


@pytest.mark.parametrize(
    "bad",
    [{"quantile": 1.1}, {"beta": -1}, {"floor": 2}, {"answer_pattern": "("}, {"answer_pattern": "x"}, {"noise": 0}],
)
def test_settings_are_checked(bad: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as caught:
        OARG(**bad)
    assert setting_error("oar_g", caught.value).field == f"oar_g.{next(iter(bad))}"
