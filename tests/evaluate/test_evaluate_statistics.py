"""avg@n, pass@k, maj@k, intervals and paired tests: hand numbers, enumeration, properties.

Planted faults seen caught: the first sample alone; abstentions as 0; pass@k with replacement; maj@k of the first
block only, by the first of tied candidates, or with votes for no answer; Avg-6 over pooled problems; sets drawn by
one stream; an interval from 2.5 to 95 %, or of one resample; broken pairs; ties above 0; a one-sided sign test, or
one without its own tail value.
"""

from __future__ import annotations

import math
from collections import Counter
from fractions import Fraction
from itertools import combinations, permutations, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from apportion.evaluate.statistics import (
    FEWEST,
    averages,
    majority_at_k,
    mean_of_sets,
    paired,
    pass_at_k,
    sign_test,
)

NAN = float("nan")


def rows(*rewards: list[float]) -> np.ndarray:
    return np.array(rewards, dtype=np.float64)


def test_row_25_all_samples_are_averaged() -> None:
    # [[0, 1], [0, 1]]: two problems, half right each. The first samples alone would give 0.
    assert averages(rows([0, 1], [0, 1])).tolist() == [0.5, 0.5]
    assert mean_of_sets([averages(rows([0, 1], [0, 1]))]).value == 50.0


def test_an_abstention_is_neither_right_nor_wrong() -> None:
    # 1 of 2 judged; nothing judged: the second problem leaves the mean, (0.5 + 1)/2 = 75 %.
    found = averages(rows([1, 0, NAN], [NAN, NAN, NAN], [1, 1, 1]))
    assert found[[0, 2]].tolist() == [0.5, 1.0] and math.isnan(found[1])
    mean = mean_of_sets([found])
    assert (mean.value, mean.problems, mean.left_out) == (75.0, 2, 1)


def test_pass_at_k_by_hand() -> None:
    # 1 − C(2,2)/C(4,2) = 1 − 1/6.
    assert pass_at_k(rows([1, 0, 1, 0]), 2).tolist() == [pytest.approx(5 / 6)]
    # Fewer wrong ones than k: certain. None right: 0. Three judged of four: 1 − C(2,2)/C(3,2) = 2/3.
    found = pass_at_k(rows([1, 1, 1, 0], [0, 0, 0, 0], [1, 0, 0, NAN], [1, NAN, NAN, NAN]), 2)
    assert found[:3].tolist() == [1.0, 0.0, pytest.approx(2 / 3)] and math.isnan(found[3])


def test_pass_at_k_is_the_share_of_subsets_with_a_right_one() -> None:
    for n in range(1, 7):
        for k in range(1, n + 1):
            every = np.array(list(product([0.0, 1.0], repeat=n)))
            for rewards, found in zip(every.tolist(), pass_at_k(every, k).tolist(), strict=True):
                subsets = list(combinations(rewards, k))
                assert found == pytest.approx(sum(any(subset) for subset in subsets) / len(subsets), abs=1e-12)


def test_pass_at_k_is_stable_where_binomials_are_huge() -> None:
    reward = np.zeros((1, 10_000))
    reward[0, :3] = 1
    exact = 1 - Fraction(math.comb(9_997, 4_000), math.comb(10_000, 4_000))
    assert pass_at_k(reward, 4_000)[0] == pytest.approx(float(exact), abs=1e-12)


def test_majority_by_hand() -> None:
    def one(rewards: list[float], forms: list[str | None], k: int) -> float:
        return float(majority_at_k(rows(rewards), [forms], k)[0])

    assert one([0, 0, 1], ["a", "a", "b"], 3) == 0
    assert one([0, 1, 1], ["a", "b", "b"], 3) == 1
    # Two candidates with one vote each share the block; so do three.
    assert one([0, 1], ["a", "b"], 2) == 0.5
    assert one([0, 1, 0], ["a", "b", "c"], 3) == pytest.approx(1 / 3)
    # No answer does not vote, and two of them do not outvote an answer; where none votes the block is wrong.
    assert one([0, 0, 1], [None, None, "b"], 3) == 1
    assert one([0, 0], [None, None], 2) == 0
    # Blocks (a a), (b b), and a last sample that fills none.
    assert one([0, 0, 1, 1, 1], ["a", "a", "b", "b", "b"], 2) == 0.5
    # What abstained has no vote: (b b) of a, b, b.
    assert one([NAN, 1, 1], ["a", "b", "b"], 2) == 1
    assert math.isnan(one([NAN, 1, 1], ["a", "b", "b"], 3))


def vote(block: tuple[tuple[str, float], ...]) -> float:
    """The reference: plain counting."""
    counts = Counter(form for form, _ in block)
    tied = [form for form, count in counts.items() if count == max(counts.values())]
    return sum(dict(block)[form] for form in tied) / len(tied)


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_majority_is_unbiased_for_the_vote_of_k(k: int) -> None:
    # Over all orders of the samples the blocks' mean is the mean vote over all subsets of k.
    known = [("a", 1.0), ("b", 0.0), ("b", 0.0), ("c", 0.0), ("a", 1.0)]
    expected = [vote(subset) for subset in combinations(known, k)]
    orders = list(permutations(known))
    found = majority_at_k(np.array([[r for _, r in o] for o in orders]), [[f for f, _ in o] for o in orders], k)
    assert found.mean() == pytest.approx(sum(expected) / len(expected))


@given(st.lists(st.lists(st.sampled_from([0.0, 1.0, NAN]), min_size=4, max_size=4), min_size=1, max_size=5))
def test_k_of_1_is_the_average(rewards: list[list[float]]) -> None:
    reward = np.array(rewards)
    forms = [[None if r == 0 else "x" for r in line] for line in rewards]
    np.testing.assert_allclose(pass_at_k(reward, 1), averages(reward), equal_nan=True)
    np.testing.assert_allclose(majority_at_k(reward, forms, 1), averages(reward), equal_nan=True)


def test_the_mean_of_sets_weighs_sets_and_not_problems() -> None:
    # (100 + 0)/2 of 4 and 12 problems; pooled it would be 25.
    mean = mean_of_sets([np.ones(4), np.zeros(12)])
    assert mean.value == 50.0 and mean.problems == 16


def test_the_interval_is_as_wide_as_theory_says() -> None:
    # Half of 400 problems right: 1.96·√(0.25/400) = 4.9 points each way.
    half = np.tile([0.0, 1.0], 200)
    low, high = mean_of_sets([half]).interval or (0, 0)
    assert low == pytest.approx(50 - 4.9, abs=0.5) and high == pytest.approx(50 + 4.9, abs=0.5)
    # Beside a second set of 100: √(0.25/400 + 0.25/100)/2 = 2.8 %, so 5.48 points.
    low, high = mean_of_sets([half, np.tile([0.0, 1.0], 50)]).interval or (0, 0)
    assert high - low == pytest.approx(2 * 5.48, abs=0.8)


def test_the_interval_is_seeded() -> None:
    values = np.random.default_rng(1).random(40)
    assert mean_of_sets([values], 3) == mean_of_sets([values], 3)
    assert mean_of_sets([values], 3).interval != mean_of_sets([values], 4).interval
    # Two equal sets are not drawn alike: else the mean of both would vary as one does.
    one, two = (mean_of_sets([values] * count).interval or (0, 0) for count in (1, 2))
    assert (two[1] - two[0]) / (one[1] - one[0]) == pytest.approx(1 / math.sqrt(2), abs=0.05)


@given(st.lists(st.floats(0, 1), min_size=FEWEST, max_size=30))
def test_the_interval_lies_within_the_values(values: list[float]) -> None:
    mean = mean_of_sets([np.array(values)])
    assert mean.value is not None
    if mean.interval is None:
        assert min(values) == max(values) and "do not differ" in mean.missing
    else:
        low, high = mean.interval
        slack = 1e-9
        assert 100 * min(values) - slack <= low <= high <= 100 * max(values) + slack


def test_where_there_is_no_interval_or_no_value() -> None:
    # 0 of 30 is not "0 … 0".
    mean = mean_of_sets([np.zeros(30)])
    assert mean.value == 0 and mean.interval is None and "do not differ" in mean.missing
    assert mean_of_sets([np.array([0.0, 1.0])]).interval is None
    for nothing in ([], [np.array([])], [np.array([NAN])], [np.ones(5), np.array([NAN])]):
        mean = mean_of_sets(nothing)
        assert mean.value is None and mean.interval is None and mean.missing


def test_sign_test_by_hand() -> None:
    assert sign_test(5, 1) == pytest.approx(14 / 64)
    assert sign_test(1, 5) == sign_test(5, 1)
    assert sign_test(3, 3) == 1 and sign_test(0, 0) == 1
    assert sign_test(0, 6) == pytest.approx(2 / 64)
    # Beyond what floats hold, by whole numbers.
    assert 0 < sign_test(900, 1100) < 1e-4


@pytest.mark.parametrize("wins, losses", [(0, 3), (1, 4), (2, 5), (4, 4), (7, 2)])
def test_sign_test_is_the_share_of_sign_patterns(wins: int, losses: int) -> None:
    patterns = [sum(signs) for signs in product([0, 1], repeat=wins + losses)]
    far = abs(wins - losses)
    extreme = sum(abs(2 * won - wins - losses) >= far for won in patterns)
    assert sign_test(wins, losses) == pytest.approx(extreme / len(patterns))


def test_paired_by_hand() -> None:
    a, b = np.array([1, 0.5, 0, 1, NAN]), np.array([0, 0.5, 0.5, 0, 1])
    found = paired([a], [b])
    # (1 + 0 − 0.5 + 1)/4 = 37.5 points; two wins, one loss: 2·(1 + 3)/8 = 1.
    assert found.difference.value == 37.5 and found.difference.left_out == 1
    assert (found.wins, found.losses, found.ties, found.p) == (2, 1, 1, 1.0)
    turned = paired([b], [a])
    assert turned.difference.value == -37.5 and (turned.wins, turned.losses) == (1, 2)


def test_problems_are_drawn_in_pairs() -> None:
    # The models differ by 0.1 or 0.2 while problems differ by up to 1: only pairs see the first with certainty.
    difficulty = np.random.default_rng(0).random(50)
    ahead = difficulty + np.tile([0.1, 0.2], 25)
    low, high = paired([ahead], [difficulty]).difference.interval or (0, 0)
    assert low >= 10 and high <= 20
    assert paired([ahead], [difficulty]).above == 1.0
    assert paired([difficulty], [ahead]).above == 0.0
    # Of equal models no resample is above 0, and no interval is claimed.
    same = paired([difficulty], [difficulty])
    assert same.above == 0.0 and same.difference.interval is None and same.p == 1


def test_paired_over_sets_weighs_sets() -> None:
    # +1 on 4 problems and 0 on 12: (100 + 0)/2.
    found = paired([np.ones(4), np.zeros(12)], [np.zeros(4), np.zeros(12)])
    assert found.difference.value == 50.0 and (found.wins, found.losses, found.ties) == (4, 0, 12)
