"""Chained arithmetic: hand-worked problems, a checker written a second way, splits and detours.

Planted faults seen caught, each in a copy: `a - b` computed as `b - a`; operators applied with precedence; a
changed hash, or a split not decided by it; `verify` that accepts any `#NN` line or a mere ending; a checker that
forgives an uncorrected error, wants or ignores the marker, or lets an answer follow an error; starts that forget
the delimiter; multipliers that are not units; a detour rate that changes the prompts or is turned around; a
"wrong" value that may be the right one; a bound on the response that is too short.
"""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apportion.tasks import (
    ALPHABET,
    TASKS,
    ArithmeticTask,
    Problem,
    check_steps,
    generate,
    parse_problem,
    split_of,
    verify,
)

KNOWN = ["11*9+3+6=?\n", "91-8-7+4=?\n", "11+2+2+9=?\n"]
# 47+8=55, 55*7=385→85, 85-9=76, 76+5=81, 81*3=243→43, 43-6=37, 37+2=39 (modulo 100, left to right)
HAND = parse_problem("47+8*7-9+5*3-6+2=?\n")
SHORT = parse_problem("47+8*7=?\n")

tasks = st.builds(
    ArithmeticTask,
    operations=st.integers(1, 12),
    modulus=st.sampled_from([10, 97, 100, 128, 1000]),
    detour=st.sampled_from([0.0, 0.5, 1.0]),
    seed=st.integers(-3, 10**9),
)
splits = st.sampled_from(["train", "test"])


def slow_check(problem: Problem, response: str, modulus: int) -> list[tuple[int, bool]]:
    """Reads the prompt itself and keeps the running value; shares nothing with the package's checker."""
    operators = re.findall(r"[+*-]", problem.prompt)
    numbers = [int(number) for number in re.findall(r"\d+", problem.prompt)]
    width = len(str(modulus - 1))
    value, taken, wrong_before = numbers[0], 0, False
    verdicts = []
    position = 0
    while position < len(response):
        end = response.find("\n\n", position)
        end = len(response) if end < 0 else end
        paragraph = response[position:end]
        ok = False
        if taken < len(operators):
            body = paragraph
            marked = body.startswith("!")
            if marked:
                body = body[1:]
            match = re.fullmatch(r"([0-9]+)([+*-])([0-9])=([0-9]+)", body)
            if match and marked == wrong_before:
                operand = numbers[taken + 1]
                if operators[taken] == "+":
                    right = (value + operand) % modulus
                elif operators[taken] == "-":
                    right = (value - operand) % modulus
                else:
                    right = (value * operand) % modulus
                ok = (
                    int(match[1]) == value
                    and len(match[1]) == width
                    and match[2] == operators[taken]
                    and int(match[3]) == operand
                    and int(match[4]) == right
                    and len(match[4]) == width
                )
                if ok:
                    value, taken = right, taken + 1
        elif taken == len(operators) and not wrong_before:
            ok = paragraph == "#" + str(value).zfill(width)
            taken += ok
        wrong_before = not ok
        verdicts.append((position, ok))
        position = end + 2
    return verdicts


def test_hand_worked_problem():
    assert HAND.steps == ("47+8=55", "55*7=85", "85-9=76", "76+5=81", "81*3=43", "43-6=37", "37+2=39")
    assert HAND.answer == "39"
    assert HAND.solution == ("47+8=55\n\n55*7=85\n\n85-9=76\n\n76+5=81\n\n81*3=43\n\n43-6=37\n\n37+2=39\n\n#39")
    assert TASKS["chain"] is ArithmeticTask


def test_subtraction_wraps_and_results_are_padded():
    assert parse_problem("03-7*3=?\n").steps == ("03-7=96", "96*3=88")  # 3 - 7 = -4 → 96; 288 → 88
    assert parse_problem("99+9=?\n").solution == "99+9=08\n\n#08"  # 108 → 08
    assert parse_problem("003-7=?\n", modulus=1000).answer == "996"


@pytest.mark.parametrize("prompt", ["47+8=?", "7+8=?\n", "47+12=?\n", "47=?\n", "47/8=?\n", "47+8=?\n\n", "٤٧+8=?\n"])
def test_other_prompts_are_refused(prompt):
    with pytest.raises(ValueError, match=r"prompt: got .* expected a chain"):
        parse_problem(prompt)


# Starts: each paragraph "AA+B=CC" and its delimiter take 7 + 2 = 9 characters.
@pytest.mark.parametrize(
    ("response", "verdicts"),
    [
        ("47+8=55\n\n55*7=85\n\n#85", [(0, True), (9, True), (18, True)]),
        # A wrong step, then steps that are consistent with it: all not ok.
        ("47+8=56\n\n56*7=92\n\n#92", [(0, False), (9, False), (18, False)]),
        # Right again without a correction: the error still stands.
        ("47+8=56\n\n55*7=85\n\n#85", [(0, False), (9, False), (18, False)]),
        ("47+8=56\n\n47+8=55\n\n#85", [(0, False), (9, False), (18, False)]),
        # A detour: its wrong step is not ok, its correction is; the marker adds one character.
        ("47+8=56\n\n!47+8=55\n\n55*7=85\n\n#85", [(0, False), (9, True), (19, True), (28, True)]),
        # A correction that is wrong, and then one that is right.
        ("47+8=56\n\n!47+8=54\n\n!47+8=55", [(0, False), (9, False), (19, True)]),
        # A correction some paragraphs later takes the chain back to the step that is owed.
        ("47+8=56\n\n56*7=92\n\n!47+8=55\n\n55*7=85", [(0, False), (9, False), (18, True), (28, True)]),
        # Nothing to correct.
        ("47+8=55\n\n!47+8=55\n\n55*7=85", [(0, True), (9, False), (19, False)]),
        ("!47+8=55", [(0, False)]),
        # Right arithmetic, but not the next step of this problem.
        ("55*7=85\n\n#85", [(0, False), (9, False)]),
        ("47+8=55\n\n55+1=56", [(0, True), (9, False)]),
        ("47+8=55\n\n55*7=85\n\n85+1=86\n\n#85", [(0, True), (9, True), (18, False), (27, False)]),
        # The answer too early, twice, wrong, or corrected.
        ("#85", [(0, False)]),
        ("47+8=55\n\n55*7=85\n\n#85\n\n#85", [(0, True), (9, True), (18, True), (23, False)]),
        ("47+8=55\n\n55*7=85\n\n#84\n\n!#85", [(0, True), (9, True), (18, False), (23, False)]),
        # Unfinished, empty, and with delimiters where none belong.
        ("47+8=55\n\n55*7=8", [(0, True), (9, False)]),
        ("47+8=55\n\n", [(0, True)]),
        ("", []),
        ("\n\n47+8=55", [(0, False), (2, False)]),
        ("47+8=55\n\n\n55*7=85", [(0, True), (9, False)]),
    ],
)
def test_check_steps_by_hand(response, verdicts):
    assert check_steps(SHORT, response) == verdicts
    assert slow_check(SHORT, response, 100) == verdicts


@pytest.mark.parametrize(
    ("response", "right"),
    [
        (SHORT.solution, True),
        ("#85", True),
        ("47+8=56\n\n#85", True),  # the outcome alone: a lucky answer counts
        ("#84\n\n#85", True),  # the last one counts
        ("#85\n\n#84", False),
        ("#85\n", False),
        ("#85 ", False),
        ("#85#85", False),
        ("!#85", False),
        ("#085", False),
        ("#8", False),
        ("85", False),
        ("", False),
    ],
)
def test_verify_by_hand(response, right):
    assert verify(response, SHORT) is right


@settings(deadline=None, max_examples=60)
@given(tasks, splits)
def test_generated_problems(task, split):
    problems = generate(task, split, 8)
    assert problems == generate(task, split, 12)[:8]
    assert len({problem.prompt for problem in problems}) == 8
    assert len({len(problem.prompt) for problem in problems}) == 1
    for problem in problems:
        assert split_of(problem.prompt) == split
        assert set(problem.prompt + problem.solution) <= set(ALPHABET)
        assert len(problem.steps) == task.operations
        assert len(problem.solution) + 1 <= task.max_response
        assert verify(problem.solution, problem)
        verdicts = check_steps(problem, problem.solution)
        assert verdicts == slow_check(problem, problem.solution, task.modulus)
        wrong = [index for index, (_, ok) in enumerate(verdicts) if not ok]
        assert len(wrong) == ("!" in problem.solution)
        assert len(wrong) == task.detour or task.detour == 0.5
        for index in wrong:
            assert problem.solution.split("\n\n")[index + 1] == "!" + problem.steps[index]


@settings(deadline=None, max_examples=100)
@given(tasks, st.data())
def test_checker_equals_the_slow_one_on_spoiled_solutions(task, data):
    problem = generate(task, "train", 1)[0]
    text = problem.solution
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(text)))
        text = text[:at] + data.draw(st.sampled_from(ALPHABET)) + text[at + data.draw(st.integers(0, 1)) :]
    assert check_steps(problem, text) == slow_check(problem, text, task.modulus)


@settings(deadline=None, max_examples=60)
@given(tasks, st.data())
def test_one_wrong_step_spoils_the_answer(task, data):
    """Right arithmetic from a wrong value cannot come back, as every step is a bijection modulo M."""
    problem = generate(task, "test", 1)[0]
    at = data.draw(st.integers(0, task.operations - 1))
    width = len(problem.answer)
    value = int(problem.steps[at].split("=")[1]) + data.draw(st.integers(1, task.modulus - 1))
    running = f"{value % task.modulus:0{width}}"
    for step in problem.steps[at + 1 :]:
        running = parse_problem(f"{running}{step[width : width + 2]}=?\n", task.modulus).answer
    assert running != problem.answer


def test_splits_are_disjoint_over_seeds_and_settings():
    prompts = {"train": set(), "test": set()}
    for split, seen in prompts.items():
        for operations in (1, 2, 8):
            for seed in range(4):
                task = ArithmeticTask(operations, detour=0.5, seed=seed)
                seen |= {problem.prompt for problem in generate(task, split, 200)}
    assert not prompts["train"] & prompts["test"]


def test_seed_changes_problems_and_detour_does_not():
    prompts = [problem.prompt for problem in generate(ArithmeticTask(), "train", 50)]
    detours = generate(ArithmeticTask(detour=0.3), "train", 50)
    assert prompts == [problem.prompt for problem in detours]
    assert not set(prompts) & {problem.prompt for problem in generate(ArithmeticTask(seed=1), "train", 50)}


def test_detour_rate():
    # 2,000 solutions at rate 0.3: standard error sqrt(0.3 * 0.7 / 2000) = 0.0102; five of them allowed.
    problems = generate(ArithmeticTask(operations=4, detour=0.3), "train", 2000)
    assert abs(sum("!" in problem.solution for problem in problems) / 2000 - 0.3) < 0.051
    starts = {problem.solution.find("!") for problem in problems}
    assert starts == {-1, 9, 18, 27, 36}  # the marker after each of the four steps: 7 + 2 characters a paragraph


def test_known_stream():
    """Pinned: the embedded policy's card was measured on exactly these problems."""
    assert [problem.prompt for problem in generate(ArithmeticTask(operations=3), "test", 3)] == KNOWN


def test_used_up_split_starts_again():
    # One operation: 100 first numbers × (9 + 9 + 3 operands) = 2,100 prompts in both splits together.
    task = ArithmeticTask(operations=1)
    test = {problem.prompt for problem in generate(task, "test", 398)}
    assert len(test) == 398
    assert {problem.prompt for problem in generate(task, "test", 420)} == test
    assert len({problem.prompt for problem in generate(task, "train", 1800)}) == 2100 - 398


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"operations": 0}, "operations: got 0, expected at least 1"),
        ({"operations": 2.0}, "operations: got 2.0, expected a whole number"),
        ({"operations": True}, "operations: got True"),
        ({"modulus": 9}, "modulus: got 9, expected 10 to 1000"),
        ({"modulus": 210}, "modulus: 210 shares a factor"),
        ({"detour": 1.5}, "detour: got 1.5, expected a probability"),
        ({"detour": float("nan")}, "detour: got nan"),
        ({"seed": None}, "seed: got None"),
    ],
)
def test_bad_settings(bad, message):
    with pytest.raises(ValueError, match=message):
        ArithmeticTask(**bad)


def test_bad_calls():
    with pytest.raises(ValueError, match="split: got 'dev', expected 'train' or 'test'"):
        generate(ArithmeticTask(), "dev", 1)
    with pytest.raises(ValueError, match="count: got -1"):
        generate(ArithmeticTask(), "train", -1)
    assert generate(ArithmeticTask(), "train", 0) == []
