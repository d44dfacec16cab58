"""One realistic run for the whole folder; a run of hand-made rows for exact numbers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from synthetic import write_run

from apportion.records import RunFolder


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return write_run(tmp_path_factory.mktemp("runs") / "chain-7", steps=3, prompts=3, group=8, logged=12)


@pytest.fixture
def handmade(tmp_path: Path) -> Callable[..., RunFolder]:
    """Writes a run of one step from rows that hold only what a test cares about."""

    def write(
        responses: Sequence[Mapping[str, Any]],
        evidence: Sequence[Mapping[str, Any]] = (),
        name: str = "run",
        metrics: Mapping[str, Any] | None = None,
        **credit: Any,
    ) -> RunFolder:
        folder = RunFolder(tmp_path / name)
        folder.log({"step": 1, "reward": 0.5, **(metrics or {})})
        rollouts, credits = [], []
        for i, given in enumerate(responses):
            n = len(given["token_ids"])
            row = {
                "row": i, "group": "g", "sample": i, "prompt": "p", "gold": "1", "mask": [True] * n,
                "finish": "stop", "verdict": "correct", "reward": 1.0, **given,
            }  # fmt: skip
            shared = {
                "method": "probepo",
                "settings": '{"n0": 4}',
                "invariants": '{"conserved": 0.0, "telescoping": 0.0}',
            }
            credits.append(
                {
                    "row": i, "base": 0.0, "mean": 0.5, "scale": 0.5, "advantage": [0.0] * n, "segments": [],
                    "counts": "{}", **shared, **{k: json.dumps(v) for k, v in credit.items()},
                    **{k: given[k] for k in ("advantage", "base", "mean", "segments") if k in given},
                }
            )  # fmt: skip
            rollouts.append(row)
        folder.write("rollouts", 1, rollouts)
        folder.write("evidence", 1, evidence)
        folder.write("credit", 1, credits)
        return folder

    return write


@pytest.fixture
def segment() -> Callable[..., dict[str, float]]:
    def make(start: int, end: int, raw: float, shrunk: float, stderr: float, increment: float, samples: int) -> Any:
        return {
            "start": start, "end": end, "raw": raw, "shrunk": shrunk, "stderr": stderr,
            "increment": increment, "samples": samples,
        }  # fmt: skip

    return make


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
# Without the last four a start asks for updates and looks for hosts that are none of this page's.
FLAGS = (
    "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--disable-quic", "--disable-sync",
    "--disable-background-networking", "--disable-component-update",
)  # fmt: skip


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """A real browser, driven by Playwright.

    No longer than a module: Playwright keeps an event loop running in this thread, and tests elsewhere start their own.
    """
    playwright = pytest.importorskip("playwright.sync_api", reason="Playwright's Python package is not installed")
    if CHROMIUM is None:
        pytest.skip("no chromium on PATH to open the page with")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        yield browser
        browser.close()


class Opened:
    """A page that was opened, and everything it did that a page of ours must not: `faults`."""

    def __init__(self, browser: Any, allowed: str, **options: Any) -> None:
        self.context = browser.new_context(**{"viewport": {"width": 1400, "height": 1000}, **options})
        self.page = self.context.new_page()
        self.page.set_default_timeout(20_000)
        self.faults: list[str] = []
        self.page.on("console", lambda m: self.faults.append(f"console: {m.text}"))
        self.page.on("pageerror", lambda e: self.faults.append(f"error: {e}"))
        self.page.on("dialog", lambda d: (self.faults.append(f"dialog: {d.message}"), d.dismiss()))
        self.page.on("request", lambda r: r.url.startswith(allowed) or self.faults.append(f"request: {r.url}"))
        self.page.on("popup", lambda p: self.faults.append(f"window: {p.url}"))

    def go(self, address: str, ready: str) -> Any:
        self.page.goto(address)
        self.page.locator(ready).wait_for()
        return self.page


@pytest.fixture
def opened(chromium: Any) -> Iterator[Callable[..., Any]]:
    """Opens a page file, or an address, and fails the test where it logs, asks for or opens anything."""
    all_of_them: list[Opened] = []

    def open_it(where: Path | str, fragment: str = "", ready: str = "body[data-view]", **options: Any) -> Any:
        address = where.as_uri() if isinstance(where, Path) else where
        all_of_them.append(Opened(chromium, address.partition("#")[0], **options))
        return all_of_them[-1].go(address + fragment, ready)

    yield open_it
    for each in all_of_them:
        each.context.close()
    assert [fault for each in all_of_them for fault in each.faults] == []
