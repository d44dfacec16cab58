"""Verdicts on the single tests of a program, and the share of them that pass as a reward. [ours]

A program's tests are no steps of its text, so this is no `StepVerifier`: a failed test says nothing about which
lines are at fault.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from apportion.errors import InputError
from apportion.verify import code
from apportion.verify.rewards import RewardFunction, Rewards, completion_text


def grade_tests(gold: Any, prediction: str, settings: code.CodeSettings) -> list[tuple[str, bool]] | None:
    """(name, whether it passed) of every test, in order; None where `code.grade` abstains.

    All pass where that says "correct", and only there. Names are as in `code.judge`: hidden tests by number only.
    """
    verdict, tests = code.judge(gold, prediction, settings)
    return None if verdict.outcome == "abstain" else tests


def test_fraction_reward(
    settings: code.CodeSettings, answer_column: str = "answer", workers: int | None = None
) -> RewardFunction:
    """The share of a program's tests that it passes, in [0, 1]; None on abstain.

    A program that is half right gets half of the reward, which a policy can earn by special cases: beside visible
    tests give hidden ones, or use `verifier_reward("code")`, which pays for all of them only.

    Args:
        settings: how programs are run.
        answer_column: the data set's column with the tests (see `code`).
        workers: programs at a time; the number of processors by default.

    Raises (when called): InputError if the column is missing or its length is not that of `completions`.
    """

    def share(gold: Any, completion: Any) -> float | None:
        tests = grade_tests(gold, completion_text(completion), settings)
        return None if tests is None else sum(passed for _, passed in tests) / len(tests)

    def test_fraction(completions: Sequence[Any], **columns: Any) -> Rewards:
        golds = columns.get(answer_column)
        if golds is None or len(golds) != len(completions):
            raise InputError(
                answer_column, "nothing" if golds is None else f"{len(golds)} values",
                f"a column of {len(completions)} golds", "name the data set's column with answer_column=",
            )  # fmt: skip
        with ThreadPoolExecutor(workers or len(os.sched_getaffinity(0)), "verify") as threads:
            return list(threads.map(share, golds, completions))

    return test_fraction
