"""What page and terminal show of one recorded step, as plain data. All text in it is `visible` already.

The keys are the page's JSON twin (`SCHEMA` names their version), so a change here is a change of schema.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from apportion.credit.registry import method_class
from apportion.errors import InputError
from apportion.records import RunFolder
from apportion.report.escape import one_line, visible
from apportion.report.reading import reading

SCHEMA = 1

_TOKEN_LIMIT, _PROMPT_LIMIT, _CONTINUATION_LIMIT = 2_000, 20_000, 4_000  # characters

Row = Mapping[str, Any]


def step_view(run: RunFolder, step: int) -> dict[str, Any]:
    """The view of one step: `groups` in order of appearance, `responses` in row order, `scale`, `invariants`.

    Raises:
        InputError: the step's rollouts and credit do not stand row for row.
    """
    rollouts, credit = run.read("rollouts", step), run.read("credit", step)
    if [row["row"] for row in rollouts] != [row["row"] for row in credit]:
        raise InputError(
            f"RUN, step {step}", f"{len(rollouts)} rollouts and {len(credit)} rows of credit",
            "the same rows in the same order", "record the step again; one of its files is not this step's",
        )  # fmt: skip
    evidence = _Evidence(run.read("evidence", step), rollouts)
    names = list(dict.fromkeys(row["group"] for row in rollouts))
    members: dict[str, list[Row]] = {name: [] for name in names}
    for row in rollouts:
        members[row["group"]].append(row)
    groups = [_group_view(members[name]) for name in names]
    index = {name: i for i, name in enumerate(names)}
    responses = [
        _response_view(r, c, index[r["group"]], groups[index[r["group"]]]["collapsed"], evidence)
        for r, c in zip(rollouts, credit, strict=True)
    ]
    first = credit[0] if credit else {"method": "", "settings": "{}", "invariants": "{}", "counts": "{}"}
    return {
        "step": step, "method": visible(first["method"]), "settings": json.loads(first["settings"]),
        "invariants": json.loads(first["invariants"]), "counts": json.loads(first["counts"]),
        "scale": _scales(responses), "groups": groups, "responses": responses,
    }  # fmt: skip


def _group_view(members: Sequence[Row]) -> dict[str, Any]:
    first = members[0]
    scored = [m["reward"] for m in members if _finite(m["reward"]) and any(m["mask"])]
    mean = sum(scored) / len(scored) if scored else None
    # The same rule as groups.group_stats: equal up to rounding, or nothing to compare with.
    equal = len(scored) < 2 or max(scored) - min(scored) <= 1e-8 * max(1.0, abs(max(scored)))
    return {
        "name": visible(first["group"], 80), "prompt": visible(first["prompt"] or "", _PROMPT_LIMIT),
        "gold": visible(first["gold"] or "", _TOKEN_LIMIT), "mean": _round(mean), "collapsed": equal,
        "scored": len(scored),
    }  # fmt: skip


def _response_view(r: Row, c: Row, group: int, collapsed: bool, evidence: _Evidence) -> dict[str, Any]:
    mask, advantage = r["mask"], c["advantage"]
    trained = [a for a, m in zip(advantage, mask, strict=True) if m]
    tokens = {
        "id": r["token_ids"], "text": token_texts(r["text"], r["char_start"], r["token_ids"]),
        "advantage": _rounded(advantage),
        "residual": _rounded(c["residual"]), "weight": _rounded(c["weight"]),
        "entropy": _rounded(r["entropy"]), "logprob": _rounded(r["old_logprob"]),
        "masked": [t for t, m in enumerate(mask) if not m],
    }  # fmt: skip
    segments = _segment_views(c, r["reward"], tokens["text"])
    pivots = [s["start"] for s in segments if s["samples"] and s["start"] > 0]
    measured = [s["start"] for s in segments if s["samples"]]
    response = {
        "row": r["row"], "group": group, "sample": r["sample"], "reward": _round(r["reward"]),
        "verdict": r["verdict"], "finish": r["finish"], "base": _round(c["base"]), "mean": _round(c["mean"]),
        "divisor": _round(c["scale"]), "length": len(mask), "pivots": len(pivots),
        "spread": _round(max(trained) - min(trained)) if trained else 0.0,
        "tokens": tokens, "segments": segments,
        "continuations": {str(p): found for p in measured if (found := evidence.at(r, p))},
        "checks": _checks(c, r["reward"], segments, trained),
    }  # fmt: skip
    return {**response, "reading": reading(response, collapsed)}


def token_texts(text: str | None, char_start: Sequence[int] | None, ids: Sequence[int]) -> list[str]:
    """What each token adds to the text. Without text or offsets its id; empty for EOS and inner bytes."""
    if text is None or char_start is None:
        return [f"⟨{i}⟩" for i in ids]
    # The first token takes what stands before it, so that no character of the text is lost.
    starts = [0, *char_start[1:], len(text)] if char_start else []
    return [visible(text[a:b], _TOKEN_LIMIT) for a, b in pairwise(starts)]


def _segment_views(c: Row, reward: float | None, texts: Sequence[str]) -> list[dict[str, Any]]:
    segments = c["segments"] or []
    settings = json.loads(c["settings"])
    # A pipeline has a table of settings a stage.
    n0 = max(each.get("n0", 0.0) for each in (settings, *settings.values()) if isinstance(each, dict))
    # `stderr` is of the raw value; shrinking V̂ by M/(M + n₀) shrinks its error alike. The reward has none.
    measured = [s["stderr"] * s["samples"] / (s["samples"] + n0) if s["samples"] else 0.0 for s in segments]
    stderr = [*measured, 0.0]
    values = [s["shrunk"] for s in segments] + [reward]
    if not _telescopes(c):
        # Values of another kind than rewards, beliefs for example, do not end at the reward.
        values = [None, *(s["shrunk"] + s["increment"] for s in segments)]
    views = []
    for k, s in enumerate(segments):
        spread = math.hypot(stderr[k], stderr[k + 1])
        start, end = int(s["start"]), int(s["end"])
        views.append(
            {
                "start": start, "end": end, "raw": _round(s["raw"]), "before": _round(s["shrunk"]),
                "after": _round(values[k + 1]), "stderr": _round(stderr[k]),
                "increment": _round(s["increment"]),
                "increment_stderr": _round(spread), "noise": spread > 0 and abs(s["increment"]) <= spread,
                "samples": int(s["samples"]), "snippet": one_line("".join(texts[start:end][:80]), 48),
            }
        )  # fmt: skip
    return views


def _checks(c: Row, reward: float | None, segments: Sequence[Row], trained: Sequence[float]) -> list[dict[str, Any]]:
    """The laws of this response, added up again from what was recorded, not the method's word for it."""
    checks = []
    if trained and conserves(c["method"]) == "token_mean":
        mean = math.fsum(trained) / len(trained)
        checks.append(_check("token mean of A = base", mean, c["base"]))
    known = [s["shrunk"] for s in c["segments"] or [] if _finite(s["shrunk"])]
    if known and _finite(reward) and _telescopes(c):
        total = math.fsum(s["increment"] for s in c["segments"])
        opening = "μ" if not segments[0]["samples"] and len(known) == len(segments) else "first V̂"
        checks.append(_check(f"Σ increments = r − {opening}", total, reward - known[0]))
    return checks


def _telescopes(c: Row) -> bool:
    """Whether the increments add up from a first value to the reward, as the method or a stage of it measured."""
    return any(name.rpartition("/")[2] == "telescoping" for name in json.loads(c["invariants"]))


def conserves(method: str) -> str:
    """What a method keeps (`CreditMethod.conserves`); none for one whose package is not installed here."""
    try:
        return method_class(method).conserves
    except InputError:
        return "none"


def _check(name: str, got: float, expected: float) -> dict[str, Any]:
    return {"name": name, "got": _round(got), "expected": _round(expected), "error": abs(got - expected)}


class _Evidence:
    """Continuations by the state they start from. A state that responses share is measured on one of them."""

    def __init__(self, rows: Iterable[Row], rollouts: Sequence[Row]) -> None:
        self._ids = {row["row"]: row["token_ids"] for row in rollouts}
        self._by_state: dict[tuple[int, int], list[Row]] = defaultdict(list)
        self._rows_at: dict[tuple[str, int], list[int]] = defaultdict(list)
        for e in (row for row in rows if row["kind"] == "continuations"):
            state = (e["row"], e["position"])
            if state not in self._by_state:
                self._rows_at[e["group"], e["position"]].append(e["row"])
            self._by_state[state].append(e)

    def at(self, response: Row, position: int) -> dict[str, Any] | None:
        """What was sampled from the state before `position` of a response, and on which row."""
        rows, prefix = self._rows_at[response["group"], position], response["token_ids"][:position]
        here = [response["row"]] if response["row"] in rows else []
        for row in here or rows:
            if self._ids.get(row, [])[:position] == prefix:
                items = sorted(self._by_state[row, position], key=lambda e: e["m"])
                return {"row": row, "items": [_continuation_view(e) for e in items]}
        return None


def _continuation_view(e: Row) -> dict[str, Any]:
    text = visible(e["text"], _CONTINUATION_LIMIT) if e["text"] is not None else f"({len(e['token_ids'])} tokens)"
    return {
        "m": e["m"], "text": text, "reward": _round(e["reward"]), "verdict": e["verdict"],
        "finish": e["finish"], "rescued": bool(e["rescued"]),
    }  # fmt: skip


def _scales(responses: Sequence[Row]) -> dict[str, float]:
    """Where the colours saturate: the step's 99th percentile of |A| and of |A − base| over trained tokens."""
    final, moved = [], []
    for r in responses:
        masked = set(r["tokens"]["masked"])
        kept = [a for t, a in enumerate(r["tokens"]["advantage"]) if t not in masked]
        final += [abs(a) for a in kept]
        moved += [abs(a - r["base"]) for a in kept]
    return {"advantage": _p99(final), "moved": _p99(moved)}


def _p99(values: list[float]) -> float:
    # Below the rounding of float32 there is nothing to colour.
    top = sorted(values)[math.ceil(0.99 * len(values)) - 1] if values else 0.0
    return top if top > 1e-5 else 1.0


def _finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def _round(value: float | None) -> float | None:
    """Five significant digits; None where there is no number, as JSON has no NaN."""
    return float(f"{value:.5g}") if value is not None and math.isfinite(value) else None


def _rounded(values: Sequence[float] | None) -> list[float | None] | None:
    return None if values is None else [_round(v) for v in values]
