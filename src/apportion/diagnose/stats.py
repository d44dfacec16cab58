"""Ratios and rank correlations with intervals that resample whole prompts.

Responses to one prompt are alike, so the prompt is what is drawn again, with all that belongs to it.
Shapes: _U units (what a diagnostic counts), _P prompts, _B resamples, _V distinct values.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

RESAMPLES = 2_000
LEVEL = 0.95
FEWEST = 3
"""Prompts below which there is no interval, and units below which there is no rank correlation."""

_CELLS = 4_000_000  # numbers in one array of resamples
_UNDEFINED = 0.05  # share of resamples without a value beyond which there is no interval


@dataclass(frozen=True)
class Estimate:
    """A number with its interval.

    Attributes:
        value: None where there is none, and then `missing` says why.
        interval: 95 % by the percentile bootstrap over prompts; None where there is none, and `missing` says why
            where there is a value.
        n: what was counted. prompts: how many prompts it belongs to.
    """

    value: float | None
    interval: tuple[float, float] | None = None
    n: int = 0
    prompts: int = 0
    missing: str = ""


@dataclass(frozen=True)
class Counts:
    """What a share, a mean or an F1 is made of: Σ numerator / Σ denominator over units that each have a prompt.

    Attributes:
        numerator, denominator: [U] float64. prompt: [U] int64, equal for units of one prompt.
        n: how many things were counted, which may be more than the units.
    """

    numerator: np.ndarray
    denominator: np.ndarray
    prompt: np.ndarray
    n: int

    @classmethod
    def of(cls, numerator: Any, denominator: Any, prompt: Any, n: int | None = None) -> Counts:
        """From anything that becomes an array; `denominator` may be one number, `n` is the units where left out."""
        top = np.asarray(numerator, dtype=np.float64).reshape(-1)
        below = np.broadcast_to(np.asarray(denominator, dtype=np.float64), top.shape)
        owner = np.asarray(prompt, dtype=np.int64).reshape(-1)
        if owner.shape != top.shape:
            raise ValueError(f"prompt: got {len(owner)} values, expected {len(top)}, one a unit")
        return cls(top, below, owner, len(top) if n is None else n)

    @classmethod
    def pooled(cls, parts: Sequence[Counts]) -> Counts:
        """The units of several steps as one."""
        if not parts:
            return cls.of([], [], [])
        return cls(
            np.concatenate([part.numerator for part in parts]), np.concatenate([part.denominator for part in parts]),
            np.concatenate([part.prompt for part in parts]), sum(part.n for part in parts),
        )  # fmt: skip


def ratio(counts: Counts, nothing: str, seed: int = 0) -> Estimate:
    """Σ numerator / Σ denominator with its interval over prompts.

    Args:
        nothing: why there is no value where the denominator is 0.
    """
    keys, prompt = np.unique(counts.prompt, return_inverse=True)
    if counts.denominator.sum() == 0:
        return Estimate(None, None, counts.n, len(keys), nothing)
    value = float(counts.numerator.sum() / counts.denominator.sum())
    sums = [np.bincount(prompt, each, len(keys)) for each in (counts.numerator, counts.denominator)]
    found = []
    for drawn_BP in _resamples(len(keys), seed, len(keys)):
        with np.errstate(invalid="ignore", divide="ignore"):
            found.append((drawn_BP @ sums[0]) / (drawn_BP @ sums[1]))
    return _with_interval(value, found, counts.n, len(keys))


def spearman(
    x: Any, y: Any, prompt: Any, seed: int = 0, names: tuple[str, str] = ("the first quantity", "the second")
) -> Estimate:
    """Spearman's rank correlation of [U] x and y: Pearson's of their ranks, tied values sharing the mean rank.

    The interval resamples prompts; ranks are taken anew in every resample, in which a unit counts as often as its
    prompt was drawn.

    Args:
        names: of x and y, for the reason where one of them is constant.
    """
    x, y = (np.asarray(each, dtype=np.float64) for each in (x, y))
    keys, owner = np.unique(np.asarray(prompt, dtype=np.int64), return_inverse=True)
    if len(x) < FEWEST:
        return Estimate(None, None, len(x), len(keys), f"{len(x)} states, and it needs at least {FEWEST}")
    value = float(_correlations(x, y, np.ones((1, len(x))))[0])
    if not np.isfinite(value):
        constant = names[0] if x.min() == x.max() else names[1]
        return Estimate(None, None, len(x), len(keys), f"all values of {constant} are equal, so there are no ranks")
    found = [_correlations(x, y, drawn_BP[:, owner]) for drawn_BP in _resamples(len(keys), seed, len(x))]
    return _with_interval(value, found, len(x), len(keys))


def _with_interval(value: float, found: Sequence[np.ndarray], n: int, prompts: int) -> Estimate:
    if prompts < FEWEST:
        return Estimate(value, None, n, prompts, f"no interval: {prompts} prompts, and it needs at least {FEWEST}")
    values = np.concatenate(found)
    defined = values[np.isfinite(values)]
    if len(defined) < (1 - _UNDEFINED) * len(values):
        return Estimate(value, None, n, prompts, "no interval: too many resamples have no value")
    low, high = np.quantile(defined, [(1 - LEVEL) / 2, (1 + LEVEL) / 2]).tolist()
    if low == high:
        # Nothing varied that could be drawn again, which is no certainty: 0 of 5 groups are not "0 … 0".
        return Estimate(value, None, n, prompts, "no interval: the prompts do not differ")
    return Estimate(value, (low, high), n, prompts)


def _resamples(prompts: int, seed: int, width: int) -> Iterator[np.ndarray]:
    """(B, P) float64: how often each prompt was drawn, in blocks that keep (B, width) arrays small."""
    if prompts < FEWEST:
        return
    generator = np.random.default_rng(seed)
    block = max(1, _CELLS // max(width, prompts))
    for start in range(0, RESAMPLES, block):
        size = min(block, RESAMPLES - start)
        drawn = generator.integers(prompts, size=(size, prompts)) + prompts * np.arange(size)[:, None]
        yield np.bincount(drawn.ravel(), minlength=size * prompts).reshape(size, prompts).astype(np.float64)


def _correlations(x_U: np.ndarray, y_U: np.ndarray, weight_BU: np.ndarray) -> np.ndarray:
    """[B] rank correlations in which unit u stands weight[b, u] times; NaN where one side is constant."""
    total_B1 = weight_BU.sum(1, keepdims=True)
    # The mean of ranks 1 … n is (n + 1)/2 whatever the ties.
    x_BU, y_BU = (_ranks(each, weight_BU) - (total_B1 + 1) / 2 for each in (x_U, y_U))
    with np.errstate(invalid="ignore", divide="ignore"):
        spread_B = np.sqrt((weight_BU * x_BU**2).sum(1) * (weight_BU * y_BU**2).sum(1))
        return (weight_BU * x_BU * y_BU).sum(1) / spread_B


def _ranks(values_U: np.ndarray, weight_BU: np.ndarray) -> np.ndarray:
    """(B, U) ranks from 1; copies and tied values share the mean of the ranks they take up."""
    distinct_V, of_U = np.unique(values_U, return_inverse=True)
    starts_V = np.concatenate([[0], np.bincount(of_U, minlength=len(distinct_V)).cumsum()[:-1]])
    held_BV = np.add.reduceat(weight_BU[:, np.argsort(of_U, kind="stable")], starts_V, axis=1)
    rank_BV = held_BV.cumsum(1) - held_BV + (held_BV + 1) / 2
    return rank_BV[:, of_U]
