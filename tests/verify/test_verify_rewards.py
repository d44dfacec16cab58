"""Reward functions in TRL's form, both ways.

Planted faults seen caught here: abstain turned to 0.0; weights ignored; the penalty's slope over max_length; roles
not looked at.
"""

import pytest

from apportion.errors import InputError
from apportion.verify.rewards import combine, completion_text, format_reward, overlong_penalty, verifier_reward

TALK = [[{"role": "assistant", "content": r"so \boxed{4}"}, {"role": "tool", "content": r"\boxed{9}"}]]


def test_plain_and_conversational():
    reward = verifier_reward("math")
    assert reward.__name__ == "math_reward"
    assert reward(prompts=["?"] * 3, completions=[r"\boxed{4}", "5", "no idea"], answer=["4"] * 3) == [1.0, 0.0, 0.0]
    assert reward(completions=TALK, answer=["4"], completion_ids=[[1]], trainer_state=None) == [1.0]
    assert completion_text([{"content": "a"}, {"role": "assistant", "content": None}]) == "a\n"


def test_abstain_is_none_never_zero():
    assert verifier_reward("choice", "letter")(completions=["A", "A"], letter=["?", "A"]) == [None, 1.0]


def test_settings_reach_the_verifier():
    assert verifier_reward("math", order="given")(completions=["5, 4"], answer=["4,5"]) == [0.0]


def test_a_missing_or_short_column_is_named():
    with pytest.raises(InputError, match="solution: got nothing; expected a column of 1 golds"):
        verifier_reward("math", "solution")(completions=["4"], answer=["4"])
    with pytest.raises(InputError, match="answer: got 1 values"):
        verifier_reward("math")(completions=["4", "4"], answer=["4"])


def test_overlong_penalty():
    # DAPO eq. 13 with L_max 10, L_cache 4: 0 to 6 tokens, then −(|y| − 6)/4, −1 from 10 on.
    penalty = overlong_penalty(10, 4)
    ids = [[0] * n for n in (1, 6, 7, 8, 10, 15)]
    assert penalty(completions=[""] * 6, completion_ids=ids) == [0.0, 0.0, -0.25, -0.5, -1.0, -1.0]
    with pytest.raises(InputError, match="buffer"):
        overlong_penalty(10, 11)


@pytest.mark.parametrize(
    ("text", "both", "box_only"),
    [
        (r"<think>a</think> \boxed{1}", 1.0, 1.0),
        (r"a</think> \boxed{1}", 1.0, 1.0),
        (r"\boxed{1}", 0.0, 1.0),
        (r"<think>\boxed{1}</think> 1", 0.0, 0.0),
        (r"<think>a</think> \boxed{1} \boxed{2}", 0.0, 0.0),
        (r"<think>a</think></think> \boxed{1}", 0.0, 1.0),
        (r"x <think>a</think> \boxed{1}", 0.0, 1.0),
        (r"<think>a</think> <think> \boxed{1}", 0.0, 1.0),
        (r"<think>a</think> \boxed{1", 0.0, 0.0),
    ],
)
def test_format(text, both, box_only):
    assert format_reward()(completions=[text]) == [both]
    assert format_reward(think=False)(completions=[text]) == [box_only]


def some(completions, **_):
    return [None if text == "n" else 1.0 for text in completions]


async def later(completions, scale, **_):
    return [2.0 * factor for factor in scale]


def test_combine():
    # 0.5·1 + 2·(2·scale)
    both = combine([some, later], [0.5, 2.0])
    assert both(completions=["y", "n"], scale=[1, 3]) == [4.5, None]
    skipping = combine([some, later], [0.5, 2.0], missing="skip")
    assert skipping(completions=["y", "n"], scale=[1, 3]) == [4.5, 12.0]
    assert combine([some], missing="skip")(completions=["n"]) == [None]
    assert both.__name__ == "some+later"
    with pytest.raises(InputError, match="weights"):
        combine([some], [1.0, 2.0])
    with pytest.raises(InputError, match=r"<lambda>: got 1 rewards"):
        combine([lambda completions, **_: [1.0]])(completions=["a", "b"])


def test_trl_functions_compose():
    rewards = pytest.importorskip("trl.rewards", reason="TRL is not installed")
    text = "<think>\nso\n</think>\n\\boxed{4}"
    combined = combine([rewards.think_format_reward, verifier_reward("math")], [0.5, 1.0])
    assert combined(completions=[[{"role": "assistant", "content": text}]], answer=["4"]) == [1.5]
