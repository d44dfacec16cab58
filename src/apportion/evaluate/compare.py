"""Finished evaluations side by side: two models on the same problems."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from apportion.errors import InputError
from apportion.evaluate.benches import AVG6
from apportion.evaluate.records import Store
from apportion.evaluate.statistics import paired

_MAY = ("n", "max_tokens", "style", "dropped", "by_spelling")
_SAMPLING = ("temperature", "top_p", "top_k", "seed")


def compare(first: Path, second: Path, seed: int = 0) -> dict[str, Any]:
    """Compares two evaluations, the first less the second, on the problems that both have.

    Returns:
        `first` and `second` (folders), `sets` (for each common set, and Avg-6 where both have it: `name`, `title`,
        and the fields of `statistics.Paired`) and `notes` (what else differs between them).

    Raises:
        InputError: a folder without a finished evaluation, no common set or no common problem, another grader,
            or one id with two problems or golds.
    """
    stores = [Store(folder) for folder in (first, second)]
    told = [store.evaluation() for store in stores]
    sets = [{each["name"]: each for each in evaluation["sets"]} for evaluation in told]
    common = [name for name in sets[0] if name in sets[1]]
    if not common:
        raise InputError("OUT", f"{first} with {', '.join(sets[0])} and {second} with {', '.join(sets[1])}",
                         "a set that both have")  # fmt: skip
    rows, averages, notes = [], {}, _different([each["settings"] for each in told], _SAMPLING, "")
    for folder, own, others in zip((first, second), sets, reversed(sets), strict=True):
        if alone := [each["title"] for name, each in own.items() if name not in others]:
            notes.append(f"{', '.join(alone)}: only {folder} has it, so it is not compared")
    for name in common:
        a, b = (each[name] for each in sets)
        if a["grader"] != b["grader"]:
            raise InputError("OUT", f"{name} graded by {a['grader']} and by {b['grader']}", "one grader for both")
        averages[name], left_out = _averages(name, stores)
        notes += _different([a, b], _MAY, f"{a['title']}: ")
        if left_out:
            notes.append(f"{a['title']}: {left_out} problems are in one evaluation only and left out")
        rows.append(_row(name, a["title"], [averages[name]], seed))
        if unjudged := rows[-1]["difference"]["left_out"]:
            notes.append(f"{a['title']}: {unjudged} problems lack a verdict in one evaluation and are left out")
    if averages.keys() >= set(AVG6):
        rows.append(_row("avg6", "Avg-6", [averages[name] for name in AVG6], seed))
    return {"first": str(first), "second": str(second), "sets": rows, "notes": notes}


def _row(name: str, title: str, sides: Sequence[tuple[np.ndarray, np.ndarray]], seed: int) -> dict[str, Any]:
    return {"name": name, "title": title, **asdict(paired([a for a, _ in sides], [b for _, b in sides], seed))}


def _averages(name: str, stores: Sequence[Store]) -> tuple[tuple[np.ndarray, np.ndarray], int]:
    """Two [P] averages over the same problems, NaN where there is none; and how many problems only one has."""
    a, b = ({row["id"]: row for row in store.items(name)} for store in stores)
    common = [key for key in a if key in b]
    if not common:
        raise InputError(
            "OUT", f"no problem of {name} in both evaluations", "the same problems", "evaluate both on them"
        )
    for key in common:
        for column in ("problem", "gold"):
            if a[key][column] != b[key][column]:
                raise InputError(f"{name}, id {key!r}, {column}", f"{a[key][column]!r:.60} and {b[key][column]!r:.60}",
                                 "the same problem in both evaluations")  # fmt: skip
    first, second = (
        np.array([np.nan if row[key]["average"] is None else row[key]["average"] for key in common]) for row in (a, b)
    )
    return (first, second), len(a) + len(b) - 2 * len(common)


def _different(sides: Sequence[Mapping[str, Any]], names: Sequence[str], where: str) -> list[str]:
    return [f"{where}{name} differs: {sides[0][name]} and {sides[1][name]}" for name in names
            if sides[0][name] != sides[1][name]]  # fmt: skip
