"""What a fault in the credit page would change first, against numbers worked out by hand.

One response of ten tokens in a real browser, with a formula that shares its tokens with words, a masked token, three
segments of which only the last is within its error, and continuations of which two say the same with other verdicts.

Planted faults seen caught: the chart's hatch on what is no noise; a jump's sign; the value line; a whisker of two
errors; the list's strip not centred; the cursor a token late; entropy's least in place of its most; a formula a token
long, or without the words beside it, or in the colour of its first token; a mark a token late; masked tokens that look
trained; code that begins too early; moved credit on the scale of A; labels a line low, or with their values swapped;
the wrong row highlighted; laws that always hold; verdicts swapped, or merged; the wrong pivot opened; a late answer
drawn over a newer one; a pivot kept from the last response; the chunk of another row. In Python: noise without an
error, the snippet's start, p99 as the largest, the strip's joins, ends and masks, a first state counted as a pivot.
"""

from __future__ import annotations

import os
import re

import pytest
from test_report_browser import until

from apportion.errors import InputError
from apportion.report import write_page
from apportion.report.detail import column
from apportion.report.escape import one_line
from apportion.report.reading import reading
from apportion.report.site import Site, start_row
from apportion.report.view import StepView

TOKENS = ["So", " a $x", "^2", "$ is", " it.\n", "and ", "on ", "to ", "end", ""]
STARTS = [0, 2, 7, 9, 13, 18, 22, 25, 28, 31]
# Of the nine trained tokens and the other rows' zeros: |A| is 2 at most, |A − base| 2.5 with the base .5.
ADVANTAGE = [0.5, 1.0, -2.0, -2.0, 0.5, -1.0, -1.0, -1.0, 9.0, 1.0]


@pytest.fixture
def page_of(handmade, segment, opened, tmp_path):
    """Opens the page of five responses in two groups, at row 0 unless an address says another."""
    mine = [
        segment(0, 5, 0.5, 0.5, 0.0, 0.25, 0),
        segment(5, 7, 0.75, 0.75, 0.1, -0.5, 4),
        segment(7, 10, 0.25, 0.25, 0.2, 0.125, 2),
    ]
    row = {
        "token_ids": list(range(10)), "text": "".join(TOKENS), "char_start": STARTS, "advantage": ADVANTAGE,
        "mask": [True] * 8 + [False, True], "base": 0.5, "segments": mine, "reward": 0.375, "verdict": "partial",
        "entropy": [0.0, 1.0, *[0.0] * 6, 0.5, 0.0],
    }  # fmt: skip
    flat = {**row, "advantage": [0.0] * 10, "mask": [True] * 10, "base": 0.0, "segments": []}
    other = {
        "token_ids": [7, 8, 9], "text": "ab `c` d", "char_start": [0, 3, 6], "reward": 1.0, "group": "h",
        "segments": [segment(0, 1, 0.5, 0.5, 0, 0.25, 0), segment(1, 3, 0.75, 0.75, 0.1, 0.25, 3)],
    }  # fmt: skip
    wide = {**other, "mask": [False, True, True], "advantage": [9.0, 0.0, -0.25], "reward": 0.0, "text": "$y$ row 4"}
    said = [
        (0, 5, "same", 1.0),
        (0, 5, "same", 0.0),
        (0, 5, "x", 1.0),
        (0, 5, "x", 1.0),
        (1, 7, "y", 1.0),
        (1, 7, "z", 0),
    ]
    evidence = [
        {"key": str(m), "group": "g", "row": at, "position": position, "m": m, "token_ids": [7], "text": text,
         "reward": reward, "verdict": "correct" if reward else "wrong", "finish": "stop", "rescued": False,
         "kind": "continuations"}
        for m, (at, position, text, reward) in enumerate(said)
    ]  # fmt: skip
    run = handmade([row, flat, flat, other, wide], evidence, settings={"n0": 0})

    def open_it(fragment="#row=0", **given):
        page = opened(write_page(run.path, tmp_path / "page.html", **given), fragment)
        until(page, "state.detail !== null")
        return page

    return open_it


def tints(page, where):
    return page.locator(where).evaluate_all(
        "nodes => nodes.map(n => (n.classList.contains('neg') ? -1 : 1) * Number(n.style.getPropertyValue('--a')))"
    )


def test_the_chart_draws_each_value_its_error_and_its_jump(page_of):
    page = page_of()
    # y(v) = 24 + 150·(1 − v): .5 → 99, .75 → 61.5, .25 → 136.5, .375 → 117.75.
    heights = re.findall(r"[ML][\d.]+,([\d.]+)H[\d.]+V([\d.]+)", page.locator("#chart .value").get_attribute("d"))
    assert heights == [("99", "61.5"), ("61.5", "136.5"), ("136.5", "117.75")]
    jumps = page.locator("#chart .jump").evaluate_all("nodes => nodes.map(n => n.getAttribute('class'))")
    assert jumps == ["jump pos", "jump neg", "jump pos noise"]
    # ±.1 around .75: 76.5 to 46.5.
    ends = re.findall(r"^M[\d.]+,([\d.]+)V([\d.]+)", page.locator("#chart .error").first.get_attribute("d"))
    assert [float(x) for x in ends[0]] == pytest.approx([76.5, 46.5])
    bands, noise = page.locator("#chart .band"), page.locator("#chart rect.noise")
    assert noise.count() == 1 and noise.get_attribute("x") == bands.nth(2).get_attribute("x")
    # Entropy is 44 high and ends at 250: 1 of 1 is at 206, .5 at 228.
    area = page.locator("#chart .entropy").get_attribute("d")
    assert re.findall(r",([\d.]+)H", area)[1] == "206.0" and re.findall(r",([\d.]+)H", area)[8] == "228.0"
    page.locator('[data-t="6"]').hover()
    left, right = (float(page.locator("#chart .hit").get_attribute(name)) for name in ("x", "width"))
    assert float(page.locator("#chart .cursor").get_attribute("x1")) == pytest.approx(left + right * 6.5 / 10)


def test_a_formula_stands_over_its_own_tokens_between_the_words_that_share_them(page_of):
    page = page_of()
    assert page.locator(".under .t").evaluate_all("nodes => nodes.map(n => n.dataset.t)") == ["1", "2", "3"]
    assert page.locator("#text [data-of]").all_inner_texts() == [" a ", " is"]
    # The mean of 1, −2, −2 is −1, half of the scale 2.
    assert tints(page, ".formula") == [-0.5] and tints(page, ".under .t") == [0.5, -1, -1]
    # A mark stands before the token that it opens.
    after = page.locator("#text .mark").evaluate_all("nodes => nodes.map(n => n.nextSibling.dataset.t)")
    assert after == ["0", "5", "7"]


def test_masked_tokens_have_no_colour_and_moved_credit_is_centred_on_its_own_scale(page_of):
    page = page_of()
    masked = page.locator("#text .masked")
    assert masked.count() == 1 and masked.get_attribute("data-t") == "8"
    assert tints(page, '#text [data-t="8"]') == [0] and tints(page, '#text [data-t="5"]') == [-0.5]
    page.locator('input[value="moved"]').check()
    # A − .5 over 2.5: 0, .2, −1, −1, 0, −.6, −.6, −.6, masked, .2.
    shown = [tints(page, f'#text [data-t="{t}"]')[0] for t in range(10)]
    assert shown == [0, 0.2, -1, -1, 0, -0.6, -0.6, -0.6, 0, 0.2]
    bands = tints(page, "#row-0 .band")
    assert bands[:5] == [0, 0.2, -1, 0, -0.6] and bands[6] == 0.2
    assert tints(page, "#chart .band") == [0, -0.6, -0.6]
    assert "2.5" in page.locator("#scale").inner_text()


def test_labels_stand_beside_their_lines_and_the_table_says_the_same(page_of):
    page = page_of()
    labels = page.locator("#gutter .seg")
    words = [re.sub(r"\s+", " ", text) for text in labels.all_inner_texts()]
    assert words == ["1 0.50 → 0.75 +0.25 ± 0.10", "2 0.75 → 0.25 −0.50 ± 0.22", "3 0.25 → 0.38 +0.13 ± 0.20"]
    tops = labels.evaluate_all("nodes => nodes.map(n => n.getBoundingClientRect().top)")
    marks = page.locator("#text .mark").evaluate_all("nodes => nodes.map(n => n.getBoundingClientRect().top)")
    # The third opens on the second's line, so its label is pushed down.
    assert abs(tops[0] - marks[0]) < 6 and abs(tops[1] - marks[1]) < 6 and tops[2] - tops[1] == pytest.approx(26)
    table = page.locator("#segments tbody tr")
    assert table.locator("td:nth-child(2)").all_inner_texts() == ["0–4", "5–6", "7–9"]
    assert table.evaluate_all("rows => rows.map(r => r.className)") == ["", "most", ""]
    assert page.locator("#segments .hatched").count() == page.locator("#gutter .hatched").count() == 1


def test_a_law_that_does_not_hold_is_marked(page_of):
    page = page_of()
    # The trained tokens' mean is −4/9 and the base .5; increments are −.125 in all, and so is .375 − .5.
    (mean, total) = page.locator("#checks li").all_inner_texts()
    assert mean.startswith("✗ token mean of A = base: −0.4444 = 0.5000") and total.startswith("✓ Σ increments")
    assert page.locator("#checks .bad").count() == page.locator("#checks .good").count() == 1


def test_continuations_keep_their_verdicts_apart(page_of):
    page = page_of()
    items = page.locator("#pivot li")
    seen = items.evaluate_all("nodes => nodes.map(n => [n.className, n.querySelector('.verdict').textContent, "
                              "getComputedStyle(n).borderLeftStyle, n.querySelector('pre').textContent])")  # fmt: skip
    assert seen == [["correct", "✓", "solid", "same"], ["wrong", "✗", "dashed", "same"], ["correct", "✓", "solid", "x"]]
    assert "×2" in items.nth(2).inner_text() and page.locator("#pivot .tally").inner_text().count("✓") == 3
    page.locator('#chart [data-position="7"]').click()
    assert "Measured on response 1" in page.locator("#pivot").inner_text()


def test_keys_and_pointer_come_to_the_token_and_pivot_that_is_meant(page_of):
    page = page_of()
    page.locator('[data-t="0"]').focus()
    page.keyboard.press("ArrowDown")
    assert page.evaluate("state.token") == 5 and "2 of 3" in page.locator("#token").inner_text()
    page.keyboard.press("ArrowLeft")
    assert "1 of 3" in page.locator("#token").inner_text()
    page.locator('[data-t="6"]').hover()
    assert "Token 6 " in page.locator("#token").inner_text()
    page.locator("#reading").hover()
    assert "Token 4 " in page.locator("#token").inner_text()
    page.keyboard.press("End")
    page.keyboard.press("Enter")
    assert page.evaluate("state.pivot") == 7 and "before token 7" in page.locator("#pivot").inner_text()
    # Another response has pivots of its own.
    page.evaluate("go({ row: 3 })")
    until(page, "state.response.row === 3")
    assert "before token 1" in page.locator("#pivot").inner_text()
    code = page.locator("#text .t").evaluate_all("nodes => nodes.map(n => n.classList.contains('code'))")
    assert code == [False, True, False]


def test_what_was_asked_for_last_is_shown_and_its_own_chunk(page_of):
    page = page_of()
    shown = page.evaluate("""async () => {
        const kept = load;
        load = async (key) => { const found = await kept(key);
            if (key.endsWith('row-3')) await new Promise((done) => setTimeout(done, 150)); return found; };
        const late = go({ row: 3 });
        await go({ row: 4 });
        await late;
        load = kept;
        return [state.response.row, state.detail.row, $('row').value, $('text').innerText, location.hash];
    }""")
    assert shown[:3] == [4, 4, "4"] and "row 4" in shown[3] and "row=4" in shown[4]
    # A formula that ends with its token takes no other.
    assert page.locator(".under .t").evaluate_all("nodes => nodes.map(n => n.dataset.t)") == ["0"]
    # That token is masked, so neither it nor the segment that it opens has a colour.
    assert tints(page, ".formula") == [0] and tints(page, "#chart .band")[0] == 0
    # Of a group, the response whose advantage differs most along its tokens.
    page.locator("#group").select_option("0")
    until(page, "state.response.row === 0")
    page.locator("#group").select_option("1")
    until(page, "state.response.row === 4")


def test_a_page_of_some_rows_shows_each_its_own_text(page_of):
    page = page_of("", response=4, max_bytes=1)
    assert page.evaluate("state.step.responses.map(r => r.row)") == [3, 4]
    assert [page.evaluate("state.detail.row"), page.evaluate("$('row').value")] == [4, "4"]
    page.locator("#row-3").click()
    until(page, "state.response.row === 3")
    assert page.evaluate("state.detail.row") == 3 and "`c`" in page.locator("#text").inner_text()


# --- what the page is made from -----------------------------------------------------------------------------


def summary(run) -> dict:
    return StepView(run, 1).summary


def test_a_strip_says_where_each_credit_stands(handmade, segment):
    mask = [True, True, False, True]
    pieces = [segment(0, 1, 0.5, 0.5, 0.1, 0.25, 4), segment(1, 4, 0.75, 0.75, 0.1, 0.25, 4)]
    row = {"token_ids": [1, 2, 3, 4], "mask": mask, "advantage": [1.0, 1.0, 7.0, 2.0], "segments": pieces}
    long = {"token_ids": [1] * 128, "advantage": [0.0, 2.0] * 64}
    first, second = summary(handmade([row, long], settings={"n0": 0}))["responses"]
    assert [piece[:2] for piece in first["strip"]] == [[0, 2], [2, 3], [3, 4]]
    assert first["strip"][0][2] == 1.0 and not first["strip"][1][2] and first["strip"][2][2] == 2.0
    assert second["strip"] == [[2 * k, 2 * k + 2, 1.0] for k in range(64)]
    # A state that was sampled before the first token splits nothing.
    assert first["pivots"] == 1 and first["values"] == [[0, 0.5, 0.1, 4], [1, 0.75, 0.1, 4]]


def test_colours_saturate_at_the_99th_percentile(handmade):
    # ⌈.99·200⌉ = 198.
    run = handmade([{"token_ids": [1] * 200, "advantage": [float(k) for k in range(200, 0, -1)], "base": 1.0}])
    assert summary(run)["scale"] == {"advantage": 198.0, "moved": 197.0}
    assert column([1.0, 1.0, 2.0, None, 2.0, 1.0]) == [1.0, 1.0, 2.0, None, 2.0, 1.0]


def test_a_difference_of_half_a_percent_is_no_tie(handmade):
    rows = [{"token_ids": [1, 2], "reward": r, "advantage": [0.0, 1.0]} for r in (0.5, 0.505)]
    view = summary(handmade(rows))
    assert not view["groups"][0]["collapsed"] and start_row(view, None) == 0


def test_what_has_no_error_is_no_noise_and_a_snippet_begins_with_the_text(handmade, segment):
    pieces = [segment(0, 1, 0.5, 0.5, 0.0, 0.0, 4), segment(1, 2, 0.5, 0.5, 0.0, 0.5, 4)]
    run = handmade([{"token_ids": [1, 2], "text": "xyab", "char_start": [2, 3], "segments": pieces}])
    first, second = StepView(run, 1).detail(0)["segments"]
    assert first["noise"] is False and first["snippet"] == "xya" and second["snippet"] == "b"


def told(increments, reward=0.5, mean=0.5, spread=0.5, before=0.5):
    """The reading of a response of segments with these increments, each with the standard error `spread`."""
    response = {"reward": reward, "mean": mean, "base": 0.0, "spread": 1.0, "low": 0.0, "high": 1.0}
    pieces = [
        {"before": None if x is None else before, "after": 0.5, "raw": 0.5, "increment": x, "increment_stderr": spread,
         "samples": 4, "chance": [0.1, 0.9], "snippet": f"piece {k}"}
        for k, x in enumerate(increments)
    ]  # fmt: skip
    return reading(response, pieces, False)


def test_the_reading_counts_every_segment_and_says_how_sure_it_is():
    assert "won in segment 3, “piece 2”" in told([None, -0.5, 0.25])
    assert "lost in segment 2, “piece 1”" in told([None, -0.5, 0.25], reward=0.25)
    assert "within one standard error" in told([0.5, 0.0]) and "likely real" in told([1.25, 0.0])
    assert "1.5 standard errors, weak evidence" in told([0.75, 0.0]) and "likely real" in told([1.0, 0.0])


def test_one_line_ends_in_an_ellipsis_and_does_not_act():
    assert one_line("abcdefgh", 5) == "abcd…" and one_line("a\n \tb", 5) == "a b" and one_line("abcde", 5) == "abcde"
    assert one_line("a\u202eb\x1b", 9) == "a⟨U+202E⟩b␛"


def test_a_page_that_cannot_be_replaced_stays_as_it_was(handmade, tmp_path, monkeypatch):
    run, out = handmade([{"token_ids": [1]}]), tmp_path / "page.html"
    out.write_text("former")

    def refuse(*_):
        raise PermissionError(13, "refused")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(InputError, match="refused"):
        write_page(run.path, out)
    assert out.read_text() == "former"


def test_a_step_recorded_again_in_as_many_bytes_is_read_again(handmade):
    run = handmade([{"token_ids": [1, 2]}])
    site, file = Site(run), run.path / "credit" / "step-000001.parquet"
    assert site.step(1) is site.step(1)
    before = site.step(1)
    os.utime(file, ns=(1, 1))
    assert site.step(1) is not before
