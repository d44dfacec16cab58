"""Verdicts on single tests, and the share that passes as a reward.

Planted faults seen caught here: a hidden test's text shown; a test that failed by itself passed; a statement that the
program fails left out, or all of them counted; abstain as 0 or as verdicts; all or nothing; time-outs
ignored.
"""

from __future__ import annotations

import pytest

from apportion.errors import InputError
from apportion.verify import code_tests
from apportion.verify.code import CodeSettings, grade
from apportion.verify.code_tests import grade_tests
from apportion.verify.sandbox import CallReport, SandboxError, StdinReport, StdinResult, StepResult

SQUARE = "def square(x):\n    return x * x"
GOLD = {"tests": ["assert square(3) == 9", "assert square(0) == 0"], "hidden": ["n = 4", "assert square(-n) == 16"]}
PASSED, FAILED, BROKEN = StepResult(""), StepResult("program", "AssertionError"), StepResult("test", "NameError")


class There:
    """A sandbox with its results ready."""

    def __init__(self, *results: StepResult | StdinResult, calls: int = 3) -> None:
        self.results, self.calls = results, calls

    def call(self, job, limits):
        if not self.results:
            raise SandboxError("lost")
        return CallReport(self.results, self.calls)

    def stdin(self, job, limits):
        return StdinReport(self.results)


def judged(gold, *results, program=SQUARE, **settings):
    made = CodeSettings(sandbox=There(*results, **settings))
    tests, outcome = grade_tests(gold, program, made), grade(gold, program, made).outcome
    # One verdict, told twice.
    assert (tests is None) == (outcome == "abstain")
    assert tests is None or all(ok for _, ok in tests) == (outcome == "correct")
    return tests


def test_each_test_has_its_verdict():
    shown = ["assert square(3) == 9", "assert square(0) == 0", "hidden test 2"]
    assert judged(GOLD, PASSED, PASSED, PASSED, PASSED) == [(name, True) for name in shown]
    tests = judged(GOLD, PASSED, FAILED, PASSED, FAILED)
    assert tests == list(zip(shown, [True, False, False], strict=True))
    # A test that fails by itself beside the program's failure did not pass.
    assert [ok for _, ok in judged(GOLD, FAILED, BROKEN, PASSED, PASSED)] == [False, False, True]


def test_a_statement_between_the_tests_that_the_program_fails_is_listed():
    gold = "assert square(1) == 1\nvalue = square('a')\nassert square(2) == 4"
    assert judged(gold, PASSED, FAILED, PASSED) == [
        ("assert square(1) == 1", True), ("value = square('a')", False), ("assert square(2) == 4", True),
    ]  # fmt: skip


def test_abstains_where_the_verdict_does():
    assert judged(GOLD) is None
    assert judged(GOLD, PASSED) is None
    assert judged(GOLD, PASSED, BROKEN, PASSED, PASSED) is None
    assert judged(GOLD, PASSED, PASSED, PASSED, PASSED, calls=0) is None
    assert judged("assert square(", PASSED) is None
    assert grade_tests(GOLD, SQUARE, CodeSettings()) is None


def test_no_program_fails_every_test():
    assert judged(GOLD, PASSED, program="<think> hm") == [
        ("assert square(3) == 9", False), ("assert square(0) == 0", False), ("hidden test 2", False),
    ]  # fmt: skip


def test_inputs_and_outputs():
    gold = {"stdin": [{"input": "1", "output": "1"}, {"input": "2", "output": "4"}, {"input": "3", "output": "9"}]}
    results = (StdinResult("1\n"), StdinResult("5"), StdinResult("9", "timed out"))
    assert judged(gold, *results) == [("test 1", True), ("test 2", False), ("test 3", False)]


def test_the_share_that_passes():
    programs = [SQUARE, "def square(x):\n    return 9", [{"role": "assistant", "content": "def square(x): return 0"}]]
    reward = code_tests.test_fraction_reward(CodeSettings(allow_local_code=True, wall_s=20), "tests", workers=2)
    assert reward.__name__ == "test_fraction"
    # Of three tests the second program passes one, and so does the third; the last row has no test.
    rewards = reward(prompts=["?"] * 4, completions=[*programs, SQUARE], tests=[GOLD, GOLD, GOLD, "x = 1"])
    assert rewards == [1.0, pytest.approx(1 / 3), pytest.approx(1 / 3), None]


def test_a_missing_or_short_column_is_named():
    reward = code_tests.test_fraction_reward(CodeSettings())
    with pytest.raises(InputError, match="answer: got nothing; expected a column of 1 golds"):
        reward(completions=[SQUARE])
    with pytest.raises(InputError, match="answer: got 1 values"):
        reward(completions=[SQUARE] * 2, answer=[GOLD])
