"""Ratios and rank correlations: hand numbers, plain loops over the same draws, and what has no number.

Planted faults seen caught: ties ranked by the higher rank; ranks centred on n/2; units resampled in place of prompts
(ratio and correlation); one-sided quantiles; an interval of width 0; an interval from two prompts; an interval from
resamples that mostly have no value; a correlation of a constant.
"""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from apportion.diagnose import stats
from apportion.diagnose.stats import Counts, Estimate, ratio, spearman


def plain_ranks(values: list[float]) -> list[float]:
    """1 + how many are smaller + half of how many others are equal."""
    return [1 + sum(w < v for w in values) + (sum(w == v for w in values) - 1) / 2 for v in values]


def plain_spearman(x: list[float], y: list[float]) -> float | None:
    a, b = plain_ranks(x), plain_ranks(y)
    mean = (len(x) + 1) / 2
    top = sum((u - mean) * (v - mean) for u, v in zip(a, b, strict=True))
    below = sum((u - mean) ** 2 for u in a) * sum((v - mean) ** 2 for v in b)
    return top / math.sqrt(below) if below else None


def plain_quantile(values: list[float], q: float) -> float:
    """Linear between order statistics."""
    values = sorted(values)
    at = q * (len(values) - 1)
    low = math.floor(at)
    return values[low] + (at - low) * (values[min(low + 1, len(values) - 1)] - values[low])


def draws(prompts: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(prompts, size=(stats.RESAMPLES, prompts))


def test_spearman_with_ties_by_hand() -> None:
    # Ranks 1, 2.5, 2.5, 4 and 1, 3, 2, 4: deviations −1.5, 0, 0, 1.5 and −1.5, .5, −.5, 1.5; 4.5/√(4.5 · 5).
    found = spearman([1, 2, 2, 3], [10, 30, 20, 40], [0, 1, 2, 3])
    assert found.value == pytest.approx(4.5 / math.sqrt(22.5), abs=1e-15)
    assert found.n == 4 and found.prompts == 4
    assert spearman([1, 2, 3], [6, 5, 4], [0, 1, 2]).value == pytest.approx(-1.0, abs=1e-15)
    # 1 − 6 Σd²/(n(n² − 1)) without ties: ranks (1, 2, 3, 4, 5) and (2, 1, 4, 3, 5), Σd² = 4: 1 − 24/120.
    assert spearman([1, 2, 3, 4, 5], [0.2, 0.1, 0.4, 0.3, 9.0], range(5)).value == pytest.approx(0.8, abs=1e-15)


def test_ratio_by_hand() -> None:
    counts = Counts.of([1, 0, 3], [2, 2, 4], [7, 7, 9])
    assert ratio(counts, "nothing") == Estimate(0.5, None, 3, 2, "no interval: 2 prompts, and it needs at least 3")
    pooled = Counts.pooled([counts, Counts.of([4], [4], [11], n=10)])
    assert ratio(pooled, "").value == pytest.approx(8 / 12) and ratio(pooled, "").n == 13
    assert ratio(pooled, "").prompts == 3


@given(st.data())
def test_intervals_are_quantiles_of_resampled_prompts(data: st.DataObject) -> None:
    seed = data.draw(st.integers(0, 5))
    fill = random.Random(data.draw(st.integers(0, 2**32)))
    prompts = data.draw(st.integers(3, 5))
    owner = list(range(prompts)) + [fill.randrange(prompts) for _ in range(data.draw(st.integers(0, 6)))]
    fill.shuffle(owner)
    x, y = ([fill.choice([0.0, 0.25, 0.5, 1.0]) for _ in owner] for _ in range(2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stats, "RESAMPLES", 40)
        means, correlations = [], []
        for drawn in draws(prompts, seed).tolist():
            units = [u for p in drawn for u in range(len(owner)) if owner[u] == p]
            means.append(sum(x[u] for u in units) / len(units))
            correlations.append(plain_spearman([x[u] for u in units], [y[u] for u in units]))
        shares, ranks = ratio(Counts.of(x, 1.0, owner), "", seed), spearman(x, y, owner, seed)
    assert shares.value == pytest.approx(sum(x) / len(x))
    bounds = [plain_quantile(means, q) for q in (0.025, 0.975)]
    if shares.interval is not None:
        assert shares.interval == pytest.approx(bounds)
    else:
        assert bounds[0] == pytest.approx(bounds[1])
    value, defined = plain_spearman(x, y), [c for c in correlations if c is not None]
    if value is None:
        assert ranks.value is None and "equal" in ranks.missing
        return
    assert ranks.value == pytest.approx(value, abs=1e-12)
    if len(defined) < 0.95 * len(correlations):
        assert ranks.interval is None and "too many resamples" in ranks.missing
    elif ranks.interval is not None:
        assert ranks.interval == pytest.approx([plain_quantile(defined, q) for q in (0.025, 0.975)], abs=1e-12)


def test_blocks_do_not_change_the_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y, owner = [1, 4, 2, 8, 5, 7], [3, 1, 4, 1, 5, 9], [0, 0, 1, 2, 3, 3]
    whole = ratio(Counts.of(x, 1.0, owner), ""), spearman(x, y, owner)
    monkeypatch.setattr(stats, "_CELLS", 40)
    assert (ratio(Counts.of(x, 1.0, owner), ""), spearman(x, y, owner)) == whole


def test_interval_holds_the_value_of_symmetric_data_and_is_about_as_wide_as_theory_says() -> None:
    fill = np.random.default_rng(3)
    half = fill.normal(size=200)
    values = np.concatenate([half, -half])
    found = ratio(Counts.of(values, 1.0, np.arange(400)), "")
    assert found.value == pytest.approx(0.0, abs=1e-15) and found.interval is not None
    low, high = found.interval
    assert low < 0 < high
    width = 2 * 1.96 * values.std() / math.sqrt(400)
    assert (high - low) == pytest.approx(width, rel=0.08)
    assert low == pytest.approx(-high, abs=0.12 * width)


def test_prompts_are_resampled_and_not_units() -> None:
    # Ten copies in each of four prompts tell no more than one: the interval stays as wide.
    once = ratio(Counts.of([0, 1, 0, 1], 1.0, range(4)), "")
    many = ratio(Counts.of([0, 1, 0, 1] * 10, 1.0, list(range(4)) * 10), "")
    assert many.interval == once.interval and many.n == 40 and many.prompts == 4


def test_order_of_units_does_not_matter() -> None:
    fill = random.Random(1)
    units = [(fill.choice([1.0, 2.0, 5.0]), fill.random(), fill.randrange(6)) for _ in range(40)]
    shuffled = fill.sample(units, len(units))
    found = []
    for each in (units, shuffled):
        x, y, owner = zip(*each, strict=True)
        found.append((ratio(Counts.of(x, y, owner), ""), spearman(x, y, owner)))
    for one, other in zip(*found, strict=True):
        assert one.value == pytest.approx(other.value, abs=1e-13)
        assert one.interval == pytest.approx(other.interval, abs=1e-13)


@pytest.mark.parametrize(
    ("found", "why"),
    [
        (ratio(Counts.of([], [], []), "no step"), "no step"),
        (ratio(Counts.of([0, 0], [0, 0], [1, 2]), "no step"), "no step"),
        (spearman([1, 2], [1, 2], [0, 1]), "2 states"),
        (spearman([], [], []), "0 states"),
        (spearman([3, 3, 3], [1, 2, 3], range(3), names=("H_max", "the variance")), "all values of H_max are equal"),
        (spearman([1, 2, 3], [0, 0, 0], range(3), names=("H_max", "the variance")), "all values of the variance"),
    ],
)
def test_no_number_without_a_reason(found: Estimate, why: str) -> None:
    assert found.value is None and found.interval is None
    assert why in found.missing


def test_no_interval_without_a_reason() -> None:
    assert "2 prompts" in spearman([1, 2, 3], [1, 3, 2], [0, 1, 1]).missing
    # 0 of 5: every resample says 0, which is no certainty.
    alike = ratio(Counts.of([0] * 5, 1.0, range(5)), "")
    assert alike.value == 0 and alike.interval is None and "do not differ" in alike.missing
    # Of three prompts one has a denominator: (2/3)³, 30 %, of the resamples have none.
    thin = ratio(Counts.of([1, 0, 0], [2, 0, 0], range(3)), "")
    assert thin.value == 0.5 and thin.interval is None and "too many resamples" in thin.missing


def test_counts_refuse_prompts_of_another_number() -> None:
    with pytest.raises(ValueError, match="got 2 values, expected 3"):
        Counts.of([1, 2, 3], 1.0, [0, 1])
