"""Evaluations and their comparison as Markdown tables. Percentages; intervals are 95 %, over problems."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from apportion.evaluate.benches import BENCHES

Evaluation = Mapping[str, Any]
_NONE = "–"


def table(evaluation: Evaluation) -> str:
    """One model: a line a set, Avg-6 where there is one, and the notes."""
    metrics = list(dict.fromkeys(_column(name) for each in evaluation["sets"] for name in each["metrics"]))
    graders = any(each["disagreements"] is not None for each in evaluation["sets"])
    head = ["set", "problems", "n", *metrics, "cut off", "no answer", "abstained", *(["graders differ"] * graders)]
    rows = [_set_row(each, metrics, graders) for each in evaluation["sets"]]
    if evaluation["avg6"] is not None:
        rows.append(["Avg-6", *[""] * (len(head) - 1)])
        rows[-1][head.index("avg@n")] = interval(evaluation["avg6"])
    return "\n\n".join([_markdown(head, rows), *evaluation["notes"]]) + "\n"


def leaderboard(evaluations: Mapping[str, Evaluation]) -> str:
    """Several evaluations by folder: a line each, a column a set with its avg@n, and Avg-6 where one has it."""
    found = {each["name"]: each["title"] for evaluation in evaluations.values() for each in evaluation["sets"]}
    names = sorted(found, key=lambda name: list(BENCHES).index(name) if name in BENCHES else len(BENCHES))
    six = any(evaluation["avg6"] is not None for evaluation in evaluations.values())
    rows = []
    for folder, evaluation in evaluations.items():
        cells = {each["name"]: interval(each["metrics"][f"avg@{each['n']}"]) for each in evaluation["sets"]}
        row = [folder, evaluation["model"], *(cells.get(name, _NONE) for name in names)]
        rows.append([*row, *([interval(evaluation["avg6"])] if six else [])])
    return _markdown(["folder", "model", *(found[name] for name in names), *(["Avg-6"] if six else [])], rows) + "\n"


def comparison(pairs: Sequence[Mapping[str, Any]]) -> str:
    """Paired comparisons (`compare.compare`): a line a set, the first model less the second, in points."""
    head = ["first", "second", "set", "problems", "first − second", "resamples above 0", "wins/losses/ties", "sign p"]
    rows = []
    for pair in pairs:
        for each in pair["sets"]:
            above = _NONE if each["above"] is None else f"{100 * each['above']:.1f} %"
            counts = f"{each['wins']}/{each['losses']}/{each['ties']}"
            rows.append([pair["first"], pair["second"], each["title"], str(each["difference"]["problems"]),
                         interval(each["difference"], signed=True), above, counts, f"{each['p']:.3g}"])  # fmt: skip
    return "\n\n".join([_markdown(head, rows), *dict.fromkeys(note for pair in pairs for note in pair["notes"])]) + "\n"


def interval(mean: Mapping[str, Any] | None, signed: bool = False) -> str:
    """A mean with its interval: 12.3 (10.1 … 14.6)."""
    if mean is None or mean["value"] is None:
        return _NONE
    shape = "+.1f" if signed else ".1f"
    value = format(mean["value"], shape)
    return value if mean["interval"] is None else f"{value} ({' … '.join(format(x, shape) for x in mean['interval'])})"


def _set_row(each: Mapping[str, Any], metrics: Sequence[str], graders: bool) -> list[str]:
    own = {_column(name): mean for name, mean in each["metrics"].items()}
    left_out = own["avg@n"]["left_out"]
    abstained = f"{each['abstained']}" + (f" ({left_out} problems without a verdict)" if left_out else "")
    return [
        each["title"], str(each["problems"]), str(each["n"]), *(interval(own.get(name)) for name in metrics),
        _share(each["cut_off"], each["samples"]), _share(each["no_answer"], each["samples"]), abstained,
        *([_NONE if each["disagreements"] is None else str(each["disagreements"])] if graders else []),
    ]  # fmt: skip


def _column(metric: str) -> str:
    # Sets differ in n, which has a column of its own.
    return "avg@n" if metric.startswith("avg@") else metric


def _share(count: int, total: int) -> str:
    return f"{100 * count / total:.0f} %" if total else _NONE


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
