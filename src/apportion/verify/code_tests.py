"""Verdicts on the single tests of a program, and the share of them that pass as a reward. [ours]

A program's tests are no steps of its text, so this is no `StepVerifier`: a failed test says nothing about which
lines are at fault.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from apportion.verify import code
from apportion.verify.rewards import Reward, Rewards, completion_texts, golds_of


def grade_tests(gold: Any, prediction: str, settings: code.CodeSettings) -> list[tuple[str, bool]] | None:
    """(name, whether it passed) of every test, in order; None where `code.grade` abstains.

    All pass where that says "correct", and only there. Names are as in `code.judge`: hidden tests by number only.
    """
    verdict, tests = code.judge(gold, prediction, settings)
    return None if verdict.outcome == "abstain" else tests


def test_fraction_reward(
    settings: code.CodeSettings, answer_column: str = "answer", workers: int | None = None
) -> Reward:
    """The share of a program's tests that it passes, in [0, 1]; None on abstain.

    A program that is half right gets half of the reward, which a policy can earn by special cases: beside visible
    tests give hidden ones, or use `verifier_reward("code")`, which pays for all of them only.

    Args:
        settings: how programs are run.
        answer_column: the data set's column with the tests (see `code`).
        workers: programs at a time; the number of processors by default.

    Raises (when called): InputError if the column is missing or its length is not that of `completions`.
    """
    return Reward("test_fraction", _shares, settings, answer_column, workers or len(os.sched_getaffinity(0)))


def _shares(
    settings: code.CodeSettings, column: str, workers: int, /, completions: Sequence[Any], **columns: Any
) -> Rewards:
    def share(gold: Any, text: str) -> float | None:
        tests = grade_tests(gold, text, settings)
        return None if tests is None else sum(passed for _, passed in tests) / len(tests)

    golds, texts = golds_of(columns, column, len(completions)), completion_texts(completions)
    with ThreadPoolExecutor(workers, "verify") as threads:
        return list(threads.map(share, golds, texts))
