"""What the page costs: bytes, seconds to write and to open, and frames while scrolling, in a real Chromium.

2,000 responses of 2,000 tokens, and one response of 32,768. `plain` is the same data as one JSON text that a page
parses when it opens. Needs chromium and Playwright's Python package.
"""

from __future__ import annotations

import argparse
import base64
import gzip
import json
import random
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import tools
from apportion.records import RunFolder
from apportion.report import write_page

WORDS = ("the", "of", "and", "to", "we", "so", "that", "since", "value", "number", "each", "total", "equation", "gives")
FORMULAS = ("$x^2+3x-4=0$", "\\(\\frac{a}{b}\\)", "$\\sqrt{2}$", "$a_{12}$", "\\boxed{42}")
SEGMENTS, SAMPLES, GROUP = 6, 8, 8
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-sync",
]
DRAWN = "document.querySelectorAll('#text .t').length > 100"
SCROLL = """async () => {
    const times = [], end = performance.now() + 2000;
    window.scrollTo(0, 0);
    for (let last = performance.now(), now = last; now < end; last = now) {
        await new Promise(requestAnimationFrame);
        window.scrollBy(0, 80);
        now = performance.now();
        times.push(now - last);
    }
    return times.sort((a, b) => a - b);
}"""


def text_of(rng: random.Random, length: int) -> tuple[list[int], list[int], str]:
    """Token ids, where each starts, and the text: words, formulas in pieces, paragraphs."""
    pieces: list[str] = []
    while len(pieces) < length - 1:
        if rng.random() < 0.03:
            formula = rng.choice(FORMULAS)
            pieces += [" ", *(formula[k : k + 2] for k in range(0, len(formula), 2))]
        else:
            pieces.append(f" {rng.choice(WORDS)}")
        pieces += ["."] * (rng.random() < 0.06) + ["\n\n"] * (rng.random() < 0.02)
    pieces = pieces[: length - 1]
    known = {piece: k for k, piece in enumerate(sorted(set(pieces)))}
    starts = [0]
    for piece in pieces:
        starts.append(starts[-1] + len(piece))
    return [*(1000 + 97 * known[piece] % 50_000 for piece in pieces), 2], starts, "".join(pieces)


def write_run(folder: Path, responses: int, length: int) -> RunFolder:
    """One recorded step; a few dozen texts, each with numbers of its own wherever it is repeated."""
    rng, run = random.Random(0), RunFolder(folder)
    texts = [text_of(rng, length) for _ in range(min(responses, 32))]
    rollouts, credit, evidence = [], [], []
    for i in range(responses):
        ids, starts, text = texts[i % len(texts)]
        reward, group = float(rng.random() < 0.5), f"prompt-{i // GROUP}"
        entropy = [rng.expovariate(3) if rng.random() < 0.2 else 0.02 * rng.random() for _ in ids]
        edges = [0, *sorted(rng.sample(range(20, length - 20), SEGMENTS - 1)), length]
        values = [0.5, *(rng.random() for _ in edges[1:-1]), reward]
        parts = [rng.gauss(0, 1) for _ in edges[1:]]
        advantage = [a for a, p, q in zip(parts, edges, edges[1:], strict=False) for _ in range(q - p)]
        base = sum(advantage) / length
        rollouts.append(
            {
                "row": i, "group": group, "sample": i % GROUP, "prompt": "Solve the problem. " * 20, "gold": "42",
                "prompt_ids": [1, 2], "token_ids": ids, "mask": [True] * length, "text": text, "char_start": starts,
                "reward": reward, "verdict": "correct" if reward else "wrong", "finish": "stop",
                "old_logprob": [-h * rng.random() for h in entropy], "entropy": entropy,
            }
        )  # fmt: skip
        segments = [
            {"start": p, "end": q, "raw": v, "shrunk": v, "stderr": 0.1 * (k > 0), "increment": w - v,
             "samples": SAMPLES * (k > 0)}
            for k, (p, q, v, w) in enumerate(zip(edges, edges[1:], values, values[1:], strict=False))
        ]  # fmt: skip
        evidence += [
            {"key": f"{i}/{p}/{m}", "kind": "continuations", "group": group, "row": i, "position": p, "m": m,
             "token_ids": ids[p : p + 40], "text": text[starts[p] : starts[p] + 160], "reward": float(m % 2),
             "verdict": "correct" if m % 2 else "wrong", "finish": "stop", "rescued": False}
            for p in edges[1:-1] for m in range(SAMPLES)
        ]  # fmt: skip
        credit.append(
            {
                "row": i, "advantage": advantage, "base": base, "mean": 0.5, "scale": 0.5,
                "residual": [a - base for a in advantage], "segments": segments, "method": "probepo",
                "settings": json.dumps({"n0": 0.0, "budget": 320, "samples": SAMPLES}),
                "invariants": "{}", "counts": "{}",
            }
        )  # fmt: skip
    run.log({"step": 1, "reward": 0.5})
    for kind, rows in (("rollouts", rollouts), ("evidence", evidence), ("credit", credit)):
        run.write(kind, 1, rows)
    return run


def plain_page(page: Path, out: Path) -> int:
    """The chunks of a page as one JSON text, parsed at once; returns its size."""
    marks = '<script type="application/gzip" id="'
    parts = page.read_text(encoding="utf-8").split(marks)[1:]
    texts = [gzip.decompress(base64.b64decode(part.split(">", 1)[1].split("<", 1)[0])).decode() for part in parts]
    data = json.dumps([json.loads(text) for text in texts]).replace("<", "\\u003c")
    code = "window.data = JSON.parse(document.getElementById('d').textContent);"
    out.write_text(f'<script type="application/json" id="d">{data}</script><script>{code}</script>')
    return out.stat().st_size


def until(page: Any, condition: str) -> None:
    while not page.evaluate(condition):
        time.sleep(0.005)


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def opening(browser: Any, address: str, ready: str) -> tuple[float, Any]:
    """Seconds from the request to `ready`, and the page."""
    page = browser.new_page(viewport={"width": 1400, "height": 1000})
    start = time.perf_counter()
    page.goto(address, wait_until="commit")
    until(page, ready)
    return time.perf_counter() - start, page


def scrolled(page: Any) -> dict[str, float]:
    times = page.evaluate(SCROLL)
    return {
        "frames": len(times), "median_ms": round(median(times), 1),
        "p95_ms": round(times[int(0.95 * len(times))], 1), "longest_ms": round(times[-1], 1),
    }  # fmt: skip


def measure(folder: Path, responses: int, length: int, rounds: int) -> dict[str, Any]:
    from playwright.sync_api import sync_playwright

    run, page_file, plain = write_run(folder / "run", responses, length), folder / "page.html", folder / "plain.html"
    written = seconds(lambda: write_page(run.path, page_file))
    size, plain_size = page_file.stat().st_size, plain_page(page_file, plain)
    long_file = write_page(write_run(folder / "long", 1, 32_768).path, folder / "long.html")
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=FLAGS)
        opened: dict[str, list[float]] = {"page": [], "plain": [], "long": []}
        loaded, switched, frames, long_frames = [], [], {}, {}
        for _ in range(rounds):
            taken, page = opening(browser, page_file.as_uri(), DRAWN)
            opened["page"].append(taken)
            page.wait_for_load_state("load")
            loaded.append(page.evaluate("performance.getEntriesByType('navigation')[0].loadEventEnd") / 1000)
            row = responses - GROUP
            switched.append(seconds(lambda page=page, row=row: page.evaluate(f"go({{ row: {row} }})")))
            frames = scrolled(page)
            page.close()
            taken, page = opening(browser, plain.as_uri(), "window.data !== undefined")
            opened["plain"].append(taken)
            page.close()
            taken, page = opening(browser, long_file.as_uri(), DRAWN)
            opened["long"].append(taken)
            long_frames = scrolled(page)
            page.close()
        version = browser.version
        browser.close()
    return {
        "browser": version, "responses": responses, "tokens": length,
        "megabytes": round(size / 1e6, 1), "bytes_per_token": round(size / responses / length, 2),
        "size_over_plain": round(size / plain_size, 3), "seconds_to_write": round(written, 1),
        "seconds_to_first_text": [round(x, 2) for x in opened["page"]],
        "seconds_to_all_read": [round(x, 2) for x in loaded],
        "opening_over_plain": tools.ratio(opened, "page", "plain"),
        "seconds_to_another_response": [round(x, 3) for x in switched], "scrolling": frames,
        "response_of_32768": {"seconds_to_first_text": [round(x, 2) for x in opened["long"]], "scrolling": long_frames},
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--responses", type=int, default=2_000)
    parser.add_argument("--tokens", type=int, default=2_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("-o", "--output", type=Path)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder), asked.responses, asked.tokens, asked.rounds)
    tools.write(__file__, found, asked.output)


if __name__ == "__main__":
    main()
