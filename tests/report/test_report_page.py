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
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from apportion.errors import InputError
from apportion.records import RunFolder
from apportion.report import read_page, write_page
from apportion.report.escape import embeddable_json, one_line, visible
from apportion.report.page import MAX_BYTES, SCRIPTS, STYLES, pack, render
from apportion.report.site import Site
from apportion.report.twin import unpacked
from apportion.report.view import SCHEMA

HOSTILE = [
    "</script><script>document.title='pwned'</script>", '"><img src=x onerror=alert(1)>', "<!--<script>", "]]>",
    "javascript:alert(1)", "\u202eevil\u202c \u2066x\u2069", "\x1b[31mred\x1b]0;title\x07", "a\x00b\x7f\x85",
    "\u2028\u2029\ufeff\u200b", "{{ 7*7 }}{% raw %}", "[bold red]x[/] [link=file:///]y", "&lt;b&gt; &amp; '", "\r\n",
]  # fmt: skip

# Of dist/katex.min.js in the npm package katex 0.19.1.
KATEX_0_19_1 = "fa140498b8cfc8302cbe5e7cb1bdbc1f952bc38b3fa258ede09e73edbf9a74bc"

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


def assert_inert(html: str) -> Shown:
    """Nothing in it but our scripts and data, no handler, no address to load from; returns what is embedded."""
    page = Page(html)
    scripts = [attrs for tag, attrs in page.elements if tag == "script"]
    kinds = [attrs.get("type") for attrs in scripts]
    assert kinds[0] == "application/json" and kinds.count(None) == 2
    assert set(kinds[1:]) <= {"application/gzip", None}
    for tag, attrs in page.elements:
        assert tag not in {"img", "iframe", "object", "embed", "link", "base", "form", "video", "audio", "svg"}
        assert not [name for name in attrs if name.startswith("on")], (tag, attrs)
        assert {name: attrs[name] for name in attrs if name in URLS} in ({}, {"href": "#main"}), (tag, attrs)
    policy = next(a["content"] for t, a in page.elements if a.get("http-equiv") == "Content-Security-Policy")
    run = [source for kind, source in zip(kinds, page.scripts, strict=True) if kind is None]
    code = " ".join(f"'{digest(source)}'" for source in run)
    assert f"script-src {code};" in policy and f"style-src '{digest(page.styles[0])}';" in policy
    assert policy.startswith("default-src 'none';") and "unsafe" not in policy and "connect-src 'none'" in policy
    chunks = {
        str(attrs["id"]): unpacked(text.encode("ascii"))
        for attrs, text in zip(scripts, page.scripts, strict=True) if attrs.get("type") == "application/gzip"
    }  # fmt: skip
    return Shown(json.loads(page.scripts[0]), chunks)


def digest(source: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()


class Shown:
    """The index and the chunks of a page."""

    def __init__(self, index: dict[str, Any], chunks: dict[str, dict[str, Any]]) -> None:
        self.index, self.chunks = index, chunks

    @property
    def steps(self) -> list[int]:
        return self.index["steps"]

    def responses(self, step: int | None = None) -> list[dict[str, Any]]:
        """The responses of a step, the last where left out, each with all that the page has of it."""
        number = self.steps[-1] if step is None else step
        summaries = self.chunks[f"step-{number}"]["responses"]
        return [{**r, **self.chunks[f"step-{number}-row-{r['row']}"]} for r in summaries]


def shown(run: RunFolder, step=None, response=None, max_steps=8, max_bytes=MAX_BYTES) -> Shown:
    index, chunks = pack(Site(run), step, response, max_steps, max_bytes)
    return Shown(index, {key: unpacked(chunk) for key, chunk in chunks.items()})


def html_of(run: RunFolder) -> str:
    return render(*pack(Site(run), None, None, 8, MAX_BYTES))


def test_a_real_run_makes_a_page_that_stands_alone(run, tmp_path):
    out = write_page(run.path, tmp_path / "page.html")
    html = out.read_text(encoding="utf-8")
    found = assert_inert(html)
    index, last = found.index, found.responses()
    assert index["schema"] == SCHEMA and index["name"] == "chain-7" and index["left_out"] == []
    assert found.steps == run.steps() and index["start"]["step"] == run.steps()[-1]
    widest = max(r["spread"] for r in last)
    assert next(r for r in last if r["row"] == index["start"]["row"])["spread"] == widest
    addresses = set(re.findall(r"https?://[^\s'\"<>)]+", html))
    assert addresses <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1998/Math/MathML"}
    assert not out.with_name("page.html.part").exists()
    # The same records make the same bytes.
    assert write_page(run.path, tmp_path / "again.html").read_text(encoding="utf-8") == html


def test_a_page_is_read_back_as_the_json_that_it_was_made_from(run, tmp_path):
    out = write_page(run.path, tmp_path / "page.html")
    site, found = Site(run), read_page(out)
    last = run.steps()[-1]
    assert found["index"]["steps"] == run.steps() and found["index"]["schema"] == SCHEMA
    assert found[f"step-{last}"] == json.loads(json.dumps(site.chunk(f"step-{last}")))
    assert found[f"step-{last}-row-5"] == json.loads(json.dumps(site.chunk(f"step-{last}-row-5")))
    assert len(found) == 1 + len(run.steps()) * 25
    html = out.read_text(encoding="utf-8")
    other = html.replace(f'"schema":{SCHEMA}', '"schema":99')
    for damaged in (other, html[: len(html) // 2], "<p>", html.replace("H4sI", "H4sJ"), html.replace("H4sI", "!")):
        out.write_text(damaged, encoding="utf-8")
        with pytest.raises(InputError, match="page: got"):
            read_page(out)
    with pytest.raises(InputError, match="No such file"):
        read_page(tmp_path / "none.html")


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
    html = html_of(run)
    found = assert_inert(html)
    assert len(found.responses()) == len(HOSTILE)
    embedded = json.dumps([found.index, found.chunks], ensure_ascii=False)
    assert not {c for c in embedded if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp")}
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
    html = html_of(run)
    assert len(html) < 500_000
    assert "(9,998,000 more characters)" in assert_inert(html).responses()[0]["tokens"]["text"][0]


def test_a_number_that_json_has_not_is_null(handmade):
    nan = float("nan")
    run = handmade(
        [{"token_ids": [1], "reward": nan, "verdict": "abstain", "mean": nan, "entropy": [nan]}], metrics={"x": nan}
    )
    found = assert_inert(html_of(run))
    assert found.responses()[0]["reward"] is None and found.responses()[0]["tokens"]["entropy"] == [None]
    with pytest.raises(ValueError):
        embeddable_json(nan)


def test_the_budget_keeps_the_most_instructive_groups_of_the_last_steps(run):
    last = run.steps()[-1]
    _, chunks = pack(Site(run), None, None, 1, MAX_BYTES)
    size = sum(len(chunk) for key, chunk in chunks.items() if "-row-" in key)
    few = shown(run, max_bytes=size // 2)
    assert few.steps == [last]
    kept = few.responses()
    widest = max(shown(run).responses(), key=lambda r: r["spread"])
    assert widest["row"] in {r["row"] for r in kept} and len(kept) % 8 == 0 and 0 < len(kept) < 24
    assert few.index["left_out"] == [
        f"{24 - len(kept)} of 24 responses of step {last}",
        *(f"24 of 24 responses of step {step}" for step in reversed(run.steps()[:-1])),
    ]
    groups = few.chunks[f"step-{last}"]["groups"]
    assert len(groups) == 3 and sorted(row for g in groups for row in g["rows"]) == [r["row"] for r in kept]
    # Extreme credits link only to what is there.
    assert {e["row"] for e in few.index["extremes"]} <= {r["row"] for r in kept}
    # A row that was asked for comes first, even of the group with nothing to tell.
    asked = shown(run, response=0, max_bytes=1)
    assert asked.index["start"] == {"step": last, "row": 0, "view": "response"}
    assert {r["group"] for r in asked.responses()} == {0}


def test_steps_are_the_last_ones_or_the_one_asked_for(run):
    first, middle, last = run.steps()
    assert shown(run, max_steps=2).steps == [middle, last]
    assert shown(run, max_steps=2).index["left_out"] == [f"1 earlier recorded step ({first})"]
    one = shown(run, step=first)
    assert one.steps == [first] and one.index["left_out"] == []


def test_progress_counts_the_responses_of_each_step(run):
    told = []
    pack(Site(run), None, None, 2, MAX_BYTES, lambda *words: told.append(words))
    _, middle, last = run.steps()
    assert told == [(f"step {step}", k, 24) for step in (last, middle) for k in (8, 16, 24)]


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
    found = assert_inert(html_of(run))
    assert found.chunks["step-1"]["method"] == "somebody-elses" and found.responses()[0]["checks"] == []
    assert found.chunks["step-1"]["laws"]["conserved"] == "declared conservation"


def test_a_step_without_responses_opens(tmp_path):
    run = RunFolder(tmp_path / "empty")
    run.log({"step": 1})
    for kind in ("rollouts", "evidence", "credit"):
        run.write(kind, 1, [])
    assert assert_inert(html_of(run)).index["start"] == {"step": 1, "row": None, "view": "response"}


def test_our_own_sources_hold_no_sink_and_no_address():
    folder = Path(__file__).parents[2] / "src" / "apportion" / "report"
    names = [*SCRIPTS, *STYLES, "page.html"]
    source = "".join((folder / name).read_text() for name in names)
    # Comments may name what is avoided.
    code = re.sub(r"//[^\n]*", "", source.replace("http://www.w3.org/2000/svg", ""))
    for word in (
        "innerHTML", "outerHTML", "insertAdjacent", "document.write", "eval(", "Function(", "fetch(", "XMLHttp",
        "http:", "https:", "@import", "url(h", "setTimeout(\"", "localStorage", "cookie",
    ):  # fmt: skip
        assert word not in code, word
    # Every script and style of ours is on the page, and no other but the live page's.
    assert {path.name for path in folder.glob("*.js")} - set(names) == {"live.js"}
    assert {path.name for path in folder.glob("*.css")} == set(STYLES)


def test_the_library_is_its_release_unchanged():
    script = Path(__file__).parents[2] / "src" / "apportion" / "report" / "vendor" / "katex.min.js"
    assert hashlib.sha256(script.read_bytes()).hexdigest() == KATEX_0_19_1
