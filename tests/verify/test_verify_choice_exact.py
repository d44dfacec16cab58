"""Multiple choice and exact strings."""

import pytest

from apportion.errors import InputError
from apportion.verify import grade


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


@pytest.mark.parametrize("response", ["", "I do not know", r"\boxed{42}", "<think>B", "Both", r"\boxed{BC}", "K"])
def test_no_choice(response):
    verdict = grade("choice", "B", response)
    assert (verdict.outcome, verdict.prediction) == ("wrong", None)


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
