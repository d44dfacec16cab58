"""The table of extreme credits from rows made by hand, and against a slow search of its own.

Planted faults seen caught: masked tokens counted, runs across masked tokens, the sign in a size, three of a response,
no bound, what is no number dropped, rows matched by place, the segment of a run's start alone, every divisor small.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from time import perf_counter
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from apportion.report.extremes import extremes

Pair = tuple[dict[str, Any], dict[str, Any]]


def response(row: int, advantage: Sequence[float], mask: Sequence[bool] | None = None, **more: Any) -> Pair:
    """A response whose tokens are the letters a, b, c, … and its credit."""
    n = len(advantage)
    rollout = {
        "row": row, "group": "g", "mask": list(mask or [True] * n), "token_ids": list(range(n)), "verdict": "wrong",
        "text": "".join(chr(97 + t % 26) for t in range(n)), "char_start": list(range(n)), "reward": 0.0,
    }  # fmt: skip
    credit = {"row": row, "advantage": list(advantage), "base": 0.0, "mean": 0.5, "scale": 0.5, "segments": []}
    return (
        {**rollout, **{k: v for k, v in more.items() if k in rollout}},
        {**credit, **{k: v for k, v in more.items() if k in credit}},
    )


def step(number: int, *pairs: Pair) -> tuple[int, list[dict[str, Any]], list[dict[str, Any]]]:
    return number, [r for r, _ in pairs], [c for _, c in pairs]


def places(found: list[dict[str, Any]], by: str = "advantage") -> list[tuple[int, int, int, int]]:
    return [(e["step"], e["row"], e["start"], e["end"]) for e in found if by in e["by"]]


def test_a_run_of_equal_tokens_is_one_entry() -> None:
    (e,) = extremes([step(7, response(3, [2.0, 2.0, 2.0], base=0.5))])
    assert {k: e[k] for k in ("step", "row", "start", "end", "advantage", "base", "moved", "snippet")} == {
        "step": 7, "row": 3, "start": 0, "end": 3, "advantage": 2, "base": 0.5, "moved": 1.5, "snippet": "abc",
    }  # fmt: skip
    assert e["by"] == ["advantage", "moved"] and e["verdict"] == "wrong" and e["group"] == "g"


def test_masked_tokens_are_none_and_part_a_run() -> None:
    found = extremes([step(1, response(0, [9.0, 1.0, 9.0, 1.0, 1.0], [False, True, False, True, True]))])
    # The longer of two equal ones comes first.
    assert places(found) == [(1, 0, 3, 5), (1, 0, 1, 2)]


def test_ranked_by_size_whatever_the_sign() -> None:
    pairs = [response(0, [1.0]), response(1, [-3.0]), response(2, [2.0])]
    assert [e["advantage"] for e in extremes([step(1, *pairs)])] == [-3, 2, 1]


def test_what_the_method_moved_is_a_ranking_of_its_own() -> None:
    # |A| is 4 and 1, |A − base| is 1 and 3.
    pairs = [response(0, [4.0], base=3.0), response(1, [1.0], base=-2.0)]
    found = extremes([step(1, *pairs)], count=1)
    assert places(found) == [(1, 0, 0, 1)] and places(found, "moved") == [(1, 1, 0, 1)]
    assert [e["moved"] for e in found] == [1, 3]


def test_at_most_two_of_a_response_in_each_ranking() -> None:
    # By |A| tokens 0 and 1; by |A − 5| the last two.
    found = extremes([step(1, response(0, [9.0, 8.0, 7.0, -2.0, -3.0], base=5.0))])
    assert places(found) == [(1, 0, 0, 1), (1, 0, 1, 2)]
    assert sorted(places(found, "moved")) == [(1, 0, 3, 4), (1, 0, 4, 5)]


def test_nothing_moved_and_no_credit_are_no_extremes() -> None:
    # float32's rounding is no movement, and a collapsed group has no credit.
    found = extremes([step(1, response(0, [0.5 + 1e-8] * 3, base=0.5), response(1, [0.0, -0.0, 0.0]))])
    assert places(found) == [(1, 0, 0, 3)] and places(found, "moved") == []


def test_equal_credits_come_by_length_then_by_the_later_step() -> None:
    steps = [step(k, response(0, [1.0]), response(1, [1.0, 1.0])) for k in (1, 2)]
    assert places(extremes(steps)) == [(2, 1, 0, 2), (1, 1, 0, 2), (2, 0, 0, 1), (1, 0, 0, 1)]


def test_count_bounds_each_ranking() -> None:
    pairs = [response(k, [float(k + 1)], base=2.0 * (k + 1)) for k in range(60)]
    found = extremes([step(1, *pairs)], count=10)
    assert [e["advantage"] for e in found if "advantage" in e["by"]] == list(range(60, 50, -1))


def test_the_top_of_the_whole_is_in_the_tops_of_the_parts() -> None:
    rng = np.random.default_rng(0)
    steps = [step(k, *(response(i, rng.normal(size=9).tolist(), base=0.3) for i in range(30))) for k in (1, 2, 3)]
    whole, parts = extremes(steps, count=12), [e for each in steps for e in extremes([each], count=12)]
    for by, size in (("advantage", "advantage"), ("moved", "moved")):
        top = sorted((e for e in parts if by in e["by"]), key=lambda e: -abs(e[size]))[:12]
        assert sorted(places(top, by)) == sorted(places(whole, by))


def test_a_credit_that_is_no_number_comes_first() -> None:
    found = extremes([step(1, response(0, [1.0, math.nan, math.nan, -math.inf, 50.0]), response(1, [9.0]))])
    assert [e["advantage"] for e in found if "advantage" in e["by"]][:2] == [None, None]
    assert all("not a finite number" in e["why"] for e in found if e["advantage"] is None)
    json.dumps(found, allow_nan=False)


def test_rows_are_matched_by_number_and_strays_passed_over() -> None:
    (r0, c0), (r1, c1) = response(0, [1.0]), response(1, [2.0])
    found = extremes([(1, [r0, r1, response(2, [5.0])[0]], [c1, c0, response(9, [7.0])[1]])])
    assert [(e["row"], e["advantage"]) for e in found] == [(1, 2), (0, 1)]


def test_empty_and_wholly_masked_responses() -> None:
    assert extremes([]) == [] and extremes([step(1)]) == []
    assert extremes([step(1, response(0, []), response(1, [3.0, 3.0], [False, False]))]) == []


def test_text_is_one_visible_line() -> None:
    text = "a\nb\u202e\u001b[31m</script>"
    (e,) = extremes([step(1, response(0, [1.0, 1.0], text=text, char_start=[0, 2], group="g\u202e\n"))])
    assert e["snippet"] == "a b⟨U+202E⟩␛[31m</script>" and "⟨U+202E⟩" in e["group"]
    (e,) = extremes([step(1, response(0, [1.0, 1.0], text=None, char_start=None))])
    assert e["snippet"] == "⟨0⟩⟨1⟩"


# --- why ------------------------------------------------------------------------------------------------------------


def why(*args: Any, **more: Any) -> str | None:
    return extremes([step(1, response(0, *args, **more))])[0]["why"]


def test_a_small_divisor_is_named() -> None:
    told = why([2.0], base=2.0, reward=0.502, mean=0.5, scale=0.001)
    assert told == "base +2.00 from a small divisor: r − μ = 0.002 over 0.001"


def test_a_rare_reward_is_named() -> None:
    told = why([-2.47], base=-2.47, reward=0.0, mean=0.875, scale=0.354)
    assert told == "base −2.47 from a rare reward: 0 where the group averages 0.88"
    assert why([0.9], base=0.9, reward=1.0, mean=0.5, scale=0.5) is None


def test_what_the_method_moved_is_told_with_its_segment() -> None:
    segments = [
        {"start": 0.0, "end": 1.0, "increment": 0.25}, {"start": 1.0, "end": 3.0, "increment": -0.75}
    ]  # fmt: skip
    told = why([0.2, -1.5, -1.5], base=0.5, segments=segments, reward=0.0)
    assert told == "the method moved it by −2.00, segment 2 of 2 with increment −0.75"
    # A run of equal credits over both segments is of neither.
    assert why([-1.5] * 3, base=0.5, segments=segments, reward=0.0) == "the method moved it by −2.00"


def test_both_are_told_where_both_count() -> None:
    told = why([-3.75], base=-2.47, reward=0.0, mean=0.875, scale=0.354)
    assert told == "base −2.47 from a rare reward: 0 where the group averages 0.88; the method moved it by −1.28"


def test_a_base_that_counts_for_little_is_not_told() -> None:
    # Moved by −2.7 on a base of −0.3, though that comes of a rare reward.
    told = why([-3.0], base=-0.3, reward=0.0, mean=0.9, scale=3.0)
    assert told == "the method moved it by −2.70"


def test_a_group_without_numbers_explains_nothing() -> None:
    for more in ({"reward": None}, {"mean": math.nan}, {"scale": None}, {"scale": math.inf}):
        assert why([2.0], base=2.0, **{"reward": 1.0, "mean": 0.1, "scale": 0.3, **more}) is None


# --- against a slow search ------------------------------------------------------------------------------------------

credits = st.lists(st.tuples(st.sampled_from([-2.0, -1.0, 0.0, 0.5, 1.0]), st.booleans()), max_size=12)


def slow(values: Sequence[tuple[float, bool]], base: float, moved: bool) -> list[tuple[int, int]]:
    """The two largest runs, token by token."""
    runs: list[list[int]] = []
    for t, (value, trained) in enumerate(values):
        if not trained:
            continue
        if runs and runs[-1][-1] == t - 1 and values[t - 1][0] == value:
            runs[-1].append(t)
        else:
            runs.append([t])
    size = {r[0]: abs(values[r[0]][0] - (base if moved else 0)) for r in runs}
    order = sorted((r for r in runs if size[r[0]] > 1e-6), key=lambda r: (-size[r[0]], -len(r), r[0]))
    return sorted((r[0], r[-1] + 1) for r in order[:2])


@given(credits, st.sampled_from([0.0, 0.5, -1.0]))
def test_the_two_largest_runs_are_those_of_a_slow_search(values: list[tuple[float, bool]], base: float) -> None:
    found = extremes([step(1, response(0, [v for v, _ in values], [m for _, m in values] or None, base=base))])
    for by in ("advantage", "moved"):
        assert sorted((e["start"], e["end"]) for e in found if by in e["by"]) == slow(values, base, by == "moved")


def test_two_thousand_tokens_of_different_credit_take_a_moment() -> None:
    rng = np.random.default_rng(1)
    values = [rng.normal(size=2000).tolist() for _ in range(5)]
    pairs = [response(i, values[i % 5]) for i in range(300)]
    start = perf_counter()
    found = extremes([step(1, *pairs)])
    # 0.1 s on two busy cores; a loop in Python over the tokens takes over a second.
    assert perf_counter() - start < 1 and len(places(found)) == 40
