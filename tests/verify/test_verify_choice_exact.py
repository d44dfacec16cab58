"""Multiple choice and exact strings.

Planted faults seen caught here: denials not looked for; what stands before a denial denied too; several options
settled by the last; the first clause taken for the last; Markdown left in place.
"""

import pytest

from apportion.errors import InputError
from apportion.verify import grade
from apportion.verify.choice import ChoiceSettings, choose


@pytest.mark.parametrize(
    "response",
    [
        "B",
        "(B)",
        "B.",
        "b",
        r"\boxed{B}",
        r"\boxed{\text{B}}",
        r"\boxed{(B)}",
        r"\boxed{\textbf{(B) } 42}",
        "The answer is B.",
        "The answer is (B), since A fails.",
        "Answer: B) the second one",
        "<think>A? No, C.</think> The correct answer is B",
        "<answer>B</answer>",
        "A is too small and C too large.\nSo it is (B).",
        "We are left with option B",
        r"First \boxed{A}, no: \boxed{B}",
    ],
)
def test_b_is_chosen(response):
    assert grade("choice", "B", response).outcome == "correct"
    assert grade("choice", "(C)", response).outcome == "wrong"


@pytest.mark.parametrize(
    "response",
    [
        "A seems right and C too, but they are not, so the answer is B",
        "A and C are wrong, hence B",
        "A is wrong. B is right.",
        "Not A, so B",
        "The answer is not A but B",
        "The answer is B, not A",
        "It could be A or C. The answer is B.",
        "It is (A). Hmm, no, it is (B).",
        "The answer is (B) rather than (A)",
        "We choose B rather than A",
        "Is it A or B? I say (B).",
        "B. Neither A nor C is a prime",
        "B) A dog or a cat",
        "**B**",
        "(**B**)",
        "*B*",
        "__B__",
        "`B`",
        "The answer is **B**.",
        r"\boxed{**B**}",
    ],
)
def test_the_last_affirmed_option_is_chosen(response):
    assert grade("choice", "B", response).outcome == "correct"
    assert grade("choice", "A", response).outcome == "wrong"


@pytest.mark.parametrize(
    "response",
    [
        "A or B",
        "A, B",
        "A/B",
        "a or b",
        "A. or B.",
        "A\nB",
        "(A) or (B)",
        "Both A and B",
        "Either (A) or (B)",
        "The answer is A or B.",
        "Answer: A and B",
        "option A or option B",
        "A or maybe B",
        r"\boxed{A, B}",
        r"\boxed{\text{A and B}}",
    ],
)
@pytest.mark.parametrize("gold", ["A", "B"])
def test_several_options_are_no_answer(gold, response):
    verdict = grade("choice", gold, response)
    assert (verdict.outcome, verdict.reason) == ("wrong", "several options named")
    assert verdict.prediction == "A, B"


@pytest.mark.parametrize(
    "response",
    [
        "Not B.",
        "not (B)",
        "It isn't B",
        "It isn’t B",
        "The answer is not B",
        "The answer isn't (B).",
        "The answer cannot be B",
        "It is neither A nor B",
        "B is wrong",
        "B is not correct",
    ],
)
def test_a_negated_option_is_not_chosen(response):
    verdict = grade("choice", "B", response)
    assert (verdict.outcome, verdict.reason) == ("wrong", "option negated")


@pytest.mark.parametrize("gold", ["Z", "A or B", "", {"A": 1}, True])
def test_a_gold_names_one_option(gold):
    assert grade("choice", gold, "A").outcome == "abstain"


@pytest.mark.parametrize("response", ["", "I do not know", r"\boxed{42}", "<think>B", "Both", r"\boxed{BC}", "K"])
def test_no_choice(response):
    verdict = grade("choice", "B", response)
    assert (verdict.outcome, verdict.prediction) == ("wrong", None)


@pytest.mark.parametrize(
    "unit", ["A or ", "(A), ", "not ", "A. ", "(A) is ", "*", "answer is B or ", "option ", "A ( ", "n't "]
)
def test_reading_options_is_linear_in_hostile_text(unit):
    # Each would take minutes at quadratic cost.
    assert choose(unit * (400_000 // len(unit)) + "?!x", ChoiceSettings()) is not None


def test_choice_settings():
    assert grade("choice", "E", "E", letters="ABCD").outcome == "abstain"
    assert grade("choice", "B", "E", letters="ABCD").prediction is None
    assert grade("choice", "B", "b", any_case=False).outcome == "wrong"
    with pytest.raises(InputError, match="letters"):
        grade("choice", "B", "B", letters="abcd")


@pytest.mark.parametrize(
    ("gold", "response", "settings", "outcome"),
    [
        ("New York", "New  York", {}, "correct"),
        ("New York", "new york", {}, "wrong"),
        ("New York", "new york", {"case": False}, "correct"),
        ("New York", "New  York", {"whitespace": False}, "wrong"),
        (["NYC", "New York"], r"\boxed{New York}", {}, "correct"),
        ("New York", r"\boxed{New York}", {"extract": False}, "wrong"),
        (7, "7", {}, "correct"),
        ("caf\u00e9", "cafe\u0301", {}, "correct"),
        ("", "", {}, "abstain"),
        ({"a": 1}, "x", {}, "abstain"),
        ("0.33...", "The answer is 0.33...", {}, "correct"),
        ("x", "", {}, "wrong"),
    ],
)
def test_exact(gold, response, settings, outcome):
    assert grade("exact", gold, response, **settings).outcome == outcome


def test_bad_input_names_the_field():
    with pytest.raises(InputError, match=r"kind: got 'maths'; expected one of .*did you mean 'math'"):
        grade("maths", "1", "1")
    with pytest.raises(InputError, match=r"math settings: got 'rel_tolerance'"):
        grade("math", "1", "1", rel_tolerance=1)
    with pytest.raises(InputError, match="prediction: got NoneType"):
        grade("math", "1", None)
