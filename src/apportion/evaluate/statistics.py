"""Averages over problems, their intervals, and paired tests.

Rewards are (P, N) float64: 1 right, 0 wrong, NaN where the verifier abstained or there is no such sample. A NaN counts
neither as 0 nor as 1: it leaves its problem's average, and a problem without any reward leaves its set's. [ours]

Shapes: _P problems of a set, _N samples of a problem, _K draws of a subset, _B resamples.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

RESAMPLES = 10_000
LEVEL = 0.95
FEWEST = 3
"""Problems below which a set has no interval."""

_BLOCK = 500  # resamples at a time, which keeps their arrays small


@dataclass(frozen=True)
class Mean:
    """A mean over problems, in percent (of differences: in percentage points), with its interval.

    Attributes:
        value: None where no problem has a value.
        interval: 95 % by the percentile bootstrap over problems; None where there is none, and `missing` says why.
        problems: how many are in the mean. left_out: how many have no value.
    """

    value: float | None
    interval: tuple[float, float] | None
    problems: int
    left_out: int
    missing: str = ""


@dataclass(frozen=True)
class Paired:
    """Two models on the same problems: the first less the second.

    Attributes:
        difference: in percentage points.
        above: share of the resamples whose difference is above 0; None where there are none.
        wins, losses, ties: problems on which the first's average is higher, lower, the same.
        p: of the exact two-sided sign test.
    """

    difference: Mean
    above: float | None
    wins: int
    losses: int
    ties: int
    p: float


def averages(reward_PN: np.ndarray) -> np.ndarray:
    """[P] avg@n of each problem, 0 to 1: the mean of all its rewards; NaN where there is none."""
    known_P = np.isfinite(reward_PN).sum(1)
    with np.errstate(invalid="ignore"):
        return np.nansum(reward_PN, 1) / known_P


def pass_at_k(reward_PN: np.ndarray, k: int) -> np.ndarray:
    """[P] unbiased pass@k of each problem, 0 to 1; NaN where fewer than k of its samples have a reward.

    1 − C(n−c, k)/C(n, k) for c right ones of n [paper, arXiv 2107.03374, eq. 1], as the product of
    (n−c−j)/(n−j) over j < k, which neither over- nor underflows and holds a 0 where n−c < k. n = 4, c = 2, k = 2 gives
    1 − 1/6 = 5/6.
    """
    known_P1 = np.isfinite(reward_PN).sum(1, keepdims=True)
    wrong_P1 = known_P1 - np.nansum(reward_PN, 1, keepdims=True)
    j_K = np.arange(k)
    with np.errstate(invalid="ignore", divide="ignore"):
        missed_P = ((wrong_P1 - j_K) / (known_P1 - j_K)).prod(1)
    return np.where(known_P1[:, 0] >= k, 1 - missed_P, np.nan)


def majority_at_k(reward_PN: np.ndarray, forms_PN: Sequence[Sequence[str | None]], k: int) -> np.ndarray:
    """[P] maj@k of each problem, 0 to 1; NaN where fewer than k of its samples have a reward. [ours]

    The samples that have a reward are cut, in order, into ⌊n/k⌋ blocks of k, and the blocks' votes averaged: samples
    are independent, so this estimates the vote of k without bias. Equal forms are one candidate; a sample without an
    answer does not vote, and a block in which none votes is wrong. The candidates that tie for the most votes share
    the block: it counts as the mean of their rewards, as if one of them were drawn.

    Args:
        forms_PN: each sample's answer in the form that is compared, None for no answer.
    """
    out_P = np.full(len(reward_PN), np.nan)
    for p, (reward_N, forms_N) in enumerate(zip(reward_PN, forms_PN, strict=True)):
        known = [(form, r) for form, r in zip(forms_N, reward_N.tolist(), strict=True) if r == r]
        if len(known) >= k:
            out_P[p] = fmean(_vote(known[at : at + k]) for at in range(0, len(known) - k + 1, k))
    return out_P


def _vote(block: Sequence[tuple[str | None, float]]) -> float:
    candidates: dict[str, list[float]] = defaultdict(list)
    for form, reward in block:
        if form is not None:
            candidates[form].append(reward)
    most = max(map(len, candidates.values()), default=0)
    return fmean([fmean(c) for c in candidates.values() if len(c) == most] or [0.0])


def mean_of_sets(sets: Sequence[np.ndarray], seed: int = 0) -> Mean:
    """The plain mean of the sets' means, in percent; of one set, its mean.

    Problems are drawn again within each set, so the interval is that of these sets' kind of problems. It holds what
    the choice of problems adds, and the samples' own noise with it, for each problem's average stands as it is.

    Args:
        sets: a [P] float64 array for each, NaN for a problem without a value.
    """
    return _estimate(sets, seed)[0]


def paired(first: Sequence[np.ndarray], second: Sequence[np.ndarray], seed: int = 0) -> Paired:
    """Compares two models' averages on the same problems of the same sets.

    The difference is that of `mean_of_sets`, with problems drawn in pairs; the sign test is over all problems.
    A problem without a value on either side is left out.
    """
    differences = [a - b for a, b in zip(first, second, strict=True)]
    mean, resampled_B = _estimate(differences, seed)
    known = np.concatenate([d[np.isfinite(d)] for d in differences])
    wins, losses = int((known > 0).sum()), int((known < 0).sum())
    above = None if resampled_B is None else float((resampled_B > 0).mean())
    return Paired(mean, above, wins, losses, len(known) - wins - losses, sign_test(wins, losses))


def sign_test(wins: int, losses: int) -> float:
    """Exact two-sided sign test: min(1, 2·P(X ≤ min(wins, losses))), X binomial(wins + losses, ½); ties are left out.

    5 wins and 1 loss give 2·(C(6,0) + C(6,1))/64 = 14/64.
    """
    total = wins + losses
    tail = sum(math.comb(total, i) for i in range(min(wins, losses) + 1))
    return min(1.0, 2 * tail / 2**total)


def _estimate(sets: Sequence[np.ndarray], seed: int) -> tuple[Mean, np.ndarray | None]:
    """The mean of the sets' means, and its [B] resamples, in percent."""
    known = [values[np.isfinite(values)] for values in sets]
    problems = sum(map(len, known))
    left_out = sum(map(len, sets)) - problems
    if not known or not all(map(len, known)):
        return Mean(None, None, problems, left_out, "no value: a set has no graded problem"), None
    value = 100 * fmean(float(values.mean()) for values in known)
    if (fewest := min(map(len, known))) < FEWEST:
        return Mean(value, None, problems, left_out, f"no interval: {fewest} problems, fewer than {FEWEST}"), None
    resampled_B = 100 * np.mean([_resampled(values, [seed, s]) for s, values in enumerate(known)], axis=0)
    low, high = np.quantile(resampled_B, [(1 - LEVEL) / 2, (1 + LEVEL) / 2]).tolist()
    if all(values.min() == values.max() for values in known):
        # Nothing varied that could be drawn again, which is no certainty: 0 of 30 problems is not "0 … 0".
        return Mean(value, None, problems, left_out, "no interval: the problems do not differ"), resampled_B
    return Mean(value, (low, high), problems, left_out), resampled_B


def _resampled(values_P: np.ndarray, seed: Sequence[int]) -> np.ndarray:
    """[B] means of as many values as there are, drawn with replacement."""
    generator = np.random.default_rng(seed)
    count = len(values_P)
    sizes = [min(_BLOCK, RESAMPLES - start) for start in range(0, RESAMPLES, _BLOCK)]
    return np.concatenate([values_P[generator.integers(count, size=(size, count))].mean(1) for size in sizes])
