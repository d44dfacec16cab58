"""What broke the credit page once: numbers that are none, odd segments, a click before the page is whole."""

from __future__ import annotations

import http.server
import random
import re
import threading

import pytest
from test_report_browser import until

from apportion.errors import InputError
from apportion.report import read_page, write_page

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("odd", [[NAN, 1.0, 0.0], [NAN] * 3, [INF, -INF, 0.0], [1e30, 0.0, 0.0]])
def test_a_diverged_step_opens_and_no_law_of_it_holds(handmade, segment, opened, tmp_path, odd):
    pieces = [segment(0, 1, 0.5, 0.5, 0.1, NAN, 4), segment(1, 3, 0.5, 0.5, 0.1, 1e30, 4)]
    row = {"token_ids": [1, 2, 3], "advantage": odd, "segments": pieces, "mean": NAN}
    run = handmade([row, {"token_ids": [1], "reward": 0.0}], invariants={"conserved": NAN, "telescoping": INF})
    page = opened(write_page(run.path, tmp_path / "page.html"), "#row=0")
    assert page.locator("#invariants .good").count() == 0 and page.locator("#invariants .bad").count() == 2
    assert page.locator("#checks .good").count() == 0


def test_segments_that_open_at_one_token_are_drawn(handmade, segment, opened, tmp_path):
    pieces = [
        segment(0, 2, 0.5, 0.5, 0, 0.1, 0),
        segment(2, 4, 0.6, 0.6, 0.1, -2.0, 4),
        segment(2, 4, -1.4, -1.4, 0, 2.4, 0),
    ]
    page = opened(
        write_page(handmade([{"token_ids": [1, 2, 3, 4], "segments": pieces}], invariants={}).path, tmp_path / "p.html")
    )
    assert page.locator("#gutter .seg").count() >= 2 and page.locator("#segments tbody tr").count() == 3
    ends = page.locator("#chart .jump").evaluate_all("nodes => nodes.map(n => Number(n.getAttribute('y2')))")
    assert all(24 <= y <= 174 for y in ends)


def test_one_token_is_in_the_tab_order_after_a_click(handmade, opened, tmp_path):
    row = {"token_ids": [1, 2, 3], "text": "abc", "char_start": [0, 1, 2], "old_logprob": [NAN, -1.0, -1.0]}
    page = opened(write_page(handmade([row]).path, tmp_path / "p.html"))
    assert "p 1.000" not in page.locator("#token").inner_text()
    page.locator('[data-t="2"]').click()
    page.keyboard.press("ArrowLeft")
    tabs = page.locator('#text .t[tabindex="0"]').evaluate_all("nodes => nodes.map(n => n.dataset.t)")
    assert tabs == ["1"]


def test_masked_tokens_have_no_colour_in_the_list_either(handmade, opened, tmp_path):
    row = {"token_ids": [1, 2, 3], "mask": [True, False, True], "advantage": [1.0, 0.0, 1.0], "base": 1.0}
    page = opened(write_page(handmade([row]).path, tmp_path / "p.html"))
    page.locator('input[value="moved"]').check()
    shown = page.locator("#row-0 .band").evaluate_all("nodes => nodes.map(n => n.style.getPropertyValue('--a'))")
    assert set(shown) == {"0.000"}


@pytest.mark.parametrize("view", ["constructor", "__proto__", "toString"])
def test_an_address_of_no_view_opens_the_response(handmade, opened, tmp_path, view):
    page = opened(write_page(handmade([{"token_ids": [1]}]).path, tmp_path / "p.html"), f"#view={view}")
    assert page.evaluate("state.view") == "response"


@pytest.mark.parametrize(
    "tex", ["+".join(f"x_{k}" for k in range(120)), "\\rlap{" + "R" * 200 + "}", "\\raisebox{9em}{up}"]
)
def test_a_formula_stays_in_its_column(handmade, opened, tmp_path, tex):
    text = f"so ${tex}$ then"
    row = {"token_ids": [1, 2], "text": text, "char_start": [0, 3]}
    page = opened(write_page(handmade([row]).path, tmp_path / "p.html"))
    assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    assert page.locator(".formula").evaluate("n => getComputedStyle(n).overflowX") == "auto"


@pytest.mark.parametrize(
    "tex", ["\\color{white} x", "\\colorbox{blue}{x}", "\\fcolorbox{red}{blue}{x}", "\\pmb{x}", "\\textcolor{white}{x}"]
)
def test_a_formula_brings_no_colour_of_its_own(handmade, opened, tmp_path, tex):
    row = {"token_ids": [1], "text": f"${tex}$", "char_start": [0]}
    page = opened(write_page(handmade([row]).path, tmp_path / "p.html"))
    assert page.locator("#text math").count() == 1
    assert page.locator("#text [mathcolor], #text [mathbackground], #text math [style]").count() == 0


@pytest.mark.parametrize("piece", ["word ", "\n", "\u05e9"])
def test_32k_tokens_of_one_kind_are_laid_at_once(handmade, opened, tmp_path, piece):
    n = 32_768
    starts = [k * len(piece) for k in range(n)]
    row = {"token_ids": [1] * n, "text": piece * n, "char_start": starts, "advantage": [0.5] * n}
    page = opened(write_page(handmade([row]).path, tmp_path / "p.html"))
    assert page.locator("#text .t").count() < 8_000
    assert page.locator("#text[dir]").count() == 0


def test_a_page_without_one_of_its_rows_is_refused(run, tmp_path):
    out = write_page(run.path, tmp_path / "p.html", step=run.steps()[0])
    html = out.read_text(encoding="utf-8")
    out.write_text(
        html[: [m.start() for m in re.finditer('<script type="application/gzip"', html)][9]], encoding="utf-8"
    )
    with pytest.raises(InputError, match="without step-"):
        read_page(out)


def test_a_place_that_is_a_folder_leaves_nothing_behind(run, tmp_path):
    (tmp_path / "p.html").mkdir()
    with pytest.raises(InputError, match="out"):
        write_page(run.path, tmp_path / "p.html")
    assert [path.name for path in tmp_path.iterdir()] == ["p.html"]


def test_a_row_whose_chunk_is_half_there_is_waited_for(handmade, chromium, tmp_path):
    letters = random.Random(0)
    rows = [{"token_ids": [1, 2], "advantage": [0.0, 1.0]}]
    rows += [{"token_ids": [1] * 100, "group": "h", "text": "".join(letters.choices("abcdefgh", k=20_000)),
              "char_start": list(range(0, 20_000, 200))} for _ in range(2)]  # fmt: skip
    data = write_page(handmade(rows).path, tmp_path / "p.html").read_bytes()
    cut, rest = data.index(b'id="step-1-row-1"') + 4000, threading.Event()

    class Slow(http.server.BaseHTTPRequestHandler):
        def log_message(self, *_):
            pass

        def do_GET(self):
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data[:cut])
            self.wfile.flush()
            rest.wait(10)
            self.wfile.write(data[cut:])

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Slow) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        page = chromium.new_page()
        page.goto(f"http://127.0.0.1:{server.server_port}/", wait_until="commit")
        until(page, "document.getElementById('step-1-row-1')?.textContent.length > 2000")
        page.evaluate("void go({ row: 1 }).catch(failed)")
        page.wait_for_timeout(100)
        rest.set()
        until(page, "state.response?.row === 1")
        page.close()
        server.shutdown()
