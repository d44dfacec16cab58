"""What the page shows of one response: tokens, segments with their errors, continuations, laws."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from apportion.credit.registry import method_class
from apportion.errors import InputError
from apportion.report.escape import one_line, visible
from apportion.report.intervals import wilson
from apportion.report.numbers import number

_TOKEN_LIMIT, _CONTINUATION_LIMIT = 2_000, 4_000  # characters
_SNIPPET = 48

Row = Mapping[str, Any]


def tokens(r: Row, c: Row) -> dict[str, Any]:
    """Every token's text, id, measures and credit, in columns; `masked` are positions."""
    return {
        "id": r["token_ids"], "text": token_texts(r["text"], r["char_start"], r["token_ids"]),
        "advantage": column(c["advantage"]), "residual": column(c["residual"]), "weight": column(c["weight"]),
        # Nats to four decimals: what is finer is not shown, and would be most of the page's size.
        "entropy": _decimals(r["entropy"]), "logprob": _decimals(r["old_logprob"]),
        "masked": [t for t, m in enumerate(r["mask"]) if not m],
    }  # fmt: skip


def token_texts(text: str | None, char_start: Sequence[int] | None, ids: Sequence[int]) -> list[str]:
    """What each token adds to the text. Without text or offsets its id; empty for EOS and inner bytes."""
    if text is None or char_start is None:
        return [f"⟨{i}⟩" for i in ids]
    # The first token takes what stands before it, so that no character of the text is lost.
    starts = [0, *char_start[1:], len(text)] if char_start else []
    return [visible(text[a:b], _TOKEN_LIMIT) for a, b in pairwise(starts)]


def snippet(r: Row, start: int, end: int) -> str:
    """The beginning of a segment's text on one line."""
    text, starts, end = r["text"], r["char_start"], min(end, start + 80)
    if text is None or starts is None:
        return one_line("".join(token_texts(None, None, r["token_ids"][start:end])), _SNIPPET)
    first = starts[start] if start else 0
    return one_line(text[first : starts[end] if end < len(starts) else None], _SNIPPET)


def segments(r: Row, c: Row) -> list[dict[str, Any]]:
    """The segments of a response with their values, increments and errors.

    `stderr` is of `before` and null where nothing was measured there; `increment_stderr` is that of both ends together.
    `noise`: the increment is within one standard error. `chance`: Wilson's 95 % interval [ours] of the chance that
    `samples` continuations with mean `raw` show, for rewards from 0 to 1.
    """
    rows = c["segments"] or []
    settings = json.loads(c["settings"])
    # A pipeline has a table of settings a stage.
    n0 = max(each.get("n0", 0.0) for each in (settings, *settings.values()) if isinstance(each, dict))
    # The reward has none.
    stderr = [*(_error(s, n0) for s in rows), None]
    values = [s["shrunk"] for s in rows] + [r["reward"]]
    if not _telescopes(c):
        # Values of another kind than rewards, beliefs for example, do not end at the reward.
        values = [None, *(s["shrunk"] + s["increment"] for s in rows)]
    chance = wilson(*(np.array([s[name] for s in rows], dtype=np.float64) for name in ("raw", "samples")))
    views = []
    for k, s in enumerate(rows):
        ends = [error for error in stderr[k : k + 2] if error is not None]
        spread = math.hypot(*ends) if ends else None
        start, end = int(s["start"]), int(s["end"])
        views.append(
            {
                "start": start, "end": end, "raw": number(s["raw"]), "before": number(s["shrunk"]),
                "after": number(values[k + 1]), "stderr": number(stderr[k]), "increment": number(s["increment"]),
                "increment_stderr": number(spread), "noise": bool(spread) and abs(s["increment"]) <= spread,
                "samples": int(s["samples"]), "chance": [chance["low"][k], chance["high"][k]],
                "snippet": snippet(r, start, end),
            }
        )  # fmt: skip
    return views


def _error(s: Row, n0: float) -> float | None:
    """The standard error of a segment's shrunk value: shrinking by M/(M + n₀) shrinks the error alike.

    M continuations that are all right, or all wrong, have a spread of 0, which is no certainty. There it is the
    standard deviation of the chance given them and a uniform prior, √((M + 1)/((M + 2)²(M + 3))) [ours].
    """
    m = s["samples"]
    if not m:
        return None
    spread = s["stderr"]
    if spread == 0 and s["raw"] in (0.0, 1.0):
        spread = math.sqrt((m + 1) / ((m + 2) ** 2 * (m + 3)))
    return spread * m / (m + n0)


def checks(c: Row, reward: float | None, pieces: Sequence[Row], trained: Sequence[float]) -> list[dict[str, Any]]:
    """The laws of a response, added up again from what was recorded, not the method's word for it.

    Args:
        pieces: its `segments`. trained: the advantages of its trained tokens.
    """
    found = []
    if trained and conserves(c["method"]) == "token_mean":
        total = math.fsum(trained) if all(map(math.isfinite, trained)) else math.nan
        found.append(_check("token mean of A = base", total / len(trained), c["base"]))
    known = [s["shrunk"] for s in c["segments"] or [] if _finite(s["shrunk"])]
    if known and _finite(reward) and _telescopes(c):
        total = math.fsum(s["increment"] for s in c["segments"])
        opening = "μ" if not pieces[0]["samples"] and len(known) == len(pieces) else "first V̂"
        found.append(_check(f"Σ increments = r − {opening}", total, reward - known[0]))
    return found


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
    return {"name": name, "got": number(got), "expected": number(expected), "error": number(abs(got - expected))}


class Samples:
    """Continuations by the state they start from. A state that responses share is measured on one of them.

    Args:
        rows: of a step's evidence. rollouts: its rollouts.
    """

    def __init__(self, rows: Iterable[Row], rollouts: Sequence[Row]) -> None:
        self._ids = {row["row"]: row["token_ids"] for row in rollouts}
        self._by_state: dict[tuple[int, int], list[Row]] = defaultdict(list)
        self._rows_at: dict[tuple[str, int], list[int]] = defaultdict(list)
        for e in (row for row in rows if row.get("kind", "continuations") == "continuations"):
            state = (e["row"], e["position"])
            if state not in self._by_state:
                self._rows_at[e["group"], e["position"]].append(e["row"])
            self._by_state[state].append(e)

    def at(self, response: Row, position: int) -> dict[str, Any] | None:
        """What was sampled from the state before `position` of a response, and on which row."""
        rows = self._rows_at.get((response["group"], position), [])
        prefix = response["token_ids"][:position]
        here = [response["row"]] if response["row"] in rows else []
        for row in here or rows:
            if self._ids.get(row, [])[:position] == prefix:
                items = sorted(self._by_state[row, position], key=lambda e: e["m"])
                return {"row": row, "items": [_continuation(e) for e in items]}
        return None


def _continuation(e: Row) -> dict[str, Any]:
    text = visible(e["text"], _CONTINUATION_LIMIT) if e["text"] is not None else f"({len(e['token_ids'])} tokens)"
    return {
        "m": e["m"], "text": text, "reward": number(e["reward"]), "verdict": e["verdict"],
        "finish": e["finish"], "rescued": bool(e["rescued"]),
    }  # fmt: skip


def _finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def column(values: Sequence[float] | None) -> list[float | None] | None:
    """`number` of each, worked out once for each run of equal values: credit is constant over a segment."""
    if values is None:
        return None
    out: list[float | None] = []
    last, shown = None, None
    for value in values:
        if value != last:
            last, shown = value, number(value)
        out.append(shown)
    return out


def _decimals(values: Sequence[float | None] | None) -> list[float | None] | None:
    if values is None:
        return None
    rounded = np.round(np.array(values, dtype=np.float64), 4)
    return [v if f else None for v, f in zip(rounded.tolist(), np.isfinite(rounded).tolist(), strict=True)]
