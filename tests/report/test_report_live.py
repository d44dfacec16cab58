"""A page that is served while its run goes on, in a real browser: what is new comes, and the reader stays."""

from __future__ import annotations

import shutil
import threading
import time

import pytest
from synthetic import write_run
from test_report_browser import until

from apportion.report.page import render_live
from apportion.report.serve import Guarded, OwnFiles, Server
from apportion.report.site import Site


@pytest.fixture
def growing(tmp_path):
    """A served run of three steps, of which the last two come when `grow` is called."""
    whole = write_run(tmp_path / "whole", steps=3, prompts=3, group=8, logged=12)
    first, *later = whole.steps()
    run = tmp_path / "run"
    run.mkdir()
    shutil.copy(whole.path / "config.toml", run)

    def grow(step: int) -> None:
        lines = (whole.path / "metrics.jsonl").read_text().splitlines(keepends=True)
        with (run / "metrics.jsonl").open("a") as file:
            file.writelines(line for line in lines if f'"step": {step},' in line)
        for kind in ("rollouts", "evidence", "credit"):
            (run / kind).mkdir(exist_ok=True)
            shutil.copy(whole.path / kind / f"step-{step:06d}.parquet", run / kind)

    folder = OwnFiles(run)
    site = Site(folder, live=True)
    with Server(Guarded(site, folder), render_live(site)) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server.url, grow, [first, *later]
        server.shutdown()


PLACE = """() => ({ view: state.view, step: state.step.step, row: state.response.row, token: state.token,
    scroll: Math.round(scrollY), focus: document.activeElement.dataset.t, tint: state.tint,
    open: [...document.querySelectorAll('details')].map(d => d.open), chosen: document.getElementById('step').value,
    selected: String(getSelection()) })"""


def test_a_new_step_comes_and_the_reader_stays(growing, opened):
    url, grow, (first, second, third) = growing
    grow(first)
    page = opened(url)
    until(page, "state.detail !== null")
    page.evaluate("go({ row: 9 })")
    until(page, "state.response.row === 9")
    page.locator(".prompt summary").click()
    page.locator('input[value="moved"]').check()
    page.locator('[data-t="20"]').click()
    page.evaluate("scrollTo(0, 300)")
    page.evaluate("getSelection().selectAllChildren(document.getElementById('reading'))")
    before = page.evaluate(PLACE)
    assert before["token"] == 20 and before["focus"] == "20" and before["selected"] and any(before["open"])
    grow(second)
    until(page, f"index.steps.includes({second})")
    time.sleep(0.2)
    assert page.evaluate(PLACE) == before
    assert page.locator(f'#step option[value="{second}"]').count() == 1
    assert f"step {second} recorded" in page.locator("#live").inner_text()
    # The new step can be gone to, and followed where that is asked for.
    page.locator("#step").select_option(str(second))
    until(page, f"state.step.step === {second}")
    page.get_by_label("follow the newest step").check()
    grow(third)
    until(page, f"state.step.step === {third}")


def test_the_run_view_grows_and_keeps_what_is_open(growing, opened):
    url, grow, (first, second, _) = growing
    grow(first)
    page = opened(url, "#view=run")
    until(page, "state.view === 'run' && state.detail !== null")
    page.locator("#view-run details summary").first.click()
    page.locator("#view-run input[type=radio]").nth(1).check()
    before = page.evaluate("[...document.querySelectorAll('#view-run details')].map(d => d.open)")
    assert any(before)
    grow(second)
    until(page, f"index.steps.includes({second})")
    time.sleep(0.2)
    after = page.evaluate("[...document.querySelectorAll('#view-run details')].map(d => d.open)")
    assert after[: len(before)] == before
    assert page.locator("#view-run input[type=radio]").nth(1).is_checked()


def test_a_run_yet_to_come_fills_its_page(growing, opened):
    url, grow, (first, *_) = growing
    page = opened(url, ready="#notice:not([hidden])")
    assert "Waiting for the first recorded step" in page.locator("#notice").inner_text()
    grow(first)
    until(page, "state.detail !== null")
    assert page.locator("#notice").is_hidden() and page.locator("#text .t").count() > 50
