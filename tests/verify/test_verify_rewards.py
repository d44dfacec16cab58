"""Reward functions in TRL's form, both ways.

Planted faults seen caught here: abstain turned to 0.0; weights ignored; the penalty's slope over max_length; roles
not looked at; NaN kept; a failing row not looked for; signatures not looked at; an event loop in the caller's thread.
"""

import asyncio
import functools
import math
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

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
    for buffer in (0, 11, 2.5, "4"):
        with pytest.raises(InputError, match="buffer"):
            overlong_penalty(10, buffer)
    with pytest.raises(InputError, match="completion_ids: got nothing"):
        penalty(completions=["a"])
    with pytest.raises(InputError, match="completion_ids: got 1 lists; expected the token ids of 2"):
        penalty(completions=["a", "b"], completion_ids=[[1]])


@given(st.integers(1, 60), st.data())
def test_overlong_penalty_is_the_papers_and_trls(longest, data):
    rewards = pytest.importorskip("trl.rewards", reason="TRL is not installed")
    buffer = data.draw(st.integers(1, longest))
    lengths = data.draw(st.lists(st.integers(0, 80), max_size=5))
    ids = [[0] * n for n in lengths]

    def paper(n):
        if n <= longest - buffer:
            return 0.0
        return (longest - buffer - n) / buffer if n <= longest else -1.0

    found = overlong_penalty(longest, buffer)(completions=[""] * len(ids), completion_ids=ids)
    assert found == pytest.approx([paper(n) for n in lengths])
    theirs = rewards.get_soft_overlong_punishment(longest, buffer)
    combined = combine([theirs])(completions=[""] * len(ids), completion_ids=ids)
    assert combined == pytest.approx(found) and "-0.0" not in str(found)


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
        (r"<think>so \boxed{1}", 0.0, 0.0),
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


class Slow:
    async def __call__(self, completions, **_):
        await asyncio.sleep(0)
        return [1.0] * len(completions)


def test_asynchronous_functions_of_any_kind_also_under_a_running_loop():
    both = combine([later, Slow(), functools.partial(later)])
    assert both(completions=["y"], scale=[1]) == [5.0]

    async def notebook():
        return both(completions=["y"], scale=[1])

    assert asyncio.run(notebook()) == [5.0]
    assert both.__name__ == "later+Slow+later"


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        ([None, math.nan], [None, None]), (np.array([1, np.nan]), [1.0, None]), (torch.tensor([1.0, 2.0]), [1.0, 2.0]),
        ((True, False), [1.0, 0.0]), ([np.float32(0.5), np.int64(2)], [0.5, 2.0]),
    ],
)  # fmt: skip
def test_numbers_of_any_kind(values, wanted):
    found = combine([lambda completions, **_: values])(completions=["a", "b"])
    assert found == wanted and all(value is None or type(value) is float for value in found)


def test_nan_counts_as_none_does():
    def fails(completions, **_):
        return [math.nan] * len(completions)

    assert combine([fails, some])(completions=["y"]) == [None]
    assert combine([fails, some], missing="skip")(completions=["y"]) == [1.0]


def needs(completions, solution, **_):
    return [1.0] * len(completions)


def narrow(completions):
    return [1.0] * len(completions)


def divides(completions, scale, **_):
    return [1 / factor for factor in scale]


async def divides_later(completions, scale, **_):
    return [1 / factor for factor in scale]


def returns(value):
    return lambda completions, **_: value


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (needs, r"reward function needs: got missing a required argument: 'solution'"),
        (narrow, r"reward function narrow: got got an unexpected keyword argument 'scale'"),
        (divides, r"reward function divides, row 1: got ZeroDivisionError: division by zero"),
        (divides_later, r"reward function divides_later, row 1: got ZeroDivisionError"),
        (returns(["1", 1.0]), r"<lambda>, row 0: got '1'; expected a finite number, or None"),
        (returns([1.0, math.inf]), r"row 1: got inf"),
        (returns([1.0, [2.0]]), r"row 1: got \[2.0\]"),
        (returns(None), r"<lambda>: got a NoneType; expected one number or None for each of 2 completions"),
        (returns("12"), r"<lambda>: got a str"),
        (returns({0: 1.0, 1: 1.0}), r"<lambda>: got a dict"),
        (returns([1.0] * 3), r"<lambda>: got 3 rewards"),
        (verifier_reward("math"), r"reward function math_reward: answer: got nothing"),
        (verifier_reward("exact", "scale"), None),
    ],
)
def test_what_a_function_gets_wrong_names_it_and_the_row(function, message):
    combined = combine([some, function])
    if message is None:
        assert combined(completions=["1", "n"], scale=[1, 0]) == [2.0, None]
        return
    with pytest.raises(InputError, match=message):
        combined(completions=["a", "b"], scale=[1, 0])


@pytest.mark.parametrize(
    ("functions", "options", "message"),
    [
        ([], {}, "weights: got 0 for 0 functions"), (["a/model"], {}, r"functions\[0\]: got 'a/model'"),
        ([some], {"weights": [math.nan]}, r"weights\[0\]: got nan"), ([some], {"weights": ["1"]}, r"weights\[0\]"),
        ([some], {"missing": "abstian"}, "missing: got 'abstian'.*did you mean 'abstain'"),
    ],
)  # fmt: skip
def test_what_cannot_be_combined_is_named_at_once(functions, options, message):
    with pytest.raises(InputError, match=message):
        combine(functions, **options)


def test_a_verifier_is_checked_before_it_is_called():
    with pytest.raises(InputError, match=r"kind: got 'mth'.*did you mean 'math'"):
        verifier_reward("mth")
    with pytest.raises(InputError, match=r"math settings: got 'oder'.*did you mean 'order'"):
        verifier_reward("math", oder="given")


def test_columns_and_completions_of_other_forms():
    reward = verifier_reward("math")
    assert reward(completions=["4", "5"], answer=np.array([4, 6])) == [1.0, 0.0]
    blocks = [{"role": "assistant", "content": [{"type": "text", "text": "4"}, {"type": "image"}]}]
    assert reward(completions=[blocks], answer=[4]) == [1.0]
    assert reward(completions=[], answer=[]) == []
    for golds, got in (("45", "str"), (45, "int"), ({"a": 1, "b": 2}, "dict")):
        with pytest.raises(InputError, match=f"answer: got {got}; expected a column of 2 golds"):
            reward(completions=["4", "5"], answer=golds)
    for completion in (None, 4, [4], [{"role": "assistant"}], [{"content": 4}]):
        with pytest.raises(InputError, match="completions, row 1: got"):
            reward(completions=["4", completion], answer=["4", "4"])


def test_abstentions_are_counted_where_a_trainer_listens():
    logged = []
    reward = verifier_reward("choice", name="mine")
    reward(completions=["A"] * 3, answer=["?", "A", "?"], log_metric=lambda name, value: logged.append((name, value)))
    assert logged == [("rewards/mine/abstained", 2.0)]
    # Trainers of other libraries may hand in nothing.
    assert reward(completions=["A"], answer=["A"], log_metric=None) == [1.0]


def test_trl_functions_compose():
    rewards = pytest.importorskip("trl.rewards", reason="TRL is not installed")
    text = "<think>\nso\n</think>\n\\boxed{4}"
    combined = combine([rewards.think_format_reward, verifier_reward("math")], [0.5, 1.0])
    assert combined(completions=[[{"role": "assistant", "content": text}]], answer=["4"]) == [1.5]


def test_every_reward_of_trl_composes():
    rewards = pytest.importorskip("trl.rewards", reason="TRL is not installed")
    thought = "<think>\nso\n</think>\n\\boxed{4}"
    talk = [[{"role": "assistant", "content": text}] for text in (thought, r"no no no no \boxed{5}")]
    columns = {"completions": talk, "completion_ids": [[1] * 6, [1] * 10], "solution": ["4", "4"], "answer": ["4", "4"]}
    cosine = rewards.get_cosine_scaled_reward(
        min_value_wrong=-1.0, max_value_wrong=-0.5, min_value_correct=0.5, max_value_correct=1.0, max_len=10
    )
    each = {
        rewards.accuracy_reward: [1.0, 0.0],
        rewards.reasoning_accuracy_reward: [1.0, 0.0],
        rewards.think_format_reward: [1.0, 0.0],
        rewards.get_soft_overlong_punishment(10, 4): [0.0, -1.0],
        # By hand: 0.5·(1 + cos π·6/10)·(1 − 0.5) + 0.5 = 0.6727; wrong and of the whole length: the lesser penalty.
        cosine: [0.6727, -0.5],
        verifier_reward("math"): [1.0, 0.0],
    }
    for function, wanted in each.items():
        assert combine([function])(**columns) == pytest.approx(wanted, abs=1e-4), function
    sums = [sum(values) for values in zip(*each.values(), strict=True)]
    assert combine(list(each))(**columns) == pytest.approx(sums, abs=1e-4)
    repeats = rewards.get_repetition_penalty_reward(ngram_size=2, max_penalty=-1.0)
    # No pair of tokens comes twice; of 5 5 5 5 three pairs are one: 1 − 1/3 of the penalty.
    ids = [[1, 2, 3, 4], [5, 5, 5, 5]]
    assert combine([repeats])(completions=talk, completion_ids=ids) == pytest.approx([0.0, -2 / 3])
    # A gold that TRL cannot read is its None, and stays one.
    unread = {**columns, "solution": ["", "4"]}
    assert combine([rewards.accuracy_reward, verifier_reward("math")])(**unread)[0] is None


def test_rewards_can_be_sent_to_another_process():
    """As TRL's asynchronous trainer does."""
    made = combine([verifier_reward("math"), format_reward(think=False), overlong_penalty(10, 4)], [1.0, 0.5, 1.0])
    again = pickle.loads(pickle.dumps(made))
    assert again.__name__ == "math_reward+format_reward+overlong_penalty"
    assert again(completions=[r"\boxed{4}"], answer=["4"], completion_ids=[[1] * 8]) == [1.0]
    # Columns may have any name, those of our own arguments too.
    assert made(completions=["4"], answer=["4"], completion_ids=[[1]], name=["x"], missing=[1], settings=[2]) == [1.0]
