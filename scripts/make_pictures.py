"""Writes docs/page-VIEW.png, the pictures of the page in README and docs, from the runs of a demo.

    make pictures        trains them, compares methods on one, and runs this: python scripts/make_pictures.py FOLDER

Needs chromium and Playwright's Python package.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

from apportion.records import RunFolder
from apportion.report import read_page, write_page

DOCS = Path(__file__).parents[1] / "docs"
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking"]
# View, whether dark, and the height that is shown of it.
PICTURES = {"response": (False, 1180), "group": (False, 1060), "methods": (True, 1180), "run": (False, 1100)}


def main(demo: Path) -> None:
    runs = sorted(path.parent for path in demo.glob("*/metrics.jsonl"))
    shown = demo / "probepo-0"
    page_file = write_page(shown, demo / "page.html", beside=[RunFolder(run) for run in runs if run != shown])
    data = read_page(page_file)
    start, step = (data["index"]["start"][name] for name in ("row", "step"))
    # A response with many pivots; the others show what the page opens at.
    rows = {"response": max(data[f"step-{step}"]["responses"], key=lambda r: (r["pivots"], r["spread"]))["row"]}
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=FLAGS)
        for view, (dark, height) in PICTURES.items():
            page = browser.new_page(
                viewport={"width": 1400, "height": height}, color_scheme="dark" if dark else "light"
            )  # fmt: skip
            page.goto(f"{page_file.resolve().as_uri()}#view={view}&row={rows.get(view, start)}")
            page.locator(f"body[data-view={view}]").wait_for()
            page.wait_for_timeout(500)  # what is drawn as it comes into sight
            page.screenshot(path=DOCS / f"page-{view}.png")
            page.close()
        browser.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
