"""What page and terminal are made from, against numbers worked out by hand.

Planted faults seen caught: a segment's `after` taken from its own value; the standard error of the raw value
used unshrunk; errors of both ends added instead of combined in quadrature; noise decided by < 1 instead of
|Δ| ≤ SE; a shared state's continuations taken from a row with another prefix; the reading naming the largest
rise of a lost response; halves rounded to even.
"""

from __future__ import annotations

import math

import pytest
from synthetic import EOS

from apportion.errors import InputError
from apportion.records import RunFolder
from apportion.report.detail import token_texts
from apportion.report.reading import fixed, signed
from apportion.report.view import StepView


def view_of(run: RunFolder, step: int = 1) -> dict:
    """The step's summary, with everything of each response in it."""
    view = StepView(run, step)
    return {**view.summary, "responses": [view.response(r["row"]) for r in view.summary["responses"]]}


def test_segments_of_the_worked_example(handmade, segment):
    # methods.md §2 (a): μ = .5, r = 1, pivots at 4 and 7, raw .75 and .25, M = n₀ = 4: V = .625, .375;
    # Δ = .125, −.25, .625. Standard errors of V: M/(M+n₀) = ½ of the raw ones: ½·.2 = .1 and ½·.1 = .05, so of
    # the increments √(0 + .01) = .1, √(.01 + .0025) = .1118, √(.0025 + 0) = .05.
    advantage = [0.925] * 4 + [0.175] * 3 + [1.925] * 3
    run = handmade(
        [{
            "token_ids": list(range(10)), "advantage": advantage, "base": 1.0,
            "segments": [
                segment(0, 4, 0.5, 0.5, 0.0, 0.125, 0), segment(4, 7, 0.75, 0.625, 0.2, -0.25, 4),
                segment(7, 10, 0.25, 0.375, 0.1, 0.625, 4),
            ],
        }]
    )  # fmt: skip
    r = view_of(run)["responses"][0]
    pieces = r["segments"]
    assert [s["before"] for s in pieces] == [0.5, 0.625, 0.375]
    assert [s["after"] for s in pieces] == [0.625, 0.375, 1.0]
    assert [s["increment"] for s in pieces] == [0.125, -0.25, 0.625]
    assert [s["increment_stderr"] for s in pieces] == pytest.approx([0.1, math.sqrt(0.0125), 0.05], rel=1e-4)
    assert [s["noise"] for s in pieces] == [False, False, False]
    assert r["pivots"] == 2 and r["spread"] == pytest.approx(1.75)
    assert [c["name"] for c in r["checks"]] == ["token mean of A = base", "Σ increments = r − μ"]
    # Mean of A = (4·.925 + 3·.175 + 3·1.925)/10 = 1; ΣΔ = .5 = r − μ. Advantages are float32 on disk.
    assert [c["error"] for c in r["checks"]] == pytest.approx([0, 0], abs=1e-7)
    assert r["checks"][1]["got"] == 0.5


@pytest.mark.parametrize("increment, noise", [(0.1, True), (-0.1, True), (0.0, True), (0.11, False), (-0.11, False)])
def test_an_increment_within_one_standard_error_is_noise(handmade, segment, increment, noise):
    # n₀ = 4, M = 4: SE of V is ½·.2 = .1.
    pieces = [segment(0, 1, 0.5, 0.5, 0.0, increment, 0), segment(1, 2, 0.5, 0.5 + increment, 0.2, 0.5, 4)]
    run = handmade([{"token_ids": [1, 2], "segments": pieces}])
    assert view_of(run)["responses"][0]["segments"][0]["noise"] is noise


def test_a_broken_law_shows_its_error(handmade, segment):
    run = handmade(
        [{"token_ids": [1, 2], "advantage": [1.0, 0.0], "base": 0.25, "segments": [segment(0, 2, 0.5, 0.5, 0, 0.3, 0)]}]
    )
    mean, total = view_of(run)["responses"][0]["checks"]
    assert mean["error"] == pytest.approx(0.25) and total["error"] == pytest.approx(0.2)


def test_masked_tokens_enter_neither_spread_nor_mean(handmade):
    run = handmade([{"token_ids": [1, 2, 3], "mask": [True, True, False], "advantage": [1.0, 2.0, 9.0], "base": 1.5}])
    view = view_of(run)
    r = view["responses"][0]
    assert r["spread"] == 1.0 and r["checks"][0]["error"] == 0 and r["tokens"]["masked"] == [2]
    assert view["scale"] == {"advantage": 2.0, "moved": 0.5}


def test_continuations_of_a_shared_state_come_from_the_row_with_the_same_prefix(handmade, segment):
    pieces = [segment(0, 2, 0.5, 0.5, 0, 0, 0), segment(2, 3, 0.5, 0.5, 0.1, 0.5, 2)]
    responses = [{"token_ids": ids, "segments": pieces} for ids in ([9, 9, 1], [1, 2, 1], [1, 2, 5])]
    evidence = [
        {"key": f"{row}/{m}", "group": "g", "row": row, "position": 2, "m": m, "token_ids": [7], "text": f"{row}/{m}",
         "reward": float(m), "verdict": "wrong", "finish": "stop", "rescued": False, "kind": "continuations"}
        for row in (0, 1) for m in (1, 0)
    ]  # fmt: skip
    by_row = [r["continuations"]["2"] for r in view_of(handmade(responses, evidence))["responses"]]
    assert [found["row"] for found in by_row] == [0, 1, 1]
    assert [c["text"] for c in by_row[2]["items"]] == ["1/0", "1/1"]


def test_groups_without_signal_are_labelled(handmade):
    # Fifteen times .9 in float32 is equal; so are one scored member and none.
    rows = [{"token_ids": [1], "group": "same", "reward": 0.9 + k * 1e-10} for k in range(3)]
    rows += [{"token_ids": [1], "group": "mixed", "reward": r} for r in (0.0, 1.0)]
    rows += [{"token_ids": [1], "group": "lone", "reward": r} for r in (1.0, float("nan"))]
    groups = view_of(handmade(rows))["groups"]
    assert [(g["name"], g["collapsed"]) for g in groups] == [("same", True), ("mixed", False), ("lone", True)]
    assert groups[1]["mean"] == 0.5 and groups[2]["scored"] == 1


def test_tokens_of_a_text_lose_no_character():
    text = "  ab\n\nçd"
    assert token_texts(text, [2, 3, 4, 6, 6, 7, 8], [0] * 7) == ["  a", "b", "\n\n", "", "ç", "d", ""]
    assert "".join(token_texts(text, [2, 3, 4, 6, 6, 7, 8], [0] * 7)) == text
    assert token_texts(None, None, [5, 6]) == ["⟨5⟩", "⟨6⟩"]
    assert token_texts("", [], []) == []


def test_the_reading_names_what_decided(handmade, segment):
    pieces = [
        segment(0, 1, 0.5, 0.5, 0, 0.3, 0),
        segment(1, 2, 0.9, 0.8, 0.1, -0.7, 4),
        segment(2, 3, 0.1, 0.1, 0.1, -0.1, 4),
    ]
    common = {"token_ids": [1, 2, 3], "advantage": [1.0, -2.0, 0.0], "segments": pieces}
    lost = handmade([{**common, "reward": 0.0, "verdict": "wrong"}])
    # SE of the drop: ½·√(.1² + .1²) = .0707, so −.7 is 9.9 of them.
    assert view_of(lost)["responses"][0]["reading"] == (
        "Reward 0 where the group averages 0.50. Most was lost in segment 2, “⟨2⟩”: "
        "V̂ went 0.80 → 0.10, −0.70 ± 0.07, 9.9 standard errors, likely real."
    )
    won = handmade([{**common, "reward": 1.0}], name="won")
    assert "Most was won in segment 1" in view_of(won)["responses"][0]["reading"]


def test_continuations_that_agree_say_what_they_leave_open(handmade, segment):
    # Wilson's interval of 4 of 4: n/(n + z²) = 4/(4 + 3.84146) = .51011 to 1.
    pieces = [segment(0, 1, 0.5, 0.5, 0, 0.5, 0), segment(1, 2, 1.0, 1.0, 0.0, -1.0, 4)]
    row = {"token_ids": [1, 2], "advantage": [0.5, -1.0], "segments": pieces, "reward": 0.0, "verdict": "wrong"}
    r = view_of(handmade([row], settings={"n0": 0}))["responses"][0]
    assert r["segments"][1]["chance"] == [0.51011, 1.0] and r["segments"][0]["chance"] == [None, None]
    # Beta(5, 1), what 4 of 4 and a uniform prior leave, has variance 5/(6²·7), a standard deviation of .140859.
    assert [s["stderr"] for s in r["segments"]] == [None, 0.14086]
    assert [s["increment_stderr"] for s in r["segments"]] == [0.14086, 0.14086]
    assert r["reading"].endswith(
        "V̂ went 1.00 → 0.00 (4 of 4 continuations right before it), −1.00 ± 0.14, 7.1 standard errors, likely real."
    )


def test_nothing_measured_has_no_error(handmade, segment):
    # A response without a pivot: from μ to its reward, and neither end was measured.
    row = {"token_ids": [1, 2], "segments": [segment(0, 2, 0.5, 0.5, 0, 0.5, 0)]}
    (piece,) = view_of(handmade([row]))["responses"][0]["segments"]
    assert piece["increment_stderr"] is None and piece["stderr"] is None and piece["noise"] is False


def test_agreement_counts_with_its_shrinkage_when_noise_is_told(handmade, segment):
    # M = n₀ = 4 halves .140859 to .070430. Before: 1 of 4, its .216506 halved to .108253. Both together are
    # √(.0049603 + .0117188) = .129148.
    pieces = [
        segment(0, 1, 0.25, 0.375, math.sqrt(0.25 * 0.75 / 4), -0.125, 4), segment(1, 2, 0.0, 0.25, 0.0, -0.25, 4)
    ]  # fmt: skip
    row = {"token_ids": [1, 2], "advantage": [0.5, -1.0], "segments": pieces, "reward": 0.0, "verdict": "wrong"}
    r = view_of(handmade([row]))["responses"][0]
    assert r["segments"][0]["increment_stderr"] == 0.12915 and r["segments"][0]["noise"] is True
    assert r["segments"][1]["increment_stderr"] == 0.07043 and r["segments"][1]["noise"] is False
    # Rewards between 0 and 1 that are equal tell nothing of their spread.
    even = segment(0, 2, 0.5, 0.5, 0.0, 0.5, 4)
    assert view_of(handmade([{**row, "segments": [even]}], name="even"))["responses"][0]["segments"][0]["stderr"] == 0.0


@pytest.mark.parametrize(
    "given, said",
    [
        ({"reward": float("nan"), "verdict": "abstain"}, "the verifier abstained"),
        ({"base": 0.5, "advantage": [0.5, 0.5]}, "Every token gets the base advantage +0.50"),
        ({"base": 0.5, "advantage": [0.0, 1.0]}, "Advantages run from +0.00 to +1.00 around the base +0.50"),
    ],
)
def test_the_reading_of_other_responses(handmade, given, said):
    other = {"token_ids": [1], "reward": 0.0, "verdict": "wrong"}
    run = handmade([{"token_ids": [1, 2], **given}, other, {**other, "reward": 1.0}])
    assert said in view_of(run)["responses"][0]["reading"]
    assert "σ = 0" in view_of(handmade([other, other], name="flat"))["responses"][0]["reading"]


def test_numbers_read_as_on_the_page():
    # 0.125 and 2.5 are exact in binary: toFixed rounds their halves up, format() to even.
    assert [fixed(0.125), fixed(-0.125), fixed(2.5, 0), fixed(None)] == ["0.13", "−0.13", "3", "–"]
    assert [signed(0.0), signed(0.125), signed(-0.5)] == ["+0.00", "+0.13", "−0.50"]


def test_files_of_different_steps_are_refused(handmade):
    run = handmade([{"token_ids": [1]}, {"token_ids": [2]}])
    run.write("credit", 1, run.read("credit", 1)[:1])
    with pytest.raises(InputError, match="2 rollouts and 1 rows of credit"):
        view_of(run)


def test_a_real_record_keeps_its_laws(run):
    view = view_of(run, run.steps()[-1])
    assert len(view["responses"]) == 24 and view["groups"][0]["collapsed"]
    errors = [c["error"] for r in view["responses"] for c in r["checks"]]
    assert len(errors) == 48 and max(errors) < 1e-6
    for r in view["responses"]:
        assert r["tokens"]["text"][-1] == "" and r["tokens"]["id"][-1] == EOS
        for s in r["segments"]:
            found = r["continuations"].get(str(s["start"]))
            if s["samples"]:
                mean = sum(c["reward"] for c in found["items"]) / len(found["items"])
                assert mean == pytest.approx(s["raw"]) and len(found["items"]) == s["samples"]


def test_values_of_another_kind_do_not_end_at_the_reward(handmade, segment):
    """GRPO-VPS lays beliefs: the last segment ends at its own value, and no sum is held against the reward."""
    pieces = [segment(0, 1, 0.1, 0.1, 0.0, 0.3, 0), segment(1, 2, 0.4, 0.4, 0.0, -0.2, 0)]
    run = handmade([{"token_ids": [1, 2], "segments": pieces}], invariants={})
    (r,) = view_of(run)["responses"]
    assert [s["after"] for s in r["segments"]] == pytest.approx([0.4, 0.2])
    assert not any("increments" in check["name"] for check in r["checks"])


def test_a_pipelines_stage_keeps_its_shrinkage(handmade, segment):
    """M = 4 and n₀ = 4 of the stage: the error of the value is half that of the mean."""
    pieces = [segment(0, 1, 0.5, 0.5, 0.0, 0.25, 0), segment(1, 2, 1.0, 0.75, 0.2, 0.25, 4)]
    settings = {"avspo": {"rate": 0.1}, "probepo": {"n0": 4}}
    run = handmade(
        [{"token_ids": [1, 2], "segments": pieces}], settings=settings, invariants={"probepo/telescoping": 0}
    )
    (r,) = view_of(run)["responses"]
    assert r["segments"][1]["stderr"] == pytest.approx(0.1)
    assert any("increments" in check["name"] for check in r["checks"])


@pytest.mark.parametrize(
    "broken, field",
    [
        ({"char_start": [0]}, "char_start: got 1 values; expected 2"),
        ({"entropy": [0.1] * 3}, "entropy"),
        ({"advantage": [1.0]}, "advantage"),
        ({"segments": [(0, 3, 4)]}, r"segments\[0\]: got 0 to 3"),
        ({"segments": [(0, 1, 4), (2, 1, 4)]}, r"segments\[1\]"),
        ({"segments": [(-1, 2, 4)]}, "segments"),
        ({"segments": [(0, 2, float("nan"))]}, "segments"),
    ],
)
def test_a_record_whose_parts_do_not_fit_is_one_clear_error(handmade, segment, broken, field):
    if "segments" in broken:
        broken = {"segments": [segment(a, b, 0.5, 0.5, 0.1, 0.0, m) for a, b, m in broken["segments"]]}
    with pytest.raises(InputError, match=f"step 1, row 0: {field}"):
        view_of(handmade([{"token_ids": [1, 2], "text": "ab", "char_start": [0, 1], **broken}]))
