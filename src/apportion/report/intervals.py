"""Intervals over seeds and of a share, and averages of consecutive steps.

Shapes: _S seeds, _P points of a curve.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np

from apportion.report.numbers import number

_CONFIDENCE, _Z = 0.95, 1.959963984540054  # the normal quantile of 0.975

Array = np.ndarray[Any, np.dtype[np.float64]]
Places = np.ndarray[Any, np.dtype[np.intp]]


def over_seeds(values_SP: Array) -> dict[str, list[float | None] | list[int]]:
    """Mean, low and high of the 95 % interval by Student's t, and n, of each column's finite values."""
    known = np.isfinite(values_SP)
    n = known.sum(axis=0)
    with np.errstate(invalid="ignore", divide="ignore"):
        centre = np.where(known, values_SP, 0.0).sum(axis=0) / n
        square = np.where(known, values_SP - centre, 0.0) ** 2
        half = np.array([t_quantile(int(k) - 1) if k > 1 else np.nan for k in n]) * np.sqrt(
            square.sum(axis=0) / (n - 1) / n
        )
    return {"mean": shown(centre), "low": shown(centre - half), "high": shown(centre + half), "n": n.tolist()}


def wilson(share: Array, samples: Array) -> dict[str, list[float | None]]:
    """Low and high of Wilson's 95 % score interval of a share of `samples`; None where it is no share."""
    with np.errstate(invalid="ignore", divide="ignore"):
        spread = 1 + _Z**2 / samples
        centre = (share + _Z**2 / (2 * samples)) / spread
        half = _Z / spread * np.sqrt(share * (1 - share) / samples + _Z**2 / (4 * samples**2))
        right = (share >= 0) & (share <= 1) & (samples > 0)
    # At 0 and 1 the interval ends there; rounding must not put it outside.
    low, high = np.maximum(centre - half, 0.0), np.minimum(centre + half, 1.0)
    return {"low": shown(np.where(right, low, np.nan)), "high": shown(np.where(right, high, np.nan))}


@lru_cache(maxsize=256)
def t_quantile(freedom: int) -> float:
    """Student's t below which 97.5 % lie, for whole degrees of freedom from 1.

    The probability between −t and t is a finite sum in θ = arctan(t/√ν) (Abramowitz and Stegun, 26.7.3 and 26.7.4);
    θ is found by halving.
    """
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _inside(middle, freedom) < _CONFIDENCE else (low, middle)
    return math.sqrt(freedom) * math.tan((low + high) / 2)


def _inside(theta: float, freedom: int) -> float:
    odd = freedom % 2
    square, term, total = math.cos(theta) ** 2, math.cos(theta) if odd else 1.0, 0.0
    for k in range(2 if odd else 1, freedom, 2):
        total += term
        term *= square * k / (k + 1)
    return (theta + math.sin(theta) * total) * 2 / math.pi if odd else math.sin(theta) * total


def bins(count: int, points: int) -> Places:
    """Where each of at most `points` runs of nearly equal length starts; the last holds the last alone."""
    if count <= points:
        return np.arange(count, dtype=np.intp)
    return np.linspace(0, count - 1, points).astype(np.intp)


def averages(values: Array, starts: Places) -> Array:
    """Means of the finite values between `starts` along the last axis; NaN where there is none."""
    if not values.shape[-1]:
        return values
    known = np.isfinite(values)
    sums = np.add.reduceat(np.where(known, values, 0.0), starts, axis=-1)
    with np.errstate(invalid="ignore"):
        return sums / np.add.reduceat(known.astype(float), starts, axis=-1)


def shown(values: Array) -> list[float | None]:
    """Five significant digits each; None where there is no number."""
    return [number(value) for value in values.tolist()]
