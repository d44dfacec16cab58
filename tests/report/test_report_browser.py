"""The page in a real browser: what is seen of it, how the keyboard moves in it, and that hostile text does nothing.

Every page that the fixture `opened` opens fails its test where it writes to the console, opens a dialog or a window,
or asks for anything but itself.
"""

from __future__ import annotations

import re
import time

import pytest
from test_report_page import HOSTILE

from apportion.report import write_page


@pytest.fixture(scope="module")
def page_file(run, tmp_path_factory):
    return write_page(run.path, tmp_path_factory.mktemp("pages") / "page.html")


def until(page, condition):
    """Waits for a condition on the page. Playwright's own wait runs text as code, which the policy refuses."""
    deadline = time.monotonic() + 20
    while not page.evaluate(condition):
        assert time.monotonic() < deadline, condition
        time.sleep(0.02)


def colour(text: str) -> tuple[float, ...]:
    """Red, green, blue and opacity of a computed colour, each from 0 to 1."""
    numbers = [float(x) for x in re.findall(r"-?[\d.]+(?:e-?\d+)?", text.split("(")[1])]
    if text.startswith("rgb"):
        numbers[:3] = [x / 255 for x in numbers[:3]]
    return (*numbers[:3], numbers[3] if len(numbers) > 3 else 1.0)


STYLE = """node => { const s = getComputedStyle(node);
    return [s.backgroundColor, s.borderBottomStyle, parseFloat(s.borderBottomWidth), s.borderBottomColor]; }"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_gains_are_blue_and_solid_losses_orange_and_dotted_by_their_size(handmade, opened, tmp_path, scheme):
    # The 99th percentile of |A| over these eight tokens is 2, so their share of full colour is |A|/2.
    values = [2.0, 1.0, 0.0, -1.0, -2.0, 0.5, -0.5, 0.25]
    run = handmade(
        [{"token_ids": list(range(8)), "text": "abcdefgh", "char_start": list(range(8)), "advantage": values}]
    )
    page = opened(write_page(run.path, tmp_path / "page.html"), color_scheme=scheme)
    seen = [page.locator(f'[data-t="{t}"]').evaluate(STYLE) for t in range(8)]
    for value, (background, line, width, line_colour) in zip(values, seen, strict=True):
        red, green, blue, opacity = colour(background)
        share = min(1, abs(value) / 2)
        assert width == pytest.approx(4 * share, abs=0.7), value
        assert opacity == pytest.approx(share * (0.46 if scheme == "light" else 0.42), abs=0.02), value
        if value:
            assert (blue > red) == (value > 0) and green < max(red, blue)
            assert line == ("solid" if value > 0 else "dotted")
            r, _, b, _ = colour(line_colour)
            assert (b > r) == (value > 0)


def test_a_token_tells_all_that_is_known_of_it(handmade, opened, tmp_path):
    row = {
        "token_ids": [11, 22, 33], "text": "so x=", "char_start": [0, 2, 4], "advantage": [0.5, -0.25, 0.125],
        "base": 0.125, "entropy": [0.1, 1.234, 0.0], "old_logprob": [-0.1, -0.6931, 0.0],
    }  # fmt: skip
    run = handmade([row])
    rows = [{**c, "residual": [0.375, -0.375, 0.0]} for c in run.read("credit", 1)]
    run.write("credit", 1, rows)
    page = opened(write_page(run.path, tmp_path / "page.html"))
    page.locator('[data-t="1"]').hover()
    told = page.locator("#token").inner_text()
    for words in ("Token 1 “ x”", "3 tokens", "22", "1.234 nats", "−0.693", "p 0.500", "+0.125", "−0.375", "−0.250"):
        assert words in told, words
    page.locator('[data-t="2"]').focus()
    assert "33" in page.locator("#token").inner_text()
    assert page.locator('[data-t="2"]').evaluate("n => getComputedStyle(n).outlineStyle") != "none"


def test_segments_show_value_before_and_after_and_hatch_what_may_be_noise(page_file, opened):
    page = opened(page_file)
    label = page.locator(".gutter .seg").first.inner_text().replace("\n", " ")
    assert re.search(r"1 .*[\d.]+ → [\d.]+ [+−][\d.]+ ± [\d.]+", label)
    hatched = page.locator(".gutter .hatched")
    for k in range(hatched.count()):
        assert "repeating-linear-gradient" in hatched.nth(k).evaluate("n => getComputedStyle(n).backgroundImage")
    table = page.locator("#segments tbody tr")
    assert table.count() == page.locator(".gutter .seg").count()
    for k in range(table.count()):
        increment = table.nth(k).locator("td").nth(3)
        change, error = (float(x.replace("−", "-")) for x in re.findall(r"[+−]?\d+\.\d+", increment.inner_text()))
        if abs(abs(change) - error) > 0.011:
            assert ("hatched" in increment.get_attribute("class")) == (abs(change) < error)


def test_a_pivot_opens_its_continuations_with_their_verdicts(run, page_file, opened):
    page = opened(page_file)
    mark = page.locator(".pivot-mark").last
    mark.click()
    samples = int(re.search(r"(\d+) continuations", mark.get_attribute("aria-label"))[1])
    card = page.locator("#pivot")
    assert card.locator(".tally .verdict").count() == samples
    shown = [re.search(r"×(\d+)", text) for text in card.locator("li header").all_inner_texts()]
    assert sum(int(found[1]) if found else 1 for found in shown) == samples
    assert page.evaluate("document.activeElement.id") == "pivot"
    assert mark.evaluate("n => n.classList.contains('chosen')")


def test_laws_stand_with_their_measured_error(page_file, opened):
    page = opened(page_file)
    assert "token mean of A = base" in page.locator("#checks").inner_text()
    assert "Σ increments = r − μ" in page.locator("#checks").inner_text()
    assert page.locator("#checks .good").count() == 2 and page.locator("#checks .bad").count() == 0
    assert "error" in page.locator("#invariants").inner_text()


def test_the_keyboard_reaches_everything_in_the_order_of_reading(page_file, opened):
    page = opened(page_file)
    places = []
    for _ in range(80):
        page.keyboard.press("Tab")
        place, outline = page.evaluate("""() => { const n = document.activeElement;
            const place = n === document.body ? null : n.closest('[id]')?.id || n.className;
            return [place, getComputedStyle(n).outlineStyle]; }""")
        if place is None:
            break
        places.append(place)
        assert outline != "none", places
    order = list(dict.fromkeys(places))
    assert order[0] == "skip"
    wanted = ["tabs", "settings-title", "step", "group", "row", "list", "chart", "maths", "text", "segments"]
    found = [place for place in order if place in wanted]
    assert found == [place for place in wanted if place in found] and len(found) >= 8, order


def test_arrows_move_by_token_and_by_segment(page_file, opened):
    page = opened(page_file)
    at = lambda: page.evaluate("Number(document.activeElement.dataset.t)")  # noqa: E731
    page.locator('[data-t="0"]').focus()
    page.keyboard.press("ArrowRight")
    assert at() == 1
    starts = page.evaluate("state.detail.segments.map(s => s.start)")
    page.keyboard.press("ArrowDown")
    assert at() == starts[1]
    page.keyboard.press("ArrowUp")
    assert at() == starts[0]
    page.keyboard.press("End")
    assert at() == page.evaluate("state.response.length") - 1
    # One token of the text is in the tab order, the one the reader was at.
    assert page.locator('.t[data-t][tabindex="0"]').count() == 1
    page.locator("#list").focus()
    before = page.evaluate("state.response.row")
    page.keyboard.press("ArrowDown")
    until(page, f"state.response.row === {before + 1}")


def test_an_address_leads_to_a_response_and_its_token(run, page_file, opened):
    step = run.steps()[1]
    page = opened(page_file, f"#view=response&step={step}&row=9&token=5")
    assert page.evaluate("[state.step.step, state.response.row, state.token]") == [step, 9, 5]
    page.locator("#row").fill("3")
    page.locator("#row").press("Enter")
    until(page, "state.response.row === 3")
    assert f"step={step}&row=3" in page.url
    page.locator("#row").fill("999")
    page.locator("#row").press("Enter")
    assert not page.locator("#row").evaluate("n => n.validity.valid")
    assert "0 to 23" in page.locator("#row").evaluate("n => n.validationMessage")


@pytest.mark.parametrize("view", ["response", "group", "run"])
@pytest.mark.parametrize("options", [{"color_scheme": "dark"}, {"viewport": {"width": 600, "height": 900}}])
def test_every_view_draws_without_a_word_on_the_console(page_file, opened, view, options):
    page = opened(page_file, f"#view={view}", **options)
    assert page.evaluate("state.view") == view
    assert page.locator(f"#view-{view}").is_visible()
    assert len(page.locator(f"#view-{view}").inner_text()) > 200
    # Nothing sticks out sideways.
    assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth + 1")


def test_a_frame_without_an_address_of_its_own_shows_the_page(page_file, opened, tmp_path):
    """As trackers show it: sandboxed, its text given in an attribute."""
    frame = tmp_path / "tracker.html"
    text = page_file.read_text(encoding="utf-8").replace("&", "&amp;").replace('"', "&quot;")
    frame.write_text(
        f'<body data-view="frame"><iframe sandbox="allow-scripts" srcdoc="{text}"></iframe>', encoding="utf-8"
    )
    page = opened(frame)
    inside = page.frames[1]
    inside.locator("body[data-view=response]").wait_for()
    inside.locator("#tabs a", has_text="Run").click()
    inside.locator("body[data-view=run]").wait_for()


def test_back_leads_to_where_the_reader_was(page_file, opened):
    page = opened(page_file)
    page.locator("#tabs a", has_text="Group").click()
    until(page, "state.view === 'group'")
    page.go_back()
    until(page, "state.view === 'response'")


# --- formulas and code --------------------------------------------------------------------------------------


def of_text(handmade, text, **more):
    pieces = re.findall(r"\s?\w+|\s|[^\w\s]", text)
    starts = [sum(map(len, pieces[:k])) for k in range(len(pieces))]
    n = len(pieces)
    return handmade([{"token_ids": list(range(n)), "text": text, "char_start": starts, "advantage": [0.5] * n, **more}])


def test_formulas_are_set_and_code_is_kept(handmade, opened, tmp_path):
    text = (
        "So $x^2=4$ and \\(y\\) cost $5 and $6.\n\n```python\nif a:\n    b = $c$\n```\n`$d$` then\n"
        "\\begin{align*}\ne &= f \\\\\n g &= h\n\\end{align*} \\[ \\frac{1}{2} \\] hence \\boxed{\\frac{3}{4}}."
    )
    page = opened(write_page(of_text(handmade, text).path, tmp_path / "page.html"))
    tex = page.evaluate("[...document.querySelectorAll('#text annotation')].map(n => n.textContent)")
    assert tex == [
        "x^2=4", "y", "\\begin{align*}\ne &= f \\\\\n g &= h\n\\end{align*}", "\\frac{1}{2}", "\\boxed{\\frac{3}{4}}",
    ]  # fmt: skip
    assert page.locator("#text mfrac").first.bounding_box()["height"] > 15
    shown = page.evaluate("[...document.querySelectorAll('#text .t')].map(n => n.textContent).join('')")
    assert "```python\nif a:\n    b = $c$\n```\n`$d$` then" in shown and "$5 and $6" in shown
    # Every token has one place in the text, those of formulas under them; as written, the text is whole.
    count = page.evaluate("state.response.length")
    assert page.locator("#text .t[data-t]").count() == count
    page.locator("#maths").uncheck()
    assert page.evaluate("[...document.querySelectorAll('#text .t')].map(n => n.textContent).join('')") == text
    assert page.locator("#text math").count() == 0


def test_prose_without_formulas_is_untouched(handmade, opened, tmp_path):
    text = "It costs $5, then $6; a $ alone, \\$7 and 50% of {x}.\n$not\n\nmath$ \\[ open `tick"
    page = opened(write_page(of_text(handmade, text).path, tmp_path / "page.html"))
    assert page.locator("#text math").count() == 0
    assert page.evaluate("[...document.querySelectorAll('#text .t')].map(n => n.textContent).join('')") == text


def test_words_that_share_a_token_with_a_formula_answer_for_it(handmade, opened, tmp_path):
    # Tokens "a", " $x$," and " b": the comma is part of the formula's token.
    row = {"token_ids": [1, 2, 3], "text": "a $x$, b", "char_start": [0, 1, 6], "advantage": [0.5, -0.5, 0.5]}
    page = opened(write_page(handmade([row]).path, tmp_path / "page.html"))
    beside = page.locator('[data-of="1"]')
    assert beside.all_inner_texts() == [" ", ","]
    beside.last.hover()
    assert "Token 1" in page.locator("#token").inner_text()


def test_a_formula_that_a_segment_cuts_stays_as_written(handmade, segment, opened, tmp_path):
    text = "a $x+y$ b"
    cut = [segment(0, 4, 0.5, 0.5, 0, 0.1, 0), segment(4, 8, 0.6, 0.6, 0.1, 0.4, 4)]
    page = opened(write_page(of_text(handmade, text, segments=cut).path, tmp_path / "page.html"))
    assert page.locator("#text math").count() == 0 and page.locator("#text .mark").count() == 2


# --- hostile text -------------------------------------------------------------------------------------------

TEX = [
    "$\\href{javascript:alert(1)}{x}$", "$\\includegraphics{http://example.invalid/x.png}$", "$\\htmlClass{a}{x}$",
    "$\\url{javascript:alert(1)}$", "$\\def\\a{\\a\\a}\\a$", "$" + "{" * 900 + "}" * 900 + "$",
    "$\\rule{9999em}{9999em}$",
    "$\\html@mathml{<img src=x onerror=alert(1)>}{y}$", "$\\text{</math><script>alert(1)</script>}$", "$\\frac{1$",
    "\\boxed{" + "{" * 5000, "$" * 3000, "\\begin{align}" * 300, "`" * 2001,
]  # fmt: skip


def test_hostile_text_is_shown_and_never_run(handmade, opened, tmp_path):
    rows = [
        {"token_ids": [1, 2], "text": t + " end", "char_start": [0, len(t)], "prompt": t, "gold": t, "group": t}
        for t in [" ".join(HOSTILE), *HOSTILE, *TEX, "x" * 1_000_000]
    ]
    run = handmade(rows, metrics={HOSTILE[0]: 1.0}, counts={HOSTILE[1]: 2}, invariants={HOSTILE[1]: 1.0})
    page = opened(write_page(run.path, tmp_path / "page.html"))
    elements = page.evaluate("document.querySelectorAll('*').length")
    for row in range(len(rows)):
        page.evaluate(f"go({{ view: 'response', row: {row} }})")
        until(page, f"state.response.row === {row}")
        for tag in ("img", "iframe", "object", "embed", "link", "base", "form", "video"):
            assert page.locator(f"#main {tag}").count() == 0, (row, tag)
        assert page.locator("#text a, #text [href], #text [src], #text script").count() == 0
        box = page.locator("#text").bounding_box()
        assert box["width"] < 1400
    for view in ("group", "run"):
        page.evaluate(f"go({{ view: '{view}' }})")
        until(page, f"state.view === '{view}'")
        assert page.locator("#main img, #main iframe, #main form").count() == 0
    assert page.title() == "Credit of run" and elements > 0
    page.evaluate("go({ view: 'response', row: 0 })")
    until(page, "state.response.row === 0")
    shown = page.locator("#text").inner_text()
    assert "⟨U+202E⟩evil" in shown and "␛[31mred" in shown and "</script><script>" in shown


def test_the_policy_runs_no_inline_code(page_file, chromium):
    """Here what the policy refuses is planted, and its refusals are what is looked for."""
    page = chromium.new_page()
    refused: list[str] = []
    page.on("console", lambda m: refused.append(m.text))
    page.goto(page_file.as_uri())
    until(page, "document.body.dataset.view")
    page.evaluate("""() => {
        try { document.body.setAttribute('onclick', 'window.ran = 1'); document.body.click(); } catch {}
        const code = document.createElement('script');
        try { code.textContent = 'window.ran = 2'; document.body.append(code); } catch {}
        try { document.body.insertAdjacentHTML('beforeend', '<img src=x onerror="window.ran = 3">'); } catch {}
        fetch('http://127.0.0.1:9/').catch(() => {});
    }""")
    page.wait_for_timeout(300)
    assert page.evaluate("window.ran") is None
    assert len([text for text in refused if "Content Security Policy" in text]) >= 2, refused
    page.close()


# --- size and paper -----------------------------------------------------------------------------------------


def test_a_response_of_32k_tokens_stays_usable(handmade, segment, opened, tmp_path):
    n = 32_768
    text = "".join("word \n" if t % 40 == 39 else "word " for t in range(n))
    starts = [5 * t + t // 40 for t in range(n)]
    cuts = [segment(k * 1024, (k + 1) * 1024, 0.5, 0.5, 0.1, 0.0, 4 if k else 0) for k in range(32)]
    row = {"token_ids": [7] * n, "text": text, "char_start": starts, "segments": cuts, "entropy": [0.5] * n,
           "advantage": [(-1) ** (t // 1024) * 1.0 for t in range(n)]}  # fmt: skip
    page = opened(write_page(handmade([row]).path, tmp_path / "page.html"))
    made = page.locator("#text .t").count()
    assert 1000 < made < 8000 and page.locator("#text .mark").count() == 32
    assert page.locator("#text").inner_text().count("word") == n
    page.evaluate(f"go({{ token: {n - 1} }})")
    until(page, f"document.querySelector('[data-t=\"{n - 1}\"]')")
    box = page.locator(f'[data-t="{n - 1}"]').bounding_box()
    assert 0 < box["y"] < 1000
    # The label of a segment stands where the segment does.
    last = page.locator(".gutter .seg").last.bounding_box(), page.locator("#text .mark").last.bounding_box()
    assert abs(last[0]["y"] - last[1]["y"]) < 12
    assert page.locator("#text .t").count() < 16_000


def test_on_paper_everything_is_there(page_file, opened, tmp_path):
    page = opened(page_file)
    page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    page.emulate_media(media="print")
    assert not page.locator("#tabs").is_visible() and page.locator("#prompt").is_visible()
    assert page.locator("#text .mark .label").first.is_visible() and not page.locator("#token").is_visible()
    assert len(page.pdf()) > 20_000


def test_a_screen_reader_hears_what_is_seen(page_file, opened):
    page = opened(page_file)
    heard = page.locator("#main").aria_snapshot()
    assert re.search(r'listbox "Responses of the group"', heard)
    assert re.search(r'option "Response \d+, (correct|wrong), reward [\d.]+, \d+ tokens, \d+ pivots?, base', heard)
    assert re.search(r'button "Segment 1: value [\d.]+ to [\d.]+, [+−][\d.]+ ± [\d.]+', heard)
    assert re.search(r'button "Pivot \d+ before token \d+: value', heard) and "table" in heard
    controls = 'button, a, input, select, [role=button], [tabindex="0"]'
    unnamed = (
        page.locator("body")
        .locator(controls)
        .evaluate_all("""nodes => nodes.filter(n => n.checkVisibility()
        && !(n.ariaLabel || n.getAttribute('aria-labelledby') || n.textContent.trim() || n.labels?.length || n.title))
        .map(n => n.outerHTML.slice(0, 80))""")
    )
    assert unnamed == []
