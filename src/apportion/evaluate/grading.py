"""Verdicts on samples, by one of the verifiers or the embedded task's own check."""

from __future__ import annotations

import os
import re
import unicodedata
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from apportion.evaluate.sources import Problem
from apportion.tasks import parse_problem, verify
from apportion.verify import check_gold, grade_many
from apportion.verify.extract import final_answer
from apportion.verify.math import MathSettings, gold_answers
from apportion.verify.normalise import canonical

GRADERS = ("math", "exact", "choice")
"""Verifiers that judge a text against a text; the first is the default."""
TASK = "task"
"""The embedded task's own check, which alone judges its problems."""
_SPELLING = " by spelling"

# A child process that did not start or got no processor is no evidence against a gold.
_MACHINE = ("start while", "starved while")
_REWARDS = {"correct": 1.0, "wrong": 0.0, "abstain": float("nan")}


@dataclass(frozen=True)
class Grade:
    """One grader's verdict on one sample.

    Attributes:
        verdict: correct, wrong or abstain.
        answer: the extracted answer in the form that votes are counted by, None for no answer: as the math verifier
            spells it (`verify.normalise.canonical`), or for the others with its whitespace levelled.
    """

    grader: str
    verdict: str
    reason: str
    answer: str | None

    @property
    def reward(self) -> float:
        """1 correct, 0 wrong, NaN abstain."""
        return _REWARDS[self.verdict]


def by_spelling(grader: str) -> str:
    """The name of a grader where it cannot read a gold and the spelling decides in its place."""
    return grader + _SPELLING


def grade(grader: str, problems: Sequence[Problem], texts: Sequence[str]) -> list[Grade]:
    """Judges one text a problem.

    Args:
        grader: of `GRADERS`, or one of these `by_spelling`, or `TASK`.
    """
    if grader == TASK:
        return [_by_task(problem, text) for problem, text in zip(problems, texts, strict=True)]
    if grader == by_spelling("math"):
        return [_by_spelling(problem, text) for problem, text in zip(problems, texts, strict=True)]
    kind = "exact" if grader.endswith(_SPELLING) else grader
    verdicts = grade_many(
        {"kind": kind, "gold": list(problem.gold), "prediction": text}
        for problem, text in zip(problems, texts, strict=True)
    )
    return [Grade(grader, v.outcome, v.reason, _form(kind, v.prediction)) for v in verdicts]


def unreadable(grader: str, problems: Sequence[Problem]) -> Iterator[str | None]:
    """Why each problem's gold cannot be judged against, as it is found; None where it can."""
    if grader == TASK:
        yield from [None] * len(problems)
        return
    with ThreadPoolExecutor(len(os.sched_getaffinity(0)), "golds") as threads:
        try:
            for reason in threads.map(lambda problem: check_gold(grader, list(problem.gold)), problems):
                yield None if reason and reason.startswith(_MACHINE) else reason
        finally:
            threads.shutdown(cancel_futures=True)


def _by_task(problem: Problem, text: str) -> Grade:
    right = verify(text, parse_problem(problem.text))
    last = text.rsplit("\n", 1)[-1]
    answer = last[1:] if last.startswith("#") else None
    reason = "the task's answer" if right else "no answer found" if answer is None else "another answer"
    return Grade(TASK, "correct" if right else "wrong", reason, answer)


def _by_spelling(problem: Problem, text: str) -> Grade:
    """The math verifier's first step and no other: its normal forms are equal, or the answer is wrong.

    The exact verifier would not do: golds come in dollar signs that no boxed answer has.
    """
    golds = gold_answers(list(problem.gold))
    answer = final_answer(text)
    if answer is None or len(answer) > MathSettings().max_chars:
        reason = "no answer found" if answer is None else f"an answer of {len(answer)} characters"
        return Grade(by_spelling("math"), "wrong", reason, answer and answer[:100])
    form = canonical(answer)
    right = form in map(canonical, golds)
    return Grade(by_spelling("math"), *(("correct", "same spelling") if right else ("wrong", "another spelling")), form)


def _form(kind: str, answer: str | None) -> str | None:
    if answer is None:
        return None
    if kind == "math":
        return canonical(answer)
    return re.sub(r"\s+", " ", unicodedata.normalize("NFC", answer)).strip()
