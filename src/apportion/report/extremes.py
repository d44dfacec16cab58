"""The most extreme credits of some steps, as segments: where an update pulls hardest, and why where that is known."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from apportion.report.detail import snippet
from apportion.report.escape import visible
from apportion.report.numbers import number
from apportion.report.reading import fixed, signed

EACH = 2  # of a response, so that one does not fill the table
_NAME = 80
# What is below the first figure is float32's rounding. Rewards of 0 and 1 that are not all equal have a σ above 0.1 in
# groups of up to a hundred, so a divisor below that comes from rewards that nearly agree. What the method moved is told
# where it is a quarter of the credit.
_NOTHING, _TINY, _RARE, _SHARE = 1e-6, 0.1, 0.25, 0.25

Row = Mapping[str, Any]


def extremes(steps: Iterable[tuple[int, Sequence[Row], Sequence[Row]]], count: int = 40) -> list[dict[str, Any]]:
    """The `count` largest |A| and the `count` largest |A − base|, each at most `EACH` a response, as one list.

    Adjacent trained tokens of equal advantage are one entry, from `start` to before `end`. `by` names the rankings it
    is in: "advantage", "moved" or both. It is ordered by |A|, then by length, then by later step. A credit that is no
    finite number is above all others, and None here. Rankings of disjoint steps can be merged: the top of the whole is
    in the tops of the parts.

    Args:
        steps: step, its rows of `rollouts` and of `credit` (see records.py), in any order; rows of one alone are
            passed over.
        count: entries of each ranking.
    """
    found: dict[str, list[tuple[Any, ...]]] = {"advantage": [], "moved": []}
    for step, rollouts, credit in steps:
        by_row = {c["row"]: c for c in credit}
        for r in rollouts:
            if (c := by_row.get(r["row"])) is None:
                continue
            starts, ends, value = _runs(r["mask"], c["advantage"])
            for by, size in (("advantage", np.abs(value)), ("moved", np.abs(value - c["base"]))):
                size = np.where(np.isfinite(size), size, math.inf)
                found[by] += [
                    (-float(size[k]), int(starts[k] - ends[k]), -step, r["row"], int(starts[k]), int(ends[k]), r, c)
                    for k in _top(size, starts, ends) if size[k] > _NOTHING
                ]  # fmt: skip
        for by, entries in found.items():
            found[by] = sorted(entries, key=lambda entry: entry[:5])[:count]
    out: dict[tuple[int, int, int], dict[str, Any]] = {}
    for by, entries in found.items():
        for _, _, step, row, start, end, r, c in entries:
            entry = out.setdefault((-step, row, start), {**_entry(-step, start, end, r, c), "by": []})
            entry["by"].append(by)
    return sorted(out.values(), key=lambda e: (-_size(e["advantage"]), e["start"] - e["end"], -e["step"], e["row"]))


def _runs(mask: Sequence[bool], advantage: Sequence[float]) -> tuple[Any, Any, Any]:
    """Starts, ends and advantage of the runs of adjacent trained tokens of equal advantage."""
    value, trained = np.asarray(advantage, dtype=np.float64), np.asarray(mask, dtype=bool)
    if not len(value):
        return np.zeros(0, int), np.zeros(0, int), value
    change = (value[1:] != value[:-1]) | (trained[1:] != trained[:-1])
    cuts = np.flatnonzero(change) + 1
    starts, ends = np.concatenate([[0], cuts]), np.concatenate([cuts, [len(value)]])
    kept = trained[starts]
    return starts[kept], ends[kept], value[starts[kept]]


def _top(size: Any, starts: Any, ends: Any) -> Any:
    """The places of the `EACH` largest, longer ones first among equals, then earlier ones."""
    near = np.arange(len(size))
    if len(size) > EACH:
        near = np.flatnonzero(size >= np.partition(size, -EACH)[-EACH])
    return near[np.lexsort((starts[near], starts[near] - ends[near], -size[near]))[:EACH]]


def _entry(step: int, start: int, end: int, r: Row, c: Row) -> dict[str, Any]:
    advantage, base = float(c["advantage"][start]), float(c["base"])
    return {
        "step": step, "row": r["row"], "group": visible(str(r["group"]), _NAME), "start": start, "end": end,
        "advantage": number(advantage), "base": number(base), "moved": number(advantage - base),
        "snippet": snippet(r, start, end), "verdict": r["verdict"], "why": _why(start, end, advantage, base, r, c),
    }  # fmt: skip


def _why(start: int, end: int, advantage: float, base: float, r: Row, c: Row) -> str | None:
    """What made it large, as far as the record says: a small divisor or a rare reward, and what the method moved."""
    moved = advantage - base
    if not math.isfinite(moved):
        return "not a finite number: this record is broken, and so was its update"
    told = [] if abs(moved) > 2 * abs(base) else _why_base(base, r["reward"], c["mean"], c["scale"])
    if abs(moved) > _SHARE * abs(advantage) and abs(moved) > _NOTHING:
        segments = c["segments"] or []
        inside = [(k, s) for k, s in enumerate(segments, 1) if s["start"] <= start and end <= s["end"]]
        words = f"the method moved it by {signed(moved)}"
        if len(inside) == 1 and _known(inside[0][1]["increment"]):
            k, s = inside[0]
            words += f", segment {k} of {len(segments)} with increment {signed(s['increment'])}"
        told = [*told, words]
    return "; ".join(told) or None


def _why_base(base: float, reward: float | None, mean: float | None, scale: float | None) -> list[str]:
    if reward is None or mean is None or scale is None or not all(map(math.isfinite, (reward, mean, scale))):
        return []
    gap = reward - mean
    if 0 < scale < _TINY and abs(gap) > _NOTHING:
        return [f"base {signed(base)} from a small divisor: r − μ = {_short(gap)} over {_short(scale)}"]
    if min(abs(1 - mean), abs(mean)) <= _RARE and abs(gap) > 0.5:
        return [f"base {signed(base)} from a rare reward: {reward:g} where the group averages {fixed(mean)}"]
    return []


def _short(value: float) -> str:
    return f"{value:.2g}".replace("-", "−")


def _known(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def _size(value: float | None) -> float:
    return math.inf if value is None else abs(value)
