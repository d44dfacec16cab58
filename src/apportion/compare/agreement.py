"""How far methods agree on the tokens of the same responses: rank correlations, signs, and where they differ most.

Shapes: _M methods, _T trainable tokens of a response, _N flat tokens, _R responses, _P pairs of methods.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from typing import Any

import numpy as np

from apportion.diagnose.stats import Counts, Estimate, ratio

MOST = 50
"""Disagreements that are listed."""


@dataclass(frozen=True)
class Pair:
    """Two methods on all responses.

    Attributes:
        first, second: their names.
        rho: [R] Spearman's rank correlation of each response's trainable tokens, tied values sharing their mean rank;
            NaN where either method is constant there.
        mean: of those that have one, 95 % by the bootstrap over prompts.
        without: how many responses have none.
        sign: share of trainable tokens whose sign differs, 0 being a sign of its own; 95 % as above.
        opposite: share of trainable tokens on which one is above 0 and the other below.
    """

    first: str
    second: str
    rho: np.ndarray
    mean: Estimate
    without: int
    sign: Estimate
    opposite: float | None


@dataclass(frozen=True)
class Disagreement:
    """Tokens in a row that every method gives the same value, and that two methods rank far apart.

    Attributes:
        row: the response. start, end: positions.
        gap: between the highest and the lowest rank, each from 0 to 1 inside the response.
        high, low: the methods that rank it highest and lowest.
        rank, advantage: of each method; the rank is None for a method that is constant in the response.
        alike: how many more responses to the prompt open with the same tokens up to and with the first of these, and
            differ there the same way, by no more.
    """

    row: int
    start: int
    end: int
    gap: float
    high: str
    low: str
    rank: Mapping[str, float | None]
    advantage: Mapping[str, float]
    alike: int = 0


def mean_ranks(values: Any) -> np.ndarray:
    """[T] ranks from 1; tied values share the mean of the ranks they take up.

    Numbers: (3, 1, 3, 2) has the ranks (3.5, 1, 3.5, 2).
    """
    _, of_T, count = np.unique(np.asarray(values, dtype=np.float64), return_inverse=True, return_counts=True)
    last = count.cumsum()
    return (last - (count - 1) / 2)[of_T]


def correlations(values_MT: np.ndarray) -> np.ndarray:
    """(M, M) Spearman's rank correlations; NaN where either row is constant.

    Numbers: (1, 2, 3, 4) with (1, 3, 2, 4) gives .8; with (2, 2, 1, 1) it gives −.8944.
    """
    rank_MT = np.array([mean_ranks(row) for row in values_MT]).reshape(values_MT.shape)
    centred_MT = rank_MT - (values_MT.shape[1] + 1) / 2
    product_MM = centred_MT @ centred_MT.T
    square_M = product_MM.diagonal()
    with np.errstate(invalid="ignore", divide="ignore"):
        # What rounding leaves beyond 1 would be no correlation.
        return np.clip(product_MM / np.sqrt(np.outer(square_M, square_M)), -1.0, 1.0)


def agreement(advantages: Mapping[str, Any], offsets: Any, mask: Any, prompt: Any) -> list[Pair]:
    """Every pair of methods, in the order in which they are given.

    A token's advantage is compared inside its response only: between responses the base decides, which methods share.

    Args:
        advantages: [N] of each method. offsets: [R+1]. mask: [N] bool, the trainable tokens.
        prompt: [R] int64, equal for responses to one prompt, which are drawn again together.
    """
    names, table_MN = _table(advantages)
    pairs = list(combinations(range(len(names)), 2))
    spans, mask, prompt = _spans(offsets), np.asarray(mask, dtype=bool), np.asarray(prompt, dtype=np.int64)
    rho_PR = np.full((len(pairs), len(spans)), np.nan)
    differ_PR, opposite_PR = np.zeros((2, len(pairs), len(spans)))
    tokens_R = np.zeros(len(spans))
    first, second = np.array(pairs, dtype=int).reshape(-1, 2).T
    for row, span in enumerate(spans):
        own_MT = table_MN[:, span][:, mask[span]]
        tokens_R[row] = own_MT.shape[1]
        if own_MT.shape[1]:
            rho_PR[:, row] = correlations(own_MT)[first, second]
            sign_MT = np.sign(own_MT)
            differ_PR[:, row] = (sign_MT[first] != sign_MT[second]).sum(1)
            opposite_PR[:, row] = (sign_MT[first] * sign_MT[second] < 0).sum(1)
    found = []
    for (i, k), rho, differ, opposite in zip(pairs, rho_PR, differ_PR, opposite_PR, strict=True):
        has = np.isfinite(rho)
        whole = tokens_R.sum()
        found.append(
            Pair(
                names[i], names[k], rho,
                ratio(Counts.of(rho[has], 1.0, prompt[has]), "in every response one of the two is constant"),
                int((~has).sum()),
                ratio(Counts.of(differ, tokens_R, prompt, int(whole)), "no trainable token"),
                float(opposite.sum() / whole) if whole else None,
            )
        )  # fmt: skip
    return found


def disagreements(
    advantages: Mapping[str, Any], offsets: Any, mask: Any, token_ids: Any, prompt: Any, most: int = MOST
) -> list[Disagreement]:
    """Where two methods rank a token of a response furthest apart, the furthest first, at most `most`.

    Ranks are inside the response and scaled to 0 … 1: (rank − 1)/(T − 1). A method that is constant in a response
    ranks nothing there. Tokens side by side are one entry where no method tells them apart; so are responses that
    share an opening, of which the one with the largest gap stands for all.

    Args:
        advantages, offsets, mask, prompt: see `agreement`. token_ids: [N].

    Numbers: (1, 2, 3) and (3, 2, 1) rank the first token 0 and 1, a gap of 1, the second .5 both, a gap of 0.
    """
    names, table_MN = _table(advantages)
    mask, ids, prompt = np.asarray(mask, dtype=bool), np.asarray(token_ids, dtype=np.int64), np.asarray(prompt)
    spans = _spans(offsets)
    runs = [_apart(table_MN[:, span], mask[span]) for span in spans]
    gap = np.concatenate([np.zeros(0), *(each.gap for each in runs)])
    row = np.repeat(np.arange(len(runs)), [len(each.gap) for each in runs])
    start = np.concatenate([np.zeros(0, dtype=np.int64), *(each.start for each in runs)])

    def ends(row: int, k: int) -> tuple[np.ndarray, str, str]:
        """Ranks of a run, and the names of the highest and the lowest."""
        rank_M = runs[row].rank(k)
        return rank_M, names[int(np.nanargmax(rank_M))], names[int(np.nanargmin(rank_M))]

    def opening(row: int, start: int) -> bytes:
        """Its tokens up to and with the one at `start`."""
        return ids[spans[row].start : min(spans[row].start + start + 1, spans[row].stop)].tobytes()

    def alike(one: int, start: int, high: str, low: str) -> int:
        found = 0
        for other in np.flatnonzero(prompt == prompt[one]).tolist():
            k = int(np.searchsorted(runs[other].start, start))
            if other != one and k < len(runs[other].gap) and runs[other].start[k] == start:
                found += opening(other, start) == opening(one, start) and ends(other, k)[1:] == (high, low)
        return found

    listed: dict[tuple[Any, ...], Disagreement] = {}
    first = np.cumsum([0, *(len(each.gap) for each in runs)])
    # Stable, so that equal gaps stand in the order of rows and positions.
    for at in np.argsort(-gap, kind="stable").tolist():
        if len(listed) == most:
            break
        i, here = int(row[at]), int(start[at])
        k = at - int(first[i])
        rank_M, high, low = ends(i, k)
        state = (int(prompt[i]), opening(i, here), high, low)
        if state in listed:
            continue
        ranks = {name: None if np.isnan(rank) else float(rank) for name, rank in zip(names, rank_M, strict=True)}
        values = dict(zip(names, table_MN[:, spans[i].start + here].tolist(), strict=True))
        more = alike(i, here, high, low)
        listed[state] = Disagreement(i, here, int(runs[i].end[k]), float(gap[at]), high, low, ranks, values, more)
    return list(listed.values())


@dataclass(frozen=True)
class _Runs:
    """Runs of a response's trainable tokens that methods rank apart.

    Attributes:
        gap, start, end: of each. values: (M, T) of the trainable tokens. first: [K] the first of them in each run.
    """

    gap: np.ndarray
    start: np.ndarray
    end: np.ndarray
    values: np.ndarray
    first: np.ndarray

    def rank(self, k: int) -> np.ndarray:
        """[M] of the tokens of run `k`; NaN for a method that is constant."""
        return _scaled(self.values)[:, self.first[k]]


def _apart(values_MT: np.ndarray, mask_T: np.ndarray) -> _Runs:
    position_T = np.flatnonzero(mask_T)
    own_MT = values_MT[:, position_T]
    none = np.zeros(0, dtype=np.int64)
    scaled_MT = _scaled(own_MT)
    varies_M = ~np.isnan(scaled_MT).any(1)
    if len(position_T) < 2 or varies_M.sum() < 2:
        return _Runs(np.zeros(0), none, none, own_MT, none)
    gap_T = scaled_MT[varies_M].max(0) - scaled_MT[varies_M].min(0)
    parts = (own_MT[:, 1:] != own_MT[:, :-1]).any(0) | (np.diff(position_T) > 1)
    bounds = np.concatenate([[0], np.flatnonzero(parts) + 1, [len(position_T)]])
    first, last = bounds[:-1], bounds[1:] - 1
    kept = gap_T[first] > 0
    first, last = first[kept], last[kept]
    return _Runs(gap_T[first], position_T[first], position_T[last] + 1, own_MT, first)


def _scaled(values_MT: np.ndarray) -> np.ndarray:
    """(M, T) ranks from 0 to 1; NaN in rows that are constant."""
    rank_MT = np.array([mean_ranks(each) for each in values_MT]).reshape(values_MT.shape)
    with np.errstate(invalid="ignore", divide="ignore"):
        scaled_MT = (rank_MT - 1) / (values_MT.shape[1] - 1)
    if values_MT.shape[1]:
        scaled_MT[values_MT.min(1) == values_MT.max(1)] = np.nan
    return scaled_MT


def _table(advantages: Mapping[str, Any]) -> tuple[list[str], np.ndarray]:
    return list(advantages), np.array([np.asarray(each, dtype=np.float64) for each in advantages.values()])


def _spans(offsets: Any) -> Sequence[slice]:
    bounds = np.asarray(offsets).tolist()
    return [slice(a, b) for a, b in pairwise(bounds)]
