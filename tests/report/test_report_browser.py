"""The page in a real browser, where one is installed: it draws without an error, and hostile text does nothing."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from test_report_page import HOSTILE, Page

from apportion.report import write_page

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on PATH to open the page with")


def opened(page: Path, profile: Path) -> tuple[str, list[str]]:
    """The document after its script ran, and what the browser wrote to the console."""
    done = subprocess.run(
        [
            str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
            "--disable-background-networking", "--disable-component-update", "--disable-sync",
            f"--user-data-dir={profile}", "--virtual-time-budget=3000", "--enable-logging=stderr", "--dump-dom",
            page.as_uri(),
        ],
        capture_output=True, text=True, timeout=90, check=True,
    )  # fmt: skip
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def test_a_real_run_draws_without_a_console_message(run, tmp_path):
    dom, console = opened(write_page(run.path, tmp_path / "page.html"), tmp_path / "profile")
    assert console == []
    page = Page(dom)
    classes = [(attrs.get("class") or "").split() for _, attrs in page.elements]
    assert sum("bracket" in c for c in classes) >= 2 and sum("pivot-mark" in c for c in classes) >= 1
    assert sum(c[:1] == ["row"] and "head" not in c for c in classes) == 8
    assert sum(attrs.get("id", "")[:1] == "t" and attrs["id"][1:].isdigit() for _, attrs in page.elements) == 76


def test_hostile_text_is_shown_and_never_run(handmade, tmp_path):
    rows = [{"token_ids": [1], "text": t, "char_start": [0], "prompt": t, "gold": t} for t in [" ".join(HOSTILE)]]
    run = handmade(rows, metrics={HOSTILE[0]: 1.0}, counts={HOSTILE[1]: 2}, invariants={HOSTILE[1]: 1.0})
    dom, console = opened(write_page(run.path, tmp_path / "page.html"), tmp_path / "profile")
    assert console == []
    page = Page(dom)
    assert [attrs.get("type") for tag, attrs in page.elements if tag == "script"] == ["application/json", None]
    assert not [tag for tag, _ in page.elements if tag == "img"] and page.title == "Credit of run"
    assert "⟨U+202E⟩evil" in dom and "␛[31mred" in dom
