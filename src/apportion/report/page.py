"""Writes the page: picks what fits, embeds it compressed and inert, inlines style and script under a strict CSP."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from apportion.errors import InputError
from apportion.report.escape import embeddable_json
from apportion.report.site import Site, start_row
from apportion.report.source import Source, open_source
from apportion.report.view import StepView

MAX_STEPS, MAX_BYTES = 8, 100_000_000
_LEVEL = 6  # of gzip; 9 takes twice as long for two percent

SCRIPTS = (
    "dom.js", "charts.js", "load.js", "scan.js", "text.js", "response.js", "details.js", "group.js", "methods.js",
    "plot.js", "run.js", "page.js",
)  # fmt: skip
STYLES = ("page.css", "response.css", "group.css", "methods.css", "run.css")
VENDORED = ("vendor/katex.min.js",)

Chunks = dict[str, bytes]
Progress = Callable[[str, int, int], None]


def write_page(
    run: Path | Source | Site,
    out: Path,
    *,
    step: int | None = None,
    response: int | None = None,
    view: str = "response",
    beside: Sequence[Source] = (),
    max_steps: int = MAX_STEPS,
    max_bytes: int = MAX_BYTES,
    progress: Progress = lambda words, done, of: None,
) -> Path:
    """Writes one HTML file that shows where a run's credit went; it opens from disk and asks for nothing.

    Args:
        run: a run folder, or records of another trainer (see source.py); a `Site` that was asked before keeps what it
            has read, and has its own `beside`.
        out: the file to write; replaced as a whole.
        step: the only step to embed; the last `max_steps` where left out.
        response: row that the page opens at, in `step` or the last one; the most instructive where left out.
        view: that the page opens at: response, group, methods or run.
        beside: runs whose learning curves are drawn beside.
        max_bytes: budget of the embedded responses, compressed; the most instructive groups come first, and the page
            says what was left out.
        progress: called with a step's name, its responses embedded so far, and how many there are.

    Raises:
        InputError: no such run, step or row, or `out` cannot be written.
    """
    site = run if isinstance(run, Site) else Site(open_source(run) if isinstance(run, Path) else run, beside)
    index, chunks = pack(site, step, response, max_steps, max_bytes, progress, view)
    partial = out.with_name(out.name + ".part")
    try:
        partial.write_text(render(index, chunks), encoding="utf-8", newline="\n")
        os.replace(partial, out)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise InputError(
            "out", f"{out}: {error.strerror}", "a file that can be written in a folder that exists"
        ) from None
    return out


def pack(
    site: Site,
    step: int | None,
    response: int | None,
    max_steps: int,
    max_bytes: int,
    progress: Progress = lambda words, done, of: None,
    opens: str = "response",
) -> tuple[dict[str, Any], Chunks]:
    """The index of a page and its chunks, compressed, by key.

    Raises:
        InputError: no such step or row.
    """
    recorded = find_steps(site.source, step)
    chosen = recorded[-max_steps:]
    shown: dict[int, list[int]] = {}
    extreme: list[dict[str, Any]] = []
    left_out: list[str] = []
    chunks: Chunks = {}
    start: dict[str, Any] = {}
    for number in reversed(chosen):
        view = site.step(number)
        if not start:
            start = {"step": number, "row": start_row(view.summary, response), "view": opens}
        # The last step always shows a group, however large; an earlier one only what there is room for.
        room = max_bytes - sum(map(len, chunks.values()))
        rows, found = _fitting(view, room, start["row"] if not shown else None, progress)
        total = len(view.rollouts)
        if len(rows) < total:
            left_out.append(f"{total - len(rows)} of {total} responses of step {number}")
        if rows or not shown:
            shown[number] = rows
            extreme += site.extremes(number, set(rows))
            chunks |= found
            chunks[f"step-{number}"] = _packed(_only(view.summary, set(rows)))
    if earlier := recorded[:-max_steps]:
        span = f"{earlier[0]}" if len(earlier) == 1 else f"{earlier[0]}–{earlier[-1]}"
        left_out.append(f"{len(earlier)} earlier recorded step{'s' * (len(earlier) > 1)} ({span})")
    index = site.index(sorted(shown), start, extreme, left_out)
    if (compared := site.compared) and compared.step in shown:
        keys = compared.keys(shown[compared.step])
        chunks |= {key: _packed(compared.chunk(key)) for key in keys}
    return index, chunks


def find_steps(source: Source, step: int | None) -> list[int]:
    """The recorded steps, or the one asked for.

    Raises:
        InputError: the run has no record of credit, or none of that step.
    """
    steps = source.recorded_steps()
    if step is None:
        return steps
    if step not in steps:
        raise InputError("step", step, f"a recorded step: {steps[0]} to {steps[-1]}, {len(steps)} in all")
    return [step]


def _fitting(view: StepView, room: int, first: int | None, progress: Progress) -> tuple[list[int], Chunks]:
    """Whole groups, the most instructive first, until the next would not fit; that of row `first` always."""
    responses = view.summary["responses"]
    members: dict[int, list[int]] = {}
    best: dict[int, float] = {}
    for r in responses:
        members.setdefault(r["group"], []).append(r["row"])
        best[r["group"]] = max(best.get(r["group"], 0.0), r["spread"])
    opens = next((r["group"] for r in responses if r["row"] == first), None)
    kept: list[int] = []
    chunks: Chunks = {}
    for group in sorted(best, key=lambda g: (g != opens, -best[g], g)):
        found = {f"step-{view.step}-row-{row}": _packed(view.detail(row)) for row in members[group]}
        size = sum(map(len, found.values()))
        if size > room and group != opens:
            break
        room -= size
        chunks |= found
        kept += members[group]
        progress(f"step {view.step}", len(kept), len(responses))
    return sorted(kept), chunks


def _only(summary: Mapping[str, Any], rows: set[int]) -> dict[str, Any]:
    """A step's summary with some of its responses; groups without any stay, so that their numbers hold."""
    groups = [{**g, "rows": [row for row in g["rows"] if row in rows]} for g in summary["groups"]]
    return {**summary, "groups": groups, "responses": [r for r in summary["responses"] if r["row"] in rows]}


def _packed(value: Mapping[str, Any]) -> bytes:
    """JSON, gzipped, in base64; the same bytes for the same value."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return base64.b64encode(gzip.compress(text.encode(), _LEVEL, mtime=0))


def render(index: Mapping[str, Any], chunks: Mapping[str, bytes]) -> str:
    """The page as text. Everything but our own style and scripts is escaped."""
    # What the page opens at stands before the scripts, so that it is seen while the rest is still being read.
    step, row = index["start"]["step"], index["start"]["row"]
    opens = (f"step-{step}", f"step-{step}-row-{row}")
    parts = {key: Markup(chunk.decode("ascii")) for key, chunk in chunks.items()}
    return _html(
        title=f"Credit of {index['name']}", connect="'none'", index=Markup(embeddable_json(index)), scripts=SCRIPTS,
        first=[(key, parts[key]) for key in opens if key in parts],
        chunks=[(key, part) for key, part in parts.items() if key not in opens],
    )  # fmt: skip


def render_live(site: Site) -> str:
    """The page that `apportion watch` serves: no data in it, for it asks for that."""
    return _html(
        title=f"Credit of {site.name}, live", connect="'self'", index=None, first=[],
        chunks=[], scripts=("live.js", *SCRIPTS),
    )  # fmt: skip


def _html(scripts: Sequence[str], **parts: Any) -> str:
    # One element each, so that the library's own licence text stands above it and errors name a place.
    sources = ["".join(map(_licensed, VENDORED)), "".join(map(_source, scripts))]
    style = "".join(map(_source, STYLES))
    page = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return page.from_string(_source("page.html")).render(
        scripts=list(map(Markup, sources)), script_hashes=Markup(" ".join(f"'{_hash(each)}'" for each in sources)),
        style=Markup(style), style_hash=Markup(f"'{_hash(style)}'"), **parts,
    )  # fmt: skip


def _licensed(name: str) -> str:
    """Another project's script, with its licence above it."""
    return f"/*\n{_source(name.removesuffix('.min.js') + '.LICENSE')}*/\n{_source(name)}"


def _source(name: str) -> str:
    return (files("apportion.report") / name).read_text(encoding="utf-8")


def _hash(source: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()
