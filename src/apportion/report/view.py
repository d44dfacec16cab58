"""What page and terminal show of one recorded step, as plain data. All text in it is `visible` already.

The keys are the page's JSON twin (`SCHEMA` names their version), so a change here is a change of schema.
"""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Mapping, Sequence
from itertools import groupby, pairwise
from typing import Any

from apportion.credit.registry import method_class
from apportion.errors import InputError
from apportion.report.detail import Samples, checks, conserves, segments, tokens
from apportion.report.escape import visible
from apportion.report.numbers import number
from apportion.report.reading import reading
from apportion.report.source import Source
from apportion.report.why import spending

SCHEMA = 2

_NAME, _WORDS, _PROMPT = 80, 2_000, 20_000  # characters
_PIECES = 64  # of a response's strip

CONSERVED = {
    "token_mean": "token mean of A = GRPO’s base advantage",
    "token_sum": "token sum of A = base × tokens",
    "group_sum": "group sum of A = Σ base × tokens",
}
INVARIANTS = {"telescoping": "Σ increments = r − first value (μ for ProbePO)"}

Row = Mapping[str, Any]


class StepView:
    """One recorded step: `summary` of all its responses, and on demand the `detail` of one.

    Raises:
        InputError: the step's rollouts and credit do not stand row for row, or a row's parts do not fit each other.
    """

    def __init__(self, source: Source, step: int) -> None:
        self.step = step
        self.rollouts, self.credit = source.read("rollouts", step), source.read("credit", step)
        rows = [row["row"] for row in self.rollouts]
        if rows != [row["row"] for row in self.credit]:
            raise InputError(
                f"RUN, step {step}", f"{len(self.rollouts)} rollouts and {len(self.credit)} rows of credit",
                "the same rows in the same order", "record the step again; one of its files is not this step's",
            )  # fmt: skip
        for r, c in zip(self.rollouts, self.credit, strict=True):
            _check(step, r, c)
        self._place = {row: i for i, row in enumerate(rows)}
        self._segments = [segments(r, c) for r, c in zip(self.rollouts, self.credit, strict=True)]
        evidence = source.read("evidence", step)
        self._samples = Samples(evidence, self.rollouts)
        self.summary = self._summary(evidence)

    def detail(self, row: int) -> dict[str, Any]:
        """Tokens, segments, continuations and laws of one response.

        Raises:
            InputError: the step has no such row.
        """
        r, c, pieces = self._rows(row)
        measured = [s["start"] for s in pieces if s["samples"]]
        return {
            "step": self.step, "row": row, "tokens": tokens(r, c), "segments": pieces,
            "continuations": {str(p): found for p in measured if (found := self._samples.at(r, p))},
            "checks": checks(c, r["reward"], pieces, _trained(r, c)),
        }  # fmt: skip

    def response(self, row: int) -> dict[str, Any]:
        """Summary and detail of one response as one.

        Raises:
            InputError: the step has no such row.
        """
        return {**self.summary["responses"][self._place[row]], **self.detail(row)}

    def _rows(self, row: int) -> tuple[Row, Row, list[dict[str, Any]]]:
        if row not in self._place:
            rows = self._place or {0: 0}
            raise InputError("response", row, f"a row of step {self.step}: {min(rows)} to {max(rows)}")
        i = self._place[row]
        return self.rollouts[i], self.credit[i], self._segments[i]

    def _summary(self, evidence: Sequence[Row]) -> dict[str, Any]:
        members: dict[str, list[Row]] = {}
        for row in self.rollouts:
            members.setdefault(row["group"], []).append(row)
        spent = spending(self.rollouts, evidence, self.credit)
        groups = [{**_group(rows), **more} for rows, more in zip(members.values(), spent.groups, strict=True)]
        place = {name: i for i, name in enumerate(members)}
        responses = [
            _response(r, c, pieces, place[r["group"]], groups[place[r["group"]]]["collapsed"], more)
            for r, c, pieces, more in zip(self.rollouts, self.credit, self._segments, spent.responses, strict=True)
        ]
        first = self.credit[0] if self.credit else {"method": "", "settings": "{}", "invariants": "{}", "counts": "{}"}
        return {
            "step": self.step, "method": visible(first["method"]), "about": _about(first["method"]),
            "settings": shown(json.loads(first["settings"])),
            "invariants": shown(json.loads(first["invariants"])), "laws": shown(_laws(first["method"])),
            "counts": shown(json.loads(first["counts"])), "scale": self._scales(), "groups": groups,
            "responses": responses,
        }  # fmt: skip

    def _scales(self) -> dict[str, float]:
        """Where the colours saturate: the step's 99th percentile of |A| and of |A − base| over trained tokens."""
        final, moved = [], []
        for r, c in zip(self.rollouts, self.credit, strict=True):
            kept = [a for a in _trained(r, c) if math.isfinite(a)]
            final += [abs(a) for a in kept]
            moved += [abs(a - c["base"]) for a in kept if math.isfinite(c["base"])]
        return {"advantage": _p99(final), "moved": _p99(moved)}


def _check(step: int, r: Row, c: Row) -> None:
    """That there is one value a token, and that segments lie inside the response."""
    n, where, again = len(r["token_ids"]), f"RUN, step {step}, row {r['row']}", "record the step again"
    columns = {name: r.get(name) for name in ("mask", "char_start", "entropy", "old_logprob")}
    for name, values in {**columns, **{name: c.get(name) for name in ("advantage", "residual", "weight")}}.items():
        if values is not None and len(values) != n:
            raise InputError(f"{where}: {name}", f"{len(values)} values", f"{n}, one a token", again)
    for k, s in enumerate(c["segments"] or []):
        ends, samples = (s["start"], s["end"]), s["samples"]
        if not (all(map(math.isfinite, (*ends, samples))) and 0 <= ends[0] <= ends[1] <= n and samples >= 0):
            got = f"{ends[0]:g} to {ends[1]:g}, {samples:g} samples"
            raise InputError(f"{where}: segments[{k}]", got, f"places from 0 to {n}, and a number of samples", again)


def shown(value: Any) -> Any:
    """Recorded JSON with its names and texts made visible, and null where a number is none."""
    if isinstance(value, dict):
        return {visible(str(name), _NAME): shown(each) for name, each in value.items()}
    if isinstance(value, list):
        return [shown(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return visible(value, 200) if isinstance(value, str) else value


def _about(method: str) -> str:
    """A method's own first sentence; nothing for one whose package is not installed here."""
    try:
        doc = method_class(method).__doc__ or ""
    except InputError:
        return ""
    return " ".join(textwrap.dedent(doc).strip().split("\n\n")[0].split())


def _laws(method: str) -> dict[str, str]:
    """The names of a method's invariants in words."""
    kept = CONSERVED.get(conserves(method), "declared conservation")
    names = {"conserved": kept, **INVARIANTS}
    # A pipeline has its own and its stages', as "probepo/telescoping".
    for stage in method.split("+") if "+" in method else ():
        names |= {f"{stage}/{name}": f"{stage}: {words}" for name, words in _laws(stage).items()}
    return names


def _trained(r: Row, c: Row) -> list[float]:
    return [a for a, m in zip(c["advantage"], r["mask"], strict=True) if m]


def _group(members: Sequence[Row]) -> dict[str, Any]:
    first = members[0]
    scored = [m["reward"] for m in members if m["reward"] is not None and math.isfinite(m["reward"]) and any(m["mask"])]
    mean = sum(scored) / len(scored) if scored else None
    # The same rule as groups.group_stats: equal up to rounding, or nothing to compare with.
    equal = len(scored) < 2 or max(scored) - min(scored) <= 1e-8 * max(1.0, abs(max(scored)))
    return {
        "name": visible(first["group"], _NAME), "prompt": visible(first["prompt"] or "", _PROMPT),
        "gold": visible(first["gold"] or "", _WORDS), "mean": number(mean), "collapsed": equal,
        "scored": len(scored), "rows": [m["row"] for m in members],
    }  # fmt: skip


def _response(
    r: Row, c: Row, pieces: Sequence[Row], group: int, collapsed: bool, more: Mapping[str, Any]
) -> dict[str, Any]:
    trained = [a for a in _trained(r, c) if math.isfinite(a)]
    view = {
        "row": r["row"], "group": group, "sample": r["sample"], "reward": number(r["reward"]),
        "verdict": r["verdict"], "finish": r["finish"], "base": number(c["base"]), "mean": number(c["mean"]),
        "divisor": number(c["scale"]), "length": len(r["mask"]),
        "pivots": sum(s["samples"] > 0 and s["start"] > 0 for s in pieces),
        "low": number(min(trained, default=None)), "high": number(max(trained, default=None)),
        "spread": number(max(trained) - min(trained)) if trained else 0.0,
        "strip": _strip(r["mask"], c["advantage"]),
        "values": [[s["start"], s["before"], s["stderr"], s["samples"]] for s in pieces], **more,
    }  # fmt: skip
    return {**view, "reading": reading(view, pieces, collapsed)}


def _strip(mask: Sequence[bool], advantage: Sequence[float]) -> list[list[float | None]]:
    """[start, end, A] of each stretch of equal advantage; masked tokens have none. Neighbours are joined, and take
    the mean of both, where a list has no room for all."""
    runs: list[list[Any]] = []
    at = 0
    for value, same in groupby(a if m else None for a, m in zip(advantage, mask, strict=True)):
        size = sum(1 for _ in same)
        runs.append([at, at + size, value])
        at += size
    if len(runs) > _PIECES:
        edges = [round(k * at / _PIECES) for k in range(_PIECES + 1)]
        kept = [[x for x, m in zip(advantage[a:b], mask[a:b], strict=True) if m] for a, b in pairwise(edges)]
        means = [sum(each) / len(each) if each else None for each in kept]
        runs = [[a, b, mean] for (a, b), mean in zip(pairwise(edges), means, strict=True) if b > a]
    return [[start, end, number(value)] for start, end, value in runs]


def _p99(values: list[float]) -> float:
    # Below the rounding of float32 there is nothing to colour.
    top = sorted(values)[math.ceil(0.99 * len(values)) - 1] if values else 0.0
    return top if top > 1e-5 else 1.0
