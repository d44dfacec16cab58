"""Writes the page: picks what fits, embeds it as inert JSON, inlines style and script under a strict CSP."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import textwrap
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from apportion.credit.registry import method_class
from apportion.errors import InputError
from apportion.records import RunFolder
from apportion.report.beside import beside, cells, heading, is_predicted
from apportion.report.escape import embeddable_json, visible
from apportion.report.view import SCHEMA, conserves, step_view

MAX_STEPS, MAX_BYTES = 8, 20_000_000
_METRIC_POINTS = 1_000

CONSERVED = {
    "token_mean": "token mean of A = GRPO’s base advantage",
    "token_sum": "token sum of A = base × tokens",
    "group_sum": "group sum of A = Σ base × tokens",
}
INVARIANTS = {"telescoping": "Σ increments = r − first value (μ for ProbePO)"}


def write_page(
    run: Path,
    out: Path,
    *,
    step: int | None = None,
    response: int | None = None,
    max_steps: int = MAX_STEPS,
    max_bytes: int = MAX_BYTES,
) -> Path:
    """Writes one HTML file that shows where a run's credit went; it opens from disk and asks for nothing.

    Args:
        run: a run folder (`RunFolder`).
        out: the file to write; replaced as a whole.
        step: the only step to embed; the last `max_steps` where left out.
        response: row that the page opens at, in `step` or the last one; the most instructive where left out.
        max_bytes: budget of the embedded responses; the most instructive groups come first, and the page says
            what was left out.

    Raises:
        InputError: no such run, step or row, or `out` cannot be written.
    """
    folder = RunFolder(run)
    data = page_data(folder, step, response, max_steps, max_bytes)
    partial = out.with_name(out.name + ".part")
    try:
        partial.write_text(render(folder.path, data), encoding="utf-8", newline="\n")
        os.replace(partial, out)
    except OSError as error:
        raise InputError(
            "out", f"{out}: {error.strerror}", "a file that can be written in a folder that exists"
        ) from None
    return out


def page_data(
    folder: RunFolder, step: int | None, response: int | None, max_steps: int, max_bytes: int
) -> dict[str, Any]:
    """What the page shows: `schema`, `run`, `steps` (see view.py), `start`, `metrics`, `beside`, `left_out`."""
    recorded = find_steps(folder, step)
    chosen = recorded[-max_steps:]
    left_out: list[str] = []
    steps: list[dict[str, Any]] = []
    spent = 0
    for number in reversed(chosen):
        view = step_view(folder, number)
        # The last step always shows a group, however large; an earlier one only what there is room for.
        spent += _fit(view, max_bytes - spent, response if number == chosen[-1] else None, at_least=int(not steps))
        if view["left_out"]:
            left_out.append(f"{view['left_out']} of {view['recorded']} responses of step {number}")
        if view["responses"] or not steps:
            steps.insert(0, view)
    if earlier := recorded[:-max_steps]:
        span = f"{earlier[0]}" if len(earlier) == 1 else f"{earlier[0]}–{earlier[-1]}"
        left_out.append(f"{len(earlier)} earlier recorded step{'s' * (len(earlier) > 1)} ({span})")
    return {
        "schema": SCHEMA, "run": visible(folder.path.resolve().name, 200), "steps": steps,
        "start": {"step": steps[-1]["step"], "row": start_row(steps[-1], response)},
        "metrics": metric_series(rows := folder.metrics()), "beside": beside(rows), "left_out": left_out,
    }  # fmt: skip


def find_steps(folder: RunFolder, step: int | None) -> list[int]:
    """The recorded steps, or the one asked for.

    Raises:
        InputError: the run has no record of credit, or none of that step.
    """
    steps = folder.recorded_steps()
    if step is None:
        return steps
    if step not in steps:
        raise InputError("step", step, f"a recorded step: {steps[0]} to {steps[-1]}, {len(steps)} in all")
    return [step]


def start_row(view: dict[str, Any], response: int | None) -> int | None:
    """The row asked for, or the one whose advantage differs most along its tokens: it has the most to show.

    Raises:
        InputError: the step has no such row.
    """
    rows = {r["row"]: r for r in view["responses"]}
    if response is None:
        return max(rows, key=lambda row: (rows[row]["spread"], -row), default=None)
    if response not in rows:
        raise InputError("response", response, f"a row of step {view['step']}: {min(rows)} to {max(rows)}")
    return response


def _fit(view: dict[str, Any], budget: int, response: int | None, at_least: int) -> int:
    """Drops whole groups, the least instructive first, until the rest fits or `at_least` groups are left."""
    responses = view["responses"]
    first = next((r["group"] for r in responses if r["row"] == response), None)
    best: dict[int, float] = {}
    for r in responses:
        best[r["group"]] = max(best.get(r["group"], 0.0), r["spread"])
    size = dict.fromkeys(best, 0)
    for r in responses:
        size[r["group"]] += len(embeddable_json(r))
    spent, kept = 0, set[int]()
    for group in sorted(best, key=lambda g: (g != first, -best[g], g)):
        if len(kept) >= at_least and spent + size[group] > budget:
            break
        kept.add(group)
        spent += size[group]
    view["responses"] = [r for r in responses if r["group"] in kept]
    view["recorded"], view["left_out"] = len(responses), len(responses) - len(view["responses"])
    return spent


def metric_series(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Every numeric metric that was logged, by name, thinned evenly to at most `_METRIC_POINTS` steps."""
    stride = -(-len(rows) // _METRIC_POINTS) or 1
    rows = rows[::-1][::stride][::-1]  # counted from the end, so that the last step stays
    names = list(dict.fromkeys(key for row in rows for key, value in row.items() if key != "step" and _number(value)))
    return {
        "step": [row["step"] for row in rows],
        "series": {visible(name, 80): [_number(row.get(name)) for row in rows] for name in names},
    }


def _number(value: Any) -> float | None:
    """The value where it is a finite number and no bool."""
    plain = isinstance(value, int | float) and not isinstance(value, bool)
    return float(f"{value:.5g}") if plain and abs(value) < float("inf") else None


def render(path: Path, data: dict[str, Any]) -> str:
    """The page as text. Everything but our own style and script is escaped."""
    here = files("apportion.report")
    script = "".join((here / name).read_text(encoding="utf-8") for name in ("dom.js", "charts.js", "page.js"))
    style = (here / "page.css").read_text(encoding="utf-8")
    last = data["steps"][-1]
    config = path / "config.toml"
    resolved = config.read_text(encoding="utf-8", errors="replace") if config.exists() else ""
    page = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return page.from_string((here / "page.html").read_text(encoding="utf-8")).render(
        data=Markup(embeddable_json({**data, "invariant_names": _invariant_names(last["method"])})),
        script=Markup(script), script_hash=_source_hash(script),
        style=Markup(style), style_hash=_source_hash(style),
        run=data["run"], last=last, settings=_settings(last["settings"]), summary=_summary(last["method"]),
        left_out=data["left_out"], phases=_phases(data["beside"]), config=visible(resolved, 20_000),
    )  # fmt: skip


def _phases(table: dict[str, Any]) -> dict[str, Any]:
    """The table of seconds by phase, and of what else was predicted, in words."""
    told = is_predicted(table)
    return {
        "title": "Seconds by phase, predicted beside measured" if told else "Seconds by phase",
        "heading": heading(table),
        "rows": [[visible(cell, 80) for cell in cells(row)] for row in table["rows"]],
        "note": "Predicted from the configuration and the machine, before the run; dashed lines below are the same."
        if told else "No cost was predicted for this run; its log says why.",
    }  # fmt: skip


def _source_hash(source: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()


def _settings(settings: dict[str, Any]) -> list[tuple[str, str]]:
    return [
        (visible(name, 80), visible(value if isinstance(value, str) else json.dumps(value), 200))
        for name, value in settings.items()
    ]


def _summary(method: str) -> str:
    """A method's own first sentence; nothing for one whose package is not installed here."""
    try:
        doc = method_class(method).__doc__ or ""
    except InputError:
        return ""
    return " ".join(textwrap.dedent(doc).strip().split("\n\n")[0].split())


def _invariant_names(method: str) -> dict[str, str]:
    kept = CONSERVED.get(conserves(method), "declared conservation")
    names = {"conserved": kept, **INVARIANTS}
    # A pipeline has its own and its stages', as "probepo/telescoping".
    for stage in method.split("+") if "+" in method else ():
        names |= {f"{stage}/{name}": f"{stage}: {words}" for name, words in _invariant_names(stage).items()}
    return names
