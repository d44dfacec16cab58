"""How far methods agree, where they differ most, and what the page is told of it.

Planted faults seen caught: the highest of tied ranks for their mean; masked tokens that count; constant responses that
are not counted; an interval over responses; zeros among opposite signs; ranks divided by T; runs across masked tokens,
or parted only where all methods differ; a constant method that ranks; the nearest first; openings that are alike but
differ the other way; names that lead out of the folder; results of another record; text as it came; bars upside down;
the second text with the first one's credit.
"""

from __future__ import annotations

import json
import math
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from apportion.compare import store
from apportion.compare.agreement import agreement, correlations, disagreements, mean_ranks
from apportion.errors import InputError
from apportion.records import RunFolder
from apportion.report import write_page
from apportion.report.compared import Compared


def slow_ranks(values: list[float]) -> list[float]:
    return [sum(w < v for w in values) + (sum(w == v for w in values) + 1) / 2 for v in values]


def slow_spearman(x: list[float], y: list[float]) -> float | None:
    a, b = slow_ranks(x), slow_ranks(y)
    mean = (len(x) + 1) / 2
    top = math.fsum((p - mean) * (q - mean) for p, q in zip(a, b, strict=True))
    below = math.sqrt(math.fsum((p - mean) ** 2 for p in a) * math.fsum((q - mean) ** 2 for q in b))
    return top / below if below else None


def flat(rows: list[list[float]]) -> np.ndarray:
    return np.array([v for row in rows for v in row], dtype=float)


def offsets_of(rows: list[list[Any]]) -> list[int]:
    return [0, *np.cumsum([len(row) for row in rows]).tolist()]


class TestRankCorrelation:
    def test_ties_share_the_mean_of_their_ranks(self):
        assert mean_ranks([3, 1, 3, 2]).tolist() == [3.5, 1, 3.5, 2]
        assert mean_ranks([]).tolist() == []

    def test_numbers_by_hand(self):
        # 1 − 6·Σd²/(n(n² − 1)) = 1 − 12/60. With ties: centred ranks (−1.5 −.5 .5 1.5) and (1 1 −1 −1): −4/√(5·4).
        found = correlations(np.array([[1.0, 2, 3, 4], [1, 3, 2, 4], [2, 2, 1, 1], [5, 5, 5, 5]]))
        assert found[0, 1] == pytest.approx(0.8)
        assert found[0, 2] == pytest.approx(-4 / math.sqrt(20))
        assert np.isnan(found[3, 0]) and np.isnan(found[0, 3])

    def test_means_counts_and_signs_by_hand(self):
        # Response 0: the same order, its last token masked (it would turn the order round). 1: the opposite order.
        # 2: `a` is constant. 3: nothing is trained.
        a = [[1, 2, 3, 4], [-1, 0, 1], [2, 2], [1, 5]]
        b = [[10, 20, 30, -9], [1, 0, -1], [1, -2], [5, 1]]
        mask = [[1, 1, 1, 0], [1, 1, 1], [1, 1], [0, 0]]
        (pair,) = agreement({"a": flat(a), "b": flat(b)}, offsets_of(a), flat(mask) > 0, [0, 1, 2, 3])
        assert pair.rho[:2].tolist() == [1, -1] and np.isnan(pair.rho[2:]).all()
        assert (pair.mean.value, pair.mean.n, pair.without) == (0, 2, 2)
        # Of 8 trained tokens two of response 1 (0 and 0 agree) and one of response 2.
        assert pair.sign.value == 3 / 8 and pair.opposite == 3 / 8
        (pair,) = agreement({"a": flat([[0, 1]]), "b": flat([[1, 1]])}, [0, 2], [True, True], [0])
        assert (pair.sign.value, pair.opposite, pair.mean.value) == (0.5, 0.0, None)
        assert "constant" in pair.mean.missing

    def test_pairs_stand_in_the_order_of_the_methods(self):
        values = {name: np.arange(3.0) for name in "cab"}
        found = agreement(values, [0, 3], [True] * 3, [0])
        assert [(pair.first, pair.second) for pair in found] == [("c", "a"), ("c", "b"), ("a", "b")]

    def test_the_interval_draws_whole_prompts(self):
        # Eight copies of every response teach nothing new: the interval over prompts stays as wide.
        rows = [[1.0, 2, 3], [3.0, 2, 1], [1.0, 3, 2], [2.0, 3, 1], [1.0, 2, 3]]
        base = [[1.0, 2, 3]] * len(rows)

        def interval(copies: int) -> tuple[float, float]:
            many, ones = rows * copies, base * copies
            prompt = list(range(len(rows))) * copies
            (pair,) = agreement({"a": flat(ones), "b": flat(many)}, offsets_of(many), [True] * 15 * copies, prompt)
            assert pair.mean.interval is not None
            return pair.mean.interval

        assert interval(8) == pytest.approx(interval(1))
        low, high = interval(1)
        assert low < np.mean([1, -1, 0.5, -0.5, 1]) < high

    @given(st.data())
    def test_a_slow_reference_agrees(self, data):
        rows = data.draw(st.lists(st.integers(0, 6), min_size=1, max_size=5))
        number = st.integers(-2, 2)
        table = {name: [data.draw(st.lists(number, min_size=n, max_size=n)) for n in rows] for name in "abc"}
        mask = [data.draw(st.lists(st.booleans(), min_size=n, max_size=n)) for n in rows]
        found = agreement(
            {name: flat(each) for name, each in table.items()}, offsets_of(mask), flat(mask) > 0, range(len(rows))
        )
        for pair in found:
            kept = [
                [[v for v, m in zip(table[name][i], mask[i], strict=True) if m] for i in range(len(rows))]
                for name in (pair.first, pair.second)
            ]
            expected = [slow_spearman(x, y) for x, y in zip(*kept, strict=True)]
            for got, wanted in zip(pair.rho, expected, strict=True):
                assert np.isnan(got) if wanted is None else got == pytest.approx(wanted, abs=1e-12)
            known = [rho for rho in expected if rho is not None]
            assert pair.without == len(rows) - len(known)
            assert pair.mean.value == (pytest.approx(sum(known) / len(known), abs=1e-12) if known else None)
            tokens = [(x, y) for a, b in zip(*kept, strict=True) for x, y in zip(a, b, strict=True)]
            if tokens:
                assert pair.sign.value == pytest.approx(sum(np.sign(x) != np.sign(y) for x, y in tokens) / len(tokens))

    @given(st.lists(st.integers(-3, 3), min_size=2, max_size=8), st.lists(st.integers(-3, 3), min_size=8, max_size=8))
    def test_only_the_order_counts(self, x, y):
        y = y[: len(x)]
        same = correlations(np.array([x, y], dtype=float))[0, 1]
        bent = correlations(np.array([[math.exp(v) for v in x], [v**3 - 7 for v in y]]))[0, 1]
        assert same == pytest.approx(bent, nan_ok=True)


class TestDisagreements:
    def found(self, rows: dict[str, list[list[float]]], mask=None, ids=None, prompt=None, **more: Any):
        first = next(iter(rows.values()))
        n = len(first)
        return disagreements(
            {name: flat(each) for name, each in rows.items()}, offsets_of(first),
            flat(mask if mask is not None else [[1] * len(row) for row in first]) > 0,
            flat(ids if ids is not None else [[100 * i + t for t in range(len(r))] for i, r in enumerate(first)]),
            list(range(n)) if prompt is None else prompt, **more,
        )  # fmt: skip

    def test_numbers_by_hand(self):
        # Ranks of `a` are 0, .5, 1 and of `b` 1, .5, 0: token 1 is ranked alike and no entry.
        first, last = self.found({"a": [[1, 2, 3]], "b": [[3, 2, 1]]})
        assert (first.row, first.start, first.end, first.gap) == (0, 0, 1, 1)
        assert (first.high, first.low, first.rank) == ("b", "a", {"a": 0, "b": 1})
        assert first.advantage == {"a": 1, "b": 3}
        assert (last.start, last.high, last.low) == (2, "a", "b")

    def test_neighbours_with_the_same_values_are_one_entry_and_a_masked_token_parts_them(self):
        rows = {"a": [[1, 1, 2, 2, 2, 1]], "b": [[5, 5, 0, 0, 0, 5]]}
        assert [(d.start, d.end) for d in self.found(rows)] == [(0, 2), (2, 5), (5, 6)]
        # Of five trained tokens `a` ranks three .25 and two .875, `b` three .75 and two .125.
        found = self.found(rows, mask=[[1, 1, 1, 0, 1, 1]])
        assert [(d.start, d.end, d.gap) for d in found] == [(2, 3, 0.75), (4, 5, 0.75), (0, 2, 0.5), (5, 6, 0.5)]
        # One method that tells them apart is enough.
        assert len(self.found({**rows, "c": [[1, 2, 3, 4, 5, 6]]})) == 6

    def test_ties_share_ranks_and_a_constant_method_ranks_nothing(self):
        rows = {"a": [[1, 1, 1, 4]], "b": [[4, 1, 1, 1]], "grpo": [[9, 9, 9, 9]]}
        found = self.found(rows)
        # Three tied tokens take ranks 1, 2, 3: their mean is 2, which is (2 − 1)/3 of the way.
        assert [(d.start, d.gap) for d in found] == [(0, pytest.approx(2 / 3)), (3, pytest.approx(2 / 3))]
        assert found[0].rank == {"a": pytest.approx(1 / 3), "b": 1, "grpo": None}
        assert found[0].advantage["grpo"] == 9
        assert self.found({"a": [[1, 2]], "grpo": [[3, 3]]}) == []

    def test_responses_that_open_alike_are_one_entry(self):
        rows = {"a": [[1, 2, 3]] * 3, "b": [[3, 2, 1]] * 3}
        ids = [[7, 8, 9], [7, 8, 10], [7, 8, 9]]
        found = self.found(rows, ids=ids, prompt=[0, 0, 0])
        assert [(d.row, d.start, d.alike) for d in found] == [(0, 0, 2), (0, 2, 1), (1, 2, 0)]
        assert [(d.row, d.alike) for d in self.found(rows, ids=ids, prompt=[0, 0, 1])][:2] == [(0, 1), (0, 0)]
        # Differing the other way is another disagreement.
        turned = {"a": [[1, 2, 3], [3, 2, 1]], "b": [[3, 2, 1], [1, 2, 3]]}
        assert all(d.alike == 0 for d in self.found(turned, ids=[[7, 8, 9]] * 2, prompt=[0, 0]))

    def test_the_furthest_come_first_and_no_more_than_asked_for(self):
        rows = {"a": [[1, 2, 3, 4], [1, 2, 3, 4]], "b": [[2, 1, 3, 4], [4, 3, 2, 1]]}
        found = self.found(rows)
        assert [d.gap for d in found] == sorted([d.gap for d in found], reverse=True)
        assert [(d.row, d.start) for d in self.found(rows, most=3)] == [(1, 0), (1, 3), (0, 0)]
        many = {"a": [list(range(80))], "b": [list(range(79, -1, -1))]}
        assert len(self.found(many)) == 50

    @given(st.data())
    def test_a_slow_reference_agrees(self, data):
        n = data.draw(st.integers(2, 8))
        rows = {name: data.draw(st.lists(st.integers(0, 3), min_size=n, max_size=n)) for name in "abc"}
        ranked = {k: [(r - 1) / (n - 1) for r in slow_ranks(v)] for k, v in rows.items() if len(set(v)) > 1}
        expected = {
            t: max((abs(ranked[a][t] - ranked[b][t]) for a, b in combinations(ranked, 2)), default=0) for t in range(n)
        }
        found = self.found({name: [each] for name, each in rows.items()})
        covered = {t: d.gap for d in found for t in range(d.start, d.end)}
        assert covered == {t: pytest.approx(gap) for t, gap in expected.items() if gap > 1e-12}


ABOUT = {
    "provenance": "measured", "settings": {"alpha": 0.5}, "model": "RUN/model", "statistics": [],
    "gap": {"mean": 0.03, "largest": 0.5, "tokens": 5}, "states": {"reused": 2, "measured": 7}, "reproduced": None,
    "cost": {"generated": 120, "forward": 60, "backward": 0, "seconds": 1.5},
}  # fmt: skip
TEXTS = ["ab<i>c", "xyz"]
A = {"probepo": [[1.0, 1, -1, -1, 0, 0], [1, 2, 3]], "vineppo": [[-1.0, -1, 1, 1, 0.5, 0], [3, 2, 1]]}


@pytest.fixture
def compared(handmade) -> RunFolder:
    """Two responses to two prompts under two methods; the last token of the first is not trained."""
    run = handmade(
        [
            {"token_ids": list(range(len(text))), "text": text, "char_start": list(range(len(text))), "group": str(i),
             "prompt": text, "mask": [t != 5 for t in range(len(text))], "advantage": A["probepo"][i]}
            for i, text in enumerate(TEXTS)
        ]
    )  # fmt: skip
    record = store.record_digest(run.path, 1)
    for name, rows in A.items():
        credit = [{**c, "advantage": rows[i], "method": name} for i, c in enumerate(run.read("credit", 1))]
        told = ABOUT if name == "vineppo" else {**ABOUT, "provenance": "recorded", "model": None, "gap": None}
        store.keep(run.path, name, 1, credit, [], {**told, "record": record, "digest": name})
    store.show(run.path, 1, list(A))
    return run


class TestCompared:
    def test_the_index_and_the_keys(self, compared):
        found = Compared.open(compared.path)
        assert found is not None
        assert found.index() == {"step": 1, "methods": ["probepo", "vineppo"]}
        assert found.keys() == ["compare-1", "compare-1-row-0", "compare-1-row-1"]
        assert found.keys({1}) == ["compare-1", "compare-1-row-1"]
        assert Compared.open(compared.path, 1) is not None

    def test_the_chunk_of_a_step(self, compared):
        chunk = Compared.open(compared.path).chunk("compare-1")
        json.dumps(chunk, allow_nan=False)
        (pair,) = chunk["pairs"]
        # Response 0 by ranks: (4.5 4.5 1.5 1.5 3) and (1.5 1.5 4.5 4.5 3); response 1 turned round. Both are −1.
        assert (pair["first"], pair["second"], pair["rho"]["value"]) == ("probepo", "vineppo", -1)
        assert (pair["responses"], pair["without"]) == (2, 0)
        # Four tokens are opposite; one more is 0 beside .5; three agree.
        assert (pair["sign"]["value"], pair["opposite"]) == (5 / 8, 4 / 8)
        assert chunk["responses"] == [{"row": 0, "rho": [-1]}, {"row": 1, "rho": [-1]}]
        recorded, measured = chunk["methods"]
        assert (recorded["provenance"], recorded["model"], measured["cost"]["generated"]) == ("recorded", None, 120)
        assert (recorded["scale"], measured["gap"]["mean"]) == (3, 0.03)
        first = chunk["disagreements"][0]
        assert (first["row"], first["token"], first["end"], first["gap"], first["snippet"]) == (1, 0, 1, 1, "x")
        assert first["advantage"] == {"probepo": 1, "vineppo": 3}

    def test_the_chunk_of_a_response(self, compared):
        found = Compared.open(compared.path)
        assert found.chunk("compare-1-row-1") == {
            name: {"advantage": A[name][1], "segments": []} for name in ("probepo", "vineppo")
        }
        for key in ("compare-2", "compare-1-row-2", "compare-1-row-", "step-1", "compare-1-row-0x"):
            with pytest.raises(InputError):
                found.chunk(key)

    def test_what_belongs_to_another_record_is_not_shown(self, compared):
        credit = compared.read("credit", 1)
        compared.write("credit", 1, [{**c, "base": 0.25} for c in credit])
        assert Compared.open(compared.path) is None

    def test_one_method_alone_is_no_comparison(self, compared):
        store.show(compared.path, 1, ["probepo"])
        assert Compared.open(compared.path) is None

    @pytest.mark.parametrize("name", ["../../outside", "..", "/etc", "probepo/../vineppo", "Probepo", ""])
    def test_names_lead_nowhere_else(self, compared, name):
        store.show(compared.path, 1, ["probepo", "vineppo", name])
        assert Compared.open(compared.path).index()["methods"] == ["probepo", "vineppo"]

    @pytest.mark.parametrize("text", ["", "[]", "{", '{"step": "1"}', '{"step": 1, "methods": [1, null]}'])
    def test_a_broken_note_shows_nothing(self, compared, text):
        (compared.path / "compare" / "shown.json").write_text(text)
        assert Compared.open(compared.path) is None

    def test_hostile_text_is_made_visible(self, compared):
        path = compared.path / "compare" / "vineppo" / "about.json"
        kept = json.loads(path.read_text())
        kept["steps"]["1"] |= {"model": "a\u202eb", "settings": {"cue\u0007": "\u001b[31m"}}
        path.write_text(json.dumps(kept))
        method = Compared.open(compared.path).chunk("compare-1")["methods"][1]
        assert method["model"] == "a⟨U+202E⟩b" and method["settings"] == {"cue␇": "␛[31m"}

    def test_a_run_without_a_comparison(self, run):
        assert Compared.open(run.path) is None


class TestPage:
    def test_lanes_texts_and_tables(self, compared, opened, tmp_path):
        page = opened(write_page(compared.path, tmp_path / "page.html"), "#view=methods&step=1&row=1&token=2")
        page.get_by_role("slider").wait_for()
        slider = page.get_by_role("slider")
        assert slider.get_attribute("aria-valuetext") == "Token 2, “z”: probepo +3.000, vineppo +1.000"
        slider.focus()
        for key, token in (
            ("ArrowLeft", 1),
            ("Home", 0),
            ("ArrowUp", 0),
            ("ArrowDown", 1),
            ("End", 2),
            ("ArrowRight", 2),
        ):
            page.keyboard.press(key)
            assert slider.get_attribute("aria-valuenow") == str(token), key
        matrix = page.locator(".compare-matrix table")
        assert matrix.locator("th[scope=col]").all_inner_texts() == ["probepo", "vineppo"]
        assert matrix.locator("tbody tr").nth(1).locator("button").inner_text() == "−1.00"
        told = page.locator(".compare-took").inner_text()
        assert "differ by 0.03 nats a token on average" in told and "As the run was trained with." in told
        assert "2 of 9 measurements" in told
        # The texts stand side by side, each with its own method's credit.
        hues = [page.locator(f"#compare-text-{k} [data-t='0']").get_attribute("class") for k in (0, 1)]
        assert ["pos" in each for each in hues] == [True, True]
        page.locator(".compare-furthest a").filter(has_text="0 ·").first.click()
        page.get_by_text("Response 0 ", exact=False).first.wait_for()
        page.wait_for_timeout(200)
        hues = [page.locator(f"#compare-text-{k} [data-t='0']").get_attribute("class") for k in (0, 1)]
        assert sorted("neg" in each for each in hues) == [False, True]

    def test_gains_stand_above_the_line_and_losses_below(self, compared, opened, tmp_path):
        page = opened(write_page(compared.path, tmp_path / "page.html"), "#view=methods&step=1&row=0")
        page.get_by_role("slider").wait_for()
        zero = page.locator(".cmp-zero").first.bounding_box()["y"]
        gains, losses = (page.locator(f".cmp-bar.{hue}").first.bounding_box() for hue in ("pos", "neg"))
        assert gains["y"] + gains["height"] <= zero + 1 and losses["y"] >= zero - 1
        assert gains["height"] > 5 and losses["height"] > 5

    def test_a_run_without_a_comparison_has_no_such_tab(self, run, opened, tmp_path):
        page = opened(write_page(run.path, tmp_path / "page.html"))
        assert page.get_by_role("link", name="Methods").count() == 0
