"""Measured beside predicted: what the steps of a run took, and what `apportion cost` had said that they would."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import fmean, median
from typing import Any

_PREDICTED, _SECONDS, _PEAK = "predicted/", "seconds/", "memory/peak"
_GENERATED, _ALL = "tokens/actor", "seconds"


def beside(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The table of a run's metrics, `steps` and `rows` of `name`, `measured`, `predicted` and `ratio`.

    Seconds of every phase are in it, and whatever else has a `predicted/NAME` beside its NAME; nothing that is 0 both
    times. `seconds` is all of the phases that are predicted, or all of them where none is; `ratio` is predicted over
    measured. Each figure is the median of the steps but the first, which warms up; of `memory/peak`, the largest. A
    step that uses what an earlier one generated counts together with it: each figure is then the mean of those steps.
    """
    steps, counted = _windows(rows)
    names = list(dict.fromkeys(name for row in rows for name in row))
    phases = [name for name in names if name.startswith(_SECONDS)]
    others = [name for name in names if name not in phases and _PREDICTED + name in names]
    told = [name for name in phases if _PREDICTED + name in names]
    table = []
    whole = [(_ALL, told or phases)] if phases else []
    for name, parts in [*((name, [name]) for name in phases), *whole, *((name, [name]) for name in others)]:
        measured = _typical(name, counted, parts)
        # A run that went on elsewhere may have been predicted there alone.
        said = [_PREDICTED + part for part in parts]
        predicted = _typical(name, [[row] for window in counted for row in window if said[0] in row], said)
        if measured is not None and (measured or predicted):
            ratio = None if predicted is None or not measured else _short(predicted / measured)
            table.append({"name": name, "measured": measured, "predicted": predicted, "ratio": ratio})
    return {"steps": steps, "rows": table}


def is_predicted(found: Mapping[str, Any]) -> bool:
    """Whether a table of `beside` holds any prediction."""
    return any(row["predicted"] is not None for row in found["rows"])


def cells(row: Mapping[str, Any]) -> tuple[str, str, str, str]:
    """One row of a table of `beside` as it is shown: name, measured, predicted, predicted over measured."""
    name, told = row["name"], row["predicted"] is not None
    if name == _ALL:
        name = "seconds, predicted phases" if told else "seconds, all phases"
    ratio = "–" if row["ratio"] is None else f"{row['ratio']:.2f}"
    return name, _shown(row["name"], row["measured"]), _shown(row["name"], row["predicted"]), ratio


def heading(found: Mapping[str, Any]) -> str:
    """What the figures of a table of `beside` are."""
    steps = found["steps"]
    return "The only step" if steps == 1 else f"A step, median of {steps}"


def lines(found: Mapping[str, Any]) -> list[str]:
    """A table of `beside` as text."""
    table = [(heading(found), "measured", "predicted", "ratio"), *map(cells, found["rows"])]
    return [f"{name:<30}{a:>12}{b:>12}{c:>8}" for name, a, b, c in table]


def _windows(rows: Sequence[Mapping[str, Any]]) -> tuple[int, list[Sequence[Mapping[str, Any]]]]:
    """The number of steps that count, and the steps of each generation batch; all but the first where there are more,
    and but the last where it is not whole."""
    starts = [i for i, row in enumerate(rows) if _GENERATED in row] or list(range(len(rows)))
    windows = [rows[a:b] for a, b in pairwise([*starts, len(rows)])]
    longest = max(map(len, windows), default=0)
    whole = [window for window in windows[1:] if len(window) == longest] or windows[:1]
    return sum(map(len, whole)), whole


def _typical(name: str, windows: Sequence[Sequence[Mapping[str, Any]]], parts: Sequence[str]) -> float | None:
    """The median of the windows' means, parts added up; None where a part is in no step."""
    if not windows or any(all(_number(row.get(part)) is None for rows in windows for row in rows) for part in parts):
        return None
    values = [[sum(_number(row.get(part)) or 0.0 for part in parts) for row in rows] for rows in windows]
    if name == _PEAK:
        return _short(max(map(max, values)))
    return _short(median(map(fmean, values)))


def _number(value: Any) -> float | None:
    plain = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < float("inf")
    return float(value) if plain else None


def _short(value: float) -> float:
    return float(f"{value:.5g}")


def _shown(name: str, value: float | None) -> str:
    if value is None:
        return "–"
    if name.startswith("memory/"):
        return f"{value / 1e9:.3f} GB"
    return f"{value:.3f} s" if name.startswith(_ALL) else f"{value:,.0f}"
