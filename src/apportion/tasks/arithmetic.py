"""Chained arithmetic modulo M, worked one paragraph a step: the task of the embedded policy. [ours]

Prompt ``47+8*7=?`` and a newline, evaluated from left to right; the worked solution is

    47+8=55

    55*7=85

    #85

Multipliers are units modulo M, so that every step is a bijection of the running value: a wrong value never
heals by itself, and one wrong step spoils the answer unless it is corrected. A *detour* is a wrong paragraph
and then its correction, marked ``!``, which says that the result above is wrong and restates the step:

    55*7=25

    !55*7=85
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Literal, get_args

Split = Literal["train", "test"]

ALPHABET = "0123456789+-*=?#!\n"
"""Every character that a prompt or a worked solution can hold."""
STEP_DELIMITER = "\n\n"
CORRECTION = "!"

_CHAIN = re.compile(r"([0-9]+)((?:[+*-][0-9])+)=\?\n")
_EXHAUSTED = 20_000  # draws without a new problem after which the split counts as used up


@dataclass(frozen=True)
class ArithmeticTask:
    """Settings of the chained arithmetic task.

    ``operations``: steps of a chain, ≥ 1; all prompts of one setting have one length. ``modulus``: 10 to
    1000; the embedded policy knows 100. ``detour``: probability that a worked solution holds one detour; it
    changes solutions, never prompts. ``seed``: another seed, another stream of problems.

    Raises ValueError naming the field, what came and what was expected.
    """

    operations: int = 8
    modulus: int = 100
    detour: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("operations", "modulus", "seed"):
            if type(getattr(self, name)) is not int:
                raise ValueError(f"{name}: got {getattr(self, name)!r}, expected a whole number")
        if self.operations < 1:
            raise ValueError(f"operations: got {self.operations}, expected at least 1")
        if not 10 <= self.modulus <= 1000:
            raise ValueError(f"modulus: got {self.modulus}, expected 10 to 1000")
        if not self.multipliers:
            raise ValueError(f"modulus: {self.modulus} shares a factor with each of 2 to 9; choose another")
        if not isinstance(self.detour, int | float) or not 0 <= self.detour <= 1:
            raise ValueError(f"detour: got {self.detour!r}, expected a probability from 0 to 1")

    @property
    def multipliers(self) -> str:
        """The digits from 2 to 9 that are units modulo ``modulus``."""
        return "".join(str(digit) for digit in range(2, 10) if math.gcd(digit, self.modulus) == 1)

    @property
    def max_response(self) -> int:
        """Tokens of the longest sensible response: one detour at every step, the answer, the EOS token."""
        width = _width(self.modulus)
        paragraph = 2 * width + 3 + len(STEP_DELIMITER)
        return self.operations * (2 * paragraph + len(CORRECTION)) + 1 + width + 1


@dataclass(frozen=True)
class Problem:
    """One problem: its prompt, the answer (digits alone), the right steps in order, one worked solution.

    ``solution`` may hold a detour; ``steps`` never does, and is what ``check_steps`` compares with.
    """

    prompt: str
    answer: str
    steps: tuple[str, ...]
    solution: str


def parse_problem(prompt: str, modulus: int = 100) -> Problem:
    """The problem that a prompt states, solved, without a detour.

    Raises ValueError when ``prompt`` is not a chain of this modulus.
    """
    width = _width(modulus)
    chain = _CHAIN.fullmatch(prompt)
    if chain is None or len(chain[1]) != width or int(chain[1]) >= modulus:
        raise ValueError(
            f"prompt: got {prompt!r}, expected a chain like '47+8*7=?\\n' starting with a number of {width} "
            f"digits below {modulus}"
        )
    steps, value = [], int(chain[1])
    for operator, operand in re.findall(r"([+*-])([0-9])", chain[2]):
        before, digit = value, int(operand)
        value = {"+": before + digit, "-": before - digit, "*": before * digit}[operator] % modulus
        steps.append(f"{before:0{width}}{operator}{operand}={value:0{width}}")
    answer = f"{value:0{width}}"
    return Problem(prompt, answer, tuple(steps), _join(steps, answer))


def generate(task: ArithmeticTask, split: Split, count: int) -> list[Problem]:
    """``count`` problems of a split; a longer call starts with the problems of a shorter one.

    The stream depends on ``operations``, ``modulus``, ``seed`` and ``split`` alone. No problem comes twice
    until the split is used up, which only short chains can be (one operation has 1,702 problems in "train").
    Raises ValueError on an unknown split or a negative count.
    """
    if split not in get_args(Split):
        raise ValueError(f"split: got {split!r}, expected 'train' or 'test'")
    if count < 0:
        raise ValueError(f"count: got {count}, expected 0 or more")
    rng = Random(f"chain/{task.operations}/{task.modulus}/{task.seed}/{split}")
    problems: list[Problem] = []
    seen: set[str] = set()
    misses = 0
    while len(problems) < count:
        prompt = _draw_prompt(task, rng)
        if split_of(prompt) != split or (prompt in seen and misses < _EXHAUSTED):
            misses += 1
            continue
        if prompt in seen:
            seen.clear()
        seen.add(prompt)
        misses = 0
        problems.append(_with_detour(task, parse_problem(prompt, task.modulus)))
    return problems


def split_of(prompt: str) -> Split:
    """The split that a prompt belongs to, by a hash of its text alone: one in five is "test".

    So the splits are disjoint over all seeds, difficulties and releases.
    """
    return "test" if hashlib.sha256(prompt.encode()).digest()[0] < 256 // 5 else "train"


def verify(response: str, problem: Problem) -> bool:
    """Whether the response ends in the line ``#`` + the right answer, with nothing after it.

    ``response`` is text without the EOS token. Only the last line counts, so listing several answers gains
    nothing.
    """
    return response.rsplit("\n", 1)[-1] == f"#{problem.answer}"


def check_steps(problem: Problem, response: str) -> list[tuple[int, bool]]:
    """(character where the paragraph starts, ok) for every paragraph of a response, in order.

    A paragraph is ok when it is the right next step of this problem: after k right steps that is step k + 1,
    and after all of them the answer. After a paragraph that is not ok only the marked correction of the step
    still owed is; so nothing that builds on an error is ok, and a detour reads not ok, ok. An answer cannot
    be corrected, a paragraph after it is not ok, and neither is an unfinished one.
    """
    verdicts: list[tuple[int, bool]] = []
    start, done, broken = 0, 0, False
    for paragraph in response.split(STEP_DELIMITER):
        if start == len(response):  # an empty response, or nothing after the last delimiter
            break
        ok = paragraph == _owed(problem, done, broken)
        done, broken = done + ok, not ok
        verdicts.append((start, ok))
        start += len(paragraph) + len(STEP_DELIMITER)
    return verdicts


def _owed(problem: Problem, done: int, broken: bool) -> str | None:
    """The one paragraph that is right after ``done`` right steps, or None where none is."""
    if done < len(problem.steps):
        return CORRECTION + problem.steps[done] if broken else problem.steps[done]
    return f"#{problem.answer}" if done == len(problem.steps) and not broken else None


def _draw_prompt(task: ArithmeticTask, rng: Random) -> str:
    chain = f"{_below(task.modulus, rng):0{_width(task.modulus)}}"
    for _ in range(task.operations):
        operator = _choice("+-*", rng)
        chain += operator + _choice(task.multipliers if operator == "*" else "123456789", rng)
    return chain + "=?\n"


def _with_detour(task: ArithmeticTask, problem: Problem) -> Problem:
    # A stream of its own, so that the rate changes neither prompts nor which detour a solution would get.
    rng = Random(f"detour/{task.seed}/{problem.prompt}")
    if rng.random() >= task.detour:
        return problem
    at = _below(len(problem.steps), rng)
    left, right = problem.steps[at].split("=")
    wrong = (int(right) + 1 + _below(task.modulus - 1, rng)) % task.modulus
    detour = [f"{left}={wrong:0{len(right)}}", CORRECTION + problem.steps[at]]
    paragraphs = [*problem.steps[:at], *detour, *problem.steps[at + 1 :]]
    return replace(problem, solution=_join(paragraphs, problem.answer))


def _join(paragraphs: Sequence[str], answer: str) -> str:
    return STEP_DELIMITER.join([*paragraphs, f"#{answer}"])


def _width(modulus: int) -> int:
    return len(str(modulus - 1))


def _below(limit: int, rng: Random) -> int:
    # Python keeps the stream of random() from version to version, but not that of randrange() or choice().
    return int(rng.random() * limit)


def _choice(characters: str, rng: Random) -> str:
    return characters[_below(len(characters), rng)]
