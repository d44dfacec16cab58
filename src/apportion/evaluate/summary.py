"""The numbers of an evaluation, from the verdicts on disk.

Shapes: _P problems of a set, _N samples of a problem.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from apportion.evaluate.benches import AVG6
from apportion.evaluate.grading import Grade
from apportion.evaluate.plan import Item, Settings, Work
from apportion.evaluate.policy import Policy
from apportion.evaluate.records import DISAGREEMENTS, EVALUATION, Store, Stored
from apportion.evaluate.statistics import averages, majority_at_k, mean_of_sets, pass_at_k
from apportion.evaluate.table import table


@dataclass(frozen=True)
class Judged:
    """A sample with the verdicts of the graders, in their order: the first one's make the numbers."""

    sample: Stored
    grades: tuple[Grade, ...]


# One line a problem, one entry a sample; None where it is missing.
Grid = Sequence[Sequence[Judged | None]]


def summarise(policy: Policy, works: Sequence[Work], settings: Settings, store: Store) -> dict[str, Any]:
    """Forms all numbers, writes the items, evaluation.json, table.md and the disagreements, and returns the numbers.

    Keys of the result: `model`, `weights` (the fingerprint), `settings`, `sets` (a list), `avg6` (None unless all six
    sets are there) and `notes`. All averages are in percent.
    """
    sets, average_P, differing = [], {}, []
    for work in works:
        grid = _grid(work, store)
        items = [_item(item, line) for item, line in zip(work.items, grid, strict=True)]
        store.write_items(work.name, items)
        reward_PN = _rewards(grid, work.n)
        average_P[work.name] = averages(reward_PN)
        disagreements = _disagreements(work, grid)
        differing += disagreements
        sets.append(
            _described(work) | _counts(work, items) | {
                "metrics": _metrics(work, grid, reward_PN, settings.seed),
                "disagreements": len(disagreements) if len(work.graders) > 1 else None,
            }
        )  # fmt: skip
    six = [average_P[name] for name in AVG6] if average_P.keys() >= set(AVG6) else None
    evaluation = {
        "model": policy.name, "weights": policy.fingerprint, "settings": asdict(settings), "sets": sets,
        "avg6": None if six is None else asdict(mean_of_sets(six, settings.seed)),
        "notes": _notes(works, six is not None),
    }  # fmt: skip
    if settings.second_grader:
        store.write_text(DISAGREEMENTS, "".join(json.dumps(each) + "\n" for each in differing))
    else:
        store.remove(DISAGREEMENTS)
    store.write_text("table.md", table(evaluation))
    # Last, for it says that all the others are there.
    store.write_text(EVALUATION, json.dumps(evaluation, indent=1, allow_nan=False) + "\n")
    return evaluation


def _grid(work: Work, store: Store) -> Grid:
    found = store.read(work.name, [item.key for item in work.items])

    def judged(item: Item, m: int) -> Judged | None:
        if (sample := found.get((item.key, m))) is None:
            return None
        return Judged(sample, tuple(sample.grades[item.judge(grader)] for grader in work.graders))

    return [[judged(item, m) for m in range(work.n)] for item in work.items]


def _rewards(grid: Grid, n: int) -> np.ndarray:
    """(P, N) float64 of the first grader; NaN where it abstained or a sample is missing."""
    rewards = [[np.nan if each is None else each.grades[0].reward for each in line] for line in grid]
    return np.array(rewards, dtype=np.float64).reshape(len(grid), n)


def _metrics(work: Work, grid: Grid, reward_PN: np.ndarray, seed: int) -> dict[str, Any]:
    forms_PN = [[None if each is None else each.grades[0].answer for each in line] for line in grid]
    values = {f"avg@{work.n}": averages(reward_PN)}
    for k in work.ks:
        values[f"pass@{k}"] = pass_at_k(reward_PN, k)
        values[f"maj@{k}"] = majority_at_k(reward_PN, forms_PN, k)
    return {name: asdict(mean_of_sets([values_P], seed)) for name, values_P in values.items()}


def _item(item: Item, line: Sequence[Judged | None]) -> dict[str, Any]:
    """A row of `records.ITEMS`."""
    present = [each for each in line if each is not None]
    grades = [each.grades[0] for each in present if each.grades[0].verdict != "abstain"]
    correct = sum(grade.verdict == "correct" for grade in grades)
    return {
        "id": item.problem.id, "row": item.problem.row, "problem": item.problem.text, "gold": list(item.problem.gold),
        "samples": len(present), "graded": len(grades), "correct": correct,
        "average": correct / len(grades) if grades else None,
        "no_answer": sum(grade.answer is None for grade in grades),
        "cut_off": sum(each.sample.finish == "length" for each in present),
        "tokens": sum(each.sample.tokens for each in present),
    }  # fmt: skip


def _described(work: Work) -> dict[str, Any]:
    return {
        "name": work.name, "title": work.problems.bench.title, "source": work.problems.source, "style": work.style,
        "n": work.n, "max_tokens": work.max_tokens, "grader": work.graders[0], "problems": len(work.items),
        "dropped": work.dropped, "by_spelling": sum(work.graders[0] in item.unread for item in work.items),
    }  # fmt: skip


def _counts(work: Work, items: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Samples by what became of them; `lost` are those that the engine did not bring back."""
    total = {name: sum(row[name] for row in items) for name in ("samples", "graded", "no_answer", "cut_off", "tokens")}
    return total | {"abstained": total["samples"] - total["graded"], "lost": work.n * len(items) - total["samples"]}


def _disagreements(work: Work, grid: Grid) -> list[dict[str, Any]]:
    """The samples on which the two graders' verdicts differ, an abstention being a verdict."""
    return [
        {
            "set": work.name, "id": item.problem.id, "m": m, "gold": list(item.problem.gold),
            "grades": [asdict(grade) for grade in each.grades],
        }
        for item, line in zip(work.items, grid, strict=True) for m, each in enumerate(line)
        if each is not None and len({grade.verdict for grade in each.grades}) > 1
    ]  # fmt: skip


def _notes(works: Sequence[Work], six: bool) -> list[str]:
    notes = []
    for work in works:
        bench, count = work.problems.bench, len(work.problems.problems)
        if bench.sizes and count not in bench.sizes:
            sizes = " or ".join(f"{size:,}" for size in bench.sizes)
            notes.append(f"{bench.title}: {count:,} problems here, {sizes} published")
        if work.dropped:
            notes.append(f"{bench.title}: {work.dropped:,} problems left out, whose gold a grader cannot read")
        if spelled := sum(work.graders[0] in item.unread for item in work.items):
            notes.append(
                f"{bench.title}: {spelled:,} problems judged by spelling, for the grader cannot read their gold"
            )
    if six:
        notes.append("Avg-6: the plain mean of the six sets' avg@n [ours: the formula]")
    return notes
