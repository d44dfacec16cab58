"""Learning curves of runs over steps, generated tokens and wall-clock, with intervals over seeds.

Shapes: _P points of a curve, _S seeds; [N] steps of a run.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np

from apportion.records import json_lines
from apportion.report.beside import beside
from apportion.report.escape import visible
from apportion.report.intervals import Array, Places, averages, bins, over_seeds, shown, wilson
from apportion.report.kinds import kinds, seed
from apportion.report.numbers import number
from apportion.report.source import Source

AXES = ("step", "tokens", "seconds")
POINTS, FEW = 500, 120  # of a curve that is shown first, and of one under "more metrics"
HELD_OUT = "evaluation/accuracy"
# Names, titles and units of the curves that come first, in their order.
KEY = {
    HELD_OUT: ("held-out accuracy", ""), "reward": ("reward", ""), "credit/acr": ("ACR", ""),
    "credit/zero_variance": ("zero-variance share", ""), "credit/p99_abs_advantage": ("p99 |A|", ""),
    "probe/ratio": ("probe / actor tokens", ""), "probe/logprob_gap": ("log-prob gap", "nats"),
    "entropy": ("entropy", "nats"), "completions/mean_length": ("response length", "tokens"),
}  # fmt: skip

_SECONDS, _SAMPLES, _NAME = "seconds/", "samples", 80

Rows = list[dict[str, Any]]


def curves(runs: Sequence[Source]) -> dict[str, Any]:
    """What the run view draws. The first run is the page's own; its kind comes first.

    `axes`: name → whether a run has logged it. `averaged`: whether some curve is thinned.

    `kinds`: `label`; `runs` (name, seed, and the last step, tokens and seconds); seconds of a step by `phases` and
    tokens `spent` by what, means over seeds; `grids`: name → x by axis, of each run in `runs` and of their `mean`.

    `curves`: name, title, unit, `key` for those that come first, `grid`, and by kind (None: has not got it) `runs`, the
    y of each; `mean`, by axis mean, low, high and n, None for a kind of one run; `wilson`, low and high of the
    held-out accuracy of one run.

    Mean and 95 % interval are over seeds by Student's t, x̄ ± t(0.975, n − 1)·s/√n; no interval where n is 1 [ours]. By
    step they are over the seeds that have the step; over tokens and seconds each seed is interpolated linearly inside
    the range that all of them cover [ours]. Accuracy of one seed has Wilson's interval for its number of responses
    (Wilson 1927). A curve of more than `POINTS` steps (`FEW` for the rest) holds averages of consecutive steps, each
    seed's before anything else; the last step stays by itself. Seconds add up `step_time`, without evaluations.

    Raises:
        InputError: a run has no metrics (see `Source.metrics`).
    """
    found, logs = kinds([run.path for run in runs]), [_Log.of(run) for run in runs]
    evaluated = any(len(log.evaluations.steps) for log in logs)
    names = [name for name in dict.fromkeys(name for log in logs for name in log.metrics.values)
             if not (evaluated and name == HELD_OUT)]  # fmt: skip
    grids = {
        "fine": [name for name in names if name.removeprefix("predicted/") in KEY],
        "coarse": [name for name in names if name.removeprefix("predicted/") not in KEY],
        "evaluation": [HELD_OUT] if evaluated else [],
    }
    drawn = [{grid: _Grid.of(grid, [logs[i] for i in kind.runs]) for grid in grids} for kind in found]
    order = sorted(
        ((name, grid) for grid, members in grids.items() for name in members), key=lambda pair: _rank(pair[0])
    )
    return {
        "axes": {axis: any(log.metrics.at[axis] is not None for log in logs) for axis in AXES},
        "averaged": any(grid.averaged for each in drawn for name, grid in each.items() if grids[name]),
        "kinds": [
            {
                "label": kind.label, "runs": [logs[i].ends for i in kind.runs],
                "phases": _means([logs[i].phases for i in kind.runs]),
                "spent": _means([logs[i].spent for i in kind.runs]),
                "grids": {name: grid.x() for name, grid in each.items()},
            } for kind, each in zip(found, drawn, strict=True)
        ],
        "curves": [
            {
                "name": visible(name, _NAME), "title": KEY.get(name, ("", ""))[0], "unit": KEY.get(name, ("", ""))[1],
                "key": name in KEY, "grid": grid, "kinds": [each[grid].y(name) for each in drawn],
            } for name, grid in order
        ],
    }  # fmt: skip


def _rank(name: str) -> int:
    return list(KEY).index(name) if name in KEY else len(KEY)


@dataclass(frozen=True)
class _Table:
    """Values of a run by step. `at`: axis → x [N], None where it was not logged; `values`: name → [N], NaN for none."""

    at: Mapping[str, Array | None]
    values: Mapping[str, Array]

    @property
    def steps(self) -> Array:
        steps = self.at["step"]
        assert steps is not None
        return steps

    def thinned(self, points: int) -> _Table:
        starts = bins(len(self.steps), points)
        at = {axis: None if x is None else averages(x, starts) for axis, x in self.at.items()}
        return _Table(at, {name: averages(y, starts) for name, y in self.values.items()})


@dataclass(frozen=True)
class _Log:
    """What a run has logged."""

    metrics: _Table
    evaluations: _Table
    ends: dict[str, Any]
    phases: dict[str, float]
    spent: dict[str, float]

    @classmethod
    def of(cls, run: Source) -> _Log:
        rows = _by_step(run.metrics())
        steps = np.array([row["step"] for row in rows], dtype=float)
        names = dict.fromkeys(name for row in rows for name in row if name != "step")
        columns = {name: _column(rows, name) for name in names}
        values = {name: y for name, y in columns.items() if np.isfinite(y).any()}
        actor, probes, time = (values.get(name) for name in ("tokens/actor", "probe/tokens", "step_time"))
        at = {
            "step": steps,
            "tokens": None if actor is None else _total(actor) + (0.0 if probes is None else _total(probes)),
            "seconds": None if time is None else _total(time),
        }
        metrics = _Table(at, values)
        ends = {axis: _x(x[-1]) if x is not None and len(x) else None for axis, x in at.items()}
        table = {row["name"]: row["measured"] for row in beside(rows)["rows"]}
        spent = {"rollouts": actor, "probes": probes}
        return cls(
            metrics, _evaluations(run.path / "evaluations.jsonl", metrics),
            {"name": visible(run.path.resolve().name, _NAME), "seed": seed(run.path), **ends},
            {name.removeprefix(_SECONDS): value for name, value in table.items() if name.startswith(_SECONDS)},
            {name: float(np.nansum(y)) for name, y in spent.items() if y is not None},
        )  # fmt: skip


def _evaluations(path: Path, metrics: _Table) -> _Table:
    rows = _by_step(json_lines(path))
    steps = np.array([row["step"] for row in rows], dtype=float)
    done = np.searchsorted(metrics.steps, steps, side="right")  # training steps before each evaluation
    at: dict[str, Array | None] = {"step": steps}
    for axis in AXES[1:]:
        x = metrics.at[axis]
        at[axis] = None if x is None else np.concatenate([[0.0], x])[done]
    told = _column(rows, "tokens")
    if len(rows) and np.isfinite(told).all():
        at["tokens"] = told
    return _Table(at, {HELD_OUT: _column(rows, "accuracy"), _SAMPLES: _column(rows, "samples")})


@dataclass(frozen=True)
class _Grid:
    """The runs of a kind on the x that their curves share. `whole`: every step; `thin`: at most `points`."""

    whole: Sequence[_Table]
    thin: Sequence[_Table]
    points: int

    @classmethod
    def of(cls, name: str, logs: Sequence[_Log]) -> _Grid:
        points = FEW if name == "coarse" else POINTS
        whole = [log.evaluations if name == "evaluation" else log.metrics for log in logs]
        return cls(whole, [table.thinned(points) for table in whole], points)

    @property
    def averaged(self) -> bool:
        return len(self._steps) > self.points

    def x(self) -> dict[str, Any]:
        runs = [{axis: _xs(x) for axis, x in table.at.items()} for table in self.thin]
        if len(self.thin) == 1:
            return {"runs": runs, "mean": None}
        by_step = _xs(averages(self._steps, self._starts))
        return {"runs": runs, "mean": {"step": by_step, **{axis: _xs(self._knots(axis)) for axis in AXES[1:]}}}

    def y(self, name: str) -> dict[str, Any] | None:
        if not any(name in table.values for table in self.thin):
            return None
        runs = [shown(table.values[name]) if name in table.values else None for table in self.thin]
        if len(self.thin) > 1:
            over = {"step": self._by_step(name), **{axis: self._between(name, axis) for axis in AXES[1:]}}
            return {"runs": runs, "mean": over, "wilson": None}
        values = self.thin[0].values
        return {
            "runs": runs,
            "mean": None,
            "wilson": wilson(values[name], values[_SAMPLES]) if name == HELD_OUT else None,
        }

    @property
    def _steps(self) -> Array:
        return np.unique(np.concatenate([table.steps for table in self.whole]))

    @property
    def _starts(self) -> Places:
        return bins(len(self._steps), self.points)

    def _knots(self, axis: str) -> Array | None:
        """Every x of a run inside the range that all cover, or as many evenly spaced ones as there is room for."""
        known = [x for table in self.thin if (x := table.at[axis]) is not None and len(x)]
        if not known:
            return None
        low, high = max(x[0] for x in known), min(x[-1] for x in known)
        knots = np.unique(np.concatenate(known))
        knots = knots[(low <= knots) & (knots <= high)]
        return knots if len(knots) <= self.points else np.linspace(low, high, self.points)

    def _by_step(self, name: str) -> dict[str, Any]:
        steps, starts = self._steps, self._starts
        rows = np.full((len(self.whole), len(steps)), np.nan)
        for row, table in zip(rows, self.whole, strict=True):
            if name in table.values:
                row[np.searchsorted(steps, table.steps)] = table.values[name]
        return over_seeds(averages(rows, starts))

    def _between(self, name: str, axis: str) -> dict[str, Any] | None:
        knots = self._knots(axis)
        if knots is None:
            return None
        rows = []
        for table in self.thin:
            x, y = table.at[axis], table.values.get(name)
            if x is not None and y is not None and (known := np.isfinite(y)).any():
                rows.append(np.interp(knots, x[known], y[known], left=np.nan, right=np.nan))
        found = np.array(rows).reshape(len(rows), len(knots))
        return over_seeds(np.where(np.isfinite(found).all(axis=0), found, np.nan))


def _total(values: Array) -> Array:
    return np.cumsum(np.nan_to_num(values, nan=0.0))


def _means(rows: Sequence[Mapping[str, float]]) -> dict[str, float | None]:
    """Means over the runs that logged any; a name that one of them lacks was 0 there."""
    logged = [row for row in rows if row]
    names = dict.fromkeys(name for row in logged for name in row)
    return {visible(name, _NAME): number(mean(row.get(name, 0.0) for row in logged)) for name in names}


def _by_step(rows: Iterable[Any]) -> Rows:
    """Rows that name a step, rising; of those that name the same, the last."""
    found = {row["step"]: row for row in rows if isinstance(row, dict) and math.isfinite(_finite(row.get("step")))}
    return [found[step] for step in sorted(found)]


def _column(rows: Rows, name: str) -> Array:
    """The finite values of a name, NaN where a row has none."""
    values = np.array([v if isinstance(v, float) else _finite(v) for v in (row.get(name) for row in rows)], dtype=float)
    return np.where(np.isfinite(values), values, np.nan)


def _finite(value: Any) -> float:
    """The value where it is a finite number and no bool, else NaN; JSON has whole numbers too large for a float."""
    plain = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < sys.float_info.max
    return float(value) if plain else math.nan


def _x(value: float) -> float:
    return int(value) if value == int(value) else float(f"{value:.7g}")


def _xs(values: Array | None) -> list[float] | None:
    return None if values is None else [_x(value) for value in values.tolist()]
