"""The table of measured beside predicted, from rows of metrics made by hand.

Planted faults seen caught: the first step counted, means over steps in place of medians, ratios upside down, phases
without a prediction added to what is set against the predicted ones, steps that generate nothing taken by themselves.
"""

from __future__ import annotations

import pytest

from apportion.report.beside import beside, is_predicted, lines
from apportion.report.page import write_page

TOLD = {"predicted/seconds/generate": 2.0, "predicted/seconds/update": 3.0, "predicted/tokens/actor": 90.0}


def row(step: int, generate: float, grade: float, update: float, tokens: float, **more: object) -> dict[str, object]:
    seconds = {"seconds/generate": generate, "seconds/grade": grade, "seconds/update": update}
    return {"step": step, **seconds, "tokens/actor": tokens, **TOLD, **more}


ROWS = [row(1, 50, 9, 50, 500), row(2, 1, 1, 4, 100), row(3, 4, 2, 2, 120), row(4, 2, 3, 9, 60)]


def table(rows: list[dict[str, object]]) -> dict[str, tuple[object, object, object]]:
    return {each["name"]: (each["measured"], each["predicted"], each["ratio"]) for each in beside(rows)["rows"]}


def test_medians_of_the_steps_but_the_first() -> None:
    assert beside(ROWS)["steps"] == 3
    assert table(ROWS) == {
        # Medians of 1, 4, 2 and of 1, 2, 3 and of 4, 2, 9; predicted over measured.
        "seconds/generate": (2, 2, 1), "seconds/grade": (2, None, None), "seconds/update": (4, 3, 0.75),
        # Generation and update of each step together, since grading is not predicted: 5, 6, 11.
        "seconds": (6, 5, float(f"{5 / 6:.5g}")), "tokens/actor": (100, 90, 0.9),
    }  # fmt: skip


def test_one_step_is_all_there_is() -> None:
    assert beside(ROWS[:1])["steps"] == 1 and table(ROWS[:1])["seconds/update"] == (50, 3, 0.06)
    assert beside([]) == {"steps": 0, "rows": []}


def test_a_batch_that_serves_several_steps_counts_as_a_whole() -> None:
    # Generated in steps 1, 4 and 7 for three steps each; the last batch has served one of its steps.
    rows: list[dict[str, object]] = [
        {"step": k, "seconds/generate": g, "predicted/seconds/generate": 1.0, "predicted/tokens/actor": 20.0}
        for k, g in enumerate([9, 0, 0, 3, 0, 3, 8])
    ]
    for k in (0, 3, 6):
        rows[k]["tokens/actor"] = 60.0
    assert beside(rows)["steps"] == 3
    # (3 + 0 + 3)/3 seconds and 60/3 tokens a step.
    assert table(rows)["seconds/generate"] == (2, 1, 0.5) and table(rows)["tokens/actor"] == (20, 20, 1)


def test_what_is_nothing_both_times_is_left_out_and_what_is_predicted_alone_too() -> None:
    rows = [row(k, 1, 0, 1, 10, **{"seconds/probe": 0.0, "predicted/seconds/probe": 0.0}) for k in (1, 2)]
    rows = [{**each, "predicted/memory/peak": 5e9} for each in rows]
    assert list(table(rows)) == ["seconds/generate", "seconds/update", "seconds", "tokens/actor"]
    # A phase that was not predicted to take anything, and did.
    rows = [{**each, "seconds/probe": 0.5} for each in rows]
    assert table(rows)["seconds/probe"] == (0.5, 0, 0)
    # And one that took nothing.
    rows = [{**each, "seconds/probe": 0.0, "predicted/seconds/probe": 0.5} for each in rows]
    assert table(rows)["seconds/probe"] == (0, 0.5, None)


def test_the_peak_of_memory_is_the_largest() -> None:
    rows = [
        row(k, 1, 1, 1, 10, **{"memory/peak": m, "predicted/memory/peak": 4e9})
        for k, m in enumerate([9e9, 2e9, 5e9, 1e9])
    ]
    assert table(rows)["memory/peak"] == (5e9, 4e9, 0.8)
    assert "memory/peak                       5.000 GB    4.000 GB    0.80" in lines(beside(rows))


def test_rows_without_a_number_do_not_count_as_one() -> None:
    rows = [row(k, 1, 1, 1, 10) for k in range(3)]
    rows = [{**each, "seconds/update": None, "seconds/grade": float("nan"), "flag": True} for each in rows]
    assert list(table(rows)) == ["seconds/generate", "tokens/actor"]


def test_a_run_that_was_predicted_later_on_has_its_prediction() -> None:
    rows = [{name: value for name, value in each.items() if not name.startswith("predicted/")} for each in ROWS[:3]]
    assert table([*rows, ROWS[3]]) == table(ROWS)


def test_a_run_without_predictions_has_its_seconds() -> None:
    rows = [{name: value for name, value in each.items() if not name.startswith("predicted/")} for each in ROWS]
    assert table(rows) == {
        "seconds/generate": (2, None, None), "seconds/grade": (2, None, None), "seconds/update": (4, None, None),
        "seconds": (8, None, None),
    }  # fmt: skip
    assert is_predicted(beside(ROWS)) and not is_predicted(beside(rows)) and not is_predicted(beside([]))


def test_as_text() -> None:
    assert lines(beside(ROWS)) == [
        "A step, median of 3               measured   predicted   ratio",
        "seconds/generate                   2.000 s     2.000 s    1.00",
        "seconds/grade                      2.000 s           –       –",
        "seconds/update                     4.000 s     3.000 s    0.75",
        "seconds, predicted phases          6.000 s     5.000 s    0.83",
        "tokens/actor                           100          90    0.90",
    ]
    assert lines(beside(ROWS[:1]))[0].startswith("The only step ")


@pytest.mark.parametrize("told", [True, False])
def test_the_page_shows_it(handmade, opened, tmp_path, told) -> None:
    own = {"seconds/generate": 1.5, "seconds/<b>\u202eevil": 0.5}
    run = handmade(
        [{"token_ids": [1], "text": "x", "char_start": [0]}],
        metrics={**own, **({"predicted/seconds/generate": 1.2} if told else {})},
    )
    page = opened(write_page(run.path, tmp_path / "page.html"), "#view=run")
    row = page.locator("#view-run tr", has_text="generate").first.inner_text()
    assert "1.500 s" in row and ("1.200 s" in row) is told and ("0.80" in row) is told
    words = page.locator("#view-run").inner_text()
    assert ("predicted beside measured" in words) is told and ("No cost was predicted" in words) is not told
    assert "<b>⟨U+202E⟩evil" in words
