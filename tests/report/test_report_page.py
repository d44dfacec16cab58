"""The page as a file: inert whatever the model wrote, whole on its own, within its budget.

Planted faults seen caught: autoescape off; `<` left as it is in the embedded JSON; the script's hash taken before
a newline was added; an inline handler in the template; NaN let into the JSON; bidi and control characters passed
through; the steps taken from the front; the response asked for dropped by the budget.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import unicodedata
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from apportion.errors import InputError
from apportion.records import RunFolder
from apportion.report import write_page
from apportion.report.escape import embeddable_json, one_line, visible
from apportion.report.page import MAX_BYTES, metric_series, page_data, render
from apportion.report.view import SCHEMA

HOSTILE = [
    "</script><script>document.title='pwned'</script>", '"><img src=x onerror=alert(1)>', "<!--<script>", "]]>",
    "javascript:alert(1)", "\u202eevil\u202c \u2066x\u2069", "\x1b[31mred\x1b]0;title\x07", "a\x00b\x7f\x85",
    "\u2028\u2029\ufeff\u200b", "{{ 7*7 }}{% raw %}", "[bold red]x[/] [link=file:///]y", "&lt;b&gt; &amp; '", "\r\n",
]  # fmt: skip

URLS = {"src", "href", "action", "data", "poster", "srcset", "style", "xlink:href"}


class Page(HTMLParser):
    """Every element with its attributes, and the text inside script elements."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.styles: list[str] = []
        self.title, self._in_title = "", False
        self.feed(html)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self._in_title = tag == "title"
        if tag == "script":
            self.scripts.append("")
        if tag == "style":
            self.styles.append("")

    def handle_endtag(self, tag):
        self._in_title = False

    def handle_data(self, data):
        if self.cdata_elem == "script":
            self.scripts[-1] += data
        elif self.cdata_elem == "style":
            self.styles[-1] += data
        elif self._in_title:
            self.title += data


def assert_inert(html: str) -> dict:
    """Exactly our two scripts, no handler, no address to load from; returns the embedded data."""
    page = Page(html)
    kinds = [attrs.get("type") for tag, attrs in page.elements if tag == "script"]
    assert kinds == ["application/json", None]
    for tag, attrs in page.elements:
        assert tag not in {"img", "iframe", "object", "embed", "link", "base", "form", "video", "audio", "svg"}
        assert not [name for name in attrs if name.startswith("on")], (tag, attrs)
        assert {name: attrs[name] for name in attrs if name in URLS} in ({}, {"href": "#response"}), (tag, attrs)
    policy = next(a["content"] for t, a in page.elements if a.get("http-equiv") == "Content-Security-Policy")
    for directive, source in (("script-src", page.scripts[1]), ("style-src", page.styles[0])):
        digest = base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()
        assert f"{directive} 'sha256-{digest}';" in policy
    assert policy.startswith("default-src 'none';") and "unsafe" not in policy
    return json.loads(page.scripts[0])


def test_a_real_run_makes_a_page_that_stands_alone(run, tmp_path):
    out = write_page(run.path, tmp_path / "page.html")
    html = out.read_text(encoding="utf-8")
    data = assert_inert(html)
    assert data["schema"] == SCHEMA and data["run"] == "chain-7" and data["left_out"] == []
    assert [s["step"] for s in data["steps"]] == run.steps()
    assert data["start"]["step"] == run.steps()[-1]
    last = data["steps"][-1]["responses"]
    widest = max(r["spread"] for r in last)
    assert next(r for r in last if r["row"] == data["start"]["row"])["spread"] == widest
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", html)
    assert not out.with_name("page.html.part").exists()


def test_hostile_text_is_inert_wherever_it_stands(handmade):
    everything = " ".join(HOSTILE)
    responses = [
        {
            "token_ids": [1, 2],
            "text": text,
            "char_start": [0, len(text) // 2],
            "prompt": text,
            "gold": text,
            "group": text,
        }
        for text in HOSTILE
    ]
    run = handmade(
        responses, metrics={everything: 1.0}, name='"><img src=x onerror=alert(1)> \u202e',
        settings={everything: everything}, invariants={everything: 1.0}, counts={everything: 1},
    )  # fmt: skip
    (run.path / "config.toml").write_bytes(everything.encode("utf-8") + b"\xff\xfe")
    html = render(run.path, page_data(run, None, None, 8, MAX_BYTES))
    data = assert_inert(html)
    assert len(data["steps"][0]["responses"]) == len(HOSTILE)
    acting = {c for c in html if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp")} - {"\n"}
    assert not acting
    assert Page(html).title == 'Credit of "><img src=x onerror=alert(1)> ⟨U+202E⟩'


@given(st.text(st.characters(exclude_categories=()), max_size=60))
def test_any_text_comes_back_from_the_embedded_json(text):
    embedded = embeddable_json({"text": text})
    assert json.loads(embedded) == {"text": text}
    assert embedded.isascii() and not set(embedded) & set("<>&\n\r\x00")


@given(st.text(st.characters(exclude_categories=()), max_size=60))
def test_what_is_visible_cannot_act(text):
    shown = visible(text)
    shown.encode("utf-8")  # no lone surrogate is left
    assert all(unicodedata.category(c) not in ("Cc", "Cf", "Cs", "Zl", "Zp") for c in shown if c not in "\n\t")
    assert visible(shown) == shown
    assert "\n" not in one_line(text, 20) and "\t" not in one_line(text, 20)


def test_letters_of_any_script_stay_as_they_are():
    text = "naïve Ω 中文 العربية हिन्दी 😀 \t\n ⟨U+202E⟩"
    assert visible(text) == text
    assert visible("a\u202eb\x1b[0m\x00\ud800") == "a⟨U+202E⟩b␛[0m␀⟨U+D800⟩"


def test_a_line_of_ten_megabytes_is_cut_and_counted(handmade):
    run = handmade([{"token_ids": [1], "text": "x" * 10_000_000, "char_start": [0]}])
    html = render(run.path, page_data(run, None, None, 8, MAX_BYTES))
    assert (
        len(html) < 100_000
        and "(9,998,000 more characters)" in assert_inert(html)["steps"][0]["responses"][0]["tokens"]["text"][0]
    )


def test_a_number_that_json_has_not_is_null(handmade):
    nan = float("nan")
    run = handmade(
        [{"token_ids": [1], "reward": nan, "verdict": "abstain", "mean": nan, "entropy": [nan]}], metrics={"x": nan}
    )
    data = page_data(run, None, None, 8, MAX_BYTES)
    assert "NaN" not in embeddable_json(data) and data["steps"][0]["responses"][0]["reward"] is None
    with pytest.raises(ValueError):
        embeddable_json(nan)


def test_the_budget_keeps_the_most_instructive_groups_of_the_last_steps(run):
    whole = page_data(run, None, None, 8, MAX_BYTES)
    size = len(embeddable_json(whole["steps"][-1]["responses"]))
    few = page_data(run, None, None, 8, size // 2)
    assert [s["step"] for s in few["steps"]] == run.steps()[-1:]
    kept = few["steps"][0]["responses"]
    widest = max(whole["steps"][-1]["responses"], key=lambda r: r["spread"])
    assert widest["row"] in {r["row"] for r in kept} and len(kept) % 8 == 0 and 0 < len(kept) < 24
    assert few["left_out"][0] == f"{24 - len(kept)} of 24 responses of step {run.steps()[-1]}"
    assert len(few["left_out"]) == 3
    # A row that was asked for comes first, even of the group with nothing to tell.
    assert page_data(run, None, 0, 8, 1)["start"] == {"step": run.steps()[-1], "row": 0}
    assert {r["group"] for r in page_data(run, None, 0, 8, 1)["steps"][0]["responses"]} == {0}


def test_steps_are_the_last_ones_or_the_one_asked_for(run):
    first, middle, last = run.steps()
    assert [s["step"] for s in page_data(run, None, None, 2, MAX_BYTES)["steps"]] == [middle, last]
    assert page_data(run, None, None, 2, MAX_BYTES)["left_out"] == [f"1 earlier recorded step ({first})"]
    one = page_data(run, first, None, 8, MAX_BYTES)
    assert [s["step"] for s in one["steps"]] == [first] and one["left_out"] == []


def test_metrics_are_whatever_numbers_were_logged():
    rows = [
        {"step": s, "a": float(s), "text": "no", "flag": True, **({"late": 1} if s == 3 else {})} for s in (1, 2, 3)
    ]
    found = metric_series(rows)
    assert found == {"step": [1, 2, 3], "series": {"a": [1.0, 2.0, 3.0], "late": [None, None, 1.0]}}
    long = metric_series([{"step": s, "a": s} for s in range(2501)])
    assert len(long["step"]) == 834 and long["step"][-1] == 2500


@pytest.mark.parametrize(
    "wanted, message", [({"step": 5}, "step: got 5"), ({"response": 99}, "response: got 99; expected a row of step")]
)
def test_a_step_or_row_that_is_not_there(run, tmp_path, wanted, message):
    with pytest.raises(InputError, match=message):
        write_page(run.path, tmp_path / "page.html", **wanted)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_no_run_and_a_place_that_cannot_be_written(run, tmp_path):
    with pytest.raises(InputError, match="the folder of a run"):
        write_page(tmp_path, tmp_path / "page.html")
    with pytest.raises(InputError, match="No such file or directory"):
        write_page(run.path, tmp_path / "missing" / "page.html")


def test_a_run_of_a_method_that_is_not_installed_still_opens(handmade):
    run = handmade([{"token_ids": [1, 2], "text": None, "old_logprob": None}])
    rows = [{**row, "method": "somebody-elses"} for row in run.read("credit", 1)]
    run.write("credit", 1, rows)
    data = assert_inert(render(run.path, page_data(run, None, None, 8, MAX_BYTES)))
    assert data["steps"][0]["method"] == "somebody-elses" and data["steps"][0]["responses"][0]["checks"] == []
    assert data["invariant_names"]["conserved"] == "declared conservation"


def test_a_step_without_responses_opens(tmp_path):
    run = RunFolder(tmp_path / "empty")
    run.log({"step": 1})
    for kind in ("rollouts", "evidence", "credit"):
        run.write(kind, 1, [])
    assert assert_inert(render(run.path, page_data(run, None, None, 8, MAX_BYTES)))["start"] == {"step": 1, "row": None}


def test_our_own_sources_hold_no_sink_and_no_address():
    folder = Path(__file__).parents[2] / "src" / "apportion" / "report"
    source = "".join(
        (folder / name).read_text() for name in ("dom.js", "charts.js", "page.js", "page.css", "page.html")
    )
    # Comments may name what is avoided.
    code = re.sub(r"//[^\n]*", "", source.replace("http://www.w3.org/2000/svg", ""))
    for word in (
        "innerHTML",
        "outerHTML",
        "insertAdjacent",
        "document.write",
        "eval(",
        "Function(",
        "fetch(",
        "http:",
        "https:",
        "@import",
        "url(h",
    ):
        assert word not in code, word
